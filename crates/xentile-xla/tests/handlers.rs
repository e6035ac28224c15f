//! Every handler through real call frames, without XLA: what it computes, and what it refuses.

#![allow(clippy::vec_box)] // frames keep the addresses of the items

use half::{bf16, f16};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use xentile::cross_entropy::CrossEntropy;
use xentile::{Labels, LogitsShape, Tile};
use xentile_cpu::cross_entropy::{
    Cotangents, DistributionOutputs, EntropyCotangents, Kernel, Launch, SavedLse, TokenOutputs,
    default_tile,
};
use xentile_cpu::scale::scale;
use xentile_cpu::{InOut, Isa, Threads};
use xla_ffi::testing::{Array, Call};
use xla_ffi::{DType, abi};

#[path = "../../xentile-cpu/tests/common/mod.rs"]
mod common;

const POISON: u64 = 0xa5a5_a5a5_a5a5_a5a5;

trait Element: xentile::Element + xla_ffi::Element {}
impl<E: xentile::Element + xla_ffi::Element> Element for E {}

/// The handler that a CPU executes.
fn handler(target: &str) -> abi::Handler {
    let found = every_handler(target).next();
    found.unwrap_or_else(|| panic!("no {target} in the table")).handler()
}

/// The handlers of a target, on every platform and in every stage.
fn every_handler(target: &str) -> impl Iterator<Item = &'static xentile_xla::Target> {
    xentile_xla::targets().iter().filter(move |entry| entry.target() == target)
}

/// Those that execute: a handler of another stage knows some of the target's operands only, so that
/// what it does not know is not wrong.
fn executing(target: &str) -> impl Iterator<Item = &'static xentile_xla::Target> {
    every_handler(target).filter(|entry| entry.stage() == xla_ffi::Stage::Execute as u32)
}

fn call(arguments: Vec<Box<Array>>, results: Vec<Box<Array>>) -> Call {
    let mut call = Call::new(arguments, results);
    call.results.iter_mut().for_each(|result| result.data.fill(POISON));
    call
}

/// Puts a result in the memory of an argument.
fn in_place(mut call: Call, argument: usize, result: usize) -> Call {
    call.results[result].buffer.data = call.arguments[argument].buffer.data;
    call
}

/// A problem, as a program would pass it.
struct Problem<E> {
    leading: Vec<i64>,
    options: CrossEntropy,
    /// `time_block` and `block_size`.
    tile: [Option<i64>; 2],
    shape: LogitsShape,
    logits: Vec<E>,
    labels: Vec<i64>,
    cotangents: [Vec<f32>; 3],
}

impl<E: Element> Problem<E> {
    fn new(rng: &mut ChaCha8Rng, leading: &[i64], vocab: i64) -> Self {
        let tokens = leading.iter().product::<i64>() as usize;
        let shape = LogitsShape::new(tokens, vocab as usize).unwrap();
        let mut floats = || (0..tokens).map(|_| rng.random_range(-1.0..1.0)).collect::<Vec<f32>>();
        let mut cotangents = [floats(), floats(), floats()];
        let mut labels: Vec<_> = (0..tokens).map(|_| rng.random_range(0..vocab)).collect();
        // One of each special kind, where there are tokens enough.
        let mut special = |token: usize, label| labels.get_mut(token).map(|at| *at = label);
        special(1, -100);
        special(2, vocab);
        special(3, -1);
        if let Some(dloss) = cotangents[0].get_mut(4) {
            *dloss = 0.0;
        }
        let logits = (0..shape.elements()).map(|_| E::from_f64(rng.random_range(-9.0..9.0)));
        Self {
            leading: leading.to_vec(),
            options: CrossEntropy::default(),
            tile: [None, None],
            shape,
            logits: logits.collect(),
            labels,
            cotangents,
        }
    }

    fn logits(&self) -> Box<Array> {
        Array::of(&self.matrix(), &self.logits)
    }

    fn matrix(&self) -> Vec<i64> {
        [&self.leading[..], &[self.shape.vocab() as i64]].concat()
    }

    fn labels(&self, narrow: bool) -> Box<Array> {
        if narrow {
            let labels: Vec<_> = self.labels.iter().map(|&label| label as i32).collect();
            Array::of(&self.leading, &labels)
        } else {
            Array::of(&self.leading, &self.labels)
        }
    }

    fn floats(&self, values: &[f32]) -> Box<Array> {
        Array::of(&self.leading, values)
    }

    fn tokenwise(&self) -> Box<Array> {
        Array::new(DType::F32, &self.leading)
    }

    fn dlogits(&self) -> Box<Array> {
        Array::new(<E as xla_ffi::Element>::DTYPE, &self.matrix())
    }

    fn attributes(&self, call: Call, every_token: Option<bool>) -> Call {
        let options = &self.options;
        let mut call = call
            .scalar("ignore_index", options.ignore_index)
            .scalar("label_smoothing", options.label_smoothing)
            .scalar("z_loss", options.z_loss);
        if let Some(softcap) = options.softcap {
            call = call.scalar("softcap", softcap);
        }
        if options.is_tempered() {
            call = call.scalar("temperature", options.temperature);
        }
        for (name, extent) in ["time_block", "block_size"].into_iter().zip(self.tile) {
            if let Some(extent) = extent {
                call = call.scalar(name, extent);
            }
        }
        match every_token {
            Some(every_token) => call.scalar("every_token", xla_ffi::Pred::from(every_token)),
            None => call,
        }
    }

    fn forward(&self, narrow: bool, every_token: bool) -> Call {
        let results = (0..4).map(|_| self.tokenwise()).collect();
        self.attributes(call(vec![self.logits(), self.labels(narrow)], results), Some(every_token))
    }

    fn backward(&self, narrow: bool, lse: &[f32], lse_low: &[f32]) -> Call {
        let [g, h, k] = self.cotangents.each_ref().map(|values| self.floats(values));
        let (lse, lse_low) = (self.floats(lse), self.floats(lse_low));
        let arguments = vec![self.logits(), self.labels(narrow), lse, lse_low, g, h, k];
        self.attributes(call(arguments, vec![self.dlogits()]), None)
    }

