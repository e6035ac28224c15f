//! Plans a pass on a GPU: the schedule, the warps and CTAs that share a row, and the chunks of a row. Pure
//! arithmetic, so that tests need no GPU.
//!
//! A cluster of `ctas` CTAs with `warps` warps each processes a row at a time. The row is split into chunks of
//! `chunk_vectors` vectors of 16 bytes, which the warps take in turns, each into its own ring of `slots` chunks.
//! Chunks are whole cache lines, and a ring holds parts of fewer than `MAX_ROWS` rows. The fused pass needs room
//! for a row and one chunk in the rings, and is fastest with one chunk more; the forward pass, which reads a
//! chunk once, needs two.
//!
//! The backward pass has tiles of rows instead, one per CTA and as even as cache lines allow.
//!
//! With fewer tokens than multiprocessors, a wider cluster shares the chunks of a row, or a row has more tiles.
//! Sums keep their order, so that T changes no bit.
//!
//! For vocabularies of up to `PACKED_VOCAB` a CTA has whole rows: as many as end at a vector boundary, and at a
//! sector boundary if possible.

use xentile::{DType, Tile, TunedTile, tuned_tiles};

use super::Pass;
use super::arguments::{
    DISTRIBUTION_BYTES, FLAT_BATCH, FLAT_THREADS, LINE, MAX_ROWS, PACKED_DISTRIBUTION_ROW_BYTES,
    PACKED_ROW_BYTES, PACKED_THREADS, PLAIN_THREADS, TABLES,
};
use crate::{Device, Limits};

/// The name of this operation's table of tuned tiles.
const TUNED: &str = "cross_entropy.cuda";

/// The largest difference of the logarithms of two vocabularies for which one uses the other's tuned tile.
const NEAR: f64 = 0.02;

/// CTAs per multiprocessor in the plain schedule.
pub(crate) const PLAIN_CTAS: u32 = 3;

const VECTOR_BYTES: u32 = 16;
/// Bytes of a partial result of a row, without auxiliary outputs.
const PART_BYTES: u32 = 16;
/// The largest vocabulary whose rows are packed.
const PACKED_VOCAB: usize = 4096;
/// The approximate bytes of a CTA's rows in the packed schedule, and the bytes from which it has all its threads.
const PACKED_BYTES: usize = 18_432;
const PACKED_MANY: usize = 32_768;
/// Bytes of the barrier after the rows in the packed schedule.
const BARRIER_BYTES: u32 = 8;
/// Bytes of a sector, the unit of memory writes.
const SECTOR_BYTES: usize = 32;

/// The widest cluster that every device with clusters runs, and the widest of all, in CTAs.
pub(crate) const PORTABLE_CTAS: u32 = 8;
const WIDEST: u32 = 16;
/// CTAs of a cluster.
const CTAS: [u32; 4] = [1, 2, 4, 8];
/// Warps of a CTA, at most.
const MAX_WARPS: u32 = 16;
/// Slots of a warp's ring, at most.
const MAX_SLOTS: u32 = 32;
/// The most chunks of a row in the fused pass: by default, and for a given tile.
const USUAL_CHUNKS: u32 = 6;
const MAX_CHUNKS: u32 = MAX_SLOTS - 2;
/// The least bytes that a warp has in flight with short rows.
const DEPTH_BYTES: u32 = 10_240;

/// The problem to plan for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// The pass.
    pub pass: Pass,
    /// The dtype of the logits.
    pub dtype: DType,
    /// V.
    pub vocab: usize,
    /// Whether rows are whole and lie without gaps.
    pub is_whole: bool,
    /// Multiprocessors for each row, as [`room`] counts them.
    pub room: u32,
    /// Whether rows have sums for auxiliary outputs.
    pub has_distribution: bool,
}

/// Returns the multiprocessors per row, rounded down to a power of two.
#[must_use]
pub fn room(limits: Limits, tokens: usize) -> u32 {
    let each = limits.multiprocessors as usize / tokens.max(1);
    1 << each.max(1).ilog2()
}

/// The schedule of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plan {
    /// Rows stream through the shared memory of a cluster.
    Ring(Ring),
    /// A CTA per tile of a row, without communication.
    Flat(Flat),
    /// Several whole rows of a small vocabulary per CTA.
    Packed(Packed),
    /// A CTA per row, which reads the row twice if necessary.
    Plain,
}

