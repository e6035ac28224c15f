//! CPU kernels for training language models.
//!
//! Each operation is one file ([`activation`], [`cross_entropy`], [`flash_attention`],
//! [`fp8_quantize`], [`linear_attention`], [`linear_cross_entropy`], [`norm`], [`optimizers`],
//! [`rope`], [`scale`](mod@scale)) written once over the [`simd`](Simd) trait and compiled for every
//! instruction set in [`Isa`], chosen at run time. Rows are spread over the threads of a [`Parallel`];
//! which thread takes a row never changes a bit of it.
//!
//! Kernels know nothing of XLA: a custom-call handler passes its own thread pool as [`Parallel`].

pub mod activation;
pub mod causal_conv1d;
mod compiled;
mod convert;
pub mod copy;
pub mod cross_entropy;
pub mod flash_attention;
pub mod fp8_quantize;
mod in_out;
mod isa;
pub mod kv_cache;
mod launch;
pub mod linear;
pub mod linear_attention;
pub mod linear_cross_entropy;
pub mod math;
pub mod norm;
#[cfg(feature = "operation")]
pub mod operation;
#[cfg(feature = "operation")]
mod operations;
pub mod optimizers;
mod parallel;
mod product;
pub mod rope;
pub mod scale;
mod simd;

pub use in_out::InOut;
pub use isa::Isa;
pub use launch::Launch;
#[cfg(feature = "operation")]
pub use operations::kernels;
pub use parallel::{Parallel, Threads};
pub(crate) use simd::PairsOfBf16;
pub use simd::{Job, Simd};

/// The program in the crate's README, compiled and run with the documentation's tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

/// Of how many arguments tests that try all of them take one: under Miri, which interprets, few.
#[cfg(test)]
const ONE_IN: usize = if cfg!(miri) { 1021 } else { 1 };
