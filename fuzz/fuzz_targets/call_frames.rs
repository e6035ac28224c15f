//! Call frames for every handler of `xentile-xla`: a right one, then changes to any of its parts. All
//! pointers lead to as much memory as the frame says, or are null or misaligned.
//!
//! Each choice is a byte, 0 where the input has ended, and 0 leaves things right: the empty input is
//! a right frame of the first target.

#![no_main]
#![allow(clippy::vec_box)] // frames keep the addresses of the items

use libfuzzer_sys::fuzz_target;
use xla_ffi::testing::{Array, Call};
use xla_ffi::{DType, ErrorCode, abi};

/// Words before and after the memory of every buffer.
const GUARD: usize = 8;
const POISON: u64 = 0xa5a5_a5a5_a5a5_a5a5;
/// A buffer of more bytes is null.
const MOST_BYTES: usize = 1 << 16;

/// Numbers that frames get wrong.
const ODD: [i64; 12] = [0, 1, 2, 3, 7, 8, 1 << 20, 1 << 31, 1 << 61, i64::MAX, i64::MIN, -1];
const NAMES: [&str; 21] = [
    "ignore_index",
    "label_smoothing",
    "z_loss",
    "softcap",
    "temperature",
    "time_block",
    "block_size",
    "every_token",
    "vocab_axis",
    "chunk_columns",
    "eps",
    "zero_centred",
    "kind",
    "layout",
    "alpha",
    "limit",
    "up_offset",
    "interleaved",
    "inverse",
    "",
    "no such attribute",
];

fuzz_target!(|bytes: &[u8]| {
    let mut choices = Choices(bytes);
    let targets = xentile_xla::targets();
    let target = choices.of(targets);
    let mut call = right(target.target(), &mut choices);
    let mut late = Vec::new();
    for _ in 0..choices.below(6) {
        change(&mut call, &mut choices, &mut late);
    }
    back(&mut call, &mut choices);
    call.link();
    for change in late {
        change.make(&mut call);
    }
    let before = memory(&call);
    let answer = call.call(target.handler());
    let after = memory(&call);
    if let Err((code, message)) = answer {
        assert!(!message.is_empty());
        assert!(code != ErrorCode::Internal, "{message}");
        assert!(before == after, "refused, and yet wrote: {message}");
        return;
    }
    // A result may lie in the memory of an argument, so guards are all that no handler may touch.
    for (before, after) in before.iter().zip(&after) {
        let inner = GUARD..before.len() - GUARD;
        assert!(before[..inner.start] == after[..inner.start], "wrote before a buffer");
        assert!(before[inner.end..] == after[inner.end..], "wrote past a buffer");
    }
});

const DTYPES: [DType; 3] = [DType::F32, DType::Bf16, DType::F16];
const LABELS: [DType; 2] = [DType::S32, DType::S64];

/// The fuzzer's bytes, one for each choice.
struct Choices<'a>(&'a [u8]);

impl Choices<'_> {
    fn byte(&mut self) -> u8 {
        let Some((&first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        first
    }

    fn below(&mut self, count: usize) -> usize {
        usize::from(self.byte()) % count.max(1)
    }

    fn of<'b, T>(&mut self, list: &'b [T]) -> &'b T {
        &list[self.below(list.len())]
    }

    fn number(&mut self) -> i64 {
        match self.byte() {
            byte if byte < 128 => i64::from(byte),
            byte => ODD[usize::from(byte) % ODD.len()],
        }
    }
}

