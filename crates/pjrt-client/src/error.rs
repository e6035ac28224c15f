//! Everything that can go wrong.

use std::path::PathBuf;

use crate::{DType, MemoryStats, Platform, Version};

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
    #[error("no PJRT plug-in for {platform}; looked in: {}; install it with: {}", .tried.join(", "), .platform.install())]
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

    /// The device, or the host, has too little memory.
    #[error(
        "{function}: out of device memory: {}; {}: {code}: {message}",
        asked(*.requested),
        had(*.available, *.limit)
    )]
    OutOfMemory {
        /// Bytes that were asked for: as the message has them, rounded where it rounds, else the
        /// program's results and temporaries. None where neither tells.
        requested: Option<u64>,
        /// Bytes that could still be had then, where the plug-in tells.
        available: Option<u64>,
        /// Bytes that there are in all, where the plug-in tells.
        limit: Option<u64>,
        /// The kind: mostly [`Code::ResourceExhausted`].
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
            Self::Pjrt { code, .. } | Self::OutOfMemory { code, .. } => Some(*code),
            _ => None,
        }
    }

    /// What a plug-in reports, as the variant that it is.
    pub(crate) fn reported(code: Code, message: String, function: &'static str) -> Self {
        if !is_out_of_memory(code, &message) {
            return Self::Pjrt { code, message, function };
        }
        let requested = requested_bytes(&message);
        Self::OutOfMemory { requested, available: None, limit: None, code, message, function }
    }

    /// That `function` of the plug-in gave back what its interface does not allow.
    pub(crate) fn malformed(function: &'static str, what: impl Into<String>) -> Self {
        Self::Malformed { function, what: what.into() }
    }

    /// With what the device tells of its memory, where memory ran out.
    pub(crate) fn with_memory(mut self, stats: impl FnOnce() -> Option<MemoryStats>) -> Self {
        if let Self::OutOfMemory { available, limit, .. } = &mut self
            && limit.is_none()
            && let Some(stats) = stats()
        {
            *limit = stats.bytes_limit;
            let used = stats.bytes_limit.zip(stats.bytes_in_use);
            *available = used.map(|(limit, used)| limit.saturating_sub(used));
        }
        self
    }

    /// With what the program takes, where memory ran out and the message has no figure.
    pub(crate) fn with_program(mut self, stats: impl FnOnce() -> Option<u64>) -> Self {
        if let Self::OutOfMemory { requested, .. } = &mut self
            && requested.is_none()
        {
            *requested = stats();
        }
        self
    }

    /// With the name of the function that started the work, not of the one that waited.
    pub(crate) fn by(mut self, started: &'static str) -> Self {
        if let Self::Pjrt { function, .. } | Self::OutOfMemory { function, .. } = &mut self {
            *function = started;
        }
        self
    }
}

/// Other resources than memory run out as well, and XLA's CPU calls a program's temporaries that
/// do not fit an internal error.
fn is_out_of_memory(code: Code, message: &str) -> bool {
    let says = |words: &str| message.to_ascii_lowercase().contains(words);
    match code {
        Code::ResourceExhausted => says("memory") || says("allocat"),
        Code::Internal => says("out of memory"),
        _ => false,
    }
}

/// The first amount of bytes that a message names after it speaks of allocating.
fn requested_bytes(message: &str) -> Option<u64> {
    let start = ["allocat", "reserve", "Used "].iter().find_map(|word| message.find(word))?;
    let words: Vec<_> = message[start..].split_whitespace().collect();
    words.iter().enumerate().find_map(|(index, word)| {
        let next = words.get(index + 1).copied().unwrap_or_default();
        if next.starts_with("bytes") {
            return word.parse().ok();
        }
        let rounded = rounded_bytes(word.trim_end_matches(['.', ',', ';', ':']))?;
        // `32.00MiB (33554432B)`.
        let exact = next.strip_prefix('(').and_then(|next| next.split_once("B)"));
        Some(exact.and_then(|(bytes, _)| bytes.parse().ok()).unwrap_or(rounded))
    })
}

/// `1.50GiB`, `1.50G` and `512B` in bytes.
fn rounded_bytes(word: &str) -> Option<u64> {
    let digits = word.find(|c: char| !c.is_ascii_digit() && c != '.')?;
    let (number, unit) = word.split_at(digits);
    let power = match unit {
        "B" => 0,
        "K" | "KiB" => 10,
        "M" | "MiB" => 20,
        "G" | "GiB" => 30,
        "T" | "TiB" => 40,
        _ => return None,
    };
    Some((number.parse::<f64>().ok()? * 2_f64.powi(power)) as u64)
}

