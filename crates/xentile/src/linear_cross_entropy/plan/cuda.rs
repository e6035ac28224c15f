//! Plans the call on NVIDIA GPUs: its chunks, the GEMMs that they take, and the scratch.
//!
//! The GEMMs are cuBLASLt's, which add to their result, and read and write slices of the weight and of
//! dweight in place. On Hopper, with 16-bit operands, they are the library's own, with the
//! cross-entropy as their epilogue. `crates/xentile-cuda/src/linear_cross_entropy/tiling.rs` lays the
//! scratch out; its tests hold [`Tiling::scratch`] to that layout.

use serde::Deserialize;

use super::{CallPlan, Plan, Problem};

const MIB: usize = 1 << 20;
/// The workspace of GEMMs: `WORKSPACE` bytes beyond the budget, and `MOST_WORKSPACE` at most where a
/// plan leaves bytes of the budget unused.
const WORKSPACE: usize = 4 * MIB;
const MOST_WORKSPACE: usize = 32 * MIB;
const SLACK: i64 = (WORKSPACE + MIB) as i64;
/// A budget below this includes the workspace, unless the plan then takes more GEMMs. Beside a small
/// scratch the workspace is large, and XLA's allocator hands out a free block whole if the block is less
/// than twice as large as the request.
const SMALL_BUDGET: usize = 64 * MIB;
/// Bytes of a column's bias and its gradient in float32, beyond the budget too.
const BIAS_BYTES: usize = 8;
/// Bytes of the partial results of a token's distribution, and the most of them in a row: as `layout`
/// in `crates/xentile-cuda/src/fused_product.rs`.
const PART_BYTES: usize = 12;
const MOST_PARTS: usize = 66;
/// FLOP and bytes a second of an H200, only to compare plans.
const FLOPS: f64 = 7e14;
const FLOPS_F32: f64 = 5e13;
const BYTES: f64 = 4e12;
/// Bytes of a float32 sum that is read and written, of which a GEMM hides some.
const SUM_BYTES: usize = 5;
/// Cost of the softmax and dlogits epilogues, in passes over the logits.
const SOFTMAX_PASSES: f64 = 0.5;
const DLOGITS_PASSES: f64 = 1.0;
/// Passes over float32 logits of a forward, a backward and a fused pass.
const FLOAT32_PASSES: [f64; 3] = [4.0, 9.0, 9.0];
/// Streaming multiprocessors.
const NUM_SMS: usize = 132;
/// Rows and columns of a GEMM's tile.
const TILE: [usize; 2] = [128, 256];
/// How full a wave of split sums is.
const SPLIT: f64 = 0.8;
/// Seconds between two GEMMs.
const LAUNCH: f64 = 3e-6;
/// The least time of a GEMM, in waves.
const LEAST_WAVE: f64 = 0.05;
/// Kernels beside the GEMMs of a chunk, and of each slot of saved logits.
const CHUNK_KERNELS: usize = 8;
const SLOT_KERNELS: usize = 3;
/// Kernels of logits that pass through the workspace, forward and backward.
const BLOCK_KERNELS: f64 = 5.0;
/// Chunks are multiples of this where they can be, for matrix units.
const STEP: usize = 128;
const LEAST_EXTENT: usize = 128;
/// Slots that logits may be saved in.
const SLOTS: [usize; 12] = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64];
/// Bytes that parts of the scratch are a multiple of: lines of memory, and what GEMMs are fastest with.
pub const ALIGNMENT: usize = 256;
/// Bytes that rows of logits are a multiple of.
const LINE_BYTES: usize = 128;

/// Tokens and columns.
type Extents = [usize; 2];
/// Columns whose logits are saved in the memory of dweight, and columns of one slot there.
type SavedColumns = [usize; 2];

/// What bounds a plan of the call on NVIDIA GPUs.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    /// Bytes beyond operands and results, at most.
    pub scratch_bytes: usize,
    /// The tiling to take in the place of the fastest.
    #[serde(default)]
    pub tiling: Option<Tiling>,
}

