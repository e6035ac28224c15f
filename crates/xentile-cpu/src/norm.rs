//! Rows over a root of theirs, times a weight: what [`rms_norm`](crate::rms_norm) and
//! [`layer_norm`](crate::layer_norm) share. Rows of the latter are *centred*: their mean is taken off
//! first, and a bias is added.
//!
//! A row is read from memory once, and walked again in the caches: statistics first, in one walk or, of
//! rows that are centred, in two, and what is written last. That walk asks for the next row, so that
//! memory is read throughout. What lies between is a few float64 operations a row.
//!
//! The weight is widened to f32 once a call, into the order that [`Simd::load`]
//! leaves a chunk of the row's dtype in, so that kernels are compiled for each dtype of rows, and not
//! for each pair. Partial sums are kept in that order too, until a block is through.

mod backward;
mod forward;
#[cfg(feature = "operation")]
mod operation;
mod passes;
mod ragged;
mod weight;

use xentile::norm::{NormShape, block_rows};
use xentile::{Element, Error, Result};

use crate::InOut;
use crate::Launch;
use crate::parallel::Shared;
use crate::simd::{LINE_BYTES, STREAM_BYTES, Simd};
pub(crate) use backward::Backward;
pub(crate) use forward::Forward;
#[cfg(feature = "operation")]
pub(crate) use operation::{BLOCKS, add_up};
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

/// Partial sums `[G, P, D]`: the rows, in G groups of as many, are cut into P blocks
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

/// Rows `[T, D]` and the weight that they have.
#[derive(Clone, Copy)]
pub(crate) struct Norm<'a> {
    eps: f64,
    zero_centred: bool,
    shape: NormShape,
    weight: Weight<'a>,
    launch: Launch<'a>,
}

/// What rows that are centred have beside the others.
pub(crate) struct Centring<'a> {
    /// `[D]` or as many as there may be of the weight; none is zeros.
    pub(crate) bias: Option<Weight<'a>>,
    /// `[T]`.
    pub(crate) mean: &'a mut [f32],
}

/// The same in the backward pass.
pub(crate) struct Centred<'a> {
    /// `[T]`, as the forward pass gave it.
    pub(crate) mean: &'a [f32],
    /// Of dbias, cut as those of dweight are.
    pub(crate) sums: &'a mut [f32],
}

impl<'a> Norm<'a> {
    /// Rows of `shape` and a `weight` `[D]`, or `[G, D]`, of which each is for T / G rows that follow one
    /// another. With `zero_centred` the weight is what a factor is above 1.
    ///
    /// # Errors
    /// A weight of another shape.
    pub(crate) fn new(
        eps: f64,
        zero_centred: bool,
        shape: NormShape,
        weight: Weight<'a>,
        launch: Launch<'a>,
    ) -> Result<Self> {
        shape.weights("weight", weight.len())?;
        Ok(Self { eps, zero_centred, shape, weight, launch })
    }

