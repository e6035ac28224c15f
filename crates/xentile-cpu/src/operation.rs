//! Kernels as tools run them, which know no operation by name.

use std::sync::{Mutex, PoisonError};

use xentile::operation::{Arrays, Pass, Problem};
use xentile::{Result, Tile};

pub use crate::Launch;
use crate::Parallel;

/// The kernels of an operation.
pub trait Kernels: Sync {
    /// The operation's name.
    fn name(&self) -> &'static str;

    /// The tile of `problem`, with the tuned one for what it leaves open; none where there are no tiles.
    ///
    /// # Errors
    /// An extent of 0.
    fn tile(&self, problem: &Problem) -> Result<Option<Tile>> {
        _ = problem;
        Ok(None)
    }

    /// The kernels on `inputs`.
    ///
    /// # Errors
    /// Inputs that do not fit `problem`; a tile of 0.
    fn open<'a>(
        &self,
        problem: &'a Problem,
        inputs: &'a Arrays<'a>,
        launch: Launch<'a>,
    ) -> Result<Box<dyn Run + 'a>>;

    /// The same written plainly and not tiled, to measure against; none where there is no such thing.
    fn dense<'a>(
        &self,
        problem: &'a Problem,
        inputs: &'a Arrays<'a>,
        pool: &'a dyn Parallel,
    ) -> Option<Box<dyn Run + 'a>> {
        _ = (problem, inputs, pool);
        None
    }
}

/// An operation on inputs, ready to run.
pub trait Run {
    /// Runs `pass` for what it is `given`, and fills those of its results that are in `results`. What a
    /// forward pass leaves for [`Pass::Backward`] is kept.
    ///
    /// # Errors
    /// The kernel refuses.
    fn run(&mut self, pass: Pass, given: &Arrays<'_>, results: &mut Arrays<'_>) -> Result<()>;
}

/// Calls `work` with every one of `pieces` and its number, spread over `pool`.
pub fn for_each<T: Send>(
    pool: &dyn Parallel,
    pieces: impl Iterator<Item = T>,
    work: impl Fn(usize, T) + Sync,
) {
    // A lock that nobody else ever wants hands each piece to the one task that has its number.
    let pieces: Vec<_> = pieces.map(|piece| Mutex::new(Some(piece))).collect();
    pool.run(pieces.len(), &|index| {
        let piece = pieces[index].lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(piece) = piece {
            work(index, piece);
        }
    });
}
