//! The kernels against the f64 reference, on fresh random input, with outputs poisoned first.

use std::fmt::Debug;

use half::{bf16, f16};
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use xentile::cross_entropy::reference::{
    TokenCotangents, TokenForward, distribution, forward, gradient,
};
use xentile::cross_entropy::{CrossEntropy, Reduction, TokenFactors};
use xentile::{DType, Element, Labels, LogitsShape, Tile};
use xentile_cpu::cross_entropy::{
    Cotangents, DistributionOutputs, EntropyCotangents, Kernel, Launch, Reduce, SavedLse,
    TokenOutputs,
};
use xentile_cpu::{InOut, Isa, Threads};

mod common;

/// One problem with its inputs.
struct Case<E> {
    shape: LogitsShape,
    options: CrossEntropy,
    logits: Vec<E>,
    labels: Vec<i64>,
    cotangents: [Vec<f32>; 3],
    weights: Vec<f32>,
    isa: Isa,
    tile: Option<Tile>,
}

/// What the kernels make of a [`Case`].
struct Results<E> {
    loss: Vec<f32>,
    logps: Vec<f32>,
    lse: Vec<f32>,
    /// For the case's per-token cotangents.
    dlogits: Vec<E>,
    /// The weighted mean and its gradient.
    mean: f64,
    mean_dlogits: Vec<E>,
}

const POISON: f32 = 7.25e3;

