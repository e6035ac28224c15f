//! A step of AdamW with moments in 8 bits over many arrays, which are written in their place.

use std::ffi::c_void;
use std::ptr::null_mut;

use xentile::DType;
use xentile::optimizers::BLOCKS;

use crate::driver::{Driver, Extent, Kernel, RawStream};
use crate::{Device, Error, Result, check_alignment, library};

mirror! {
    /// See kernels/optimizers.cuh.
    struct Array = OptimizerArray {
        grads: *const c_void,
        params: *mut c_void,
        mu: *mut c_void,
        nu: *mut c_void,
        mu_scales: *mut f32,
        nu_scales: *mut f32,
        size: i64,
        first_chunk: u32,
        block_log2: u32,
    }
}

mirror! {
    /// See kernels/optimizers.cuh.
    struct Arguments = OptimizerArguments {
        scalars: *const i32,
        leaves: *const i32,
        arrays: u32,
        chunks: u32,
        array: [Array; 256],
    }
}

numbers! {
    ARRAYS: u32 = kOptimizerArrays, 256;
    THREADS: u32 = kOptimizerThreads, 896;
    CHUNK: u32 = kOptimizerChunk, 256;
    SHARED_BYTES: u32 = kOptimizerSharedBytes, 98_560;
}

impl Array {
    const NONE: Self = Self {
        grads: null_mut(),
        params: null_mut(),
        mu: null_mut(),
        nu: null_mut(),
        mu_scales: null_mut(),
        nu_scales: null_mut(),
        size: 0,
        first_chunk: 0,
        block_log2: 0,
    };
}

/// Where a parameter's moments are, on the device: codes, and a scale in f32 for each `block` of them.
#[derive(Clone, Copy, Debug)]
pub struct State {
    /// Codes of the first moment.
    pub mu: *mut c_void,
    /// Its scales.
    pub mu_scales: *mut f32,
    /// Codes of the second moment.
    pub nu: *mut c_void,
    /// Its scales.
    pub nu_scales: *mut f32,
    /// One of [`BLOCKS`], which divides the number of entries.
    pub block: usize,
}

/// A parameter with its gradient and state, on the device.
#[derive(Clone, Copy, Debug)]
pub struct Parameter {
    /// Entries of the parameter.
    pub size: usize,
    /// The gradient.
    pub grads: *const c_void,
    /// The parameter, which is overwritten.
    pub params: *mut c_void,
    /// The state, which is overwritten.
    pub state: State,
}

/// A step of AdamW with moments in 8 bits, for parameters of one dtype, on a GPU.
#[derive(Clone, Copy, Debug)]
pub struct AdamW8bit {
    /// The dtype of parameters: f32 or bf16.
    pub params: DType,
    /// The dtype of gradients: f32 or bf16.
    pub grads: DType,
}

impl AdamW8bit {
    /// Loads the kernel, so that [`run`](Self::run) has only to launch it.
    ///
    /// # Errors
    /// No driver or GPU that will do, or no kernel for the dtypes.
    ///
    /// # Safety
    /// `stream` is a `CUstream` of the calling thread's current context.
    pub unsafe fn load(&self, stream: *mut c_void) -> Result<()> {
        // SAFETY: passed on from this function's contract.
        unsafe { self.kernel(stream) }.map(drop)
    }

    /// Has `stream` make a step, in a launch for every 256 parameters. `scalars` are the words of
    /// [`Scalars`](xentile::optimizers::Scalars) on the device. `leaves` has a word for each
    /// parameter: twice its number, which seeds stochastic rounding, plus 1 if it decays.
    ///
    /// # Errors
    /// No driver or GPU that will do, arrays that begin at no multiple of 16, blocks that do not fit, a failure
    /// of the driver.
    ///
    /// # Safety
    /// `stream` is a `CUstream` of the calling thread's current context, and the pointers lead to arrays of these
    /// sizes on its device, apart from each other, which nothing else touches until it has run what was
    /// launched here.
    pub unsafe fn run(
        &self,
        stream: *mut c_void,
        scalars: *const i32,
        leaves: *const i32,
        parameters: &[Parameter],
    ) -> Result<()> {
        // SAFETY: passed on from this function's contract.
        let kernel = unsafe { self.kernel(stream) }?;
        let most = Device::current()?.limits().multiprocessors;
        for (index, some) in parameters.chunks(ARRAYS as usize).enumerate() {
            let leaves = leaves.wrapping_add(index * ARRAYS as usize);
            let arguments = arguments(scalars, leaves, some)?;
            let ctas = arguments.chunks.div_ceil(THREADS / 32).min(most);
            if ctas == 0 {
                continue;
            }
            let extent = Extent {
                ctas,
                rows: 1,
                threads: THREADS,
                shared_bytes: SHARED_BYTES,
                cluster: None,
            };
            // SAFETY: passed on from this function's contract.
            unsafe { Driver::get()?.launch(kernel, extent, stream, &*arguments) }?;
        }
        Ok(())
    }

