//! How a pass is laid out on a GPU: which schedule, how many warps and CTAs share a row, and in what
//! chunks it travels. Arithmetic alone, so that it is tested without a GPU.
//!
//! A cluster of `ctas` CTAs of `warps` warps takes a row at a time, cut into chunks of
//! `chunk_vectors` vectors (16 bytes each) that the warps hold in turns, each in a ring of `slots`
//! chunks of its own. Chunks are whole lines of memory, and fewer than `MAX_ROWS` rows are in a ring
//! at a time. The fused pass needs a row and a chunk in the ring, and is fastest with one
//! chunk more; the forward pass, which looks at a chunk once, needs two.
//!
//! The backward pass takes tiles of rows instead, one a CTA and as even as lines allow.

use xentile::{DType, Tile, TunedTile, tuned_tiles};

use super::Pass;
use super::arguments::{FLAT_BATCH, FLAT_THREADS, LINE, MAX_ROWS, PLAIN_THREADS, TABLES};
use crate::{Device, Limits};

/// The name of this operation's table of tuned tiles.
const TUNED: &str = "cross_entropy.cuda";

/// How much the logarithms of two vocabularies may differ for one to be worked on as the other.
const NEAR: f64 = 0.02;

/// CTAs of the plain schedule that a multiprocessor is given.
pub(crate) const PLAIN_CTAS: u32 = 3;

const VECTOR_BYTES: u32 = 16;
/// CTAs of a cluster.
const CTAS: [u32; 4] = [1, 2, 4, 8];
/// Slots of a warp's ring, at most.
const MAX_SLOTS: u32 = 32;
/// Chunks of a row in the fused pass, at most where nobody asks for more, and at all.
const USUAL_CHUNKS: u32 = 6;
const MAX_CHUNKS: u32 = MAX_SLOTS - 2;
/// What a warp keeps on its way at least where rows are short, in bytes.
const DEPTH_BYTES: u32 = 10_240;

/// What is planned for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// The pass.
    pub pass: Pass,
    /// The dtype of the logits.
    pub dtype: DType,
    /// V.
    pub vocab: usize,
}

/// How a pass is laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plan {
    /// Rows stream through the shared memory of a cluster.
    Ring(Ring),
    /// Tiles of rows, each a CTA's, that know nothing of each other.
    Flat(Flat),
    /// A CTA takes a row, and reads it twice where it needs to.
    Plain,
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
    /// Chunks of a row that a warp holds.
    pub chunks: u32,
    /// Chunks in a warp's ring.
    pub slots: u32,
    /// Consecutive tokens that a cluster takes before it moves on.
    pub time_block: u32,
    /// Shared memory of a CTA.
    pub shared_bytes: u32,
}

impl Plan {
    /// The tile that this plan works on at a time: `time_block` tokens, and the columns that move in
    /// one step.
    #[must_use]
    pub fn tile(&self, dtype: DType) -> Tile {
        let (time_block, vectors) = match self {
            Self::Ring(ring) => (ring.time_block, ring.step_vectors()),
            Self::Flat(flat) => (flat.time_block, flat.tile_vectors),
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
}

/// The plan for `shape` on `device`, of the tuned tile or the rule, with either extent of its tile
/// replaced where one is given.
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

/// The tuned tile of `shape`: one of a vocabulary that is nearly its own, of this device if there is.
fn tuned<'a>(rows: &'a [TunedTile], device: &str, shape: Shape) -> Option<&'a TunedTile> {
    let distance = |row: &TunedTile| ((row.vocab as f64).ln() - (shape.vocab as f64).ln()).abs();
    rows.iter()
        .filter(|row| row.pass.as_deref() == Some(shape.pass.name()))
        .filter(|row| row.dtype == shape.dtype.name() && distance(row) <= NEAR)
        .min_by(|a, b| {
            let foreign = (a.device != device).cmp(&(b.device != device));
            foreign.then_with(|| distance(a).total_cmp(&distance(b)))
        })
}

struct Planner {
    limits: Limits,
    pass: Pass,
    /// Elements of a vector.
    per: u32,
    /// Vectors of a row with those that may come before its own in its first line.
    vectors: u32,
}

