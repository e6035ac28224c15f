//! The element types of logits, and correctly rounded conversions from float64.

use std::fmt;
use std::str::FromStr;

use half::{bf16, f16};

use crate::{Error, Result};

/// The dtype of logits and of their gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE binary32.
    F32,
    /// The upper half of binary32: 8 exponent bits, 7 mantissa bits.
    Bf16,
    /// IEEE binary16.
    F16,
}

impl DType {
    /// Every dtype, in the order that tables list them.
    pub const ALL: [Self; 3] = [Self::F32, Self::Bf16, Self::F16];

    /// The name that configs and reports use.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
        }
    }

    /// Bytes per element.
    #[must_use]
    pub fn size_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }

    /// The distance between neighbouring values of this dtype around `x`: one unit in the last
    /// place, of the subnormals where `x` is below the normal range.
    #[must_use]
    pub fn ulp(self, x: f64) -> f64 {
        let (mantissa_bits, min_exponent) = match self {
            Self::F32 => (23, -126),
            Self::Bf16 => (7, -126),
            Self::F16 => (10, -14),
        };
        // The biased exponent field, read exactly; f64 subnormals lie far below every minimum.
        let exponent = ((x.abs().to_bits() >> 52) as i32 - 1023).max(min_exponent);
        2f64.powi(exponent - mantissa_bits)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for DType {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|dtype| dtype.name() == name).ok_or_else(|| Error::Unknown {
            what: "dtype",
            value: name.to_owned(),
            choices: "f32, bf16, f16",
        })
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::bf16 {}
    impl Sealed for half::f16 {}
}

/// An element of logits: `f32`, [`struct@bf16`] or [`struct@f16`]. Sealed, since kernels read the bits.
pub trait Element: sealed::Sealed + Copy + Send + Sync + PartialEq + fmt::Debug + 'static {
    /// Which dtype this is.
    const DTYPE: DType;

    /// The value, exactly.
    fn to_f32(self) -> f32;

    /// The nearest element, ties to even.
    fn from_f32(x: f32) -> Self;

    /// The nearest element, ties to even, rounded once.
    #[must_use]
    fn from_f64(x: f64) -> Self {
        Self::from_f32(round_to_odd(x))
    }

    /// The value, exactly.
    fn to_f64(self) -> f64 {
        f64::from(self.to_f32())
    }
}

/// Rounds to f32 by the rule "inexact results get an odd mantissa", after which a second rounding
/// to a format at least two bits narrower gives what a single rounding would have given (Boldo and
/// Melquiond, "When double rounding is odd", 2005).
fn round_to_odd(x: f64) -> f32 {
    let nearest = x as f32;
    if f64::from(nearest) == x || !nearest.is_finite() || nearest.to_bits() & 1 == 1 {
        return nearest;
    }
    if (f64::from(nearest) < x) == (x > 0.0) {
        f32::from_bits(nearest.to_bits() + 1)
    } else if nearest == 0.0 {
        // Underflowed past the least subnormal, from above.
        f32::from_bits(nearest.to_bits() | 1)
    } else {
        f32::from_bits(nearest.to_bits() - 1)
    }
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;

    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }

    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        x
    }

    fn from_f64(x: f64) -> Self {
        x as f32
    }
}

impl Element for bf16 {
    const DTYPE: DType = DType::Bf16;

    #[inline(always)]
    fn to_f32(self) -> f32 {
        Self::to_f32(self)
    }

    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        Self::from_f32(x)
    }
}

impl Element for f16 {
    const DTYPE: DType = DType::F16;

    #[inline(always)]
    fn to_f32(self) -> f32 {
        Self::to_f32(self)
    }

    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        Self::from_f32(x)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every pair of neighbouring bf16 values: the midpoint, and the doubles on either side of it,
    /// must each round once and correctly.
    #[test]
    fn from_f64_rounds_once_at_every_bf16_midpoint() {
        for bits in 0..0x7f7f_u16 {
            let (low, high) = (bf16::from_bits(bits), bf16::from_bits(bits + 1));
            let middle = (low.to_f64() + high.to_f64()) / 2.0;
            let even = if bits & 1 == 0 { low } else { high };
            assert_eq!(<bf16 as Element>::from_f64(middle), even, "midpoint above {bits:#x}");
            let below = f64::from_bits(middle.to_bits() - 1);
            let above = f64::from_bits(middle.to_bits() + 1);
            assert_eq!(<bf16 as Element>::from_f64(below), low, "below midpoint of {bits:#x}");
            assert_eq!(<bf16 as Element>::from_f64(above), high, "above midpoint of {bits:#x}");
            assert_eq!(<bf16 as Element>::from_f64(-above), -high);
        }
    }

    #[test]
    fn from_f64_rounds_once_at_every_f16_midpoint() {
        for bits in 0..0x7bff_u16 {
            let (low, high) = (f16::from_bits(bits), f16::from_bits(bits + 1));
            let middle = (low.to_f64() + high.to_f64()) / 2.0;
            let below = f64::from_bits(middle.to_bits() - 1);
            let above = f64::from_bits(middle.to_bits() + 1);
            assert_eq!(<f16 as Element>::from_f64(below), low, "below midpoint of {bits:#x}");
            assert_eq!(<f16 as Element>::from_f64(above), high, "above midpoint of {bits:#x}");
        }
    }

    #[test]
    fn ulp_is_the_distance_to_the_next_value() {
        for bits in [0_u16, 1, 0x7f, 0x80, 0x3f7f, 0x3f80, 0x4049, 0x7f00] {
            let x = bf16::from_bits(bits);
            let next = bf16::from_bits(bits + 1);
            assert_eq!(DType::Bf16.ulp(x.to_f64()), next.to_f64() - x.to_f64(), "bits {bits:#x}");
        }
        assert_eq!(DType::F32.ulp(1.0), 2f64.powi(-23));
        assert_eq!(DType::F16.ulp(0.0), 2f64.powi(-24));
    }

    #[test]
    fn names_round_trip() {
        for dtype in DType::ALL {
            assert_eq!(dtype.name().parse::<DType>(), Ok(dtype));
        }
        let message = "fp8".parse::<DType>().unwrap_err().to_string();
        assert_eq!(message, "dtype `fp8` is unknown; it must be one of f32, bf16, f16");
    }
}
