//! FP8 quantisation: the attributes and the shapes of its targets, on any platform.

pub(crate) mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;

use xentile::fp8_quantize::{Blocks, Format, Fp8Quantize, QuantizeShape};
use xla_ffi::{DType, Decoder, Parameter, Result};

use crate::arguments::invalid;
use crate::declaration::{
    ArrayDecl, AttributeDecl, Declaration, Dims, Dtype, F32, FLOATS, FP8, Range, Stages, attribute,
    input, may_alias, output, residual,
};

const POWER_OF_TWO: AttributeDecl = attribute("power_of_two", Range::Bool);
const ATTRIBUTES: &[AttributeDecl] = &[
    attribute("block_rows", Range::Extent),
    attribute("block_columns", Range::Extent).absent("all columns"),
    POWER_OF_TWO,
];
/// Rows, or a matrix where blocks have several rows.
const ROWS: Dims = Dims::By("block_rows", &[("1", "*batch D"), ("*", "*batch M D")]);
const MATRIX: ArrayDecl = input("x", "*batch M D", FLOATS);
const VALUES: ArrayDecl = output("values", "*batch M D", FP8);
const VALUES_T: ArrayDecl = output("values_t", "*batch D M", Dtype::Like("values"));
const SCALES: ArrayDecl = output("scales", "", F32).by(Dims::By(
    "block_rows",
    &[("1", "*batch M D/block_columns"), ("*", "*batch M/block_rows D/block_columns")],
));
const SCALES_T: ArrayDecl = output("scales_t", "", F32).by(Dims::By(
    "block_rows",
    &[("1", "*batch D M/block_columns"), ("*", "*batch D/block_rows M/block_columns")],
));

pub(crate) const DECLARATIONS: &[Declaration] = &[
    QUANTIZE,
    QUANTIZE_TRANSPOSED,
    SCALED,
    SCALED_TRANSPOSED,
    AMAX,
    SWIGLU,
    SWIGLU_TRANSPOSED,
    RMS_NORM,
    RMS_NORM_ADD,
    RMS_NORM_TRANSPOSED,
    RMS_NORM_ADD_TRANSPOSED,
];

pub(crate) const QUANTIZE: Declaration = Declaration {
    name: c"xentile_fp8_quantize",
    summary: "Values, and the scale of each block.",
    operands: &[input("x", "", FLOATS).by(ROWS)],
    results: &[
        output("values", "", FP8).by(ROWS),
        output("scales", "", F32).by(Dims::By(
            "block_rows",
            &[("1", "*batch D/block_columns"), ("*", "*batch M/block_rows D/block_columns")],
        )),
    ],
    attributes: &[ATTRIBUTES],
    ..Declaration::BASE
};

pub(crate) const QUANTIZE_TRANSPOSED: Declaration = Declaration {
    name: c"xentile_fp8_quantize_transposed",
    summary: "Values and scales, and the transposed copy with its own scales.",
    operands: &[MATRIX],
    results: &[VALUES, SCALES, VALUES_T, SCALES_T],
    attributes: &[ATTRIBUTES],
    ..Declaration::BASE
};

pub(crate) const SCALED: Declaration = Declaration {
    name: c"xentile_fp8_quantize_scaled",
    summary: "Values by a given scale, and amax of each row.",
    operands: &[input("x", "*batch D", FLOATS), input("scale", "", F32)],
    results: &[output("values", "*batch D", FP8), output("amax", "*batch", F32)],
    ..Declaration::BASE
};

pub(crate) const SCALED_TRANSPOSED: Declaration = Declaration {
    name: c"xentile_fp8_quantize_scaled_transposed",
    summary: "Values by a given scale, amax of each row, and the transposed copy.",
    operands: &[MATRIX, input("scale", "", F32)],
    results: &[VALUES, output("amax", "*batch M", F32), VALUES_T],
    ..Declaration::BASE
};

pub(crate) const AMAX: Declaration = Declaration {
    name: c"xentile_fp8_quantize_amax",
    summary: "amax of each row.",
    operands: &[input("x", "*batch D", FLOATS)],
    results: &[output("amax", "*batch", F32)],
    ..Declaration::BASE
};

/// Results of blocks of 128 columns, of rows and of matrices.
const OF_ROWS: [ArrayDecl; 2] =
    [output("values", "*batch D", FP8), output("scales", "*batch D/128", F32)];
const OF_MATRICES: [ArrayDecl; 4] = [
    VALUES,
    output("scales", "*batch M D/128", F32),
    VALUES_T,
    output("scales_t", "*batch D M/128", F32),
];

const GATE_ATTRIBUTES: &[AttributeDecl] = &[
    attribute("packing", Range::Word(&["apart", "halves", "interleaved"])),
    attribute("alpha", Range::Positive),
    attribute("up_offset", Range::Finite),
    attribute("limit", Range::Positive).absent("none"),
    POWER_OF_TWO,
];
/// Gate and up: each alone, or both packed, twice.
const GATED_ROWS: Dims = Dims::By(
    "packing",
    &[("apart", "*batch D"), ("halves", "*batch 2.D"), ("interleaved", "*batch D.2")],
);
const GATED_MATRICES: Dims = Dims::By(
    "packing",
    &[("apart", "*batch M D"), ("halves", "*batch M 2.D"), ("interleaved", "*batch M D.2")],
);

