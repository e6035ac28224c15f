//! Steps of optimizers over many arrays: the shapes of their targets, for GPUs alone.
//!
//! Declarations have the arrays of one parameter. A call has these for each of its parameters, one
//! after the other, between `leaves` and the end of the operands, and so its results.

#[cfg(feature = "cuda")]
pub(crate) mod cuda;

use xla_ffi::DType;

use crate::declaration::{Alias, ArrayDecl, Declaration, Dtype, F32, S32, Stages, input, output};

const F32_OR_BF16: Dtype = Dtype::OneOf(&[DType::F32, DType::Bf16]);
const CODES: Dtype = Dtype::OneOf(&[DType::U8]);
const LIKE_PARAMS: Dtype = Dtype::Like("params");
const ARRAY: &str = "*batch D";
const SCALES: &str = "*batch B";

pub(crate) const DECLARATIONS: &[Declaration] = &[ADAMW_8BIT];

const SCALARS: ArrayDecl = input("scalars", "16", S32);
const LEAVES: ArrayDecl = input("leaves", "N", S32);
const GRADS: ArrayDecl = input("grads", ARRAY, F32_OR_BF16);
const PARAMS: ArrayDecl = input("params", ARRAY, F32_OR_BF16);

const fn in_place(operand: &'static str, result: &'static str) -> Alias {
    Alias { operand, result, always: true }
}

pub(crate) const ADAMW_8BIT: Declaration = Declaration {
    name: c"xentile_adamw_8bit",
    summary: "A step of AdamW with moments in 8 bits and a scale for each block of 256, 128 or 64, in \
              place. The arrays after `leaves`, and the results, are repeated for each of N parameters.",
    host: Stages::None,
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
