//! The runtime's table of functions.

use std::{
    ffi::{CStr, CString},
    marker::PhantomData,
    mem::offset_of,
    ptr::null_mut,
};

use crate::{Error, ErrorCode, Result, abi};

/// The runtime's functions, of which an older runtime lacks the last ones.
#[derive(Clone, Copy)]
pub(crate) struct Api<'a> {
    pub(crate) table: *const abi::Api,
    lifetime: PhantomData<&'a abi::Api>,
}

// SAFETY: the table is constant, and the functions in use here may be called on any thread.
unsafe impl Send for Api<'_> {}
// SAFETY: as above.
unsafe impl Sync for Api<'_> {}

/// The function in `$field` of the table, or `None` where the runtime has none.
macro_rules! function {
    ($api:expr, $field:ident) => {{
        let table = $api.table;
        let end = std::mem::offset_of!(abi::Api, $field) + size_of::<fn()>();
        // SAFETY: `Api::new` checked that the table holds its size, and the field ends within it.
        unsafe {
            if (*table).struct_size >= end { (&raw const (*table).$field).read() } else { None }
        }
    }};
}
pub(crate) use function;

impl<'a> Api<'a> {
    /// `None` where there is no table, or one too short to make an error with.
    ///
    /// # Safety
    /// `table` is null or the runtime's, alive for `'a`.
    pub(crate) unsafe fn new(table: *const abi::Api) -> Option<Self> {
        // SAFETY: not null and aligned, and any table begins with its size.
        let known = !table.is_null()
            && table.is_aligned()
            && unsafe { (&raw const (*table).struct_size).read() }
                >= offset_of!(abi::Api, error_create);
        let api = Self { table, lifetime: PhantomData };
        (known && function!(api, error_create).is_some()).then_some(api)
    }

    /// The major and minor version of the interface that the runtime speaks.
    pub(crate) fn version(self) -> (i32, i32) {
        // SAFETY: `new` checked that the table reaches past its version.
        let version = unsafe { (&raw const (*self.table).api_version).read() };
        (version.major_version, version.minor_version)
    }

    /// Makes an error for the runtime, which then owns it. Null where the runtime refuses.
    pub(crate) fn make_error(self, error: &Error) -> *mut abi::Error {
        let message = CString::new(error.message().replace('\0', "\\0")).unwrap_or_default();
        let mut args = abi::ErrorCreateArgs {
            struct_size: offset_of!(abi::ErrorCreateArgs, errc) + size_of::<u32>(),
            extension_start: null_mut(),
            message: message.as_ptr(),
            errc: error.code() as u32,
        };
        match function!(self, error_create) {
            // SAFETY: the struct is whole, and the runtime copies the message.
            Some(create) => unsafe { create(&raw mut args) },
            None => null_mut(),
        }
    }

    /// Calls `function`, which the error of a runtime without it names `name`.
    ///
    /// # Safety
    /// `args` is what the function expects.
    pub(crate) unsafe fn call<A>(
        self,
        function: Option<abi::Call<A>>,
        name: &str,
        args: &mut A,
    ) -> Result {
        let Some(function) = function else {
            let (major, minor) = self.version();
            return Err(Error::unimplemented(format!(
                "this runtime (XLA FFI {major}.{minor}) has no {name}"
            )));
        };
        // SAFETY: as this function's contract has it.
        let error = unsafe { function(args) };
        if error.is_null() { Ok(()) } else { Err(self.take_error(error)) }
    }

    /// What `error` says; the runtime then frees it.
    fn take_error(self, error: *mut abi::Error) -> Error {
        let mut details = abi::ErrorGetDetailsArgs {
            struct_size: offset_of!(abi::ErrorGetDetailsArgs, errc) + size_of::<u32>(),
            extension_start: null_mut(),
            error,
            message: std::ptr::null(),
            errc: 0,
        };
        if let Some(get) = function!(self, error_get_details) {
            // SAFETY: the struct is whole, and longer than that of runtimes without codes.
            unsafe { get(&raw mut details) };
        }
        let message = if details.message.is_null() {
            "the runtime gives no reason".into()
        } else {
            // SAFETY: the runtime's message ends with a null and lives as long as the error.
            unsafe { CStr::from_ptr(details.message) }.to_string_lossy().into_owned()
        };
        if let Some(destroy) = function!(self, error_destroy) {
            let mut args = abi::ErrorDestroyArgs {
                struct_size: size_of::<abi::ErrorDestroyArgs>(),
                extension_start: null_mut(),
                error,
            };
            // SAFETY: the error is ours to free, and used no more.
            unsafe { destroy(&raw mut args) };
        }
        Error::new(ErrorCode::from_u32(details.errc), message)
    }
}
