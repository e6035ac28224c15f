//! The tile, open to the user on every backend.

use crate::{Error, Result};

/// The piece of `[T, V]` that a kernel works on at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tile {
    time_block: usize,
    block_size: usize,
}

impl Tile {
    /// A tile of `time_block` tokens by `block_size` vocabulary columns. Either may exceed the
    /// problem; the last tile of an axis is cut short.
    ///
    /// # Errors
    /// An extent of 0.
    pub fn new(time_block: usize, block_size: usize) -> Result<Self> {
        if time_block == 0 {
            return Err(Error::Tile { name: "time_block" });
        }
        if block_size == 0 {
            return Err(Error::Tile { name: "block_size" });
        }
        Ok(Self { time_block, block_size })
    }

    /// This tile with either extent replaced where one is given.
    ///
    /// # Errors
    /// An extent of 0.
    pub fn with(self, time_block: Option<usize>, block_size: Option<usize>) -> Result<Self> {
        Self::new(time_block.unwrap_or(self.time_block), block_size.unwrap_or(self.block_size))
    }

    /// Tokens per tile.
    #[must_use]
    pub fn time_block(self) -> usize {
        self.time_block
    }

    /// Vocabulary columns per tile.
    #[must_use]
    pub fn block_size(self) -> usize {
        self.block_size
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_an_empty_tile() {
        assert_eq!(
            Tile::new(0, 1).unwrap_err().to_string(),
            "tile time_block is 0; it must be at least 1"
        );
        assert_eq!(
            Tile::new(1, 0).unwrap_err().to_string(),
            "tile block_size is 0; it must be at least 1"
        );
    }
}
