//! The kernels for TPUs, exported by the Python package `pallas_bridge` where a config asks for them.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use serde_json::json;

use crate::microbench::Config;

/// Names the Python that has `pallas_bridge`.
const PYTHON: &str = "XENTILE_PYTHON";

/// The manifest of the program that `config` describes, exported unless it is there already.
///
/// # Errors
/// There is no Python with `pallas_bridge`, or it refuses the config: what it says.
pub(crate) fn manifest(config: &Config) -> Result<PathBuf> {
    let mut cell = json!({
        "op": config.op,
        "topology": config.topology,
        "time": config.time,
        "vocab": config.vocab,
        "dtype": config.dtype.name(),
        "tile": config.tile,
        "options": config.options,
    });
    let mut hasher = DefaultHasher::new();
    cell.to_string().hash(&mut hasher);
    let folder = folder(config.cache.as_deref())?;
    std::fs::create_dir_all(&folder)
        .with_context(|| format!("cannot make {} for programs of TPUs", folder.display()))?;
    let stem = format!("cross_entropy_{:016x}", hasher.finish());
    let path = folder.join(format!("{stem}.json"));
    cell["program"] = json!(path);
    // Configs have the endings of programs' other files, so that nothing else is named like them.
    let config_path = folder.join(format!("{stem}.config"));
    std::fs::write(&config_path, cell.to_string())
        .with_context(|| format!("cannot write {}", config_path.display()))?;
    export(&config_path)?;
    Ok(path)
}

/// Where programs are kept: the cache of the config or the environment, else the user's.
fn folder(cache: Option<&Path>) -> Result<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    if let Some(cache) = cache.map(Path::to_path_buf).or(set("XENTILE_CACHE").map(PathBuf::from)) {
        return Ok(cache);
    }
    let user = set("XDG_CACHE_HOME").map(PathBuf::from);
    let user = user.or(set("HOME").map(|home| Path::new(&home).join(".cache")));
    let user = user.context("no folder for the programs of TPUs: name one with --cache")?;
    Ok(user.join("xentile"))
}

fn export(config: &Path) -> Result<()> {
    let python = std::env::var_os(PYTHON).map(PathBuf::from).unwrap_or_else(|| {
        match std::env::var_os("VIRTUAL_ENV") {
            Some(environment) => Path::new(&environment).join("bin/python"),
            None => "python3".into(),
        }
    });
    let output = Command::new(&python)
        .args(["-m", "pallas_bridge.export", "--config"])
        .arg(config)
        // It only traces: devices are of no use to it, and may be in use.
        .env("JAX_PLATFORMS", "cpu")
        .stdin(Stdio::null())
        .output();
    let missing = |what: &str| {
        format!(
            "{what}; kernels for xla:tpu come from pallas_bridge: run `pip install ./pallas_bridge` \
             in a checkout of xentile, or name a Python that has it in {PYTHON}, or a program that \
             was exported with --program FILE.json, or take the dense one with --impl reference"
        )
    };
    let output = match output {
        Ok(output) => output,
        Err(error) => bail!(missing(&format!("cannot run {}: {error}", python.display()))),
    };
    if output.status.success() {
        return Ok(());
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    let last = stderr.lines().rfind(|line| !line.trim().is_empty()).unwrap_or_default();
    match last.strip_prefix("error: ") {
        Some(reason) => bail!("{reason}"),
        None => bail!(missing(&format!("{} does not export: {last}", python.display()))),
    }
}
