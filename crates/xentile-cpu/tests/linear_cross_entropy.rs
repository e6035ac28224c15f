//! Linear cross-entropy against the f64 reference, on fresh random input, with outputs and scratch
//! poisoned first.

use half::{bf16, f16};
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use xentile::cross_entropy::CrossEntropy;
use xentile::cross_entropy::reference::{TokenCotangents, TokenForward};
use xentile::linear_cross_entropy::reference::{
    Factors, Gradients as Sums, gradients, map_rows, outputs, pull_back,
};
use xentile::linear_cross_entropy::{LinearShape, Operands as Checked, VocabAxis};
use xentile::{DType, Element, Labels, Tile};
use xentile_cpu::cross_entropy::{Cotangents, Launch, SavedLse, TokenOutputs};
use xentile_cpu::linear_cross_entropy::{Gradients, Linear, Operands, default_tile, scratch_bytes};
use xentile_cpu::{Isa, Threads};

mod common;

const POISON: u8 = 0xa5;

/// How gradients are made: with logits made again, in one pass, and in two with logits kept.
const WAYS: [&str; 3] = ["again", "fused", "kept"];

struct Case<E> {
    shape: LinearShape,
    options: CrossEntropy,
    hidden: Vec<E>,
    weight: Vec<E>,
    bias: Option<Vec<E>>,
    labels: Vec<i64>,
    cotangents: [Vec<f32>; 3],
    isa: Isa,
    columns: usize,
    rows: Option<usize>,
    /// Beyond the least, in bytes.
    room: usize,
}

/// What a pass gives.
#[derive(Clone, Debug, Default)]
struct Found {
    tokenwise: [Vec<f32>; 4],
    hidden: Vec<f32>,
    weight: Vec<f32>,
    bias: Vec<f32>,
}

impl Found {
    fn bits(&self) -> Vec<Vec<u32>> {
        let [loss, logps, lse, low] = &self.tokenwise;
        [loss, logps, lse, low, &self.hidden, &self.weight, &self.bias]
            .map(|numbers| numbers.iter().map(|x| x.to_bits()).collect())
            .to_vec()
    }
}

/// What float64 makes of a [`Case`], however its passes are cut.
struct Exact {
    tokens: Vec<TokenForward>,
    /// What a row of logits is about, and so what a rounding in f32 is worth.
    sizes: Vec<f64>,
    /// Gradients and what their errors are held against, of the loss alone.
    fused: [Sums; 2],
    /// The same of all three outputs.
    others: [Sums; 2],
}

fn widened<E: Element>(elements: &[E]) -> Vec<f32> {
    elements.iter().map(|x| x.to_f32()).collect()
}

impl<E: Element> Case<E> {
    fn new(rng: &mut ChaCha8Rng, [tokens, width, vocab]: [usize; 3], axis: VocabAxis) -> Self {
        let shape =
            LinearShape::new([tokens, width], axis.weight(vocab, width), Some(axis)).unwrap();
        let mut numbers = |count: usize, scale: f64| -> Vec<E> {
            (0..count).map(|_| E::from_f64(rng.random_range(-scale..scale))).collect()
        };
        let (hidden, bias) = (numbers(tokens * width, 2.0), numbers(vocab, 1.0));
        let weight = numbers(vocab * width, 4.0 / (width as f64).sqrt());
        let mut tokenwise = || (0..tokens).map(|_| rng.random_range(-1.0..1.0)).collect();
        let cotangents = [tokenwise(), tokenwise(), tokenwise()];
        let labels = (0..tokens).map(|_| rng.random_range(0..vocab as i64)).collect();
        Self {
            shape,
            options: CrossEntropy::default(),
            hidden,
            weight,
            bias: Some(bias),
            labels,
            cotangents,
            isa: Isa::detect(),
            columns: 1024,
            rows: None,
            room: 0,
        }
    }

