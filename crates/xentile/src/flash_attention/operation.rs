//! Attention for tools: one sequence of queries and keys, as many keys as queries by default. Entries are judged
//! by the error bounds of the reference.

use std::iter;
use std::ops::Range;
use std::time::Instant;

use rayon::prelude::*;

use super::reference::{Gradients, Head, Near};
use super::{AttentionShape, FlashAttention, Mask};
use crate::operation::{
    Array, ArraySpec, Arrays, Bound, Cost, DimSpec, ElementRule, Facts, Judged, Kind, Operation,
    OptionSpec, Pass, Problem, Reference, Role, Signature, Synthetic, TOKENS, ToleranceSpec,
    Tolerances, Value, Visitor,
};
use crate::{DType, Element, Error, Result, by_dtype};

/// Attention of one sequence.
pub const OPERATION: Attention = Attention;

/// The operations of this module.
pub const ALL: &[&dyn Operation] = &[&OPERATION];

/// The operation.
#[derive(Clone, Copy, Debug)]
pub struct Attention;

/// Seeds of the arrays' generators.
const SEEDS: [u64; 5] = [
    0x9e37_79b9_7f4a_7c15,
    0xbf58_476d_1ce4_e5b9,
    0x94d0_49bb_1331_11eb,
    0xd6e8_feb8_6659_fd93,
    0xa076_1d64_78bd_642f,
];

/// Operands with each query's range of keys, the first key and the one after the last, for packed texts with
/// different numbers of queries and keys.
pub const KEYS_SEEN: [&str; 2] = ["first_key_seen", "behind_last_key_seen"];

const fn dim(letter: &'static str, key: &'static str, about: &'static str) -> DimSpec {
    DimSpec { letter, key, index: key, about, default: None, like: None, in_shape: false }
}

const DIMS: [DimSpec; 5] = [
    TOKENS,
    dim("H", "heads", "query heads"),
    dim("D", "head_dim", "columns of a head"),
    dim("J", "kv_heads", "KV heads; they divide the query heads"),
    DimSpec {
        index: "key",
        like: Some(TOKENS.letter),
        ..dim("K", "keys", "keys of a head; the last one aligns with the last query")
    },
];

const OPTIONS: [OptionSpec; 7] = [
    OptionSpec::new(
        "causal",
        Kind::Bool,
        Value::Bool(true),
        "true or false",
        "hides keys after the query's position",
    ),
    OptionSpec::new(
        "window_before",
        Kind::Count,
        Value::Absent,
        "at least 0, or absent for all",
        "visible keys before the query's position",
    ),
    OptionSpec::new(
        "window_after",
        Kind::Count,
        Value::Absent,
        "at least 0, or absent for all",
        "visible keys after the query's position",
    ),
    OptionSpec::new(
        "softcap",
        Kind::Number,
        Value::Absent,
        "finite and above 0, or absent for none",
        "c of c tanh(t / c)",
    ),
    OptionSpec::new(
        "scale",
        Kind::Number,
        Value::Absent,
        "finite; 1 / sqrt(head_dim) where absent",
        "factor of the logits",
    ),
    OptionSpec::new(
        "sinks",
        Kind::Bool,
        Value::Bool(false),
        "true or false",
        "gives each head a sink",
    )
    .on_top(),
    OptionSpec::new(
        "segments",
        Kind::Count,
        Value::Absent,
        "from 1 to the tokens and to the keys, or absent for none",
        "packed texts, each longer than the one before; a query sees only its own text, whose \
         queries and keys end together",
    )
    .on_top(),
];

/// The options that kernels take.
#[must_use]
pub fn options(problem: &Problem) -> FlashAttention {
    let default = FlashAttention::new(problem.dim("D"));
    FlashAttention {
        scale: problem.number("scale").unwrap_or(default.scale),
        softcap: problem.number("softcap"),
    }
}

/// The mask of the options.
#[must_use]
pub fn mask(problem: &Problem) -> Mask {
    let side = |name| problem.integer(name).and_then(|count| usize::try_from(count).ok());
    let window = ["window_before", "window_after"].map(side);
    Mask { causal: problem.flag("causal"), window }
}

/// The number of texts that are packed into a sequence, if any.
fn segments(problem: &Problem) -> Option<usize> {
    problem.integer("segments").and_then(|count| usize::try_from(count).ok())
}