    /// # Safety
    /// `stream` is a `CUstream` of the calling thread's current context.
    unsafe fn kernel(&self, stream: RawStream) -> Result<Kernel> {
        let name = format!("adamw_8bit_{}_{}", self.params, self.grads);
        // SAFETY: passed on from this function's contract.
        unsafe { library::kept_kernel(&name, Device::current()?, stream) }
    }
}

/// The arguments of a launch for 256 parameters at most.
fn arguments(
    scalars: *const i32,
    leaves: *const i32,
    parameters: &[Parameter],
) -> Result<Box<Arguments>> {
    let mut table = Box::new(Arguments {
        scalars,
        leaves,
        arrays: parameters.len() as u32,
        chunks: 0,
        array: [Array::NONE; 256],
    });
    let mut chunks = 0_u64;
    for (row, one) in table.array.iter_mut().zip(parameters) {
        *row = array(one, chunks as u32)?;
        chunks += one.size.div_ceil(CHUNK as usize) as u64;
    }
    // Kernels count an array's groups of 4 entries in 32 bits, and chunks of all arrays, to which a CTA's last turn adds
    // the warps of a grid.
    let fits = parameters.iter().all(|one| (one.size as u64) < 1 << 34);
    let chunks = u32::try_from(chunks).ok().filter(|&chunks| fits && chunks < 1 << 31);
    table.chunks = chunks.ok_or_else(|| {
        let largest = parameters.iter().map(|one| one.size).max().unwrap_or(0);
        Error::Problem(xentile::Error::Shape {
            tokens: parameters.len(),
            vocab: largest,
            requirement: "each parameter must have below 2^34 entries, and those of a launch below 2^39",
        })
    })?;
    Ok(table)
}

/// A row of the table.
fn array(of: &Parameter, first_chunk: u32) -> Result<Array> {
    let State { mu, mu_scales, nu, nu_scales, block } = of.state;
    if !BLOCKS.contains(&block) || !of.size.is_multiple_of(block) {
        return Err(Error::Problem(xentile::Error::Shape {
            tokens: of.size.checked_div(block).unwrap_or(0),
            vocab: block,
            requirement: "blocks of 8-bit state must have 256, 128 or 64 entries, all of them full",
        }));
    }
    for (name, address) in [
        ("grads", of.grads),
        ("params", of.params.cast_const()),
        ("mu", mu.cast_const()),
        ("nu", nu.cast_const()),
    ] {
        check_alignment(name, address)?;
    }
    Ok(Array {
        grads: of.grads,
        params: of.params,
        mu,
        nu,
        mu_scales,
        nu_scales,
        size: of.size as i64,
        first_chunk,
        block_log2: block.ilog2(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(address: usize) -> *mut c_void {
        std::ptr::without_provenance_mut(address)
    }

    fn quantized(size: usize, block: usize) -> Parameter {
        let scales = at(0x9000).cast();
        let state =
            State { mu: at(0x3000), mu_scales: scales, nu: at(0x4000), nu_scales: scales, block };
        Parameter { size, grads: at(0x1000), params: at(0x2000), state }
    }

    #[test]
    fn chunks_follow_each_other() {
        let null = std::ptr::null();
        let sizes = [256, 0, 64, 320];
        let all = sizes.map(|size| quantized(size, 64));
        let table = arguments(null, null, &all).unwrap();
        assert_eq!(table.chunks, 4);
        let first: Vec<_> = table.array[..4].iter().map(|row| row.first_chunk).collect();
        assert_eq!(first, [0, 1, 1, 2]);
        assert_eq!(table.array[0].block_log2, 6);
    }

    #[test]
    fn wrong_lengths_are_refused() {
        for (size, block) in [(100, 64), (192, 96), (256, 0)] {
            let error = array(&quantized(size, block), 0).unwrap_err().to_string();
            assert!(error.contains("256, 128 or 64 entries"), "{error}");
        }
        let odd = Parameter { params: at(0x2004), ..quantized(64, 64) };
        let error = array(&odd, 0).unwrap_err().to_string();
        assert_eq!(error, "`params` is at 0x2004; it must be at a multiple of 16");
        let many = quantized(usize::MAX / 2 / 256 * 256, 256);
        let error = arguments(std::ptr::null(), std::ptr::null(), &[many]).unwrap_err();
        assert!(error.to_string().contains("below 2^34 entries"), "{error}");
    }
}
