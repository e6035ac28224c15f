//! RMSNorm's handlers through real call frames, without XLA: what they compute, and what they refuse.

#![allow(clippy::vec_box)] // frames keep the addresses of the items

use half::{bf16, f16};
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use xentile::rms_norm::{NormShape, RmsNorm};
use xentile_cpu::rms_norm::{Gradient, Kernel, Launch, PartialSums, Weight};
use xentile_cpu::{InOut, Isa, Threads};
use xla_ffi::testing::{Array, Call};
use xla_ffi::{DType, Pred, abi};

#[path = "../../xentile-cpu/tests/common/mod.rs"]
mod common;

const POISON: u64 = 0xa5a5_a5a5_a5a5_a5a5;
const TARGETS: [&str; 4] = [
    "xentile_rms_norm_forward",
    "xentile_rms_norm_add_forward",
    "xentile_rms_norm_backward",
    "xentile_rms_norm_add_backward",
];

trait Element: xentile::Element + xla_ffi::Element {}
impl<E: xentile::Element + xla_ffi::Element> Element for E {}

fn handler(target: &str) -> abi::Handler {
    let mut entries = xentile_xla::targets().iter();
    let found = entries.find(|entry| entry.target() == target && entry.platform() == "Host");
    found.unwrap_or_else(|| panic!("no {target} in the table")).handler()
}

/// The names of a target's arguments and results, in order.
fn names(target: &str) -> (&'static [&'static str], &'static [&'static str]) {
    match target {
        "xentile_rms_norm_forward" => (&["x", "weight"], &["y", "rstd"]),
        "xentile_rms_norm_add_forward" => (&["x", "residual", "weight"], &["y", "sum", "rstd"]),
        "xentile_rms_norm_backward" => (&["x", "weight", "rstd", "dy"], &["dx", "dweight"]),
        _ => (&["x", "weight", "rstd", "dy", "dsum"], &["dx", "dweight"]),
    }
}

/// A problem, as a program would pass it.
struct Problem<E> {
    leading: Vec<i64>,
    columns: i64,
    /// How many leading axes weight and partial sums have.
    batch: [usize; 2],
    blocks: i64,
    options: RmsNorm,
    /// x, residual, dy, dsum.
    matrices: [Vec<E>; 4],
    rstd: Vec<f32>,
}

impl<E: Element> Problem<E> {
    fn new(rng: &mut ChaCha8Rng, leading: &[i64], columns: i64) -> Self {
        let rows = leading.iter().product::<i64>();
        let mut matrix = || -> Vec<E> {
            (0..rows * columns).map(|_| E::from_f64(rng.random_range(-3.0..3.0))).collect()
        };
        let matrices = [matrix(), matrix(), matrix(), matrix()];
        Self {
            leading: leading.to_vec(),
            columns,
            batch: [0, 0],
            blocks: 2,
            options: RmsNorm { eps: 1e-5, zero_centred: rng.random() },
            matrices,
            rstd: (0..rows).map(|_| rng.random_range(0.1..2.0)).collect(),
        }
    }

    fn dims(&self, leading: usize, last: &[i64]) -> Vec<i64> {
        [&self.leading[..leading], last].concat()
    }

    fn matrix_dims(&self) -> Vec<i64> {
        self.dims(self.leading.len(), &[self.columns])
    }

    fn weight_dims(&self) -> Vec<i64> {
        self.dims(self.batch[0], &[self.columns])
    }

    fn dweight_dims(&self) -> Vec<i64> {
        self.dims(self.batch[1], &[self.blocks, self.columns])
    }

    /// The call of `target`, with results poisoned.
    fn call<W: Element>(&self, target: &str, weight: &[W]) -> Call {
        let matrix = |index: usize| Array::of(&self.matrix_dims(), &self.matrices[index]);
        let output = || Array::new(<E as xla_ffi::Element>::DTYPE, &self.matrix_dims());
        let arguments = names(target).0.iter().map(|&name| match name {
            "x" => matrix(0),
            "residual" => matrix(1),
            "dy" => matrix(2),
            "dsum" => matrix(3),
            "weight" => Array::of(&self.weight_dims(), weight),
            _ => Array::of(&self.leading, &self.rstd),
        });
        let results = names(target).1.iter().map(|&name| match name {
            "rstd" => Array::new(DType::F32, &self.leading),
            "dweight" => Array::new(DType::F32, &self.dweight_dims()),
            _ => output(),
        });
        let mut call = Call::new(arguments.collect(), results.collect())
            .scalar("eps", self.options.eps)
            .scalar("zero_centred", Pred::from(self.options.zero_centred));
        call.results.iter_mut().for_each(|result| result.data.fill(POISON));
        call
    }

