//! RMSNorm, with a residual or without, and LayerNorm: forward, and backward with partial sums of dweight and
//! dbias. Rows of LayerNorm are *centred*: their mean is subtracted.

mod arguments;
mod plan;

use std::ffi::c_void;
use std::ptr::{null, null_mut};

pub(crate) use arguments::Arguments;
use plan::Plan;
use xentile::norm::{Kind, Norm as Options, NormShape};
use xentile::{DType, Error as ProblemError};

use crate::driver::{Driver, Extent, Kernel, RawStream};
use crate::{Device, Error, Limits, Result, check_alignment, check_places, library};

/// A weight: its dtype and length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Weight {
    /// The dtype, whatever that of rows.
    pub dtype: DType,
    /// Entries, a multiple of D.
    pub length: usize,
}

/// The shape of partial sums: `[groups, blocks, D]`. Which rows of a group a block has, and the order of its
/// sum, depend on the shape and on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartialSums {
    /// Groups of equal size, at least 1 unless there are no rows.
    pub groups: usize,
    /// Blocks of a group, at least 1.
    pub blocks: usize,
}

/// The number by which kernels know the dtype of a weight.
pub(crate) fn weight_dtype(dtype: DType) -> u32 {
    match dtype {
        DType::F32 => arguments::WEIGHT_F32,
        DType::Bf16 => arguments::WEIGHT_BF16,
        DType::F16 => arguments::WEIGHT_F16,
    }
}

/// A pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// y and statistics.
    Forward,
    /// dx and partial sums.
    Backward(PartialSums),
}

/// Arrays of the forward pass, on the device: matrices are `[T, D]`.
#[derive(Clone, Copy, Debug)]
pub struct Forward {
    /// The input; it is normalised, or its sum with the residual.
    pub x: *const c_void,
    /// The residual of RMSNorm and the output for the sum, which may be the same memory.
    pub residual: Option<(*const c_void, *mut c_void)>,
    /// The weight.
    pub weight: *const c_void,
    /// The bias of LayerNorm, of the weight's dtype, and its number of entries, a multiple of D.
    pub bias: Option<(*const c_void, usize)>,
    /// The norm, which may replace `x`.
    pub y: *mut c_void,
    /// `[T]`; null for RMSNorm.
    pub mean: *mut f32,
    /// `[T]`.
    pub rstd: *mut f32,
}

/// Arrays of the backward pass, on the device: matrices are `[T, D]`.
#[derive(Clone, Copy, Debug)]
pub struct Backward {
    /// The normalised array.
    pub x: *const c_void,
    /// The weight.
    pub weight: *const c_void,
    /// `[T]`, as the forward pass wrote it; null for RMSNorm.
    pub mean: *const f32,
    /// `[T]`, as the forward pass wrote it.
    pub rstd: *const f32,
    /// The cotangent of the norm.
    pub dy: *const c_void,
    /// The cotangent of the sum with a residual, if there was one.
    pub dsum: Option<*const c_void>,
    /// The gradient, which may replace `x` or `dy`.
    pub dx: *mut c_void,
    /// `[groups, blocks, D]`.
    pub dweight: *mut f32,
    /// The same; null for RMSNorm.
    pub dbias: *mut f32,
}

/// A norm of rows `[T, D]` on a GPU.
#[derive(Clone, Copy, Debug)]
pub struct Norm {
    /// The first part of the names of its kernels.
    pub(crate) kernels: &'static str,
    options: Options,
    pub(crate) shape: NormShape,
    dtype: DType,
    weight: Weight,
    adds: bool,
}

impl Norm {
    /// The norm of rows of `shape` and `dtype`; `adds` says that they are sums with a residual.
    ///
    /// # Errors
    /// An option outside its range, a weight of another shape, or rows longer than kernels count.
    ///
    /// # Panics
    /// LayerNorm of sums with a residual.
    pub fn new(
        options: Options,
        shape: NormShape,
        dtype: DType,
        weight: Weight,
        adds: bool,
    ) -> Result<Self> {
        let kernels = match (options.kind, adds) {
            (Kind::Rms, false) => "rms_norm",
            (Kind::Rms, true) => "rms_norm_add",
            (Kind::Layer, false) => "layer_norm",
            (Kind::Layer, true) => panic!("LayerNorm has no residual"),
        };
        Self::with_kernels(kernels, options, shape, dtype, weight, adds)
    }

