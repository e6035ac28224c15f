//! Draws a token of each row of logits, by temperature, top-k, top-p and min-p: kernels/sample.cuh. A cluster of
//! CTAs has a row.

mod arguments;

use std::ffi::c_void;

use arguments::{Arguments, MAX_CTAS, MOST_COLUMNS, NOISE_CTAS, SHARED_BYTES, THREADS};

use crate::cache::Cache;
use crate::driver::{DeviceNumber, Driver, Extent, Kernel, RawStream};
use crate::{Device, Error, Result, library};

/// CTAs of a cluster that every GPU with clusters runs.
const PORTABLE_CTAS: u32 = 8;

/// Columns for which one CTA more is worth its exchanges.
const LEAST_COLUMNS: usize = 2048;

/// Logits `[rows, vocab]` on a GPU.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    rows: usize,
    vocab: usize,
}

/// What a draw reads and writes, on a GPU.
#[derive(Clone, Copy, Debug)]
pub struct Arrays {
    /// `[rows, vocab]`.
    pub logits: *const f32,
    /// `[rows, 2]`: keys of threefry2x32.
    pub keys: *const u32,
    /// `[rows]`
    pub steps: *const i32,
    /// `[rows]`: a step and its start, added up, give a key its own noise.
    pub starts: *const i32,
    /// `[4]`: temperature, top_k, top_p and min_p.
    pub options: *const f32,
    /// `[rows]`: the tokens, -1 in rows without a finite largest logit.
    pub tokens: *mut i32,
    /// `[rows]`: their log-probabilities at the temperature, NaN in those rows.
    pub logps: *mut f32,
    /// `[rows, vocab]`: scratch for the noise of a kernel of more CTAs than a cluster has; null without it, where few
    /// columns get noise, and for rows that fill a GPU.
    pub bounds: *mut f32,
}

/// What draws on a device.
#[derive(Clone, Copy)]
struct Ready {
    kernel: Kernel,
    /// Draws noise for `kernel`.
    noise_kernel: Kernel,
    /// The most CTAs of a cluster that the device runs.
    most_ctas: u32,
}

impl Sample {
    /// The largest vocabulary: clusters of 8 CTAs have room for it.
    pub const LARGEST_VOCAB: usize = PORTABLE_CTAS as usize * MOST_COLUMNS;

