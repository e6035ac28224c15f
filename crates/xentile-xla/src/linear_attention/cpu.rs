//! Linear attention and the gated delta rule on the CPU.

use xentile::Element;
use xentile::linear_attention::LinearAttention;
use xentile_cpu::Isa;
use xentile_cpu::linear_attention::{self as kernels, Kernel, Launch};
use xla_ffi::{
    ANY_RANK, AnyBuffer, AnyBufferMut, Buffer, BufferMut, DType, Decoder, Parameter, Result,
    ThreadPool,
};

use super::finite;
use crate::arguments::{check_shape, given, given_unless, invalid};
use crate::cpu::{Pool, ask_for_huge_pages};
use crate::dtype::{self, with_element};
use crate::target::target_list;

target_list! {
    HOST;

    super::FORWARD: fn xentile_linear_attention_forward_host = forward(
        operands, o, states, scratch, pool,
    );
    super::BACKWARD: fn xentile_linear_attention_backward_host = backward(
        operands, cotangents, gradients, scratch, more, pool,
    );
}

/// Elements of a chunk on GPUs: of sums, of terms of dg, and of an inverse.
const DECAYS: usize = 192;
const EXPONENTS: usize = 256;
const INVERSE: usize = 8192;

type Floats<'a> = Buffer<'a, f32>;
type FloatsMut<'a> = BufferMut<'a, f32>;
type Operands<'a> = super::Operands<AnyBuffer<'a>, Floats<'a>>;
type Cotangents<'a> = super::Cotangents<AnyBuffer<'a>, Floats<'a>>;
type Gradients<'a> = super::Gradients<AnyBufferMut<'a>, FloatsMut<'a>>;

/// Scratch of GPUs: its names and shapes alone are looked at.
struct Scratch<'a> {
    floats: Vec<(&'static str, FloatsMut<'a>)>,
    rows: Vec<(&'static str, AnyBufferMut<'a>)>,
}

/// As `Scratch`, that of the forward pass.
struct ForwardScratch<'a>(Scratch<'a>);

/// As `Scratch`, what the backward pass has besides.
struct BackwardScratch<'a>(Scratch<'a>);

impl<'a> Parameter<'a> for Scratch<'a> {
    fn decode(decoder: &mut Decoder<'a>, _: &'static str) -> Result<Self> {
        let floats = vec![("decays", decoder.parameter("decays")?)];
        let mut rows = Vec::new();
        for name in ["inverse", "values"] {
            rows.extend(given(decoder, "delta", name)?.map(|array| (name, array)));
        }
        Ok(Self { floats, rows })
    }
}

impl<'a> Parameter<'a> for ForwardScratch<'a> {
    fn decode(decoder: &mut Decoder<'a>, name: &'static str) -> Result<Self> {
        let mut scratch = Scratch::decode(decoder, name)?;
        let states = given(decoder, "delta", "chunk_states")?;
        scratch.rows.extend(states.map(|array| ("chunk_states", array)));
        Ok(Self(scratch))
    }
}

impl<'a> Parameter<'a> for BackwardScratch<'a> {
    fn decode(decoder: &mut Decoder<'a>, _: &'static str) -> Result<Self> {
        let (mut floats, mut rows) = (Vec::new(), Vec::new());
        for name in ["chunk_states", "chunk_dstates"] {
            rows.extend(given(decoder, "delta", name)?.map(|array| (name, array)));
        }
        floats.extend(
            given(decoder, "delta", "dvalues_local")?.map(|array| ("dvalues_local", array)),
        );
        rows.extend(given(decoder, "delta", "dsolved")?.map(|array| ("dsolved", array)));
        for name in ["group_dstates", "exponents"] {
            floats.extend(given_unless(decoder, "delta", name)?.map(|array| (name, array)));
        }
        for name in ["dq_parts", "dk_parts"] {
            floats.extend(given(decoder, "shared", name)?.map(|array| (name, array)));
        }
        Ok(Self(Scratch { floats, rows }))
    }
}

/// The shape of a call, which all arrays must have.
struct Extents<'a> {
    leading: &'a [usize],
    dtype: DType,
    attention: LinearAttention,
    group_tokens: usize,
    groups_times_chunk: usize,
}

