//! RMSNorm and LayerNorm: forward, and backward with partial sums of dweight and dbias. Rows of LayerNorm
//! are *centred*: their mean is subtracted first, and a bias is added.
//!
//! A row is read from memory once, and again from the caches: first for its statistics, in one pass or, for
//! centred rows, in two, then for the output. The output pass prefetches the next row, so that memory is
//! read throughout. Between the passes are a few float64 operations a row.
//!
//! The weight is converted to f32 once a call, in the element order of [`Simd::load`] for the row's dtype,
//! so that kernels are compiled for each dtype of rows, and not for each pair of dtypes. Partial sums have
//! that order too, until the end of a block.

mod backward;
mod forward;
#[cfg(feature = "operation")]
pub(crate) mod operation;
mod passes;
mod ragged;
mod weight;

use xentile::norm::{Kind, Norm, NormShape, block_rows};
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

/// Matrices of a backward pass, each `[T, D]`: dx may replace x or dy. x is the normalised array, and dy the
/// cotangent of y.
#[derive(Debug)]
pub enum Gradient<'a, E> {
    /// Each in its own memory.
    Apart {
        /// Read.
        x: &'a [E],
        /// Read.
        dy: &'a [E],
        /// Written.
        dx: &'a mut [E],
    },
    /// dx replaces x.
    InPlaceOfX {
        /// Read, then overwritten by dx.
        x: &'a mut [E],
        /// Read.
        dy: &'a [E],
    },
    /// dx replaces dy.
    InPlaceOfDy {
        /// Read.
        x: &'a [E],
        /// Read, then overwritten by dx.
        dy: &'a mut [E],
    },
}

/// Partial sums `[G, P, D]` of dweight: the rows, in G groups of equal size, are cut into P blocks each, as
/// [`block_rows`] says.
#[derive(Debug)]
pub struct PartialSums<'a> {
    /// The output.
    pub sums: &'a mut [f32],
    /// G, a divisor of the number of rows.
    pub groups: usize,
    /// P, at least 1. A block is one task, so that fewer blocks than threads leave threads idle.
    pub blocks: usize,
}

/// The statistics of rows, which the forward pass writes and the backward pass reads: each `[T]`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Statistics<T> {
    /// The means; empty for RMSNorm.
    pub mean: T,
    /// One over each root.
    pub rstd: T,
}

impl<T: Default> Statistics<T> {
    /// The statistics of RMSNorm.
    pub fn rms(rstd: T) -> Self {
        Self { mean: T::default(), rstd }
    }
}

/// A norm of rows `[T, D]` with one weight.
#[derive(Clone, Copy)]
pub struct Kernel<'a> {
    norm: Norm,
    shape: NormShape,
    weight: Weight<'a>,
    launch: Launch<'a>,
}

impl<'a> Kernel<'a> {
    /// A kernel for rows of `shape` and a `weight` `[D]`, or `[G, D]`, each for T / G consecutive rows.
    ///
    /// # Errors
    /// An option outside its range, or a weight of another shape.
    pub fn new(
        norm: Norm,
        shape: NormShape,
        weight: impl Into<Weight<'a>>,
        launch: Launch<'a>,
    ) -> Result<Self> {
        norm.validate()?;
        let weight = weight.into();
        shape.weights("weight", weight.len())?;
        Ok(Self { norm, shape, weight, launch })
    }