impl Planner {
    fn new(limits: Limits, shape: Shape) -> Self {
        let per = per_vector(shape.dtype);
        let vocab = u32::try_from(shape.vocab).unwrap_or(i32::MAX as u32);
        let whole_lines = vocab.is_multiple_of(per * LINE);
        let vectors = vocab / per + if whole_lines { 0 } else { LINE - 1 };
        Self { limits, pass: shape.pass, per, vectors }
    }

    fn plan(
        &self,
        tuned: Option<&TunedTile>,
        time_block: Option<usize>,
        block_size: Option<usize>,
    ) -> Plan {
        let tokens = |block: usize| u32::try_from(block).unwrap_or(u32::MAX);
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
        Plan::Ring(Ring { time_block: time_block.map_or(base.time_block, tokens), ..base })
    }

    /// The plan of a tuned tile, if its row says all and fits.
    fn tuned(&self, row: &TunedTile) -> Option<Ring> {
        let (warps, ctas) = (row.warps?, row.cluster?);
        let chunk = self.chunk_of(warps * ctas, row.block_size);
        let time_block = u32::try_from(row.time_block).ok()?;
        self.ring(warps, ctas, chunk).map(|ring| Ring { time_block, ..ring })
    }

    /// The plan where nothing was measured.
    fn rule(&self) -> Option<Ring> {
        match self.pass {
            Pass::Fused => self.rule_fused(),
            _ => self.rule_once(6_656),
        }
    }