fn normal(rng: &mut ChaCha8Rng) -> f64 {
    let (u, v): (f64, f64) = (1.0 - rng.random::<f64>(), rng.random());
    (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()
}

impl<E: Element> Case<E> {
    fn new(rng: &mut ChaCha8Rng, tokens: usize, vocab: usize, scale: f64) -> Self {
        let shape = LogitsShape::new(tokens, vocab).unwrap();
        let mut tokenwise = || (0..tokens).map(|_| normal(rng) as f32).collect::<Vec<_>>();
        let cotangents = [tokenwise(), tokenwise(), tokenwise()];
        Self {
            shape,
            options: CrossEntropy::default(),
            logits: (0..shape.elements()).map(|_| E::from_f64(normal(rng) * scale)).collect(),
            labels: (0..tokens).map(|_| rng.random_range(0..vocab as i64)).collect(),
            cotangents,
            weights: (0..tokens).map(|_| rng.random::<f32>()).collect(),
            isa: Isa::detect(),
            tile: None,
        }
    }

    fn reduce(&self) -> Reduce<'_> {
        Reduce { reduction: Reduction::Mean, weights: Some(&self.weights), cotangent: 0.75 }
    }

    fn run(&self, threads: usize) -> Results<E> {
        let pool = Threads::new(threads).unwrap();
        let launch = Launch { isa: self.isa, tile: self.tile, pool: &pool };
        let labels = Labels::from(self.labels.as_slice());
        let kernel =
            Kernel::with_unchecked_labels(self.options, self.shape, labels, launch).unwrap();
        let (t, n) = (self.shape.tokens(), self.shape.elements());
        let mut lse_low = vec![POISON; t];
        let poisoned = || vec![E::from_f32(POISON); n];
        let mut results = Results {
            loss: vec![POISON; t],
            logps: vec![POISON; t],
            lse: vec![POISON; t],
            dlogits: poisoned(),
            mean: f64::from(POISON),
            mean_dlogits: poisoned(),
        };
        let outputs = TokenOutputs {
            loss: Some(&mut results.loss),
            logps: Some(&mut results.logps),
            lse: Some(&mut results.lse),
            lse_low: Some(&mut lse_low),
            ..TokenOutputs::default()
        };
        kernel.forward(&self.logits, outputs).unwrap();
        let saved = SavedLse { lse: &results.lse, lse_low: Some(&lse_low) };
        let [g, h, k] = &self.cotangents;
        let cotangents = Cotangents { loss: Some(g), logps: Some(h), lse: Some(k) };
        let logits = InOut::apart(&self.logits, &mut results.dlogits);
        kernel.backward(logits, saved, cotangents).unwrap();
        let reduce = self.reduce();
        let logits = InOut::apart(&self.logits, &mut results.mean_dlogits);
        results.mean = kernel.value_and_grad(logits, reduce, TokenOutputs::default()).unwrap();

        let mut in_place = self.logits.clone();
        kernel.backward(InOut::InPlace(&mut in_place), saved, cotangents).unwrap();
        same_bits("backward in place", &in_place, &results.dlogits);
        in_place.copy_from_slice(&self.logits);
        let logits = InOut::InPlace(&mut in_place);
        let again = kernel.value_and_grad(logits, reduce, TokenOutputs::default()).unwrap();
        assert!(again.to_bits() == results.mean.to_bits());
        same_bits("value_and_grad in place", &in_place, &results.mean_dlogits);
        results
    }

    /// Holds the kernels to the tolerances that the project states.
    fn check(&self, what: &str) {
        let results = self.run(2);
        let what = format!("{what} {} {} [{:?}]", E::DTYPE, self.isa, self.shape);
        let labels = Labels::from(self.labels.as_slice());
        let factors =
            TokenFactors::new(self.options, Reduction::Mean, labels, Some(&self.weights)).unwrap();
        // exp is 3 units off at most, once in the sum and once in the gradient, and a unit may be
        // twice as large, relative to the value, before a division as after it. A capped logit is a
        // few units off too, which exp makes a relative error.
        // A temperature moves every distance from lse by half a unit.
        let f32_ulps = 16.0
            + 4.0 * self.options.softcap.unwrap_or(0.0)
            + if self.options.is_tempered() { 32.0 } else { 0.0 };
        let mut judge = Judge { f32_ulps, ..Judge::default() };
        let mut losses = Vec::new();
        for (token, &label) in self.labels.iter().enumerate() {
            let row = token * self.shape.vocab()..(token + 1) * self.shape.vocab();
            let z: Vec<f64> = self.logits[row.clone()].iter().map(|z| z.to_f64()).collect();
            let expected = forward(&self.options, &z, label);
            losses.push(expected.loss);
            let what = format!("{what} token {token}");
            let scale = self.scale(&z, label, expected);
            near(&format!("{what} loss"), results.loss[token], expected.loss, scale);
            near(&format!("{what} logps"), results.logps[token], expected.logps, scale);
            near(&format!("{what} lse"), results.lse[token], expected.lse, scale);

            let [g, h, k] = [0, 1, 2].map(|i| f64::from(self.cotangents[i][token]));
            let mut dz = vec![f64::NAN; z.len()];
            let cotangents = TokenCotangents { loss: g, logps: h, lse: k, entropy: 0.0 };
            gradient(&self.options, &z, label, expected.lse, cotangents, &mut dz);
            let size =
                (g * (1.0 + 2.0 * self.options.z_loss * expected.lse)).abs() + h.abs() + k.abs();
            judge.row(&what, &results.dlogits[row.clone()], &dz, size);

            let factor = factors.of(token);
            if factor == 0.0 {
                dz.fill(0.0);
            } else {
                let cotangents = TokenCotangents {
                    loss: self.reduce().cotangent * factor,
                    ..Default::default()
                };
                gradient(&self.options, &z, label, expected.lse, cotangents, &mut dz);
            }
            judge.row(&format!("{what} mean"), &results.mean_dlogits[row.clone()], &dz, factor);
            for (column, z) in z.iter().enumerate() {
                let masked = *z == f64::NEG_INFINITY && !results.loss[token].is_nan();
                if masked && self.options.softcap.is_none() {
                    let dz = results.dlogits[row.start + column];
                    assert!(dz.to_f32() == 0.0, "{what} column {column} is masked, yet {dz:?}");
                }
            }
        }
        let expected = factors.reduce(losses);
        near(&format!("{what} mean"), results.mean as f32, expected, expected.abs().max(1.0));
        judge.finish(&what);
    }

    /// Holds what is said of the distribution to the reference, and the gradient with its cotangents.
    fn check_distribution(&self, what: &str) {
        let what = format!("{what} {} {} [{:?}]", E::DTYPE, self.isa, self.shape);
        let pool = Threads::new(2).unwrap();
        let launch = Launch { isa: self.isa, tile: self.tile, pool: &pool };
        let labels = Labels::from(self.labels.as_slice());
        let kernel =
            Kernel::with_unchecked_labels(self.options, self.shape, labels, launch).unwrap();
        let (t, vocab) = (self.shape.tokens(), self.shape.vocab());
        let [mut lse, mut lse_low, mut entropy, mut highest] = [(); 4].map(|()| vec![POISON; t]);
        let mut argmax = vec![-7; t];
        let outputs = TokenOutputs {
            lse: Some(&mut lse),
            lse_low: Some(&mut lse_low),
            ..TokenOutputs::default()
        };
        let of = DistributionOutputs {
            entropy: &mut entropy,
            highest: &mut highest,
            argmax: &mut argmax,
        };
        kernel.distribution(&self.logits, outputs, of).unwrap();
        let [g, h, q] = &self.cotangents;
        let mut dlogits = self.logits.clone();
        let saved = SavedLse { lse: &lse, lse_low: Some(&lse_low) };
        let cotangents = Cotangents { loss: Some(g), logps: Some(h), lse: None };
        let of_entropy = EntropyCotangents { entropy: &entropy, dentropy: q };
        let in_place = InOut::InPlace(&mut dlogits[..]);
        kernel.distribution_backward(in_place, saved, cotangents, of_entropy).unwrap();
        for (token, &label) in self.labels.iter().enumerate() {
            let what = format!("{what} token {token}");
            let row = token * vocab..(token + 1) * vocab;
            let z: Vec<f64> = self.logits[row.clone()].iter().map(|z| z.to_f64()).collect();
            let (forward, expected) =
                (forward(&self.options, &z, label), distribution(&self.options, &z));
            near(&format!("{what} lse"), lse[token], forward.lse, forward.lse.abs().max(1.0));
            let is_ignored = label == self.options.ignore_index;
            let of_row = if is_ignored { 0.0 } else { expected.entropy };
            near(&format!("{what} entropy"), entropy[token], of_row, of_row.max(1.0));
            near(&format!("{what} highest"), highest[token], expected.highest, 1e-12);
            assert_eq!(argmax[token], expected.argmax.map_or(-1, |at| at as i32), "{what}");
            let [g, h, q] = [g, h, q].map(|of| f64::from(of[token]));
            let of = TokenCotangents { loss: g, logps: h, lse: 0.0, entropy: q };
            let mut dz = vec![f64::NAN; vocab];
            gradient(&self.options, &z, label, forward.lse, of, &mut dz);
            // z - lse + H cancels, and is as wrong as its largest term.
            let size = g.abs() + h.abs() + q.abs() * (1.0 + of_row.abs());
            let scale = 1.0 / self.options.temperature;
            for (column, (actual, expected)) in dlogits[row].iter().zip(&dz).enumerate() {
                let (actual, error) = (actual.to_f64(), (actual.to_f64() - expected).abs());
                let bound = 2.0 * E::DTYPE.ulp(*expected) + 1e-6 * size * scale;
                assert!(
                    error <= bound || actual.is_nan() && expected.is_nan(),
                    "{what} column {column}: {actual}, expected {expected}, bound {bound:e}"
                );
            }
        }
        self.check_distribution_fused(&what, &kernel, saved, (&entropy, &highest, &argmax));
    }

    /// Holds both passes at once to what they give apart, bit for bit.
    fn check_distribution_fused(
        &self,
        what: &str,
        kernel: &Kernel<'_>,
        saved: SavedLse<'_>,
        apart: (&[f32], &[f32], &[i32]),
    ) {
        let t = self.shape.tokens();
        let [mut loss, mut lse, mut lse_low, mut entropy, mut highest] =
            [(); 5].map(|()| vec![POISON; t]);
        let mut argmax = vec![-7; t];
        let outputs = TokenOutputs {
            loss: Some(&mut loss),
            lse: Some(&mut lse),
            lse_low: Some(&mut lse_low),
            ..TokenOutputs::default()
        };
        let of = DistributionOutputs {
            entropy: &mut entropy,
            highest: &mut highest,
            argmax: &mut argmax,
        };
        let [g, ..] = &self.cotangents;
        let (mut fused, mut backward) = (self.logits.clone(), self.logits.clone());
        kernel.distribution_fused(InOut::InPlace(&mut fused), g, outputs, of).unwrap();
        same_bits(&format!("{what} entropy"), &entropy, apart.0);
        same_bits(&format!("{what} highest"), &highest, apart.1);
        assert_eq!(argmax, apart.2, "{what}");
        same_bits(&format!("{what} lse"), &lse, saved.lse);
        let cotangents = Cotangents { loss: Some(g), logps: None, lse: None };
        let nothing = vec![0.0; t];
        let of_entropy = EntropyCotangents { entropy: &entropy, dentropy: &nothing };
        let in_place = InOut::InPlace(&mut backward[..]);
        // As the pass goes that is the fastest.
        if self.options.is_tempered() || self.shape.vocab() <= 4096 {
            kernel.distribution_backward(in_place, saved, cotangents, of_entropy).unwrap();
        } else {
            kernel.backward(in_place, saved, cotangents).unwrap();
        }
        same_bits(&format!("{what} dlogits"), &fused, &backward);
    }

    /// What a loss may be wrong in proportion to: every term that it sums.
    fn scale(&self, z: &[f64], label: i64, expected: TokenForward) -> f64 {
        let label_logit =
            usize::try_from(label).ok().and_then(|y| z.get(y)).map_or(0.0, |z| z.abs());
        let scale = expected.lse.abs().max(label_logit).max(1.0);
        if self.options.z_loss == 0.0 { scale } else { scale.max(expected.loss.abs()) }
    }
}

