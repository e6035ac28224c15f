//! Errors with XLA's codes.

/// The result of a handler, and of most calls of this crate.
pub type Result<T = (), E = Error> = std::result::Result<T, E>;

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $value:literal, $text:literal, $make:ident;)*) => {
        /// The kind of an [`Error`]; JAX names it in the exception.
        #[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
        #[non_exhaustive]
        #[repr(u32)]
        pub enum ErrorCode {
            $($(#[$doc])* $name = $value,)*
        }

        impl ErrorCode {
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

        impl Error {
            $(
                #[doc = concat!("An error of the code `", $text, "`.")]
                pub fn $make(message: impl Into<String>) -> Self {
                    Self::new(ErrorCode::$name, message)
                }
            )*
        }
    };
}

/// What a handler answers when it cannot do its work.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    code: ErrorCode,
    message: String,
}

codes! {
    /// The caller gave the call up.
    Cancelled = 1, "CANCELLED", cancelled;
    /// None of the others.
    Unknown = 2, "UNKNOWN", unknown;
    /// The input is wrong, whatever the state of the system.
    InvalidArgument = 3, "INVALID_ARGUMENT", invalid_argument;
    /// It took too long.
    DeadlineExceeded = 4, "DEADLINE_EXCEEDED", deadline_exceeded;
    /// Something asked for is not there.
    NotFound = 5, "NOT_FOUND", not_found;
    /// Something to be made is there already.
    AlreadyExists = 6, "ALREADY_EXISTS", already_exists;
    /// The caller may not do this.
    PermissionDenied = 7, "PERMISSION_DENIED", permission_denied;
    /// Memory or another resource ran out.
    ResourceExhausted = 8, "RESOURCE_EXHAUSTED", resource_exhausted;
    /// The system is not in the state that the call needs.
    FailedPrecondition = 9, "FAILED_PRECONDITION", failed_precondition;
    /// The call was stopped half-way.
    Aborted = 10, "ABORTED", aborted;
    /// Past the end of something.
    OutOfRange = 11, "OUT_OF_RANGE", out_of_range;
    /// Not supported here.
    Unimplemented = 12, "UNIMPLEMENTED", unimplemented;
    /// A defect: what always holds does not. Also a panic.
    Internal = 13, "INTERNAL", internal;
    /// Not now; try again.
    Unavailable = 14, "UNAVAILABLE", unavailable;
    /// Data is lost or damaged for good.
    DataLoss = 15, "DATA_LOSS", data_loss;
    /// The caller is not known.
    Unauthenticated = 16, "UNAUTHENTICATED", unauthenticated;
}

impl Error {
    /// An error of `code`.
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }

    /// The kind of the error.
    #[must_use]
    pub const fn code(&self) -> ErrorCode {
        self.code
    }

    /// The reason, for people.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.message
    }
}

impl ErrorCode {
    /// The code that XLA numbers `value`; `Unknown` for a number that is no error's.
    #[must_use]
    pub fn from_u32(value: u32) -> Self {
        Self::ALL.iter().copied().find(|&code| code as u32 == value).unwrap_or(Self::Unknown)
    }
}

impl std::fmt::Display for ErrorCode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}
