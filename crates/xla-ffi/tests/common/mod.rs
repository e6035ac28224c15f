//! A runtime of our own: call frames that own what they point to, and a table of functions that
//! keeps the errors that handlers make.

#![allow(dead_code)] // every test uses a part
#![allow(clippy::vec_box)] // frames keep the addresses of the items

use std::{
    ffi::{CStr, CString, c_void},
    ptr::{null, null_mut},
    thread::JoinHandle,
};

use xla_ffi::{DType, ErrorCode, abi};

/// What stands behind the runtime's opaque pointers.
pub struct ErrorBox {
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

/// The runtime's side of a call: its threads, started for every task.
pub struct Pool {
    /// As if all threads were busy until the handler has returned.
    pub late: bool,
    pub threads: i64,
    running: Vec<JoinHandle<()>>,
    queue: Vec<(abi::Task, usize)>,
}

impl Pool {
    pub fn new(threads: i64, late: bool) -> Box<Self> {
        Box::new(Self { late, threads, running: Vec::new(), queue: Vec::new() })
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

/// A table with everything that handlers call.
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
        device_ordinal_get: None,
    }
}

/// A buffer to pass, with its shape.
pub struct Array {
    pub buffer: abi::Buffer,
    pub dims: Vec<i64>,
    pub data: Vec<u64>,
}

impl Array {
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

    pub fn f32(values: &[f32]) -> Box<Self> {
        let mut array = Self::new(DType::F32, &[values.len() as i64]);
        array.floats_mut()[..values.len()].copy_from_slice(values);
        array
    }

    fn floats_mut(&mut self) -> &mut [f32] {
        // SAFETY: the words are twice as many floats.
        unsafe { std::slice::from_raw_parts_mut(self.buffer.data.cast(), self.data.len() * 2) }
    }

    pub fn floats(&mut self) -> Vec<f32> {
        let length = self.dims.iter().product::<i64>() as usize;
        self.floats_mut()[..length].to_vec()
    }
}

/// A call frame and what it points to. Every field can be broken before [`Call::call`].
pub struct Call {
    pub frame: abi::CallFrame,
    pub api: Box<abi::Api>,
    pub pool: Box<Pool>,
    pub arguments: Vec<Box<Array>>,
    pub results: Vec<Box<Array>>,
    pub types: Vec<u32>,
    pub attr_types: Vec<u32>,
    pub names: Vec<Box<abi::ByteSpan>>,
    pub attrs: Vec<*mut c_void>,
    args: Vec<*mut c_void>,
    rets: Vec<*mut c_void>,
    spans: Vec<*mut abi::ByteSpan>,
}

impl Call {
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
        };
        call.link();
        call
    }

    /// Adds an attribute, whose value outlives the test.
    pub fn attribute<T>(mut self, name: &'static str, kind: u32, value: T) -> Self {
        self.attr_types.push(kind);
        self.names.push(Box::new(span(name)));
        self.attrs.push(leak(value));
        self.link();
        self
    }

    pub fn scalar<T>(self, name: &'static str, dtype: DType, value: T) -> Self {
        let value = abi::Scalar { dtype: dtype as u32, value: leak(value) };
        self.attribute(name, abi::ATTR_TYPE_SCALAR, value)
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

    /// Calls the handler: code and message of its error.
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

    /// The message of an `INVALID_ARGUMENT`.
    pub fn refused(&mut self, handler: abi::Handler) -> String {
        let (code, message) = self.call(handler).expect_err("the frame is wrong");
        assert_eq!(code, ErrorCode::InvalidArgument, "{message}");
        message
    }
}

pub fn span(text: &'static str) -> abi::ByteSpan {
    abi::ByteSpan { ptr: text.as_ptr().cast(), len: text.len() }
}

pub fn leak<T>(value: T) -> *mut c_void {
    (Box::leak(Box::new(value)) as *mut T).cast()
}
