//! Rotary position embedding (Su et al., "RoFormer", 2021): pairs of columns of every row turn by an angle
//! of the row's position. The contract of every backend.
//!
//! `x` is `[N, D]`: a row is a head of a token. The first R of its columns, an even number, make R / 2
//! pairs. Those of [`Layout::Halves`] (GPT-NeoX, Llama) are columns `i` and `i + R / 2`, those that are
//! [`Layout::Interleaved`] (GPT-J) columns `2 i` and `2 i + 1`. The pair `(a, b)` with the index `i` becomes
//!
//! `(a c - b s, b c + a s)`, `c = cos[p, i]`, `s = sin[p, i]`
//!
//! where `p` is the row's index into the tables `cos` and `sin` `[P, R / 2]`, f32. With
//! [`inverse`](Rope::inverse) the sign of `s` is the other one: the transposed map, and so the gradient of
//! x, which needs nothing of x. Columns from R on are copied.
//!
//! Whoever calls makes the tables. They are small beside x, since all heads of a token share a row of
//! them, and what scales frequencies, or cosine and sine, is in them.
//!
//! # Error bounds
//!
//! A product and a sum of f32 round once each, and y is rounded once: before that it is within
//! [`ROUNDINGS`] of `|a c| + |b s|` (or `|b c| + |a s|`), in units of `2^-24`. What falls below the normal
//! range of f32 may be lost, `2^-126` a product.
//!
//! # Special numbers
//!
//! No pair touches another, and NaN and infinities give what the formulas give. An index that is not in
//! `0..P` makes the R columns of its row NaN. Copied columns keep every bit.

#[cfg(feature = "operation")]
pub mod operation;
pub mod reference;

use std::fmt;

use crate::error::check_length;
use crate::shape::is_addressable;
use crate::{Error, Result};

/// How far an entry of y may be off before it is rounded to its dtype, in units of `2^-24` of the sum of
/// the magnitudes of its two terms.
pub const ROUNDINGS: f64 = 2.0;

/// How far cosine and sine may be off that are made of positions, in units of `2^-24`, for positions of 32
/// bits.
pub const TABLE_ROUNDINGS: f64 = 4.0;

/// Which columns are a pair.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Layout {
    /// `i` and `i + R / 2`.
    #[default]
    Halves,
    /// `2 i` and `2 i + 1`.
    Interleaved,
}

impl Layout {
    /// Every layout.
    pub const ALL: [Self; 2] = [Self::Halves, Self::Interleaved];

    /// The columns of the pair `index` of so many `pairs`.
    #[must_use]
    pub fn columns(self, index: usize, pairs: usize) -> [usize; 2] {
        match self {
            Self::Halves => [index, pairs + index],
            Self::Interleaved => [2 * index, 2 * index + 1],
        }
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Halves => "halves",
            Self::Interleaved => "interleaved",
        })
    }
}

/// The options of a rotation, the same for every backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rope {
    /// Which columns are a pair.
    pub layout: Layout,
    /// Whether pairs turn the other way.
    pub inverse: bool,
}

/// The shapes of x `[N, D]`, its indices `[N]` and the tables `[G, P, R / 2]`, of which each of the G is
/// for N / G rows that follow one another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RopeShape {
    rows: usize,
    columns: usize,
    pairs: usize,
    positions: usize,
    groups: usize,
}

impl RopeShape {
    /// Shapes of one table.
    ///
    /// # Errors
    /// There are more columns in pairs than columns, or more elements than memory can address.
    pub fn new(rows: usize, columns: usize, pairs: usize, positions: usize) -> Result<Self> {
        if pairs > columns / 2 {
            return Err(Error::Option {
                name: "R / 2",
                value: pairs as f64,
                requirement: "at most half the columns of x",
            });
        }
        // Of elements of four bytes.
        let arrays = [[rows, columns], [rows, 1], [positions, pairs]];
        if !arrays.into_iter().all(|[a, b]| is_addressable([a, b, 4])) {
            return Err(Error::Shape {
                tokens: rows,
                vocab: columns,
                requirement: "rows x columns must fit the address space",
            });
        }
        Ok(Self { rows, columns, pairs, positions, groups: 1 })
    }

