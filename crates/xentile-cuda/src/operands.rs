//! What a loss of hidden states and an output matrix takes on a GPU, and the memory that it may use.

use std::ffi::c_void;

use crate::cross_entropy::{Labels, past};

/// Operands on a GPU, each at a multiple of 16.
#[derive(Clone, Copy, Debug)]
pub struct Operands {
    /// `[N, D]`.
    pub hidden: *const c_void,
    /// `[V, D]` or `[D, V]`.
    pub weight: *const c_void,
    /// `[N]`.
    pub labels: Labels,
    /// `[V]`, or null for none.
    pub bias: *const f32,
}

impl Operands {
    /// The bias of the columns from `first` on, or null.
    pub(crate) fn bias_from(&self, first: usize) -> *const f32 {
        past(self.bias.cast_mut(), first).cast_const()
    }
}

/// Memory that a call may use.
#[derive(Clone, Copy, Debug)]
pub struct Scratch {
    /// Where it begins, at a multiple of 256.
    pub at: *mut c_void,
    /// Its size.
    pub bytes: usize,
}