impl<'a> super::Operands<AnyBuffer<'a>, Floats<'a>> {
    /// Checks all shapes and dtypes.
    fn extents(&'a self) -> Result<Extents<'a>> {
        let (q, v) = (self.q.dims(), self.v.dims());
        let (&[ref leading @ .., tokens, key_heads, keys], &[.., heads, values]) = (q, v) else {
            return Err(invalid(format_args!(
                "`q` has shape {q:?} and `v` shape {v:?}; they must be [.., T, H, K] and [.., T, G, V]"
            )));
        };
        if !matches!(self.q.dtype(), DType::F32 | DType::Bf16 | DType::F16) {
            return Err(dtype::wrong("q", self.q.dtype(), dtype::ELEMENTS));
        }
        let attention = LinearAttention {
            delta: self.delta,
            scale: finite(self.scale)?,
            sequences: if leading.contains(&0) { 0 } else { leading.iter().product() },
            tokens,
            key_heads,
            heads,
            keys,
            values,
        };
        let [group_tokens, groups_times_chunk] =
            [("group_tokens", self.group_tokens), ("groups_times_chunk", self.groups_times_chunk)]
                .map(|(name, count)| {
                    usize::try_from(count).ok().filter(|count| *count > 0).ok_or_else(|| {
                        invalid(format_args!(
                            "attribute `{name}` is {count}; it must be at least 1"
                        ))
                    })
                });
        let extents = Extents {
            leading,
            dtype: self.q.dtype(),
            attention,
            group_tokens: group_tokens?,
            groups_times_chunk: groups_times_chunk?,
        };
        extents.check_rows("k", self.k.dims(), self.k.dtype(), &[tokens, key_heads, keys])?;
        extents.check_rows("v", v, self.v.dtype(), &[tokens, heads, values])?;
        extents.check("g", self.g.dims(), &[tokens, heads])?;
        if let Some(b) = &self.b {
            extents.check("b", b.dims(), &[tokens, heads])?;
        }
        extents.check("initial_state", self.initial_state.dims(), &[heads, keys, values])?;
        attention.validate().map_err(|error| invalid(format_args!("wrong shape: {error}")))?;
        Ok(extents)
    }

    /// The operands as kernels take them.
    fn typed<E: Element + xla_ffi::Element>(&'a self) -> Result<kernels::Operands<'a, E>> {
        Ok(kernels::Operands {
            q: self.q.typed::<E, ANY_RANK>()?.as_slice(),
            k: self.k.typed::<E, ANY_RANK>()?.as_slice(),
            v: self.v.typed::<E, ANY_RANK>()?.as_slice(),
            g: self.g.as_slice(),
            b: self.b.as_ref().map(Buffer::as_slice),
            state: self.initial_state.as_slice(),
        })
    }
}

impl Extents<'_> {
    /// Checks that the array `name` has the axes of *batch, then `last`.
    fn check(&self, name: &str, dims: &[usize], last: &[usize]) -> Result {
        check_shape(name, dims, &[self.leading, last].concat())
    }

    /// As `check`, and that the array has the dtype of q.
    fn check_rows(&self, name: &str, dims: &[usize], dtype: DType, last: &[usize]) -> Result {
        if dtype != self.dtype {
            return Err(dtype::wrong(name, dtype, &self.dtype.to_string()));
        }
        self.check(name, dims, last)
    }

    /// Checks an array of states, of which each head has some.
    fn check_states(&self, dims: &[usize]) -> Result {
        let LinearAttention { tokens, heads, keys, values, .. } = self.attention;
        let groups = tokens.div_ceil(self.group_tokens);
        self.check("states", dims, &[heads, groups, keys, values])
    }

    /// Checks arrays that no kernel for CPUs takes, and writes zeros: where every result is searched for NaN, what
    /// was in memory must not be found. What the backward pass has in two parts has the axis `parts`, [2].
    fn clear(&self, scratch: Scratch<'_>, parts: &[usize]) -> Result {
        let LinearAttention { tokens, heads, keys, values, .. } = self.attention;
        let chunks = tokens.div_ceil(self.groups_times_chunk);
        let shape = |name| match name {
            "decays" => vec![heads, tokens.div_ceil(64), DECAYS],
            "inverse" => vec![heads, chunks, INVERSE],
            "group_dstates" => vec![heads, tokens.div_ceil(self.group_tokens), keys, values],
            "exponents" => vec![heads, tokens.div_ceil(64), EXPONENTS],
            "dvalues_local" => vec![heads, chunks, 64, values],
            "values" | "dsolved" => [&[heads, chunks], parts, &[64, values]].concat(),
            "dq_parts" | "dk_parts" => vec![heads, chunks, 64, keys],
            _ => [&[heads, chunks], parts, &[keys, values]].concat(),
        };
        for (name, array) in scratch.floats {
            self.check(name, array.dims(), &shape(name))?;
            array.into_slice().fill(0.0);
        }
        for (name, array) in scratch.rows {
            self.check_rows(name, array.dims(), array.dtype(), &shape(name))?;
            with_element!(self.dtype, "q", E => {
                array.typed::<E, ANY_RANK>()?.into_slice().fill(E::from_f32(0.0));
                Ok(())
            })?;
        }
        Ok(())
    }
}