/// The layout of whole rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packed {
    /// Rows of a CTA: its tokens.
    pub rows: u32,
    /// The fewest rows that end at a vector boundary.
    pub unit: u32,
    /// Lanes of a row.
    pub lanes: u32,
    /// Whether every row is whole vectors.
    pub whole_vectors: bool,
    /// Threads of a CTA.
    pub threads: u32,
    /// Columns of a row, and its bytes.
    pub columns: u32,
    row_bytes: u32,
    /// Bytes that are kept of a row beside its logits.
    kept_bytes: u32,
}

impl Packed {
    /// Bytes of shared memory of a CTA: the rows, the further bytes of each, and a barrier.
    #[must_use]
    pub fn shared_bytes(&self) -> u32 {
        let tile = (self.rows * self.row_bytes).next_multiple_of(VECTOR_BYTES);
        tile + self.rows * self.kept_bytes + BARRIER_BYTES
    }

    /// The layout with fewer rows, if few tokens would leave multiprocessors idle.
    #[must_use]
    pub fn for_tokens(self, tokens: usize, multiprocessors: u32) -> Self {
        let share = tokens.div_ceil(2 * multiprocessors.max(1) as usize);
        let share = share.next_multiple_of(self.unit as usize);
        Self { rows: u32::try_from(share).map_or(self.rows, |share| share.min(self.rows)), ..self }
    }
}

/// The layout of tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flat {
    /// Vectors of a tile, whole lines.
    pub tile_vectors: u32,
    /// Tiles of a row.
    pub tiles: u32,
    /// Consecutive tokens of a CTA.
    pub time_block: u32,
}

/// The layout of rows that stream through shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ring {
    /// Warps of a CTA.
    pub warps: u32,
    /// CTAs of a cluster.
    pub ctas: u32,
    /// Vectors of a chunk.
    pub chunk_vectors: u32,
    /// Chunks of a row per warp.
    pub chunks: u32,
    /// Chunks in a warp's ring.
    pub slots: u32,
    /// Consecutive tokens of a cluster.
    pub time_block: u32,
    /// Bytes of shared memory of a CTA, and of a partial result of a row.
    pub shared_bytes: u32,
    part_bytes: u32,
    /// The number of columns of pieces of a row's sum; a warp has one column if there are as many warps.
    pub columns: u32,
    /// Pieces of a column.
    pub pieces: u32,
}

impl Plan {
    /// The tile of this plan: `time_block` tokens, and the columns of one step.
    #[must_use]
    pub fn tile(&self, dtype: DType) -> Tile {
        let (time_block, vectors) = match self {
            Self::Ring(ring) => (ring.time_block, ring.step_vectors()),
            Self::Flat(flat) => (flat.time_block, flat.tile_vectors),
            Self::Packed(packed) => {
                return Tile::new(packed.rows as usize, packed.columns as usize)
                    .expect("rows of no columns are not planned for");
            }
            Self::Plain => (1, PLAIN_THREADS),
        };
        Tile::new(time_block as usize, (vectors * per_vector(dtype)) as usize)
            .expect("plans have no empty tiles")
    }
}

impl Ring {
    /// Vectors that move in one step.
    fn step_vectors(&self) -> u32 {
        self.warps * self.ctas * self.chunk_vectors
    }

    /// Whether a column of pieces is spread over several warps.
    pub(crate) fn is_spread(&self) -> bool {
        self.warps * self.ctas != self.columns
    }

    /// The layout in narrower clusters, with the same sums.
    pub(crate) fn narrower(self) -> impl Iterator<Item = Self> {
        let halves = std::iter::successors(Some(self.ctas), |ctas| Some(ctas / 2));
        halves.skip(1).take_while(|ctas| *ctas > 1).filter_map(move |ctas| self.over(ctas))
    }

    /// The layout with its chunks over `ctas` CTAs, and the same sums.
    fn over(self, ctas: u32) -> Option<Self> {
        let chunks = self.columns * self.pieces;
        // Every warp has at least one piece, and sends as many as any other. Slots hold a row and what comes
        // before the next row.
        let warps = chunks.div_ceil(ctas).min(MAX_WARPS);
        let warps = if warps * ctas > chunks { chunks / ctas } else { warps };
        let held = chunks.div_ceil((warps * ctas).max(1));
        let slots = held + 2;
        if warps == 0 || slots > MAX_SLOTS {
            return None;
        }
        let parts = if warps * ctas == self.columns { self.columns } else { warps * ctas * held };
        let tables = (parts + 1) * self.part_bytes;
        let shared_bytes = shared_bytes(warps, tables, slots, self.chunk_vectors);
        Some(Self { warps, ctas, chunks: held, slots, shared_bytes, ..self })
    }
}