fn same_bits<E: Element>(what: &str, a: &[E], b: &[E]) {
    let bits = |x: &E| x.to_f32().to_bits();
    assert!(a.iter().map(bits).eq(b.iter().map(bits)), "{what}");
}

fn near(what: &str, actual: f32, expected: f64, scale: f64) {
    if expected.is_nan() {
        assert!(actual.is_nan(), "{what}: {actual}, expected NaN");
    } else if expected.is_infinite() {
        assert!(f64::from(actual) == expected, "{what}: {actual}, expected {expected}");
    } else {
        let error = (f64::from(actual) - expected).abs() / scale;
        assert!(error <= 2e-6, "{what}: {actual}, expected {expected}, relative error {error:e}");
    }
}

/// Counts the gradients that are not the rounded reference, and refuses those far from it.
#[derive(Default)]
struct Judge {
    entries: usize,
    unequal: usize,
    is_f32: bool,
    /// How far f32 gradients may be from the rounded reference.
    f32_ulps: f64,
}

impl Judge {
    /// `size` is the magnitude of the row's cotangent.
    fn row<E: Element>(&mut self, what: &str, actual: &[E], expected: &[f64], size: f64) {
        // f32 has no coarser rounding to hide an exponential's own error behind.
        let ulps = if E::DTYPE == DType::F32 { self.f32_ulps } else { 1.0 };
        self.is_f32 = E::DTYPE == DType::F32;
        for (column, (&actual, &expected)) in actual.iter().zip(expected).enumerate() {
            let rounded = E::from_f64(expected);
            self.entries += 1;
            if actual == rounded || actual.to_f32().is_nan() && expected.is_nan() {
                continue;
            }
            self.unequal += 1;
            // p - 1 of a p near 1 has the error of p, of up to four units of 2^-24 where z was capped.
            let bound = (ulps * E::DTYPE.ulp(expected)).max(2f64.powi(-22) * size);
            let error = (actual.to_f64() - rounded.to_f64()).abs();
            assert!(
                error <= bound,
                "{what} column {column}: {actual:?}, expected {expected:e}, error {error:e}"
            );
        }
    }

