//! FP8 quantisation of matrices, with scales by row, by block or given, and transposed copies.
//!
//! Where the blocks are parts of rows, tasks are runs of blocks; where they have several rows, or a
//! transposed copy is asked for, tiles, which are in the caches as they are read again.

mod entries;
#[cfg(feature = "operation")]
pub(crate) mod operation;
mod runs;
mod tiles;
mod transposed;

use xentile::fp8_quantize::{Blocks, Format, Fp8Quantize, QuantizeShape};
use xentile::{Element, Error, Result};

use crate::Job;
pub use crate::Launch;
use crate::simd::Simd;
use runs::Runs;
use tiles::Tiles;
use transposed::{ColumnScales, Scales, Transposed};

/// Implements [`Job`] by `each`, which is compiled for each format.
macro_rules! job_by_format {
    ($($name:ident)*) => {$(
        impl<E: Element> Job for $name<'_, E> {
            type Output = ();

            #[inline(always)]
            fn run<S: Simd>(self, s: S) {
                match self.arrays.options.format {
                    Format::E4M3Fn => self.each::<S, false>(s),
                    Format::E5M2 => self.each::<S, true>(s),
                }
            }
        }
    )*};
}
job_by_format!(Runs Tiles Transposed);

crate::compiled::passes! {
    /// Each pass over elements `E`.
    struct Passes {
        runs: Runs,
        tiles: Tiles,
        column_scales: ColumnScales,
        transposed: Transposed,
    }
}

/// Entries of a task: enough to be worth sharing out, few enough that every thread gets some.
const TASK_ENTRIES: usize = 1 << 16;

/// Rows and columns of a tile of a matrix that has one scale, or that is a block.
const TILE: usize = 128;

/// Values, `[G, M, D]`, and the scale of each block.
#[derive(Debug)]
pub struct Quantized<'a> {
    /// The bits of values.
    pub values: &'a mut [u8],
    /// Their scales.
    pub scales: &'a mut [f32],
}

/// What all tasks share. Pointers that are of no use are null.
pub(crate) struct Arrays<E> {
    options: Fp8Quantize,
    shape: QuantizeShape,
    /// Rows and columns of a block, not above those of the shape.
    block: [usize; 2],
    x: *const E,
    values: *mut u8,
    /// Scales of values, or amax of rows.
    numbers: *mut f32,
    /// Given scales, `rows_of_scale` rows each.
    given: *const f32,
    rows_of_scale: usize,
    /// The transposed copy, and its scales.
    transposed: *mut u8,
    transposed_scales: *mut f32,
}

// SAFETY: tasks write disjoint parts of what pointers lead to.
unsafe impl<E: Element> Sync for Arrays<E> {}

/// Quantisation of `[G, M, D]`.
#[derive(Clone, Copy)]
pub struct Kernel<'a> {
    options: Fp8Quantize,
    shape: QuantizeShape,
    launch: Launch<'a>,
}

impl<'a> Kernel<'a> {
    /// A kernel for x of `shape`.
    #[must_use]
    pub fn new(options: Fp8Quantize, shape: QuantizeShape, launch: Launch<'a>) -> Self {
        Self { options, shape, launch }
    }

    /// Writes values `[G, M, D]` of `x`, and scales `[G, ..]` of `blocks`.
    ///
    /// # Errors
    /// An argument of another shape; a block of no rows or no columns.
    pub fn quantize<E: Element>(
        &self,
        blocks: Blocks,
        x: &[E],
        quantized: Quantized<'_>,
    ) -> Result<()> {
        self.check(blocks, x, &quantized)?;
        if self.shape.elements() == 0 {
            quantized.scales.fill(1.0);
            return Ok(());
        }
        let arrays = self.arrays(blocks, x, quantized, None);
        if blocks.rows == 1 {
            self.runs(&arrays, Runs { has_values: true, ..Runs::amax(&arrays) });
            return Ok(());
        }
        let [down, across] = blocks.count(self.shape.rows(), self.shape.columns());
        let tiles = self.shape.matrices() * down * across;
        let at_a_time = TASK_ENTRIES / (arrays.block[0] * arrays.block[1]);
        self.tasks(tiles, at_a_time, &|first, end| {
            let pass = Tiles { arrays: &arrays, down, across, first, end };
            (Passes::get().tiles)(self.launch.isa, pass);
        });
        Ok(())
    }

