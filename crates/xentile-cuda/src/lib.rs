//! CUDA kernels for language-model training.
//!
//! Each operation is a file of `kernels/` in CUDA C++ and one here that launches it
//! ([`activation`], [`cross_entropy`], [`decode_step`], [`flash_attention`], [`fp8_quantize`],
//! [`fused_product`], [`kl_divergence`], [`linear_attention`], [`muon`], [`norm`], [`optimizers`],
//! [`sample`], [`scale`](mod@scale)). The build script compiles the kernels for every architecture from
//! Ampere on and embeds the code, if the feature `kernels` is on. That needs CUDA's compiler; running needs
//! NVIDIA's driver alone, which is opened by the first call, so that a program with this library starts on
//! machines without a GPU too, and gets an error there that names what is missing.
//!
//! A launch is one call of the driver on the caller's stream: nothing is allocated and nothing waits.
//! What comes before the first launch of a kind (opening the driver, loading code, asking the device)
//! is done once and kept; `load` does it ahead of time, for callers that record a CUDA graph.
//!
//! The driver's functions, twenty-one of them, are declared here rather than taken from `cudarc`:
//! its table, opened at run time, panics where a library or a function is missing, which is the case
//! that a library for all machines has to answer with an error.

#[macro_use]
mod mirror;
pub mod activation;
mod bias;
mod blas;
mod cache;
pub mod causal_conv1d;
pub mod cross_entropy;
pub mod decode_step;
mod device;
mod driver;
mod error;
pub mod flash_attention;
pub mod fp8_quantize;
pub mod fused_product;
pub mod kl_divergence;
mod library;
pub mod linear_attention;
pub mod linear_cross_entropy;
pub mod muon;
pub mod norm;
mod operands;
pub mod optimizers;
pub mod qk_norm_rope;
pub mod rope;
mod round;
pub mod sample;
pub mod scale;

pub use device::{Device, Limits};
pub use error::{Error, Result};

use std::ffi::c_void;

/// Checks that there are kernels in this library, a driver that runs them, and a GPU.
///
/// # Errors
/// There are not: what is missing, or too old.
pub fn available() -> Result<()> {
    library::code()?;
    driver::Driver::get().map(drop)
}

/// Checks that `address` is one that kernels read vectors from.
fn check_alignment(name: &'static str, address: *const c_void) -> Result<()> {
    if address.addr().is_multiple_of(16) {
        Ok(())
    } else {
        Err(Error::Alignment { name, address: address.addr() })
    }
}

/// Checks that an argument and a result of `bytes` each, with their names, begin where kernels read
/// vectors from, and are one or apart, as every pass that has both asks of them.
///
/// # Errors
/// They overlap in part, or begin at no multiple of 16.
pub fn check_places(
    (name, argument): (&'static str, *const c_void),
    (other, result): (&'static str, *mut c_void),
    bytes: usize,
) -> Result<()> {
    let (a, b) = (argument.addr(), result.addr());
    if a != b && a.abs_diff(b) < bytes {
        return Err(Error::Overlap { name, other });
    }
    check_alignment(name, argument)?;
    check_alignment(other, result)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrays_are_the_same_or_do_not_overlap() {
        let at = |address: usize| std::ptr::without_provenance_mut::<c_void>(address);
        let check = |a, b| check_places(("logits", at(a)), ("dlogits", at(b)), 64);
        assert_eq!(check(0x1000, 0x1000), Ok(()));
        assert_eq!(check(0x1000, 0x1040), Ok(()));
        assert_eq!(check(0x1040, 0x1000), Ok(()));
        for (a, b) in [(0x1000, 0x1030), (0x1030, 0x1000)] {
            let message = check(a, b).unwrap_err().to_string();
            assert!(message.starts_with("`logits` lies over a part of `dlogits`"), "{message}");
        }
        assert_eq!(
            check(0x1008, 0x2000).unwrap_err().to_string(),
            "`logits` is at 0x1008; it must be at a multiple of 16"
        );
    }
}