    fn finish(&self, what: &str) {
        // One in a thousand; and four standard deviations of so many, as small cases may be unlucky.
        let expected = self.entries / 1000;
        let allowed = 4 + expected + 4 * expected.isqrt();
        assert!(
            self.is_f32 || self.unequal <= allowed,
            "{what}: {} of {} gradients differ from the rounded reference",
            self.unequal,
            self.entries
        );
    }
}

/// Runs `body` for every dtype.
macro_rules! for_each_dtype {
    ($body:ident $(, $argument:expr)*) => {
        $body::<f32>($($argument),*);
        $body::<bf16>($($argument),*);
        $body::<f16>($($argument),*);
    };
}

fn tile(time_block: usize, block_size: usize) -> Option<Tile> {
    Some(Tile::new(time_block, block_size).unwrap())
}

#[test]
fn shapes_and_tiles_on_every_instruction_set() {
    fn body<E: Element>() {
        let mut rng = common::fresh_rng("shapes");
        for (tokens, vocab) in
            [(1, 1), (1, 2), (3, 31), (2, 32), (5, 33), (4, 257), (9, 1000), (3, 4099)]
        {
            for isa in Isa::available() {
                for tile in [None, tile(1, 1), tile(2, 7), tile(3, 64), tile(100, 1 << 20)] {
                    let case = Case::<E>::new(&mut rng, tokens, vocab, 3.0);
                    Case { isa, tile, ..case }.check(&format!("{tile:?}"));
                }
            }
        }
    }
    for_each_dtype!(body);
}

#[test]
fn options_on_every_instruction_set() {
    fn body<E: Element>() {
        let mut rng = common::fresh_rng("options");
        let base = CrossEntropy::default();
        let all = [
            CrossEntropy { label_smoothing: 0.1, ..base },
            CrossEntropy { label_smoothing: 1.0, ..base },
            CrossEntropy { z_loss: 1e-4, ..base },
            CrossEntropy { softcap: Some(30.0), ..base },
            CrossEntropy {
                softcap: Some(2.0),
                z_loss: 0.1,
                label_smoothing: 0.2,
                ignore_index: 3,
                temperature: 1.3,
            },
            CrossEntropy { temperature: 0.6, ..base },
        ];
        for options in all {
            for isa in Isa::available() {
                let case = Case::<E>::new(&mut rng, 6, 1003, 4.0);
                Case { isa, options, ..case }.check(&format!("{options:?}"));
            }
        }
    }
    for_each_dtype!(body);
}

#[test]
fn distributions_on_every_instruction_set() {
    fn body<E: Element>() {
        let mut rng = common::fresh_rng("distributions");
        let base = CrossEntropy::default();
        let all = [
            base,
            CrossEntropy { temperature: 0.7, z_loss: 1e-3, ..base },
            CrossEntropy { softcap: Some(4.0), temperature: 1.5, label_smoothing: 0.1, ..base },
        ];
        for (options, isa) in
            all.into_iter().flat_map(|of| Isa::available().into_iter().map(move |isa| (of, isa)))
        {
            // Rows of less than a chunk, of a block and a bit, of several with a larger one last, and long ones.
            for vocab in [1, 3, 1003, 3000, 5003] {
                let mut case = Case::<E>::new(&mut rng, 9, vocab, 3.0);
                case.logits[vocab - 1] = E::from_f32(50.0);
                if vocab > 3 {
                    // Ties, and masked entries.
                    case.logits[vocab..][5..8].fill(E::from_f32(30.0));
                    case.logits[2 * vocab..][..700].fill(E::from_f32(f32::NEG_INFINITY));
                    case.labels[2] = vocab as i64 - 1;
                }
                case.logits[3 * vocab..4 * vocab].fill(E::from_f32(f32::NEG_INFINITY));
                case.logits[5 * vocab - 1] = E::from_f32(f32::NAN);
                (case.labels[5], case.labels[6]) = (-100, vocab as i64);
                case.cotangents[2][7] = 0.0;
                Case { isa, options, ..case }.check_distribution(&format!("{options:?}"));
            }
        }
    }
    for_each_dtype!(body);
}