    /// The same, and the transposed copy `[G, D, M]` with scales of its own, of `blocks` of it.
    ///
    /// # Errors
    /// As for [`Self::quantize`]; blocks of several rows that are not as many columns.
    pub fn quantize_transposed<E: Element>(
        &self,
        blocks: Blocks,
        x: &[E],
        quantized: Quantized<'_>,
        transposed: Quantized<'_>,
    ) -> Result<()> {
        if blocks.rows > 1 && blocks.columns != Some(blocks.rows) {
            return Err(Error::Invalid(format!(
                "blocks are {} x {}; of a transposed copy they must be parts of rows, or squares",
                blocks.rows,
                blocks.columns_of(self.shape.columns())
            )));
        }
        self.check(blocks, x, &quantized)?;
        let shape = self.shape.transposed();
        shape.check("the transposed copy", transposed.values.len(), shape.elements())?;
        shape.check("its scales", transposed.scales.len(), shape.scales(blocks))?;
        if shape.elements() == 0 {
            quantized.scales.fill(1.0);
            transposed.scales.fill(1.0);
            return Ok(());
        }
        let arrays = self.arrays(blocks, x, quantized, Some(transposed));
        let Some(block) = blocks.columns else {
            // Rows and columns are blocks: their scales come first.
            self.runs(&arrays, Runs { has_scales: true, ..Runs::amax(&arrays) });
            let strips = self.shape.columns().div_ceil(TILE);
            self.tasks(self.shape.matrices() * strips, 1, &|first, end| {
                let pass = ColumnScales { arrays: &arrays, strips, first, end };
                (Passes::get().column_scales)(self.launch.isa, pass);
            });
            self.transposed(&arrays, TILE, Scales::OfRows { block: usize::MAX, are_there: true });
            return Ok(());
        };
        let scales = match blocks.rows {
            1 => Scales::OfRows { block, are_there: false },
            _ => Scales::OfSquares,
        };
        self.transposed(&arrays, block, scales);
        Ok(())
    }

    /// Writes values `[G, M, D]` of `x` by given scales, one for so many of the G x M rows, and amax `[G, M]`
    /// of its rows.
    ///
    /// # Errors
    /// An argument of another shape.
    pub fn scaled<E: Element>(
        &self,
        x: &[E],
        scale: &[f32],
        values: &mut [u8],
        amax: &mut [f32],
    ) -> Result<()> {
        let quantized = Quantized { values, scales: amax };
        let rows_of_scale = self.check_given(x, scale, &quantized)?;
        if self.shape.elements() == 0 {
            quantized.scales.fill(0.0);
            return Ok(());
        }
        let arrays = self.arrays(Blocks::ROW, x, quantized, None);
        let arrays = Arrays { given: scale.as_ptr(), rows_of_scale, ..arrays };
        self.runs(&arrays, Runs { has_values: true, ..Runs::amax(&arrays) });
        Ok(())
    }

    /// The same, and the transposed copy `[G, D, M]` by the same scales, of which a matrix has one.
    ///
    /// # Errors
    /// An argument of another shape.
    pub fn scaled_transposed<E: Element>(
        &self,
        x: &[E],
        scale: &[f32],
        values: &mut [u8],
        amax: &mut [f32],
        transposed: &mut [u8],
    ) -> Result<()> {
        let quantized = Quantized { values, scales: amax };
        let rows_of_scale = self.check_given(x, scale, &quantized)?;
        self.shape.check("the transposed copy", transposed.len(), self.shape.elements())?;
        if self.shape.elements() == 0 {
            quantized.scales.fill(0.0);
            return Ok(());
        }
        if !rows_of_scale.is_multiple_of(self.shape.rows()) {
            return Err(Error::Invalid(format!(
                "scale holds {} elements; it must hold one for every so many of {} matrices",
                scale.len(),
                self.shape.matrices()
            )));
        }
        let transposed = Quantized { values: transposed, scales: &mut [] };
        let arrays = self.arrays(Blocks::ROW, x, quantized, Some(transposed));
        let arrays = Arrays { given: scale.as_ptr(), rows_of_scale, ..arrays };
        self.runs(&arrays, Runs::amax(&arrays));
        self.transposed(&arrays, TILE, Scales::Given);
        Ok(())
    }