/// Returns the plan for `shape` on `device`, by the tuned tile or the rule; a given extent replaces that of the
/// tile.
#[must_use]
pub fn choose(
    device: &Device,
    shape: Shape,
    time_block: Option<usize>,
    block_size: Option<usize>,
) -> Plan {
    let tuned = tuned(tuned_tiles(TUNED), device.name(), shape);
    Planner::new(device.limits(), shape).plan(tuned, time_block, block_size)
}

/// The tuned tile of a vocabulary near that of `shape`, preferably for this device.
fn tuned<'a>(rows: &'a [TunedTile], device: &str, shape: Shape) -> Option<&'a TunedTile> {
    let distance = |row: &TunedTile| ((row.vocab as f64).ln() - (shape.vocab as f64).ln()).abs();
    // bf16 and f16 share their measurements.
    let is_as_wide = |row: &TunedTile| {
        DType::ALL
            .into_iter()
            .any(|d| d.name() == row.dtype && d.size_bytes() == shape.dtype.size_bytes())
    };
    rows.iter()
        .filter(|row| row.pass.as_deref() == Some(shape.pass.name()))
        .filter(|row| is_as_wide(row) && distance(row) <= NEAR)
        .min_by(|a, b| {
            let other = |row: &TunedTile| (row.dtype != shape.dtype.name(), row.device != device);
            other(a).cmp(&other(b)).then_with(|| distance(a).total_cmp(&distance(b)))
        })
}

struct Planner {
    limits: Limits,
    shape: Shape,
    pass: Pass,
    /// Elements of a vector.
    per: u32,
    /// Vectors of a row, including those before it in its first cache line.
    vectors: u32,
}

impl Planner {
    fn new(limits: Limits, shape: Shape) -> Self {
        let per = per_vector(shape.dtype);
        let vocab = u32::try_from(shape.vocab).unwrap_or(i32::MAX as u32);
        let whole_lines = vocab.is_multiple_of(per * LINE);
        let vectors = vocab / per + if whole_lines { 0 } else { LINE - 1 };
        Self { limits, shape, pass: shape.pass, per, vectors }
    }

    fn plan(
        &self,
        tuned: Option<&TunedTile>,
        time_block: Option<usize>,
        block_size: Option<usize>,
    ) -> Plan {
        let tokens = |block: usize| u32::try_from(block).unwrap_or(u32::MAX);
        if let Some(packed) = self.packed(time_block, block_size) {
            return Plan::Packed(packed);
        }
        if self.pass == Pass::Backward {
            let tuned_block = tuned.map(|row| row.time_block);
            let block = time_block.or(tuned_block).map_or(1, tokens);
            return Plan::Flat(self.flat(block, block_size.or(tuned.map(|row| row.block_size))));
        }
        let base = tuned.and_then(|row| self.tuned(row)).or_else(|| self.rule());
        let Some(base) = base.filter(|_| self.limits.clusters) else {
            return Plan::Plain;
        };
        let base = block_size.map_or(base, |columns| self.with_columns(base, columns));
        let base = Ring { time_block: time_block.map_or(base.time_block, tokens), ..base };
        Plan::Ring(self.spread(base).unwrap_or(base))
    }

    /// `base` with a row's chunks over the multiprocessors per row.
    fn spread(&self, base: Ring) -> Option<Ring> {
        let widest = self.shape.room.min(WIDEST);
        std::iter::successors(Some(widest), |ctas| Some(ctas / 2))
            .take_while(|ctas| *ctas > base.ctas)
            .filter_map(|ctas| base.over(ctas))
            .find(|ring| ring.shared_bytes <= self.limits.shared_bytes_per_block)
    }

