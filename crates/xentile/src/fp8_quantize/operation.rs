//! FP8 quantisation, as tools see it. It has no derivative, and so the forward pass alone.
//!
//! Scales are judged by the exact ones, values by the exact quotients, each within half a unit in the last
//! place of the format and what the contract rounds before, and values times scales by x itself.

use rayon::prelude::*;

use super::reference::{amax, exact_quotient, exact_scale};
use super::{Blocks, Format, Fp8Quantize, QuantizeShape};
use crate::operation::{
    ArrayElement, ArraySpec, Arrays, Bound, Cost, DimSpec, Distribution, ElementRule, HIDDEN,
    Judged, Kind, Operation, OptionSpec, Pass, Problem, Reference, Role, Rows, Signature,
    Synthetic, TOKENS, ToleranceSpec, Tolerances, Value, Visitor,
};
use crate::{Element, Error, Result, by_dtype};

/// FP8 quantisation of rows.
pub const OPERATION: OfRows = OfRows;

/// The operation.
#[derive(Clone, Copy, Debug)]
pub struct OfRows;

/// 2^-24, half a unit in the last place of f32 at 1.
const ROUNDING: f64 = (f32::EPSILON / 2.0) as f64;

/// What is rounded before a quotient is rounded to the format: the reciprocal of the largest number, the
/// scale, its reciprocal, and the product.
const QUOTIENT: f64 = 2.0 + super::QUOTIENT_ROUNDINGS;

const DIMS: [DimSpec; 2] = [TOKENS, HIDDEN];

const OPTIONS: [OptionSpec; 5] = [
    OptionSpec::new(
        "granularity",
        Kind::Word(&["tensor", "row", "block_1d", "block_2d"]),
        Value::Word("tensor"),
        "tensor, row, block_1d or block_2d",
        "which entries have a scale in common: all, those of a row, block_size of a row, or a square \
         of block_size",
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
        "whether scales are the least powers of two that do",
    ),
    OptionSpec::new(
        "format",
        Kind::Word(&["f8e4m3fn", "f8e5m2"]),
        Value::Word("f8e4m3fn"),
        "f8e4m3fn or f8e5m2",
        "what values are",
    ),
    OptionSpec::new(
        "transposed",
        Kind::Bool,
        Value::Bool(false),
        "true or false",
        "whether there is the transposed copy too, in blocks of its own",
    ),
];

/// The options that kernels take.
#[must_use]
pub fn options(problem: &Problem) -> Fp8Quantize {
    let format = problem.word("format").parse().unwrap_or(Format::E4M3Fn);
    Fp8Quantize { format, power_of_two: problem.flag("power_of_two") }
}

/// The blocks that have scales of their own; none where all of x has one.
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

/// The shape of x, one matrix.
///
/// # Errors
/// More elements than memory can address.
pub fn shape(problem: &Problem) -> Result<QuantizeShape> {
    QuantizeShape::new(1, problem.dim("T"), problem.dim("D"))
}

