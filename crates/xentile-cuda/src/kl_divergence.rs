//! KL divergence of rows of logits from a teacher's, with the gradient: kernels/kl_divergence.cuh. A cluster of CTAs
//! has a row, and then others.

mod arguments;

use std::ffi::c_void;

use arguments::{
    Arguments, FEW_THREAD_COLUMNS, LINE_COLUMNS, MAX_CTAS, SHARED_BYTES, THREAD_COLUMNS, THREADS,
};
use xentile::DType;

use crate::cache::Cache;
use crate::driver::{DeviceNumber, Driver, Extent, Kernel, RawStream};
use crate::{Device, Error, Result, check_alignment, library};

/// CTAs of a cluster that every GPU with clusters runs.
const PORTABLE_CTAS: u32 = 8;

/// Warps of a CTA.
const WARPS: usize = THREADS as usize / 32;

/// Columns that a CTA has registers for.
const CTA_COLUMNS: usize = THREADS as usize * THREAD_COLUMNS;

/// Columns that are loaded together.
const VECTOR: usize = 4;

/// Logits `[rows, vocab]` of a student and of a teacher, on a GPU.
#[derive(Clone, Copy, Debug)]
pub struct KlDivergence {
    dtype: DType,
    rows: usize,
    /// Rows of `dlogits`.
    all_rows: usize,
    vocab: usize,
    inverse_temperature: f32,
}

/// What a pass reads and writes, on a GPU.
#[derive(Clone, Copy, Debug)]
pub struct Arrays {
    /// `[rows, vocab]`.
    pub student: *const f32,
    /// `[rows, vocab]`.
    pub teacher: *const f32,
    /// `[rows]`: what gradients are multiplied by; where it is 0, they are 0.
    pub factors: *const f32,
    /// `[1]`: the row of `dlogits` that the first row has, or the nearest that leaves room for the others.
    pub first: *const i32,
    /// `[rows]`.
    pub losses: *mut f32,
    /// `[all_rows, vocab]`, of the dtype.
    pub dlogits: *mut c_void,
}

impl KlDivergence {
    /// The largest vocabulary: the widest clusters have registers for it.
    pub const LARGEST_VOCAB: usize = MAX_CTAS as usize * CTA_COLUMNS;

    /// Plans a pass, with a gradient of `dtype` that is `rows` of `all_rows`.
    ///
    /// # Errors
    /// Fewer rows in all, a vocabulary that is no multiple of 4 in 4 to [`LARGEST_VOCAB`](Self::LARGEST_VOCAB), more rows than an `i32`
    /// counts, a temperature that is not finite and above 0.
    pub fn new(
        dtype: DType,
        rows: usize,
        all_rows: usize,
        vocab: usize,
        temperature: f64,
    ) -> Result<Self> {
        if !((1..=Self::LARGEST_VOCAB).contains(&vocab) && vocab.is_multiple_of(VECTOR)) {
            return Err(invalid(format!(
                "the vocabulary is {vocab}; it must be a multiple of {VECTOR} from {VECTOR} to {}",
                Self::LARGEST_VOCAB
            )));
        }
        if i32::try_from(rows).is_err() {
            return Err(invalid(format!(
                "there are {rows} rows; there may be {} at most",
                i32::MAX
            )));
        }
        if rows > all_rows {
            return Err(invalid(format!("there are {rows} rows; there may be {all_rows} at most")));
        }
        let inverse_temperature = (1.0 / temperature) as f32;
        if !(inverse_temperature > 0.0 && inverse_temperature.is_finite()) {
            return Err(invalid(format!(
                "temperature is {temperature}; it must be finite and above 0, in f32"
            )));
        }
        Ok(Self { dtype, rows, all_rows, vocab, inverse_temperature })
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
        unsafe { self.ready(stream) }.map(drop)
    }

    /// Has `stream` write losses and gradients.
    ///
    /// # Errors
    /// No driver or GPU that will do, arrays that begin at no multiple of 16, a failure of the driver.
    ///
    /// # Safety
    /// `stream` is a `CUstream` of the calling thread's current context, and the pointers lead to arrays of these
    /// shapes on its device, which nothing else touches until it has run what was launched here.
    pub unsafe fn run(&self, stream: *mut c_void, arrays: Arrays) -> Result<()> {
        if self.rows == 0 {
            return Ok(());
        }
        let Arrays { student, teacher, factors, first, losses, dlogits } = arrays;
        check_alignment("student", student.cast())?;
        check_alignment("teacher", teacher.cast())?;
        check_alignment("dlogits", dlogits)?;
        // SAFETY: passed on from this function's contract.
        let (kernel, clusters) = unsafe { self.ready(stream) }?;
        let (rows, vocab, last) =
            (self.rows as i32, self.vocab as i32, (self.all_rows - self.rows) as i64);
        let arguments = Arguments {
            student,
            teacher,
            factors,
            first,
            losses,
            dlogits,
            last,
            rows,
            vocab,
            inverse_temperature: self.inverse_temperature,
        };
        let clusters = self.rows.min(clusters as usize) as u32;
        // SAFETY: passed on from this function's contract.
        unsafe { Driver::get()?.launch(kernel, self.extent(clusters), stream, &arguments) }
    }

