//! The matrix of a Newton-Schulz step of Muon, c0 I + c1 A + c2 A A with A = X X': kernels/muon.cuh, for Hopper
//! alone.

mod arguments;

use std::ffi::c_void;

use arguments::{Arguments, BOX, BYTES, SUM_BYTES, SUM_THREADS, THREADS, TILE_COLUMNS, TILE_ROWS};
use xentile::DType;

use crate::driver::{Driver, Extent, Kernel, RawStream, TensorMap};
use crate::operands::Scratch;
use crate::{Device, Error, Result, check_alignment, library};

/// CTAs of a cluster.
const CTAS: u32 = 2;
/// Blocks of 64 of K for which a split more is worth its sums.
const LEAST_BLOCKS: usize = 16;
/// Elements of a vector of the copy engine.
const VECTOR: usize = 8;

/// Matrices X `[batch, rows, columns]` in bf16. A is X X', or `of_columns` X' X.
#[derive(Clone, Copy, Debug)]
pub struct NewtonSchulz {
    batch: usize,
    rows: usize,
    columns: usize,
    of_columns: bool,
}

impl NewtonSchulz {
    /// Plans the step.
    ///
    /// # Errors
    /// Rows or columns that are no positive multiple of 8, or more matrices or entries than 32 bits count.
    pub fn new(batch: usize, rows: usize, columns: usize, of_columns: bool) -> Result<Self> {
        let invalid = |message| Err(Error::Problem(xentile::Error::Invalid(message)));
        let is_one = |extent: usize| extent > 0 && extent.is_multiple_of(VECTOR);
        if !is_one(rows) || !is_one(columns) {
            return invalid(format!(
                "matrices are {rows} x {columns}; both must be positive multiples of {VECTOR}"
            ));
        }
        let one = Self { batch, rows, columns, of_columns };
        let most = i32::MAX as usize / 128;
        let items = one.items().checked_mul(batch);
        if rows.max(columns) > most || items.is_none_or(|items| items > most) {
            return invalid(format!("there are {batch} matrices of {rows} x {columns}; too many"));
        }
        Ok(one)
    }

    /// Rows of A.
    fn side(&self) -> usize {
        if self.of_columns { self.columns } else { self.rows }
    }

    /// Blocks of 64 of K.
    fn blocks(&self) -> usize {
        let k = if self.of_columns { self.rows } else { self.columns };
        k.div_ceil(BOX as usize)
    }

    /// Pairs of tiles of a matrix that have columns in common.
    fn pairs(&self) -> usize {
        let pairs = self.side().div_ceil(TILE_ROWS) / 2;
        pairs * (pairs + 1) / 2
    }

    /// Pairs of tiles of a matrix: those, and in the last of an odd number of rows of tiles its tiles, two at a
    /// time.
    fn items(&self) -> usize {
        let rows = self.side().div_ceil(TILE_ROWS);
        let odd = (rows * TILE_ROWS).div_ceil(TILE_COLUMNS).div_ceil(2);
        self.pairs() + if rows % 2 == 1 { odd } else { 0 }
    }

    /// Splits of K that keep so many clusters busy, and whose sums fit into so many bytes.
    fn splits(&self, clusters: u32, bytes: usize) -> usize {
        let items = (self.items() * self.batch).max(1);
        let fits = bytes / (items * Self::sums_bytes());
        (clusters as usize / items).min(self.blocks() / LEAST_BLOCKS).min(fits).max(1)
    }

    /// Bytes of the sums of a pair of tiles.
    fn sums_bytes() -> usize {
        CTAS as usize * TILE_ROWS * TILE_COLUMNS * 4
    }

    /// Loads the kernels, so that [`run`](Self::run) has only to launch them.
    ///
    /// # Errors
    /// No driver or GPU that will do.
    ///
    /// # Safety
    /// `stream` is a `CUstream` of the calling thread's current context.
    pub unsafe fn load(&self, stream: *mut c_void) -> Result<()> {
        for name in [self.named("gram"), self.named("partial"), "muon_sum", "muon_square"] {
            // SAFETY: passed on from this function's contract.
            unsafe { kernel(name, stream) }?;
        }
        Ok(())
    }

