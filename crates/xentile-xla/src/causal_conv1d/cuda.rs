//! Causal depthwise convolution on NVIDIA GPUs.

use xentile::causal_conv1d::CausalConv1d;
use xentile_cuda::causal_conv1d::{self as kernels, Convolution, Pass};
use xla_ffi::{Buffer, Context, DType, OnDevice, Result, Stage};

use crate::arguments::check_shape;
use crate::cuda::{Any, AnyMut, FloatsMut, failed, to_dtype};
use crate::dtype;
use crate::target::target_list;

target_list! {
    CUDA;

    super::FORWARD: fn xentile_causal_conv1d_forward_cuda,
        initialize xentile_causal_conv1d_forward_cuda_initialize = forward(operands, y, context);
    super::BACKWARD: fn xentile_causal_conv1d_backward_cuda,
        initialize xentile_causal_conv1d_backward_cuda_initialize = backward(
        operands, dy, gradients, context,
    );
}

type Operands<'a> = super::Operands<Any<'a>, OnDevice<Buffer<'a, i32>>>;
type Gradients<'a> = super::Gradients<AnyMut<'a>, FloatsMut<'a>>;

/// The convolution, and its operands as kernels take them.
fn prepared(operands: &Operands, conv: CausalConv1d) -> Result<(Convolution, kernels::Operands)> {
    let Operands { x, weight, bias, state, segments, .. } = operands;
    let weight_dtype = to_dtype("weight", weight.dtype())?;
    if let Some(bias) = bias {
        check_dtype("bias", bias.dtype(), weight.dtype())?;
    }
    if let Some(state) = state {
        check_dtype("initial_state", state.dtype(), x.dtype())?;
    }
    let convolution = Convolution::new(conv, to_dtype("x", x.dtype())?, weight_dtype);
    let groups = |array: &Any, each: usize| array.elements().checked_div(each).unwrap_or(1);
    let operands = kernels::Operands {
        x: x.as_ptr().cast_const(),
        weight: weight.as_ptr().cast_const(),
        weight_groups: groups(weight, conv.channels * conv.width),
        bias: bias.as_ref().map(|bias| (bias.as_ptr().cast_const(), groups(bias, conv.channels))),
        state: state.as_ref().map(|state| state.as_ptr().cast_const()),
        segments: segments.as_ref().map(|ids| ids.as_ptr().cast_const().cast()),
    };
    Ok((convolution.map_err(failed)?, operands))
}

fn check_dtype(name: &'static str, found: DType, right: DType) -> Result {
    if found == right { Ok(()) } else { Err(dtype::wrong(name, found, &right.to_string())) }
}

fn forward(operands: Operands, y: AnyMut, context: Context) -> Result {
    let conv = operands.conv(|array| array.dims(), |array| array.dims())?;
    check_shape("y", y.dims(), operands.x.dims())?;
    check_dtype("y", y.dtype(), operands.x.dtype())?;
    let (convolution, operands) = prepared(&operands, conv)?;
    xentile_cuda::available().map_err(failed)?;
    let stream = context.stream()?.as_ptr();
    // SAFETY: XLA's stream and buffers, whose shapes were checked.
    let outcome = unsafe {
        match context.stage() {
            Stage::Initialize => {
                convolution.load(Pass::Forward, operands.segments.is_some(), stream)
            }
            _ => convolution.forward(stream, operands, y.as_ptr()),
        }
    };
    outcome.map_err(failed)
}

fn backward(operands: Operands, dy: Any, gradients: Gradients, context: Context) -> Result {
    let conv = operands.conv(|array| array.dims(), |array| array.dims())?;
    let dims = [operands.x.dims(), dy.dims()];
    gradients.check(&conv, dims, |array| array.dims(), |array| array.dims())?;
    let dtype = operands.x.dtype();
    check_dtype("dy", dy.dtype(), dtype)?;
    check_dtype("dx", gradients.x.dtype(), dtype)?;
    if let Some(state) = &gradients.state {
        check_dtype("dinitial_state", state.dtype(), dtype)?;
    }
    let (convolution, operands) = prepared(&operands, conv)?;
    xentile_cuda::available().map_err(failed)?;
    let stream = context.stream()?.as_ptr();
    let gradients = kernels::Gradients {
        x: gradients.x.as_ptr(),
        weight: gradients.weight.as_ptr().cast(),
        bias: gradients.bias.map(|bias| bias.as_ptr().cast()),
        state: gradients.state.map(|state| state.as_ptr()),
    };
    // SAFETY: XLA's stream and buffers, whose shapes were checked.
    let outcome = unsafe {
        match context.stage() {
            Stage::Initialize => {
                convolution.load(Pass::Backward, operands.segments.is_some(), stream)
            }
            _ => convolution.backward(stream, operands, dy.as_ptr().cast_const(), gradients),
        }
    };
    outcome.map_err(failed)
}
