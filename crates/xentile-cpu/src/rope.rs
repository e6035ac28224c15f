//! Rotary position embedding: a read and a write of x, in place or apart.
//!
//! A task is rows that follow one another. The heads of a token share a row of the tables, which is brought
//! into the order that vectors want once for all of them, and then lies in the nearest cache.

#[cfg(feature = "operation")]
pub(crate) mod operation;
mod pass;

use xentile::rope::{Rope, RopeShape};
use xentile::{Element, Result};

use crate::InOut;
pub use crate::Launch;
use pass::{Arrays, Passes, Rotate};

/// Bytes of x in a task: large enough to stream, small enough to share out.
const TASK_BYTES: usize = 1 << 17;

/// Rotary position embedding for one shape.
#[derive(Clone, Copy)]
pub struct Kernel<'a> {
    options: Rope,
    shape: RopeShape,
    launch: Launch<'a>,
}

impl<'a> Kernel<'a> {
    /// A kernel for arrays of `shape`.
    #[must_use]
    pub fn new(options: Rope, shape: RopeShape, launch: Launch<'a>) -> Self {
        Self { options, shape, launch }
    }

    /// Writes what `x` `[N, D]` becomes to its output, by `indices` `[N]` into the tables `cos` and `sin`
    /// `[G, P, R / 2]`.
    ///
    /// # Errors
    /// An argument of another shape.
    pub fn run<E: Element>(
        &self,
        x: InOut<'_, E>,
        indices: &[i32],
        [cos, sin]: [&[f32]; 2],
    ) -> Result<()> {
        let shape = self.shape;
        let (read, written) = x.lengths();
        shape.check("x", read)?;
        shape.check("y", written)?;
        shape.check_indices("indices", indices.len())?;
        shape.check_tables("cos", cos.len())?;
        shape.check_tables("sin", sin.len())?;
        let in_place = matches!(x, InOut::InPlace(_));
        let (x, y) = x.into_pointers();
        let arrays =
            Arrays { options: self.options, shape, x, y, in_place, indices, tables: [cos, sin] };
        let task = (TASK_BYTES / (shape.columns() * size_of::<E>()).max(1)).max(1);
        self.launch.pool.run(shape.rows().div_ceil(task), &|index| {
            let first = index * task;
            let pass = Rotate { arrays: &arrays, first, end: shape.rows().min(first + task) };
            (Passes::get().rotate)(self.launch.isa, pass);
        });
        Ok(())
    }
}
