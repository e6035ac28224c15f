//! Plans the call on CPUs: the columns of a block, and the scratch.
//!
//! XLA's CPU widens whole 16-bit operands to float32 before a GEMM. The library widens a block of the
//! weight at a time. It saves logits, or in 16 bits their unnormalised softmax, in the memory of
//! dweight until their gradient is computed, which saves a GEMM in float32 too where the budget is
//! small.

use xentile::linear_cross_entropy::LinearShape;
use xentile::linear_cross_entropy::plan::{CallPlan, CpuLimits, Plan, Problem};
use xentile::{DType, Result, tuned_tile};

use super::layout::{self, Kept, Layout, keeping};

/// Narrower blocks, for budgets that hold no tuned one.
const NARROWER: [usize; 7] = [1024, 768, 512, 384, 256, 128, 64];
/// A column block takes longer than its columns, by the time of so many columns: sums of dhidden are
/// read and written, and hidden states and logits are packed.
const PER_BLOCK: f64 = 32.0;
/// Bytes that the library allocates for a token.
const PER_TOKEN: usize = 128;
/// Bytes of a column's bias and its gradient in float32.
const PER_BIAS: usize = 8;

/// Returns the plan of least estimated time that fits; none where XLA's plan is as good.
///
/// # Errors
/// A shape that is none; a tuned tile that is none.
pub fn plan(problem: &Problem, dtype: DType, limits: &CpuLimits) -> Result<Option<Plan>> {
    if problem.is_out_of_range() {
        return Ok(None);
    }
    let Some(tuned) = tuned_tile(super::TUNED, dtype, problem.vocab)? else { return Ok(None) };
    let shape = problem.shape()?;
    let [time_block, given] = limits.tile;
    let widest = given.unwrap_or(tuned.block_size());
    let narrower = NARROWER.into_iter().filter(|&columns| columns < widest);
    let mut plans = [widest].into_iter().chain(narrower).filter_map(|columns| {
        let columns = columns.min(problem.vocab);
        let least =
            Layout::new(shape, dtype, columns, true).bytes() + bytes_beside_scratch(problem);
        (least <= limits.scratch_bytes)
            .then(|| with_saved(problem, shape, dtype, columns, least, limits))
    });
    if given.is_some() {
        return Ok(plans.next());
    }
    let cost = |plan: &Plan| plan.products * (1.0 + PER_BLOCK / plan.columns as f64);
    let best = plans.min_by(|a, b| cost(a).total_cmp(&cost(b)));
    // GEMMs of float32 operands are as fast in XLA, so the call needs fewer of them.
    let is_better = |plan: &Plan| plan.products < limits.xla_products;
    let is_short = dtype != DType::F32;
    Ok(best.filter(|plan| is_short || time_block.is_some() || is_better(plan)))
}

/// Returns the plan of blocks of `columns`, which saves the logits that the budget has room for
/// beyond `least` bytes.
fn with_saved(
    problem: &Problem,
    shape: LinearShape,
    dtype: DType,
    columns: usize,
    least: usize,
    limits: &CpuLimits,
) -> Plan {
    let saves_logits = limits.may_save_logits && !problem.reduced;
    let mut plan = Plan {
        tokens: problem.tokens,
        columns,
        products: 4.0,
        scratch_bytes: least,
        dweight_chunk: None,
        saved_columns: None,
        single_pass: None,
        f32_logits: false,
        saves_logits: false,
    };
    if !(problem.reduced || saves_logits) || !layout::keeps(shape, dtype, columns) {
        return plan;
    }
    let room = (limits.scratch_bytes - least) / dtype.size_bytes();
    let (mut in_scratch, mut recomputed) = (0, 0);
    for block in keeping(shape, columns, room) {
        match block.kept {
            Some(Kept::InWeight(_)) => {}
            Some(Kept::InScratch(_)) => in_scratch += block.columns.len(),
            None => recomputed += block.columns.len(),
        }
    }
    if recomputed < problem.vocab {
        plan.products = 3.0 + recomputed as f64 / problem.vocab as f64;
        plan.scratch_bytes += in_scratch * problem.tokens * dtype.size_bytes();
        plan.saves_logits = saves_logits;
    }
    plan
}

/// Returns what the call of a pass takes by `plan`.
///
/// # Errors
/// A shape that is none.
pub fn plan_call(problem: &Problem, dtype: DType, plan: &Plan, pass: &str) -> Result<CallPlan> {
    let scratch_bytes = match pass {
        "fused" | "keep" | "resume" => {
            plan.scratch_bytes.saturating_sub(bytes_beside_scratch(problem))
        }
        _ => Layout::new(problem.shape()?, dtype, plan.columns, pass != "forward").bytes(),
    };
    let attributes =
        vec![("vocab_axis", usize::from(problem.vocab_is_last)), ("chunk_columns", plan.columns)];
    Ok(CallPlan { attributes, scratch_bytes })
}

/// Bytes that are held beside a call's scratch.
fn bytes_beside_scratch(problem: &Problem) -> usize {
    PER_TOKEN * problem.tokens + PER_BIAS * usize::from(problem.bias) * problem.vocab
}
