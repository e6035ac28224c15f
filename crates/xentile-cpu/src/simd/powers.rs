//! The powers of two that exponentials are made of, as instruction sets hold them in registers.

/// [`exp`](crate::math::exp) returns e^x times this, 2^32: far enough above 1 that no result within reach of f32's
/// subnormals is itself subnormal, so that multiplying by `a / EXP_SCALE` rounds `a * e^x` once.
pub const EXP_SCALE: f32 = 4_294_967_296.0;

/// `2^(k / 32)`.
#[allow(clippy::approx_constant)] // one of them is the square root of 2
const POWERS: [f32; 32] = [
    1.0, 1.0218972, 1.0442737, 1.0671405, 1.0905077, 1.1143868, 1.1387886, 1.1637249, 1.1892071,
    1.2152474, 1.2418578, 1.269051, 1.2968396, 1.3252367, 1.3542556, 1.38391, 1.4142135, 1.4451808,
    1.4768262, 1.5091645, 1.5422108, 1.5759809, 1.6104903, 1.6457555, 1.6817929, 1.7186193,
    1.7562522, 1.7947091, 1.8340081, 1.8741677, 1.9152066, 1.9571441,
];

/// The bits of `EXP_SCALE * 2^(k / N)`, less `k` shifted to where [`exp`](crate::math::exp) will add it back.
pub(crate) const fn table_of_powers<const N: usize>() -> [u32; N] {
    let mut table = [0; N];
    let mut k = 0;
    while k < N {
        let scaled = POWERS[k * (POWERS.len() / N)] * EXP_SCALE;
        table[k] = scaled.to_bits() - ((k as u32) << (23 - N.trailing_zeros()));
        k += 1;
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn powers_are_correctly_rounded() {
        for (k, power) in POWERS.into_iter().enumerate() {
            assert_eq!(power, 2f64.powf(k as f64 / 32.0) as f32);
        }
    }
}
