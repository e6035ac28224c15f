//! `x * factor` with one factor for each row: what is left of a fused backward pass when the
//! cotangent of the loss comes to be known.

mod arguments;

use std::ffi::c_void;

use arguments::Arguments;
use xentile::DType;

use crate::driver::{Driver, Extent, Kernel, RawStream};
use crate::{Device, Result, check_places, library};

const THREADS: u32 = 256;
/// Vectors of 16 bytes for each thread that is started, and CTAs on each multiprocessor at most.
const VECTORS: usize = 4;
const CTAS: u32 = 8;

/// `x` `[rows, columns]` and a factor for each row, on a GPU.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    /// The dtype of `x`.
    pub dtype: DType,
    /// Rows, each with its factor.
    pub rows: usize,
    /// Columns.
    pub columns: usize,
}

impl Scale {
    /// Loads the kernel, so that [`run`](Self::run) has only to launch it.
    ///
    /// # Errors
    /// No driver or GPU that will do.
    ///
    /// # Safety
    /// `stream` is a `CUstream` of the calling thread's current context.
    pub unsafe fn load(&self, stream: *mut c_void) -> Result<()> {
        // SAFETY: passed on from this function's contract.
        unsafe { self.ready(stream) }.map(drop)
    }

    /// Has `stream` write `x` times the factors `[rows]` in f32, rounded to the dtype, to `scaled`,
    /// which may be `x`: then rows whose factor is exactly 1 are not touched.
    ///
    /// # Errors
    /// No driver or GPU that will do, arrays that begin at no multiple of 16 or overlap in part, a
    /// failure of the driver.
    ///
    /// # Safety
    /// `stream` is a `CUstream` of the calling thread's current context, and the pointers lead to arrays of these shapes on its device, which
    /// nothing else touches until it has run what was launched here.
    pub unsafe fn run(
        &self,
        stream: *mut c_void,
        x: *const c_void,
        factors: *const f32,
        scaled: *mut c_void,
    ) -> Result<()> {
        let bytes = self.rows * self.columns * self.dtype.size_bytes();
        if bytes == 0 {
            return Ok(());
        }
        check_places(("x", x), ("scaled", scaled), bytes)?;
        // SAFETY: passed on from this function's contract.
        let (kernel, device) = unsafe { self.ready(stream) }?;
        let share = 16 * THREADS as usize * VECTORS;
        let most = device.limits().multiprocessors * CTAS;
        let ctas = u32::try_from(bytes.div_ceil(share)).unwrap_or(most).clamp(1, most.max(1));
        let extent = Extent { ctas, rows: 1, threads: THREADS, shared_bytes: 0, cluster: None };
        let (rows, columns) = (self.rows as i64, self.columns as i64);
        let arguments = Arguments { x, factors, scaled, rows, columns };
        // SAFETY: passed on from this function's contract.
        unsafe { Driver::get()?.launch(kernel, extent, stream, &arguments) }
    }

    /// # Safety
    /// `stream` is a `CUstream` of the calling thread's current context.
    unsafe fn ready(&self, stream: RawStream) -> Result<(Kernel, &'static Device)> {
        let device = Device::current()?;
        // SAFETY: passed on from this function's contract.
        let kernel =
            unsafe { library::kept_kernel(&format!("scale_{}", self.dtype), device, stream) }?;
        Ok((kernel, device))
    }
}
