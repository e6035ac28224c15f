//! Devices, present or not.

use std::{any::Any, fmt, sync::Arc};

use crate::{
    Error, Memory, MemoryStats, Plugin, Result, Values,
    abi::{self, Call},
    raw,
    raw_client::{self, Shared},
    value,
};

/// A device of a client.
#[derive(Clone)]
pub struct Device {
    client: Shared,
    pub(crate) raw: *mut abi::Device,
}

// SAFETY: PJRT's functions may be called on any thread, and by several at once.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

impl Device {
    /// # Safety
    /// `raw` is a device of `client`, which owns it.
    pub(crate) unsafe fn new(client: Shared, raw: *mut abi::Device) -> Self {
        Self { client, raw }
    }

    /// # Safety
    /// `devices` leads to `len` devices of `client`, which owns them.
    pub(crate) unsafe fn list(
        client: &Shared,
        devices: *const *mut abi::Device,
        len: usize,
    ) -> Vec<Self> {
        // SAFETY: passed on from this function's contract.
        let devices = unsafe { raw::slice(devices, len) };
        devices.iter().map(|&raw| Self { client: client.clone(), raw }).collect()
    }

    /// The devices of `client` that this process can use.
    pub(crate) fn addressable(client: &Shared) -> Result<Vec<Self>> {
        // SAFETY: the client is alive, and so is the list.
        unsafe {
            let out = client
                .plugin
                .call::<abi::ClientAddressableDevices>(|args| args.client = client.raw)?;
            Ok(Self::list(client, out.addressable_devices, out.num_addressable_devices))
        }
    }

    /// The device, if it is of `client`.
    pub(crate) fn of(
        &self,
        client: &Shared,
        what: impl FnOnce() -> String,
    ) -> Result<*mut abi::Device> {
        raw_client::same(client, &self.client, what)?;
        Ok(self.raw)
    }

    /// What the device is.
    ///
    /// # Errors
    /// The plug-in reports one.
    pub fn description(&self) -> Result<DeviceDescription> {
        let name = abi::DeviceGetDescription::FUNCTION;
        // SAFETY: the device is alive.
        let out = unsafe { self.call::<abi::DeviceGetDescription>(|args| args.device = self.raw) }?;
        if out.device_description.is_null() {
            return Err(Error::malformed(name, "no description"));
        }
        Ok(DeviceDescription {
            plugin: self.client.plugin,
            _owner: self.client.clone(),
            raw: out.device_description,
        })
    }

    /// The number among the devices of all processes.
    ///
    /// # Errors
    /// The plug-in reports one.
    pub fn id(&self) -> Result<i32> {
        self.description()?.id()
    }

    /// The kind of hardware.
    ///
    /// # Errors
    /// The plug-in reports one.
    pub fn kind(&self) -> Result<String> {
        self.description()?.kind()
    }

    /// Whether this process can use it.
    ///
    /// # Errors
    /// The plug-in reports one.
    pub fn is_addressable(&self) -> Result<bool> {
        // SAFETY: the device is alive.
        let out = unsafe { self.call::<abi::DeviceIsAddressable>(|args| args.device = self.raw) }?;
        Ok(out.is_addressable != 0)
    }

    /// The number of the hardware, such as CUDA's; none where it has no number.
    ///
    /// # Errors
    /// The plug-in reports one.
    pub fn local_hardware_id(&self) -> Result<Option<i32>> {
        // SAFETY: the device is alive.
        let out =
            unsafe { self.call::<abi::DeviceLocalHardwareId>(|args| args.device = self.raw) }?;
        Ok(Some(out.local_hardware_id).filter(|&id| id >= 0))
    }

    /// The memory that buffers on the device are in, by default.
    ///
    /// # Errors
    /// The plug-in reports one.
    pub fn default_memory(&self) -> Result<Memory> {
        // SAFETY: the device is alive.
        let out = unsafe { self.call::<abi::DeviceDefaultMemory>(|args| args.device = self.raw) }?;
        // SAFETY: the client owns the memory.
        unsafe { Memory::new(self.client.clone(), out.memory, abi::DeviceDefaultMemory::FUNCTION) }
    }

    /// Every memory that the device reaches.
    ///
    /// # Errors
    /// The plug-in reports one.
    pub fn memories(&self) -> Result<Vec<Memory>> {
        let name = abi::DeviceAddressableMemories::FUNCTION;
        // SAFETY: the device is alive, and so is the list, which the client owns.
        unsafe {
            let out = self.call::<abi::DeviceAddressableMemories>(|args| args.device = self.raw)?;
            raw::slice(out.memories, out.num_memories)
                .iter()
                .map(|&memory| Memory::new(self.client.clone(), memory, name))
                .collect()
        }
    }

