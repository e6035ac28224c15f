//! The passes over elements of each dtype, compiled in this crate.
//!
//! A generic function is compiled by every crate that calls it, and a pass, with its variants for each
//! instruction set, takes longer than all else that such a crate has. So what callers compile ends at
//! a table of functions.

use std::any::Any;

use half::{bf16, f16};
use xentile::{DType, Element};

use crate::Isa;
use crate::cross_entropy::{Gradient, Statistics};
use crate::rms_norm::{Arrange, Backward, Forward};
use crate::scale::Scale;

/// Each pass over elements `E`.
pub(crate) struct Passes<E> {
    pub(crate) statistics: fn(Isa, Statistics<'_, E>),
    pub(crate) gradient: fn(Isa, Gradient<'_, E>),
    pub(crate) scale: fn(Isa, Scale<'_, E>),
    pub(crate) rms_norm_weight: fn(Isa, Arrange<'_, E>),
    pub(crate) rms_norm_forward: fn(Isa, Forward<'_, E>),
    pub(crate) rms_norm_backward: fn(Isa, Backward<'_, E>),
}

static F32: Passes<f32> = Passes::new();
static BF16: Passes<bf16> = Passes::new();
static F16: Passes<f16> = Passes::new();

impl<E: Element> Passes<E> {
    const fn new() -> Self {
        Self {
            statistics: |isa, pass| isa.run(pass),
            gradient: |isa, pass| isa.run(pass),
            scale: |isa, pass| isa.run(pass),
            rms_norm_weight: |isa, pass| isa.run(pass),
            rms_norm_forward: |isa, pass| isa.run(pass),
            rms_norm_backward: |isa, pass| isa.run(pass),
        }
    }

    /// Those that are compiled.
    pub(crate) fn get() -> &'static Self {
        let passes: &dyn Any = match E::DTYPE {
            DType::F32 => &F32,
            DType::Bf16 => &BF16,
            DType::F16 => &F16,
        };
        passes.downcast_ref().expect("a dtype is of one type")
    }
}