fn asked(requested: Option<u64>) -> String {
    requested.map_or("the requested size is not reported".into(), |bytes| {
        format!("{} asked for", human(bytes))
    })
}

fn had(available: Option<u64>, limit: Option<u64>) -> String {
    match (available, limit) {
        (Some(available), Some(limit)) => {
            format!("{} available of {}", human(available), human(limit))
        }
        (Some(available), None) => format!("{} available", human(available)),
        (None, Some(limit)) => format!("{} in all", human(limit)),
        (None, None) => "the available size is not reported".into(),
    }
}

fn human(bytes: u64) -> String {
    let mib = bytes as f64 / 2_f64.powi(20);
    if mib < 1024.0 { format!("{mib:.2} MiB") } else { format!("{:.2} GiB", mib / 1024.0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Messages of XLA's GPU, TPU and CPU.
    #[test]
    fn memory_that_ran_out_is_read_from_messages() {
        let cases = [
            ("Out of memory while trying to allocate 7406166528 bytes.", Some(7_406_166_528)),
            (
                "Out of memory while trying to allocate 4770354232 bytes.\nBufferAssignment OOM \
                 Debugging.\nBufferAssignment stats:\n             parameter allocation:  372.76MiB",
                Some(4_770_354_232),
            ),
            ("Out of memory while trying to allocate 64.00GiB.", Some(64 << 30)),
            ("Out of memory allocating 35184372088832 bytes.", Some(1 << 45)),
            (
                "Failed to allocate request for 32.00MiB (33554433B) on device ordinal 0",
                Some(33_554_433),
            ),
            (
                "Error allocating device buffer: Attempting to reserve 1.50G at the bottom of \
                 memory. That was not possible. There are 500.00M free, 0B reserved, and 500.00M \
                 reservable.",
                Some(3 << 29),
            ),
            (
                "XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used \
                 20.00G of 15.75G hbm. Exceeded hbm capacity by 4.25G.",
                Some(20 << 30),
            ),
            ("Out of memory.", None),
        ];
        for (message, expected) in cases {
            let error = Error::reported(Code::ResourceExhausted, message.into(), "PJRT_F");
            let Error::OutOfMemory { requested, .. } = error else { panic!("{error:?}") };
            assert_eq!(requested, expected, "{message}");
            assert_eq!(error.code(), Some(Code::ResourceExhausted));
            assert!(error.to_string().ends_with(message), "{error}");
        }
        // Temporaries on the CPU.
        let message =
            "Compute error: Error preparing computation: Out of memory allocating 1024 bytes.";
        let error = Error::reported(Code::Internal, message.into(), "PJRT_F");
        assert!(matches!(error, Error::OutOfMemory { requested: Some(1024), .. }), "{error:?}");
    }

    #[test]
    fn other_errors_stay_what_they_are() {
        for (code, message) in [
            (Code::ResourceExhausted, "Too many open files"),
            (Code::Internal, "INTERNAL: Failed to launch"),
            (Code::InvalidArgument, "allocate 5 bytes of memory"),
        ] {
            let error = Error::reported(code, message.into(), "PJRT_F");
            assert!(matches!(&error, Error::Pjrt { .. }), "{error:?}");
            assert_eq!(error.to_string(), format!("PJRT_F: {code}: {message}"));
        }
    }

    #[test]
    fn out_of_memory_names_available_and_requested_bytes() {
        let error = || Error::reported(Code::ResourceExhausted, "Out of memory".into(), "PJRT_F");
        assert_eq!(
            error().to_string(),
            "PJRT_F: out of device memory: the requested size is not reported; the available size \
             is not reported: RESOURCE_EXHAUSTED: Out of memory"
        );
        let stats = MemoryStats {
            bytes_in_use: Some(1 << 30),
            bytes_limit: Some(3 << 30),
            ..MemoryStats::default()
        };
        let error = error().with_memory(|| Some(stats)).with_program(|| Some(1 << 19)).by("PJRT_G");
        assert_eq!(
            error.to_string(),
            "PJRT_G: out of device memory: 0.50 MiB asked for; 2.00 GiB available of 3.00 GiB: \
             RESOURCE_EXHAUSTED: Out of memory"
        );
        // The message's own figure stays.
        let error = Error::reported(Code::ResourceExhausted, "allocating 7 bytes".into(), "PJRT_F");
        let error = error.with_program(|| Some(1));
        assert!(matches!(error, Error::OutOfMemory { requested: Some(7), .. }), "{error:?}");
    }
}