/// Real vocabularies that no vector divides, and rows large enough to be streamed.
#[test]
fn real_vocabularies() {
    fn body<E: Element>(vocab: usize) {
        let mut rng = common::fresh_rng("vocabularies");
        Case::<E>::new(&mut rng, 29, vocab, 2.5).check("vocabulary");
    }
    for_each_dtype!(body, 151_643);
    for_each_dtype!(body, 50_257);
    body::<bf16>(262_144);
}

#[test]
fn ignored_tokens() {
    fn body<E: Element>() {
        let mut rng = common::fresh_rng("ignored");
        for ignored in [vec![0], vec![4], vec![1, 2], (0..5).collect::<Vec<_>>()] {
            let mut case = Case::<E>::new(&mut rng, 5, 333, 2.0);
            for &token in &ignored {
                case.labels[token] = -100;
                // Not even NaN may leak out of a row that is skipped.
                case.logits[token * 333 + 5] = E::from_f32(f32::NAN);
            }
            case.check("ignored");
            let results = case.run(1);
            for &token in &ignored {
                let row = token * 333..(token + 1) * 333;
                let zero = |dz: &E| dz.to_f32() == 0.0;
                assert!(results.dlogits[row.clone()].iter().all(zero));
                assert!(results.mean_dlogits[row].iter().all(zero));
                assert_eq!((results.loss[token], results.logps[token]), (0.0, 0.0));
            }
            if ignored.len() == 5 {
                assert_eq!(results.mean, 0.0);
            }
        }
    }
    for_each_dtype!(body);
}

#[test]
fn a_weight_of_zero_takes_its_token_out() {
    let mut rng = common::fresh_rng("weights");
    let mut case = Case::<bf16>::new(&mut rng, 3, 100, 2.0);
    case.weights[1] = 0.0;
    case.logits[150] = bf16::NAN;
    let results = case.run(2);
    assert!(results.mean.is_finite());
    assert!(results.mean_dlogits[100..200].iter().all(|dz| dz.to_f32() == 0.0));
    case.check("weight 0");
}

#[test]
fn cotangents_of_zero_take_their_token_out() {
    let mut rng = common::fresh_rng("zero cotangents");
    let mut case = Case::<bf16>::new(&mut rng, 4, 100, 2.0);
    for token in [1, 3] {
        case.cotangents.iter_mut().for_each(|cotangents| cotangents[token] = 0.0);
    }
    case.logits[150] = bf16::NAN;
    case.labels[3] = 100;
    let results = case.run(2);
    for row in [100..200, 300..400] {
        assert!(results.dlogits[row].iter().all(|dz| dz.to_bits() == 0));
    }
    case.check("cotangents 0");
}

#[test]
fn labels_out_of_range_poison_their_own_token_only() {
    fn body<E: Element>() {
        let mut rng = common::fresh_rng("labels");
        for bad in [-1, 777, i64::MAX, i64::MIN] {
            let mut case = Case::<E>::new(&mut rng, 4, 777, 2.0);
            case.labels[2] = bad;
            case.check("bad label");
            let results = case.run(2);
            assert!(results.loss[2].is_nan() && results.logps[2].is_nan());
            assert!(results.loss[1].is_finite() && results.loss[3].is_finite());
            let pool = Threads::new(1).unwrap();
            let launch = Launch { isa: case.isa, tile: None, pool: &pool };
            let labels = Labels::from(case.labels.as_slice());
            let refused = Kernel::new(case.options, case.shape, labels, launch).map(|_| ());
            assert!(refused.unwrap_err().to_string().contains(&format!("label {bad} of token 2")));
        }
    }
    for_each_dtype!(body);
}

#[test]
fn non_finite_logits() {
    fn body<E: Element>(softcap: Option<f64>) {
        let mut rng = common::fresh_rng("non-finite");
        for isa in Isa::available() {
            for column in [0, 40, 199] {
                let mut case = Case::<E>::new(&mut rng, 6, 200, 2.0);
                (case.isa, case.tile, case.options.softcap) = (isa, tile(2, 48), softcap);
                case.options.label_smoothing = if column == 0 { 0.1 } else { 0.0 };
                let set = |case: &mut Case<E>, token: usize, x: f32| {
                    case.logits[token * 200 + column] = E::from_f32(x);
                };
                set(&mut case, 0, f32::NAN);
                set(&mut case, 1, f32::INFINITY);
                set(&mut case, 2, f32::NEG_INFINITY);
                case.logits[600..800].fill(E::from_f32(f32::NEG_INFINITY));
                // All but the last column masked, and the label itself masked.
                case.logits[800..999].fill(E::from_f32(f32::NEG_INFINITY));
                case.labels[4] = 199;
                case.labels[5] = column as i64;
                set(&mut case, 5, f32::NEG_INFINITY);
                case.check(&format!("column {column} softcap {softcap:?}"));
            }
        }
    }
    for_each_dtype!(body, None);
    for_each_dtype!(body, Some(5.0));
}

