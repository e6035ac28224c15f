//! What there is to run on: `xentile plugins`.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};
use xentile_tools::{cli, plugins, tpu};

/// Tells what xentile finds on this machine.
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Lists the PJRT plug-ins that were found: path, platform, versions, extensions, devices,
    /// memory. Exit code 2 where there is none.
    Plugins {
        /// A plug-in's file, instead of those that are found.
        #[arg(long, value_name = "FILE")]
        plugin: Option<PathBuf>,
    },
}

fn main() -> ExitCode {
    cli::finish(match Cli::parse().command {
        Command::Plugins { plugin } => list(plugin),
    })
}

fn list(plugin: Option<PathBuf>) -> Result<u8> {
    if tpu::would_wait() {
        return tpu::again();
    }
    let (text, any) = plugins::describe(plugin.as_deref());
    print!("{text}");
    Ok(if any { cli::PASSED } else { cli::BAD_INPUT })
}
