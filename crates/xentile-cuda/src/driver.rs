//! The functions of NVIDIA's driver that launch kernels, loaded from the driver's library at run time.

mod abi;

use std::ffi::{CStr, c_char, c_int, c_uchar, c_uint, c_void};
use std::mem::MaybeUninit;
use std::ptr::null_mut;
use std::sync::OnceLock;

use crate::{Error, Result};
use abi::{LaunchAttribute, LaunchConfig, NO_DEVICE, SUCCESS};
use xentile::DType;

pub(crate) use abi::TensorMap;

/// The oldest version of CUDA whose driver runs the embedded code: a driver runs code for its own major
/// version or an older one. Drivers before 12.8 also lack some of the functions below.
const NEEDED: i32 = {
    let compiled_by = match option_env!("XENTILE_CUDA_VERSION") {
        Some(version) => number(version) / 1000 * 1000,
        None => 0,
    };
    if compiled_by > 12_080 { compiled_by } else { 12_080 }
};

const LIBRARY: &str = "libcuda.so.1";

/// A device, by the driver's number.
pub(crate) type DeviceNumber = c_int;
type Code = c_int;

/// Declares the table of functions, and loads it.
macro_rules! functions {
    ($($field:ident = $symbol:ident($($type:ty),*);)*) => {
        /// The driver's functions.
        pub(crate) struct Driver {
            $($field: unsafe extern "C" fn($($type),*) -> Code,)*
        }

        impl Driver {
            /// # Safety
            /// `library` is NVIDIA's driver.
            unsafe fn load(library: &libloading::Library) -> Result<Self, libloading::Error> {
                Ok(Self {
                    // SAFETY: the types are those of cuda.h.
                    $($field: unsafe {
                        *library.get(concat!(stringify!($symbol), "\0").as_bytes())?
                    },)*
                })
            }
        }
    };
}

functions! {
    init = cuInit(c_uint);
    error_name = cuGetErrorName(Code, *mut *const c_char);
    error_string = cuGetErrorString(Code, *mut *const c_char);
    device_count = cuDeviceGetCount(*mut c_int);
    device_name = cuDeviceGetName(*mut c_char, c_int, DeviceNumber);
    device_attribute = cuDeviceGetAttribute(*mut c_int, c_uint, DeviceNumber);
    push_context = cuCtxPushCurrent_v2(Context);
    pop_context = cuCtxPopCurrent_v2(*mut Context);
    stream_context = cuStreamGetCtx(RawStream, *mut Context);
    context_device = cuCtxGetDevice(*mut DeviceNumber);
    load_library = cuLibraryLoadData(
        *mut Library, *const c_void, *mut c_void, *mut c_void, c_uint, *mut c_void, *mut c_void, c_uint
    );
    library_kernel = cuLibraryGetKernel(*mut Kernel, Library, *const c_char);
    kernel_function = cuKernelGetFunction(*mut Function, Kernel);
    kernel_attribute = cuKernelGetAttribute(*mut c_int, c_uint, Kernel, DeviceNumber);
    set_kernel_attribute = cuKernelSetAttribute(c_uint, c_int, Kernel, DeviceNumber);
    load_function = cuFuncLoad(Function);
    max_active_clusters = cuOccupancyMaxActiveClusters(*mut c_int, Kernel, *const LaunchConfig);
    copy = cuMemcpyDtoDAsync_v2(DeviceAddress, DeviceAddress, usize, RawStream);
    fill_bytes = cuMemsetD8Async(DeviceAddress, c_uchar, usize, RawStream);
    encode_tensor_map = cuTensorMapEncodeTiled(
        *mut TensorMap, c_uint, c_uint, *mut c_void, *const u64, *const u64, *const c_uint,
        *const c_uint, c_uint, c_uint, c_uint, c_uint
    );
    launch = cuLaunchKernelEx(*const LaunchConfig, Kernel, *mut *mut c_void, *mut *mut c_void);
}

