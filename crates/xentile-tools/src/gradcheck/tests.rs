//! Wrong results are found, and results that round what a contract lets them round are not, at the bounds
//! of each operation.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::{SystemTime, UNIX_EPOCH};

use half::{bf16, f16};
use xentile::cross_entropy::operation::options;
use xentile::cross_entropy::reference::{TokenCotangents, forward, gradient};
use xentile::cross_entropy::{CrossEntropy, Target};
use xentile::fp8::encode;
use xentile::linear_cross_entropy::reference::{Factors, Gradients, map_rows, pull_back};
use xentile::linear_cross_entropy::{LinearShape, Operands, VocabAxis};
use xentile::operation::{
    Array, ArrayElement, Arrays, Bound, Distribution, Judged, Kind, OptionSpec, Pass, Problem,
    Rows, Synthetic, TileExtents, Value, Visitor,
};
use xentile::{DType, Element, operations};

use super::judge::{Judge, poisoned};
use super::report::Report;
use crate::config::Op;

/// A problem of an operation, with these options and all others at their defaults.
fn problem(op: Op, dtype: DType, extents: &[usize], more: &[(&'static str, Value)]) -> Problem {
    let dims = op.dims().iter().zip(extents).map(|(dim, extent)| (dim.letter, *extent));
    let mut options: BTreeMap<_, _> =
        op.options().iter().map(|option| (option.name, option.default)).collect();
    options.extend(more.iter().copied());
    let tile = TileExtents::default();
    Problem { dims: dims.collect(), dtype, options, tile, cotangent: 1.0 }
}

/// What is reported of results that were `found`.
fn judged(
    op: Op,
    problem: &Problem,
    inputs: &Arrays<'_>,
    pass: Pass,
    given: &Arrays<'_>,
    found: &Arrays<'_>,
) -> Report {
    let tolerances = op.tolerance_values(problem, |_| None);
    let mut reference = op.reference(problem, inputs, tolerances).unwrap();
    reference.forward();
    let mut report = Report::empty();
    let mut judge = Judge { report: &mut report, op, problem, pass, found, is_timed: false };
    reference.outputs(&mut judge);
    reference.gradients(pass, given, "", &mut judge);
    report
}

fn seed() -> u64 {
    let seed = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().subsec_nanos().into();
    println!("seed {seed}");
    seed
}

/// One entry two units in the last place off, or forgotten, among correct ones must be found,
/// judged wrong and named.
#[test]
fn one_wrong_gradient_of_logits_is_found() {
    let op = Op::named("cross_entropy").unwrap();
    let problem = problem(op, DType::Bf16, &[3, 40], &[("reduction", Value::Word("none"))]);
    let rows = [0, 1, 2];
    let synthetic = Synthetic { seed: seed(), ..Synthetic::default() };
    let inputs = op.inputs(&problem, &synthetic, &rows).unwrap();
    let given = Arrays::default()
        .with("dloss", vec![1_f32; 3])
        .with("dlogps", vec![0_f32; 3])
        .with("dlse", vec![0_f32; 3]);
    let (logits, labels) = (inputs.expect::<bf16>("logits"), inputs.expect::<i64>("labels"));
    let mut dlogits = Vec::new();
    for (row, &label) in logits.chunks(40).zip(labels) {
        let wide: Vec<_> = row.iter().map(|z| z.to_f64()).collect();
        let mut dz = vec![0.0; 40];
        let of = TokenCotangents { loss: 1.0, ..Default::default() };
        let lse = forward(&options(&problem), &wide, label).lse;
        gradient(&options(&problem), &wide, label, lse, of, &mut dz);
        dlogits.extend(dz.into_iter().map(<bf16 as Element>::from_f64));
    }
    let judge = |dlogits: &[bf16]| {
        let found = Arrays::default().with("dlogits", dlogits.to_vec());
        judged(op, &problem, &inputs, Pass::Backward, &given, &found)
    };
    let right = judge(&dlogits);
    assert!(right.passed());
    assert_eq!(right.metric("dlogits_rounded/equal"), Some(1.0));
    for wrong in [bf16::from_bits(dlogits[57].to_bits() + 2), bf16::from_f32(7.25e3), bf16::NAN] {
        let kept = std::mem::replace(&mut dlogits[57], wrong);
        let report = judge(&dlogits);
        assert!(!report.passed(), "{wrong} for {kept}");
        let json = report.to_json();
        let place = &json["worst"]["dlogits_rounded/excess"];
        assert_eq!(*place, serde_json::json!({"token": 1, "column": 17}));
        dlogits[57] = kept;
    }
}

/// What a factor makes of a gradient is held: where it is 0 all is exactly 0, where it is not finite no
/// token that takes part is, and every other is 0.
#[test]
fn factors_reach_tokens_that_take_part_and_no_others() {
    let op = Op::named("cross_entropy").unwrap();
    let (rows, columns) = ([0, 1, 2, 3], 300);
    let nan = f64::NAN;
    for (factor, right, wrong) in
        [(0.0, 0.0, 6e-8), (f64::INFINITY, f64::NEG_INFINITY, 1.0), (nan, nan, 7.0)]
    {
        let more = [("factor", Value::Number(factor)), ("reduction", Value::Word("sum"))];
        let problem = problem(op, DType::F16, &[4, columns], &more);
        let from = Synthetic { seed: seed(), ..Synthetic::default() };
        let mut inputs = op.inputs(&problem, &from, &rows).unwrap();
        let mut labels = inputs.expect::<i64>("labels").to_vec();
        labels[2] = -100;
        inputs.insert("labels", Array::of(labels));
        let judge = |taking_part: f64, ignored: f64| {
            let all = |row| if row == 2 { ignored } else { taking_part };
            let all = (0..4 * columns).map(|at| <f16 as Element>::from_f64(all(at / columns)));
            let found = Arrays::default().with("dlogits", all.collect::<Vec<_>>());
            judged(op, &problem, &inputs, Pass::Fused, &Arrays::default(), &found)
        };
        assert!(judge(right, 0.0).passed(), "{factor}");
        assert!(!judge(wrong, 0.0).passed(), "{factor}: a token that takes part");
        assert!(!judge(right, 6e-8).passed(), "{factor}: a token that is ignored");
        assert!(!judge(right, nan).passed(), "{factor}: a token that is ignored");
    }
}

/// Of every operation that has kernels to call, each result is held: with its largest entry off by a
/// fifth, forgotten or NaN it fails, and is named.
#[test]
fn one_wrong_entry_of_any_result_is_found() {
    let native = operations().iter().filter_map(|of| xentile_cpu::kernels(of.name()));
    for kernels in native {
        let op = Op::named(kernels.name()).unwrap();
        let flags = op.options().iter().filter(|option| option.kind == Kind::Bool);
        let mut more: Vec<_> = flags.map(|option| (option.name, Value::Bool(true))).collect();
        // Gradients for cotangents of every output.
        let none = |option: &&OptionSpec| matches!(option.kind, Kind::Word(words) if words.contains(&"none"));
        more.extend(op.options().iter().filter(none).map(|of| (of.name, Value::Word("none"))));
        for dtype in DType::ALL {
            // Two heads of attention share one of keys: of a sum over many of either sign a fifth is
            // within what their roundings may add up to. It has more keys than queries.
            let problem = problem(op, dtype, &[9, 70, 24, 35, 13], &more);
            let rows: Vec<u64> = (0..9).collect();
            let from = Synthetic { seed: seed(), ..Synthetic::default() };
            let inputs = op.inputs(&problem, &from, &rows).unwrap();
            let pass = Pass::ForwardAndBackward;
            let given = op.given(&problem, pass, &from, &rows);
            let (pool, isa) = (xentile_cpu::Threads::new(2).unwrap(), xentile_cpu::Isa::detect());
            let launch = xentile_cpu::operation::Launch { isa, pool: &pool };
            let mut found = poisoned(op, &problem, pass);
            kernels.open(&problem, &inputs, launch).unwrap().run(pass, &given, &mut found).unwrap();
            let judge = |found: &Arrays<'_>| judged(op, &problem, &inputs, pass, &given, found);
            let right = judge(&found);
            assert!(right.passed(), "{op} {dtype}: {}", right.to_json());
            for spec in op.signature(&problem, pass).results {
                let array = found.get(spec.name).unwrap().clone();
                let size = |index: &usize| array.at(*index).abs();
                let all = 0..array.len();
                let index = all.max_by(|a, b| size(a).total_cmp(&size(b))).unwrap();
                let largest = array.at(index);
                for factor in [0.0, 0.8, f64::NAN] {
                    let mut wrong = array.clone();
                    // Where no label is the argmax, a label reported as argmax is wrong.
                    let value = if largest == 0.0 { 1.0 + factor } else { largest * factor };
                    let value = value as f32;
                    match &mut wrong {
                        Array::F32(all) => all.to_mut()[index] = value,
                        Array::Bf16(all) => all.to_mut()[index] = bf16::from_f32(value),
                        Array::F16(all) => all.to_mut()[index] = f16::from_f32(value),
                        Array::F64(all) => all.to_mut()[index] = value.into(),
                        Array::F8(format, all) => all.to_mut()[index] = encode(*format, value),
                        Array::U8(all) => all.to_mut()[index] = value as u8,
                        other => panic!("{other:?}"),
                    }
                    let mut results = found.clone();
                    results.insert(spec.name, wrong);
                    let report = judge(&results);
                    assert!(!report.passed(), "{op} {dtype}: {} times {factor}", spec.name);
                }
            }
        }
    }
}

/// Queries and keys of attention end together, whichever are more: a kernel for which they begin together,
/// or whose diagonal is a key off, is found.
#[test]
fn a_shifted_causal_diagonal_is_found() {
    let op = Op::named("flash_attention").unwrap();
    let kernels = xentile_cpu::kernels(op.name()).unwrap();
    let (pool, isa) = (xentile_cpu::Threads::new(1).unwrap(), xentile_cpu::Isa::detect());
    let launch = xentile_cpu::operation::Launch { isa, pool: &pool };
    let (pass, columns) = (Pass::Forward, 16);
    for lengths in [[5, 12], [1, 7], [12, 5]] {
        let [queries, keys] = lengths;
        let of = |keys, more: &[_]| problem(op, DType::F32, &[queries, 2, columns, 1, keys], more);
        let right = of(keys, &[]);
        let rows: Vec<u64> = (0..queries as u64).collect();
        let from = Synthetic { seed: seed(), ..Synthetic::default() };
        let inputs = op.inputs(&right, &from, &rows).unwrap();
        let given = op.given(&right, Pass::Backward, &from, &rows);
        let passes = |problem: &Problem, operands: &Arrays<'_>| {
            let mut found = poisoned(op, problem, pass);
            let mut run = kernels.open(problem, operands, launch).unwrap();
            run.run(pass, &Arrays::default(), &mut found).unwrap();
            judged(op, &right, &inputs, pass, &given, &found).passed()
        };
        assert!(passes(&right, &inputs), "{lengths:?}");
        let after = |after: usize| {
            let more = [
                ("causal", Value::Bool(false)),
                ("window_after", Value::Integer(after.try_into().unwrap())),
            ];
            of(keys, &more)
        };
        if keys > queries {
            // Of the first keys alone, which are as many as queries.
            let mut first = inputs.clone();
            for name in ["k", "v"] {
                let of_first = inputs.expect::<f32>(name)[..queries * columns].to_vec();
                first.insert(name, Array::of(of_first));
            }
            assert!(!passes(&of(queries, &[]), &first), "{lengths:?} that begin together");
        } else {
            assert!(!passes(&after(queries - keys), &inputs), "{lengths:?} that begin together");
        }
        if queries > 1 {
            assert!(!passes(&after(1), &inputs), "{lengths:?}, a key off");
        }
    }
}

/// What the reference says that results are.
struct Expected<'a> {
    results: &'a Arrays<'a>,
    said: BTreeMap<&'static str, Vec<f64>>,
}

