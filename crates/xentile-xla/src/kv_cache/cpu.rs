//! A decoder's cache of keys and values on the CPU.

use xentile_cpu::kv_cache::{self as kernels, Extents};
use xentile_cpu::{Isa, Launch};
use xla_ffi::{
    ANY_RANK, Aliased, AnyBuffer, AnyBufferMut, Buffer, Decoder, MayAlias, Parameter, Result,
    ThreadPool,
};

use super::place;
use crate::arguments::{check_shape, invalid};
use crate::cpu::Pool;
use crate::dtype::with_element;
use crate::target::target_list;

target_list! {
    HOST;

    super::APPEND: fn xentile_kv_cache_append_host = append(keys_and_values, layer, position, results);
    super::ATTENTION: fn xentile_kv_cache_attention_host = attend(q, cache, length, o, options, pool);
}

/// The caches, and the rows to append.
struct Appended<'a> {
    caches: [MayAlias<AnyBuffer<'a>>; 2],
    rows: [AnyBuffer<'a>; 2],
}

impl<'a> Parameter<'a> for Appended<'a> {
    fn decode(decoder: &mut Decoder<'a>, _: &'static str) -> Result<Self> {
        Ok(Self {
            caches: [decoder.parameter("keys")?, decoder.parameter("values")?],
            rows: [decoder.parameter("new_keys")?, decoder.parameter("new_values")?],
        })
    }
}

/// Both caches, as results.
struct Results<'a>([AnyBufferMut<'a>; 2]);

impl<'a> Parameter<'a> for Results<'a> {
    fn decode(decoder: &mut Decoder<'a>, _: &'static str) -> Result<Self> {
        Ok(Self([decoder.parameter("all_keys")?, decoder.parameter("all_values")?]))
    }
}

fn append(
    appended: Appended,
    layer: Buffer<i32, 0>,
    position: Buffer<i32>,
    results: Results,
) -> Result {
    let names = [("keys", "new_keys", "all_keys"), ("values", "new_values", "all_values")];
    let Appended { caches, rows } = appended;
    let (first, dtype) = (caches[0].dims(), caches[0].dtype());
    for ((cache, rows), (names, result)) in
        caches.into_iter().zip(rows).zip(names.into_iter().zip(results.0))
    {
        let dims = cache.dims();
        let &[_, sequences, length, kv_heads, head_dim] = dims else {
            return Err(invalid(format_args!(
                "`{}` has shape {dims:?}; it must be [L, N, S, K, D]",
                names.0
            )));
        };
        check_shape(names.0, dims, first)?;
        check_shape(names.2, result.dims(), dims)?;
        check_shape("position", position.dims(), &[sequences])?;
        let tokens = rows.dims().get(1).copied().unwrap_or(0);
        check_shape(names.1, rows.dims(), &[sequences, tokens, kv_heads, head_dim])?;
        let (each, from) = place(dims, layer.as_slice()[0])?;
        let extents = Extents { sequences, length, kv_heads, group: 1, head_dim };
        with_element!(dtype, "keys", E => {
            let rows = rows.typed::<E, ANY_RANK>()?;
            let all = match cache.typed::<E, ANY_RANK>()?.with(result.typed::<E, ANY_RANK>()?)? {
                Aliased::InPlace(all) => all,
                Aliased::Apart { argument, result } => {
                    result.copy_from_slice(argument);
                    result
                }
            };
            let layer = &mut all[from..][..each];
            kernels::append(extents, rows.as_slice(), position.as_slice(), layer).map_err(invalid)
        })?;
    }
    Ok(())
}

/// The caches, and the layer that is read.
struct Cache<'a> {
    keys: AnyBuffer<'a>,
    values: AnyBuffer<'a>,
    layer: Buffer<'a, i32, 0>,
}

impl<'a> Parameter<'a> for Cache<'a> {
    fn decode(decoder: &mut Decoder<'a>, _: &'static str) -> Result<Self> {
        Ok(Self {
            keys: decoder.parameter("keys")?,
            values: decoder.parameter("values")?,
            layer: decoder.parameter("layer")?,
        })
    }
}

/// The attributes.
struct Options {
    window: usize,
    scale: f32,
}

impl<'a> Parameter<'a> for Options {
    fn decode(decoder: &mut Decoder<'a>, _: &'static str) -> Result<Self> {
        let (window, scale): (i64, f64) =
            (decoder.parameter("window")?, decoder.parameter("scale")?);
        let window =
            usize::try_from(window).ok().filter(|window| *window > 0).ok_or_else(|| {
                invalid(format_args!("attribute window is {window}; it must be at least 1"))
            })?;
        let scale = scale as f32;
        if !(scale.is_finite() && scale > 0.0) {
            return Err(invalid(format_args!(
                "attribute scale is {scale}; it must be finite and above 0"
            )));
        }
        Ok(Self { window, scale })
    }
}

fn attend(
    q: AnyBuffer,
    cache: Cache,
    length: Buffer<i32>,
    o: AnyBufferMut,
    options: Options,
    pool: ThreadPool,
) -> Result {
    let (dims, cached) = (q.dims(), cache.keys.dims());
    let (&[sequences, kv_heads, group, head_dim], &[_, _, positions, ..]) = (dims, cached) else {
        return Err(invalid(format_args!(
            "`q` has shape {dims:?} and `keys` {cached:?}; they must be [N, K, G, D] and [L, N, S, K, D]"
        )));
    };
    check_shape("keys", &cached[1..], &[sequences, positions, kv_heads, head_dim])?;
    check_shape("values", cache.values.dims(), cached)?;
    check_shape("length", length.dims(), &[sequences])?;
    check_shape("o", o.dims(), dims)?;
    let (each, from) = place(cached, cache.layer.as_slice()[0])?;
    let pool = Pool(pool);
    let launch = Launch { isa: Isa::detect(), pool: &pool };
    let extents = Extents { sequences, length: positions, kv_heads, group, head_dim };
    with_element!(q.dtype(), "q", E => {
        let keys = cache.keys.typed::<E, ANY_RANK>()?;
        let values = cache.values.typed::<E, ANY_RANK>()?;
        let operands = kernels::Operands {
            q: q.typed::<E, ANY_RANK>()?.as_slice(),
            keys: &keys.as_slice()[from..][..each],
            values: &values.as_slice()[from..][..each],
            lengths: length.as_slice(),
            window: options.window,
            scale: options.scale,
        };
        let o = o.typed::<E, ANY_RANK>()?.into_slice();
        kernels::attend(launch, extents, operands, o).map_err(invalid)
    })
}
