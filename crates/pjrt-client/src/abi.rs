//! PJRT's C interface, as version 0.81 of it has it.
//!
//! Written from understanding of `pjrt_c_api.h`; `tests/abi.rs` compares size and offset of every
//! field, and the position of every function, with the header that a plug-in carries. Fields keep
//! the names of that header. A C enum is a [`u32`] and a C bool a [`u8`] here, because the plug-in
//! may store a value that this text does not know.
//!
//! A function is a type, [`Call`]: the struct of its arguments. Names are those of C without
//! `PJRT_`, underscores and `_Args`.

#![allow(missing_docs)] // fields are named by the C header

use std::{
    ffi::{c_char, c_int, c_void},
    mem::offset_of,
    ops::{Deref, DerefMut},
};

/// A version other than this major one is another interface.
pub const API_MAJOR: c_int = 0;
/// The version that this text was written from. Plug-ins of other minor versions work too.
pub const API_MINOR: c_int = 81;

pub const EXTENSION_GPU_CUSTOM_CALL: u32 = 0;
pub const EXTENSION_FFI: u32 = 5;

pub const VALUE_STRING: u32 = 0;
pub const VALUE_INT64: u32 = 1;
pub const VALUE_INT64_LIST: u32 = 2;
pub const VALUE_FLOAT: u32 = 3;
pub const VALUE_BOOL: u32 = 4;

pub const HOST_IMMUTABLE_ONLY_DURING_CALL: u32 = 0;
pub const HOST_IMMUTABLE_ZERO_COPY: u32 = 2;

pub const LAYOUT_TILED: u32 = 0;
pub const LAYOUT_STRIDES: u32 = 1;

macro_rules! opaque {
    ($($name:ident)*) => {
        $(
            /// An object of the plug-in.
            #[repr(C)]
            pub struct $name {
                opaque: [u8; 0],
            }
        )*
    };
}

opaque! {
    Error Event Client Device Memory DeviceDescription TopologyDescription Executable
    LoadedExecutable Buffer ExecuteContext SerializedExecutable SerializedTopology
}

/// A struct that begins with its size, under its name in the header.
///
/// # Safety
/// All zeros are a value of it, and the first field is the size.
pub unsafe trait Struct: Sized {
    /// The name in the header.
    const NAME: &'static str;
    /// Every field and its offset.
    const FIELDS: &'static [(&'static str, usize)];
}

/// The arguments of a function in the table, of which only one function takes them.
///
/// # Safety
/// The function called [`Call::FUNCTION`] takes a pointer to it.
pub unsafe trait Call: Struct {
    /// The name in the header.
    const FUNCTION: &'static str;
    /// The position in the table.
    const INDEX: usize = index_of(Self::FUNCTION);
}

/// A struct as it is handed over: zeros, with room at its end.
///
/// Later plug-ins refuse a struct that lacks the fields they added at its end, and take a longer
/// one. With the room they find their new fields there, and zero in them, which asks for nothing.
#[repr(C)]
pub struct Padded<T> {
    value: T,
    room: [usize; 16],
}

impl<T: Struct> Padded<T> {
    /// Zeros but for the size.
    #[must_use]
    pub const fn new() -> Self {
        // SAFETY: all zeros are a value of T, and of the room.
        let mut new = unsafe { std::mem::zeroed::<Self>() };
        // SAFETY: T begins with its size.
        unsafe { (&raw mut new).cast::<usize>().write(size_of::<Self>()) };
        new
    }
}

impl<T> Padded<T> {
    /// A pointer to the struct and the room.
    #[must_use]
    pub const fn as_ptr(&self) -> *const T {
        std::ptr::from_ref(self).cast()
    }

    /// A pointer to the struct and the room.
    #[must_use]
    pub const fn as_mut_ptr(&mut self) -> *mut T {
        std::ptr::from_mut(self).cast()
    }
}

impl<T: Struct> Default for Padded<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> Deref for Padded<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> DerefMut for Padded<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

