//! RMSNorm: forward, with a residual or without, and backward with partial sums of dweight.
//!
//! A row is walked twice and read from memory once: statistics first, and what is written, from the
//! caches, second. The second walk asks for the next row, so that memory is read throughout. What lies
//! between is a few float64 operations a row.
//!
//! The weight is widened to f32 once a call, into the order that [`Simd::load`]
//! leaves a chunk of the row's dtype in, so that kernels are compiled for each dtype of rows, and not
//! for each pair. Sums of dweight are kept in that order too, until a block is through.

mod backward;
mod forward;
#[cfg(feature = "operation")]
pub(crate) mod operation;
mod passes;
mod ragged;
mod weight;

use xentile::rms_norm::{NormShape, RmsNorm, block_rows};
use xentile::{Element, Error, Result};

use crate::InOut;
pub use crate::Launch;
use crate::parallel::Shared;
use crate::simd::{LINE_BYTES, STREAM_BYTES, Simd};
pub(crate) use backward::Backward;
pub(crate) use forward::Forward;
use passes::Passes;
pub(crate) use weight::Arranged;
pub use weight::Weight;

/// Bytes of a row's dtype in a task: large enough to stream, small enough to share out.
const TASK_BYTES: usize = 1 << 18;

/// Rows that are walked together where registers are many.
const TOGETHER: usize = 4;

/// Bytes of a row's dtype that memory is asked for ahead.
const AHEAD_BYTES: usize = 1 << 13;

/// Terms that a lane sums in f32 before the sum goes to float64, which the contract's error bounds are
/// made of.
const LANE_TERMS: usize = 32;

/// What a backward pass reads and writes, each `[T, D]`: dx may replace x or dy.
#[derive(Debug)]
pub enum Gradient<'a, E> {
    /// In memory of their own.
    Apart {
        /// What was normalised.
        x: &'a [E],
        /// The cotangent of the norm.
        dy: &'a [E],
        /// The gradient.
        dx: &'a mut [E],
    },
    /// dx in the place of x.
    InPlaceOfX {
        /// What was normalised, and then the gradient.
        x: &'a mut [E],
        /// The cotangent of the norm.
        dy: &'a [E],
    },
    /// dx in the place of dy.
    InPlaceOfDy {
        /// What was normalised.
        x: &'a [E],
        /// The cotangent of the norm, and then the gradient.
        dy: &'a mut [E],
    },
}

/// Partial sums of dweight `[G, P, D]`: the rows, in G groups of as many, are cut into P blocks
/// each, as [`block_rows`] says.
#[derive(Debug)]
pub struct PartialSums<'a> {
    /// What is written.
    pub sums: &'a mut [f32],
    /// G, a divisor of the number of rows.
    pub groups: usize,
    /// P, at least 1. A block is one task, so that fewer blocks than threads leave some idle.
    pub blocks: usize,
}

/// RMSNorm of rows `[T, D]` for one weight.
#[derive(Clone, Copy)]
pub struct Kernel<'a> {
    options: RmsNorm,
    shape: NormShape,
    weight: Weight<'a>,
    launch: Launch<'a>,
}

impl<'a> Kernel<'a> {
    /// A kernel for rows of `shape` and a `weight` `[D]`, or `[G, D]`, of which each is for T / G
    /// rows that follow one another.
    ///
    /// # Errors
    /// An option outside its range, or a weight of another shape.
    pub fn new(
        options: RmsNorm,
        shape: NormShape,
        weight: impl Into<Weight<'a>>,
        launch: Launch<'a>,
    ) -> Result<Self> {
        options.validate()?;
        let weight = weight.into();
        shape.weights(weight.len())?;
        Ok(Self { options, shape, weight, launch })
    }

    /// Writes the norm of `x` `[T, D]` to y, its output, and `rstd` `[T]`.
    ///
    /// # Errors
    /// An argument of another shape.
    pub fn forward<E: Element>(&self, x: InOut<'_, E>, rstd: &mut [f32]) -> Result<()> {
        self.run_forward(x, None, rstd)
    }

    /// Writes `x` + `residual`, each `[T, D]`, to the output of `residual`, the norm of that sum to
    /// the output of `x`, and `rstd` `[T]`.
    ///
    /// # Errors
    /// An argument of another shape.
    pub fn add_forward<E: Element>(
        &self,
        x: InOut<'_, E>,
        residual: InOut<'_, E>,
        rstd: &mut [f32],
    ) -> Result<()> {
        self.run_forward(x, Some(residual), rstd)
    }

    fn run_forward<E: Element>(
        &self,
        x: InOut<'_, E>,
        residual: Option<InOut<'_, E>>,
        rstd: &mut [f32],
    ) -> Result<()> {
        let shape = self.shape;
        self.check("x", "y", &x)?;
        residual.as_ref().map_or(Ok(()), |residual| self.check("residual", "sum", residual))?;
        shape.check_rows("rstd", rstd.len())?;
        let mut in_place = matches!(x, InOut::InPlace(_));
        in_place |= matches!(residual, Some(InOut::InPlace(_)));
        let (x, y) = x.into_pointers();
        let rows = forward::Rows {
            options: self.options,
            shape,
            x,
            y,
            add: residual.map(InOut::into_pointers),
            rstd: rstd.as_mut_ptr(),
            weight: &Arranged::new::<E>(self),
            in_place,
        };
        let task = (TASK_BYTES / (shape.columns() * size_of::<E>())).max(1);
        self.launch.pool.run(shape.rows().div_ceil(task), &|index| {
            let first = index * task;
            let end = shape.rows().min(first + task);
            (Passes::get().forward)(self.launch.isa, Forward { rows: &rows, first, end });
        });
        Ok(())
    }

