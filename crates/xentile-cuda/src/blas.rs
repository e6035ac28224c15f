//! Matrix products by NVIDIA's cuBLASLt, opened at run time: the library that XLA itself calls.
//!
//! Every product here is one of row-major matrices with sums in f32. cuBLASLt counts columns first,
//! for which a row-major matrix is its own transpose, so that what is asked of it is `outᵀ = bᵀ aᵀ`.

mod abi;

use std::ffi::c_void;
use std::path::PathBuf;
use std::ptr::{from_ref, null_mut};
use std::sync::OnceLock;

use abi::{Code, HeuristicResult, SUCCESS};
use xentile::DType;

use crate::cache::Cache;
use crate::driver::{DeviceNumber, RawStream, reason};
use crate::{Device, Error, Result};

/// Plans distinguish alignments of addresses up to this multiple.
const MOST_ALIGNMENT: u32 = 256;

/// Names of the library, newest first.
const NAMES: [&str; 2] = ["libcublasLt.so.13", "libcublasLt.so.12"];

/// Where packages of Python put it, beside others of theirs.
const PACKAGES: [&str; 2] =
    ["nvidia/cu13/lib/libcublasLt.so.13", "nvidia/cublas/lib/libcublasLt.so.12"];

/// What says where else it is.
const VARIABLE: &str = "XENTILE_CUBLASLT";

/// A row-major matrix on a GPU, or a part of one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrix {
    pub(crate) at: *mut c_void,
    pub(crate) dtype: DType,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    /// Elements from one row to the next.
    pub(crate) stride: usize,
}

impl Matrix {
    /// A whole matrix.
    pub(crate) fn new(at: *mut c_void, dtype: DType, rows: usize, columns: usize) -> Self {
        Self { at, dtype, rows, columns, stride: columns }
    }

    /// Its rows from `first` on.
    pub(crate) fn rows(self, first: usize, rows: usize) -> Self {
        Self { at: self.element(first * self.stride), rows, ..self }
    }

    /// Its columns from `first` on.
    pub(crate) fn columns(self, first: usize, columns: usize) -> Self {
        Self { at: self.element(first), columns, ..self }
    }

    fn element(self, index: usize) -> *mut c_void {
        self.at.wrapping_byte_add(index * self.dtype.size_bytes())
    }

    /// As it stands in a product.
    pub(crate) fn plain(self) -> Operand {
        Operand { matrix: self, transposed: false }
    }

    /// Its transpose, as it stands in a product.
    pub(crate) fn transposed(self) -> Operand {
        Operand { matrix: self, transposed: true }
    }
}

/// A factor of a product.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operand {
    pub(crate) matrix: Matrix,
    pub(crate) transposed: bool,
}

impl Operand {
    /// Its extents, rows first.
    pub(crate) fn extents(self) -> (usize, usize) {
        let Matrix { rows, columns, .. } = self.matrix;
        if self.transposed { (columns, rows) } else { (rows, columns) }
    }
}

/// Memory that a product may use besides its operands.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Workspace {
    pub(crate) at: *mut c_void,
    pub(crate) bytes: usize,
}

/// What decides how a product runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    device: DeviceNumber,
    workspace_bytes: usize,
    accumulate: bool,
    out: Place,
    a: (Place, bool),
    b: (Place, bool),
}

/// A matrix but for its address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Place {
    dtype: DType,
    rows: usize,
    columns: usize,
    stride: usize,
    alignment: u32,
}

impl From<Matrix> for Place {
    fn from(matrix: Matrix) -> Self {
        let Matrix { at, dtype, rows, columns, stride } = matrix;
        let alignment = 1 << at.addr().trailing_zeros().min(MOST_ALIGNMENT.trailing_zeros());
        Self { dtype, rows, columns, stride, alignment }
    }
}

/// How a product runs, found once and kept for good.
#[derive(Clone, Copy, Debug)]
struct Planned {
    operation: Handle,
    a: Handle,
    b: Handle,
    out: Handle,
    algorithm: abi::Algorithm,
}

/// Something of cuBLASLt's own.
#[derive(Clone, Copy, Debug)]
struct Handle(*mut c_void);

// SAFETY: cuBLASLt takes its handles and descriptors from any thread, and ours never change.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

pub(crate) use abi::Blas;