    /// Writes the norm of `x` `[T, D]` to y, its output, and statistics. RMSNorm may have a `residual`
    /// `[T, D]`: the normalised array is then their sum, which is written to the output of `residual`.
    /// LayerNorm may have a `bias` of any dtype, `[D]` or `[G, D]` as the weight may be.
    ///
    /// # Errors
    /// An argument of another shape, a residual of LayerNorm or a bias of RMSNorm.
    pub fn forward<E: Element>(
        &self,
        x: InOut<'_, E>,
        residual: Option<InOut<'_, E>>,
        bias: Option<Weight<'_>>,
        statistics: Statistics<&mut [f32]>,
    ) -> Result<()> {
        let shape = self.shape;
        self.check("x", "y", &x)?;
        if let Some(residual) = &residual {
            self.check_kind("residual", Kind::Rms)?;
            self.check("residual", "sum", residual)?;
        }
        let Statistics { mean, rstd } = statistics;
        shape.check_rows("rstd", rstd.len())?;
        self.check_mean(mean.len())?;
        if let Some(bias) = bias {
            self.check_kind("bias", Kind::Layer)?;
            shape.weights("bias", bias.len())?;
        }
        let mut in_place = matches!(x, InOut::InPlace(_));
        in_place |= matches!(residual, Some(InOut::InPlace(_)));
        let (x, y) = x.into_pointers();
        let bias = match bias {
            Some(bias) => Arranged::new::<E>(self, bias, false),
            None => Arranged::zeros(shape),
        };
        let rows = forward::Rows {
            norm: self.norm,
            shape,
            x,
            y,
            add: residual.map(InOut::into_pointers),
            rstd: rstd.as_mut_ptr(),
            weight: &Arranged::new::<E>(self, self.weight, self.norm.zero_centred),
            centring: self.is_centred().then_some((&bias, mean.as_mut_ptr())),
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

    /// Writes the gradient of the normalised array to dx, and partial sums of dweight and, for LayerNorm, of
    /// dbias to `dbias`, cut as those of dweight; `dbias` is empty for RMSNorm. With `dsum` `[T, D]`, the
    /// cotangent of the sum with a residual, dx is the gradient of both terms.
    ///
    /// # Errors
    /// An argument of another shape, or a `dsum` of LayerNorm.
    pub fn backward<E: Element>(
        &self,
        gradient: Gradient<'_, E>,
        statistics: Statistics<&[f32]>,
        dsum: Option<&[E]>,
        partial: PartialSums<'_>,
        dbias: &mut [f32],
    ) -> Result<()> {
        let (shape, Statistics { mean, rstd }) = (self.shape, statistics);
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
        self.check_mean(mean.len())?;
        if let Some(dsum) = dsum {
            self.check_kind("dsum", Kind::Rms)?;
            shape.check_matrix("dsum", dsum.len())?;
        }
        let PartialSums { sums, groups, blocks } = partial;
        let block_rows = self.check_partial("dweight", sums.len(), groups, blocks)?;
        if self.is_centred() {
            self.check_partial("dbias", dbias.len(), groups, blocks)?;
        } else if !dbias.is_empty() {
            self.check_kind("dbias", Kind::Layer)?;
        }
        let rows = backward::Rows {
            shape,
            x,
            dy,
            dsum: dsum.map(<[E]>::as_ptr),
            dx,
            mean: self.is_centred().then_some(mean),
            rstd,
            weight: &Arranged::new::<E>(self, self.weight, self.norm.zero_centred),
            in_place,
        };
        let (sums, dbias) = (Shared::new(sums), Shared::new(dbias));
        let columns = shape.columns();
        let group_rows = shape.rows().checked_div(groups).unwrap_or(0);
        self.launch.pool.run(groups * blocks, &|index| {
            let (group, block) = (index / blocks, index % blocks);
            let row_of = |block: usize| group * group_rows + group_rows.min(block * block_rows);
            let (first, end) = (row_of(block), row_of(block + 1));
            // SAFETY: tasks have distinct indices, so their pieces are disjoint.
            let sums = unsafe { sums.slice(index * columns, columns) };
            let (isa, passes, rows) = (self.launch.isa, Passes::get(), &rows);
            if self.is_centred() {
                // SAFETY: as above.
                let dbias = unsafe { dbias.slice(index * columns, columns) };
                (passes.centred_backward)(isa, Backward { rows, first, end, sums, dbias });
            } else {
                (passes.backward)(isa, Backward { rows, first, end, sums, dbias: &mut [] });
            }
        });
        Ok(())
    }

    fn is_centred(&self) -> bool {
        self.norm.kind == Kind::Layer
    }

    /// Refuses the array `name` unless the norm is of `kind`.
    fn check_kind(&self, name: &str, kind: Kind) -> Result<()> {
        if self.norm.kind == kind {
            return Ok(());
        }
        Err(Error::Invalid(format!("{name} is passed; only norms of kind {kind:?} have one")))
    }

    fn check_mean(&self, length: usize) -> Result<()> {
        match self.norm.kind {
            Kind::Layer => self.shape.check_rows("mean", length),
            Kind::Rms if length == 0 => Ok(()),
            Kind::Rms => self.check_kind("mean", Kind::Layer),
        }
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

    /// The rows of a block of the partial sums called `name`, of `length` elements.
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
