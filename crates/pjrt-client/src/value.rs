//! Values with names: options that go in, attributes and costs that come out.

use std::{collections::BTreeMap, ffi::c_char, fmt, ptr::null_mut};

use crate::{Error, Result, abi, raw};

/// The value of an option or attribute.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Value {
    /// A text.
    Text(String),
    /// A whole number.
    Int(i64),
    /// Whole numbers.
    Ints(Vec<i64>),
    /// A number.
    Float(f32),
    /// A truth value.
    Bool(bool),
    /// One of a type that this crate does not know, by the number of that type. No option is.
    Other(u32),
}

/// Attributes by name.
pub type Values = BTreeMap<String, Value>;

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text(value) => f.write_str(value),
            Self::Int(value) => write!(f, "{value}"),
            Self::Ints(values) => write!(f, "{values:?}"),
            Self::Float(value) => write!(f, "{value}"),
            Self::Bool(value) => write!(f, "{value}"),
            Self::Other(kind) => write!(f, "a value of type {kind}, which is unknown here"),
        }
    }
}

impl Value {
    /// The number, whole or not.
    #[must_use]
    #[allow(clippy::cast_precision_loss)] // costs are estimates
    pub const fn as_f64(&self) -> Option<f64> {
        match self {
            Self::Int(value) => Some(*value as f64),
            Self::Float(value) => Some(*value as f64),
            _ => None,
        }
    }

    /// The whole number.
    #[must_use]
    pub const fn as_i64(&self) -> Option<i64> {
        match self {
            Self::Int(value) => Some(*value),
            _ => None,
        }
    }

    /// The text.
    #[must_use]
    pub const fn as_str(&self) -> Option<&str> {
        match self {
            Self::Text(value) => Some(value.as_str()),
            _ => None,
        }
    }
}

macro_rules! from {
    ($($type:ty => $variant:ident,)*) => {
        $(
            impl From<$type> for Value {
                fn from(value: $type) -> Self {
                    Self::$variant(value.into())
                }
            }
        )*
    };
}

from! {
    &str => Text,
    String => Text,
    i32 => Int,
    i64 => Int,
    &[i64] => Ints,
    Vec<i64> => Ints,
    f32 => Float,
    bool => Bool,
}

/// `options` as the plug-in takes them, for as long as they live.
pub(crate) fn encode(options: &[(&str, Value)]) -> Result<Vec<abi::NamedValue>> {
    options.iter().map(|(name, value)| encode_one(name, value)).collect()
}

fn encode_one(name: &str, value: &Value) -> Result<abi::NamedValue> {
    use abi::NamedValueUnion as Union;
    let (r#type, value, value_size) = match value {
        Value::Text(text) => {
            let union = Union { string_value: text.as_ptr().cast::<c_char>() };
            (abi::VALUE_STRING, union, text.len())
        }
        Value::Int(value) => (abi::VALUE_INT64, Union { int64_value: *value }, 1),
        Value::Ints(values) => {
            (abi::VALUE_INT64_LIST, Union { int64_array_value: values.as_ptr() }, values.len())
        }
        Value::Float(value) => (abi::VALUE_FLOAT, Union { float_value: *value }, 1),
        Value::Bool(value) => (abi::VALUE_BOOL, Union { bool_value: u8::from(*value) }, 1),
        Value::Other(number) => {
            return Err(Error::Arguments(format!(
                "option {name:?} has a value of type {number}, which PJRT {} does not know",
                crate::Version::OURS
            )));
        }
    };
    Ok(abi::NamedValue {
        struct_size: size_of::<abi::NamedValue>(),
        extension_start: null_mut(),
        name: name.as_ptr().cast(),
        name_size: name.len(),
        r#type,
        value,
        value_size,
    })
}

/// The `len` values at `values`.
///
/// # Safety
/// They are there, as the plug-in says.
pub(crate) unsafe fn decode(values: *const abi::NamedValue, len: usize) -> Values {
    // SAFETY: passed on from this function's contract, for all of the block.
    unsafe {
        let values = raw::slice(values, len);
        values
            .iter()
            .map(|value| (raw::text(value.name, value.name_size), decode_one(value)))
            .collect()
    }
}

/// # Safety
/// The value is what its type says.
unsafe fn decode_one(value: &abi::NamedValue) -> Value {
    // SAFETY: the type says which field of the union is set, and the pointers lead to what they
    // should.
    unsafe {
        match value.r#type {
            abi::VALUE_STRING => Value::Text(raw::text(value.value.string_value, value.value_size)),
            abi::VALUE_INT64 => Value::Int(value.value.int64_value),
            abi::VALUE_INT64_LIST => {
                Value::Ints(raw::slice(value.value.int64_array_value, value.value_size).to_vec())
            }
            abi::VALUE_FLOAT => Value::Float(value.value.float_value),
            abi::VALUE_BOOL => Value::Bool(value.value.bool_value != 0),
            number => Value::Other(number),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_round_trip() {
        let options = [
            ("text", "v6e:2x2".into()),
            ("empty", "".into()),
            ("int", Value::Int(-7)),
            ("ints", vec![2, 3].into()),
            ("none", Value::Ints(vec![])),
            ("float", 0.5.into()),
            ("bool", true.into()),
        ];
        let encoded = encode(&options).unwrap();
        // SAFETY: `options` lives, and `encode` filled the structs in.
        let decoded = unsafe { decode(encoded.as_ptr(), encoded.len()) };
        let expected: Values =
            options.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        assert_eq!(decoded, expected);
        let error = encode(&[("x", Value::Other(9))]).err().unwrap().to_string();
        assert!(error.contains("\"x\"") && error.contains('9'), "{error}");
    }
}
