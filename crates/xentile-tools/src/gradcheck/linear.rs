//! Linear cross-entropy against the float64 reference, each entry within what a program may be off
//! that rounds where the contract says and sums in f32. docs/linear-cross-entropy.md derives it.

use std::time::Instant;

use anyhow::{Context, Result};
use bytemuck::Pod;
use pjrt_client::Buffer;
use xentile::cross_entropy::reference::{TokenCotangents, TokenForward, forward, gradient};
use xentile::cross_entropy::{CrossEntropy, Target, TokenFactors};
use xentile::linear_cross_entropy::Operands;
use xentile::linear_cross_entropy::reference::{Factors, Gradients, map_rows, pull_back};
use xentile::{DType, Element};
use xentile_programs::exported::Linear;

use super::compare::{Outputs, Worst, distance};
use super::program::{Program, asked};
use super::report::{Figure, Place, Report};
use super::{Config, Input, Limits};
use crate::config::{Backend, Shape, Weights, linear};
use crate::input::file::Mapped;
use crate::input::linear::HiddenStates;
use crate::input::predicting_rows;
use crate::input::synthetic::Synthetic;
use crate::machine::Machine;
use crate::memory;
use crate::timing::timed;

/// Half the distance of 1 and the next f32.
const F32_ROUNDING: f64 = 1.0 / (1 << 24) as f64;

/// What to do where memory is short.
const REMEDY: &str = "lower shape.batch, shape.seq_len, shape.vocab or hidden";

/// Runs what `config` asks for.
pub(super) fn run<E: Element + Pod + pjrt_client::Element>(
    config: &Config,
    options: CrossEntropy,
    limits: Limits,
) -> Result<Report> {
    config.op.check_backend(config.backend)?;
    match &config.input {
        Input::Synthetic(synthetic) => {
            let shape = config.synthetic_shape()?;
            let asked = config.linear()?.context("the operation has hidden states")?;
            synthetic.validate().context("input.synthetic")?;
            memory::require(needed_bytes(shape, config, asked), REMEDY)?;
            let rows = predicting_rows(shape.batch, shape.seq_len);
            let ignore_index = options.ignore_index;
            let states =
                HiddenStates::synthetic(synthetic, &rows, shape.vocab, asked, ignore_index)
                    .context("input.synthetic")?;
            check::<E>(config, options, limits, shape, asked, synthetic, &states)
        }
        Input::File(path) => {
            let in_file = || format!("input file {}", path.display());
            let mapped = Mapped::open(path)?;
            let tensors = mapped.tensors().with_context(in_file)?;
            let shape = config.agree(tensors.shape()).with_context(in_file)?;
            let Config { op, bias, vocab_axis, max_scratch_bytes, .. } = *config;
            let width = config.hidden.or(tensors.width());
            let asked = linear(op, width, bias, vocab_axis, max_scratch_bytes)
                .with_context(in_file)?
                .context("the operation has hidden states")?;
            memory::require(needed_bytes(shape, config, asked), "make a smaller file")
                .with_context(in_file)?;
            let states = HiddenStates::of_file(&tensors, asked).with_context(in_file)?;
            // Weights and cotangents are not in files.
            let seeded = Synthetic::default();
            check::<E>(config, options, limits, shape, asked, &seeded, &states)
                .with_context(in_file)
        }
    }
}

/// Bytes for arrays and their gradients, on the host and where the device's memory is the host's
/// there too, for gradients and their bounds in float64, and for the rows of each thread.
fn needed_bytes(shape: Shape, config: &Config, linear: Linear) -> Option<u64> {
    let tokens = (shape.batch as u64).checked_mul(shape.seq_len as u64)?;
    let rows = tokens.checked_add(shape.vocab as u64)?;
    let copies = if config.backend == Backend::XlaCpu { 4 } else { 2 };
    let bytes = copies * config.dtype.size_bytes() as u64 + 3 * size_of::<f64>() as u64;
    let arrays = rows.checked_mul(linear.hidden as u64)?.checked_mul(bytes)?;
    let threads = rayon::current_num_threads() as u64;
    let logits = (shape.vocab as u64).checked_mul(40 * size_of::<f64>() as u64 * threads)?;
    arrays.checked_add(logits)
}

