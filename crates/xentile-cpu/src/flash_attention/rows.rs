//! Passes over rows of logits, `[rows, columns]` of a block and a tile: whole chunks of every
//! instruction set.

use std::ops::Range;

use xentile::Element;
use xentile::flash_attention::FlashAttention;

use super::tiles::{Block, HeadView, Tile};
use crate::convert::{elements, narrow_rows};
use crate::math::{EXP_SCALE, capped_with_derivative, exp};
use crate::product::{Left, Matrix, Panels};
use crate::{Isa, Job, Simd};

/// What makes logits of products, in f32.
#[derive(Clone, Copy)]
pub(super) struct Scaling {
    scale: f32,
    /// c and 1 / c.
    cap: Option<[f32; 2]>,
}

impl From<FlashAttention> for Scaling {
    fn from(options: FlashAttention) -> Self {
        let cap = options.softcap.map(|cap| [cap as f32, 1.0 / cap as f32]);
        Self { scale: options.scale as f32, cap }
    }
}

impl Scaling {
    /// What gradients by products are multiplied with.
    pub(super) fn scale(self) -> f32 {
        self.scale
    }

    /// The logits of a chunk of products, and their derivative by the product times the scale.
    #[inline(always)]
    fn logits<S: Simd>(self, s: S, raw: [S::Vector; 2]) -> [[S::Vector; 2]; 2] {
        let scaled = raw.map(|x| s.mul(x, s.splat(self.scale)));
        match self.cap {
            None => [scaled, [s.splat(1.0); 2]],
            Some(cap) => capped_with_derivative(s, scaled, cap.map(|x| s.splat(x))),
        }
    }
}

/// What the rows of a block see of a tile.
pub(super) struct Seen<'a> {
    view: &'a HeadView<'a>,
    rows: Range<usize>,
    first_key: usize,
    columns: usize,
    /// Segments of the tile's keys, where not all are that of all rows.
    segments: Option<&'a [i32]>,
}

impl<'a> Seen<'a> {
    pub(super) fn new(view: &'a HeadView<'a>, block: &Block, tile: &Tile) -> Self {
        let segments = view.segments.filter(|_| !view.is_uniform(block, tile));
        Self {
            view,
            rows: block.rows.clone(),
            first_key: tile.keys.start,
            columns: block.columns(tile),
            segments: segments.map(|[_, of_keys]| &of_keys[tile.keys.clone()]),
        }
    }

    /// The columns of row `row` of the block, of one segment or not.
    #[inline(always)]
    fn columns(&self, row: usize) -> Range<usize> {
        let keys = self.view.keys(self.rows.start + row);
        let within = |key: usize| key.saturating_sub(self.first_key).min(self.columns);
        within(keys.start)..within(keys.end)
    }

    /// Whether row `row` sees a column.
    fn sees(&self, row: usize, column: usize) -> bool {
        let is_own = match (self.segments, self.view.segments) {
            (Some(of_keys), Some([of_queries, _])) => {
                of_keys[column] == of_queries[self.view.query(self.rows.start + row)]
            }
            _ => true,
        };
        is_own && self.columns(row).contains(&column)
    }

    /// Adds to sums `[rows, width]` the products of `factors` `[rows, columns]` with rows of keys or
    /// values `all` `[K, width]` that are not finite, `unfit`: of 0 times such a row, where it is not
    /// seen, nothing.
    pub(super) fn add_unfit_keys<E: Element>(
        &self,
        unfit: &[usize],
        factors: &[f32],
        all: &[E],
        width: usize,
        sums: &mut [f32],
    ) {
        for &column in unfit {
            let from = &all[(self.first_key + column) * width..][..width];
            for (row, to) in sums.chunks_exact_mut(width).enumerate() {
                if self.sees(row, column) {
                    add(factors[row * self.columns + column], from, to);
                }
            }
        }
    }

    /// The same of sums `[columns, width]` and rows `all` `[rows, width]` of the block.
    pub(super) fn add_unfit_rows<E: Element>(
        &self,
        unfit: &[usize],
        factors: &[f32],
        all: &[E],
        width: usize,
        sums: &mut [f32],
    ) {
        for &row in unfit {
            let from = &all[row * width..][..width];
            for column in self.columns(row).filter(|&column| self.sees(row, column)) {
                let to = &mut sums[column * width..][..width];
                add(factors[row * self.columns + column], from, to);
            }
        }
    }