    /// The packed layout, if rows are short and no smaller `block_size` is given.
    fn packed(&self, time_block: Option<usize>, block_size: Option<usize>) -> Option<Packed> {
        let Shape { dtype, vocab, is_whole, has_distribution, .. } = self.shape;
        // There is no kernel for the gradient of entropies.
        let is_whole = is_whole && !(has_distribution && self.pass == Pass::Backward);
        let is_cut = block_size.is_some_and(|columns| columns < vocab);
        if !self.limits.clusters || !is_whole || is_cut || vocab == 0 || vocab > PACKED_VOCAB {
            return None;
        }
        let row_bytes = vocab * dtype.size_bytes();
        let rows_to = |bytes: usize| bytes / gcd(row_bytes, bytes);
        let unit = rows_to(VECTOR_BYTES as usize);
        let sectors = rows_to(SECTOR_BYTES);
        let step = if sectors * row_bytes <= PACKED_MANY { sectors } else { unit };
        let fit = |bytes: usize, step: usize| (bytes / row_bytes / step * step).max(step);
        let usual = fit(PACKED_BYTES, step).min(PACKED_THREADS as usize);
        // Half of shared memory, so that two CTAs share a multiprocessor.
        let most = fit(self.limits.shared_bytes_per_block as usize / 2 - 16_384, unit);
        let rows = time_block.map_or(usual, |block| block.min(most).next_multiple_of(unit));
        let threads = if rows * row_bytes > PACKED_MANY || rows > PACKED_THREADS as usize / 2 {
            PACKED_THREADS
        } else {
            PACKED_THREADS / 2
        };
        let rows = rows.min(threads as usize) as u32;
        let whole_vectors = (vocab as u32).is_multiple_of(self.per);
        let (units, each) =
            if whole_vectors { (vocab as u32 / self.per, 4) } else { (vocab as u32, 8) };
        let lanes = units.div_ceil(each).next_power_of_two().min(32);
        let (unit, columns, row_bytes) = (unit as u32, vocab as u32, row_bytes as u32);
        let kept_bytes =
            if has_distribution { PACKED_DISTRIBUTION_ROW_BYTES } else { PACKED_ROW_BYTES };
        Some(Packed { rows, unit, lanes, whole_vectors, threads, columns, row_bytes, kept_bytes })
    }

    /// The plan of a tuned tile, if the tile is complete and fits.
    fn tuned(&self, row: &TunedTile) -> Option<Ring> {
        let (warps, ctas) = (row.warps?, row.cluster?);
        let chunk = self.chunk_of(warps * ctas, row.block_size);
        let time_block = u32::try_from(row.time_block).ok()?;
        self.ring(warps, ctas, chunk).map(|ring| Ring { time_block, ..ring })
    }

    /// The plan without a tuned tile.
    fn rule(&self) -> Option<Ring> {
        match self.pass {
            Pass::Fused => self.rule_fused(),
            _ => self.rule_once(6_656),
        }
    }

    /// Tiles of the given columns, or even tiles that a thread loads in one batch.
    fn flat(&self, time_block: u32, columns: Option<usize>) -> Flat {
        let tile_vectors = columns.map_or_else(
            || {
                let usual = self.vectors.div_ceil(FLAT_THREADS * FLAT_BATCH);
                let most = self.vectors.div_ceil(FLAT_THREADS);
                self.chunk(1, usual.max(self.shape.room.min(most)))
            },
            |columns| self.chunk_of(1, columns),
        );
        let tiles = self.vectors.div_ceil(tile_vectors).max(1);
        Flat { tile_vectors, tiles, time_block }
    }

    /// The fewest CTAs that hold a row, and the fewest chunks in them.
    fn rule_fused(&self) -> Option<Ring> {
        let warps = self.warps(12);
        let choices = if warps == 12 { &[12, 16][..] } else { &[warps] };
        CTAS.into_iter().find_map(|ctas| {
            (1..=USUAL_CHUNKS).find_map(|chunks| {
                choices.iter().find_map(|&warps| {
                    let ring = self.ring(warps, ctas, self.chunk(warps * ctas, chunks))?;
                    (ring.slots >= ring.chunks + 2).then_some(ring)
                })
            })
        })
    }

    /// The layout for the pass that reads a chunk once: chunks of at most `bytes`, and few warps per row, so that a
    /// multiprocessor has several rows in flight and each warp's part of a row outweighs the exchange at its end.
    fn rule_once(&self, bytes: u32) -> Option<Ring> {
        let warps = self.warps(4);
        let ctas = if self.vectors >= 12_288 { 2 } else { 1 };
        let most = (bytes / VECTOR_BYTES).min(self.most_chunk(warps, ctas)) / LINE * LINE;
        let chunks = self.vectors.div_ceil(warps * ctas * most.max(LINE));
        self.ring(warps, ctas, self.chunk(warps * ctas, chunks))
    }

    /// The number of warps, up to `most`, for which a row has a vector per lane.
    fn warps(&self, most: u32) -> u32 {
        let fits = |warps: &u32| *warps <= most && self.vectors >= 32 * warps;
        [12, 8, 4, 2].into_iter().find(fits).unwrap_or(1)
    }

    /// The chunk for which each of the warps has `chunks` chunks of a row.
    fn chunk(&self, warps: u32, chunks: u32) -> u32 {
        self.vectors.div_ceil(warps * chunks.max(1)).next_multiple_of(LINE).max(LINE)
    }