fn check<E: Element + Pod + pjrt_client::Element>(
    config: &Config,
    options: CrossEntropy,
    limits: Limits,
    shape: Shape,
    asked_for: Linear,
    seeded: &Synthetic,
    states: &HiddenStates<E>,
) -> Result<Report> {
    let began = Instant::now();
    let HiddenStates { shape: arrays, hidden, weight, bias, labels } = states;
    let labels = labels.as_slice().into();
    let operands = Operands::new(&options, *arrays, hidden, weight, bias.as_deref(), labels)?;
    let asked = asked(config, arrays.logits(), Some(asked_for));
    let signature = asked.linear_signature(asked_for)?;
    let program = Program::open(config, &asked, signature, |session| states.upload(session))?;

    let rows = predicting_rows(shape.batch, shape.seq_len);
    let described = format!("{:?} x {:?}", arrays.hidden(), arrays.weight());
    let mut report = Report::new(config, described, &program.setup());
    let bounds = Bounds::new(options, limits, operands);
    match config.options.reduction.reduction() {
        Some(reduction) => {
            let weights = match config.options.weights {
                Weights::None => None,
                Weights::Random => Some(seeded.weights(&rows)),
            };
            let (elapsed, result) = timed(|| program.value_and_grad(weights.as_deref()));
            let (loss, gradients) = result?;
            report.seconds("time/kernel_grad_s", elapsed);
            let tokens = bounds.tokens(&mut report);
            let factors = TokenFactors::new(options, reduction, labels, weights.as_deref())?;
            let slack = tokens.iter().enumerate();
            let slack = slack.map(|(token, of)| factors.of(token).abs() * of.slack.loss).sum();
            let expected = factors.reduce(tokens.iter().map(|token| token.exact.loss));
            compare_loss(&mut report, limits, loss, expected, slack);
            let cotangents =
                |token| TokenCotangents { loss: factors.of(token), ..Default::default() };
            bounds.compare_gradients(&mut report, &tokens, cotangents, &read(&gradients)?);
            report.leave_out(&["fwd/"], "a program of value_and_grad");
        }
        None => {
            let given = seeded.cotangents(&rows);
            let mut outputs = Outputs::poisoned(arrays.tokens());
            let (elapsed, result) = timed(|| program.forward_and_backward(&mut outputs, &given));
            let gradients = result?;
            report.seconds("time/kernel_grad_s", elapsed);
            let tokens = bounds.tokens(&mut report);
            compare_forward(&mut report, &outputs, &tokens);
            let [g, h, k] = &given;
            let cotangents = |token: usize| {
                let [loss, logps, lse] = [g, h, k].map(|cotangent| f64::from(cotangent[token]));
                TokenCotangents { loss, logps, lse }
            };
            bounds.compare_gradients(&mut report, &tokens, cotangents, &read(&gradients)?);
        }
    }
    report.seconds("time/total_s", began.elapsed().as_secs_f64());
    report.finish(&Machine::current(), memory::peak_resident_bytes());
    Ok(report)
}

/// Gradients, on the host.
fn read<E: pjrt_client::Element>(gradients: &[Buffer]) -> Result<Vec<Vec<E>>> {
    gradients.iter().map(|gradient| Ok(gradient.to_vec()?)).collect()
}

fn compare_loss(report: &mut Report, limits: Limits, actual: f64, expected: f64, slack: f64) {
    report.add(Figure::plain("loss", actual));
    report.add(
        Figure::plain("abs_diff_loss", distance(actual, expected))
            .at_most(limits.forward_rel * expected.abs().max(1.0) + slack),
    );
}