    fn fused(&self, narrow: bool, every_token: bool) -> Call {
        let dloss = self.floats(&self.cotangents[0]);
        let mut results: Vec<_> = (0..3).map(|_| self.tokenwise()).collect();
        results.push(self.dlogits());
        let arguments = vec![self.logits(), self.labels(narrow), dloss];
        self.attributes(call(arguments, results), Some(every_token))
    }

    fn distribution(&self) -> Call {
        let mut results: Vec<_> = (0..6).map(|_| self.tokenwise()).collect();
        results.push(Array::new(DType::S32, &self.leading));
        self.attributes(call(vec![self.logits(), self.labels(true)], results), Some(true))
    }

    fn distribution_fused(&self, every_token: bool) -> Call {
        let mut results: Vec<_> = (0..5).map(|_| self.tokenwise()).collect();
        results.extend([Array::new(DType::S32, &self.leading), self.dlogits()]);
        let arguments = vec![self.logits(), self.labels(true), self.floats(&self.cotangents[0])];
        self.attributes(call(arguments, results), Some(every_token))
    }

    fn distribution_backward(&self, saved: [&[f32]; 3]) -> Call {
        let [g, h, k] = self.cotangents.each_ref().map(|values| self.floats(values));
        let mut arguments = vec![self.logits(), self.labels(true)];
        arguments.extend(saved.map(|values| self.floats(values)));
        arguments.extend([g, h, k, self.floats(&self.cotangents[1])]);
        self.attributes(call(arguments, vec![self.dlogits()]), None)
    }

