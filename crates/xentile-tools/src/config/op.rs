//! The operation that a config names.

use std::fmt;
use std::ops::Deref;
use std::sync::OnceLock;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use xentile::operation::{NamedFunction, Operation, OptionSpec, Value};
use xentile::operations;

/// An operation, by its name.
#[derive(Clone, Copy)]
pub struct Op(&'static dyn Operation);

impl Op {
    /// The names of all operations, in the order that they are listed in.
    #[must_use]
    pub fn names() -> &'static [&'static str] {
        static NAMES: OnceLock<Vec<&str>> = OnceLock::new();
        NAMES.get_or_init(|| operations().iter().map(|operation| operation.name()).collect())
    }

    /// The operation called `name`.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        xentile::operation(name).map(Self)
    }

    /// The operation that the function called `name` is, and what it sets of its options.
    #[must_use]
    pub fn find_function(name: &str) -> Option<(Self, &'static NamedFunction)> {
        let found =
            |op: Self| Some((op, op.facts().functions.iter().find(|one| one.name == name)?));
        operations().iter().find_map(|operation| found(Self(*operation)))
    }

    /// The first operation for which `has` is true, to say whose something is.
    pub(crate) fn first(has: impl Fn(&dyn Operation) -> bool) -> Option<Self> {
        operations().iter().copied().find(|operation| has(*operation)).map(Self)
    }
}

impl Default for Op {
    fn default() -> Self {
        Self(operations()[0])
    }
}

impl Deref for Op {
    type Target = dyn Operation;

    fn deref(&self) -> &Self::Target {
        self.0
    }
}

impl PartialEq for Op {
    fn eq(&self, other: &Self) -> bool {
        self.name() == other.name()
    }
}

impl fmt::Debug for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Serialize for Op {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl<'de> Deserialize<'de> for Op {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        if let Some((op, function)) = Self::find_function(&name) {
            return Err(serde::de::Error::custom(format_args!(
                "{name} is a function: write op: {op} with {}",
                set_by(op, function)
            )));
        }
        Self::named(&name).ok_or_else(|| serde::de::Error::unknown_variant(&name, Self::names()))
    }
}

/// The options that a function sets, as `--set` has them: `options.kind=silu layout=halves`.
pub(crate) fn set_by(op: Op, function: &NamedFunction) -> String {
    let set = |(name, value): &(&str, Value)| {
        let path = op.option(name).map_or_else(|| (*name).to_owned(), OptionSpec::path);
        format!("{path}={value}")
    };
    function.options.iter().map(set).collect::<Vec<_>>().join(" ")
}
