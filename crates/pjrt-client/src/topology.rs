//! Devices that need not be present, to compile for.

use std::{any::Any, fmt, sync::Arc};

use crate::{
    CompileOptions, DeviceDescription, Error, Executable, Plugin, Program, Result, Value, Values,
    abi::{self, Call},
    raw,
    raw_client::Shared,
    value,
};

/// A number of devices and how they are connected, present or not. Copies are the same topology.
#[derive(Clone)]
pub struct Topology(Arc<Inner>);

struct Inner {
    plugin: Plugin,
    raw: *mut abi::TopologyDescription,
    /// The client that owns it, if one does.
    client: Option<Shared>,
}

// SAFETY: PJRT's functions may be called on any thread, and by several at once.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.client.is_none() {
            // SAFETY: the topology is alive, and nothing uses it after.
            let _ = unsafe {
                self.plugin.call::<abi::TopologyDescriptionDestroy>(|args| args.topology = self.raw)
            };
        }
    }
}

impl Topology {
    /// The topology that the plug-in knows as `name`, such as `v6e:2x2`. No device is needed.
    ///
    /// # Errors
    /// The plug-in knows no such topology, or none at all.
    pub fn new(plugin: Plugin, name: &str, options: &[(&str, Value)]) -> Result<Self> {
        let encoded = value::encode(options)?;
        // SAFETY: name and options live for the call.
        let out = unsafe {
            plugin.call::<abi::TopologyDescriptionCreate>(|args| {
                args.topology_name = name.as_ptr().cast();
                args.topology_name_size = name.len();
                args.create_options = encoded.as_ptr();
                args.num_options = encoded.len();
            })
        }?;
        if out.topology.is_null() {
            let name = abi::TopologyDescriptionCreate::FUNCTION;
            return Err(Error::malformed(name, "no topology"));
        }
        Ok(Self(Arc::new(Inner { plugin, raw: out.topology, client: None })))
    }

    /// # Safety
    /// `raw` is null or the topology of `client`, which owns it.
    pub(crate) unsafe fn from_client(
        client: Shared,
        raw: *mut abi::TopologyDescription,
    ) -> Result<Self> {
        if raw.is_null() {
            let name = abi::ClientTopologyDescription::FUNCTION;
            return Err(Error::malformed(name, "no topology"));
        }
        Ok(Self(Arc::new(Inner { plugin: client.plugin, raw, client: Some(client) })))
    }

    /// `cpu`, `cuda`, `tpu`.
    ///
    /// # Errors
    /// The plug-in reports one.
    pub fn platform_name(&self) -> Result<String> {
        // SAFETY: the topology is alive, and so is the text.
        unsafe {
            let out = self
                .call::<abi::TopologyDescriptionPlatformName>(|args| args.topology = self.0.raw)?;
            Ok(raw::text(out.platform_name, out.platform_name_size))
        }
    }

    /// The version of what is below.
    ///
    /// # Errors
    /// The plug-in reports one.
    pub fn platform_version(&self) -> Result<String> {
        // SAFETY: the topology is alive, and so is the text.
        unsafe {
            let out = self.call::<abi::TopologyDescriptionPlatformVersion>(|args| {
                args.topology = self.0.raw;
            })?;
            Ok(raw::text(out.platform_version, out.platform_version_size))
        }
    }

    /// What each device is.
    ///
    /// # Errors
    /// The plug-in reports one.
    pub fn devices(&self) -> Result<Vec<DeviceDescription>> {
        // SAFETY: the topology is alive, and so are the descriptions.
        unsafe {
            let out = self.call::<abi::TopologyDescriptionGetDeviceDescriptions>(|args| {
                args.topology = self.0.raw;
            })?;
            let owner: Arc<dyn Any + Send + Sync> = self.0.clone();
            let descriptions = raw::slice(out.descriptions, out.num_descriptions).iter();
            Ok(descriptions
                .map(|&raw| DeviceDescription::new(self.0.plugin, owner.clone(), raw))
                .collect())
        }
    }

    /// What else the plug-in says.
    ///
    /// # Errors
    /// The plug-in reports one.
    pub fn attributes(&self) -> Result<Values> {
        // SAFETY: the topology is alive, and so are its attributes.
        unsafe {
            let out =
                self.call::<abi::TopologyDescriptionAttributes>(|args| args.topology = self.0.raw)?;
            Ok(value::decode(out.attributes, out.num_attributes))
        }
    }

    /// Bytes that are the same for the same topology, to name what was compiled for it.
    ///
    /// # Errors
    /// The plug-in reports one.
    pub fn serialize(&self) -> Result<Vec<u8>> {
        // SAFETY: the topology is alive, and the bytes are until the deleter is called, once.
        unsafe {
            let out =
                self.call::<abi::TopologyDescriptionSerialize>(|args| args.topology = self.0.raw)?;
            let bytes = out.serialized_bytes.cast::<u8>();
            let bytes = raw::slice(bytes, out.serialized_bytes_size).to_vec();
            if let Some(delete) = out.serialized_topology_deleter {
                delete(out.serialized_topology);
            }
            Ok(bytes)
        }
    }

    /// Compiles a program for these devices ahead of time.
    ///
    /// # Errors
    /// The program is wrong, with the compiler's message whole; or the plug-in does not compile
    /// ahead of time.
    pub fn compile(&self, program: &Program<'_>, options: &CompileOptions) -> Result<Executable> {
        let options = options.encode()?;
        let program = program.encode();
        // SAFETY: the topology is alive, and program and options live for the call.
        unsafe {
            let out = self.call::<abi::Compile>(|args| {
                args.topology = self.0.raw;
                args.program = program.as_ptr();
                args.compile_options = options.as_ptr().cast();
                args.compile_options_size = options.len();
                if let Some(client) = &self.0.client {
                    args.client = client.raw;
                }
            })?;
            let name = abi::Compile::FUNCTION;
            Executable::new(self.0.plugin, self.0.clone(), out.executable, name)
        }
    }

    /// # Safety
    /// As for [`Plugin::call`].
    unsafe fn call<A: Call>(&self, fill: impl FnOnce(&mut A)) -> Result<abi::Padded<A>> {
        // SAFETY: passed on from this function's contract.
        unsafe { self.0.plugin.call(fill) }
    }
}

impl fmt::Debug for Topology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Topology").field("devices", &self.devices().ok()).finish()
    }
}