    /// The chunk for which the warps read `columns`, or the whole row, in a step.
    fn chunk_of(&self, warps: u32, columns: usize) -> u32 {
        let vectors = columns.div_ceil((warps * self.per) as usize);
        let whole = self.chunk(warps, 1);
        u32::try_from(vectors)
            .map_or(whole, |vectors| vectors.min(whole).next_multiple_of(LINE).max(LINE))
    }

    /// Bytes of a partial result of a row.
    fn part_bytes(&self) -> u32 {
        if self.shape.has_distribution { DISTRIBUTION_BYTES } else { PART_BYTES }
    }

    /// The largest chunk of a ring of two.
    fn most_chunk(&self, warps: u32, ctas: u32) -> u32 {
        let rest = shared_bytes(warps, (warps * ctas + 1) * self.part_bytes(), 2, 0);
        self.limits.shared_bytes_per_block.saturating_sub(rest) / (warps * 2 * VECTOR_BYTES)
    }

    /// `base` with the step nearest to `columns` among those that fit.
    fn with_columns(&self, base: Ring, columns: usize) -> Ring {
        let Ring { warps, ctas, .. } = base;
        let wanted = self.chunk_of(warps * ctas, columns);
        let ring = match self.pass {
            Pass::Fused => self.ring(warps, ctas, wanted).or_else(|| {
                (1..=MAX_CHUNKS)
                    .filter_map(|chunks| self.ring(warps, ctas, self.chunk(warps * ctas, chunks)))
                    .min_by_key(|ring| ring.chunk_vectors.abs_diff(wanted))
            }),
            _ => self.ring(warps, ctas, wanted.min(self.most_chunk(warps, ctas) / LINE * LINE)),
        };
        ring.map_or(base, |ring| Ring { time_block: base.time_block, ..ring })
    }

    /// The layout with the given chunks and suitable slots, if they fit shared memory.
    fn ring(&self, warps: u32, ctas: u32, chunk_vectors: u32) -> Option<Ring> {
        if chunk_vectors == 0 {
            return None;
        }
        let chunks = self.vectors.div_ceil(warps * ctas * chunk_vectors).max(1);
        let (least, best) = match self.pass {
            Pass::Fused => (chunks + 1, chunks + 2),
            _ => (2, 2),
        };
        // A warp has several short rows in flight.
        let deep = DEPTH_BYTES / (chunk_vectors * VECTOR_BYTES);
        let best = if chunks == 1 { best.max(deep) } else { best };
        let most = MAX_SLOTS.min(chunks.saturating_mul(MAX_ROWS - 1) - 1);
        (least..=best.min(most)).rev().find_map(|slots| {
            let (columns, pieces, time_block) = (warps * ctas, chunks, 1);
            let part_bytes = self.part_bytes();
            let table = (columns + 1) * part_bytes;
            let shared_bytes = shared_bytes(warps, table, slots, chunk_vectors);
            let ring = Ring {
                warps,
                ctas,
                chunk_vectors,
                chunks,
                slots,
                time_block,
                shared_bytes,
                part_bytes,
                columns,
                pieces,
            };
            (shared_bytes <= self.limits.shared_bytes_per_block).then_some(ring)
        })
    }
}

/// Bytes of shared memory of a CTA, as `RingLayout` of kernels/ring.cuh divides them: slots, tables of partial
/// results, rows, and barriers for both.
fn shared_bytes(warps: u32, table_bytes: u32, slots: u32, chunk_vectors: u32) -> u32 {
    const ROW_BYTES: u32 = 64;
    let fixed = TABLES * (table_bytes + BARRIER_BYTES) + warps * MAX_ROWS * ROW_BYTES;
    let slot = chunk_vectors.saturating_mul(VECTOR_BYTES).saturating_add(BARRIER_BYTES);
    slot.saturating_mul(warps * slots).saturating_add(fixed)
}

