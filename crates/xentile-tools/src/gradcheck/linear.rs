//! Linear cross-entropy against the float64 reference, each entry within what a program may be off
//! that rounds what the contract lets it round and sums in f32. docs/linear-cross-entropy.md derives it.

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
    /// The mean square of logits.
    square: f64,
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

    /// By how much each of a token's logits may be off, being sums in f32.
    fn shifts(&self, token: usize, logits: &[f64]) -> Vec<f64> {
        let hidden = norm(self.operands.hidden(token).iter().map(|x| x.to_f64()));
        // The sum of magnitudes is at most the product of both norms.
        let of_product = self.of_sum(self.operands.shape().width()) * hidden;
        let columns = logits.iter().zip(&self.norms).enumerate();
        let shift = |(column, (&z, norm)): (usize, (&f64, &f64))| {
            let of_bias = match self.operands.has_bias() {
                true => F32_ROUNDING * (z.abs() + self.operands.bias(column).abs()),
                false => 0.0,
            };
            of_product * norm + of_bias
        };
        columns.map(shift).collect()
    }

    fn label(&self, token: usize) -> i64 {
        self.operands.labels().get(token)
    }

    fn probability(&self, z: f64, lse: f64) -> f64 {
        (self.options.cap(z) - lse).exp()
    }

    /// The derivative of softcap.
    fn slope(&self, z: f64) -> f64 {
        self.options.softcap.map_or(1.0, |cap| (z / cap).cosh().powi(-2))
    }

    /// The reference's outputs of every token, and their bounds.
    fn tokens(&self, report: &mut Report) -> Vec<Token> {
        let (elapsed, tokens) = timed(|| {
            map_rows(&self.operands, |token, logits| {
                self.token(token, logits, &self.shifts(token, logits))
            })
        });
        report.seconds("time/ref_forward_s", elapsed);
        tokens
    }

    fn token(&self, token: usize, logits: &[f64], shifts: &[f64]) -> Token {
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
        let square = logits.iter().map(|z| z * z).sum::<f64>() / logits.len() as f64;
        Token { exact, slack, lse_shift, square }
    }

    /// By how much entries of a row of dlogits may be off as they go into products, with what these
    /// add as they are summed. `dlogits` hold the row on entry.
    fn row_bounds(
        &self,
        token: usize,
        logits: &[f64],
        of: &Token,
        cotangents: TokenCotangents,
        dlogits: &mut [f64],
    ) {
        let target = self.options.target(self.label(token), logits.len());
        if cotangents.are_zero() || matches!(target, Target::Ignored) {
            return;
        }
        let TokenCotangents { loss: g, logps: h, lse: k } = cotangents;
        let (e, w) = (self.options.label_smoothing, self.options.z_loss);
        let (lse, lse_shift) = (of.exact.lse, of.lse_shift);
        let of_p = (g * (1.0 + 2.0 * w * lse) - h + k).abs();
        let of_lse = (2.0 * g * w * lse_shift).abs();
        let smoothed = (g * e).abs() / logits.len() as f64;
        let size = (g * (1.0 + 2.0 * w * lse)).abs() + h.abs() + k.abs();
        let shape = self.operands.shape();
        let of_sums = self.of_sum(shape.vocab().max(shape.tokens()));
        let of_cap = self.options.softcap.map_or(0.0, |cap| 2.0 / cap);
        // In 16 bits the softmax may be normalised by the sum of rounded exponentials, and hidden
        // states are rounded with the factor of their token.
        let dtype = <E as Element>::DTYPE;
        let rounding = if dtype == DType::F32 { 0.0 } else { dtype.ulp(1.0) / 2.0 };
        // An exponential below the normal range, whose row's largest is near 1.
        let largest = logits.iter().map(|&z| self.probability(z, lse)).fold(0.0, f64::max);
        let subnormal = of_p * largest * dtype.ulp(0.0);
        let shifts = self.shifts(token, logits);
        for (column, (dz, (&z, shift))) in
            dlogits.iter_mut().zip(logits.iter().zip(shifts)).enumerate()
        {
            let (p, slope) = (self.probability(z, lse), self.slope(z));
            let of_p_moved = of_p * (shift + lse_shift + rounding).exp_m1();
            let moved = slope * p * (of_p_moved + of_lse);
            // Terms are rounded before they cancel, but the label's, which is made in one piece.
            let operand = match target {
                Target::Column(label) if label == column => dz.abs(),
                _ => slope * (of_p * p + smoothed),
            };
            let kernel = (self.limits.dlogits_ulp * dtype.ulp(operand))
                .max(self.limits.dlogits_cotangent * size);
            let relative = operand * (of_cap * shift + rounding) + dz.abs() * of_sums;
            *dz = moved + kernel + subnormal + relative;
        }
    }

    /// What the error of a whole gradient may be, relative to it: roundings of its own and of operands,
    /// and what is usual of logits that are sums in f32.
    fn relative_limit(&self, tokens: &[Token]) -> f64 {
        let rounding = <E as Element>::DTYPE.ulp(1.0) / 2.0;
        let square = tokens.iter().map(|token| token.square).sum::<f64>();
        let logit = (square / tokens.len().max(1) as f64).sqrt();
        let of_logits = self.of_sum(self.operands.shape().width()) * logit;
        self.limits.gradient_roundings * rounding + of_logits
    }

    /// Compares the program's gradients of hidden, weight and bias with those for `cotangents`.
    fn compare_gradients(
        &self,
        report: &mut Report,
        tokens: &[Token],
        cotangents: impl Fn(usize) -> TokenCotangents + Sync,
        found: &[Vec<E>],
    ) {
        let dlogits = |token: usize, logits: &[f64], out: &mut [f64]| {
            let (label, lse) = (self.label(token), tokens[token].exact.lse);
            gradient(&self.options, logits, label, lse, cotangents(token), out);
        };
        let (elapsed, expected) = timed(|| pull_back(&self.operands, Factors::Signed, dlogits));
        report.seconds("time/ref_grad_s", elapsed);
        let (elapsed, bounds) = timed(|| {
            pull_back(&self.operands, Factors::Magnitudes, |token, logits, out| {
                dlogits(token, logits, out);
                self.row_bounds(token, logits, &tokens[token], cotangents(token), out);
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
            let relative = self.relative_limit(tokens);
            compare_gradient(report, relative, name, (expected, &bounds), found, place);
        }
    }
}

/// Compares one gradient with what is expected and by how much it may be off before it is rounded.
fn compare_gradient<E: Element>(
    report: &mut Report,
    relative_limit: f64,
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
    report.add(Figure::plain(format!("{name}/relative"), relative).at_most(relative_limit));
    let share = equal as f64 / found.len().max(1) as f64;
    report.add(Figure::plain(format!("{name}/equal"), share));
}

fn norm(values: impl Iterator<Item = f64>) -> f64 {
    values.map(|x| x * x).sum::<f64>().sqrt()
}

#[cfg(test)]
mod tests {
    use std::time::{SystemTime, UNIX_EPOCH};

    use half::{bf16, f16};

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
                let lse = tokens[token].exact.lse;
                gradient(&OPTIONS, logits, bounds.label(token), lse, cotangents(token), out);
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

    /// Where a made-up program rounds.
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Rounds {
        /// dlogits, as they become operands.
        Gradients,
        /// The unnormalised softmax, whose sum normalises it, and hidden states times a row's factor.
        Softmax,
        /// Logits.
        Logits,
    }

    /// Loss and gradients of the mean, and the report of them.
    fn judged<E: Element + pjrt_client::Element>(
        std: f64,
        rounds: Rounds,
        options: CrossEntropy,
    ) -> Report {
        let rows: Vec<u64> = (0..40).collect();
        let seed = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().subsec_nanos().into();
        println!("seed {seed}");
        let seeded = Synthetic { std: Some(std), seed, ..Synthetic::default() };
        let linear = Linear { hidden: 64, bias: true, vocab_axis: 0, max_scratch_bytes: None };
        let states = HiddenStates::<E>::synthetic(&seeded, &rows, 500, linear, -100).unwrap();
        let HiddenStates { shape, hidden, weight, bias, labels } = &states;
        let operands = Operands::new(
            &options,
            *shape,
            hidden,
            weight,
            bias.as_deref(),
            labels.as_slice().into(),
        )
        .unwrap();
        let dtype = <E as Element>::DTYPE;
        let limits = Tolerances::default();
        let limits = limits.resolve(Op::LinearCrossEntropy, dtype, options.softcap).unwrap();
        let bounds = Bounds::new(options, limits, operands);
        let mut report = Report::empty();
        let tokens = bounds.tokens(&mut report);
        let round = |x: f64| <E as Element>::from_f64(x).to_f64();
        let made = |exact: &[f64]| -> Vec<f64> {
            match rounds {
                Rounds::Logits => exact.iter().map(|&z| round(z)).collect(),
                _ => exact.to_vec(),
            }
        };
        let found =
            map_rows(&operands, |token, logits| forward(&options, &made(logits), labels[token]));
        let mut outputs = Outputs::poisoned(rows.len());
        for (token, found) in found.iter().enumerate() {
            outputs.loss[token] = found.loss as f32;
            outputs.logps[token] = found.logps as f32;
            outputs.lse[token] = found.lse as f32;
        }
        compare_forward(&mut report, &outputs, &tokens);
        let of = TokenCotangents { loss: 1.0 / 40.0, ..Default::default() };
        let lses = &found;
        let exact = |token: usize, logits: &[f64], out: &mut [f64]| {
            gradient(&options, logits, labels[token], lses[token].lse, of, out);
        };
        let label = |token: usize| labels[token] as usize;
        let row = |token: usize, logits: &[f64], out: &mut [f64]| {
            let logits = made(logits);
            exact(token, &logits, out);
            if rounds != Rounds::Softmax {
                return out.iter_mut().for_each(|dz| *dz = round(*dz));
            }
            let at_label = out[label(token)];
            let top = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let of_row = options.cap(top);
            let e: Vec<_> =
                logits.iter().map(|&z| round((options.cap(z) - of_row).exp())).collect();
            let sum: f64 = e.iter().sum();
            for ((dz, e), &z) in out.iter_mut().zip(e).zip(&logits) {
                let slope = bounds.slope(z);
                // Written times the derivative, where there is a softcap.
                let written = match options.softcap {
                    Some(_) => round(slope * (options.cap(z) - of_row).exp()),
                    None => e,
                };
                let smoothed = options.label_smoothing / 500.0;
                let more = 1.0 + 2.0 * options.z_loss * lses[token].lse;
                *dz = of.loss * (more * written / sum - slope * smoothed);
            }
            out[label(token)] = round(at_label * sum / of.loss) * of.loss / sum;
        };
        let Gradients { hidden: dhidden, weight: mut dweight, bias: dbias } =
            pull_back(&operands, Factors::Signed, row);
        if rounds == Rounds::Softmax {
            // Hidden states times a factor that is no power of two.
            let factor = |token: usize| 1.0 + token as f64 / 40.0;
            let scaled: Vec<E> = hidden
                .iter()
                .enumerate()
                .map(|(i, x)| <E as Element>::from_f64(x.to_f64() * factor(i / 64)))
                .collect();
            let labels = labels.as_slice().into();
            let scaled = Operands::new(&options, *shape, &scaled, weight, None, labels).unwrap();
            let of_tokens: Vec<Vec<f64>> = map_rows(&operands, |token, logits| {
                let mut out = vec![0.0; logits.len()];
                row(token, logits, &mut out);
                out.iter().map(|dz| dz / factor(token)).collect()
            });
            dweight = pull_back(&scaled, Factors::Signed, |token, _, out| {
                out.copy_from_slice(&of_tokens[token]);
            })
            .weight;
        }
        let rounded = |all: &[f64]| -> Vec<E> { all.iter().map(|&x| E::from_f64(x)).collect() };
        let found = [rounded(&dhidden), rounded(&dweight), rounded(&dbias)];
        bounds.compare_gradients(&mut report, &tokens, |_| of, &found);
        report
    }

    /// Programs that round what the contract lets them round pass, at any spread of logits.
    #[test]
    fn operands_may_be_rounded() {
        fn body<E: Element + pjrt_client::Element>() {
            let plain = CrossEntropy::default();
            let softcap = CrossEntropy { softcap: Some(15.0), ..plain };
            let smoothed = CrossEntropy { label_smoothing: 0.1, z_loss: 1e-3, ..plain };
            for (scale, options) in [0.5, 1.0, 8.0, 64.0]
                .into_iter()
                .flat_map(|scale| [plain, softcap, smoothed].map(|options| (scale, options)))
            {
                for rounds in [Rounds::Gradients, Rounds::Softmax] {
                    let report = judged::<E>(scale, rounds, options);
                    assert!(
                        report.passed(),
                        "{} {scale} {rounds:?} {options:?}: {}",
                        <E as Element>::DTYPE,
                        report.to_json()
                    );
                }
            }
        }
        body::<f32>();
        body::<bf16>();
        body::<f16>();
    }

    /// A program that rounds logits fails, in what it says of tokens at any spread and in gradients
    /// where logits are large.
    #[test]
    fn rounded_logits_are_found() {
        fn body<E: Element + pjrt_client::Element>() {
            for scale in [0.5, 1.0, 8.0, 64.0] {
                let report = judged::<E>(scale, Rounds::Logits, CrossEntropy::default());
                let of_tokens = ["fwd/loss_excess", "fwd/logp_excess", "fwd/lse_excess"];
                let of_gradients = ["dhidden/excess", "dweight/excess"];
                let large = of_gradients.into_iter().filter(|_| scale >= 8.0);
                for name in of_tokens.into_iter().chain(large) {
                    let found = report.figure(name).unwrap();
                    assert!(found > 1.0, "{} {scale}: {name} is {found}", <E as Element>::DTYPE);
                }
            }
        }
        body::<bf16>();
        body::<f16>();
    }
}
