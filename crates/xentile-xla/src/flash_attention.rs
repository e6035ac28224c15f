//! Attention: the attributes and the shapes of its targets, on any platform.

pub(crate) mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;

use xentile::flash_attention::{AttentionShape, FlashAttention};
use xla_ffi::{Decoder, Parameter, Result};

use crate::arguments::invalid;
use crate::declaration::{
    ArrayDecl, AttributeDecl, Declaration, Dims, Dtype, F32, FLOATS, Given, HALVES, Range, S32,
    Stages, attribute, cotangent, gradient, input, output, residual, scratch,
};

const Q: ArrayDecl = input("q", "*batch G S D", FLOATS);
const K: ArrayDecl = input("k", "*batch K D", Dtype::Like("q"));
const V: ArrayDecl = input("v", "*batch K E", Dtype::Like("q"));
/// The first key that a query sees, and the one behind its last.
const RANGES: ArrayDecl = input("ranges", "*batch S 2", S32);
const Q_SEGMENTS: ArrayDecl = input("q_segments", "*batch S", S32).given(Given::Where("segments"));
const KV_SEGMENTS: ArrayDecl =
    input("kv_segments", "*batch K", S32).given(Given::Where("segments"));
const SINKS: ArrayDecl = input("sinks", "*batch G", F32).given(Given::Where("sinks"));

const ATTRIBUTES: &[AttributeDecl] = &[
    attribute("scale", Range::Finite),
    attribute("softcap", Range::Positive).absent("none"),
    attribute("segments", Range::Bool),
    attribute("sinks", Range::Bool),
    attribute("tokens_first", Range::Bool).absent("false").cuda_only(),
];

/// What the backward pass alone has: the columns of heads that its scratch is for, 64 or 128, and whether the terms
/// of dq are added up in one order.
const OF_BACKWARD: &[AttributeDecl] = &[
    attribute("scratch_columns", Range::OneOf(&[64, 128])).absent("none").cuda_only(),
    attribute("deterministic", Range::Bool).absent("true").cuda_only(),
];

/// For every 128 queries of a head.
const SCRATCH: ArrayDecl = scratch("scratch", "", F32)
    .by(Dims::By(
        "scratch_columns",
        &[("64", "*batch G S/128 8960"), ("*", "*batch G S/128 17152")],
    ))
    .given(Given::Where("scratch_columns"));

pub(crate) const DECLARATIONS: &[Declaration] = &[FORWARD, BACKWARD, DECODE, PAGED];

pub(crate) const FORWARD: Declaration = Declaration {
    name: c"xentile_flash_attention_forward",
    summary: "o and lse of attention over the keys that each query sees.",
    operands: &[Q, K, V, RANGES, Q_SEGMENTS, KV_SEGMENTS, SINKS],
    results: &[output("o", "*batch G S E", Dtype::Like("q")), residual("lse", "*batch G S", F32)],
    attributes: &[ATTRIBUTES],
    ..Declaration::BASE
};

pub(crate) const BACKWARD: Declaration = Declaration {
    name: c"xentile_flash_attention_backward",
    summary: "dq, dk, dv and dsinks, from what forward gave and the cotangents of that.",
    operands: &[
        Q,
        K,
        V,
        RANGES,
        Q_SEGMENTS,
        KV_SEGMENTS,
        SINKS,
        residual("o", "*batch G S E", Dtype::Like("q")),
        residual("lse", "*batch G S", F32),
        cotangent("dout", "*batch G S E", Dtype::Like("q")),
        cotangent("dlse", "*batch G S", F32),
    ],
    results: &[
        gradient("dq", "*batch G S D", Dtype::Like("q")),
        gradient("dk", "*batch K D", Dtype::Like("k")),
        gradient("dv", "*batch K E", Dtype::Like("v")),
        gradient("dsinks", "*batch G", F32).given(Given::Where("sinks")),
        SCRATCH,
    ],
    attributes: &[ATTRIBUTES, OF_BACKWARD],
    ..Declaration::BASE
};

