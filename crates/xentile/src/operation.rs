//! Operations as tools see them: names, dims, options, arrays and expected values.
//!
//! Tools work with every operation that [`operations`](crate::operations) lists, and know none by name. An
//! operation is a file that implements [`Operation`] and a line in that list. Its kernels are found by its
//! name.
//!
//! Arrays have names. A dim is a letter (`T`, `D`), a multiple of a letter (`2F`), a number of blocks
//! (`D/block_size`), or an option that counts (`columns`); a [`Problem`] gives the extents. A [`Signature`]
//! lists the arrays of a [`Pass`]. [`Operation::inputs`] and [`Operation::given`] make random operands.
//! [`Operation::reference`] computes results in float64, and passes each row's expected entries and error
//! bounds to a [`Visitor`], so that no float64 array of the logits' size exists.

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
    /// Its letter in the dims of arrays.
    pub letter: &'static str,
    /// Its key in configs.
    pub key: &'static str,
    /// The name of an index along it, in reports.
    pub index: &'static str,
    /// What it counts.
    pub about: &'static str,
    /// The extent where a config gives none. Without a default, a config must give one.
    pub default: Option<usize>,
    /// The earlier dim whose extent is taken if neither the config nor `default` gives one.
    pub like: Option<&'static str>,
    /// Whether it is a key of `shape` in gradcheck's configs, like `batch` and `seq_len`.
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

/// What one program of an operation computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// The outputs.
    Forward,
    /// Gradients, from cotangents of the outputs and the residuals of the forward pass.
    Backward,
    /// A scalar and its gradients.
    Fused,
    /// Forward, then backward, in one program.
    ForwardAndBackward,
}

impl Pass {
    /// The name of the pass in programs.
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
    /// The problem's dtype.
    Compute,
    /// A fixed dtype.
    Is(DType),
    /// An FP8 format, stored as bits.
    Fp8(Format),
    /// Unsigned integers of 8 bits.
    Byte,
    /// Integers, 32-bit on devices.
    Index,
}

/// The role of an array in an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// An operand.
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

/// An operand or a result of an operation.
#[derive(Clone, Debug, PartialEq)]
pub struct ArraySpec {
    /// Its name.
    pub name: &'static str,
    /// Its dims; `2F` has twice the extent of `F`, `D/block_size` the number of blocks in `D`, and `columns`
    /// the value of that option.
    pub dims: Vec<&'static str>,
    /// The dtype of its elements.
    pub element: ElementRule,
    /// Its role in the operation.
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
            ElementRule::Fp8(_) | ElementRule::Byte => 1,
            ElementRule::Index => size_of::<i32>(),
        }
    }

    /// A host array for it, filled with `value`. Scalars are float64, since hosts sum in float64.
    #[must_use]
    pub fn room(&self, problem: &Problem, value: f32) -> Array<'static> {
        let length = self.extents(problem).iter().product();
        match self.element {
            _ if self.dims.is_empty() => Array::of(vec![f64::from(value)]),
            ElementRule::Is(dtype) => Array::filled(dtype, length, value),
            ElementRule::Fp8(format) => {
                Array::F8(format, vec![encode(format, value); length].into())
            }
            ElementRule::Byte => Array::of(vec![value as u8; length]),
            ElementRule::Compute | ElementRule::Index => {
                Array::filled(problem.dtype, length, value)
            }
        }
    }

    /// Its bytes in `problem`, on a device; none on overflow.
    #[must_use]
    pub fn bytes(&self, problem: &Problem) -> Option<u64> {
        let extents = self.extents(problem);
        let width = self.width(problem) as u64;
        extents.iter().try_fold(width, |bytes, &extent| bytes.checked_mul(extent as u64))
    }
}

/// The arrays of a pass, in order. Gradients are the last results.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Signature {
    /// The operands.
    pub operands: Vec<ArraySpec>,
    /// The results.
    pub results: Vec<ArraySpec>,
}

