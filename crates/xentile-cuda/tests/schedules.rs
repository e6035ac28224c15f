//! Linear cross-entropy over every schedule, on a GPU that `driver.c` and `host.c` play on the host,
//! against float64: what lies where, in which order it is written and read, and no byte beyond.

#![cfg(all(feature = "kernels", target_os = "linux"))]

#[macro_use]
#[path = "../src/mirror.rs"]
mod mirror;

#[path = "../../xentile-cpu/tests/common/mod.rs"]
mod common;
// What kernels take, which host.c declares once more.
#[path = "../src/cross_entropy/arguments.rs"]
mod cross_entropy;
#[path = "../src/driver/abi.rs"]
mod driver;
mod fake;
#[path = "../src/fused_product/arguments.rs"]
mod fused_product;

use std::ffi::c_void;
use std::ops::Range;
use std::process::Command;
use std::ptr::{null, null_mut, without_provenance_mut};

use half::bf16;
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use xentile::cross_entropy::CrossEntropy;
use xentile::cross_entropy::reference::{TokenCotangents, TokenDistribution, distribution};
use xentile::linear_cross_entropy::{LinearShape, VocabAxis, reference};
use xentile::{DType, Element, linear_cross_entropy};
use xentile_cuda::cross_entropy::{
    Cotangents, DistributionOutputs, Labels, Pass, SavedLse, TokenOutputs,
};
use xentile_cuda::linear_cross_entropy::{
    Extents, Gradients, Linear, Operands, SavedColumns, Scratch,
};

/// Runs [`schedules`] as a process that finds the fake libraries, on a GPU of `capability`.
fn run(capability: &str, variables: &[(&str, &str)]) {
    let sizes = [
        ("ROWS_BYTES", size_of::<cross_entropy::Arguments>()),
        ("PRODUCT_BYTES", size_of::<fused_product::Arguments>()),
    ];
    let folder = fake::driver(&["driver.c", "host.c"], &sizes);
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "schedules", "--include-ignored", "--nocapture"])
        .env("LD_LIBRARY_PATH", folder.path())
        .env("XENTILE_CUBLASLT", folder.path().join("libcuda.so.1"))
        .env("FAKE_CAPABILITY", capability)
        .envs(variables.iter().copied())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    let said = |line: &&str| line.contains("SEED") || line.contains("right");
    text.lines().filter(said).for_each(|line| println!("{line}"));
}

#[test]
fn schedules_over_kernels_of_any_gpu() {
    run("80", &[]);
}

#[test]
fn schedules_over_kernels_of_hopper() {
    // So few that any product keeps them busy.
    run("90", &[("FAKE_MULTIPROCESSORS", "2")]);
}

#[test]
fn schedules_where_shifts_are_raised() {
    run("90", &[("FAKE_RESCALES", "1")]);
}

/// Memory of a size, and no more: what follows it is looked at.
struct Memory {
    words: Vec<u128>,
    bytes: usize,
}

/// What every sum that is added to is before.
const RUNNING: f32 = 0.25;

const GUARD: u128 = 0x5a5a_5a5a_5a5a_5a5a_5a5a_5a5a_5a5a_5a5a;
/// Words before the memory, and after it.
const MARGIN: usize = 64;

impl Memory {
    /// Of bytes that are no number's.
    fn new(bytes: usize) -> Self {
        let inside = bytes.div_ceil(16);
        let mut words = vec![GUARD; inside + 2 * MARGIN];
        words[MARGIN..MARGIN + inside].fill(u128::MAX);
        Self { words, bytes: inside * 16 }
    }

    fn at(&mut self) -> *mut c_void {
        self.words[MARGIN..].as_mut_ptr().cast()
    }

    /// Its first elements.
    fn read<T: Copy>(&self, count: usize) -> Vec<T> {
        assert!(count * size_of::<T>() <= self.bytes);
        let first = self.words[MARGIN..].as_ptr().cast::<T>();
        // SAFETY: there are so many bytes, of numbers for which any will do, at a multiple of 16.
        (0..count).map(|index| unsafe { first.add(index).read() }).collect()
    }