/// Returns the text of each of `tokens` tokens, for `count` packed texts. Lengths are roughly proportional to 1, 2,
/// 3 .., and at least one token.
fn texts(count: usize, tokens: usize) -> Vec<usize> {
    let (count, tokens) = (count as u128, tokens as u128);
    // Each text has one token, and its share of the others.
    let end = |text: u128| text + (tokens - count) * text * (text + 1) / (count * (count + 1));
    (0..count)
        .flat_map(|text| iter::repeat_n(text as usize, (end(text + 1) - end(text)) as usize))
        .collect()
}

/// The keys that each query sees, by the mask and within its own text.
#[must_use]
pub fn keys_seen(problem: &Problem) -> Vec<Range<usize>> {
    let [queries, keys] = ["T", "K"].map(|letter| problem.dim(letter));
    let mask = mask(problem);
    let Some(count) = segments(problem) else {
        return (0..queries).map(|query| mask.keys(query, queries, keys)).collect();
    };
    let [of_queries, of_keys] = [queries, keys].map(|tokens| texts(count, tokens));
    let of_text = |text| {
        let [queries, keys] = [&of_queries, &of_keys].map(|all: &Vec<usize>| {
            all.partition_point(|of| *of < text)..all.partition_point(|of| *of <= text)
        });
        (0..queries.len()).map(move |query| {
            let seen = mask.keys(query, queries.len(), keys.len());
            keys.start + seen.start..keys.start + seen.end
        })
    };
    (0..count).flat_map(of_text).collect()
}

/// Whether packed texts have different numbers of queries and keys; kernels then take ranges of keys.
fn has_two_lengths(problem: &Problem) -> bool {
    segments(problem).is_some() && problem.dim("K") != problem.dim("T")
}

/// The shape of arrays.
///
/// # Errors
/// Heads that cannot be shared, or a shape that no kernel takes.
pub fn shape(problem: &Problem) -> Result<AttentionShape> {
    let [queries, heads, width, kv_heads, keys] = DIMS.map(|dim| problem.dim(dim.letter));
    if !heads.is_multiple_of(kv_heads) {
        return Err(Error::Invalid(format!(
            "kv_heads is {kv_heads}; it must divide heads, which is {heads}"
        )));
    }
    let shape = AttentionShape {
        heads: kv_heads,
        group: heads / kv_heads,
        queries,
        keys,
        width,
        value_width: width,
    };
    shape.validate()?;
    Ok(shape)
}

/// Returns random rows of `heads` heads for the tokens `rows`, in `E`.
fn heads_of<E: Element>(problem: &Problem, from: &Synthetic, rows: &[u64], heads: usize) -> Vec<E> {
    let width = problem.dim("D");
    let mut all = vec![E::from_f32(0.0); heads * rows.len() * width];
    for (head, all) in all.chunks_exact_mut((rows.len() * width).max(1)).enumerate() {
        from.apart((head as u64).wrapping_mul(SEEDS[4])).fill(rows, width, all);
    }
    all
}

