//! One error type for every operation: each variant names the value that was wrong and what would
//! be right.

use thiserror::Error;

/// The result of a fallible call of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an operation refuses its input.
#[derive(Clone, Debug, Error, PartialEq)]
pub enum Error {
    /// A shape that no kernel can address.
    #[error("shape [{tokens}, {vocab}]: {requirement}")]
    Shape {
        /// Rows of the logits.
        tokens: usize,
        /// Columns of the logits.
        vocab: usize,
        /// What would be right.
        requirement: &'static str,
    },
    /// A buffer whose length disagrees with the shape.
    #[error("{name} holds {actual} elements; {axes} needs {expected}")]
    Length {
        /// The argument.
        name: &'static str,
        /// Its length.
        actual: usize,
        /// The axes that the argument has, as text.
        axes: &'static str,
        /// The length that those axes give.
        expected: usize,
    },
    /// An axis without extent.
    #[error("axis {axis} of {name} is 0; it must be at least 1")]
    EmptyAxis {
        /// The argument.
        name: &'static str,
        /// The axis.
        axis: usize,
    },
    /// Two axes that must have one extent and have two.
    #[error("axis {axis} of {name} is {actual}; it must be {expected}, as axis {of_axis} of {of}")]
    Axes {
        /// The argument whose axis is taken for wrong.
        name: &'static str,
        /// That axis.
        axis: usize,
        /// Its extent.
        actual: usize,
        /// The argument that it is held against.
        of: &'static str,
        /// The axis of that.
        of_axis: usize,
        /// The extent of that.
        expected: usize,
    },
    /// A square matrix that says nothing of what its axes are.
    #[error(
        "weight is [{extent}, {extent}], and either axis may be the vocabulary's; set vocab_axis to 0 \
         for [V, D] or to 1 for [D, V]"
    )]
    VocabAxis {
        /// V, and D.
        extent: usize,
    },
    /// A tile extent of zero.
    #[error("tile {name} is 0; it must be at least 1")]
    Tile {
        /// `time_block` or `block_size`.
        name: &'static str,
    },
    /// An option outside its range.
    #[error("{name} is {value}; it must be {requirement}")]
    Option {
        /// The option.
        name: &'static str,
        /// Its value.
        value: f64,
        /// What would be right.
        requirement: &'static str,
    },
    /// A label that names no column and is not the ignored one.
    #[error(
        "label {label} of token {token} is outside [0, {vocab}) and is not ignore_index ({ignore_index})"
    )]
    LabelOutOfRange {
        /// The first token with such a label.
        token: usize,
        /// The label.
        label: i64,
        /// Columns of the logits.
        vocab: usize,
        /// The label that is skipped.
        ignore_index: i64,
    },
    /// Anything else that is asked for and cannot be, in words.
    #[error("{0}")]
    Invalid(String),
    /// A word that names no member of a closed set.
    #[error("{what} `{value}` is unknown; it must be one of {choices}")]
    Unknown {
        /// What was being named, such as `dtype`.
        what: &'static str,
        /// The word given.
        value: String,
        /// The words allowed.
        choices: &'static str,
    },
}

/// Holds `actual` against the length that `axes` gives.
pub(crate) fn check_length(
    name: &'static str,
    actual: usize,
    axes: &'static str,
    expected: usize,
) -> Result<()> {
    if actual == expected { Ok(()) } else { Err(Error::Length { name, actual, axes, expected }) }
}
