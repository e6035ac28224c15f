//! The handlers of RMSNorm and LayerNorm through real call frames, without XLA: what they compute, and what
//! they refuse.

#![allow(clippy::vec_box)] // frames keep the addresses of the items

use half::{bf16, f16};
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use xentile::norm::{Kind, Norm, NormShape};
use xentile_cpu::norm::{Gradient, Kernel, Launch, PartialSums, Statistics, Weight};
use xentile_cpu::{InOut, Isa, Threads};
use xla_ffi::testing::{Array, Call};
use xla_ffi::{DType, Pred, abi};

#[path = "../../xentile-cpu/tests/common/mod.rs"]
mod common;

const POISON: u64 = 0xa5a5_a5a5_a5a5_a5a5;
const TARGETS: [&str; 6] = [
    "xentile_rms_norm_forward",
    "xentile_rms_norm_add_forward",
    "xentile_rms_norm_backward",
    "xentile_rms_norm_add_backward",
    "xentile_layer_norm_forward",
    "xentile_layer_norm_backward",
];

trait Element: xentile::Element + xla_ffi::Element {}
impl<E: xentile::Element + xla_ffi::Element> Element for E {}

fn handler(target: &str) -> abi::Handler {
    let mut entries = xentile_xla::targets().iter();
    let found = entries.find(|entry| entry.target() == target && entry.platform() == "Host");
    found.unwrap_or_else(|| panic!("no {target} in the table")).handler()
}

fn kind_of(target: &str) -> Kind {
    if target.starts_with("xentile_rms_norm") { Kind::Rms } else { Kind::Layer }
}

/// The names of a target's arguments and results, in order.
fn names(target: &str) -> (&'static [&'static str], &'static [&'static str]) {
    match target.strip_prefix("xentile_").expect("a target's prefix") {
        "rms_norm_forward" => (&["x", "weight"], &["y", "rstd"]),
        "rms_norm_add_forward" => (&["x", "residual", "weight"], &["y", "sum", "rstd"]),
        "rms_norm_backward" => (&["x", "weight", "rstd", "dy"], &["dx", "dweight"]),
        "rms_norm_add_backward" => (&["x", "weight", "rstd", "dy", "dsum"], &["dx", "dweight"]),
        "layer_norm_forward" => (&["x", "weight", "bias"], &["y", "mean", "rstd"]),
        _ => (&["x", "weight", "mean", "rstd", "dy"], &["dx", "dweight", "dbias"]),
    }
}

/// Arguments by index and results by index that may share memory, for each way to call a target.
fn ways(target: &str) -> &'static [&'static [(usize, usize)]] {
    match target.strip_prefix("xentile_").expect("a target's prefix") {
        "rms_norm_forward" | "layer_norm_forward" => &[&[], &[(0, 0)]],
        "rms_norm_add_forward" => &[&[], &[(0, 0)], &[(1, 1)], &[(0, 0), (1, 1)]],
        "layer_norm_backward" => &[&[], &[(0, 0)], &[(4, 0)]],
        _ => &[&[], &[(0, 0)], &[(3, 0)]],
    }
}