    fn with_kernel(&self, body: impl FnOnce(Kernel<'_>)) {
        let pool = Threads::new(1).unwrap();
        let tuned = default_tile::<E>(self.shape.vocab());
        let extent = |extent: Option<i64>, tuned| extent.map_or(tuned, |extent| extent as usize);
        let tile = Tile::new(
            extent(self.tile[0], tuned.time_block()),
            extent(self.tile[1], tuned.block_size()),
        );
        let launch = Launch { isa: Isa::detect(), tile: Some(tile.unwrap()), pool: &pool };
        let labels = Labels::from(&self.labels[..]);
        body(Kernel::with_unchecked_labels(self.options, self.shape, labels, launch).unwrap());
    }

    /// The handlers of distributions against the kernel, bit for bit.
    fn check_distribution(&self) {
        let tokens = self.shape.tokens();
        self.with_kernel(|kernel| {
            let mut native = [(); 6].map(|()| vec![7.0_f32; tokens]);
            let mut argmax = vec![7_i32; tokens];
            let [loss, logps, lse, lse_low, entropy, highest] = native.each_mut();
            let outputs = TokenOutputs {
                loss: Some(loss),
                logps: Some(logps),
                lse: Some(lse),
                lse_low: Some(lse_low),
                zero_masked: false,
            };
            let of = DistributionOutputs { entropy, highest, argmax: &mut argmax };
            kernel.distribution(&self.logits, outputs, of).unwrap();
            let mut forward = self.distribution();
            forward.call(handler("xentile_cross_entropy_distribution")).unwrap();
            for (result, native) in forward.results.iter_mut().zip(&native) {
                same_bits("distribution", &result.values::<f32>(), native);
            }
            assert_eq!(forward.results[6].values::<i32>(), argmax);

            let [_, _, lse, lse_low, entropy, _] = &native;
            let mut dlogits = self.logits.clone();
            let [g, h, k] = &self.cotangents;
            kernel
                .distribution_backward(
                    InOut::InPlace(&mut dlogits),
                    SavedLse { lse, lse_low: Some(lse_low) },
                    Cotangents { loss: Some(g), logps: Some(h), lse: Some(k) },
                    EntropyCotangents { entropy, dentropy: h },
                )
                .unwrap();
            let backward = || self.distribution_backward([lse, lse_low, entropy]);
            for mut backward in [backward(), in_place(backward(), 0, 0)] {
                backward.call(handler("xentile_cross_entropy_distribution_backward")).unwrap();
                same_bits("backward", &backward.results[0].values::<E>(), &dlogits);
            }

            for every_token in [false, true] {
                let mut native = [(); 5].map(|()| vec![7.0_f32; tokens]);
                let mut argmax = vec![7_i32; tokens];
                let [loss, lse, lse_low, entropy, highest] = native.each_mut();
                let outputs = TokenOutputs {
                    loss: Some(loss),
                    logps: None,
                    lse: Some(lse),
                    lse_low: Some(lse_low),
                    zero_masked: !every_token,
                };
                let of = DistributionOutputs { entropy, highest, argmax: &mut argmax };
                let mut dlogits = self.logits.clone();
                kernel.distribution_fused(InOut::InPlace(&mut dlogits), g, outputs, of).unwrap();
                let fused = || self.distribution_fused(every_token);
                for mut fused in [fused(), in_place(fused(), 0, 6)] {
                    fused.call(handler("xentile_cross_entropy_distribution_fused")).unwrap();
                    for (result, native) in fused.results.iter_mut().zip(&native) {
                        same_bits("distribution fused", &result.values::<f32>(), native);
                    }
                    assert_eq!(fused.results[5].values::<i32>(), argmax);
                    same_bits("distribution fused", &fused.results[6].values::<E>(), &dlogits);
                }
            }
        });
    }

    /// Every handler against the kernel, bit for bit.
    fn check(&self) {
        self.check_distribution();
        let tokens = self.shape.tokens();
        self.with_kernel(|kernel| {
            for (narrow, every_token) in
                [(false, false), (false, true), (true, false), (true, true)]
            {
                let zero_masked = !every_token;
                let mut native = [(); 4].map(|()| vec![7.0_f32; tokens]);
                let [loss, logps, lse, lse_low] = native.each_mut().map(|x| Some(&mut x[..]));
                let outputs = TokenOutputs { loss, logps, lse, lse_low, zero_masked };
                kernel.forward(&self.logits, outputs).unwrap();
                let mut forward = self.forward(narrow, every_token);
                forward.call(handler("xentile_cross_entropy_forward")).unwrap();
                for (result, native) in forward.results.iter_mut().zip(&native) {
                    same_bits("forward", &result.values::<f32>(), native);
                }

                let [_, _, lse, lse_low] = &native;
                let mut dlogits = self.logits.clone();
                let saved = SavedLse { lse, lse_low: Some(lse_low) };
                let [g, h, k] = &self.cotangents;
                let cotangents = Cotangents { loss: Some(g), logps: Some(h), lse: Some(k) };
                kernel.backward(InOut::InPlace(&mut dlogits), saved, cotangents).unwrap();
                let backward = || self.backward(narrow, lse, lse_low);
                for mut backward in [backward(), in_place(backward(), 0, 0)] {
                    backward.call(handler("xentile_cross_entropy_backward")).unwrap();
                    same_bits("backward", &backward.results[0].values::<E>(), &dlogits);
                }

                let mut native = [(); 3].map(|()| vec![7.0_f32; tokens]);
                let [loss, lse, lse_low] = native.each_mut().map(|x| Some(&mut x[..]));
                let outputs = TokenOutputs { loss, logps: None, lse, lse_low, zero_masked };
                dlogits.copy_from_slice(&self.logits);
                kernel.fused(InOut::InPlace(&mut dlogits), g, outputs).unwrap();
                let fused = || self.fused(narrow, every_token);
                for mut fused in [fused(), in_place(fused(), 0, 3)] {
                    fused.call(handler("xentile_cross_entropy_fused")).unwrap();
                    for (result, native) in fused.results.iter_mut().zip(&native) {
                        same_bits("fused", &result.values::<f32>(), native);
                    }
                    same_bits("fused dlogits", &fused.results[3].values::<E>(), &dlogits);
                }
            }
        });
    }
}

fn same_bits<E: xentile::Element>(what: &str, actual: &[E], native: &[E]) {
    let bits = |x: &[E]| x.iter().map(|x| x.to_f32().to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(actual), bits(native), "{what}");
}

/// Runs `body` for every dtype.
macro_rules! for_each_dtype {
    ($body:ident) => {
        $body::<f32>();
        $body::<bf16>();
        $body::<f16>();
    };
}

#[test]
fn values_are_those_of_the_kernels() {
    fn body<E: Element>() {
        let mut rng = common::fresh_rng("handlers");
        let leading: [&[i64]; 6] = [&[], &[1], &[6], &[2, 5], &[3, 1, 2, 1], &[2, 0, 3]];
        for leading in leading {
            for vocab in [1, 33, 1003] {
                let mut problem = Problem::<E>::new(&mut rng, leading, vocab);
                problem.check();
                problem.options =
                    CrossEntropy { label_smoothing: 0.1, z_loss: 1e-3, ..problem.options };
                problem.tile = [Some(2), None];
                problem.check();
                problem.options.softcap = Some(5.0);
                problem.options.ignore_index = 0;
                problem.tile = [None, Some(64)];
                problem.check();
                problem.tile = [Some(i64::MAX), Some(i64::MAX)];
                problem.check();
            }
        }
    }
    for_each_dtype!(body);
}

#[test]
fn scaled_values_are_those_of_the_kernel() {
    fn body<E: Element>() {
        let mut rng = common::fresh_rng("handlers");
        let shapes: [(&[i64], &[i64]); 7] = [
            (&[], &[]),
            (&[5], &[]),
            (&[5], &[5]),
            (&[2, 3, 41], &[2, 3]),
            (&[2, 3, 41], &[2]),
            (&[4, 0], &[4]),
            (&[0, 7], &[0]),
        ];
        for (x_dims, factor_dims) in shapes {
            let x: Vec<E> = (0..x_dims.iter().product())
                .map(|_| E::from_f64(rng.random_range(-9.0..9.0)))
                .collect();
            let factors: Vec<f32> =
                (0..factor_dims.iter().product()).map(|_| rng.random_range(-2.0..2.0)).collect();
            for factors in [factors.clone(), vec![1.0; factors.len()]] {
                let pool = Threads::new(1).unwrap();
                let mut native = x.clone();
                scale(Isa::detect(), &pool, InOut::InPlace(&mut native), &factors).unwrap();
                let frame = || {
                    call(
                        vec![Array::of(x_dims, &x), Array::of(factor_dims, &factors)],
                        vec![Array::new(<E as xla_ffi::Element>::DTYPE, x_dims)],
                    )
                };
                for mut frame in [frame(), in_place(frame(), 0, 0)] {
                    frame.call(handler("xentile_scale")).unwrap();
                    same_bits("scale", &frame.results[0].values::<E>(), &native);
                }
            }
        }
    }
    for_each_dtype!(body);
}

#[test]
fn every_handler_answers_the_metadata_call() {
    for target in xentile_xla::targets() {
        let mut call = Call::new(vec![], vec![]);
        // SAFETY: zeros are a value of every field.
        let mut metadata = unsafe { std::mem::zeroed::<abi::Metadata>() };
        metadata.struct_size = std::mem::offset_of!(abi::Metadata, traits) + size_of::<u32>();
        let metadata = call.own(metadata);
        call.frame.extension_start = call
            .own(abi::MetadataExtension {
                extension_base: abi::ExtensionBase {
                    struct_size: size_of::<abi::MetadataExtension>(),
                    r#type: abi::EXTENSION_METADATA,
                    next: std::ptr::null_mut(),
                },
                metadata,
            })
            .cast();
        call.call(target.handler()).unwrap();
        // SAFETY: the call owns it.
        let (version, traits) = unsafe { ((*metadata).api_version, (*metadata).traits) };
        let graphs = xla_ffi::Traits::COMMAND_BUFFER_COMPATIBLE.bits();
        assert_eq!(traits, if target.platform() == "CUDA" { graphs } else { 0 });
        let (mut major, mut minor) = (-1, -1);
        // SAFETY: two numbers to write.
        unsafe { xentile_xla::xentile_ffi_version(&raw mut major, &raw mut minor) };
        assert_eq!((version.major_version, version.minor_version), (major, minor));
    }
}

/// A right frame of a target.
fn right(target: &str) -> Call {
    let problem = Problem::<bf16>::new(&mut ChaCha8Rng::seed_from_u64(0), &[2, 3], 5);
    match target {
        "xentile_cross_entropy_forward" => problem.forward(true, true),
        "xentile_cross_entropy_backward" => problem.backward(true, &[0.0; 6], &[0.0; 6]),
        "xentile_cross_entropy_fused" => problem.fused(true, true),
        "xentile_cross_entropy_distribution" => problem.distribution(),
        "xentile_cross_entropy_distribution_fused" => problem.distribution_fused(true),
        "xentile_cross_entropy_distribution_backward" => {
            problem.distribution_backward([&[0.0; 6]; 3])
        }
        "xentile_scale" => call(
            vec![Array::new(DType::Bf16, &[2, 3, 5]), Array::of(&[2, 3], &[0.5_f32; 6])],
            vec![Array::new(DType::Bf16, &[2, 3, 5])],
        ),
        _ => panic!("{target} has no right frame here"),
    }
}

/// The names of a target's arguments and results, in order.
fn names(target: &str) -> (&'static [&'static str], &'static [&'static str]) {
    match target {
        "xentile_cross_entropy_forward" => {
            (&["logits", "labels"], &["loss", "logps", "lse", "lse_low"])
        }
        "xentile_cross_entropy_backward" => {
            (&["logits", "labels", "lse", "lse_low", "dloss", "dlogps", "dlse"], &["dlogits"])
        }
        "xentile_cross_entropy_fused" => {
            (&["logits", "labels", "dloss"], &["loss", "lse", "lse_low", "dlogits"])
        }
        "xentile_cross_entropy_distribution" => (
            &["logits", "labels"],
            &["loss", "logps", "lse", "lse_low", "entropy", "highest", "argmax"],
        ),
        "xentile_cross_entropy_distribution_fused" => (
            &["logits", "labels", "dloss"],
            &["loss", "lse", "lse_low", "entropy", "highest", "argmax", "dlogits"],
        ),
        "xentile_cross_entropy_distribution_backward" => (
            &[
                "logits", "labels", "lse", "lse_low", "entropy", "dloss", "dlogps", "dlse",
                "dentropy",
            ],
            &["dlogits"],
        ),
        "xentile_scale" => (&["x", "factor"], &["scaled"]),
        _ => panic!("{target} has no names here"),
    }
}

