//! How rows are shared out: the kernel, its threads, and what they keep.

use crate::Limits;

use super::arguments::{ANY_THREADS, RING1_THREADS, RING2_THREADS, RING4_THREADS, WARPS};

/// Bytes of a vector.
const VECTOR: usize = 16;
/// Threads of a CTA of the forward pass that has room for several rows.
const FORWARD_THREADS: u32 = 128;
/// Threads of a CTA, at most.
const MOST_THREADS: u32 = 32 * WARPS;
/// Threads of a CTA of the backward pass over centred rows with four vectors each, where it has several teams: more
/// have more bytes on their way, which takes longer.
const CENTRED_RING4_THREADS_OF_TEAMS: u32 = 384;
/// Threads of one with two vectors each, below which four are better: they have too few bytes on their way.
const RING2_FEWEST_THREADS: u32 = 416;
/// Bytes that a CTA copies ahead of its rows, at most, which any GPU has room for.
const MOST_AHEAD: usize = 32 << 10;
/// Bytes that the CTAs of a multiprocessor copy so. Measured on an H200: below it copying takes 0.7 to 1.0 of the
/// time of reading the weight after the rows, above it up to 1.4.
const MOST_AHEAD_OF_MULTIPROCESSOR: usize = 64 << 10;
/// Threads with 64 registers each that a multiprocessor holds.
const RESIDENT_THREADS: u32 = 1024;
/// CTAs of the forward pass that a GPU would have to hold one after another, at most, for fewer that stay to be faster.
const MOST_TURNS: u32 = 5;
/// Elements of a row that a warp takes for itself where rows are of any length.
const WARP_COLUMNS: usize = 1024;

/// A launch. `threads` are `teams` of `lanes`, each of which has a row at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Plan {
    /// How rows are taken, as in the kernel's name.
    pub(super) way: &'static str,
    pub(super) ctas: u32,
    pub(super) lanes: u32,
    pub(super) teams: u32,
    /// Whether the teams of a CTA have rows that follow one another.
    pub(super) adjacent: bool,
    /// Bytes of the weight that each CTA copies to shared memory while its rows come.
    pub(super) ahead: u32,
    pub(super) shared_bytes: u32,
}

impl Plan {
    pub(super) fn threads(&self) -> u32 {
        self.lanes * self.teams
    }

    /// This with a weight of `bytes` copied to shared memory while rows come, which all rows have in common, in each
    /// of `arrays`; where there are few CTAs. More of them hide each other's waiting, and share what the L1 holds.
    pub(super) fn with_ahead(self, bytes: usize, arrays: u32, limits: Limits) -> Self {
        let shared = bytes * arrays as usize;
        if !self.way.starts_with("held") || !self.has_few_ctas(bytes, shared, limits) {
            return self;
        }
        Self { ahead: bytes as u32, shared_bytes: self.shared_bytes + shared as u32, ..self }
    }

    /// Whether CTAs are so few that each copies a weight of `bytes` ahead, `shared` with a bias.
    fn has_few_ctas(&self, bytes: usize, shared: usize, limits: Limits) -> bool {
        let most = limits.multiprocessors as usize * MOST_AHEAD_OF_MULTIPROCESSOR;
        let all = shared.saturating_mul(self.ctas as usize);
        bytes.is_multiple_of(VECTOR) && shared <= MOST_AHEAD && all <= most
    }

    /// This by CTAs that stay for several rows, all with one weight of `bytes`, where there are neither very few rows
    /// nor many. A row has the same bits.
    pub(super) fn in_turns(self, bytes: usize, limits: Limits) -> Self {
        let resident = limits.multiprocessors * (RESIDENT_THREADS / self.threads());
        let takes_turns = self.ctas > resident && self.ctas.div_ceil(MOST_TURNS) <= resident;
        if self.way != "held4" || !takes_turns || self.has_few_ctas(bytes, bytes, limits) {
            return self;
        }
        Self { way: "turns4", ctas: resident, ..self }
    }