pub(crate) const DECODE: Declaration = Declaration {
    name: c"xentile_flash_attention_decode",
    summary: "What forward gives, for few queries: chunks of keys are shared out over the GPU and merged.",
    host: Stages::None,
    operands: &[input("q", "*batch G S D", HALVES), K, V, RANGES, SINKS],
    results: &[
        output("o", "*batch G S E", Dtype::Like("q")),
        residual("lse", "*batch G S", F32),
        scratch("partials", "*batch K/chunk_keys G S E", F32),
        scratch("partial_lse", "*batch K/chunk_keys G S", F32),
    ],
    attributes: &[&[
        attribute("scale", Range::Finite),
        attribute("softcap", Range::Positive).absent("none"),
        attribute("sinks", Range::Bool),
        attribute("chunk_keys", Range::Extent),
        attribute("tokens_first", Range::Bool).absent("false").cuda_only(),
    ]],
    ..Declaration::BASE
};

pub(crate) const PAGED: Declaration = Declaration {
    name: c"xentile_flash_attention_paged",
    summary: "What decode gives, of keys and values in pages of a pool, of which block_tables names those of each \
              of B texts. `*batch` is the heads of keys, which lie behind B, P and S in memory.",
    host: Stages::None,
    operands: &[
        input("q", "*batch B G S D", HALVES),
        input("k_pages", "*batch P T D", Dtype::Like("q")),
        input("v_pages", "*batch P T E", Dtype::Like("q")),
        input("block_tables", "B N", S32),
        input("ranges", "B S 2", S32),
        input("sinks", "*batch G", F32).given(Given::Where("sinks")),
    ],
    results: &[
        output("o", "*batch B G S E", Dtype::Like("q")),
        residual("lse", "*batch B G S", F32),
        scratch("partials", "*batch N/chunk_pages B G S E", F32),
        scratch("partial_lse", "*batch N/chunk_pages B G S", F32),
    ],
    attributes: &[&[
        attribute("scale", Range::Finite),
        attribute("softcap", Range::Positive).absent("none"),
        attribute("sinks", Range::Bool),
        attribute("chunk_pages", Range::Extent),
        attribute("tokens_first", Range::Bool).absent("false").cuda_only(),
    ]],
    maps_shared: false,
    ..Declaration::BASE
};

/// The attributes of every target of attention, each within its range.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Options {
    pub(crate) attention: FlashAttention,
    /// Whether rows of q, k, v and o lie before the last leading axis in memory.
    pub(crate) tokens_first: bool,
}

impl<'a> Parameter<'a> for Options {
    fn decode(decoder: &mut Decoder<'a>, _: &'static str) -> Result<Self> {
        let options = FlashAttention {
            scale: decoder.parameter("scale")?,
            softcap: decoder.parameter("softcap")?,
        };
        options.validate().map_err(|error| invalid(format_args!("attribute {error}")))?;
        let tokens_first = decoder.parameter::<Option<bool>>("tokens_first")?.unwrap_or(false);
        Ok(Self { attention: options, tokens_first })
    }
}

/// The shape of `q` `[.., G, S, D]`, `k` `[.., K, D]` and `v` `[.., K, E]`.
fn shape(q: &[usize], k: &[usize], v: &[usize]) -> Result<AttentionShape> {
    let (
        [leading @ .., group, queries, width],
        [of_k @ .., keys, k_width],
        [of_v @ .., v_keys, value_width],
    ) = (q, k, v)
    else {
        return Err(invalid(format_args!(
            "`q` has shape {q:?}, `k` {k:?} and `v` {v:?}; they must be [.., G, S, D], [.., K, D] and \
             [.., K, E]"
        )));
    };
    if (of_k, k_width) != (leading, width) {
        return Err(invalid(format_args!(
            "`k` has shape {k:?}; it must be {leading:?}, K and {width}, as `q` has shape {q:?}"
        )));
    }
    if (of_v, v_keys) != (leading, keys) {
        return Err(invalid(format_args!(
            "`v` has shape {v:?}; it must be {leading:?}, {keys} and E, as `k` has shape {k:?}"
        )));
    }
    // An empty axis first, because the others alone may multiply to more than fits.
    let heads = if leading.contains(&0) { 0 } else { leading.iter().product() };
    let shape = AttentionShape {
        heads,
        group: *group,
        queries: *queries,
        keys: *keys,
        width: *width,
        value_width: *value_width,
    };
    shape.validate().map_err(invalid)?;
    Ok(shape)
}

/// What queries see, and sinks: ranges, and what the attributes `segments` and `sinks` say that there is.
/// Of buffers of s32 and of f32.
pub(crate) struct Seen<I, F> {
    pub(crate) ranges: I,
    pub(crate) segments: Option<[I; 2]>,
    pub(crate) sinks: Option<F>,
}

