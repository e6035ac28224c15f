//! `gradcheck`: exit 0 within tolerance, 1 outside it, 2 for bad input.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Parser;

use crate::config::Implementation;
use crate::{cli, draft, gradcheck, presets};

/// Checks a kernel against the float64 reference, and prints a verdict
#[derive(Parser)]
#[command(version, after_help = "exit code: 0 within tolerance, 1 outside it, 2 bad input")]
pub struct Arguments {
    /// The YAML config; configs/gradcheck/ has one for every vocabulary and option
    #[arg(long, value_name = "FILE", required_unless_present = "preset")]
    config: Option<PathBuf>,
    /// A shipped config, instead of --config
    #[arg(long, value_name = "NAME", conflicts_with = "config", value_parser = presets::parser("gradcheck"))]
    preset: Option<String>,
    /// Overrides a key of the config, such as --set shape.vocab=50257; may be repeated
    #[arg(long, value_name = "KEY=VALUE", num_args = 1..)]
    set: Vec<String>,
    /// The implementation
    #[arg(long = "impl")]
    implementation: Option<Implementation>,
    /// Manifest of a program that JAX exported, to run as the kernel on xla: backends
    #[arg(long, value_name = "FILE")]
    program: Option<PathBuf>,
    /// The folder of compiled programs, for xla: backends; only these tools may write there.
    /// Default: XENTILE_CACHE, if set
    #[arg(long, value_name = "DIR")]
    cache: Option<PathBuf>,
    /// Also writes the report as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Runs the command; returns its exit code.
///
/// # Errors
/// Bad input.
pub fn run(arguments: &Arguments) -> Result<u8> {
    let path =
        presets::choose("gradcheck", arguments.config.as_deref(), arguments.preset.as_deref())
            .context("no config: name one by --config or --preset")?;
    let mut config = gradcheck::load(&path, &arguments.set, arguments.program.as_deref())?;
    config.implementation = arguments.implementation.unwrap_or(config.implementation);
    config.cache = arguments.cache.clone().or(config.cache);
    let report = gradcheck::run(&config)?;
    print!("{}", report.to_text());
    if let Some(path) = &arguments.json {
        write_json(path, &report.to_json())?;
    }
    Ok(if report.passed() { cli::PASSED } else { cli::FAILED })
}

fn write_json(path: &Path, json: &serde_json::Value) -> Result<()> {
    let text = serde_json::to_string_pretty(json)? + "\n";
    draft::write_whole(path, text.as_bytes())
        .with_context(|| format!("cannot write {}", path.display()))
}