    /// The same with tables for each of `groups` of the rows.
    ///
    /// # Errors
    /// The rows are not so many groups of one size.
    pub fn with_groups(self, groups: usize) -> Result<Self> {
        let divides = groups > 0 && self.rows.is_multiple_of(groups);
        if !(divides || self.rows == 0) {
            return Err(Error::Option {
                name: "groups",
                value: groups as f64,
                requirement: "a divisor of the number of rows",
            });
        }
        if groups.checked_mul(self.positions).and_then(|n| n.checked_mul(self.pairs)).is_none() {
            return Err(Error::Option {
                name: "groups",
                value: groups as f64,
                requirement: "few enough for tables that memory can address",
            });
        }
        Ok(Self { groups, ..self })
    }

    /// N, the number of rows.
    #[must_use]
    pub fn rows(self) -> usize {
        self.rows
    }

    /// D, the number of columns.
    #[must_use]
    pub fn columns(self) -> usize {
        self.columns
    }

    /// R / 2, the number of pairs of a row.
    #[must_use]
    pub fn pairs(self) -> usize {
        self.pairs
    }

    /// P, the rows of a table.
    #[must_use]
    pub fn positions(self) -> usize {
        self.positions
    }

    /// G, the number of tables of each kind.
    #[must_use]
    pub fn groups(self) -> usize {
        self.groups
    }

    /// N x D.
    #[must_use]
    pub fn elements(self) -> usize {
        self.rows * self.columns
    }

    /// Rows that share tables.
    #[must_use]
    pub fn rows_of_group(self) -> usize {
        self.rows.checked_div(self.groups).unwrap_or(0)
    }

    /// Checks the length of an array of x's shape called `name`.
    ///
    /// # Errors
    /// The length is not N x D.
    pub fn check(self, name: &'static str, length: usize) -> Result<()> {
        check_length(name, length, "[N, D]", self.elements())
    }

    /// Checks the length of indices called `name`.
    ///
    /// # Errors
    /// The length is not N.
    pub fn check_indices(self, name: &'static str, length: usize) -> Result<()> {
        check_length(name, length, "[N]", self.rows)
    }

    /// Checks the length of tables called `name`.
    ///
    /// # Errors
    /// The length is not G x P x R / 2.
    pub fn check_tables(self, name: &'static str, length: usize) -> Result<()> {
        let expected = self.groups * self.positions * self.pairs;
        check_length(name, length, "[G, P, R / 2]", expected)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_that_cannot_be_are_named() {
        let message = RopeShape::new(3, 7, 4, 1).unwrap_err().to_string();
        assert_eq!(message, "R / 2 is 4; it must be at most half the columns of x");
        assert!(RopeShape::new(usize::MAX / 8, 4, 2, 1).is_err());
        assert!(RopeShape::new(1, 4, 2, usize::MAX / 8).is_err());
        let shape = RopeShape::new(6, 7, 3, 5).unwrap();
        let message = shape.with_groups(4).unwrap_err().to_string();
        assert_eq!(message, "groups is 4; it must be a divisor of the number of rows");
        assert!(shape.with_groups(0).is_err());
        let shape = shape.with_groups(2).unwrap();
        assert_eq!((shape.rows_of_group(), shape.groups()), (3, 2));
        assert_eq!(shape.check("x", 42), Ok(()));
        assert_eq!(shape.check_indices("indices", 6), Ok(()));
        let message = shape.check_tables("cos", 15).unwrap_err().to_string();
        assert_eq!(message, "cos holds 15 elements; [G, P, R / 2] needs 30");
        let none = RopeShape::new(0, 7, 3, 5).unwrap().with_groups(0).unwrap();
        assert_eq!(none.rows_of_group(), 0);
    }

    #[test]
    fn layouts_cover_the_columns_once() {
        for layout in Layout::ALL {
            let mut columns: Vec<_> = (0..5).flat_map(|i| layout.columns(i, 5)).collect();
            columns.sort_unstable();
            assert_eq!(columns, (0..10).collect::<Vec<_>>(), "{layout}");
        }
    }
}