    /// Outputs and gradients of each of [`WAYS`].
    fn run(&self, threads: usize) -> [Found; 3] {
        let pool = Threads::new(threads).unwrap();
        let tile = self.rows.map(|rows| Tile::new(rows, 1).unwrap());
        let launch = Launch { isa: self.isa, tile, pool: &pool };
        let labels = Labels::from(self.labels.as_slice());
        let linear = Linear::new(self.options, self.shape, labels, launch, self.columns).unwrap();
        let bias = self.bias.as_deref().map(widened);
        let operands =
            Operands { hidden: &self.hidden[..], weight: &self.weight, bias: bias.as_deref() };
        let scratch = |makes_gradients| {
            let bytes = scratch_bytes(self.shape, E::DTYPE, self.columns, makes_gradients);
            // An odd one, since nobody says that scratch is aligned.
            vec![POISON; bytes + if makes_gradients { self.room } else { 0 } + 1]
        };
        let (tokens, poison) = (self.shape.tokens(), E::from_f32(7.25e3));
        WAYS.map(|way| {
            let mut tokenwise = [(); 4].map(|()| vec![7.25e3_f32; tokens]);
            let mut dhidden = vec![poison; self.hidden.len()];
            let mut dweight = vec![poison; self.weight.len()];
            let mut dbias = bias.clone().unwrap_or_default();
            let [loss, logps, lse, lse_low] = tokenwise.each_mut().map(|x| Some(&mut x[..]));
            let outputs = TokenOutputs { loss, logps, lse, lse_low, zero_masked: false };
            let gradients = Gradients {
                hidden: &mut dhidden,
                weight: &mut dweight,
                bias: bias.as_ref().map(|_| &mut dbias[..]),
            };
            let mut for_gradients = scratch(true);
            let [g, h, k] = &self.cotangents;
            let in_gradients = &mut for_gradients[1..];
            match way {
                "fused" => linear.fused(operands, g, outputs, gradients, in_gradients).unwrap(),
                "kept" => linear.keep(operands, outputs, gradients.weight, in_gradients).unwrap(),
                _ => linear.forward(operands, outputs, &mut scratch(false)[1..]).unwrap(),
            }
            let gradients = Gradients {
                hidden: &mut dhidden,
                weight: &mut dweight,
                bias: bias.as_ref().map(|_| &mut dbias[..]),
            };
            let saved = SavedLse { lse: &tokenwise[2], lse_low: Some(&tokenwise[3]) };
            let cotangents = Cotangents { loss: Some(g), logps: Some(h), lse: Some(k) };
            match way {
                "fused" => {}
                "kept" => {
                    linear.resume(operands, saved, cotangents, gradients, in_gradients).unwrap();
                }
                _ => linear.backward(operands, saved, cotangents, gradients, in_gradients).unwrap(),
            }
            let [hidden, weight] = [&dhidden, &dweight].map(|x| widened(x));
            Found { tokenwise, hidden, weight, bias: dbias }
        })
    }

    /// The same with logits `factor` times as wide.
    fn spread(mut self, factor: f64) -> Self {
        self.weight.iter_mut().for_each(|w| *w = E::from_f64(w.to_f64() * factor));
        self
    }

    /// The same with logits of `height` in a column of each token that is not its label.
    fn peaked(mut self, height: f64) -> Self {
        let (width, vocab) = (self.shape.width(), self.shape.vocab());
        let step = match self.shape.vocab_axis() {
            VocabAxis::First => 1,
            VocabAxis::Last => vocab,
        };
        for (token, hidden) in self.hidden.chunks_exact_mut(width).enumerate() {
            let column = (self.labels[token] as usize + 1 + token % (vocab - 1)) % vocab;
            let start = if step == 1 { column * width } else { column };
            let weights: Vec<f64> =
                self.weight[start..].iter().step_by(step).take(width).map(|w| w.to_f64()).collect();
            let square: f64 = weights.iter().map(|w| w * w).sum();
            for (x, w) in hidden.iter_mut().zip(weights) {
                *x = E::from_f64(x.to_f64() + height * w / square);
            }
        }
        self
    }