/// Changes a right frame of `target`, and expects of every handler an `INVALID_ARGUMENT` that says
/// each of `reasons`, with results untouched. Those of GPUs find it before they look for one.
fn refused(target: &str, change: impl Fn(&mut Call), reasons: &[&str]) {
    refused_by(every_handler(target), change, reasons);
}

/// As [`refused`], by the handlers of these entries.
fn refused_by(
    entries: impl Iterator<Item = &'static xentile_xla::Target>,
    change: impl Fn(&mut Call),
    reasons: &[&str],
) {
    for entry in entries {
        let target = entry.target();
        let mut call = right(target);
        change(&mut call);
        call.link();
        call.frame.stage = entry.stage();
        call.results.iter_mut().for_each(|result| result.data.fill(POISON));
        let message = call.refused(entry.handler());
        let symbol = entry.symbol();
        for reason in reasons {
            assert!(message.contains(reason), "{symbol}: {message:?} does not say {reason:?}");
        }
        let untouched = |result: &Array| result.data.iter().all(|&word| word == POISON);
        assert!(call.results.iter().all(|result| untouched(result)), "{symbol}: {message}");
    }
}

/// The targets of losses of logits. Other operations may have a test file of their own.
fn targets() -> impl Iterator<Item = &'static str> {
    let host = xentile_xla::targets().iter().filter(|entry| entry.platform() == "Host");
    let own = ["xentile_cross_entropy", "xentile_scale"];
    host.map(xentile_xla::Target::target)
        .filter(move |target| own.iter().any(|own| target.starts_with(own)))
}

/// Every operand of a target: whether it is a result, its index and its name.
fn operands(target: &str) -> Vec<(bool, usize, &'static str)> {
    let (arguments, results) = names(target);
    let list = |result, names: &'static [&'static str]| {
        names.iter().enumerate().map(move |(index, &name)| (result, index, name))
    };
    list(false, arguments).chain(list(true, results)).collect()
}

/// Argument or result `index` of the call.
fn operand(call: &mut Call, result: bool, index: usize) -> &mut Box<Array> {
    if result { &mut call.results[index] } else { &mut call.arguments[index] }
}

/// Whether a target gives nothing of the shape of its logits.
fn is_forward(target: &str) -> bool {
    target.ends_with("forward") || target.ends_with("distribution")
}

#[test]
fn wrong_shapes_are_refused_by_name() {
    for target in targets() {
        for (result, index, name) in operands(target) {
            let dims = operand(&mut right(target), result, index).dims.clone();
            let longer = |axis| {
                let mut dims = dims.clone();
                dims[axis] += 1;
                dims
            };
            let mut wrong: Vec<Vec<i64>> = (0..dims.len()).map(longer).collect();
            wrong.extend([[&dims[..], &[1]].concat(), [&[1], &dims[..]].concat()]);
            if name != "factor" {
                wrong.extend([vec![7], dims[1..].to_vec()]);
            }
            for dims in wrong {
                let reason = match name {
                    // Its shape is what others are held to, and another one fits a forward pass.
                    "logits" if dims[..] == [2, 3, 6] && is_forward(target) => continue,
                    "logits" | "x" => String::from("` has shape ["),
                    _ => format!("`{name}` has shape {dims:?}; it must be "),
                };
                let change = |call: &mut Call| {
                    let operand = operand(call, result, index);
                    *operand = Array::new(DType::from_u32(operand.buffer.dtype).unwrap(), &dims);
                };
                refused(target, change, &[&reason]);
            }
        }
    }
}

#[test]
fn logits_without_a_vocabulary_are_refused() {
    for target in targets().filter(|target| target.contains("cross_entropy")) {
        for (dims, reason) in [
            (&[][..], "`logits` has shape []; it must have an axis at least"),
            (&[0], "`logits` has shape [0]; its last axis, the vocabulary, must be at least 1"),
            (&[2, 3, 0], "`logits` has shape [2, 3, 0]; its last axis"),
        ] {
            let change = |call: &mut Call| call.arguments[0] = Array::new(DType::Bf16, dims);
            refused(target, change, &[reason]);
        }
    }
    // Extents that multiply to more than any number holds, beside one of 0.
    let target = "xentile_cross_entropy_forward";
    let mut call = right(target);
    let leading = [i64::MAX, 0, i64::MAX];
    let empty = |dtype, dims: &[i64]| {
        let mut array = Array::new(dtype, &[0]);
        array.dims = dims.to_vec();
        array.buffer.rank = dims.len() as i64;
        array.buffer.dims = array.dims.as_mut_ptr();
        array
    };
    call.arguments[0] = empty(DType::Bf16, &[i64::MAX, 0, i64::MAX, i64::MAX]);
    call.arguments[1] = empty(DType::S32, &leading);
    call.results.iter_mut().for_each(|result| *result = empty(DType::F32, &leading));
    call.link();
    for entry in every_handler(target) {
        call.frame.stage = entry.stage();
        call.call(entry.handler()).unwrap();
    }
}