macro_rules! structs {
    ($($name:ident = $c:literal { $($field:ident: $type:ty,)* })*) => {
        $(
            #[repr(C)]
            #[derive(Clone, Copy)]
            pub struct $name {
                pub struct_size: usize,
                $(pub $field: $type,)*
            }

            // SAFETY: numbers, pointers, optional functions and unions of them may be zeros.
            unsafe impl Struct for $name {
                const NAME: &'static str = $c;
                const FIELDS: &'static [(&'static str, usize)] = &[
                    ("struct_size", offset_of!($name, struct_size)),
                    $((stringify!($field), offset_of!($name, $field)),)*
                ];
            }
        )*

        /// Size and fields of every struct, by the name in the header.
        pub const STRUCTS: &[(&str, usize, &[(&str, usize)])] = &[
            $(($c, size_of::<$name>(), $name::FIELDS),)*
        ];
    };
}

macro_rules! calls {
    ($($name:ident = $c:literal { $($field:ident: $type:ty,)* })*) => {
        $(
            #[repr(C)]
            #[derive(Clone, Copy)]
            pub struct $name {
                pub struct_size: usize,
                pub extension_start: *mut ExtensionBase,
                $(pub $field: $type,)*
            }

            // SAFETY: as for the other structs.
            unsafe impl Struct for $name {
                const NAME: &'static str = concat!($c, "_Args");
                const FIELDS: &'static [(&'static str, usize)] = &[
                    ("struct_size", offset_of!($name, struct_size)),
                    ("extension_start", offset_of!($name, extension_start)),
                    $((stringify!($field), offset_of!($name, $field)),)*
                ];
            }

            // SAFETY: the table takes each struct in the function of its name.
            unsafe impl Call for $name {
                const FUNCTION: &'static str = $c;
            }
        )*

        /// Size and fields of the arguments of every function, by the name in the header.
        pub const CALLS: &[(&str, usize, &[(&str, usize)])] = &[
            $((concat!($c, "_Args"), size_of::<$name>(), $name::FIELDS),)*
        ];
    };
}

/// A deleter of something that the plug-in lent.
pub type Deleter<T> = unsafe extern "C" fn(*mut T);
/// What [`EventOnReady`] calls, with an error to be destroyed or null.
pub type OnReady = unsafe extern "C" fn(error: *mut Error, user_arg: *mut c_void);

/// The value of a [`NamedValue`], by its type.
#[repr(C)]
#[derive(Clone, Copy)]
pub union NamedValueUnion {
    pub string_value: *const c_char,
    pub int64_value: i64,
    pub int64_array_value: *const i64,
    pub float_value: f32,
    pub bool_value: u8,
}

/// The layout of a [`MemoryLayout`], by its type.
#[repr(C)]
#[derive(Clone, Copy)]
pub union MemoryLayoutUnion {
    pub tiled: MemoryLayoutTiled,
    pub strides: MemoryLayoutStrides,
}

structs! {
    ExtensionBase = "PJRT_Extension_Base" {
        r#type: u32,
        next: *mut ExtensionBase,
    }
    ApiVersion = "PJRT_Api_Version" {
        extension_start: *mut ExtensionBase,
        major_version: c_int,
        minor_version: c_int,
    }
    // Comes in arrays, so it is never padded.
    NamedValue = "PJRT_NamedValue" {
        extension_start: *mut ExtensionBase,
        name: *const c_char,
        name_size: usize,
        r#type: u32,
        value: NamedValueUnion,
        value_size: usize,
    }
    Program = "PJRT_Program" {
        extension_start: *mut ExtensionBase,
        code: *mut c_char,
        code_size: usize,
        format: *const c_char,
        format_size: usize,
    }
    MemoryLayoutTiled = "PJRT_Buffer_MemoryLayout_Tiled" {
        extension_start: *mut ExtensionBase,
        minor_to_major: *const i64,
        minor_to_major_size: usize,
        tile_dims: *const i64,
        tile_dim_sizes: *const usize,
        num_tiles: usize,
    }
    MemoryLayoutStrides = "PJRT_Buffer_MemoryLayout_Strides" {
        extension_start: *mut ExtensionBase,
        byte_strides: *const i64,
        num_byte_strides: usize,
    }
    MemoryLayout = "PJRT_Buffer_MemoryLayout" {
        extension_start: *mut ExtensionBase,
        layout: MemoryLayoutUnion,
        r#type: u32,
    }
    ExecuteOptions = "PJRT_ExecuteOptions" {
        extension_start: *mut ExtensionBase,
        send_callbacks: *mut *mut c_void,
        recv_callbacks: *mut *mut c_void,
        num_send_ops: usize,
        num_recv_ops: usize,
        launch_id: c_int,
        non_donatable_input_indices: *const i64,
        num_non_donatable_input_indices: usize,
        context: *mut ExecuteContext,
        call_location: *const c_char,
        num_tasks: usize,
        task_ids: *mut c_int,
        incarnation_ids: *mut i64,
    }
}

