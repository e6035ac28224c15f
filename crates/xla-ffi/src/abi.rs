//! The C interface between XLA and a handler, as XLA FFI 0.1 defines it and every later minor version
//! keeps it.
//!
//! Written from understanding of `xla/ffi/api/c_api.h`; `tests/abi.rs` compares size and offset of
//! every field with the header of an installed jaxlib. Fields keep the names of that header. A field
//! that C declares as an enum is a plain [`u32`] here, because another side of the interface may
//! store a value that this text does not know.
//!
//! No struct that XLA hands over may be read before its `struct_size` was: an older side has shorter
//! ones.

#![allow(missing_docs)] // fields are named by the C header

use std::ffi::{c_char, c_int, c_void};

/// The interface version that handlers answer; a runtime refuses a handler newer than itself.
pub const API_MAJOR: c_int = 0;
/// See [`API_MAJOR`]. Nothing of this crate needs more than the first minor version.
pub const API_MINOR: c_int = 1;

/// What a member of the list at `extension_start` is.
pub const EXTENSION_METADATA: u32 = 1;

/// The only type of argument.
pub const ARG_TYPE_BUFFER: u32 = 1;
/// The only type of result.
pub const RET_TYPE_BUFFER: u32 = 1;

pub const ATTR_TYPE_ARRAY: u32 = 1;
pub const ATTR_TYPE_DICTIONARY: u32 = 2;
pub const ATTR_TYPE_SCALAR: u32 = 3;
pub const ATTR_TYPE_STRING: u32 = 4;

pub const STAGE_INSTANTIATE: u32 = 0;
pub const STAGE_PREPARE: u32 = 1;
pub const STAGE_INITIALIZE: u32 = 2;
pub const STAGE_EXECUTE: u32 = 3;

/// A bit of [`Metadata::traits`]: calls may be captured into a command buffer and replayed.
pub const TRAIT_COMMAND_BUFFER_COMPATIBLE: u32 = 1;

/// An error that the runtime owns.
#[repr(C)]
pub struct Error {
    opaque: [u8; 0],
}

/// What the runtime knows of the call in progress.
#[repr(C)]
pub struct ExecutionContext {
    opaque: [u8; 0],
}

/// A promise to complete later, which this crate does not use.
#[repr(C)]
pub struct Future {
    opaque: [u8; 0],
}

/// A handler: null for success.
pub type Handler = unsafe extern "C" fn(frame: *mut CallFrame) -> *mut Error;
/// A task of the runtime's thread pool.
pub type Task = unsafe extern "C" fn(data: *mut c_void);

/// The head of a list of additions to a struct.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ExtensionBase {
    pub struct_size: usize,
    pub r#type: u32,
    pub next: *mut ExtensionBase,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ApiVersion {
    pub struct_size: usize,
    pub extension_start: *mut ExtensionBase,
    pub major_version: c_int,
    pub minor_version: c_int,
}

/// A string without a terminator.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ByteSpan {
    pub ptr: *const c_char,
    pub len: usize,
}

/// The value behind an attribute of type [`ATTR_TYPE_SCALAR`].
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Scalar {
    pub dtype: u32,
    pub value: *mut c_void,
}

/// The value behind an attribute of type [`ATTR_TYPE_ARRAY`].
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Array {
    pub dtype: u32,
    pub size: usize,
    pub data: *mut c_void,
}

/// An argument or result.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Buffer {
    pub struct_size: usize,
    pub extension_start: *mut ExtensionBase,
    pub dtype: u32,
    pub data: *mut c_void,
    pub rank: i64,
    pub dims: *mut i64,
}

/// The arguments of a call.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Args {
    pub struct_size: usize,
    pub extension_start: *mut ExtensionBase,
    pub size: i64,
    pub types: *mut u32,
    pub args: *mut *mut c_void,
}

/// The results of a call.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Rets {
    pub struct_size: usize,
    pub extension_start: *mut ExtensionBase,
    pub size: i64,
    pub types: *mut u32,
    pub rets: *mut *mut c_void,
}

/// The attributes of a call, or a dictionary among them.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Attrs {
    pub struct_size: usize,
    pub extension_start: *mut ExtensionBase,
    pub size: i64,
    pub types: *mut u32,
    pub names: *mut *mut ByteSpan,
    pub attrs: *mut *mut c_void,
}