/// A right frame of `target`; extents, dtypes and attributes are chosen.
fn right(target: &str, choices: &mut Choices<'_>) -> Call {
    if let Some(pass) = target.strip_prefix("xentile_activation_") {
        return right_activation(pass, choices);
    }
    if let Some(pass) = target.strip_prefix("xentile_fp8_quantize") {
        return right_fp8_quantize(pass, choices);
    }
    if let Some(pass) = target.strip_prefix("xentile_linear_cross_entropy_") {
        return right_linear(pass, choices);
    }
    if let Some(pass) = target.strip_prefix("xentile_flash_attention_") {
        return right_flash_attention(pass, choices);
    }
    if let Some(pass) = target.strip_prefix("xentile_layer_norm_") {
        return right_layer_norm(pass, choices);
    }
    if let Some(pass) = target.strip_prefix("xentile_rms_norm_") {
        return right_rms_norm(pass, choices);
    }
    if target == "xentile_rope" {
        return right_rope(choices);
    }
    let dtype = *choices.of(&DTYPES);
    let label = *choices.of(&LABELS);
    let leading: Vec<_> = (0..choices.below(4)).map(|_| choices.below(5) as i64).collect();
    let matrix = [&leading[..], &[1 + choices.below(80) as i64]].concat();
    let wide = || Array::new(dtype, &matrix);
    let floats = |count: usize| (0..count).map(|_| Array::new(DType::F32, &leading));
    let labels = || Array::new(label, &leading);
    let (arguments, results): (Vec<_>, Vec<_>) = match target {
        "xentile_cross_entropy_forward" => (vec![wide(), labels()], floats(4).collect()),
        "xentile_cross_entropy_backward" => {
            ([wide(), labels()].into_iter().chain(floats(5)).collect(), vec![wide()])
        }
        "xentile_cross_entropy_fused" => (
            [wide(), labels()].into_iter().chain(floats(1)).collect(),
            floats(3).chain([wide()]).collect(),
        ),
        "xentile_cross_entropy_distribution" => {
            (vec![wide(), labels()], floats(6).chain([Array::new(DType::S32, &leading)]).collect())
        }
        "xentile_cross_entropy_distribution_fused" => (
            [wide(), labels()].into_iter().chain(floats(1)).collect(),
            floats(5).chain([Array::new(DType::S32, &leading), wide()]).collect(),
        ),
        "xentile_cross_entropy_distribution_backward" => {
            ([wide(), labels()].into_iter().chain(floats(7)).collect(), vec![wide()])
        }
        "xentile_scale" => ([wide()].into_iter().chain(floats(1)).collect(), vec![wide()]),
        _ => panic!("{target} has no right frame here"),
    };
    let call = Call::new(arguments, results);
    if target == "xentile_scale" {
        return call;
    }
    with_options(call, target.ends_with("backward"), choices)
}

/// The same of linear cross-entropy; scratch may be too little.
fn right_linear(pass: &str, choices: &mut Choices<'_>) -> Call {
    let dtype = *choices.of(&DTYPES);
    let [tokens, width, vocab] = [5, 20, 80].map(|most| 1 + choices.below(most) as i64);
    let axis = choices.below(2);
    let weight = if axis == 0 { [vocab, width] } else { [width, vocab] };
    let operands = || [[tokens, width], weight].map(|dims| Array::new(dtype, &dims));
    let floats = |count: usize| (0..count).map(|_| Array::new(DType::F32, &[tokens]));
    let labels = Array::new(*choices.of(&LABELS), &[tokens]);
    let mut arguments: Vec<_> = operands().into_iter().chain([labels]).collect();
    let scratch = Array::new(DType::U8, &[*choices.of(&[0, 1000, 1 << 15])]);
    let kept = || Array::new(dtype, &weight);
    let mut results: Vec<_> = match pass {
        "forward" => floats(4).collect(),
        "keep" => floats(4).chain([kept()]).collect(),
        "backward" => {
            arguments.extend(floats(5));
            operands().into_iter().collect()
        }
        "resume" => {
            let held = Array::new(DType::U8, &scratch.dims);
            arguments.extend(floats(5).chain([kept(), held]));
            operands().into_iter().collect()
        }
        "fused" => {
            arguments.extend(floats(1));
            floats(3).chain(operands()).collect()
        }
        _ => panic!("{pass} has no right frame here"),
    };
    results.push(scratch);
    if choices.below(2) == 1 {
        arguments.push(Array::new(DType::F32, &[vocab]));
        if !matches!(pass, "forward" | "keep") {
            results.push(Array::new(DType::F32, &[vocab]));
        }
    }
    let call = Call::new(arguments, results)
        .scalar("vocab_axis", axis as i64)
        .scalar("chunk_columns", *choices.of(&[1_i64, 7, 64, i64::MAX]));
    with_options(call, matches!(pass, "backward" | "resume"), choices)
}