    /// CTAs of a cluster: a power of two.
    fn ctas(&self) -> u32 {
        self.vocab.div_ceil(CTA_COLUMNS).next_power_of_two() as u32
    }

    /// Columns of a warp.
    fn share(&self) -> usize {
        self.vocab.div_ceil(self.ctas() as usize * WARPS).next_multiple_of(LINE_COLUMNS)
    }

    fn kernel_name(&self) -> String {
        let few = if self.share() <= 32 * FEW_THREAD_COLUMNS { "_few" } else { "" };
        format!("kl_divergence_{}{few}", self.dtype)
    }

    /// The launch of so many clusters.
    fn extent(&self, clusters: u32) -> Extent {
        let ctas = self.ctas();
        Extent {
            ctas: clusters * ctas,
            rows: 1,
            threads: THREADS,
            shared_bytes: (SHARED_BYTES + WARPS * self.share() * 8) as u32,
            cluster: Some(ctas),
        }
    }

    /// The kernel, and the clusters that run at once.
    ///
    /// # Safety
    /// `stream` is a `CUstream` of the calling thread's current context.
    unsafe fn ready(&self, stream: RawStream) -> Result<(Kernel, u32)> {
        static READY: Cache<(DeviceNumber, DType, usize), (Kernel, u32)> = Cache::new();
        let device = Device::current()?;
        if !device.limits().clusters {
            let (major, minor) = device.capability();
            return Err(invalid(format!(
                "{} has compute capability {major}.{minor}; the kernel of the divergence needs 9.0 or later",
                device.name()
            )));
        }
        READY.get((device.number(), self.dtype, self.vocab), |_| {
            // SAFETY: passed on from this function's contract.
            let kernel = unsafe { library::kept_kernel(&self.kernel_name(), device, stream) }?;
            if self.ctas() > PORTABLE_CTAS {
                library::allow_wide_clusters(kernel, device)?;
            }
            let extent = self.extent(1);
            let fits = extent.shared_bytes <= device.limits().shared_bytes_per_block;
            // SAFETY: as above.
            let clusters = || unsafe { Driver::get()?.max_active_clusters(kernel, extent, stream) };
            match fits.then(clusters).transpose()? {
                Some(clusters) if clusters > 0 => Ok((kernel, clusters)),
                _ => Err(invalid(format!(
                    "{} has no room for a cluster that holds a row of {} columns",
                    device.name(),
                    self.vocab
                ))),
            }
        })
    }
}

fn invalid(message: String) -> Error {
    Error::Problem(xentile::Error::Invalid(message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clusters_have_registers_and_shared_memory_for_the_vocabulary() {
        let cases = [(4, 1), (20_480, 1), (20_484, 2), (128_256, 8), (163_840, 8), (163_844, 16)];
        for (vocab, ctas) in [&cases[..], &[(KlDivergence::LARGEST_VOCAB, 16)]].concat() {
            let extent = KlDivergence::new(DType::Bf16, 9, 9, vocab, 1.0).unwrap().extent(3);
            assert_eq!((extent.ctas, extent.cluster), (3 * ctas, Some(ctas)), "{vocab}");
            assert!(extent.shared_bytes <= 232_448, "{vocab}: {}", extent.shared_bytes);
        }
    }

    #[test]
    fn few_columns_have_a_kernel_of_their_own() {
        for (vocab, name) in [(128_256, "bf16_few"), (131_076, "bf16"), (151_936, "bf16")] {
            let divergence = KlDivergence::new(DType::Bf16, 9, 9, vocab, 1.0).unwrap();
            assert_eq!(divergence.kernel_name(), format!("kl_divergence_{name}"), "{vocab}");
        }
    }

    #[test]
    fn wrong_extents_are_refused() {
        let message = |rows, vocab, temperature| {
            KlDivergence::new(DType::F32, rows, usize::MAX, vocab, temperature)
                .unwrap_err()
                .to_string()
        };
        let right = "it must be a multiple of 4 from 4 to 327680";
        for vocab in [0, 50_257, 327_684] {
            assert_eq!(message(1, vocab, 1.0), format!("the vocabulary is {vocab}; {right}"));
        }
        assert_eq!(
            message(1 << 31, 8, 1.0),
            "there are 2147483648 rows; there may be 2147483647 at most"
        );
        assert_eq!(message(1, 8, 0.0), "temperature is 0; it must be finite and above 0, in f32");
    }
}