/// The head of the plug-in's table, which [`FUNCTIONS`] follow.
#[repr(C)]
pub struct Api {
    pub struct_size: usize,
    pub extension_start: *mut ExtensionBase,
    pub pjrt_api_version: ApiVersion,
}

/// The arguments of the FFI extension's `register_handler`, since its version 3.
///
/// Version 2 had one field more in the middle and asked for 60 bytes, so this is handed over
/// without room: such a plug-in must refuse it, not misread it.
#[repr(C)]
pub struct FfiRegisterHandler {
    pub struct_size: usize,
    pub target_name: *const c_char,
    pub target_name_size: usize,
    pub handler: *const c_void,
    pub platform_name: *const c_char,
    pub platform_name_size: usize,
    pub traits: u32,
}

/// The extension of type [`EXTENSION_FFI`].
#[repr(C)]
pub struct FfiExtension {
    pub base: ExtensionBase,
    pub type_register: *const c_void,
    pub user_data_add: *const c_void,
    pub register_handler: Option<unsafe extern "C" fn(*mut FfiRegisterHandler) -> *mut Error>,
}

/// The arguments of the GPU extension's `custom_call`, since its version 2.
#[repr(C)]
pub struct GpuRegisterCustomCall {
    pub struct_size: usize,
    pub function_name: *const c_char,
    pub function_name_size: usize,
    pub api_version: c_int,
    pub handler_instantiate: *const c_void,
    pub handler_prepare: *const c_void,
    pub handler_initialize: *const c_void,
    pub handler_execute: *const c_void,
    pub traits: u32,
}

/// The extension of type [`EXTENSION_GPU_CUSTOM_CALL`].
#[repr(C)]
pub struct GpuCustomCallExtension {
    pub base: ExtensionBase,
    pub custom_call: Option<unsafe extern "C" fn(*mut GpuRegisterCustomCall) -> *mut Error>,
}