/// The same of RMSNorm.
fn right_rms_norm(pass: &str, choices: &mut Choices<'_>) -> Call {
    let [dtype, of_weight] = [(); 2].map(|()| *choices.of(&DTYPES));
    let leading: Vec<_> = (0..choices.below(4)).map(|_| choices.below(5) as i64).collect();
    let columns = 1 + choices.below(80) as i64;
    let [batch, groups] = [(); 2].map(|()| leading[..choices.below(leading.len() + 1)].to_vec());
    let wide = || Array::new(dtype, &[&leading[..], &[columns]].concat());
    let weight = Array::new(of_weight, &[&batch[..], &[columns]].concat());
    let rstd = Array::new(DType::F32, &leading);
    let blocks = 1 + choices.below(7) as i64;
    let dweight = || Array::new(DType::F32, &[&groups[..], &[blocks, columns]].concat());
    let (arguments, results): (Vec<_>, Vec<_>) = match pass {
        "forward" => (vec![wide(), weight], vec![wide(), rstd]),
        "add_forward" => (vec![wide(), wide(), weight], vec![wide(), wide(), rstd]),
        "backward" => (vec![wide(), weight, rstd, wide()], vec![wide(), dweight()]),
        "add_backward" => (vec![wide(), weight, rstd, wide(), wide()], vec![wide(), dweight()]),
        _ => panic!("{pass} has no right frame here"),
    };
    Call::new(arguments, results)
        .scalar("eps", *choices.of(&[1e-6, 0.0, f64::MAX]))
        .scalar("zero_centred", xla_ffi::Pred::from(*choices.of(&[false, true])))
}

/// The same of LayerNorm.
fn right_layer_norm(pass: &str, choices: &mut Choices<'_>) -> Call {
    let [dtype, of_weight] = [(); 2].map(|()| *choices.of(&DTYPES));
    let leading: Vec<_> = (0..choices.below(4)).map(|_| choices.below(5) as i64).collect();
    let columns = 1 + choices.below(80) as i64;
    let mut some = || leading[..choices.below(leading.len() + 1)].to_vec();
    let [of_weights, of_biases, groups] = [some(), some(), some()];
    let wide = || Array::new(dtype, &[&leading[..], &[columns]].concat());
    let of_columns = |axes: &[i64]| Array::new(of_weight, &[axes, &[columns]].concat());
    let (weight, bias) = (of_columns(&of_weights), of_columns(&of_biases));
    let number = || Array::new(DType::F32, &leading);
    let blocks = 1 + choices.below(7) as i64;
    let sums = || Array::new(DType::F32, &[&groups[..], &[blocks, columns]].concat());
    let (arguments, results) = match pass {
        "forward" => (vec![wide(), weight, bias], vec![wide(), number(), number()]),
        "backward" => {
            (vec![wide(), weight, number(), number(), wide()], vec![wide(), sums(), sums()])
        }
        _ => panic!("{pass} has no right frame here"),
    };
    Call::new(arguments, results).scalar("eps", *choices.of(&[1e-5, 0.0, f64::MAX]))
}

/// The same of rotary position embedding; indices may be in no table.
fn right_rope(choices: &mut Choices<'_>) -> Call {
    let dtype = *choices.of(&DTYPES);
    let leading: Vec<_> = (0..choices.below(4)).map(|_| choices.below(5) as i64).collect();
    let columns = choices.below(80) as i64;
    let pairs = choices.below(columns as usize / 2 + 1) as i64;
    let batch = &leading[..choices.below(leading.len() + 1)];
    let positions = choices.below(5) as i64;
    let table = || Array::new(DType::F32, &[batch, &[positions, pairs]].concat());
    let wide = || Array::new(dtype, &[&leading[..], &[columns]].concat());
    let count = leading.iter().product::<i64>() as usize;
    let indices: Vec<_> = (0..count).map(|_| choices.below(7) as i32 - 1).collect();
    Call::new(vec![wide(), Array::of(&leading, &indices), table(), table()], vec![wide()])
        .scalar("interleaved", xla_ffi::Pred::from(*choices.of(&[false, true])))
        .scalar("inverse", xla_ffi::Pred::from(*choices.of(&[false, true])))
}