    /// The same with kernels of other names.
    ///
    /// # Errors
    /// As for [`new`](Self::new).
    pub(crate) fn with_kernels(
        kernels: &'static str,
        options: Options,
        shape: NormShape,
        dtype: DType,
        weight: Weight,
        adds: bool,
    ) -> Result<Self> {
        options.validate()?;
        shape.weights("weight", weight.length)?;
        if i32::try_from(shape.columns()).is_err() {
            return Err(Error::Columns32 { columns: shape.columns() });
        }
        Ok(Self { kernels, options, shape, dtype, weight, adds })
    }

    fn is_centred(&self) -> bool {
        self.options.kind == Kind::Layer
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

    /// Has `stream` write y, statistics and, with a residual, the sum.
    ///
    /// # Errors
    /// No driver or GPU that will do, a bias of another shape, arrays that are not aligned to 16 bytes or
    /// overlap in part, or a failure of the driver.
    ///
    /// # Safety
    /// `stream` is a `CUstream` of the calling thread's current context, and the pointers lead to arrays
    /// of these shapes on its device, which nothing else touches until the launched kernels have run.
    pub unsafe fn forward(&self, stream: *mut c_void, arrays: Forward) -> Result<()> {
        let Forward { x, residual, weight, bias, y, mean, rstd } = arrays;
        if let Some((_, length)) = bias {
            self.shape.weights("bias", length)?;
        }
        if self.shape.rows() == 0 {
            return Ok(());
        }
        assert_eq!(self.adds, residual.is_some(), "a residual that `new` did not get");
        assert_eq!(self.is_centred(), bias.is_some(), "LayerNorm has a bias");
        check_places(("x", x), ("y", y), self.bytes())?;
        let (added, sum) = residual.unwrap_or((null(), null_mut()));
        if residual.is_some() {
            check_places(("residual", added), ("sum", sum), self.bytes())?;
        }
        let mut arguments =
            Arguments { x, added, to: y, sum, mean, rstd, ..self.arguments(weight)? };
        if let Some((bias, length)) = bias {
            check_alignment("bias", bias)?;
            arguments = Arguments { bias, bias_rows: self.rows_of_each(length), ..arguments };
        }
        // SAFETY: passed on from this function's contract.
        unsafe { self.launch(Pass::Forward, stream, arguments) }
    }

    /// Has `stream` write dx and partial sums of dweight and, for LayerNorm, of dbias.
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
        let Backward { x, weight, mean, rstd, dy, dsum, dx, dweight, dbias } = arrays;
        assert_eq!(self.adds, dsum.is_some(), "a residual that `new` did not get");
        let group_rows = self.group_rows(sums)?;
        if sums.groups == 0 {
            return Ok(());
        }
        let added = dsum.unwrap_or(null());
        check_places(("x", x), ("dx", dx), self.bytes())?;
        check_places(("dy", dy), ("dx", dx), self.bytes())?;
        if dsum.is_some() {
            check_places(("dsum", added), ("dx", dx), self.bytes())?;
        }
        check_alignment("dweight", dweight.cast())?;
        check_alignment("dbias", dbias.cast())?;
        let arguments = Arguments {
            x,
            added,
            dy,
            to: dx,
            mean: mean.cast_mut(),
            rstd: rstd.cast_mut(),
            dweight,
            dbias,
            group_rows: group_rows as i64,
            blocks: sums.blocks as i64,
            ..self.arguments(weight)?
        };
        // SAFETY: passed on from this function's contract.
        unsafe { self.launch(Pass::Backward(sums), stream, arguments) }
    }

    /// Bytes of a matrix.
    pub(crate) fn bytes(&self) -> usize {
        self.shape.elements() * self.dtype.size_bytes()
    }

