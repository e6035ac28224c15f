//! One program for everything: `xentile gradcheck`, `microbench`, `sweep`, `suite`, `ops`, `plugins`.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{CommandFactory, Parser, Subcommand};
use clap_complete::Shell;
use xentile_tools::commands::gradcheck;
#[cfg(feature = "sweep")]
use xentile_tools::commands::microbench;
use xentile_tools::{cli, ops, plugins, tpu};

/// Checks and measures kernels, and lists operations and plug-ins.
#[derive(Parser)]
#[command(name = "xentile", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Gradcheck(gradcheck::Arguments),
    #[cfg(feature = "sweep")]
    Microbench(Box<microbench::Arguments>),
    #[cfg(feature = "sweep")]
    Sweep(microbench::Sweep),
    #[cfg(feature = "sweep")]
    Suite(microbench::Suite),
    /// Lists operations; with a NAME its arrays, dims, options with defaults, and implementations
    /// on this machine.
    Ops {
        /// An operation.
        name: Option<String>,
    },
    /// Lists the PJRT plug-ins found: path, platform, versions, extensions, devices, memory. Exit
    /// code 2 if there is none.
    Plugins {
        /// A plug-in's file, instead of searching.
        #[arg(long, value_name = "FILE")]
        plugin: Option<PathBuf>,
    },
    /// Prints completions for a shell.
    Completions {
        /// The shell.
        shell: Shell,
    },
    /// Writes man pages, one for each command.
    Man {
        /// The folder to write to.
        folder: PathBuf,
    },
}

fn main() -> ExitCode {
    cli::finish(match Cli::parse().command {
        Command::Gradcheck(arguments) => gradcheck::run(&arguments),
        #[cfg(feature = "sweep")]
        Command::Microbench(arguments) => microbench::run(&arguments),
        #[cfg(feature = "sweep")]
        Command::Sweep(sweep) => sweep.run(),
        #[cfg(feature = "sweep")]
        Command::Suite(suite) => suite.run(),
        Command::Ops { name } => operations(name.as_deref()),
        Command::Plugins { plugin } => list(plugin),
        Command::Completions { shell } => {
            clap_complete::generate(shell, &mut Cli::command(), "xentile", &mut std::io::stdout());
            Ok(cli::PASSED)
        }
        Command::Man { folder } => man(&folder),
    })
}

fn man(folder: &std::path::Path) -> Result<u8> {
    let cannot = || format!("cannot write man pages to {}", folder.display());
    std::fs::create_dir_all(folder).with_context(cannot)?;
    clap_mangen::generate_to(Cli::command(), folder).with_context(cannot)?;
    Ok(cli::PASSED)
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
