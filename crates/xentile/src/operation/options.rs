//! Options: their names, types and defaults.

use std::fmt;

use serde::{Serialize, Serializer};

/// What an option may hold.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    /// `true` or `false`.
    Bool,
    /// An integer of 64 bits.
    Integer,
    /// An integer of at least 0.
    Count,
    /// A number.
    Number,
    /// One of these words.
    Word(&'static [&'static str]),
}

/// What an option holds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value {
    /// Nothing.
    Absent,
    /// Of [`Kind::Bool`].
    Bool(bool),
    /// Of [`Kind::Integer`] and [`Kind::Count`].
    Integer(i64),
    /// Of [`Kind::Number`].
    Number(f64),
    /// Of [`Kind::Word`].
    Word(&'static str),
}

impl Serialize for Value {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match *self {
            Self::Absent => serializer.serialize_none(),
            Self::Bool(value) => serializer.serialize_bool(value),
            Self::Integer(value) => serializer.serialize_i64(value),
            Self::Number(value) if value.is_finite() => serializer.serialize_f64(value),
            // JSON has no such numbers.
            Self::Number(value) if value.is_nan() => serializer.serialize_str("nan"),
            Self::Number(value) => {
                serializer.serialize_str(if value > 0.0 { "inf" } else { "-inf" })
            }
            Self::Word(value) => serializer.serialize_str(value),
        }
    }
}

/// As in configs.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Absent => f.write_str("none"),
            Self::Bool(value) => write!(f, "{value}"),
            Self::Integer(value) => write!(f, "{value}"),
            Self::Number(value) => write!(f, "{value}"),
            Self::Word(value) => f.write_str(value),
        }
    }
}

/// Where configs have an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Section {
    /// Under `options`.
    Options,
    /// A key of its own, beside the extents that it changes the arrays of.
    Top,
}

/// An option of an operation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OptionSpec {
    /// Its name.
    pub name: &'static str,
    /// What it may hold.
    pub kind: Kind,
    /// What it holds where a config has none. Where that is [`Value::Absent`], it may be null.
    pub default: Value,
    /// The values that are taken, in words.
    pub range: &'static str,
    /// What it does.
    pub about: &'static str,
    /// Where configs have it.
    pub section: Section,
    /// Whether a sweep may vary it.
    pub is_swept: bool,
}

impl OptionSpec {
    /// An option under `options`.
    #[must_use]
    pub const fn new(
        name: &'static str,
        kind: Kind,
        default: Value,
        range: &'static str,
        about: &'static str,
    ) -> Self {
        Self { name, kind, default, range, about, section: Section::Options, is_swept: false }
    }

    /// With a key of its own.
    #[must_use]
    pub const fn on_top(self) -> Self {
        Self { section: Section::Top, ..self }
    }

    /// Its key in configs, with the section before it.
    #[must_use]
    pub fn path(&self) -> String {
        match self.section {
            Section::Options => format!("options.{}", self.name),
            Section::Top => self.name.to_owned(),
        }
    }

    /// That a sweep may vary.
    #[must_use]
    pub const fn swept(self) -> Self {
        Self { is_swept: true, ..self }
    }
}
