//! A running plug-in.

use std::{fmt, ptr::NonNull, sync::Arc};

use crate::{
    Buffer, CompileOptions, DType, Device, Element, Error, Event, LoadedExecutable, Place, Plugin,
    Program, Result, Topology, Value,
    abi::{self, Call},
    device, layout, raw,
    raw_client::{RawClient, Shared},
    value,
};

/// A plug-in at work on its devices. Copies are the same client, which shuts down when the last of
/// them, and all that was made with it, is gone.
#[derive(Clone)]
pub struct Client(pub(crate) Shared);

/// A value that stays in its place. Unlike a box it may be moved while it is borrowed.
struct Owner<O>(NonNull<O>);

// SAFETY: it owns the value, as a box does.
unsafe impl<O: Send> Send for Owner<O> {}

impl<O> Owner<O> {
    fn new(owner: O) -> Self {
        Self(NonNull::from(Box::leak(Box::new(owner))))
    }

    /// # Safety
    /// `'o` ends before the owner is dropped.
    unsafe fn get<'o>(&self) -> &'o O {
        // SAFETY: passed on from this function's contract.
        unsafe { self.0.as_ref() }
    }
}

impl<O> Drop for Owner<O> {
    fn drop(&mut self) {
        // SAFETY: it came from a box, and goes nowhere else.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

impl Client {
    /// Starts a client. The options are the plug-in's own: `cpu_device_count` of the CPU,
    /// `memory_fraction`, `preallocate` and `visible_devices` of GPUs.
    ///
    /// # Errors
    /// The plug-in reports one, for instance that there is no such device.
    pub fn new(plugin: Plugin, options: &[(&str, Value)]) -> Result<Self> {
        let encoded = value::encode(options)?;
        // SAFETY: the options live for the call.
        let out = unsafe {
            plugin.call::<abi::ClientCreate>(|args| {
                args.create_options = encoded.as_ptr();
                args.num_options = encoded.len();
            })
        }?;
        if out.client.is_null() {
            return Err(Error::malformed(abi::ClientCreate::FUNCTION, "no client"));
        }
        Ok(Self(Arc::new(RawClient { plugin, raw: out.client })))
    }

    /// The plug-in.
    #[must_use]
    pub fn plugin(&self) -> Plugin {
        self.0.plugin
    }

    /// `cpu`, `cuda`, `tpu`.
    ///
    /// # Errors
    /// The plug-in reports one.
    pub fn platform_name(&self) -> Result<String> {
        // SAFETY: the client is alive, and so is the text.
        unsafe {
            let out = self.call::<abi::ClientPlatformName>(|args| args.client = self.0.raw)?;
            Ok(raw::text(out.platform_name, out.platform_name_size))
        }
    }

    /// The version of what is below: CUDA, libtpu, the processor.
    ///
    /// # Errors
    /// The plug-in reports one.
    pub fn platform_version(&self) -> Result<String> {
        // SAFETY: the client is alive, and so is the text.
        unsafe {
            let out = self.call::<abi::ClientPlatformVersion>(|args| args.client = self.0.raw)?;
            Ok(raw::text(out.platform_version, out.platform_version_size))
        }
    }

    /// Which of several processes this is; 0 where there is one.
    ///
    /// # Errors
    /// The plug-in reports one.
    pub fn process_index(&self) -> Result<i32> {
        // SAFETY: the client is alive.
        let out = unsafe { self.call::<abi::ClientProcessIndex>(|args| args.client = self.0.raw) }?;
        Ok(out.process_index)
    }

    /// Every device, those of other processes included.
    ///
    /// # Errors
    /// The plug-in reports one.
    pub fn devices(&self) -> Result<Vec<Device>> {
        // SAFETY: the client is alive, and so is the list.
        unsafe {
            let out = self.call::<abi::ClientDevices>(|args| args.client = self.0.raw)?;
            Ok(Device::list(&self.0, out.devices, out.num_devices))
        }
    }

    /// The devices that this process can use.
    ///
    /// # Errors
    /// The plug-in reports one.
    pub fn addressable_devices(&self) -> Result<Vec<Device>> {
        Device::addressable(&self.0)
    }

    /// What the client runs on, for ahead-of-time compilation.
    ///
    /// # Errors
    /// The plug-in reports one.
    pub fn topology(&self) -> Result<Topology> {
        // SAFETY: the client is alive; it owns the topology.
        let out = unsafe {
            self.call::<abi::ClientTopologyDescription>(|args| args.client = self.0.raw)
        }?;
        // SAFETY: as above.
        unsafe { Topology::from_client(self.0.clone(), out.topology) }
    }

    /// A buffer with a copy of `data` on the first device. `dims` may be empty: one element.
    ///
    /// # Errors
    /// `data` does not fill `dims`, or the plug-in reports one, for instance that memory ran out.
    pub fn buffer<T: Element>(&self, data: &[T], dims: &[i64]) -> Result<Buffer> {
        self.buffer_on(data, dims, Place::Default)
    }

    /// A buffer with a copy of `data` in `place`.
    ///
    /// # Errors
    /// As for [`Self::buffer`].
    pub fn buffer_on<'a, T: Element>(
        &self,
        data: &[T],
        dims: &[i64],
        place: impl Into<Place<'a>>,
    ) -> Result<Buffer> {
        layout::check_len(T::DTYPE, dims, data.len())?;
        // SAFETY: as many elements as the dimensions take.
        let (buffer, _) = unsafe {
            self.transfer(
                data.as_ptr().cast(),
                T::DTYPE,
                dims,
                place.into(),
                abi::HOST_IMMUTABLE_ONLY_DURING_CALL,
            )
        }?;
        Ok(buffer)
    }

    /// A buffer with a copy of `bytes`, the elements in row-major order and in this machine's order
    /// of bytes. Those of less than a byte take one each.
    ///
    /// # Errors
    /// As for [`Self::buffer`].
    pub fn buffer_from_bytes<'a>(
        &self,
        bytes: &[u8],
        dtype: DType,
        dims: &[i64],
        place: impl Into<Place<'a>>,
    ) -> Result<Buffer> {
        layout::check_bytes(dtype, dims, bytes.len())?;
        // SAFETY: as many bytes as the dimensions take.
        let (buffer, _) = unsafe {
            self.transfer(
                bytes.as_ptr().cast(),
                dtype,
                dims,
                place.into(),
                abi::HOST_IMMUTABLE_ONLY_DURING_CALL,
            )
        }?;
        Ok(buffer)
    }