    /// Of the forward pass over rows of so many bytes.
    pub(super) fn forward(rows: usize, columns: usize, element: usize, limits: Limits) -> Self {
        let plan = |way, lanes, teams: u32, of_team: usize| Self {
            way,
            ctas: count(rows.div_ceil(teams as usize * of_team)),
            lanes,
            teams,
            adjacent: true,
            ahead: 0,
            shared_bytes: 0,
        };
        let bytes = columns * element;
        let vectors = bytes / VECTOR;
        if !bytes.is_multiple_of(VECTOR) || vectors > 8 * MOST_THREADS as usize {
            let (lanes, teams) = match columns {
                0..=WARP_COLUMNS => (32, FORWARD_THREADS / 32),
                _ if vectors > 4096 => (MOST_THREADS, 1),
                _ => (256, 1),
            };
            let plan = plan(any(bytes), lanes, teams, 1);
            let most = limits.multiprocessors.max(1) * (2048 / plan.threads());
            return Self { ctas: plan.ctas.min(most), ..plan };
        }
        let (way, of_thread, of_team) = match vectors {
            0..=32 => ("held1", 1, 4),
            33..=64 => ("held2", 2, 2),
            65..=4096 => ("held4", 4, 1),
            _ => ("held8", 8, 1),
        };
        let lanes = lanes(vectors, of_thread);
        plan(way, lanes, (FORWARD_THREADS / lanes).max(1), of_team)
    }

    /// Of the backward pass with so many blocks of rows, over `arrays` matrices that are read.
    pub(super) fn backward(
        blocks: usize,
        columns: usize,
        element: usize,
        arrays: u32,
        is_centred: bool,
        limits: Limits,
    ) -> Self {
        let bytes = columns * element;
        let vectors = bytes / VECTOR;
        let ctas = count(blocks);
        // Blocks that do not all find a multiprocessor share them.
        let share = 1 + u32::from(ctas > limits.multiprocessors);
        let room = (limits.shared_bytes_per_block - STATIC_BYTES) / share;
        // A row's rstd, which each thread copies for itself where rows are not centred.
        let statistics = if is_centred { 0 } else { 4 };
        // Of so many threads at the most and, less than which leave memory idle, at the least.
        let ring = |way, of_thread: u32, most_threads: u32, least_threads: u32| {
            let lanes = lanes(vectors, of_thread);
            let teams = most_threads / lanes;
            let teams = if lanes > 32 { teams.min(NAMED_BARRIERS) } else { teams };
            let place = (arrays * of_thread * VECTOR as u32 + statistics) * lanes * teams;
            // Sums of all teams come to lie there, in f32.
            let sums = if teams > 1 { 4 * columns as u32 * teams } else { 0 };
            let shared_bytes = (2 * place).max(sums);
            let fits = teams > 0 && lanes * teams >= least_threads && shared_bytes <= room;
            let adjacent = lanes <= 32;
            fits.then_some(Self { way, ctas, lanes, teams, adjacent, ahead: 0, shared_bytes })
        };
        let ring1 = |share| ring("ring1", 1, RING1_THREADS / share, 1);
        let ring2 = |share, least: u32| ring("ring2", 2, RING2_THREADS / share, least / share);
        let ring4 = |share, most: u32| ring("ring4", 4, most / share, 1);
        let found = match vectors {
            _ if !bytes.is_multiple_of(VECTOR) => None,
            0..=32 => ring1(share).or_else(|| ring1(2 * share)),
            33..=64 => ring2(share, 1).or_else(|| ring2(2 * share, 1)),
            // Sums of dbias leave no registers for as many vectors.
            65..=128 if is_centred => ring2(share, 1),
            _ => ring2(share, RING2_FEWEST_THREADS)
                .or_else(|| {
                    is_centred.then(|| ring4(share, CENTRED_RING4_THREADS_OF_TEAMS)).flatten()
                })
                .or_else(|| ring4(share, RING4_THREADS))
                .or_else(|| ring2(share, 1))
                .or_else(|| ring2(1, 1))
                .or_else(|| ring4(1, RING4_THREADS))
                .or_else(|| ring4(2, RING4_THREADS)),
        };
        found.unwrap_or_else(|| {
            let pieces = if bytes.is_multiple_of(VECTOR) { vectors } else { columns };
            let lanes = lanes(pieces, 1).clamp(32, ANY_THREADS);
            let way = any(bytes);
            Self { way, ctas, lanes, teams: 1, adjacent: true, ahead: 0, shared_bytes: 0 }
        })
    }
}