impl Signature {
    /// Index of the first gradient among the results.
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

/// A function of `pallas_bridge` that is an operation with some options set.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NamedFunction {
    /// Its name in `pallas_bridge`.
    pub name: &'static str,
    /// The options that the name implies, with their values.
    pub options: &'static [(&'static str, Value)],
}

/// Lower bounds of the work of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Bytes that must be read.
    pub bytes_read: u64,
    /// Bytes that must be written.
    pub bytes_written: u64,
    /// FLOP of the GEMMs, at least; 0 for operations that are bound by memory.
    pub flops: u64,
}

/// A kernel in XLA's listings, and its memory traffic in units of the first operand's bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KernelTraffic {
    /// The name, or its constant part.
    pub name: &'static str,
    /// How often it reads or writes the first operand's bytes.
    pub passes: f64,
}

/// Named arrays of a file, among which an operation finds its inputs.
pub trait Stored {
    /// The names.
    fn names(&self) -> Vec<String>;

    /// The extents of an array.
    ///
    /// # Errors
    /// There is none of that name.
    fn extents(&self, name: &str) -> Result<Vec<usize>>;

    /// An array of floats in its stored dtype, without a copy if its alignment allows.
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

/// What is the same for every problem of an operation.
#[derive(Clone, Copy, Debug)]
pub struct Facts {
    /// Its name, in configs, reports and programs.
    pub name: &'static str,
    /// What it computes, in a line.
    pub about: &'static str,
    /// The name of its family, none for its own. What is written of a config of one operation has the
    /// keys of all that are of its family, null where it has no such thing itself.
    pub family: Option<&'static str>,
    /// The dims of its arrays.
    pub dims: &'static [DimSpec],
    /// Its options.
    pub options: &'static [OptionSpec],
    /// The functions of `pallas_bridge` that are this operation with some options set.
    pub functions: &'static [NamedFunction],
    /// What gradcheck lets pass, with defaults.
    pub tolerances: &'static [ToleranceSpec],
    /// The extents of a tile, by the names that configs have for them; none where kernels have no tile.
    pub tile: &'static [DimSpec],
    /// The distributions that its inputs are drawn from.
    pub distributions: &'static [Distribution],
    /// The passes that there are kernels or programs of.
    pub passes: &'static [Pass],
    /// Whether a token's row says something of the next token, so that the last row of a sequence is of
    /// no use.
    pub predicts_next: bool,
    /// Whether there are [`Operation::zeros`].
    pub has_zeros: bool,
    /// Its kernels that are estimated from a schedule.
    pub traffic: &'static [KernelTraffic],
}

impl Facts {
    /// What most operations have in common.
    pub const BASE: Self = Self {
        name: "",
        about: "",
        family: None,
        dims: &[],
        options: &[],
        functions: &[],
        tolerances: &[],
        tile: &[],
        distributions: &[Distribution::Normal, Distribution::Uniform],
        passes: &[Pass::Forward, Pass::Backward, Pass::ForwardAndBackward],
        predicts_next: false,
        has_zeros: false,
        traffic: &[],
    };
}

/// An operation.
pub trait Operation: Sync {
    /// What is the same for every problem.
    fn facts(&self) -> &'static Facts;

    /// Its name.
    fn name(&self) -> &'static str {
        self.facts().name
    }

    /// The name of its family.
    fn family(&self) -> &'static str {
        self.facts().family.unwrap_or(self.facts().name)
    }

    /// The dims of its arrays.
    fn dims(&self) -> &'static [DimSpec] {
        self.facts().dims
    }

    /// Its options.
    fn options(&self) -> &'static [OptionSpec] {
        self.facts().options
    }

    /// The passes that there are kernels or programs of.
    fn passes(&self) -> &'static [Pass] {
        self.facts().passes
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
        Tolerances::new(self.facts().tolerances.iter().map(value))
    }
}