/// The chunks of tokens and columns of a call.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tiling {
    /// Tokens and columns of a chunk.
    pub chunk: Extents,
    /// Whether gradients come with the loss, in one call: then a chunk has all tokens or all columns.
    pub fused: bool,
    /// The chunks of dweight's sweep, where dhidden and dweight have separate passes.
    #[serde(default)]
    pub dweight_chunk: Option<Extents>,
    /// The columns whose logits a fused call over chunks of columns saves, if any.
    #[serde(default)]
    pub saved_columns: Option<SavedColumns>,
    /// The tokens of a chunk, and the number of columns, of a single pass over the first columns. The
    /// other columns follow in chunks of `chunk`.
    #[serde(default)]
    pub single_pass: Option<Extents>,
    /// Whether logits of 16-bit operands go through memory, in float32.
    #[serde(default)]
    pub f32_logits: bool,
}

impl Tiling {
    fn new(chunk: Extents, fused: bool) -> Self {
        Self {
            chunk,
            fused,
            dweight_chunk: None,
            saved_columns: None,
            single_pass: None,
            f32_logits: false,
        }
    }

    fn of(plan: &Plan) -> Self {
        let Plan {
            tokens,
            columns,
            products,
            dweight_chunk,
            saved_columns,
            single_pass,
            f32_logits,
            ..
        } = *plan;
        Self {
            chunk: [tokens, columns],
            fused: products < 4.0,
            dweight_chunk,
            saved_columns,
            single_pass,
            f32_logits,
        }
    }

    /// Whether gradients come with the loss, of whole rows.
    fn by_tokens(&self, problem: &Problem) -> bool {
        self.fused && self.chunk[1] == problem.vocab
    }

    /// Returns the number of GEMMs, in those of the logits.
    fn products(&self, problem: &Problem) -> f64 {
        if self.f32_logits {
            return if self.fused { 3.0 } else { 4.0 };
        }
        if self.dweight_chunk.is_some() {
            return 5.0;
        }
        let computed_once = match self.single_pass {
            Some([_, columns]) => columns,
            None if self.fused => {
                self.chunk[1] + self.saved_columns.map_or(0, |[columns, _]| columns)
            }
            None => 0,
        };
        4.0 - computed_once as f64 / problem.vocab as f64
    }

    /// Returns the bytes of scratch that every pass of the call fits into.
    #[must_use]
    pub fn scratch(&self, problem: &Problem) -> usize {
        let mut total = self.workspace(problem) + token_bytes(problem);
        let [tokens, columns] = self.chunk;
        if self.f32_logits {
            total += aligned(4 * tokens * columns) + 16 * tokens;
        } else if self.fused {
            total += scaled_hidden_bytes(problem, tokens);
            total +=
                shift_bytes(problem, self.single_pass.unwrap_or(self.chunk), self.saved_columns);
        }
        if let Some(single_pass) = self.single_pass {
            let sums = chunk_sum_bytes(problem, scratch_rows(problem.tokens));
            let first = single_pass_bytes(problem, single_pass);
            return total + sums + first.max(recomputed_bytes(problem, self.chunk));
        }
        if let Some(chunk) = self.dweight_chunk {
            let first = logit_bytes(problem, self.chunk) + chunk_sum_bytes(problem, tokens);
            let second = logit_bytes(problem, chunk) + weight_sum_bytes(problem, chunk[1]);
            return total + first.max(second);
        }
        if columns < problem.vocab && !self.by_tokens(problem) {
            total += hidden_sum_bytes(problem, tokens);
        }
        total + recomputed_bytes(problem, self.chunk)
    }

    /// Returns bytes of the workspace of GEMMs.
    fn workspace(&self, problem: &Problem) -> usize {
        let Some([tokens, _]) = self.single_pass else { return WORKSPACE };
        // Partial sums of few tokens' dhidden, which nothing else has room for.
        let tiles = tokens.div_ceil(TILE[0]) * problem.hidden.div_ceil(TILE[1]);
        let parts = NUM_SMS / tiles.max(1);
        if parts > 1 { WORKSPACE.max(4 * tokens * problem.hidden * parts) } else { WORKSPACE }
    }

