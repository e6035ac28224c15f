//! XLA's PJRT plug-ins for Rust.
//!
//! A plug-in is a shared library that compiles StableHLO for a kind of device and runs it: XLA on
//! the CPU, on GPUs, on TPUs. It is opened at run time and speaks a C interface, PJRT, that this
//! crate declares itself: nothing is linked, and no XLA is needed to build.
//!
//! ```no_run
//! use pjrt_client::{CompileOptions, Platform, Plugin, Program};
//!
//! # fn main() -> pjrt_client::Result {
//! let plugin = Plugin::find(Platform::Cpu, None)?;
//! let client = plugin.client(&[("cpu_device_count", 4.into())])?;
//! let program = "func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
//!   %y = stablehlo.add %x, %x : tensor<2xf32>
//!   return %y : tensor<2xf32>
//! }";
//! let double = client.compile(&Program::mlir(program), &CompileOptions::new())?;
//! let x = client.buffer(&[1.0_f32, 2.0], &[2])?;
//! let y = double.execute(&[&x])?;
//! assert_eq!(y[0].to_vec::<f32>()?, [2.0, 4.0]);
//! # Ok(())
//! # }
//! ```
//!
//! - **Any plug-in of the major version.** Every function is looked for within the plug-in's own
//!   table, and one that it lacks is [`Error::MissingFunction`] when it is called. Newer plug-ins
//!   find room for the fields they added.
//! - **Whatever order things are dropped in.** Buffers and programs keep their client, which shuts
//!   down after the last of them. All types may be sent to and shared by threads, as PJRT allows.
//! - **What is not reported is `None`.** Figures about memory that a plug-in does not have are never
//!   zero.
//! - **No device needed.** A [`Topology`] describes devices that are elsewhere, and programs are
//!   compiled for them.

#[cfg(not(all(unix, target_pointer_width = "64")))]
compile_error!("PJRT plug-ins are there for Unix with pointers of 64 bits");

pub mod abi;
mod buffer;
mod cache;
mod client;
mod device;
mod dtype;
mod error;
mod event;
mod executable;
mod extension;
mod handler;
mod layout;
mod library;
mod loaded;
mod locate;
mod memory;
mod options;
mod place;
mod platform;
mod plugin;
mod program;
mod raw;
mod raw_client;
mod stats;
mod topology;
mod value;
mod version;

pub use buffer::Buffer;
pub use cache::{Cache, CacheError, Cached};
pub use client::Client;
pub use device::{Device, DeviceDescription};
pub use dtype::{DType, Element};
pub use error::{Code, Error, Result};
pub use event::{Event, Transfer};
pub use executable::{Executable, Output};
pub use extension::Extension;
pub use handler::Handlers;
pub use layout::Layout;
pub use loaded::{ExecuteOptions, Execution, LoadedExecutable};
pub use memory::Memory;
pub use options::CompileOptions;
pub use place::Place;
pub use platform::Platform;
pub use plugin::Plugin;
pub use program::{OptimizedProgram, Program};
pub use stats::{CompiledMemoryStats, MemoryStats};
pub use topology::Topology;
pub use value::{Value, Values};
pub use version::Version;

/// The program on a page of docs/, compiled with the documentation's tests.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/how-to/pjrt-client.md")]
struct HowTo;