impl<'a, I: Parameter<'a>, F: Parameter<'a>> Parameter<'a> for Seen<I, F> {
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

/// Tells the shape of a kind of buffer.
type DimsOf<B> = fn(&B) -> &[usize];

/// A call's shape, with its leading axes.
pub(crate) struct Call<'a> {
    pub(crate) shape: AttentionShape,
    pub(crate) leading: &'a [usize],
}

impl<'a> Call<'a> {
    /// Checks the shapes of q, k, v and of what is seen, whose buffers the functions tell the shape of.
    pub(crate) fn new<I, F>(
        [q, k, v]: [&'a [usize]; 3],
        seen: &Seen<I, F>,
        (of_integers, of_floats): (DimsOf<I>, DimsOf<F>),
    ) -> Result<Self> {
        let shape = shape(q, k, v)?;
        let leading = &q[..q.len() - 3];
        let AttentionShape { group, queries, keys, .. } = shape;
        check("ranges", of_integers(&seen.ranges), leading, &[queries, 2])?;
        if let Some([of_queries, of_keys]) = &seen.segments {
            check("q_segments", of_integers(of_queries), leading, &[queries])?;
            check("kv_segments", of_integers(of_keys), leading, &[keys])?;
        }
        if let Some(sinks) = &seen.sinks {
            check("sinks", of_floats(sinks), leading, &[group])?;
        }
        Ok(Self { shape, leading })
    }

    /// Checks the shapes of the forward pass's results.
    pub(crate) fn check_forward(&self, o: &[usize], lse: &[usize]) -> Result {
        self.check_queries("o", o, &[self.shape.value_width])?;
        self.check_queries("lse", lse, &[])
    }

    /// Checks the shapes of what chunks of so many keys leave.
    #[cfg(feature = "cuda")]
    pub(crate) fn check_partials(&self, o: &[usize], lse: &[usize], chunk: usize) -> Result {
        let AttentionShape { group, queries, keys, value_width, .. } = self.shape;
        let chunks = keys.div_ceil(chunk);
        check("partials", o, self.leading, &[chunks, group, queries, value_width])?;
        check("partial_lse", lse, self.leading, &[chunks, group, queries])
    }

    /// Checks the shapes of what the backward pass takes and gives besides; of the sinks' gradient where it
    /// is, and whether it should be.
    pub(crate) fn check_backward(
        &self,
        [o, lse, dout, dlse]: [&[usize]; 4],
        [dq, dk, dv]: [&[usize]; 3],
        (dsinks, has_sinks): (Option<&[usize]>, bool),
    ) -> Result {
        let AttentionShape { width, value_width, group, .. } = self.shape;
        for (name, dims, columns) in [
            ("o", o, &[value_width][..]),
            ("lse", lse, &[]),
            ("dout", dout, &[value_width]),
            ("dlse", dlse, &[]),
            ("dq", dq, &[width]),
        ] {
            self.check_queries(name, dims, columns)?;
        }
        self.check_keys("dk", dk, width)?;
        self.check_keys("dv", dv, value_width)?;
        if dsinks.is_some() != has_sinks {
            return Err(invalid(
                "the call must have the result `dsinks` where it has `sinks`, and there alone",
            ));
        }
        dsinks.map_or(Ok(()), |dims| check("dsinks", dims, self.leading, &[group]))
    }

    /// Checks the shape of the backward pass's scratch, of so many words for every 128 queries.
    #[cfg(feature = "cuda")]
    pub(crate) fn check_scratch(&self, scratch: &[usize], words: usize) -> Result {
        let AttentionShape { group, queries, .. } = self.shape;
        check("scratch", scratch, self.leading, &[group, queries.div_ceil(128), words])
    }

    fn check_queries(&self, name: &str, dims: &[usize], columns: &[usize]) -> Result {
        let rows = [&[self.shape.group, self.shape.queries], columns].concat();
        check(name, dims, self.leading, &rows)
    }

    fn check_keys(&self, name: &str, dims: &[usize], columns: usize) -> Result {
        check(name, dims, self.leading, &[self.shape.keys, columns])
    }
}

/// Checks that an array, with its name, is `leading` and then `last`.
fn check(name: &str, dims: &[usize], leading: &[usize], last: &[usize]) -> Result {
    let right = [leading, last].concat();
    if dims == right {
        return Ok(());
    }
    Err(invalid(format_args!("`{name}` has shape {dims:?}; it must be {right:?}")))
}
