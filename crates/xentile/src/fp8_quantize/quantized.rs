//! Options, results, tolerances and checks that all operations with FP8 results share.
//!
//! Entries to be quantised may have been rounded before. So each entry has an interval, a single number if it is
//! an input: an entry that is near a rounding tie in float64 may be either of two neighbours in its dtype. Then
//! amax of its block, the scale and the quotients have intervals too. A scale is checked against its interval,
//! and a value against that of its quotient, extended by the contract's roundings and half a unit in the last
//! place of the format. Values times scales are checked against the entries.

use rayon::prelude::*;

use super::reference::{amax, exact_quotient, exact_scale};
use super::{Blocks, Format, Fp8Quantize, QuantizeShape};
use crate::operation::{
    ArraySpec, Arrays, Bound, ElementRule, Judged, Kind, OptionSpec, Problem, Role, Rows,
    ToleranceSpec, Tolerances, Value, Visitor,
};
use crate::{DType, Element, Error, Result};

/// 2^-24, half a unit in the last place of f32 at 1.
const ROUNDING: f64 = (f32::EPSILON / 2.0) as f64;

/// The number of roundings before that to the format: of the reciprocal of the largest number, the scale, its
/// reciprocal, and the product.
const QUOTIENT: f64 = 2.0 + super::QUOTIENT_ROUNDINGS;

/// The options of quantisation.
pub(crate) const OPTIONS: [OptionSpec; 5] = [
    OptionSpec::new(
        "granularity",
        Kind::Word(&["tensor", "row", "block_1d", "block_2d"]),
        Value::Word("tensor"),
        "tensor, row, block_1d or block_2d",
        "entries that share a scale: all, a row, block_size of a row, or a square of block_size",
    ),
    OptionSpec::new(
        "block_size",
        Kind::Count,
        Value::Integer(128),
        "at least 1",
        "rows and columns of blocks",
    ),
    OptionSpec::new(
        "power_of_two",
        Kind::Bool,
        Value::Bool(false),
        "true or false",
        "rounds scales up to powers of two",
    ),
    OptionSpec::new(
        "format",
        Kind::Word(&["f8e4m3fn", "f8e5m2"]),
        Value::Word("f8e4m3fn"),
        "f8e4m3fn or f8e5m2",
        "dtype of the values",
    ),
    OptionSpec::new(
        "transposed",
        Kind::Bool,
        Value::Bool(false),
        "true or false",
        "adds a transposed copy, in blocks of its own",
    ),
];

/// The options that kernels take.
#[must_use]
pub fn options(problem: &Problem) -> Fp8Quantize {
    let format = problem.word("format").parse().unwrap_or(Format::E4M3Fn);
    Fp8Quantize { format, power_of_two: problem.flag("power_of_two") }
}

/// The blocks that have a scale each; none for one scale of x.
#[must_use]
pub fn blocks(problem: &Problem) -> Option<Blocks> {
    let size = problem.integer("block_size").map_or(128, |size| size.max(1) as usize);
    match problem.word("granularity") {
        "row" => Some(Blocks::ROW),
        "block_1d" => Some(Blocks { rows: 1, columns: Some(size) }),
        "block_2d" => Some(Blocks { rows: size, columns: Some(size) }),
        _ => None,
    }
}

/// The dims of the quantised matrix, and of its blocks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Letters {
    rows: &'static str,
    columns: &'static str,
    parts_of_rows: &'static str,
    parts_of_columns: &'static str,
}

impl Letters {
    /// Those of a matrix `[T, D]`.
    pub(crate) const HIDDEN: Self = Self {
        rows: "T",
        columns: "D",
        parts_of_rows: "T/block_size",
        parts_of_columns: "D/block_size",
    };
    /// Those of a matrix `[T, F]`.
    pub(crate) const MLP: Self =
        Self { columns: "F", parts_of_columns: "F/block_size", ..Self::HIDDEN };