#[test]
fn wrong_dtypes_are_refused_by_name() {
    for target in targets() {
        for (result, index, name) in operands(target) {
            for dtype in [DType::F64, DType::S8, DType::U32, DType::S64, DType::F16, DType::Pred] {
                let last = names(target).1.last().unwrap();
                let [named, value] = match (name, dtype) {
                    ("labels", DType::S64) => continue,
                    ("logits", DType::F16) if is_forward(target) => continue,
                    // f16 is right, and the result is what must be f16 too.
                    ("logits" | "x", DType::F16) => [last, "has dtype bf16; it must be f16"],
                    _ => [name, &*format!("has dtype {dtype}; it must be ")],
                };
                let change = |call: &mut Call| {
                    let operand = operand(call, result, index);
                    *operand = Array::new(dtype, &operand.dims.clone());
                };
                refused(target, change, &[&format!("`{named}`"), value]);
            }
        }
    }
}

#[test]
fn wrong_numbers_of_operands_are_refused() {
    for target in targets() {
        let (arguments, results) = names(target);
        let (last, count) = (arguments[arguments.len() - 1], arguments.len());
        let less = |call: &mut Call| _ = call.arguments.pop();
        refused(target, less, &[&format!("argument {} (`{last}`) is missing", count - 1)]);
        let more = |call: &mut Call| {
            call.arguments.push(Array::f32(&[1.0]));
            call.types.push(1);
        };
        refused(
            target,
            more,
            &[&format!("has {} arguments; the handler takes {count}", count + 1)],
        );
        let (last, count) = (results[results.len() - 1], results.len());
        let less = |call: &mut Call| _ = call.results.pop();
        refused(target, less, &[&format!("result {} (`{last}`) is missing", count - 1)]);
        let more = |call: &mut Call| {
            call.results.push(Array::f32(&[1.0]));
            call.types.push(1);
        };
        refused(target, more, &[&format!("has {} results; the handler takes {count}", count + 1)]);
    }
}

/// Takes the attribute `name` out of the call.
fn remove(call: &mut Call, name: &str) {
    let is = |span: &abi::ByteSpan| {
        // SAFETY: names are text that the call owns.
        unsafe { std::slice::from_raw_parts(span.ptr.cast::<u8>(), span.len) == name.as_bytes() }
    };
    if let Some(index) = call.names.iter().position(|span| is(span)) {
        call.names.remove(index);
        call.attr_types.remove(index);
        call.attrs.remove(index);
    }
}

/// Gives the attribute `name` another value.
fn set<T: xla_ffi::Element>(call: &mut Call, name: &str, value: T) {
    remove(call, name);
    let taken = std::mem::replace(call, Call::new(vec![], vec![]));
    *call = taken.scalar(name, value);
}

#[test]
fn wrong_attributes_are_refused_by_name() {
    for target in targets().filter(|target| target.contains("cross_entropy")) {
        let takes_every_token = !target.contains("backward");
        let mut required = vec!["ignore_index", "label_smoothing", "z_loss"];
        required.extend(takes_every_token.then_some("every_token"));
        for name in required {
            let reason = format!("attribute `{name}` is missing");
            refused(target, |call| remove(call, name), &[&reason]);
            let reason = format!("attribute `{name}` is u8; it must be");
            refused(target, |call| set(call, name, 1_u8), &[&reason]);
        }
        for name in ["softcap", "temperature", "time_block", "block_size"] {
            let reason = format!("attribute `{name}` is f32; it must be");
            refused(target, |call| set(call, name, 1_f32), &[&reason]);
        }
        for name in ["time_block", "block_size"] {
            for extent in [0, -1, i64::MIN] {
                let reason = format!("attribute `{name}` is {extent}; it must be at least 1");
                refused(target, |call| set(call, name, extent), &[&reason]);
            }
        }
        for (name, values) in [
            ("label_smoothing", &[2.0, -0.1, f64::NAN, f64::INFINITY][..]),
            ("z_loss", &[-1e-4, f64::NAN, f64::INFINITY]),
            ("softcap", &[0.0, -3.0, f64::NAN, f64::INFINITY]),
            ("temperature", &[0.0, -1.0, f64::NAN, f64::INFINITY]),
        ] {
            for &value in values {
                let reason = format!("attribute {name} is {value}; it must be ");
                refused(target, |call| set(call, name, value), &[&reason]);
            }
        }
        let reasons = ["attribute `reduction` is unknown; the handler takes `ignore_index`, "];
        refused_by(executing(target), |call| set(call, "reduction", 1_i64), &reasons);
        if !takes_every_token {
            let set = |call: &mut Call| set(call, "every_token", xla_ffi::Pred::from(true));
            refused_by(executing(target), set, &["attribute `every_token` is unknown"]);
        }
    }
    let reasons = ["attribute `factor` is unknown; the handler takes none"];
    refused_by(executing("xentile_scale"), |call| set(call, "factor", 1_f32), &reasons);
}

/// A result may lie in the place of the first argument, exactly or not at all.
#[test]
fn memory_shared_in_part_is_refused() {
    for (target, result) in [
        ("xentile_cross_entropy_backward", 0),
        ("xentile_cross_entropy_fused", 3),
        ("xentile_cross_entropy_distribution_fused", 6),
        ("xentile_cross_entropy_distribution_backward", 0),
        ("xentile_scale", 0),
    ] {
        for entry in every_handler(target) {
            let mut call = right(target);
            call.frame.stage = entry.stage();
            call.arguments[0].data.push(POISON);
            call.arguments[0].buffer.data = call.arguments[0].data.as_mut_ptr().cast();
            call.results[result].buffer.data =
                call.arguments[0].buffer.data.wrapping_byte_add(size_of::<bf16>());
            let before = call.arguments[0].data.clone();
            let message = call.refused(entry.handler());
            assert!(message.contains("lies over a part of "), "{message}");
            assert!(call.arguments[0].data == before, "{target}");
        }
    }
    let mut call = right("xentile_cross_entropy_forward");
    call.results[0].buffer.data = call.arguments[0].buffer.data;
    let message = call.refused(handler("xentile_cross_entropy_forward"));
    assert!(message.contains("argument 0 (`logits`) shares memory with result 0"), "{message}");
}