impl Operation for Attention {
    fn facts(&self) -> &'static Facts {
        const FACTS: Facts = Facts {
            name: "flash_attention",
            about: "softmax attention of one sequence, by tiles of keys",
            dims: &DIMS,
            options: &OPTIONS,
            tolerances: &[ToleranceSpec {
                name: "gradient_roundings",
                about: "relative error in norm of o and of each gradient, in units of rounding of \
                    the dtype, beyond the bounds of entries",
                default: |_| 1.5,
            }],
            ..Facts::BASE
        };
        &FACTS
    }

    fn validate(&self, problem: &Problem) -> Result<()> {
        options(problem).validate().map_err(|error| Error::Invalid(format!("options: {error}")))?;
        if let Some(count) = segments(problem) {
            for (letter, what) in [("T", "tokens"), ("K", "keys")] {
                let most = problem.dim(letter);
                if !(1..=most).contains(&count) {
                    return Err(Error::Invalid(format!(
                        "segments is {count}; it must be from 1 to the {what}, which are {most}"
                    )));
                }
            }
        }
        shape(problem).map(drop)
    }

    fn signature(&self, problem: &Problem, pass: Pass) -> Signature {
        let has_sinks = problem.flag("sinks");
        let (of_queries, of_keys) = (["H", "T", "D"], ["J", "K", "D"]);
        let array = |name, dims: &[&'static str], role| {
            ArraySpec::new(name, dims, ElementRule::Compute, role)
        };
        let mut operands = vec![
            ArraySpec::input("q", &of_queries),
            ArraySpec::input("k", &of_keys),
            ArraySpec::input("v", &of_keys),
        ];
        if has_sinks {
            operands.push(ArraySpec::number("sinks", &["H"], Role::Input { differentiable: true }));
        }
        let of_tokens = |name| {
            ArraySpec::new(name, &["T"], ElementRule::Index, Role::Input { differentiable: false })
        };
        if has_two_lengths(problem) {
            operands.extend(KEYS_SEEN.map(of_tokens));
        } else if segments(problem).is_some() {
            operands.push(of_tokens("segment_ids"));
        }
        let mut results = Vec::new();
        if pass != Pass::Backward {
            results.push(array("o", &of_queries, Role::Output));
            results.push(ArraySpec::number("lse", &["H", "T"], Role::Output));
        }
        if pass.has_gradients() {
            operands.push(array("do", &of_queries, Role::Cotangent("o")));
            operands.push(ArraySpec::number("dlse", &["H", "T"], Role::Cotangent("lse")));
            results.push(array("dq", &of_queries, Role::Gradient("q")));
            results.push(array("dk", &of_keys, Role::Gradient("k")));
            results.push(array("dv", &of_keys, Role::Gradient("v")));
            if has_sinks {
                results.push(ArraySpec::number("dsinks", &["H"], Role::Gradient("sinks")));
            }
        }
        Signature { operands, results }
    }

    fn inputs(&self, problem: &Problem, from: &Synthetic, rows: &[u64]) -> Result<Arrays<'static>> {
        shape(problem)?;
        from.check_unlabelled(self, "queries, keys and values")?;
        let mut inputs = Arrays::default();
        let [heads, kv_heads, keys] = ["H", "J", "K"].map(|letter| problem.dim(letter));
        let keys: Vec<_> = (0..keys as u64).collect();
        let arrays = [
            ("q", rows, heads, 0),
            ("k", &keys, kv_heads, SEEDS[0]),
            ("v", &keys, kv_heads, SEEDS[1]),
        ];
        by_dtype!(problem.dtype, E => for (name, rows, heads, apart) in arrays {
            let drawn = heads_of::<E>(problem, &from.apart(apart), rows, heads);
            inputs.insert(name, Array::of(drawn));
        });
        if problem.flag("sinks") {
            let mut sinks = vec![0_f32; heads];
            from.unit().apart(SEEDS[2]).fill(&[0], heads, &mut sinks);
            inputs.insert("sinks", Array::of(sinks));
        }
        if has_two_lengths(problem) {
            let seen = keys_seen(problem);
            let ends: [fn(&Range<usize>) -> i64; 2] =
                [|seen| seen.start as i64, |seen| seen.end as i64];
            for (name, end) in KEYS_SEEN.into_iter().zip(ends) {
                inputs.insert(name, Array::of(seen.iter().map(end).collect::<Vec<_>>()));
            }
        } else if let Some(count) = segments(problem) {
            // Segment ids are in no order, and may be negative.
            let of_text = |text| 5 - 3 * text as i64 + 1000 * (text as i64 % 2);
            let ids = texts(count, rows.len()).into_iter().map(of_text);
            inputs.insert("segment_ids", Array::of(ids.collect::<Vec<_>>()));
        }
        Ok(inputs)
    }

    /// Standard normal cotangents.
    fn given(
        &self,
        problem: &Problem,
        pass: Pass,
        from: &Synthetic,
        rows: &[u64],
    ) -> Arrays<'static> {
        let mut given = Arrays::default();
        if !pass.has_gradients() {
            return given;
        }
        let heads = problem.dim("H");
        let unit = from.unit();
        by_dtype!(problem.dtype, E => {
            let drawn = heads_of::<E>(problem, &unit.apart(SEEDS[2]), rows, heads);
            given.insert("do", Array::of(drawn));
        });
        let mut dlse = vec![0_f32; heads * rows.len()];
        unit.apart(SEEDS[3]).fill(&[0], heads * rows.len(), &mut dlse);
        given.insert("dlse", Array::of(dlse));
        given
    }

    /// Without a cotangent of lse, which is seldom part of a loss.
    fn measured(
        &self,
        problem: &Problem,
        pass: Pass,
        from: &Synthetic,
        rows: &[u64],
    ) -> Arrays<'static> {
        let mut given = self.given(problem, pass, from, rows);
        if let Some(dlse) = given.get_mut("dlse") {
            dlse.fill(0.0);
        }
        given
    }

    fn reference<'a>(
        &self,
        problem: &'a Problem,
        inputs: &'a Arrays<'a>,
        tolerances: Tolerances,
    ) -> Result<Box<dyn Reference + 'a>> {
        let wide = |name| {
            let array = inputs.get(name).expect("an input");
            (0..array.len()).map(|index| array.at(index)).collect::<Vec<_>>()
        };
        Ok(Box::new(OfSequence {
            dtype: problem.dtype,
            options: options(problem),
            keys_seen: keys_seen(problem),
            shape: shape(problem)?,
            q: wide("q"),
            k: wide("k"),
            v: wide("v"),
            sinks: inputs.get("sinks").map(|_| wide("sinks")),
            tolerances,
            o: Vec::new(),
            lse: Vec::new(),
        }))
    }

    /// Bytes of float64 arrays, and of the results' bounds.
    fn reference_bytes(&self, problem: &Problem, _: usize) -> Option<u64> {
        let [queries, heads, width, kv_heads, keys] =
            DIMS.map(|dim| problem.dim(dim.letter) as u64);
        let of_queries = heads.checked_mul(5)?.checked_mul(queries)?;
        let rows = of_queries.checked_add(kv_heads.checked_mul(6)?.checked_mul(keys)?)?;
        rows.checked_mul(width)?.checked_mul(size_of::<f64>() as u64)
    }

    /// Two GEMMs forward and five backward, of visible pairs. Keys and values that no query sees are not
    /// read.
    fn cost(&self, problem: &Problem) -> Cost {
        let whole = self.signature(problem, Pass::ForwardAndBackward);
        let [all_bytes, bytes_written] = whole.bytes(problem);
        let [_, heads, width, kv_heads, keys] = DIMS.map(|dim| problem.dim(dim.letter));
        let (mut pairs, mut keys_read, mut end) = (0_u64, 0, 0);
        // Both ends of the ranges increase from one query to the next.
        for seen in keys_seen(problem) {
            pairs += seen.len() as u64;
            keys_read += seen.end.saturating_sub(seen.start.max(end));
            end = end.max(seen.end);
        }
        let unseen =
            (2 * kv_heads * (keys - keys_read) * width * problem.dtype.size_bytes()) as u64;
        let bytes_read = all_bytes.saturating_sub(unseen);
        Cost { bytes_read, bytes_written, flops: 7 * 2 * (heads * width) as u64 * pairs }
    }

    fn headline(&self, problem: &Problem) -> (&'static str, String) {
        let sinks = if problem.flag("sinks") { ", with sinks" } else { "" };
        let texts = segments(problem).map_or(String::new(), |count| format!(", {count} texts"));
        ("q, k, v", format!("{} {}{sinks}{texts}", self.shape(problem, None), problem.dtype))
    }
}

