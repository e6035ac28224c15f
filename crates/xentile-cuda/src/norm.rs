//! What norms of rows share, [`rms_norm`](crate::rms_norm) and [`layer_norm`](crate::layer_norm): the rows
//! of the latter are *centred*.

mod arguments;
mod plan;

use std::ffi::c_void;
use std::ptr::{null, null_mut};

pub(crate) use arguments::Arguments;
use plan::Plan;
use xentile::norm::NormShape;
use xentile::{DType, Error as ProblemError};

use crate::driver::{Driver, Extent, Kernel, RawStream};
use crate::{Device, Error, Limits, Result, check_alignment, library};

/// A weight: its dtype, and of how many rows that follow one another each `[D]` is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Weight {
    /// The dtype, whatever that of rows.
    pub dtype: DType,
    /// Entries, a multiple of D.
    pub length: usize,
}

/// How partial sums are cut: `[groups, blocks, D]`. Which rows of a group a block has, and in
/// which order they are added, is that of the shape and of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartialSums {
    /// Groups of as many rows, at least 1 where there are rows.
    pub groups: usize,
    /// Blocks of a group, at least 1.
    pub blocks: usize,
}

/// What kernels call the dtype of a weight.
pub(crate) fn weight_dtype(dtype: DType) -> u32 {
    match dtype {
        DType::F32 => arguments::WEIGHT_F32,
        DType::Bf16 => arguments::WEIGHT_BF16,
        DType::F16 => arguments::WEIGHT_F16,
    }
}

/// What a pass is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// y and statistics.
    Forward,
    /// dx and partial sums.
    Backward(PartialSums),
}

/// Rows `[T, D]` on a GPU and the weight that they have.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Norm {
    /// What the names of its kernels begin with.
    pub(crate) kernels: &'static str,
    pub(crate) eps: f64,
    pub(crate) zero_centred: bool,
    pub(crate) shape: NormShape,
    pub(crate) dtype: DType,
    pub(crate) weight: Weight,
    /// Matrices that the backward pass reads.
    pub(crate) arrays: u32,
    /// Whether the mean of rows is taken off.
    pub(crate) is_centred: bool,
}

impl Norm {
    /// Checks what every pass has.
    ///
    /// # Errors
    /// A weight of another shape, or rows longer than kernels count.
    pub(crate) fn checked(self) -> Result<Self> {
        self.shape.weights("weight", self.weight.length)?;
        if i32::try_from(self.shape.columns()).is_err() {
            return Err(Error::Columns32 { columns: self.shape.columns() });
        }
        Ok(self)
    }

    /// Loads the kernel of `pass`, so that it has only to be launched.
    ///
    /// # Errors
    /// No driver or GPU that will do, or partial sums that cannot be.
    ///
    /// # Safety
    /// `stream` is a `CUstream` of the calling thread's current context.
    pub(crate) unsafe fn load(&self, pass: Pass, stream: RawStream) -> Result<()> {
        // SAFETY: passed on from this function's contract.
        unsafe { self.ready(pass, stream) }.map(drop)
    }

    /// Bytes of a matrix.
    pub(crate) fn bytes(&self) -> usize {
        self.shape.elements() * self.dtype.size_bytes()
    }

    /// Rows of a group.
    pub(crate) fn group_rows(&self, sums: PartialSums) -> Result<usize> {
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

    /// Of how many rows that follow one another each `[D]` of `length` numbers is.
    pub(crate) fn rows_of_each(&self, length: usize) -> i64 {
        let count = length / self.shape.columns();
        self.shape.rows().checked_div(count).unwrap_or(0) as i64
    }

    /// What both passes have.
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
            eps: self.eps,
            weight_dtype: weight_dtype(self.weight.dtype),
            zero_centred: self.zero_centred.into(),
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
            Pass::Forward => ("forward", Plan::forward(rows, columns, element, limits)),
            Pass::Backward(PartialSums { groups, blocks }) => {
                let all = groups.saturating_mul(blocks);
                let (arrays, is_centred) = (self.arrays, self.is_centred);
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
    pub(crate) unsafe fn launch(
        &self,
        pass: Pass,
        stream: RawStream,
        arguments: Arguments,
    ) -> Result<()> {
        // SAFETY: passed on from this function's contract.
        unsafe { self.launch_with(pass, stream, arguments, |arguments| arguments) }
    }

    /// The same of a kernel that takes what `wrap` makes of arguments.
    ///
    /// # Errors
    /// As for [`launch`](Self::launch).
    ///
    /// # Safety
    /// As for [`launch`](Self::launch), of all pointers in what `wrap` makes.
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
            let bytes = self.shape.columns() * self.weight.dtype.size_bytes();
            plan = plan.with_ahead(bytes, 1 + u32::from(self.is_centred), limits);
        }
        let Plan { ctas, lanes, teams, adjacent, ahead, shared_bytes, .. } = plan;
        let extent = Extent { ctas, rows: 1, threads: plan.threads(), shared_bytes, cluster: None };
        let adjacent = adjacent.into();
        let arguments = wrap(Arguments { lanes, teams, adjacent, ahead, ..arguments });
        // SAFETY: passed on from this function's contract.
        unsafe { Driver::get()?.launch(kernel, extent, stream, &arguments) }
    }
}