#[cfg(feature = "cuda")]
#[test]
fn without_a_gpu_handlers_for_one_say_what_is_missing() {
    let Err(missing) = xentile_cuda::available() else {
        println!("there is a GPU here");
        return;
    };
    for target in targets() {
        for entry in every_handler(target).filter(|entry| entry.platform() == "CUDA") {
            let mut call = right(target);
            call.frame.stage = entry.stage();
            let (code, message) = call.call(entry.handler()).unwrap_err();
            assert_eq!(code, xla_ffi::ErrorCode::FailedPrecondition, "{message}");
            assert!(message.contains(&missing.to_string()), "{message}");
        }
        right(target).call(handler(target)).expect("a CPU computes as before");
    }
}

mod linear_on_cpu {
    use super::*;
    use xentile::linear_cross_entropy::LinearShape;
    use xentile_cpu::linear_cross_entropy::{Gradients, Linear, Operands, scratch_bytes};

    const TOKENS: usize = 9;
    const WIDTH: usize = 5;
    const VOCAB: usize = 23;
    const COLUMNS: usize = 8;

    struct Problem<E> {
        vocab_axis: usize,
        options: CrossEntropy,
        hidden: Vec<E>,
        weight: Vec<E>,
        bias: Option<Vec<f32>>,
        labels: Vec<i64>,
        cotangents: [Vec<f32>; 3],
    }

    impl<E: Element> Problem<E> {
        fn new(rng: &mut ChaCha8Rng, vocab_axis: usize, has_bias: bool) -> Self {
            let mut numbers =
                |length| (0..length).map(|_| rng.random_range(-2.0..2.0)).collect::<Vec<f32>>();
            let elements = |numbers: Vec<f32>| {
                numbers.into_iter().map(|x| E::from_f64(x.into())).collect::<Vec<_>>()
            };
            let (hidden, weight) = (numbers(TOKENS * WIDTH), numbers(VOCAB * WIDTH));
            let bias = has_bias.then(|| numbers(VOCAB));
            let cotangents = [(); 3].map(|()| numbers(TOKENS));
            let mut labels: Vec<_> =
                (0..TOKENS).map(|_| rng.random_range(0..VOCAB as i64)).collect();
            labels[1] = -100;
            let options =
                CrossEntropy { label_smoothing: 0.1, z_loss: 1e-3, ..CrossEntropy::default() };
            let (hidden, weight) = (elements(hidden), elements(weight));
            Self { vocab_axis, options, hidden, weight, bias, labels, cotangents }
        }

        fn weight_extents(&self) -> [usize; 2] {
            let extents = [VOCAB, WIDTH];
            [extents[self.vocab_axis], extents[1 - self.vocab_axis]]
        }

        fn shape(&self) -> LinearShape {
            LinearShape::new([TOKENS, WIDTH], self.weight_extents(), None).unwrap()
        }

        fn scratch(&self) -> usize {
            scratch_bytes(self.shape(), <E as xentile::Element>::DTYPE, COLUMNS, true)
        }

        /// The call of a pass, whose arguments have these numbers of tokens after the labels.
        fn call(&self, pass: &str, numbers: &[&[f32]]) -> Call {
            let left = match pass {
                "resume" => vec![self.like_weight(), self.scratch_array()],
                _ => Vec::new(),
            };
            self.call_with(pass, numbers, left)
        }

        fn like_weight(&self) -> Box<Array> {
            let dims = self.weight_extents().map(|extent| extent as i64);
            Array::new(<E as xla_ffi::Element>::DTYPE, &dims)
        }

        fn scratch_array(&self) -> Box<Array> {
            Array::new(DType::U8, &[self.scratch() as i64])
        }

        /// As [`Self::call`], with what another call left.
        fn call_with(&self, pass: &str, numbers: &[&[f32]], left: Vec<Box<Array>>) -> Call {
            let hidden = [TOKENS as i64, WIDTH as i64];
            let weight = self.weight_extents().map(|extent| extent as i64);
            let mut arguments = vec![
                Array::of(&hidden, &self.hidden),
                Array::of(&weight, &self.weight),
                Array::of(&hidden[..1], &self.labels),
            ];
            arguments.extend(numbers.iter().map(|numbers| Array::f32(numbers)));
            arguments.extend(left);
            arguments.extend(self.bias.as_deref().map(Array::f32));
            let of_tokens = match pass {
                "forward" | "keep" => 4,
                "backward" | "resume" => 0,
                _ => 3,
            };
            let mut results: Vec<_> =
                (0..of_tokens).map(|_| Array::new(DType::F32, &hidden[..1])).collect();
            let makes_gradients = !matches!(pass, "forward" | "keep");
            if makes_gradients {
                results.push(Array::new(<E as xla_ffi::Element>::DTYPE, &hidden));
            }
            if pass != "forward" {
                results.push(self.like_weight());
            }
            results.push(self.scratch_array());
            if makes_gradients && self.bias.is_some() {
                results.push(Array::new(DType::F32, &[VOCAB as i64]));
            }
            let call = call(arguments, results)
                .scalar("ignore_index", self.options.ignore_index)
                .scalar("label_smoothing", self.options.label_smoothing)
                .scalar("z_loss", self.options.z_loss)
                .scalar("vocab_axis", self.vocab_axis as i64)
                .scalar("chunk_columns", COLUMNS as i64);
            match pass {
                "backward" | "resume" => call,
                _ => call.scalar("every_token", xla_ffi::Pred::from(true)),
            }
        }