/// The reference on one sequence, in float64.
struct OfSequence {
    dtype: DType,
    options: FlashAttention,
    keys_seen: Vec<Range<usize>>,
    shape: AttentionShape,
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    sinks: Option<Vec<f64>>,
    tolerances: Tolerances,
    o: Vec<Near>,
    lse: Vec<Near>,
}

impl OfSequence {
    /// Calls `run` with the reference of query head `head`.
    fn with_head<T>(&self, head: usize, run: impl FnOnce(&Head<'_>) -> T) -> T {
        let AttentionShape { group, queries, keys, width, .. } = self.shape;
        let of = |all: &'_ [f64], head: usize, rows: usize| {
            let range = head * rows * width..(head + 1) * rows * width;
            all[range].to_vec()
        };
        let q = of(&self.q, head, queries);
        let [k, v] = [&self.k, &self.v].map(|all| of(all, head / group, keys));
        let sees = |query: usize, key: usize| self.keys_seen[query].contains(&key);
        run(&Head {
            options: self.options,
            dtype: self.dtype,
            widths: [width; 2],
            q: &q,
            k: &k,
            v: &v,
            sees: &sees,
            sink: self.sinks.as_ref().map(|sinks| sinks[head]),
        })
    }

    fn judged(&self, all: &[Near]) -> Judged {
        let squares = |of: fn(&Near) -> f64| all.iter().map(|near| of(near).powi(2)).sum::<f64>();
        let squares = [squares(|near| SHARE * near.bound), squares(|near| near.value)];
        Judged::WithinRounding { relative: self.tolerances.bound_whole(self.dtype, squares) }
    }

