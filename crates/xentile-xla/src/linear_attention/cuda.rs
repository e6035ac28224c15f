//! Linear attention and the gated delta rule on NVIDIA GPUs.

use std::ffi::c_void;
use std::ptr::null_mut;

use xentile_cuda::linear_attention::{self as kernels, LinearAttention, Shape};
use xla_ffi::{Context, DType, Decoder, OnDevice, Parameter, Result, Stage};

use super::finite;
use crate::arguments::{check_shape, given, given_unless, invalid};
use crate::cuda::{Any, AnyMut, Floats, FloatsMut, failed};
use crate::dtype;
use crate::target::target_list;

target_list! {
    CUDA;

    super::FORWARD: fn xentile_linear_attention_forward_cuda,
        initialize xentile_linear_attention_forward_cuda_initialize = forward(
        operands, o, states, scratch, more, context,
    );
    super::BACKWARD: fn xentile_linear_attention_backward_cuda,
        initialize xentile_linear_attention_backward_cuda_initialize = backward(
        operands, cotangents, gradients, scratch, more, context,
    );
}

const CHUNK: usize = 64;

type Operands<'a> = super::Operands<Any<'a>, Floats<'a>>;
type Cotangents<'a> = super::Cotangents<Any<'a>, Floats<'a>>;
type Gradients<'a> = super::Gradients<AnyMut<'a>, FloatsMut<'a>>;

struct Scratch<'a> {
    decays: FloatsMut<'a>,
    inverse: Option<AnyMut<'a>>,
    values: Option<AnyMut<'a>>,
}

/// The states before chunks in the forward pass.
struct ForwardScratch<'a>(Option<AnyMut<'a>>);

struct BackwardScratch<'a> {
    states: Option<AnyMut<'a>>,
    dstates: Option<AnyMut<'a>>,
    dvalues_local: Option<FloatsMut<'a>>,
    dsolved: Option<AnyMut<'a>>,
    group_dstates: Option<FloatsMut<'a>>,
    exponents: Option<FloatsMut<'a>>,
    parts: Option<[FloatsMut<'a>; 2]>,
}

impl<'a> Parameter<'a> for Scratch<'a> {
    fn decode(decoder: &mut Decoder<'a>, _: &'static str) -> Result<Self> {
        Ok(Self {
            decays: decoder.parameter("decays")?,
            inverse: given(decoder, "delta", "inverse")?,
            values: given(decoder, "delta", "values")?,
        })
    }
}

impl<'a> Parameter<'a> for ForwardScratch<'a> {
    fn decode(decoder: &mut Decoder<'a>, _: &'static str) -> Result<Self> {
        Ok(Self(given(decoder, "delta", "chunk_states")?))
    }
}

impl<'a> Parameter<'a> for BackwardScratch<'a> {
    fn decode(decoder: &mut Decoder<'a>, _: &'static str) -> Result<Self> {
        let states = given(decoder, "delta", "chunk_states")?;
        let dstates = given(decoder, "delta", "chunk_dstates")?;
        let dvalues_local = given(decoder, "delta", "dvalues_local")?;
        let dsolved = given(decoder, "delta", "dsolved")?;
        let group_dstates = given_unless(decoder, "delta", "group_dstates")?;
        let exponents = given_unless(decoder, "delta", "exponents")?;
        let dq_parts: Option<FloatsMut<'a>> = given(decoder, "shared", "dq_parts")?;
        let dk_parts: Option<FloatsMut<'a>> = given(decoder, "shared", "dk_parts")?;
        Ok(Self {
            states,
            dstates,
            dvalues_local,
            dsolved,
            group_dstates,
            exponents,
            parts: dq_parts.zip(dk_parts).map(|(q, k)| [q, k]),
        })
    }
}

/// The extents of a call, which the shapes of all arrays must have.
struct Extents<'a> {
    leading: &'a [usize],
    shape: Shape,
    groups: usize,
    chunks: usize,
}

impl Extents<'_> {
    /// Checks that the array `name` has the axes of *batch, then `last`.
    fn check(&self, name: &str, dims: &[usize], last: &[usize]) -> Result {
        check_shape(name, dims, &[self.leading, last].concat())
    }

    /// As `check`, and that the array is in bf16.
    fn check_rounded(&self, name: &str, dims: &[usize], dtype: DType, last: &[usize]) -> Result {
        check_dtype(name, dtype)?;
        self.check(name, dims, last)
    }

    /// Checks the scratch of both passes, and the states before chunks, whose numbers have `parts`: [2] or none.
    fn check_scratch(&self, scratch: &Scratch, states: Option<&AnyMut>, parts: &[usize]) -> Result {
        let Shape { heads, keys, values, group, .. } = self.shape;
        let Scratch { decays, inverse, values: value_rows } = scratch;
        self.check("decays", decays.dims(), &[heads, self.chunks, 3 * CHUNK])?;
        if let Some(states) = states {
            let last = [&[heads, group], parts, &[keys, values]].concat();
            self.check_rounded("chunk_states", states.dims(), states.dtype(), &last)?;
        }
        if let Some(inverse) = inverse {
            let last = [heads, group, 2 * CHUNK * CHUNK];
            self.check_rounded("inverse", inverse.dims(), inverse.dtype(), &last)?;
        }
        value_rows.as_ref().map_or(Ok(()), |array| {
            let last = [&[heads, group], parts, &[CHUNK, values]].concat();
            self.check_rounded("values", array.dims(), array.dtype(), &last)
        })
    }
}

