//! LayerNorm: forward, and backward with partial sums of dweight and dbias.

use std::ffi::c_void;

use xentile::DType;
use xentile::layer_norm::{LayerNorm, NormShape};

use crate::norm::{self, Arguments};
pub use crate::norm::{PartialSums, Pass, Weight};
use crate::{Result, check_alignment, check_places};

/// What the forward pass reads and writes, on the device: matrices are `[T, D]`.
#[derive(Clone, Copy, Debug)]
pub struct Forward {
    /// What is normalised.
    pub x: *const c_void,
    /// The weight.
    pub weight: *const c_void,
    /// The bias, of the weight's dtype, and its number of entries, a multiple of D.
    pub bias: (*const c_void, usize),
    /// The norm, which may be in the place of `x`.
    pub y: *mut c_void,
    /// `[T]`.
    pub mean: *mut f32,
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
    pub mean: *const f32,
    /// The same.
    pub rstd: *const f32,
    /// The cotangent of the norm.
    pub dy: *const c_void,
    /// The gradient, which may be in the place of `x` or of `dy`.
    pub dx: *mut c_void,
    /// `[groups, blocks, D]`.
    pub dweight: *mut f32,
    /// The same.
    pub dbias: *mut f32,
}

/// LayerNorm of rows `[T, D]` on a GPU.
#[derive(Clone, Copy, Debug)]
pub struct Norm(norm::Norm);

impl Norm {
    /// The norm of rows of `shape` and `dtype`.
    ///
    /// # Errors
    /// An option outside its range, a weight of another shape, or rows longer than kernels count.
    pub fn new(options: LayerNorm, shape: NormShape, dtype: DType, weight: Weight) -> Result<Self> {
        options.validate()?;
        let (kernels, eps, zero_centred) = ("layer_norm", options.eps, false);
        let of = norm::Norm {
            kernels,
            eps,
            zero_centred,
            shape,
            dtype,
            weight,
            arrays: 2,
            is_centred: true,
        };
        Ok(Self(of.checked()?))
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
        unsafe { self.0.load(pass, stream) }
    }

    /// Has `stream` write y, mean and rstd.
    ///
    /// # Errors
    /// No driver or GPU that will do, a bias of another shape, arrays that begin at no multiple of 16 or
    /// overlap in part, or a failure of the driver.
    ///
    /// # Safety
    /// `stream` is a `CUstream` of the calling thread's current context, and the pointers lead to arrays
    /// of these shapes on its device, which nothing else touches until it has run what was launched here.
    pub unsafe fn forward(&self, stream: *mut c_void, arrays: Forward) -> Result<()> {
        let Forward { x, weight, bias: (bias, length), y, mean, rstd } = arrays;
        self.0.shape.weights("bias", length)?;
        if self.0.shape.rows() == 0 {
            return Ok(());
        }
        check_places(("x", x), ("y", y), self.0.bytes())?;
        check_alignment("bias", bias)?;
        let bias_rows = self.0.rows_of_each(length);
        let common = self.0.arguments(weight)?;
        let arguments = Arguments { x, bias, bias_rows, to: y, mean, rstd, ..common };
        // SAFETY: passed on from this function's contract.
        unsafe { self.0.launch(Pass::Forward, stream, arguments) }
    }

    /// Has `stream` write dx and partial sums of dweight and dbias.
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
        let Backward { x, weight, mean, rstd, dy, dx, dweight, dbias } = arrays;
        let group_rows = self.0.group_rows(sums)?;
        if sums.groups == 0 {
            return Ok(());
        }
        let bytes = self.0.bytes();
        check_places(("x", x), ("dx", dx), bytes)?;
        check_places(("dy", dy), ("dx", dx), bytes)?;
        check_alignment("dweight", dweight.cast())?;
        check_alignment("dbias", dbias.cast())?;
        let arguments = Arguments {
            x,
            dy,
            to: dx,
            mean: mean.cast_mut(),
            rstd: rstd.cast_mut(),
            dweight,
            dbias,
            group_rows: group_rows as i64,
            blocks: sums.blocks as i64,
            ..self.0.arguments(weight)?
        };
        // SAFETY: passed on from this function's contract.
        unsafe { self.0.launch(Pass::Backward(sums), stream, arguments) }
    }
}