    /// The shape of the quantised matrix.
    ///
    /// # Errors
    /// More elements than memory can address.
    pub(crate) fn shape(self, problem: &Problem) -> Result<QuantizeShape> {
        QuantizeShape::new(1, problem.dim(self.rows), problem.dim(self.columns))
    }

    /// Values and scales, also of the transposed copy if there is one.
    pub(crate) fn results(self, problem: &Problem) -> Vec<ArraySpec> {
        let Self { rows, columns, parts_of_rows, parts_of_columns } = self;
        let format = ElementRule::Fp8(options(problem).format);
        let values = |name, dims: &[_]| ArraySpec::new(name, dims, format, Role::Output);
        let scales = |name, dims: &[_]| ArraySpec::number(name, dims, Role::Output);
        // Of the matrix and of the transposed copy.
        let dims: [&[&str]; 2] = match problem.word("granularity") {
            "row" => [&[rows], &[columns]],
            "block_1d" => [&[rows, parts_of_columns], &[columns, parts_of_rows]],
            "block_2d" => [&[parts_of_rows, parts_of_columns], &[parts_of_columns, parts_of_rows]],
            _ => [&[], &[]],
        };
        let mut results = vec![values("values", &[rows, columns]), scales("scales", dims[0])];
        if problem.flag("transposed") {
            results.push(values("transposed", &[columns, rows]));
            results.push(scales("transposed_scales", dims[1]));
        }
        results
    }

    /// Bytes that [`Quantized`] holds with `threads` threads and entries of `width` bytes: scales, the
    /// dequantised matrix, and rows of each thread; none on overflow.
    pub(crate) fn reference_bytes(
        self,
        problem: &Problem,
        threads: usize,
        width: usize,
    ) -> Option<u64> {
        let [high, wide] = [self.rows, self.columns].map(|letter| problem.dim(letter) as u64);
        let rows = high.max(wide).checked_mul((2 * size_of::<f64>() * threads) as u64)?;
        let scales = self.results(problem).into_iter();
        let scales = scales.filter(|spec| spec.element == ElementRule::Is(DType::F32));
        let scales = scales.map(|spec| spec.bytes(problem)).try_fold(0, |sum: u64, one| {
            // Four numbers, each twice as wide as it is on devices.
            sum.checked_add(one?.checked_mul(8)?)
        })?;
        let entries = high.checked_mul(wide)?;
        let entries = entries.checked_mul((size_of::<f32>() + width) as u64)?;
        entries.checked_add(rows)?.checked_add(scales)
    }
}

/// Refuses options outside their range.
///
/// # Errors
/// A block of no entries.
pub(crate) fn validate(problem: &Problem) -> Result<()> {
    if problem.integer("block_size") == Some(0) {
        let text = "options: block_size is 0; it must be at least 1";
        return Err(Error::Invalid(text.to_owned()));
    }
    Ok(())
}

/// A description of the format and the blocks for reports.
pub(crate) fn headline(problem: &Problem) -> String {
    let block = match blocks(problem) {
        Some(Blocks { columns: Some(columns), rows }) => format!(" of {rows} x {columns}"),
        _ => String::new(),
    };
    let (format, granularity) = (options(problem).format, problem.word("granularity"));
    let transposed = if problem.flag("transposed") { ", with the transposed copy" } else { "" };
    format!("{} to {format}, {granularity}{block}{transposed}", problem.dtype)
}

/// Tolerances of quantisation.
pub(crate) const TOLERANCES: [ToleranceSpec; 2] = [
    ToleranceSpec {
        name: "scale_ulp",
        about: "error of a scale, in units in the last place of f32",
        default: |problem| if problem.flag("power_of_two") { 0.0 } else { 1.0 },
    },
    ToleranceSpec {
        name: "quotient_roundings",
        about: "relative error of a quotient before it is rounded to the format, in units of 2^-24",
        default: |problem| if problem.flag("power_of_two") { 0.0 } else { QUOTIENT },
    },
];

