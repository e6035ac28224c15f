//! The kernels of FP8 quantisation, as tools run them: of x, and of what other kernels give.

use xentile::fp8_quantize::operation::{OPERATION, blocks, options, shape};
use xentile::fp8_quantize::{Blocks, Fp8Quantize, QuantizeShape};
use xentile::operation::{Array, ArrayElement, Arrays, Operation, Pass, Problem};
use xentile::{Element, Result, by_dtype, rms_norm_fp8, swiglu_fp8};

use super::{Kernel, Launch, Quantized};
use crate::norm::{self, Statistics};
use crate::operation::{Kernels, Run};
use crate::{InOut, activation};

/// The kernels of FP8 quantisation.
pub(crate) const KERNELS: OfRows = OfRows;

/// The kernels of FP8 quantisation.
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
        let matrix = Matrix::new(problem, shape(problem)?, launch);
        Ok(by_dtype!(problem.dtype, E => Box::new(Plain { matrix, x: inputs.expect::<E>("x") })))
    }
}

struct Plain<'a, E> {
    matrix: Matrix<'a>,
    x: &'a [E],
}

impl<E: Element + ArrayElement> Run for Plain<'_, E> {
    fn run(&mut self, _: Pass, _: &Arrays<'_>, results: &mut Arrays<'_>) -> Result<()> {
        self.matrix.quantize(self.x, results)
    }
}

/// The kernel of SwiGLU, and that of quantisation after it.
pub(crate) const SWIGLU: Swiglu = Swiglu;

/// The kernel of SwiGLU, and that of quantisation after it.
pub(crate) struct Swiglu;

impl Kernels for Swiglu {
    fn name(&self) -> &'static str {
        swiglu_fp8::operation::OPERATION.name()
    }

    fn open<'a>(
        &self,
        problem: &'a Problem,
        inputs: &'a Arrays<'a>,
        launch: Launch<'a>,
    ) -> Result<Box<dyn Run + 'a>> {
        let options = swiglu_fp8::operation::activation(problem)?;
        let shape = xentile::activation::operation::shape(problem)?;
        let kernel = activation::Kernel::new(options, shape, launch)?;
        let shape = swiglu_fp8::operation::quantized(problem)?;
        Ok(by_dtype!(problem.dtype, E => Box::new(Gated {
            kernel,
            matrix: Matrix::new(problem, shape, launch),
            x: inputs.expect::<E>("x"),
            y: Vec::new(),
        })))
    }
}

struct Gated<'a, E> {
    kernel: activation::Kernel<'a>,
    matrix: Matrix<'a>,
    x: &'a [E],
    /// What is quantised; empty until the first run.
    y: Vec<E>,
}

impl<E: Element + ArrayElement> Run for Gated<'_, E> {
    fn run(&mut self, _: Pass, _: &Arrays<'_>, results: &mut Arrays<'_>) -> Result<()> {
        self.y.resize(self.matrix.shape.elements(), E::from_f32(0.0));
        self.kernel.forward(self.x, &mut self.y)?;
        self.matrix.quantize(&self.y, results)
    }
}

/// The kernel of RMSNorm, and that of quantisation after it.
pub(crate) const RMS_NORM: RmsNorm = RmsNorm;

/// The kernels of this module.
pub(crate) const ALL: &[&dyn Kernels] = &[&KERNELS, &SWIGLU, &RMS_NORM];

/// The kernel of RMSNorm, and that of quantisation after it.
pub(crate) struct RmsNorm;

impl Kernels for RmsNorm {
    fn name(&self) -> &'static str {
        rms_norm_fp8::operation::OPERATION.name()
    }

    fn open<'a>(
        &self,
        problem: &'a Problem,
        inputs: &'a Arrays<'a>,
        launch: Launch<'a>,
    ) -> Result<Box<dyn Run + 'a>> {
        use xentile::norm::operation::RMS_NORM;
        let kernel = norm::Kernel::of(RMS_NORM, problem, inputs, launch)?;
        Ok(by_dtype!(problem.dtype, E => Box::new(Normed {
            kernel,
            matrix: Matrix::new(problem, shape(problem)?, launch),
            x: inputs.expect::<E>("x"),
            residual: inputs.slice::<E>("residual"),
            y: Vec::new(),
            rstd: vec![0.0; problem.dim("T")],
        })))
    }
}