    /// Writes the gradient of what was normalised to dx, from `rstd` `[T]` as the forward pass gave it
    /// and dy, and partial sums of dweight. With `dsum` `[T, D]`, the cotangent of a sum with a
    /// residual, which is what was normalised then, dx is the gradient of both of its terms.
    ///
    /// # Errors
    /// An argument of another shape.
    pub fn backward<E: Element>(
        &self,
        gradient: Gradient<'_, E>,
        rstd: &[f32],
        dsum: Option<&[E]>,
        partial: PartialSums<'_>,
    ) -> Result<()> {
        let shape = self.shape;
        let in_place = !matches!(gradient, Gradient::Apart { .. });
        let (lengths, [x, dy], dx) = match gradient {
            Gradient::Apart { x, dy, dx } => {
                ([x.len(), dy.len(), dx.len()], [x.as_ptr(), dy.as_ptr()], dx.as_mut_ptr())
            }
            Gradient::InPlaceOfX { x, dy } => {
                let dx = x.as_mut_ptr();
                ([x.len(), dy.len(), x.len()], [dx.cast_const(), dy.as_ptr()], dx)
            }
            Gradient::InPlaceOfDy { x, dy } => {
                let dx = dy.as_mut_ptr();
                ([x.len(), dy.len(), dy.len()], [x.as_ptr(), dx.cast_const()], dx)
            }
        };
        for (name, length) in ["x", "dy", "dx"].into_iter().zip(lengths) {
            shape.check_matrix(name, length)?;
        }
        shape.check_rows("rstd", rstd.len())?;
        dsum.map_or(Ok(()), |dsum| shape.check_matrix("dsum", dsum.len()))?;
        let rows_of_block = self.check_partial(&partial)?;
        let PartialSums { sums, groups, blocks } = partial;
        let rows = backward::Rows {
            shape,
            x,
            dy,
            dsum: dsum.map(<[E]>::as_ptr),
            dx,
            rstd,
            weight: &Arranged::new::<E>(self),
            in_place,
        };
        let (sums, columns) = (Shared::new(sums), shape.columns());
        let rows_of_group = shape.rows().checked_div(groups).unwrap_or(0);
        self.launch.pool.run(groups * blocks, &|index| {
            let (group, block) = (index / blocks, index % blocks);
            let within = |block: usize| rows_of_group.min(block * rows_of_block);
            let pass = Backward {
                rows: &rows,
                first: group * rows_of_group + within(block),
                end: group * rows_of_group + within(block + 1),
                // SAFETY: tasks have distinct indices, so their pieces are disjoint.
                sums: unsafe { sums.slice(index * columns, columns) },
            };
            (Passes::get().backward)(self.launch.isa, pass);
        });
        Ok(())
    }

    fn check<E>(
        &self,
        input: &'static str,
        output: &'static str,
        place: &InOut<'_, E>,
    ) -> Result<()> {
        let (read, written) = place.lengths();
        self.shape.check_matrix(input, read)?;
        self.shape.check_matrix(output, written)
    }

    /// The rows of a block.
    fn check_partial(&self, partial: &PartialSums<'_>) -> Result<usize> {
        let (rows, &PartialSums { groups, blocks, .. }) = (self.shape.rows(), partial);
        let wrong = |name, value: usize, requirement| {
            Err(Error::Option { name, value: value as f64, requirement })
        };
        if blocks == 0 {
            return wrong("blocks", blocks, "at least 1");
        }
        if rows > 0 && (groups == 0 || !rows.is_multiple_of(groups)) {
            return wrong("groups", groups, "a divisor of the number of rows");
        }
        let expected = groups.saturating_mul(blocks).saturating_mul(self.shape.columns());
        if partial.sums.len() != expected {
            let actual = partial.sums.len();
            return Err(Error::Length { name: "dweight", actual, axes: "[G, P, D]", expected });
        }
        Ok(block_rows(rows.checked_div(groups).unwrap_or(0), blocks))
    }
}

/// Whether an output, which is not in the place of an input, goes past the caches: it is too large for
/// them, and all of its rows begin on a line.
#[inline(always)]
fn streams<S: Simd, E>(shape: NormShape, output: *const E) -> bool {
    let row = shape.columns() * size_of::<E>();
    S::STREAMS
        && shape.rows() * row >= STREAM_BYTES
        && row.is_multiple_of(LINE_BYTES)
        && output.addr().is_multiple_of(LINE_BYTES)
}

/// Rows that are walked together, so that the weight, and sums of dweight, come from the caches once for
/// all of them. With few registers it is one: their state would not stay in them, and lines that are
/// written in halves would be so many at a time.
const fn together<S: Simd>() -> usize {
    if S::REGISTERS == 32 { TOGETHER } else { 1 }
}

/// How many elements before they are read memory is asked for those of `count` rows of `columns`: whole
/// groups of them, and far enough for its latency.
#[inline(always)]
fn elements_ahead<E>(count: usize, columns: usize) -> usize {
    let group = count * columns;
    group * (AHEAD_BYTES / (group * size_of::<E>())).max(1)
}

/// Asks for a chunk that is soon to be read.
#[inline(always)]
fn fetch<S: Simd, E>(s: S, chunk: *const E) {
    for line in (0..S::CHUNK * size_of::<E>()).step_by(LINE_BYTES) {
        s.prefetch(chunk.cast::<u8>().wrapping_add(line));
    }
}