/// Offsets, extreme and rising rows: the shift must follow.
#[test]
fn large_logits() {
    fn body<E: Element>() {
        let mut rng = common::fresh_rng("large");
        for isa in Isa::available() {
            let mut offset = Case::<E>::new(&mut rng, 4, 999, 1.0);
            for z in &mut offset.logits {
                *z = E::from_f64(z.to_f64() + 1e4);
            }
            Case { isa, ..offset }.check("offset by 1e4");

            let mut wide = Case::<E>::new(&mut rng, 4, 5003, 1.0);
            for z in &mut wide.logits {
                *z = E::from_f64(rng.random_range(-640.0..=640.0));
            }
            Case { isa, tile: tile(2, 100), ..wide }.check("|z| to 640");

            let mut rising = Case::<E>::new(&mut rng, 2, 5003, 1.0);
            for (i, z) in rising.logits.iter_mut().enumerate() {
                *z = E::from_f64((i % 5003) as f64 * 0.05 - 30.0);
            }
            Case { isa, tile: tile(1, 64), ..rising }.check("rising");

            let mut mask = Case::<E>::new(&mut rng, 2, 501, 1.0);
            for z in mask.logits.iter_mut().step_by(3) {
                *z = E::from_f32(-6e4);
            }
            mask.labels = vec![1, 2];
            Case { isa, ..mask }.check("masked by a large negative number");
        }
    }
    for_each_dtype!(body);
}

fn all_bits<E: Element>(results: &Results<E>) -> (Vec<u32>, u64) {
    let floats = [&results.loss, &results.logps, &results.lse];
    let elements = [&results.dlogits, &results.mean_dlogits];
    let floats = floats.into_iter().flatten().map(|x| x.to_bits());
    let elements = elements.into_iter().flatten().map(|x| x.to_f32().to_bits());
    (floats.chain(elements).collect(), results.mean.to_bits())
}

#[test]
fn results_do_not_depend_on_threads_or_on_the_run() {
    fn body<E: Element>() {
        let mut rng = common::fresh_rng("threads");
        let case = Case { tile: tile(3, 500), ..Case::<E>::new(&mut rng, 37, 4099, 3.0) };
        let one = all_bits(&case.run(1));
        for threads in [1, 2, 3, 8] {
            assert!(all_bits(&case.run(threads)) == one, "{threads} threads");
        }
    }
    for_each_dtype!(body);
}

/// A row gives the same bits wherever it lies in memory and whichever rows surround it.
#[test]
fn results_do_not_depend_on_alignment_or_time_block() {
    fn body<E: Element>() {
        let mut rng = common::fresh_rng("alignment");
        let vocab = 2051;
        let whole = Case { tile: tile(4, 700), ..Case::<E>::new(&mut rng, 9, vocab, 3.0) };
        let results = whole.run(2);
        for token in 0..9 {
            let row = token * vocab..(token + 1) * vocab;
            let alone = Case {
                shape: LogitsShape::new(1, vocab).unwrap(),
                logits: whole.logits[row.clone()].to_vec(),
                labels: vec![whole.labels[token]],
                cotangents: [0, 1, 2].map(|i| vec![whole.cotangents[i][token]]),
                weights: vec![whole.weights[token]],
                tile: tile(1, 700),
                ..whole
            };
            let alone = alone.run(1);
            assert_eq!(alone.loss[0].to_bits(), results.loss[token].to_bits());
            assert_eq!(alone.lse[0].to_bits(), results.lse[token].to_bits());
            same_bits("row alone", &alone.dlogits, &results.dlogits[row]);
        }
    }
    for_each_dtype!(body);
}

/// Equal tokens get equal bits in any batch, whether threads share a row or have many.
#[test]
fn results_do_not_depend_on_the_number_of_tokens() {
    fn body<E: Element>(vocab: usize) {
        let mut rng = common::fresh_rng("batches");
        let one = Case::<E>::new(&mut rng, 1, vocab, 3.0);
        let alone = one.run(1);
        for tokens in [1, 7, 64, 500] {
            let many = Case {
                shape: LogitsShape::new(tokens, vocab).unwrap(),
                logits: one.logits.repeat(tokens),
                labels: one.labels.repeat(tokens),
                cotangents: [0, 1, 2].map(|i| one.cotangents[i].repeat(tokens)),
                weights: one.weights.repeat(tokens),
                ..one
            };
            let results = many.run(3);
            for token in [0, tokens / 2, tokens - 1] {
                let what = format!("{vocab} columns, token {token} of {tokens}");
                same_bits(&what, &results.loss[token..=token], &alone.loss);
                same_bits(&what, &results.lse[token..=token], &alone.lse);
                let row = token * vocab..(token + 1) * vocab;
                same_bits(&what, &results.dlogits[row], &alone.dlogits);
            }
        }
    }
    for vocab in [10, 257, 20_003] {
        body::<bf16>(vocab);
    }
    body::<f32>(257);
    body::<f32>(9001);
}

