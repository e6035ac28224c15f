//! The kernels that the build script compiled, in this library.

use std::ffi::CString;
use std::sync::OnceLock;

use crate::driver::{Driver, Kernel, KernelAttribute, Library, RawStream};
use crate::{Device, Result};

/// Aligned as the driver reads it.
#[repr(C, align(64))]
struct Aligned<T: ?Sized>(T);

static CODE: &Aligned<[u8]> =
    &Aligned(*include_bytes!(concat!(env!("OUT_DIR"), "/kernels.fatbin")));

/// Bytes of the embedded code, for all architectures.
#[must_use]
pub fn code_bytes() -> usize {
    CODE.0.len()
}

/// The kernel `name`, loaded into the context of `stream`, with leave to take all the dynamic shared
/// memory that `device` gives a CTA. Slow: callers keep what it returns.
///
/// # Safety
/// `stream` is a stream of `device`.
pub(crate) unsafe fn kernel(name: &str, device: &Device, stream: RawStream) -> Result<Kernel> {
    static LIBRARY: OnceLock<Result<Library>> = OnceLock::new();
    let driver = Driver::get()?;
    // SAFETY: the build script made it one.
    let library = LIBRARY.get_or_init(|| unsafe { driver.load_library(&CODE.0) }).clone()?;
    let name = CString::new(name).unwrap_or_default();
    let kernel = driver.kernel(library, &name)?;
    // SAFETY: passed on from this function's contract.
    unsafe { driver.in_context_of(stream, || driver.load_kernel(kernel)) }?;
    let all = device.limits().shared_bytes_per_block.cast_signed();
    let fixed =
        driver.kernel_attribute(kernel, device.number(), KernelAttribute::StaticSharedBytes)?;
    let most = KernelAttribute::MaxDynamicSharedBytes;
    driver.set_kernel_attribute(kernel, device.number(), most, all - fixed)?;
    Ok(kernel)
}
