//! Call frames for every handler of `xentile-xla`: a right one, then changes to any of its parts. All
//! pointers lead to as much memory as the frame says, or are null or misaligned.
//!
//! Each choice is a byte, 0 where the input has ended, and 0 leaves things right: the empty input is
//! a right frame of the first target.

#![no_main]
#![allow(clippy::vec_box)] // frames keep the addresses of the items

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use xla_ffi::testing::{Array, Call};
use xla_ffi::{DType, ErrorCode, abi};

#[path = "../../crates/xentile-xla/tests/frames/mod.rs"]
mod frames;

/// Words before and after the memory of every buffer.
const GUARD: usize = 8;
const POISON: u64 = 0xa5a5_a5a5_a5a5_a5a5;
/// A buffer of more bytes is null.
const MOST_BYTES: usize = 1 << 16;

/// Numbers that frames get wrong.
const ODD: [i64; 12] = [0, 1, 2, 3, 7, 8, 1 << 20, 1 << 31, 1 << 61, i64::MAX, i64::MIN, -1];
/// The attributes of all targets, and names that none has.
static NAMES: LazyLock<Vec<&str>> = LazyLock::new(|| {
    let mut names: Vec<_> = xentile_xla::declarations()
        .flat_map(|declaration| declaration.attributes().map(|attribute| attribute.name))
        .chain(["", "no such attribute"])
        .collect();
    names.sort_unstable();
    names.dedup();
    names
});

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

/// A frame as `target` is declared; extents, dtypes and attributes are chosen. Attributes may not fit each other.
fn right(target: &str, choices: &mut Choices<'_>) -> Call {
    let mut declarations = xentile_xla::declarations();
    let declaration = declarations.find(|one| one.name() == target).expect("targets are declared");
    frames::right(declaration, "Host", &mut |_, count| choices.below(count)).call()
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
    let name = *choices.of(NAMES.as_slice());
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
