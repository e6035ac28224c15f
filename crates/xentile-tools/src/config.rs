//! YAML configs: reading, `--set` overrides, and errors that name the key and the nearest valid one.

use std::fmt;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use pjrt_client::Platform;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_yaml::{Mapping, Value};
use xentile::cross_entropy::{CrossEntropy, Reduction};
use xentile::linear_cross_entropy::{LinearShape, VocabAxis};
use xentile::{DType, LogitsShape, Tile};
use xentile_programs::exported::Linear;

/// The largest config read; the shipped ones are under 1 KiB.
const MAX_BYTES: u64 = 1 << 20;

/// Keys that had another name: the old one, the new one.
const RENAMED: [(&str, &str); 1] = [("scale", "std")];

/// Reads the config at `path` and applies `sets`, each `key.subkey=value` with a YAML value.
///
/// # Errors
/// The file cannot be read, is not YAML, or has a key or value that `T` does not know.
pub fn load<T: DeserializeOwned>(path: &Path, sets: &[String]) -> Result<T> {
    let text = read(path)?;
    parse(&text, sets).with_context(|| format!("config {}", path.display()))
}

/// The text of the config at `path`.
///
/// # Errors
/// It cannot be read, or is longer than any config.
pub fn read(path: &Path) -> Result<String> {
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
pub fn parse<T: DeserializeOwned>(text: &str, sets: &[String]) -> Result<T> {
    parse_over(Value::Null, text, sets)
}

/// [`parse`], with the values of `base` for keys that text and `sets` leave out.
///
/// # Errors
/// As for [`load`].
pub fn parse_over<T: DeserializeOwned>(base: Value, text: &str, sets: &[String]) -> Result<T> {
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
    serde_path_to_error::deserialize(tree).map_err(|error| {
        let path = error.path().to_string();
        explain(&path, &error.into_inner().to_string())
    })
}

/// Puts what `tree` lacks there from `base`.
fn fill(tree: &mut Value, base: Value) {
    let (Some(tree), Value::Mapping(base)) = (tree.as_mapping_mut(), base) else { return };
    for (key, value) in base {
        fill(tree.entry(key).or_insert_with(|| value.clone()), value);
    }
}

/// A value that was read from the key `name` of a JSON file.
pub(crate) fn from_json<T: DeserializeOwned>(name: &str, json: serde_json::Value) -> Result<T> {
    serde_path_to_error::deserialize(json).map_err(|error| {
        let path = format!("{name}.{}", error.path());
        explain(&path, &error.into_inner().to_string())
    })
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

/// Rewords serde's message about the value at `path`, adding the nearest key where one is unknown.
fn explain(path: &str, message: &str) -> anyhow::Error {
    for kind in ["field", "variant"] {
        let Some(rest) = message.strip_prefix(&format!("unknown {kind} ")) else { continue };
        // serde quotes first what it met, then what it knows.
        let mut quoted = rest.split('`').skip(1).step_by(2);
        let Some(met) = quoted.next() else { continue };
        let known: Vec<_> = quoted.collect();
        let what = match kind {
            "field" => format!("unknown key `{}`", path.trim_start_matches("?.")),
            _ => format!("unknown value `{met}` for `{path}`"),
        };
        let renamed = |(old, new): &&(&str, &str)| *old == met && known.contains(new);
        if let Some((_, new)) = RENAMED.iter().find(renamed) {
            return anyhow::anyhow!("{what}; it is called `{new}` now");
        }
        let near = |name: &&&str| strsim::damerau_levenshtein(name, met);
        let hint = match known.iter().min_by_key(near) {
            Some(name) if near(&name) <= 1 + met.len() / 3 => format!("did you mean `{name}`?"),
            _ => format!("the choices are {}", known.join(", ")),
        };
        return anyhow::anyhow!("{what}; {hint}");
    }
    match path {
        "." | "?" => anyhow::anyhow!("{message}"),
        _ => anyhow::anyhow!("`{path}`: {message}"),
    }
}

/// What is computed.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum Op {
    /// Cross-entropy over logits.
    #[default]
    CrossEntropy,
    /// Cross-entropy of hidden states against an output matrix.
    LinearCrossEntropy,
}

impl Op {
    /// Refuses a backend that has no programs of the operation.
    ///
    /// # Errors
    /// It has none.
    pub(crate) fn check_backend(self, backend: Backend) -> Result<()> {
        ensure!(
            self == Self::CrossEntropy || backend != Backend::Cpu,
            "backend is cpu; linear_cross_entropy has programs for backends of XLA alone: set backend \
             to xla:cpu"
        );
        Ok(())
    }
}

/// What [`Op::LinearCrossEntropy`] is asked for, from the keys of a config; none for an operation over
/// logits.
///
/// # Errors
/// A key that the operation does not have, or a value out of range.
pub(crate) fn linear(
    op: Op,
    hidden: Option<usize>,
    bias: bool,
    vocab_axis: Option<usize>,
    max_scratch_bytes: Option<u64>,
) -> Result<Option<Linear>> {
    if op == Op::CrossEntropy {
        for (name, is_set) in [
            ("hidden", hidden.is_some()),
            ("bias", bias),
            ("vocab_axis", vocab_axis.is_some()),
            ("max_scratch_bytes", max_scratch_bytes.is_some()),
        ] {
            ensure!(!is_set, "{name} is set; op cross_entropy has none, linear_cross_entropy has");
        }
        return Ok(None);
    }
    let Some(hidden) = hidden else {
        bail!("op linear_cross_entropy needs hidden: the number of columns of hidden states");
    };
    ensure!(hidden >= 1, "hidden is 0; it must be at least 1");
    let vocab_axis = vocab_axis.unwrap_or(0);
    VocabAxis::try_from(vocab_axis)?;
    Ok(Some(Linear { hidden, bias, vocab_axis, max_scratch_bytes }))
}

/// The shape of hidden states and weight, whose logits have the shape `logits`.
///
/// # Errors
/// More elements than memory can address.
pub(crate) fn linear_shape(logits: LogitsShape, linear: Linear) -> Result<LinearShape> {
    let axis = VocabAxis::try_from(linear.vocab_axis)?;
    let hidden = [logits.tokens(), linear.hidden];
    let weight = axis.weight(logits.vocab(), linear.hidden);
    Ok(LinearShape::new(hidden, weight, Some(axis))?)
}

/// Where it is computed.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Backend {
    /// The CPU kernels, called directly.
    #[default]
    Cpu,
    /// XLA on the CPU.
    #[serde(rename = "xla:cpu")]
    #[value(name = "xla:cpu")]
    XlaCpu,
    /// XLA on an NVIDIA GPU.
    #[serde(rename = "xla:cuda")]
    #[value(name = "xla:cuda")]
    XlaCuda,
    /// XLA on a TPU.
    #[serde(rename = "xla:tpu")]
    #[value(name = "xla:tpu")]
    XlaTpu,
}