    /// Its first elements, of f32 or of `E`.
    fn numbers<E: Element>(&self, dtype: DType, count: usize) -> Vec<f32> {
        match dtype {
            DType::F32 => self.read::<f32>(count),
            _ => self.read::<E>(count).into_iter().map(E::to_f32).collect(),
        }
    }

    /// Has its first elements be `value`.
    fn fill(&mut self, count: usize, value: f32) {
        assert!(4 * count <= self.bytes);
        let first = self.at().cast::<f32>();
        // SAFETY: there is memory for so many, at a multiple of 16.
        (0..count).for_each(|index| unsafe { first.add(index).write(value) });
    }

    fn check(&self, name: &str) {
        let inside = self.bytes / 16;
        let after = &self.words[MARGIN + inside..];
        assert!(self.words[..MARGIN].iter().all(|&word| word == GUARD), "before {name}");
        assert!(after.iter().all(|&word| word == GUARD), "after {name}");
    }
}

/// How far `found` is from `wanted`, beside that.
fn error<E: Element>(found: &[E], wanted: &[f64]) -> f64 {
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let difference = norm(&mut found.iter().zip(wanted).map(|(x, y)| x.to_f64() - y));
    difference / norm(&mut wanted.iter().copied()).max(1e-30)
}

/// A problem, and what is right.
struct Problem<E> {
    options: CrossEntropy,
    hidden: Vec<E>,
    weight: Vec<E>,
    bias: Option<Vec<f32>>,
    labels: Vec<i64>,
    cotangents: [Vec<f32>; 3],
    outputs: Vec<xentile::cross_entropy::reference::TokenForward>,
    distributions: Vec<TokenDistribution>,
    /// For all cotangents, and for those of the loss alone.
    gradients: [reference::Gradients; 2],
}

impl<E: Element> Problem<E> {
    fn new(
        rng: &mut ChaCha8Rng,
        [tokens, width, vocab]: [usize; 3],
        axis: VocabAxis,
        has_bias: bool,
    ) -> Self {
        let options = CrossEntropy {
            ignore_index: 3,
            // Both together let there be no unnormalised softmax.
            label_smoothing: if rng.random_range(0..3) == 0 { 0.1 } else { 0.0 },
            z_loss: 1e-3,
            softcap: (rng.random_range(0..3) == 0).then_some(5.0),
            temperature: [1.0, 0.7, 1.5][rng.random_range(0..3)],
        };
        let mut numbers = |count: usize, scale: f64| -> Vec<E> {
            (0..count).map(|_| E::from_f64((rng.random::<f64>() - 0.5) * scale)).collect()
        };
        let hidden = numbers(tokens * width, 4.0);
        let weight = numbers(vocab * width, 3.0 / (width as f64).sqrt());
        let bias = has_bias.then(|| numbers(vocab, 3.0));
        let mut labels: Vec<i64> = (0..tokens).map(|_| rng.random_range(0..vocab as i64)).collect();
        labels[0] = 3;
        // Some of them the likeliest.
        let likeliest = |token: usize| -> i64 {
            let row = &hidden[token * width..][..width];
            let logit = |column: usize| -> f64 {
                let at = |d| {
                    if axis == VocabAxis::First { column * width + d } else { d * vocab + column }
                };
                let product = (0..width).map(|d| row[d].to_f64() * weight[at(d)].to_f64());
                product.sum::<f64>() + bias.as_ref().map_or(0.0, |bias| bias[column].to_f64())
            };
            (0..vocab).max_by(|&a, &b| logit(a).total_cmp(&logit(b))).unwrap_or(0) as i64
        };
        (1..tokens).step_by(3).for_each(|token| labels[token] = likeliest(token));
        let mut token_scalars = || -> Vec<f32> { (0..tokens).map(|_| rng.random()).collect() };
        let mut cotangents = [token_scalars(), token_scalars(), token_scalars()];
        cotangents.iter_mut().for_each(|cotangents| cotangents[1 % tokens] = 0.0);
        let extents = axis.weight(vocab, width);
        let shape = LinearShape::new([tokens, width], extents, Some(axis)).unwrap();
        let operands = linear_cross_entropy::Operands::new(
            &options,
            shape,
            &hidden,
            &weight,
            bias.as_deref(),
            xentile::Labels::I64(&labels),
        )
        .unwrap();
        let outputs = reference::outputs(&options, &operands);
        let distributions =
            reference::map_rows(&operands, |_, logits| distribution(&options, logits));
        let of = |token: usize, which: usize| f64::from(cotangents[which][token]);
        let gradients = [
            reference::gradients(&options, &operands, &outputs, |token| TokenCotangents {
                loss: of(token, 0),
                logps: of(token, 1),
                lse: of(token, 2),
                entropy: 0.0,
            }),
            reference::gradients(&options, &operands, &outputs, |token| TokenCotangents {
                loss: of(token, 0),
                ..TokenCotangents::default()
            }),
        ];
        let bias = bias.map(|bias| bias.iter().map(|x| x.to_f64() as f32).collect());
        Self {
            options,
            hidden,
            weight,
            bias,
            labels,
            cotangents,
            outputs,
            distributions,
            gradients,
        }
    }

