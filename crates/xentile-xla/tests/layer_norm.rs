//! LayerNorm's handlers through real call frames, without XLA: what they compute, and what they refuse.

#![allow(clippy::vec_box)] // frames keep the addresses of the items

use half::{bf16, f16};
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use xentile::layer_norm::{LayerNorm, NormShape};
use xentile_cpu::layer_norm::{Gradient, Kernel, Launch, PartialSums, Statistics, Weight};
use xentile_cpu::{InOut, Isa, Threads};
use xla_ffi::testing::{Array, Call};
use xla_ffi::{DType, abi};

#[path = "../../xentile-cpu/tests/common/mod.rs"]
mod common;

const POISON: u64 = 0xa5a5_a5a5_a5a5_a5a5;
const TARGETS: [&str; 2] = ["xentile_layer_norm_forward", "xentile_layer_norm_backward"];
const EPS: f64 = 1e-5;

trait Element: xentile::Element + xla_ffi::Element {}
impl<E: xentile::Element + xla_ffi::Element> Element for E {}

fn handler(target: &str) -> abi::Handler {
    let mut entries = xentile_xla::targets().iter();
    let found = entries.find(|entry| entry.target() == target && entry.platform() == "Host");
    found.unwrap_or_else(|| panic!("no {target} in the table")).handler()
}

/// The names of a target's arguments and results, in order.
fn names(target: &str) -> (&'static [&'static str], &'static [&'static str]) {
    if target == TARGETS[0] {
        return (&["x", "weight", "bias"], &["y", "mean", "rstd"]);
    }
    (&["x", "weight", "mean", "rstd", "dy"], &["dx", "dweight", "dbias"])
}

/// A problem, as a program would pass it.
struct Problem<E, W> {
    leading: Vec<i64>,
    columns: i64,
    /// How many leading axes weight, bias and partial sums have.
    batch: [usize; 3],
    blocks: i64,
    x: Vec<E>,
    dy: Vec<E>,
    weight: Vec<W>,
    bias: Vec<W>,
    mean: Vec<f32>,
    rstd: Vec<f32>,
}