/// The greatest common divisor.
fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Elements of a vector.
fn per_vector(dtype: DType) -> u32 {
    VECTOR_BYTES / dtype.size_bytes() as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOPPER: Limits =
        Limits { multiprocessors: 132, shared_bytes_per_block: 232_448, clusters: true };
    const SMALL: Limits = Limits { shared_bytes_per_block: 101_376, ..HOPPER };
    const AMPERE: Limits =
        Limits { multiprocessors: 108, shared_bytes_per_block: 166_912, clusters: false };
    const PASSES: [Pass; 3] = [Pass::Forward, Pass::Backward, Pass::Fused];
    const VOCABS: [usize; 18] = [
        1,
        7,
        8,
        33,
        255,
        1003,
        4096,
        10_007,
        32_000,
        50_257,
        65_536,
        128_256,
        151_643,
        151_936,
        262_144,
        1_000_003,
        50_000_000,
        2_147_483_647,
    ];

    fn plan(limits: Limits, shape: Shape, tile: [Option<usize>; 2]) -> Plan {
        let tuned = tuned(tuned_tiles(TUNED), "NVIDIA H200", shape);
        Planner::new(limits, shape).plan(tuned, tile[0], tile[1])
    }

    fn shape(pass: Pass, dtype: DType, vocab: usize) -> Shape {
        Shape { pass, dtype, vocab, is_whole: true, room: 1, has_distribution: false }
    }

    fn fused(dtype: DType, vocab: usize) -> Shape {
        shape(Pass::Fused, dtype, vocab)
    }

    /// The assumptions of kernels/ring.cuh.
    fn check(limits: Limits, shape: Shape, ring: Ring) {
        let Ring { warps, ctas, chunk_vectors, chunks, slots, time_block, shared_bytes, .. } = ring;
        let what = format!("{shape:?}: {ring:?}");
        let widest = if shape.room >= 16 { 16 } else { 8 };
        assert!((1..=16).contains(&warps) && ctas.is_power_of_two() && ctas <= widest, "{what}");
        // Every piece has a warp, and every warp a piece.
        let pieces = ring.columns * ring.pieces;
        assert!(warps * ctas <= pieces && pieces <= warps * ctas * chunks, "{what}");
        let parts = if ring.is_spread() { warps * ctas * chunks } else { warps * ctas } + 1;
        assert!(
            chunk_vectors > 0 && chunk_vectors.is_multiple_of(LINE) && time_block > 0,
            "{what}"
        );
        // Slots hold all vectors of a row, also with the most vectors before it in its first line.
        let per = per_vector(shape.dtype) as usize;
        let lines = (shape.vocab * shape.dtype.size_bytes()).is_multiple_of(128);
        let vectors = shape.vocab / per + if lines { 0 } else { 7 };
        let held = u64::from(ring.step_vectors()) * u64::from(chunks);
        assert!(chunks > 0 && held >= vectors as u64, "{what}");
        assert!(slots <= 32 && slots / chunks + 1 < MAX_ROWS, "{what}");
        assert!(slots >= if shape.pass == Pass::Fused { chunks + 1 } else { 2 }, "{what}");
        assert!(shared_bytes <= limits.shared_bytes_per_block, "{what}");
        let bytes = warps * slots * chunk_vectors * 16
            + 4 * parts * if shape.has_distribution { 32 } else { 16 }
            + warps * 8 * 64
            + warps * slots * 8
            + 4 * 8;
        assert_eq!(shared_bytes, bytes, "{what}");
    }

    #[test]
    fn plans_for_an_h200_are_those_measured_fastest() {
        for (dtype, vocab, [warps, ctas, chunks, slots]) in [
            (DType::Bf16, 32_000, [12, 1, 1, 3]),
            (DType::Bf16, 50_257, [12, 1, 2, 4]),
            (DType::Bf16, 128_256, [16, 2, 4, 6]),
            (DType::Bf16, 151_643, [12, 2, 5, 7]),
            (DType::Bf16, 151_936, [12, 2, 5, 7]),
            (DType::Bf16, 262_144, [16, 4, 4, 6]),
            (DType::F32, 151_643, [12, 4, 5, 7]),
            // As for bf16, which has the same width.
            (DType::F16, 128_256, [16, 2, 4, 6]),
            (DType::F16, 151_643, [12, 2, 5, 7]),
            (DType::F16, 50_257, [12, 1, 2, 4]),
        ] {
            let shape = fused(dtype, vocab);
            let Plan::Ring(ring) = plan(HOPPER, shape, [None; 2]) else { panic!("{shape:?}") };
            check(HOPPER, shape, ring);
            let found = [ring.warps, ring.ctas, ring.chunks, ring.slots];
            assert_eq!(found, [warps, ctas, chunks, slots], "{shape:?}");
        }
    }

    #[test]
    fn the_forward_pass_has_few_warps_to_a_row() {
        for (pass, vocab, [warps, ctas, chunks, slots]) in [
            (Pass::Forward, 32_000, [4, 1, 3, 2]),
            (Pass::Forward, 50_257, [4, 1, 4, 2]),
            (Pass::Forward, 151_643, [4, 2, 6, 2]),
            (Pass::Forward, 262_144, [4, 2, 10, 2]),
        ] {
            let shape = shape(pass, DType::Bf16, vocab);
            let Plan::Ring(ring) = plan(HOPPER, shape, [None; 2]) else { panic!("{shape:?}") };
            let found = [ring.warps, ring.ctas, ring.chunks, ring.slots];
            assert_eq!(found, [warps, ctas, chunks, slots], "{shape:?}");
        }
    }

    #[test]
    fn the_backward_pass_has_even_tiles() {
        for (vocab, [tile_vectors, tiles]) in
            [(32_000, [1000, 4]), (50_257, [904, 7]), (151_643, [1000, 19]), (262_144, [1024, 32])]
        {
            let shape = shape(Pass::Backward, DType::Bf16, vocab);
            for limits in [HOPPER, AMPERE] {
                let found = plan(limits, shape, [None; 2]);
                let flat = Flat { tile_vectors, tiles, time_block: 1 };
                assert_eq!(found, Plan::Flat(flat), "{shape:?}");
            }
        }
    }

    /// The assumptions of kernels/flat.cuh.
    fn check_flat(shape: Shape, flat: Flat) {
        let Flat { tile_vectors, tiles, time_block } = flat;
        let what = format!("{shape:?}: {flat:?}");
        assert!(time_block > 0, "{what}");
        assert!(tile_vectors > 0 && tile_vectors.is_multiple_of(LINE), "{what}");
        let vectors = shape.vocab as u64 / u64::from(per_vector(shape.dtype)) + 7;
        let held = u64::from(tile_vectors) * u64::from(tiles);
        assert!(held + 7 >= vectors && held <= u64::from(u32::MAX), "{what}");
    }

    /// The assumptions of kernels/packed.cuh.
    fn check_packed(limits: Limits, shape: Shape, packed: Packed) {
        let what = format!("{shape:?}: {packed:?}");
        let bytes = shape.vocab * shape.dtype.size_bytes();
        for tokens in [1, 7, 64, 4096, 1 << 20] {
            let Packed { rows, lanes, threads, .. } = packed.for_tokens(tokens, 132);
            assert!((rows as usize * bytes).is_multiple_of(16) && rows > 0, "{what}");
            assert!(rows <= threads && threads.is_multiple_of(32) && threads <= 256, "{what}");
            assert!(lanes.is_power_of_two() && lanes <= 32, "{what}");
        }
        assert_eq!(packed.whole_vectors, bytes.is_multiple_of(16), "{what}");
        assert!(packed.shared_bytes() <= limits.shared_bytes_per_block, "{what}");
        assert!(shape.vocab <= 4096 && shape.is_whole, "{what}");
    }

    #[test]
    fn few_tokens_take_more_multiprocessors_and_have_the_same_sums() {
        for pass in [Pass::Forward, Pass::Fused] {
            for vocab in [32_000, 50_257, 128_256, 151_643, 262_144] {
                let of = |tokens| {
                    let shape = shape(pass, DType::Bf16, vocab);
                    let shape = Shape { room: room(HOPPER, tokens), ..shape };
                    let Plan::Ring(ring) = plan(HOPPER, shape, [None; 2]) else {
                        panic!("{shape:?}")
                    };
                    ring
                };
                let many = of(4096);
                assert!(!many.is_spread() && many.pieces == many.chunks, "{many:?}");
                for tokens in [1, 8, 16, 33, 64, 132] {
                    let few = of(tokens);
                    let order = |ring: Ring| [ring.columns, ring.pieces, ring.chunk_vectors];
                    assert_eq!(order(few), order(many), "{vocab}, {tokens}: {few:?}");
                    assert!(few.ctas >= many.ctas, "{few:?}");
                    assert!(tokens > 1 || few.ctas > 4, "{few:?}");
                    for narrower in few.narrower() {
                        assert_eq!(order(narrower), order(many), "{narrower:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn small_vocabularies_are_packed_where_rows_lie_without_gaps() {
        for (dtype, vocab, [rows, lanes]) in [
            (DType::Bf16, 2, [256, 1]),
            (DType::Bf16, 257, [32, 32]),
            (DType::Bf16, 2048, [4, 32]),
            (DType::Bf16, 4095, [8, 32]),
            (DType::F32, 4096, [1, 32]),
        ] {
            for pass in PASSES {
                let whole = shape(pass, dtype, vocab);
                let Plan::Packed(packed) = plan(HOPPER, whole, [None; 2]) else {
                    panic!("{whole:?}")
                };
                assert_eq!([packed.rows, packed.lanes], [rows, lanes], "{whole:?}");
                let asked = plan(HOPPER, whole, [Some(9), None]).tile(dtype);
                assert!(asked.time_block().is_multiple_of(packed.unit as usize), "{asked:?}");
                let said = plan(HOPPER, Shape { has_distribution: true, ..whole }, [None; 2]);
                let is_packed = matches!(said, Plan::Packed(more) if more.rows == packed.rows);
                assert_eq!(is_packed, pass != Pass::Backward, "{whole:?}: {said:?}");
                let gaps = Shape { is_whole: false, ..whole };
                for (shape, block_size) in [(gaps, None), (whole, Some(vocab - 1))] {
                    let found = plan(HOPPER, shape, [None, block_size]);
                    assert!(!matches!(found, Plan::Packed(_)), "{shape:?}: {found:?}");
                }
            }
        }
    }

    #[test]
    fn every_plan_is_one_that_kernels_run() {
        let extents = [None, Some(1), Some(7), Some(1024), Some(30_000), Some(usize::MAX)];
        for limits in [HOPPER, SMALL] {
            for pass in PASSES {
                for dtype in DType::ALL {
                    for vocab in VOCABS {
                        for block_size in extents {
                            for (room, is_whole) in [(1, true), (1, false), (4, true), (128, true)]
                            {
                                let has_distribution = room != 1;
                                let shape = shape(pass, dtype, vocab);
                                let shape = Shape { room, is_whole, has_distribution, ..shape };
                                let plan = plan(limits, shape, [block_size, block_size]);
                                match plan {
                                    Plan::Ring(ring) => check(limits, shape, ring),
                                    Plan::Flat(flat) => check_flat(shape, flat),
                                    Plan::Packed(packed) => check_packed(limits, shape, packed),
                                    Plan::Plain => assert_eq!(pass, Pass::Fused, "{shape:?}"),
                                }
                                assert!(plan.tile(dtype).block_size() > 0);
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn rows_that_no_cluster_holds_and_gpus_without_clusters_are_plain() {
        // Eight CTAs of an H200 hold rows of 1.2 MB and the chunks in flight.
        assert!(matches!(plan(HOPPER, fused(DType::Bf16, 600_000), [None; 2]), Plan::Ring(_)));
        assert_eq!(plan(HOPPER, fused(DType::Bf16, 1_000_003), [None; 2]), Plan::Plain);
        for pass in [Pass::Forward, Pass::Fused] {
            let shape = shape(pass, DType::F32, 50_257);
            assert_eq!(plan(AMPERE, shape, [Some(4), Some(512)]), Plan::Plain);
        }
    }

    #[test]
    fn a_tile_that_is_asked_for_is_the_one_used_where_it_fits() {
        for pass in PASSES {
            let shape = shape(pass, DType::Bf16, 50_257);
            let given = |time_block, block_size| {
                plan(HOPPER, shape, [Some(time_block), Some(block_size)]).tile(DType::Bf16)
            };
            for time_block in [1, 3, 64] {
                assert_eq!(given(time_block, 1).time_block(), time_block);
            }
            let columns = [1, 5_000, 10_000, 20_000].map(|columns| given(1, columns).block_size());
            assert!(columns.is_sorted() && columns[0] < columns[3], "{pass:?}: {columns:?}");
            // A step is a multiple of one cache line per warp.
            for (asked, found) in [5_000, 10_000, 20_000].into_iter().zip(&columns[1..]) {
                assert!(found.abs_diff(asked) < 12 * 2 * 64, "{pass:?}: {asked} became {found}");
            }
        }
    }

    #[test]
    fn a_tile_of_the_device_itself_comes_before_a_nearer_one() {
        let row = |vocab, device: &str| TunedTile {
            dtype: "bf16".into(),
            vocab,
            time_block: 1,
            block_size: vocab,
            device: device.into(),
            pass: Some("fused".into()),
            warps: Some(12),
            cluster: Some(1),
        };
        let rows = [row(1000, "a"), row(1010, "b"), row(1500, "b")];
        let find = |device, vocab| tuned(&rows, device, fused(DType::Bf16, vocab)).cloned();
        let find_as = |dtype| tuned(&rows, "a", fused(dtype, 1000)).cloned();
        assert_eq!(find("a", 1001), Some(rows[0].clone()));
        assert_eq!(find("b", 1001), Some(rows[1].clone()));
        assert_eq!(find("c", 1001), Some(rows[0].clone()));
        assert_eq!(find("c", 1200), None);
        let forward = shape(Pass::Forward, DType::Bf16, 1000);
        assert_eq!(find_as(DType::F16), Some(rows[0].clone()));
        assert_eq!(find_as(DType::F32), None);
        assert_eq!(tuned(&rows, "a", forward), None);
    }
}