    /// Returns an estimate of the time of a call.
    fn seconds(&self, problem: &Problem) -> f64 {
        let both = [true; 2];
        if let Some(single_pass) = self.single_pass {
            let rest = Problem { vocab: problem.vocab - single_pass[1], ..*problem };
            return single_pass_seconds(problem, single_pass)
                + sweep_seconds(&rest, self.chunk, DLOGITS_PASSES, both, None);
        }
        let sweep = |chunk, passes, gradients, has_own_gemm| {
            sweep_seconds(problem, chunk, passes, gradients, has_own_gemm)
        };
        if self.f32_logits {
            let [forward, backward, fused] = FLOAT32_PASSES;
            if self.fused {
                return sweep(self.chunk, fused, both, Some(false));
            }
            return sweep(self.chunk, forward, [false; 2], Some(false))
                + sweep(self.chunk, backward, both, Some(false));
        }
        if self.by_tokens(problem) {
            if !has_epilogue(problem) {
                return sweep(self.chunk, 2.0, both, Some(false));
            }
            // The GEMM that writes the unnormalised softmax takes a little longer.
            let kernels = problem.tokens.div_ceil(self.chunk[0]) * CHUNK_KERNELS;
            return sweep(self.chunk, SOFTMAX_PASSES, both, None) + kernels as f64 * LAUNCH;
        }
        if self.fused {
            return self.column_seconds(problem);
        }
        let [forward, backward] = logit_passes(problem);
        let total = block_seconds(problem) + sweep(self.chunk, forward, [false; 2], None);
        let Some(dweight_chunk) = self.dweight_chunk else {
            return total + sweep(self.chunk, backward, both, None);
        };
        total
            + sweep(self.chunk, backward, [true, false], None)
            + sweep(dweight_chunk, backward, [false, true], None)
    }

    /// Returns seconds of a call that recomputes the columns whose logits are not saved.
    fn column_seconds(&self, problem: &Problem) -> f64 {
        let Problem { tokens: n, hidden: d, vocab: v, .. } = *problem;
        let last = self.chunk[1];
        let [in_place, slot] = self.saved_columns.unwrap_or([0, 1]);
        let saved = even_chunks(in_place, slot);
        let rest = even_chunks(v.saturating_sub(last + in_place), last);
        let splits = logit_bytes(problem, self.chunk) > 2 * MOST_WORKSPACE;
        let gemm = |m, n, k| gemm_seconds(problem, splits, [m, n, k]);
        // Each slot has kernels of its own.
        let mut total = (CHUNK_KERNELS + SLOT_KERNELS * saved.len()) as f64 * LAUNCH;
        let [saved_passes, last_passes] =
            if has_epilogue(problem) { [SOFTMAX_PASSES; 2] } else { [3.0, 2.0] };
        let [forward, backward] = logit_passes(problem);
        for (columns, logits, passes) in [
            (saved, 1.0, saved_passes),
            (rest, 2.0, forward + backward),
            (vec![last], 1.0, last_passes),
        ] {
            for count in columns {
                total += logits * gemm(n, count, d) + gemm(n, d, count) + gemm(count, d, n);
                let logits = passes * (problem.operand_bytes() * n * count) as f64;
                total += (logits + (SUM_BYTES * n * d) as f64) / BYTES;
            }
        }
        total
    }
}

/// Returns the plan that may be fastest of those that fit; none where nothing fits.
#[must_use]
pub fn plan(problem: &Problem, limits: &Limits) -> Option<Plan> {
    if problem.is_out_of_range() {
        return None;
    }
    let mut room = limits.scratch_bytes as i64 - problem.narrowed_bytes() as i64;
    if let Some(tiling) = limits.tiling {
        return Some(with_workspace(problem, &tiling, room));
    }
    let found = fastest(problem, room + SLACK)?;
    if limits.scratch_bytes < SMALL_BUDGET {
        // Beside the scratch there are a token's outputs.
        room -= 32 * problem.tokens as i64;
        let tight = fastest(problem, room)
            .filter(|tight| tight.products(problem) <= found.products(problem));
        if let Some(tight) = tight {
            return Some(with_workspace(problem, &tight, room));
        }
        room += 32 * problem.tokens as i64;
    }
    Some(with_workspace(problem, &found, room))
}