    fn operands(&self) -> Checked<'_, E> {
        let labels = Labels::from(self.labels.as_slice());
        let bias = self.bias.as_deref();
        Checked::new(&self.options, self.shape, &self.hidden, &self.weight, bias, labels).unwrap()
    }

    fn exact(&self) -> Exact {
        let checked = self.operands();
        let tokens = outputs(&self.options, &checked);
        let sizes =
            map_rows(&checked, |_, logits| logits.iter().fold(1.0, |a: f64, z| a.max(z.abs())));
        let [fused, others] = [true, false].map(|is_fused| {
            let cotangents = |token: usize| {
                let [g, h, k] = self.cotangents.each_ref().map(|x| f64::from(x[token]));
                let others = if is_fused { [0.0; 2] } else { [h, k] };
                TokenCotangents { loss: g, logps: others[0], lse: others[1], entropy: 0.0 }
            };
            let exact = gradients(&self.options, &checked, &tokens, cotangents);
            let size = pull_back(&checked, Factors::Magnitudes, |token, logits, bound| {
                let [p, flat] = self.magnitudes(token, tokens[token].lse, cotangents(token));
                for (bound, z) in bound.iter_mut().zip(logits) {
                    let z = self.options.cap(*z);
                    *bound = p * (z - tokens[token].lse).exp() + flat;
                }
                if let Ok(label) = usize::try_from(self.labels[token])
                    && label < bound.len()
                {
                    bound[label] += p;
                }
            });
            [exact, size]
        });
        Exact { tokens, sizes, fused, others }
    }

    fn check(&self, what: &str) {
        self.hold(&self.exact(), what);
    }

    /// Holds every way against float64.
    fn hold(&self, expected: &Exact, what: &str) {
        let all = self.run(2);
        for (way, found) in WAYS.into_iter().zip(&all) {
            let what = format!("{what} {} {} {:?} {way}", E::DTYPE, self.isa, self.shape);
            self.check_outputs(&what, expected, found);
            let [exact, size] = if way == "fused" { &expected.fused } else { &expected.others };
            // The softmax and its gradient are rounded in 16 bits, and so is what the first sums to.
            let units = match E::DTYPE {
                DType::F32 => 2e-4,
                _ => 2.0 * E::DTYPE.ulp(1.0),
            };
            for (name, actual, exact, size) in [
                ("dhidden", &found.hidden, &exact.hidden, &size.hidden),
                ("dweight", &found.weight, &exact.weight, &size.weight),
                ("dbias", &found.bias, &exact.bias, &size.bias),
            ] {
                if name == "dbias" && self.bias.is_none() {
                    continue;
                }
                for (i, (&actual, (&exact, &size))) in
                    actual.iter().zip(exact.iter().zip(size)).enumerate()
                {
                    let bound = units * size + 2.0 * E::DTYPE.ulp(exact) + 1e-30;
                    let error = (f64::from(actual) - exact).abs();
                    assert!(
                        error <= bound,
                        "{what}: {name} {i} is {actual}, exactly {exact}: off by {error:e}, more \
                         than {bound:e}"
                    );
                }
            }
        }
        // Threads change no bit.
        let again = self.run(3);
        assert!(all.each_ref().map(Found::bits) == again.map(|found| found.bits()), "{what}");
    }

    /// What a gradient is made of, times the probability and by itself.
    fn magnitudes(&self, token: usize, lse: f64, of: TokenCotangents) -> [f64; 2] {
        if self.labels[token] == self.options.ignore_index {
            return [0.0; 2];
        }
        let g = of.loss.abs();
        let p = g * (1.0 + 2.0 * self.options.z_loss * lse.abs()) + of.logps.abs() + of.lse.abs();
        [p, g * self.options.label_smoothing / self.shape.vocab() as f64]
    }

    fn check_outputs(&self, what: &str, expected: &Exact, found: &Found) {
        for (token, (expected, size)) in expected.tokens.iter().zip(&expected.sizes).enumerate() {
            let exact = [expected.loss, expected.logps, expected.lse];
            let names = ["loss", "logps", "lse"];
            for ((name, exact), actual) in names.into_iter().zip(exact).zip(&found.tokenwise) {
                let bound = 16.0 * DType::F32.ulp(*size) * (1.0 + self.options.z_loss * size);
                let error = (f64::from(actual[token]) - exact).abs();
                assert!(
                    error <= bound,
                    "{what}: {name} {token} is {}, exactly {exact}: more than {bound:e} off",
                    actual[token]
                );
            }
        }
    }
}