    fn hand_over(
        &self,
        (array, prefix): (&'static str, &str),
        all: &[Near],
        judged: Judged,
        visitor: &mut dyn Visitor,
    ) {
        let width = self.shape.width;
        visitor.result(array, &format!("{prefix}{array}"), judged, &|rows| {
            all.par_chunks(width).enumerate().for_each(|(row, all)| {
                let values: Vec<_> = all.iter().map(|near| near.value).collect();
                let bounds: Vec<_> = all.iter().map(|near| near.bound + FLUSHED).collect();
                rows.row(row * width, &values, Bound::Each(&bounds));
            });
        });
    }
}

/// The largest ratio of the norm of all errors to that of their bounds. Bounds add magnitudes, whereas errors have
/// either sign and partly cancel.
const SHARE: f64 = 1.0 / 16.0;

/// The error of a few products that fall below f32's normal range.
const FLUSHED: f64 = 64.0 * f32::MIN_POSITIVE as f64;

impl Reference for OfSequence {
    fn forward(&mut self) {
        let AttentionShape { queries, value_width, .. } = self.shape;
        let heads = self.shape.heads * self.shape.group;
        let of_heads: Vec<_> = (0..heads)
            .into_par_iter()
            .map(|head| {
                self.with_head(head, |of| {
                    let mut o = vec![Near::default(); queries * value_width];
                    let rows = o.chunks_exact_mut(value_width).enumerate();
                    let lse: Vec<_> = rows.map(|(query, o)| of.forward(query, o)).collect();
                    (o, lse)
                })
            })
            .collect();
        for (o, lse) in of_heads {
            self.o.extend(o);
            self.lse.extend(lse);
        }
    }

    fn outputs(&self, visitor: &mut dyn Visitor) {
        self.hand_over(("o", "fwd/"), &self.o, self.judged(&self.o), visitor);
        self.hand_over(("lse", "fwd/"), &self.lse, Judged::Within, visitor);
    }

