//! Activations of one array and gated, and their gradients.
//!
//! An entry of y, or the two of dx, is made of what lies in its place, so that tasks are runs of entries of
//! y, which may cut rows. Interleaved arrays go chunk by chunk by way of buffers, in which they are apart.

mod function;
#[cfg(feature = "operation")]
pub(crate) mod operation;
mod pass;

use xentile::activation::{Activation, ActivationShape};
use xentile::{Element, Result};

pub use crate::Launch;
use pass::{Arrays, Backward, Forward, Passes};

/// Bytes of y in a task: large enough to stream, small enough to share out.
const TASK_BYTES: usize = 1 << 17;

/// An activation of rows, for one shape of y `[T, F]`.
#[derive(Clone, Copy)]
pub struct Kernel<'a> {
    options: Activation,
    shape: ActivationShape,
    launch: Launch<'a>,
}

impl<'a> Kernel<'a> {
    /// A kernel for y of `shape`.
    ///
    /// # Errors
    /// An option outside its range.
    pub fn new(options: Activation, shape: ActivationShape, launch: Launch<'a>) -> Result<Self> {
        options.validate()?;
        Ok(Self { options, shape, launch })
    }

    /// Writes `y` `[T, F]` for `x`, `[T, F]` or, where two arrays are packed, `[T, 2F]`.
    ///
    /// # Errors
    /// An argument of another shape.
    pub fn forward<E: Element>(&self, x: &[E], y: &mut [E]) -> Result<()> {
        self.shape.check_packed(self.options.layout, "x", x.len())?;
        self.shape.check("y", y.len())?;
        let arrays = self.arrays(x, None, y);
        self.run(size_of::<E>(), &|first, end| {
            let pass = Forward { arrays: &arrays, first, end };
            (Passes::get().forward)(self.launch.isa, pass);
        });
        Ok(())
    }

    /// Writes `dx`, in the shape of `x`, for `dy` `[T, F]`, the cotangent of y.
    ///
    /// # Errors
    /// An argument of another shape.
    pub fn backward<E: Element>(&self, x: &[E], dy: &[E], dx: &mut [E]) -> Result<()> {
        for (name, length) in [("x", x.len()), ("dx", dx.len())] {
            self.shape.check_packed(self.options.layout, name, length)?;
        }
        self.shape.check("dy", dy.len())?;
        let arrays = self.arrays(x, Some(dy), dx);
        self.run(size_of::<E>(), &|first, end| {
            let pass = Backward { arrays: &arrays, first, end };
            (Passes::get().backward)(self.launch.isa, pass);
        });
        Ok(())
    }

    /// Writes `dx` as [`backward`](Self::backward) does, and `y` as [`forward`](Self::forward) does.
    ///
    /// A task does one after the other over its run of entries, whose x is then in a cache.
    ///
    /// # Errors
    /// An argument of another shape.
    pub fn backward_with_y<E: Element>(
        &self,
        x: &[E],
        dy: &[E],
        dx: &mut [E],
        y: &mut [E],
    ) -> Result<()> {
        for (name, length) in [("x", x.len()), ("dx", dx.len())] {
            self.shape.check_packed(self.options.layout, name, length)?;
        }
        for (name, length) in [("dy", dy.len()), ("y", y.len())] {
            self.shape.check(name, length)?;
        }
        let (of_dx, of_y) = (self.arrays(x, Some(dy), dx), self.arrays(x, None, y));
        self.run(size_of::<E>(), &|first, end| {
            (Passes::get().backward)(self.launch.isa, Backward { arrays: &of_dx, first, end });
            (Passes::get().forward)(self.launch.isa, Forward { arrays: &of_y, first, end });
        });
        Ok(())
    }

    fn arrays<E>(&self, x: &[E], dy: Option<&[E]>, result: &mut [E]) -> Arrays<E> {
        Arrays {
            options: self.options,
            columns: self.shape.columns(),
            x: x.as_ptr(),
            dy: dy.map_or(std::ptr::null(), <[E]>::as_ptr),
            bytes: size_of_val(result),
            result: result.as_mut_ptr(),
        }
    }

    fn run(&self, width: usize, work: &(dyn Fn(usize, usize) + Sync)) {
        let (entries, task) = (self.shape.elements(), TASK_BYTES / width);
        self.launch.pool.run(entries.div_ceil(task), &|index| {
            let first = index * task;
            work(first, entries.min(first + task));
        });
    }
}