    /// Writes amax `[G, M]` of the rows of `x`.
    ///
    /// # Errors
    /// An argument of another shape.
    pub fn amax<E: Element>(&self, x: &[E], amax: &mut [f32]) -> Result<()> {
        self.shape.check("x", x.len(), self.shape.elements())?;
        self.shape.check("amax", amax.len(), self.shape.scales(Blocks::ROW))?;
        if self.shape.elements() == 0 {
            amax.fill(0.0);
            return Ok(());
        }
        let quantized = Quantized { values: &mut [], scales: amax };
        let arrays = self.arrays(Blocks::ROW, x, quantized, None);
        self.runs(&arrays, Runs::amax(&arrays));
        Ok(())
    }

    fn check<E>(&self, blocks: Blocks, x: &[E], quantized: &Quantized<'_>) -> Result<()> {
        blocks.validate()?;
        self.shape.check("x", x.len(), self.shape.elements())?;
        self.shape.check("values", quantized.values.len(), self.shape.elements())?;
        self.shape.check("scales", quantized.scales.len(), self.shape.scales(blocks))
    }

    /// How many rows have a given scale in common.
    fn check_given<E>(&self, x: &[E], scale: &[f32], quantized: &Quantized<'_>) -> Result<usize> {
        let rows = self.shape.matrices() * self.shape.rows();
        self.shape.check("x", x.len(), self.shape.elements())?;
        self.shape.check("values", quantized.values.len(), self.shape.elements())?;
        self.shape.check("amax", quantized.scales.len(), rows)?;
        if rows == 0 || (!scale.is_empty() && rows.is_multiple_of(scale.len())) {
            return Ok(rows / scale.len().max(1));
        }
        Err(Error::Invalid(format!(
            "scale holds {} elements; it must hold one for every so many of {rows} rows",
            scale.len()
        )))
    }

    /// What pointers of checked arrays lead to.
    fn arrays<E>(
        &self,
        blocks: Blocks,
        x: &[E],
        quantized: Quantized<'_>,
        transposed: Option<Quantized<'_>>,
    ) -> Arrays<E> {
        let [transposed, transposed_scales] = match transposed {
            Some(transposed) => {
                [transposed.values.as_mut_ptr(), transposed.scales.as_mut_ptr().cast()]
            }
            None => [std::ptr::null_mut(); 2],
        };
        Arrays {
            options: self.options,
            shape: self.shape,
            block: [blocks.rows.min(self.shape.rows()), blocks.columns_of(self.shape.columns())],
            x: x.as_ptr(),
            values: quantized.values.as_mut_ptr(),
            numbers: quantized.scales.as_mut_ptr(),
            given: std::ptr::null(),
            rows_of_scale: 1,
            transposed,
            transposed_scales: transposed_scales.cast(),
        }
    }

    /// What `pass` says, of all parts of rows.
    fn runs<E: Element>(&self, arrays: &Arrays<E>, pass: Runs<'_, E>) {
        let across = self.shape.columns().div_ceil(arrays.block[1]);
        let runs = self.shape.matrices() * self.shape.rows() * across;
        self.tasks(runs, TASK_ENTRIES / arrays.block[1], &|first, end| {
            (Passes::get().runs)(self.launch.isa, Runs { across, first, end, ..pass });
        });
    }

    /// Values and the transposed copy, in square tiles.
    fn transposed<E: Element>(&self, arrays: &Arrays<E>, tile: usize, scales: Scales) {
        let [rows, columns] = [self.shape.rows(), self.shape.columns()];
        let tiles = [rows.div_ceil(tile), columns.div_ceil(tile)];
        let at_a_time = TASK_ENTRIES / (tile.min(rows) * tile.min(columns));
        self.tasks(self.shape.matrices() * tiles[0] * tiles[1], at_a_time, &|first, end| {
            let pass = Transposed { arrays, tile, tiles, scales, first, end };
            (Passes::get().transposed)(self.launch.isa, pass);
        });
    }

    /// Runs `work` on all of `count` things, some at a time.
    fn tasks(&self, count: usize, at_a_time: usize, work: &(dyn Fn(usize, usize) + Sync)) {
        let at_a_time = at_a_time.max(1);
        self.launch.pool.run(count.div_ceil(at_a_time), &|index| {
            let first = index * at_a_time;
            work(first, count.min(first + at_a_time));
        });
    }
}