fn forward(
    operands: Operands,
    o: AnyBufferMut,
    states: FloatsMut,
    scratch: ForwardScratch,
    pool: ThreadPool,
) -> Result {
    let extents = operands.extents()?;
    let LinearAttention { tokens, heads, values, .. } = extents.attention;
    extents.check_rows("o", o.dims(), o.dtype(), &[tokens, heads, values])?;
    extents.check_states(states.dims())?;
    extents.clear(scratch.0, &[])?;
    let pool = Pool(pool);
    with_element!(extents.dtype, "q", E => {
        let o = o.typed::<E, ANY_RANK>()?.into_slice();
        ask_for_huge_pages(o);
        let launch = Launch { isa: Isa::detect(), pool: &pool };
        let operands = operands.typed::<E>()?;
        Kernel::new(extents.attention, extents.group_tokens, launch)
            .and_then(|kernel| kernel.forward(operands, o, states.into_slice()))
            .map_err(invalid)
    })
}

fn backward(
    operands: Operands,
    cotangents: Cotangents,
    gradients: Gradients,
    scratch: Scratch,
    more: BackwardScratch,
    pool: ThreadPool,
) -> Result {
    let extents = operands.extents()?;
    let LinearAttention { tokens, key_heads, heads, keys, values, .. } = extents.attention;
    let [key_rows, value_rows] = [[tokens, key_heads, keys], [tokens, heads, values]];
    let state_axes = [heads, keys, values];
    extents.check_states(cotangents.states.dims())?;
    extents.check_rows("do", cotangents.o.dims(), cotangents.o.dtype(), &value_rows)?;
    extents.check("dfinal_state", cotangents.final_state.dims(), &state_axes)?;
    for (name, array, last) in [
        ("dq", &gradients.q, &key_rows),
        ("dk", &gradients.k, &key_rows),
        ("dv", &gradients.v, &value_rows),
    ] {
        extents.check_rows(name, array.dims(), array.dtype(), last)?;
    }
    extents.check("dg", gradients.g.dims(), &[tokens, heads])?;
    if let Some(b) = &gradients.b {
        extents.check("db", b.dims(), &[tokens, heads])?;
    }
    extents.check("dinitial_state", gradients.initial_state.dims(), &state_axes)?;
    extents.clear(scratch, &[2])?;
    extents.clear(more.0, &[2])?;
    let pool = Pool(pool);
    with_element!(extents.dtype, "q", E => {
        let launch = Launch { isa: Isa::detect(), pool: &pool };
        let operands = operands.typed::<E>()?;
        let o = cotangents.o.typed::<E, ANY_RANK>()?;
        let cotangents = kernels::Cotangents {
            states: cotangents.states.as_slice(),
            o: o.as_slice(),
            state: cotangents.final_state.as_slice(),
        };
        let gradients = kernels::Gradients {
            q: gradients.q.typed::<E, ANY_RANK>()?.into_slice(),
            k: gradients.k.typed::<E, ANY_RANK>()?.into_slice(),
            v: gradients.v.typed::<E, ANY_RANK>()?.into_slice(),
            g: gradients.g.into_slice(),
            b: gradients.b.map(BufferMut::into_slice),
            state: gradients.initial_state.into_slice(),
        };
        Kernel::new(extents.attention, extents.group_tokens, launch)
            .and_then(|kernel| kernel.backward(operands, cotangents, gradients))
            .map_err(invalid)
    })
}
