//! What a sweep is asked for: which cells there are.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use pjrt_client::Platform;
use serde::{Deserialize, Serialize};
use serde_yaml::Mapping;
use xentile::TunedTile;
use xentile_programs::programs;

use crate::config::{Backend, Implementation, Schema, Scope, Taken, TileConfig, name};
use crate::microbench;

/// A grid to measure: of tiles or, where an operation plans what it holds, of budgets.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Tokens per tile.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub time_blocks: Vec<usize>,
    /// Vocabulary columns per tile.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub block_sizes: Vec<usize>,
    /// Limits of memory beyond operands and results; null is the operation's default.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub max_scratch_bytes: Vec<Option<usize>>,
    /// Passes over the grid; each cell keeps the round with the median step time.
    #[serde(default = "once")]
    pub rounds: usize,
    /// The folder of the results; `benches/results/<processor>/<name of the config>` by default.
    #[serde(default)]
    pub out: Option<PathBuf>,
    /// Whether the best tile becomes the default for this dtype and vocabulary.
    #[serde(default)]
    pub update_tuned: bool,
    /// The folder of the default tiles.
    #[serde(default = "default_tuned_dir")]
    pub tuned_dir: PathBuf,
    /// The measurement of every cell.
    #[serde(default)]
    pub cell: microbench::Config,
}

fn default_tuned_dir() -> PathBuf {
    "configs/tuned".into()
}

fn once() -> usize {
    1
}

/// What a sweep varies, beside others perhaps.
pub(super) struct Axis {
    /// The key of its values in the sweep's config.
    pub(super) list: &'static str,
    /// The name of one value.
    pub(super) name: &'static str,
    /// The key of one value in a cell's config.
    pub(super) key: &'static str,
    /// None is the operation's own choice.
    pub(super) values: Vec<Option<usize>>,
}

/// A cell's value on every axis.
pub(super) type Index = Vec<Option<usize>>;

/// A value as configs have it.
pub(super) fn shown(value: Option<usize>) -> String {
    value.map_or_else(|| "null".to_owned(), |value| value.to_string())
}

/// The names and values of a place.
pub(super) fn describe(axes: &[Axis], place: &Index) -> String {
    let values = axes.iter().zip(place);
    values
        .map(|(axis, &value)| format!("{} {}", axis.name, shown(value)))
        .collect::<Vec<_>>()
        .join(" ")
}

impl Config {
    /// Whether the operation has a budget to vary.
    fn has_budgets(&self) -> bool {
        self.cell.op.option("max_scratch_bytes").is_some_and(|option| option.is_swept)
    }

    /// Whether it is of budgets, and of tiles if not.
    pub(super) fn is_of_budgets(&self) -> bool {
        let has_tiles = !(self.time_blocks.is_empty() && self.block_sizes.is_empty());
        self.has_budgets() && !has_tiles
    }

    /// Whether programs of the operation come from JAX.
    fn is_exported(&self) -> bool {
        programs(self.cell.op.name()).is_none()
    }

    /// What the sweep varies: what goes across the plot first.
    pub(super) fn axes(&self) -> Vec<Axis> {
        if self.is_of_budgets() {
            return vec![Axis {
                list: "max_scratch_bytes",
                name: "max_scratch_bytes",
                key: "max_scratch_bytes",
                values: self.max_scratch_bytes.clone(),
            }];
        }
        let extents = |list: &[usize]| list.iter().copied().map(Some).collect();
        vec![
            Axis {
                list: "time_blocks",
                name: "time_block",
                key: "tile.time_block",
                values: extents(&self.time_blocks),
            },
            Axis {
                list: "block_sizes",
                name: "block_size",
                key: "tile.block_size",
                values: extents(&self.block_sizes),
            },
        ]
    }

    pub(super) fn validate(&self) -> Result<()> {
        let (axes, is_of_budgets) = (self.axes(), self.is_of_budgets());
        ensure!(
            is_of_budgets || self.max_scratch_bytes.is_empty(),
            "max_scratch_bytes is set; a sweep of {} varies time_blocks and block_sizes{}",
            self.cell.op,
            if self.has_budgets() { ", or max_scratch_bytes alone" } else { "" }
        );
        ensure!(
            is_of_budgets || !self.cell.op.facts().tile.is_empty(),
            "op {} has no tile to vary; measure it without a sweep",
            self.cell.op
        );
        ensure!(self.rounds >= 1, "rounds is 0; it must be at least 1");
        for Axis { list, values, .. } in &axes {
            ensure!(!values.is_empty(), "{list} is empty; list at least one value");
            for (index, &value) in values.iter().enumerate() {
                ensure!(
                    !values[..index].contains(&value),
                    "{list} lists {} twice; remove one",
                    shown(value)
                );
            }
        }
        let (varied, is_set) = match is_of_budgets {
            false => ("tile", self.cell.tile != TileConfig::default()),
            true => ("max_scratch_bytes", self.cell.top.get("max_scratch_bytes").is_some()),
        };
        ensure!(!is_set, "cell.{varied} is what the sweep varies; remove it");
        ensure!(
            self.cell.implementation == Implementation::Kernel,
            "cell.impl is {}, which has no {varied}; set it to kernel",
            name(&self.cell.implementation)
        );
        ensure!(
            !self.is_exported() || self.cell.program.is_none(),
            "cell.program is set, which is of one {}; remove it, and each cell exports its own",
            if is_of_budgets { "budget" } else { "tile" }
        );
        self.cell.validate().context("cell")?;
        if self.update_tuned {
            ensure!(
                !is_of_budgets,
                "update_tuned is true; a sweep of max_scratch_bytes has no tile to tune: set \
                 update_tuned to false"
            );
            // Elsewhere nothing reads one.
            ensure!(
                !self.is_exported() || self.cell.backend == Backend::XlaCpu,
                "update_tuned is true, and cell.backend is {}; {} has tuned tiles on xla:cpu alone: \
                 set update_tuned to false",
                name(&self.cell.backend),
                self.cell.op
            );
            ensure!(
                self.cell.topology.is_none(),
                "update_tuned is true, and cell.topology is set: without step times no tile is the \
                 best; set update_tuned to false"
            );
            ensure!(
                self.tuned_dir.is_dir(),
                "tuned_dir {} is not a directory; start from the repository root, or name one, or \
                 set update_tuned to false",
                self.tuned_dir.display()
            );
            read_tuned(&self.tuned_file())?;
        }
        Ok(())
    }

    pub(super) fn tuned_file(&self) -> PathBuf {
        // The kernels of `xla:cpu` are those of `cpu`, and so is their tile.
        let kernels = self.cell.backend.platform().map_or("cpu", Platform::name);
        let table = format!("{}.{kernels}.yaml", self.cell.op);
        self.tuned_dir.join(table)
    }
}

impl Schema for Config {
    fn take(tree: &mut Mapping) -> Result<Taken> {
        match tree.get_mut("cell") {
            Some(serde_yaml::Value::Mapping(cell)) => Taken::out_of(cell, Scope::Measured, "cell."),
            _ => Ok(Taken::default()),
        }
    }

    fn put(&mut self, taken: Taken) {
        self.cell.put(taken);
    }
}

/// The tiles in `file`; none where there is no such file.
pub(super) fn read_tuned(file: &Path) -> Result<Vec<TunedTile>> {
    let text = match fs::read_to_string(file) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        text => text.with_context(|| format!("cannot read {}", file.display()))?,
    };
    serde_yaml::from_str(&text)
        .with_context(|| format!("{} is not a table of tuned tiles", file.display()))
}
