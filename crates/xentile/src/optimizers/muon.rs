//! A step of Muon (Jordan et al., 2024) over one matrix, as tools see it. It has no derivative, and so the forward
//! pass alone.

use super::reference::U;
use super::step::{ENTRY_ROUNDINGS, STEP, check_step};
use crate::operation::{
    ArraySpec, Arrays, Bound, Distribution, ElementRule, Facts, HIDDEN, Judged, Operation,
    OptionSpec, Pass, Problem, Reference, Role, Signature, Synthetic, TOKENS, ToleranceSpec,
    Tolerances, Visitor,
};
use crate::{DType, Result};

/// Muon with Nesterov's momentum in f32.
#[derive(Clone, Copy, Debug)]
pub struct Muon;

const LEARNING_RATE: f64 = 1e-2;
const WEIGHT_DECAY: f64 = 0.1;
const BETA: f64 = 0.95;
const EPS: f64 = 1e-8;
const COEFFICIENTS: [f64; 3] = [3.4445, -4.775, 2.0315];
const ITERATIONS: usize = 5;

/// Seeds of the parameter and of the momentum.
const SEEDS: [u64; 2] = [0x9e37_79b9_7f4a_7c15, 0xbf58_476d_1ce4_e5b9];

impl Operation for Muon {
    fn facts(&self) -> &'static Facts {
        const OPTIONS: [OptionSpec; 1] = [STEP];
        const FACTS: Facts = Facts {
            name: "muon",
            about: "Muon",
            dims: &[TOKENS, HIDDEN],
            options: &OPTIONS,
            tolerances: &[
                ENTRY_ROUNDINGS,
                // Five iterations in bf16 have a relative error of 0.02, and optax's 0.05.
                ToleranceSpec {
                    name: "step_rms",
                    about: "error of an entry's step, by the root mean square of all",
                    default: |_| 0.3,
                },
            ],
            passes: &[Pass::Forward],
            ..Facts::BASE
        };
        &FACTS
    }

    fn validate(&self, problem: &Problem) -> Result<()> {
        check_step(problem)
    }

    fn signature(&self, _: &Problem, _: Pass) -> Signature {
        let input = Role::Input { differentiable: false };
        let full = |name, element, role| ArraySpec::new(name, &["T", "D"], element, role);
        let f32 = ElementRule::Is(DType::F32);
        Signature {
            operands: vec![
                full("params", ElementRule::Compute, input),
                full("grads", ElementRule::Compute, input),
                full("mu", f32, input),
            ],
            results: vec![
                full("new_params", ElementRule::Compute, Role::Output),
                full("new_mu", f32, Role::Output),
            ],
        }
    }

    fn inputs(&self, problem: &Problem, from: &Synthetic, rows: &[u64]) -> Result<Arrays<'static>> {
        from.check_unlabelled(self, "gradients")?;
        let columns = problem.dim("D");
        let [of_params, of_mu] =
            SEEDS.map(|seed| Synthetic { distribution: Distribution::Normal, ..from.apart(seed) });
        let mut inputs = Arrays::default();
        inputs.insert("params", of_params.draw(problem.dtype, rows, columns));
        inputs.insert("grads", from.draw(problem.dtype, rows, columns));
        inputs.insert("mu", of_mu.draw(DType::F32, rows, columns));
        Ok(inputs)
    }

    fn reference<'a>(
        &self,
        problem: &'a Problem,
        inputs: &'a Arrays<'a>,
        tolerances: Tolerances,
    ) -> Result<Box<dyn Reference + 'a>> {
        let [params, grads, mu] = ["params", "grads", "mu"].map(|name| {
            let all = inputs.get(name).expect("an operand");
            (0..all.len()).map(|index| all.at(index)).collect()
        });
        Ok(Box::new(Steps {
            rows: problem.dim("T"),
            columns: problem.dim("D"),
            step: problem.dim(STEP.name) as i32,
            params,
            grads,
            mu,
            error: tolerances.get("entry_roundings") * U,
            of_step: tolerances.get("step_rms"),
            found: [const { Vec::new() }; 2],
        }))
    }

    /// Some 12 arrays in float64, and four squares.
    fn reference_bytes(&self, problem: &Problem, _: usize) -> Option<u64> {
        let [rows, columns] = ["T", "D"].map(|name| problem.dim(name) as u64);
        let side = rows.min(columns);
        let entries = rows.checked_mul(columns)?.checked_mul(12)?;
        entries.checked_add(side.checked_mul(side)?.checked_mul(4)?)?.checked_mul(8)
    }

    fn headline(&self, problem: &Problem) -> (&'static str, String) {
        let shape = format!("[{}, {}]", problem.dim("T"), problem.dim("D"));
        ("parameter", format!("{shape} {}", problem.dtype))
    }
}

