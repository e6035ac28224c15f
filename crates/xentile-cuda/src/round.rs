//! Sums in f32, rounded to the dtype that they are for.

mod arguments;

use arguments::Arguments;

use crate::blas::Matrix;
use crate::driver::{Driver, Extent, RawStream};
use crate::{Device, Result, library};

const THREADS: u32 = 256;
/// Elements of a thread, at most, and CTAs of a multiprocessor.
const PER_THREAD: usize = 8;
const CTAS: u32 = 8;
/// Rows of CTAs that a launch may have.
const GRID_ROWS: usize = 65_535;

/// Has `stream` write `sums`, in f32 and with no gaps, to `to`, of a 16-bit dtype.
///
/// # Errors
/// No driver or GPU that will do, or a failure of the driver.
///
/// # Safety
/// `stream` is a stream of the calling thread's current context, and both matrices are on its device,
/// where nothing else touches them until it has run what was launched here.
pub(crate) unsafe fn round(stream: RawStream, sums: Matrix, to: Matrix) -> Result<()> {
    // Without gaps, all is one row.
    let (rows, columns, stride) = if to.stride == to.columns {
        (1, to.rows * to.columns, to.rows * to.columns)
    } else {
        (to.rows, to.columns, to.stride)
    };
    if rows * columns == 0 {
        return Ok(());
    }
    let device = Device::current()?;
    // SAFETY: passed on from this function's contract.
    let kernel = unsafe { library::kept_kernel(&format!("round_{}", to.dtype), device, stream) }?;
    let pieces = columns.div_ceil(THREADS as usize * PER_THREAD);
    let most = device.limits().multiprocessors.max(1) * CTAS;
    let extent = Extent {
        ctas: u32::try_from(pieces).unwrap_or(most).clamp(1, most),
        rows: rows.min(GRID_ROWS) as u32,
        threads: THREADS,
        shared_bytes: 0,
        cluster: None,
    };
    let arguments = Arguments {
        from: sums.at.cast_const().cast(),
        to: to.at,
        rows: rows as i64,
        columns: columns as i64,
        stride: stride as i64,
    };
    // SAFETY: passed on from this function's contract.
    unsafe { Driver::get()?.launch(kernel, extent, stream, &arguments) }
}
