//! The same mathematics written plainly, an entry and a block at a time. What is f32 in the contract is f32
//! here, and the rounding to 8 bits is by distance, in float64. Beside it the scale and the quotient
//! that the contract's are the roundings of.

use super::{Format, Fp8Quantize, LEAST_SCALE};

/// amax of a block's entries.
#[must_use]
pub fn amax(entries: impl IntoIterator<Item = f32>) -> f32 {
    let found = entries.into_iter().map(f32::abs).filter(|x| x.is_finite()).fold(0.0, f32::max);
    if found < f32::MIN_POSITIVE { 0.0 } else { found }
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