fn compare_forward(report: &mut Report, outputs: &Outputs, tokens: &[Token]) {
    let mut compare = |name: &str, actual: &[f32], of: fn(&TokenForward) -> f64| {
        let (mut abs, mut excess) = (Worst::default(), Worst::default());
        for (token, (&actual, Token { exact, slack, .. })) in actual.iter().zip(tokens).enumerate()
        {
            let place = Place { token: Some(token), column: None, hidden: None };
            let error = distance(f64::from(actual), of(exact));
            abs.see_at(error, place);
            excess.see_at(error / of(slack), place);
        }
        report.add(Figure::plain(format!("fwd/{name}_max_abs"), abs.value).at(abs.place));
        let excess = Figure::plain(format!("fwd/{name}_excess"), excess.value).at(excess.place);
        report.add(excess.at_most(1.0));
    };
    compare("loss", &outputs.loss, |token| token.loss);
    compare("logp", &outputs.logps, |token| token.logps);
    compare("lse", &outputs.lse, |token| token.lse);
}

/// What the reference says of a token, and by how much a program may be off.
struct Token {
    exact: TokenForward,
    slack: TokenForward,
    /// What logits that are off make of lse.
    lse_shift: f64,
}

/// A token's logits, rounded as the contract says.
struct Row {
    logits: Vec<f64>,
    /// By how much each may be off: a sum in f32 rounds to another value where the exact one is close
    /// to the middle of two.
    shifts: Vec<f64>,
}

/// Bounds of what a program's results may be off by.
struct Bounds<'a, E> {
    options: CrossEntropy,
    limits: Limits,
    operands: Operands<'a, E>,
    /// The norm of each column's weights.
    norms: Vec<f64>,
}

impl<'a, E: Element + pjrt_client::Element> Bounds<'a, E> {
    fn new(options: CrossEntropy, limits: Limits, operands: Operands<'a, E>) -> Self {
        let columns = 0..operands.shape().vocab();
        let norms = columns.map(|column| norm(operands.weights(column).map(E::to_f64))).collect();
        Self { options, limits, operands, norms }
    }

    /// What a sum of `count` terms in f32 is off by, relative to the sum of their magnitudes.
    fn of_sum(&self, count: usize) -> f64 {
        self.limits.sum_roundings * F32_ROUNDING * (count as f64).sqrt()
    }

    /// A row of exact logits as programs have it.
    fn row(&self, token: usize, exact: &[f64]) -> Row {
        let hidden = norm(self.operands.hidden(token).iter().map(|x| x.to_f64()));
        // The sum of magnitudes is at most the product of both norms.
        let of_product = self.of_sum(self.operands.shape().width()) * hidden;
        let round = |z: f64| <E as Element>::from_f64(z).to_f64();
        let mut row = Row { logits: Vec::with_capacity(exact.len()), shifts: Vec::new() };
        for (column, (&z, norm)) in exact.iter().zip(&self.norms).enumerate() {
            let of_bias = match self.operands.has_bias() {
                true => F32_ROUNDING * (z.abs() + self.operands.bias(column).abs()),
                false => 0.0,
            };
            let error = of_product * norm + of_bias;
            let rounded = round(z);
            let (low, high) = (round(z - error), round(z + error));
            row.logits.push(rounded);
            row.shifts.push((rounded - low).max(high - rounded).max(0.0));
        }
        row
    }

    fn label(&self, token: usize) -> i64 {
        self.operands.labels().get(token)
    }

    fn probability(&self, z: f64, lse: f64) -> f64 {
        (self.options.cap(z) - lse).exp()
    }

    /// The reference's outputs of every token, and their bounds.
    fn tokens(&self, report: &mut Report) -> Vec<Token> {
        let (elapsed, tokens) = timed(|| {
            map_rows(&self.operands, |token, logits| self.token(token, &self.row(token, logits)))
        });
        report.seconds("time/ref_forward_s", elapsed);
        tokens
    }

