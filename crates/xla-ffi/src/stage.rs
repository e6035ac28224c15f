//! When a handler is called, and what a runtime may assume of it.

use std::fmt;

use crate::abi;

/// When a handler is called.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
#[repr(u32)]
pub enum Stage {
    /// Once, as the program is built. There are attributes, no arguments, and no device.
    Instantiate = abi::STAGE_INSTANTIATE,
    /// Before every run of the program. Buffers have addresses, and no contents.
    Prepare = abi::STAGE_PREPARE,
    /// Before every run, after `Prepare` of all: the place to load what `Execute` must not.
    Initialize = abi::STAGE_INITIALIZE,
    /// The call itself.
    #[default]
    Execute = abi::STAGE_EXECUTE,
}

impl Stage {
    pub(crate) const fn from_u32(value: u32) -> Option<Self> {
        match value {
            abi::STAGE_INSTANTIATE => Some(Self::Instantiate),
            abi::STAGE_PREPARE => Some(Self::Prepare),
            abi::STAGE_INITIALIZE => Some(Self::Initialize),
            abi::STAGE_EXECUTE => Some(Self::Execute),
            _ => None,
        }
    }
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Instantiate => "instantiate",
            Self::Prepare => "prepare",
            Self::Initialize => "initialize",
            Self::Execute => "execute",
        })
    }
}

/// What a runtime may assume of a handler.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub struct Traits(u32);

impl Traits {
    /// Nothing.
    pub const NONE: Self = Self(0);
    /// Every call with the same attributes launches the same work on the stream, so that it may be
    /// captured once, into a CUDA graph for instance, and replayed.
    pub const COMMAND_BUFFER_COMPATIBLE: Self = Self(abi::TRAIT_COMMAND_BUFFER_COMPATIBLE);

    /// The bits, as XLA numbers them.
    #[must_use]
    pub const fn bits(self) -> u32 {
        self.0
    }
}
