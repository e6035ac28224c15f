//! What the binaries run: flags, and what comes of them.

pub mod gradcheck;
#[cfg(feature = "sweep")]
pub mod microbench;
