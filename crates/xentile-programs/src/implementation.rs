//! The programs that an operation may have.

/// By which program.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Implementation {
    /// Plain operations, which XLA fuses as it can.
    Dense,
    /// Custom calls of `libxentile_xla`.
    Kernel,
}
