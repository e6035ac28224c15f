//! The kernels that the build script compiled, in this library.

use std::ffi::CString;
use std::sync::OnceLock;

use crate::cache::Cache;
use crate::driver::{DeviceNumber, Driver, Kernel, KernelAttribute, Library, RawStream};
use crate::{Device, Error, Result};

/// The embedded code, for all architectures.
#[cfg(feature = "kernels")]
const CODE: Option<&[u8]> = {
    /// Aligned as the driver reads it.
    #[repr(C, align(64))]
    struct Aligned<T: ?Sized>(T);

    static EMBEDDED: &Aligned<[u8]> =
        &Aligned(*include_bytes!(concat!(env!("OUT_DIR"), "/kernels.fatbin")));
    Some(&EMBEDDED.0)
};
#[cfg(not(feature = "kernels"))]
const CODE: Option<&[u8]> = None;

/// The code that the build script compiled.
pub(crate) fn code() -> Result<&'static [u8]> {
    CODE.ok_or(Error::NoKernels)
}

/// The kernel `name`, loaded into the context of `stream`, with leave to take all the dynamic shared
/// memory that `device` gives a CTA. Slow: callers keep what it returns.
///
/// # Safety
/// `stream` is a stream of `device`.
pub(crate) unsafe fn kernel(name: &str, device: &Device, stream: RawStream) -> Result<Kernel> {
    static LIBRARY: OnceLock<Result<Library>> = OnceLock::new();
    let (driver, code) = (Driver::get()?, code()?);
    // SAFETY: the build script made it one.
    let library = LIBRARY.get_or_init(|| unsafe { driver.load_library(code) }).clone()?;
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

/// Lets `kernel` be launched in clusters of more CTAs than every device has room for.
pub(crate) fn allow_wide_clusters(kernel: Kernel, device: &Device) -> Result<()> {
    let wide = KernelAttribute::WideClusters;
    Driver::get()?.set_kernel_attribute(kernel, device.number(), wide, 1)
}

/// [`kernel`], kept from its first call on.
///
/// # Safety
/// As for [`kernel`].
pub(crate) unsafe fn kept_kernel(name: &str, device: &Device, stream: RawStream) -> Result<Kernel> {
    static KEPT: Cache<(DeviceNumber, String), Kernel> = Cache::new();
    let key = (device.number(), name.to_owned());
    // SAFETY: passed on from this function's contract.
    KEPT.get(key, |_| unsafe { kernel(name, device, stream) })
}
