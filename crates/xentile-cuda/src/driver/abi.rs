//! Structs and numbers of cuda.h, by its own names.

#![allow(non_snake_case, reason = "as in C")]

use std::ffi::{c_uint, c_void};

mirror! {
    /// How a kernel is launched.
    pub(crate) struct LaunchConfig = CUlaunchConfig {
        gridDimX: c_uint,
        gridDimY: c_uint,
        gridDimZ: c_uint,
        blockDimX: c_uint,
        blockDimY: c_uint,
        blockDimZ: c_uint,
        sharedMemBytes: c_uint,
        hStream: *mut c_void,
        attrs: *const LaunchAttribute,
        numAttrs: c_uint,
    }
}

mirror! {
    /// What else is asked of a launch.
    pub(crate) struct LaunchAttribute = CUlaunchAttribute {
        id: c_uint,
        pad: [u8; 4],
        value: [c_uint; 16],
    }
}

mirror! {
    /// How boxes of a tensor are copied. The driver asks for a multiple of 64.
    #[repr(align(128))]
    pub(crate) struct TensorMap = CUtensorMap {
        opaque: [u64; 16],
    }
}

numbers! {
    SUCCESS: i32 = CUDA_SUCCESS, 0;
    NO_DEVICE: i32 = CUDA_ERROR_NO_DEVICE, 100;
    PROGRAMMATIC_SERIALIZATION: c_uint = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, 6;
    COOPERATIVE: c_uint = CU_LAUNCH_ATTRIBUTE_COOPERATIVE, 2;
    CLUSTER_DIMENSION: c_uint = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, 4;
    MULTIPROCESSORS: c_uint = CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 16;
    CAPABILITY_MAJOR: c_uint = CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 75;
    CAPABILITY_MINOR: c_uint = CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 76;
    SHARED_BYTES_PER_BLOCK: c_uint = CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 97;
    CLUSTER_LAUNCH: c_uint = CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH, 120;
    STATIC_SHARED_BYTES: c_uint = CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, 1;
    MAX_DYNAMIC_SHARED_BYTES: c_uint = CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 8;
    WIDE_CLUSTERS: c_uint = CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 14;
    TENSOR_OF_F16: c_uint = CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 6;
    TENSOR_OF_F32: c_uint = CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 7;
    TENSOR_OF_BF16: c_uint = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 9;
    NOT_INTERLEAVED: c_uint = CU_TENSOR_MAP_INTERLEAVE_NONE, 0;
    SWIZZLE_128_BYTES: c_uint = CU_TENSOR_MAP_SWIZZLE_128B, 3;
    PROMOTION_256_BYTES: c_uint = CU_TENSOR_MAP_L2_PROMOTION_L2_256B, 3;
    FILL_WITH_ZEROS: c_uint = CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE, 0;
}