/// A problem, as a program would pass it.
struct Problem<E, W> {
    leading: Vec<i64>,
    columns: i64,
    /// The numbers of leading axes of weight, bias and partial sums.
    batch: [usize; 3],
    blocks: i64,
    eps: f64,
    zero_centred: bool,
    x: Vec<E>,
    residual: Vec<E>,
    dy: Vec<E>,
    dsum: Vec<E>,
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
            eps: 1e-5,
            zero_centred: rng.random(),
            x: draw(rng, leading, columns),
            residual: draw(rng, leading, columns),
            dy: draw(rng, leading, columns),
            dsum: draw(rng, leading, columns),
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
        let arguments = names(target).0.iter().map(|&name| {
            let dims = self.dims(name);
            match name {
                "x" => Array::of(&dims, &self.x),
                "residual" => Array::of(&dims, &self.residual),
                "dy" => Array::of(&dims, &self.dy),
                "dsum" => Array::of(&dims, &self.dsum),
                "weight" => Array::of(&dims, &self.weight),
                "bias" => Array::of(&dims, &self.bias),
                "mean" => Array::of(&dims, &self.mean),
                _ => Array::of(&dims, &self.rstd),
            }
        });
        let results = names(target).1.iter().map(|&name| match name {
            "y" | "sum" | "dx" => Array::new(<E as xla_ffi::Element>::DTYPE, &self.dims(name)),
            _ => Array::new(DType::F32, &self.dims(name)),
        });
        let mut call = Call::new(arguments.collect(), results.collect()).scalar("eps", self.eps);
        if kind_of(target) == Kind::Rms {
            call = call.scalar("zero_centred", Pred::from(self.zero_centred));
        }
        call.results.iter_mut().for_each(|result| result.data.fill(POISON));
        for &(argument, result) in places {
            call.results[result].buffer.data = call.arguments[argument].buffer.data;
        }
        call
    }

    /// Every handler against the kernel, bit for bit, wherever results may lie.
    fn check(&self) {
        for target in TARGETS {
            let wanted = match target.ends_with("forward") {
                true => self.forward(target),
                false => self.backward(target),
            };
            for places in ways(target) {
                let mut call = self.call(target, places);
                call.call(handler(target)).unwrap();
                for (index, &name) in names(target).1.iter().enumerate() {
                    let result = &mut call.results[index];
                    match name {
                        "y" | "dx" => same(name, &result.values::<E>(), &wanted.matrices[0]),
                        "sum" => same(name, &result.values::<E>(), &wanted.matrices[1]),
                        "dweight" | "mean" => same(name, &result.values(), &wanted.floats[0]),
                        _ => same(name, &result.values(), &wanted.floats[1]),
                    }
                }
            }
        }
    }

    fn kernel<'a>(&'a self, target: &str, pool: &'a Threads) -> Kernel<'a> {
        let rows = self.leading.iter().product::<i64>() as usize;
        let shape = NormShape::new(rows, self.columns as usize).unwrap();
        let kind = kind_of(target);
        let zero_centred = kind == Kind::Rms && self.zero_centred;
        let norm = Norm { kind, eps: self.eps, zero_centred };
        let launch = Launch { isa: Isa::detect(), pool };
        Kernel::new(norm, shape, &self.weight[..], launch).unwrap()
    }

    fn forward(&self, target: &str) -> Wanted<E> {
        let pool = Threads::new(2).unwrap();
        let is_layer = kind_of(target) == Kind::Layer;
        let (mut y, mut sum) = (self.x.clone(), self.residual.clone());
        let mut mean = if is_layer { self.mean.clone() } else { Vec::new() };
        let mut rstd = self.rstd.clone();
        let residual = target.contains("_add_").then_some(InOut::InPlace(&mut sum));
        let bias = is_layer.then(|| self.bias[..].into());
        let statistics = Statistics { mean: &mut mean[..], rstd: &mut rstd[..] };
        let kernel = self.kernel(target, &pool);
        kernel.forward(InOut::InPlace(&mut y), residual, bias, statistics).unwrap();
        Wanted { matrices: [y, sum], floats: [mean, rstd] }
    }

    fn backward(&self, target: &str) -> Wanted<E> {
        let pool = Threads::new(2).unwrap();
        let is_layer = kind_of(target) == Kind::Layer;
        let groups = self.leading[..self.batch[2]].iter().product::<i64>() as usize;
        let blocks = self.blocks as usize;
        let length = groups * blocks * self.columns as usize;
        let mut dx = self.dy.clone();
        let mut dweight = vec![7.0; length];
        let mut dbias = vec![7.0; if is_layer { length } else { 0 }];
        let mean = if is_layer { &self.mean[..] } else { &[] };
        let statistics = Statistics { mean, rstd: &self.rstd[..] };
        let dsum = target.contains("_add_").then_some(&self.dsum[..]);
        let partial = PartialSums { sums: &mut dweight, groups, blocks };
        let gradient = Gradient::InPlaceOfDy { x: &self.x, dy: &mut dx };
        let kernel = self.kernel(target, &pool);
        kernel.backward(gradient, statistics, dsum, partial, &mut dbias).unwrap();
        Wanted { matrices: [dx, Vec::new()], floats: [dweight, dbias] }
    }
}

/// The results of a kernel: y and sum, or dx; mean and rstd, or dweight and dbias.
struct Wanted<E> {
    matrices: [Vec<E>; 2],
    floats: [Vec<f32>; 2],
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
        let mut rng = common::fresh_rng("norm handlers");
        let leading: [&[i64]; 6] = [&[], &[1], &[6], &[2, 5], &[3, 2, 2], &[2, 0, 3]];
        for leading in leading {
            let (one, two, axes) = (leading.len().min(1), leading.len().min(2), leading.len());
            // Of rows of two axes alone every width.
            for &columns in if leading.len() == 2 { &[1, 33, 260][..] } else { &[33] } {
                for batch in
                    [[0; 3], [axes; 3], [0, one, one], [one, 0, 0], [two, 0, 0], [one, axes, 0]]
                {
                    Problem::<E, W>::new(&mut rng, leading, columns, batch).check();
                }
            }
        }
    }
    fn weights<E: Element>() {
        body::<E, f32>();
        body::<E, bf16>();
        body::<E, f16>();
    }
    weights::<f32>();
    weights::<bf16>();
    weights::<f16>();
}