/// The same of attention.
fn right_flash_attention(pass: &str, choices: &mut Choices<'_>) -> Call {
    let dtype = *choices.of(&DTYPES);
    let leading: Vec<_> = (0..choices.below(3)).map(|_| choices.below(3) as i64).collect();
    let [group, queries, keys] = [3, 120, 220].map(|most| choices.below(most) as i64);
    let [width, value_width] = [(); 2].map(|()| 1 + choices.below(40) as i64);
    let of = |dtype, last: &[i64]| Array::new(dtype, &[&leading[..], last].concat());
    let (q, o) = ([group, queries, width], [group, queries, value_width]);
    let [has_segments, has_sinks] = [(); 2].map(|()| *choices.of(&[false, true]));
    let inputs = || {
        let mut inputs =
            vec![of(dtype, &q), of(dtype, &[keys, width]), of(dtype, &[keys, value_width])];
        inputs.push(of(DType::S32, &[queries, 2]));
        if has_segments {
            inputs.extend([of(DType::S32, &[queries]), of(DType::S32, &[keys])]);
        }
        inputs.extend(has_sinks.then(|| of(DType::F32, &[group])));
        inputs
    };
    let rows = || of(DType::F32, &[group, queries]);
    let (arguments, results): (Vec<_>, Vec<_>) = match pass {
        "forward" => (inputs(), vec![of(dtype, &o), rows()]),
        "backward" => {
            let given = [of(dtype, &o), rows(), of(dtype, &o), rows()];
            let [of_q, of_k] = [of(dtype, &q), of(dtype, &[keys, width])];
            let mut results = vec![of_q, of_k, of(dtype, &[keys, value_width])];
            results.extend(has_sinks.then(|| of(DType::F32, &[group])));
            (inputs().into_iter().chain(given).collect(), results)
        }
        _ => panic!("{pass} has no right frame here"),
    };
    let call = Call::new(arguments, results).scalar("scale", *choices.of(&[0.125, 0.0, f64::MAX]));
    let call = call.scalar("segments", xla_ffi::Pred::from(has_segments));
    let call = call.scalar("sinks", xla_ffi::Pred::from(has_sinks));
    match *choices.of(&[None, Some(30.0), Some(0.0)]) {
        Some(softcap) => call.scalar("softcap", softcap),
        None => call,
    }
}

/// The same of activations.
fn right_activation(pass: &str, choices: &mut Choices<'_>) -> Call {
    let dtype = *choices.of(&DTYPES);
    let leading: Vec<_> = (0..choices.below(4)).map(|_| choices.below(5) as i64).collect();
    let columns = choices.below(80) as i64;
    let text = |call: Call, name: &str, value: &'static str| {
        let span = abi::ByteSpan { ptr: value.as_ptr().cast(), len: value.len() };
        call.attribute(name, abi::ATTR_TYPE_STRING, span)
    };
    let kinds = ["silu", "gelu_tanh", "gelu_erf", "relu", "squared_relu"];
    let (kind, layout) = (*choices.of(&kinds), *choices.of(&["single", "halves", "interleaved"]));
    let last: &[i64] = match layout {
        "single" => &[columns],
        "halves" => &[2, columns],
        _ => &[columns, 2],
    };
    let packed = || Array::new(dtype, &[&leading[..], last].concat());
    let single = || Array::new(dtype, &[&leading[..], &[columns]].concat());
    let (arguments, results) = match pass {
        "forward" => (vec![packed()], vec![single()]),
        "backward" => (vec![packed(), single()], vec![packed()]),
        _ => panic!("{pass} has no right frame here"),
    };
    let is_gated = layout != "single";
    let mut call = Call::new(arguments, results)
        .scalar("alpha", if kind == "silu" { *choices.of(&[1.0, 1.702]) } else { 1.0 })
        .scalar("up_offset", if is_gated { *choices.of(&[0.0, 1.0]) } else { 0.0 });
    if is_gated && choices.below(2) == 1 {
        call = call.scalar("limit", *choices.of(&[7.0, 1e-6]));
    }
    text(text(call, "kind", kind), "layout", layout)
}