/// Barriers that a CTA has for its teams.
const NAMED_BARRIERS: u32 = 15;

/// Shared memory that is not the ring's: places for what warps add up.
const STATIC_BYTES: u32 = 1024;

/// How rows of any length are taken.
fn any(bytes: usize) -> &'static str {
    if bytes.is_multiple_of(VECTOR) { "vectors" } else { "elements" }
}

/// Threads that have `pieces` between them, `of_thread` each: a part of a warp that halves, or whole
/// warps.
fn lanes(pieces: usize, of_thread: u32) -> u32 {
    let lanes = u32::try_from(pieces.div_ceil(of_thread as usize)).unwrap_or(u32::MAX / 2);
    if lanes <= 32 { lanes.next_power_of_two() } else { lanes.next_multiple_of(32) }
}

fn count(ctas: usize) -> u32 {
    u32::try_from(ctas).unwrap_or(u32::MAX).clamp(1, i32::MAX as u32)
}

#[cfg(test)]
mod tests {
    use super::super::arguments::PLACES;
    use super::*;

    const H100: Limits =
        Limits { multiprocessors: 132, shared_bytes_per_block: 227 << 10, clusters: true };
    const A100: Limits =
        Limits { multiprocessors: 108, shared_bytes_per_block: 163 << 10, clusters: false };
    const RTX_4090: Limits =
        Limits { multiprocessors: 128, shared_bytes_per_block: 99 << 10, clusters: false };