/// Returns the plan of a tiling, with as much workspace of `room` bytes as it uses.
fn with_workspace(problem: &Problem, tiling: &Tiling, room: i64) -> Plan {
    let scratch = tiling.scratch(problem);
    // With whole rows of the unnormalised softmax, sums of dhidden may take the workspace too.
    let sums = match tiling.by_tokens(problem) {
        true => chunk_sum_bytes(problem, tiling.chunk[0]),
        false => 0,
    };
    let left = usize::try_from(room - scratch as i64).unwrap_or(0);
    let more = MOST_WORKSPACE.saturating_sub(tiling.workspace(problem)) + sums;
    Plan {
        tokens: tiling.chunk[0],
        columns: tiling.chunk[1],
        products: tiling.products(problem),
        scratch_bytes: scratch
            + left.min(more) / ALIGNMENT * ALIGNMENT
            + bytes_beside_scratch(problem),
        dweight_chunk: tiling.dweight_chunk,
        saved_columns: tiling.saved_columns,
        single_pass: tiling.single_pass,
        f32_logits: tiling.f32_logits,
        saves_logits: false,
    }
}

/// Returns what the call of a pass takes by `plan`.
#[must_use]
pub fn plan_call(problem: &Problem, plan: &Plan, pass: &str) -> CallPlan {
    let mut scratch_bytes = plan.scratch_bytes.saturating_sub(bytes_beside_scratch(problem));
    let tiling = Tiling::of(plan);
    if pass == "distribution_fused" {
        scratch_bytes += distribution_bytes(problem);
    }
    let workspace =
        (tiling.workspace(problem) + scratch_bytes).saturating_sub(tiling.scratch(problem));
    let mut attributes = vec![
        ("vocab_axis", usize::from(problem.vocab_is_last)),
        ("chunk_tokens", plan.tokens),
        ("chunk_columns", plan.columns),
        ("workspace_bytes", workspace),
    ];
    if let Some([tokens, columns]) = plan.single_pass {
        attributes.extend([("once_tokens", tokens), ("once_columns", columns)]);
    }
    if let Some([columns, slot]) = plan.saved_columns {
        attributes.extend([("kept_columns", columns), ("kept_slot", slot)]);
    }
    if plan.f32_logits {
        attributes.push(("wide", 1));
    }
    if let Some([tokens, columns]) = plan.dweight_chunk {
        attributes.extend([("apart_tokens", tokens), ("apart_columns", columns)]);
    }
    CallPlan { attributes, scratch_bytes }
}

/// Bytes that are held beside a call's scratch.
fn bytes_beside_scratch(problem: &Problem) -> usize {
    BIAS_BYTES * usize::from(problem.bias) * problem.vocab + problem.narrowed_bytes()
}

/// Bytes of workspace that entropy and top-1 match take in addition: beside their partial results, a
/// row's logits in float32 twice, for GPUs whose GEMMs have no epilogue.
fn distribution_bytes(problem: &Problem) -> usize {
    PART_BYTES * MOST_PARTS * problem.tokens + 8 * problem.vocab + MIB
}

/// Returns the fastest tiling of those that fit into `room` bytes.
fn fastest(problem: &Problem, room: i64) -> Option<Tiling> {
    let mut tilings = candidates(problem, room);
    tilings.retain(|tiling| fits(tiling, problem, room));
    tilings.extend(separate_sweeps(problem, room));
    least(tilings, |tiling| tiling.seconds(problem))
}

fn fits(tiling: &Tiling, problem: &Problem, room: i64) -> bool {
    tiling.scratch(problem) as i64 <= room
}

/// Returns the element of least cost, the first of several.
fn least<T>(all: impl IntoIterator<Item = T>, cost: impl Fn(&T) -> f64) -> Option<T> {
    let costs = all.into_iter().map(|one| (cost(&one), one));
    costs.min_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, one)| one)
}

fn candidates(problem: &Problem, room: i64) -> Vec<Tiling> {
    let is_short = problem.operand_bytes() < 4;
    let has_fused = !is_short || has_epilogue(problem);
    let mut found = Vec::new();
    for tokens in chunk_extents(problem.tokens) {
        let rows = [tokens, problem.vocab];
        if problem.reduced && has_fused {
            found.push(Tiling::new(rows, true));
        }
        if is_short {
            found.push(Tiling { f32_logits: true, ..Tiling::new(rows, problem.reduced) });
        }
        if !problem.reduced || tokens < problem.tokens {
            let columns = chunk_extents(problem.vocab).into_iter();
            found.extend(columns.map(|columns| Tiling::new([tokens, columns], false)));
        }
    }
    if problem.reduced {
        fused_by_columns(problem, room, &mut found);
        // Gradients of other dtypes have no memory for saved logits.
        if lends_weight(problem) {
            fused_by_both(problem, room, &mut found);
        }
    }
    found
}

