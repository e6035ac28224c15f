//! `xentile microbench` by its old name.

use std::process::ExitCode;

use clap::Parser;
use xentile_tools::{cli, commands::microbench};

fn main() -> ExitCode {
    cli::finish(microbench::run(&microbench::Arguments::parse()))
}
