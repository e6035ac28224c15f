//! `x * factor` on NVIDIA GPUs.

use xentile_cuda::scale::Scale;
use xla_ffi::{Context, Result, Stage};

use super::check;
use crate::cuda::{Any, AnyMut, Floats, check_result, failed, to_dtype};
use crate::target::target_list;

target_list! {
    CUDA;

    super::SCALE: fn xentile_scale_cuda,
        initialize xentile_scale_cuda_initialize = times(
        x, factor, scaled, context,
    );
}

fn times(x: Any, factor: Floats, scaled: AnyMut, context: Context) -> Result {
    check(x.dims(), factor.dims(), scaled.dims())?;
    let dtype = to_dtype("x", x.dtype())?;
    check_result(("x", x), ("scaled", &scaled))?;
    if x.elements() == 0 {
        return Ok(());
    }
    let rows = factor.elements();
    let scale = Scale { dtype, rows, columns: x.elements() / rows };
    xentile_cuda::available().map_err(failed)?;
    let stream = context.stream()?.as_ptr();
    // SAFETY: XLA's stream and buffers, whose shapes were checked.
    let outcome = unsafe {
        match context.stage() {
            Stage::Initialize => scale.load(stream),
            _ => scale.run(stream, x.as_ptr(), factor.as_ptr().cast(), scaled.as_ptr()),
        }
    };
    outcome.map_err(failed)
}