    /// Plans a draw.
    ///
    /// # Errors
    /// A vocabulary of none or of more than [`LARGEST_VOCAB`](Self::LARGEST_VOCAB), or more rows than a grid has.
    pub fn new(rows: usize, vocab: usize) -> Result<Self> {
        if !(1..=Self::LARGEST_VOCAB).contains(&vocab) {
            return Err(invalid(format!(
                "the vocabulary is {vocab}; it must be 1 to {}",
                Self::LARGEST_VOCAB
            )));
        }
        let most = i32::MAX.unsigned_abs() / MAX_CTAS;
        if rows > most as usize {
            return Err(invalid(format!("there are {rows} rows; there may be {most} at most")));
        }
        Ok(Self { rows, vocab })
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

    /// Has `stream` draw a token of each row.
    ///
    /// # Errors
    /// No driver or GPU that will do, a failure of the driver.
    ///
    /// # Safety
    /// `stream` is a `CUstream` of the calling thread's current context, and the pointers lead to arrays of these
    /// shapes on its device, which nothing else touches until it has run what was launched here.
    pub unsafe fn run(&self, stream: *mut c_void, arrays: Arrays) -> Result<()> {
        if self.rows == 0 {
            return Ok(());
        }
        // SAFETY: passed on from this function's contract.
        let Ready { kernel, noise_kernel, most_ctas } = unsafe { self.ready(stream) }?;
        let Arrays { logits, keys, steps, starts, options, tokens, logps, bounds } = arrays;
        let (rows, vocab) = (self.rows as i32, self.vocab as i32);
        let arguments =
            Arguments { logits, keys, steps, starts, options, tokens, logps, bounds, rows, vocab };
        let extent = self.extent(self.ctas().min(most_ctas));
        let driver = Driver::get()?;
        // SAFETY: passed on from this function's contract; both kernels wait for the launch before.
        unsafe {
            if !bounds.is_null() {
                // In clusters, which leave other groups of multiprocessors to the clusters of rows.
                let cluster = Some(most_ctas);
                let all = Extent { ctas: NOISE_CTAS, shared_bytes: 0, cluster, ..extent };
                driver.launch_early(noise_kernel, all, stream, &arguments)?;
            }
            driver.launch_early(kernel, extent, stream, &arguments)
        }
    }

    /// CTAs of a cluster: a power of two, and at least two, as memcheck takes a message of a CTA to itself for a
    /// fault where its cluster has no other.
    fn ctas(&self) -> u32 {
        let ctas = self.vocab.div_ceil(LEAST_COLUMNS).next_power_of_two();
        u32::try_from(ctas).unwrap_or(MAX_CTAS).clamp(2, MAX_CTAS)
    }

    /// The launch in clusters of so many CTAs.
    fn extent(&self, ctas: u32) -> Extent {
        let columns = self.vocab.div_ceil(ctas as usize);
        Extent {
            ctas: self.rows as u32 * ctas,
            rows: 1,
            threads: THREADS,
            shared_bytes: (SHARED_BYTES + 4 * columns) as u32,
            cluster: Some(ctas),
        }
    }

    /// The kernels for the current device.
    ///
    /// # Safety
    /// `stream` is a `CUstream` of the calling thread's current context.
    unsafe fn ready(&self, stream: RawStream) -> Result<Ready> {
        static READY: Cache<DeviceNumber, Ready> = Cache::new();
        let device = Device::current()?;
        let limits = device.limits();
        let needed = self.extent(self.ctas().min(PORTABLE_CTAS)).shared_bytes;
        if !limits.clusters {
            let (major, minor) = device.capability();
            return Err(invalid(format!(
                "{} has compute capability {major}.{minor}; the kernel that draws tokens needs 9.0 or later",
                device.name()
            )));
        }
        if needed > limits.shared_bytes_per_block {
            return Err(Error::SharedMemory {
                needed: needed as usize,
                most: limits.shared_bytes_per_block,
            });
        }
        READY.get(device.number(), |_| {
            // SAFETY: passed on from this function's contract.
            let load = |name| unsafe { library::kernel(name, device, stream) };
            let (kernel, noise_kernel) = (load("sample")?, load("sample_noise")?);
            library::allow_wide_clusters(kernel, device)?;
            library::allow_wide_clusters(noise_kernel, device)?;
            // The largest vocabulary: with less shared memory a cluster has room where this one has.
            let wide = Self { rows: 1, vocab: Self::LARGEST_VOCAB }.extent(MAX_CTAS);
            // SAFETY: as above.
            let most = unsafe { Driver::get()?.max_active_clusters(kernel, wide, stream) };
            let has_room = most.is_ok_and(|clusters| clusters > 0);
            let most_ctas = if has_room { MAX_CTAS } else { PORTABLE_CTAS };
            Ok(Ready { kernel, noise_kernel, most_ctas })
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
    fn clusters_have_room_for_the_vocabulary() {
        let ctas = |vocab| Sample::new(1, vocab).unwrap().ctas();
        assert_eq!([1, 2048, 2049, 5000, 32_000, 151_936].map(ctas), [2, 2, 2, 4, 16, 16]);
        let largest = Sample::new(3, Sample::LARGEST_VOCAB).unwrap();
        let extent = largest.extent(PORTABLE_CTAS);
        assert_eq!((extent.ctas, extent.cluster), (24, Some(8)));
        assert!(extent.shared_bytes <= 232_448, "{}", extent.shared_bytes);
    }

    #[test]
    fn other_extents_are_refused() {
        let message = |rows, vocab| Sample::new(rows, vocab).unwrap_err().to_string();
        assert_eq!(message(1, 0), "the vocabulary is 0; it must be 1 to 262144");
        assert_eq!(message(1, 262_145), "the vocabulary is 262145; it must be 1 to 262144");
        assert_eq!(message(1 << 27, 9), "there are 134217728 rows; there may be 134217727 at most");
    }
}
