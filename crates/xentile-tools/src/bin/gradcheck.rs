//! `xentile gradcheck` by its old name.

use std::process::ExitCode;

use clap::Parser;
use xentile_tools::{cli, commands::gradcheck};

fn main() -> ExitCode {
    cli::finish(gradcheck::run(&gradcheck::Arguments::parse()))
}
