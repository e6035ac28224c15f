//! The same on NVIDIA GPUs: what runs at which stage.

use std::ffi::c_void;

use xla_ffi::{Context, Result, Stage};

use crate::cuda::{Any, failed};

/// Checks that an argument, with its name, has the dtype of `x`.
pub(crate) fn check_dtype((name, argument): (&str, Any), x: Any) -> Result {
    if argument.dtype() == x.dtype() {
        return Ok(());
    }
    Err(crate::dtype::wrong(name, argument.dtype(), &x.dtype().to_string()))
}

/// Calls `load` where XLA prepares a program, and `launch` where it runs it, each with its stream.
pub(crate) fn run(
    context: Context,
    load: impl FnOnce(*mut c_void) -> xentile_cuda::Result<()>,
    launch: impl FnOnce(*mut c_void) -> xentile_cuda::Result<()>,
) -> Result {
    xentile_cuda::available().map_err(failed)?;
    let stream = context.stream()?.as_ptr();
    match context.stage() {
        Stage::Initialize => load(stream),
        _ => launch(stream),
    }
    .map_err(failed)
}
