//! Reading YAML configs: `--set` overrides, and errors that name the key and the nearest valid one.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use serde::de::DeserializeOwned;
use serde_yaml::{Mapping, Value};

use super::explain::explain;
use super::settings::Taken;
use crate::presets;

/// The largest config read; the shipped ones are under 1 KiB.
const MAX_BYTES: u64 = 1 << 20;

/// What a config is read into. Keys that operations declare are taken out before the rest is read.
pub trait Schema: DeserializeOwned {
    /// Takes keys that operations declare out of `tree`.
    ///
    /// # Errors
    /// A value that its key does not take.
    fn take(tree: &mut Mapping) -> Result<Taken> {
        _ = tree;
        Ok(Taken::default())
    }

    /// Puts in what was taken.
    fn put(&mut self, taken: Taken) {
        _ = taken;
    }
}

/// Reads the config at `path` and applies `sets`, each `key.subkey=value` with a YAML value.
///
/// # Errors
/// The file cannot be read, is not YAML, or has a key or value that `T` does not know.
pub fn load<T: Schema>(path: &Path, sets: &[String]) -> Result<T> {
    let text = read(path)?;
    parse(&text, sets).with_context(|| format!("config {}", path.display()))
}

/// The text of the config at `path`.
///
/// # Errors
/// It cannot be read, or is longer than any config.
pub fn read(path: &Path) -> Result<String> {
    if let Some(text) = presets::text(path) {
        return Ok(text.to_owned());
    }
    let shown = path.display();
    let bytes =
        std::fs::metadata(path).with_context(|| format!("cannot read config {shown}"))?.len();
    ensure!(bytes <= MAX_BYTES, "config {shown} has {bytes} bytes; the most is {MAX_BYTES}");
    std::fs::read_to_string(path).with_context(|| format!("cannot read config {shown}"))
}

/// [`load`] for a config that has been read.
///
/// # Errors
/// As for [`load`].
pub fn parse<T: Schema>(text: &str, sets: &[String]) -> Result<T> {
    parse_over(Value::Null, text, sets)
}

/// [`parse`], with the values of `base` for keys that text and `sets` leave out.
///
/// # Errors
/// As for [`load`].
pub fn parse_over<T: Schema>(base: Value, text: &str, sets: &[String]) -> Result<T> {
    let mut tree: Value = serde_yaml::from_str(text).context("not valid YAML")?;
    ensure!(tree.is_mapping(), "a config is a mapping of keys to values");
    for set in sets {
        let Some((key, value)) = set.split_once('=') else {
            bail!("--set {set} has no `=`; write key=value, such as tile.time_block=8");
        };
        let value = serde_yaml::from_str(value)
            .with_context(|| format!("--set {set}: the value is not valid YAML"))?;
        set_key(&mut tree, key, value).with_context(|| format!("--set {set}"))?;
    }
    fill(&mut tree, base);
    let taken = match &mut tree {
        Value::Mapping(mapping) => T::take(mapping)?,
        _ => Taken::default(),
    };
    let mut read: T = serde_path_to_error::deserialize(tree).map_err(|error| {
        let path = error.path().to_string();
        explain(&path, &error.into_inner().to_string(), &taken.keys)
    })?;
    read.put(taken);
    Ok(read)
}

/// Puts what `tree` lacks there from `base`.
fn fill(tree: &mut Value, base: Value) {
    let (Some(tree), Value::Mapping(base)) = (tree.as_mapping_mut(), base) else { return };
    for (key, value) in base {
        fill(tree.entry(key).or_insert_with(|| value.clone()), value);
    }
}

fn set_key(tree: &mut Value, key: &str, value: Value) -> Result<()> {
    let mut place = tree;
    for part in key.split('.') {
        ensure!(!part.is_empty(), "`{key}` has an empty part");
        if place.is_null() {
            *place = Value::Mapping(Mapping::new());
        }
        let Some(mapping) = place.as_mapping_mut() else {
            bail!("`{part}` lies below a value that is not a mapping");
        };
        place = mapping.entry(Value::from(part)).or_insert(Value::Null);
    }
    *place = value;
    Ok(())
}