impl Operation for OfRows {
    fn name(&self) -> &'static str {
        "fp8_quantize"
    }

    fn about(&self) -> &'static str {
        "quantisation to FP8, with scales by tensor, row or block"
    }

    fn dims(&self) -> &'static [DimSpec] {
        &DIMS
    }

    fn options(&self) -> &'static [OptionSpec] {
        &OPTIONS
    }

    fn tolerances(&self) -> &'static [ToleranceSpec] {
        const ALL: [ToleranceSpec; 2] = [
            ToleranceSpec {
                name: "scale_ulp",
                about: "units in the last place of f32 that a scale may be off by",
                default: |problem| if problem.flag("power_of_two") { 0.0 } else { 1.0 },
            },
            ToleranceSpec {
                name: "quotient_roundings",
                about: "what a quotient may be off by before it is rounded to the format, relative to \
                        it, in units of 2^-24",
                default: |problem| if problem.flag("power_of_two") { 0.0 } else { QUOTIENT },
            },
        ];
        &ALL
    }

    fn tile(&self) -> &'static [DimSpec] {
        &[]
    }

    fn distributions(&self) -> &'static [Distribution] {
        &[Distribution::Normal, Distribution::Uniform, Distribution::Offset]
    }

    fn passes(&self) -> &'static [Pass] {
        &[Pass::Forward]
    }

    fn validate(&self, problem: &Problem) -> Result<()> {
        if problem.integer("block_size") == Some(0) {
            let text = "options: block_size is 0; it must be at least 1";
            return Err(Error::Invalid(text.to_owned()));
        }
        Ok(())
    }

    fn signature(&self, problem: &Problem, _: Pass) -> Signature {
        let x = Role::Input { differentiable: false };
        let format = ElementRule::Fp8(options(problem).format);
        let values = |name, dims: &[_]| ArraySpec::new(name, dims, format, Role::Output);
        let scales = |name, dims: &[_]| ArraySpec::number(name, dims, Role::Output);
        // Of x and of the transposed copy.
        let dims: [&[&str]; 2] = match problem.word("granularity") {
            "row" => [&["T"], &["D"]],
            "block_1d" => [&["T", "D/block_size"], &["D", "T/block_size"]],
            "block_2d" => [&["T/block_size", "D/block_size"], &["D/block_size", "T/block_size"]],
            _ => [&[], &[]],
        };
        let mut results = vec![values("values", &["T", "D"]), scales("scales", dims[0])];
        if problem.flag("transposed") {
            results.push(values("transposed", &["D", "T"]));
            results.push(scales("transposed_scales", dims[1]));
        }
        let operands = vec![ArraySpec::new("x", &["T", "D"], ElementRule::Compute, x)];
        Signature { operands, results }
    }

    fn inputs(&self, problem: &Problem, from: &Synthetic, rows: &[u64]) -> Result<Arrays<'static>> {
        shape(problem)?;
        from.check_unlabelled(self, "rows")?;
        let mut inputs = Arrays::default();
        inputs.insert("x", from.draw(problem.dtype, rows, problem.dim("D")));
        Ok(inputs)
    }

    fn given(&self, _: &Problem, _: Pass, _: &Synthetic, _: &[u64]) -> Arrays<'static> {
        Arrays::default()
    }

    fn reference<'a>(
        &self,
        problem: &'a Problem,
        inputs: &'a Arrays<'a>,
        tolerances: Tolerances,
    ) -> Result<Box<dyn Reference + 'a>> {
        let shape = shape(problem)?;
        let sides = if problem.flag("transposed") { &[false, true][..] } else { &[false] };
        Ok(by_dtype!(problem.dtype, E => {
            let x = inputs.expect::<E>("x");
            let side = |&is_turned: &bool| Side {
                options: options(problem),
                blocks: blocks(problem),
                is_turned,
                shape: if is_turned { shape.transposed() } else { shape },
                x,
                scales: Vec::new(),
                tolerances: tolerances.clone(),
            };
            Box::new(Matrix { sides: sides.iter().map(side).collect() })
        }))
    }

    /// Scales, what comes back of one side, and rows of each thread.
    fn reference_bytes(&self, problem: &Problem, threads: usize) -> Option<u64> {
        let entries = problem.elements(&DIMS)?;
        let longer = problem.dim("T").max(problem.dim("D"));
        let rows = (longer as u64).checked_mul(2 * threads as u64)?;
        let scales = self.signature(problem, Pass::Forward).results;
        let scales =
            scales.iter().filter(|spec| spec.element == ElementRule::Is(crate::DType::F32));
        let scales = scales.map(|spec| spec.bytes(problem)).try_fold(0, |sum: u64, one| {
            // Twice as wide as they are on devices.
            sum.checked_add(one?.checked_mul(2)?)
        })?;
        let rows = rows.checked_mul(size_of::<f64>() as u64)?;
        entries.checked_mul(size_of::<f32>() as u64)?.checked_add(rows)?.checked_add(scales)
    }

    fn cost(&self, problem: &Problem) -> Cost {
        let [bytes_read, bytes_written] = self.signature(problem, Pass::Forward).bytes(problem);
        Cost { bytes_read, bytes_written, flops: 0 }
    }

    fn headline(&self, problem: &Problem) -> (&'static str, String) {
        let block = match blocks(problem) {
            Some(Blocks { columns: Some(columns), rows }) => format!(" of {rows} x {columns}"),
            _ => String::new(),
        };
        let (shape, dtype) = (self.shape(problem, None), problem.dtype);
        let (format, granularity) = (options(problem).format, problem.word("granularity"));
        let turned = if problem.flag("transposed") { ", with the transposed copy" } else { "" };
        ("rows", format!("{shape} {dtype} to {format}, {granularity}{block}{turned}"))
    }
}

/// The reference.
struct Matrix<'a, E> {
    /// x, and the transposed copy where there is one.
    sides: Vec<Side<'a, E>>,
}

/// x, or its transposed.
struct Side<'a, E> {
    options: Fp8Quantize,
    /// None where there is one scale.
    blocks: Option<Blocks>,
    is_turned: bool,
    /// Turned where x is.
    shape: QuantizeShape,
    x: &'a [E],
    /// Of blocks.
    scales: Vec<f64>,
    tolerances: Tolerances,
}

