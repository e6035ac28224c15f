//! What a compiled program would take on a TPU: an estimate, from the compiler's
//! schedule and what is published of the chip. docs/internals/tpu-cross-entropy.md holds it against steps that
//! were measured.
//!
//! Assumed: a bundle takes a cycle and nothing stalls; loops that the data end turn once a token;
//! copies between HBM and VMEM go at the published bandwidth, and beside arithmetic; XLA's copies that
//! transpose go at a third of that bandwidth; each step of a pipelined grid costs a constant more. What
//! kernels copy whose blocks stay for several steps is planned with them.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use xentile::Tile;
use xentile::operation::{Cost, KernelTraffic, Operation, Problem};

use crate::schedule::{Computation, Schedule};

/// What a step of a pipelined grid costs beyond its bundles: copies started and awaited. Fitted on four
/// of the seven measured tiles of docs/internals/tpu-cross-entropy.md.
const V6E_STEP_S: f64 = 0.389e-6;

/// Likewise on a v5e, fitted on one of the matrix products of JAX's Pallas guide.
const V5E_STEP_S: f64 = 0.2348e-6;

/// The share of the published bandwidth at which XLA's copies that transpose move bytes, in and out
/// counted. Fitted with `V6E_STEP_S` on the same four tiles, for a v6e; assumed for other generations.
const TRANSPOSED_SHARE: f64 = 0.344;

/// What is published of one core of a TPU.
#[derive(Clone, Copy, Debug)]
struct Chip {
    /// The first part of a topology's name.
    generation: &'static str,
    /// Dense bf16 operations a second.
    flops: f64,
    /// Rows and columns of an MXU, of which a core has four.
    mxu: f64,
    hbm_bytes_per_second: f64,
    /// What a step of a pipelined grid costs: fitted for v5e and v6e, and the nearer of the two elsewhere.
    step_s: f64,
}

const CHIPS: [Chip; 4] = [
    Chip {
        generation: "v5e",
        flops: 1.97e14,
        mxu: 128.0,
        hbm_bytes_per_second: 8.2e11,
        step_s: V5E_STEP_S,
    },
    Chip {
        generation: "v5p",
        flops: 2.295e14,
        mxu: 128.0,
        hbm_bytes_per_second: 1.23e12,
        step_s: V5E_STEP_S,
    },
    Chip {
        generation: "v6e",
        flops: 9.2e14,
        mxu: 256.0,
        hbm_bytes_per_second: 1.64e12,
        step_s: V6E_STEP_S,
    },
    Chip {
        generation: "tpu7x",
        flops: 1.155e15,
        mxu: 256.0,
        hbm_bytes_per_second: 3.7e12,
        step_s: V6E_STEP_S,
    },
];

impl Chip {
    fn of(topology: &str) -> Option<&'static Self> {
        let generation = topology.split(':').next()?;
        CHIPS.iter().find(|chip| chip.generation == generation)
    }

    /// Cycles a second. It is not published for each, but what all MXUs do in a second is.
    fn clock(&self) -> f64 {
        self.flops / (4.0 * 2.0 * self.mxu * self.mxu)
    }

    /// Seconds that a computation's copies of so many bytes between HBM and VMEM take.
    fn dma_s(&self, part: &Computation, bytes: u64) -> f64 {
        let share = if part.transposes() { TRANSPOSED_SHARE } else { 1.0 };
        bytes as f64 / (share * self.hbm_bytes_per_second)
    }
}

/// Which of the two a kernel waits for.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Bottleneck {
    /// Copies between HBM and VMEM.
    Dma,
    /// Bundles.
    Schedule,
}

impl Bottleneck {
    fn of(dma: f64, schedule: f64) -> Self {
        if dma >= schedule { Self::Dma } else { Self::Schedule }
    }

    /// As tables have it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Dma => "DMA",
            Self::Schedule => "schedule",
        }
    }
}

/// What a step cannot take less than.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Floor {
    /// What must move at the published bandwidth: of logits, read once, and their gradient, written once.
    TwoPasses,
    /// Logits and both gradients of them, each a product, at the published operations a second.
    ThreeProducts,
}

impl Floor {
    /// As reports have it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::TwoPasses => "two passes over HBM",
            Self::ThreeProducts => "three products",
        }
    }
}

