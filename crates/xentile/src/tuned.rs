//! Tiles found by sweeps, carried as data: `tuned/<op>.<backend>.yaml`, which is `configs/tuned/`.

use std::collections::BTreeMap;
use std::sync::OnceLock;

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

/// The tables that this crate carries, a line for each operation and backend.
const TABLES: &[(&str, &str)] = &[
    ("cross_entropy.cpu", include_str!("../tuned/cross_entropy.cpu.yaml")),
    ("cross_entropy.cuda", include_str!("../tuned/cross_entropy.cuda.yaml")),
    ("linear_cross_entropy.cpu", include_str!("../tuned/linear_cross_entropy.cpu.yaml")),
];

/// Every tile carried for `table`, which is named `<op>.<backend>`; none where no sweep was kept.
///
/// # Panics
/// Never: the tables are parsed by this crate's tests.
#[must_use]
pub fn tuned_tiles(table: &str) -> &'static [TunedTile] {
    static PARSED: OnceLock<BTreeMap<&str, Vec<TunedTile>>> = OnceLock::new();
    let parsed = PARSED.get_or_init(|| {
        let parse = |text| serde_yaml::from_str(text).expect("carried tables parse");
        TABLES.iter().map(|&(name, text)| (name, parse(text))).collect()
    });
    parsed.get(table).map_or(&[], Vec::as_slice)
}

/// The tile to use for `dtype` logits of `vocab` columns where the user names none: the one found
/// at the nearest vocabulary (by ratio) of the same dtype.
///
/// # Errors
/// The table holds a tile of 0.
pub fn tuned_tile(table: &str, dtype: DType, vocab: usize) -> Result<Option<Tile>> {
    let distance = |row: &&TunedTile| ((row.vocab as f64).ln() - (vocab as f64).ln()).abs();
    let rows = tuned_tiles(table).iter().filter(|row| row.dtype == dtype.name());
    let nearest = rows.min_by(|a, b| distance(a).total_cmp(&distance(b)));
    nearest.map(|row| Tile::new(row.time_block, row.block_size)).transpose()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_carried_table_holds_usable_tiles() {
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
}