impl<E: Element, W: Element> Problem<E, W>
where
    for<'a> Weight<'a>: From<&'a [W]>,
{
    fn new(rng: &mut ChaCha8Rng, leading: &[i64], columns: i64, batch: [usize; 3]) -> Self {
        fn draw<T: xentile::Element>(rng: &mut ChaCha8Rng, axes: &[i64], columns: i64) -> Vec<T> {
            let count = axes.iter().product::<i64>() * columns;
            (0..count).map(|_| T::from_f64(rng.random_range(-3.0..3.0))).collect()
        }
        Self {
            leading: leading.to_vec(),
            columns,
            batch,
            blocks: rng.random_range(1..9),
            x: draw(rng, leading, columns),
            dy: draw(rng, leading, columns),
            weight: draw(rng, &leading[..batch[0]], columns),
            bias: draw(rng, &leading[..batch[1]], columns),
            mean: draw(rng, leading, 1),
            rstd: draw(rng, leading, 1),
        }
    }

    fn dims(&self, name: &str) -> Vec<i64> {
        let columns = self.columns;
        match name {
            "weight" => [&self.leading[..self.batch[0]], &[columns]].concat(),
            "bias" => [&self.leading[..self.batch[1]], &[columns]].concat(),
            "mean" | "rstd" => self.leading.clone(),
            "dweight" | "dbias" => {
                [&self.leading[..self.batch[2]], &[self.blocks, columns]].concat()
            }
            _ => [&self.leading[..], &[columns]].concat(),
        }
    }

    /// The call of `target`, with results poisoned and in the places of arguments.
    fn call(&self, target: &str, places: &[(usize, usize)]) -> Call {
        let arguments = names(target).0.iter().map(|&name| match name {
            "x" => Array::of(&self.dims(name), &self.x),
            "dy" => Array::of(&self.dims(name), &self.dy),
            "weight" => Array::of(&self.dims(name), &self.weight),
            "bias" => Array::of(&self.dims(name), &self.bias),
            "mean" => Array::of(&self.dims(name), &self.mean),
            _ => Array::of(&self.dims(name), &self.rstd),
        });
        let results = names(target).1.iter().map(|&name| match name {
            "y" | "dx" => Array::new(<E as xla_ffi::Element>::DTYPE, &self.dims(name)),
            _ => Array::new(DType::F32, &self.dims(name)),
        });
        let mut call = Call::new(arguments.collect(), results.collect()).scalar("eps", EPS);
        call.results.iter_mut().for_each(|result| result.data.fill(POISON));
        for &(argument, result) in places {
            call.results[result].buffer.data = call.arguments[argument].buffer.data;
        }
        call
    }

    /// Every handler against the kernel, bit for bit, wherever results may lie.
    fn check(&self) {
        let pool = Threads::new(2).unwrap();
        let rows = self.leading.iter().product::<i64>() as usize;
        let shape = NormShape::new(rows, self.columns as usize).unwrap();
        let launch = Launch { isa: Isa::detect(), pool: &pool };
        let kernel = Kernel::new(LayerNorm { eps: EPS }, shape, &self.weight[..], launch).unwrap();

        let (mut y, mut mean, mut rstd) = (self.x.clone(), self.mean.clone(), self.rstd.clone());
        let into = Statistics { mean: &mut mean[..], rstd: &mut rstd[..] };
        kernel.forward(InOut::InPlace(&mut y), Some(self.bias[..].into()), into).unwrap();
        for places in [&[][..], &[(0, 0)]] {
            let mut call = self.call(TARGETS[0], places);
            call.call(handler(TARGETS[0])).unwrap();
            same("y", &call.results[0].values::<E>(), &y);
            same("mean", &call.results[1].values::<f32>(), &mean);
            same("rstd", &call.results[2].values::<f32>(), &rstd);
        }

        let groups = self.leading[..self.batch[2]].iter().product::<i64>() as usize;
        let blocks = self.blocks as usize;
        let mut dx = self.dy.clone();
        let [mut sums, mut of_bias] = [7.0; 2].map(|x| vec![x; groups * blocks * shape.columns()]);
        let of_rows = Statistics { mean: &self.mean[..], rstd: &self.rstd[..] };
        let partial = PartialSums { sums: &mut sums, groups, blocks };
        let gradient = Gradient::InPlaceOfDy { x: &self.x, dy: &mut dx };
        kernel.backward(gradient, of_rows, partial, &mut of_bias).unwrap();
        for places in [&[][..], &[(0, 0)], &[(4, 0)]] {
            let mut call = self.call(TARGETS[1], places);
            call.call(handler(TARGETS[1])).unwrap();
            same("dx", &call.results[0].values::<E>(), &dx);
            same("dweight", &call.results[1].values::<f32>(), &sums);
            same("dbias", &call.results[2].values::<f32>(), &of_bias);
        }
    }
}

fn same<E: xentile::Element>(what: &str, actual: &[E], native: &[E]) {
    let bits = |x: &[E]| x.iter().map(|x| x.to_f32().to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(actual), bits(native), "{what}");
}

#[test]
fn values_are_those_of_the_kernels() {
    fn body<E: Element, W: Element>()
    where
        for<'a> Weight<'a>: From<&'a [W]>,
    {
        let mut rng = common::fresh_rng("layer_norm handlers");
        let leading: [&[i64]; 6] = [&[], &[1], &[6], &[2, 5], &[3, 2, 2], &[2, 0, 3]];
        for leading in leading {
            let (one, axes) = (leading.len().min(1), leading.len());
            for columns in [1, 33, 260] {
                for batch in [[0; 3], [axes; 3], [0, one, one], [one, 0, 0], [one, axes, 0]] {
                    Problem::<E, W>::new(&mut rng, leading, columns, batch).check();
                }
            }
        }
    }
    body::<f32, bf16>();
    body::<f32, f32>();
    body::<bf16, f32>();
    body::<bf16, f16>();
    body::<f16, f16>();
    body::<f16, bf16>();
}

/// Changes a right frame, in which x is [2, 3, 5] in bf16 and the weight [5] in f32, and expects an
/// `INVALID_ARGUMENT` that says `reason`, with results untouched.
fn refused(target: &str, change: impl FnOnce(&mut Call), reason: &str) {
    let rng = &mut common::fresh_rng("right");
    let mut call = Problem::<bf16, f32>::new(rng, &[2, 3], 5, [0; 3]).call(target, &[]);
    change(&mut call);
    call.link();
    call.results.iter_mut().for_each(|result| result.data.fill(POISON));
    let message = call.refused(handler(target));
    assert!(message.contains(reason), "{target}: {message:?} does not say {reason:?}");
    let untouched = |result: &Array| result.data.iter().all(|&word| word == POISON);
    assert!(call.results.iter().all(|result| untouched(result)), "{target}: {message}");
}