/// The tolerance of entries that are computed before quantisation.
pub(crate) const UNROUNDED: ToleranceSpec = ToleranceSpec {
    name: "unrounded",
    about: "error of an entry before quantisation beyond the kernels' bound, in units of \
            rounding of the dtype: 1 for programs that may skip that rounding, as XLA's",
    default: |_| 0.0,
};

/// Returns the interval of an entry of `E` that kernels compute within `bound` of `y` before they round it.
/// `unrounded` is the tolerance.
fn between<E: Element>(y: f64, bound: f64, unrounded: f64) -> [f32; 2] {
    // A product with a factor of 0 is exact.
    if y == 0.0 || !y.is_finite() {
        return [y as f32; 2];
    }
    if unrounded == 0.0 {
        // Rounding is monotone.
        return [y - bound, y + bound].map(|y| E::from_f64(y).to_f32());
    }
    let bound = bound + unrounded * 0.5 * E::DTYPE.ulp(y);
    [y - bound, y + bound].map(|y| y as f32)
}

/// The entries of a row-major matrix, as intervals.
pub(crate) trait Entries: Sync {
    /// The interval of an entry.
    fn at(&self, index: usize) -> [f32; 2];
}

impl<E: Element> Entries for &[E] {
    fn at(&self, index: usize) -> [f32; 2] {
        [self[index].to_f32(); 2]
    }
}

impl Entries for Vec<[f32; 2]> {
    fn at(&self, index: usize) -> [f32; 2] {
        self[index]
    }
}

/// Returns the middle and half the width of an interval.
fn middle([from, to]: [f64; 2]) -> [f64; 2] {
    if from == to { [from, 0.0] } else { [0.5 * (from + to), 0.5 * (to - from)] }
}

/// The reference of a quantised matrix.
pub(crate) struct Quantized<S> {
    /// The entries to be quantised.
    entries: S,
    /// The matrix, and the transposed copy if there is one.
    sides: Vec<Side>,
}

impl<S: Entries> Quantized<S> {
    /// The reference for `entries`.
    ///
    /// # Errors
    /// More elements than memory can address.
    pub(crate) fn new(
        problem: &Problem,
        letters: Letters,
        entries: S,
        tolerances: &Tolerances,
    ) -> Result<Self> {
        let shape = letters.shape(problem)?;
        let sides = if problem.flag("transposed") { &[false, true][..] } else { &[false] };
        let side = |&is_transposed: &bool| Side {
            options: options(problem),
            blocks: blocks(problem),
            is_transposed,
            shape: if is_transposed { shape.transposed() } else { shape },
            scales: Vec::new(),
            tolerances: tolerances.clone(),
        };
        Ok(Self { entries, sides: sides.iter().map(side).collect() })
    }

    /// Computes the expected scales. Call it before [`Self::hand_over`].
    pub(crate) fn make_scales(&mut self) {
        self.sides.iter_mut().for_each(|side| side.make_scales(&self.entries));
    }

    /// Passes expected results, and dequantised matrices, to the visitor.
    pub(crate) fn hand_over(&self, visitor: &mut dyn Visitor) {
        self.sides.iter().for_each(|side| side.hand_over(&self.entries, visitor));
    }
}

impl Quantized<Vec<[f32; 2]>> {
    /// A reference whose entries [`Self::make`] computes.
    ///
    /// # Errors
    /// More elements than memory can address.
    pub(crate) fn without_input(
        problem: &Problem,
        letters: Letters,
        tolerances: &Tolerances,
    ) -> Result<Self> {
        Self::new(problem, letters, Vec::new(), tolerances)
    }

