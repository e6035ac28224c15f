//! XLA's typed FFI for Rust: a custom call is a function of typed buffers and attributes.
//!
//! ```
//! use xla_ffi::{Buffer, BufferMut};
//!
//! /// `z = alpha * x + y`
//! fn axpy(x: Buffer<f32>, y: Buffer<f32>, mut z: BufferMut<f32>, alpha: f32) {
//!     for (z, (x, y)) in z.iter_mut().zip(x.iter().zip(&*y)) {
//!         *z = alpha * x + y;
//!     }
//! }
//!
//! xla_ffi::handler! {
//!     /// The symbol to register with XLA, or through `jax.ffi.register_ffi_target`.
//!     pub fn example_axpy = axpy(x, y, z, alpha);
//! }
//! # fn main() {}
//! ```
//!
//! [`handler!`] lists what a parameter can be. `examples/axpy.rs` is a whole custom call, with its
//! JAX side in `examples/axpy.py`.
//!
//! - **Checked.** Before the function runs, every struct size, pointer, count, type and rank of the
//!   call frame is checked, results are seen to share no memory with what the function reads, and a
//!   frame that does not fit is answered with `INVALID_ARGUMENT` and the reason. A panic becomes
//!   `INTERNAL`.
//! - **Any runtime since XLA FFI 0.1.** Handlers answer that version, and functions that a runtime
//!   lacks are errors of the call that needs them.
//! - **Host or device.** A [`Buffer`] is a slice, for platforms whose memory the processor reads. Take
//!   [`OnDevice`] buffers on others: those give an address alone.
//! - **Tested without XLA.** The feature `testing` makes call frames by hand.

pub mod abi;
mod api;
mod attributes;
mod buffer;
mod context;
mod decoder;
mod dtype;
mod error;
mod frame;
mod handler;
mod once;
mod pointers;
mod raw;
mod stage;
#[cfg(feature = "testing")]
pub mod testing;

pub use attributes::{Array, Attribute, Dictionary, FromAttribute, Scalar};
pub use buffer::{
    Aliased, AnyBuffer, AnyBufferMut, Buffer, BufferKind, BufferMut, MayAlias, OnDevice,
};
pub use context::{Context, Scratch, Stream, ThreadPool};
pub use decoder::{Attributes, Decoder, Parameter};
pub use dtype::{DType, Element, F8E4M3FN, F8E5M2, Pred};
pub use error::{Error, ErrorCode, Result};
pub use handler::{Outcome, call};
pub use raw::ANY_RANK;
pub use stage::{Stage, Traits};

#[cfg(not(target_pointer_width = "64"))]
compile_error!("XLA runs on platforms with pointers of 64 bits");

/// The program on a page of docs/, compiled with the documentation's tests.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/how-to/custom-call.md")]
struct HowTo;
