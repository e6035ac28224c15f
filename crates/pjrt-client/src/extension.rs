//! Groups of functions beyond the table.

use crate::abi;

macro_rules! extensions {
    ($($(#[$doc:meta])* $name:ident = $value:literal;)*) => {
        /// A group of functions that a plug-in may offer beyond the table.
        #[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
        #[non_exhaustive]
        pub enum Extension {
            $($(#[$doc])* $name,)*
            /// One that this crate does not know, by its number.
            Other(u32),
        }

        impl Extension {
            /// The extension that PJRT numbers `value`.
            #[must_use]
            pub const fn from_u32(value: u32) -> Self {
                match value {
                    $($value => Self::$name,)*
                    _ => Self::Other(value),
                }
            }

            /// The number in PJRT.
            #[must_use]
            pub const fn number(self) -> u32 {
                match self {
                    $(Self::$name => $value,)*
                    Self::Other(value) => value,
                }
            }
        }
    };
}

extensions! {
    /// Custom calls of GPUs, with a handler for each stage.
    GpuCustomCall = 0;
    /// Profiles of the device.
    Profiler = 1;
    /// Partitioning rules of custom calls.
    CustomPartitioner = 2;
    /// Streams of the device.
    Stream = 3;
    /// Layouts of executables and buffers.
    Layouts = 4;
    /// Custom calls.
    Ffi = 5;
    /// Memories of devices that are not present.
    MemoryDescriptions = 6;
    /// Triton's compiler.
    Triton = 7;
    /// Buffers without a shape.
    RawBuffer = 8;
    /// A phase of compilation at a time.
    PhaseCompile = 9;
    /// An example.
    Example = 10;
    /// Explicitly none of the others.
    Unknown = 11;
    /// Buffers sent to another host.
    CrossHostTransfers = 12;
    /// What an executable was made with.
    ExecutableMetadata = 13;
    /// Callbacks of the device.
    Callback = 14;
    /// Memory of the host that devices reach.
    HostAllocator = 15;
}

/// One in the plug-in's list, which is constant.
#[derive(Clone, Copy)]
pub(crate) struct Entry {
    pub(crate) extension: Extension,
    pub(crate) base: *const abi::ExtensionBase,
    pub(crate) size: usize,
}

/// The list that begins at `next`. It is cut after 64, in case it bites its tail.
///
/// # Safety
/// `next` is null or leads to such a list.
pub(crate) unsafe fn entries(mut next: *const abi::ExtensionBase) -> Vec<Entry> {
    let mut entries = Vec::new();
    while !next.is_null() && next.is_aligned() && entries.len() < 64 {
        // SAFETY: an extension begins with this struct.
        let base = unsafe { next.read() };
        entries.push(Entry {
            extension: Extension::from_u32(base.r#type),
            base: next,
            size: base.struct_size,
        });
        next = base.next;
    }
    entries
}
