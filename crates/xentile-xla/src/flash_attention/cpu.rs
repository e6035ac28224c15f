//! Attention on the CPU.

use xentile::flash_attention::AttentionShape;
use xentile_cpu::Isa;
use xentile_cpu::flash_attention::{
    Cotangents, Gradients, Kernel, Launch, Operands, Saved, Visible,
};
use xla_ffi::{ANY_RANK, AnyBuffer, AnyBufferMut, Buffer, BufferMut, Result, ThreadPool};

use super::{Call, Options};
use crate::arguments::invalid;
use crate::cpu::{Pool, ask_for_huge_pages};
use crate::dtype::with_element;
use crate::target::target_list;

target_list! {
    HOST;

    super::FORWARD: fn xentile_flash_attention_forward_host = forward(
        q, k, v, seen, o, lse, options, pool,
    );
    super::BACKWARD: fn xentile_flash_attention_backward_host = backward(
        q, k, v, seen, o, lse, dout, dlse, dq, dk, dv, dsinks, options, pool,
    );
}

type Seen<'a> = super::Seen<Buffer<'a, i32>, Buffer<'a, f32>>;

/// Checks the shapes of what both passes take.
fn checked<'a>(
    q: &'a AnyBuffer,
    k: &'a AnyBuffer,
    v: &'a AnyBuffer,
    seen: &Seen,
) -> Result<Call<'a>> {
    Call::new([q.dims(), k.dims(), v.dims()], seen, (|array| array.dims(), |array| array.dims()))
}

fn kernel<'b>(
    shape: AttentionShape,
    options: Options,
    seen: &'b Seen<'_>,
    pool: &'b Pool<'b>,
) -> Result<Kernel<'b>> {
    if options.tokens_first {
        return Err(invalid("attribute `tokens_first` is true; on CPUs heads must be first"));
    }
    let segments = seen.segments.as_ref().map(|all| [all[0].as_slice(), all[1].as_slice()]);
    let visible = Visible { ranges: seen.ranges.as_slice(), segments };
    let sinks = seen.sinks.as_ref().map(Buffer::as_slice);
    let launch = Launch { isa: Isa::detect(), pool };
    Kernel::new(options.attention, shape, visible, sinks, launch).map_err(invalid)
}

#[expect(clippy::too_many_arguments, reason = "they are the call's")]
fn forward(
    q: AnyBuffer,
    k: AnyBuffer,
    v: AnyBuffer,
    seen: Seen,
    o: AnyBufferMut,
    lse: BufferMut<f32>,
    options: Options,
    pool: ThreadPool,
) -> Result {
    let call = checked(&q, &k, &v, &seen)?;
    call.check_forward(o.dims(), lse.dims())?;
    let pool = Pool(pool);
    let kernel = kernel(call.shape, options, &seen, &pool)?;
    with_element!(q.dtype(), "q", E => {
        let (q, k) = (q.typed::<E, ANY_RANK>()?, k.typed::<E, ANY_RANK>()?);
        let (v, o) = (v.typed::<E, ANY_RANK>()?, o.typed::<E, ANY_RANK>()?.into_slice());
        ask_for_huge_pages(o);
        let operands = Operands { q: q.as_slice(), k: k.as_slice(), v: v.as_slice() };
        kernel.forward(operands, o, lse.into_slice()).map_err(invalid)
    })
}

#[expect(clippy::too_many_arguments, reason = "they are the call's")]
fn backward(
    q: AnyBuffer,
    k: AnyBuffer,
    v: AnyBuffer,
    seen: Seen,
    o: AnyBuffer,
    lse: Buffer<f32>,
    dout: AnyBuffer,
    dlse: Buffer<f32>,
    dq: AnyBufferMut,
    dk: AnyBufferMut,
    dv: AnyBufferMut,
    dsinks: Option<BufferMut<f32>>,
    options: Options,
    pool: ThreadPool,
) -> Result {
    let call = checked(&q, &k, &v, &seen)?;
    call.check_backward(
        [o.dims(), lse.dims(), dout.dims(), dlse.dims()],
        [dq.dims(), dk.dims(), dv.dims()],
        (dsinks.as_ref().map(BufferMut::dims), seen.sinks.is_some()),
    )?;
    let pool = Pool(pool);
    let kernel = kernel(call.shape, options, &seen, &pool)?;
    with_element!(q.dtype(), "q", E => {
        let (q, k) = (q.typed::<E, ANY_RANK>()?, k.typed::<E, ANY_RANK>()?);
        let (v, o) = (v.typed::<E, ANY_RANK>()?, o.typed::<E, ANY_RANK>()?);
        let dout = dout.typed::<E, ANY_RANK>()?;
        let operands = Operands { q: q.as_slice(), k: k.as_slice(), v: v.as_slice() };
        let saved = Saved { o: o.as_slice(), lse: lse.as_slice() };
        let cotangents = Cotangents { o: dout.as_slice(), lse: dlse.as_slice() };
        let gradients = Gradients {
            q: dq.typed::<E, ANY_RANK>()?.into_slice(),
            k: dk.typed::<E, ANY_RANK>()?.into_slice(),
            v: dv.typed::<E, ANY_RANK>()?.into_slice(),
            sinks: dsinks.map(BufferMut::into_slice),
        };
        for result in [&mut *gradients.q, &mut *gradients.k, &mut *gradients.v] {
            ask_for_huge_pages(result);
        }
        kernel.backward(operands, saved, cotangents, gradients).map_err(invalid)
    })
}