/// A right frame of a target: x is [2, 3, 5], in bf16, and the weight [5] in f32.
fn right(target: &str) -> Call {
    let rng = &mut common::fresh_rng("right");
    let mut problem = Problem::<bf16, f32>::new(rng, &[2, 3], 5, [0; 3]);
    problem.blocks = 2;
    problem.call(target, &[])
}

/// Changes a right frame, and expects an `INVALID_ARGUMENT` that says `reason`, with results untouched.
fn refused(target: &str, change: impl FnOnce(&mut Call), reason: &str) {
    let mut call = right(target);
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
                    &[&[], &[6], &[1], &[3, 5], &[2, 3, 5, 1], &[2, 3, 4], &[2, 3, 5, 5]],
                    "it must be the last axis of `x`, [2, 3, 5], after none or some of its first \
                     axes",
                ),
                "mean" | "rstd" => (
                    &[&[], &[2], &[6], &[3, 2], &[2, 3, 1]],
                    "it must be [2, 3], the leading axes of `x`",
                ),
                "dweight" => (
                    &[&[], &[5], &[2, 6], &[0, 5], &[3, 2, 5], &[2, 0, 5], &[2, 3, 1, 1, 5]],
                    "it must be blocks, at least 1, by the last axis of `x`, [2, 3, 5], after none \
                     or some of its first axes",
                ),
                "dbias" => (&[&[], &[5], &[9, 5]], "it must be [2, 5], that of `dweight`"),
                // Other arrays are compared with x.
                "x" => (&[&[2, 3, 6], &[2, 4, 5], &[5]], "` has shape ["),
                _ => (
                    &[&[], &[5], &[2, 3, 6], &[6, 5], &[2, 3, 5, 1]],
                    "it must be [2, 3, 5], that of `x`",
                ),
            };
            for &dims in wrong {
                let change = |call: &mut Call| replace(call, result, index, None, dims);
                if name == "x" {
                    refused(target, change, must);
                } else {
                    refused(target, change, &format!("`{name}` has shape {dims:?}; {must}"));
                }
            }
        }
        for (dims, reason) in [
            (&[][..], "`x` has shape []; it must have an axis at least, the columns"),
            (&[2, 3, 0], "`x` has shape [2, 3, 0]; its last axis, the columns, must be at least 1"),
        ] {
            refused(target, |call| replace(call, false, 0, None, dims), reason);
        }
    }
}

/// Extents that multiply to more than any number holds, beside one of 0.
#[test]
fn empty_arrays_have_any_extents() {
    for target in TARGETS {
        let mut call = right(target);
        let leading = [i64::MAX, 0, i64::MAX];
        for (result, index, name) in operands(target) {
            let list = if result { &mut call.results } else { &mut call.arguments };
            let dtype = DType::from_u32(list[index].buffer.dtype).unwrap();
            let mut array = Array::new(dtype, &[0]);
            array.dims = match name {
                "weight" | "bias" => continue,
                "mean" | "rstd" => leading.to_vec(),
                "dweight" | "dbias" => [&leading[..], &[3, 5]].concat(),
                _ => [&leading[..], &[5]].concat(),
            };
            array.buffer.rank = array.dims.len() as i64;
            array.buffer.dims = array.dims.as_mut_ptr();
            list[index] = array;
        }
        call.link();
        call.call(handler(target)).unwrap();
    }
}

#[test]
fn wrong_dtypes_are_refused_by_name() {
    for target in TARGETS {
        for (result, index, name) in operands(target) {
            for dtype in [DType::F64, DType::S8, DType::S32, DType::F16, DType::Pred] {
                let right_dtypes = match name {
                    "x" | "weight" => "f32, bf16 or f16",
                    "bias" | "mean" | "rstd" | "dweight" | "dbias" => "f32",
                    _ => "bf16",
                };
                let reason = match (name, dtype) {
                    ("weight", DType::F16) => continue,
                    // f16 is right, and what comes next must be f16 too.
                    ("x", DType::F16) => "has dtype bf16; it must be f16".into(),
                    _ => format!("`{name}`"),
                };
                let dims = match name {
                    "weight" | "bias" => vec![5],
                    "mean" | "rstd" => vec![2, 3],
                    "dweight" | "dbias" => vec![2, 5],
                    _ => vec![2, 3, 5],
                };
                let change = |call: &mut Call| replace(call, result, index, Some(dtype), &dims);
                refused(target, change, &reason);
                if dtype != DType::F16 || name != "x" {
                    let reason = format!("has dtype {dtype}; it must be {right_dtypes}");
                    let change = |call: &mut Call| replace(call, result, index, Some(dtype), &dims);
                    refused(target, change, &reason);
                }
            }
        }
    }
}

