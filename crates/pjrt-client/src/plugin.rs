//! A plug-in that is open.

use std::{
    collections::HashMap,
    ffi::c_int,
    fmt,
    mem::offset_of,
    path::{Path, PathBuf},
    ptr::null_mut,
    sync::{Mutex, PoisonError},
};

use crate::{
    Code, Error, Extension, Platform, Result, Values, Version,
    abi::{self, Call, Padded},
    extension::{self, Entry},
    library::Library,
    raw, value,
};

/// A plug-in, open for the life of the process. Copies are the same one.
#[derive(Clone, Copy)]
pub struct Plugin(&'static Inner);

struct Inner {
    path: PathBuf,
    table: *const abi::Api,
    /// Bytes of the table.
    size: usize,
    version: Version,
    extensions: Vec<Entry>,
    /// The handlers of every target and platform.
    handlers: Mutex<HashMap<(String, String), [usize; 4]>>,
}

// SAFETY: the table and the extensions are constant, and PJRT's functions may be called on any
// thread.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

/// Every open plug-in. One that is opened again is the same, whatever path led there.
static OPEN: Mutex<Vec<Plugin>> = Mutex::new(Vec::new());

impl Plugin {
    /// Opens the plug-in in the file `path`, and initialises it unless that was done before.
    ///
    /// The file's code runs in this process, and is trusted as the program itself is.
    ///
    /// # Errors
    /// The file is not a plug-in, or one of another major version, or its initialisation fails.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let library =
            Library::open(path).map_err(|reason| Error::Open { path: path.into(), reason })?;
        let foreign = |reason: &str| Error::NotAPlugin { path: path.into(), reason: reason.into() };
        let get = library
            .symbol(c"GetPjrtApi")
            .ok_or_else(|| foreign("it exports no function GetPjrtApi"))?;
        // SAFETY: a library with this symbol is a plug-in, in which it is this function.
        let table = unsafe {
            std::mem::transmute::<*mut std::ffi::c_void, unsafe extern "C" fn() -> *const abi::Api>(
                get.as_ptr(),
            )()
        };
        if table.is_null() || !table.is_aligned() {
            return Err(foreign("GetPjrtApi returns no table of functions"));
        }

        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(plugin) = open.iter().find(|plugin| plugin.0.table == table) {
            return Ok(*plugin);
        }
        // SAFETY: the plug-in returned it.
        let inner = unsafe { Inner::read(path, table) }?;
        let held = Box::into_raw(Box::new(inner));
        // SAFETY: it is there until it is given back, and then nothing has this.
        let plugin = Self(unsafe { &*held });
        if let Err(error) = plugin.initialize() {
            // SAFETY: it came from a box, and no copy of `plugin` was handed out.
            drop(unsafe { Box::from_raw(held) });
            return Err(error);
        }
        open.push(plugin);
        Ok(plugin)
    }

    /// Opens the plug-in of `platform`: in `path` if there is one, else where [`Platform::locate`]
    /// finds it.
    ///
    /// # Errors
    /// No plug-in is found, or it does not [open](Self::open).
    pub fn find(platform: Platform, path: Option<&Path>) -> Result<Self> {
        match path {
            Some(path) => Self::open(path),
            None => Self::open(platform.locate()?),
        }
    }

    /// The file, as it was first opened.
    #[must_use]
    pub fn path(self) -> &'static Path {
        &self.0.path
    }

    /// The version of PJRT's interface that the plug-in speaks.
    #[must_use]
    pub fn version(self) -> Version {
        self.0.version
    }

    /// Whether the plug-in has the function with this name in C, such as `PJRT_Client_Create`.
    #[must_use]
    pub fn has(self, function: &str) -> bool {
        abi::FUNCTIONS
            .iter()
            .position(|&name| name == function)
            .is_some_and(|index| self.function(index).is_some())
    }

    /// What the plug-in offers beyond the table.
    pub fn extensions(self) -> impl Iterator<Item = Extension> {
        self.0.extensions.iter().map(|entry| entry.extension)
    }

    /// What the plug-in says of itself, such as the version of XLA.
    ///
    /// # Errors
    /// The plug-in reports one.
    pub fn attributes(self) -> Result<Values> {
        // SAFETY: nothing to fill in; the attributes live as long as the process.
        unsafe {
            let out = self.call::<abi::PluginAttributes>(|_| ())?;
            Ok(value::decode(out.attributes, out.num_attributes))
        }
    }

    pub(crate) fn handlers(self) -> &'static Mutex<HashMap<(String, String), [usize; 4]>> {
        &self.0.handlers
    }

    /// The struct of an extension, if the plug-in has it and it is as long as a `T`.
    ///
    /// `T` must be what that extension is.
    pub(crate) fn extension<T>(self, extension: Extension) -> Option<*const T> {
        let entry = self.0.extensions.iter().find(|entry| entry.extension == extension)?;
        (entry.size >= size_of::<T>()).then(|| entry.base.cast())
    }

    /// Calls the function that takes an `A`, once `fill` has put the arguments in, and returns the
    /// struct with what the function put there.
    ///
    /// # Safety
    /// The arguments are what the function expects.
    pub(crate) unsafe fn call<A: Call>(self, fill: impl FnOnce(&mut A)) -> Result<Padded<A>> {
        let mut args = Padded::<A>::new();
        fill(&mut args);
        // SAFETY: passed on from this function's contract.
        unsafe { self.call_with(&mut args) }?;
        Ok(args)
    }

    /// [`Self::call`], with arguments in a struct that is there already.
    ///
    /// # Safety
    /// As for [`Self::call`].
    pub(crate) unsafe fn call_with<A: Call>(self, args: &mut Padded<A>) -> Result {
        let function = self.function(A::INDEX).ok_or_else(|| self.missing(A::FUNCTION))?;
        // SAFETY: the table has this function at this position, which takes a pointer to an A; the
        // rest is passed on from this function's contract.
        let error = unsafe {
            let function = std::mem::transmute::<
                unsafe extern "C" fn(),
                unsafe extern "C" fn(*mut Padded<A>) -> *mut abi::Error,
            >(function);
            function(args)
        };
        // SAFETY: the plug-in returned it, and it goes nowhere else.
        unsafe { self.result(error, A::FUNCTION) }
    }

    /// The error that `function` returned, taken over, or success.
    ///
    /// # Safety
    /// `error` is null or an error of the plug-in, which nothing else destroys.
    pub(crate) unsafe fn result(self, error: *mut abi::Error, function: &'static str) -> Result {
        if error.is_null() {
            return Ok(());
        }
        let mut message = Padded::<abi::ErrorMessage>::new();
        message.error = error;
        let mut code = Padded::<abi::ErrorGetCode>::new();
        code.error = error;
        let mut destroy = Padded::<abi::ErrorDestroy>::new();
        destroy.error = error;
        // SAFETY: the error is alive until the last line, and its message as long. `initialize` saw
        // that these functions are there. Two of them return nothing.
        unsafe {
            self.void(&mut message);
            let get = self.function(abi::ErrorGetCode::INDEX).map(|function| {
                std::mem::transmute::<
                    unsafe extern "C" fn(),
                    unsafe extern "C" fn(*mut Padded<abi::ErrorGetCode>) -> *mut abi::Error,
                >(function)
            });
            let second = get.map_or(null_mut(), |get| get(&raw mut code));
            let text = raw::text(message.message, message.message_size);
            self.void(&mut destroy);
            if !second.is_null() {
                destroy.error = second;
                self.void(&mut destroy);
            }
            Err(Error::reported(Code::from_u32(code.code), text, function))
        }
    }

    /// Calls a function that returns nothing.
    ///
    /// # Safety
    /// As for [`Self::call`].
    unsafe fn void<A: Call>(self, args: &mut Padded<A>) {
        if let Some(function) = self.function(A::INDEX) {
            // SAFETY: passed on from this function's contract.
            unsafe {
                std::mem::transmute::<unsafe extern "C" fn(), unsafe extern "C" fn(*mut Padded<A>)>(
                    function,
                )(args);
            }
        }
    }

    /// The function at `index`, unless it lies past the end of the table or is null.
    fn function(self, index: usize) -> Option<unsafe extern "C" fn()> {
        let offset = abi::offset_of_function(index);
        if offset + size_of::<fn()>() > self.0.size {
            return None;
        }
        // SAFETY: the table is this long.
        unsafe { self.0.table.byte_add(offset).cast::<Option<unsafe extern "C" fn()>>().read() }
    }

    fn missing(self, function: &'static str) -> Error {
        Error::MissingFunction { function, path: self.0.path.clone(), plugin: self.0.version }
    }

    fn initialize(self) -> Result {
        // Every other function may return an error, which must be readable.
        for (index, function) in [
            (abi::ErrorDestroy::INDEX, abi::ErrorDestroy::FUNCTION),
            (abi::ErrorMessage::INDEX, abi::ErrorMessage::FUNCTION),
            (abi::ErrorGetCode::INDEX, abi::ErrorGetCode::FUNCTION),
        ] {
            self.function(index).ok_or_else(|| self.missing(function))?;
        }
        // SAFETY: there is nothing to fill in.
        unsafe { self.call::<abi::PluginInitialize>(|_| ()) }.map(drop)
    }
}

