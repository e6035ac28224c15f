//! The kernels of FP8 quantisation, as tools run them.

use xentile::fp8_quantize::operation::{OPERATION, blocks, options, shape};
use xentile::fp8_quantize::{Blocks, Fp8Quantize, QuantizeShape};
use xentile::operation::{Array, ArrayElement, Arrays, Operation, Pass, Problem};
use xentile::{Element, Result, by_dtype};

use super::{Kernel, Launch, Quantized};
use crate::operation::{Kernels, Run};

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
        let (options, shape, blocks) = (options(problem), shape(problem)?, blocks(problem));
        let amax = if blocks.is_none() { vec![0.0; shape.scales(Blocks::ROW)] } else { Vec::new() };
        Ok(by_dtype!(problem.dtype, E => Box::new(Matrix {
            options,
            shape,
            blocks,
            launch,
            x: inputs.expect::<E>("x"),
            amax,
        })))
    }
}

struct Matrix<'a, E> {
    options: Fp8Quantize,
    shape: QuantizeShape,
    /// None where there is one scale.
    blocks: Option<Blocks>,
    launch: Launch<'a>,
    x: &'a [E],
    /// Of rows, where there is one scale.
    amax: Vec<f32>,
}

impl<E: Element> Matrix<'_, E> {
    /// Values by the scale of all of x, the transposed copy where there is room for it, and that scale.
    fn by_one_scale(&mut self, values: &mut [u8], transposed: Option<&mut [u8]>) -> Result<f32> {
        let kernel = Kernel::new(self.options, self.shape, self.launch);
        kernel.amax(self.x, &mut self.amax)?;
        let scale = self.options.scale(self.amax.iter().copied().fold(0.0, f32::max));
        match transposed {
            None => kernel.scaled(self.x, &[scale], values, &mut self.amax)?,
            Some(turned) => {
                kernel.scaled_transposed(self.x, &[scale], values, &mut self.amax, turned)?;
            }
        }
        Ok(scale)
    }
}

impl<E: Element + ArrayElement> Run for Matrix<'_, E> {
    fn run(&mut self, _: Pass, _: &Arrays<'_>, results: &mut Arrays<'_>) -> Result<()> {
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
            let scale = self.by_one_scale(values, transposed.map(Vec::as_mut_slice))?;
            scalars.into_iter().for_each(|to| to.fill(scale.into()));
            return Ok(());
        };
        let quantized = Quantized { values, scales: scales.expect("scales to fill") };
        let kernel = Kernel::new(self.options, self.shape, self.launch);
        match transposed.zip(transposed_scales) {
            None => kernel.quantize(blocks, self.x, quantized),
            Some((values, scales)) => {
                let transposed = Quantized { values, scales };
                kernel.quantize_transposed(blocks, self.x, quantized, transposed)
            }
        }
    }
}