        /// Every handler against the kernel, bit for bit.
        fn check(&self) {
            let pool = Threads::new(1).unwrap();
            let launch = Launch { isa: Isa::detect(), tile: None, pool: &pool };
            let labels = Labels::from(&self.labels[..]);
            let linear = Linear::new(self.options, self.shape(), labels, launch, COLUMNS).unwrap();
            let operands = Operands {
                hidden: &self.hidden[..],
                weight: &self.weight,
                bias: self.bias.as_deref(),
            };
            let scratch = &mut vec![0; self.scratch()][..];
            let [dloss, dlogps, dlse] = &self.cotangents;
            let zero_masked = false;

            let mut native = [(); 4].map(|()| vec![7.0_f32; TOKENS]);
            let [loss, logps, lse, lse_low] = native.each_mut().map(|x| Some(&mut x[..]));
            let outputs = TokenOutputs { loss, logps, lse, lse_low, zero_masked };
            linear.forward(operands, outputs, scratch).unwrap();
            self.run("forward", &[], &native, None);

            let mut made = Made::of(self);
            let [_, _, lse, lse_low] = &native;
            let saved = SavedLse { lse, lse_low: Some(lse_low) };
            let cotangents = Cotangents { loss: Some(dloss), logps: Some(dlogps), lse: Some(dlse) };
            linear.backward(operands, saved, cotangents, made.gradients(), scratch).unwrap();
            let numbers: [&[f32]; 5] = [lse, lse_low, dloss, dlogps, dlse];
            self.run("backward", &numbers, &[], Some(&made));
            self.check_halves(&linear, &numbers);

            let mut native = [(); 3].map(|()| vec![7.0_f32; TOKENS]);
            let [loss, lse, lse_low] = native.each_mut().map(|x| Some(&mut x[..]));
            let outputs = TokenOutputs { loss, logps: None, lse, lse_low, zero_masked };
            linear.fused(operands, dloss, outputs, made.gradients(), scratch).unwrap();
            self.run("fused", &[dloss], &native, Some(&made));
        }

        /// The handlers of both halves of a fused pass, the second with what the first left in memory of
        /// its own and where results go.
        fn check_halves(&self, linear: &Linear<'_>, numbers: &[&[f32]; 5]) {
            let operands = Operands {
                hidden: &self.hidden[..],
                weight: &self.weight,
                bias: self.bias.as_deref(),
            };
            let scratch = &mut vec![0; self.scratch()][..];
            let mut made = Made::of(self);
            let mut native = [(); 4].map(|()| vec![7.0_f32; TOKENS]);
            let [loss, logps, lse, lse_low] = native.each_mut().map(|x| Some(&mut x[..]));
            let outputs = TokenOutputs { loss, logps, lse, lse_low, zero_masked: false };
            linear.keep(operands, outputs, &mut made.weight, scratch).unwrap();
            let [lse, lse_low, dloss, dlogps, dlse] = *numbers;
            let saved = SavedLse { lse, lse_low: Some(lse_low) };
            let cotangents = Cotangents { loss: Some(dloss), logps: Some(dlogps), lse: Some(dlse) };
            linear.resume(operands, saved, cotangents, made.gradients(), scratch).unwrap();

            for takes_place in [false, true] {
                let mut call = self.call("keep", &[]);
                call.call(target("keep")).unwrap();
                let left = call.results.split_off(4);
                for (found, native) in call.results.iter_mut().zip(&native) {
                    same_bits("keep", &found.values::<f32>(), native);
                }
                let mut call = self.call_with("resume", numbers, left);
                if takes_place {
                    call = in_place(in_place(call, 8, 1), 9, 2);
                }
                self.expect("resume", call, &[], Some(&made));
            }
        }

        /// Calls the handler of a pass, and expects these results.
        fn run(
            &self,
            pass: &str,
            numbers: &[&[f32]],
            of_tokens: &[Vec<f32>],
            made: Option<&Made<E>>,
        ) {
            self.expect(pass, self.call(pass, numbers), of_tokens, made);
        }

        /// Makes `call`, and expects these results.
        fn expect(
            &self,
            pass: &str,
            mut call: Call,
            of_tokens: &[Vec<f32>],
            made: Option<&Made<E>>,
        ) {
            call.call(target(pass)).unwrap();
            let (found, gradients) = call.results.split_at_mut(of_tokens.len());
            for (found, native) in found.iter_mut().zip(of_tokens) {
                same_bits(pass, &found.values::<f32>(), native);
            }
            let Some(made) = made else { return };
            same_bits("dhidden", &gradients[0].values::<E>(), &made.hidden);
            same_bits("dweight", &gradients[1].values::<E>(), &made.weight);
            if let Some(bias) = &made.bias {
                same_bits("dbias", &gradients[3].values::<f32>(), bias);
            }
        }
    }

    /// Gradients that the kernel makes.
    struct Made<E> {
        hidden: Vec<E>,
        weight: Vec<E>,
        bias: Option<Vec<f32>>,
    }

    impl<E: Element> Made<E> {
        fn of(problem: &Problem<E>) -> Self {
            let Problem { hidden, weight, bias, .. } = problem;
            Self { hidden: hidden.clone(), weight: weight.clone(), bias: bias.clone() }
        }

