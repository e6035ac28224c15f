//! Causal depthwise convolution on the CPU.

use xentile::Element;
use xentile_cpu::Isa;
use xentile_cpu::causal_conv1d::{self as kernels, Kernel, Launch};
use xla_ffi::{ANY_RANK, AnyBuffer, AnyBufferMut, Buffer, BufferMut, Result, ThreadPool};

use crate::arguments::{check_shape, invalid};
use crate::cpu::{Pool, ask_for_huge_pages};
use crate::dtype::{self, with_element};
use crate::norm::cpu::columns;
use crate::target::target_list;

target_list! {
    HOST;

    super::FORWARD: fn xentile_causal_conv1d_forward_host = forward(operands, y, pool);
    super::BACKWARD: fn xentile_causal_conv1d_backward_host = backward(
        operands, dy, gradients, pool,
    );
}

type Operands<'a> = super::Operands<AnyBuffer<'a>, Buffer<'a, i32>>;
type Gradients<'a> = super::Gradients<AnyBufferMut<'a>, BufferMut<'a, f32>>;

/// The operands as kernels take them.
fn typed<'a, E: Element + xla_ffi::Element>(
    operands: &'a Operands<'a>,
) -> Result<kernels::Operands<'a, E>> {
    let Operands { x, weight, bias, state, segments, .. } = operands;
    let of_weight = columns("weight", *weight)?;
    let bias = match bias {
        Some(bias) if bias.dtype() != weight.dtype() => {
            return Err(dtype::wrong("bias", bias.dtype(), &weight.dtype().to_string()));
        }
        bias => bias.map(|bias| columns("bias", bias)).transpose()?,
    };
    Ok(kernels::Operands {
        x: x.typed::<E, ANY_RANK>()?.as_slice(),
        weight: of_weight,
        bias,
        state: state.map(AnyBuffer::typed::<E, ANY_RANK>).transpose()?.map(|all| all.as_slice()),
        segments: segments.as_ref().map(Buffer::as_slice),
    })
}

fn forward(operands: Operands, y: AnyBufferMut, pool: ThreadPool) -> Result {
    let conv = operands.conv(|array| array.dims(), |array| array.dims())?;
    check_shape("y", y.dims(), operands.x.dims())?;
    let pool = Pool(pool);
    with_element!(operands.x.dtype(), "x", E => {
        let y = y.typed::<E, ANY_RANK>()?.into_slice();
        ask_for_huge_pages(y);
        let launch = Launch { isa: Isa::detect(), pool: &pool };
        let operands = typed::<E>(&operands)?;
        Kernel::new(conv, launch).and_then(|kernel| kernel.forward(operands, y)).map_err(invalid)
    })
}

fn backward(operands: Operands, dy: AnyBuffer, gradients: Gradients, pool: ThreadPool) -> Result {
    let conv = operands.conv(|array| array.dims(), |array| array.dims())?;
    let dims = [operands.x.dims(), dy.dims()];
    gradients.check(&conv, dims, |array| array.dims(), |array| array.dims())?;
    let pool = Pool(pool);
    with_element!(operands.x.dtype(), "x", E => {
        let launch = Launch { isa: Isa::detect(), pool: &pool };
        let operands = typed::<E>(&operands)?;
        let dy = dy.typed::<E, ANY_RANK>()?;
        let dx = gradients.x.typed::<E, ANY_RANK>()?.into_slice();
        ask_for_huge_pages(dx);
        let state = gradients.state.map(AnyBufferMut::typed::<E, ANY_RANK>).transpose()?;
        let gradients = kernels::Gradients {
            x: dx,
            weight: gradients.weight.into_slice(),
            bias: gradients.bias.map(BufferMut::into_slice),
            state: state.map(BufferMut::into_slice),
        };
        Kernel::new(conv, launch)
            .and_then(|kernel| kernel.backward(operands, dy.as_slice(), gradients))
            .map_err(invalid)
    })
}