    /// Tiles of so many columns; else even ones that a thread takes in one batch.
    fn flat(&self, time_block: u32, columns: Option<usize>) -> Flat {
        let tile_vectors = columns.map_or_else(
            || self.chunk(1, self.vectors.div_ceil(FLAT_THREADS * FLAT_BATCH)),
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

    /// For the pass that looks at a chunk once: chunks of at most `bytes`, and few warps to a row, so
    /// that several rows are under way on a multiprocessor and each warp's part of one is worth the
    /// exchange that it ends with.
    fn rule_once(&self, bytes: u32) -> Option<Ring> {
        let warps = self.warps(4);
        let ctas = if self.vectors >= 12_288 { 2 } else { 1 };
        let most = (bytes / VECTOR_BYTES).min(self.most_chunk(warps, ctas)) / LINE * LINE;
        let chunks = self.vectors.div_ceil(warps * ctas * most.max(LINE));
        self.ring(warps, ctas, self.chunk(warps * ctas, chunks))
    }

    /// As many warps as find a vector for each of their lanes in a row, up to `most`.
    fn warps(&self, most: u32) -> u32 {
        let fits = |warps: &u32| *warps <= most && self.vectors >= 32 * warps;
        [12, 8, 4, 2].into_iter().find(fits).unwrap_or(1)
    }

    /// The chunk that cuts a row into `chunks` for each of so many warps.
    fn chunk(&self, warps: u32, chunks: u32) -> u32 {
        self.vectors.div_ceil(warps * chunks.max(1)).next_multiple_of(LINE).max(LINE)
    }

    /// The chunk with which so many warps move `columns` in a step, or the whole row.
    fn chunk_of(&self, warps: u32, columns: usize) -> u32 {
        let vectors = columns.div_ceil((warps * self.per) as usize);
        let whole = self.chunk(warps, 1);
        u32::try_from(vectors)
            .map_or(whole, |vectors| vectors.min(whole).next_multiple_of(LINE).max(LINE))
    }

    /// The largest chunk of a ring of two.
    fn most_chunk(&self, warps: u32, ctas: u32) -> u32 {
        let rest = shared_bytes(warps, ctas, 2, 0);
        self.limits.shared_bytes_per_block.saturating_sub(rest) / (warps * 2 * VECTOR_BYTES)
    }

    /// `base` with the step that comes nearest to `columns` of those that fit.
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

    /// The layout with such chunks and the slots that suit it, if shared memory has the room.
    fn ring(&self, warps: u32, ctas: u32, chunk_vectors: u32) -> Option<Ring> {
        if chunk_vectors == 0 {
            return None;
        }
        let chunks = self.vectors.div_ceil(warps * ctas * chunk_vectors).max(1);
        let (least, best) = match self.pass {
            Pass::Fused => (chunks + 1, chunks + 2),
            _ => (2, 2),
        };
        // Of short rows a warp takes several at a time.
        let deep = DEPTH_BYTES / (chunk_vectors * VECTOR_BYTES);
        let best = if chunks == 1 { best.max(deep) } else { best };
        let most = MAX_SLOTS.min(chunks.saturating_mul(MAX_ROWS - 1) - 1);
        (least..=best.min(most)).rev().find_map(|slots| {
            let shared_bytes = shared_bytes(warps, ctas, slots, chunk_vectors);
            let ring =
                Ring { warps, ctas, chunk_vectors, chunks, slots, time_block: 1, shared_bytes };
            (shared_bytes <= self.limits.shared_bytes_per_block).then_some(ring)
        })
    }
}

/// Shared memory of a CTA, as `RingLayout` of kernels/ring.cuh divides it: slots, tables of parts,
/// rows, and barriers for both.
fn shared_bytes(warps: u32, ctas: u32, slots: u32, chunk_vectors: u32) -> u32 {
    const PART_BYTES: u32 = 16;
    const ROW_BYTES: u32 = 64;
    const BARRIER_BYTES: u32 = 8;
    let fixed = TABLES * (ctas * warps * PART_BYTES + BARRIER_BYTES) + warps * MAX_ROWS * ROW_BYTES;
    let slot = chunk_vectors.saturating_mul(VECTOR_BYTES).saturating_add(BARRIER_BYTES);
    slot.saturating_mul(warps * slots).saturating_add(fixed)
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

    fn fused(dtype: DType, vocab: usize) -> Shape {
        Shape { pass: Pass::Fused, dtype, vocab }
    }

    /// What kernels/ring.cuh takes for granted.
    fn check(limits: Limits, shape: Shape, ring: Ring) {
        let Ring { warps, ctas, chunk_vectors, chunks, slots, time_block, shared_bytes } = ring;
        let what = format!("{shape:?}: {ring:?}");
        assert!((1..=16).contains(&warps) && [1, 2, 4, 8].contains(&ctas), "{what}");
        assert!(
            chunk_vectors > 0 && chunk_vectors.is_multiple_of(LINE) && time_block > 0,
            "{what}"
        );
        // Every vector has a place, with the most that may come before a row's own.
        let per = per_vector(shape.dtype) as usize;
        let lines = (shape.vocab * shape.dtype.size_bytes()).is_multiple_of(128);
        let vectors = shape.vocab / per + if lines { 0 } else { 7 };
        let held = u64::from(ring.step_vectors()) * u64::from(chunks);
        assert!(chunks > 0 && held >= vectors as u64, "{what}");
        assert!(slots <= 32 && slots / chunks + 1 < MAX_ROWS, "{what}");
        assert!(slots >= if shape.pass == Pass::Fused { chunks + 1 } else { 2 }, "{what}");
        assert!(shared_bytes <= limits.shared_bytes_per_block, "{what}");
        let bytes = warps * slots * chunk_vectors * 16
            + 4 * ctas * warps * 16
            + warps * 8 * 64
            + warps * slots * 8
            + 4 * 8;
        assert_eq!(shared_bytes, bytes, "{what}");
    }

    #[test]
    fn what_was_measured_best_on_an_h200_is_planned_for_it() {
        for (dtype, vocab, [warps, ctas, chunks, slots]) in [
            (DType::Bf16, 32_000, [12, 1, 1, 3]),
            (DType::Bf16, 50_257, [12, 1, 2, 4]),
            (DType::Bf16, 128_256, [16, 2, 4, 6]),
            (DType::Bf16, 151_643, [12, 2, 5, 7]),
            (DType::Bf16, 151_936, [12, 2, 5, 7]),
            (DType::Bf16, 262_144, [16, 4, 4, 6]),
            (DType::F32, 151_643, [12, 4, 5, 7]),
            // By the rule: f16 was not measured.
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
            let shape = Shape { pass, dtype: DType::Bf16, vocab };
            let Plan::Ring(ring) = plan(HOPPER, shape, [None; 2]) else { panic!("{shape:?}") };
            let found = [ring.warps, ring.ctas, ring.chunks, ring.slots];
            assert_eq!(found, [warps, ctas, chunks, slots], "{shape:?}");
        }
    }

    #[test]
    fn the_backward_pass_has_even_tiles() {
        for (vocab, [tile_vectors, tiles]) in [
            (1, [8, 1]),
            (32_000, [1000, 4]),
            (50_257, [904, 7]),
            (151_643, [1000, 19]),
            (262_144, [1024, 32]),
        ] {
            let shape = Shape { pass: Pass::Backward, dtype: DType::Bf16, vocab };
            for limits in [HOPPER, AMPERE] {
                let found = plan(limits, shape, [None; 2]);
                let flat = Flat { tile_vectors, tiles, time_block: 1 };
                assert_eq!(found, Plan::Flat(flat), "{shape:?}");
            }
        }
    }

    /// What kernels/flat.cuh takes for granted.
    fn check_flat(shape: Shape, flat: Flat) {
        let Flat { tile_vectors, tiles, time_block } = flat;
        let what = format!("{shape:?}: {flat:?}");
        assert!(time_block > 0, "{what}");
        assert!(tile_vectors > 0 && tile_vectors.is_multiple_of(LINE), "{what}");
        let vectors = shape.vocab as u64 / u64::from(per_vector(shape.dtype)) + 7;
        let held = u64::from(tile_vectors) * u64::from(tiles);
        assert!(held + 7 >= vectors && held <= u64::from(u32::MAX), "{what}");
    }

    #[test]
    fn every_plan_is_one_that_kernels_run() {
        let extents = [None, Some(1), Some(7), Some(1024), Some(30_000), Some(usize::MAX)];
        for limits in [HOPPER, SMALL] {
            for pass in PASSES {
                for dtype in DType::ALL {
                    for vocab in VOCABS {
                        for block_size in extents {
                            let shape = Shape { pass, dtype, vocab };
                            let plan = plan(limits, shape, [block_size, block_size]);
                            match plan {
                                Plan::Ring(ring) => check(limits, shape, ring),
                                Plan::Flat(flat) => check_flat(shape, flat),
                                Plan::Plain => assert_eq!(pass, Pass::Fused, "{shape:?}"),
                            }
                            assert!(plan.tile(dtype).block_size() > 0);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn rows_that_no_cluster_holds_and_gpus_without_clusters_are_plain() {
        // Eight CTAs of an H200 hold rows of 1.2 MB and what is on its way.
        assert!(matches!(plan(HOPPER, fused(DType::Bf16, 600_000), [None; 2]), Plan::Ring(_)));
        assert_eq!(plan(HOPPER, fused(DType::Bf16, 1_000_003), [None; 2]), Plan::Plain);
        for pass in [Pass::Forward, Pass::Fused] {
            let shape = Shape { pass, dtype: DType::F32, vocab: 50_257 };
            assert_eq!(plan(AMPERE, shape, [Some(4), Some(512)]), Plan::Plain);
        }
    }

    #[test]
    fn a_tile_that_is_asked_for_is_the_one_used_where_it_fits() {
        for pass in PASSES {
            let shape = Shape { pass, dtype: DType::Bf16, vocab: 50_257 };
            let given = |time_block, block_size| {
                plan(HOPPER, shape, [Some(time_block), Some(block_size)]).tile(DType::Bf16)
            };
            for time_block in [1, 3, 64] {
                assert_eq!(given(time_block, 1).time_block(), time_block);
            }
            let columns = [1, 5_000, 10_000, 20_000].map(|columns| given(1, columns).block_size());
            assert!(columns.is_sorted() && columns[0] < columns[3], "{pass:?}: {columns:?}");
            // A step is a multiple of what one line for each warp moves.
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
        assert_eq!(find("a", 1001), Some(rows[0].clone()));
        assert_eq!(find("b", 1001), Some(rows[1].clone()));
        assert_eq!(find("c", 1001), Some(rows[0].clone()));
        assert_eq!(find("c", 1200), None);
        let forward = Shape { pass: Pass::Forward, ..fused(DType::Bf16, 1000) };
        assert_eq!(tuned(&rows, "a", forward), None);
    }
}