    fn kernel<'a>(&self, weight: Weight<'a>, pool: &'a Threads) -> Kernel<'a> {
        let rows = self.leading.iter().product::<i64>() as usize;
        let shape = NormShape::new(rows, self.columns as usize).unwrap();
        Kernel::new(self.options, shape, weight, Launch { isa: Isa::detect(), pool }).unwrap()
    }

    /// Every handler against the kernel, bit for bit, wherever results may lie.
    fn check<W: Element>(&self, weight: &[W])
    where
        for<'a> Weight<'a>: From<&'a [W]>,
    {
        let pool = Threads::new(2).unwrap();
        let kernel = self.kernel(weight.into(), &pool);
        let [x, residual, dy, dsum] = &self.matrices;
        let mut rstd = self.rstd.clone();

        let mut y = x.clone();
        kernel.forward(InOut::InPlace(&mut y), &mut rstd).unwrap();
        for mut call in self.placed(TARGETS[0], weight, &[&[], &[(0, 0)]]) {
            call.call(handler(TARGETS[0])).unwrap();
            same("y", &call.results[0].values::<E>(), &y);
            same("rstd", &call.results[1].values::<f32>(), &rstd);
        }

        let (mut y, mut sum) = (x.clone(), residual.clone());
        kernel.add_forward(InOut::InPlace(&mut y), InOut::InPlace(&mut sum), &mut rstd).unwrap();
        let places: [&[(usize, usize)]; 4] = [&[], &[(0, 0)], &[(1, 1)], &[(0, 0), (1, 1)]];
        for mut call in self.placed(TARGETS[1], weight, &places) {
            call.call(handler(TARGETS[1])).unwrap();
            same("y", &call.results[0].values::<E>(), &y);
            same("sum", &call.results[1].values::<E>(), &sum);
            same("rstd", &call.results[2].values::<f32>(), &rstd);
        }

        for (target, dsum) in [(TARGETS[2], None), (TARGETS[3], Some(&dsum[..]))] {
            let mut dx = dy.clone();
            let groups = self.leading[..self.batch[1]].iter().product::<i64>() as usize;
            let blocks = self.blocks as usize;
            let mut sums = vec![7.0; groups * blocks * self.columns as usize];
            let partial = PartialSums { sums: &mut sums, groups, blocks };
            let gradient = Gradient::InPlaceOfDy { x, dy: &mut dx };
            kernel.backward(gradient, &self.rstd, dsum, partial).unwrap();
            for mut call in self.placed(target, weight, &[&[], &[(0, 0)], &[(3, 0)]]) {
                call.call(handler(target)).unwrap();
                same("dx", &call.results[0].values::<E>(), &dx);
                same("dweight", &call.results[1].values::<f32>(), &sums);
            }
        }
    }

    /// The call with results in the places of arguments, in each of these ways.
    fn placed<W: Element>(
        &self,
        target: &str,
        weight: &[W],
        ways: &[&[(usize, usize)]],
    ) -> Vec<Call> {
        let placed = ways.iter().map(|places| {
            let mut call = self.call(target, weight);
            for &(argument, result) in *places {
                call.results[result].buffer.data = call.arguments[argument].buffer.data;
            }
            call
        });
        placed.collect()
    }
}

fn same<E: xentile::Element>(what: &str, actual: &[E], native: &[E]) {
    let bits = |x: &[E]| x.iter().map(|x| x.to_f32().to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(actual), bits(native), "{what}");
}

