//! The operation contract: what an operation takes and gives, by which names, and what tools need to
//! know of it, said once. Tools serve whatever [`operations`](crate::operations) lists, and know none by name.
//!
//! Arrays have names, and dims are letters (`T`, `D`), multiples of such (`2F`), or parts of them as long
//! as an option says (`D/block_size`), or options that count (`columns`), whose extents a [`Problem`] says.
//! What an operation takes in a [`Pass`] is its [`Signature`]; [`Operation::inputs`] and
//! [`Operation::given`] draw it, [`Operation::reference`] computes it in float64 and hands a [`Visitor`]
//! what each entry should be and by how much it may be off, a row at a time, so that no float64 array of
//! the logits' size exists.
//!
//! An operation is a file that implements [`Operation`] and a line in that list. Kernels are elsewhere,
//! and found by the operation's name.

mod array;
mod judge;
mod options;
mod problem;
mod synthetic;

use std::fmt;

pub use array::{Array, ArrayElement, Arrays};
pub(crate) use judge::WHOLE_RESULTS;
pub use judge::{Bound, Judged, Reference, Rows, ToleranceSpec, Tolerances, Visitor};
pub use options::{Kind, OptionSpec, Section, Value};
pub use problem::{Problem, TileExtents, multiple};
pub use synthetic::{Distribution, Purpose, Synthetic};

use crate::fp8::{Format, encode};
use crate::{DType, Error, Result};

/// A dim of arrays, such as tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DimSpec {
    /// The letter that arrays have for it.
    pub letter: &'static str,
    /// Its key in configs.
    pub key: &'static str,
    /// What one index along it is called in reports.
    pub index: &'static str,
    /// What it counts.
    pub about: &'static str,
    /// The extent that is measured where a config names none; it has to name one where this is none.
    pub default: Option<usize>,
    /// The letter of the dim before it whose extent it has where a config names none and there is no default.
    pub like: Option<&'static str>,
    /// Whether gradcheck's configs have it in `shape`, beside `batch` and `seq_len`.
    pub in_shape: bool,
}

/// Tokens: batch x time, flattened.
pub const TOKENS: DimSpec = DimSpec {
    letter: "T",
    key: "time",
    index: "token",
    about: "tokens: batch x time, flattened",
    default: Some(512),
    like: None,
    in_shape: false,
};

/// Columns of a vocabulary.
pub const VOCAB: DimSpec = DimSpec {
    letter: "V",
    key: "vocab",
    index: "column",
    about: "vocabulary columns",
    default: Some(151_643),
    like: None,
    in_shape: true,
};

/// Columns of hidden states.
pub const HIDDEN: DimSpec = DimSpec {
    letter: "D",
    key: "hidden",
    index: "hidden",
    about: "columns of hidden states",
    default: None,
    like: None,
    in_shape: false,
};

/// What is computed of an operation at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// What the operation gives.
    Forward,
    /// Gradients, for cotangents of that and what the forward pass left.
    Backward,
    /// A scalar and its gradients.
    Fused,
    /// Forward and backward, in one program.
    ForwardAndBackward,
}

impl Pass {
    /// The name of the pass, which programs have.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::Fused => "value_and_grad",
            Self::ForwardAndBackward => "forward_and_backward",
        }
    }

    /// Whether it gives gradients.
    #[must_use]
    pub fn has_gradients(self) -> bool {
        self != Self::Forward
    }
}

/// What the elements of an array are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ElementRule {
    /// Of the problem's dtype.
    Compute,
    /// Of this dtype whatever the problem's is.
    Is(DType),
    /// Bits of a format of 8 bits.
    Fp8(Format),
    /// Integers, 32 bits wide on devices.
    Index,
}