    /// Computes entries a row at a time, then the scales. `of` returns a row's entries before they are
    /// rounded to `E`, with the kernels' error bounds; `R` is a thread's buffer.
    pub(crate) fn make<E: Element, R: Default>(
        &mut self,
        of: impl for<'r> Fn(usize, &'r mut R) -> [&'r [f64]; 2] + Sync,
    ) {
        let Side { shape, tolerances, .. } = &self.sides[0];
        let (columns, unrounded) = (shape.columns(), tolerances.get("unrounded"));
        self.entries = vec![[0.0; 2]; shape.rows() * columns];
        let rows = self.entries.par_chunks_mut(columns.max(1)).enumerate();
        rows.for_each_init(R::default, |row, (token, entries)| {
            let [y, bounds] = of(token, row);
            for (entry, (&y, &bound)) in entries.iter_mut().zip(y.iter().zip(bounds)) {
                *entry = between::<E>(y, bound, unrounded);
            }
        });
        self.make_scales();
    }
}

/// The matrix, or its transposed copy.
struct Side {
    options: Fp8Quantize,
    /// None for one scale.
    blocks: Option<Blocks>,
    is_transposed: bool,
    /// The shape after transposition.
    shape: QuantizeShape,
    /// The intervals of the blocks' scales.
    scales: Vec<[f64; 2]>,
    tolerances: Tolerances,
}

/// The expected quotient and scale of an entry.
struct Expected {
    /// The quotient, and its error bound.
    quotient: [f64; 2],
    /// The scale, and its error bound.
    scale: [f64; 2],
}

impl Side {
    /// Names of values, of scales, and of the metrics of the dequantised matrix.
    fn names(&self) -> [&'static str; 3] {
        match self.is_transposed {
            false => ["values", "scales", "dequantised"],
            true => ["transposed", "transposed_scales", "transposed_dequantised"],
        }
    }

    fn at(&self, entries: &impl Entries, row: usize, column: usize) -> [f32; 2] {
        entries.at(match self.is_transposed {
            false => row * self.shape.columns() + column,
            true => column * self.shape.rows() + row,
        })
    }

    /// Rows and columns of a block, and the number of blocks in a row.
    fn cut(&self) -> [usize; 3] {
        let [rows, columns] = [self.shape.rows(), self.shape.columns()];
        match self.blocks {
            None => [rows, columns, 1],
            Some(blocks) => {
                [blocks.rows, blocks.columns_of(columns), blocks.count(rows, columns)[1]]
            }
        }
    }

    /// The interval of the exact scale of a block.
    fn scale(&self, entries: &impl Entries, block: usize) -> [f64; 2] {
        let [high, wide, across] = self.cut();
        let [row, column] = [block / across * high, block % across * wide];
        let rows = row..self.shape.rows().min(row + high);
        let columns = column..self.shape.columns().min(column + wide);
        let all = || {
            let places = rows.clone().flat_map(|row| columns.clone().map(move |at| (row, at)));
            places.map(|(row, column)| self.at(entries, row, column))
        };
        let most = amax(all().flatten());
        // The smaller magnitude of each interval; 0 if the entry may be infinite or have either sign.
        let least = amax(all().map(|[from, to]| match from.signum() == to.signum() {
            true if from.is_finite() && to.is_finite() => from.abs().min(to.abs()),
            _ => 0.0,
        }));
        let [one, other] = [least, most].map(|amax| exact_scale(&self.options, amax));
        // A block of zeros has a larger scale than one of tiny entries.
        [one.min(other), one.max(other)]
    }

    fn make_scales(&mut self, entries: &impl Entries) {
        let [high, _, across] = self.cut();
        let blocks = self.shape.rows().div_ceil(high) * across;
        let scales = (0..blocks).into_par_iter().map(|block| self.scale(entries, block));
        self.scales = scales.collect();
    }

    /// The block of an entry.
    fn block(&self, row: usize, column: usize) -> usize {
        let [high, wide, across] = self.cut();
        row / high * across + column / wide
    }

