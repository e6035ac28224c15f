//! A decoder's cache of keys and values: the shapes of its targets, for CPUs alone.

pub(crate) mod cpu;

use xla_ffi::Result;

use crate::arguments::check_layer;
use crate::declaration::{
    Alias, Declaration, Dtype, FLOATS, Range, S32, Stages, attribute, input, output,
};

/// Of N sequences of at most S positions.
const CACHE: &str = "L N S K D";
const ROWS: &str = "N T K D";
/// G heads for each of K of keys.
const HEADS: &str = "N K G D";

pub(crate) const DECLARATIONS: &[Declaration] = &[APPEND, ATTENTION];

pub(crate) const APPEND: Declaration = Declaration {
    name: c"xentile_kv_cache_append",
    summary: "The cache with rows of a layer's keys and values, of each sequence from a position on; rows whose \
              position is not in the cache are dropped.",
    cuda: Stages::None,
    operands: &[
        input("keys", CACHE, FLOATS),
        input("values", CACHE, Dtype::Like("keys")),
        input("new_keys", ROWS, Dtype::Like("keys")),
        input("new_values", ROWS, Dtype::Like("keys")),
        input("layer", "", S32),
        input("position", "N", S32),
    ],
    results: &[
        output("all_keys", CACHE, Dtype::Like("keys")),
        output("all_values", CACHE, Dtype::Like("keys")),
    ],
    maps_shared: false,
    aliases: &[
        Alias { operand: "keys", result: "all_keys", always: true },
        Alias { operand: "values", result: "all_values", always: true },
    ],
    ..Declaration::BASE
};

pub(crate) const ATTENTION: Declaration = Declaration {
    name: c"xentile_kv_cache_attention",
    summary: "Attention of one token of each sequence over the first positions of a layer's cache, of which it sees \
              the last ones in a window; 0 where a length is not in 1..=S.",
    cuda: Stages::None,
    operands: &[
        input("q", HEADS, FLOATS),
        input("keys", CACHE, Dtype::Like("q")),
        input("values", CACHE, Dtype::Like("q")),
        input("layer", "", S32),
        input("length", "N", S32),
    ],
    results: &[output("o", HEADS, Dtype::Like("q"))],
    attributes: &[&[attribute("window", Range::Extent), attribute("scale", Range::Positive)]],
    maps_shared: false,
    ..Declaration::BASE
};

/// The elements of a layer, and where those of `layer` begin, in a cache of this shape.
pub(crate) fn place(cache: &[usize], layer: i32) -> Result<(usize, usize)> {
    let each = cache[1..].iter().product::<usize>();
    Ok((each, check_layer(layer, cache[0])? * each))
}