/// The same of FP8 quantisation.
fn right_fp8_quantize(pass: &str, choices: &mut Choices<'_>) -> Call {
    let dtype = *choices.of(&DTYPES);
    let format = *choices.of(&[DType::F8E4M3FN, DType::F8E5M2]);
    let leading: Vec<_> = (0..choices.below(3)).map(|_| choices.below(4) as i64).collect();
    let [rows, columns] = [(); 2].map(|()| choices.below(80) as i64);
    let block = *choices.of(&[1_i64, 3, 16, 128, i64::MAX]);
    // Of 1 x block, and of block x block.
    let is_square = choices.below(2) == 1;
    let count = |extent: i64| (extent as u64).div_ceil(block as u64) as i64;
    let of = |last: &[i64]| [&leading[..], last].concat();
    let scales = |rows: i64, columns: i64| {
        let down = if is_square { count(rows) } else { rows };
        Array::new(DType::F32, &of(&[down, count(columns)]))
    };
    let values = |last: &[i64]| Array::new(format, &of(last));
    let x = Array::new(dtype, &of(&[rows, columns]));
    let amax = Array::new(DType::F32, &of(&[rows]));
    let few = Array::new(DType::F32, &leading[..choices.below(leading.len() + 1)]);
    let (arguments, results) = match pass {
        "" => (vec![x], vec![values(&[rows, columns]), scales(rows, columns)]),
        "_transposed" => {
            let both = [(rows, columns), (columns, rows)];
            let results = both.map(|(m, d)| [values(&[m, d]), scales(m, d)]);
            (vec![x], results.into_iter().flatten().collect())
        }
        "_scaled" => (vec![x, few], vec![values(&[rows, columns]), amax]),
        "_scaled_transposed" => {
            let results = vec![values(&[rows, columns]), amax, values(&[columns, rows])];
            (vec![x, few], results)
        }
        "_amax" => (vec![x], vec![amax]),
        _ => panic!("{pass} has no right frame here"),
    };
    let call = Call::new(arguments, results);
    if !matches!(pass, "" | "_transposed") {
        return call;
    }
    call.scalar("block_rows", if is_square { block } else { 1 })
        .scalar("block_columns", block)
        .scalar("power_of_two", xla_ffi::Pred::from(*choices.of(&[false, true])))
}

/// With the attributes that every pass over logits has.
fn with_options(mut call: Call, is_backward: bool, choices: &mut Choices<'_>) -> Call {
    call = call
        .scalar("ignore_index", *choices.of(&[-100_i64, 0, i64::MIN]))
        .scalar("label_smoothing", *choices.of(&[0.0, 0.1, 1.0]))
        .scalar("z_loss", *choices.of(&[0.0, 1e-4, 10.0]));
    if let Some(softcap) = *choices.of(&[None, Some(5.0), Some(f64::MIN_POSITIVE)]) {
        call = call.scalar("softcap", softcap);
    }
    if let Some(temperature) = *choices.of(&[None, Some(0.7), Some(1e9)]) {
        call = call.scalar("temperature", temperature);
    }
    for name in ["time_block", "block_size"] {
        if let Some(extent) = *choices.of(&[None, Some(1_i64), Some(3), Some(i64::MAX)]) {
            call = call.scalar(name, extent);
        }
    }
    if is_backward {
        return call;
    }
    call.scalar("every_token", xla_ffi::Pred::from(*choices.of(&[false, true])))
}

/// A change to what [`Call::link`] would put right.
enum Late {
    Frame(u8, i64),
    Data { result: bool, index: usize, to: To },
}

/// Where a buffer's memory is moved.
enum To {
    Null,
    /// Off its alignment.
    By(usize),
    /// Over the memory of an argument, this many bytes on.
    Argument(usize, usize),
}

