//! Keys of a config that operations declare: extents of dims, options, tolerances.

use std::collections::BTreeMap;

use anyhow::{Result, bail};
use serde::de::{DeserializeOwned, Error as _};
use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};
use serde_yaml::{Mapping, Value as Yaml};
use xentile::operation::{DimSpec, Kind, Operation, OptionSpec, Section, TOKENS, Value};
use xentile::operations;

use super::Op;
use super::explain::explain;

/// Which keys of an operation a part of a config has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scope {
    /// Every dim, and options that are keys of their own: of a measurement.
    #[default]
    Measured,
    /// The same without dims that `shape` tells: of a check.
    Checked,
    /// What is under `options`.
    Options,
    /// What is under `tolerances`.
    Tolerances,
}

/// A key, as the first operation that has it declares it.
struct Key {
    name: &'static str,
    kind: Kind,
    default: Value,
    is_dim: bool,
}

impl Scope {
    fn has_dim(self, dim: &DimSpec) -> bool {
        match self {
            Self::Measured => true,
            Self::Checked => !dim.in_shape && dim.letter != TOKENS.letter,
            Self::Options | Self::Tolerances => false,
        }
    }

    /// The dims of an operation that are keys of it.
    pub(crate) fn dims(self, op: Op) -> impl Iterator<Item = &'static DimSpec> {
        op.dims().iter().filter(move |dim| self.has_dim(dim))
    }

    /// Whether an option is a key of it.
    pub(crate) fn has(self, option: &OptionSpec) -> bool {
        match self {
            Self::Options => option.section == Section::Options,
            Self::Measured | Self::Checked => option.section == Section::Top,
            Self::Tolerances => false,
        }
    }

    /// What it calls the key `name`, seen from the whole of a config.
    fn path(self, name: &str) -> String {
        match self {
            Self::Measured | Self::Checked => name.to_owned(),
            Self::Options => format!("options.{name}"),
            Self::Tolerances => format!("tolerances.{name}"),
        }
    }

    /// The keys of `operation`: dims, then the rest.
    fn keys(self, operation: &dyn Operation) -> Vec<Key> {
        let extent = |extent: Option<usize>| {
            extent.map_or(Value::Absent, |extent| Value::Integer(extent as i64))
        };
        let dims = operation.dims().iter().filter(|dim| self.has_dim(dim)).map(|dim| Key {
            name: dim.key,
            kind: Kind::Count,
            default: extent(dim.default),
            is_dim: true,
        });
        let options = operation.options().iter().filter(|option| self.has(option));
        let options = options.map(|option| Key {
            name: option.name,
            kind: option.kind,
            default: option.default,
            is_dim: false,
        });
        let tolerances = match self {
            Self::Tolerances => operation.facts().tolerances,
            _ => &[],
        };
        let tolerances = tolerances.iter().map(|tolerance| Key {
            name: tolerance.name,
            kind: Kind::Number,
            default: Value::Absent,
            is_dim: false,
        });
        dims.chain(options).chain(tolerances).collect()
    }

    /// The keys of all operations.
    fn all(self) -> Vec<Key> {
        self.of(|_| true)
    }

    /// The keys of all operations of a family.
    fn list_family(self, op: Op) -> Vec<Key> {
        self.of(|operation| operation.family() == op.family())
    }

    /// The keys of operations, dims first, each once.
    fn of(self, is_of: impl Fn(&dyn Operation) -> bool) -> Vec<Key> {
        let operations = || operations().iter().filter(|operation| is_of(**operation));
        let keys = || operations().flat_map(|operation| self.keys(*operation));
        let mut all: Vec<Key> = Vec::new();
        for key in keys().filter(|key| key.is_dim).chain(keys().filter(|key| !key.is_dim)) {
            if all.iter().all(|has| has.name != key.name) {
                all.push(key);
            }
        }
        all
    }
}

/// Values of keys that operations declare. It knows its operation, to be written as that has it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Settings {
    scope: Scope,
    op: Op,
    set: BTreeMap<&'static str, Value>,
}

impl Settings {
    /// None of `scope`.
    #[must_use]
    pub fn of(scope: Scope) -> Self {
        Self { scope, ..Self::default() }
    }

    /// Takes its keys out of `tree`, whose own path is `path`.
    fn take(scope: Scope, tree: &mut Mapping, path: &str) -> Result<Self> {
        let mut settings = Self::of(scope);
        for key in scope.all() {
            if let Some(value) = tree.remove(key.name).filter(|value| !value.is_null()) {
                settings
                    .set
                    .insert(key.name, parsed(&format!("{path}{}", key.name), key.kind, value)?);
            }
        }
        Ok(settings)
    }

    /// The same from the mapping under `name`, which may have no other keys.
    fn take_under(scope: Scope, name: &str, tree: &mut Mapping, path: &str) -> Result<Self> {
        let path = format!("{path}{name}.");
        match tree.remove(name) {
            None | Some(Yaml::Null) => Ok(Self::of(scope)),
            Some(Yaml::Mapping(mut under)) => {
                let settings = Self::take(scope, &mut under, &path)?;
                let Some(unknown) = under.keys().next() else { return Ok(settings) };
                let unknown =
                    unknown.as_str().map_or_else(|| format!("{unknown:?}"), str::to_owned);
                let known: Vec<_> =
                    scope.all().iter().map(|key| format!("`{}`", key.name)).collect();
                let message =
                    format!("unknown field `{unknown}`, expected one of {}", known.join(", "));
                Err(explain(&format!("{path}{unknown}"), &message, &[]))
            }
            Some(_) => {
                bail!("`{}`: it must be a mapping of keys to values", path.trim_end_matches('.'))
            }
        }
    }

