//! The kernels of norms for tools.

use half::{bf16, f16};
use xentile::norm::Kind;
use xentile::norm::operation::{LAYER_NORM, NormOperation, RMS_NORM, shape};
use xentile::operation::{Array, ArrayElement, Arrays, Operation, Pass, Problem};
use xentile::{Element, Result, by_dtype};

use super::{Gradient, Kernel, Launch, PartialSums, Statistics, Weight};
use crate::InOut;
use crate::operation::{Kernels, Run};

/// The kernels of RMSNorm.
pub(crate) const RMS_KERNELS: NormKernels = NormKernels(RMS_NORM);
/// The kernels of LayerNorm.
pub(crate) const LAYER_KERNELS: NormKernels = NormKernels(LAYER_NORM);

/// The kernels of this module.
pub(crate) const ALL: &[&dyn Kernels] = &[&RMS_KERNELS, &LAYER_KERNELS];

/// Blocks of partial sums, whatever the number of threads.
const BLOCKS: usize = 64;

/// The kernels of one of the two operations.
pub(crate) struct NormKernels(NormOperation);

impl<'a> Weight<'a> {
    /// The array called `name`, if there is one.
    pub(crate) fn of(inputs: &'a Arrays<'_>, name: &str) -> Option<Self> {
        Some(match inputs.get(name)? {
            Array::Bf16(_) => Self::Bf16(inputs.expect::<bf16>(name)),
            Array::F16(_) => Self::F16(inputs.expect::<f16>(name)),
            _ => Self::F32(inputs.expect(name)),
        })
    }
}

impl<'a> Kernel<'a> {
    /// The kernel of an operation on a problem with its inputs.
    pub(crate) fn of(
        operation: NormOperation,
        problem: &Problem,
        inputs: &'a Arrays<'_>,
        launch: Launch<'a>,
    ) -> Result<Self> {
        let weight = Weight::of(inputs, "weight").expect("a weight is an input");
        Self::new(operation.norm(problem), shape(problem)?, weight, launch)
    }
}

impl Kernels for NormKernels {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn open<'a>(
        &self,
        problem: &'a Problem,
        inputs: &'a Arrays<'a>,
        launch: Launch<'a>,
    ) -> Result<Box<dyn Run + 'a>> {
        let kernel = Kernel::of(self.0, problem, inputs, launch)?;
        Ok(by_dtype!(problem.dtype, E => Box::new(NormRun {
            kernel,
            x: inputs.expect::<E>("x"),
            residual: inputs.slice::<E>("residual"),
            bias: Weight::of(inputs, "bias"),
            statistics: Statistics::default(),
            sum: Vec::new(),
            partial: [Vec::new(), Vec::new()],
        })))
    }
}

struct NormRun<'a, E> {
    kernel: Kernel<'a>,
    x: &'a [E],
    residual: Option<&'a [E]>,
    bias: Option<Weight<'a>>,
    /// Saved by the last forward pass.
    statistics: Statistics<Vec<f32>>,
    /// The sum with the residual, saved for a separate backward pass.
    sum: Vec<E>,
    /// Of dweight and, for LayerNorm, of dbias.
    partial: [Vec<f32>; 2],
}

impl<E: Element + ArrayElement> NormRun<'_, E> {
    fn forward(&mut self, results: &mut Arrays<'_>) -> Result<()> {
        let (shape, is_layer) = (self.kernel.shape, self.kernel.norm.kind == Kind::Layer);
        let Statistics { mean, rstd } = &mut self.statistics;
        mean.resize(if is_layer { shape.rows() } else { 0 }, 0.0);
        rstd.resize(shape.rows(), 0.0);
        let [y, sum] = results.slices_mut(["y", "sum"]);
        let x = InOut::apart(self.x, y.expect("a norm to fill"));
        let residual =
            self.residual.map(|residual| InOut::apart(residual, sum.expect("a sum to fill")));
        self.kernel.forward(x, residual, self.bias, Statistics { mean, rstd })?;
        for (name, values) in [("mean", mean), ("rstd", rstd)] {
            if let [Some(result)] = results.slices_mut([name]) {
                result.copy_from_slice(values);
            }
        }
        Ok(())
    }

    fn backward(&mut self, cotangents: &Arrays<'_>, results: &mut Arrays<'_>) -> Result<()> {
        let shape = self.kernel.shape;
        let blocks = BLOCKS.min(shape.rows().max(1));
        let [dweight, dbias] = &mut self.partial;
        dweight.resize(blocks * shape.columns(), 0.0);
        if self.kernel.norm.kind == Kind::Layer {
            dbias.resize(blocks * shape.columns(), 0.0);
        }
        let [sum, dx] = results.slices_mut(["sum", "dx"]);
        let x = match (self.residual, sum) {
            (None, _) => self.x,
            (Some(_), Some(sum)) => sum,
            (Some(_), None) => &self.sum,
        };
        let dx = dx.expect("a gradient to fill");
        let gradient = Gradient::Apart { x, dy: cotangents.expect("dy"), dx };
        let Statistics { mean, rstd } = &self.statistics;
        let partial = PartialSums { sums: dweight, groups: 1, blocks };
        let (statistics, dsum) = (Statistics { mean: &mean[..], rstd }, cotangents.slice("dsum"));
        self.kernel.backward(gradient, statistics, dsum, partial, dbias)?;
        for (name, partial) in ["dweight", "dbias"].into_iter().zip(&self.partial) {
            add_blocks(partial, shape.columns(), results.get_mut(name));
        }
        Ok(())
    }
}

impl<E: Element + ArrayElement> Run for NormRun<'_, E> {
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

/// Adds the blocks of `partial` `[P, columns]` in their order, and rounds once.
pub(crate) fn add_blocks(partial: &[f32], columns: usize, result: Option<&mut Array<'_>>) {
    fn rounded<W: Element>(partial: &[f32], columns: usize, result: &mut [W]) {
        for (column, result) in result.iter_mut().enumerate() {
            *result = W::from_f32(partial[column..].iter().step_by(columns).sum());
        }
    }
    match result {
        Some(Array::F32(result)) => rounded(partial, columns, result.to_mut()),
        Some(Array::Bf16(result)) => rounded(partial, columns, result.to_mut()),
        Some(Array::F16(result)) => rounded(partial, columns, result.to_mut()),
        _ => (),
    }
}
