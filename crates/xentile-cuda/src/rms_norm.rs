//! RMSNorm: forward, with a residual or without, and backward with partial sums of dweight.

use std::ffi::c_void;
use std::ptr::{null, null_mut};

use xentile::DType;
use xentile::rms_norm::{NormShape, RmsNorm};

use crate::norm::{self, Arguments};
pub use crate::norm::{PartialSums, Pass, Weight};
use crate::{Result, check_alignment, check_places};

/// What the forward pass reads and writes, on the device: matrices are `[T, D]`.
#[derive(Clone, Copy, Debug)]
pub struct Forward {
    /// What is normalised, or added to.
    pub x: *const c_void,
    /// What is added, and where the sum goes, which may be the same place.
    pub residual: Option<(*const c_void, *mut c_void)>,
    /// The weight.
    pub weight: *const c_void,
    /// The norm, which may be in the place of `x`.
    pub y: *mut c_void,
    /// `[T]`.
    pub rstd: *mut f32,
}

/// What the backward pass reads and writes, on the device: matrices are `[T, D]`.
#[derive(Clone, Copy, Debug)]
pub struct Backward {
    /// What was normalised.
    pub x: *const c_void,
    /// The weight.
    pub weight: *const c_void,
    /// `[T]`, as the forward pass gave it.
    pub rstd: *const f32,
    /// The cotangent of the norm.
    pub dy: *const c_void,
    /// The cotangent of the sum with a residual, if there was one.
    pub dsum: Option<*const c_void>,
    /// The gradient, which may be in the place of `x` or of `dy`.
    pub dx: *mut c_void,
    /// `[groups, blocks, D]`.
    pub dweight: *mut f32,
}

/// RMSNorm of rows `[T, D]` on a GPU.
#[derive(Clone, Copy, Debug)]
pub struct Norm {
    of: norm::Norm,
    adds: bool,
}

impl Norm {
    /// The norm of rows of `shape` and `dtype`; `adds` says that they are sums with a residual.
    ///
    /// # Errors
    /// An option outside its range, a weight of another shape, or rows longer than kernels count.
    pub fn new(
        options: RmsNorm,
        shape: NormShape,
        dtype: DType,
        weight: Weight,
        adds: bool,
    ) -> Result<Self> {
        options.validate()?;
        let RmsNorm { eps, zero_centred } = options;
        let kernels = if adds { "rms_norm_add" } else { "rms_norm" };
        let arrays = 2 + u32::from(adds);
        let of = norm::Norm {
            kernels,
            eps,
            zero_centred,
            shape,
            dtype,
            weight,
            arrays,
            is_centred: false,
        };
        Ok(Self { of: of.checked()?, adds })
    }

    /// Loads the kernel of `pass`, so that it has only to be launched.
    ///
    /// # Errors
    /// No driver or GPU that will do, or partial sums that cannot be.
    ///
    /// # Safety
    /// `stream` is a `CUstream` of the calling thread's current context.
    pub unsafe fn load(&self, pass: Pass, stream: *mut c_void) -> Result<()> {
        // SAFETY: passed on from this function's contract.
        unsafe { self.of.load(pass, stream) }
    }

    /// Has `stream` write y, rstd and, with a residual, the sum.
    ///
    /// # Errors
    /// No driver or GPU that will do, arrays that begin at no multiple of 16 or overlap in part, or a
    /// failure of the driver.
    ///
    /// # Safety
    /// `stream` is a `CUstream` of the calling thread's current context, and the pointers lead to arrays
    /// of these shapes on its device, which nothing else touches until it has run what was launched here.
    pub unsafe fn forward(&self, stream: *mut c_void, arrays: Forward) -> Result<()> {
        if self.of.shape.rows() == 0 {
            return Ok(());
        }
        let Forward { x, residual, weight, y, rstd } = arrays;
        assert_eq!(self.adds, residual.is_some(), "what is added was said before");
        let (added, sum) = residual.unwrap_or((null(), null_mut()));
        let bytes = self.of.bytes();
        check_places(("x", x), ("y", y), bytes)?;
        if residual.is_some() {
            check_places(("residual", added), ("sum", sum), bytes)?;
        }
        let to = Arguments { x, added, to: y, sum, rstd, ..self.of.arguments(weight)? };
        // SAFETY: passed on from this function's contract.
        unsafe { self.of.launch(Pass::Forward, stream, to) }
    }

    /// Has `stream` write dx and partial sums of dweight.
    ///
    /// # Errors
    /// As for [`forward`](Self::forward), or partial sums that cannot be.
    ///
    /// # Safety
    /// As for [`forward`](Self::forward).
    pub unsafe fn backward(
        &self,
        stream: *mut c_void,
        sums: PartialSums,
        arrays: Backward,
    ) -> Result<()> {
        let Backward { x, weight, rstd, dy, dsum, dx, dweight } = arrays;
        assert_eq!(self.adds, dsum.is_some(), "what is added was said before");
        let group_rows = self.of.group_rows(sums)?;
        if sums.groups == 0 {
            return Ok(());
        }
        let (bytes, added) = (self.of.bytes(), dsum.unwrap_or(null()));
        check_places(("x", x), ("dx", dx), bytes)?;
        check_places(("dy", dy), ("dx", dx), bytes)?;
        if dsum.is_some() {
            check_places(("dsum", added), ("dx", dx), bytes)?;
        }
        check_alignment("dweight", dweight.cast())?;
        let arguments = Arguments {
            x,
            added,
            dy,
            to: dx,
            rstd: rstd.cast_mut(),
            dweight,
            group_rows: group_rows as i64,
            blocks: sums.blocks as i64,
            ..self.of.arguments(weight)?
        };
        // SAFETY: passed on from this function's contract.
        unsafe { self.of.launch(Pass::Backward(sums), stream, arguments) }
    }
}