    /// Bytes of a weight of a row.
    fn weight_bytes(&self) -> usize {
        self.shape.columns() * self.weight.dtype.size_bytes()
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

    /// The number of consecutive rows for each `[D]` of `length` elements.
    fn rows_of_each(&self, length: usize) -> i64 {
        let count = length / self.shape.columns();
        self.shape.rows().checked_div(count).unwrap_or(0) as i64
    }

    /// The arguments that both passes have.
    pub(crate) fn arguments(&self, weight: *const c_void) -> Result<Arguments> {
        check_alignment("weight", weight)?;
        let rows = self.shape.rows();
        Ok(Arguments {
            x: null(),
            added: null(),
            dy: null(),
            weight,
            bias: null(),
            mean: null_mut(),
            rstd: null_mut(),
            to: null_mut(),
            sum: null_mut(),
            dweight: null_mut(),
            dbias: null_mut(),
            rows: rows as i64,
            columns: self.shape.columns() as i64,
            weight_rows: self.rows_of_each(self.weight.length),
            bias_rows: rows as i64,
            group_rows: 0,
            blocks: 0,
            eps: self.options.eps,
            weight_dtype: weight_dtype(self.weight.dtype),
            zero_centred: self.options.zero_centred.into(),
            lanes: 0,
            teams: 0,
            adjacent: 0,
            ahead: 0,
        })
    }

    /// Threads that add up a row in the forward pass.
    pub(crate) fn forward_lanes(&self, limits: Limits) -> u32 {
        let (rows, columns) = (self.shape.rows(), self.shape.columns());
        Plan::forward(rows, columns, self.dtype.size_bytes(), limits).lanes
    }

    /// # Safety
    /// `stream` is a `CUstream` of the calling thread's current context.
    unsafe fn ready(&self, pass: Pass, stream: RawStream) -> Result<(Kernel, Plan, Limits)> {
        let device = Device::current()?;
        let (rows, columns) = (self.shape.rows(), self.shape.columns());
        let (element, limits) = (self.dtype.size_bytes(), device.limits());
        let (name, plan) = match pass {
            Pass::Forward => {
                let plan = Plan::forward(rows, columns, element, limits);
                let is_plain = self.kernels == "rms_norm" && self.weight.length == columns;
                let bytes = self.weight_bytes();
                ("forward", if is_plain { plan.in_turns(bytes, limits) } else { plan })
            }
            Pass::Backward(PartialSums { groups, blocks }) => {
                let all = groups.saturating_mul(blocks);
                let (arrays, is_centred) = (2 + u32::from(self.adds), self.is_centred());
                ("backward", Plan::backward(all, columns, element, arrays, is_centred, limits))
            }
        };
        let name = format!("{}_{name}_{}_{}", self.kernels, plan.way, self.dtype);
        // SAFETY: passed on from this function's contract.
        Ok((unsafe { library::kept_kernel(&name, device, stream) }?, plan, limits))
    }

    /// Has `stream` run the kernel of `pass`.
    ///
    /// # Errors
    /// As for [`load`](Self::load), or a failure of the driver.
    ///
    /// # Safety
    /// `stream` is a `CUstream` of the calling thread's current context, and the pointers in `arguments`
    /// lead to arrays of these shapes on its device, which nothing else touches until it has run what was
    /// launched here.
    unsafe fn launch(&self, pass: Pass, stream: RawStream, arguments: Arguments) -> Result<()> {
        // SAFETY: passed on from this function's contract.
        unsafe { self.launch_with(pass, stream, arguments, |arguments| arguments) }
    }

    /// The same for a kernel whose argument is `wrap` of the arguments.
    ///
    /// # Errors
    /// As for [`launch`](Self::launch).
    ///
    /// # Safety
    /// As for [`launch`](Self::launch), for all pointers in the result of `wrap`.
    pub(crate) unsafe fn launch_with<A>(
        &self,
        pass: Pass,
        stream: RawStream,
        arguments: Arguments,
        wrap: impl FnOnce(Arguments) -> A,
    ) -> Result<()> {
        // SAFETY: passed on from this function's contract.
        let (kernel, mut plan, limits) = unsafe { self.ready(pass, stream) }?;
        let rows = arguments.rows;
        if pass == Pass::Forward && arguments.weight_rows.min(arguments.bias_rows) >= rows {
            plan = plan.with_ahead(self.weight_bytes(), 1 + u32::from(self.is_centred()), limits);
        }
        let Plan { ctas, lanes, teams, adjacent, ahead, shared_bytes, .. } = plan;
        let extent = Extent { ctas, rows: 1, threads: plan.threads(), shared_bytes, cluster: None };
        let adjacent = adjacent.into();
        let arguments = wrap(Arguments { lanes, teams, adjacent, ahead, ..arguments });
        // SAFETY: passed on from this function's contract.
        unsafe { Driver::get()?.launch(kernel, extent, stream, &arguments) }
    }
}
