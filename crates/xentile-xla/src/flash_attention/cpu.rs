//! Attention on the CPU.

use xentile::flash_attention::AttentionShape;
use xentile_cpu::Isa;
use xentile_cpu::flash_attention::{
    Cotangents, Gradients, Kernel, Launch, Operands, Saved, Visible,
};
use xla_ffi::{
    ANY_RANK, AnyBuffer, AnyBufferMut, Buffer, BufferMut, Decoder, Parameter, Result, ThreadPool,
};

use super::{Options, check, invalid, shape};
use crate::cpu::{Pool, ask_for_huge_pages};
use crate::dtype::with_element;
use crate::target::{HOST, target_list};

target_list! {
    HOST;

    /// o and lse.
    "xentile_flash_attention_forward", Execute: fn xentile_flash_attention_forward_host = forward(
        q, k, v, seen, o, lse, options, pool,
    );

    /// dq, dk, dv and, with sinks, dsinks, from what forward gave and cotangents of that.
    "xentile_flash_attention_backward", Execute: fn xentile_flash_attention_backward_host = backward(
        q, k, v, seen, saved, saved_lse, dout, dlse, dq, dk, dv, dsinks, options, pool,
    );
}

/// What queries see, and sinks: ranges, and what the attributes `segments` and `sinks` say that there is.
struct Seen<'a> {
    ranges: Buffer<'a, i32>,
    segments: Option<[Buffer<'a, i32>; 2]>,
    sinks: Option<Buffer<'a, f32>>,
}

impl<'a> Parameter<'a> for Seen<'a> {
    fn decode(decoder: &mut Decoder<'a>, _: &'static str) -> Result<Self> {
        let ranges = decoder.parameter("ranges")?;
        let segments = match decoder.parameter("segments")? {
            false => None,
            true => Some([decoder.parameter("q_segments")?, decoder.parameter("kv_segments")?]),
        };
        let sinks = match decoder.parameter("sinks")? {
            false => None,
            true => Some(decoder.parameter("sinks")?),
        };
        Ok(Self { ranges, segments, sinks })
    }
}

/// A call's shape, with its leading axes.
struct Call<'a> {
    shape: AttentionShape,
    leading: &'a [usize],
}

impl<'a> Call<'a> {
    fn new(q: &'a AnyBuffer, k: &AnyBuffer, v: &AnyBuffer, seen: &Seen) -> Result<Self> {
        let shape = shape(q.dims(), k.dims(), v.dims())?;
        let leading = &q.dims()[..q.dims().len() - 3];
        let AttentionShape { group, queries, keys, .. } = shape;
        check("ranges", seen.ranges.dims(), leading, &[queries, 2])?;
        if let Some([of_queries, of_keys]) = &seen.segments {
            check("q_segments", of_queries.dims(), leading, &[queries])?;
            check("kv_segments", of_keys.dims(), leading, &[keys])?;
        }
        if let Some(sinks) = &seen.sinks {
            check("sinks", sinks.dims(), leading, &[group])?;
        }
        Ok(Self { shape, leading })
    }

    fn check_queries(&self, name: &str, dims: &[usize], columns: &[usize]) -> Result {
        let rows = [&[self.shape.group, self.shape.queries], columns].concat();
        check(name, dims, self.leading, &rows)
    }

    fn check_keys(&self, name: &str, dims: &[usize], columns: usize) -> Result {
        check(name, dims, self.leading, &[self.shape.keys, columns])
    }

    fn kernel<'b>(
        &self,
        options: Options,
        seen: &'b Seen<'_>,
        pool: &'b Pool<'b>,
    ) -> Result<Kernel<'b>> {
        let segments = seen.segments.as_ref().map(|all| [all[0].as_slice(), all[1].as_slice()]);
        let visible = Visible { ranges: seen.ranges.as_slice(), segments };
        let sinks = seen.sinks.as_ref().map(Buffer::as_slice);
        let launch = Launch { isa: Isa::detect(), pool };
        Kernel::new(options.0, self.shape, visible, sinks, launch).map_err(invalid)
    }
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
    let call = Call::new(&q, &k, &v, &seen)?;
    call.check_queries("o", o.dims(), &[call.shape.value_width])?;
    call.check_queries("lse", lse.dims(), &[])?;
    let pool = Pool(pool);
    let kernel = call.kernel(options, &seen, &pool)?;
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
    let call = Call::new(&q, &k, &v, &seen)?;
    let AttentionShape { width, value_width, group, .. } = call.shape;
    for (name, dims, columns) in [
        ("o", o.dims(), &[value_width][..]),
        ("lse", lse.dims(), &[]),
        ("do", dout.dims(), &[value_width]),
        ("dlse", dlse.dims(), &[]),
        ("dq", dq.dims(), &[width]),
    ] {
        call.check_queries(name, dims, columns)?;
    }
    call.check_keys("dk", dk.dims(), width)?;
    call.check_keys("dv", dv.dims(), value_width)?;
    if dsinks.is_some() != seen.sinks.is_some() {
        return Err(invalid(
            "the call must have the result `dsinks` where it has `sinks`, and there alone",
        ));
    }
    if let Some(dsinks) = &dsinks {
        check("dsinks", dsinks.dims(), call.leading, &[group])?;
    }
    let pool = Pool(pool);
    let kernel = call.kernel(options, &seen, &pool)?;
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
