//! Attention by tiles, whose logits are never all in memory (Dao et al., "FlashAttention", 2022; Dao,
//! "FlashAttention-2", 2023). The contract of every backend.
//!
//! Of a head: queries `q` `[S, D]`, keys `k` `[K, D]` and values `v` `[K, E]`, of one dtype (f32, bf16
//! or f16). A group of query heads shares one head of keys and values. Of query i and key j:
//!
//! - `t = scale (q k)`, or `c tanh(scale (q k) / c)` with a [`softcap`](FlashAttention::softcap) c;
//! - `lse = ln(sum_j e^t)` over the keys that the query sees and, where heads have a *sink* s, `e^s`
//!   beside them: a logit that takes probability and gives no value (Xiao et al., "Efficient Streaming
//!   Language Models with Attention Sinks", 2023; learned ones are those of gpt-oss);
//! - `p = e^(t - lse)`, and `o = sum_j p v` in the dtype of q.
//!
//! Which keys a query sees is a range of them, [`Mask::keys`], from which those of another segment are
//! left out. The backward pass, for cotangents `do` of o and `dlse` of lse:
//!
//! - `delta = do o - dlse`, of o as it was rounded; `dp = do v`; `ds = p (dp - delta)`, times
//!   `1 - (t / c)^2` with a softcap;
//! - `dq = scale sum_j ds k`; over all queries of the group `dk = scale sum_i ds q`, `dv = sum_i p do`;
//!   `dsink = -sum_i e^(sink - lse) delta`.
//!
//! # Precision
//!
//! Logits, statistics and every sum are f32. Probabilities, and ds, are operands of products: kernels
//! may round them to the dtype, once, where that has 16 bits. [`reference::Head`] gives with each value
//! how far it may be off.
//!
//! Each sum has an order that follows from the shape and the ranges of its own row: no number of
//! threads, and no other row, head or batch entry changes a bit.
//!
//! # Special rows
//!
//! - A query that sees **no key**: o is 0 and lse -inf, or the sink where there is one. Its gradients
//!   are 0, and nothing that it holds is read into those of others.
//! - **Logits of -inf** count as keys that are not seen.
//! - **NaN or +inf** in a logit makes o and lse of its query NaN, and with a cotangent all gradients of its group.
//! - Keys and values that no query of a group has in its range are not read; gradients of theirs are 0.

#[cfg(feature = "operation")]
pub mod operation;
pub mod reference;

use std::ops::Range;

use crate::error::check_length;
use crate::shape::is_addressable;
use crate::{Error, Result};

/// The most columns that a head may have.
pub const MOST_COLUMNS: usize = 256;

/// The options of attention, the same for every backend.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FlashAttention {
    /// What products are multiplied with.
    pub scale: f64,
    /// c > 0 replaces a logit t by `c tanh(t / c)`.
    pub softcap: Option<f64>,
}

impl FlashAttention {
    /// The options for queries of so many columns: a scale of `1 / sqrt(columns)`.
    #[must_use]
    pub fn new(columns: usize) -> Self {
        Self { scale: 1.0 / (columns as f64).sqrt(), softcap: None }
    }

    /// Checks the range of every option.
    ///
    /// # Errors
    /// A scale that is not finite in f32; a softcap that is not above 0 and finite there.
    pub fn validate(&self) -> Result<()> {
        let Self { scale, softcap } = *self;
        if !(scale as f32).is_finite() {
            return Err(Error::Option {
                name: "scale",
                value: scale,
                requirement: "finite, in f32",
            });
        }
        match softcap {
            Some(cap) if !((cap as f32).is_normal() && cap > 0.0) => Err(Error::Option {
                name: "softcap",
                value: cap,
                requirement: "finite and above 0, in f32",
            }),
            _ => Ok(()),
        }
    }
}

/// Which keys a query sees, by places. Queries and keys end together: of S queries and K keys, query i
/// has the place i + K - S among keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mask {
    /// Whether a query sees nothing behind its own place.
    pub causal: bool,
    /// The most keys that it sees before its place, and behind.
    pub window: [Option<usize>; 2],
}

impl Mask {
    /// The keys that query `query` of `queries` sees, of `keys`.
    #[must_use]
    pub fn keys(&self, query: usize, queries: usize, keys: usize) -> Range<usize> {
        let place = query as i128 + keys as i128 - queries as i128;
        let after = if self.causal { Some(0) } else { self.window[1] };
        let within = |at: i128| at.clamp(0, keys as i128) as usize;
        let first = self.window[0].map_or(0, |before| within(place - before as i128));
        let end = after.map_or(keys, |after| within(place + after as i128 + 1));
        first..end.max(first)
    }
}

/// The shape of a problem: for each of `heads` heads of keys and values, of all batch entries, queries
/// `[group, queries, width]`, keys `[keys, width]` and values `[keys, value_width]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionShape {
    /// Heads of keys and values, of all batch entries.
    pub heads: usize,
    /// Heads of queries that share one of keys.
    pub group: usize,
    /// Queries of a head.
    pub queries: usize,
    /// Keys of a head.
    pub keys: usize,
    /// Columns of queries and keys.
    pub width: usize,
    /// Columns of values.
    pub value_width: usize,
}