impl Blas {
    /// The library, opened by the first call and then kept.
    ///
    /// # Errors
    /// It is nowhere to be found, or lacks something. An error is kept too.
    pub(crate) fn get() -> Result<&'static Self> {
        static BLAS: OnceLock<Result<Blas>> = OnceLock::new();
        BLAS.get_or_init(Self::open).as_ref().map_err(Clone::clone)
    }

    fn open() -> Result<Self> {
        let mut reasons = Vec::new();
        for path in candidates() {
            // SAFETY: NVIDIA's library, whose initialisers are trusted as the program is.
            let library = match unsafe { libloading::Library::new(&path) } {
                Ok(library) => library,
                Err(error) => {
                    reasons.push(reason(&error));
                    continue;
                }
            };
            // SAFETY: it was found by cuBLASLt's name.
            match unsafe { Self::load(&library) } {
                Ok(blas) => {
                    // What it gives out outlives any use of ours.
                    std::mem::forget(library);
                    return Ok(blas);
                }
                Err(error) => reasons.push(reason(&error)),
            }
        }
        Err(Error::NoBlas { reason: reasons.join("; "), variable: VARIABLE })
    }

    /// Has `stream` write `a b` to `out`, or add it to what is there.
    ///
    /// # Errors
    /// Extents that disagree (an error of this crate's own), or a failure of cuBLASLt.
    ///
    /// # Safety
    /// `stream` is a stream of the calling thread's current context; matrices and `workspace` are on its
    /// device, and nothing else touches them until it has run what was launched here.
    pub(crate) unsafe fn product(
        &self,
        stream: RawStream,
        out: Matrix,
        (a, b): (Operand, Operand),
        accumulate: bool,
        workspace: Workspace,
    ) -> Result<()> {
        let ((rows, inner), (other, columns)) = (a.extents(), b.extents());
        assert_eq!(
            (rows, inner, columns),
            (out.rows, other, out.columns),
            "products have extents that agree"
        );
        if rows == 0 || columns == 0 {
            return Ok(());
        }
        let device = Device::current()?.number();
        let key = Key {
            device,
            workspace_bytes: workspace.bytes,
            accumulate,
            out: out.into(),
            a: (a.matrix.into(), a.transposed),
            b: (b.matrix.into(), b.transposed),
        };
        let handle = self.handle(device)?;
        let planned = self.planned(handle, key)?;
        let (one, beta) = (1.0_f32, if accumulate { 1.0_f32 } else { 0.0 });
        // SAFETY: passed on from this function's contract; the scalars are on the host, as is the
        // default, and read before the call returns.
        let code = unsafe {
            (self.matmul)(
                handle.0,
                planned.operation.0,
                from_ref(&one).cast(),
                b.matrix.at,
                planned.b.0,
                a.matrix.at,
                planned.a.0,
                from_ref(&beta).cast(),
                out.at,
                planned.out.0,
                out.at,
                planned.out.0,
                &raw const planned.algorithm,
                workspace.at,
                workspace.bytes,
                stream,
            )
        };
        check("cublasLtMatmul", code)
    }

    /// The handle of a device, which is current.
    fn handle(&self, device: DeviceNumber) -> Result<Handle> {
        static HANDLES: Cache<DeviceNumber, Handle> = Cache::new();
        HANDLES.get(device, |_| {
            let mut handle = null_mut();
            // SAFETY: a place for the handle.
            check("cublasLtCreate", unsafe { (self.create)(&raw mut handle) })?;
            Ok(Handle(handle))
        })
    }

    fn planned(&self, handle: Handle, key: Key) -> Result<Planned> {
        static PLANNED: Cache<Key, Planned> = Cache::new();
        PLANNED.get(key, |key| self.plan(handle, key))
    }

    fn plan(&self, handle: Handle, key: &Key) -> Result<Planned> {
        let mut operation = null_mut();
        // SAFETY: a place for the descriptor.
        let code =
            unsafe { (self.operation_create)(&raw mut operation, abi::COMPUTE_F32, abi::REAL_F32) };
        check("cublasLtMatmulDescCreate", code)?;
        for (attribute, transposed) in [(abi::TRANSPOSE_A, key.b.1), (abi::TRANSPOSE_B, key.a.1)] {
            let value = i32::from(transposed);
            // SAFETY: the attribute is an i32.
            let code =
                unsafe { (self.operation_set)(operation, attribute, from_ref(&value).cast(), 4) };
            check("cublasLtMatmulDescSetAttribute", code)?;
        }
        let (a, b, out) = (self.layout(key.a.0)?, self.layout(key.b.0)?, self.layout(key.out)?);
        let preference = self.preference(key)?;
        let mut found = HeuristicResult::default();
        let mut count = 0;
        // SAFETY: descriptors made above, and room for the one result that is asked for.
        let code = unsafe {
            (self.heuristic)(
                handle.0,
                operation,
                b.0,
                a.0,
                out.0,
                out.0,
                preference,
                1,
                &raw mut found,
                &raw mut count,
            )
        };
        // SAFETY: made above, and not used again.
        let destroyed = unsafe { (self.preference_destroy)(preference) };
        check("cublasLtMatmulPreferenceDestroy", destroyed)?;
        check("cublasLtMatmulAlgoGetHeuristic", if count == 0 { code.max(1) } else { code })?;
        let operation = Handle(operation);
        Ok(Planned { operation, a, b, out, algorithm: found.algorithm })
    }

    fn layout(&self, place: Place) -> Result<Handle> {
        let Place { dtype, rows, columns, stride, .. } = place;
        let mut layout = null_mut();
        // SAFETY: a place for the descriptor.
        let code = unsafe {
            (self.layout_create)(
                &raw mut layout,
                real(dtype),
                columns as u64,
                rows as u64,
                stride as i64,
            )
        };
        check("cublasLtMatrixLayoutCreate", code)?;
        Ok(Handle(layout))
    }

    fn preference(&self, key: &Key) -> Result<*mut c_void> {
        let mut preference = null_mut();
        // SAFETY: a place for the descriptor.
        let code = unsafe { (self.preference_create)(&raw mut preference) };
        check("cublasLtMatmulPreferenceCreate", code)?;
        let set = |attribute, value: *const c_void, size| {
            // SAFETY: `size` bytes, as many as the attribute has.
            let code = unsafe { (self.preference_set)(preference, attribute, value, size) };
            check("cublasLtMatmulPreferenceSetAttribute", code)
        };
        let bytes = key.workspace_bytes as u64;
        set(abi::MAX_WORKSPACE_BYTES, from_ref(&bytes).cast(), 8)?;
        // Sums of parts are added up in a fixed order, in the workspace.
        let scheme = abi::REDUCTION_IN_WORKSPACE;
        set(abi::REDUCTION_SCHEMES, from_ref(&scheme).cast(), 4)?;
        let places = [key.b.0, key.a.0, key.out, key.out];
        for (attribute, place) in (abi::ALIGNMENT_OF_A..).zip(places) {
            set(attribute, from_ref(&place.alignment).cast(), 4)?;
        }
        Ok(preference)
    }
}