macro_rules! handles {
    ($($(#[$doc:meta])* $name:ident;)*) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Copy, Debug)]
            #[repr(transparent)]
            pub(crate) struct $name(*mut c_void);

            // SAFETY: the driver takes its handles from any thread.
            unsafe impl Send for $name {}
            // SAFETY: as above.
            unsafe impl Sync for $name {}
        )*
    };
}

handles! {
    /// `CUlibrary`: code, independent of a context.
    Library;
    /// `CUkernel`: a kernel, independent of a context. The driver accepts it as a `CUfunction`, and takes the
    /// context from the stream.
    Kernel;
    /// `CUfunction`: a kernel in a context.
    Function;
    /// `CUcontext`.
    Context;
}

/// `CUdeviceptr`.
type DeviceAddress = u64;

/// `CUstream`, which the caller owns.
pub(crate) type RawStream = *mut c_void;

/// Attributes of a device.
#[derive(Clone, Copy)]
#[repr(u32)]
pub(crate) enum DeviceAttribute {
    Multiprocessors = abi::MULTIPROCESSORS,
    CapabilityMajor = abi::CAPABILITY_MAJOR,
    CapabilityMinor = abi::CAPABILITY_MINOR,
    SharedBytesPerBlock = abi::SHARED_BYTES_PER_BLOCK,
    Clusters = abi::CLUSTER_LAUNCH,
}

/// Attributes of a kernel.
#[derive(Clone, Copy)]
#[repr(u32)]
pub(crate) enum KernelAttribute {
    StaticSharedBytes = abi::STATIC_SHARED_BYTES,
    MaxDynamicSharedBytes = abi::MAX_DYNAMIC_SHARED_BYTES,
    WideClusters = abi::WIDE_CLUSTERS,
}

/// An attribute of a launch: its number and its values.
type Attribute = (c_uint, [c_uint; 3]);

/// The extents of a launch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extent {
    /// CTAs in a row of the grid.
    pub(crate) ctas: u32,
    /// Rows of the grid, 65535 at most.
    pub(crate) rows: u32,
    pub(crate) threads: u32,
    /// Dynamic shared memory of a CTA.
    pub(crate) shared_bytes: u32,
    /// CTAs of a cluster; none for kernels without clusters.
    pub(crate) cluster: Option<u32>,
}

impl Extent {
    /// Calls `body` with the launch configuration.
    fn with_config<R>(self, stream: RawStream, body: impl FnOnce(&LaunchConfig) -> R) -> R {
        self.with_attributes(stream, self.cluster_attribute().as_slice(), body)
    }

    fn cluster_attribute(self) -> Option<Attribute> {
        self.cluster.map(|ctas| (abi::CLUSTER_DIMENSION, [ctas, 1, 1]))
    }

    /// Calls `body` with the launch configuration and at most two attributes.
    fn with_attributes<R>(
        self,
        stream: RawStream,
        attributes: &[Attribute],
        body: impl FnOnce(&LaunchConfig) -> R,
    ) -> R {
        let mut all = [LaunchAttribute { id: 0, pad: [0; 4], value: [0; 16] }; 2];
        for (to, (id, values)) in all.iter_mut().zip(attributes) {
            to.id = *id;
            to.value[..3].copy_from_slice(values);
        }
        body(&LaunchConfig {
            gridDimX: self.ctas,
            gridDimY: self.rows,
            gridDimZ: 1,
            blockDimX: self.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: self.shared_bytes,
            hStream: stream,
            attrs: all.as_ptr(),
            numAttrs: attributes.len() as c_uint,
        })
    }
}

