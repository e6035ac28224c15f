//! What this crate uses of cuBLASLt's C interface, which is the same in its versions 12 and 13.

use std::ffi::{c_int, c_void};

/// `cublasStatus_t`, `cudaDataType_t` and other enumerations.
pub(super) type Code = c_int;

pub(super) const SUCCESS: Code = 0;

/// `cudaDataType_t`.
pub(super) const REAL_F32: Code = 0;
pub(super) const REAL_F16: Code = 2;
pub(super) const REAL_BF16: Code = 14;

/// `cublasComputeType_t`: sums in f32, and products of f32 operands in f32 too.
pub(super) const COMPUTE_F32: Code = 68;

/// `cublasLtMatmulDescAttributes_t`, each an i32: whether an operand is transposed.
pub(super) const TRANSPOSE_A: Code = 3;
pub(super) const TRANSPOSE_B: Code = 4;

/// `cublasLtMatmulPreferenceAttributes_t`; the alignments of a, b, c and d follow one another.
pub(super) const MAX_WORKSPACE_BYTES: Code = 1;
pub(super) const REDUCTION_SCHEMES: Code = 3;
pub(super) const ALIGNMENT_OF_A: Code = 5;

/// `cublasLtReductionScheme_t`: by a pass over the workspace, in f32.
pub(super) const REDUCTION_IN_WORKSPACE: u32 = 2;

/// `cublasLtMatmulAlgo_t`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct Algorithm([u64; 8]);

/// `cublasLtMatmulHeuristicResult_t`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct HeuristicResult {
    pub(super) algorithm: Algorithm,
    workspace_bytes: usize,
    state: Code,
    waves: f32,
    reserved: [c_int; 4],
}

const _: () = assert!(size_of::<HeuristicResult>() == 96);

macro_rules! functions {
    ($($field:ident = $symbol:ident($($type:ty),* $(,)?);)*) => {
        /// cuBLASLt's functions.
        pub(crate) struct Blas {
            $(pub(super) $field: unsafe extern "C" fn($($type),*) -> Code,)*
        }

        impl Blas {
            /// # Safety
            /// `library` is cuBLASLt.
            pub(super) unsafe fn load(
                library: &libloading::Library,
            ) -> Result<Self, libloading::Error> {
                Ok(Self {
                    // SAFETY: the types are those of cublasLt.h.
                    $($field: unsafe {
                        *library.get(concat!(stringify!($symbol), "\0").as_bytes())?
                    },)*
                })
            }
        }
    };
}

/// Handles and descriptors are all addresses.
type Opaque = *mut c_void;

functions! {
    create = cublasLtCreate(*mut Opaque);
    operation_create = cublasLtMatmulDescCreate(*mut Opaque, Code, Code);
    operation_set = cublasLtMatmulDescSetAttribute(Opaque, Code, *const c_void, usize);
    layout_create = cublasLtMatrixLayoutCreate(*mut Opaque, Code, u64, u64, i64);
    preference_create = cublasLtMatmulPreferenceCreate(*mut Opaque);
    preference_set = cublasLtMatmulPreferenceSetAttribute(Opaque, Code, *const c_void, usize);
    preference_destroy = cublasLtMatmulPreferenceDestroy(Opaque);
    heuristic = cublasLtMatmulAlgoGetHeuristic(
        Opaque, Opaque, Opaque, Opaque, Opaque, Opaque, Opaque, c_int,
        *mut HeuristicResult, *mut c_int,
    );
    matmul = cublasLtMatmul(
        Opaque, Opaque, *const c_void, *const c_void, Opaque, *const c_void, Opaque,
        *const c_void, *const c_void, Opaque, *mut c_void, Opaque, *const Algorithm,
        *mut c_void, usize, *mut c_void,
    );
}