    /// Runs `pass` as `linear` has it, in no more memory than it asks for, and compares. A fused one
    /// runs once more with what is said of the distribution.
    fn check(&self, linear: &Linear, pass: Pass) {
        self.check_one(linear, pass, false, 0);
        if pass == Pass::Fused && linear.leaves_hidden {
            // Room for float32 sums of dhidden.
            let sums = 4 * linear.tokens * linear.width;
            self.check_one(linear, pass, false, sums.next_multiple_of(256) + 256);
        }
        if pass == Pass::Fused && !linear.adds_to_weight {
            // A part of each row, and a row's logits where no product says anything.
            let more = (12 * linear.tokens + 8 * linear.vocab).next_multiple_of(256) + 4096;
            let workspace_bytes = linear.workspace_bytes + more;
            let leaves_hidden = false;
            self.check_one(&Linear { workspace_bytes, leaves_hidden, ..*linear }, pass, true, 0);
        }
    }

    /// With `room` bytes of scratch more than needed.
    fn check_one(&self, linear: &Linear, pass: Pass, has_distribution: bool, room: usize) {
        let (options, has_bias) = (self.options, self.bias.is_some());
        println!("{linear:?} {pass:?} {options:?} bias {has_bias} says more {has_distribution}");
        let tokens = linear.tokens;
        let mut scratch = Memory::new(linear.scratch_bytes(pass) + room);
        let [mut of_hidden, mut of_weight] = [
            (linear.hidden_gradient, self.hidden.len()),
            (linear.weight_gradient, self.weight.len()),
        ]
        .map(|(dtype, count)| Memory::new(dtype.size_bytes() * count));
        if linear.adds_to_weight && pass == Pass::Fused {
            of_weight.fill(self.weight.len(), RUNNING);
        }
        let mut numbers = [(); 6].map(|()| Memory::new(4 * tokens));
        let operands = Operands {
            hidden: self.hidden.as_ptr().cast(),
            weight: self.weight.as_ptr().cast(),
            labels: Labels::I64(self.labels.as_ptr()),
            bias: self.bias.as_ref().map_or(null(), Vec::as_ptr),
        };
        let mut of_bias = self.bias.as_ref().map(|bias| Memory::new(size_of_val(&bias[..])));
        let at_bias = of_bias.as_mut().map_or(null_mut(), |memory| memory.at().cast());
        let gradients = Gradients { hidden: of_hidden.at(), weight: of_weight.at(), bias: at_bias };
        let [loss, logps, lse, lse_low, entropy, argmax] =
            numbers.each_mut().map(|memory| memory.at().cast::<f32>());
        let argmax = argmax.cast();
        let distribution = DistributionOutputs { entropy, highest: null_mut(), argmax };
        let outputs = TokenOutputs { loss, logps, lse, lse_low, zero_masked: false };
        let saved: Vec<f32> = self.outputs.iter().map(|token| token.lse as f32).collect();
        let saved_low: Vec<f32> = self
            .outputs
            .iter()
            .zip(&saved)
            .map(|(token, &high)| (token.lse - f64::from(high)) as f32)
            .collect();
        let [dloss, dlogps, dlse] = self.cotangents.each_ref().map(Vec::as_ptr);
        let given = Scratch { at: scratch.at(), bytes: scratch.bytes };
        // Streams are numbers here.
        let stream = without_provenance_mut(1);
        // SAFETY: the GPU that plays here computes on the host, in memory of the sizes that are said.
        unsafe {
            match pass {
                Pass::Forward => linear.forward(self.options, stream, operands, outputs, given),
                Pass::Backward => {
                    let saved = SavedLse { lse: saved.as_ptr(), lse_low: saved_low.as_ptr() };
                    let cotangents = Cotangents { loss: dloss, logps: dlogps, lse: dlse };
                    linear.backward(
                        self.options,
                        stream,
                        operands,
                        saved,
                        cotangents,
                        gradients,
                        given,
                    )
                }
                Pass::Fused if has_distribution => linear.distribution_fused(
                    self.options,
                    stream,
                    operands,
                    dloss,
                    outputs,
                    distribution,
                    gradients,
                    given,
                ),
                Pass::Fused => {
                    linear.fused(self.options, stream, operands, dloss, outputs, gradients, given)
                }
            }
            .unwrap();
            if pass == Pass::Fused && linear.leaves_hidden {
                linear.hidden(self.options, stream, operands, gradients.hidden, given).unwrap();
            }
        }
        scratch.check("the scratch");
        of_hidden.check("dhidden");
        of_weight.check("dweight");
        let (token_error, gradient_error) = match linear.dtype {
            DType::F32 => (1e-5, 1e-5),
            // What gradients are made of is rounded, and no logit.
            _ => (1e-5, 5e-3),
        };
        if pass != Pass::Backward {
            let wanted: Vec<f64> = self.outputs.iter().map(|token| token.loss).collect();
            let found = error(&numbers[0].read::<f32>(tokens), &wanted);
            assert!(found < token_error, "loss {found}");
            let wanted: Vec<f64> = self.outputs.iter().map(|token| token.lse).collect();
            let found = error(&numbers[2].read::<f32>(tokens), &wanted);
            assert!(found < token_error, "lse {found}");
        }
        if has_distribution {
            let of = |token: usize| self.labels[token] == self.options.ignore_index;
            let wanted = self.distributions.iter().enumerate();
            let wanted: Vec<f64> =
                wanted.map(|(token, known)| if of(token) { 0.0 } else { known.entropy }).collect();
            let found = error(&numbers[4].read::<f32>(tokens), &wanted);
            assert!(found < 1e-4, "entropy {found}");
            for (token, &argmax) in numbers[5].read::<i32>(tokens).iter().enumerate() {
                let wanted = self.distributions[token].argmax.map(|column| column as i64);
                let label = Some(self.labels[token]);
                let is_correct = Some(i64::from(argmax)) == label;
                assert!(of(token) || is_correct == (wanted == label), "token {token}: {argmax}");
            }
        }
        if pass != Pass::Forward {
            let wanted = &self.gradients[usize::from(pass == Pass::Fused)];
            let found = of_hidden.numbers::<E>(linear.hidden_gradient, self.hidden.len());
            let found = error(&found, &wanted.hidden);
            assert!(found < gradient_error, "dhidden {found}");
            let mut found = of_weight.numbers::<E>(linear.weight_gradient, self.weight.len());
            if linear.adds_to_weight && pass == Pass::Fused {
                found.iter_mut().for_each(|x| *x -= RUNNING);
            }
            let found = error(&found, &wanted.weight);
            assert!(found < gradient_error, "dweight {found}");
            if let Some(of_bias) = of_bias {
                of_bias.check("dbias");
                let wanted = &wanted.bias;
                let found = error(&of_bias.read::<f32>(wanted.len()), wanted);
                assert!(found < gradient_error, "dbias {found}");
            }
        }
    }
}