    /// Overwrites what row `row` does not see of `all`: in chunks from the column `chunks.start` to
    /// `chunks.end`.
    #[inline(always)]
    fn hide(&self, row: usize, chunks: &Range<usize>, all: &mut [f32], with: f32) {
        let seen = self.columns(row);
        all[chunks.start..seen.start].fill(with);
        all[seen.end..chunks.end].fill(with);
        if let (Some(of_keys), Some([of_queries, _])) = (self.segments, self.view.segments) {
            let own = of_queries[self.view.query(self.rows.start + row)];
            for (x, &segment) in all[seen.clone()].iter_mut().zip(&of_keys[seen]) {
                *x = if segment == own { *x } else { with };
            }
        }
    }
}

/// Adds a multiple of a row.
fn add<E: Element>(factor: f32, from: &[E], to: &mut [f32]) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to += factor * from.to_f32());
}

/// Whole chunks that have all of some columns.
#[inline(always)]
fn chunks<S: Simd>(columns: &Range<usize>) -> Range<usize> {
    columns.start / S::CHUNK * S::CHUNK..columns.end.next_multiple_of(S::CHUNK)
}

/// Turns products into what exponentials of logits are beside the largest logit so far.
pub(super) struct Probabilities<'a> {
    pub(super) scaling: Scaling,
    pub(super) seen: &'a Seen<'a>,
    pub(super) products: &'a mut [f32],
    /// The largest logit of each row.
    pub(super) largest: &'a mut [f32],
    /// The sum of its exponentials.
    pub(super) sums: &'a mut [f64],
    /// Sums of values, each row times its exponentials, whose rows are brought down to a new largest
    /// logit.
    pub(super) values: &'a mut [f32],
}

impl Job for Probabilities<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { scaling, seen, products, largest, sums, values } = self;
        let width = values.len() / sums.len();
        for (row, all) in products.chunks_exact_mut(seen.columns).enumerate() {
            let columns = seen.columns(row);
            if columns.is_empty() {
                all.fill(0.0);
                continue;
            }
            let within = chunks::<S>(&columns);
            let steps = || within.clone().step_by(S::CHUNK);
            for at in steps() {
                // SAFETY: rows are whole chunks.
                unsafe {
                    let place = all.as_mut_ptr().add(at);
                    let [logits, _] = scaling.logits(s, s.load(place.cast_const()));
                    s.store(logits, place);
                }
            }
            seen.hide(row, &within, all, f32::NEG_INFINITY);
            let mut most = [s.splat(largest[row]); 2];
            for at in steps() {
                // SAFETY: as above.
                let logits: [S::Vector; 2] = unsafe { s.load(all.as_ptr().add(at)) };
                most = [0, 1].map(|i| s.max(logits[i], most[i]));
            }
            let most = s.largest(s.max(most[0], most[1]));
            if most == f32::NEG_INFINITY {
                // Nothing is seen, or nothing but NaN.
                let is_nan = all[within.clone()].iter().any(|x| x.is_nan());
                sums[row] += if is_nan { f64::NAN } else { 0.0 };
                all.fill(0.0);
                continue;
            }
            if most != largest[row] {
                // Of -inf it is 0.
                let factor = (largest[row] - most).exp();
                largest[row] = most;
                sums[row] *= f64::from(factor);
                values[row * width..][..width].iter_mut().for_each(|x| *x *= factor);
            }
            let mut sum = [s.splat(0.0); 2];
            for at in steps() {
                // SAFETY: as above.
                unsafe {
                    let place = all.as_mut_ptr().add(at);
                    let logits: [S::Vector; 2] = s.load(place.cast_const());
                    let p = exp(s, logits.map(|t| s.sub(t, s.splat(most))));
                    let p = p.map(|p| s.mul(p, s.splat(1.0 / EXP_SCALE)));
                    sum = [0, 1].map(|i| s.add(sum[i], p[i]));
                    s.store(p, place);
                }
            }
            sums[row] += s.sum(s.add(sum[0], sum[1]));
            all[..within.start].fill(0.0);
            all[within.end..].fill(0.0);
        }
    }
}

/// Turns products into probabilities, and products of cotangents with values into ds.
pub(super) struct Differentials<'a> {
    pub(super) scaling: Scaling,
    pub(super) seen: &'a Seen<'a>,
    pub(super) products: &'a mut [f32],
    pub(super) of_values: &'a mut [f32],
    /// Of each row.
    pub(super) lse: &'a [f32],
    pub(super) delta: &'a [f32],
}