impl AttentionShape {
    /// Checks that kernels take such arrays.
    ///
    /// # Errors
    /// No column, or more than 256; more elements than memory can address.
    pub fn validate(&self) -> Result<()> {
        for (name, columns) in [("q", self.width), ("v", self.value_width)] {
            if columns == 0 || columns > MOST_COLUMNS {
                return Err(Error::Invalid(format!(
                    "{name} has heads of {columns} columns; it must be from 1 to {MOST_COLUMNS}"
                )));
            }
        }
        let widest = self.width.max(self.value_width);
        let of = |factors: [usize; 5]| factors.contains(&0) || is_addressable(factors);
        let fits = of([4, self.heads, self.group, self.queries, widest])
            && of([4, self.heads, self.keys, widest, 1]);
        // Ranges are of 32 bits.
        if fits && i32::try_from(self.keys).is_ok() && i32::try_from(self.queries).is_ok() {
            return Ok(());
        }
        Err(Error::Invalid(format!("{self:?} does not fit the address space, or 2^31 keys")))
    }

    /// Rows of queries of a head of keys.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.group * self.queries
    }

    /// Checks the length of an array of `columns` for each query, called `name`.
    ///
    /// # Errors
    /// It has another length.
    pub fn check_queries(&self, name: &'static str, length: usize, columns: usize) -> Result<()> {
        check_length(name, length, "[N, G, S, ..]", self.heads * self.rows() * columns)
    }

    /// Checks the length of an array of `columns` for each key, called `name`.
    ///
    /// # Errors
    /// It has another length.
    pub fn check_keys(&self, name: &'static str, length: usize, columns: usize) -> Result<()> {
        check_length(name, length, "[N, K, ..]", self.heads * self.keys * columns)
    }

    /// Checks the length of an array called `name` with as many numbers a row of queries, which the
    /// group shares.
    ///
    /// # Errors
    /// It has another length.
    pub fn check_rows(&self, name: &'static str, length: usize, numbers: usize) -> Result<()> {
        check_length(name, length, "[N, S, ..]", self.heads * self.queries * numbers)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_outside_their_range_are_named() {
        let right = FlashAttention { scale: -0.5, softcap: Some(50.0) };
        assert_eq!(right.validate(), Ok(()));
        assert_eq!(FlashAttention::new(64), FlashAttention { scale: 0.125, softcap: None });
        let refuse = |options: FlashAttention| options.validate().unwrap_err().to_string();
        let found = refuse(FlashAttention { scale: f64::NAN, ..right });
        assert_eq!(found, "scale is NaN; it must be finite, in f32");
        for cap in [0.0, -1.0, f64::INFINITY, 1e-40, 1e39] {
            let found = refuse(FlashAttention { softcap: Some(cap), ..right });
            assert!(found.ends_with("it must be finite and above 0, in f32"), "{found}");
        }
    }

    #[test]
    fn queries_and_keys_end_together() {
        let causal = Mask { causal: true, ..Mask::default() };
        let ranges = |mask: Mask, queries: usize, keys: usize| -> Vec<_> {
            (0..queries).map(|query| mask.keys(query, queries, keys)).collect()
        };
        assert_eq!(ranges(causal, 2, 4), [0..3, 0..4]);
        assert_eq!(ranges(causal, 4, 2), [0..0, 0..0, 0..1, 0..2]);
        let window = Mask { causal: false, window: [Some(1), Some(0)] };
        assert_eq!(ranges(window, 3, 3), [0..1, 0..2, 1..3]);
        let window = Mask { causal: true, window: [Some(0), Some(5)] };
        assert_eq!(ranges(window, 2, 3), [1..2, 2..3]);
        let window = Mask { causal: false, window: [Some(0), None] };
        assert_eq!(ranges(window, 3, 2), [0..2, 0..2, 1..2]);
        assert_eq!(ranges(Mask::default(), 2, 0), [0..0, 0..0]);
        let far = Mask { causal: false, window: [Some(usize::MAX); 2] };
        assert_eq!(far.keys(0, 1, 3), 0..3);
    }

    #[test]
    fn shapes_that_no_kernel_takes_are_refused() {
        let right =
            AttentionShape { heads: 2, group: 3, queries: 5, keys: 7, width: 8, value_width: 256 };
        assert_eq!(right.validate(), Ok(()));
        assert_eq!(right.check_queries("q", 2 * 3 * 5 * 8, 8), Ok(()));
        let message = right.check_keys("k", 3, 8).unwrap_err().to_string();
        assert_eq!(message, "k holds 3 elements; [N, K, ..] needs 112");
        for wrong in [0, 257] {
            let message = AttentionShape { width: wrong, ..right }.validate().unwrap_err();
            let says = format!("q has heads of {wrong} columns; it must be from 1 to 256");
            assert_eq!(message.to_string(), says);
            assert!(AttentionShape { value_width: wrong, ..right }.validate().is_err());
        }
        assert!(AttentionShape { heads: usize::MAX / 64, ..right }.validate().is_err());
        assert!(AttentionShape { keys: 1 << 31, ..right }.validate().is_err());
    }
}