    /// Has `stream` write A to `gram`, and `matrix`, of its shape, from `x`. K is split where `sums` has room for
    /// them.
    ///
    /// # Errors
    /// No driver or GPU that will do, arrays that begin at no multiple of 16, a failure of the driver.
    ///
    /// # Safety
    /// `stream` is a `CUstream` of the calling thread's current context, and the pointers lead to arrays of these
    /// sizes on its device, apart from each other, which nothing else touches until it has run what was
    /// launched here.
    pub unsafe fn run(
        &self,
        stream: *mut c_void,
        x: *const c_void,
        matrix: *mut c_void,
        gram: *mut c_void,
        sums: Scratch,
        [c0, c1, c2]: [f32; 3],
    ) -> Result<()> {
        let side = self.side();
        if self.batch == 0 {
            return Ok(());
        }
        let results = [("matrix", matrix), ("gram", gram), ("sums", sums.at)];
        check_alignment("x", x)?;
        for (name, address) in results {
            check_alignment(name, address.cast_const())?;
        }
        let clusters = Device::current()?.limits().multiprocessors / CTAS;
        let splits = self.splits(clusters, sums.bytes);
        let items = self.items();
        let count = |number: usize| number as u32;
        let first = Arguments {
            x: self.map(x, self.rows, self.columns)?,
            out: self.map(gram.cast_const(), side, side)?,
            partial: sums.at.cast(),
            side: count(side),
            blocks: count(self.blocks()),
            splits: count(splits),
            pairs: count(self.pairs()),
            items: count(items),
            all: count(items * self.batch * splits),
            c0,
            c1,
            c2,
        };
        let second = Arguments {
            x: first.out,
            out: self.map(matrix.cast_const(), side, side)?,
            blocks: count(side.div_ceil(BOX as usize)),
            splits: 1,
            all: count(items * self.batch),
            ..first
        };
        let of = |all: u32| Extent {
            ctas: CTAS * clusters.min(all),
            rows: 1,
            threads: THREADS,
            shared_bytes: BYTES,
            cluster: Some(CTAS),
        };
        let driver = Driver::get()?;
        // SAFETY: passed on from this function's contract.
        let launch = |name, extent, arguments: &Arguments| unsafe {
            driver.launch(kernel(name, stream)?, extent, stream, arguments)
        };
        if splits == 1 {
            launch(self.named("gram"), of(first.all), &first)?;
        } else {
            launch(self.named("partial"), of(first.all), &first)?;
            let (ctas, threads) = (CTAS * second.all, SUM_THREADS);
            let sum = Extent { ctas, rows: 1, threads, shared_bytes: SUM_BYTES, cluster: None };
            launch("muon_sum", sum, &first)?;
        }
        launch("muon_square", of(second.all), &second)
    }

    fn map(&self, at: *const c_void, rows: usize, columns: usize) -> Result<TensorMap> {
        let strides = [1, columns, rows * columns];
        let extents = [columns, rows, self.batch];
        Driver::get()?.tensor_map_of(DType::Bf16, at, extents, strides, [BOX, BOX, 1])
    }

    /// A kernel's name.
    fn named(&self, result: &str) -> &'static str {
        match (result, self.of_columns) {
            ("gram", false) => "muon_gram_wide",
            ("gram", true) => "muon_gram_tall",
            (_, false) => "muon_partial_wide",
            (_, true) => "muon_partial_tall",
        }
    }
}

/// # Safety
/// `stream` is a `CUstream` of the calling thread's current context.
unsafe fn kernel(name: &str, stream: RawStream) -> Result<Kernel> {
    let device = Device::current()?;
    if device.capability() != (9, 0) || !device.limits().clusters {
        let (name, capability) = (device.name().to_owned(), device.capability());
        return Err(Error::NotHopper { name, capability });
    }
    // SAFETY: passed on from this function's contract.
    unsafe { library::kept_kernel(name, device, stream) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_of_tiles_cover_a_triangle() {
        let items = |side| NewtonSchulz::new(1, side, side, false).unwrap().items();
        // Of 7 rows of tiles 6 are pairs with 1, 2 and 3 columns; the last has 4 tiles.
        let sides = [8, 128, 256, 384, 640, 896, 1024, 2048];
        assert_eq!(sides.map(items), [1, 1, 1, 2, 5, 8, 10, 36]);
    }

    #[test]
    fn few_tiles_are_split_where_sums_fit() {
        let embedding = NewtonSchulz::new(1, 151_936, 896, true).unwrap();
        assert_eq!(embedding.splits(66, usize::MAX), 8);
        assert_eq!(embedding.splits(66, 3 * 8 * 262_144), 3);
        assert_eq!(embedding.splits(66, 0), 1);
        assert_eq!(NewtonSchulz::new(24, 896, 4864, false).unwrap().splits(66, usize::MAX), 1);
        assert_eq!(NewtonSchulz::new(1, 128, 64, true).unwrap().splits(66, usize::MAX), 1);
    }

    #[test]
    fn other_matrices_are_refused() {
        let error = NewtonSchulz::new(1, 12, 16, false).unwrap_err().to_string();
        assert_eq!(error, "matrices are 12 x 16; both must be positive multiples of 8");
        let error = NewtonSchulz::new(1 << 30, 8, 8, false).unwrap_err().to_string();
        assert_eq!(error, "there are 1073741824 matrices of 8 x 8; too many");
    }
}