#[test]
fn values_are_those_of_the_kernels() {
    fn body<E: Element, W: Element>(rng: &mut ChaCha8Rng)
    where
        for<'a> Weight<'a>: From<&'a [W]>,
    {
        let leading: [&[i64]; 6] = [&[], &[1], &[6], &[2, 5], &[3, 2, 2], &[2, 0, 3]];
        for leading in leading {
            for columns in [1, 33, 260] {
                let mut problem = Problem::<E>::new(rng, leading, columns);
                let axes = leading.len();
                for batch in [[0, 0], [axes, axes], [0, axes.min(1)], [axes.min(2), 0]] {
                    problem.batch = batch;
                    problem.blocks = rng.random_range(1..9);
                    let count = problem.weight_dims().iter().product();
                    let weight: Vec<W> =
                        (0..count).map(|_| W::from_f64(rng.random_range(-2.0..2.0))).collect();
                    problem.check(&weight);
                }
            }
        }
    }
    fn weights<E: Element>() {
        let mut rng = common::fresh_rng("rms_norm handlers");
        body::<E, f32>(&mut rng);
        body::<E, bf16>(&mut rng);
        body::<E, f16>(&mut rng);
    }
    weights::<f32>();
    weights::<bf16>();
    weights::<f16>();
}

/// A right frame of a target: x is [2, 3, 5], in bf16, and the weight [5] in f32.
fn right(target: &str) -> Call {
    let problem = Problem::<bf16>::new(&mut common::fresh_rng("right"), &[2, 3], 5);
    problem.call(target, &[1.0_f32; 5])
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
                "weight" => (
                    &[&[], &[6], &[1], &[3, 5], &[2, 3, 5, 1], &[2, 3, 4], &[2, 3, 5, 5]],
                    "it must be the last axis of `x`, [2, 3, 5], after none or some of its first \
                     axes",
                ),
                "rstd" => (
                    &[&[], &[2], &[6], &[3, 2], &[2, 3, 1]],
                    "it must be [2, 3], the leading axes of `x`",
                ),
                "dweight" => (
                    &[&[], &[5], &[2, 6], &[0, 5], &[3, 2, 5], &[2, 0, 5], &[2, 3, 1, 1, 5]],
                    "it must be blocks, at least 1, by the last axis of `x`, [2, 3, 5], after none \
                     or some of its first axes",
                ),
                // Others are held to it.
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
                "weight" => continue,
                "rstd" => leading.to_vec(),
                "dweight" => [&leading[..], &[3, 5]].concat(),
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
                    "rstd" | "dweight" => "f32",
                    _ => "bf16",
                };
                let reason = match (name, dtype) {
                    ("weight", DType::F16) => continue,
                    // f16 is right, and what comes next must be f16 too.
                    ("x", DType::F16) => "has dtype bf16; it must be f16".into(),
                    _ => format!("`{name}`"),
                };
                let dims = match name {
                    "weight" => vec![5],
                    "rstd" => vec![2, 3],
                    "dweight" => vec![2, 5],
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
        let centred = Pred::from(false);
        let none = |call: &mut Call| *call = bare(call);
        refused(target, none, "attribute `eps` is missing");
        let eps_only = |call: &mut Call| *call = bare(call).scalar("eps", 1e-6);
        refused(target, eps_only, "attribute `zero_centred` is missing");
        for (eps, text) in [(-1e-6, "-0.000001"), (f64::NAN, "NaN"), (f64::INFINITY, "inf")] {
            let reason = format!("attribute eps is {text}; it must be finite and at least 0");
            let change = |call: &mut Call| {
                *call = bare(call).scalar("eps", eps).scalar("zero_centred", centred);
            };
            refused(target, change, &reason);
        }
        let narrow = |call: &mut Call| {
            *call = bare(call).scalar("eps", 1e-6_f32).scalar("zero_centred", centred);
        };
        refused(target, narrow, "attribute `eps` is f32; it must be f64");
        let number =
            |call: &mut Call| *call = bare(call).scalar("eps", 1e-6).scalar("zero_centred", 1_i64);
        refused(target, number, "attribute `zero_centred` is s64; it must be pred");
        let unknown = |call: &mut Call| {
            let taken = std::mem::replace(call, Call::new(vec![], vec![]));
            *call = taken.scalar("block_size", 1_i64);
        };
        let reason = "attribute `block_size` is unknown; the handler takes `eps`, `zero_centred`";
        refused(target, unknown, reason);
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
