//! What a target's calls take and give, declared once, as data.
//!
//! A [`Declaration`] names a target's arrays in the order of a call, each with its dimensions, its dtype and
//! its role, and the target's attributes, each with its type, its range and what its absence means. It stands
//! in the file of its operation, and the lists of handlers for CPUs and for GPUs both point at it. Programs
//! read all declarations as one JSON text, [`crate::json`], which the library hands out in C as
//! `xentile_declarations` and `pallas_bridge` carries as a file. The C header's prototypes, the page
//! `docs/reference/targets.md` and the frames of tests and of the fuzzer are made from them. Tests hold the
//! handlers to them: names and order of arrays, dtypes, attributes, and which attributes may be absent.
//!
//! Dimensions are a text such as `*batch V`. `*batch` stands for any number of leading axes, those of tokens.
//! An operand without it is shared by all tokens, and a result without it is a sum over tokens: a handler gives
//! it as partial sums `[.., P, D]`. A number is that extent; `2.F` packs two, one axis of 2F in a program,
//! `[2, F]` to a handler; `D/128` is the number of blocks of 128 in D, and `D/block_columns` that of blocks of
//! as many as the attribute says, an axis that is not there where the attribute is absent.

use std::ffi::CStr;

use xla_ffi::DType;

/// The stages of a call that a platform has handlers for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stages {
    /// No handler: the platform does not have the target.
    None,
    /// One handler, which computes.
    Execute,
    /// One handler that loads kernels, and one that launches them.
    InitializeAndExecute,
}

/// A target.
#[derive(Clone, Copy, Debug)]
pub struct Declaration {
    /// The name that programs call.
    pub name: &'static CStr,
    /// What it computes, in one sentence.
    pub summary: &'static str,
    /// The handlers for CPUs.
    pub host: Stages,
    /// The handlers for NVIDIA GPUs.
    pub cuda: Stages,
    /// The arguments, in order.
    pub operands: &'static [ArrayDecl],
    /// The results, in order.
    pub results: &'static [ArrayDecl],
    /// The attributes, in lists that others have too.
    pub attributes: &'static [&'static [AttributeDecl]],
    /// Named axes right behind `*batch` that a mesh may shard as it may axes of tokens.
    pub sharded: &'static [&'static str],
    /// Each `(a, n, b)` says that n times the extent a is at most the extent b, or the number b.
    pub bounds: &'static [(&'static str, usize, &'static str)],
    /// Each `(a, b)` says that the extent a is a multiple of the extent b.
    pub multiples: &'static [(&'static str, &'static str)],
    /// Whether shared operands may have some of the first axes of tokens, those that `vmap` maps.
    pub maps_shared: bool,
    /// Which results may lie in the place of an operand.
    pub aliases: &'static [Alias],
}

impl Declaration {
    /// A target on both platforms, without arrays and attributes.
    pub(crate) const BASE: Self = Self {
        name: c"",
        summary: "",
        host: Stages::Execute,
        cuda: Stages::InitializeAndExecute,
        operands: &[],
        results: &[],
        attributes: &[],
        sharded: &[],
        bounds: &[],
        multiples: &[],
        maps_shared: true,
        aliases: &[],
    };

    /// The name as text.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.name.to_str().expect("names are ASCII")
    }

    /// The attributes, of all lists.
    pub fn attributes(&self) -> impl Iterator<Item = &'static AttributeDecl> {
        self.attributes.iter().copied().flatten()
    }

    /// The symbols of its handlers in the library, with the platform and the stage of each.
    #[must_use]
    pub fn symbols(&self) -> Vec<(String, &'static str, &'static str)> {
        let mut symbols = Vec::new();
        for (platform, suffix, stages) in [("Host", "host", self.host), ("CUDA", "cuda", self.cuda)]
        {
            let symbol = format!("{}_{suffix}", self.name());
            if stages == Stages::InitializeAndExecute {
                symbols.push((format!("{symbol}_initialize"), platform, "initialize"));
            }
            if stages != Stages::None {
                symbols.push((symbol, platform, "execute"));
            }
        }
        symbols
    }
}

/// An argument or a result.
#[derive(Clone, Copy, Debug)]
pub struct ArrayDecl {
    /// Its name, which errors have.
    pub name: &'static str,
    /// Its dimensions.
    pub dims: Dims,
    /// Its dtype.
    pub dtype: Dtype,
    /// What it is for.
    pub role: Role,
    /// When a call has it.
    pub given: Given,
}