    /// The expected quotient and scale, from the intervals of an entry and of its scale.
    fn expected(&self, entry: [f32; 2], scale: [f64; 2]) -> Expected {
        let roundings = self.tolerances.get("quotient_roundings") * ROUNDING;
        if entry[0].is_nan() {
            return Expected { quotient: [f64::NAN, 0.0], scale: middle(scale) };
        }
        let quotient = |x: f32, scale| exact_quotient(&self.options, x, scale);
        let [from, to] = match entry[0] == entry[1] && scale[0] == scale[1] {
            true => [quotient(entry[0], scale[0]); 2],
            false => {
                let all = entry.map(|x| scale.map(|scale| quotient(x, scale)));
                let all = all.as_flattened().iter().copied();
                [all.clone().fold(f64::INFINITY, f64::min), all.fold(-f64::INFINITY, f64::max)]
            }
        };
        let [quotient, off] = middle([from, to]);
        let most = from.abs().max(to.abs());
        Expected { quotient: [quotient, off + most * roundings], scale: middle(scale) }
    }

    /// Passes rows of expected values and bounds, which `of` makes for each entry.
    fn rows(
        &self,
        entries: &impl Entries,
        to: &dyn Rows,
        of: impl Fn(Expected) -> [f64; 2] + Sync,
    ) {
        let columns = self.shape.columns();
        let init = || (vec![0.0; columns], vec![0.0; columns]);
        (0..self.shape.rows()).into_par_iter().for_each_init(init, |(expected, bounds), row| {
            for column in 0..columns {
                let scale = self.scales[self.block(row, column)];
                let entry = self.at(entries, row, column);
                [expected[column], bounds[column]] = of(self.expected(entry, scale));
            }
            to.row(row * columns, expected, Bound::Each(bounds));
        });
    }

    fn hand_over(&self, entries: &impl Entries, visitor: &mut dyn Visitor) {
        let [values, scales, back] = self.names();
        let f32_ulp = |x: f64| DType::F32.ulp(x);
        let scale_ulp = self.tolerances.get("scale_ulp");
        if self.blocks.is_none() {
            let (found, [expected, off]) = (visitor.found().get(scales), middle(self.scales[0]));
            if let Some(found) = found.map(|found| found.at(0)) {
                // `expected` is not rounded to f32; scales of blocks are rounded when they are judged.
                let is_exact = f64::from(expected as f32) == expected;
                let ulps = if is_exact { scale_ulp } else { scale_ulp + 0.5 };
                visitor.scalar(scales, found, expected, off + ulps * f32_ulp(expected));
            }
        } else {
            let judged = Judged::Rounded { ulps: scale_ulp, equal: 0.0 };
            visitor.result(scales, scales, judged, &|to| {
                let of = |&scale: &[f64; 2]| match middle(scale) {
                    [expected, 0.0] => (expected, 0.0),
                    // The middle is rounded when it is judged.
                    [expected, off] => (expected, off + (scale_ulp + 0.5) * f32_ulp(expected)),
                };
                let (expected, bounds): (Vec<_>, Vec<_>) = self.scales.iter().map(of).unzip();
                to.row(0, &expected, Bound::Each(&bounds));
            });
        }
        let judged = Judged::WithinRounding { relative: f64::INFINITY };
        visitor.result(values, values, judged, &|to| self.rows(entries, to, |of| of.quotient));
        let Some(found) = self.back(visitor.found()) else { return };
        visitor.made(values, &found, back, Judged::Within, &|to| {
            self.rows(
                entries,
                to,
                |Expected { quotient: [quotient, bound], scale: [scale, off] }| {
                    if quotient.is_nan() {
                        return [quotient, 1.0];
                    }
                    let expected = quotient * scale;
                    let ulp = self.options.format.ulp(quotient.abs() + bound);
                    // Errors of the scale, and of rounding the product.
                    let of_scale = off + scale_ulp * f32_ulp(scale) + ROUNDING * scale;
                    let most = quotient.abs() + bound + ulp;
                    let bound = (bound + 0.5 * ulp) * scale + most * of_scale + f32_ulp(expected);
                    [expected, bound]
                },
            );
        });
    }