impl Job for Differentials<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { scaling, seen, products, of_values, lse, delta } = self;
        let rows = products.chunks_exact_mut(seen.columns);
        for (row, (all, ds)) in rows.zip(of_values.chunks_exact_mut(seen.columns)).enumerate() {
            let columns = seen.columns(row);
            if columns.is_empty() || lse[row] == f32::NEG_INFINITY {
                all.fill(0.0);
                ds.fill(0.0);
                continue;
            }
            let within = chunks::<S>(&columns);
            let (lse, delta) = (s.splat(lse[row]), s.splat(delta[row]));
            for at in within.clone().step_by(S::CHUNK) {
                // SAFETY: rows are whole chunks.
                unsafe {
                    let place = all.as_mut_ptr().add(at);
                    let of_ds = ds.as_mut_ptr().add(at);
                    let [logits, slope] = scaling.logits(s, s.load(place.cast_const()));
                    let dp: [S::Vector; 2] = s.load(of_ds.cast_const());
                    let p = exp(s, logits.map(|t| s.sub(t, lse)));
                    let p = p.map(|p| s.mul(p, s.splat(1.0 / EXP_SCALE)));
                    let made = [0, 1].map(|i| s.mul(p[i], s.sub(dp[i], delta)));
                    let made = match scaling.cap {
                        None => made,
                        Some(_) => [0, 1].map(|i| s.mul(made[i], slope[i])),
                    };
                    s.store(p, place);
                    s.store(made, of_ds);
                }
            }
            for all in [all, ds] {
                seen.hide(row, &within, all, 0.0);
                all[..within.start].fill(0.0);
                all[within.end..].fill(0.0);
            }
        }
    }
}

/// Sums of the products of two rows.
pub(super) struct Dots<'a> {
    pub(super) left: &'a [f32],
    pub(super) right: &'a [f32],
}

impl Job for Dots<'_> {
    type Output = f64;

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> f64 {
        const LANES: usize = 8;
        let mut lanes = [0.0_f64; LANES];
        let (left, rest) = self.left.as_chunks::<LANES>();
        let (right, others) = self.right.as_chunks::<LANES>();
        for (left, right) in left.iter().zip(right) {
            for (lane, (left, right)) in lanes.iter_mut().zip(left.iter().zip(right)) {
                *lane += f64::from(*left) * f64::from(*right);
            }
        }
        let rest = rest.iter().zip(others).map(|(a, b)| f64::from(*a) * f64::from(*b));
        lanes.into_iter().chain(rest).sum()
    }
}

/// Runs a job that is compiled in this crate.
#[inline(never)]
pub(super) fn probabilities(isa: Isa, job: Probabilities<'_>) {
    isa.run(job);
}

/// As [`probabilities`].
#[inline(never)]
pub(super) fn differentials(isa: Isa, job: Differentials<'_>) {
    isa.run(job);
}

/// As [`probabilities`].
#[inline(never)]
pub(super) fn dots(isa: Isa, job: Dots<'_>) -> f64 {
    isa.run(job)
}

/// Rows of numbers as a factor that goes with one of elements `E`.
pub(super) enum Factor<'a, E> {
    Numbers(Matrix<'a, f32>),
    Rounded(Matrix<'a, E>),
}

impl<'a, E: Element> Factor<'a, E> {
    /// Rounds the numbers where they lie, where products take those of `E` alone.
    pub(super) fn new(isa: Isa, numbers: &'a mut [f32], columns: usize) -> Self {
        if !Panels::takes_bf16::<E>(isa) {
            return Self::Numbers(Matrix::new(numbers, columns));
        }
        narrow_rows::<E>(isa, columns, numbers);
        let step = columns * size_of::<f32>() / size_of::<E>();
        Self::Rounded(Matrix::with_row_step(elements(numbers), columns, step))
    }

    /// With rows for columns.
    pub(super) fn transposed(&self) -> Box<dyn Left + 'a> {
        match self {
            Self::Numbers(matrix) => Box::new(matrix.transposed()),
            Self::Rounded(matrix) => Box::new(matrix.transposed()),
        }
    }

    pub(super) fn left(&self) -> &dyn Left {
        match self {
            Self::Numbers(matrix) => matrix,
            Self::Rounded(matrix) => matrix,
        }
    }
}