/// An estimate of a step; nothing in it was measured.
#[derive(Clone, Debug, Serialize)]
pub struct Estimate {
    /// Cycles a second that are assumed, in 1e9.
    pub clock_ghz: f64,
    /// The published bandwidth, in 1e9 bytes a second.
    pub hbm_gb_per_s: f64,
    /// What `floor_ms` is of.
    pub floor: Floor,
    /// What a step cannot take less than.
    pub floor_ms: f64,
    /// Our kernels, in the order of the schedule.
    pub kernels: Vec<KernelEstimate>,
    /// XLA's copies that transpose a kernel's operands or results.
    pub transposing_ms: f64,
    /// Everything else: of each part, its schedule or its copies, whichever is longer.
    pub rest_ms: f64,
    /// The kernels one after another, the copies that transpose, and the rest.
    pub step_ms: f64,
    /// `step_ms / floor_ms`.
    pub ratio_to_floor: f64,
}

/// An estimate of one kernel.
#[derive(Clone, Debug, Serialize)]
pub struct KernelEstimate {
    /// Without the number that XLA gives it.
    pub name: String,
    /// Copies in and out of one tile of the first operand.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tile_dma_us: Option<f64>,
    /// The schedule's share of one tile of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tile_schedule_us: Option<f64>,
    /// Copies of all tiles.
    pub dma_ms: f64,
    /// The whole schedule.
    pub schedule_ms: f64,
    /// The longer of the two.
    pub binds: Bottleneck,
    /// What the steps of its grid cost beyond that.
    pub steps_ms: f64,
    /// The longer, the steps, and of tiles the first one's way in and the last one's way out, which
    /// nothing covers.
    pub kernel_ms: f64,
}

/// What a program does.
#[derive(Clone, Debug)]
pub struct Work {
    /// Rows and columns of the first operand.
    pub matrix: [usize; 2],
    /// Bytes of an entry of it.
    pub width: usize,
    /// None where there are no tiles.
    pub tile: Option<Tile>,
    /// What a step cannot take less than.
    pub cost: Cost,
    /// Kernels that are known by name.
    pub traffic: &'static [KernelTraffic],
}

impl Work {
    /// That of an operation.
    #[must_use]
    pub fn of(operation: &dyn Operation, problem: &Problem, tile: Option<Tile>) -> Self {
        let signature = operation.signature(problem, operation.whole(problem));
        let first = signature.operands.first();
        let extents = first.map_or(Vec::new(), |spec| spec.extents(problem));
        let columns = extents.last().copied().unwrap_or(1);
        let rows = extents.iter().rev().skip(1).product();
        Self {
            matrix: [rows, columns],
            width: problem.dtype.size_bytes(),
            tile,
            cost: operation.cost(problem),
            traffic: operation.facts().traffic,
        }
    }
}

