//! Work that is under way.

use std::{fmt, mem::ManuallyDrop};

use crate::{
    Error, Plugin, Result,
    abi::{self, Call},
    device,
    layout::Order,
    raw_client::Shared,
};

/// The end of work that is under way, with its outcome. Dropping it waits for nothing.
pub struct Event {
    client: Shared,
    raw: *mut abi::Event,
    /// What started the work, for the error.
    function: &'static str,
}

// SAFETY: PJRT's functions may be called on any thread, and an event by several at once.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// # Safety
    /// `raw` is an event of `client`, which nothing else destroys.
    pub(crate) unsafe fn new(
        client: Shared,
        raw: *mut abi::Event,
        function: &'static str,
    ) -> Result<Self> {
        if raw.is_null() {
            return Err(Error::malformed(function, "no event"));
        }
        Ok(Self { client, raw, function })
    }

    /// Whether the work has ended, in success or not.
    ///
    /// # Errors
    /// The plug-in cannot tell.
    pub fn is_ready(&self) -> Result<bool> {
        // SAFETY: the event is alive.
        let out =
            unsafe { self.client.plugin.call::<abi::EventIsReady>(|args| args.event = self.raw) }?;
        Ok(out.is_ready != 0)
    }

    /// Waits for the end of the work.
    ///
    /// # Errors
    /// The work failed.
    pub fn wait(&self) -> Result {
        // SAFETY: the event is alive.
        unsafe { self.client.plugin.call::<abi::EventAwait>(|args| args.event = self.raw) }
            .map(drop)
            .map_err(|error| self.name(error))
    }

    /// Why the work failed. None where it succeeded, and while it is under way.
    pub fn error(&self) -> Option<Error> {
        match self.is_ready() {
            Ok(false) => return None,
            Ok(true) => {}
            Err(error) => return Some(error),
        }
        // SAFETY: the event is alive and ready.
        unsafe { self.client.plugin.call::<abi::EventError>(|args| args.event = self.raw) }
            .err()
            .map(|error| self.name(error))
    }

    /// Drops `data` when the work has ended.
    pub(crate) fn keep<T: Send + 'static>(self, data: T) -> Result {
        unsafe extern "C" fn release<T>(error: *mut abi::Error, held: *mut std::ffi::c_void) {
            // SAFETY: made by into_raw below, and this is called once.
            let (plugin, data) = *unsafe { Box::from_raw(held.cast::<(Plugin, T)>()) };
            // A panic must not reach the plug-in.
            let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(data)));
            // SAFETY: the error is the callback's to destroy. What it says reaches the caller
            // elsewhere.
            let _ = unsafe { plugin.result(error, abi::EventOnReady::FUNCTION) };
        }
        let plugin = self.client.plugin;
        let held = Box::into_raw(Box::new((plugin, data)));
        // SAFETY: the event is alive, and the callback takes what `held` points to. Where this
        // fails `held` is leaked, as the work may go on.
        unsafe {
            plugin.call::<abi::EventOnReady>(|args| {
                args.event = self.raw;
                args.callback = Some(release::<T>);
                args.user_arg = held.cast();
            })
        }
        .map(drop)
    }

    /// Names the function that started the work, and not the one that waited.
    fn name(&self, error: Error) -> Error {
        error.by(self.function).with_memory(|| device::memory_stats(&self.client))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: the event is alive, and nothing uses it after.
        let _ =
            unsafe { self.client.plugin.call::<abi::EventDestroy>(|args| args.event = self.raw) };
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Event")
            .field("of", &self.function)
            .field("ready", &self.is_ready().ok())
            .finish()
    }
}

/// Elements on their way to the host.
#[derive(Debug)]
pub struct Transfer<T: crate::Element> {
    event: Event,
    /// Empty, with room for the elements, until they are there.
    data: ManuallyDrop<Vec<T>>,
    len: usize,
    order: Order,
    /// Bytes of an element of the buffer, of which a `T` may be one.
    width: usize,
}

impl<T: crate::Element> Transfer<T> {
    /// # Safety
    /// When `event` is ready `len` elements are written into `data` in this order, unless it is an
    /// error.
    pub(crate) unsafe fn new(
        event: Event,
        data: Vec<T>,
        len: usize,
        order: Order,
        width: usize,
    ) -> Self {
        Self { event, data: ManuallyDrop::new(data), len, order, width }
    }

    /// Whether the elements are there, or the transfer failed.
    ///
    /// # Errors
    /// The plug-in cannot tell.
    pub fn is_ready(&self) -> Result<bool> {
        self.event.is_ready()
    }

    /// Waits for the elements.
    ///
    /// # Errors
    /// The transfer failed, or what computes the elements.
    pub fn wait(mut self) -> Result<Vec<T>> {
        self.event.wait()?;
        let mut data = std::mem::take(&mut *self.data);
        // SAFETY: the transfer wrote this many.
        let bytes = unsafe {
            std::slice::from_raw_parts_mut(
                data.as_mut_ptr().cast::<u8>(),
                self.len * size_of::<T>(),
            )
        };
        if !self.order.is_row_major() {
            let mut rows = Vec::with_capacity(bytes.len());
            self.order.to_row_major(bytes, self.width, &mut rows);
            bytes.copy_from_slice(&rows);
        }
        T::repair(bytes);
        // SAFETY: the elements are there, and `repair` made values of them.
        unsafe { data.set_len(self.len) };
        Ok(data)
    }
}

impl<T: crate::Element> Drop for Transfer<T> {
    fn drop(&mut self) {
        // The runtime writes until the event is ready.
        if self.data.capacity() != 0
            && matches!(self.event.wait(), Err(error) if error.code().is_none())
        {
            return;
        }
        // SAFETY: not used after.
        unsafe { ManuallyDrop::drop(&mut self.data) }
    }
}