/// Runs `body` for every dtype.
macro_rules! for_each_dtype {
    ($body:ident, $what:literal) => {
        let mut rng = common::fresh_rng($what);
        $body::<f32>(&mut rng);
        $body::<bf16>(&mut rng);
        $body::<f16>(&mut rng);
    };
}

fn some_options() -> CrossEntropy {
    CrossEntropy {
        label_smoothing: 0.1,
        z_loss: 1e-3,
        softcap: Some(4.0),
        ignore_index: 0,
        temperature: 1.0,
    }
}

#[test]
fn values_and_gradients_of_awkward_shapes() {
    fn body<E: Element>(rng: &mut ChaCha8Rng) {
        for shape in [[1, 1, 1], [1, 5, 3], [3, 1, 40], [37, 19, 61], [67, 21, 257], [9, 64, 100]] {
            for axis in [VocabAxis::First, VocabAxis::Last] {
                let mut case = Case::<E>::new(rng, shape, axis);
                let exact = case.exact();
                case.hold(&exact, "plain");
                for (columns, room, rows) in
                    [(32, 0, None), (50, 999, Some(7)), (16, 1 << 16, None)]
                {
                    (case.columns, case.room, case.rows) = (columns, room, rows);
                    case.hold(&exact, "in column blocks");
                }
                case.options = some_options();
                case.check("with options");
                case.options.softcap = None;
                case.bias = None;
                case.check("without bias");
            }
        }
    }
    for_each_dtype!(body, "awkward shapes");
}

/// The norm of what `found` is off by, in units of what rounding alone takes.
fn roundings<E: Element>(found: &[f32], exact: &[f64]) -> f64 {
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    let pairs = || found.iter().zip(exact);
    norm(&mut pairs().map(|(&x, y)| f64::from(x) - y))
        / norm(&mut pairs().map(|(_, &y)| E::from_f64(y).to_f64() - y))
}

#[test]
fn logits_of_any_spread() {
    fn body<E: Element>(rng: &mut ChaCha8Rng) {
        let shape = [67, 48, 601];
        // Each with one axis and one set of options, which the seed chooses.
        let axis =
            |rng: &mut ChaCha8Rng| [VocabAxis::First, VocabAxis::Last][rng.random_range(0..2)];
        // Those of a case are about 2.7 wide.
        for std in common::some_where_slow(rng, &[0.5, 8.0, 64.0], 1) {
            let spread = std / 2.7;
            let axis = axis(rng);
            let mut case = Case::<E>::new(rng, shape, axis).spread(spread);
            case.columns = 100;
            case.room = 50_000;
            let what = format!("{spread:.2} times as wide, {axis:?}");
            let exact = case.exact();
            case.hold(&exact, &what);
            let cotangents = case.cotangents.clone();
            // One for all, as of a mean, since gradients are rounded relative to themselves.
            case.cotangents = [vec![0.25; shape[0]], vec![0.0; shape[0]], vec![0.0; shape[0]]];
            let [of, _] = case.exact().fused;
            for (way, found) in WAYS.iter().zip(case.run(2)) {
                let of_hidden = roundings::<E>(&found.hidden, &of.hidden);
                let of_weight = roundings::<E>(&found.weight, &of.weight);
                let what = format!("{} {what} {way}: {of_hidden} {of_weight}", E::DTYPE);
                assert!(E::DTYPE == DType::F32 || of_hidden < 1.45 && of_weight < 1.85, "{what}");
            }
            case.cotangents = cotangents;
            case.options = [
                some_options(),
                CrossEntropy { softcap: None, ..some_options() },
                CrossEntropy { softcap: Some(30.0), ..CrossEntropy::default() },
                CrossEntropy { temperature: 1.25, ..some_options() },
            ][rng.random_range(0..4)];
            case.check(&what);
        }
        for height in common::some_where_slow(rng, &[38.0, 300.0], 1) {
            let axis = axis(rng);
            let mut case = Case::<E>::new(rng, shape, axis).peaked(height);
            (case.columns, case.room) = (100, 50_000);
            case.check("peaked");
        }
    }
    for_each_dtype!(body, "spreads");
}

