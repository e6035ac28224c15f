//! Arrays on devices.

use std::fmt;

use crate::{
    DType, Device, Element, Error, Event, Layout, Memory, Place, Result, Transfer,
    abi::{self, Call},
    layout::{self, Order},
    raw,
    raw_client::Shared,
};

/// An array on a device, perhaps one that is still being computed. It can be used before it is:
/// what uses it waits.
pub struct Buffer {
    pub(crate) client: Shared,
    pub(crate) raw: *mut abi::Buffer,
}

// SAFETY: PJRT's functions may be called on any thread, and by several at once.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// # Safety
    /// `raw` is null or a buffer of `client`, which nothing else destroys.
    pub(crate) unsafe fn new(
        client: Shared,
        raw: *mut abi::Buffer,
        function: &'static str,
    ) -> Result<Self> {
        if raw.is_null() {
            return Err(Error::malformed(function, "no buffer"));
        }
        Ok(Self { client, raw })
    }

    /// The type of the elements.
    ///
    /// # Errors
    /// The buffer is deleted, or the plug-in reports one.
    pub fn dtype(&self) -> Result<DType> {
        self.alive()?;
        // SAFETY: the buffer is alive.
        let out = unsafe { self.call::<abi::BufferElementType>(|args| args.buffer = self.raw) }?;
        DType::from_u32(out.r#type).ok_or_else(|| {
            let what = format!("elements of type {}", out.r#type);
            Error::malformed(abi::BufferElementType::FUNCTION, what)
        })
    }

    /// The dimensions; none for a single element.
    ///
    /// # Errors
    /// The buffer is deleted, or the plug-in reports one.
    pub fn dims(&self) -> Result<&[i64]> {
        self.alive()?;
        // SAFETY: the buffer is alive, and its dimensions are as long.
        unsafe {
            let out = self.call::<abi::BufferDimensions>(|args| args.buffer = self.raw)?;
            Ok(raw::slice(out.dims, out.num_dims))
        }
    }

    /// How many elements there are.
    ///
    /// # Errors
    /// The buffer is deleted, or the plug-in reports one.
    pub fn count(&self) -> Result<usize> {
        layout::count(self.dtype()?, self.dims()?)
    }

    /// How the elements lie on the device.
    ///
    /// # Errors
    /// The buffer is deleted, or the plug-in reports one.
    pub fn layout(&self) -> Result<Layout> {
        self.alive()?;
        // SAFETY: the buffer is alive, and the layout's parts are as long.
        unsafe {
            let out = self.call::<abi::BufferGetMemoryLayout>(|args| args.buffer = self.raw)?;
            Layout::decode(&out.layout, abi::BufferGetMemoryLayout::FUNCTION)
        }
    }

    /// Bytes that the buffer takes on the device.
    ///
    /// # Errors
    /// The buffer is deleted, or the plug-in reports one.
    pub fn on_device_size(&self) -> Result<usize> {
        self.alive()?;
        // SAFETY: the buffer is alive.
        let out =
            unsafe { self.call::<abi::BufferOnDeviceSizeInBytes>(|args| args.buffer = self.raw) }?;
        Ok(out.on_device_size_in_bytes)
    }

    /// The device it is on.
    ///
    /// # Errors
    /// The buffer is deleted, or the plug-in reports one.
    pub fn device(&self) -> Result<Device> {
        self.alive()?;
        // SAFETY: the buffer is alive.
        let out = unsafe { self.call::<abi::BufferDevice>(|args| args.buffer = self.raw) }?;
        if out.device.is_null() {
            return Err(Error::malformed(abi::BufferDevice::FUNCTION, "no device"));
        }
        // SAFETY: the client owns the device.
        Ok(unsafe { Device::new(self.client.clone(), out.device) })
    }

    /// The memory it is in.
    ///
    /// # Errors
    /// The buffer is deleted, or the plug-in reports one.
    pub fn memory(&self) -> Result<Memory> {
        self.alive()?;
        // SAFETY: the buffer is alive, and the client owns the memory.
        unsafe {
            let out = self.call::<abi::BufferMemory>(|args| args.buffer = self.raw)?;
            Memory::new(self.client.clone(), out.memory, abi::BufferMemory::FUNCTION)
        }
    }

    /// Whether the processor reads it where it is.
    ///
    /// # Errors
    /// The buffer is deleted, or the plug-in reports one.
    pub fn is_on_cpu(&self) -> Result<bool> {
        self.alive()?;
        // SAFETY: the buffer is alive.
        let out = unsafe { self.call::<abi::BufferIsOnCpu>(|args| args.buffer = self.raw) }?;
        Ok(out.is_on_cpu != 0)
    }

    /// When the elements are there.
    ///
    /// # Errors
    /// The buffer is deleted, or the plug-in reports one.
    pub fn ready(&self) -> Result<Event> {
        self.alive()?;
        // SAFETY: the buffer is alive, and the event is new.
        unsafe {
            let out = self.call::<abi::BufferReadyEvent>(|args| args.buffer = self.raw)?;
            Event::new(self.client.clone(), out.event, abi::BufferReadyEvent::FUNCTION)
        }
    }

    /// The elements, in row-major order, once they are there.
    ///
    /// # Errors
    /// They are not of type `T`, the buffer is deleted, or what computes it failed.
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        self.to_vec_async()?.wait()
    }

    /// The elements, in row-major order, without waiting for them.
    ///
    /// # Errors
    /// They are not of type `T`, or the buffer is deleted.
    pub fn to_vec_async<T: Element>(&self) -> Result<Transfer<T>> {
        let (dtype, dims) = (self.dtype()?, self.dims()?);
        self.expect::<T>(dtype)?;
        let len = layout::count(dtype, dims)?;
        self.start(dims, len, dtype.size())
    }

    /// Starts a transfer of `len` values, of which `width` bytes are an element.
    fn start<T: Element>(&self, dims: &[i64], len: usize, width: usize) -> Result<Transfer<T>> {
        let order = self.order(dims);
        let mut data = Vec::<T>::with_capacity(len);
        // SAFETY: there is room for the elements, and the transfer keeps it until they are written.
        unsafe {
            let event = self.copy(data.as_mut_ptr().cast(), len * size_of::<T>(), &order)?;
            Ok(Transfer::new(event, data, len, order, width))
        }
    }

    /// Puts the elements into `out`, in row-major order, once they are there.
    ///
    /// # Errors
    /// They are not of type `T` or not as many, the buffer is deleted, or what computes it failed.
    pub fn copy_to<T: Element>(&self, out: &mut [T]) -> Result {
        let (dtype, dims) = (self.dtype()?, self.dims()?);
        self.expect::<T>(dtype)?;
        layout::check_len(dtype, dims, out.len())?;
        let order = self.order(dims);
        if !order.is_row_major() {
            out.copy_from_slice(&self.to_vec::<T>()?);
            return Ok(());
        }
        let bytes = size_of_val(out);
        // SAFETY: there is room for the elements, and nobody else looks until they are written.
        // Whatever was, `repair` makes values of it.
        unsafe {
            let outcome = self
                .copy(out.as_mut_ptr().cast(), bytes, &order)
                .and_then(|event| wait_for_good(&event));
            T::repair(std::slice::from_raw_parts_mut(out.as_mut_ptr().cast::<u8>(), bytes));
            outcome
        }
    }

    /// The elements of any type as bytes, in row-major order and in this machine's order of bytes,
    /// once they are there.
    ///
    /// # Errors
    /// The buffer is deleted, or what computes it failed.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let (dtype, dims) = (self.dtype()?, self.dims()?);
        let len = layout::count(dtype, dims)? * dtype.size();
        self.start::<u8>(dims, len, dtype.size())?.wait()
    }

    /// The order in which the elements come. Asking for another would be of no use: the CPU's
    /// plug-in takes no notice.
    fn order(&self, dims: &[i64]) -> Order {
        Order::new(dims, self.layout().ok())
    }

    /// # Safety
    /// `bytes` bytes may be written at `out` until the event is ready.
    unsafe fn copy(
        &self,
        out: *mut std::ffi::c_void,
        bytes: usize,
        order: &Order,
    ) -> Result<Event> {
        let mut layout = layout::untiled(&order.minor_to_major);
        // SAFETY: the buffer is alive, the layout lives for the call, and the rest is passed on
        // from this function's contract.
        unsafe {
            let done = self.call::<abi::BufferToHostBuffer>(|args| {
                args.src = self.raw;
                args.host_layout = layout.as_mut_ptr();
                args.dst = out;
                args.dst_size = bytes;
            })?;
            Event::new(self.client.clone(), done.event, abi::BufferToHostBuffer::FUNCTION)
        }
    }

    /// A copy in `place`, which is another one.
    ///
    /// # Errors
    /// The buffer is deleted or in that place, or the plug-in reports one.
    pub fn copy_into<'a>(&self, place: impl Into<Place<'a>>) -> Result<Self> {
        self.alive()?;
        match place.into() {
            Place::Default => Err(Error::Arguments(
                "a copy needs a device or a memory; Place::Default is none".into(),
            )),
            Place::Device(device) => {
                let device = device.of(&self.client, || "the device".into())?;
                // SAFETY: buffer and device are alive, and the copy is new.
                unsafe {
                    let out = self.call::<abi::BufferCopyToDevice>(|args| {
                        args.buffer = self.raw;
                        args.dst_device = device;
                    })?;
                    let name = abi::BufferCopyToDevice::FUNCTION;
                    Self::new(self.client.clone(), out.dst_buffer, name)
                }
            }
            Place::Memory(memory) => {
                let memory = memory.of(&self.client)?;
                // SAFETY: buffer and memory are alive, and the copy is new.
                unsafe {
                    let out = self.call::<abi::BufferCopyToMemory>(|args| {
                        args.buffer = self.raw;
                        args.dst_memory = memory;
                    })?;
                    let name = abi::BufferCopyToMemory::FUNCTION;
                    Self::new(self.client.clone(), out.dst_buffer, name)
                }
            }
        }
    }

    /// Gives the memory back, once what uses the buffer has ended. Deleting twice is no error.
    ///
    /// # Errors
    /// The plug-in reports one.
    pub fn delete(&self) -> Result {
        if self.is_deleted()? {
            return Ok(());
        }
        // SAFETY: the buffer is alive.
        unsafe { self.call::<abi::BufferDelete>(|args| args.buffer = self.raw) }.map(drop)
    }

    /// Whether the buffer was deleted, or donated to a program.
    ///
    /// # Errors
    /// The plug-in reports one.
    pub fn is_deleted(&self) -> Result<bool> {
        // SAFETY: the buffer is alive; this may be asked of one that is deleted.
        let out = unsafe { self.call::<abi::BufferIsDeleted>(|args| args.buffer = self.raw) }?;
        Ok(out.is_deleted != 0)
    }

    /// PJRT allows nothing else to be asked of a deleted buffer.
    fn alive(&self) -> Result {
        if self.is_deleted()? { Err(Error::Deleted) } else { Ok(()) }
    }

    fn expect<T: Element>(&self, found: DType) -> Result {
        if found == T::DTYPE {
            return Ok(());
        }
        Err(Error::WrongType { expected: T::DTYPE, found })
    }

    /// # Safety
    /// As for [`Plugin::call`](crate::Plugin::call).
    unsafe fn call<A: Call>(&self, fill: impl FnOnce(&mut A)) -> Result<abi::Padded<A>> {
        // SAFETY: passed on from this function's contract.
        unsafe { self.client.plugin.call(fill) }
    }
}

/// Waits for something that writes to borrowed memory.
fn wait_for_good(event: &Event) -> Result {
    let outcome = event.wait();
    if matches!(&outcome, Err(error) if error.code().is_none()) {
        // Without a way to wait, the memory is never safe again.
        eprintln!("pjrt-client: cannot wait for a transfer to the host, so the process ends");
        std::process::abort();
    }
    outcome
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: the buffer is alive, and nothing uses it after. What is under way holds its own
        // reference.
        let _ =
            unsafe { self.client.plugin.call::<abi::BufferDestroy>(|args| args.buffer = self.raw) };
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.dtype(), self.dims()) {
            (Ok(dtype), Ok(dims)) => write!(f, "Buffer({dtype}{dims:?})"),
            _ => f.write_str("Buffer(deleted)"),
        }
    }
}
