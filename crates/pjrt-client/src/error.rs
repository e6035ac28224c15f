//! Everything that can go wrong.

use std::path::PathBuf;

use crate::{DType, Platform, Version};

/// The result of a call of this crate.
pub type Result<T = (), E = Error> = std::result::Result<T, E>;

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $value:literal, $text:literal;)*) => {
        /// The kind of an error that a plug-in reports.
        #[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
        #[non_exhaustive]
        #[repr(u32)]
        pub enum Code {
            $($(#[$doc])* $name = $value,)*
        }

        impl Code {
            /// Every code.
            pub const ALL: &[Self] = &[$(Self::$name),*];

            /// The code as XLA writes it.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$name => $text,)*
                }
            }
        }
    };
}

codes! {
    /// The work was given up.
    Cancelled = 1, "CANCELLED";
    /// None of the others.
    Unknown = 2, "UNKNOWN";
    /// The input is wrong, whatever the state of the system.
    InvalidArgument = 3, "INVALID_ARGUMENT";
    /// It took too long.
    DeadlineExceeded = 4, "DEADLINE_EXCEEDED";
    /// Something asked for is not there.
    NotFound = 5, "NOT_FOUND";
    /// Something to be made is there already.
    AlreadyExists = 6, "ALREADY_EXISTS";
    /// The caller may not do this.
    PermissionDenied = 7, "PERMISSION_DENIED";
    /// Memory or another resource ran out.
    ResourceExhausted = 8, "RESOURCE_EXHAUSTED";
    /// The system is not in the state that the call needs.
    FailedPrecondition = 9, "FAILED_PRECONDITION";
    /// The work was stopped half-way.
    Aborted = 10, "ABORTED";
    /// Past the end of something.
    OutOfRange = 11, "OUT_OF_RANGE";
    /// The plug-in does not support this.
    Unimplemented = 12, "UNIMPLEMENTED";
    /// A defect of the plug-in, or a device that failed.
    Internal = 13, "INTERNAL";
    /// Not now; try again.
    Unavailable = 14, "UNAVAILABLE";
    /// Data is lost or damaged for good.
    DataLoss = 15, "DATA_LOSS";
    /// The caller is not known.
    Unauthenticated = 16, "UNAUTHENTICATED";
}

impl Code {
    /// The code that PJRT numbers `value`; `Unknown` for a number that is no error's.
    #[must_use]
    pub fn from_u32(value: u32) -> Self {
        Self::ALL.iter().copied().find(|&code| code as u32 == value).unwrap_or(Self::Unknown)
    }
}

impl std::fmt::Display for Code {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// What went wrong.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No plug-in for the platform anywhere.
    #[error("no PJRT plug-in for {platform}; looked in:{}\ninstall it with: {}", list(.tried), .platform.install())]
    NotFound {
        /// The platform asked for.
        platform: Platform,
        /// Every place looked in, in that order.
        tried: Vec<String>,
    },

    /// The file cannot be opened as a shared library.
    #[error("cannot open the PJRT plug-in {path}: {reason}", path = .path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The system's reason, with what named the file where that was an environment variable.
        reason: String,
    },

    /// A shared library, and no PJRT plug-in.
    #[error("{path} is not a PJRT plug-in: {reason}", path = .path.display())]
    NotAPlugin {
        /// The file.
        path: PathBuf,
        /// Why not.
        reason: String,
    },

    /// The plug-in speaks another major version.
    #[error(
        "the plug-in {path} speaks PJRT {plugin}; this crate speaks {}.x",
        Version::OURS.major,
        path = .path.display()
    )]
    Version {
        /// The file.
        path: PathBuf,
        /// What the plug-in speaks.
        plugin: Version,
    },

    /// The plug-in has no such function, as older ones lack the newest.
    #[error(
        "the plug-in {path} has no {function}: it speaks PJRT {plugin}, and this crate {}",
        Version::OURS,
        path = .path.display()
    )]
    MissingFunction {
        /// The function, by its name in C.
        function: &'static str,
        /// The file of the plug-in.
        path: PathBuf,
        /// What the plug-in speaks.
        plugin: Version,
    },

    /// The plug-in lacks a group of functions beyond the table.
    #[error("the plug-in {path} has no {extension} extension, which {what} needs", path = .path.display())]
    MissingExtension {
        /// The extension.
        extension: &'static str,
        /// What needs it.
        what: &'static str,
        /// The file of the plug-in.
        path: PathBuf,
    },

    /// The plug-in reports an error.
    #[error("{function}: {code}: {message}")]
    Pjrt {
        /// The kind.
        code: Code,
        /// The plug-in's message, whole.
        message: String,
        /// The function that failed, by its name in C.
        function: &'static str,
    },

    /// The plug-in gave back what its interface does not allow.
    #[error("{function} of the plug-in returned {what}")]
    Malformed {
        /// The function, by its name in C.
        function: &'static str,
        /// What it returned.
        what: String,
    },

    /// Elements of one type, asked for as another.
    #[error("the buffer holds {found}, not {expected}")]
    WrongType {
        /// The type asked for.
        expected: DType,
        /// The type of the buffer.
        found: DType,
    },

    /// As many elements, or bytes, as do not fit the dimensions.
    #[error("{found} {unit} do not fill {dims:?}, which takes {expected}")]
    WrongLength {
        /// `elements of f32`, `bytes of f32`.
        unit: String,
        /// How many the dimensions take.
        expected: usize,
        /// How many there are.
        found: usize,
        /// The dimensions.
        dims: Vec<i64>,
    },

    /// Dimensions that no array has.
    #[error("dimensions {dims:?} of {dtype}: {reason}")]
    WrongDims {
        /// The type of the elements.
        dtype: DType,
        /// The dimensions.
        dims: Vec<i64>,
        /// What is wrong.
        reason: &'static str,
    },

    /// A buffer that was deleted or donated.
    #[error("the buffer was deleted, or donated to a program")]
    Deleted,

    /// A program that was deleted.
    #[error("the program was deleted")]
    Unloaded,

    /// Something that belongs to another client.
    #[error("{what} belongs to another client; it must be of the client in use")]
    OtherClient {
        /// `argument 2`, `the device`.
        what: String,
    },

    /// Arguments that no call can have.
    #[error("{0}")]
    Arguments(String),

    /// A handler is registered already.
    #[error(
        "another handler of {target} on {platform} is registered; a target has one for the life of the process"
    )]
    Registered {
        /// The custom call's target.
        target: String,
        /// XLA's name of the platform.
        platform: String,
    },
}

impl Error {
    /// The code, where the plug-in reported the error.
    #[must_use]
    pub const fn code(&self) -> Option<Code> {
        match self {
            Self::Pjrt { code, .. } => Some(*code),
            _ => None,
        }
    }
}

fn list(places: &[String]) -> String {
    places.iter().map(|place| format!("\n  {place}")).collect()
}
