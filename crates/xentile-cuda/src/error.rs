//! Why a kernel does not run.

use thiserror::Error;
use xentile::DType;

/// The result of a fallible call of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a kernel does not run. Versions of CUDA are its own numbers: 13000 is 13.0.
#[derive(Clone, Debug, Error, PartialEq)]
#[non_exhaustive]
pub enum Error {
    /// The kernels were not compiled.
    #[error(
        "there are no CUDA kernels in this build; the feature `kernels` of xentile-cuda adds them"
    )]
    NoKernels,
    /// The driver's library is not there, or lacks something.
    #[error(
        "no CUDA driver: {reason}; install NVIDIA's driver for CUDA {} or later",
        version(*.needed)
    )]
    NoDriver {
        /// What the loader says.
        reason: String,
        /// The oldest version of CUDA that will do.
        needed: i32,
    },
    /// The driver is older than the code in this library.
    #[error(
        "the CUDA driver is for CUDA {}; the kernels here need one for CUDA {} or later",
        version(*.actual),
        version(*.needed)
    )]
    DriverTooOld {
        /// The driver's version of CUDA.
        actual: i32,
        /// The oldest that will do.
        needed: i32,
    },
    /// There is no GPU, or none that this process may see.
    #[error(
        "the CUDA driver finds no GPU; the kernels here need one (is CUDA_VISIBLE_DEVICES set?)"
    )]
    NoDevice,
    /// The GPU is older than the code in this library.
    #[error(
        "{name} has compute capability {}.{}; the kernels here need 8.0 or later",
        .capability.0,
        .capability.1
    )]
    DeviceTooOld {
        /// What the driver calls it.
        name: String,
        /// Its compute capability.
        capability: (i32, i32),
    },
    /// A function of the driver failed.
    #[error("{function} failed: {reason}")]
    Driver {
        /// The function.
        function: &'static str,
        /// The driver's name of the error, and its words for it.
        reason: String,
    },
    /// cuBLASLt is not there, or lacks something.
    #[error(
        "no cuBLASLt, whose products linear cross-entropy needs: {reason}; install CUDA's cuBLAS, or \
         set {variable} to the library's path"
    )]
    NoBlas {
        /// What the loader says.
        reason: String,
        /// The environment variable that names the library.
        variable: &'static str,
    },
    /// A function of cuBLASLt failed.
    #[error("{function} failed with status {status}")]
    Blas {
        /// The function.
        function: &'static str,
        /// cuBLAS's status.
        status: i32,
    },
    /// Scratch that is less than what a call needs.
    #[error("scratch of {bytes} bytes is too little; {needed} bytes are needed")]
    Scratch {
        /// Bytes that were given.
        bytes: usize,
        /// The least that will do.
        needed: usize,
    },
    /// A workspace of products that has no room for sums of rows, or logits in f32.
    #[error(
        "a workspace of {bytes} bytes is too little for operands of 16 bits; it must be at least {needed}"
    )]
    Workspace {
        /// Bytes that were given.
        bytes: usize,
        /// The least that will do.
        needed: usize,
    },
    /// Gradients with the loss, in chunks that have neither whole rows nor whole columns.
    #[error(
        "chunks of {tokens} tokens x {columns} columns; where gradients come with the loss, they must \
         have all tokens or all columns"
    )]
    FusedChunk {
        /// Tokens of a chunk.
        tokens: usize,
        /// Columns of a chunk.
        columns: usize,
    },
    /// More saved logits than the memory of dweight holds.
    #[error(
        "logits of {columns} columns, in slots of {slot}, cannot be saved in the memory of dweight; \
         save fewer, of a weight [V, D] and with all tokens in a chunk"
    )]
    SavedColumns {
        /// Columns whose logits were to be saved.
        columns: usize,
        /// Columns of a slot.
        slot: usize,
    },
    /// Columns that cannot have a single pass.
    #[error(
        "{columns} columns cannot have a single pass, {tokens} tokens at a time; it takes some of the \
         columns of a weight [V, D] whose gradient has its dtype, and no saved logits"
    )]
    SinglePass {
        /// Tokens of a chunk.
        tokens: usize,
        /// Columns that were to have a single pass.
        columns: usize,
    },
    /// A row longer than kernels count.
    #[error("the vocabulary is {vocab}; CUDA kernels take at most {}", i32::MAX)]
    Vocabulary {
        /// Columns of the logits.
        vocab: usize,
    },
    /// The same of a norm.
    #[error("rows have {columns} columns; CUDA kernels take at most {}", i32::MAX)]
    Columns32 {
        /// D.
        columns: usize,
    },
    /// A GPU that products with cross-entropy in their epilogue are not for.
    #[error(
        "{name} has compute capability {}.{}; products with cross-entropy in their epilogue are for \
         9.0 alone",
        .capability.0,
        .capability.1
    )]
    NotHopper {
        /// What the driver calls it.
        name: String,
        /// Its compute capability.
        capability: (i32, i32),
    },
    /// Operands that products with cross-entropy in their epilogue do not take.
    #[error(
        "hidden states are {dtype} and {width} wide, and rows of the weight have {row} elements; \
         products with cross-entropy in their epilogue take 16-bit dtypes and multiples of 8"
    )]
    FusedProduct {
        /// Of the operands.
        dtype: DType,
        /// D.
        width: usize,
        /// D, or V where that is last.
        row: usize,
    },
    /// Running sums of a gradient that would be rounded at every step.
    #[error("the weight's gradient that is added to is in {dtype}; it must be in f32")]
    RunningSums {
        /// Of the gradient.
        dtype: DType,
    },
    /// An unnormalised softmax that a dtype cannot hold, or options that need logits.
    #[error(
        "there is no unnormalised softmax of {tokens} tokens in {dtype} or for these options; it \
         needs bf16, {most} tokens at most, and not both softcap and label_smoothing"
    )]
    Unnormalised {
        /// Of the operands.
        dtype: DType,
        /// N.
        tokens: usize,
        /// The most that there may be.
        most: usize,
    },
    /// A GPU that has no room for the kernel that decodes a token, or no code for it.
    #[error(
        "{name} has compute capability {}.{} and {multiprocessors} multiprocessors; the kernel that \
         decodes a token needs 9.0 and at least 128",
        .capability.0,
        .capability.1
    )]
    DecodeStep {
        /// What the driver calls it.
        name: String,
        /// Its compute capability.
        capability: (i32, i32),
        /// How many it has.
        multiprocessors: u32,
    },
    /// A kernel whose CTA needs more shared memory than the GPU gives one.
    #[error(
        "a kernel needs {needed} bytes of shared memory, and this GPU gives a CTA {most} at most"
    )]
    SharedMemory {
        /// Bytes of a CTA.
        needed: usize,
        /// The most that it may have.
        most: u32,
    },
    /// A GPU of which this process has too small a part.
    #[error("{name} has no room for a cluster of two CTAs")]
    NoCluster {
        /// What the driver calls it.
        name: String,
    },
    /// Columns that a matrix of dlogits cannot have.
    #[error(
        "dlogits are {columns} of {vocab} columns from {first_column} on, with rows {stride} elements \
         apart; columns must be the vocabulary's, and rows a multiple of 8 apart that has room for them"
    )]
    Columns {
        /// The first column.
        first_column: usize,
        /// How many there are.
        columns: usize,
        /// Elements from row to row.
        stride: usize,
        /// Columns of the vocabulary.
        vocab: usize,
    },
    /// An array that does not begin where vectors do.
    #[error("`{name}` is at {address:#x}; it must be at a multiple of 16")]
    Alignment {
        /// The argument.
        name: &'static str,
        /// Its address on the device.
        address: usize,
    },
    /// Two arrays that overlap otherwise than exactly.
    #[error("`{name}` lies over a part of `{other}`; it must lie exactly in its place, or apart")]
    Overlap {
        /// The argument.
        name: &'static str,
        /// The result.
        other: &'static str,
    },
    /// What no kernel of any backend takes.
    #[error(transparent)]
    Problem(#[from] xentile::Error),
}

/// 13000 as "13.0".
fn version(number: i32) -> String {
    format!("{}.{}", number / 1000, number % 1000 / 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_name_what_would_be_right() {
        let message = |error: Error| error.to_string();
        assert_eq!(
            message(Error::DriverTooOld { actual: 12090, needed: 13000 }),
            "the CUDA driver is for CUDA 12.9; the kernels here need one for CUDA 13.0 or later"
        );
        assert_eq!(
            message(Error::DeviceTooOld { name: "Tesla T4".into(), capability: (7, 5) }),
            "Tesla T4 has compute capability 7.5; the kernels here need 8.0 or later"
        );
        assert_eq!(
            message(Error::NoDriver { reason: "not found".into(), needed: 13000 }),
            "no CUDA driver: not found; install NVIDIA's driver for CUDA 13.0 or later"
        );
    }
}