/// Adds tilings by columns that save as many logits as there is room for.
fn fused_by_columns(problem: &Problem, room: i64, found: &mut Vec<Tiling>) {
    let tokens = problem.tokens;
    if problem.operand_bytes() < 4 && (problem.vocab_is_last || !has_epilogue(problem)) {
        return;
    }
    let without = Tiling::new([tokens, 1], true).scratch(problem) as i64;
    let step = STEP as i64;
    let column = (tokens * problem.operand_bytes()) as i64;
    let most = (room - without).div_euclid(column).div_euclid(step) * step;
    // A few columns fewer may be a wave of tiles fewer.
    let mut columns: Vec<i64> = (4..17)
        .map(|part| (most as f64 * part as f64 / 16.0 / STEP as f64).ceil() as i64 * step)
        .chain((1..8).map(|fewer| most - step * fewer))
        .chain(chunk_extents(problem.vocab).into_iter().map(|columns| columns as i64))
        .filter(|&columns| 0 < columns && columns < problem.vocab as i64)
        .collect();
    columns.sort_unstable();
    columns.dedup();
    let saves = lends_weight(problem) && !problem.vocab_is_last;
    for count in columns {
        let tiling = Tiling::new([tokens, count as usize], true);
        found.push(tiling);
        let slots = if saves { &SLOTS[..] } else { &[] };
        let saved =
            slots.iter().filter_map(|&slots| fit_saved_columns(problem, tiling.chunk[1], slots));
        found.extend(saved.map(|saved| Tiling { saved_columns: Some(saved), ..tiling }));
    }
}

/// Adds tilings that save some columns' unnormalised softmax, and recompute the others.
fn fused_by_both(problem: &Problem, room: i64, found: &mut Vec<Tiling>) {
    if problem.vocab_is_last || !has_epilogue(problem) {
        return;
    }
    if fits(&Tiling::new([problem.tokens, problem.vocab], true), problem, room) {
        return;
    }
    for tokens in chunk_extents(problem.tokens) {
        let none = Tiling { single_pass: Some([tokens, 0]), ..Tiling::new([0, 0], true) };
        let left = room - none.scratch(problem) as i64;
        let room = left + single_pass_bytes(problem, [tokens, 0]) as i64;
        let Some(chunk) = best_recomputed_chunk(problem, room) else { continue };
        let column = (tokens * problem.operand_bytes()) as i64;
        let mut most = left.div_euclid(column);
        let half = (problem.vocab / 2) as i64;
        if most > half && tokens < problem.tokens {
            // Beyond half of the vocabulary a column has sums in the scratch as well.
            let with_sums = column + 4 * problem.hidden as i64;
            most = half + (left - half * column).div_euclid(with_sums);
        }
        // Fewer columns leave memory for the workspace of GEMMs.
        for part in 8..17 {
            let step = STEP as i64;
            let columns = (most * part).div_euclid(16).div_euclid(step) * step;
            let Ok(columns @ 1..) = usize::try_from(columns) else { continue };
            if columns < problem.vocab {
                let rest = problem.vocab - columns;
                let even = rest.div_ceil(rest.div_ceil(chunk[1])).next_multiple_of(STEP);
                let even = even.min(chunk[1]).min(rest);
                let single_pass = Some([tokens, columns]);
                found.push(Tiling { single_pass, ..Tiling::new([chunk[0], even], true) });
            }
        }
    }
}

/// Returns the best chunk of a sweep with `room` bytes for logits and sums of dweight.
fn best_recomputed_chunk(problem: &Problem, room: i64) -> Option<Extents> {
    let chunks = chunk_extents(problem.tokens).into_iter().flat_map(|tokens| {
        let columns = chunk_extents(problem.vocab).into_iter();
        let chunks = columns.map(move |columns| [tokens, columns]);
        // Among the four widest, as a narrower chunk may take one wave of tiles fewer.
        chunks.filter(|&chunk| recomputed_bytes(problem, chunk) as i64 <= room).take(4)
    });
    least(chunks, |&chunk| sweep_seconds(problem, chunk, DLOGITS_PASSES, [true; 2], None))
}

