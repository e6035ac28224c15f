//! The tools that prove kernels right (`gradcheck`) and fast (`microbench` and its sweep).
//!
//! [`config`] reads what the user asks for, [`gradcheck`] compares, [`microbench`] times, [`sweep`]
//! repeats, [`suite`] tells of all operations, [`decode`] times steps of a decoder, [`plot`] draws, [`ops`] tells what there is. [`commands`] parses flags for the binaries,
//! and [`presets`] are the configs that come with them. No operation is
//! known here by name: `xentile::operations` lists them.

pub mod cli;
pub mod commands;
pub mod config;
pub mod decode;
pub mod draft;
pub mod estimate;
mod exported;
pub mod gradcheck;
pub mod input;
pub mod machine;
pub mod memory;
pub mod microbench;
pub mod ops;
#[cfg(feature = "sweep")]
pub mod plot;
pub mod plugins;
pub mod presets;
mod progress;
pub mod schedule;
mod setup;
#[cfg(feature = "sweep")]
pub mod suite;
#[cfg(feature = "sweep")]
pub mod sweep;
mod timing;
pub mod tpu;
mod xla;