#[test]
fn wrong_numbers_of_operands_are_refused() {
    for target in TARGETS {
        let (arguments, results) = names(target);
        let (last, count) = (arguments[arguments.len() - 1], arguments.len());
        let less = |call: &mut Call| _ = call.arguments.pop();
        refused(target, less, &format!("argument {} (`{last}`) is missing", count - 1));
        let more = |call: &mut Call| {
            call.arguments.push(Array::f32(&[1.0]));
            call.types.push(1);
        };
        let reason = format!("has {} arguments; the handler takes {count}", count + 1);
        refused(target, more, &reason);
        let (last, count) = (results[results.len() - 1], results.len());
        let less = |call: &mut Call| _ = call.results.pop();
        refused(target, less, &format!("result {} (`{last}`) is missing", count - 1));
    }
}

#[test]
fn wrong_attributes_are_refused_by_name() {
    for target in TARGETS {
        /// The frame without its attributes.
        fn bare(call: &mut Call) -> Call {
            let taken = std::mem::replace(call, Call::new(vec![], vec![]));
            Call::new(taken.arguments, taken.results)
        }
        let none = |call: &mut Call| *call = bare(call);
        refused(target, none, "attribute `eps` is missing");
        let is_layer = kind_of(target) == Kind::Layer;
        // The frame with this eps and the other attributes.
        let with_eps = |call: &mut Call, eps: f64| {
            let call = bare(call).scalar("eps", eps);
            if is_layer { call } else { call.scalar("zero_centred", Pred::from(false)) }
        };
        for (eps, text) in [(-1e-6, "-0.000001"), (f64::NAN, "NaN"), (f64::INFINITY, "inf")] {
            let reason = format!("attribute eps is {text}; it must be finite and at least 0");
            refused(target, |call| *call = with_eps(call, eps), &reason);
        }
        let narrow = |call: &mut Call| {
            *call = bare(call).scalar("eps", 1e-6_f32);
        };
        refused(target, narrow, "attribute `eps` is f32; it must be f64");
        let unknown = |call: &mut Call| *call = with_eps(call, 1e-6).scalar("block_size", 1_i64);
        let takes = if is_layer { "`eps`" } else { "`eps`, `zero_centred`" };
        let reason = format!("attribute `block_size` is unknown; the handler takes {takes}");
        refused(target, unknown, &reason);
        let number =
            |call: &mut Call| *call = bare(call).scalar("eps", 1e-6).scalar("zero_centred", 1_i64);
        if is_layer {
            refused(target, number, "attribute `zero_centred` is unknown; the handler takes `eps`");
        } else {
            refused(target, number, "attribute `zero_centred` is s64; it must be pred");
            let eps_only = |call: &mut Call| *call = bare(call).scalar("eps", 1e-6);
            refused(target, eps_only, "attribute `zero_centred` is missing");
        }
    }
}

/// A result lies exactly in the place of an argument that it may take, or apart from all.
#[test]
fn shared_memory_is_refused() {
    let over = |target: &str, argument: usize, result: usize, bytes: usize, reason: &str| {
        let mut call = right(target);
        call.arguments[argument].data.push(POISON);
        call.arguments[argument].buffer.data = call.arguments[argument].data.as_mut_ptr().cast();
        call.results[result].buffer.data =
            call.arguments[argument].buffer.data.wrapping_byte_add(bytes);
        let before = call.arguments[argument].data.clone();
        let message = call.refused(handler(target));
        assert!(message.contains(reason), "{target}: {message}");
        assert!(call.arguments[argument].data == before, "{target} wrote");
    };
    let in_part = "lies over a part of result ";
    let apart = "the handler needs them apart";
    for (target, argument, result) in [
        (TARGETS[0], 0, 0),
        (TARGETS[1], 0, 0),
        (TARGETS[1], 1, 1),
        (TARGETS[2], 0, 0),
        (TARGETS[2], 3, 0),
        (TARGETS[3], 3, 0),
    ] {
        over(target, argument, result, size_of::<bf16>(), in_part);
    }
    // The sum in the place of x, y in that of the residual, dx in that of dsum.
    over(TARGETS[1], 0, 1, 0, in_part);
    over(TARGETS[1], 1, 0, 0, in_part);
    over(TARGETS[3], 4, 0, 0, apart);
    over(TARGETS[0], 1, 1, 0, apart);
    over(TARGETS[2], 2, 1, 0, apart);
    // x and dy in one place, and dx there too: a row's x would be gone before its dy is read again.
    let mut call = right(TARGETS[2]);
    call.arguments[3].buffer.data = call.arguments[0].buffer.data;
    call.results[0].buffer.data = call.arguments[0].buffer.data;
    let message = call.refused(handler(TARGETS[2]));
    assert!(message.contains("argument 3 (`dy`) shares memory with result 0"), "{message}");
}