/// Everything that a handler is called with. `struct_size` counts up to `attrs`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CallFrame {
    pub struct_size: usize,
    pub extension_start: *mut ExtensionBase,
    pub api: *const Api,
    pub ctx: *mut ExecutionContext,
    pub stage: u32,
    pub args: Args,
    pub rets: Rets,
    pub attrs: Attrs,
    pub future: *mut Future,
}

/// What a handler says of itself. `struct_size` counts up to `traits`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Metadata {
    pub struct_size: usize,
    pub api_version: ApiVersion,
    pub traits: u32,
    pub state_type_id: i64,
}

/// The question for [`Metadata`]: a frame that carries it asks for nothing else.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct MetadataExtension {
    pub extension_base: ExtensionBase,
    pub metadata: *mut Metadata,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ErrorCreateArgs {
    pub struct_size: usize,
    pub extension_start: *mut ExtensionBase,
    pub message: *const c_char,
    pub errc: u32,
}

/// Runtimes before minor version 4 end it at `message`, and leave `errc` alone.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ErrorGetDetailsArgs {
    pub struct_size: usize,
    pub extension_start: *mut ExtensionBase,
    pub error: *mut Error,
    pub message: *const c_char,
    pub errc: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ErrorDestroyArgs {
    pub struct_size: usize,
    pub extension_start: *mut ExtensionBase,
    pub error: *mut Error,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct StreamGetArgs {
    pub struct_size: usize,
    pub extension_start: *mut ExtensionBase,
    pub ctx: *mut ExecutionContext,
    pub stream: *mut c_void,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DeviceMemoryAllocateArgs {
    pub struct_size: usize,
    pub extension_start: *mut ExtensionBase,
    pub ctx: *mut ExecutionContext,
    pub size: usize,
    pub alignment: usize,
    pub data: *mut c_void,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DeviceMemoryFreeArgs {
    pub struct_size: usize,
    pub extension_start: *mut ExtensionBase,
    pub ctx: *mut ExecutionContext,
    pub size: usize,
    pub data: *mut c_void,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ThreadPoolScheduleArgs {
    pub struct_size: usize,
    pub extension_start: *mut ExtensionBase,
    pub ctx: *mut ExecutionContext,
    pub task: Option<Task>,
    pub data: *mut c_void,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ThreadPoolNumThreadsArgs {
    pub struct_size: usize,
    pub extension_start: *mut ExtensionBase,
    pub ctx: *mut ExecutionContext,
    pub num_threads: *mut i64,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DeviceOrdinalGetArgs {
    pub struct_size: usize,
    pub extension_start: *mut ExtensionBase,
    pub ctx: *mut ExecutionContext,
    pub device_ordinal: i32,
}

/// A function of the runtime that may fail: null for success.
pub type Call<A> = unsafe extern "C" fn(args: *mut A) -> *mut Error;
/// A function of the runtime that cannot fail.
pub type Infallible<A> = unsafe extern "C" fn(args: *mut A);
/// A function that this crate never calls.
pub type Unused = *const c_void;

/// The functions of the runtime. One past `struct_size` is absent, and one within may be null.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Api {
    pub struct_size: usize,
    pub extension_start: *mut ExtensionBase,
    pub api_version: ApiVersion,
    pub internal_api: *const c_void,
    pub error_create: Option<Call<ErrorCreateArgs>>,
    pub error_get_details: Option<Infallible<ErrorGetDetailsArgs>>,
    pub error_destroy: Option<Infallible<ErrorDestroyArgs>>,
    pub handler_register: Unused,
    pub stream_get: Option<Call<StreamGetArgs>>,
    pub type_register: Unused,
    pub execution_context_get: Unused,
    pub state_set: Unused,
    pub state_get: Unused,
    pub device_memory_allocate: Option<Call<DeviceMemoryAllocateArgs>>,
    pub device_memory_free: Option<Call<DeviceMemoryFreeArgs>>,
    pub thread_pool_schedule: Option<Call<ThreadPoolScheduleArgs>>,
    pub thread_pool_num_threads: Option<Call<ThreadPoolNumThreadsArgs>>,
    pub future_create: Unused,
    pub future_set_available: Unused,
    pub future_set_error: Unused,
    pub run_id_get: Unused,
    pub device_ordinal_get: Option<Call<DeviceOrdinalGetArgs>>,
}
