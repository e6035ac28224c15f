//! Handlers of custom calls.

use std::{ffi::c_void, ptr::null, sync::PoisonError};

use crate::{Error, Extension, Plugin, Result, abi};

/// The handlers of a custom call's target, as XLA's typed FFI has them: addresses of functions that
/// take a call frame, and null where a stage has none.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Handlers {
    /// Called once, as a program is built.
    pub instantiate: *const c_void,
    /// Called before every run.
    pub prepare: *const c_void,
    /// Called before every run, after `prepare` of all.
    pub initialize: *const c_void,
    /// The call itself.
    pub execute: *const c_void,
}

impl Handlers {
    /// One for the call itself, and none for the stages before it.
    #[must_use]
    pub const fn execute(execute: *const c_void) -> Self {
        Self { instantiate: null(), prepare: null(), initialize: null(), execute }
    }

    fn addresses(self) -> [usize; 4] {
        [self.instantiate, self.prepare, self.initialize, self.execute].map(<*const c_void>::addr)
    }
}

impl Plugin {
    /// Makes custom calls of `target` run these handlers, in programs that are compiled for
    /// `platform` from now on. That is XLA's name of it: `Host` for the CPU, `CUDA` for NVIDIA GPUs.
    /// It lasts as long as the process, and doing it twice with the same handlers is no error.
    ///
    /// Plug-ins for GPUs take handlers for every stage, for their own platform whatever `platform`
    /// says; others take `execute` alone.
    ///
    /// # Errors
    /// The plug-in takes no handlers or not these, or others are registered for the target.
    ///
    /// # Safety
    /// The addresses are null or those of such handlers, which stay where they are.
    pub unsafe fn register(self, target: &str, platform: &str, handlers: Handlers) -> Result {
        if handlers.execute.is_null() {
            return Err(Error::Arguments(format!(
                "the handler of {target} is null; one for execute is needed"
            )));
        }
        let mut known = self.handlers().lock().unwrap_or_else(PoisonError::into_inner);
        let key = (target.to_owned(), platform.to_owned());
        if let Some(&registered) = known.get(&key) {
            // The plug-in would keep the first and call this a success.
            return if registered == handlers.addresses() {
                Ok(())
            } else {
                Err(Error::Registered { target: key.0, platform: key.1 })
            };
        }
        let stages = handlers != Handlers::execute(handlers.execute);
        // SAFETY: passed on from this function's contract.
        unsafe {
            if stages {
                self.register_gpu(target, handlers)
            } else {
                self.register_ffi(target, platform, handlers.execute)
            }
        }?;
        known.insert(key, handlers.addresses());
        Ok(())
    }

    /// # Safety
    /// As for [`Self::register`].
    unsafe fn register_ffi(self, target: &str, platform: &str, handler: *const c_void) -> Result {
        let missing = || Error::MissingExtension {
            extension: "FFI",
            what: "a handler of a custom call",
            path: self.path().into(),
        };
        let extension = self.extension::<abi::FfiExtension>(Extension::Ffi).ok_or_else(missing)?;
        // SAFETY: an extension of this type is this struct, as long as it.
        let register = unsafe { (*extension).register_handler }.ok_or_else(missing)?;
        let mut args = abi::FfiRegisterHandler {
            struct_size: std::mem::offset_of!(abi::FfiRegisterHandler, traits) + size_of::<u32>(),
            target_name: target.as_ptr().cast(),
            target_name_size: target.len(),
            handler,
            platform_name: platform.as_ptr().cast(),
            platform_name_size: platform.len(),
            // A handler says its traits itself.
            traits: 0,
        };
        // SAFETY: the names live for the call; the rest is passed on from this function's contract.
        unsafe { self.result(register(&raw mut args), "PJRT_FFI_Register_Handler") }
    }

    /// # Safety
    /// As for [`Self::register`].
    unsafe fn register_gpu(self, target: &str, handlers: Handlers) -> Result {
        let missing = || Error::MissingExtension {
            extension: "Gpu_Custom_Call",
            what: "a handler of a stage other than execute",
            path: self.path().into(),
        };
        let extension = self
            .extension::<abi::GpuCustomCallExtension>(Extension::GpuCustomCall)
            .ok_or_else(missing)?;
        // SAFETY: an extension of this type is this struct, as long as it.
        let register = unsafe { (*extension).custom_call }.ok_or_else(missing)?;
        let mut args = abi::GpuRegisterCustomCall {
            struct_size: size_of::<abi::GpuRegisterCustomCall>(),
            function_name: target.as_ptr().cast(),
            function_name_size: target.len(),
            api_version: 1,
            handler_instantiate: handlers.instantiate,
            handler_prepare: handlers.prepare,
            handler_initialize: handlers.initialize,
            handler_execute: handlers.execute,
            traits: 0,
        };
        // SAFETY: the name lives for the call; the rest is passed on from this function's contract.
        unsafe { self.result(register(&raw mut args), "PJRT_Gpu_Register_Custom_Call") }
    }
}
