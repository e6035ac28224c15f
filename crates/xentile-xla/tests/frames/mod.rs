//! Frames of calls that are as a declaration says.

use std::collections::HashMap;

use xentile_xla::declaration::{ArrayDecl, AttributeDecl, Declaration, Dims, Dtype, Given, Range};
use xla_ffi::testing::{Array, Call};
use xla_ffi::{DType, Pred, abi};

/// What is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    /// Any outcome is right.
    Free,
    /// The first outcome is right whatever else is chosen; others may go with few other attributes.
    Value,
}

/// Returns a number below the given one.
pub type Choose<'a> = &'a mut dyn FnMut(Choice, usize) -> usize;

/// The value of an attribute.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value {
    Bool(bool),
    Integer(i64),
    Float(f64),
    Word(&'static str),
}

impl Value {
    /// The call, with this as the attribute `name`.
    pub fn add(self, call: Call, name: &str) -> Call {
        match self {
            Self::Bool(value) => call.scalar(name, Pred::from(value)),
            Self::Integer(value) => call.scalar(name, value),
            Self::Float(value) => call.scalar(name, value),
            Self::Word(value) => {
                let span = abi::ByteSpan { ptr: value.as_ptr().cast(), len: value.len() };
                call.attribute(name, abi::ATTR_TYPE_STRING, span)
            }
        }
    }

    /// As cases of dimensions have it.
    fn text(self) -> String {
        match self {
            Self::Bool(value) => value.to_string(),
            Self::Integer(value) => value.to_string(),
            Self::Float(value) => value.to_string(),
            Self::Word(value) => value.into(),
        }
    }
}

