//! How kernels are to run.

use crate::{Isa, Parallel};

/// How a kernel is to run, where there is no tile to choose.
#[derive(Clone, Copy)]
pub struct Launch<'a> {
    /// The instruction set.
    pub isa: Isa,
    /// The threads.
    pub pool: &'a dyn Parallel,
}