impl Driver {
    /// The driver, opened by the first call and then kept.
    ///
    /// # Errors
    /// The driver is missing or too old, or finds no GPU. Later calls return the same error.
    pub(crate) fn get() -> Result<&'static Self> {
        static DRIVER: OnceLock<Result<Driver>> = OnceLock::new();
        DRIVER.get_or_init(Self::open).as_ref().map_err(Clone::clone)
    }

    fn open() -> Result<Self> {
        let missing =
            |error: libloading::Error| Error::NoDriver { reason: reason(&error), needed: NEEDED };
        // SAFETY: the initialisers of NVIDIA's driver are trusted as the program is.
        let library = unsafe { libloading::Library::new(LIBRARY) }.map_err(missing)?;
        // Checked first, as an old driver may lack functions.
        let actual = driver_version(&library).map_err(missing)?;
        if actual < NEEDED {
            return Err(Error::DriverTooOld { actual, needed: NEEDED });
        }
        // SAFETY: it was found by the driver's name, and has its version.
        let driver = unsafe { Self::load(&library) }.map_err(missing)?;
        // Never unloaded, since the driver has threads.
        std::mem::forget(library);
        // SAFETY: no flags are defined.
        let code = unsafe { (driver.init)(0) };
        if code == NO_DEVICE {
            return Err(Error::NoDevice);
        }
        driver.check("cuInit", code)?;
        if driver.device_count()? == 0 { Err(Error::NoDevice) } else { Ok(driver) }
    }

    fn check(&self, function: &'static str, code: Code) -> Result<()> {
        if code == SUCCESS {
            return Ok(());
        }
        let text = |ask: unsafe extern "C" fn(Code, *mut *const c_char) -> Code| {
            let mut text = std::ptr::null();
            // SAFETY: a place for the text's address; the text lives as long as the driver.
            let known = unsafe { ask(code, &raw mut text) } == SUCCESS && !text.is_null();
            // SAFETY: as above.
            known.then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
        };
        let name = text(self.error_name).unwrap_or_else(|| format!("error {code}"));
        let words = text(self.error_string).unwrap_or_else(|| "the driver says no more".into());
        Err(Error::Driver { function, reason: format!("{name}, {words}") })
    }

    /// The number of devices.
    pub(crate) fn device_count(&self) -> Result<usize> {
        let mut count = 0;
        // SAFETY: a number to write.
        self.check("cuDeviceGetCount", unsafe { (self.device_count)(&raw mut count) })?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    pub(crate) fn device_name(&self, device: DeviceNumber) -> Result<String> {
        let mut name: [c_char; 256] = [0; 256];
        // SAFETY: the buffer has the number of bytes that is passed.
        let code = unsafe { (self.device_name)(name.as_mut_ptr(), 256, device) };
        self.check("cuDeviceGetName", code)?;
        name[255] = 0;
        // SAFETY: it ends with a zero, there if not before.
        Ok(unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned())
    }

    pub(crate) fn device_attribute(
        &self,
        device: DeviceNumber,
        attribute: DeviceAttribute,
    ) -> Result<i32> {
        let mut value = 0;
        // SAFETY: a number to write.
        let code = unsafe { (self.device_attribute)(&raw mut value, attribute as u32, device) };
        self.check("cuDeviceGetAttribute", code)?;
        Ok(value)
    }

    /// The device of the calling thread's current context. (A stream's device cannot be queried while the
    /// stream is captured into a graph.)
    pub(crate) fn current_device(&self) -> Result<DeviceNumber> {
        let mut device = 0;
        // SAFETY: a number to write.
        let code = unsafe { (self.context_device)(&raw mut device) };
        self.check("cuCtxGetDevice", code)?;
        Ok(device)
    }

    /// Calls `body` with the context of `stream` current.
    ///
    /// # Safety
    /// `stream` is a stream.
    pub(crate) unsafe fn in_context_of<R>(
        &self,
        stream: RawStream,
        body: impl FnOnce() -> Result<R>,
    ) -> Result<R> {
        let mut context = Context(null_mut());
        // SAFETY: passed on from this function's contract.
        let code = unsafe { (self.stream_context)(stream, &raw mut context) };
        self.check("cuStreamGetCtx", code)?;
        // SAFETY: the context lives while its stream does.
        self.check("cuCtxPushCurrent", unsafe { (self.push_context)(context) })?;
        let result = body();
        // SAFETY: pops the context that was pushed.
        let code = unsafe { (self.pop_context)(&raw mut context) };
        self.check("cuCtxPopCurrent", code)?;
        result
    }

    /// Loads code for all devices.
    ///
    /// # Safety
    /// `code` is a fat binary.
    pub(crate) unsafe fn load_library(&self, code: &'static [u8]) -> Result<Library> {
        let mut library = MaybeUninit::uninit();
        let (code, none) = (code.as_ptr().cast(), null_mut());
        // SAFETY: passed on from this function's contract; there are no options.
        let code = unsafe {
            (self.load_library)(library.as_mut_ptr(), code, none, none, 0, none, none, 0)
        };
        self.check("cuLibraryLoadData", code)?;
        // SAFETY: written, since the call succeeded.
        Ok(unsafe { library.assume_init() })
    }

    pub(crate) fn kernel(&self, library: Library, name: &CStr) -> Result<Kernel> {
        let mut kernel = MaybeUninit::uninit();
        // SAFETY: the library is loaded for good.
        let code = unsafe { (self.library_kernel)(kernel.as_mut_ptr(), library, name.as_ptr()) };
        self.check("cuLibraryGetKernel", code)?;
        // SAFETY: written, since the call succeeded.
        Ok(unsafe { kernel.assume_init() })
    }

    /// Loads the kernel into the current context. A launch must not do this while it is captured.
    pub(crate) fn load_kernel(&self, kernel: Kernel) -> Result<()> {
        let mut function = MaybeUninit::uninit();
        // SAFETY: the kernel's library is loaded for good.
        let code = unsafe { (self.kernel_function)(function.as_mut_ptr(), kernel) };
        self.check("cuKernelGetFunction", code)?;
        // SAFETY: written, since the call succeeded.
        self.check("cuFuncLoad", unsafe { (self.load_function)(function.assume_init()) })
    }

    pub(crate) fn kernel_attribute(
        &self,
        kernel: Kernel,
        device: DeviceNumber,
        attribute: KernelAttribute,
    ) -> Result<i32> {
        let mut value = 0;
        // SAFETY: a number to write.
        let code =
            unsafe { (self.kernel_attribute)(&raw mut value, attribute as u32, kernel, device) };
        self.check("cuKernelGetAttribute", code)?;
        Ok(value)
    }

    pub(crate) fn set_kernel_attribute(
        &self,
        kernel: Kernel,
        device: DeviceNumber,
        attribute: KernelAttribute,
        value: i32,
    ) -> Result<()> {
        // SAFETY: the kernel's library is loaded for good.
        let code = unsafe { (self.set_kernel_attribute)(attribute as u32, value, kernel, device) };
        self.check("cuKernelSetAttribute", code)
    }

    /// The number of clusters of `extent` that the device of `stream` runs at once.
    ///
    /// # Safety
    /// `stream` is a stream.
    pub(crate) unsafe fn max_active_clusters(
        &self,
        kernel: Kernel,
        extent: Extent,
        stream: RawStream,
    ) -> Result<u32> {
        let mut clusters = 0;
        let code = extent.with_config(stream, |config| {
            // SAFETY: passed on from this function's contract.
            unsafe { (self.max_active_clusters)(&raw mut clusters, kernel, config) }
        });
        self.check("cuOccupancyMaxActiveClusters", code)?;
        Ok(u32::try_from(clusters).unwrap_or(0))
    }

    /// Enqueues a write of `bytes` zeros on `stream`.
    ///
    /// # Safety
    /// As for [`copy`](Self::copy).
    pub(crate) unsafe fn clear(
        &self,
        stream: RawStream,
        at: *mut c_void,
        bytes: usize,
    ) -> Result<()> {
        // SAFETY: passed on from this function's contract.
        unsafe { self.fill(stream, at, 0, bytes) }
    }

    /// Enqueues a write of `byte` to `bytes` bytes on `stream`.
    ///
    /// # Safety
    /// As for [`copy`](Self::copy).
    pub(crate) unsafe fn fill(
        &self,
        stream: RawStream,
        at: *mut c_void,
        byte: u8,
        bytes: usize,
    ) -> Result<()> {
        let address = at.expose_provenance() as DeviceAddress;
        // SAFETY: passed on from this function's contract.
        let code = unsafe { (self.fill_bytes)(address, byte, bytes, stream) };
        self.check("cuMemsetD8Async", code)
    }

    /// Enqueues a copy of `bytes` bytes on `stream`.
    ///
    /// # Safety
    /// `stream` is a stream of the calling thread's current context, and both arrays are on its device,
    /// apart, and touched by nothing else until the copy is made.
    pub(crate) unsafe fn copy(
        &self,
        stream: RawStream,
        to: *mut c_void,
        from: *const c_void,
        bytes: usize,
    ) -> Result<()> {
        let address = |pointer: *const c_void| pointer.expose_provenance() as DeviceAddress;
        // SAFETY: passed on from this function's contract.
        let code = unsafe { (self.copy)(address(to), address(from), bytes, stream) };
        self.check("cuMemcpyDtoDAsync", code)
    }

    /// The TMA descriptor of a matrix at `at`, of `rows` and `columns` with `stride` elements from row to
    /// row, for boxes of `boxed` columns and rows. Boxes are 128 bytes wide, and swizzled in shared memory.
    pub(crate) fn tensor_map(
        &self,
        dtype: DType,
        at: *const c_void,
        (rows, columns): (usize, usize),
        stride: usize,
        (width, height): (c_uint, c_uint),
    ) -> Result<TensorMap> {
        self.tensor_map_of(dtype, at, [columns, rows], [1, stride], [width, height])
    }

    /// The TMA descriptor of a tensor. Extents and `strides`, in elements, are in order of increasing stride;
    /// the first stride is 1.
    pub(crate) fn tensor_map_of<const RANK: usize>(
        &self,
        dtype: DType,
        at: *const c_void,
        extents: [usize; RANK],
        strides: [usize; RANK],
        boxed: [c_uint; RANK],
    ) -> Result<TensorMap> {
        let dtype_code = match dtype {
            DType::F32 => abi::TENSOR_OF_F32,
            DType::F16 => abi::TENSOR_OF_F16,
            DType::Bf16 => abi::TENSOR_OF_BF16,
        };
        let extents = extents.map(|extent| extent as u64);
        let strides = strides.map(|stride| (stride * dtype.size_bytes()) as u64);
        let steps = [1; RANK];
        let mut map = TensorMap::none();
        // SAFETY: as many extents, boxes and steps as the rank that is passed, strides of all but the first, and the
        // rest as cuda.h has it. The address is only kept.
        let code = unsafe {
            (self.encode_tensor_map)(
                &raw mut map,
                dtype_code,
                RANK as c_uint,
                at.cast_mut(),
                extents.as_ptr(),
                strides[1..].as_ptr(),
                boxed.as_ptr(),
                steps.as_ptr(),
                abi::NOT_INTERLEAVED,
                abi::SWIZZLE_128_BYTES,
                abi::PROMOTION_256_BYTES,
                abi::FILL_WITH_ZEROS,
            )
        };
        self.check("cuTensorMapEncodeTiled", code)?;
        Ok(map)
    }

    /// Launches a kernel, whose one parameter is a struct, on `stream`.
    ///
    /// # Safety
    /// `stream` is a stream, and `arguments` what the kernel takes: arrays on the stream's device, as
    /// long as the kernel needs, which nothing else touches until the kernel has run.
    pub(crate) unsafe fn launch<A>(
        &self,
        kernel: Kernel,
        extent: Extent,
        stream: RawStream,
        arguments: &A,
    ) -> Result<()> {
        // SAFETY: passed on from this function's contract.
        unsafe { self.launch_with(None, kernel, extent, stream, arguments) }
    }

    /// Launches a kernel that may start before the previous kernel ends, and waits for it with
    /// `griddepcontrol.wait`; needs compute capability 9.0.
    ///
    /// # Safety
    /// As for [`launch`](Self::launch).
    pub(crate) unsafe fn launch_early<A>(
        &self,
        kernel: Kernel,
        extent: Extent,
        stream: RawStream,
        arguments: &A,
    ) -> Result<()> {
        let early = Some((abi::PROGRAMMATIC_SERIALIZATION, [1, 0, 0]));
        // SAFETY: passed on from this function's contract.
        unsafe { self.launch_with(early, kernel, extent, stream, arguments) }
    }

    /// Launches a kernel all of whose CTAs run at once; where there is no room for them it fails.
    ///
    /// # Safety
    /// As for [`launch`](Self::launch).
    pub(crate) unsafe fn launch_cooperative<A>(
        &self,
        kernel: Kernel,
        extent: Extent,
        stream: RawStream,
        arguments: &A,
    ) -> Result<()> {
        let cooperative = Some((abi::COOPERATIVE, [1, 0, 0]));
        // SAFETY: passed on from this function's contract.
        unsafe { self.launch_with(cooperative, kernel, extent, stream, arguments) }
    }

    /// Launches a kernel with the extent's clusters and one more attribute.
    ///
    /// # Safety
    /// As for [`launch`](Self::launch).
    unsafe fn launch_with<A>(
        &self,
        attribute: Option<Attribute>,
        kernel: Kernel,
        extent: Extent,
        stream: RawStream,
        arguments: &A,
    ) -> Result<()> {
        let mut parameters = [std::ptr::from_ref(arguments).cast_mut().cast::<c_void>()];
        let attributes: Vec<_> = extent.cluster_attribute().into_iter().chain(attribute).collect();
        let code = extent.with_attributes(stream, &attributes, |config| {
            // SAFETY: passed on from this function's contract. The driver copies the struct.
            unsafe { (self.launch)(config, kernel, parameters.as_mut_ptr(), null_mut()) }
        });
        self.check("cuLaunchKernelEx", code)
    }
}

impl TensorMap {
    /// An empty descriptor.
    pub(crate) fn none() -> Self {
        Self { opaque: [0; 16] }
    }
}

/// The CUDA version of the driver.
fn driver_version(library: &libloading::Library) -> Result<i32, libloading::Error> {
    type Ask = unsafe extern "C" fn(*mut c_int) -> Code;
    let mut version = 0;
    // SAFETY: the type is that of cuda.h, and there is a number to write.
    let code = unsafe { library.get::<Ask>(b"cuDriverGetVersion\0")?(&raw mut version) };
    Ok(if code == SUCCESS { version } else { 0 })
}

/// The text of an error and of its cause, the loader's message.
pub(crate) fn reason(error: &libloading::Error) -> String {
    match std::error::Error::source(error) {
        Some(cause) => cause.to_string(),
        None => error.to_string(),
    }
}

/// Parses a decimal number.
const fn number(digits: &str) -> i32 {
    let (mut number, mut index) = (0, 0);
    while index < digits.len() {
        number = number * 10 + (digits.as_bytes()[index] - b'0') as i32;
        index += 1;
    }
    number
}