struct Normed<'a, E> {
    kernel: norm::Kernel<'a>,
    matrix: Matrix<'a>,
    x: &'a [E],
    residual: Option<&'a [E]>,
    /// What is quantised; empty until the first run.
    y: Vec<E>,
    rstd: Vec<f32>,
}

impl<E: Element + ArrayElement> Run for Normed<'_, E> {
    fn run(&mut self, _: Pass, _: &Arrays<'_>, results: &mut Arrays<'_>) -> Result<()> {
        self.y.resize(self.matrix.shape.elements(), E::from_f32(0.0));
        let x = InOut::apart(self.x, &mut self.y);
        let [sum] = results.slices_mut(["sum"]);
        let residual =
            self.residual.map(|residual| InOut::apart(residual, sum.expect("a sum to fill")));
        self.kernel.forward(x, residual, None, Statistics::rms(&mut self.rstd[..]))?;
        self.matrix.quantize(&self.y, results)
    }
}

/// What is quantised as a problem asks for.
struct Matrix<'a> {
    options: Fp8Quantize,
    shape: QuantizeShape,
    /// None where there is one scale.
    blocks: Option<Blocks>,
    launch: Launch<'a>,
    /// Of rows, where there is one scale.
    amax: Vec<f32>,
}

impl<'a> Matrix<'a> {
    fn new(problem: &Problem, shape: QuantizeShape, launch: Launch<'a>) -> Self {
        let (options, blocks) = (options(problem), blocks(problem));
        let amax = if blocks.is_none() { vec![0.0; shape.scales(Blocks::ROW)] } else { Vec::new() };
        Self { options, shape, blocks, launch, amax }
    }

    /// Values by the scale of all of x, the transposed copy where there is room for it, and that scale.
    fn by_one_scale<E: Element>(
        &mut self,
        x: &[E],
        values: &mut [u8],
        transposed: Option<&mut [u8]>,
    ) -> Result<f32> {
        let kernel = Kernel::new(self.options, self.shape, self.launch);
        kernel.amax(x, &mut self.amax)?;
        let scale = self.options.scale(self.amax.iter().copied().fold(0.0, f32::max));
        match transposed {
            None => kernel.scaled(x, &[scale], values, &mut self.amax)?,
            Some(transposed) => {
                kernel.scaled_transposed(x, &[scale], values, &mut self.amax, transposed)?;
            }
        }
        Ok(scale)
    }

    /// Fills values and scales among `results`.
    fn quantize<E: Element>(&mut self, x: &[E], results: &mut Arrays<'_>) -> Result<()> {
        let [mut values, mut transposed] = [None, None];
        let [mut scales, mut transposed_scales] = [None, None];
        let mut scalars = Vec::new();
        for (name, array) in results.iter_mut() {
            match (name, array) {
                ("values", Array::F8(_, bits)) => values = Some(bits.to_mut()),
                ("transposed", Array::F8(_, bits)) => transposed = Some(bits.to_mut()),
                ("scales", Array::F32(all)) => scales = Some(all.to_mut()),
                ("transposed_scales", Array::F32(all)) => transposed_scales = Some(all.to_mut()),
                (_, Array::F64(scalar)) => scalars.push(scalar.to_mut()),
                _ => (),
            }
        }
        let values = values.expect("values to fill");
        let Some(blocks) = self.blocks else {
            let scale = self.by_one_scale(x, values, transposed.map(Vec::as_mut_slice))?;
            scalars.into_iter().for_each(|to| to.fill(scale.into()));
            return Ok(());
        };
        let quantized = Quantized { values, scales: scales.expect("scales to fill") };
        let kernel = Kernel::new(self.options, self.shape, self.launch);
        match transposed.zip(transposed_scales) {
            None => kernel.quantize(blocks, x, quantized),
            Some((values, scales)) => {
                let transposed = Quantized { values, scales };
                kernel.quantize_transposed(blocks, x, quantized, transposed)
            }
        }
    }
}
