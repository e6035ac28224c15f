//! What configs of both tools have: operations, backends, shapes, tiles.

mod explain;
mod op;
mod read;
mod settings;

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail, ensure};
use clap::ValueEnum;
use pjrt_client::Platform;
use serde::de::{DeserializeSeed, Error as _, MapAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use xentile::operation::{DimSpec, Problem, TileExtents};
use xentile::{DType, Tile, operations};

pub use op::Op;
pub(crate) use op::set_by;
pub use read::{Schema, load, parse, parse_over, read};
pub use settings::{Scope, Settings, Taken};

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

    /// Refuses an operation that has no kernels to call directly where these are what runs.
    ///
    /// # Errors
    /// It has none.
    pub(crate) fn check_kernels(self, op: Op) -> Result<()> {
        ensure!(
            self.platform().is_some() || xentile_cpu::kernels(op.name()).is_some(),
            "backend is cpu; {op} has programs for backends of XLA alone: set backend to xla:cpu"
        );
        Ok(())
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
        let backend = name(&self);
        for (name, is_set) in [("isa", isa.is_some()), ("threads", threads != 0)] {
            ensure!(!is_set, "{name} is set; on {backend} it is XLA's to choose");
        }
        Ok(())
    }
}

/// Which program computes it.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Implementation {
    /// Plain f32 code that keeps all probabilities in memory.
    Reference,
    /// The tiled kernel.
    #[default]
    Kernel,
}

impl Implementation {
    /// The program for XLA.
    pub(crate) fn program(self) -> xentile_programs::Implementation {
        match self {
            Self::Reference => xentile_programs::Implementation::Dense,
            Self::Kernel => xentile_programs::Implementation::Kernel,
        }
    }
}

/// The name that flags, configs and reports use.
pub(crate) fn name(value: &impl ValueEnum) -> String {
    value.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

/// `shape`: sequences, tokens of each, and the extents of dims that are in it.
#[derive(Clone, Debug, PartialEq)]
pub struct Shape {
    /// Sequences.
    pub batch: usize,
    /// Tokens of a sequence.
    pub seq_len: usize,
    /// Extents of dims by their keys.
    pub dims: BTreeMap<&'static str, usize>,
}

impl Shape {
    /// The keys of dims that a shape may have.
    fn keys() -> impl Iterator<Item = &'static str> {
        let dims = operations().iter().flat_map(|operation| operation.dims());
        dims.filter(|dim| dim.in_shape).map(|dim| dim.key)
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{}, {}", self.batch, self.seq_len)?;
        self.dims.values().try_for_each(|extent| write!(f, ", {extent}"))?;
        f.write_str("]")
    }
}

impl Serialize for Shape {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(2 + self.dims.len()))?;
        map.serialize_entry("batch", &self.batch)?;
        map.serialize_entry("seq_len", &self.seq_len)?;
        for (key, extent) in &self.dims {
            map.serialize_entry(key, extent)?;
        }
        map.end()
    }
}

impl<'de> Deserialize<'de> for Shape {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(ShapeVisitor)
    }
}

/// Refuses a key that no shape has.
struct UnknownKey<'a>(&'a str);

impl<'de> DeserializeSeed<'de> for UnknownKey<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, _: D) -> Result<(), D::Error> {
        let mut all = vec!["batch", "seq_len"];
        all.extend(Shape::keys());
        all.dedup();
        let all: Vec<_> = all.iter().map(|key| format!("`{key}`")).collect();
        let (key, all) = (self.0, all.join(", "));
        Err(D::Error::custom(format!("unknown field `{key}`, expected one of {all}")))
    }
}

struct ShapeVisitor;

impl<'de> Visitor<'de> for ShapeVisitor {
    type Value = Shape;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a mapping of extents")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Shape, A::Error> {
        let [mut batch, mut seq_len] = [None; 2];
        let mut dims = BTreeMap::new();
        while let Some(key) = map.next_key::<String>()? {
            match key.as_str() {
                "batch" => batch = Some(map.next_value()?),
                "seq_len" => seq_len = Some(map.next_value()?),
                key => match Shape::keys().find(|known| *known == key) {
                    Some(known) => _ = dims.insert(known, map.next_value()?),
                    // Refused as its value is read, so that the error has its path.
                    None => map.next_value_seed(UnknownKey(key))?,
                },
            }
        }
        Ok(Shape {
            batch: batch.ok_or_else(|| A::Error::missing_field("batch"))?,
            seq_len: seq_len.ok_or_else(|| A::Error::missing_field("seq_len"))?,
            dims,
        })
    }
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

impl From<TileConfig> for TileExtents {
    fn from(TileConfig { time_block, block_size }: TileConfig) -> Self {
        Self { time_block, block_size }
    }
}