/// A chunk that may be all of it.
fn some_of(rng: &mut ChaCha8Rng, total: usize) -> usize {
    if rng.random_range(0..3) == 0 { total } else { rng.random_range(1..=total) }
}

fn problems<E: Element>(rng: &mut ChaCha8Rng) -> usize {
    let mut ran = 0;
    for turn in 0..8 {
        let axis = if rng.random() { VocabAxis::First } else { VocabAxis::Last };
        // Widths that products of Hopper's own take, and others; sides that have halves.
        let [tokens, width, vocab] =
            [rng.random_range(1..200), rng.random_range(1..12), rng.random_range(130..400)];
        let width = if rng.random() { width * 8 } else { width };
        let has_bias = turn % 2 == 0;
        let least = if E::DTYPE == DType::F32 { 0 } else { 1024 };
        let problem = Problem::<E>::new(rng, [tokens, width, vocab], axis, has_bias);
        for _ in 0..3 {
            let extents = |rng: &mut ChaCha8Rng| Extents {
                tokens: some_of(rng, tokens),
                columns: some_of(rng, vocab),
            };
            let linear = Linear {
                tokens,
                width,
                vocab,
                vocab_is_last: axis == VocabAxis::Last,
                dtype: E::DTYPE,
                hidden_gradient: [E::DTYPE, DType::F32][rng.random_range(0..2)],
                weight_gradient: [E::DTYPE, DType::F32][rng.random_range(0..2)],
                adds_to_weight: false,
                leaves_hidden: rng.random(),
                chunk: extents(rng),
                dweight_chunk: rng.random::<bool>().then(|| extents(rng)),
                saved_columns: None,
                single_pass: None,
                f32_logits: rng.random_range(0..4) == 0,
                workspace_bytes: [least, 1 << 12, 1 << 16][rng.random_range(0..3)],
                time_block: None,
                block_size: None,
            };
            for pass in [Pass::Forward, Pass::Backward] {
                problem.check(&linear, pass);
                ran += 1;
            }
            let slot = rng.random_range(1..=vocab);
            let whole = |tokens, columns| Extents { tokens, columns };
            let last = some_of(rng, vocab);
            // All but the last chunk's, where none is recomputed, or fewer.
            let columns = some_of(rng, (vocab - last).max(1));
            let by_tokens = Linear { chunk: whole(linear.chunk.tokens, vocab), ..linear };
            let by_columns = Linear { chunk: whole(tokens, last), ..linear };
            let saved_columns = Linear {
                saved_columns: Some(SavedColumns { columns, slot: slot.min(columns) }),
                ..by_columns
            };
            // Any columns but all, in any chunks, and the others in any.
            let first = whole(some_of(rng, tokens), rng.random_range(1..vocab));
            let single_pass =
                (axis == VocabAxis::First).then_some(Linear { single_pass: Some(first), ..linear });
            let running = Linear {
                weight_gradient: DType::F32,
                adds_to_weight: true,
                ..[by_tokens, by_columns][rng.random_range(0..2)]
            };
            let single_pass = single_pass.filter(|linear| linear.weight_gradient == linear.dtype);
            let all = [by_tokens, by_columns, most_saved(saved_columns), running];
            for linear in all.into_iter().chain(single_pass) {
                problem.check(&linear, Pass::Fused);
                ran += 1;
            }
        }
    }
    ran
}