/// The dimensions of an array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dims {
    /// A text such as `*batch V`.
    Fixed(&'static str),
    /// One text for each value of an attribute, `*` for all other values.
    By(&'static str, &'static [(&'static str, &'static str)]),
}

/// The dtype of an array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dtype {
    /// One of these.
    OneOf(&'static [DType]),
    /// That of another array of the call.
    Like(&'static str),
    /// That of another array of the call, or f32 on GPUs.
    LikeOrF32(&'static str),
    /// u8 on CPUs, any on GPUs: bytes that no other reads.
    Bytes,
}

/// What an array is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// What a function takes.
    Input,
    /// What a forward pass leaves to a backward pass.
    Residual,
    /// The cotangent of a result of the forward pass.
    Cotangent,
    /// What a function returns.
    Output,
    /// The gradient of an input.
    Gradient,
    /// Memory to work in.
    Scratch,
}

/// When a call has an array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Given {
    /// Always.
    Always,
    /// Where this attribute is true.
    Where(&'static str),
    /// Where this attribute is false.
    Unless(&'static str),
    /// Where the caller gives it.
    Optional,
    /// Where the caller gives this operand.
    With(&'static str),
}

/// An attribute.
#[derive(Clone, Copy, Debug)]
pub struct AttributeDecl {
    /// Its name.
    pub name: &'static str,
    /// Its type and range.
    pub range: Range,
    /// What its absence means; it must be there if none.
    pub absent: Option<&'static str>,
    /// Whether GPUs alone have it.
    pub cuda_only: bool,
}

/// The type and range of an attribute.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Range {
    /// A truth value.
    Bool,
    /// An s64, any.
    Integer,
    /// An s64 of at least 1.
    Extent,
    /// An s64, one of these.
    OneOf(&'static [i64]),
    /// An f64, finite in f32.
    Finite,
    /// An f64, finite and above 0.
    Positive,
    /// An f64 from the first to the second, which may be infinite: then finite.
    Between(f64, f64),
    /// A text, one of these.
    Word(&'static [&'static str]),
}

/// A result that may lie in the place of an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Alias {
    /// The operand.
    pub operand: &'static str,
    /// The result.
    pub result: &'static str,
    /// Whether calls ask for it whatever else reads the operand.
    pub always: bool,
}

pub(crate) const F32: Dtype = Dtype::OneOf(&[DType::F32]);
pub(crate) const S32: Dtype = Dtype::OneOf(&[DType::S32]);
/// What kernels compute with.
pub(crate) const FLOATS: Dtype = Dtype::OneOf(&[DType::F32, DType::Bf16, DType::F16]);
/// The floats of 16 bits.
pub(crate) const HALVES: Dtype = Dtype::OneOf(&[DType::Bf16, DType::F16]);
/// Those of labels.
pub(crate) const LABELS: Dtype = Dtype::OneOf(&[DType::S32, DType::S64]);
/// The formats of FP8.
pub(crate) const FP8: Dtype = Dtype::OneOf(&[DType::F8E4M3FN, DType::F8E5M2]);

macro_rules! constructors {
    ($($name:ident, $role:ident;)*) => {$(
        pub(crate) const fn $name(name: &'static str, dims: &'static str, dtype: Dtype) -> ArrayDecl {
            ArrayDecl { name, dims: Dims::Fixed(dims), dtype, role: Role::$role, given: Given::Always }
        }
    )*};
}

constructors! {
    input, Input;
    residual, Residual;
    cotangent, Cotangent;
    output, Output;
    gradient, Gradient;
    scratch, Scratch;
}

impl ArrayDecl {
    /// The same, with dimensions by an attribute.
    pub(crate) const fn by(mut self, dims: Dims) -> Self {
        self.dims = dims;
        self
    }

    /// The same, not in every call.
    pub(crate) const fn given(mut self, given: Given) -> Self {
        self.given = given;
        self
    }
}

pub(crate) const fn attribute(name: &'static str, range: Range) -> AttributeDecl {
    AttributeDecl { name, range, absent: None, cuda_only: false }
}

impl AttributeDecl {
    /// The same, which may be absent.
    pub(crate) const fn absent(mut self, meaning: &'static str) -> Self {
        self.absent = Some(meaning);
        self
    }

    /// The same, on GPUs alone.
    pub(crate) const fn cuda_only(mut self) -> Self {
        self.cuda_only = true;
        self
    }
}

pub(crate) const fn may_alias(operand: &'static str, result: &'static str) -> Alias {
    Alias { operand, result, always: false }
}
