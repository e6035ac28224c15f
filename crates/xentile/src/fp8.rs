//! The formats of 8 bits (Micikevicius et al., "FP8 Formats for Deep Learning", 2022).

use std::fmt;
use std::str::FromStr;

use crate::{Error, Result};

/// A format of 8 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// 4 bits of exponent and 3 of mantissa, finite: no infinity, and one NaN of each sign.
    E4M3Fn,
    /// 5 bits of exponent and 2 of mantissa, as IEEE has it.
    E5M2,
}

impl Format {
    /// Both.
    pub const ALL: [Self; 2] = [Self::E4M3Fn, Self::E5M2];
    /// Their names, for messages.
    pub const NAMES: &str = "f8e4m3fn, f8e5m2";

    /// The name, which XLA has for it too.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::E4M3Fn => "f8e4m3fn",
            Self::E5M2 => "f8e5m2",
        }
    }

    /// The largest finite number.
    #[inline]
    #[must_use]
    pub fn largest(self) -> f32 {
        match self {
            Self::E4M3Fn => 448.0,
            Self::E5M2 => 57344.0,
        }
    }

    /// Bits of the mantissa.
    #[must_use]
    pub const fn mantissa_bits(self) -> u32 {
        match self {
            Self::E4M3Fn => 3,
            Self::E5M2 => 2,
        }
    }

    /// The exponent of the least normal number.
    #[must_use]
    pub const fn least_exponent(self) -> i32 {
        match self {
            Self::E4M3Fn => -6,
            Self::E5M2 => -14,
        }
    }

    /// The bits of NaN, without its sign.
    #[must_use]
    pub const fn nan(self) -> u8 {
        match self {
            Self::E4M3Fn => 0x7f,
            Self::E5M2 => 0x7e,
        }
    }

    /// The distance between neighbouring numbers around `x`: one unit in the last place, of the subnormals
    /// where `x` is below the normal range.
    #[must_use]
    pub fn ulp(self, x: f64) -> f64 {
        // The biased exponent field, read exactly; f64 subnormals lie far below every minimum.
        let exponent = ((x.abs().to_bits() >> 52) as i32 - 1023).max(self.least_exponent());
        2_f64.powi(exponent - self.mantissa_bits() as i32)
    }

    /// The nearest number, ties to even, and of those beyond the largest that.
    #[must_use]
    pub fn nearest(self, x: f64) -> f64 {
        let largest = f64::from(self.largest());
        let x = x.clamp(-largest, largest);
        // A power of two, so that neither the quotient nor the product is rounded.
        let ulp = self.ulp(x);
        (x / ulp).round_ties_even() * ulp
    }

    /// The number that `bits` are.
    #[must_use]
    pub fn decode(self, bits: u8) -> f32 {
        let mantissa_bits = self.mantissa_bits();
        let sign = if bits & 0x80 == 0 { 1.0 } else { -1.0 };
        let magnitude = u32::from(bits & 0x7f);
        let mantissa = (magnitude & ((1 << mantissa_bits) - 1)) as f32;
        let exponent = (magnitude >> mantissa_bits) as i32;
        let unit = |exponent: i32| 2_f32.powi(exponent - mantissa_bits as i32);
        let found = match self {
            Self::E4M3Fn if magnitude == 0x7f => f32::NAN,
            Self::E5M2 if magnitude > 0x7c => f32::NAN,
            Self::E5M2 if magnitude == 0x7c => f32::INFINITY,
            _ if exponent == 0 => mantissa * unit(self.least_exponent()),
            _ => {
                (mantissa + (1 << mantissa_bits) as f32)
                    * unit(exponent - 1 + self.least_exponent())
            }
        };
        sign * found
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Format {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|format| format.name() == name).ok_or_else(|| Error::Unknown {
            what: "format",
            value: name.to_owned(),
            choices: Self::NAMES,
        })
    }
}

/// The bits of the number of `format` that is nearest to `x`, of two the one with even bits, and of
/// those beyond the largest that.
#[must_use]
pub fn encode(format: Format, x: f32) -> u8 {
    let sign = if x.is_sign_negative() { 0x80 } else { 0 };
    if x.is_nan() {
        return sign | format.nan();
    }
    // Magnitudes rise with their bits.
    let x = f64::from(x.abs().min(format.largest()));
    let distance = |bits: u8| (f64::from(format.decode(bits)) - x).abs();
    let above = (0..0x7f).find(|&bits| f64::from(format.decode(bits)) >= x).expect("it is finite");
    let below = above.saturating_sub(1);
    let nearest = match distance(below).partial_cmp(&distance(above)) {
        Some(std::cmp::Ordering::Less) => below,
        Some(std::cmp::Ordering::Equal) if below & 1 == 0 => below,
        _ => above,
    };
    sign | nearest
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of the paper's table 1.
    #[test]
    fn formats_are_those_of_the_paper() {
        let of = |format: Format, bits| format.decode(bits);
        assert_eq!(of(Format::E4M3Fn, 0x7e), 448.0);
        assert_eq!(of(Format::E4M3Fn, 0x08), 2_f32.powi(-6));
        assert_eq!(of(Format::E4M3Fn, 0x81), -(2_f32.powi(-9)));
        assert_eq!(of(Format::E5M2, 0x7b), 57344.0);
        assert_eq!(of(Format::E5M2, 0x04), 2_f32.powi(-14));
        assert_eq!(of(Format::E5M2, 0x01), 2_f32.powi(-16));
        assert_eq!(of(Format::E5M2, 0xfc), f32::NEG_INFINITY);
        for format in Format::ALL {
            assert!(of(format, format.nan()).is_nan() && of(format, format.nan() | 0x80).is_nan());
            assert_eq!(format.name().parse(), Ok(format));
        }
        let message = "f8".parse::<Format>().unwrap_err().to_string();
        assert_eq!(message, "format `f8` is unknown; it must be one of f8e4m3fn, f8e5m2");
    }

    /// Every number is its own, and every middle of two goes to the even one.
    #[test]
    fn encode_rounds_to_nearest_even() {
        for format in Format::ALL {
            let last = encode(format, f32::INFINITY);
            assert_eq!(format.decode(last), format.largest());
            for bits in 0..=last {
                let x = format.decode(bits);
                assert_eq!(format.nearest(x.into()), x.into());
                assert_eq!([encode(format, x), encode(format, -x)], [bits, bits | 0x80]);
                if bits < last {
                    let middle = (x + format.decode(bits + 1)) / 2.0;
                    let even = if bits & 1 == 0 { bits } else { bits + 1 };
                    assert_eq!(encode(format, middle), even, "{format} {bits:#x}");
                    let nearest = format.nearest((-middle).into());
                    assert_eq!(nearest, (-format.decode(even)).into(), "{format} {bits:#x}");
                    let ulp = f64::from(format.decode(bits + 1)) - f64::from(x);
                    assert_eq!(format.ulp(middle.into()), ulp, "{format} {bits:#x}");
                    let [below, above] =
                        [-1, 1].map(|by| f32::from_bits((middle.to_bits() as i32 + by) as u32));
                    assert_eq!([encode(format, below), encode(format, above)], [bits, bits + 1]);
                }
            }
            assert_eq!(encode(format, 1e9), last);
            assert_eq!(format.nearest(-1e9), (-format.largest()).into());
            assert_eq!(encode(format, f32::NAN) & 0x7f, format.nan());
        }
    }
}