    /// From the JSON under `name` of a file, which may have no other keys.
    ///
    /// # Errors
    /// A key that no operation has, or a value that its key does not take.
    pub fn from_json(
        scope: Scope,
        name: &str,
        op: Op,
        json: &serde_json::Map<String, serde_json::Value>,
    ) -> Result<Self> {
        let mut tree = Mapping::new();
        tree.insert(name.into(), serde_yaml::to_value(json)?);
        let mut settings = Self::take_under(scope, name, &mut tree, "")?;
        settings.op = op;
        Ok(settings)
    }

    /// Written and checked as of `op` from here on.
    pub fn set_op(&mut self, op: Op) {
        self.op = op;
    }

    /// The value of `name`, if it is set.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<Value> {
        self.set.get(name).copied()
    }

    /// Sets the value of `name`.
    pub fn set(&mut self, name: &'static str, value: Value) {
        self.set.insert(name, value);
    }

    /// The extent of a dim: what is set, else its default.
    #[must_use]
    pub fn extent(&self, dim: &DimSpec) -> Option<usize> {
        match self.get(dim.key) {
            Some(Value::Integer(extent)) => usize::try_from(extent).ok(),
            _ => dim.default,
        }
    }

    /// The number that is set.
    #[must_use]
    pub fn number(&self, name: &str) -> Option<f64> {
        match self.get(name) {
            Some(Value::Number(number)) => Some(number),
            _ => None,
        }
    }

    /// Refuses keys that the operation does not have and another has.
    ///
    /// # Errors
    /// The first such key that is not at its default.
    pub fn check_owners(&self) -> Result<()> {
        let own = self.scope.keys(&*self.op);
        for key in self.scope.all() {
            let Some(value) = self.get(key.name) else { continue };
            if own.iter().any(|own| own.name == key.name) || value == key.default {
                continue;
            }
            let has = |operation: &dyn Operation| {
                self.scope.keys(operation).iter().any(|has| has.name == key.name)
            };
            // One whose name contains this one first.
            let is_alike = |operation: &dyn Operation| {
                has(operation) && operation.name().contains(self.op.name())
            };
            let owner = Op::first(is_alike).or_else(|| Op::first(has));
            let owner = owner.map_or("no operation", |op| op.name());
            bail!("{} is set; op {} has none, {owner} has", self.scope.path(key.name), self.op);
        }
        Ok(())
    }
}

impl Serialize for Settings {
    /// All that there are: of `options` those of the operation, else of its family.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let own = self.scope.keys(&*self.op);
        let is_own = |name: &str| own.iter().any(|own| own.name == name);
        let mut map = serializer.serialize_map(None)?;
        match self.scope {
            Scope::Options => {
                for key in &own {
                    map.serialize_entry(key.name, &self.get(key.name).unwrap_or(key.default))?;
                }
            }
            _ => {
                for key in self.scope.list_family(self.op) {
                    let has_default = !key.is_dim || is_own(key.name);
                    let default = if has_default { key.default } else { Value::Absent };
                    let value = self.get(key.name).unwrap_or(default);
                    map.serialize_entry(key.name, &value)?;
                }
            }
        }
        map.end()
    }
}

/// A value of `kind` at `path`.
fn parsed(path: &str, kind: Kind, value: Yaml) -> Result<Value> {
    fn read<T: DeserializeOwned>(path: &str, value: Yaml) -> Result<T> {
        serde_yaml::from_value(value).map_err(|error| explain(path, &error.to_string(), &[]))
    }
    Ok(match kind {
        Kind::Bool => Value::Bool(read(path, value)?),
        Kind::Integer => Value::Integer(read(path, value)?),
        Kind::Number => Value::Number(match value.as_str() {
            // As JSON has them, beside YAML's `.inf` and `.nan`.
            Some("inf") => f64::INFINITY,
            Some("-inf") => f64::NEG_INFINITY,
            Some("nan") => f64::NAN,
            _ => read(path, value)?,
        }),
        Kind::Count => {
            let count: u64 = read(path, value)?;
            Value::Integer(i64::try_from(count).map_err(|_| {
                explain(
                    path,
                    &format!("{count} is more than any count; the most is {}", i64::MAX),
                    &[],
                )
            })?)
        }
        Kind::Word(words) => {
            let word: String = read(path, value)?;
            let known = words.iter().find(|known| **known == word);
            Value::Word(known.ok_or_else(|| {
                let error = serde::de::value::Error::unknown_variant(&word, words);
                explain(path, &error.to_string(), &[])
            })?)
        }
    })
}

/// What was taken out of a config.
#[derive(Clone, Debug, Default)]
pub struct Taken {
    /// Dims, and options that are keys of their own.
    pub top: Settings,
    /// What is under `options`.
    pub options: Settings,
    /// What is under `tolerances`.
    pub tolerances: Settings,
    /// The keys of `top`.
    pub(super) keys: Vec<&'static str>,
}

impl Taken {
    /// Takes keys of `scope` out of `tree`, whose own path is `path`, and those under `options` and
    /// `tolerances`.
    ///
    /// # Errors
    /// A value that its key does not take, or an unknown key under one of those.
    pub fn out_of(tree: &mut Mapping, scope: Scope, path: &str) -> Result<Self> {
        let tolerances = match scope {
            Scope::Checked => Settings::take_under(Scope::Tolerances, "tolerances", tree, path)?,
            _ => Settings::of(Scope::Tolerances),
        };
        Ok(Self {
            top: Settings::take(scope, tree, path)?,
            options: Settings::take_under(Scope::Options, "options", tree, path)?,
            tolerances,
            keys: scope.all().iter().map(|key| key.name).chain(["options", "tolerances"]).collect(),
        })
    }
}
