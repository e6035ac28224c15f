//! FP8 quantisation: numbers over the scale of their block, rounded to 8 bits (Micikevicius et al., "FP8
//! Formats for Deep Learning", 2022). The contract of every backend, which says every bit.
//!
//! Of a matrix `x` `[M, D]` (of any number of matrices), of one dtype E (f32, bf16 or f16), cut into blocks of
//! [`Blocks::rows`] x [`Blocks::columns`], those at the edges smaller, and with `LARGEST` the largest finite
//! number of the [`Format`], 448 or 57344:
//!
//! - `amax = max |x|` over the block's finite entries, 0 where it has none, or where it is below f32's
//!   normal range;
//! - `scale = max(amax * c, 2^-126)` in f32, where `c` is `1 / LARGEST` rounded to f32, and 1 where amax is
//!   0. With [`power_of_two`](Fp8Quantize::power_of_two) it is the least power of two of at least
//!   `amax / LARGEST`, and `2^-126`;
//! - `value`: the quotient `x / scale`, cut to within `LARGEST` on both sides, and rounded to the format, a
//!   tie to even. The quotient is `x` times `1 / scale`, each rounded to f32; it is that of a division
//!   where the scale is a power of two. Entries below f32's normal range count as 0 of their sign.
//!
//! What comes back of it is `value * scale`, within half a unit in the last place of the value, and
//! [`QUOTIENT_ROUNDINGS`], of `x`.
//!
//! Both divisions are products because that is what XLA makes of a division by what many entries share.
//!
//! The transposed copy `[D, M]` has blocks and scales of its own, [`Blocks::rows`] x [`Blocks::columns`] of
//! the transposed matrix.
//!
//! Where the scale is given, one for a whole matrix, the second half alone is left, and amax of each row
//! is a result: that is what the next steps' scale is made of. A scale must lie within 2^-126 and 2^126,
//! so that its reciprocal is a normal number too.
//!
//! # Special entries
//!
//! - **NaN** stays NaN, of its sign but on NVIDIA GPUs, whose instruction makes all NaN one, `0x7f`; and
//!   touches no other entry: amax leaves it aside;
//! - **infinity** becomes `LARGEST` of its sign, of which amax knows nothing: `LARGEST * scale` is then the
//!   largest finite entry of its block, and `LARGEST` in a block that has none;
//! - **zeros** alone have the scale 1, and stay 0 of their sign;
//! - **tiny** entries have a scale of at least `2^-126`: so it is never 0, and its reciprocal is finite;
//! - **huge** entries, above 1.9 times `2^127`, may come back as infinity where scales are powers of two.

#[cfg(feature = "operation")]
pub mod operation;
#[cfg(feature = "operation")]
pub(crate) mod quantized;
pub mod reference;

pub use crate::fp8::Format;
use crate::shape::is_addressable;
use crate::{Error, Result};

/// How far the quotient may be off by itself, in units of 2^-24: two roundings.
pub const QUOTIENT_ROUNDINGS: f64 = 2.0;

/// The least scale.
pub const LEAST_SCALE: f32 = f32::MIN_POSITIVE;

/// The options, the same for every backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fp8Quantize {
    /// What values are.
    pub format: Format,
    /// Whether scales are powers of two.
    pub power_of_two: bool,
}

impl Fp8Quantize {
    /// The scale of a block with this amax, which is finite and at least 0.
    #[inline]
    #[must_use]
    pub fn scale(&self, amax: f32) -> f32 {
        if amax < f32::MIN_POSITIVE {
            return 1.0;
        }
        if self.power_of_two {
            // LARGEST is 1.75 times a power of two: a mantissa above that takes the next exponent.
            let rounded = (amax.to_bits() + 0x001f_ffff) & 0x7f80_0000;
            let exponent = (self.format.largest() / 1.75).to_bits() - 1_f32.to_bits();
            return f32::from_bits(rounded.saturating_sub(exponent)).max(LEAST_SCALE);
        }
        let reciprocal = match self.format {
            Format::E4M3Fn => 1.0 / 448.0,
            Format::E5M2 => 1.0 / 57344.0,
        };
        (amax * reciprocal).max(LEAST_SCALE)
    }
}

/// Extents of a block, each at least 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blocks {
    /// Rows of a block.
    pub rows: usize,
    /// Columns of it; as many as there are where it is none.
    pub columns: Option<usize>,
}

impl Blocks {
    /// Each row a block.
    pub const ROW: Self = Self { rows: 1, columns: None };

    /// Refuses an extent of 0.
    ///
    /// # Errors
    /// There is one.
    pub fn validate(&self) -> Result<()> {
        let wrong = |name| Err(Error::Option { name, value: 0.0, requirement: "at least 1" });
        match self {
            Self { rows: 0, .. } => wrong("block_rows"),
            Self { columns: Some(0), .. } => wrong("block_columns"),
            _ => Ok(()),
        }
    }

    /// How many blocks there are along `rows` and `columns`.
    #[must_use]
    pub fn count(&self, rows: usize, columns: usize) -> [usize; 2] {
        // A row is a block, also where it is empty.
        [rows.div_ceil(self.rows), self.columns.map_or(1, |block| columns.div_ceil(block))]
    }

    /// The columns of a block, in a matrix of so many.
    #[must_use]
    pub fn columns_of(&self, columns: usize) -> usize {
        self.columns.unwrap_or(columns).clamp(1, columns.max(1))
    }
}

