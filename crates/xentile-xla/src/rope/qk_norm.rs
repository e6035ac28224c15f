//! RMSNorm of the heads of q and k and their rotation, on NVIDIA GPUs.

use xentile::norm::Norm;
use xentile::rope::Layout;
use xentile_cuda::qk_norm_rope::{Backward, Forward, Pass, QkNormRope, QkShape};
use xla_ffi::{Buffer, Context, Decoder, OnDevice, Parameter, Result};

use super::{Options as RopeOptions, product};
use crate::arguments::invalid;
use crate::cuda::{Any, AnyMut, Floats, FloatsMut, check_result, failed, to_dtype};
use crate::norm::cuda::{check_dtype, run};
use crate::norm::{RmsOptions, check_alike, check_like, check_rows};
use crate::target::target_list;

type Indices<'a> = OnDevice<Buffer<'a, i32>>;

target_list! {
    CUDA;

    super::QK_NORM_FORWARD: fn xentile_qk_norm_rope_forward_cuda,
        initialize xentile_qk_norm_rope_forward_cuda_initialize = forward(
        q, k, q_weight, k_weight, indices, cos, sin, q_rotated, k_rotated, q_rstd, k_rstd, options,
        context,
    );
    super::QK_NORM_BACKWARD: fn xentile_qk_norm_rope_backward_cuda,
        initialize xentile_qk_norm_rope_backward_cuda_initialize = backward(
        q, k, q_weight, k_weight, q_rstd, k_rstd, indices, cos, sin, q_cotangent, k_cotangent, dq,
        dk, dq_weight, dk_weight, options, context,
    );
}

/// The attributes.
#[derive(Clone, Copy, Debug)]
struct Options {
    norm: Norm,
    layout: Layout,
}

impl<'a> Parameter<'a> for Options {
    fn decode(decoder: &mut Decoder<'a>, name: &'static str) -> Result<Self> {
        let norm = RmsOptions::decode(decoder, name)?.0;
        Ok(Self { norm, layout: RopeOptions::layout(decoder)? })
    }
}

#[expect(clippy::too_many_arguments, reason = "they are the call's")]
fn forward(
    q: Any,
    k: Any,
    q_weight: Any,
    k_weight: Any,
    indices: Indices,
    cos: Floats,
    sin: Floats,
    q_rotated: AnyMut,
    k_rotated: AnyMut,
    q_rstd: FloatsMut,
    k_rstd: FloatsMut,
    options: Options,
    context: Context,
) -> Result {
    let pass = prepare([q, k], [q_weight, k_weight], indices, [cos, sin], options)?;
    check_results([q, k], ["q", "k"], [("q_rotated", &q_rotated), ("k_rotated", &k_rotated)])?;
    check_heads([q, k], [q_rstd.dims(), k_rstd.dims()])?;
    if q.elements() + k.elements() == 0 {
        return Ok(());
    }
    let arrays = Forward {
        x: [q, k].map(|one| one.as_ptr().cast_const()),
        weight: [q_weight, k_weight].map(|one| one.as_ptr().cast_const()),
        indices: indices.as_ptr().cast_const().cast(),
        tables: [cos, sin].map(|one| one.as_ptr().cast_const().cast()),
        y: [q_rotated.as_ptr(), k_rotated.as_ptr()],
        rstd: [q_rstd.as_ptr().cast(), k_rstd.as_ptr().cast()],
    };
    run(
        context,
        // SAFETY: XLA's stream.
        |stream| unsafe { pass.load(Pass::Forward, stream) },
        // SAFETY: the same, and XLA's buffers, whose shapes were checked.
        |stream| unsafe { pass.forward(stream, arrays) },
    )
}

