//! The kernel of rotary position embedding, as tools run it.

use xentile::operation::{ArrayElement, Arrays, Operation, Pass, Problem};
use xentile::rope::operation::{OPERATION, options, shape, tables_of};
use xentile::rope::{Rope, RopeShape};
use xentile::{Element, Result, by_dtype};

use super::{Kernel, Launch};
use crate::InOut;
use crate::operation::{Kernels, Run};

/// The kernels of rotary position embedding.
pub(crate) const KERNELS: OfHeads = OfHeads;

/// The kernels of this module.
pub(crate) const ALL: &[&dyn Kernels] = &[&KERNELS];

/// The kernels of rotary position embedding.
pub(crate) struct OfHeads;

impl Kernels for OfHeads {
    fn name(&self) -> &'static str {
        OPERATION.name()
    }

    /// Tables are made once, as a model makes them once for all layers.
    fn open<'a>(
        &self,
        problem: &'a Problem,
        inputs: &'a Arrays<'a>,
        launch: Launch<'a>,
    ) -> Result<Box<dyn Run + 'a>> {
        let shape = shape(problem)?;
        let tables = tables_of(problem, inputs)
            .map(|table| table.into_iter().map(|x| x as f32).collect::<Vec<_>>());
        let heads = problem.dim("H");
        let indices =
            (0..problem.dim("T")).flat_map(|token| (0..heads).map(move |_| token as i32)).collect();
        Ok(by_dtype!(problem.dtype, E => Box::new(Rows {
            options: options(problem),
            shape,
            launch,
            x: inputs.expect::<E>("x"),
            indices,
            tables,
        })))
    }
}

struct Rows<'a, E> {
    options: Rope,
    shape: RopeShape,
    launch: Launch<'a>,
    x: &'a [E],
    indices: Vec<i32>,
    tables: [Vec<f32>; 2],
}

impl<E: Element + ArrayElement> Rows<'_, E> {
    fn rotate(&self, inverse: bool, x: &[E], y: &mut [E]) -> Result<()> {
        let options = Rope { inverse, ..self.options };
        let [cos, sin] = &self.tables;
        Kernel::new(options, self.shape, self.launch).run(
            InOut::apart(x, y),
            &self.indices,
            [cos, sin],
        )
    }
}

impl<E: Element + ArrayElement> Run for Rows<'_, E> {
    fn run(&mut self, pass: Pass, given: &Arrays<'_>, results: &mut Arrays<'_>) -> Result<()> {
        let [y, dx] = results.slices_mut(["y", "dx"]);
        if pass != Pass::Backward {
            self.rotate(false, self.x, y.expect("rows to fill"))?;
        }
        if pass.has_gradients() {
            self.rotate(true, given.expect("dy"), dx.expect("a gradient to fill"))?;
        }
        Ok(())
    }
}