impl Inner {
    /// # Safety
    /// `table` is a plug-in's, not null and aligned.
    unsafe fn read(path: &Path, table: *const abi::Api) -> Result<Self> {
        const LEAST: usize = offset_of!(abi::Api, pjrt_api_version)
            + offset_of!(abi::ApiVersion, minor_version)
            + size_of::<c_int>();
        // SAFETY: any table begins with its size.
        let size = unsafe { (&raw const (*table).struct_size).read() };
        if size < LEAST {
            return Err(Error::NotAPlugin {
                path: path.into(),
                reason: format!("its table has struct_size {size}; it must be at least {LEAST}"),
            });
        }
        // SAFETY: the table reaches past the version.
        let table_head = unsafe { &*table };
        let version = Version {
            major: table_head.pjrt_api_version.major_version,
            minor: table_head.pjrt_api_version.minor_version,
        };
        if version.major != Version::OURS.major {
            return Err(Error::Version { path: path.into(), plugin: version });
        }
        Ok(Self {
            path: path.into(),
            table,
            size,
            version,
            // SAFETY: it is a list of extensions, constant as the table is.
            extensions: unsafe { extension::entries(table_head.extension_start) },
            handlers: Mutex::default(),
        })
    }
}

impl PartialEq for Plugin {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self.0, other.0)
    }
}

impl Eq for Plugin {}

impl fmt::Debug for Plugin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Plugin")
            .field("path", &self.0.path)
            .field("version", &self.0.version)
            .finish()
    }
}