/// What an array is to an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// An operand; whether it has a gradient.
    Input {
        /// Whether it has a gradient.
        differentiable: bool,
    },
    /// The cotangent of the result of this name, an operand.
    Cotangent(&'static str),
    /// A result.
    Output,
    /// The gradient of the operand of this name, a result.
    Gradient(&'static str),
}

/// An array that an operation takes or gives.
#[derive(Clone, Debug, PartialEq)]
pub struct ArraySpec {
    /// Its name.
    pub name: &'static str,
    /// The letters of its dims; `2F` is twice as long as `F`, `D/block_size` as many parts of `D`, and `columns` as
    /// many as that option says.
    pub dims: Vec<&'static str>,
    /// What its elements are.
    pub element: ElementRule,
    /// What it is to the operation.
    pub role: Role,
}

impl ArraySpec {
    /// An operand of the problem's dtype that has a gradient.
    #[must_use]
    pub fn input(name: &'static str, dims: &[&'static str]) -> Self {
        Self::new(name, dims, ElementRule::Compute, Role::Input { differentiable: true })
    }

    /// An array.
    #[must_use]
    pub fn new(
        name: &'static str,
        dims: &[&'static str],
        element: ElementRule,
        role: Role,
    ) -> Self {
        Self { name, dims: dims.to_vec(), element, role }
    }

    /// An operand in f32, such as a weight a token.
    #[must_use]
    pub fn number(name: &'static str, dims: &[&'static str], role: Role) -> Self {
        Self::new(name, dims, ElementRule::Is(DType::F32), role)
    }

    /// Whether this operand has a gradient.
    #[must_use]
    pub fn is_differentiable(&self) -> bool {
        self.role == Role::Input { differentiable: true }
    }

    /// Its extents in `problem`.
    #[must_use]
    pub fn extents(&self, problem: &Problem) -> Vec<usize> {
        self.dims.iter().map(|letter| problem.dim(letter)).collect()
    }

    /// Bytes of an element, on a device.
    #[must_use]
    pub fn width(&self, problem: &Problem) -> usize {
        match self.element {
            ElementRule::Compute => problem.dtype.size_bytes(),
            ElementRule::Is(dtype) => dtype.size_bytes(),
            ElementRule::Fp8(_) => 1,
            ElementRule::Index => size_of::<i32>(),
        }
    }

    /// Room for it on the host, all of it `value`. A scalar is in float64, as hosts sum it.
    #[must_use]
    pub fn room(&self, problem: &Problem, value: f32) -> Array<'static> {
        let length = self.extents(problem).iter().product();
        match self.element {
            _ if self.dims.is_empty() => Array::of(vec![f64::from(value)]),
            ElementRule::Is(dtype) => Array::filled(dtype, length, value),
            ElementRule::Fp8(format) => {
                Array::F8(format, vec![encode(format, value); length].into())
            }
            ElementRule::Compute | ElementRule::Index => {
                Array::filled(problem.dtype, length, value)
            }
        }
    }

    /// Its bytes in `problem`, on a device; none where no address names so many.
    #[must_use]
    pub fn bytes(&self, problem: &Problem) -> Option<u64> {
        let extents = self.extents(problem);
        let width = self.width(problem) as u64;
        extents.iter().try_fold(width, |bytes, &extent| bytes.checked_mul(extent as u64))
    }
}

/// What a pass takes and gives, in order. Gradients end the results.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Signature {
    /// What it takes.
    pub operands: Vec<ArraySpec>,
    /// What it gives.
    pub results: Vec<ArraySpec>,
}

impl Signature {
    /// Where gradients begin among the results.
    #[must_use]
    pub fn gradients(&self) -> usize {
        let is_gradient = |spec: &ArraySpec| matches!(spec.role, Role::Gradient(_));
        self.results.iter().position(is_gradient).unwrap_or(self.results.len())
    }

    /// Bytes of all operands, and of all results, on a device.
    #[must_use]
    pub fn bytes(&self, problem: &Problem) -> [u64; 2] {
        [&self.operands, &self.results]
            .map(|specs| specs.iter().filter_map(|spec| spec.bytes(problem)).sum())
    }

    /// The operand or result called `name`.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&ArraySpec> {
        self.operands.iter().chain(&self.results).find(|spec| spec.name == name)
    }
}

/// A function that users know by a name of its own: an operation with some options set.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NamedFunction {
    /// Its name in `pallas_bridge`.
    pub name: &'static str,
    /// Options and their values, which its name stands for.
    pub options: &'static [(&'static str, Value)],
}

/// What a step cannot take less than.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Bytes that must be read.
    pub bytes_read: u64,
    /// Bytes that must be written.
    pub bytes_written: u64,
    /// Operations of matrix products, the fewest there can be; 0 where there are none, and memory is
    /// what a step is held to.
    pub flops: u64,
}

/// A kernel that XLA shows by name, and how often it moves as many bytes as the first operand has.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KernelTraffic {
    /// The name, or the part of it that does not change.
    pub name: &'static str,
    /// How often.
    pub passes: f64,
}

