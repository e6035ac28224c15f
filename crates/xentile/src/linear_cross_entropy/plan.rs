//! What a planner of the linear cross-entropy receives and returns.
//!
//! [`cuda`] plans the call on NVIDIA GPUs; `xentile_cpu::linear_cross_entropy::plan` plans the call on
//! CPUs. Both are arithmetic alone, so that every build of the library answers for every platform.

pub mod cuda;

use serde::{Deserialize, Serialize};

use super::{LinearShape, VocabAxis};
use crate::Result;

/// The shapes and dtypes of a loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Problem {
    /// N.
    pub tokens: usize,
    /// D.
    pub hidden: usize,
    /// V.
    pub vocab: usize,
    /// Bytes of an element of hidden.
    pub hidden_bytes: usize,
    /// Bytes of an element of the weight.
    pub weight_bytes: usize,
    /// Whether there is a bias.
    pub bias: bool,
    /// Whether the forward pass knows the cotangents but for one factor, as it does with a reduction.
    pub reduced: bool,
    /// Whether the weight is `[D, V]` rather than `[V, D]`.
    pub vocab_is_last: bool,
    /// Whether the weight's gradient is added to float32 sums that the caller has.
    pub running: bool,
}

impl Problem {
    /// The shape of the arrays.
    ///
    /// # Errors
    /// A D or V of 0; more elements than memory can address.
    pub fn shape(&self) -> Result<LinearShape> {
        let axis = if self.vocab_is_last { VocabAxis::Last } else { VocabAxis::First };
        let weight = axis.weight(self.vocab, self.hidden);
        LinearShape::new([self.tokens, self.hidden], weight, Some(axis))
    }

    /// Bytes of an element of GEMM operands: those of the narrower array.
    #[must_use]
    pub fn operand_bytes(&self) -> usize {
        self.hidden_bytes.min(self.weight_bytes)
    }

    /// Bytes of the wider array in the dtype of the other.
    #[must_use]
    pub fn narrowed_bytes(&self) -> usize {
        let row = self.hidden * self.operand_bytes();
        if self.hidden_bytes > self.operand_bytes() {
            self.tokens * row
        } else if self.weight_bytes > self.operand_bytes() {
            self.vocab * row
        } else {
            0
        }
    }

    /// Whether there is nothing to plan: an axis is empty, or sizes overflow.
    #[must_use]
    pub fn is_out_of_range(&self) -> bool {
        /// Extents below this keep every product of two of them, in bytes, within 64 bits.
        const MOST_EXTENT: usize = 1 << 29;
        let extents = [self.tokens, self.hidden, self.vocab];
        extents.iter().any(|extent| !(1..MOST_EXTENT).contains(extent))
    }
}

/// What bounds a plan of the call on CPUs.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CpuLimits {
    /// Bytes beyond operands and results, at most.
    pub scratch_bytes: usize,
    /// The tile that the user gave: tokens of a task, and the most columns of a block.
    pub tile: [Option<usize>; 2],
    /// GEMMs of XLA's plan in the same budget.
    pub xla_products: f64,
    /// Whether a forward pass may save logits for the backward pass.
    pub may_save_logits: bool,
}

/// The chunks of the library's call, and what it costs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// Tokens of a chunk.
    pub tokens: usize,
    /// Columns of a chunk.
    pub columns: usize,
    /// GEMMs of the size of the logits' own, forward and backward: 3 is the least.
    pub products: f64,
    /// Bytes beyond operands and results, at most.
    pub scratch_bytes: usize,
    /// Tokens and columns of a chunk of dweight's sweep, where dhidden has a separate one.
    #[serde(default)]
    pub dweight_chunk: Option<[usize; 2]>,
    /// Columns whose logits are saved in the memory of dweight, and columns of a slot there.
    #[serde(default)]
    pub saved_columns: Option<[usize; 2]>,
    /// The first columns, which have a single pass: tokens of its chunks, and the number of columns.
    #[serde(default)]
    pub single_pass: Option<[usize; 2]>,
    /// Whether logits of 16-bit operands go through memory, in float32.
    #[serde(default)]
    pub f32_logits: bool,
    /// Whether the forward pass saves logits, and its scratch, for a backward pass in another call.
    #[serde(default)]
    pub saves_logits: bool,
}

/// What a call takes: attributes in their order, and bytes of scratch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CallPlan {
    /// Names and values of attributes.
    pub attributes: Vec<(&'static str, usize)>,
    /// Bytes of the scratch.
    pub scratch_bytes: usize,
}