/// Where the library may be: where the user says, where the loader finds it, and beside packages of
/// Python of which something is loaded.
fn candidates() -> Vec<PathBuf> {
    if let Some(path) = std::env::var_os(VARIABLE) {
        return vec![path.into()];
    }
    let mut found: Vec<PathBuf> = NAMES.iter().map(PathBuf::from).collect();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let mut roots: Vec<&str> = maps
        .lines()
        .filter_map(|line| line.find('/').map(|start| &line[start..]))
        .filter_map(|path| {
            ["/jax_plugins/", "/nvidia/"]
                .iter()
                .find_map(|folder| path.find(folder).map(|at| &path[..at]))
        })
        .collect();
    roots.sort_unstable();
    roots.dedup();
    for root in roots {
        let paths = PACKAGES.map(|package| PathBuf::from(root).join(package));
        found.extend(paths.into_iter().filter(|path| path.exists()));
    }
    found
}

/// cuBLASLt's name of a dtype.
fn real(dtype: DType) -> Code {
    match dtype {
        DType::F32 => abi::REAL_F32,
        DType::F16 => abi::REAL_F16,
        DType::Bf16 => abi::REAL_BF16,
    }
}

fn check(function: &'static str, code: Code) -> Result<()> {
    if code == SUCCESS { Ok(()) } else { Err(Error::Blas { function, status: code }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_matrix_lie_where_they_should() {
        let at = std::ptr::without_provenance_mut(0x1000);
        let whole = Matrix::new(at, DType::Bf16, 10, 7);
        let part = whole.rows(2, 3).columns(1, 4);
        assert_eq!(part.at.addr(), 0x1000 + 2 * (2 * 7 + 1));
        assert_eq!((part.rows, part.columns, part.stride), (3, 4, 7));
        assert_eq!(part.transposed().extents(), (4, 3));
        assert_eq!(Place::from(whole).alignment, 256);
        assert_eq!(Place::from(part).alignment, 2);
    }
}
