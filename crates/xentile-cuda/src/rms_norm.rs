//! RMSNorm: forward, with a residual or without, and backward with partial sums of dweight.

mod arguments;
mod plan;

use std::ffi::c_void;
use std::ptr::{null, null_mut};

use arguments::Arguments;
use plan::Plan;
use xentile::rms_norm::{NormShape, RmsNorm};
use xentile::{DType, Error as ProblemError};

use crate::driver::{Driver, Extent, Kernel, RawStream};
use crate::{Device, Error, Result, check_alignment, check_places, library};

/// A weight: its dtype, and of how many rows that follow one another each `[D]` is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Weight {
    /// The dtype, whatever that of rows.
    pub dtype: DType,
    /// Entries, a multiple of D.
    pub length: usize,
}

/// How partial sums of dweight are cut: `[groups, blocks, D]`. Which rows of a group a block has, and in
/// which order they are added, is that of the shape and of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartialSums {
    /// Groups of as many rows, at least 1 where there are rows.
    pub groups: usize,
    /// Blocks of a group, at least 1.
    pub blocks: usize,
}

/// What a pass is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// y and rstd.
    Forward,
    /// dx and partial sums of dweight.
    Backward(PartialSums),
}

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
    options: RmsNorm,
    shape: NormShape,
    dtype: DType,
    weight: Weight,
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
        shape.weights(weight.length)?;
        if i32::try_from(shape.columns()).is_err() {
            return Err(Error::Columns32 { columns: shape.columns() });
        }
        Ok(Self { options, shape, dtype, weight, adds })
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
        unsafe { self.ready(pass, stream) }.map(drop)
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
        if self.shape.rows() == 0 {
            return Ok(());
        }
        let Forward { x, residual, weight, y, rstd } = arrays;
        assert_eq!(self.adds, residual.is_some(), "what is added was said before");
        let (added, sum) = residual.unwrap_or((null(), null_mut()));
        let bytes = self.bytes();
        check_places(("x", x), ("y", y), bytes)?;
        if residual.is_some() {
            check_places(("residual", added), ("sum", sum), bytes)?;
        }
        let to = Arguments { x, added, to: y, sum, rstd, ..self.arguments(weight)? };
        // SAFETY: passed on from this function's contract.
        unsafe { self.launch(Pass::Forward, stream, to) }
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
        let group_rows = self.group_rows(sums)?;
        if sums.groups == 0 {
            return Ok(());
        }
        let (bytes, added) = (self.bytes(), dsum.unwrap_or(null()));
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
            ..self.arguments(weight)?
        };
        // SAFETY: passed on from this function's contract.
        unsafe { self.launch(Pass::Backward(sums), stream, arguments) }
    }

    /// Bytes of a matrix.
    fn bytes(&self) -> usize {
        self.shape.elements() * self.dtype.size_bytes()
    }

    /// Rows of a group.
    fn group_rows(&self, sums: PartialSums) -> Result<usize> {
        let (rows, PartialSums { groups, blocks }) = (self.shape.rows(), sums);
        let wrong = |name, value: usize, requirement| {
            Err(ProblemError::Option { name, value: value as f64, requirement }.into())
        };
        if blocks == 0 {
            return wrong("blocks", blocks, "at least 1");
        }
        if rows > 0 && (groups == 0 || !rows.is_multiple_of(groups)) {
            return wrong("groups", groups, "a divisor of the number of rows");
        }
        Ok(rows.checked_div(groups).unwrap_or(0))
    }

    /// What both passes have.
    fn arguments(&self, weight: *const c_void) -> Result<Arguments> {
        check_alignment("weight", weight)?;
        let rows = self.shape.rows();
        let weights = self.weight.length / self.shape.columns();
        Ok(Arguments {
            x: null(),
            added: null(),
            dy: null(),
            weight,
            rstd: null_mut(),
            to: null_mut(),
            sum: null_mut(),
            dweight: null_mut(),
            rows: rows as i64,
            columns: self.shape.columns() as i64,
            weight_rows: rows.checked_div(weights).unwrap_or(0) as i64,
            group_rows: 0,
            blocks: 0,
            eps: self.options.eps,
            weight_dtype: match self.weight.dtype {
                DType::F32 => arguments::WEIGHT_F32,
                DType::Bf16 => arguments::WEIGHT_BF16,
                DType::F16 => arguments::WEIGHT_F16,
            },
            zero_centred: self.options.zero_centred.into(),
            lanes: 0,
            teams: 0,
            stages: 0,
            adjacent: 0,
        })
    }

    /// # Safety
    /// `stream` is a `CUstream` of the calling thread's current context.
    unsafe fn ready(&self, pass: Pass, stream: RawStream) -> Result<(Kernel, Plan)> {
        let device = Device::current()?;
        let (rows, columns) = (self.shape.rows(), self.shape.columns());
        let (element, limits) = (self.dtype.size_bytes(), device.limits());
        let (name, plan) = match pass {
            Pass::Forward => ("forward", Plan::forward(rows, columns, element, limits)),
            Pass::Backward(PartialSums { groups, blocks }) => {
                let arrays = 2 + u32::from(self.adds);
                let all = groups.saturating_mul(blocks);
                ("backward", Plan::backward(all, columns, element, arrays, limits))
            }
        };
        let add = if self.adds { "add_" } else { "" };
        let name = format!("rms_norm_{add}{name}_{}_{}", plan.way, self.dtype);
        // SAFETY: passed on from this function's contract.
        Ok((unsafe { library::kept_kernel(&name, device, stream) }?, plan))
    }

    /// # Safety
    /// As for [`forward`](Self::forward).
    unsafe fn launch(&self, pass: Pass, stream: RawStream, arguments: Arguments) -> Result<()> {
        // SAFETY: passed on from this function's contract.
        let (kernel, plan) = unsafe { self.ready(pass, stream) }?;
        let Plan { ctas, lanes, teams, stages, adjacent, shared_bytes, .. } = plan;
        let extent = Extent { ctas, rows: 1, threads: plan.threads(), shared_bytes, cluster: None };
        let adjacent = adjacent.into();
        let arguments = Arguments { lanes, teams, stages, adjacent, ..arguments };
        // SAFETY: passed on from this function's contract.
        unsafe { Driver::get()?.launch(kernel, extent, stream, &arguments) }
    }
}
