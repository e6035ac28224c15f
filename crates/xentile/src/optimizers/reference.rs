//! A step in float64, with bounds of what f32 makes of it.

use super::{BLOCKS, Rule, table, zero_code};

/// A rounding of f32.
pub(super) const U: f64 = f32::EPSILON as f64 / 2.0;

/// The scalars of a step, each as exact as what kernels are given.
#[derive(Clone, Copy, Debug)]
pub(super) struct Hyper {
    pub(super) rule: Rule,
    pub(super) learning_rate: f64,
    /// The decay of each moment, and the weight of the gradient in it.
    pub(super) decays: [[f64; 2]; 2],
    pub(super) eps: f64,
    pub(super) weight_decay: f64,
    /// The factors of mu and of the gradient in a step of Adam, and that of nu.
    pub(super) scales: [f64; 3],
    /// The largest relative error of those in f32.
    pub(super) scale_error: f64,
    pub(super) clip: f64,
}

/// A number, and by how much f32 may be off.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Bounded {
    pub(super) value: f64,
    pub(super) error: f64,
}

/// What a step makes of an entry.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Entry {
    pub(super) param: Bounded,
    pub(super) mu: Bounded,
    pub(super) nu: Bounded,
}

impl Hyper {
    /// A step of the entry p with the gradient `grad`. Sums are off by `roundings` of their terms' sizes.
    pub(super) fn step(&self, [grad, p, mu, nu]: [f64; 4], roundings: f64) -> Entry {
        let error = roundings * U;
        let g = grad * self.clip;
        let sum = |of: [f64; 2], x: f64, moment: f64| Bounded {
            value: of[1] * x + of[0] * moment,
            error: error * (of[1] * x.abs() + of[0] * moment.abs()),
        };
        let (step, mu, nu) = match self.rule {
            Rule::Adam => {
                let mu = sum(self.decays[0], g, mu);
                let nu = sum(self.decays[1], g * g, nu);
                (self.adam(g, mu, nu, error), mu, nu)
            }
            Rule::Lion => {
                let at = sum(self.decays[0], g, mu);
                (sign(at), sum(self.decays[1], g, mu), Bounded::default())
            }
        };
        let change = self.learning_rate * (step.value + self.weight_decay * p);
        let of_decay = error * (self.weight_decay * p).abs();
        let param = Bounded {
            value: p - change,
            error: self.learning_rate * (step.error + of_decay)
                + 2.0 * U * (p.abs() + change.abs()),
        };
        Entry { param, mu, nu }
    }

    fn adam(&self, g: f64, mu: Bounded, nu: Bounded, error: f64) -> Bounded {
        let [mu_scale, grad_scale, nu_scale] = self.scales;
        let relative = error + self.scale_error;
        let root = (nu_scale * nu.value).sqrt();
        // The root halves errors of what it is of.
        let of_root = if root == 0.0 { 0.0 } else { nu.error / nu.value + relative };
        let below = root + self.eps;
        let terms = (mu_scale * mu.value).abs() + (grad_scale * g).abs();
        let value = (mu_scale * mu.value + grad_scale * g) / below;
        let of_terms = (mu_scale * mu.error + relative * terms) / below;
        Bounded { value, error: of_terms + value.abs() * (of_root + error) }
    }
}

/// The sign of a sum: that of near 0 may be either.
fn sign(of: Bounded) -> Bounded {
    let value = if of.value == 0.0 || of.value.is_nan() { of.value } else { of.value.signum() };
    Bounded { value, error: if of.value.abs() <= of.error { 2.0 * value.abs() } else { 0.0 } }
}

/// A code of 256 values, for float64.
pub(super) struct Code {
    signed: bool,
    values: [f32; 256],
    midpoints: Vec<f64>,
}

impl Code {
    pub(super) fn new(signed: bool) -> Self {
        let values = table(signed);
        let middle = |pair: &[f32]| 0.5 * (f64::from(pair[0]) + f64::from(pair[1]));
        Self { signed, values, midpoints: values.windows(2).map(middle).collect() }
    }

    pub(super) fn value(&self, code: u8) -> f64 {
        self.values[usize::from(code)].into()
    }

    /// The code nearest to `y`.
    pub(super) fn nearest(&self, y: f64) -> u8 {
        self.midpoints.partition_point(|&midpoint| midpoint <= y) as u8
    }