    fn token(&self, token: usize, Row { logits, shifts }: &Row) -> Token {
        let label = self.label(token);
        let exact = forward(&self.options, logits, label);
        let lse = exact.lse;
        let grown = logits.iter().zip(shifts);
        let grown = grown.map(|(&z, shift)| self.probability(z, lse) * shift.exp_m1());
        let lse_shift = grown.sum::<f64>().ln_1p();
        let (e, w) = (self.options.label_smoothing, self.options.z_loss);
        let mut slack = TokenForward { loss: 0.0, logps: 0.0, lse: lse_shift };
        let mut scale = lse.abs().max(w * lse * lse).max(1.0);
        if let Target::Column(y) = self.options.target(label, logits.len()) {
            let mean = shifts.iter().sum::<f64>() / shifts.len() as f64;
            slack.logps = shifts[y] + lse_shift;
            slack.loss = (1.0 - e) * slack.logps
                + e * (mean + lse_shift)
                + w * lse_shift * (2.0 * lse.abs() + lse_shift);
            scale = scale.max(logits[y].abs());
        }
        for slack in [&mut slack.loss, &mut slack.logps, &mut slack.lse] {
            *slack += self.limits.forward_rel * scale;
        }
        Token { exact, slack, lse_shift }
    }

    /// By how much entries of a row of dlogits may be off as they go into products, with what these
    /// add as they are summed. `dlogits` hold the row on entry.
    fn row_bounds(
        &self,
        row: &Row,
        token: &Token,
        cotangents: TokenCotangents,
        dlogits: &mut [f64],
    ) {
        if cotangents.are_zero() {
            return;
        }
        let TokenCotangents { loss: g, logps: h, lse: k } = cotangents;
        let (w, lse, lse_shift) = (self.options.z_loss, token.exact.lse, token.lse_shift);
        let of_p = (g * (1.0 + 2.0 * w * lse) - h + k).abs();
        let of_lse = (2.0 * g * w * lse_shift).abs();
        let size = (g * (1.0 + 2.0 * w * lse)).abs() + h.abs() + k.abs();
        let shape = self.operands.shape();
        let of_sums = self.of_sum(shape.vocab().max(shape.tokens()));
        let of_cap = self.options.softcap.map_or(0.0, |cap| 2.0 / cap);
        // Numerators of p have a factor that is rounded too, with what it multiplies.
        let dtype = <E as Element>::DTYPE;
        let of_factor = if dtype == DType::Bf16 { dtype.ulp(1.0) / 2.0 } else { 0.0 };
        for ((dz, &z), &shift) in dlogits.iter_mut().zip(&row.logits).zip(&row.shifts) {
            let p = self.probability(z, lse);
            let moved = p * (of_p * (shift + lse_shift).exp_m1() + of_lse);
            let ulp = <E as Element>::DTYPE.ulp(*dz);
            let kernel = (self.limits.dlogits_ulp * ulp).max(self.limits.dlogits_cotangent * size);
            *dz = moved + kernel + dz.abs() * (of_cap * shift + of_sums + of_factor);
        }
    }