pub(crate) const SWIGLU: Declaration = Declaration {
    name: c"xentile_fp8_quantize_swiglu",
    summary: "Values and scales of SwiGLU, by blocks of 128 columns; what packs gate and up is given twice.",
    host: Stages::None,
    operands: &[
        input("x", "", FLOATS).by(GATED_ROWS),
        input("up", "", Dtype::Like("x")).by(GATED_ROWS),
    ],
    results: &OF_ROWS,
    attributes: &[GATE_ATTRIBUTES],
    ..Declaration::BASE
};

pub(crate) const SWIGLU_TRANSPOSED: Declaration = Declaration {
    name: c"xentile_fp8_quantize_swiglu_transposed",
    summary: "The same, and the transposed copy with its own scales.",
    operands: &[
        input("x", "", FLOATS).by(GATED_MATRICES),
        input("up", "", Dtype::Like("x")).by(GATED_MATRICES),
    ],
    results: &OF_MATRICES,
    ..SWIGLU
};

const ROW: ArrayDecl = input("x", "*batch D", FLOATS);
const WEIGHT: ArrayDecl = input("weight", "D", FLOATS);

pub(crate) const RMS_NORM: Declaration = Declaration {
    name: c"xentile_fp8_quantize_rms_norm",
    summary: "Values and scales of RMSNorm, by blocks of 128 columns, and the rstd of each row.",
    host: Stages::None,
    operands: &[ROW, WEIGHT],
    results: &[OF_ROWS[0], OF_ROWS[1], residual("rstd", "*batch", F32)],
    attributes: &[&[crate::norm::EPS, crate::norm::ZERO_CENTRED, POWER_OF_TWO]],
    maps_shared: false,
    ..Declaration::BASE
};

pub(crate) const RMS_NORM_ADD: Declaration = Declaration {
    name: c"xentile_fp8_quantize_rms_norm_add",
    summary: "The same of x + residual, which is a result too.",
    operands: &[ROW, input("residual", "*batch D", Dtype::Like("x")), WEIGHT],
    results: &[
        OF_ROWS[0],
        OF_ROWS[1],
        output("sum", "*batch D", Dtype::Like("x")),
        residual("rstd", "*batch", F32),
    ],
    aliases: &[may_alias("residual", "sum")],
    ..RMS_NORM
};

pub(crate) const RMS_NORM_TRANSPOSED: Declaration = Declaration {
    name: c"xentile_fp8_quantize_rms_norm_transposed",
    summary: "Values and scales of RMSNorm, the transposed copy with its own scales, and the rstd of each row.",
    operands: &[MATRIX, WEIGHT],
    results: &[
        OF_MATRICES[0],
        OF_MATRICES[1],
        OF_MATRICES[2],
        OF_MATRICES[3],
        residual("rstd", "*batch M", F32),
    ],
    ..RMS_NORM
};

pub(crate) const RMS_NORM_ADD_TRANSPOSED: Declaration = Declaration {
    name: c"xentile_fp8_quantize_rms_norm_add_transposed",
    summary: "The same of x + residual, which is a result too.",
    operands: &[MATRIX, input("residual", "*batch M D", Dtype::Like("x")), WEIGHT],
    results: &[
        OF_MATRICES[0],
        OF_MATRICES[1],
        OF_MATRICES[2],
        OF_MATRICES[3],
        output("sum", "*batch M D", Dtype::Like("x")),
        residual("rstd", "*batch M", F32),
    ],
    aliases: &[may_alias("residual", "sum")],
    ..RMS_NORM
};

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

/// The format of the values `name`.
pub(crate) fn format(name: &str, values: DType) -> Result<Format> {
    match values {
        DType::F8E4M3FN => Ok(Format::E4M3Fn),
        DType::F8E5M2 => Ok(Format::E5M2),
        other => Err(invalid(format_args!(
            "`{name}` has dtype {other}; it must be one of {}",
            Format::NAMES
        ))),
    }
}

/// Checks that the values `name` have the format of the others.
pub(crate) fn check_format(name: &str, values: DType, of: Format) -> Result {
    if format(name, values)? == of {
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
pub(crate) fn shape_scales(x: &[usize], blocks: Blocks) -> Vec<usize> {
    let (leading, columns) = (&x[..x.len() - 1], x[x.len() - 1]);
    if blocks.rows == 1 {
        let count = blocks.columns.map(|_| blocks.count(1, columns)[1]);
        return leading.iter().copied().chain(count).collect();
    }
    let (leading, rows) = (&leading[..leading.len() - 1], leading[leading.len() - 1]);
    leading.iter().copied().chain(blocks.count(rows, columns)).collect()
}

/// The shape of the transposed copy of `x`.
pub(crate) fn transposed(x: &[usize]) -> Vec<usize> {
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