calls! {
    ErrorDestroy = "PJRT_Error_Destroy" {
        error: *mut Error,
    }
    ErrorMessage = "PJRT_Error_Message" {
        error: *const Error,
        message: *const c_char,
        message_size: usize,
    }
    ErrorGetCode = "PJRT_Error_GetCode" {
        error: *const Error,
        code: u32,
    }
    PluginInitialize = "PJRT_Plugin_Initialize" {}
    PluginAttributes = "PJRT_Plugin_Attributes" {
        attributes: *const NamedValue,
        num_attributes: usize,
    }
    EventDestroy = "PJRT_Event_Destroy" {
        event: *mut Event,
    }
    EventIsReady = "PJRT_Event_IsReady" {
        event: *mut Event,
        is_ready: u8,
    }
    EventError = "PJRT_Event_Error" {
        event: *mut Event,
    }
    EventAwait = "PJRT_Event_Await" {
        event: *mut Event,
    }
    EventOnReady = "PJRT_Event_OnReady" {
        event: *mut Event,
        callback: Option<OnReady>,
        user_arg: *mut c_void,
    }
    ClientCreate = "PJRT_Client_Create" {
        create_options: *const NamedValue,
        num_options: usize,
        kv_get_callback: *const c_void,
        kv_get_user_arg: *mut c_void,
        kv_put_callback: *const c_void,
        kv_put_user_arg: *mut c_void,
        client: *mut Client,
        kv_try_get_callback: *const c_void,
        kv_try_get_user_arg: *mut c_void,
    }
    ClientDestroy = "PJRT_Client_Destroy" {
        client: *mut Client,
    }
    ClientPlatformName = "PJRT_Client_PlatformName" {
        client: *mut Client,
        platform_name: *const c_char,
        platform_name_size: usize,
    }
    ClientProcessIndex = "PJRT_Client_ProcessIndex" {
        client: *mut Client,
        process_index: c_int,
    }
    ClientPlatformVersion = "PJRT_Client_PlatformVersion" {
        client: *mut Client,
        platform_version: *const c_char,
        platform_version_size: usize,
    }
    ClientTopologyDescription = "PJRT_Client_TopologyDescription" {
        client: *mut Client,
        topology: *mut TopologyDescription,
    }
    ClientDevices = "PJRT_Client_Devices" {
        client: *mut Client,
        devices: *const *mut Device,
        num_devices: usize,
    }
    ClientAddressableDevices = "PJRT_Client_AddressableDevices" {
        client: *mut Client,
        addressable_devices: *const *mut Device,
        num_addressable_devices: usize,
    }
    ClientCompile = "PJRT_Client_Compile" {
        client: *mut Client,
        program: *const Program,
        compile_options: *const c_char,
        compile_options_size: usize,
        executable: *mut LoadedExecutable,
    }
    ClientBufferFromHostBuffer = "PJRT_Client_BufferFromHostBuffer" {
        client: *mut Client,
        data: *const c_void,
        r#type: u32,
        dims: *const i64,
        num_dims: usize,
        byte_strides: *const i64,
        num_byte_strides: usize,
        host_buffer_semantics: u32,
        device: *mut Device,
        memory: *mut Memory,
        device_layout: *mut MemoryLayout,
        done_with_host_buffer: *mut Event,
        buffer: *mut Buffer,
    }
    DeviceDescriptionId = "PJRT_DeviceDescription_Id" {
        device_description: *mut DeviceDescription,
        id: c_int,
    }
    DeviceDescriptionProcessIndex = "PJRT_DeviceDescription_ProcessIndex" {
        device_description: *mut DeviceDescription,
        process_index: c_int,
    }
    DeviceDescriptionAttributes = "PJRT_DeviceDescription_Attributes" {
        device_description: *mut DeviceDescription,
        num_attributes: usize,
        attributes: *const NamedValue,
    }
    DeviceDescriptionKind = "PJRT_DeviceDescription_Kind" {
        device_description: *mut DeviceDescription,
        device_kind: *const c_char,
        device_kind_size: usize,
    }
    DeviceDescriptionDebugString = "PJRT_DeviceDescription_DebugString" {
        device_description: *mut DeviceDescription,
        debug_string: *const c_char,
        debug_string_size: usize,
    }
    DeviceDescriptionToString = "PJRT_DeviceDescription_ToString" {
        device_description: *mut DeviceDescription,
        to_string: *const c_char,
        to_string_size: usize,
    }
    DeviceGetDescription = "PJRT_Device_GetDescription" {
        device: *mut Device,
        device_description: *mut DeviceDescription,
    }
    DeviceIsAddressable = "PJRT_Device_IsAddressable" {
        device: *mut Device,
        is_addressable: u8,
    }
    DeviceLocalHardwareId = "PJRT_Device_LocalHardwareId" {
        device: *mut Device,
        local_hardware_id: c_int,
    }
    DeviceAddressableMemories = "PJRT_Device_AddressableMemories" {
        device: *mut Device,
        memories: *const *mut Memory,
        num_memories: usize,
    }
    DeviceDefaultMemory = "PJRT_Device_DefaultMemory" {
        device: *mut Device,
        memory: *mut Memory,
    }
    DeviceMemoryStats = "PJRT_Device_MemoryStats" {
        device: *mut Device,
        bytes_in_use: i64,
        peak_bytes_in_use: i64,
        peak_bytes_in_use_is_set: u8,
        num_allocs: i64,
        num_allocs_is_set: u8,
        largest_alloc_size: i64,
        largest_alloc_size_is_set: u8,
        bytes_limit: i64,
        bytes_limit_is_set: u8,
        bytes_reserved: i64,
        bytes_reserved_is_set: u8,
        peak_bytes_reserved: i64,
        peak_bytes_reserved_is_set: u8,
        bytes_reservable_limit: i64,
        bytes_reservable_limit_is_set: u8,
        largest_free_block_bytes: i64,
        largest_free_block_bytes_is_set: u8,
        pool_bytes: i64,
        pool_bytes_is_set: u8,
        peak_pool_bytes: i64,
        peak_pool_bytes_is_set: u8,
    }
    MemoryId = "PJRT_Memory_Id" {
        memory: *mut Memory,
        id: c_int,
    }
    MemoryKind = "PJRT_Memory_Kind" {
        memory: *mut Memory,
        kind: *const c_char,
        kind_size: usize,
    }
    MemoryDebugString = "PJRT_Memory_DebugString" {
        memory: *mut Memory,
        debug_string: *const c_char,
        debug_string_size: usize,
    }
    MemoryToString = "PJRT_Memory_ToString" {
        memory: *mut Memory,
        to_string: *const c_char,
        to_string_size: usize,
    }
    ExecutableDestroy = "PJRT_Executable_Destroy" {
        executable: *mut Executable,
    }
    ExecutableName = "PJRT_Executable_Name" {
        executable: *mut Executable,
        executable_name: *const c_char,
        executable_name_size: usize,
    }
    ExecutableNumReplicas = "PJRT_Executable_NumReplicas" {
        executable: *mut Executable,
        num_replicas: usize,
    }
    ExecutableNumPartitions = "PJRT_Executable_NumPartitions" {
        executable: *mut Executable,
        num_partitions: usize,
    }
    ExecutableNumOutputs = "PJRT_Executable_NumOutputs" {
        executable: *mut Executable,
        num_outputs: usize,
    }
    ExecutableSizeOfGeneratedCodeInBytes = "PJRT_Executable_SizeOfGeneratedCodeInBytes" {
        executable: *mut Executable,
        size_in_bytes: i64,
    }
    ExecutableFingerprint = "PJRT_Executable_Fingerprint" {
        executable: *mut Executable,
        executable_fingerprint: *const c_char,
        executable_fingerprint_size: usize,
    }
    ExecutableGetCostAnalysis = "PJRT_Executable_GetCostAnalysis" {
        executable: *mut Executable,
        num_properties: usize,
        properties: *const NamedValue,
    }
    ExecutableGetCompiledMemoryStats = "PJRT_Executable_GetCompiledMemoryStats" {
        executable: *mut Executable,
        generated_code_size_in_bytes: i64,
        argument_size_in_bytes: i64,
        output_size_in_bytes: i64,
        alias_size_in_bytes: i64,
        temp_size_in_bytes: i64,
        host_generated_code_size_in_bytes: i64,
        host_argument_size_in_bytes: i64,
        host_output_size_in_bytes: i64,
        host_alias_size_in_bytes: i64,
        host_temp_size_in_bytes: i64,
        peak_memory_in_bytes: i64,
    }
    ExecutableOutputElementTypes = "PJRT_Executable_OutputElementTypes" {
        executable: *mut Executable,
        output_types: *const u32,
        num_output_types: usize,
    }
    ExecutableOutputDimensions = "PJRT_Executable_OutputDimensions" {
        executable: *mut Executable,
        num_outputs: usize,
        dims: *const i64,
        dim_sizes: *const usize,
    }
    ExecutableOptimizedProgram = "PJRT_Executable_OptimizedProgram" {
        executable: *mut Executable,
        program: *mut Program,
    }
    ExecutableSerialize = "PJRT_Executable_Serialize" {
        executable: *const Executable,
        serialized_bytes: *const c_char,
        serialized_bytes_size: usize,
        serialized_executable: *mut SerializedExecutable,
        serialized_executable_deleter: Option<Deleter<SerializedExecutable>>,
    }
    ExecutableDeserializeAndLoad = "PJRT_Executable_DeserializeAndLoad" {
        client: *mut Client,
        serialized_executable: *const c_char,
        serialized_executable_size: usize,
        loaded_executable: *mut LoadedExecutable,
        overridden_serialized_compile_options: *const c_char,
        overridden_serialized_compile_options_size: usize,
    }
    LoadedExecutableDestroy = "PJRT_LoadedExecutable_Destroy" {
        executable: *mut LoadedExecutable,
    }
    LoadedExecutableGetExecutable = "PJRT_LoadedExecutable_GetExecutable" {
        loaded_executable: *mut LoadedExecutable,
        executable: *mut Executable,
    }
    LoadedExecutableAddressableDevices = "PJRT_LoadedExecutable_AddressableDevices" {
        executable: *mut LoadedExecutable,
        addressable_devices: *const *mut Device,
        num_addressable_devices: usize,
    }
    LoadedExecutableDelete = "PJRT_LoadedExecutable_Delete" {
        executable: *mut LoadedExecutable,
    }
    LoadedExecutableIsDeleted = "PJRT_LoadedExecutable_IsDeleted" {
        executable: *mut LoadedExecutable,
        is_deleted: u8,
    }
    LoadedExecutableExecute = "PJRT_LoadedExecutable_Execute" {
        executable: *mut LoadedExecutable,
        options: *mut ExecuteOptions,
        argument_lists: *const *const *mut Buffer,
        num_devices: usize,
        num_args: usize,
        output_lists: *const *mut *mut Buffer,
        device_complete_events: *mut *mut Event,
        execute_device: *mut Device,
    }
    BufferDestroy = "PJRT_Buffer_Destroy" {
        buffer: *mut Buffer,
    }
    BufferElementType = "PJRT_Buffer_ElementType" {
        buffer: *mut Buffer,
        r#type: u32,
    }
    BufferDimensions = "PJRT_Buffer_Dimensions" {
        buffer: *mut Buffer,
        dims: *const i64,
        num_dims: usize,
    }
    BufferGetMemoryLayout = "PJRT_Buffer_GetMemoryLayout" {
        buffer: *mut Buffer,
        layout: MemoryLayout,
    }
    BufferOnDeviceSizeInBytes = "PJRT_Buffer_OnDeviceSizeInBytes" {
        buffer: *mut Buffer,
        on_device_size_in_bytes: usize,
    }
    BufferDevice = "PJRT_Buffer_Device" {
        buffer: *mut Buffer,
        device: *mut Device,
    }
    BufferMemory = "PJRT_Buffer_Memory" {
        buffer: *mut Buffer,
        memory: *mut Memory,
    }
    BufferDelete = "PJRT_Buffer_Delete" {
        buffer: *mut Buffer,
    }
    BufferIsDeleted = "PJRT_Buffer_IsDeleted" {
        buffer: *mut Buffer,
        is_deleted: u8,
    }
    BufferCopyToDevice = "PJRT_Buffer_CopyToDevice" {
        buffer: *mut Buffer,
        dst_device: *mut Device,
        dst_buffer: *mut Buffer,
    }
    BufferCopyToMemory = "PJRT_Buffer_CopyToMemory" {
        buffer: *mut Buffer,
        dst_memory: *mut Memory,
        dst_buffer: *mut Buffer,
    }
    BufferToHostBuffer = "PJRT_Buffer_ToHostBuffer" {
        src: *mut Buffer,
        host_layout: *mut MemoryLayout,
        dst: *mut c_void,
        dst_size: usize,
        event: *mut Event,
    }
    BufferIsOnCpu = "PJRT_Buffer_IsOnCpu" {
        buffer: *mut Buffer,
        is_on_cpu: u8,
    }
    BufferReadyEvent = "PJRT_Buffer_ReadyEvent" {
        buffer: *mut Buffer,
        event: *mut Event,
    }
    TopologyDescriptionCreate = "PJRT_TopologyDescription_Create" {
        topology_name: *const c_char,
        topology_name_size: usize,
        create_options: *const NamedValue,
        num_options: usize,
        topology: *mut TopologyDescription,
    }
    TopologyDescriptionDestroy = "PJRT_TopologyDescription_Destroy" {
        topology: *mut TopologyDescription,
    }
    TopologyDescriptionPlatformName = "PJRT_TopologyDescription_PlatformName" {
        topology: *const TopologyDescription,
        platform_name: *const c_char,
        platform_name_size: usize,
    }
    TopologyDescriptionPlatformVersion = "PJRT_TopologyDescription_PlatformVersion" {
        topology: *mut TopologyDescription,
        platform_version: *const c_char,
        platform_version_size: usize,
    }
    TopologyDescriptionGetDeviceDescriptions = "PJRT_TopologyDescription_GetDeviceDescriptions" {
        topology: *const TopologyDescription,
        descriptions: *const *mut DeviceDescription,
        num_descriptions: usize,
    }
    TopologyDescriptionSerialize = "PJRT_TopologyDescription_Serialize" {
        topology: *mut TopologyDescription,
        serialized_bytes: *const c_char,
        serialized_bytes_size: usize,
        serialized_topology: *mut SerializedTopology,
        serialized_topology_deleter: Option<Deleter<SerializedTopology>>,
    }
    TopologyDescriptionAttributes = "PJRT_TopologyDescription_Attributes" {
        topology: *mut TopologyDescription,
        attributes: *const NamedValue,
        num_attributes: usize,
    }
    Compile = "PJRT_Compile" {
        topology: *const TopologyDescription,
        program: *const Program,
        compile_options: *const c_char,
        compile_options_size: usize,
        client: *mut Client,
        executable: *mut Executable,
    }
}

