//! Activations of a transformer's MLP, of one array or gated: SwiGLU, GEGLU, ReGLU (Shazeer, "GLU
//! Variants Improve Transformer", 2020), GELU (Hendrycks and Gimpel, 2016) and squared ReLU (So et al.,
//! "Primer", 2021). The contract of every backend.
//!
//! Of one array `x` `[.., F]`, `y = f(x)`, entry by entry. Gated, `x` `[.., 2F]` packs two arrays, and
//! `y` is `[.., F]`:
//!
//! `y = f(min(gate, limit)) (clip(up, -limit, limit) + up_offset)`
//!
//! where gate and up are the [`Layout::Halves`] of a row, gate first, or its even and its odd columns,
//! [`Layout::Interleaved`]. Without a `limit` nothing is clamped. With [`Kind::Silu`], `alpha` 1.702,
//! `limit` 7 and `up_offset` 1 it is the SwiGLU of gpt-oss (OpenAI, 2025), whose layout is interleaved.
//!
//! | kind | f(x) | |
//! | --- | --- | --- |
//! | [`Kind::Silu`] | `x s(alpha x)`, `s(z) = 1 / (1 + e^-z)` | with `alpha` 1.702 the quick form of GELU |
//! | [`Kind::GeluTanh`] | `x s(z)`, `z = 2 sqrt(2 / pi) (x + 0.044715 x^3)` | which is `x (1 + tanh(z / 2)) / 2` |
//! | [`Kind::GeluErf`] | `x P(x)`, `P(x) = erfc(-x / sqrt(2)) / 2` | |
//! | [`Kind::Relu`] | `max(x, 0)` | |
//! | [`Kind::SquaredRelu`] | `max(x, 0)^2` | |
//!
//! Options are rounded to f32. The backward pass takes x and `dy`, the cotangent of y, and makes all else
//! anew. It gives `dx` in the layout of x: `dy f'(x)`; or, gated,
//!
//! - `dgate = dy (clip(up) + up_offset) f'(min(gate, limit))`, 0 where `gate > limit`;
//! - `dup = dy f(min(gate, limit))`, 0 where `|up| > limit`.
//!
//! An entry at the limit counts as within, and `f'(0)` of a ReLU is 0.
//!
//! # Error bounds
//!
//! Numbers are f32 until y and dx are rounded, once. Before that, in units of `u = 2^-24`, half the
//! spacing of f32 after 1, `f` is within [`VALUE_ROUNDINGS`] of [`At::value_scale`], and `f'` within
//! [`SLOPE_ROUNDINGS`] of [`At::slope_scale`], each as far as its factors (up, dy) scale it. The scales are
//! what is given itself, and more where an exponent of size `n` is rounded, and its power is then off by
//! `n u`: far out in the tail, where `f` is tiny. Where a number falls below f32's normal range it may be
//! lost: [`Bound::lost`].
//!
//! # Special numbers
//!
//! No entry touches another. NaN gives NaN. An infinity gives what the formulas give, 0 times infinity
//! being NaN: `f(inf)` is infinite, `f(-inf)` 0 for the ReLUs and NaN for others, whose slopes are NaN at
//! both; a gate above the limit is the limit.

#[cfg(feature = "operation")]
pub mod operation;
pub mod reference;

use std::fmt;
use std::str::FromStr;

use crate::shape::is_addressable;
use crate::{Error, Result};
#[cfg(doc)]
use reference::{At, Bound};

/// How far `f` may be off, in units of 2^-24 of its scale.
pub const VALUE_ROUNDINGS: f64 = 20.0;
/// The same of `f'`.
pub const SLOPE_ROUNDINGS: f64 = 32.0;

/// The function of an activation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Sigmoid-weighted: `x s(alpha x)`.
    Silu,
    /// GELU by tanh.
    GeluTanh,
    /// GELU by erf, the exact one.
    GeluErf,
    /// The positive part.
    Relu,
    /// The square of that.
    SquaredRelu,
}

impl Kind {
    /// Every kind.
    pub const ALL: [Self; 5] =
        [Self::Silu, Self::GeluTanh, Self::GeluErf, Self::Relu, Self::SquaredRelu];

    /// The names of all, for messages.
    pub const NAMES: &'static str = "silu, gelu_tanh, gelu_erf, relu, squared_relu";