    /// What the device's allocator counts.
    ///
    /// # Errors
    /// The plug-in reports one: `UNIMPLEMENTED` where it counts nothing, as the CPU's.
    pub fn memory_stats(&self) -> Result<MemoryStats> {
        // SAFETY: the device is alive.
        let out = unsafe {
            self.call::<abi::DeviceMemoryStats>(|args| {
                args.device = self.raw;
                // The only figure without a flag.
                args.bytes_in_use = -1;
            })
        }?;
        Ok(MemoryStats::new(&out))
    }

    /// # Safety
    /// As for [`Plugin::call`].
    unsafe fn call<A: Call>(&self, fill: impl FnOnce(&mut A)) -> Result<abi::Padded<A>> {
        // SAFETY: passed on from this function's contract.
        unsafe { self.client.plugin.call(fill) }
    }
}

/// What the first device of `client` tells of its memory.
pub(crate) fn memory_stats(client: &Shared) -> Option<MemoryStats> {
    let devices = Device::addressable(client).ok()?;
    devices.first()?.memory_stats().ok()
}

impl PartialEq for Device {
    fn eq(&self, other: &Self) -> bool {
        self.raw == other.raw
    }
}

impl Eq for Device {}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.description().and_then(|description| description.text()) {
            Ok(text) => f.write_str(&text),
            Err(_) => f.write_str("Device"),
        }
    }
}

/// What a device is, whether it is present or only described by a topology.
#[derive(Clone)]
pub struct DeviceDescription {
    plugin: Plugin,
    /// Keeps the description alive.
    _owner: Arc<dyn Any + Send + Sync>,
    raw: *mut abi::DeviceDescription,
}

// SAFETY: PJRT's functions may be called on any thread, and by several at once.
unsafe impl Send for DeviceDescription {}
// SAFETY: as above.
unsafe impl Sync for DeviceDescription {}

impl DeviceDescription {
    /// # Safety
    /// `raw` is alive while `owner` is.
    pub(crate) unsafe fn new(
        plugin: Plugin,
        owner: Arc<dyn Any + Send + Sync>,
        raw: *mut abi::DeviceDescription,
    ) -> Self {
        Self { plugin, _owner: owner, raw }
    }

    /// The number among the devices of all processes.
    ///
    /// # Errors
    /// The plug-in reports one.
    pub fn id(&self) -> Result<i32> {
        // SAFETY: the description is alive.
        let out = unsafe {
            self.call::<abi::DeviceDescriptionId>(|args| args.device_description = self.raw)
        }?;
        Ok(out.id)
    }

    /// The process that can use the device.
    ///
    /// # Errors
    /// The plug-in reports one.
    pub fn process_index(&self) -> Result<i32> {
        // SAFETY: the description is alive.
        let out = unsafe {
            self.call::<abi::DeviceDescriptionProcessIndex>(|args| {
                args.device_description = self.raw;
            })
        }?;
        Ok(out.process_index)
    }

    /// The kind of hardware, such as `TPU v6 lite`.
    ///
    /// # Errors
    /// The plug-in reports one.
    pub fn kind(&self) -> Result<String> {
        // SAFETY: the description is alive, and so is the text.
        unsafe {
            let out =
                self.call::<abi::DeviceDescriptionKind>(|args| args.device_description = self.raw)?;
            Ok(raw::text(out.device_kind, out.device_kind_size))
        }
    }

    /// The device in few words.
    ///
    /// # Errors
    /// The plug-in reports one.
    pub fn text(&self) -> Result<String> {
        // SAFETY: the description is alive, and so is the text.
        unsafe {
            let out = self.call::<abi::DeviceDescriptionToString>(|args| {
                args.device_description = self.raw;
            })?;
            Ok(raw::text(out.to_string, out.to_string_size))
        }
    }

    /// The device in many words.
    ///
    /// # Errors
    /// The plug-in reports one.
    pub fn debug_text(&self) -> Result<String> {
        // SAFETY: the description is alive, and so is the text.
        unsafe {
            let out = self.call::<abi::DeviceDescriptionDebugString>(|args| {
                args.device_description = self.raw;
            })?;
            Ok(raw::text(out.debug_string, out.debug_string_size))
        }
    }

    /// What else the plug-in says, such as coordinates and the number of cores.
    ///
    /// # Errors
    /// The plug-in reports one.
    pub fn attributes(&self) -> Result<Values> {
        // SAFETY: the description is alive, and so are its attributes.
        unsafe {
            let out = self.call::<abi::DeviceDescriptionAttributes>(|args| {
                args.device_description = self.raw;
            })?;
            Ok(value::decode(out.attributes, out.num_attributes))
        }
    }

    /// # Safety
    /// As for [`Plugin::call`].
    unsafe fn call<A: Call>(&self, fill: impl FnOnce(&mut A)) -> Result<abi::Padded<A>> {
        // SAFETY: passed on from this function's contract.
        unsafe { self.plugin.call(fill) }
    }
}

impl fmt::Debug for DeviceDescription {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceDescription")
            .field("id", &self.id().ok())
            .field("kind", &self.kind().ok())
            .finish()
    }
}
