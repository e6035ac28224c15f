//! xentile's kernels as XLA custom calls, in a plain C library: `libxentile_xla.so`.
//!
//! `include/xentile_xla.h` is its face: functions that tell of the library, the table of [`Target`]s
//! to register with XLA, and the handlers themselves. `docs/reference/targets.md` says what each target
//! takes and gives.
//!
//! An operation is a file with what every platform shares, such as the attributes and the checks of
//! shapes, and below it a file a platform with the handlers and their list of targets. A new one is
//! a new file and a line in the table's list.

mod activation;
mod arguments;
mod causal_conv1d;
mod cpu;
mod cross_entropy;
#[cfg(feature = "cuda")]
mod cuda;
pub mod declaration;
mod decode_step;
mod dtype;
mod flash_attention;
mod fp8_quantize;
pub mod json;
mod kl_divergence;
mod kv_cache;
mod linear;
mod linear_attention;
mod linear_cross_entropy;
mod norm;
mod optimizers;
mod rope;
mod sample;
mod scale;
mod shapes;
mod table;
mod target;

use std::ffi::{CStr, CString, c_char};
use std::sync::LazyLock;

use xentile::{Implementation, tuned_implementation, tuned_tile};
use xentile_cpu::Isa;
use xla_ffi::abi;

pub use table::{TABLE_VERSION, declarations, targets};
pub use target::Target;

/// The version of this library, ending with a null.
#[unsafe(no_mangle)]
pub extern "C" fn xentile_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    VERSION.as_ptr().cast()
}

/// The version of the table's layout and of what the targets take: [`TABLE_VERSION`].
#[unsafe(no_mangle)]
pub extern "C" fn xentile_table_version() -> u32 {
    TABLE_VERSION
}

/// The version of XLA's FFI that the handlers answer; a runtime that is older refuses them.
///
/// # Safety
/// Each pointer is null, which asks for nothing, or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn xentile_ffi_version(major: *mut i32, minor: *mut i32) {
    // SAFETY: passed on from this function's contract.
    unsafe {
        write(major, abi::API_MAJOR);
        write(minor, abi::API_MINOR);
    }
}

/// The table of targets, and their number in `count`. It lives as long as the library.
///
/// # Safety
/// `count` is null, which asks for nothing, or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn xentile_targets(count: *mut usize) -> *const Target {
    let targets = targets();
    // SAFETY: passed on from this function's contract.
    unsafe { write(count, targets.len()) };
    targets.as_ptr()
}

/// What every target takes and gives, as the JSON text that [`mod@json`] describes, ending with a
/// null. It has targets that this library has no handlers for, too.
#[unsafe(no_mangle)]
pub extern "C" fn xentile_declarations() -> *const c_char {
    static TEXT: LazyLock<CString> = LazyLock::new(|| {
        CString::new(json::declarations_json()).expect("texts of declarations have no null")
    });
    CStr::as_ptr(&TEXT)
}

/// The name of the instruction set that the kernels on this processor use, ending with a null.
#[unsafe(no_mangle)]
pub extern "C" fn xentile_cpu_isa() -> *const c_char {
    static NAME: LazyLock<CString> =
        LazyLock::new(|| CString::new(Isa::detect().name()).unwrap_or_default());
    CStr::as_ptr(&NAME)
}

/// Writes the tile that `table` ("linear_cross_entropy.cpu") has tuned for `dtype` ("bf16") and `vocab`
/// columns, and returns 1; 0 where there is none.
///
/// # Safety
/// `table` and `dtype` are texts that end with a null; each other pointer is null, which asks for
/// nothing, or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn xentile_tuned_tile(
    table: *const c_char,
    dtype: *const c_char,
    vocab: usize,
    time_block: *mut usize,
    block_size: *mut usize,
) -> i32 {
    // SAFETY: passed on from this function's contract.
    let [table, dtype] = [table, dtype].map(|text| unsafe { CStr::from_ptr(text) }.to_str());
    let tile = table.ok().zip(dtype.ok().and_then(|dtype| dtype.parse().ok()));
    let tile = tile.and_then(|(table, dtype)| tuned_tile(table, dtype, vocab).ok().flatten());
    let Some(tile) = tile else { return 0 };
    // SAFETY: passed on from this function's contract.
    unsafe {
        write(time_block, tile.time_block());
        write(block_size, tile.block_size());
    }
    1
}

/// Whether XLA's own program was measured to be faster than the kernel of `operation` ("activation") in
/// its `variant` ("relu single", or "" where it has none) on `backend` ("cuda"): 1, else 0.
///
/// # Safety
/// The three are texts that end with a null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn xentile_prefers_xla(
    backend: *const c_char,
    operation: *const c_char,
    variant: *const c_char,
) -> i32 {
    let texts = [backend, operation, variant].map(|text| {
        // SAFETY: passed on from this function's contract.
        unsafe { CStr::from_ptr(text) }.to_str().unwrap_or_default()
    });
    let [backend, operation, variant] = texts;
    i32::from(tuned_implementation(backend, operation, variant) == Implementation::Xla)
}

/// Writes the plan that `request` asks for, as JSON that ends with a null, to the `size` bytes at
/// `answer` if it fits, and returns its length without the null. `include/xentile_xla.h` documents the
/// keys of both.
///
/// # Safety
/// `request` is a text that ends with a null; `size` bytes at `answer` are valid for writes, or `size`
/// is 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn xentile_plan(
    request: *const c_char,
    answer: *mut c_char,
    size: usize,
) -> usize {
    // SAFETY: passed on from this function's contract.
    let request = unsafe { CStr::from_ptr(request) }.to_str().unwrap_or_default();
    let text = CString::new(linear_cross_entropy::plan::answer(request)).unwrap_or_default();
    let bytes = text.as_bytes_with_nul();
    if bytes.len() <= size {
        // SAFETY: passed on from this function's contract; the text is new memory.
        unsafe { answer.copy_from_nonoverlapping(bytes.as_ptr().cast(), bytes.len()) };
    }
    bytes.len() - 1
}

/// # Safety
/// `to` is null or valid for a write.
unsafe fn write<T>(to: *mut T, value: T) {
    if !to.is_null() {
        // SAFETY: passed on from this function's contract.
        unsafe { to.write(value) };
    }
}