/// Where in the table the function at `index` of [`FUNCTIONS`] is.
#[must_use]
pub const fn offset_of_function(index: usize) -> usize {
    size_of::<Api>() + index * size_of::<fn()>()
}

/// The position of the function `name` in [`FUNCTIONS`].
///
/// # Panics
/// There is no such function.
#[must_use]
pub const fn index_of(name: &str) -> usize {
    let mut index = 0;
    while index < FUNCTIONS.len() {
        if same(FUNCTIONS[index].as_bytes(), name.as_bytes()) {
            return index;
        }
        index += 1;
    }
    panic!("no such function")
}

const fn same(a: &[u8], b: &[u8]) -> bool {
    if a.len() != b.len() {
        return false;
    }
    let mut index = 0;
    while index < a.len() {
        if a[index] != b[index] {
            return false;
        }
        index += 1;
    }
    true
}

/// The functions of the table, in its order.
#[rustfmt::skip]
pub const FUNCTIONS: &[&str] = &[
    "PJRT_Error_Destroy",
    "PJRT_Error_Message",
    "PJRT_Error_GetCode",
    "PJRT_Plugin_Initialize",
    "PJRT_Plugin_Attributes",
    "PJRT_Event_Destroy",
    "PJRT_Event_IsReady",
    "PJRT_Event_Error",
    "PJRT_Event_Await",
    "PJRT_Event_OnReady",
    "PJRT_Client_Create",
    "PJRT_Client_Destroy",
    "PJRT_Client_PlatformName",
    "PJRT_Client_ProcessIndex",
    "PJRT_Client_PlatformVersion",
    "PJRT_Client_Devices",
    "PJRT_Client_AddressableDevices",
    "PJRT_Client_LookupDevice",
    "PJRT_Client_LookupAddressableDevice",
    "PJRT_Client_AddressableMemories",
    "PJRT_Client_Compile",
    "PJRT_Client_DefaultDeviceAssignment",
    "PJRT_Client_BufferFromHostBuffer",
    "PJRT_DeviceDescription_Id",
    "PJRT_DeviceDescription_ProcessIndex",
    "PJRT_DeviceDescription_Attributes",
    "PJRT_DeviceDescription_Kind",
    "PJRT_DeviceDescription_DebugString",
    "PJRT_DeviceDescription_ToString",
    "PJRT_Device_GetDescription",
    "PJRT_Device_IsAddressable",
    "PJRT_Device_LocalHardwareId",
    "PJRT_Device_AddressableMemories",
    "PJRT_Device_DefaultMemory",
    "PJRT_Device_MemoryStats",
    "PJRT_Memory_Id",
    "PJRT_Memory_Kind",
    "PJRT_Memory_DebugString",
    "PJRT_Memory_ToString",
    "PJRT_Memory_AddressableByDevices",
    "PJRT_Executable_Destroy",
    "PJRT_Executable_Name",
    "PJRT_Executable_NumReplicas",
    "PJRT_Executable_NumPartitions",
    "PJRT_Executable_NumOutputs",
    "PJRT_Executable_SizeOfGeneratedCodeInBytes",
    "PJRT_Executable_GetCostAnalysis",
    "PJRT_Executable_OutputMemoryKinds",
    "PJRT_Executable_OptimizedProgram",
    "PJRT_Executable_Serialize",
    "PJRT_LoadedExecutable_Destroy",
    "PJRT_LoadedExecutable_GetExecutable",
    "PJRT_LoadedExecutable_AddressableDevices",
    "PJRT_LoadedExecutable_Delete",
    "PJRT_LoadedExecutable_IsDeleted",
    "PJRT_LoadedExecutable_Execute",
    "PJRT_Executable_DeserializeAndLoad",
    "PJRT_LoadedExecutable_Fingerprint",
    "PJRT_Buffer_Destroy",
    "PJRT_Buffer_ElementType",
    "PJRT_Buffer_Dimensions",
    "PJRT_Buffer_UnpaddedDimensions",
    "PJRT_Buffer_DynamicDimensionIndices",
    "PJRT_Buffer_GetMemoryLayout",
    "PJRT_Buffer_OnDeviceSizeInBytes",
    "PJRT_Buffer_Device",
    "PJRT_Buffer_Memory",
    "PJRT_Buffer_Delete",
    "PJRT_Buffer_IsDeleted",
    "PJRT_Buffer_CopyToDevice",
    "PJRT_Buffer_ToHostBuffer",
    "PJRT_Buffer_IsOnCpu",
    "PJRT_Buffer_ReadyEvent",
    "PJRT_Buffer_UnsafePointer",
    "PJRT_Buffer_IncreaseExternalReferenceCount",
    "PJRT_Buffer_DecreaseExternalReferenceCount",
    "PJRT_Buffer_OpaqueDeviceMemoryDataPointer",
    "PJRT_CopyToDeviceStream_Destroy",
    "PJRT_CopyToDeviceStream_AddChunk",
    "PJRT_CopyToDeviceStream_TotalBytes",
    "PJRT_CopyToDeviceStream_GranuleSize",
    "PJRT_CopyToDeviceStream_CurrentBytes",
    "PJRT_TopologyDescription_Create",
    "PJRT_TopologyDescription_Destroy",
    "PJRT_TopologyDescription_PlatformName",
    "PJRT_TopologyDescription_PlatformVersion",
    "PJRT_TopologyDescription_GetDeviceDescriptions",
    "PJRT_TopologyDescription_Serialize",
    "PJRT_TopologyDescription_Attributes",
    "PJRT_Compile",
    "PJRT_Executable_OutputElementTypes",
    "PJRT_Executable_OutputDimensions",
    "PJRT_Buffer_CopyToMemory",
    "PJRT_Client_CreateViewOfDeviceBuffer",
    "PJRT_Executable_Fingerprint",
    "PJRT_Client_TopologyDescription",
    "PJRT_Executable_GetCompiledMemoryStats",
    "PJRT_Memory_Kind_Id",
    "PJRT_ExecuteContext_Create",
    "PJRT_ExecuteContext_Destroy",
    "PJRT_Buffer_CopyRawToHost",
    "PJRT_AsyncHostToDeviceTransferManager_Destroy",
    "PJRT_AsyncHostToDeviceTransferManager_TransferData",
    "PJRT_Client_CreateBuffersForAsyncHostToDevice",
    "PJRT_AsyncHostToDeviceTransferManager_RetrieveBuffer",
    "PJRT_AsyncHostToDeviceTransferManager_Device",
    "PJRT_AsyncHostToDeviceTransferManager_BufferCount",
    "PJRT_AsyncHostToDeviceTransferManager_BufferSize",
    "PJRT_AsyncHostToDeviceTransferManager_SetBufferError",
    "PJRT_AsyncHostToDeviceTransferManager_AddMetadata",
    "PJRT_Client_DmaMap",
    "PJRT_Client_DmaUnmap",
    "PJRT_Client_CreateUninitializedBuffer",
    "PJRT_Client_UpdateGlobalProcessInfo",
    "PJRT_TopologyDescription_Deserialize",
    "PJRT_Client_CreateAliasBuffer",
    "PJRT_Client_FulfillAliasBuffer",
    "PJRT_LoadedExecutable_GetDeviceAssignment",
];
