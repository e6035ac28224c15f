//! What tests of norms share.

use half::{bf16, f16};
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use xentile::Element;
use xentile_cpu::rms_norm::Weight;

pub const POISON: f32 = 7.25e3;
/// The unit of the contract's bounds.
pub const U: f64 = 1.0 / 16_777_216.0;
/// What products may lose below f32's normal range, with room for what multiplies it.
pub const LOST: f64 = 1e-35;

pub fn normal(rng: &mut ChaCha8Rng) -> f64 {
    let (u, v): (f64, f64) = (1.0 - rng.random::<f64>(), rng.random());
    (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()
}

pub trait AsWeight: Element {
    fn weight(weight: &[Self]) -> Weight<'_>;
}

impl AsWeight for f32 {
    fn weight(weight: &[Self]) -> Weight<'_> {
        weight.into()
    }
}

impl AsWeight for bf16 {
    fn weight(weight: &[Self]) -> Weight<'_> {
        weight.into()
    }
}

impl AsWeight for f16 {
    fn weight(weight: &[Self]) -> Weight<'_> {
        weight.into()
    }
}

/// An array between poisoned elements.
pub struct Padded<E> {
    pub all: Vec<E>,
    pub skip: usize,
}

impl<E: Element> Padded<E> {
    pub fn of(values: &[E], skip: usize) -> Self {
        let poison = |count| vec![E::from_f32(POISON); count];
        Self { all: [poison(skip), values.to_vec(), poison(3)].concat(), skip }
    }

    pub fn poisoned(length: usize, skip: usize) -> Self {
        Self::of(&vec![E::from_f32(POISON); length], skip)
    }

    pub fn get(&self) -> &[E] {
        &self.all[self.skip..self.all.len() - 3]
    }

    pub fn get_mut(&mut self) -> &mut [E] {
        let end = self.all.len() - 3;
        &mut self.all[self.skip..end]
    }

    /// The array, if nothing around it was written.
    pub fn take(self) -> Vec<E> {
        let (before, after) = (&self.all[..self.skip], &self.all[self.all.len() - 3..]);
        let poison = E::from_f32(POISON);
        assert!(before.iter().chain(after).all(|&x| x == poison), "wrote beside an array");
        self.get().to_vec()
    }
}

pub fn wide<E: Element>(row: &[E]) -> Vec<f64> {
    row.iter().map(|x| x.to_f64()).collect()
}

/// Of every NaN the same, since which of two an operation keeps is the order that the compiler gives
/// them.
pub fn same<E: Element>(what: &str, a: &[E], b: &[E]) {
    let canonical = |x: f32| if x.is_nan() { f32::NAN } else { x };
    let bits = |x: &E| canonical(x.to_f32()).to_bits();
    assert_eq!(a.len(), b.len(), "{what}");
    if let Some(index) = a.iter().zip(b).position(|(a, b)| bits(a) != bits(b)) {
        panic!("{what}: element {index} is {:?} and {:?}", a[index], b[index]);
    }
}

/// Holds `actual` to what some number within `bound` of `expected` may be rounded to. Where that is
/// infinite or NaN, `actual` is one of the two.
pub fn within<E: Element>(what: &str, actual: E, expected: f64, bound: f64) {
    let value = actual.to_f64();
    if !expected.is_finite() || !bound.is_finite() {
        assert!(!value.is_finite(), "{what}: {actual:?}, expected {expected}");
        return;
    }
    // A tie, which may be rounded either way, lies within.
    let bound = bound * 1.001 + expected.abs() * 1e-15;
    let [low, high] = [expected - bound, expected + bound].map(|x| E::from_f64(x).to_f64());
    assert!(low <= value && value <= high, "{what}: {actual:?}, expected {expected} +- {bound:e}");
}

/// Runs `body` for every dtype of rows and of weights.
macro_rules! for_each_dtype {
    ($body:ident) => {
        for_each_dtype!($body, f32);
        for_each_dtype!($body, bf16);
        for_each_dtype!($body, f16);
    };
    ($body:ident, $E:ty) => {
        $body::<$E, f32>();
        $body::<$E, bf16>();
        $body::<$E, f16>();
    };
}

pub(crate) use for_each_dtype;
