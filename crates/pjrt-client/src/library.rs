//! Shared libraries.

use std::{
    ffi::{CStr, CString, c_void},
    os::unix::ffi::OsStrExt,
    path::Path,
    ptr::NonNull,
};

/// A shared library, which stays in the process for good: a plug-in starts threads that outlive it.
pub(crate) struct Library(NonNull<c_void>);

impl Library {
    pub(crate) fn open(path: &Path) -> Result<Self, String> {
        // A path without a slash would be searched for among the system's libraries.
        let path = std::path::absolute(path).map_err(|error| error.to_string())?;
        // The loader's own reasons for these two are hard to read.
        if path.is_dir() {
            return Err("it is a directory".into());
        }
        std::fs::File::open(&path).map_err(|error| error.to_string())?;
        let path = CString::new(path.as_os_str().as_bytes())
            .map_err(|_| "the path holds a zero byte".to_owned())?;
        // SAFETY: the path ends with a zero. The library's initialisers are trusted as the program
        // is.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        NonNull::new(handle).map(Self).ok_or_else(last_error)
    }

    /// The address of `symbol`, not null.
    pub(crate) fn symbol(&self, symbol: &CStr) -> Option<NonNull<c_void>> {
        // SAFETY: the handle is open for good, and the name ends with a zero.
        NonNull::new(unsafe { libc::dlsym(self.0.as_ptr(), symbol.as_ptr()) })
    }
}

fn last_error() -> String {
    // SAFETY: the text is this thread's, until its next call of the loader.
    unsafe {
        let text = libc::dlerror();
        if text.is_null() {
            "the loader gives no reason".into()
        } else {
            CStr::from_ptr(text).to_string_lossy().into_owned()
        }
    }
}