/// The shape `[G, M, D]` of what is quantised: matrices (all leading axes, flattened) of rows by columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuantizeShape {
    matrices: usize,
    rows: usize,
    columns: usize,
}

impl QuantizeShape {
    /// So many matrices of `rows` and `columns`; each may be 0.
    ///
    /// # Errors
    /// More elements than memory can address.
    pub fn new(matrices: usize, rows: usize, columns: usize) -> Result<Self> {
        let empty = [matrices, rows, columns].contains(&0);
        // Four bytes is the widest element, beside a scale.
        if !empty && !is_addressable([matrices, rows, columns, 8]) {
            return Err(Error::Invalid(format!(
                "shape [{matrices}, {rows}, {columns}]; matrices x rows x columns must fit the \
                 address space"
            )));
        }
        Ok(Self { matrices, rows, columns })
    }

    /// G.
    #[must_use]
    pub fn matrices(self) -> usize {
        self.matrices
    }

    /// M.
    #[must_use]
    pub fn rows(self) -> usize {
        self.rows
    }

    /// D.
    #[must_use]
    pub fn columns(self) -> usize {
        self.columns
    }

    /// G x M x D.
    #[must_use]
    pub fn elements(self) -> usize {
        if self.columns == 0 { 0 } else { self.matrices * self.rows * self.columns }
    }

    /// The shape of the transposed copy.
    #[must_use]
    pub fn transposed(self) -> Self {
        Self { rows: self.columns, columns: self.rows, ..self }
    }

    /// How many scales there are.
    #[must_use]
    pub fn scales(self, blocks: Blocks) -> usize {
        let [down, across] = blocks.count(self.rows, self.columns);
        self.matrices * down * across
    }

    /// Checks the length of an array called `name`, which should be `expected`.
    ///
    /// # Errors
    /// It is another.
    pub fn check(self, name: &str, length: usize, expected: usize) -> Result<()> {
        if length == expected {
            return Ok(());
        }
        let Self { matrices, rows, columns } = self;
        Err(Error::Invalid(format!(
            "{name} holds {length} elements; it must hold {expected} where x is \
             [{matrices}, {rows}, {columns}]"
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OF: [Fp8Quantize; 4] = [
        Fp8Quantize { format: Format::E4M3Fn, power_of_two: false },
        Fp8Quantize { format: Format::E4M3Fn, power_of_two: true },
        Fp8Quantize { format: Format::E5M2, power_of_two: false },
        Fp8Quantize { format: Format::E5M2, power_of_two: true },
    ];

    /// Numbers by hand; and whatever amax is, neither the scale nor its reciprocal is beyond f32's normal
    /// range, nor what comes back of it beyond f32.
    #[test]
    fn scales_keep_their_range() {
        assert_eq!(OF.map(|of| of.scale(448.0)), [1.0, 1.0, 448.0 / 57344.0, 2_f32.powi(-7)]);
        assert_eq!(OF[1].scale(449.0), 2.0);
        assert_eq!(OF[3].scale(57345.0), 2.0);
        assert_eq!(OF[1].scale(1.0), 2_f32.powi(-8));
        for of in OF {
            assert_eq!(of.scale(0.0), 1.0);
            assert_eq!(of.scale(f32::MIN_POSITIVE), LEAST_SCALE);
            for exponent in -126..128 {
                for mantissa in [1.0, 1.3, 1.75, 1.750_000_1, 1.999_999_9] {
                    let amax = mantissa * 2_f32.powi(exponent);
                    let scale = of.scale(amax);
                    let largest = of.format.largest();
                    assert!(scale.is_normal() && (1.0 / scale).is_normal(), "{of:?} {amax}");
                    let back = of.format.decode(reference::encode(of.format, amax / scale)) * scale;
                    // Next to 2^128 a power of two leaves the rounding nowhere to go but there.
                    let is_next = of.power_of_two && amax / 2_f32.powi(127) > 1.9;
                    assert!(back.is_finite() || is_next, "{of:?} {amax}");
                    assert!(amax / scale <= largest * 1.000_001, "{of:?} {amax}");
                    if of.power_of_two {
                        assert_eq!(scale.to_bits() & 0x007f_ffff, 0);
                        assert!(scale == LEAST_SCALE || amax / scale > largest / 2.0);
                        assert!(amax / scale <= largest, "{of:?} {amax}");
                    }
                }
            }
        }
    }

    #[test]
    fn shapes_and_blocks_are_checked() {
        let shape = QuantizeShape::new(2, 130, 200).unwrap();
        let square = Blocks { rows: 128, columns: Some(128) };
        assert_eq!(shape.scales(square), 8);
        assert_eq!(shape.scales(Blocks::ROW), 260);
        assert_eq!(shape.transposed().scales(Blocks { rows: 1, columns: Some(128) }), 800);
        assert!(QuantizeShape::new(usize::MAX / 4, 1, 1).is_err());
        assert_eq!(QuantizeShape::new(usize::MAX, 0, 7).unwrap().elements(), 0);
        let message = Blocks { rows: 0, columns: None }.validate().unwrap_err().to_string();
        assert_eq!(message, "block_rows is 0; it must be at least 1");
        let message = shape.check("values", 3, 4).unwrap_err().to_string();
        assert_eq!(message, "values holds 3 elements; it must hold 4 where x is [2, 130, 200]");
    }
}
