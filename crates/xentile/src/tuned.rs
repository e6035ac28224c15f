//! Measured choices, carried as data in `tuned/`, which is `configs/tuned/`: the best tiles of sweeps
//! (`<op>.<backend>.yaml`), and whether an operation's kernel or XLA's program is faster
//! (`implementations.<backend>.yaml`).

use std::collections::BTreeMap;
use std::sync::OnceLock;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::{DType, Result, Tile};

/// One tile that a sweep found best.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct TunedTile {
    /// The dtype of the logits, or of the hidden states, swept.
    pub dtype: String,
    /// The vocabulary swept.
    pub vocab: usize,
    /// Best tokens per tile.
    pub time_block: usize,
    /// Best vocabulary columns per tile.
    pub block_size: usize,
    /// Where it was measured: a processor's name.
    pub device: String,
    /// On GPUs, the pass that was measured: `forward`, `backward` or `fused`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pass: Option<String>,
    /// On GPUs, warps of a CTA.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warps: Option<u32>,
    /// On GPUs, CTAs that share a row.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cluster: Option<u32>,
}

/// What runs if the user names no implementation.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq)]
#[serde(rename_all = "lowercase")]
pub enum Implementation {
    /// This project's kernel.
    Kernel,
    /// XLA's own program.
    Xla,
}

/// Measurements of a variant of an operation inside a jitted transformer block. Times are relative to
/// those of the block with XLA's program (geometric means over shapes).
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct TunedImplementation {
    /// The operation's name.
    pub operation: String,
    /// The variant, such as `silu halves`; empty if the operation has none.
    pub variant: String,
    /// What runs.
    pub implementation: Implementation,
    /// Forward time of the block with the kernel.
    pub forward: f64,
    /// Forward and backward time.
    pub both: f64,
    /// Bytes of temporaries forward and backward, likewise relative.
    pub temporaries: f64,
    /// Where it was measured: a GPU's name.
    pub device: String,
}

/// The tables of implementations, a line for each backend.
const IMPLEMENTATIONS: &[(&str, &str)] =
    &[("cuda", include_str!("../tuned/implementations.cuda.yaml"))];

/// Returns all measurements for a backend; empty if there are none.
///
/// # Panics
/// Never: the tables are parsed by this crate's tests.
#[must_use]
pub fn tuned_implementations(backend: &str) -> &'static [TunedImplementation] {
    static PARSED: OnceLock<Parsed<TunedImplementation>> = OnceLock::new();
    rows(PARSED.get_or_init(|| parse(IMPLEMENTATIONS)), backend)
}

/// Returns what runs for a variant of an operation on a backend if the user names no implementation: the
/// kernel if nothing was measured.
#[must_use]
pub fn tuned_implementation(backend: &str, operation: &str, variant: &str) -> Implementation {
    tuned_implementations(backend)
        .iter()
        .find(|row| row.operation == operation && row.variant == variant)
        .map_or(Implementation::Kernel, |row| row.implementation)
}

/// The tables of tiles that this crate carries, a line for each operation and backend.
const TABLES: &[(&str, &str)] = &[
    ("cross_entropy.cpu", include_str!("../tuned/cross_entropy.cpu.yaml")),
    ("cross_entropy.cuda", include_str!("../tuned/cross_entropy.cuda.yaml")),
    ("linear_cross_entropy.cpu", include_str!("../tuned/linear_cross_entropy.cpu.yaml")),
];

/// Returns the tiles of `table`, which is named `<op>.<backend>`; empty if there is no such table.
///
/// # Panics
/// Never: the tables are parsed by this crate's tests.
#[must_use]
pub fn tuned_tiles(table: &str) -> &'static [TunedTile] {
    static PARSED: OnceLock<Parsed<TunedTile>> = OnceLock::new();
    rows(PARSED.get_or_init(|| parse(TABLES)), table)
}

/// Returns the tile for `dtype` logits of `vocab` columns if the user names none: the best tile at the
/// nearest measured vocabulary (by ratio) of the same dtype.
///
/// # Errors
/// The table holds a tile of 0.
pub fn tuned_tile(table: &str, dtype: DType, vocab: usize) -> Result<Option<Tile>> {
    let distance = |row: &&TunedTile| ((row.vocab as f64).ln() - (vocab as f64).ln()).abs();
    let rows = tuned_tiles(table).iter().filter(|row| row.dtype == dtype.name());
    let nearest = rows.min_by(|a, b| distance(a).total_cmp(&distance(b)));
    nearest.map(|row| Tile::new(row.time_block, row.block_size)).transpose()
}

/// Parsed tables by their names.
type Parsed<T> = BTreeMap<&'static str, Vec<T>>;

fn parse<T: DeserializeOwned>(tables: &[(&'static str, &str)]) -> Parsed<T> {
    let parse = |text| serde_yaml::from_str(text).expect("carried tables parse");
    tables.iter().map(|&(name, text)| (name, parse(text))).collect()
}

fn rows<'a, T>(parsed: &'a Parsed<T>, table: &str) -> &'a [T] {
    parsed.get(table).map_or(&[], Vec::as_slice)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tuned_tables_hold_valid_tiles() {
        for (table, _) in TABLES {
            assert!(!tuned_tiles(table).is_empty(), "{table} is empty");
            for row in tuned_tiles(table) {
                let dtype = row.dtype.parse().expect("a known dtype");
                assert!(tuned_tile(table, dtype, row.vocab).unwrap().is_some());
                assert!(!row.device.is_empty(), "{table}: a tile without its device");
            }
        }
        assert_eq!(tuned_tiles("no_such.backend"), []);
    }

    #[test]
    fn tuned_implementations_match_their_figures() {
        for (backend, _) in IMPLEMENTATIONS {
            let rows = tuned_implementations(backend);
            assert!(!rows.is_empty(), "{backend} is empty");
            for (at, row) in rows.iter().enumerate() {
                let name = (&row.operation, &row.variant);
                let is_other =
                    |other: &TunedImplementation| (&other.operation, &other.variant) != name;
                assert!(rows[..at].iter().all(is_other), "{backend}: {name:?} stands twice");
                assert!(row.forward > 0.0 && row.temporaries > 0.0 && !row.device.is_empty());
                // Within noise of XLA's time either may run (benches/peers/blocks.py).
                let kernel = row.implementation == Implementation::Kernel;
                assert!((row.both - 1.0).abs() <= 0.01 || kernel == (row.both < 1.0), "{row:?}");
                let found = tuned_implementation(backend, &row.operation, &row.variant);
                assert_eq!(found, row.implementation);
            }
        }
        assert_eq!(tuned_implementations("no_such"), []);
        assert_eq!(tuned_implementation("cuda", "no_such", ""), Implementation::Kernel);
    }
}
