//! What there is to know of a GPU, asked once.

use std::sync::OnceLock;

use crate::driver::{DeviceAttribute, DeviceNumber, Driver};
use crate::{Error, Result};

/// A GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    number: DeviceNumber,
    name: String,
    capability: (i32, i32),
    limits: Limits,
}

/// What a plan has to keep to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Shared memory that one CTA may have, in bytes.
    pub shared_bytes_per_block: u32,
    /// Whether CTAs come in clusters, which read and write each other's shared memory.
    pub clusters: bool,
}

impl Device {
    /// The GPU of the calling thread's current context.
    ///
    /// # Errors
    /// No driver, one too old, a GPU too old, or no context.
    pub fn current() -> Result<&'static Self> {
        static DEVICES: OnceLock<Vec<OnceLock<Result<Device>>>> = OnceLock::new();
        let driver = Driver::get()?;
        let number = driver.current_device()?;
        let devices = match DEVICES.get() {
            Some(devices) => devices,
            None => {
                let count = driver.device_count()?;
                DEVICES.get_or_init(|| (0..count).map(|_| OnceLock::new()).collect())
            }
        };
        let place = usize::try_from(number).ok().and_then(|index| devices.get(index));
        let place = place.ok_or_else(|| Error::Driver {
            function: "cuCtxGetDevice",
            reason: format!("device {number} of {} is none", devices.len()),
        })?;
        place.get_or_init(|| Self::ask(driver, number)).as_ref().map_err(Clone::clone)
    }

    fn ask(driver: &Driver, number: DeviceNumber) -> Result<Self> {
        let ask = |attribute| driver.device_attribute(number, attribute);
        let capability =
            (ask(DeviceAttribute::CapabilityMajor)?, ask(DeviceAttribute::CapabilityMinor)?);
        let name = driver.device_name(number)?;
        if capability < (8, 0) {
            return Err(Error::DeviceTooOld { name, capability });
        }
        let count = |attribute| Ok::<_, Error>(u32::try_from(ask(attribute)?).unwrap_or(0));
        let limits = Limits {
            multiprocessors: count(DeviceAttribute::Multiprocessors)?,
            shared_bytes_per_block: count(DeviceAttribute::SharedBytesPerBlock)?,
            clusters: capability >= (9, 0) && ask(DeviceAttribute::Clusters)? != 0,
        };
        Ok(Self { number, name, capability, limits })
    }

    pub(crate) fn number(&self) -> DeviceNumber {
        self.number
    }

    /// What the driver calls it, such as `NVIDIA H200`.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its compute capability, major and minor.
    #[must_use]
    pub fn capability(&self) -> (i32, i32) {
        self.capability
    }

    /// What a plan has to keep to.
    #[must_use]
    pub fn limits(&self) -> Limits {
        self.limits
    }
}
