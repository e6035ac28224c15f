//! Rotary position embedding: a read and a write of x, in place or apart.

mod arguments;

use std::ffi::c_void;

use arguments::{Arguments, BATCH, THREADS};
use xentile::DType;
use xentile::rope::{Layout, Rope, RopeShape};

use crate::driver::{Driver, Extent, Kernel, RawStream};
use crate::{Device, Error, Result, check_alignment, check_places, library};

/// The bytes of a vector.
const VECTOR: usize = 16;

/// Rotary position embedding of arrays of one dtype, on a GPU.
#[derive(Clone, Copy, Debug)]
pub struct Rotation {
    options: Rope,
    shape: RopeShape,
    dtype: DType,
}

/// The arrays: x, which y may be, indices, and the tables.
#[derive(Clone, Copy, Debug)]
pub struct Operands {
    /// `[N, D]`.
    pub x: *const c_void,
    /// `[N]`.
    pub indices: *const i32,
    /// `[G, P, R / 2]`.
    pub cos: *const f32,
    /// The same.
    pub sin: *const f32,
    /// `[N, D]`.
    pub y: *mut c_void,
}

impl Rotation {
    /// That of arrays of `shape`.
    #[must_use]
    pub fn new(options: Rope, shape: RopeShape, dtype: DType) -> Self {
        Self { options, shape, dtype }
    }

    /// Loads the kernel, so that [`run`](Self::run) has only to launch it.
    ///
    /// # Errors
    /// No driver or GPU that will do.
    ///
    /// # Safety
    /// `stream` is a `CUstream` of the calling thread's current context.
    pub unsafe fn load(&self, stream: *mut c_void) -> Result<()> {
        // SAFETY: passed on from this function's contract.
        unsafe { self.kernel(stream) }.map(drop)
    }

    /// Has `stream` write y.
    ///
    /// # Errors
    /// No driver or GPU that will do, arrays that begin at no multiple of 16 or overlap in part, a
    /// failure of the driver.
    ///
    /// # Safety
    /// `stream` is a `CUstream` of the calling thread's current context, and the pointers lead to arrays
    /// of these shapes on its device, which nothing else touches until it has run what was launched here.
    pub unsafe fn run(&self, stream: *mut c_void, operands: Operands) -> Result<()> {
        let Self { options, shape, dtype } = *self;
        if shape.elements() == 0 {
            return Ok(());
        }
        let Operands { x, indices, cos, sin, y } = operands;
        check_places(("x", x), ("y", y), shape.elements() * dtype.size_bytes())?;
        check_alignment("cos", cos.cast())?;
        check_alignment("sin", sin.cast())?;
        // SAFETY: passed on from this function's contract.
        let kernel = unsafe { self.kernel(stream) }?;
        let units = self.units();
        let ctas = units
            .checked_mul(shape.rows())
            .map(|all| all.div_ceil((THREADS * BATCH) as usize))
            .and_then(|ctas| i32::try_from(ctas).ok())
            .ok_or(Error::Problem(xentile::Error::Shape {
                tokens: shape.rows(),
                vocab: shape.columns(),
                requirement: "its vectors must fit a grid",
            }))?;
        let extent = Extent {
            ctas: ctas.cast_unsigned(),
            rows: 1,
            threads: THREADS,
            shared_bytes: 0,
            cluster: None,
        };
        let arguments = Arguments {
            x,
            indices,
            cos,
            sin,
            y,
            rows: shape.rows() as i64,
            rows_of_group: shape.rows_of_group() as i64,
            positions: shape.positions() as i64,
            columns: shape.columns() as i64,
            pairs: shape.pairs() as i64,
            units: units as i64,
            sign: if options.inverse { -1.0 } else { 1.0 },
            in_place: (x == y.cast_const()).into(),
        };
        // SAFETY: passed on from this function's contract.
        unsafe { Driver::get()?.launch(kernel, extent, stream, &arguments) }
    }

    /// Whether rows, and what turns of them, consist of vectors.
    fn has_vectors(&self) -> bool {
        self.vectors().is_some()
    }

    /// Units of a row: of vectors that turn, or pairs, and of what is copied.
    fn units(&self) -> usize {
        self.vectors().unwrap_or(self.shape.columns() - self.shape.pairs())
    }

    fn vectors(&self) -> Option<usize> {
        units(self.options.layout, self.shape.columns(), self.shape.pairs(), self.dtype)
    }

    /// # Safety
    /// `stream` is a `CUstream` of the calling thread's current context.
    unsafe fn kernel(&self, stream: RawStream) -> Result<Kernel> {
        let single = if self.has_vectors() { "" } else { "single_" };
        let name = format!("rope_{single}{}_{}", self.options.layout, self.dtype);
        // SAFETY: passed on from this function's contract.
        unsafe { library::kept_kernel(&name, Device::current()?, stream) }
    }
}

/// Units of a row of `columns`, of whose `pairs` each turns: vectors of either half, of interleaved pairs, or
/// of what is copied. None where rows, or what turns of them, do not consist of vectors.
pub(crate) fn units(layout: Layout, columns: usize, pairs: usize, dtype: DType) -> Option<usize> {
    let per = VECTOR / dtype.size_bytes();
    let (turning, units) = match layout {
        Layout::Halves => (pairs, (columns - pairs) / per),
        Layout::Interleaved => (2 * pairs, columns / per),
    };
    (columns.is_multiple_of(per) && turning.is_multiple_of(per)).then_some(units)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_cover_a_row() {
        let of = |layout, columns, pairs, dtype| {
            let shape = RopeShape::new(3, columns, pairs, 5).unwrap();
            let rotation = Rotation::new(Rope { layout, inverse: false }, shape, dtype);
            (rotation.has_vectors(), rotation.units())
        };
        let (halves, interleaved) = (Layout::Halves, Layout::Interleaved);
        assert_eq!(of(halves, 128, 64, DType::Bf16), (true, 8));
        assert_eq!(of(interleaved, 128, 64, DType::Bf16), (true, 16));
        assert_eq!(of(halves, 80, 16, DType::F32), (true, 16));
        assert_eq!(of(interleaved, 80, 16, DType::F32), (true, 20));
        // Halves that begin within a vector, and rows that do.
        assert_eq!(of(halves, 64, 12, DType::Bf16), (false, 52));
        assert_eq!(of(interleaved, 64, 12, DType::Bf16), (true, 8));
        assert_eq!(of(interleaved, 33, 16, DType::F32), (false, 17));
    }
}