    /// Compares the program's gradients of hidden, weight and bias with those for `cotangents`.
    fn compare_gradients(
        &self,
        report: &mut Report,
        tokens: &[Token],
        cotangents: impl Fn(usize) -> TokenCotangents + Sync,
        found: &[Vec<E>],
    ) {
        let dlogits = |token: usize, row: &Row, out: &mut [f64]| {
            let (label, lse) = (self.label(token), tokens[token].exact.lse);
            gradient(&self.options, &row.logits, label, lse, cotangents(token), out);
        };
        let (elapsed, expected) = timed(|| {
            pull_back(&self.operands, Factors::Signed, |token, logits, out| {
                dlogits(token, &self.row(token, logits), out);
            })
        });
        report.seconds("time/ref_grad_s", elapsed);
        let (elapsed, bounds) = timed(|| {
            pull_back(&self.operands, Factors::Magnitudes, |token, logits, out| {
                let row = self.row(token, logits);
                dlogits(token, &row, out);
                self.row_bounds(&row, &tokens[token], cotangents(token), out);
            })
        });
        report.seconds("time/ref_bounds_s", elapsed);
        let Gradients { hidden, weight, bias } = &expected;
        let width = self.operands.shape().width();
        let vocab_axis = self.operands.shape().vocab_axis().index();
        let vocab = self.operands.shape().vocab();
        let of_hidden = |index: usize| Place {
            token: Some(index / width),
            column: None,
            hidden: Some(index % width),
        };
        let of_weight = |index: usize| {
            let [column, hidden] = match vocab_axis {
                0 => [index / width, index % width],
                _ => [index % vocab, index / vocab],
            };
            Place { token: None, column: Some(column), hidden: Some(hidden) }
        };
        let of_bias = |index| Place { token: None, column: Some(index), hidden: None };
        // Processors may take products below the normal range of f32 for 0.
        let terms = self.operands.shape().vocab().max(self.operands.shape().tokens());
        let flushed = terms as f64 * f64::from(f32::MIN_POSITIVE);
        let figures = [
            ("dhidden", hidden, &bounds.hidden, &of_hidden as &dyn Fn(usize) -> Place),
            ("dweight", weight, &bounds.weight, &of_weight),
            ("dbias", bias, &bounds.bias, &of_bias),
        ];
        for ((name, expected, bounds, place), found) in figures.into_iter().zip(found) {
            let bounds: Vec<_> = bounds.iter().map(|bound| bound + flushed).collect();
            compare_gradient(report, self.limits, name, (expected, &bounds), found, place);
        }
    }
}

/// Compares one gradient with what is expected and by how much it may be off before it is rounded.
fn compare_gradient<E: Element>(
    report: &mut Report,
    limits: Limits,
    name: &str,
    (expected, bounds): (&[f64], &[f64]),
    found: &[E],
    place: &dyn Fn(usize) -> Place,
) {
    let (mut abs, mut excess) = (Worst::default(), Worst::default());
    let (mut equal, mut squares, mut total) = (0_u64, 0.0, 0.0);
    for (index, ((&expected, &bound), found)) in expected.iter().zip(bounds).zip(found).enumerate()
    {
        let error = distance(found.to_f64(), expected);
        let bound = bound + 0.5 * <E as Element>::DTYPE.ulp(expected.abs() + bound);
        abs.see_at(error, place(index));
        excess.see_at(error / bound, place(index));
        equal += u64::from(found.to_f64() == E::from_f64(expected).to_f64());
        squares += error * error;
        total += expected * expected;
    }
    report.add(Figure::plain(format!("{name}_max_abs"), abs.value).at(abs.place));
    let excess = Figure::plain(format!("{name}/excess"), excess.value).at(excess.place);
    report.add(excess.at_most(1.0));
    // Of no gradient at all no share can be off.
    let relative = if squares == 0.0 { 0.0 } else { (squares / total).sqrt() };
    let rounding = <E as Element>::DTYPE.ulp(1.0) / 2.0;
    report.add(
        Figure::plain(format!("{name}/relative"), relative)
            .at_most(limits.gradient_roundings * rounding),
    );
    let share = equal as f64 / found.len().max(1) as f64;
    report.add(Figure::plain(format!("{name}/equal"), share));
}