impl Late {
    fn make(self, call: &mut Call) {
        match self {
            Self::Frame(field, value) => {
                let frame = &mut call.frame;
                // Up to the table of functions the frame must hold what it takes to make an error.
                let size = value.clamp(32, i64::MAX) as usize;
                match field % 16 {
                    0 => frame.struct_size = size,
                    1 => frame.args.struct_size = value as usize,
                    2 => frame.rets.struct_size = value as usize,
                    3 => frame.attrs.struct_size = value as usize,
                    4 => frame.stage = value as u32,
                    5 => frame.args.size = value.min(frame.args.size),
                    6 => frame.rets.size = value.min(frame.rets.size),
                    7 => frame.attrs.size = value.min(frame.attrs.size),
                    8 => frame.args.args = std::ptr::null_mut(),
                    9 => frame.rets.rets = std::ptr::null_mut(),
                    10 => frame.attrs.attrs = std::ptr::null_mut(),
                    11 => frame.args.types = std::ptr::null_mut(),
                    12 => frame.rets.types = std::ptr::null_mut(),
                    13 => frame.attrs.names = std::ptr::null_mut(),
                    14 => call.api.api_version.major_version = value as i32,
                    _ => {
                        // Long enough to make errors; what comes later may be absent.
                        let least = std::mem::offset_of!(abi::Api, stream_get);
                        call.api.struct_size = least.max(value as usize % 512);
                    }
                }
            }
            Self::Data { result, index, to } => {
                let Some(array) = list(call, result).get(index) else { return };
                if array.buffer.data.is_null() {
                    return;
                }
                let data = match to {
                    To::Null => std::ptr::null_mut(),
                    To::By(bytes) => start(array).wrapping_byte_add(bytes),
                    To::Argument(argument, offset) => match call.arguments.get(argument) {
                        Some(argument) if argument.data.len() == array.data.len() => {
                            start(argument).wrapping_byte_add(offset)
                        }
                        _ => return,
                    },
                };
                list_mut(call, result)[index].buffer.data = data;
            }
        }
    }
}

/// Where the guard before the memory of `array` ends. Behind it there is a word to spare.
fn start(array: &Array) -> *mut std::ffi::c_void {
    array.data[GUARD..].as_ptr().cast_mut().cast()
}

fn list(call: &Call, result: bool) -> &Vec<Box<Array>> {
    if result { &call.results } else { &call.arguments }
}

fn list_mut(call: &mut Call, result: bool) -> &mut Vec<Box<Array>> {
    if result { &mut call.results } else { &mut call.arguments }
}

/// Changes one thing.
fn change(call: &mut Call, choices: &mut Choices<'_>, late: &mut Vec<Late>) {
    let kind = choices.byte() % 12;
    let result = choices.byte() % 2 == 1;
    let index = choices.below(list(call, result).len());
    let array = list_mut(call, result).get_mut(index);
    match (kind, array) {
        (0, Some(array)) => {
            array.buffer.dtype = match choices.byte() {
                byte if byte < 128 => u32::from(byte),
                _ => choices.number() as u32,
            };
        }
        (1, Some(array)) => {
            let axis = choices.below(array.dims.len());
            let extent = choices.number();
            if let Some(at) = array.dims.get_mut(axis) {
                *at = extent;
            }
        }
        (2, Some(array)) => {
            match choices.byte() % 3 {
                0 => array.dims.push(choices.number()),
                1 => _ = array.dims.pop(),
                _ => array.dims.insert(0, 1),
            }
            array.buffer.rank = array.dims.len() as i64;
        }
        (3, Some(array)) => array.buffer.rank = choices.number().min(array.buffer.rank),
        (4, Some(array)) => array.buffer.struct_size = choices.number() as usize,
        (5, Some(_)) => {
            let to = match choices.byte() % 3 {
                0 => To::Argument(choices.below(call.arguments.len()), choices.below(GUARD)),
                1 => To::Null,
                _ => To::By(choices.below(8)),
            };
            late.push(Late::Data { result, index, to });
        }
        (6, Some(_)) => _ = list_mut(call, result).remove(index),
        (7, _) => {
            let array = Array::new(*choices.of(DType::ALL), &[choices.below(9) as i64]);
            list_mut(call, result).insert(index, array);
            call.types.push(1);
        }
        (8, _) => {
            let index = choices.below(call.types.len());
            let kind = choices.number() as u32;
            call.types.get_mut(index).into_iter().for_each(|at| *at = kind);
        }
        (9, _) => late.push(Late::Frame(choices.byte(), choices.number())),
        (10, _) => {
            let index = choices.below(call.names.len());
            if index < call.names.len() {
                call.names.remove(index);
                call.attr_types.remove(index);
                call.attrs.remove(index);
            }
        }
        _ => attribute(call, choices),
    }
}