/// Small vocabularies, and few rows of a large one.
#[test]
fn small_vocabularies_and_few_rows() {
    fn body<E: Element>() {
        let mut rng = common::fresh_rng("small vocabularies");
        let base = CrossEntropy::default();
        let all = [
            base,
            CrossEntropy { softcap: Some(30.0), ..base },
            CrossEntropy { softcap: Some(5.0), label_smoothing: 0.1, z_loss: 1e-3, ..base },
            CrossEntropy { label_smoothing: 0.1, ..base },
        ];
        for vocab in [2, 3, 10, 257, 2048, 4096] {
            for options in all {
                let tokens = 1 + 20_000 / (vocab + 100);
                // Of few columns one soon has all of the probability, as far as float64 tells.
                let scales = if vocab < 100 { 2 } else { 3 };
                let scale = [1.0, 8.0, 45.0][rng.random_range(0..scales)];
                let mut case = Case::<E>::new(&mut rng, tokens, vocab, scale);
                // In sums of two opposite terms a unit of either is many of theirs.
                case.cotangents[1].fill(0.0);
                Case { options, ..case }.check(&format!("std {scale} {options:?}"));
            }
        }
        for tokens in [1, 2, 64] {
            let case =
                Case::<E>::new(&mut rng, tokens, if tokens == 64 { 9001 } else { 151_936 }, 3.0);
            case.check("few rows");
        }
    }
    for_each_dtype!(body);
}

/// Both schedules must agree to the bit, since users switch between them without noticing.
#[test]
fn the_fused_gradient_is_the_recomputed_one() {
    fn body<E: Element>() {
        let mut rng = common::fresh_rng("schedules");
        let mut case = Case::<E>::new(&mut rng, 8, 3001, 3.0);
        let labels = Labels::from(case.labels.as_slice());
        let weights = case.weights.clone();
        let factors =
            TokenFactors::new(case.options, Reduction::Mean, labels, Some(&weights)).unwrap();
        // A cotangent that f32 holds exactly, so that both schedules start from the same number.
        let factors: Vec<f32> = (0..8).map(|token| factors.of(token) as f32).collect();
        case.weights = factors.clone();
        case.cotangents = [factors, vec![0.0; 8], vec![0.0; 8]];
        let pool = Threads::new(2).unwrap();
        let launch = Launch { isa: case.isa, tile: case.tile, pool: &pool };
        let kernel =
            Kernel::new(case.options, case.shape, case.labels.as_slice().into(), launch).unwrap();
        let mut fused = vec![E::from_f32(POISON); case.logits.len()];
        let reduce =
            Reduce { reduction: Reduction::Sum, weights: Some(&case.weights), cotangent: 1.0 };
        let logits = InOut::apart(&case.logits, &mut fused);
        kernel.value_and_grad(logits, reduce, TokenOutputs::default()).unwrap();
        let results = case.run(2);
        same_bits("schedules", &fused, &results.dlogits);

        let [mut loss, mut lse] = [vec![POISON; 8], vec![POISON; 8]];
        let mut in_place = case.logits.clone();
        for logits in
            [InOut::apart(&case.logits, &mut fused), InOut::InPlace(in_place.as_mut_slice())]
        {
            let outputs = TokenOutputs {
                loss: Some(&mut loss),
                lse: Some(&mut lse),
                ..TokenOutputs::default()
            };
            kernel.fused(logits, &case.cotangents[0], outputs).unwrap();
            same_bits("fused loss", &loss, &results.loss);
            same_bits("fused lse", &lse, &results.lse);
        }
        same_bits("fused dlogits", &fused, &results.dlogits);
        same_bits("fused dlogits in place", &in_place, &results.dlogits);
    }
    for_each_dtype!(body);
}

/// Ignored tokens, tokens without a cotangent, and others, with and without `zero_masked`.
#[test]
fn tokens_that_take_no_part() {
    fn body<E: Element>() {
        const V: usize = 333;
        let mut rng = common::fresh_rng("masked");
        let mut case = Case { tile: tile(2, 100), ..Case::<E>::new(&mut rng, 5, V, 2.0) };
        case.labels[1] = -100;
        case.labels[3] = V as i64;
        // Token 2 has no cotangent, token 4 neither, and NaN in its row, as ignored token 1 has.
        let dloss = [0.5, 0.25, 0.0, 1.0, -0.0];
        for token in [1, 4] {
            case.logits[token * V..(token + 1) * V].fill(E::from_f32(f32::NAN));
        }
        let real = case.run(1);
        let pool = Threads::new(2).unwrap();
        let launch = Launch { isa: case.isa, tile: case.tile, pool: &pool };
        let labels = Labels::from(case.labels.as_slice());
        let kernel =
            Kernel::with_unchecked_labels(case.options, case.shape, labels, launch).unwrap();
        let mut dlogits = vec![E::from_f32(POISON); case.logits.len()];
        for (fused, zero_masked) in [(false, false), (false, true), (true, false), (true, true)] {
            let what = format!("fused {fused}, zero_masked {zero_masked}");
            let mut outputs = [(); 4].map(|()| vec![POISON; 5]);
            let [loss, logps, lse, lse_low] = outputs.each_mut().map(|x| Some(x.as_mut_slice()));
            let asked = TokenOutputs { loss, logps, lse, lse_low, zero_masked };
            if fused {
                dlogits.fill(E::from_f32(POISON));
                kernel.fused(InOut::apart(&case.logits, &mut dlogits), &dloss, asked).unwrap();
            } else {
                kernel.forward(&case.logits, asked).unwrap();
            }
            let [loss, logps, lse, lse_low] = outputs;
            for token in 0..5 {
                let is_masked = token == 1 || fused && dloss[token] == 0.0;
                if is_masked && zero_masked {
                    let all = [&loss, &logps, &lse, &lse_low].map(|x| x[token].to_bits());
                    assert_eq!(all, [0; 4], "{what}, token {token}");
                } else {
                    let what = format!("{what}, token {token}");
                    same_bits(&what, &[loss[token]], &[real.loss[token]]);
                    same_bits(&what, &[logps[token]], &[real.logps[token]]);
                    same_bits(&what, &[lse[token]], &[real.lse[token]]);
                }
                let mut row = dlogits[token * V..(token + 1) * V].iter().map(|dz| dz.to_f32());
                if fused {
                    let right: fn(f32) -> bool = match token {
                        0 => |dz| dz != 0.0 && dz.is_finite(),
                        3 => f32::is_nan,
                        _ => |dz| dz.to_bits() == 0,
                    };
                    assert!(row.all(right), "{what}, token {token}");
                }
            }
        }
    }
    for_each_dtype!(body);
}

