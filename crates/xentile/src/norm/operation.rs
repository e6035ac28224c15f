//! What tools see alike of every norm: the shape of rows, the dtype of the weight, tolerances, and how
//! inputs are drawn.

use super::NormShape;
use crate::operation::{
    Array, ArrayElement, Distribution, ElementRule, Kind, OptionSpec, Problem, Synthetic,
    ToleranceSpec, Value, WHOLE_RESULTS,
};
use crate::{DType, Element, Result, by_dtype};

/// The option that says the dtype of the weight.
pub(crate) const WEIGHT_DTYPE: OptionSpec = OptionSpec::new(
    "weight_dtype",
    Kind::Word(&["f32", "bf16", "f16"]),
    Value::Absent,
    "f32, bf16 or f16",
    "the dtype of the weight; that of rows where absent",
)
.on_top();

pub(crate) const TOLERANCES: [ToleranceSpec; 2] = [
    ToleranceSpec {
        name: "sum_roundings",
        about: "what sums over a row and over tokens may be off by beside what kernels may, in \
                sqrt(n) units of rounding of f32",
        default: |_| 0.0,
    },
    WHOLE_RESULTS,
];

/// What keeps the generators of arrays apart.
pub(crate) const SEEDS: [u64; 4] =
    [0x9e37_79b9_7f4a_7c15, 0xbf58_476d_1ce4_e5b9, 0x94d0_49bb_1331_11eb, 0xd6e8_feb8_6659_fd93];

/// Half the distance of 1 and the next f32.
pub(crate) const F32_ROUNDING: f64 = 1.0 / (1 << 24) as f64;

/// What a few products that fall below f32's normal range may lose.
pub(crate) const FLUSHED: f64 = 8.0 * f32::MIN_POSITIVE as f64;

/// The dtype of the weight.
#[must_use]
pub fn weight_dtype(problem: &Problem) -> DType {
    problem.word("weight_dtype").parse().unwrap_or(problem.dtype)
}

/// The same, as a signature says it.
pub(crate) fn weight_rule(problem: &Problem) -> ElementRule {
    match problem.option("weight_dtype") {
        Value::Absent => ElementRule::Compute,
        _ => ElementRule::Is(weight_dtype(problem)),
    }
}

/// The shape of rows.
///
/// # Errors
/// More elements than memory can address.
pub fn shape(problem: &Problem) -> Result<NormShape> {
    NormShape::new(problem.dim("T"), problem.dim("D"))
}

/// Rows of `[T, D]` from a distribution.
pub(crate) fn rows_of(problem: &Problem, from: &Synthetic, rows: &[u64]) -> Array<'static> {
    from.draw(problem.dtype, rows, problem.dim("D"))
}

/// Numbers `[D]` of the weight's dtype, near `centre` as those of trained models are.
pub(crate) fn columns_of(problem: &Problem, from: &Synthetic, centre: f32) -> Array<'static> {
    let from = Synthetic { distribution: Distribution::Normal, std: Some(0.25), ..from.clone() };
    let mut columns = vec![0_f32; problem.dim("D")];
    from.fill(&[0], problem.dim("D"), &mut columns);
    by_dtype!(weight_dtype(problem), W => {
        Array::of(columns.iter().map(|x| W::from_f32(centre + x)).collect::<Vec<W>>())
    })
}

/// Row `row` of a matrix with rows of `columns`, in float64.
pub(crate) fn wide_row<E: Element + ArrayElement>(
    all: &[E],
    columns: usize,
    row: usize,
) -> Vec<f64> {
    all[row * columns..][..columns].iter().map(|x| x.to_f64()).collect()
}
