//! The same mathematics written plainly, an entry and a block at a time. What is f32 in the contract is f32
//! here, and the rounding to 8 bits is by distance, in float64. Beside it the scale and the quotient
//! that the contract's are the roundings of.

use super::{Fp8Quantize, LEAST_SCALE};
pub use crate::fp8::encode;

/// amax of a block's entries.
#[must_use]
pub fn amax(entries: impl IntoIterator<Item = f32>) -> f32 {
    let found = entries.into_iter().map(f32::abs).filter(|x| x.is_finite()).fold(0.0, f32::max);
    if found < f32::MIN_POSITIVE { 0.0 } else { found }
}

/// The scale of a block with this amax, without a rounding but that of float64.
#[must_use]
pub fn exact_scale(options: &Fp8Quantize, amax: f32) -> f64 {
    if amax < f32::MIN_POSITIVE {
        return 1.0;
    }
    let (amax, largest) = (f64::from(amax), f64::from(options.format.largest()));
    if !options.power_of_two {
        return (amax / largest).max(LEAST_SCALE.into());
    }
    let mut scale = f64::from(LEAST_SCALE);
    while scale * largest < amax {
        scale *= 2.0;
    }
    scale
}

/// The quotient of an entry `x` of a block with this scale, cut to what the format has.
#[must_use]
pub fn exact_quotient(options: &Fp8Quantize, x: f32, scale: f64) -> f64 {
    let largest = f64::from(options.format.largest());
    let x = if x.abs() < f32::MIN_POSITIVE { 0.0 } else { f64::from(x) };
    (x / scale).clamp(-largest, largest)
}

/// The value of an entry `x` of a block with this scale.
#[must_use]
pub fn value(options: &Fp8Quantize, x: f32, scale: f32) -> u8 {
    let x = if x.abs() < f32::MIN_POSITIVE { 0_f32.copysign(x) } else { x };
    // The sign of a NaN that an operation makes is not said.
    if x.is_nan() {
        return encode(options.format, x);
    }
    encode(options.format, x * (1.0 / scale))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fp8::Format;

    #[test]
    fn special_entries_keep_the_contract() {
        let of = Fp8Quantize { format: Format::E4M3Fn, power_of_two: false };
        let nan = f32::NAN.copysign(-1.0);
        assert_eq!(amax([1.0, f32::NAN, -3.0, f32::INFINITY]), 3.0);
        assert_eq!(amax([f32::NAN, 1e-40]), 0.0);
        assert_eq!(amax([]), 0.0);
        let scale = of.scale(3.0);
        let found = [1.0, nan, -3.0, f32::NEG_INFINITY].map(|x| value(&of, x, scale));
        assert_eq!(found.map(|bits| of.format.decode(bits))[2..], [-448.0, -448.0]);
        assert_eq!(found[1], 0xff);
        assert_eq!(value(&of, -1e-40, f32::MIN_POSITIVE), 0x80);
        assert_eq!(value(&of, -0.0, 1.0), 0x80);
    }
}