    /// The name that attributes and configs have.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Silu => "silu",
            Self::GeluTanh => "gelu_tanh",
            Self::GeluErf => "gelu_erf",
            Self::Relu => "relu",
            Self::SquaredRelu => "squared_relu",
        }
    }
}

impl FromStr for Kind {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name).ok_or_else(|| Error::Unknown {
            what: "kind",
            value: name.to_owned(),
            choices: Self::NAMES,
        })
    }
}

/// What x packs, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Layout {
    /// One array: there is no gate.
    Single,
    /// Gate and up, the two halves of each row.
    Halves,
    /// Gate and up, column by column in turn.
    Interleaved,
}

impl Layout {
    /// Every layout.
    pub const ALL: [Self; 3] = [Self::Single, Self::Halves, Self::Interleaved];

    /// The names of all, for messages.
    pub const NAMES: &'static str = "single, halves, interleaved";

    /// The name that attributes and configs have.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Single => "single",
            Self::Halves => "halves",
            Self::Interleaved => "interleaved",
        }
    }

    /// Columns of x for one of y.
    #[must_use]
    pub fn packs(self) -> usize {
        if self == Self::Single { 1 } else { 2 }
    }

    /// Where the gate (or the one number) and the up of `column` of y lie in a row of x, which has
    /// `columns` for y.
    #[must_use]
    pub fn places(self, column: usize, columns: usize) -> [usize; 2] {
        match self {
            Self::Single => [column, column],
            Self::Halves => [column, columns + column],
            Self::Interleaved => [2 * column, 2 * column + 1],
        }
    }
}

impl FromStr for Layout {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|layout| layout.name() == name).ok_or_else(|| Error::Unknown {
            what: "layout",
            value: name.to_owned(),
            choices: Self::NAMES,
        })
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The options of an activation, the same for every backend.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Activation {
    /// The function.
    pub kind: Kind,
    /// What x packs.
    pub layout: Layout,
    /// The slope of the sigmoid's argument, of [`Kind::Silu`].
    pub alpha: f64,
    /// What gate and up are clamped to.
    pub limit: Option<f64>,
    /// What is added to up.
    pub up_offset: f64,
}

impl Activation {
    /// A kind with a layout, and no more.
    #[must_use]
    pub fn new(kind: Kind, layout: Layout) -> Self {
        Self { kind, layout, alpha: 1.0, limit: None, up_offset: 0.0 }
    }

    /// Checks the range of every option, and that it has a meaning for the others.
    ///
    /// # Errors
    /// The first that has not.
    pub fn validate(&self) -> Result<()> {
        let wrong = |name, value, requirement| Err(Error::Option { name, value, requirement });
        let holds = |number: f64| (number as f32).is_finite();
        let above_0 = |number: f64| number as f32 > 0.0 && holds(number);
        if !above_0(self.alpha) {
            return wrong("alpha", self.alpha, "finite and above 0, in f32");
        }
        if self.alpha != 1.0 && self.kind != Kind::Silu {
            return wrong("alpha", self.alpha, "1 where the kind is not silu");
        }
        if let Some(limit) = self.limit
            && !above_0(limit)
        {
            return wrong("limit", limit, "finite and above 0, in f32");
        }
        if !holds(self.up_offset) {
            return wrong("up_offset", self.up_offset, "finite, in f32");
        }
        if self.layout == Layout::Single {
            if let Some(limit) = self.limit {
                return wrong(
                    "limit",
                    limit,
                    "absent where the layout is single: nothing is gated",
                );
            }
            if self.up_offset != 0.0 {
                let requirement = "0 where the layout is single: nothing is gated";
                return wrong("up_offset", self.up_offset, requirement);
            }
        }
        Ok(())
    }

    /// `limit`, as kernels compare with it: infinite where there is none.
    #[must_use]
    pub fn bound(&self) -> f32 {
        self.limit.map_or(f32::INFINITY, |limit| limit as f32)
    }
}

/// The shape of y, `[T, F]`: rows (all leading axes, flattened) by columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ActivationShape {
    rows: usize,
    columns: usize,
}

impl ActivationShape {
    /// A shape of `rows` of `columns`, either of which may be 0.
    ///
    /// # Errors
    /// x has more elements than memory can address.
    pub fn new(rows: usize, columns: usize) -> Result<Self> {
        // Two arrays, of elements of four bytes.
        if !is_addressable([rows, columns, 8]) {
            return Err(Error::Shape {
                tokens: rows,
                vocab: columns,
                requirement: "rows x columns must fit the address space",
            });
        }
        Ok(Self { rows, columns })
    }