impl Visitor for Expected<'_> {
    fn found(&self) -> &Arrays<'_> {
        self.results
    }

    fn scalar(&mut self, _: &str, _: f64, _: f64, _: f64) {}

    fn result(
        &mut self,
        array: &'static str,
        _: &str,
        _: Judged,
        rows: &(dyn Fn(&dyn Rows) + Sync),
    ) {
        struct Said(Mutex<Vec<f64>>);
        impl Rows for Said {
            fn row(&self, first: usize, expected: &[f64], _: Bound<'_>) {
                self.0.lock().unwrap()[first..][..expected.len()].copy_from_slice(expected);
            }
        }
        let Some(found) = self.results.get(array) else { return };
        let said = Said(Mutex::new(vec![0.0; found.len()]));
        rows(&said);
        self.said.insert(array, said.0.into_inner().unwrap());
    }

    fn made(
        &mut self,
        _: &'static str,
        _: &[f32],
        _: &str,
        _: Judged,
        _: &(dyn Fn(&dyn Rows) + Sync),
    ) {
    }

    fn seconds(&mut self, _: &str, _: f64) {}
}

/// The array with one entry in the place of another.
fn with_entry(array: &Array<'_>, index: usize, value: f64) -> Array<'static> {
    let mut all: Vec<_> = (0..array.len()).map(|at| array.at(at)).collect();
    all[index] = value;
    match array {
        Array::F32(_) => Array::of(rounded::<f32>(&all)),
        Array::Bf16(_) => Array::of(rounded::<bf16>(&all)),
        Array::F16(_) => Array::of(rounded::<f16>(&all)),
        other => panic!("{other:?}"),
    }
}

/// All that losses know of tokens is held: results that are the reference's, rounded, pass, and with the
/// largest entry of one off by a fifth, forgotten or NaN they fail; so they do where a column that there is
/// not has a number.
#[test]
fn gradcheck_checks_properties_of_tokens() {
    let more = [
        ("reduction", Value::Word("none")),
        ("distribution", Value::Bool(true)),
        ("columns", Value::Integer(20)),
        ("temperature", Value::Number(0.7)),
    ];
    for op in ["cross_entropy", "linear_cross_entropy"].map(|name| Op::named(name).unwrap()) {
        for dtype in DType::ALL {
            let problem = problem(op, dtype, &[9, 70, 24], &more);
            let rows: Vec<u64> = (0..9).collect();
            let from = Synthetic { seed: seed(), ..Synthetic::default() };
            let inputs = op.inputs(&problem, &from, &rows).unwrap();
            let pass = Pass::ForwardAndBackward;
            let given = op.given(&problem, pass, &from, &rows);
            let mut reference =
                op.reference(&problem, &inputs, op.tolerance_values(&problem, |_| None)).unwrap();
            reference.forward();
            let room = poisoned(op, &problem, pass);
            let mut expected = Expected { results: &room, said: BTreeMap::new() };
            reference.outputs(&mut expected);
            reference.gradients(pass, &given, "", &mut expected);
            let mut found = Arrays::default();
            for (name, all) in &expected.said {
                let array = room.get(name).unwrap();
                found.insert(
                    name,
                    match array {
                        Array::F32(_) => Array::of(rounded::<f32>(all)),
                        Array::Bf16(_) => Array::of(rounded::<bf16>(all)),
                        _ => Array::of(rounded::<f16>(all)),
                    },
                );
            }
            let judge = |found: &Arrays<'_>| judged(op, &problem, &inputs, pass, &given, found);
            let right = judge(&found);
            assert!(right.passed(), "{op} {dtype}: {}", right.to_json());
            let names: Vec<_> =
                op.signature(&problem, pass).results.iter().map(|of| of.name).collect();
            for name in ["entropy", "correct", "column_logps"] {
                assert!(names.contains(&name), "{op}: {name}");
            }
            for name in names {
                let array = found.get(name).unwrap();
                let finite = |index: &usize| array.at(*index).is_finite();
                let size = |index: &usize| array.at(*index).abs();
                let all = (0..array.len()).filter(finite);
                let index = all.max_by(|a, b| size(a).total_cmp(&size(b))).unwrap();
                let largest = array.at(index);
                let wrong = |index, value| {
                    let mut results = found.clone();
                    results.insert(name, with_entry(array, index, value));
                    assert!(!judge(&results).passed(), "{op} {dtype}: {value} in {name}");
                };
                for factor in [0.0, 0.8, f64::NAN] {
                    // Where no label is the argmax, a label reported as argmax is wrong.
                    wrong(index, if largest == 0.0 { 1.0 + factor } else { largest * factor });
                }
                if name == "column_logps" {
                    wrong((0..array.len()).find(|at| array.at(*at).is_nan()).unwrap(), -1.0);
                }
            }
        }
    }
}

/// A value of 8 bits that is the next one, or of what is rounded before the next but one, and a scale that
/// is fail, and are named, with scales of any part of x and in the transposed copy. So does a value in
/// the place of NaN, and another one in that of infinity.
#[test]
fn one_value_a_unit_off_is_found() {
    let names = ["fp8_quantize", "swiglu_fp8", "rms_norm_fp8"];
    let formats = ["f8e4m3fn", "f8e5m2"];
    let all = names.into_iter().flat_map(|name| {
        let with = move |of| formats.map(|format| (name, of, format));
        ["row", "block_1d", "block_2d"].into_iter().flat_map(with)
    });
    for (name, granularity, format) in all {
        let kernels = xentile_cpu::kernels(name).unwrap();
        let op = Op::named(name).unwrap();
        let more = [
            ("granularity", Value::Word(granularity)),
            ("format", Value::Word(format)),
            ("block_size", Value::Integer(16)),
            ("transposed", Value::Bool(true)),
        ];
        let problem = problem(op, DType::Bf16, &[37, 70], &more);
        let rows: Vec<u64> = (0..37).collect();
        let (pool, isa) = (xentile_cpu::Threads::new(2).unwrap(), xentile_cpu::Isa::detect());
        let launch = xentile_cpu::operation::Launch { isa, pool: &pool };
        let (pass, nothing) = (Pass::Forward, Arrays::default());
        let of = |distribution| {
            let from = Synthetic { seed: seed(), distribution, ..Synthetic::default() };
            let inputs = op.inputs(&problem, &from, &rows).unwrap();
            let mut found = poisoned(op, &problem, pass);
            let mut run = kernels.open(&problem, &inputs, launch).unwrap();
            run.run(pass, &nothing, &mut found).unwrap();
            drop(run);
            (inputs, found)
        };
        let what = format!("{name} {granularity} {format}");
        let (inputs, found) = of(Distribution::Normal);
        let judge = |found: &Arrays<'_>| judged(op, &problem, &inputs, pass, &nothing, found);
        let right = judge(&found);
        assert!(right.passed(), "{what}: {}", right.to_json());
        for (array, of_metric, columns) in
            [("values", "values/excess", 70), ("transposed", "transposed/excess", 37)]
        {
            let mut results = found.clone();
            let Some(Array::F8(_, bits)) = results.get_mut(array) else { panic!("{array}") };
            let place = |index: usize| match array {
                "values" => [index / columns, index % columns],
                _ => [index % columns, index / columns],
            };
            // Of x where it is exact, so that its neighbours are a whole unit off; others may lie beside
            // a tie.
            let magnitude = |index: usize| match name {
                "fp8_quantize" => {
                    let [token, column] = place(index);
                    inputs.expect::<bf16>("x")[70 * token + column].to_bits() & 0x7fff
                }
                _ => 0,
            };
            let largest = |&index: &usize| (bits[index] & 0x7f, magnitude(index));
            let index = (0..bits.len()).max_by_key(largest).unwrap();
            bits.to_mut()[index] -= if name == "fp8_quantize" { 1 } else { 2 };
            let report = judge(&results);
            assert!(!report.passed(), "{what}: {array}");
            let [token, column] = place(index);
            let place = &report.to_json()["worst"][of_metric];
            let of_column = op.dims()[1].index;
            assert_eq!(*place, serde_json::json!({"token": token, of_column: column}), "{what}");
        }
        // What an entry beside a tie of bf16 may move a scale by, which none of an input does.
        let off = if name == "fp8_quantize" { 3.0 * f32::EPSILON } else { 1.0 / 64.0 };
        for scales_of in ["scales", "transposed_scales"] {
            let mut results = found.clone();
            let Some(Array::F32(scales)) = results.get_mut(scales_of) else { panic!("{what}") };
            scales.to_mut()[2] *= 1.0 + off;
            let excess = judge(&results).metric(&format!("{scales_of}_rounded/excess"));
            assert!(excess.unwrap() > 1.0, "{what}: {scales_of}: {excess:?}");
            // Half of it is far beyond what a value may be off by, too.
            let Some(Array::F32(scales)) = results.get_mut(scales_of) else { panic!("{what}") };
            scales.to_mut()[2] *= 0.5;
            let back = if scales_of == "scales" { "" } else { "transposed_" };
            let excess = judge(&results).metric(&format!("{back}dequantised_excess"));
            assert!(excess.unwrap() > 1.0, "{what}: {scales_of}: {excess:?}");
        }
        let (inputs, found) = of(Distribution::Nonfinite);
        let judge = |found: &Arrays<'_>| judged(op, &problem, &inputs, pass, &nothing, found);
        let right = judge(&found);
        assert!(right.passed(), "{what}: {}", right.to_json());
        let Some(Array::F8(format, bits)) = found.get("values") else { panic!("{what}") };
        let is_nan = |bits: &u8| format.decode(*bits).is_nan();
        let mut places: Vec<_> = bits.iter().position(is_nan).into_iter().collect();
        // A row that has an infinity has no other entry but 0 once it is normalised.
        if name != "rms_norm_fp8" {
            let x: Vec<_> = inputs.expect::<bf16>("x").iter().map(|x| x.to_f32()).collect();
            let width = x.len() / 37;
            let is_infinite = |at: &usize| match name {
                "fp8_quantize" => x[*at].is_infinite(),
                _ => x[at / 70 * width + at % 70] == f32::INFINITY,
            };
            places.extend((0..bits.len()).find(|at| is_infinite(at) && !is_nan(&bits[*at])));
        }
        for at in places {
            let mut results = found.clone();
            let Some(Array::F8(format, bits)) = results.get_mut("values") else { panic!("{what}") };
            bits.to_mut()[at] = encode(*format, 1.0);
            let excess = judge(&results).metric("values/excess");
            assert!(excess.unwrap() > 1.0, "{what}: {excess:?}");
        }
    }
}

/// Cotangents of every token that are neither 0 nor alike.
fn mixed(tokens: usize) -> Arrays<'static> {
    let sign = |token: usize| if token.is_multiple_of(2) { 1.0 } else { -1.0 };
    Arrays::default()
        .with("dloss", (0..tokens).map(sign).collect::<Vec<f32>>())
        .with("dlogps", vec![0.5_f32; tokens])
        .with("dlse", vec![-0.25_f32; tokens])
}

