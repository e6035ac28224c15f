//! One problem of an operation.

use std::collections::BTreeMap;

use super::{DimSpec, Value};
use crate::{DType, Result, Tile};

/// What a dim of an array is a multiple of: how often, 1 where nothing is before the letter, and the
/// letter.
#[must_use]
pub fn multiple(dim: &str) -> (usize, &str) {
    let letter = dim.trim_start_matches(|c: char| c.is_ascii_digit());
    (dim[..dim.len() - letter.len()].parse().unwrap_or(1), letter)
}

/// The extents of a tile that were named.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TileExtents {
    /// Tokens of a tile.
    pub time_block: Option<usize>,
    /// Columns of a tile.
    pub block_size: Option<usize>,
}

impl TileExtents {
    /// The tile, with `default` for what is left open.
    ///
    /// # Errors
    /// An extent of 0.
    pub fn resolve(self, default: Tile) -> Result<Tile> {
        default.with(self.time_block, self.block_size)
    }
}

impl From<Tile> for TileExtents {
    fn from(tile: Tile) -> Self {
        Self { time_block: Some(tile.time_block()), block_size: Some(tile.block_size()) }
    }
}

/// What an operation is asked for.
#[derive(Clone, Debug, PartialEq)]
pub struct Problem {
    /// Extents by the letters of dims.
    pub dims: Vec<(&'static str, usize)>,
    /// The dtype of arrays that have no other.
    pub dtype: DType,
    /// Every option of the operation, by name.
    pub options: BTreeMap<&'static str, Value>,
    /// The tile.
    pub tile: TileExtents,
    /// The cotangent of the scalar, where there is one.
    pub cotangent: f64,
}

impl Problem {
    /// The extent of the dim `letter`, or of so many as are before it, as in `2F`; 1 for a letter that the
    /// problem does not have. Of `D/block_size` it is how many parts there are, the last of which may be
    /// shorter, where the option `block_size` says how long one is, and of the name of an option what that counts.
    #[must_use]
    pub fn dim(&self, letter: &str) -> usize {
        if let Some((letter, option)) = letter.split_once('/') {
            let part = self.integer(option).and_then(|part| usize::try_from(part).ok());
            return self.dim(letter).div_ceil(part.unwrap_or(1).max(1));
        }
        let (times, letter) = multiple(letter);
        times * self.extent(letter)
    }

    fn extent(&self, letter: &str) -> usize {
        let named = self.dims.iter().find(|(name, _)| *name == letter).map(|(_, extent)| *extent);
        let counted = || self.integer(letter).and_then(|count| usize::try_from(count).ok());
        named.or_else(counted).unwrap_or(1)
    }

    /// The product of the extents of `dims`, as far as there are addresses.
    #[must_use]
    pub fn elements(&self, dims: &[DimSpec]) -> Option<u64> {
        dims.iter().try_fold(1_u64, |n, dim| n.checked_mul(self.dim(dim.letter) as u64))
    }

    /// An option; [`Value::Absent`] where the operation has none of that name.
    #[must_use]
    pub fn option(&self, name: &str) -> Value {
        self.options.get(name).copied().unwrap_or(Value::Absent)
    }

    /// Whether the option `name` is set to true.
    #[must_use]
    pub fn flag(&self, name: &str) -> bool {
        self.option(name) == Value::Bool(true)
    }

    /// An option that is a number; none where it is absent.
    #[must_use]
    pub fn number(&self, name: &str) -> Option<f64> {
        match self.option(name) {
            Value::Number(number) => Some(number),
            Value::Integer(number) => Some(number as f64),
            _ => None,
        }
    }

    /// An option that is an integer; none where it is absent.
    #[must_use]
    pub fn integer(&self, name: &str) -> Option<i64> {
        match self.option(name) {
            Value::Integer(number) => Some(number),
            _ => None,
        }
    }

    /// An option that is one of a few words; empty where it is absent.
    #[must_use]
    pub fn word(&self, name: &str) -> &'static str {
        match self.option(name) {
            Value::Word(word) => word,
            _ => "",
        }
    }
}
