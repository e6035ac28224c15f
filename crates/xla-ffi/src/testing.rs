//! A runtime for tests of handlers, without XLA (the feature `testing`): call frames that own what
//! they point to, and a table of functions that keeps the errors that handlers make.
//!
//! ```
//! use xla_ffi::testing::{Array, Call};
//! use xla_ffi::{Buffer, BufferMut, DType};
//!
//! fn scale(x: Buffer<f32>, mut y: BufferMut<f32>, alpha: f32) {
//!     y.iter_mut().zip(&*x).for_each(|(y, x)| *y = alpha * x);
//! }
//!
//! xla_ffi::handler! { fn example_scale = scale(x, y, alpha); }
//!
//! let x = Array::of(&[2], &[1.0_f32, 2.0]);
//! let mut call = Call::new(vec![x], vec![Array::new(DType::F32, &[2])]);
//! call = call.scalar("alpha", 3.0_f32);
//! call.call(example_scale).unwrap();
//! assert_eq!(call.results[0].values::<f32>(), [3.0, 6.0]);
//! ```

#![allow(clippy::vec_box)] // frames keep the addresses of the items

use std::{
    any::Any,
    ffi::{CStr, CString, c_void},
    ptr::{null, null_mut},
    thread::JoinHandle,
};

use crate::{DType, Element, ErrorCode, abi};

/// What stands behind the runtime's opaque pointers.
struct ErrorBox {
    code: u32,
    message: CString,
}

unsafe extern "C" fn error_create(args: *mut abi::ErrorCreateArgs) -> *mut abi::Error {
    // SAFETY: handlers pass a whole struct with a message.
    let (code, message) = unsafe { ((*args).errc, CStr::from_ptr((*args).message).into()) };
    Box::into_raw(Box::new(ErrorBox { code, message })).cast()
}

unsafe extern "C" fn error_get_details(args: *mut abi::ErrorGetDetailsArgs) {
    // SAFETY: the struct is whole and the error one of ours.
    unsafe {
        let error = (*args).error.cast::<ErrorBox>();
        (*args).message = (*error).message.as_ptr();
        (*args).errc = (*error).code;
    }
}

unsafe extern "C" fn error_destroy(args: *mut abi::ErrorDestroyArgs) {
    // SAFETY: the error is one of ours, and freed once.
    drop(unsafe { Box::from_raw((*args).error.cast::<ErrorBox>()) });
}

/// The runtime's side of a call: its device, and its threads, started for every task.
pub struct Pool {
    /// The number of the device.
    pub device: i32,
    /// As if all threads were busy until the handler has returned.
    pub late: bool,
    /// The number of threads that handlers see; every task that they schedule gets one of its own.
    pub threads: i64,
    running: Vec<JoinHandle<()>>,
    queue: Vec<(abi::Task, usize)>,
}

impl Pool {
    /// A pool of `threads`, which come `late` or at once.
    #[must_use]
    pub fn new(threads: i64, late: bool) -> Box<Self> {
        Box::new(Self { device: 0, late, threads, running: Vec::new(), queue: Vec::new() })
    }
}

unsafe extern "C" fn num_threads(args: *mut abi::ThreadPoolNumThreadsArgs) -> *mut abi::Error {
    // SAFETY: the struct is whole, and the context a `Pool`.
    unsafe { *(*args).num_threads = (*(*args).ctx.cast::<Pool>()).threads };
    null_mut()
}

unsafe extern "C" fn schedule(args: *mut abi::ThreadPoolScheduleArgs) -> *mut abi::Error {
    // SAFETY: the struct is whole, and the context a `Pool` that this thread alone uses.
    let (pool, task, data) =
        unsafe { (&mut *(*args).ctx.cast::<Pool>(), (*args).task.unwrap(), (*args).data) };
    let data = data.expose_provenance();
    if pool.late {
        pool.queue.push((task, data));
    } else {
        pool.running.push(std::thread::spawn(move || start(task, data)));
    }
    null_mut()
}

unsafe extern "C" fn device_ordinal(args: *mut abi::DeviceOrdinalGetArgs) -> *mut abi::Error {
    // SAFETY: the struct is whole, and the context a `Pool`.
    unsafe { (*args).device_ordinal = (*(*args).ctx.cast::<Pool>()).device };
    null_mut()
}

fn start(task: abi::Task, data: usize) {
    // SAFETY: the data belongs to the task, which runs once.
    unsafe { task(std::ptr::with_exposed_provenance_mut(data)) };
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.queue.drain(..).for_each(|(task, data)| start(task, data));
        self.running.drain(..).for_each(|thread| thread.join().unwrap());
    }
}