/// With fewer columns where there is no room for as many.
fn most_saved(linear: Linear) -> Linear {
    let mut saved_columns = linear.saved_columns.unwrap();
    while saved_columns.columns > 0 && !linear.has_room(saved_columns) {
        saved_columns.columns -= 1;
    }
    Linear { saved_columns: (saved_columns.columns > 0).then_some(saved_columns), ..linear }
}

/// A problem in one chunk that has an unnormalised softmax, so many times 8 wide.
fn with_unnormalised(rng: &mut ChaCha8Rng, width: Range<usize>) -> (Problem<bf16>, Linear) {
    let [tokens, vocab] = [rng.random_range(1..60), rng.random_range(130..400)];
    let width = 8 * rng.random_range(width);
    let problem = loop {
        let has_bias = rng.random();
        let problem = Problem::new(rng, [tokens, width, vocab], VocabAxis::First, has_bias);
        if problem.options.softcap.is_none() || problem.options.label_smoothing == 0.0 {
            break problem;
        }
    };
    let linear = Linear {
        tokens,
        width,
        vocab,
        vocab_is_last: false,
        dtype: DType::Bf16,
        hidden_gradient: DType::Bf16,
        weight_gradient: DType::Bf16,
        adds_to_weight: false,
        leaves_hidden: false,
        chunk: Extents { tokens, columns: vocab },
        dweight_chunk: None,
        saved_columns: None,
        single_pass: None,
        f32_logits: false,
        workspace_bytes: 1 << 16,
        time_block: None,
        block_size: None,
    };
    (problem, linear)
}