/// A call of a target, before it is put into a frame.
pub struct Frame {
    /// The arguments and the results that the call has, each with its shape and its dtype.
    pub arrays: [Vec<(&'static ArrayDecl, Vec<i64>, DType)>; 2],
    /// The attributes that the call has.
    pub attributes: Vec<(&'static AttributeDecl, Value)>,
}

impl Frame {
    /// The call.
    pub fn call(&self) -> Call {
        let [arguments, results] = [0, 1].map(|side: usize| {
            let arrays = self.arrays[side].iter();
            arrays.map(|(_, dims, dtype)| Array::new(*dtype, dims)).collect()
        });
        let attributes = self.attributes.iter();
        attributes.fold(Call::new(arguments, results), |call, (declared, value)| {
            value.add(call, declared.name)
        })
    }
}

/// A right call of a target on a platform.
pub fn right(declaration: &'static Declaration, platform: &str, choose: Choose<'_>) -> Frame {
    let attributes = attributes(declaration, platform, choose);
    let values: HashMap<_, _> =
        attributes.iter().map(|(declared, value)| (declared.name, *value)).collect();
    let mut made = Made { values, ..Made::default() };
    // Dims by an attribute that the call does not have are those of an array that it has not either.
    let has_dims = |array: &&ArrayDecl| match array.dims {
        Dims::By(attribute, _) => made.values.contains_key(attribute),
        Dims::Fixed(_) => true,
    };
    let all = || declaration.operands.iter().chain(declaration.results).filter(has_dims);
    let names = all().map(|array| made.dims(array).split_whitespace().count()).max().unwrap_or(0);
    let has_tokens = all().any(|array| made.dims(array).starts_with("*batch"));
    let axes = if names > 2 { 3 } else { 4 };
    if has_tokens {
        let count = choose(Choice::Free, axes);
        made.leading = (0..count).map(|_| choose(Choice::Free, 5) as i64).collect();
    }
    made.most_extent = if names > 2 { 24 } else { 80 };
    let arrays = [declaration.operands, declaration.results].map(|side| {
        let is_result = std::ptr::eq(side, declaration.results);
        let mut found = Vec::new();
        for array in side {
            let is_given = match array.given {
                Given::Always => true,
                Given::Where(attribute) | Given::Unless(attribute) => {
                    let is_false =
                        matches!(made.values.get(attribute), None | Some(Value::Bool(false)));
                    is_false == matches!(array.given, Given::Unless(_))
                }
                Given::Optional => choose(Choice::Free, 2) == 1,
                Given::With(operand) => made.dtypes.contains_key(operand),
            };
            if is_given {
                let shape = made.shape(declaration, array, is_result && has_tokens, choose);
                let dtype = made.dtype(array, choose);
                found.push((array, shape, dtype));
            }
        }
        found
    });
    Frame { arrays, attributes }
}

fn attributes(
    declaration: &'static Declaration,
    platform: &str,
    choose: Choose<'_>,
) -> Vec<(&'static AttributeDecl, Value)> {
    let mut found: Vec<(&AttributeDecl, Value)> = Vec::new();
    for declared in declaration.attributes() {
        // Blocks of several rows are square.
        let of_rows = found.last().filter(|_| declared.name == "block_columns");
        if let Some((_, rows @ Value::Integer(2..))) = of_rows {
            found.push((declared, *rows));
            continue;
        }
        let is_absent = declared.absent.is_some() && {
            let is_float = value(declared.range, &mut |_, _| 0).is_float();
            choose(if is_float { Choice::Value } else { Choice::Free }, 2) == 0
        };
        if !is_absent && (!declared.cuda_only || platform == "CUDA") {
            found.push((declared, value(declared.range, choose)));
        }
    }
    found
}

impl Value {
    fn is_float(self) -> bool {
        matches!(self, Self::Float(_))
    }
}

/// A value within a range.
fn value(range: Range, choose: Choose<'_>) -> Value {
    let mut float = |all: &[f64]| Value::Float(all[choose(Choice::Value, all.len())]);
    match range {
        Range::Finite => float(&[0.0, 1.0, -1.5]),
        Range::Positive => float(&[1.0, 7.0, 1e-6]),
        Range::Between(from, to) => float(&[1e-6_f64.clamp(from, to), from, to.min(f64::MAX)]),
        Range::Bool => Value::Bool(choose(Choice::Free, 2) == 1),
        Range::Integer => Value::Integer([-100, 0, i64::MIN][choose(Choice::Free, 3)]),
        Range::Extent => Value::Integer([1, 3, 16, 128][choose(Choice::Free, 4)]),
        Range::OneOf(all) => Value::Integer(all[choose(Choice::Free, all.len())]),
        Range::Word(all) => Value::Word(all[choose(Choice::Free, all.len())]),
    }
}

/// What is chosen so far.
#[derive(Default)]
struct Made {
    values: HashMap<&'static str, Value>,
    leading: Vec<i64>,
    most_extent: usize,
    extents: HashMap<String, i64>,
    /// Axes before those of shared operands and sums, by dims: arrays of one shape are mapped alike.
    before: HashMap<(&'static str, bool), Vec<i64>>,
    dtypes: HashMap<&'static str, DType>,
}

impl Made {
    /// The text of an array's dimensions.
    fn dims(&self, array: &ArrayDecl) -> &'static str {
        match array.dims {
            Dims::Fixed(text) => text,
            Dims::By(attribute, cases) => {
                let value =
                    self.values.get(attribute).map(|value| value.text()).unwrap_or_default();
                let case = cases.iter().find(|(of, _)| *of == value || *of == "*");
                case.unwrap_or_else(|| panic!("no dims of {} for {value}", array.name)).1
            }
        }
    }

    fn shape(
        &mut self,
        declaration: &Declaration,
        array: &ArrayDecl,
        may_be_sum: bool,
        choose: Choose<'_>,
    ) -> Vec<i64> {
        let text = self.dims(array);
        let (mut shape, names) = match text.strip_prefix("*batch") {
            Some(names) => (self.leading.clone(), names),
            None => {
                let most = if declaration.maps_shared { self.leading.len() } else { 0 };
                let leading = &self.leading;
                let before = self.before.entry((text, may_be_sum)).or_insert_with(|| {
                    let mut axes = leading[..choose(Choice::Free, most + 1)].to_vec();
                    axes.extend(may_be_sum.then(|| 1 + choose(Choice::Free, 7) as i64));
                    axes
                });
                (before.clone(), text)
            }
        };
        for name in names.split_whitespace() {
            self.push_axis(&mut shape, declaration, name, choose);
        }
        shape
    }

    fn push_axis(
        &mut self,
        shape: &mut Vec<i64>,
        declaration: &Declaration,
        name: &str,
        choose: Choose<'_>,
    ) {
        if let Some((of, block)) = name.split_once('/') {
            let extent = self.extent(declaration, of, choose);
            let block = block.parse().ok().or(match self.values.get(block) {
                Some(Value::Integer(block)) => Some(*block),
                _ => None,
            });
            shape.extend(block.map(|block| (extent as u64).div_ceil(block as u64) as i64));
            return;
        }
        for part in name.split('.') {
            let extent = part.parse().ok();
            shape.push(extent.unwrap_or_else(|| self.extent(declaration, part, choose)));
        }
    }

    /// The extent of a named axis.
    fn extent(&mut self, declaration: &Declaration, name: &str, choose: Choose<'_>) -> i64 {
        if let Some(extent) = self.extents.get(name) {
            return *extent;
        }
        if let Some((_, of)) = declaration.multiples.iter().find(|one| one.0 == name) {
            // Blocks are of some extents.
            let times = if *of == "B" { [64, 128, 256] } else { [1, 2, 3] };
            let of = self.extent(declaration, of, choose);
            let extent = of * times[choose(Choice::Free, 3)];
            self.extents.insert(name.into(), extent);
            return extent;
        }
        let bound = declaration.bounds.iter().find(|bound| bound.0 == name);
        let extent = match bound {
            Some((_, times, of)) => {
                let most =
                    of.parse().unwrap_or_else(|_| self.extent(declaration, of, choose) as usize);
                choose(Choice::Free, most / times + 1) as i64
            }
            None if is_bytes(declaration, name) => [1 << 18, 1000, 0][choose(Choice::Value, 3)],
            None => 1 + choose(Choice::Free, self.most_extent) as i64,
        };
        self.extents.insert(name.into(), extent);
        extent
    }

    fn dtype(&mut self, array: &'static ArrayDecl, choose: Choose<'_>) -> DType {
        let dtype = match array.dtype {
            Dtype::OneOf(all) => all[choose(Choice::Free, all.len())],
            Dtype::Like(other) | Dtype::LikeOrF32(other) => self.dtypes[other],
            Dtype::Bytes => DType::U8,
        };
        self.dtypes.insert(array.name, dtype);
        dtype
    }
}

/// Whether a named axis is that of bytes of scratch.
fn is_bytes(declaration: &Declaration, name: &str) -> bool {
    let mut all = declaration.operands.iter().chain(declaration.results);
    all.any(|array| {
        matches!(array.dims, Dims::Fixed(dims) if dims == name) && array.dtype == Dtype::Bytes
    })
}