/// A table with what handlers on a CPU call.
#[must_use]
pub fn api() -> abi::Api {
    abi::Api {
        struct_size: size_of::<abi::Api>(),
        extension_start: null_mut(),
        api_version: abi::ApiVersion {
            struct_size: size_of::<abi::ApiVersion>(),
            extension_start: null_mut(),
            major_version: 0,
            minor_version: 3,
        },
        internal_api: null(),
        error_create: Some(error_create),
        error_get_details: Some(error_get_details),
        error_destroy: Some(error_destroy),
        handler_register: null(),
        stream_get: None,
        type_register: null(),
        execution_context_get: null(),
        state_set: null(),
        state_get: null(),
        device_memory_allocate: None,
        device_memory_free: None,
        thread_pool_schedule: Some(schedule),
        thread_pool_num_threads: Some(num_threads),
        future_create: null(),
        future_set_available: null(),
        future_set_error: null(),
        run_id_get: null(),
        device_ordinal_get: Some(device_ordinal),
    }
}

/// A buffer to pass, with its shape and its memory. A test may break any of them.
pub struct Array {
    /// What the frame points to.
    pub buffer: abi::Buffer,
    /// What `buffer.dims` points to.
    pub dims: Vec<i64>,
    /// What `buffer.data` points to.
    pub data: Vec<u64>,
}

impl Array {
    /// An array of zeros.
    ///
    /// # Panics
    /// An extent is below 0.
    #[must_use]
    pub fn new(dtype: DType, dims: &[i64]) -> Box<Self> {
        let bytes = dims.iter().product::<i64>() as usize * dtype.size();
        let mut array = Box::new(Self {
            buffer: abi::Buffer {
                struct_size: size_of::<abi::Buffer>(),
                extension_start: null_mut(),
                dtype: dtype as u32,
                data: null_mut(),
                rank: dims.len() as i64,
                dims: null_mut(),
            },
            dims: dims.to_vec(),
            data: vec![0; bytes.div_ceil(8)],
        });
        array.buffer.dims = array.dims.as_mut_ptr();
        array.buffer.data = array.data.as_mut_ptr().cast();
        array
    }

    /// An array of `values`.
    ///
    /// # Panics
    /// They are fewer or more than `dims` says.
    #[must_use]
    pub fn of<T: Element>(dims: &[i64], values: &[T]) -> Box<Self> {
        let mut array = Self::new(T::DTYPE, dims);
        array.elements_mut().copy_from_slice(values);
        array
    }

    /// A vector of `values`.
    #[must_use]
    pub fn f32(values: &[f32]) -> Box<Self> {
        Self::of(&[values.len() as i64], values)
    }

    /// The elements, wherever the buffer lies by now.
    ///
    /// # Panics
    /// They are not `T`.
    #[must_use]
    pub fn values<T: Element>(&mut self) -> Vec<T> {
        self.elements_mut().to_vec()
    }

    fn elements_mut<T: Element>(&mut self) -> &mut [T] {
        assert_eq!(self.buffer.dtype, T::DTYPE as u32);
        let length = self.dims.iter().product::<i64>() as usize;
        // SAFETY: the buffer's memory holds the elements, which take any bits.
        unsafe { std::slice::from_raw_parts_mut(self.buffer.data.cast(), length) }
    }
}

/// A call frame and what it points to. Every field can be broken before [`Call::call`].
pub struct Call {
    /// What the handler is called with.
    pub frame: abi::CallFrame,
    /// The runtime's functions.
    pub api: Box<abi::Api>,
    /// The runtime's threads.
    pub pool: Box<Pool>,
    /// The arguments; [`Call::link`] puts new ones in the frame.
    pub arguments: Vec<Box<Array>>,
    /// The results, likewise.
    pub results: Vec<Box<Array>>,
    /// The types of arguments and of results.
    pub types: Vec<u32>,
    /// The types of attributes.
    pub attr_types: Vec<u32>,
    /// Their names.
    pub names: Vec<Box<abi::ByteSpan>>,
    /// Their values.
    pub attrs: Vec<*mut c_void>,
    args: Vec<*mut c_void>,
    rets: Vec<*mut c_void>,
    spans: Vec<*mut abi::ByteSpan>,
    owned: Vec<Box<dyn Any>>,
}

