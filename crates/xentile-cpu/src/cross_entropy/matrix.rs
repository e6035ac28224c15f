//! Rows of logits to read and rows of dlogits to write, which may be the same memory.

use std::marker::PhantomData;

use xentile::{Element, LogitsShape, Result};

use crate::InOut;
use crate::simd::{LINE_BYTES, Simd};

/// Logits `[T, V]` and, for passes that write, dlogits `[T, V]`.
pub(crate) struct Matrix<'a, E> {
    from: *const E,
    to: *mut E,
    shape: LogitsShape,
    borrow: PhantomData<&'a mut [E]>,
}

// SAFETY: tasks read and write through row pointers, and every use of one is in an unsafe function
// whose contract gives each row to a single task.
unsafe impl<E: Element> Sync for Matrix<'_, E> {}

impl<'a, E: Element> Matrix<'a, E> {
    /// # Errors
    /// Logits are not `[T, V]`.
    pub(super) fn read_only(logits: &'a [E], shape: LogitsShape) -> Result<Self> {
        shape.check_matrix("logits", logits.len())?;
        Ok(Self { from: logits.as_ptr(), to: std::ptr::null_mut(), shape, borrow: PhantomData })
    }

    /// # Errors
    /// Logits or dlogits are not `[T, V]`.
    pub(super) fn new(logits: InOut<'a, E>, shape: LogitsShape) -> Result<Self> {
        let (read, written) = logits.lengths();
        shape.check_matrix("logits", read)?;
        shape.check_matrix("dlogits", written)?;
        let (from, to) = logits.into_pointers();
        Ok(Self { from, to, shape, borrow: PhantomData })
    }

    pub(super) fn shape(&self) -> LogitsShape {
        self.shape
    }

    /// The first logit of `token`, valid for reads of V elements.
    #[inline(always)]
    pub(super) fn logits(&self, token: usize) -> *const E {
        assert!(token < self.shape.tokens());
        // SAFETY: `from` points at T x V elements and the token is below T.
        unsafe { self.from.add(token * self.shape.vocab()) }
    }

    /// The first element of the gradient of `token`, valid for writes of V elements.
    ///
    /// # Panics
    /// The matrix is read-only.
    #[inline(always)]
    pub(super) fn dlogits(&self, token: usize) -> *mut E {
        assert!(token < self.shape.tokens() && !self.to.is_null());
        // SAFETY: as for `logits`.
        unsafe { self.to.add(token * self.shape.vocab()) }
    }
}

/// A row of a later tile, to be brought into the second-level cache while this one is worked on.
///
/// Either pass of a fused kernel asks for every other chunk, so that memory is read throughout: were
/// it all asked for by the pass that also writes, memory would be idle in one and too slow in the
/// other.
#[derive(Clone, Copy)]
pub(super) struct Ahead<E>(Option<*const E>);

impl<E: Element> Ahead<E> {
    /// The row `tokens` after `token`, if it is asked for and there is one.
    #[inline(always)]
    pub(super) fn new(matrix: &Matrix<'_, E>, token: usize, tokens: Option<usize>) -> Self {
        let later = tokens.map(|tokens| token.saturating_add(tokens));
        let later = later.filter(|&later| later < matrix.shape().tokens());
        Self(later.map(|later| matrix.logits(later)))
    }

    /// The same row from `column` on.
    #[inline(always)]
    pub(super) fn from(self, column: usize) -> Self {
        Self(self.0.map(|row| row.wrapping_add(column)))
    }

    /// Asks for the chunk from `column`. Past the end of the logits this only wastes a prefetch.
    #[inline(always)]
    pub(super) fn fetch<S: Simd>(self, simd: S, column: usize) {
        if let Some(row) = self.0 {
            let chunk = row.wrapping_add(column).cast::<u8>();
            for line in (0..S::CHUNK * size_of::<E>()).step_by(LINE_BYTES) {
                simd.prefetch(chunk.wrapping_add(line));
            }
        }
    }
}
