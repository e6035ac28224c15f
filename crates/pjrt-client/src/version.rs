//! Versions of PJRT's interface.

use std::fmt;

use crate::abi;

/// A version of PJRT's interface.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Version {
    /// Of two that differ here neither can use the other.
    pub major: i32,
    /// Of two that differ here the older lacks some functions.
    pub minor: i32,
}

impl Version {
    /// The version that this crate was written for.
    pub const OURS: Self = Self { major: abi::API_MAJOR, minor: abi::API_MINOR };
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}
