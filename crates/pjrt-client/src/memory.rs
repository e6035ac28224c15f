//! Memories of devices.

use std::fmt;

use crate::{
    Error, Result,
    abi::{self, Call},
    raw,
    raw_client::{self, Shared},
};

/// A memory that devices of a client reach.
#[derive(Clone)]
pub struct Memory {
    client: Shared,
    pub(crate) raw: *mut abi::Memory,
}

// SAFETY: PJRT's functions may be called on any thread, and by several at once.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// # Safety
    /// `raw` is null or a memory of `client`, which owns it.
    pub(crate) unsafe fn new(
        client: Shared,
        raw: *mut abi::Memory,
        function: &'static str,
    ) -> Result<Self> {
        if raw.is_null() {
            return Err(Error::malformed(function, "no memory"));
        }
        Ok(Self { client, raw })
    }

    /// The memory, if it is of `client`.
    pub(crate) fn of(&self, client: &Shared) -> Result<*mut abi::Memory> {
        raw_client::same(client, &self.client, || "the memory".into())?;
        Ok(self.raw)
    }

    /// The number among memories of this kind.
    ///
    /// # Errors
    /// The plug-in reports one.
    pub fn id(&self) -> Result<i32> {
        // SAFETY: the memory is alive.
        let out = unsafe { self.call::<abi::MemoryId>(|args| args.memory = self.raw) }?;
        Ok(out.id)
    }

    /// `device`, `pinned_host`, `unpinned_host`.
    ///
    /// # Errors
    /// The plug-in reports one.
    pub fn kind(&self) -> Result<String> {
        // SAFETY: the memory is alive, and so is the text.
        unsafe {
            let out = self.call::<abi::MemoryKind>(|args| args.memory = self.raw)?;
            Ok(raw::text(out.kind, out.kind_size))
        }
    }

    /// The memory in few words.
    ///
    /// # Errors
    /// The plug-in reports one.
    pub fn text(&self) -> Result<String> {
        // SAFETY: the memory is alive, and so is the text.
        unsafe {
            let out = self.call::<abi::MemoryToString>(|args| args.memory = self.raw)?;
            Ok(raw::text(out.to_string, out.to_string_size))
        }
    }

    /// The memory in many words.
    ///
    /// # Errors
    /// The plug-in reports one.
    pub fn debug_text(&self) -> Result<String> {
        // SAFETY: the memory is alive, and so is the text.
        unsafe {
            let out = self.call::<abi::MemoryDebugString>(|args| args.memory = self.raw)?;
            Ok(raw::text(out.debug_string, out.debug_string_size))
        }
    }

    /// # Safety
    /// As for [`Plugin::call`](crate::Plugin::call).
    unsafe fn call<A: Call>(&self, fill: impl FnOnce(&mut A)) -> Result<abi::Padded<A>> {
        // SAFETY: passed on from this function's contract.
        unsafe { self.client.plugin.call(fill) }
    }
}

impl PartialEq for Memory {
    fn eq(&self, other: &Self) -> bool {
        self.raw == other.raw
    }
}

impl Eq for Memory {}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memory")
            .field("kind", &self.kind().ok())
            .field("id", &self.id().ok())
            .finish()
    }
}