impl super::Operands<Any<'_>, Floats<'_>> {
    /// Checks all shapes and dtypes.
    fn extents(&self) -> Result<Extents<'_>> {
        let (q, v) = (self.q.dims(), self.v.dims());
        let (&[ref leading @ .., tokens, key_heads, keys], &[.., heads, values]) = (q, v) else {
            return Err(invalid(format_args!(
                "`q` has shape {q:?} and `v` {v:?}; they must be [.., T, H, K] and [.., T, G, V]"
            )));
        };
        let [group_tokens, groups_times_chunk] = [self.group_tokens, self.groups_times_chunk]
            .map(|tokens| usize::try_from(tokens).unwrap_or(0));
        let chunks = tokens.div_ceil(CHUNK);
        let group = tokens
            .checked_div(groups_times_chunk)
            .map_or(0, |_| tokens.div_ceil(groups_times_chunk));
        let groups = tokens.checked_div(group_tokens).map_or(0, |_| tokens.div_ceil(group_tokens));
        let is_whole =
            group_tokens.is_multiple_of(CHUNK) && groups_times_chunk.is_multiple_of(CHUNK);
        if tokens > 0
            && (!is_whole
                || groups == 0
                || chunks.div_ceil(groups) != group
                || group * CHUNK != group_tokens)
        {
            return Err(invalid(format_args!(
                "attributes `group_tokens` and `groups_times_chunk` are {group_tokens} and {groups_times_chunk} for \
                 {tokens} tokens; they must be 64 times the chunks of a group and the number of groups"
            )));
        }
        let sequences = if leading.contains(&0) { 0 } else { leading.iter().product() };
        let shape =
            Shape { sequences, tokens, key_heads, heads, keys, values, group: group.max(1) };
        let extents = Extents { leading, shape, groups, chunks };
        check_dtype("q", self.q.dtype())?;
        extents.check_rounded("k", self.k.dims(), self.k.dtype(), &[tokens, key_heads, keys])?;
        extents.check_rounded("v", v, self.v.dtype(), &[tokens, heads, values])?;
        extents.check("g", self.g.dims(), &[tokens, heads])?;
        if let Some(b) = &self.b {
            extents.check("b", b.dims(), &[tokens, heads])?;
        }
        extents.check("initial_state", self.initial_state.dims(), &[heads, keys, values])?;
        Ok(extents)
    }

    /// The call, and its operands as kernels take them.
    fn prepared(&self, extents: &Extents) -> Result<(LinearAttention, kernels::Operands)> {
        let call =
            LinearAttention::new(extents.shape, self.delta, finite(self.scale)?).map_err(failed)?;
        let operands = kernels::Operands {
            q: self.q.as_ptr().cast_const(),
            k: self.k.as_ptr().cast_const(),
            v: self.v.as_ptr().cast_const(),
            g: self.g.as_ptr().cast_const().cast(),
            b: self.b.as_ref().map(|b| b.as_ptr().cast_const().cast()),
            initial_state: self.initial_state.as_ptr().cast_const().cast(),
        };
        Ok((call, operands))
    }
}

impl Scratch<'_> {
    fn places(&self, states: Option<&AnyMut>) -> kernels::Scratch {
        kernels::Scratch {
            decays: self.decays.as_ptr().cast(),
            states: place(states),
            inverse: place(self.inverse.as_ref()),
            values: place(self.values.as_ref()),
        }
    }
}

/// The address of an array, or null.
fn place(array: Option<&AnyMut>) -> *mut c_void {
    array.map_or(null_mut(), OnDevice::as_ptr)
}

fn check_dtype(name: &str, found: DType) -> Result {
    if found == DType::Bf16 { Ok(()) } else { Err(dtype::wrong(name, found, "bf16")) }
}

