//! A measurement in a process of its own, so that its peak of memory is its own too.

use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::config::Config;
use crate::draft::Draft;

/// The report of `config`.
///
/// # Errors
/// As for [`report`], or its file cannot be written.
pub(crate) fn measured(config: &Config) -> Result<Value> {
    // Never finished: it is there for the process alone.
    let cell = Draft::new(&std::env::temp_dir().join("xentile-cell.yaml"))?;
    std::fs::write(cell.path(), serde_yaml::to_string(config)?)
        .with_context(|| format!("cannot write {}", cell.path().display()))?;
    report(cell.path(), &[])
}

/// The report of the config at `path`, overridden by `sets`.
///
/// # Errors
/// What the process says that it failed with.
pub(crate) fn report(path: &Path, sets: &[String]) -> Result<Value> {
    let mut arguments = vec![OsString::from("--config"), path.into()];
    if !sets.is_empty() {
        arguments.push("--set".into());
        arguments.extend(sets.iter().map(OsString::from));
    }
    report_of(arguments)
}

/// The report of `microbench` with these arguments.
///
/// # Errors
/// As for [`report`].
pub(crate) fn report_of(arguments: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Result<Value> {
    let program = std::env::current_exe().context("cannot find this program's own file")?;
    let mut command = Command::new(&program);
    // microbench measures by itself, and xentile has it as a command.
    if program.file_stem().is_some_and(|name| name == "xentile") {
        command.arg("microbench");
    }
    let output = command
        .args(arguments)
        .args(["--json", "-"])
        .stdin(Stdio::null())
        .output()
        .context("cannot start the measurement's process")?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        match stderr.lines().rfind(|line| !line.trim().is_empty()) {
            Some(line) if output.status.code().is_some() => {
                bail!("{}", line.strip_prefix("error: ").unwrap_or(line))
            }
            _ => bail!("the measurement's process ended with {}", output.status),
        }
    }
    for warning in stderr.lines().filter(|line| line.starts_with("warning: ")) {
        eprintln!("{warning}");
    }
    serde_json::from_slice(&output.stdout).context("the measurement's report is not JSON")
}