/// Also one whose payload is all ones, which rounding to bf16 by an addition would carry out of.
#[test]
fn a_cotangent_that_is_not_a_number() {
    fn body<E: Element>() {
        let mut rng = common::fresh_rng("cotangent");
        let mut case = Case::<E>::new(&mut rng, 3, 200, 2.0);
        for isa in Isa::available() {
            case.isa = isa;
            for bits in [0x7fc0_0000, 0x7fff_ffff, 0xffff_ffff] {
                for which in 0..3 {
                    let right = case.cotangents[which][1];
                    case.cotangents[which][1] = f32::from_bits(bits);
                    let results = case.run(1);
                    assert!(results.dlogits[200..400].iter().all(|dz| dz.to_f32().is_nan()));
                    assert!(results.dlogits[..200].iter().all(|dz| dz.to_f32().is_finite()));
                    case.cotangents[which][1] = right;
                }
            }
        }
    }
    for_each_dtype!(body);
}

#[test]
fn empty_problems_and_wrong_lengths() {
    let pool = Threads::new(1).unwrap();
    let launch = Launch { isa: Isa::detect(), tile: None, pool: &pool };
    let labels: [i32; 0] = [];
    let none = LogitsShape::new(0, 5).unwrap();
    let kernel = Kernel::new(CrossEntropy::default(), none, labels.as_slice().into(), launch);
    let reduce = Reduce { reduction: Reduction::Mean, weights: None, cotangent: 1.0 };
    let empty = InOut::<f32>::apart(&[], &mut []);
    let value = kernel.unwrap().value_and_grad(empty, reduce, TokenOutputs::default());
    assert_eq!(value, Ok(0.0));

    let labels = [1_i32, 2];
    let shape = LogitsShape::new(2, 5).unwrap();
    let kernel =
        Kernel::new(CrossEntropy::default(), shape, labels.as_slice().into(), launch).unwrap();
    let refuse = |result: Result<(), xentile::Error>| result.unwrap_err().to_string();
    assert_eq!(
        refuse(kernel.forward(&[0.0_f32; 9], TokenOutputs::default())),
        "logits holds 9 elements; [T, V] needs 10"
    );
    let mut loss = [0.0; 3];
    let outputs = TokenOutputs { loss: Some(&mut loss), ..Default::default() };
    assert_eq!(
        refuse(kernel.forward(&[0.0_f32; 10], outputs)),
        "loss holds 3 elements; [T] needs 2"
    );
    let mut dlogits = [0.0_f32; 10];
    let saved = SavedLse { lse: &[0.0; 2], lse_low: None };
    let cotangents = Cotangents { logps: Some(&[1.0]), ..Default::default() };
    let result = kernel.backward(InOut::apart(&[0.0; 10], &mut dlogits), saved, cotangents);
    assert_eq!(refuse(result), "logps cotangents holds 1 elements; [T] needs 2");
    let result = kernel.fused(InOut::InPlace(&mut dlogits), &[1.0; 3], TokenOutputs::default());
    assert_eq!(refuse(result), "dloss holds 3 elements; [T] needs 2");
    let mut short = [0.0_f32; 9];
    let logits = InOut::apart(&dlogits, &mut short);
    let result = kernel.fused(logits, &[1.0; 2], TokenOutputs::default());
    assert_eq!(refuse(result), "dlogits holds 9 elements; [T, V] needs 10");
    fn describe<E: Debug>(e: E) -> String {
        format!("{e:?}")
    }
    let bad = CrossEntropy { softcap: Some(-1.0), ..Default::default() };
    let refused = Kernel::new(bad, shape, labels.as_slice().into(), launch).map(|_| ());
    assert!(describe(refused.unwrap_err()).contains("softcap"));
}