    /// The scale of a block, and its codes.
    pub(super) fn encode(&self, block: &[f32]) -> (f32, Vec<u8>) {
        let scale = block.iter().fold(0_f32, |most, x| most.max(x.abs()));
        let code = |&x: &f32| match scale {
            0.0 => zero_code(self.signed),
            _ => self.nearest(f64::from(x) / f64::from(scale)),
        };
        (scale, block.iter().map(code).collect())
    }

    /// The scale of a block, and the least and largest code of each entry.
    pub(super) fn interval(&self, block: &[Bounded], roundings: f64) -> (Bounded, Vec<[u8; 2]>) {
        let is_finite = block.iter().all(|x| x.value.is_finite());
        if !is_finite {
            let has_nan = block.iter().any(|x| x.value.is_nan());
            let value = if has_nan { f64::NAN } else { f64::INFINITY };
            return (Bounded { value, error: 0.0 }, vec![[0, 255]; block.len()]);
        }
        let most = |of: fn(&Bounded) -> f64| block.iter().map(of).fold(0.0, f64::max);
        let scale = Bounded { value: most(|x| x.value.abs()), error: most(|x| x.error) };
        if scale.value == 0.0 {
            return (scale, vec![[zero_code(self.signed); 2]; block.len()]);
        }
        let codes = |x: &Bounded| {
            let y = x.value / scale.value;
            let of_scale = roundings * U + scale.error / scale.value;
            let error = x.error / scale.value + y.abs() * of_scale;
            [self.nearest(y - error), self.nearest(y + error)]
        };
        (scale, block.iter().map(codes).collect())
    }
}

/// Whether blocks may have this extent.
pub(super) fn is_block(extent: usize) -> bool {
    BLOCKS.contains(&extent)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Codes are those of the nearest values, and beside a midpoint, and there alone, there are two.
    #[test]
    fn codes_are_the_nearest() {
        for signed in [true, false] {
            let code = Code::new(signed);
            let block: Vec<f32> = table(signed).iter().map(|value| 3.0 * value).collect();
            let (scale, codes) = code.encode(&block);
            assert_eq!(scale, 3.0);
            assert!(codes.iter().enumerate().all(|(index, &code)| index == usize::from(code)));
            assert_eq!(code.encode(&[0.0; 4]), (0.0, vec![zero_code(signed); 4]));
            let beside = 0.5 * (code.value(200) + code.value(201)) * (1.0 + 0.5 * U);
            let exact = [1.0, code.value(200), beside].map(|value| Bounded { value, error: 0.0 });
            let (_, found) = code.interval(&exact, 1.0);
            assert_eq!(found, [[255; 2], [200; 2], [200, 201]]);
        }
        let infinite = [1.0, f64::INFINITY].map(|value| Bounded { value, error: 0.0 });
        let (scale, codes) = Code::new(true).interval(&infinite, 1.0);
        assert_eq!((scale.value, codes), (f64::INFINITY, vec![[0, 255]; 2]));
    }

    /// The first step of Adam has the size of the learning rate, and Lion's always.
    #[test]
    fn steps_are_those_of_the_papers() {
        let adam = Hyper {
            rule: Rule::Adam,
            learning_rate: 0.5,
            decays: [[0.9, 0.1], [0.99, 0.01]],
            eps: 0.0,
            weight_decay: 0.1,
            scales: [1.0 / 0.1, 0.0, 1.0 / 0.01],
            scale_error: 0.0,
            clip: 0.5,
        };
        let entry = adam.step([-6.0, 2.0, 0.0, 0.0], 1.0);
        assert!((entry.param.value - (2.0 + 0.5 - 0.1)).abs() < 1e-12, "{entry:?}");
        assert!((entry.mu.value + 0.3).abs() < 1e-12 && (entry.nu.value - 0.09).abs() < 1e-12);
        let entry = Hyper { eps: 1e-8, ..adam }.step([0.0; 4], 1.0);
        assert_eq!((entry.param.value, entry.param.error), (0.0, 0.0));
        let lion = Hyper { rule: Rule::Lion, weight_decay: 0.0, ..adam };
        let entry = lion.step([6.0, 2.0, -1.0, 0.0], 1.0);
        assert_eq!((entry.param.value, entry.param.error < 1e-6), (2.5, true));
        assert!((entry.mu.value + 0.96).abs() < 1e-12);
    }
}