/// Estimates a step, where it is held to products that of the kernels in `moved`.
///
/// # Errors
/// Why there is no estimate: a chip that nothing is known of, a schedule that does not tell how many
/// bundles run, or a program without kernels of ours.
pub fn estimate(
    topology: &str,
    schedule: &Schedule,
    work: &Work,
    moved: &[Traffic],
) -> Result<Estimate> {
    let chip = Chip::of(topology).with_context(|| format!("nothing is known of {topology}"))?;
    let clock = chip.clock();
    let &Work { matrix: [rows, columns], width, tile, cost, traffic } = work;
    let operand = (rows * columns * width) as f64;
    let mut kernels = Vec::new();
    let mut transposing = 0.0;
    let mut rest = 0.0;
    for part in &schedule.computations {
        let unreported =
            |what: &str| format!("the compiler's listing of {} does not tell {what}", part.name);
        let bundles = part.run_bundles.with_context(|| unreported("how many bundles run"))? as f64;
        if let Some(known) = Traffic::of(part, moved) {
            let found =
                part_of(chip, part, Some(known)).with_context(|| unreported("its steps"))?;
            kernels.push(KernelEstimate {
                name: known.name.clone(),
                tile_dma_us: None,
                tile_schedule_us: None,
                dma_ms: found.dma_ms,
                schedule_ms: found.schedule_ms,
                binds: Bottleneck::of(found.dma_ms, found.schedule_ms),
                steps_ms: found.steps_ms,
                kernel_ms: found.ms,
            });
            continue;
        }
        match kernel(part, traffic).zip(tile) {
            Some(((name, passes), tile)) => {
                let data = part.data_bundles.with_context(|| unreported("loops over data"))?;
                let bundles = bundles + (rows as u64 * data) as f64;
                let [high, wide] = [tile.time_block(), tile.block_size()];
                let tiles = (rows.div_ceil(high) * columns.div_ceil(wide)) as f64;
                let bytes = (high * wide.min(columns) * width) as f64;
                let tile_s = passes * bytes / chip.hbm_bytes_per_second;
                let dma = passes * operand / chip.hbm_bytes_per_second;
                let scheduled = bundles / clock;
                let steps = part.grid_steps.with_context(|| unreported("its steps"))?;
                let steps = steps as f64 * chip.step_s;
                kernels.push(KernelEstimate {
                    name: name.to_owned(),
                    tile_dma_us: Some(tile_s * 1e6),
                    tile_schedule_us: Some(scheduled / tiles * 1e6),
                    dma_ms: dma * 1e3,
                    schedule_ms: scheduled * 1e3,
                    binds: Bottleneck::of(dma, scheduled),
                    steps_ms: steps * 1e3,
                    kernel_ms: (dma.max(scheduled) + steps + tile_s) * 1e3,
                });
            }
            None => {
                let bytes =
                    part.dma_bytes.with_context(|| unreported("how many bytes are copied"))?;
                let longer = chip.dma_s(part, bytes).max(bundles / clock);
                *if part.transposes() { &mut transposing } else { &mut rest } += longer;
            }
        }
    }
    ensure!(cost.flops == 0 || !kernels.is_empty(), "no kernel of ours makes the matrix products");
    let (floor, floor_s) = match cost.flops {
        0 => {
            let bytes = (cost.bytes_read + cost.bytes_written) as f64;
            (Floor::TwoPasses, bytes / chip.hbm_bytes_per_second)
        }
        flops => (Floor::ThreeProducts, flops as f64 / chip.flops),
    };
    let floor_ms = floor_s * 1e3;
    let (transposing_ms, rest_ms) = (transposing * 1e3, rest * 1e3);
    let kernels_ms: f64 = kernels.iter().map(|kernel| kernel.kernel_ms).sum();
    let step_ms = kernels_ms + transposing_ms + rest_ms;
    Ok(Estimate {
        clock_ghz: clock / 1e9,
        hbm_gb_per_s: chip.hbm_bytes_per_second / 1e9,
        floor,
        floor_ms,
        kernels,
        transposing_ms,
        rest_ms,
        step_ms,
        ratio_to_floor: step_ms / floor_ms,
    })
}

/// An estimate of a computation by its schedule, whatever it computes.
#[derive(Clone, Debug, Serialize)]
pub struct PartEstimate {
    /// The compiler's name for it.
    pub name: String,
    /// Its schedule.
    pub schedule_ms: f64,
    /// Its copies between HBM and VMEM; 0 where nothing tells their bytes.
    pub dma_ms: f64,
    /// What the steps of its grid cost beyond that.
    pub steps_ms: f64,
    /// The longer of schedule and copies, and the steps.
    pub ms: f64,
}

/// What is known of a computation whose listing does not tell.
#[derive(Clone, Debug)]
pub struct Traffic {
    /// A part of its name.
    pub name: String,
    /// Bytes that it moves between HBM and VMEM: the listing takes blocks that stay for several steps
    /// to be fetched in each.
    pub bytes: u64,
    /// Steps of its grid, where it makes a pipeline of its own.
    pub steps: Option<u64>,
}

impl Traffic {
    /// Those of kernels, by their names, that move so many bytes.
    #[must_use]
    pub fn list_kernels(moved: &BTreeMap<String, u64>) -> Vec<Self> {
        let known =
            |(name, &bytes): (&String, &u64)| Self { name: name.clone(), bytes, steps: None };
        moved.iter().map(known).collect()
    }

    /// What is known of a computation, by the longest name that fits.
    fn of<'a>(part: &Computation, known: &'a [Self]) -> Option<&'a Self> {
        let fitting = known.iter().filter(|known| part.name.contains(&known.name));
        fitting.max_by_key(|known| known.name.len())
    }
}