/// Returns the most columns that `slots` slots in the memory of dweight hold; none where no slot fits.
///
/// `last` is the number of columns of the last chunk, whose logits stay in the scratch.
fn fit_saved_columns(problem: &Problem, last: usize, slots: usize) -> Option<SavedColumns> {
    let Problem { tokens: n, hidden: d, vocab: v, .. } = *problem;
    let even = (v - last).div_ceil(slots).next_multiple_of(STEP);
    let slot = even.min(v * d / (d + slots * n.max(d)) / STEP * STEP);
    if slot == 0 {
        return None;
    }
    let columns = (slots * slot).min(v - last);
    let stride = row_stride(slot, problem.operand_bytes());
    let end = slot_offset([n, d], columns.checked_sub(1)?, slot, stride) + n * stride;
    (end <= v * d).then_some([columns, slot])
}

/// The element of the weight's gradient `[V, D]` where logits of the columns from `first` on are saved,
/// for hidden states `[N, D]` of the extents given, in slots of `slot` columns and rows of `stride`.
///
/// A slot takes as many elements as its logits or its rows of the gradient, whichever are more. The first
/// slot begins after one slot's rows of the gradient, so that a slot's gradient overwrites only slots
/// that were read before.
#[must_use]
pub fn slot_offset([n, d]: [usize; 2], first: usize, slot: usize, stride: usize) -> usize {
    let rows = aligned(slot * d);
    rows + first / slot * aligned(rows.max(n * stride))
}

/// Returns the tiling of the best chunks of separate sweeps for dhidden and dweight.
fn separate_sweeps(problem: &Problem, room: i64) -> Option<Tiling> {
    let best = |gradients: [bool; 2]| {
        let chunks = chunk_extents(problem.tokens).into_iter().flat_map(|tokens| {
            chunk_extents(problem.vocab).into_iter().map(move |columns| [tokens, columns])
        });
        let fitting = chunks.filter(|&chunk| {
            let sums = match gradients[0] {
                true => chunk_sum_bytes(problem, chunk[0]),
                false => weight_sum_bytes(problem, chunk[1]),
            };
            let bytes = logit_bytes(problem, chunk) + sums + token_bytes(problem) + WORKSPACE;
            bytes as i64 <= room
        });
        least(fitting, |&chunk| sweep_seconds(problem, chunk, 2.0, gradients, None))
    };
    let (hidden, weight) = (best([true, false])?, best([false, true])?);
    let tiling = Tiling { dweight_chunk: Some(weight), ..Tiling::new(hidden, false) };
    fits(&tiling, problem, room).then_some(tiling)
}

/// Returns chunks that divide `total` evenly, rounded up to steps.
fn chunk_extents(total: usize) -> Vec<usize> {
    let (mut found, mut last, mut count) = (vec![total], total, 2);
    while last > LEAST_EXTENT {
        let chunk = total.div_ceil(count).next_multiple_of(STEP);
        if chunk < last {
            found.push(chunk);
            last = chunk;
        }
        count += (count / 8).max(1);
    }
    found
}

/// Returns seconds of kernels over logits of 16-bit operands, by blocks of a workspace.
fn block_seconds(problem: &Problem) -> f64 {
    if has_epilogue(problem) || problem.operand_bytes() == 4 {
        return 0.0;
    }
    let blocks = (4 * problem.tokens * problem.vocab) as f64 / WORKSPACE as f64;
    blocks * BLOCK_KERNELS * LAUNCH
}

/// Returns bytes of a chunk of the single pass, and of its sums that dweight has no room for.
fn single_pass_bytes(problem: &Problem, chunk: Extents) -> usize {
    let scaled = chunk[0] * problem.hidden * problem.operand_bytes();
    logit_bytes(problem, chunk) + scaled + 4 * problem.hidden * scratch_columns(problem, chunk)
}

/// Returns the columns with sums in the scratch: dweight has room for half of the vocabulary.
fn scratch_columns(problem: &Problem, [tokens, columns]: Extents) -> usize {
    if tokens < problem.tokens { columns.saturating_sub(problem.vocab / 2) } else { 0 }
}