/// Arrays that were stored under names, for an operation to find its inputs among.
pub trait Stored {
    /// The names.
    fn names(&self) -> Vec<String>;

    /// The extents of an array.
    ///
    /// # Errors
    /// There is none of that name.
    fn extents(&self, name: &str) -> Result<Vec<usize>>;

    /// An array as it is stored: rows of floats of their own dtype, without a copy where memory allows.
    ///
    /// # Errors
    /// There is none of that name, or it holds no floats.
    fn floats(&self, name: &str) -> Result<Array<'_>>;

    /// An array of integers.
    ///
    /// # Errors
    /// There is none of that name, or it holds no integers.
    fn integers(&self, name: &str) -> Result<Vec<i64>>;
}

/// An operation.
pub trait Operation: Sync {
    /// Its name, in configs, reports and programs.
    fn name(&self) -> &'static str;

    /// What it computes, in a line.
    fn about(&self) -> &'static str;

    /// The name of its family. What is written of a config of one operation has the keys of all that are
    /// of its family, null where it has no such thing itself.
    fn family(&self) -> &'static str {
        self.name()
    }

    /// The dims of its arrays.
    fn dims(&self) -> &'static [DimSpec];

    /// Its options.
    fn options(&self) -> &'static [OptionSpec];

    /// The functions of `pallas_bridge` that are this operation with some options set.
    fn functions(&self) -> &'static [NamedFunction] {
        &[]
    }

    /// What gradcheck lets pass, with defaults.
    fn tolerances(&self) -> &'static [ToleranceSpec];

    /// The extents of a tile, by the names that configs have for them; none where kernels have no tile.
    fn tile(&self) -> &'static [DimSpec] {
        &[]
    }

    /// The distributions that its inputs are drawn from.
    fn distributions(&self) -> &'static [Distribution];

    /// The passes that there are kernels or programs of.
    fn passes(&self) -> &'static [Pass];

    /// Whether a token's row says something of the next token, so that the last row of a sequence is of
    /// no use.
    fn predicts_next(&self) -> bool {
        false
    }

    /// Refuses options outside their range, and what `problem` asks for that there is not.
    ///
    /// # Errors
    /// The first value that cannot be.
    fn validate(&self, problem: &Problem) -> Result<()>;

    /// What an option stands for in `problem`, which may leave it out.
    fn meant(&self, problem: &Problem, option: &str) -> Value {
        problem.option(option)
    }

    /// Whether what `problem` asks for is a scalar, and so [`Pass::Fused`].
    fn is_fused(&self, problem: &Problem) -> bool {
        _ = problem;
        false
    }

    /// Whether a program of `problem` for XLA comes from JAX, though this build writes others.
    fn needs_jax(&self, problem: &Problem) -> bool {
        _ = problem;
        false
    }

    /// Whether any pass gives gradients.
    fn has_derivative(&self) -> bool {
        self.passes().iter().any(|pass| pass.has_gradients())
    }

    /// The pass that gives everything that `problem` asks for.
    fn whole(&self, problem: &Problem) -> Pass {
        match self.is_fused(problem) {
            true => Pass::Fused,
            false if self.has_derivative() => Pass::ForwardAndBackward,
            false => Pass::Forward,
        }
    }

    /// What `pass` takes and gives.
    fn signature(&self, problem: &Problem, pass: Pass) -> Signature;

    /// Draws its inputs. Each of `rows`, one a token, has a generator of its own.
    ///
    /// # Errors
    /// `from` asks for what inputs of this operation cannot be; more elements than memory can address.
    fn inputs(&self, problem: &Problem, from: &Synthetic, rows: &[u64]) -> Result<Arrays<'static>>;

    /// Draws what `pass` takes beside inputs: weights of tokens, cotangents. Without a derivative that is
    /// nothing.
    fn given(
        &self,
        problem: &Problem,
        pass: Pass,
        from: &Synthetic,
        rows: &[u64],
    ) -> Arrays<'static> {
        _ = (problem, pass, from, rows);
        Arrays::default()
    }

    /// What [`Self::given`] is where time is measured: cotangents that training has none of are 0.
    fn measured(
        &self,
        problem: &Problem,
        pass: Pass,
        from: &Synthetic,
        rows: &[u64],
    ) -> Arrays<'static> {
        self.given(problem, pass, from, rows)
    }

    /// Whether there are [`Self::zeros`].
    fn has_zeros(&self) -> bool {
        false
    }

    /// Its inputs with zeros in the place of what takes long to draw.
    ///
    /// # Errors
    /// There are no such; more elements than memory can address.
    fn zeros(&self, problem: &Problem, from: &Synthetic, rows: &[u64]) -> Result<Arrays<'static>> {
        self.inputs(problem, from, rows)
    }

    /// What the dims of the inputs in `file` are, by letter, with `batch` and `seq_len` of its tokens.
    ///
    /// # Errors
    /// The file lacks what the operation needs, or shapes disagree.
    fn stored_dims(&self, file: &dyn Stored) -> Result<StoredDims> {
        _ = file;
        Err(Error::Invalid(format!("op {} takes no file; its inputs are drawn", self.name())))
    }

    /// Its inputs from `file`.
    ///
    /// # Errors
    /// As for [`Self::stored_dims`]; another dtype than the problem's.
    fn stored<'a>(&self, problem: &Problem, file: &'a dyn Stored) -> Result<Arrays<'a>> {
        _ = problem;
        self.stored_dims(file).map(|_| Arrays::default())
    }

    /// Bytes that reading a file takes, beside what the file itself has; none for more than there are
    /// addresses.
    fn stored_bytes(&self, problem: &Problem, file: &dyn Stored) -> Option<u64> {
        _ = (problem, file);
        Some(0)
    }

    /// The float64 reference on `inputs`.
    ///
    /// # Errors
    /// Inputs that the operation does not take, such as a label out of range.
    fn reference<'a>(
        &self,
        problem: &'a Problem,
        inputs: &'a Arrays<'a>,
        tolerances: Tolerances,
    ) -> Result<Box<dyn Reference + 'a>>;

    /// Bytes that the reference holds with `threads` threads; none for more than there are addresses.
    fn reference_bytes(&self, problem: &Problem, threads: usize) -> Option<u64>;

    /// Bytes that a program holds that is not tiled, beside operands and results.
    fn dense_bytes(&self, problem: &Problem) -> Option<u64> {
        _ = problem;
        Some(0)
    }

    /// What a step of [`Self::whole`] cannot take less than: each array read or written once, unless it says
    /// otherwise.
    fn cost(&self, problem: &Problem) -> Cost {
        let whole = self.signature(problem, self.whole(problem));
        let [bytes_read, bytes_written] = whole.bytes(problem);
        Cost { bytes_read, bytes_written, flops: 0 }
    }

    /// Its kernels that are estimated from a schedule.
    fn traffic(&self) -> &'static [KernelTraffic] {
        &[]
    }

    /// The extents of its inputs, in a few words; `sequences` is batch and sequence length, where there
    /// are any.
    fn shape(&self, problem: &Problem, sequences: Option<[usize; 2]>) -> String {
        _ = sequences;
        let signature = self.signature(problem, Pass::Forward);
        let inputs = signature.operands.iter().filter(|spec| spec.dims.len() > 1);
        inputs.map(|spec| format!("{:?}", spec.extents(problem))).collect::<Vec<_>>().join(" x ")
    }

    /// What it is about, and that of `problem`, as a line of a table for people.
    fn headline(&self, problem: &Problem) -> (&'static str, String);
}

impl fmt::Debug for dyn Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What a file of inputs holds.
#[derive(Clone, Debug, PartialEq)]
pub struct StoredDims {
    /// Sequences, and tokens of each.
    pub sequences: [usize; 2],
    /// The extents of dims, by letter, but for tokens.
    pub dims: Vec<(&'static str, usize)>,
}

/// What tools look up in an operation.
impl dyn Operation {
    /// The option called `name`.
    #[must_use]
    pub fn option(&self, name: &str) -> Option<&'static OptionSpec> {
        self.options().iter().find(|option| option.name == name)
    }

    /// The dim whose key in configs is `key`.
    #[must_use]
    pub fn dim(&self, key: &str) -> Option<&'static DimSpec> {
        self.dims().iter().find(|dim| dim.key == key)
    }

    /// Tolerances, with defaults where `set` has none.
    #[must_use]
    pub fn tolerance_values(
        &self,
        problem: &Problem,
        set: impl Fn(&str) -> Option<f64>,
    ) -> Tolerances {
        let value = |spec: &ToleranceSpec| {
            (spec.name, set(spec.name).unwrap_or_else(|| (spec.default)(problem)))
        };
        Tolerances::new(self.tolerances().iter().map(value))
    }
}
