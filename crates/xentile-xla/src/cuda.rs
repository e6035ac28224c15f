//! What the handlers of every operation on GPUs share.
//!
//! A target has two handlers of the same operands: `initialize`, which checks them and loads the
//! kernel, so that nothing is loaded while XLA records a CUDA graph, and `execute`, which checks them
//! again and launches it. One function is both, and does the one or the other as [`Context::stage`]
//! says.

use xla_ffi::{AnyBuffer, AnyBufferMut, Buffer, BufferMut, DType, Error, OnDevice, Result, Traits};

use crate::dtype;

/// Execute does the same work on the stream for the same operands.
pub(crate) const TRAITS: Traits = Traits::COMMAND_BUFFER_COMPATIBLE;

pub(crate) type Any<'a> = OnDevice<AnyBuffer<'a>>;
pub(crate) type AnyMut<'a> = OnDevice<AnyBufferMut<'a>>;
pub(crate) type Floats<'a> = OnDevice<Buffer<'a, f32>>;
pub(crate) type FloatsMut<'a> = OnDevice<BufferMut<'a, f32>>;

/// The dtype of the argument `name`, if kernels take it.
pub(crate) fn to_dtype(name: &str, dtype: DType) -> Result<xentile::DType> {
    match dtype {
        DType::F32 => Ok(xentile::DType::F32),
        DType::Bf16 => Ok(xentile::DType::Bf16),
        DType::F16 => Ok(xentile::DType::F16),
        other => Err(dtype::wrong(name, other, dtype::ELEMENTS)),
    }
}

/// Checks that a result of the shape of the argument that it is computed from, each with its name,
/// has its dtype too, and lies in its place or apart.
pub(crate) fn check_result(
    (name, argument): (&'static str, Any),
    (other, result): (&'static str, &AnyMut),
) -> Result {
    if result.dtype() != argument.dtype() {
        return Err(dtype::wrong(other, result.dtype(), &argument.dtype().to_string()));
    }
    let bytes = argument.elements() * argument.dtype().size();
    let (argument, result) = ((name, argument.as_ptr().cast_const()), (other, result.as_ptr()));
    xentile_cuda::check_places(argument, result, bytes).map_err(failed)
}

/// The error of a kernel, with XLA's code for it.
pub(crate) fn failed(error: xentile_cuda::Error) -> Error {
    use xentile_cuda::Error as E;
    let message = error.to_string();
    match error {
        E::Driver { .. } | E::Blas { .. } => Error::internal(message),
        E::NoKernels
        | E::NoBlas { .. }
        | E::NoDriver { .. }
        | E::DriverTooOld { .. }
        | E::NoDevice
        | E::DeviceTooOld { .. } => Error::failed_precondition(message),
        _ => Error::invalid_argument(message),
    }
}