impl Backend {
    /// The plug-in's platform; none where no plug-in is needed.
    #[must_use]
    pub fn platform(self) -> Option<Platform> {
        match self {
            Self::Cpu => None,
            Self::XlaCpu => Some(Platform::Cpu),
            Self::XlaCuda => Some(Platform::Cuda),
            Self::XlaTpu => Some(Platform::Tpu),
        }
    }

    /// Refuses what is not the user's to choose on this backend.
    ///
    /// # Errors
    /// A plug-in or a cache of programs where none is needed; an instruction set or threads (0 is no choice) where XLA
    /// chooses.
    pub fn check_choices(
        self,
        plugin: Option<&Path>,
        cache: Option<&Path>,
        isa: Option<&str>,
        threads: usize,
    ) -> Result<()> {
        if self.platform().is_none() {
            for (name, is_set) in [("plugin", plugin.is_some()), ("cache", cache.is_some())] {
                ensure!(!is_set, "{name} is set; backend cpu needs none");
            }
            return Ok(());
        }
        let backend = crate::microbench::name(&self);
        for (name, is_set) in [("isa", isa.is_some()), ("threads", threads != 0)] {
            ensure!(!is_set, "{name} is set; on {backend} it is XLA's to choose");
        }
        Ok(())
    }
}