        fn gradients(&mut self) -> Gradients<'_, E> {
            let Self { hidden, weight, bias } = self;
            Gradients { hidden, weight, bias: bias.as_deref_mut() }
        }
    }

    fn target(pass: &str) -> abi::Handler {
        handler(&format!("xentile_linear_cross_entropy_{pass}"))
    }

    #[test]
    fn values_are_those_of_the_kernels() {
        fn body<E: Element>() {
            let mut rng = common::fresh_rng("handlers");
            for (vocab_axis, has_bias) in [(0, false), (0, true), (1, false), (1, true)] {
                Problem::<E>::new(&mut rng, vocab_axis, has_bias).check();
            }
        }
        for_each_dtype!(body);
    }

    #[test]
    fn shapes_that_disagree_are_refused_by_name() {
        let problem = Problem::<bf16>::new(&mut common::fresh_rng("handlers"), 0, true);
        let zeros: &[f32] = &[0.0; TOKENS];
        // With the index of `bias` and, where gradients are made, that of `dbias`.
        let passes: [(_, &[_], _, _); 5] = [
            ("forward", &[], 3, None),
            ("backward", &[zeros; 5], 8, Some(3)),
            ("fused", &[zeros], 4, Some(6)),
            ("keep", &[], 3, None),
            ("resume", &[zeros; 5], 10, Some(3)),
        ];
        for (pass, numbers, bias, dbias) in passes {
            let refused = |change: &dyn Fn(&mut Call), reason: &str| {
                let mut call = problem.call(pass, numbers);
                change(&mut call);
                call.link();
                let message = call.refused(target(pass));
                assert!(message.contains(reason), "{pass}: {message:?} does not say {reason:?}");
                let untouched = |result: &Array| result.data.iter().all(|&word| word == POISON);
                assert!(call.results.iter().all(|result| untouched(result)), "{pass}: {message}");
            };
            for dims in [&[22][..], &[24], &[1, 23], &[]] {
                refused(
                    &|call| call.arguments[bias] = Array::new(DType::F32, dims),
                    &format!("`bias` has shape {dims:?}; it must be [23]"),
                );
            }
            refused(
                &|call| call.arguments[bias] = Array::new(DType::Bf16, &[23]),
                &format!("argument {bias} (`bias`) has dtype bf16; it must be f32"),
            );
            refused(
                &|call| {
                    call.arguments.push(Array::f32(&[0.0; VOCAB]));
                    call.types.push(1);
                },
                &format!("the call has {} arguments; the handler takes {}", bias + 2, bias + 1),
            );
            refused(
                &|call| call.arguments[1] = Array::new(DType::Bf16, &[23, 4]),
                "`weight` has shape [23, 4]; it must have the 5 columns of `hidden` on axis 1",
            );
            refused(&|call| set(call, "chunk_columns", 0_i64), "attribute `chunk_columns` is 0");
            if pass == "keep" {
                refused(
                    &|call| call.results[4] = poisoned(DType::Bf16, &[5, 23]),
                    "`kept` has shape [5, 23]; it must be [23, 5]",
                );
            }
            if pass == "resume" {
                refused(
                    &|call| call.arguments[8] = Array::new(DType::Bf16, &[5, 23]),
                    "`kept` has shape [5, 23]; it must be [23, 5]",
                );
                refused(
                    &|call| call.arguments[9] = Array::new(DType::U8, &[7]),
                    &format!("`held` has shape [7]; it must be [{}]", problem.scratch()),
                );
            }
            let Some(dbias) = dbias else { continue };
            refused(
                &|call| call.results[dbias] = poisoned(DType::F32, &[22]),
                "`dbias` has shape [22]; it must be [23]",
            );
            refused(
                &|call| call.results[dbias - 2] = poisoned(DType::Bf16, &[22, 5]),
                "`dweight` has shape [22, 5]; it must be [23, 5]",
            );
            let both = "the call must have both `bias` and `dbias`, or neither";
            refused(&|call| _ = call.arguments.pop(), both);
            refused(&|call| _ = call.results.pop(), both);
        }
    }

    fn poisoned(dtype: DType, dims: &[i64]) -> Box<Array> {
        let mut array = Array::new(dtype, dims);
        array.data.fill(POISON);
        array
    }
}

#[cfg(feature = "cuda")]
mod linear {
    use super::*;

    /// A forward call of two tokens, three columns of hidden and five of the vocabulary.
    fn forward(weight: [i64; 2], vocab_axis: i64) -> Call {
        let arguments = vec![
            Array::new(DType::Bf16, &[2, 3]),
            Array::new(DType::Bf16, &weight),
            Array::of(&[2], &[0_i32, 1]),
        ];
        let mut results: Vec<_> = (0..4).map(|_| Array::new(DType::F32, &[2])).collect();
        results.push(Array::new(DType::U8, &[1 << 16]));
        call(arguments, results)
            .scalar("ignore_index", -100_i64)
            .scalar("label_smoothing", 0.0_f64)
            .scalar("z_loss", 0.0_f64)
            .scalar("vocab_axis", vocab_axis)
            .scalar("chunk_tokens", 2_i64)
            .scalar("chunk_columns", 5_i64)
            .scalar("workspace_bytes", 256_i64)
            .scalar("every_token", xla_ffi::Pred::from(true))
    }

    fn target() -> abi::Handler {
        every_handler("xentile_linear_cross_entropy_forward")
            .find(|entry| entry.platform() == "CUDA")
            .expect("it is in the table")
            .handler()
    }

    #[test]
    fn shapes_that_disagree_are_refused_by_name() {
        let refused = |mut call: Call, reason: &str| {
            call.link();
            let message = call.refused(target());
            assert!(message.contains(reason), "{message:?} does not say {reason:?}");
        };
        refused(
            forward([5, 4], 0),
            "`weight` has shape [5, 4]; it must have the 3 columns of `hidden` on axis 1",
        );
        refused(
            forward([5, 3], 1),
            "`weight` has shape [5, 3]; it must have the 3 columns of `hidden` on axis 0",
        );
        refused(forward([5, 3], 2), "attribute vocab_axis is 2; it must be 0 or 1");
        refused(
            forward([5, 3], 0).scalar("apart_tokens", 1_i64),
            "attributes apart_tokens and apart_columns must be given both or neither",
        );
        let mut unlike = forward([5, 3], 0);
        unlike.arguments[1] = Array::new(DType::F16, &[5, 3]);
        refused(unlike, "`weight` has dtype f16; it must be bf16");
        let mut labels = forward([5, 3], 0);
        labels.arguments[2] = Array::of(&[3], &[0_i32, 1, 2]);
        refused(labels, "`labels` has shape [3]; it must be [2], one for each row of `hidden`");
        let mut chunk = forward([5, 3], 0);
        set(&mut chunk, "chunk_columns", 0_i64);
        refused(chunk, "attribute `chunk_columns` is 0; it must be at least 1");
        for (dtype, extent, reason) in [
            (DType::F32, 4, "`bias` has shape [4]; it must be [5]"),
            (DType::Bf16, 5, "argument 3 (`bias`) has dtype bf16; it must be f32"),
        ] {
            let mut bias = forward([5, 3], 0);
            bias.arguments.push(Array::new(dtype, &[extent]));
            refused(bias, reason);
        }
        let mut more = forward([5, 3], 0);
        more.arguments.extend([(); 2].map(|()| Array::new(DType::F32, &[5])));
        refused(more, "the call has 5 arguments; the handler takes 4");
    }

    #[test]
    fn without_a_gpu_it_says_what_is_missing() {
        let Err(missing) = xentile_cuda::available() else {
            println!("there is a GPU here");
            return;
        };
        let mut call = forward([5, 3], 0);
        let (code, message) = call.call(target()).unwrap_err();
        assert_eq!(code, xla_ffi::ErrorCode::FailedPrecondition, "{message}");
        assert!(message.contains(&missing.to_string()), "{message}");
    }
}