    /// A buffer that may be the slice of `owner` that `data` returns, without a copy, where the
    /// device reads the host's memory and the slice is aligned as it wants (64 bytes on the CPU).
    /// Programs never write to it, and `owner` is dropped, on any thread, when it is no longer
    /// read.
    ///
    /// # Errors
    /// As for [`Self::buffer`].
    pub fn buffer_from_owner<'a, O: Send + Sync + 'static, T: Element>(
        &self,
        owner: O,
        data: impl for<'o> FnOnce(&'o O) -> &'o [T],
        dims: &[i64],
        place: impl Into<Place<'a>>,
    ) -> Result<Buffer> {
        let owner = Owner::new(owner);
        // SAFETY: the slice is only read here and until the event.
        let data = data(unsafe { owner.get() });
        layout::check_len(T::DTYPE, dims, data.len())?;
        // SAFETY: as many elements as the dimensions take. They live until the event, which `owner`
        // is kept for, and are borrowed for as long: nothing else has the owner.
        let (buffer, done) = unsafe {
            self.transfer(
                data.as_ptr().cast(),
                T::DTYPE,
                dims,
                place.into(),
                abi::HOST_IMMUTABLE_ZERO_COPY,
            )
        }?;
        match done {
            Some(done) => done.keep(owner)?,
            // Without an event there is no knowing when.
            None => std::mem::forget(owner),
        }
        Ok(buffer)
    }

    /// # Safety
    /// `data` holds the elements, for as long as `semantics` asks.
    unsafe fn transfer(
        &self,
        data: *const std::ffi::c_void,
        dtype: DType,
        dims: &[i64],
        place: Place<'_>,
        semantics: u32,
    ) -> Result<(Buffer, Option<Event>)> {
        let name = abi::ClientBufferFromHostBuffer::FUNCTION;
        let (mut device, mut memory) = (std::ptr::null_mut(), std::ptr::null_mut());
        match place {
            Place::Default => device = self.first()?,
            Place::Device(place) => device = place.of(&self.0, || "the device".into())?,
            Place::Memory(place) => memory = place.of(&self.0)?,
        }
        // SAFETY: the client, the device and the memory are alive; the rest is passed on from this
        // function's contract.
        let out = unsafe {
            self.call::<abi::ClientBufferFromHostBuffer>(|args| {
                args.client = self.0.raw;
                args.data = data;
                args.r#type = dtype as u32;
                args.dims = dims.as_ptr();
                args.num_dims = dims.len();
                args.host_buffer_semantics = semantics;
                args.device = device;
                args.memory = memory;
            })
        }
        .map_err(|error| self.explain(error))?;
        // SAFETY: both are new, and the caller's to destroy.
        unsafe {
            let done = Event::new(self.0.clone(), out.done_with_host_buffer, name).ok();
            Ok((Buffer::new(self.0.clone(), out.buffer, name)?, done))
        }
    }

    fn first(&self) -> Result<*mut abi::Device> {
        let name = abi::ClientAddressableDevices::FUNCTION;
        let devices = self.addressable_devices()?;
        let first = devices.first().ok_or_else(|| Error::malformed(name, "no device"))?;
        Ok(first.raw)
    }

    /// Compiles a program for the devices that the options name.
    ///
    /// # Errors
    /// The program is wrong, with the compiler's message whole.
    pub fn compile(
        &self,
        program: &Program<'_>,
        options: &CompileOptions,
    ) -> Result<LoadedExecutable> {
        let options = options.encode()?;
        let program = program.encode();
        // SAFETY: the client is alive, and program and options live for the call.
        let out = unsafe {
            self.call::<abi::ClientCompile>(|args| {
                args.client = self.0.raw;
                args.program = program.as_ptr();
                args.compile_options = options.as_ptr().cast();
                args.compile_options_size = options.len();
            })
        }
        .map_err(|error| self.explain(error))?;
        // SAFETY: it is new, and the caller's to destroy.
        unsafe {
            LoadedExecutable::new(self.0.clone(), out.executable, abi::ClientCompile::FUNCTION)
        }
    }

    /// Loads what [`Executable::serialize`](crate::Executable::serialize) made; with the options
    /// that it was compiled with, unless others are given.
    ///
    /// # Errors
    /// The plug-in refuses it.
    ///
    /// # Safety
    /// The bytes were made by the same version of the same plug-in, for the same kind of device.
    /// They may hold machine code, which is not checked.
    pub unsafe fn deserialize(
        &self,
        serialized: &[u8],
        options: Option<&CompileOptions>,
    ) -> Result<LoadedExecutable> {
        let name = abi::ExecutableDeserializeAndLoad::FUNCTION;
        let options = options.map(CompileOptions::encode).transpose()?;
        // SAFETY: the client is alive, and all bytes live for the call.
        let out = unsafe {
            self.call::<abi::ExecutableDeserializeAndLoad>(|args| {
                args.client = self.0.raw;
                args.serialized_executable = serialized.as_ptr().cast();
                args.serialized_executable_size = serialized.len();
                if let Some(options) = &options {
                    args.overridden_serialized_compile_options = options.as_ptr().cast();
                    args.overridden_serialized_compile_options_size = options.len();
                }
            })
        }
        .map_err(|error| self.explain(error))?;
        // SAFETY: it is new, and the caller's to destroy.
        unsafe { LoadedExecutable::new(self.0.clone(), out.loaded_executable, name) }
    }

    /// Adds to an error what the first device tells of its memory, where that ran out.
    fn explain(&self, error: Error) -> Error {
        error.with_memory(|| device::memory_stats(&self.0))
    }

    /// # Safety
    /// As for [`Plugin::call`].
    unsafe fn call<A: Call>(&self, fill: impl FnOnce(&mut A)) -> Result<abi::Padded<A>> {
        // SAFETY: passed on from this function's contract.
        unsafe { self.0.plugin.call(fill) }
    }
}

impl Plugin {
    /// Starts a client: [`Client::new`].
    ///
    /// # Errors
    /// The plug-in reports one.
    pub fn client(self, options: &[(&str, Value)]) -> Result<Client> {
        Client::new(self, options)
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client")
            .field("platform", &self.platform_name().ok())
            .field("plugin", &self.0.plugin)
            .finish()
    }
}