/// Returns bytes of a chunk of recomputed columns, and of sums of their dweight.
fn recomputed_bytes(problem: &Problem, chunk: Extents) -> usize {
    let has_sums = chunk[0] < problem.tokens;
    let sums = if has_sums { weight_sum_bytes(problem, chunk[1]) } else { 0 };
    logit_bytes(problem, chunk) + sums
}

/// Returns seconds of the single pass over the first columns, and of sums over the others.
fn single_pass_seconds(problem: &Problem, chunk: Extents) -> f64 {
    let Problem { tokens: n, hidden: d, vocab: v, .. } = *problem;
    let [tokens, columns] = chunk;
    let gemm = |m, n, k| gemm_seconds(problem, true, [m, n, k]);
    let kernels = CHUNK_KERNELS as f64 * LAUNCH;
    let mut each = gemm(tokens, v, d) + gemm(tokens, d, columns) + kernels;
    let chunks = n.div_ceil(tokens);
    let beyond = scratch_columns(problem, chunk);
    let parts = [columns - beyond, beyond].into_iter().filter(|&part| part > 0);
    each += parts.map(|part| gemm(part, d, tokens)).fold(0.0, |sum, part| sum + part);
    let mut moved = SOFTMAX_PASSES * (problem.operand_bytes() * n * columns) as f64;
    moved += (SUM_BYTES * n * d) as f64;
    if chunks > 1 {
        moved += (SUM_BYTES * columns * d) as f64 * chunks as f64;
    }
    chunks as f64 * each + moved / BYTES
}

/// Returns bytes of scalars of all tokens, and of a bit for each column that is a label.
fn token_bytes(problem: &Problem) -> usize {
    32 * problem.tokens + problem.vocab / 8 + 4096
}

/// Returns bytes of scaled hidden states, where dhidden is not of their dtype.
fn scaled_hidden_bytes(problem: &Problem, tokens: usize) -> usize {
    match problem.hidden_bytes == problem.operand_bytes() {
        true => 0,
        false => aligned(tokens * problem.hidden * problem.operand_bytes()),
    }
}

/// Whether the memory of dweight may hold logits: it has the dtype of GEMM operands, and no sums.
fn lends_weight(problem: &Problem) -> bool {
    problem.hidden_bytes == problem.weight_bytes && !problem.running
}

/// Returns bytes of the running maxima of the unnormalised softmax: two a token and tile.
fn shift_bytes(
    problem: &Problem,
    [tokens, columns]: Extents,
    saved: Option<SavedColumns>,
) -> usize {
    if problem.operand_bytes() == 4 {
        return 0;
    }
    let [in_place, slot] = saved.unwrap_or([0, 1]);
    let slots = (0..in_place).step_by(slot).map(|first| slot.min(in_place - first));
    let tiles: usize = slots.chain([columns]).map(|columns| columns.div_ceil(TILE[1])).sum();
    aligned(2 * tokens * tiles)
}

/// Returns the passes over logits, forward and backward, that are no GEMM's epilogue.
fn logit_passes(problem: &Problem) -> [f64; 2] {
    if has_epilogue(problem) { [0.0, DLOGITS_PASSES] } else { [1.0, 2.0] }
}

/// Whether the GEMM of the logits has the cross-entropy as its epilogue.
fn has_epilogue(problem: &Problem) -> bool {
    let row = if problem.vocab_is_last { problem.vocab } else { problem.hidden };
    problem.operand_bytes() == 2 && problem.hidden.is_multiple_of(8) && row.is_multiple_of(8)
}

/// Returns even chunks of `total`.
fn even_chunks(total: usize, chunk: usize) -> Vec<usize> {
    if total == 0 {
        return Vec::new();
    }
    let count = total.div_ceil(chunk);
    vec![total.div_ceil(count); count]
}

/// Returns bytes of a chunk of logits, whose rows are whole cache lines.
fn logit_bytes(problem: &Problem, [tokens, columns]: Extents) -> usize {
    let bytes = problem.operand_bytes();
    tokens * row_stride(columns, bytes) * bytes
}

/// Elements of `bytes` each from one row of logits to the next.
#[must_use]
pub fn row_stride(columns: usize, bytes: usize) -> usize {
    columns.next_multiple_of(LINE_BYTES / bytes)
}

/// The rows of `rows` of float32 sums that lie in the memory of their 16-bit gradient: half of them.
#[must_use]
pub fn own_rows(rows: usize) -> usize {
    rows / 128 * 64
}

