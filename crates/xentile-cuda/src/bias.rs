//! The gradient of a bias: what dlogits of all tokens, or the unnormalised softmax times their factors,
//! add up to, a column each; and rows of a bias, for products to add to.

mod arguments;

use std::ffi::c_void;
use std::ptr::null;

use arguments::Arguments;
use xentile::DType;

use crate::blas::{Matrix, Workspace};
use crate::driver::{Driver, Extent, RawStream};
use crate::{Device, Result, check_alignment, library};

/// Bytes of a row that a CTA has: a vector of 16 for each of 32 lanes.
const STRIP_BYTES: usize = 512;
/// CTAs of a multiprocessor.
const CTAS: usize = 8;
/// Rows that a part has at least.
const LEAST_ROWS: usize = 64;
/// Bytes that rows of sums of a part are a multiple of.
const VECTOR_BYTES: usize = 16;

/// Has `stream` write the sums of `matrix` over its rows to `to`, a number for each column, or add
/// them to what is there. Rows lie whole vectors apart; where `factors` are not null, each counts times
/// the second of four numbers in f32.
///
/// `workspace` has sums of parts of the rows, as far as it goes.
///
/// # Errors
/// A matrix that begins at no multiple of 16, no driver or GPU that will do, or a failure of the
/// driver.
///
/// # Safety
/// `stream` is a stream of the calling thread's current context; the matrix, `to` and `workspace` are on
/// its device, where nothing else touches them until it has run what was launched here.
pub(crate) unsafe fn sum_columns(
    stream: RawStream,
    (matrix, factors): (Matrix, *const c_void),
    to: *mut f32,
    adds: bool,
    workspace: Workspace,
) -> Result<()> {
    check_alignment("dlogits", matrix.at)?;
    let Matrix { rows, columns, .. } = matrix;
    if rows == 0 || columns == 0 {
        return Ok(());
    }
    let device = Device::current()?;
    let parts = parts(&matrix, device.limits().multiprocessors, workspace.bytes);
    // SAFETY: passed on from this function's contract.
    unsafe {
        if parts == 1 {
            return launch_sums(device, stream, (matrix, factors), (to, columns), 1, adds);
        }
        let sums = Matrix {
            stride: stride(columns),
            ..Matrix::new(workspace.at, DType::F32, parts, columns)
        };
        let place = (sums.at.cast(), sums.stride);
        launch_sums(device, stream, (matrix, factors), place, parts, false)?;
        launch_sums(device, stream, (sums, null()), (to, columns), 1, adds)
    }
}

/// Has `stream` write `bias`, a number for each column, to every row of `to`, of f32.
///
/// # Errors
/// No driver or GPU that will do, or a failure of the driver.
///
/// # Safety
/// As for [`sum_columns`].
pub(crate) unsafe fn write_rows(stream: RawStream, bias: *const f32, to: Matrix) -> Result<()> {
    assert_eq!(to.dtype, DType::F32, "what a bias is added to is in f32");
    let Matrix { rows, columns, .. } = to;
    if rows == 0 || columns == 0 {
        return Ok(());
    }
    let device = Device::current()?;
    let ctas = columns.div_ceil(32 * arguments::WARPS as usize);
    let grid_rows = (device.limits().multiprocessors as usize * CTAS).div_ceil(ctas).min(rows);
    let arguments = Arguments {
        from: bias.cast(),
        factors: null(),
        to: to.at.cast(),
        rows: rows as i64,
        columns: columns as i64,
        stride: 0,
        to_stride: to.stride as i64,
        adds: 0,
    };
    // SAFETY: passed on from this function's contract.
    unsafe { launch(device, stream, "bias_rows", [ctas, grid_rows], &arguments) }
}

/// Parts that rows are cut into: as many as keep the device busy, and have room.
fn parts(matrix: &Matrix, multiprocessors: u32, room: usize) -> usize {
    let wanted = (multiprocessors as usize * CTAS).div_ceil(strips(matrix));
    let most = room / (4 * stride(matrix.columns));
    wanted.min(matrix.rows / LEAST_ROWS).min(most).max(1)
}

/// CTAs that have a column each.
fn strips(matrix: &Matrix) -> usize {
    (matrix.columns * matrix.dtype.size_bytes()).div_ceil(STRIP_BYTES)
}

/// Elements from one part's sums to the next.
fn stride(columns: usize) -> usize {
    columns.next_multiple_of(VECTOR_BYTES / 4)
}

/// # Safety
/// As for [`sum_columns`].
unsafe fn launch_sums(
    device: &Device,
    stream: RawStream,
    (matrix, factors): (Matrix, *const c_void),
    (to, to_stride): (*mut f32, usize),
    parts: usize,
    adds: bool,
) -> Result<()> {
    let Matrix { at, dtype, rows, columns, stride } = matrix;
    let arguments = Arguments {
        from: at.cast_const(),
        factors,
        to,
        rows: rows as i64,
        columns: columns as i64,
        stride: stride as i64,
        to_stride: to_stride as i64,
        adds: u32::from(adds),
    };
    let name = format!("bias_sums_{dtype}");
    // SAFETY: passed on from this function's contract.
    unsafe { launch(device, stream, &name, [strips(&matrix), parts], &arguments) }
}

/// # Safety
/// As for [`sum_columns`].
unsafe fn launch(
    device: &Device,
    stream: RawStream,
    name: &str,
    grid: [usize; 2],
    arguments: &Arguments,
) -> Result<()> {
    let [ctas, rows] = grid.map(|count| u32::try_from(count).unwrap_or(u32::MAX));
    let threads = 32 * arguments::WARPS;
    let extent = Extent { ctas, rows, threads, shared_bytes: 0, cluster: None };
    // SAFETY: passed on from this function's contract.
    unsafe {
        let kernel = library::kept_kernel(name, device, stream)?;
        Driver::get()?.launch(kernel, extent, stream, arguments)
    }
}

#[cfg(test)]
mod tests {
    use std::ptr::null_mut;

    use super::*;

    #[test]
    fn rows_are_cut_where_columns_are_few_and_there_is_room() {
        let parts_of = |rows, columns, room| {
            parts(&Matrix::new(null_mut(), DType::Bf16, rows, columns), 132, room)
        };
        assert_eq!(parts_of(8192, 128_256, 4 << 20), 3);
        assert_eq!(parts_of(8192, 1024, 4 << 20), 128);
        assert_eq!(parts_of(8192, 1024, 10 * 4096 + 1), 10);
        assert_eq!(parts_of(8192, 1024, 0), 1);
        assert_eq!(parts_of(1, 7, 4 << 20), 1);
    }
}