#[test]
fn a_column_that_is_masked_has_no_gradient() {
    fn body<E: Element>(rng: &mut ChaCha8Rng) {
        let mut case = Case::<E>::new(rng, [20, 8, 77], VocabAxis::First);
        case.columns = 30;
        for smoothing in [0.0, 0.1] {
            case.options.label_smoothing = smoothing;
            for masked in [5, 76] {
                case.bias.as_mut().unwrap()[masked] = E::from_f32(f32::NEG_INFINITY);
                case.labels.iter_mut().for_each(|label| *label %= 5);
            }
            for found in case.run(2) {
                for masked in [5, 76] {
                    assert!(found.weight[masked * 8..][..8].iter().all(|&x| x == 0.0));
                    assert_eq!(found.bias[masked], 0.0);
                }
                assert!(found.hidden.iter().all(|x| x.is_finite()));
            }
        }
    }
    for_each_dtype!(body, "masked columns");
}

#[test]
fn every_instruction_set() {
    fn body<E: Element>(rng: &mut ChaCha8Rng) {
        for isa in Isa::available() {
            let mut case = Case::<E>::new(rng, [70, 40, 333], VocabAxis::First);
            (case.isa, case.columns) = (isa, 100);
            case.check("instruction set");
        }
    }
    for_each_dtype!(body, "instruction sets");
}

#[test]
fn bits_do_not_depend_on_tokens_a_task() {
    fn body<E: Element>(rng: &mut ChaCha8Rng) {
        let mut case = Case::<E>::new(rng, [301, 30, 500], VocabAxis::First);
        let tuned = default_tile::<E>(500).time_block();
        // The seed chooses two beside what threads have by themselves.
        let others = [Some(tuned), Some(1), Some(64), Some(1000)];
        let others: [_; 2] = std::array::from_fn(|half| others[2 * half + rng.random_range(0..2)]);
        let mut bits = [None, others[0], others[1]].map(|rows| {
            case.rows = rows;
            case.run(2).map(|found| found.bits())
        });
        let first = std::mem::take(&mut bits[0]);
        assert!(bits[1..].iter().all(|other| *other == first));
    }
    for_each_dtype!(body, "tokens of a task");
}

#[test]
fn logits_may_be_kept_anywhere() {
    fn body<E: Element>(rng: &mut ChaCha8Rng) {
        let mut case = Case::<E>::new(rng, [90, 30, 500], VocabAxis::First);
        case.columns = 64;
        // What a fused pass knows of.
        case.cotangents[1..].iter_mut().for_each(|cotangent| cotangent.fill(0.0));
        let mut keeping = |room| {
            case.room = room;
            case.check("kept");
            let [_, fused, kept] = case.run(2).map(|found| found.bits());
            assert_eq!(fused, kept);
            fused
        };
        let least = keeping(0);
        for room in [10_000, 50_000, 1 << 20] {
            // In 16 bits what is kept has been rounded.
            assert!(keeping(room) == least || E::DTYPE != DType::F32);
        }
    }
    for_each_dtype!(body, "kept logits");
}