    /// Writes the norm of `x` to its output, or of its sum with `residual`, which is written to the output
    /// of that, and statistics. Rows are centred where there is `centring`, and have no residual then.
    ///
    /// # Errors
    /// An argument of another shape.
    pub(crate) fn forward<E: Element>(
        &self,
        x: InOut<'_, E>,
        residual: Option<InOut<'_, E>>,
        centring: Option<Centring<'_>>,
        rstd: &mut [f32],
    ) -> Result<()> {
        assert!(residual.is_none() || centring.is_none(), "no pass adds and centres");
        let shape = self.shape;
        self.check("x", "y", &x)?;
        residual.as_ref().map_or(Ok(()), |residual| self.check("residual", "sum", residual))?;
        shape.check_rows("rstd", rstd.len())?;
        if let Some(Centring { bias, mean }) = &centring {
            shape.check_rows("mean", mean.len())?;
            bias.map_or(Ok(0), |bias| shape.weights("bias", bias.len()))?;
        }
        let mut in_place = matches!(x, InOut::InPlace(_));
        in_place |= matches!(residual, Some(InOut::InPlace(_)));
        let (x, y) = x.into_pointers();
        let bias = centring.as_ref().map(|centring| match centring.bias {
            Some(bias) => Arranged::new::<E>(self, bias, false),
            None => Arranged::zeros(shape),
        });
        let rows = forward::Rows {
            eps: self.eps,
            shape,
            x,
            y,
            add: residual.map(InOut::into_pointers),
            rstd: rstd.as_mut_ptr(),
            weight: &Arranged::new::<E>(self, self.weight, self.zero_centred),
            centring: bias
                .as_ref()
                .zip(centring)
                .map(|(bias, centring)| (bias, centring.mean.as_mut_ptr())),
            in_place,
        };
        let task = (TASK_BYTES / (shape.columns() * size_of::<E>())).max(1);
        self.launch.pool.run(shape.rows().div_ceil(task), &|index| {
            let first = index * task;
            let end = shape.rows().min(first + task);
            let (isa, passes, rows) = (self.launch.isa, Passes::get(), &rows);
            match rows.centring {
                None => (passes.forward)(isa, Forward { rows, first, end }),
                Some(_) => (passes.centred_forward)(isa, Forward { rows, first, end }),
            }
        });
        Ok(())
    }

    /// Writes the gradient of what was normalised to dx, plus `dsum` `[T, D]` where there is any, from
    /// statistics as the forward pass gave them and dy, and partial sums of dweight. Rows are centred
    /// where there is `centred`, and have no dsum then.
    ///
    /// # Errors
    /// An argument of another shape.
    pub(crate) fn backward<E: Element>(
        &self,
        gradient: Gradient<'_, E>,
        centred: Option<Centred<'_>>,
        rstd: &[f32],
        dsum: Option<&[E]>,
        partial: PartialSums<'_>,
    ) -> Result<()> {
        assert!(dsum.is_none() || centred.is_none(), "no pass adds and centres");
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
        let PartialSums { sums, groups, blocks } = partial;
        let rows_of_block = self.check_partial("dweight", sums.len(), groups, blocks)?;
        if let Some(Centred { mean, sums }) = &centred {
            shape.check_rows("mean", mean.len())?;
            self.check_partial("dbias", sums.len(), groups, blocks)?;
        }
        let (mean, of_bias) = centred.map(|Centred { mean, sums }| (mean, sums)).unzip();
        let rows = backward::Rows {
            shape,
            x,
            dy,
            dsum: dsum.map(<[E]>::as_ptr),
            dx,
            mean,
            rstd,
            weight: &Arranged::new::<E>(self, self.weight, self.zero_centred),
            in_place,
        };
        let (sums, of_bias) = (Shared::new(sums), of_bias.map(Shared::new));
        let columns = shape.columns();
        let rows_of_group = shape.rows().checked_div(groups).unwrap_or(0);
        self.launch.pool.run(groups * blocks, &|index| {
            let (group, block) = (index / blocks, index % blocks);
            let within = |block: usize| rows_of_group.min(block * rows_of_block);
            // SAFETY: tasks have distinct indices, so their pieces are disjoint.
            let [sums, of_bias] = unsafe {
                let of_bias = of_bias.as_ref().map(|all| all.slice(index * columns, columns));
                [sums.slice(index * columns, columns), of_bias.unwrap_or_default()]
            };
            let first = group * rows_of_group + within(block);
            let end = group * rows_of_group + within(block + 1);
            let (isa, passes, rows) = (self.launch.isa, Passes::get(), &rows);
            match rows.mean {
                None => (passes.backward)(isa, Backward { rows, first, end, sums, of_bias }),
                Some(_) => {
                    (passes.centred_backward)(isa, Backward { rows, first, end, sums, of_bias });
                }
            }
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

    /// The rows of a block of partial sums called `name`, of which there are `length` numbers.
    fn check_partial(
        &self,
        name: &'static str,
        length: usize,
        groups: usize,
        blocks: usize,
    ) -> Result<usize> {
        let rows = self.shape.rows();
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
        if length != expected {
            return Err(Error::Length { name, actual: length, axes: "[G, P, D]", expected });
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