/// `shape`: logits are `[batch, seq_len, vocab]`.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Shape {
    /// Sequences.
    pub batch: usize,
    /// Tokens of a sequence.
    pub seq_len: usize,
    /// Vocabulary columns.
    pub vocab: usize,
}

/// `tile`: either extent may be left to the tuned default.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct TileConfig {
    /// Tokens per tile.
    pub time_block: Option<usize>,
    /// Vocabulary columns per tile.
    pub block_size: Option<usize>,
}

impl TileConfig {
    /// The tile, with `default` for what is left open.
    ///
    /// # Errors
    /// An extent of 0.
    pub fn resolve(self, default: Tile) -> Result<Tile> {
        Ok(default.with(self.time_block, self.block_size)?)
    }

    /// The tile that a program for `backend` names: with `default` for what is left open, but on a
    /// GPU, where kernels choose for the device that they find themselves on.
    ///
    /// # Errors
    /// An extent of 0.
    pub fn of_program(self, backend: Backend, default: Tile) -> Result<Self> {
        let resolved = self.resolve(default)?;
        Ok(if backend == Backend::XlaCuda { self } else { resolved.into() })
    }
}

impl From<Tile> for TileConfig {
    fn from(tile: Tile) -> Self {
        Self { time_block: Some(tile.time_block()), block_size: Some(tile.block_size()) }
    }
}

impl fmt::Display for TileConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let extent = |extent: Option<usize>| {
            extent.map_or_else(|| "of the kernel's choice".to_owned(), |extent| extent.to_string())
        };
        let (time_block, block_size) = (extent(self.time_block), extent(self.block_size));
        write!(f, "time_block {time_block}, block_size {block_size}")
    }
}

/// How per-token losses become one number, or do not.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ReductionConfig {
    /// They do not: per-token outputs with per-token cotangents.
    None,
    /// `sum(w * loss) / sum(w)`.
    #[default]
    Mean,
    /// `sum(w * loss)`.
    Sum,
}

impl ReductionConfig {
    /// The reduction, if there is one.
    #[must_use]
    pub fn reduction(self) -> Option<Reduction> {
        match self {
            Self::None => None,
            Self::Mean => Some(Reduction::Mean),
            Self::Sum => Some(Reduction::Sum),
        }
    }
}

/// Per-token weights.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Weights {
    /// Every token weighs 1.
    #[default]
    None,
    /// Uniform in [0, 1), from the input's seed.
    Random,
}

/// `options` of cross-entropy.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Options {
    /// Tokens with this label are skipped.
    pub ignore_index: i64,
    /// In [0, 1].
    pub label_smoothing: f64,
    /// At least 0.
    pub z_loss: f64,
    /// Above 0, or absent.
    pub softcap: Option<f64>,
    /// Mean where absent.
    pub reduction: ReductionConfig,
    /// None where absent.
    pub weights: Weights,
}

impl Default for Options {
    fn default() -> Self {
        let CrossEntropy { ignore_index, label_smoothing, z_loss, softcap } =
            CrossEntropy::default();
        let (reduction, weights) = Default::default();
        Self { ignore_index, label_smoothing, z_loss, softcap, reduction, weights }
    }
}

impl Options {
    /// The options that kernels take.
    ///
    /// # Errors
    /// An option outside its range, or weights without a reduction.
    pub fn cross_entropy(&self) -> Result<CrossEntropy> {
        let &Self { ignore_index, label_smoothing, z_loss, softcap, .. } = self;
        let options = CrossEntropy { ignore_index, label_smoothing, z_loss, softcap };
        options.validate().context("options")?;
        ensure!(
            self.reduction != ReductionConfig::None || self.weights == Weights::None,
            "options.weights has no part in reduction none, which takes a cotangent a token; set \
             options.weights to none or options.reduction to mean or sum"
        );
        Ok(options)
    }
}