    #[test]
    fn every_column_has_a_thread() {
        let of_thread = |way: &str| way.chars().last()?.to_digit(10).map(|digit| digit as usize);
        for limits in [H100, A100, RTX_4090] {
            for element in [2, 4] {
                for columns in (1..3000).chain([4096, 5120, 8192, 12288, 16384, 65535, 65536]) {
                    let forward = Plan::forward(7, columns, element, limits);
                    let vectors = columns * element / VECTOR;
                    let check = |plan: Plan, most: u32| {
                        let threads = plan.threads();
                        assert!(threads <= most && plan.lanes >= 1, "{columns} {plan:?}");
                        assert!(plan.lanes.is_power_of_two() || plan.lanes.is_multiple_of(32));
                        if let Some(of_thread) = of_thread(plan.way) {
                            assert_eq!(columns * element % VECTOR, 0);
                            assert!(vectors <= of_thread * plan.lanes as usize, "{plan:?}");
                        } else {
                            assert!(plan.lanes.is_multiple_of(32));
                        }
                    };
                    check(forward, MOST_THREADS);
                    assert!(forward.lanes <= 32 || forward.teams <= 2, "{forward:?}");
                    let cases = [(1, 2), (128, 2), (128, 3), (1000, 3)];
                    let cases = cases.into_iter().flat_map(|case| [(case, false), (case, true)]);
                    for ((blocks, arrays), is_centred) in cases {
                        let plan =
                            Plan::backward(blocks, columns, element, arrays, is_centred, limits);
                        let most = match plan.way {
                            "ring1" => RING1_THREADS,
                            "ring2" => RING2_THREADS,
                            "ring4" => RING4_THREADS,
                            _ => ANY_THREADS,
                        };
                        check(plan, most);
                        assert!(plan.lanes <= 32 || plan.teams <= NAMED_BARRIERS, "{plan:?}");
                        assert!(plan.adjacent || plan.lanes > 32, "{plan:?}");
                        assert!(plan.shared_bytes + STATIC_BYTES <= limits.shared_bytes_per_block);
                        // Of rows of several vectors a thread, teams are whole warps.
                        let is_part = plan.lanes < 32 && ["ring2", "ring4"].contains(&plan.way);
                        assert!(!is_part, "{plan:?}");
                        let places = plan.teams * (plan.lanes / 32).next_multiple_of(4);
                        assert!(plan.lanes <= 32 || places <= PLACES, "{plan:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn plans_of_common_shapes() {
        let forward = |columns| Plan::forward(8192, columns, 2, H100);
        let short = |plan: Plan| (plan.way, plan.lanes, plan.teams, plan.ctas);
        assert_eq!(short(forward(128)), ("held1", 16, 8, 256));
        assert_eq!(short(forward(896)), ("held4", 32, 4, 2048));
        assert_eq!(short(forward(4096)), ("held4", 128, 1, 8192));
        assert_eq!(short(forward(65536)), ("held8", 1024, 1, 8192));
        assert_eq!(short(forward(1023)), ("elements", 32, 4, 2048));
        let ahead = |rows, columns| {
            Plan::forward(rows, columns, 2, H100).with_ahead(4 * columns, 1, H100).ahead
        };
        assert_eq!((ahead(512, 768), ahead(16384, 768)), (3072, 0));
        assert_eq!((ahead(512, 4096), ahead(1024, 4096)), (16384, 0));
        let turns = |rows, columns| {
            let plan = Plan::forward(rows, columns, 2, H100).in_turns(4 * columns, H100);
            (plan.way, plan.lanes, plan.teams, plan.ctas)
        };
        assert_eq!(turns(2048, 7168), ("turns4", 224, 1, 528));
        assert_eq!(turns(3500, 5120), ("turns4", 160, 1, 792));
        assert_eq!(turns(9000, 1096), ("turns4", 64, 2, 1056));
        // Of many rows, and of so few that each CTA has one, or copies the weight ahead.
        assert_eq!(turns(4096, 5120).0, "held4");
        assert_eq!(turns(528, 7168).0, "held4");
        assert_eq!(turns(4 * 1057, 640).0, "held4");
        // What is no whole number of vectors, or of rows that are not held.
        assert_eq!((ahead(4, 1023), ahead(1, 65536)), (0, 0));
        let bf16_weight =
            |columns| Plan::forward(4, columns, 4, H100).with_ahead(2 * columns, 1, H100).ahead;
        assert_eq!((bf16_weight(1024), bf16_weight(1028)), (2048, 0));
        let backward = |columns, limits| Plan::backward(128, columns, 2, 2, false, limits);
        let whole = |plan: Plan| (plan.way, plan.lanes, plan.teams, plan.shared_bytes >> 10);
        assert_eq!(whole(backward(128, H100)), ("ring1", 16, 64, 72));
        assert_eq!(whole(backward(512, H100)), ("ring2", 32, 20, 85));
        assert_eq!(whole(backward(896, H100)), ("ring2", 64, 10, 85));
        assert_eq!(whole(backward(2048, H100)), ("ring2", 128, 5, 85));
        assert_eq!(whole(backward(4096, H100)), ("ring2", 256, 2, 68));
        assert_eq!(whole(backward(5120, H100)), ("ring2", 320, 2, 85));
        assert_eq!(whole(backward(6144, H100)), ("ring4", 192, 2, 99));
        assert_eq!(whole(backward(8192, H100)), ("ring2", 512, 1, 68));
        assert_eq!(whole(backward(16384, H100)), ("ring4", 512, 1, 132));
        assert_eq!(whole(backward(4096, A100)), ("ring2", 256, 1, 34));
        let adds = |columns, limits| whole(Plan::backward(128, columns, 2, 3, false, limits));
        assert_eq!(adds(4096, H100), ("ring2", 256, 2, 100));
        assert_eq!(adds(6144, H100), ("ring4", 192, 2, 147));
        assert_eq!(adds(8192, H100), ("ring2", 512, 1, 100));
        assert_eq!(adds(128, RTX_4090), ("ring1", 16, 32, 52));
        assert_eq!(adds(512, RTX_4090), ("ring2", 32, 10, 62));
        assert_eq!(adds(8192, RTX_4090), ("ring4", 256, 1, 98));
        let centred = |columns| whole(Plan::backward(128, columns, 2, 2, true, H100));
        assert_eq!(centred(896), ("ring2", 64, 10, 80));
        assert_eq!(centred(4096), ("ring2", 256, 2, 64));
        assert_eq!(centred(6144), ("ring4", 192, 2, 96));
        assert_eq!(centred(8192), ("ring2", 512, 1, 64));
        assert_eq!(backward(65536, H100).way, "vectors");
    }
}