    /// T, the number of rows.
    #[must_use]
    pub fn rows(self) -> usize {
        self.rows
    }

    /// F, the number of columns of y.
    #[must_use]
    pub fn columns(self) -> usize {
        self.columns
    }

    /// T x F.
    #[must_use]
    pub fn elements(self) -> usize {
        self.rows * self.columns
    }

    /// Checks the length of an array of y's shape called `name`.
    ///
    /// # Errors
    /// The length is not T x F.
    pub fn check(self, name: &'static str, length: usize) -> Result<()> {
        crate::error::check_length(name, length, "[T, F]", self.elements())
    }

    /// Checks the length of an array of x's shape called `name`.
    ///
    /// # Errors
    /// The length is not T x F, or T x 2F where x packs two arrays.
    pub fn check_packed(self, layout: Layout, name: &'static str, length: usize) -> Result<()> {
        let axes = if layout == Layout::Single { "[T, F]" } else { "[T, 2F]" };
        crate::error::check_length(name, length, axes, self.elements() * layout.packs())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_outside_their_range_are_named() {
        let right = Activation {
            alpha: 1.702,
            limit: Some(7.0),
            up_offset: 1.0,
            ..Activation::new(Kind::Silu, Layout::Interleaved)
        };
        assert_eq!(right.validate(), Ok(()));
        let single = Activation::new(Kind::GeluErf, Layout::Single);
        assert_eq!(single.validate(), Ok(()));
        let refuse = |options: Activation| options.validate().unwrap_err().to_string();
        for (options, message) in [
            (
                Activation { alpha: 0.0, ..right },
                "alpha is 0; it must be finite and above 0, in f32",
            ),
            (
                Activation { alpha: 1e39, ..right },
                "alpha is 1000000000000000000000000000000000000000; ",
            ),
            (Activation { limit: Some(0.0), ..right }, "limit is 0; it must be finite and above 0"),
            (
                Activation { limit: Some(-7.0), ..right },
                "limit is -7; it must be finite and above 0",
            ),
            (Activation { limit: Some(f64::NAN), ..right }, "limit is NaN; it must be finite and"),
            (Activation { limit: Some(1e-50), ..right }, "limit is 0.0000"),
            (
                Activation { up_offset: f64::INFINITY, ..right },
                "up_offset is inf; it must be finite",
            ),
            (
                Activation { kind: Kind::Relu, ..right },
                "alpha is 1.702; it must be 1 where the kind",
            ),
            (Activation { limit: Some(7.0), ..single }, "limit is 7; it must be absent where the"),
            (
                Activation { up_offset: 1.0, ..single },
                "up_offset is 1; it must be 0 where the layout",
            ),
        ] {
            let found = refuse(options);
            assert!(found.starts_with(message), "{found}");
        }
    }

    #[test]
    fn names_round_trip() {
        for kind in Kind::ALL {
            assert_eq!(kind.name().parse(), Ok(kind));
            assert!(Kind::NAMES.contains(kind.name()));
        }
        for layout in Layout::ALL {
            assert_eq!(layout.name().parse(), Ok(layout));
            assert!(Layout::NAMES.contains(layout.name()));
        }
        let message = "swish".parse::<Kind>().unwrap_err().to_string();
        assert_eq!(
            message,
            "kind `swish` is unknown; it must be one of silu, gelu_tanh, gelu_erf, relu, squared_relu"
        );
        let message = "packed".parse::<Layout>().unwrap_err().to_string();
        assert_eq!(
            message,
            "layout `packed` is unknown; it must be one of single, halves, interleaved"
        );
    }

    #[test]
    fn lengths_are_checked_by_name() {
        assert!(ActivationShape::new(usize::MAX / 8, 2).is_err());
        let shape = ActivationShape::new(3, 4).unwrap();
        assert_eq!(shape.check_packed(Layout::Halves, "x", 24), Ok(()));
        let message = shape.check_packed(Layout::Halves, "x", 12).unwrap_err().to_string();
        assert_eq!(message, "x holds 12 elements; [T, 2F] needs 24");
    }
}