/// Reads a dtype by name.
pub(crate) fn dtype<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<DType, D::Error> {
    let name = String::deserialize(deserializer)?;
    name.parse().map_err(serde::de::Error::custom)
}

/// Writes a dtype by name.
pub(crate) fn dtype_name<S: serde::Serializer>(
    dtype: &DType,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(dtype.name())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Example {
        shape: Shape,
        #[serde(default)]
        tile: TileConfig,
        #[serde(default)]
        options: Options,
    }

    const TEXT: &str = "shape: {batch: 1, seq_len: 2, vocab: 3}";

    fn refuse(text: &str, sets: &[&str]) -> String {
        let sets: Vec<_> = sets.iter().map(ToString::to_string).collect();
        format!("{:#}", parse::<Example>(text, &sets).unwrap_err())
    }

    #[test]
    fn sets_override_and_add() {
        let sets = ["shape.vocab=50257", "tile.block_size=64", "options.reduction=sum"];
        let sets: Vec<_> = sets.iter().map(ToString::to_string).collect();
        let example: Example = parse(TEXT, &sets).unwrap();
        assert_eq!(example.shape.vocab, 50257);
        assert_eq!(example.tile, TileConfig { time_block: None, block_size: Some(64) });
        assert_eq!(example.options.reduction, ReductionConfig::Sum);
    }

    #[test]
    fn what_is_left_out_comes_from_below() {
        let base: Value = serde_yaml::from_str(
            "{shape: {batch: 9, seq_len: 9, vocab: 9}, options: {z_loss: 0.5, softcap: 3}}",
        )
        .unwrap();
        let sets = ["shape.vocab=4".to_owned(), "options.softcap=null".to_owned()];
        let text = "shape: {batch: 1}";
        let example: Example = parse_over(base, text, &sets).unwrap();
        assert_eq!(example.shape, Shape { batch: 1, seq_len: 9, vocab: 4 });
        assert_eq!((example.options.z_loss, example.options.softcap), (0.5, None));
    }

    #[test]
    fn an_unknown_key_is_named_with_the_nearest() {
        assert_eq!(
            refuse(TEXT, &["tile.blok_size=64"]),
            "unknown key `tile.blok_size`; did you mean `block_size`?"
        );
        assert_eq!(
            refuse(TEXT, &["optoins.z_loss=1"]),
            "unknown key `optoins`; did you mean `options`?"
        );
        assert_eq!(
            refuse(TEXT, &["shape.zzzzzzzz=1"]),
            "unknown key `shape.zzzzzzzz`; the choices are batch, seq_len, vocab"
        );
        assert_eq!(
            refuse(TEXT, &["options.reduction=maen"]),
            "unknown value `maen` for `options.reduction`; did you mean `mean`?"
        );
    }

    #[test]
    fn other_mistakes_are_named() {
        assert_eq!(
            refuse(TEXT, &["shape.vocab"]),
            "--set shape.vocab has no `=`; write key=value, such as tile.time_block=8"
        );
        assert!(refuse(TEXT, &["shape.vocab=many"]).starts_with("`shape.vocab`: invalid type"));
        assert!(refuse(TEXT, &["shape.vocab=-1"]).starts_with("`shape.vocab`: "));
        assert!(refuse(TEXT, &["shape.vocab.deep=1"]).contains("not a mapping"));
        assert!(refuse("[1]", &[]).contains("mapping of keys"));
        assert!(refuse("shape: {", &[]).starts_with("not valid YAML"));
        assert!(refuse("{}", &[]).contains("missing field `shape`"));
        let zero = TileConfig { time_block: Some(0), block_size: None };
        let message = zero.resolve(Tile::new(1, 1).unwrap()).unwrap_err().to_string();
        assert_eq!(message, "tile time_block is 0; it must be at least 1");
    }
}
