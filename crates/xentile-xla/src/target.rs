//! A handler to register with XLA, and the macro that makes handlers with their list.

use std::ffi::{CStr, c_char};

use xla_ffi::{Stage, abi};

use crate::declaration::Declaration;

/// XLA's name of the platform of CPUs, in its registries.
pub(crate) const HOST: &CStr = c"Host";

/// That of NVIDIA's GPUs.
#[cfg(feature = "cuda")]
pub(crate) const CUDA: &CStr = c"CUDA";

/// A handler to register: `xentile_target` in C. Texts end with a null and live as long as the
/// library.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Target {
    struct_size: usize,
    target: *const c_char,
    platform: *const c_char,
    stage: u32,
    symbol: *const c_char,
    handler: abi::Handler,
}

// SAFETY: texts and functions that never change.
unsafe impl Send for Target {}
// SAFETY: as above.
unsafe impl Sync for Target {}

impl Target {
    pub(crate) const fn new(
        declaration: &Declaration,
        platform: &'static CStr,
        stage: Stage,
        symbol: &'static CStr,
        handler: abi::Handler,
    ) -> Self {
        Self {
            struct_size: size_of::<Self>(),
            target: declaration.name.as_ptr(),
            platform: platform.as_ptr(),
            stage: stage as u32,
            symbol: symbol.as_ptr(),
            handler,
        }
    }

    /// The target's name, which a program calls it by.
    #[must_use]
    pub fn target(&self) -> &'static str {
        text(self.target)
    }

    /// The platform, by the name that XLA's registries have for it.
    #[must_use]
    pub fn platform(&self) -> &'static str {
        text(self.platform)
    }

    /// The stage of a call that the handler is for, as XLA numbers it.
    #[must_use]
    pub fn stage(&self) -> u32 {
        self.stage
    }

    /// The handler's name in this library.
    #[must_use]
    pub fn symbol(&self) -> &'static str {
        text(self.symbol)
    }

    /// The handler.
    #[must_use]
    pub fn handler(&self) -> abi::Handler {
        self.handler
    }
}

/// A text of a [`Target`].
fn text(text: *const c_char) -> &'static str {
    // SAFETY: `Target::new` made it from a `CStr` that lives for ever.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().expect("names are ASCII")
}

/// Makes the handlers of declared targets, as [`xla_ffi::handler!`] does, and `TARGETS`, the list of them:
/// `DECLARATION: fn symbol = function(names of its parameters);` for CPUs, and for GPUs
/// `DECLARATION: fn symbol, initialize other_symbol = function(..);` of one function for both stages. What one
/// for `Initialize` loads is kept for good, so that it is run once for calls that are alike.
macro_rules! target_list {
    (HOST; $(
        $declaration:path: fn $symbol:ident = $function:ident $(::<$generic:ident>)? ($($parameter:tt)*);
    )*) => {
        xla_ffi::handler! {
            $(pub fn $symbol = $function $(::<$generic>)? ($($parameter)*);)*
        }

        /// What this file adds to the table.
        pub(crate) const TARGETS: &[$crate::target::Target] = &[$(
            $crate::target::Target::new(
                &$declaration,
                $crate::target::HOST,
                xla_ffi::Stage::Execute,
                $crate::target::c_str(concat!(stringify!($symbol), "\0")),
                $symbol,
            )
        ),*];
    };
    (CUDA; $(
        $declaration:path: fn $symbol:ident $(, initialize $initialize:ident)? =
            $function:ident $parameters:tt;
    )*) => {
        xla_ffi::handler! {
            $(
                $(
                    pub fn $initialize = $function $parameters, stage = xla_ffi::Stage::Initialize,
                        traits = $crate::cuda::TRAITS, once = true;
                )?
                pub fn $symbol = $function $parameters, traits = $crate::cuda::TRAITS;
            )*
        }

        /// What this file adds to the table.
        pub(crate) const TARGETS: &[$crate::target::Target] = &[$(
            $(
                $crate::target::Target::new(
                    &$declaration,
                    $crate::target::CUDA,
                    xla_ffi::Stage::Initialize,
                    $crate::target::c_str(concat!(stringify!($initialize), "\0")),
                    $initialize,
                ),
            )?
            $crate::target::Target::new(
                &$declaration,
                $crate::target::CUDA,
                xla_ffi::Stage::Execute,
                $crate::target::c_str(concat!(stringify!($symbol), "\0")),
                $symbol,
            )
        ),*];
    };
}
pub(crate) use target_list;

/// `text`, which ends with a null.
pub(crate) const fn c_str(text: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(text.as_bytes()) {
        Ok(text) => text,
        Err(_) => panic!("a name ends with its only null"),
    }
}
