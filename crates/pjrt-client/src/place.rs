//! Where buffers are to be.

use crate::{Device, Memory};

/// Where a buffer is to be.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub enum Place<'a> {
    /// The first device of this process.
    #[default]
    Default,
    /// The memory that the device takes by default.
    Device(&'a Device),
    /// This one.
    Memory(&'a Memory),
}

impl<'a> From<&'a Device> for Place<'a> {
    fn from(device: &'a Device) -> Self {
        Self::Device(device)
    }
}

impl<'a> From<&'a Memory> for Place<'a> {
    fn from(memory: &'a Memory) -> Self {
        Self::Memory(memory)
    }
}