#[expect(clippy::too_many_arguments, reason = "they are the call's")]
fn backward(
    q: Any,
    k: Any,
    q_weight: Any,
    k_weight: Any,
    q_rstd: Floats,
    k_rstd: Floats,
    indices: Indices,
    cos: Floats,
    sin: Floats,
    q_cotangent: Any,
    k_cotangent: Any,
    dq: AnyMut,
    dk: AnyMut,
    dq_weight: FloatsMut,
    dk_weight: FloatsMut,
    options: Options,
    context: Context,
) -> Result {
    let pass = prepare([q, k], [q_weight, k_weight], indices, [cos, sin], options)?;
    for (x, (name, cotangent)) in
        [(q, ("q_cotangent", q_cotangent)), (k, ("k_cotangent", k_cotangent))]
    {
        check_like(x.dims(), &[(name, cotangent.dims())])?;
        check_dtype((name, cotangent), x)?;
    }
    check_results([q, k], ["q", "k"], [("dq", &dq), ("dk", &dk)])?;
    check_heads([q, k], [q_rstd.dims(), k_rstd.dims()])?;
    let columns = q.dims()[q.dims().len() - 1];
    let blocks = match dq_weight.dims() {
        &[blocks, of] if blocks > 0 && of == columns => blocks,
        dims => {
            return Err(invalid(format_args!(
                "`dq_weight` has shape {dims:?}; it must be blocks, at least 1, by {columns}, the \
                 columns of `q`"
            )));
        }
    };
    check_alike(("dk_weight", dk_weight.dims()), ("dq_weight", dq_weight.dims()))?;
    let arrays = Backward {
        x: [q, k].map(|one| one.as_ptr().cast_const()),
        weight: [q_weight, k_weight].map(|one| one.as_ptr().cast_const()),
        rstd: [q_rstd, k_rstd].map(|one| one.as_ptr().cast_const().cast()),
        indices: indices.as_ptr().cast_const().cast(),
        tables: [cos, sin].map(|one| one.as_ptr().cast_const().cast()),
        dy: [q_cotangent, k_cotangent].map(|one| one.as_ptr().cast_const()),
        dx: [dq.as_ptr(), dk.as_ptr()],
        dweight: [dq_weight.as_ptr().cast(), dk_weight.as_ptr().cast()],
    };
    run(
        context,
        // SAFETY: XLA's stream.
        |stream| unsafe { pass.load(Pass::Backward { blocks }, stream) },
        // SAFETY: the same, and XLA's buffers, whose shapes were checked.
        |stream| unsafe { pass.backward(stream, blocks, arrays) },
    )
}

/// Checks what both passes have.
fn prepare(
    x: [Any; 2],
    weights: [Any; 2],
    indices: Indices,
    tables: [Floats; 2],
    options: Options,
) -> Result<QkNormRope> {
    let shape = shape(
        x.map(|one| one.dims()),
        weights.map(|one| one.dims()),
        indices.dims(),
        tables.map(|one| one.dims()),
    )?;
    let dtype = to_dtype("q", x[0].dtype())?;
    check_dtype(("k", x[1]), x[0])?;
    let weights =
        [to_dtype("q_weight", weights[0].dtype())?, to_dtype("k_weight", weights[1].dtype())?];
    QkNormRope::new(options.norm, options.layout, shape, dtype, weights).map_err(failed)
}

/// The shape of `q` `[.., H, D]` and `k` `[.., K, D]`, weights `[D]`, indices `[..]` and tables `[P, R / 2]`.
fn shape(
    [q, k]: [&[usize]; 2],
    weights: [&[usize]; 2],
    indices: &[usize],
    [cos, sin]: [&[usize]; 2],
) -> Result<QkShape> {
    let ([leading @ .., heads, columns], [of_k @ .., k_heads, k_columns]) = (q, k) else {
        return Err(invalid(format_args!(
            "`q` has shape {q:?} and `k` {k:?}; both must have two axes at least, heads and columns"
        )));
    };
    if of_k != leading || k_columns != columns || *columns == 0 {
        return Err(invalid(format_args!(
            "`k` has shape {k:?} and `q` {q:?}; they may differ in heads, the last axis but one, \
             alone, and must have columns"
        )));
    }
    let right: [(&str, &[usize], &[usize]); 4] = [
        ("q_weight", weights[0], &[*columns]),
        ("k_weight", weights[1], &[*columns]),
        ("indices", indices, leading),
        ("sin", sin, cos),
    ];
    for (name, dims, right) in right {
        if dims != right {
            return Err(invalid(format_args!(
                "`{name}` has shape {dims:?}; it must be {right:?}, with `q` {q:?}"
            )));
        }
    }
    match cos {
        &[positions, pairs] if pairs <= columns / 2 => Ok(QkShape {
            tokens: product(leading),
            heads: [*heads, *k_heads],
            columns: *columns,
            pairs,
            positions,
        }),
        _ => Err(invalid(format_args!(
            "`cos` has shape {cos:?}; it must be positions by pairs, at most half the columns of \
             `q`, {q:?}"
        ))),
    }
}

/// Checks that results are like q and k, and lie in their places or apart.
fn check_results(
    x: [Any; 2],
    names: [&'static str; 2],
    results: [(&'static str, &AnyMut); 2],
) -> Result {
    for ((x, name), result) in x.into_iter().zip(names).zip(results) {
        check_like(x.dims(), &[(result.0, result.1.dims())])?;
        check_result((name, x), result)?;
    }
    Ok(())
}

/// Checks the statistics of q and k.
fn check_heads(x: [Any; 2], rstd: [&[usize]; 2]) -> Result {
    for ((x, name), rstd) in x.into_iter().zip(["q_rstd", "k_rstd"]).zip(rstd) {
        check_rows(x.dims(), name, rstd)?;
    }
    Ok(())
}
