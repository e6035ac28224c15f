//! Steps of optimizers over many arrays: the shapes of their targets.
//!
//! Declarations have the arrays of one parameter. A call has these for each of its parameters, one
//! after the other, between `leaves`, which has a word for each, and the end of the operands, and so
//! its results.

pub(crate) mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;

use xentile::optimizers::BLOCKS;
use xla_ffi::{DType, Error, Result};

use crate::declaration::{
    Alias, ArrayDecl, Declaration, Dims, Dtype, F32, Range, S32, Stages, attribute, input, output,
    scratch,
};

const F32_OR_BF16: Dtype = Dtype::OneOf(&[DType::F32, DType::Bf16]);
const CODES: Dtype = Dtype::OneOf(&[DType::U8]);
const LIKE_PARAMS: Dtype = Dtype::Like("params");
const ARRAY: &str = "*batch D";
const SCALES: &str = "*batch B";

pub(crate) const DECLARATIONS: &[Declaration] = &[ADAMW, ADAMW_8BIT, LION_8BIT, NEWTON_SCHULZ];

const SCALARS: ArrayDecl = input("scalars", "16", S32);
const LEAVES: ArrayDecl = input("leaves", "1", S32);
const GRADS: ArrayDecl = input("grads", ARRAY, F32_OR_BF16);
const PARAMS: ArrayDecl = input("params", ARRAY, F32_OR_BF16);

const fn in_place(operand: &'static str, result: &'static str) -> Alias {
    Alias { operand, result, always: true }
}

pub(crate) const ADAMW: Declaration = Declaration {
    name: c"xentile_adamw",
    summary: "A step of AdamW, in place. Words of `leaves`, arrays after it and results are repeated for each \
              parameter.",
    cuda: Stages::None,
    operands: &[SCALARS, LEAVES, GRADS, PARAMS, input("mu", ARRAY, F32), input("nu", ARRAY, F32)],
    results: &[
        output("new_params", ARRAY, LIKE_PARAMS),
        output("new_mu", ARRAY, F32),
        output("new_nu", ARRAY, F32),
    ],
    maps_shared: false,
    aliases: &[
        in_place("params", "new_params"),
        in_place("mu", "new_mu"),
        in_place("nu", "new_nu"),
    ],
    ..Declaration::BASE
};

pub(crate) const ADAMW_8BIT: Declaration = Declaration {
    name: c"xentile_adamw_8bit",
    summary: "The same with moments in 8 bits and a scale for each block of 256, 128 or 64.",
    operands: &[
        SCALARS,
        LEAVES,
        GRADS,
        PARAMS,
        input("mu", ARRAY, CODES),
        input("mu_scales", SCALES, F32),
        input("nu", ARRAY, CODES),
        input("nu_scales", SCALES, F32),
    ],
    results: &[
        output("new_params", ARRAY, LIKE_PARAMS),
        output("new_mu", ARRAY, CODES),
        output("new_mu_scales", SCALES, F32),
        output("new_nu", ARRAY, CODES),
        output("new_nu_scales", SCALES, F32),
    ],
    multiples: &[("D", "B")],
    maps_shared: false,
    aliases: &[
        in_place("params", "new_params"),
        in_place("mu", "new_mu"),
        in_place("mu_scales", "new_mu_scales"),
        in_place("nu", "new_nu"),
        in_place("nu_scales", "new_nu_scales"),
    ],
    ..Declaration::BASE
};

pub(crate) const LION_8BIT: Declaration = Declaration {
    name: c"xentile_lion_8bit",
    summary: "A step of Lion, whose arrays are those of AdamW in 8 bits but for `nu`.",
    cuda: Stages::None,
    operands: &[
        SCALARS,
        LEAVES,
        GRADS,
        PARAMS,
        input("mu", ARRAY, CODES),
        input("mu_scales", SCALES, F32),
    ],
    results: &[
        output("new_params", ARRAY, LIKE_PARAMS),
        output("new_mu", ARRAY, CODES),
        output("new_mu_scales", SCALES, F32),
    ],
    multiples: &[("D", "B")],
    maps_shared: false,
    aliases: &[
        in_place("params", "new_params"),
        in_place("mu", "new_mu"),
        in_place("mu_scales", "new_mu_scales"),
    ],
    ..Declaration::BASE
};

pub(crate) const NEWTON_SCHULZ: Declaration = Declaration {
    name: c"xentile_newton_schulz",
    summary: "c0 I + c1 A + c2 A A, rounded, of which a step of Muon takes the product with X: A, which is in `gram`, is \
              X X', or with axis 1 X' X. R and C are multiples of 8.",
    host: Stages::None,
    operands: &[input("x", "*batch R C", Dtype::OneOf(&[DType::Bf16]))],
    results: &[
        output("matrix", "", Dtype::Like("x"))
            .by(Dims::By("axis", &[("0", "*batch R R"), ("1", "*batch C C")])),
        scratch("gram", "", Dtype::Like("x"))
            .by(Dims::By("axis", &[("0", "*batch R R"), ("1", "*batch C C")])),
        scratch("sums", "B", Dtype::Bytes),
    ],
    attributes: &[&[
        attribute("axis", Range::OneOf(&[0, 1])),
        attribute("c0", Range::Finite),
        attribute("c1", Range::Finite),
        attribute("c2", Range::Finite),
    ]],
    maps_shared: false,
    ..Declaration::BASE
};

/// The names of a parameter's operands, the gradient first.
pub(crate) fn operands(of: &Declaration) -> impl Iterator<Item = &'static str> + use<> {
    of.operands.iter().map(|operand| operand.name).skip(2)
}

/// The extent of blocks of an array `[.., D]` with scales `[.., D / block]`.
pub(crate) fn block_size(params: &[usize], scales: &[usize]) -> Result<usize> {
    let block = match (params.split_last(), scales.split_last()) {
        (Some((&columns, leading)), Some((&blocks, others))) if leading == others => {
            BLOCKS.into_iter().find(|block| blocks * block == columns)
        }
        _ => None,
    };
    block.ok_or_else(|| {
        Error::invalid_argument(format!(
            "`mu_scales` has shape {scales:?}; it must have a scale for each 256, 128 or 64 entries of the \
             last axis of `params`, {params:?}"
        ))
    })
}