/// The unnormalised softmax of whole rows, most of them in the memory of the weight's gradient.
fn unnormalised_in_places(rng: &mut ChaCha8Rng) -> usize {
    let mut ran = 0;
    while ran < 8 {
        let (problem, whole) = with_unnormalised(rng, 8..12);
        // Too little for sums of dhidden.
        let in_two_calls = Linear { leaves_hidden: true, workspace_bytes: 1 << 12, ..whole };
        problem.check(&in_two_calls, Pass::Fused);
        let Linear { tokens, vocab, .. } = whole;
        let last = rng.random_range(vocab * 2 / 3..vocab);
        let (columns, slots) = (vocab - last, rng.random_range(1..4));
        let saved_columns = SavedColumns { columns, slot: columns.div_ceil(slots) };
        let chunk = Extents { tokens, columns: last };
        let linear = Linear { chunk, saved_columns: Some(saved_columns), ..whole };
        if linear.has_room(saved_columns) {
            problem.check(&linear, Pass::Fused);
            ran += 1;
        }
    }
    ran
}

/// The unnormalised softmax of some columns, whose sums of dweight are where it goes, and dlogits of
/// the others.
fn unnormalised_of_some(rng: &mut ChaCha8Rng) -> usize {
    for _ in 0..12 {
        let (problem, whole) = with_unnormalised(rng, 1..12);
        let Linear { tokens, vocab, .. } = whole;
        let mut extents =
            || Extents { tokens: some_of(rng, tokens), columns: rng.random_range(1..vocab) };
        let linear = Linear { chunk: extents(), single_pass: Some(extents()), ..whole };
        problem.check(&linear, Pass::Fused);
    }
    12
}

/// Logits of 16-bit operands are in the workspace in f32, where no product has the cross-entropy in it.
fn too_little_for_logits() {
    let linear = Linear {
        tokens: 3,
        // No multiple of 8.
        width: 7,
        vocab: 130,
        vocab_is_last: false,
        dtype: DType::Bf16,
        hidden_gradient: DType::Bf16,
        weight_gradient: DType::Bf16,
        adds_to_weight: false,
        leaves_hidden: false,
        chunk: Extents { tokens: 3, columns: 130 },
        dweight_chunk: None,
        saved_columns: None,
        single_pass: None,
        f32_logits: false,
        workspace_bytes: 1023,
        time_block: None,
        block_size: None,
    };
    let none = null_mut();
    let labels = Labels::I32(null());
    let operands = Operands { hidden: null(), weight: null(), labels, bias: null() };
    let outputs =
        TokenOutputs { loss: none, logps: none, lse: none, lse_low: none, zero_masked: false };
    let scratch = Scratch { at: null_mut(), bytes: linear.scratch_bytes(Pass::Forward) };
    let (options, stream) = (CrossEntropy::default(), without_provenance_mut(1));
    // SAFETY: nothing is read or launched before the workspace was looked at.
    let refused = unsafe { linear.forward(options, stream, operands, outputs, scratch) };
    assert_eq!(
        refused.unwrap_err().to_string(),
        "a workspace of 1023 bytes is too little for operands of 16 bits; it must be at least 1024"
    );
}

/// Not a test: what [`run`] runs.
#[test]
#[ignore = "the tests run it, with libraries that play a GPU"]
fn schedules() {
    too_little_for_logits();
    let mut rng = common::fresh_rng("schedules");
    let ran = problems::<f32>(&mut rng)
        + problems::<bf16>(&mut rng)
        + unnormalised_in_places(&mut rng)
        + unnormalised_of_some(&mut rng);
    println!("{ran} schedules are right");
}