impl<E: Element + ArrayElement> Side<'_, E> {
    /// Names of values, of scales, and of metrics of what comes back.
    fn names(&self) -> [&'static str; 3] {
        match self.is_turned {
            false => ["values", "scales", "dequantised"],
            true => ["transposed", "transposed_scales", "transposed_dequantised"],
        }
    }

    fn at(&self, row: usize, column: usize) -> f32 {
        let index = match self.is_turned {
            false => row * self.shape.columns() + column,
            true => column * self.shape.rows() + row,
        };
        self.x[index].to_f32()
    }

    /// Rows and columns of a block, and how many blocks there are across.
    fn cut(&self) -> [usize; 3] {
        let [rows, columns] = [self.shape.rows(), self.shape.columns()];
        match self.blocks {
            None => [rows, columns, 1],
            Some(blocks) => {
                [blocks.rows, blocks.columns_of(columns), blocks.count(rows, columns)[1]]
            }
        }
    }

    /// The exact scale of a block.
    fn scale(&self, block: usize) -> f64 {
        let [high, wide, across] = self.cut();
        let [row, column] = [block / across * high, block % across * wide];
        let rows = row..self.shape.rows().min(row + high);
        let columns = column..self.shape.columns().min(column + wide);
        let entries = rows.flat_map(|row| columns.clone().map(move |column| (row, column)));
        exact_scale(&self.options, amax(entries.map(|(row, column)| self.at(row, column))))
    }

    fn make_scales(&mut self) {
        let [high, _, across] = self.cut();
        let blocks = self.shape.rows().div_ceil(high) * across;
        self.scales = (0..blocks).into_par_iter().map(|block| self.scale(block)).collect();
    }

    /// The block of an entry.
    fn block(&self, row: usize, column: usize) -> usize {
        let [high, wide, across] = self.cut();
        row / high * across + column / wide
    }

    /// Calls `each` with each entry of a row, its quotient and what that may be off by, and its scale, and
    /// hands over what `each` makes of them: what is expected, and by how much that may be off.
    fn rows(&self, to: &dyn Rows, each: impl Fn([f64; 3]) -> [f64; 2] + Sync) {
        let columns = self.shape.columns();
        let roundings = self.tolerances.get("quotient_roundings") * ROUNDING;
        let init = || (vec![0.0; columns], vec![0.0; columns]);
        (0..self.shape.rows()).into_par_iter().for_each_init(init, |(expected, bounds), row| {
            for column in 0..columns {
                let scale = self.scales[self.block(row, column)];
                let quotient = exact_quotient(&self.options, self.at(row, column), scale);
                [expected[column], bounds[column]] =
                    each([quotient, quotient.abs() * roundings, scale]);
            }
            to.row(row * columns, expected, Bound::Each(bounds));
        });
    }

    /// Hands over what results should be, and what comes back of them.
    fn hand_over(&self, visitor: &mut dyn Visitor) {
        let [values, scales, back] = self.names();
        let f32_ulp = |x: f64| crate::DType::F32.ulp(x);
        let scale_ulp = self.tolerances.get("scale_ulp");
        if self.blocks.is_none() {
            let (found, expected) = (visitor.found().get(scales), self.scales[0]);
            if let Some(found) = found.map(|found| found.at(0)) {
                // The expected one is not rounded, as that of blocks is where it is judged.
                let is_exact = f64::from(expected as f32) == expected;
                let ulps = if is_exact { scale_ulp } else { scale_ulp + 0.5 };
                visitor.scalar(scales, found, expected, ulps * f32_ulp(expected));
            }
        } else {
            let judged = Judged::Rounded { ulps: scale_ulp, equal: 0.0 };
            visitor.result(scales, scales, judged, &|to| {
                to.row(0, &self.scales, Bound::All(0.0));
            });
        }
        let judged = Judged::WithinRounding { relative: f64::INFINITY };
        visitor.result(values, values, judged, &|to| {
            self.rows(to, |[quotient, bound, _]| [quotient, bound]);
        });
        let Some(found) = self.back(visitor.found()) else { return };
        visitor.made(values, &found, back, Judged::Within, &|to| {
            self.rows(to, |[quotient, bound, scale]| {
                let expected = quotient * scale;
                let ulp = self.options.format.ulp(quotient.abs() + bound);
                // The scale is off too, and the product is rounded.
                let of_scale = scale_ulp * f32_ulp(scale) + ROUNDING * scale;
                let most = quotient.abs() + ulp;
                let bound = (bound + 0.5 * ulp) * scale + most * of_scale + f32_ulp(expected);
                [expected, bound]
            });
        });
    }

    /// Values times scales, in f32, of what was found.
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

impl<E: Element + ArrayElement> Reference for Matrix<'_, E> {
    fn forward(&mut self) {
        self.sides.iter_mut().for_each(Side::make_scales);
    }

    fn outputs(&self, visitor: &mut dyn Visitor) {
        self.sides.iter().for_each(|side| side.hand_over(visitor));
    }

    /// There are none.
    fn gradients(&self, _: Pass, _: &Arrays<'_>, _: &str, _: &mut dyn Visitor) {}
}
