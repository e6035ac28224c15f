//! The kernels of activations, as tools run them.

use xentile::activation::operation::{OPERATION, options, shape};
use xentile::operation::{ArrayElement, Arrays, Operation, Pass, Problem};
use xentile::{Element, Result, by_dtype};

use super::{Kernel, Launch};
use crate::operation::{Kernels, Run};

/// The kernels of activations.
pub(crate) const KERNELS: OfRows = OfRows;

/// The kernels of this module.
pub(crate) const ALL: &[&dyn Kernels] = &[&KERNELS];

/// The kernels of activations.
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
        let kernel = Kernel::new(options(problem)?, shape(problem)?, launch)?;
        Ok(by_dtype!(problem.dtype, E => Box::new(Rows { kernel, x: inputs.expect::<E>("x") })))
    }
}

struct Rows<'a, E> {
    kernel: Kernel<'a>,
    x: &'a [E],
}

impl<E: Element + ArrayElement> Run for Rows<'_, E> {
    fn run(&mut self, pass: Pass, given: &Arrays<'_>, results: &mut Arrays<'_>) -> Result<()> {
        let [y, dx] = results.slices_mut(["y", "dx"]);
        if pass != Pass::Backward {
            self.kernel.forward(self.x, y.expect("an array to fill"))?;
        }
        if pass.has_gradients() {
            let dx = dx.expect("a gradient to fill");
            self.kernel.backward(self.x, given.expect("dy"), dx)?;
        }
        Ok(())
    }
}