    fn gradients(&self, _: Pass, given: &Arrays<'_>, prefix: &str, visitor: &mut dyn Visitor) {
        let began = Instant::now();
        let AttentionShape { heads, group, queries, keys, width, .. } = self.shape;
        let of = |name| given.get(name).expect("a cotangent");
        let (dout, dlse) = (of("do"), of("dlse"));
        let of_heads: Vec<_> = (0..heads)
            .into_par_iter()
            .map(|head| {
                let mut sums = Gradients::zeros(keys, [width; 2]);
                let (mut dq, mut dsinks) = (Vec::new(), Vec::new());
                for head in head * group..(head + 1) * group {
                    let mut dsink = Near::default();
                    self.with_head(head, |of| {
                        for query in 0..queries {
                            let row = head * queries + query;
                            let dout: Vec<_> =
                                (row * width..(row + 1) * width).map(|at| dout.at(at)).collect();
                            let mut of_row = vec![Near::default(); width];
                            let part =
                                of.backward(query, &dout, dlse.at(row), &mut of_row, &mut sums);
                            dsink.value += part.value;
                            dsink.bound += part.bound;
                            dq.extend(of_row);
                        }
                    });
                    dsinks.push(dsink);
                }
                (dq, sums, dsinks)
            })
            .collect();
        let [mut dq, mut dk, mut dv, mut dsinks] = [const { Vec::new() }; 4];
        for (of_queries, sums, of_sinks) in of_heads {
            dq.extend(of_queries);
            dk.extend(sums.k);
            dv.extend(sums.v);
            dsinks.extend(of_sinks);
        }
        for (name, all) in [("dq", &dq), ("dk", &dk), ("dv", &dv)] {
            self.hand_over((name, prefix), all, self.judged(all), visitor);
        }
        if self.sinks.is_some() {
            self.hand_over(("dsinks", prefix), &dsinks, Judged::Within, visitor);
        }
        visitor.seconds("ref_grad_s", began.elapsed().as_secs_f64());
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::operation::TileExtents;

    /// A problem of two query heads of 8 columns with one KV head, in f32, and with `options` set.
    fn problem([queries, keys]: [usize; 2], options: &[(&'static str, Value)]) -> Problem {
        let mut all: BTreeMap<_, _> =
            OPTIONS.iter().map(|option| (option.name, option.default)).collect();
        all.extend(options.iter().copied());
        let dims = DIMS.map(|dim| dim.letter).into_iter().zip([queries, 2, 8, 1, keys]);
        let (dtype, tile) = (DType::F32, TileExtents::default());
        Problem { dims: dims.collect(), dtype, options: all, tile, cotangent: 1.0 }
    }

    /// FLOP count visible pairs, and bytes the keys that some query sees.
    #[test]
    fn costs_are_of_what_is_seen() {
        let (no, count) = (Value::Bool(false), Value::Integer);
        for (lengths, options, pairs, keys_read) in [
            ([4, 4], vec![], 10, 4),
            ([1, 9], vec![], 9, 9),
            ([4, 6], vec![], 3 + 4 + 5 + 6, 6),
            ([6, 4], vec![], 1 + 2 + 3 + 4, 4),
            ([6, 4], vec![("causal", no)], 24, 4),
            ([2, 9], vec![("window_before", count(3))], 8, 5),
            ([6, 4], vec![("window_before", count(1))], 1 + 2 + 2 + 2, 4),
            ([7, 3], vec![("causal", no), ("window_after", count(1))], 1 + 2 + 3 + 3, 3),
            ([9, 9], vec![("segments", count(3))], 3 + 6 + 10, 9),
            // Texts of 2, 3, 4 queries and 2, 4, 6 keys, which end together.
            ([9, 12], vec![("segments", count(3))], (1 + 2) + (2 + 3 + 4) + (3 + 4 + 5 + 6), 12),
            // Texts of 2, 4, 6 queries and 2, 3, 4 keys: some queries see no key.
            ([12, 9], vec![("segments", count(3))], (1 + 2) + (1 + 2 + 3) + (1 + 2 + 3 + 4), 9),
            // Windows of a text's few queries exclude some of its keys.
            ([3, 12], vec![("segments", count(2)), ("window_before", count(1))], 2 + 2 + 2, 2 + 3),
        ] {
            let [queries, keys] = lengths;
            let cost = OPERATION.cost(&problem(lengths, &options));
            assert_eq!(cost.flops, 7 * 2 * 8 * 2 * pairs, "{lengths:?} {options:?}");
            let has_texts = options.iter().any(|(name, _)| *name == "segments");
            // A segment id for each query, or a range of keys.
            let of_texts = if queries == keys { queries } else { 2 * queries };
            let ids = if has_texts { of_texts } else { 0 };
            let of_queries = 2 * 2 * queries * 8 + 2 * queries;
            let read = 4 * (of_queries + 2 * keys_read * 8 + ids);
            assert_eq!(cost.bytes_read, read as u64, "{lengths:?} {options:?}");
            let written = 4 * (of_queries + 2 * keys * 8);
            assert_eq!(cost.bytes_written, written as u64, "{lengths:?} {options:?}");
        }
    }

    #[test]
    fn texts_have_tokens_and_keys() {
        let validate = |lengths, count| {
            let problem = problem(lengths, &[("segments", Value::Integer(count))]);
            OPERATION.validate(&problem).map_err(|error| error.to_string())
        };
        assert_eq!(validate([5, 7], 5), Ok(()));
        let of = |what| Err(format!("segments is 6; it must be from 1 to the {what}, which are 5"));
        assert_eq!([validate([5, 7], 6), validate([7, 5], 6)], [of("tokens"), of("keys")]);
    }

    #[test]
    fn queries_and_keys_of_a_text_end_together() {
        let of = |lengths| keys_seen(&problem(lengths, &[("segments", Value::Integer(2))]));
        assert_eq!(of([6, 6]), [0..1, 0..2, 2..3, 2..4, 2..5, 2..6]);
        assert_eq!(of([3, 12]), [0..4, 4..11, 4..12]);
        assert_eq!(of([9, 3]), [0..0, 0..0, 0..1, 1..1, 1..1, 1..1, 1..1, 1..2, 1..3]);
    }

    #[test]
    fn texts_fill_a_sequence() {
        assert_eq!(texts(1, 3), [0, 0, 0]);
        assert_eq!(texts(3, 3), [0, 1, 2]);
        assert_eq!(texts(3, 9), [0, 0, 1, 1, 1, 2, 2, 2, 2]);
        for (count, tokens) in [(1, 1), (2, 7), (5, 64), (64, 65), (300, 4096)] {
            let all = texts(count, tokens);
            assert_eq!(all.len(), tokens);
            let lengths: Vec<_> =
                (0..count).map(|text| all.iter().filter(|of| **of == text).count()).collect();
            assert!(all.is_sorted() && lengths.iter().all(|length| *length >= 1), "{lengths:?}");
            assert!(lengths[0] <= lengths[count - 1], "{lengths:?}");
        }
    }
}