/// The rows of `rows` of float32 sums that lie in the scratch.
fn scratch_rows(rows: usize) -> usize {
    rows - own_rows(rows)
}

/// Returns bytes of sums of all tokens' dhidden, where chunks have so many.
fn hidden_sum_bytes(problem: &Problem, tokens: usize) -> usize {
    let n = problem.tokens;
    chunk_sum_bytes(problem, if tokens < n { scratch_rows(n) } else { n })
}

/// Returns bytes of sums of so many rows of dhidden.
fn chunk_sum_bytes(problem: &Problem, rows: usize) -> usize {
    if problem.hidden_bytes < 4 { 4 * problem.hidden * rows } else { 0 }
}

/// Returns bytes of sums of so many columns' dweight.
fn weight_sum_bytes(problem: &Problem, columns: usize) -> usize {
    if problem.weight_bytes == 4 || problem.running {
        return 0;
    }
    let is_last = problem.vocab_is_last;
    let [rows, row] = if is_last { [problem.hidden, columns] } else { [columns, problem.hidden] };
    let shares = !is_last || columns == problem.vocab;
    4 * row * if shares { scratch_rows(rows) } else { rows }
}

/// Returns seconds of a GEMM of extents m, n and k; `splits` is whether there is a workspace for
/// partial sums.
fn gemm_seconds(problem: &Problem, splits: bool, [m, n, k]: [usize; 3]) -> f64 {
    let flops = if problem.operand_bytes() < 4 { FLOPS } else { FLOPS_F32 };
    let waves = (m.div_ceil(TILE[0]) * n.div_ceil(TILE[1])) as f64 / NUM_SMS as f64;
    // Where tiles are few, their sums are split over the other multiprocessors, at some loss.
    let few = if splits { (waves / SPLIT).min(1.0) } else { 1.0 };
    let waves = if waves > 1.0 { waves.ceil() } else { few.max(LEAST_WAVE) };
    let tile = [NUM_SMS, TILE[0], TILE[1], 2, k];
    tile.into_iter().fold(waves, |product, factor| product * factor as f64) / flops + LAUNCH
}

/// Returns seconds of the logits' GEMM, of `passes` over the logits, and of the GEMMs of both gradients.
///
/// `has_own_gemm` is whether the GEMM of logits is the library's own, which splits no sums; by default
/// it is where the GEMM has an epilogue.
fn sweep_seconds(
    problem: &Problem,
    chunk: Extents,
    passes: f64,
    [makes_hidden, makes_weight]: [bool; 2],
    has_own_gemm: Option<bool>,
) -> f64 {
    // Partial sums need a workspace; beside small chunks there is little.
    let splits = logit_bytes(problem, chunk) > 2 * MOST_WORKSPACE;
    let gemm = |m, n, k| gemm_seconds(problem, splits, [m, n, k]);
    let Problem { tokens: n, hidden: d, vocab: v, .. } = *problem;
    let [tokens, columns] = chunk;
    let (rows, parts) = (n.div_ceil(tokens), v.div_ceil(columns));
    let mut each = match has_own_gemm.unwrap_or_else(|| has_epilogue(problem)) {
        true => gemm_seconds(problem, false, [tokens, columns, d]),
        false => gemm(tokens, columns, d),
    };
    if makes_hidden {
        each += gemm(tokens, d, columns);
    }
    if makes_weight {
        // Sums that have no room in the memory of dweight alone are two GEMMs.
        let is_halved =
            rows > 1 && 2 * columns > v && weight_sum_bytes(problem, columns) < 4 * columns * d;
        let halves = if is_halved { 2 } else { 1 };
        each += halves as f64 * gemm(columns.div_ceil(halves), d, tokens);
    }
    let mut moved = passes * problem.operand_bytes() as f64 * n as f64 * v as f64;
    if makes_hidden && parts > 1 {
        moved += (SUM_BYTES * n * d) as f64 * parts as f64;
    }
    if makes_weight && rows > 1 {
        moved += (SUM_BYTES * v * d) as f64 * rows as f64;
    }
    (rows * parts) as f64 * each + moved / BYTES
}

fn aligned(bytes: usize) -> usize {
    bytes.next_multiple_of(ALIGNMENT)
}