/// Estimates each computation, without the copies of which neither the schedule nor `known` tells the
/// bytes; none for a chip that nothing is known of, or where the schedule does not tell how many bundles
/// or steps run.
#[must_use]
pub fn parts(topology: &str, schedule: &Schedule, known: &[Traffic]) -> Option<Vec<PartEstimate>> {
    let chip = Chip::of(topology)?;
    schedule.computations.iter().map(|part| part_of(chip, part, Traffic::of(part, known))).collect()
}

fn part_of(chip: &Chip, part: &Computation, known: Option<&Traffic>) -> Option<PartEstimate> {
    let bytes = known.map(|known| known.bytes).or(part.dma_bytes).unwrap_or(0);
    let steps = known.and_then(|known| known.steps).or(part.grid_steps)?;
    let schedule_ms = part.run_bundles? as f64 / chip.clock() * 1e3;
    let dma_ms = chip.dma_s(part, bytes) * 1e3;
    let steps_ms = steps as f64 * chip.step_s * 1e3;
    let ms = schedule_ms.max(dma_ms) + steps_ms;
    Some(PartEstimate { name: part.name.clone(), schedule_ms, dma_ms, steps_ms, ms })
}

/// Which of our kernels a computation is; JAX may have named it after the transformations around it.
fn kernel(part: &Computation, traffic: &'static [KernelTraffic]) -> Option<(&'static str, f64)> {
    let known = traffic.iter().find(|known| part.name.contains(known.name));
    known.map(|known| (known.name, known.passes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(name: &str, run_bundles: u64, data_bundles: u64, dma_bytes: u64) -> Computation {
        Computation {
            name: name.to_owned(),
            run_bundles: Some(run_bundles),
            data_bundles: Some(data_bundles),
            dma_bytes: Some(dma_bytes),
            grid_steps: Some(2),
            ..Computation::default()
        }
    }

    /// The work of an operation in bf16, with every option at its default.
    fn work(name: &str, dims: &[(&'static str, usize)], tile: Option<Tile>) -> Work {
        let operation = xentile::operation(name).unwrap();
        let options = operation.options().iter().map(|option| (option.name, option.default));
        let problem = Problem {
            dims: dims.to_vec(),
            dtype: xentile::DType::Bf16,
            options: options.collect(),
            tile: Default::default(),
            cotangent: 1.0,
        };
        Work::of(operation, &problem, tile)
    }

    fn of(parts: Vec<Computation>, topology: &str) -> Result<Estimate> {
        let tile = Tile::new(32, 512).ok();
        let work = work("cross_entropy", &[("T", 64), ("V", 1000)], tile);
        estimate(topology, &Schedule { computations: parts, ..Schedule::default() }, &work, &[])
    }

    #[test]
    fn the_estimate_is_the_larger_of_dma_and_schedule() {
        let rest = part("copy.3", 10, 0, 1_640_000);
        let short = vec![part("xentile_cross_entropy_fused.2", 100, 1, 0), rest.clone()];
        let estimate = of(short, "v6e:2x2").unwrap();
        let [kernel] = &estimate.kernels[..] else { panic!("{estimate:?}") };
        let near = |found: f64, expected: f64| {
            assert!((found / expected - 1.0).abs() < 1e-9, "{found} is not {expected}");
        };
        assert_eq!(
            (&kernel.name[..], kernel.binds),
            ("xentile_cross_entropy_fused", Bottleneck::Dma)
        );
        near(kernel.dma_ms, 2.0 * 128_000.0 / 1.64e12 * 1e3);
        near(kernel.schedule_ms, 164.0 / (9.2e14 / 524_288.0) * 1e3);
        let tile_us = kernel.tile_dma_us.unwrap();
        near(tile_us, 2.0 * 32_768.0 / 1.64e12 * 1e6);
        near(kernel.tile_schedule_us.unwrap(), kernel.schedule_ms / 4.0 * 1e3);
        near(kernel.kernel_ms, kernel.dma_ms + 2e3 * V6E_STEP_S + tile_us / 1e3);
        near(estimate.rest_ms, 0.001);
        near(estimate.step_ms, kernel.kernel_ms + 0.001);
        near(estimate.floor_ms, kernel.dma_ms);
        near(estimate.ratio_to_floor, estimate.step_ms / estimate.floor_ms);

        let crossed = Computation { slots_used: [("xlu".to_owned(), 1)].into(), ..rest.clone() };
        let estimate = of(vec![crossed], "v6e:2x2").unwrap();
        near(estimate.transposing_ms, 0.001 / TRANSPOSED_SHARE);
        near(estimate.step_ms, estimate.transposing_ms);

        let unreported = Computation { dma_bytes: None, ..rest.clone() };
        let error = of(vec![unreported], "v6e:2x2").unwrap_err().to_string();
        assert!(error.contains("of copy.3 does not tell how many bytes"), "{error}");

        let long = vec![part("xentile_cross_entropy_backward", 1_000_000, 0, 0), rest];
        let estimate = of(long, "v6e:2x2").unwrap();
        assert_eq!(estimate.kernels[0].binds, Bottleneck::Schedule);
        assert!(estimate.kernels[0].kernel_ms > 0.5);
    }

    #[test]
    fn any_part_is_estimated_by_its_schedule() {
        let schedule = Schedule {
            computations: vec![
                part("peer_backward.1", 1_000_000, 0, 7),
                part("copy", 1, 0, 1_640_000),
            ],
            ..Schedule::default()
        };
        let name = "peer_backward".to_owned();
        let known = Traffic { name, bytes: 1_640_000_000, steps: None };
        let own_steps = Traffic { steps: Some(1000), ..known.clone() };
        let found = parts("v6e:2x2", &schedule, &[own_steps]).unwrap();
        assert!((found[0].steps_ms / (1e6 * V6E_STEP_S) - 1.0).abs() < 1e-9);
        let known = [known];
        let found = parts("v6e:2x2", &schedule, &known).unwrap();
        let near = |found: f64, expected: f64| assert!((found / expected - 1.0).abs() < 1e-9);
        near(found[0].dma_ms, 1.0);
        near(found[0].schedule_ms, 1e9 / (9.2e14 / 524_288.0));
        near(found[0].ms, 1.0 + 2e3 * V6E_STEP_S);
        near(found[1].ms, 0.001 + 2e3 * V6E_STEP_S);
        assert!(parts("v99:2x2", &schedule, &known).is_none());
    }

    #[test]
    fn kernels_of_hidden_states_move_what_was_planned() {
        let name = "xentile_linear_cross_entropy_forward".to_owned();
        let known = [Traffic { name: name.clone(), bytes: 1_640_000_000, steps: None }];
        let of = |named: &str, moved: &[Traffic]| {
            let schedule =
                Schedule { computations: vec![part(named, 10, 3, 7)], ..Schedule::default() };
            let dims = [("T", 8192), ("V", 128_256), ("D", 2048)];
            let work = work("linear_cross_entropy", &dims, None);
            estimate("v6e:2x2", &schedule, &work, moved)
        };
        let found = of(&format!("jvp_{name}.1"), &known).unwrap();
        let near = |found: f64, expected: f64| assert!((found / expected - 1.0).abs() < 1e-9);
        let [kernel] = &found.kernels[..] else { panic!("{found:?}") };
        assert_eq!(
            (&kernel.name, kernel.binds, kernel.tile_dma_us),
            (&name, Bottleneck::Dma, None)
        );
        near(kernel.kernel_ms, 1.0 + 2e3 * V6E_STEP_S);
        near(found.step_ms, kernel.kernel_ms);
        assert_eq!(found.floor, Floor::ThreeProducts);
        near(found.floor_ms, 6.0 * 8192.0 * 128_256.0 * 2048.0 / 9.2e14 * 1e3);
        // XLA's own programs have no kernels that are known.
        assert!(of("fusion.1", &known).is_err());
        assert!(of(&name, &[]).is_err());
    }

    #[test]
    fn an_unknown_topology_has_no_estimate() {
        let kernel = || part("jvp_xentile_cross_entropy_forward_.1", 100, 0, 0);
        assert!(of(vec![kernel()], "v99:2x2").is_err());
        assert!(of(vec![Computation { run_bundles: None, ..kernel() }], "v5e:2x2").is_err());
        for topology in ["v5e:2x2", "v5p:2x2x1", "tpu7x:2x2x1"] {
            let estimate = of(vec![kernel()], topology).unwrap();
            assert!((1.4..2.3).contains(&estimate.clock_ghz), "{topology}: {estimate:?}");
        }
    }
}