#[test]
fn tokens_that_take_no_part() {
    fn body<E: Element>(rng: &mut ChaCha8Rng) {
        let mut case = Case::<E>::new(rng, [20, 8, 77], VocabAxis::First);
        case.columns = 30;
        for token in 0..20 {
            if token % 2 == 0 {
                case.labels[token] = -100;
            } else if token % 3 == 0 {
                case.cotangents.iter_mut().for_each(|cotangent| cotangent[token] = 0.0);
            }
        }
        case.check("ignored");
        for found in &case.run(2) {
            for token in (0..20).filter(|token| token % 2 == 0 || token % 3 == 0) {
                assert!(found.hidden[token * 8..][..8].iter().all(|&x| x == 0.0));
            }
        }
        case.labels.fill(-100);
        let everything_is_0 = |found: &Found| {
            [&found.hidden, &found.weight, &found.bias]
                .into_iter()
                .all(|gradient| gradient.iter().all(|&x| x == 0.0))
        };
        assert!(case.run(2).iter().all(everything_is_0));
    }
    for_each_dtype!(body, "masked tokens");
}

#[test]
fn a_label_out_of_range_spoils_its_own_token() {
    fn body<E: Element>(rng: &mut ChaCha8Rng) {
        let mut case = Case::<E>::new(rng, [6, 8, 40], VocabAxis::First);
        case.columns = 16;
        let good = case.run(2);
        (case.labels[1], case.labels[4]) = (40, -7);
        for (found, good) in case.run(2).iter().zip(&good) {
            for token in 0..6 {
                let spoilt = token == 1 || token == 4;
                let [loss, logps, lse, _] = &found.tokenwise;
                assert_eq!(loss[token].is_nan() && logps[token].is_nan(), spoilt);
                let (lse, good_lse) = (lse[token], good.tokenwise[2][token]);
                // The label's exponential is summed apart, where there is a label.
                let allowed = if spoilt { 2e-6 * good_lse.abs().max(1.0) } else { 0.0 };
                assert!((lse - good_lse).abs() <= allowed, "{lse} is not {good_lse}");
                let row = token * 8..token * 8 + 8;
                assert_eq!(found.hidden[row.clone()].iter().all(|x| x.is_nan()), spoilt);
                assert_eq!(found.hidden[row.clone()] == good.hidden[row], !spoilt);
            }
            assert!(found.weight.iter().all(|x| x.is_nan()));
        }
    }
    for_each_dtype!(body, "labels out of range");
}