fn norm(values: impl Iterator<Item = f64>) -> f64 {
    values.map(|x| x * x).sum::<f64>().sqrt()
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};
    use xentile::linear_cross_entropy::{LinearShape, VocabAxis};

    use super::*;
    use crate::config::Op;
    use crate::gradcheck::Tolerances;

    const LINEAR: Linear =
        Linear { hidden: 24, bias: true, vocab_axis: 1, max_scratch_bytes: None };
    const OPTIONS: CrossEntropy =
        CrossEntropy { ignore_index: -100, label_smoothing: 0.1, z_loss: 0.01, softcap: Some(9.0) };

    fn cotangents(token: usize) -> TokenCotangents {
        let sign = if token.is_multiple_of(2) { 1.0 } else { -1.0 };
        TokenCotangents { loss: sign, logps: 0.5, lse: -0.25 }
    }

    /// Gradients that are the reference's, rounded, pass; with one entry of one of them wrong they
    /// fail, and the entry is named.
    fn one_wrong_entry<E: Element + pjrt_client::Element>() {
        let rows: Vec<u64> = (0..9).collect();
        let seeded = Synthetic { ignored: 0.2, ..Synthetic::default() };
        let states = HiddenStates::<E>::synthetic(&seeded, &rows, 70, LINEAR, -100).unwrap();
        let HiddenStates { shape, hidden, weight, bias, labels } = &states;
        let labels = labels.as_slice().into();
        let operands =
            Operands::new(&OPTIONS, *shape, hidden, weight, bias.as_deref(), labels).unwrap();
        let dtype = <E as Element>::DTYPE;
        let limits = Tolerances::default();
        let limits = limits.resolve(Op::LinearCrossEntropy, dtype, OPTIONS.softcap).unwrap();
        let bounds = Bounds::new(OPTIONS, limits, operands);
        let tokens = bounds.tokens(&mut Report::empty());
        let Gradients { hidden, weight, bias } =
            pull_back(&operands, Factors::Signed, |token, logits, out| {
                let row = bounds.row(token, logits);
                let lse = tokens[token].exact.lse;
                gradient(&OPTIONS, &row.logits, bounds.label(token), lse, cotangents(token), out);
            });
        let rounded = |all: &[f64]| -> Vec<E> { all.iter().map(|&x| E::from_f64(x)).collect() };
        let mut found = [rounded(&hidden), rounded(&weight), rounded(&bias)];
        let judge = |found: &[Vec<E>; 3]| {
            let mut report = Report::empty();
            bounds.compare_gradients(&mut report, &tokens, cotangents, found);
            report
        };
        assert!(judge(&found).passed(), "{dtype}");
        for (which, name) in ["dhidden", "dweight", "dbias"].into_iter().enumerate() {
            // The largest entry has the most digits to be wrong in.
            let size = |&index: &usize| found[which][index].to_f64().abs();
            let all = 0..found[which].len();
            let index = all.max_by(|a, b| size(a).total_cmp(&size(b))).unwrap();
            for factor in [0.0, 0.9, f64::NAN] {
                let kept = found[which][index];
                found[which][index] = E::from_f64(kept.to_f64() * factor);
                let report = judge(&found);
                found[which][index] = kept;
                assert!(!report.passed(), "{dtype}: {name} times {factor}");
                let place = &report.to_json()["worst"][format!("{name}/excess")];
                let expected = match which {
                    0 => serde_json::json!({"token": index / 24, "hidden": index % 24}),
                    1 => serde_json::json!({"column": index % 70, "hidden": index / 70}),
                    _ => serde_json::json!({"column": index}),
                };
                assert_eq!(*place, expected, "{dtype}: {name} times {factor}");
            }
        }
    }

    #[test]
    fn one_wrong_entry_of_a_gradient_is_found() {
        one_wrong_entry::<f32>();
        one_wrong_entry::<bf16>();
        one_wrong_entry::<f16>();
    }

    /// A logit in the middle of two values of its dtype may become either, and one that is not may not.
    #[test]
    fn a_logit_moves_only_from_the_middle_of_two_values() {
        let arrays = ([bf16::from_f32(1.0)], [1.0, 1.0].map(bf16::from_f32), [0_i64]);
        let shape = LinearShape::new([1, 1], [2, 1], Some(VocabAxis::First)).unwrap();
        let (hidden, weight, labels) = &arrays;
        let labels = labels.as_slice().into();
        let options = CrossEntropy::default();
        let operands = Operands::new(&options, shape, hidden, weight, None, labels).unwrap();
        let limits = Tolerances::default();
        let limits = limits.resolve(Op::LinearCrossEntropy, DType::Bf16, None).unwrap();
        let bounds = Bounds::new(options, limits, operands);
        let ulp = 2f64.powi(-7);
        let row = bounds.row(0, &[1.0 + 0.5 * ulp, 1.0 + 0.4 * ulp]);
        assert_eq!((row.logits, row.shifts), (vec![1.0, 1.0], vec![ulp, 0.0]));
    }
}
