//! The kernels of LayerNorm, as tools run them.

use xentile::layer_norm::NormShape;
use xentile::layer_norm::operation::{OPERATION, options, shape};
use xentile::operation::{ArrayElement, Arrays, Operation, Pass, Problem};
use xentile::{Element, Result, by_dtype};

use super::{Gradient, Kernel, Launch, PartialSums, Statistics, Weight};
use crate::InOut;
use crate::norm::{BLOCKS, add_up};
use crate::operation::{Kernels, Run};

/// The kernels of LayerNorm.
pub(crate) const KERNELS: OfRows = OfRows;

/// The kernels of LayerNorm.
pub(crate) struct OfRows;

impl Kernels for OfRows {
    fn name(&self) -> &'static str {
        OPERATION.name()
    }

    fn open<'a>(
        &self,
        problem: &'a Problem,
        inputs: &'a Arrays<'a>,
        launch: Launch<'a>,
    ) -> Result<Box<dyn Run + 'a>> {
        let weight = Weight::of(inputs, "weight").expect("a weight is an input");
        let shape = shape(problem)?;
        let kernel = Kernel::new(options(problem), shape, weight, launch)?;
        Ok(by_dtype!(problem.dtype, E => Box::new(Rows {
            kernel,
            shape,
            x: inputs.expect::<E>("x"),
            bias: Weight::of(inputs, "bias"),
            of_rows: Statistics { mean: Vec::new(), rstd: Vec::new() },
            partial: [Vec::new(), Vec::new()],
        })))
    }
}

struct Rows<'a, E> {
    kernel: Kernel<'a>,
    shape: NormShape,
    x: &'a [E],
    bias: Option<Weight<'a>>,
    /// What the last forward pass left.
    of_rows: Statistics<Vec<f32>>,
    /// Of dweight and of dbias.
    partial: [Vec<f32>; 2],
}

impl<E: Element + ArrayElement> Rows<'_, E> {
    fn forward(&mut self, results: &mut Arrays<'_>) -> Result<()> {
        let Statistics { mean, rstd } = &mut self.of_rows;
        for all in [&mut *mean, &mut *rstd] {
            all.resize(self.shape.rows(), 0.0);
        }
        let [y] = results.slices_mut(["y"]);
        let x = InOut::apart(self.x, y.expect("a norm to fill"));
        self.kernel.forward(x, self.bias, Statistics { mean, rstd })?;
        if let [Some(to_mean), Some(to_rstd)] = results.slices_mut(["mean", "rstd"]) {
            to_mean.copy_from_slice(mean);
            to_rstd.copy_from_slice(rstd);
        }
        Ok(())
    }

    fn backward(&mut self, given: &Arrays<'_>, results: &mut Arrays<'_>) -> Result<()> {
        let blocks = BLOCKS.min(self.shape.rows().max(1));
        let [dweight, dbias] = &mut self.partial;
        for all in [&mut *dweight, &mut *dbias] {
            all.resize(blocks * self.shape.columns(), 0.0);
        }
        let [dx] = results.slices_mut(["dx"]);
        let (x, dy) = (self.x, given.expect("dy"));
        let gradient = Gradient::Apart { x, dy, dx: dx.expect("a gradient to fill") };
        let Statistics { mean, rstd } = &self.of_rows;
        let partial = PartialSums { sums: dweight, groups: 1, blocks };
        self.kernel.backward(gradient, Statistics { mean, rstd }, partial, dbias)?;
        for (name, partial) in ["dweight", "dbias"].into_iter().zip(&self.partial) {
            add_up(partial, self.shape.columns(), results.get_mut(name));
        }
        Ok(())
    }
}

impl<E: Element + ArrayElement> Run for Rows<'_, E> {
    fn run(&mut self, pass: Pass, given: &Arrays<'_>, results: &mut Arrays<'_>) -> Result<()> {
        if pass != Pass::Backward {
            self.forward(results)?;
        }
        if pass.has_gradients() { self.backward(given, results) } else { Ok(()) }
    }
}