/// The problem that a config asks for, its options not yet checked.
///
/// # Errors
/// A dim of the operation without an extent; a key of another operation.
pub(crate) fn problem(
    op: Op,
    extent: impl Fn(&DimSpec) -> Option<usize>,
    dtype: DType,
    tile: TileConfig,
    [top, options]: [&Settings; 2],
    cotangent: f64,
) -> Result<Problem> {
    top.check_owners()?;
    options.check_owners()?;
    let mut dims: Vec<(&'static str, usize)> = Vec::new();
    for dim in op.dims() {
        let like = || dims.iter().find(|(letter, _)| dim.like == Some(*letter));
        let Some(extent) = extent(dim).or_else(|| like().map(|(_, extent)| *extent)) else {
            let key = if dim.in_shape { format!("shape.{}", dim.key) } else { dim.key.to_owned() };
            bail!("op {op} needs {key}: the number of {}", dim.about);
        };
        ensure!(extent >= 1, "{} is 0; it must be at least 1", dim.key);
        dims.push((dim.letter, extent));
    }
    for (key, is_set) in
        [("time_block", tile.time_block.is_some()), ("block_size", tile.block_size.is_some())]
    {
        ensure!(
            !is_set || op.facts().tile.iter().any(|dim| dim.key == key),
            "tile.{key} is set; op {op} has no such extent"
        );
    }
    let value = |name| top.get(name).or(options.get(name));
    let options = op.options().iter();
    let options =
        options.map(|option| (option.name, value(option.name).unwrap_or(option.default))).collect();
    Ok(Problem { dims, dtype, options, tile: tile.into(), cotangent })
}

/// What to do where memory is short: which keys to lower.
pub(crate) fn remedy(keys: &[String]) -> String {
    match keys {
        [] => "ask for less".to_owned(),
        [one] => format!("lower {one}"),
        [most @ .., last] => format!("lower {} or {last}", most.join(", ")),
    }
}

/// Refuses a program from JAX where it could not run, or would not be what is asked for.
///
/// # Errors
/// Another backend than one of XLA's, or the dense program.
pub(crate) fn check_program(
    program: Option<&Path>,
    backend: Backend,
    implementation: Implementation,
) -> Result<()> {
    if program.is_some() {
        ensure!(
            backend != Backend::Cpu,
            "program is set; backend cpu runs no programs, those named xla: do"
        );
        ensure!(
            implementation == Implementation::Kernel,
            "program is set, which is the kernel; set impl to kernel or leave program out"
        );
    }
    Ok(())
}

/// The manifest that `program` names, with the tile in the place of `{time_block}` and
/// `{block_size}`.
///
/// # Errors
/// The name has a place for an extent of the tile that is left open.
pub(crate) fn manifest(program: &Path, tile: TileConfig) -> Result<PathBuf> {
    let Some(text) = program.to_str() else { return Ok(program.into()) };
    let mut text = text.to_owned();
    for (key, extent) in [("time_block", tile.time_block), ("block_size", tile.block_size)] {
        let place = format!("{{{key}}}");
        if !text.contains(&place) {
            continue;
        }
        let Some(extent) = extent else {
            bail!("program {text} has a place for {key}, which is left open; set tile.{key}");
        };
        text = text.replace(&place, &extent.to_string());
    }
    Ok(text.into())
}

/// Reads a dtype by name.
pub(crate) fn dtype<'de, D: Deserializer<'de>>(deserializer: D) -> Result<DType, D::Error> {
    let name = String::deserialize(deserializer)?;
    name.parse().map_err(D::Error::custom)
}

/// Writes a dtype by name.
pub(crate) fn dtype_name<S: Serializer>(dtype: &DType, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(dtype.name())
}

#[cfg(test)]
mod tests {
    use serde_yaml::{Mapping, Value};
    use xentile::operation;

    use super::*;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Example {
        shape: Shape,
        #[serde(default)]
        tile: TileConfig,
        #[serde(skip_deserializing)]
        options: Settings,
    }

    impl Schema for Example {
        fn take(tree: &mut Mapping) -> Result<Taken> {
            Taken::out_of(tree, Scope::Checked, "")
        }

        fn put(&mut self, taken: Taken) {
            self.options = taken.options;
        }
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
        assert_eq!(example.shape.dims["vocab"], 50257);
        assert_eq!(example.tile, TileConfig { time_block: None, block_size: Some(64) });
        assert_eq!(example.options.get("reduction"), Some(operation::Value::Word("sum")));
    }

    #[test]
    fn keys_left_out_come_from_the_base() {
        let base: Value = serde_yaml::from_str(
            "{shape: {batch: 9, seq_len: 9, vocab: 9}, options: {z_loss: 0.5, softcap: 3}}",
        )
        .unwrap();
        let sets = ["shape.vocab=4".to_owned(), "options.softcap=null".to_owned()];
        let text = "shape: {batch: 1}";
        let example: Example = parse_over(base, text, &sets).unwrap();
        assert_eq!(example.shape.to_string(), "[1, 9, 4]");
        let options = &example.options;
        assert_eq!((options.number("z_loss"), options.number("softcap")), (Some(0.5), None));
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