fn forward(
    operands: Operands,
    o: AnyMut,
    states: FloatsMut,
    scratch: Scratch,
    more: ForwardScratch,
    context: Context,
) -> Result {
    let extents = operands.extents()?;
    let Shape { tokens, heads, keys, values, .. } = extents.shape;
    extents.check_rounded("o", o.dims(), o.dtype(), &[tokens, heads, values])?;
    extents.check("states", states.dims(), &[heads, extents.groups, keys, values])?;
    extents.check_scratch(&scratch, more.0.as_ref(), &[])?;
    let (call, operands) = operands.prepared(&extents)?;
    xentile_cuda::available().map_err(failed)?;
    let stream = context.stream()?.as_ptr();
    let outputs = kernels::Outputs { o: o.as_ptr(), states: states.as_ptr().cast() };
    // SAFETY: XLA's stream and buffers, whose shapes were checked.
    let outcome = unsafe {
        match context.stage() {
            Stage::Initialize => call.load(false, stream),
            _ => call.forward(stream, operands, outputs, scratch.places(more.0.as_ref())),
        }
    };
    outcome.map_err(failed)
}

fn backward(
    operands: Operands,
    cotangents: Cotangents,
    gradients: Gradients,
    scratch: Scratch,
    more: BackwardScratch,
    context: Context,
) -> Result {
    let extents = operands.extents()?;
    let Shape { tokens, key_heads, heads, keys, values, group, .. } = extents.shape;
    let [key_rows, value_rows] = [[tokens, key_heads, keys], [tokens, heads, values]];
    let state_axes = [heads, keys, values];
    extents.check("states", cotangents.states.dims(), &[heads, extents.groups, keys, values])?;
    extents.check("dfinal_state", cotangents.final_state.dims(), &state_axes)?;
    extents.check_rounded("do", cotangents.o.dims(), cotangents.o.dtype(), &value_rows)?;
    for (name, array, last) in [
        ("dq", &gradients.q, &key_rows),
        ("dk", &gradients.k, &key_rows),
        ("dv", &gradients.v, &value_rows),
    ] {
        extents.check_rounded(name, array.dims(), array.dtype(), last)?;
    }
    extents.check("dg", gradients.g.dims(), &[tokens, heads])?;
    if let Some(b) = &gradients.b {
        extents.check("db", b.dims(), &[tokens, heads])?;
    }
    extents.check("dinitial_state", gradients.initial_state.dims(), &state_axes)?;
    extents.check_scratch(&scratch, more.states.as_ref(), &[2])?;
    if let Some(dstates) = &more.dstates {
        let last = [heads, group, 2, keys, values];
        extents.check_rounded("chunk_dstates", dstates.dims(), dstates.dtype(), &last)?;
    }
    if let Some(dvalues_local) = &more.dvalues_local {
        extents.check("dvalues_local", dvalues_local.dims(), &[heads, group, CHUNK, values])?;
    }
    if let Some(array) = &more.dsolved {
        let last = [heads, group, 2, CHUNK, values];
        extents.check_rounded("dsolved", array.dims(), array.dtype(), &last)?;
    }
    if let Some(dstates) = &more.group_dstates {
        extents.check("group_dstates", dstates.dims(), &[heads, extents.groups, keys, values])?;
    }
    if let Some(exponents) = &more.exponents {
        extents.check("exponents", exponents.dims(), &[heads, extents.chunks, 4 * CHUNK])?;
    }
    for part in more.parts.iter().flatten() {
        extents.check("dq_parts` and `dk_parts", part.dims(), &[heads, group, CHUNK, keys])?;
    }
    let (call, operands) = operands.prepared(&extents)?;
    xentile_cuda::available().map_err(failed)?;
    let stream = context.stream()?.as_ptr();
    let cotangents = kernels::Cotangents {
        o: cotangents.o.as_ptr().cast_const(),
        final_state: cotangents.final_state.as_ptr().cast_const().cast(),
        states: cotangents.states.as_ptr().cast_const().cast(),
    };
    let gradients = kernels::Gradients {
        q: gradients.q.as_ptr(),
        k: gradients.k.as_ptr(),
        v: gradients.v.as_ptr(),
        g: gradients.g.as_ptr().cast(),
        b: gradients.b.map(|b| b.as_ptr().cast()),
        initial_state: gradients.initial_state.as_ptr().cast(),
    };
    let scratch = scratch.places(more.states.as_ref());
    let floats = |array: Option<FloatsMut>| array.map_or(null_mut(), |array| array.as_ptr().cast());
    let more = kernels::BackwardScratch {
        dstates: place(more.dstates.as_ref()),
        dvalues_local: floats(more.dvalues_local),
        dsolved: place(more.dsolved.as_ref()),
        group_dstates: floats(more.group_dstates),
        exponents: floats(more.exponents),
        parts: more.parts.map(|parts| parts.map(|part| part.as_ptr().cast())),
    };
    // SAFETY: XLA's stream and buffers, whose shapes were checked.
    let outcome = unsafe {
        match context.stage() {
            Stage::Initialize => call.load(true, stream),
            _ => call.backward(stream, operands, cotangents, gradients, (scratch, more)),
        }
    };
    outcome.map_err(failed)
}