/// Every operand of a target: whether it is a result, its index and its name.
fn operands(target: &str) -> Vec<(bool, usize, &'static str)> {
    let (arguments, results) = names(target);
    let list = |result, names: &'static [&'static str]| {
        names.iter().enumerate().map(move |(index, &name)| (result, index, name))
    };
    list(false, arguments).chain(list(true, results)).collect()
}

fn replace(call: &mut Call, result: bool, index: usize, dtype: Option<DType>, dims: &[i64]) {
    let list = if result { &mut call.results } else { &mut call.arguments };
    let dtype = dtype.unwrap_or_else(|| DType::from_u32(list[index].buffer.dtype).unwrap());
    list[index] = Array::new(dtype, dims);
}

#[test]
fn wrong_shapes_are_refused_by_name() {
    for target in TARGETS {
        for (result, index, name) in operands(target) {
            let (wrong, must): (&[&[i64]], _) = match name {
                "weight" | "bias" => (
                    &[&[], &[6], &[1], &[3, 5], &[2, 3, 5, 1], &[2, 3, 4]],
                    "it must be the last axis of `x`, [2, 3, 5]",
                ),
                "mean" | "rstd" => {
                    (&[&[], &[2], &[6], &[3, 2]], "it must be [2, 3], the leading axes of `x`")
                }
                "dweight" => (
                    &[&[], &[5], &[2, 6], &[0, 5], &[3, 2, 5]],
                    "it must be blocks, at least 1, by the last axis of `x`",
                ),
                "dbias" => (&[&[], &[5], &[9, 5]], "that of `dweight`"),
                "x" => (&[&[2, 3, 6], &[2, 4, 5], &[5], &[], &[2, 3, 0]], "` has shape ["),
                _ => (&[&[], &[5], &[2, 3, 6], &[6, 5]], "it must be [2, 3, 5], that of `x`"),
            };
            for &dims in wrong {
                refused(target, |call| replace(call, result, index, None, dims), must);
            }
        }
    }
}

#[test]
fn wrong_dtypes_are_refused_by_name() {
    for target in TARGETS {
        for (result, index, name) in operands(target) {
            for dtype in [DType::F64, DType::S32, DType::F16] {
                let must = match name {
                    "weight" if dtype == DType::F16 => continue,
                    // f16 is right, and what comes next must be f16 too.
                    "x" if dtype == DType::F16 => "has dtype bf16; it must be f16".into(),
                    "x" | "weight" => {
                        format!("`{name}` has dtype {dtype}; it must be f32, bf16 or f16")
                    }
                    "y" | "dy" | "dx" => format!("has dtype {dtype}; it must be bf16"),
                    _ => format!("has dtype {dtype}; it must be f32"),
                };
                let rng = &mut common::fresh_rng("dims");
                let of = Problem::<bf16, f32>::new(rng, &[2, 3], 5, [0; 3]);
                let dims = of.dims(name);
                // Sums are of as many blocks as those beside them.
                if name.starts_with("db") || name.starts_with("dw") {
                    continue;
                }
                let change = |call: &mut Call| replace(call, result, index, Some(dtype), &dims);
                refused(target, change, &must);
            }
        }
    }
}

#[test]
fn wrong_attributes_are_refused_by_name() {
    for target in TARGETS {
        /// The frame without its attribute.
        fn bare(call: &mut Call) -> Call {
            let taken = std::mem::replace(call, Call::new(vec![], vec![]));
            Call::new(taken.arguments, taken.results)
        }
        refused(target, |call| *call = bare(call), "attribute `eps` is missing");
        for (eps, text) in [(-1e-6, "-0.000001"), (f64::NAN, "NaN"), (f64::INFINITY, "inf")] {
            let reason = format!("attribute eps is {text}; it must be finite and at least 0");
            refused(target, |call| *call = bare(call).scalar("eps", eps), &reason);
        }
        let more = |call: &mut Call| {
            *call = bare(call).scalar("eps", EPS).scalar("zero_centred", 1_i64);
        };
        refused(target, more, "attribute `zero_centred` is unknown; the handler takes `eps`");
    }
}