impl Call {
    /// A call in stage `Execute` without attributes, in a runtime of 4 threads.
    #[must_use]
    pub fn new(arguments: Vec<Box<Array>>, results: Vec<Box<Array>>) -> Self {
        let types = vec![1; arguments.len().max(results.len())];
        // SAFETY: zeros are a value of every field.
        let frame = unsafe { std::mem::zeroed() };
        let mut call = Self {
            frame,
            api: Box::new(api()),
            pool: Pool::new(4, false),
            arguments,
            results,
            types,
            attr_types: Vec::new(),
            names: Vec::new(),
            attrs: Vec::new(),
            args: Vec::new(),
            rets: Vec::new(),
            spans: Vec::new(),
            owned: Vec::new(),
        };
        call.link();
        call
    }

    /// Adds an attribute of type `kind`, whose value is a struct of [`abi`].
    #[must_use]
    pub fn attribute<T: 'static>(mut self, name: &str, kind: u32, value: T) -> Self {
        let text = self.own(name.as_bytes().to_vec().into_boxed_slice());
        // SAFETY: the slice was boxed just now.
        let text = unsafe { &*text };
        self.attr_types.push(kind);
        self.names.push(Box::new(abi::ByteSpan { ptr: text.as_ptr().cast(), len: text.len() }));
        let value = self.own(value);
        self.attrs.push(value.cast());
        self.link();
        self
    }

    /// Adds a number as an attribute.
    #[must_use]
    pub fn scalar<T: Element>(mut self, name: &str, value: T) -> Self {
        let value = self.own(value).cast();
        let scalar = abi::Scalar { dtype: T::DTYPE as u32, value };
        self.attribute(name, abi::ATTR_TYPE_SCALAR, scalar)
    }

    /// Keeps `value` as long as the call, at one address.
    pub fn own<T: 'static>(&mut self, value: T) -> *mut T {
        let mut value = Box::new(value);
        let address = &raw mut *value;
        self.owned.push(value);
        address
    }

    /// Points the frame to everything.
    pub fn link(&mut self) {
        self.args = self.arguments.iter_mut().map(|a| (&raw mut a.buffer).cast()).collect();
        self.rets = self.results.iter_mut().map(|r| (&raw mut r.buffer).cast()).collect();
        self.spans = self.names.iter_mut().map(|name| &raw mut **name).collect();
        self.frame = abi::CallFrame {
            struct_size: std::mem::offset_of!(abi::CallFrame, future),
            extension_start: null_mut(),
            api: &raw const *self.api,
            ctx: (&raw mut *self.pool).cast(),
            stage: abi::STAGE_EXECUTE,
            args: abi::Args {
                struct_size: size_of::<abi::Args>(),
                extension_start: null_mut(),
                size: self.args.len() as i64,
                types: self.types.as_mut_ptr(),
                args: self.args.as_mut_ptr(),
            },
            rets: abi::Rets {
                struct_size: size_of::<abi::Rets>(),
                extension_start: null_mut(),
                size: self.rets.len() as i64,
                types: self.types.as_mut_ptr(),
                rets: self.rets.as_mut_ptr(),
            },
            attrs: abi::Attrs {
                struct_size: size_of::<abi::Attrs>(),
                extension_start: null_mut(),
                size: self.attrs.len() as i64,
                types: self.attr_types.as_mut_ptr(),
                names: self.spans.as_mut_ptr(),
                attrs: self.attrs.as_mut_ptr(),
            },
            future: null_mut(),
        };
    }

    /// Calls the handler.
    ///
    /// # Errors
    /// Code and message of the handler's error.
    ///
    /// # Panics
    /// The message is not UTF-8.
    pub fn call(&mut self, handler: abi::Handler) -> Result<(), (ErrorCode, String)> {
        // SAFETY: what the frame points to is owned here, or what a test broke is refused unread.
        let error = unsafe { handler(&raw mut self.frame) };
        if error.is_null() {
            return Ok(());
        }
        // SAFETY: made by `error_create`, and freed here.
        let error = unsafe { Box::from_raw(error.cast::<ErrorBox>()) };
        Err((ErrorCode::from_u32(error.code), error.message.to_str().unwrap().to_owned()))
    }

    /// The message of the `INVALID_ARGUMENT` that the handler answers.
    ///
    /// # Panics
    /// It answers anything else.
    pub fn refused(&mut self, handler: abi::Handler) -> String {
        let (code, message) = self.call(handler).expect_err("the frame is wrong");
        assert_eq!(code, ErrorCode::InvalidArgument, "{message}");
        message
    }
}