/// Adds an attribute of any type, behind those that are there.
fn attribute(call: &mut Call, choices: &mut Choices<'_>) {
    let name = *choices.of(&NAMES);
    // Room for the largest element.
    let value = [choices.number(), choices.number()];
    let data = call.own(value).cast();
    let taken = std::mem::replace(call, Call::new(vec![], vec![]));
    *call = match choices.byte() % 6 {
        0 => taken.attribute(
            name,
            abi::ATTR_TYPE_SCALAR,
            abi::Scalar { dtype: *choices.of(DType::ALL) as u32, value: data },
        ),
        1 => taken.attribute(
            name,
            abi::ATTR_TYPE_SCALAR,
            abi::Scalar {
                dtype: choices.number() as u32,
                value: if choices.byte() < 128 { data } else { std::ptr::null_mut() },
            },
        ),
        2 => taken.attribute(
            name,
            abi::ATTR_TYPE_ARRAY,
            abi::Array {
                dtype: *choices.of(DType::ALL) as u32,
                size: usize::from(choices.byte() % 2),
                data,
            },
        ),
        3 => taken.attribute(
            name,
            abi::ATTR_TYPE_STRING,
            abi::ByteSpan { ptr: data.cast_const().cast(), len: choices.below(17) },
        ),
        4 => {
            let attrs = taken.frame.attrs;
            taken.attribute(name, abi::ATTR_TYPE_DICTIONARY, abi::Attrs { size: 0, ..attrs })
        }
        // Of no type that there is, so that nothing is read.
        _ => taken.attribute(name, 5 + u32::from(choices.byte()), value),
    };
    if choices.byte() == 255 {
        call.names.last_mut().into_iter().for_each(|span| span.ptr = std::ptr::null());
    }
}

/// Bytes of a buffer of these extents; none where there is no such buffer.
fn bytes(buffer: &abi::Buffer, dims: &[i64]) -> Option<usize> {
    let dtype = DType::from_u32(buffer.dtype)?;
    let rank = usize::try_from(buffer.rank).ok()?;
    let dims = dims.get(..rank)?;
    if dims.contains(&0) {
        return Some(0);
    }
    let extents = dims.iter().map(|&extent| usize::try_from(extent).ok());
    extents
        .chain([Some(dtype.size())])
        .try_fold(1_usize, |product, extent| product.checked_mul(extent?))
}

/// Gives every buffer memory of the size that it says, between guards, with chosen contents.
fn back(call: &mut Call, choices: &mut Choices<'_>) {
    let mut state = u64::from(choices.byte()) + 1;
    for (result, count) in [(false, call.arguments.len()), (true, call.results.len())] {
        for array in &mut list_mut(call, result)[..count] {
            array.buffer.dims = array.dims.as_mut_ptr();
            let bytes = bytes(&array.buffer, &array.dims);
            let Some(bytes) = bytes.filter(|&bytes| bytes <= MOST_BYTES) else {
                array.data = vec![POISON; 2 * GUARD];
                array.buffer.data = std::ptr::null_mut();
                continue;
            };
            // A word more, for data that is moved off its alignment.
            array.data = vec![POISON; bytes.div_ceil(8) + 1 + 2 * GUARD];
            let inner = GUARD..array.data.len() - GUARD;
            if !result {
                for word in &mut array.data[inner] {
                    // xorshift64; labels of small words are in range now and then.
                    state ^= state << 13;
                    state ^= state >> 7;
                    state ^= state << 17;
                    *word = if state.is_multiple_of(3) { state & 0x7_0000_0007 } else { state };
                }
            }
            array.buffer.data = array.data[GUARD..].as_mut_ptr().cast();
        }
    }
}

/// All memory that handlers are shown, guards and all.
fn memory(call: &Call) -> Vec<Vec<u64>> {
    call.arguments.iter().chain(&call.results).map(|array| array.data.clone()).collect()
}