#[test]
fn nan_stays_in_its_token_or_column() {
    fn body<E: Element>(rng: &mut ChaCha8Rng) {
        let mut case = Case::<E>::new(rng, [9, 8, 77], VocabAxis::First);
        case.columns = 30;
        let (nan, masked) = (E::from_f32(f32::NAN), 7);
        case.labels[2] = -100;
        case.cotangents.iter_mut().for_each(|cotangent| cotangent[masked] = 0.0);
        let good = case.run(2);
        let clean = (case.hidden.clone(), case.weight.clone());
        // In tokens that take no part.
        (case.hidden[2 * 8 + 3], case.hidden[masked * 8]) = (nan, E::from_f32(f32::INFINITY));
        for (found, good) in case.run(2).iter().zip(&good) {
            assert_eq!(found.tokenwise[0][..masked], good.tokenwise[0][..masked]);
            let gradients = |of: &Found| [of.hidden.clone(), of.weight.clone(), of.bias.clone()];
            assert_eq!(gradients(found), gradients(good));
        }
        // In a token that counts; and one whose logits are beyond f32, where the dtype reaches so far.
        let huge = if E::DTYPE == DType::F16 { f32::INFINITY } else { 3e38 };
        for bad in [nan, E::from_f32(huge)] {
            (case.hidden, case.weight) = clean.clone();
            case.hidden[5 * 8..6 * 8].fill(bad);
            for (found, good) in case.run(2).iter().zip(&good) {
                for token in 0..9 {
                    let row = token * 8..(token + 1) * 8;
                    let (hidden, loss) = (&found.hidden[row.clone()], found.tokenwise[0][token]);
                    if token == 5 {
                        assert!(loss.is_nan() && hidden.iter().all(|x| x.is_nan()));
                    } else {
                        assert_eq!((hidden, loss), (&good.hidden[row], good.tokenwise[0][token]));
                    }
                }
                assert!(found.weight.iter().all(|x| x.is_nan()));
            }
        }
        // In the weight.
        (case.hidden, case.weight) = clean;
        case.weight[40 * 8] = nan;
        for found in case.run(2) {
            for token in 0..9 {
                let hidden = &found.hidden[token * 8..][..8];
                let takes_part = token != 2 && token != masked;
                assert_eq!(found.tokenwise[0][token].is_nan(), token != 2);
                assert!(hidden.iter().all(|x| if takes_part { x.is_nan() } else { *x == 0.0 }));
            }
        }
    }
    for_each_dtype!(body, "numbers that are none");
}

#[test]
fn no_tokens_have_no_gradient() {
    let mut rng = common::fresh_rng("no tokens");
    for axis in [VocabAxis::First, VocabAxis::Last] {
        let case = Case::<bf16>::new(&mut rng, [0, 3, 50], axis);
        for found in case.run(2) {
            assert!(found.weight.iter().chain(&found.bias).all(|&x| x == 0.0));
        }
    }
}

#[test]
fn shapes_that_disagree_are_named() {
    let pool = Threads::new(1).unwrap();
    let launch = Launch { isa: Isa::detect(), tile: None, pool: &pool };
    let shape = LinearShape::new([2, 3], [5, 3], None).unwrap();
    let labels = [0_i32, 1];
    let linear = |columns, labels| {
        Linear::new(CrossEntropy::default(), shape, Labels::from(labels), launch, columns)
    };
    assert_eq!(
        linear(0, &labels[..]).err().unwrap().to_string(),
        "tile columns is 0; it must be at least 1"
    );
    assert_eq!(
        linear(5, &labels[..1]).err().unwrap().to_string(),
        "labels holds 1 elements; [T] needs 2"
    );
    let linear = linear(5, &labels).unwrap();
    let refuse = |[hidden, weight, bias, short]: [usize; 4]| {
        let [hidden, weight, bias] = [hidden, weight, bias].map(|length| vec![0.0_f32; length]);
        let operands = Operands { hidden: &hidden[..], weight: &weight, bias: Some(&bias) };
        let bytes = scratch_bytes(shape, DType::F32, 5, false);
        let mut scratch = vec![0; bytes - short];
        linear.forward(operands, TokenOutputs::default(), &mut scratch).unwrap_err().to_string()
    };
    assert_eq!(refuse([5, 15, 5, 0]), "hidden holds 5 elements; [T, D] needs 6");
    assert_eq!(refuse([6, 14, 5, 0]), "weight holds 14 elements; [V, D] needs 15");
    assert_eq!(refuse([6, 15, 4, 0]), "bias holds 4 elements; [V] needs 5");
    assert!(refuse([6, 15, 5, 1]).starts_with("scratch holds "));
    let operands = Operands { hidden: &[0.0; 6][..], weight: &[0.0; 15], bias: None };
    let refused = linear.keep(operands, TokenOutputs::default(), &mut [0.0; 14], &mut []);
    assert_eq!(refused.unwrap_err().to_string(), "kept holds 14 elements; [V, D] needs 15");
}