    /// Found values times found scales, in f32.
    fn back(&self, found: &Arrays<'_>) -> Option<Vec<f32>> {
        let [values, scales, _] = self.names();
        let (bits, scales) = (found.bits(values)?, found.get(scales)?);
        let columns = self.shape.columns();
        let back = |(index, &bits)| {
            let scale = scales.at(self.block(index / columns, index % columns)) as f32;
            self.options.format.decode(bits) * scale
        };
        Some(bits.par_iter().enumerate().map(back).collect())
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    /// 256 and 258 are neighbours in bf16.
    #[test]
    fn an_entry_beside_a_tie_is_either_of_two() {
        assert_eq!(between::<bf16>(256.9, 1e-3, 0.0), [256.0; 2]);
        assert_eq!(between::<bf16>(256.9995, 1e-3, 0.0), [256.0, 258.0]);
        assert_eq!(between::<bf16>(-257.0005, 1e-3, 0.0), [-258.0, -256.0]);
        assert_eq!(between::<bf16>(0.0, 1.0, 0.0), [0.0; 2]);
        assert_eq!(between::<bf16>(f64::INFINITY, f64::NAN, 0.0), [f32::INFINITY; 2]);
        let [from, to] = between::<bf16>(256.9, 0.0, 1.0);
        assert!(from <= 256.0 && to >= 257.9, "{from} {to}");
    }

    fn side(power_of_two: bool) -> Side {
        let tolerances = [("scale_ulp", 1.0), ("quotient_roundings", 4.0)];
        Side {
            options: Fp8Quantize { format: Format::E4M3Fn, power_of_two },
            blocks: Some(Blocks { rows: 1, columns: Some(2) }),
            is_transposed: false,
            shape: QuantizeShape::new(1, 1, 6).unwrap(),
            scales: Vec::new(),
            tolerances: Tolerances::new(tolerances),
        }
    }

    /// A block's largest entry changes its scale, other entries only their own values; an entry that may not be
    /// finite does not hide the others, and is not hidden.
    #[test]
    fn scales_and_quotients_lie_between_those_of_entries() {
        let entries = vec![
            [448.0, 450.0],
            [10.0; 2],
            [-20.0; 2],
            [-2.0, 3.0],
            [f32::MAX, f32::INFINITY],
            [1.0; 2],
        ];
        let mut exact = side(false);
        exact.make_scales(&entries);
        let [largest, max] = [448.0, f64::from(f32::MAX)];
        let scales = [[1.0, 450.0 / largest], [20.0 / largest; 2], [1.0 / largest, max / largest]];
        assert_eq!(exact.scales, scales);
        let mut rounded = side(true);
        rounded.make_scales(&entries);
        assert_eq!(rounded.scales[..2], [[1.0, 2.0], [2_f64.powi(-4); 2]]);

        let of = |column: usize| exact.expected(entries[column], exact.scales[column / 2]);
        let Expected { quotient: [quotient, bound], .. } = of(1);
        let far = 10.0 * largest / 450.0;
        assert!(quotient - bound <= far && quotient + bound >= 10.0, "{quotient} {bound}");
        assert!(bound < 0.03, "{bound}");
        let Expected { quotient: [quotient, bound], .. } = of(2);
        assert_eq!(quotient, -largest);
        assert_eq!(bound, 4.0 * largest * ROUNDING);
        let Expected { quotient: [quotient, bound], .. } = of(3);
        let [from, to] = [-2.0, 3.0].map(|x| x * largest / 20.0);
        assert!(quotient - bound <= from && quotient + bound >= to && bound < 57.0, "{bound}");
        assert!(exact.expected([f32::NAN; 2], [1.0; 2]).quotient[0].is_nan());
    }
}