/// The reference.
struct Steps {
    rows: usize,
    columns: usize,
    step: i32,
    params: Vec<f64>,
    grads: Vec<f64>,
    mu: Vec<f64>,
    error: f64,
    of_step: f64,
    /// Parameters and momentum after the step, each with its bound.
    found: [Vec<(f64, f64)>; 2],
}

impl Reference for Steps {
    fn forward(&mut self) {
        let [beta, rest] = [BETA, 1.0 - BETA].map(|x| f64::from(x as f32));
        let correction = |steps| 1.0 / (1.0 - beta.powi(steps));
        let [now, next] = [self.step, self.step + 1].map(correction);
        let pairs = || self.grads.iter().zip(&self.mu);
        let mu = |(g, mu): (&f64, &f64)| {
            (rest * g + beta * mu, self.error * (rest * g.abs() + beta * mu.abs()))
        };
        let new_mu: Vec<_> = pairs().map(mu).collect();
        let ahead = |(&(mu, _), g): (&(f64, f64), &f64)| beta * next * mu + rest * now * g;
        let directions = new_mu.iter().zip(&self.grads).map(ahead).collect();
        let steps = orthogonalized(directions, self.rows, self.columns);
        let squares: f64 = steps.iter().map(|x| x * x).sum();
        let bound = self.of_step * (squares / steps.len().max(1) as f64).sqrt();
        let scale = (self.columns as f64 / self.rows as f64).max(1.0).sqrt();
        let step = |(p, o): (&f64, &f64)| {
            let new = p - LEARNING_RATE * (scale * o + WEIGHT_DECAY * p);
            (new, LEARNING_RATE * scale * bound + self.error * p.abs())
        };
        self.found = [self.params.iter().zip(&steps).map(step).collect(), new_mu];
    }

    fn outputs(&self, visitor: &mut dyn Visitor) {
        for (name, all) in ["new_params", "new_mu"].into_iter().zip(&self.found) {
            let (expected, bounds): (Vec<_>, Vec<_>) = all.iter().copied().unzip();
            let judged = Judged::WithinRounding { relative: f64::INFINITY };
            visitor.result(name, name, judged, &|rows| {
                rows.row(0, &expected, Bound::Each(&bounds));
            });
        }
    }
}

/// The Newton-Schulz iteration of a matrix over its norm.
fn orthogonalized(x: Vec<f64>, rows: usize, columns: usize) -> Vec<f64> {
    if rows > columns {
        let wide = orthogonalized(transposed(&x, rows, columns), columns, rows);
        return transposed(&wide, columns, rows);
    }
    let norm = x.iter().map(|x| x * x).sum::<f64>().sqrt() + EPS;
    let mut x: Vec<_> = x.iter().map(|x| x / norm).collect();
    let [c0, c1, c2] = COEFFICIENTS;
    for _ in 0..ITERATIONS {
        let gram = product(&x, &transposed(&x, rows, columns), columns, rows);
        let square = product(&gram, &gram, rows, rows);
        let mut matrix: Vec<_> = gram.iter().zip(&square).map(|(a, b)| c1 * a + c2 * b).collect();
        matrix.iter_mut().step_by(rows + 1).for_each(|x| *x += c0);
        x = product(&matrix, &x, rows, columns);
    }
    x
}

fn transposed(x: &[f64], rows: usize, columns: usize) -> Vec<f64> {
    (0..columns).flat_map(|column| (0..rows).map(move |row| x[row * columns + column])).collect()
}

/// The product of matrices `[.., inner]` and `[inner, columns]`.
fn product(a: &[f64], b: &[f64], inner: usize, columns: usize) -> Vec<f64> {
    let mut found = vec![0.0; a.len() / inner.max(1) * columns];
    for (to, from) in found.chunks_mut(columns.max(1)).zip(a.chunks(inner.max(1))) {
        for (factor, row) in from.iter().zip(b.chunks(columns.max(1))) {
            to.iter_mut().zip(row).for_each(|(to, x)| *to += factor * x);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_orthogonal_matrix_stays_so_up_to_the_fixed_interval() {
        let x = vec![0.0, 3.0, 0.0, -3.0, 0.0, 0.0];
        let found = orthogonalized(x, 2, 3);
        assert!(
            (0.68..1.14).contains(&found[1]) && (found[1] + found[3]).abs() < 1e-12,
            "{found:?}"
        );
        assert_eq!([found[0], found[2], found[4], found[5]], [0.0; 4]);
        let tall = orthogonalized(vec![0.0, -3.0, 3.0, 0.0, 0.0, 0.0], 3, 2);
        assert!((tall[2] - found[1]).abs() < 1e-12, "{tall:?}");
    }
}