fn operands<'a, E: Element + ArrayElement>(
    problem: &Problem,
    inputs: &'a Arrays<'_>,
) -> Operands<'a, E> {
    let axis = VocabAxis::try_from(problem.integer("vocab_axis").unwrap_or(0) as usize).unwrap();
    let [tokens, vocab, width] = ["T", "V", "D"].map(|letter| problem.dim(letter));
    let shape = LinearShape::new([tokens, width], axis.weight(vocab, width), Some(axis)).unwrap();
    Operands::new(
        &options(problem),
        shape,
        inputs.expect("hidden"),
        inputs.expect("weight"),
        inputs.slice("bias"),
        inputs.expect::<i64>("labels").into(),
    )
    .unwrap()
}

fn rounded<E: Element>(all: &[f64]) -> Vec<E> {
    all.iter().map(|&x| E::from_f64(x)).collect()
}

/// Gradients that are the reference's, rounded, pass; with one entry of one of them wrong they
/// fail, and the entry is named.
fn one_wrong_entry<E: Element + ArrayElement>() {
    let op = Op::named("linear_cross_entropy").unwrap();
    let dtype = <E as Element>::DTYPE;
    let more = [
        ("reduction", Value::Word("none")),
        ("bias", Value::Bool(true)),
        ("vocab_axis", Value::Integer(1)),
        ("label_smoothing", Value::Number(0.1)),
        ("z_loss", Value::Number(0.01)),
        ("softcap", Value::Number(9.0)),
    ];
    let problem = problem(op, dtype, &[9, 70, 24], &more);
    let rows: Vec<u64> = (0..9).collect();
    let seeded = Synthetic { ignored: 0.2, seed: seed(), ..Synthetic::default() };
    let inputs = op.inputs(&problem, &seeded, &rows).unwrap();
    let given = mixed(9);
    let (of, operands) = (options(&problem), operands::<E>(&problem, &inputs));
    let label = |token| operands.labels().get(token);
    let Gradients { hidden, weight, bias } =
        pull_back(&operands, Factors::Signed, |token, logits, out| {
            let lse = forward(&of, logits, label(token)).lse;
            let [loss, logps, of_lse] =
                ["dloss", "dlogps", "dlse"].map(|name| f64::from(given.expect::<f32>(name)[token]));
            let cotangents = TokenCotangents { loss, logps, lse: of_lse, entropy: 0.0 };
            gradient(&of, logits, label(token), lse, cotangents, out);
        });
    let mut found = [rounded::<E>(&hidden), rounded(&weight), rounded(&bias)];
    let names = ["dhidden", "dweight", "dbias"];
    let judge = |found: &[Vec<E>; 3]| {
        let mut results = Arrays::default();
        for (name, array) in names.into_iter().zip(found) {
            results.insert(name, Array::of(array.clone()));
        }
        judged(op, &problem, &inputs, Pass::Backward, &given, &results)
    };
    assert!(judge(&found).passed(), "{dtype}");
    for (which, name) in names.into_iter().enumerate() {
        // The largest entry has the most digits to be wrong in.
        let size = |&index: &usize| found[which][index].to_f64().abs();
        let all = 0..found[which].len();
        let index = all.max_by(|a, b| size(a).total_cmp(&size(b))).unwrap();
        for factor in [0.0, 0.8, f64::NAN] {
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

/// The report of loss and gradients of the mean over 40 tokens of 500 columns and 64 hidden ones.
fn check_program<E: Element + ArrayElement>(
    std: f64,
    rounds: Rounds,
    more: &[(&'static str, Value)],
) -> Report {
    const TOKENS: usize = 40;
    let op = Op::named("linear_cross_entropy").unwrap();
    let mut all = vec![("bias", Value::Bool(true)), ("reduction", Value::Word("none"))];
    all.extend(more);
    let problem = problem(op, <E as Element>::DTYPE, &[TOKENS, 500, 64], &all);
    let rows: Vec<u64> = (0..TOKENS as u64).collect();
    let seeded = Synthetic { std: Some(std), seed: seed(), ..Synthetic::default() };
    let inputs = op.inputs(&problem, &seeded, &rows).unwrap();
    let share = 1.0 / TOKENS as f64;
    let given = Arrays::default()
        .with("dloss", vec![share as f32; TOKENS])
        .with("dlogps", vec![0_f32; TOKENS])
        .with("dlse", vec![0_f32; TOKENS]);
    let of = TokenCotangents { loss: f64::from(share as f32), ..Default::default() };
    let options: CrossEntropy = options(&problem);
    let operands = operands::<E>(&problem, &inputs);
    let label = |token: usize| operands.labels().get(token);
    let column = |token: usize| match options.target(label(token), 500) {
        Target::Column(column) => column,
        other => panic!("{other:?}"),
    };
    let slope = |z: f64| options.softcap.map_or(1.0, |cap| (z / cap).cosh().powi(-2));
    let round = |x: f64| <E as Element>::from_f64(x).to_f64();
    let made = |exact: &[f64]| -> Vec<f64> {
        match rounds {
            Rounds::Logits => exact.iter().map(|&z| round(z)).collect(),
            _ => exact.to_vec(),
        }
    };
    let outputs =
        map_rows(&operands, |token, logits| forward(&options, &made(logits), label(token)));
    let row = |token: usize, logits: &[f64], out: &mut [f64]| {
        let (logits, lse) = (made(logits), outputs[token].lse);
        gradient(&options, &logits, label(token), lse, of, out);
        if rounds != Rounds::Softmax {
            return out.iter_mut().for_each(|dz| *dz = round(*dz));
        }
        let at_label = out[column(token)];
        let top = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let of_row = options.cap(top);
        let e: Vec<_> = logits.iter().map(|&z| round((options.cap(z) - of_row).exp())).collect();
        let sum: f64 = e.iter().sum();
        for ((dz, e), &z) in out.iter_mut().zip(e).zip(&logits) {
            // Written times the derivative, where there is a softcap.
            let written = match options.softcap {
                Some(_) => round(slope(z) * (options.cap(z) - of_row).exp()),
                None => e,
            };
            let smoothed = options.label_smoothing / 500.0;
            let more = 1.0 + 2.0 * options.z_loss * lse;
            *dz = of.loss * (more * written / sum - slope(z) * smoothed);
        }
        out[column(token)] = round(at_label * sum / of.loss) * of.loss / sum;
    };
    let Gradients { hidden: dhidden, weight: mut dweight, bias: dbias } =
        pull_back(&operands, Factors::Signed, row);
    if rounds == Rounds::Softmax {
        // Hidden states times a factor that is no power of two.
        let factor = |token: usize| 1.0 + token as f64 / TOKENS as f64;
        let scaled: Vec<E> = inputs
            .expect::<E>("hidden")
            .iter()
            .enumerate()
            .map(|(i, x)| <E as Element>::from_f64(x.to_f64() * factor(i / 64)))
            .collect();
        let labels = inputs.expect::<i64>("labels").into();
        let weight = inputs.expect("weight");
        let scaled =
            Operands::new(&options, operands.shape(), &scaled, weight, None, labels).unwrap();
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
    let numbers = |of: fn(&xentile::cross_entropy::reference::TokenForward) -> f64| {
        outputs.iter().map(|token| of(token) as f32).collect::<Vec<_>>()
    };
    let mut found = Arrays::default()
        .with("loss", numbers(|token| token.loss))
        .with("logps", numbers(|token| token.logps))
        .with("lse", numbers(|token| token.lse));
    for (name, gradient) in [("dhidden", dhidden), ("dweight", dweight), ("dbias", dbias)] {
        found.insert(name, Array::of(rounded::<E>(&gradient)));
    }
    judged(op, &problem, &inputs, Pass::ForwardAndBackward, &given, &found)
}

/// Programs that round what the contract lets them round pass, at any spread of logits.
#[test]
fn operands_may_be_rounded() {
    fn body<E: Element + ArrayElement>() {
        let softcap = [("softcap", Value::Number(15.0))];
        let smoothed = [("label_smoothing", Value::Number(0.1)), ("z_loss", Value::Number(1e-3))];
        for std in [0.5, 1.0, 8.0, 64.0] {
            for options in [&[][..], &softcap, &smoothed] {
                for rounds in [Rounds::Gradients, Rounds::Softmax] {
                    let report = check_program::<E>(std, rounds, options);
                    assert!(
                        report.passed(),
                        "{} {std} {rounds:?} {options:?}: {}",
                        <E as Element>::DTYPE,
                        report.to_json()
                    );
                }
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
    fn body<E: Element + ArrayElement>() {
        for std in [0.5, 1.0, 8.0, 64.0] {
            let report = check_program::<E>(std, Rounds::Logits, &[]);
            let of_tokens = ["fwd/loss_excess", "fwd/logp_excess", "fwd/lse_excess"];
            let of_gradients = ["dhidden/excess", "dweight/excess"];
            let large = of_gradients.into_iter().filter(|_| std >= 8.0);
            for name in of_tokens.into_iter().chain(large) {
                let found = report.metric(name).unwrap();
                assert!(found > 1.0, "{} {std}: {name} is {found}", <E as Element>::DTYPE);
            }
        }
    }
    body::<bf16>();
    body::<f16>();
}

/// What an operation does not have is said before anything is drawn.
#[test]
fn distributions_of_logits_are_no_distributions_of_hidden_states() {
    let op = Op::named("linear_cross_entropy").unwrap();
    let problem = problem(op, DType::F32, &[1, 9, 4], &[]);
    for distribution in [Distribution::Offset, Distribution::Masked] {
        let synthetic = Synthetic { distribution, ..Synthetic::default() };
        let refused = op.inputs(&problem, &synthetic, &[0]).unwrap_err().to_string();
        assert!(refused.contains("normal, uniform, peaked or trained"), "{refused}");
        assert!(!op.facts().distributions.contains(&distribution));
    }
}
