//! From the types of buffers to those of Rust.

use xla_ffi::{DType, Error};

/// Runs `$body` with `$E` for the type that elements of `$dtype` have: those of the argument
/// `$name`, which kernels take in f32, bf16 and f16.
macro_rules! with_element {
    ($dtype:expr, $name:literal, $E:ident => $body:expr) => {
        match $dtype {
            xla_ffi::DType::F32 => {
                type $E = f32;
                $body
            }
            xla_ffi::DType::Bf16 => {
                type $E = half::bf16;
                $body
            }
            xla_ffi::DType::F16 => {
                type $E = half::f16;
                $body
            }
            other => Err($crate::dtype::wrong($name, other, $crate::dtype::ELEMENTS)),
        }
    };
}
pub(crate) use with_element;

/// What kernels take.
pub(crate) const ELEMENTS: &str = "f32, bf16 or f16";

/// The error for an argument whose elements are of no type that will do.
pub(crate) fn wrong(name: &str, actual: DType, right: &str) -> Error {
    Error::invalid_argument(format!("`{name}` has dtype {actual}; it must be {right}"))
}
