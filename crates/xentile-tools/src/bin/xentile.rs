//! What there is to run, and to run on: `xentile ops`, `xentile plugins`.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};
use xentile_tools::{cli, ops, plugins, tpu};

/// Tells what xentile finds on this machine.
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Lists the operations there are. With a NAME: what that one takes and gives, its dims and options
    /// with their defaults, and what runs it on this machine.
    Ops {
        /// An operation.
        name: Option<String>,
    },
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
        Command::Ops { name } => operations(name.as_deref()),
        Command::Plugins { plugin } => list(plugin),
    })
}

fn operations(name: Option<&str>) -> Result<u8> {
    print!("{}", name.map_or_else(|| Ok(ops::list()), ops::describe)?);
    Ok(cli::PASSED)
}

fn list(plugin: Option<PathBuf>) -> Result<u8> {
    if tpu::would_wait() {
        return tpu::again();
    }
    let (text, any) = plugins::describe(plugin.as_deref());
    print!("{text}");
    Ok(if any { cli::PASSED } else { cli::BAD_INPUT })
}
