//! FP8 quantisation: the attributes and the shapes of its targets, on any platform.

pub(crate) mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;

use xentile::fp8_quantize::{Blocks, Format, Fp8Quantize, QuantizeShape};
use xla_ffi::{DType, Decoder, Error, Parameter, Result};

/// The attributes of targets that make scales, each within its range.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Options {
    pub(crate) blocks: Blocks,
    pub(crate) power_of_two: bool,
}

impl<'a> Parameter<'a> for Options {
    fn decode(decoder: &mut Decoder<'a>, _: &'static str) -> Result<Self> {
        let extent = |name: &str, extent: i64| {
            usize::try_from(extent).ok().filter(|extent| *extent > 0).ok_or_else(|| {
                invalid(format_args!("attribute {name} is {extent}; it must be at least 1"))
            })
        };
        let columns: Option<i64> = decoder.parameter("block_columns")?;
        let blocks = Blocks {
            rows: extent("block_rows", decoder.parameter("block_rows")?)?,
            columns: columns.map(|columns| extent("block_columns", columns)).transpose()?,
        };
        Ok(Self { blocks, power_of_two: decoder.parameter("power_of_two")? })
    }
}

/// The format of `values`.
pub(crate) fn format(values: DType) -> Result<Format> {
    match values {
        DType::F8E4M3FN => Ok(Format::E4M3Fn),
        DType::F8E5M2 => Ok(Format::E5M2),
        other => Err(invalid(format_args!(
            "`values` has dtype {other}; it must be one of {}",
            Format::NAMES
        ))),
    }
}

/// Checks that the values `name` have the format of the others.
pub(crate) fn check_format(name: &str, values: DType, of: Format) -> Result {
    if format(values)? == of {
        return Ok(());
    }
    Err(invalid(format_args!("`{name}` has dtype {values}; it must be {of}")))
}

/// What a target without attributes of its own takes.
pub(crate) fn given(format: Format) -> Fp8Quantize {
    Fp8Quantize { format, power_of_two: false }
}

/// The shape of `x`, whose last `axes` are those of a matrix, 1 of rows alone or 2; none where it is
/// empty.
pub(crate) fn shape(x: &[usize], axes: usize) -> Result<Option<QuantizeShape>> {
    if x.len() < axes {
        return Err(invalid(format_args!(
            "`x` has shape {x:?}; it must have an axis of columns, and one of rows before it where \
             blocks have several or a transposed copy is a result"
        )));
    }
    if x.contains(&0) {
        return Ok(None);
    }
    let (leading, own) = x.split_at(x.len() - axes);
    let matrices = leading.iter().product();
    let [rows, columns] = match own {
        [columns] => [1, *columns],
        _ => [own[0], own[1]],
    };
    QuantizeShape::new(matrices, rows, columns)
        .map(Some)
        .map_err(|error| invalid(format_args!("`x` has {error}")))
}

/// The shape of scales of `blocks` of `x`.
pub(crate) fn of_scales(x: &[usize], blocks: Blocks) -> Vec<usize> {
    let (leading, columns) = (&x[..x.len() - 1], x[x.len() - 1]);
    if blocks.rows == 1 {
        let count = blocks.columns.map(|_| blocks.count(1, columns)[1]);
        return leading.iter().copied().chain(count).collect();
    }
    let (leading, rows) = (&leading[..leading.len() - 1], leading[leading.len() - 1]);
    leading.iter().copied().chain(blocks.count(rows, columns)).collect()
}

/// The shape of the transposed copy of `x`.
pub(crate) fn turned(x: &[usize]) -> Vec<usize> {
    let mut dims = x.to_vec();
    let last = dims.len() - 1;
    dims.swap(last - 1, last);
    dims
}

/// Checks the shape of a result or argument.
pub(crate) fn check(name: &str, dims: &[usize], expected: &[usize], x: &[usize]) -> Result {
    if dims == expected {
        return Ok(());
    }
    Err(invalid(format_args!(
        "`{name}` has shape {dims:?}; it must be {expected:?}, as `x` has shape {x:?}"
    )))
}

/// Checks that `scale` has none or some of the first of `axes`.
pub(crate) fn check_scale(scale: &[usize], axes: &[usize]) -> Result {
    if axes.starts_with(scale) {
        return Ok(());
    }
    Err(invalid(format_args!(
        "`scale` has shape {scale:?}; it must be that of none or some of the first axes of {axes:?}"
    )))
}

pub(crate) fn invalid(message: impl std::fmt::Display) -> Error {
    Error::invalid_argument(message.to_string())
}
