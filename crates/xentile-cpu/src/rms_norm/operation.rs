//! The kernels of RMSNorm, as tools run them.

use xentile::operation::{ArrayElement, Arrays, Operation, Pass, Problem};
use xentile::rms_norm::NormShape;
use xentile::rms_norm::operation::{OPERATION, options, shape};
use xentile::{Element, Result, by_dtype};

use super::{Gradient, Kernel, Launch, PartialSums, Weight};
use crate::InOut;
use crate::norm::{BLOCKS, add_up};
use crate::operation::{Kernels, Run};

/// The kernels of RMSNorm.
pub(crate) const KERNELS: OfRows = OfRows;

/// The kernels of RMSNorm.
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
            residual: inputs.slice::<E>("residual"),
            rstd: Vec::new(),
            sum: Vec::new(),
            partial: Vec::new(),
        })))
    }
}

struct Rows<'a, E> {
    kernel: Kernel<'a>,
    shape: NormShape,
    x: &'a [E],
    residual: Option<&'a [E]>,
    /// What the last forward pass left.
    rstd: Vec<f32>,
    /// The sum with the residual, for a backward pass by itself.
    sum: Vec<E>,
    partial: Vec<f32>,
}

impl<E: Element + ArrayElement> Rows<'_, E> {
    fn forward(&mut self, results: &mut Arrays<'_>) -> Result<()> {
        self.rstd.resize(self.shape.rows(), 0.0);
        let [y, sum] = results.slices_mut(["y", "sum"]);
        let x = InOut::apart(self.x, y.expect("a norm to fill"));
        match self.residual {
            None => self.kernel.forward(x, &mut self.rstd)?,
            Some(residual) => {
                let residual = InOut::apart(residual, sum.expect("a sum to fill"));
                self.kernel.add_forward(x, residual, &mut self.rstd)?;
            }
        }
        if let [Some(rstd)] = results.slices_mut(["rstd"]) {
            rstd.copy_from_slice(&self.rstd);
        }
        Ok(())
    }

    fn backward(&mut self, given: &Arrays<'_>, results: &mut Arrays<'_>) -> Result<()> {
        let blocks = BLOCKS.min(self.shape.rows().max(1));
        self.partial.resize(blocks * self.shape.columns(), 0.0);
        let [sum, dx] = results.slices_mut(["sum", "dx"]);
        let x = match (self.residual, sum) {
            (None, _) => self.x,
            (Some(_), Some(sum)) => sum,
            (Some(_), None) => &self.sum,
        };
        let gradient =
            Gradient::Apart { x, dy: given.expect("dy"), dx: dx.expect("a gradient to fill") };
        let partial = PartialSums { sums: &mut self.partial, groups: 1, blocks };
        self.kernel.backward(gradient, &self.rstd, given.slice("dsum"), partial)?;
        add_up(&self.partial, self.shape.columns(), results.get_mut("dweight"));
        Ok(())
    }
}

impl<E: Element + ArrayElement> Run for Rows<'_, E> {
    fn run(&mut self, pass: Pass, given: &Arrays<'_>, results: &mut Arrays<'_>) -> Result<()> {
        if pass != Pass::Backward {
            self.forward(results)?;
        }
        if pass.has_gradients() {
            self.backward(given, results)?;
        } else if let Some(sum) = results.slice::<E>("sum") {
            self.sum = sum.to_vec();
        }
        Ok(())
    }
}
