//! Steps of optimizers on the CPU.

use xentile::optimizers::{Scalars, WORDS};
use xentile_cpu::Isa;
use xentile_cpu::optimizers::{Codes, Grads, Launch, Moments, Parameter as Step, Params, step};
use xla_ffi::{
    ANY_RANK, Aliased, AnyBuffer, AnyBufferMut, Buffer, DType, Decoder, Element, MayAlias,
    Parameter, Result, ThreadPool,
};

use super::{GRADS, block_size, operands};
use crate::arguments::{check_shape, invalid};
use crate::cpu::Pool;
use crate::declaration::Declaration;
use crate::dtype;
use crate::target::target_list;

target_list! {
    HOST;

    super::ADAMW: fn xentile_adamw_host = steps::<ADAMW>(scalars, leaves, arrays, pool);
    super::ADAMW_8BIT: fn xentile_adamw_8bit_host = steps::<ADAMW_8BIT>(scalars, leaves, arrays, pool);
    super::LION_8BIT: fn xentile_lion_8bit_host = steps::<LION_8BIT>(scalars, leaves, arrays, pool);
}

type Words<'a> = Buffer<'a, i32>;
type InPlace<'a> = (&'static str, MayAlias<AnyBuffer<'a>>, AnyBufferMut<'a>);

/// A parameter's gradient, and its other arrays with the results that overwrite them.
struct Arrays<'a> {
    grads: AnyBuffer<'a>,
    in_place: Vec<InPlace<'a>>,
}

/// The arrays of every parameter of one of [`STEPS`].
struct All<'a, const TARGET: usize>(Vec<Arrays<'a>>);

const STEPS: [&Declaration; 3] = [&super::ADAMW, &super::ADAMW_8BIT, &super::LION_8BIT];
const ADAMW: usize = 0;
const ADAMW_8BIT: usize = 1;
const LION_8BIT: usize = 2;

impl<'a, const TARGET: usize> Parameter<'a> for All<'a, TARGET> {
    fn decode(decoder: &mut Decoder<'a>, _: &'static str) -> Result<Self> {
        let declaration = STEPS[TARGET];
        let mut found = Vec::new();
        // A call has one parameter at least.
        let mut next = Some(decoder.parameter::<AnyBuffer>(GRADS.name)?);
        while let Some(grads) = next {
            let names = operands(declaration).skip(1);
            let arrays = names.map(|name| Ok((name, decoder.parameter(name)?)));
            found.push((grads, arrays.collect::<Result<Vec<_>>>()?));
            next = decoder.parameter(GRADS.name)?;
        }
        let mut all = Vec::with_capacity(found.len());
        for (grads, arrays) in found {
            let mut in_place = Vec::with_capacity(arrays.len());
            for ((name, operand), result) in arrays.into_iter().zip(declaration.results) {
                in_place.push((name, operand, decoder.parameter(result.name)?));
            }
            all.push(Arrays { grads, in_place });
        }
        Ok(Self(all))
    }
}

/// The result that overwrites an operand of this shape, with the operand's elements.
fn in_its_place<'a, T: Element>(
    (name, operand, result): InPlace<'a>,
    dims: &[usize],
) -> Result<&'a mut [T]> {
    check_shape(name, operand.dims(), dims)?;
    check_shape(&format!("new_{name}"), result.dims(), dims)?;
    let operand = operand.typed::<T, ANY_RANK>()?;
    Ok(match operand.with(result.typed::<T, ANY_RANK>()?)? {
        Aliased::InPlace(both) => both,
        Aliased::Apart { argument, result } => {
            result.copy_from_slice(argument);
            result
        }
    })
}

/// The elements of a gradient.
fn grads<'a>(array: AnyBuffer<'a>, dims: &[usize]) -> Result<Grads<'a>> {
    check_shape(GRADS.name, array.dims(), dims)?;
    Ok(match array.dtype() {
        DType::F32 => Grads::F32(array.typed::<f32, ANY_RANK>()?.as_slice()),
        DType::Bf16 => Grads::Bf16(array.typed::<half::bf16, ANY_RANK>()?.as_slice()),
        other => return Err(dtype::wrong(GRADS.name, other, "f32 or bf16")),
    })
}

/// A parameter's step.
fn prepare(leaf: i32, arrays: Arrays<'_>, target: usize) -> Result<Step<'_>> {
    let mut all = arrays.in_place.into_iter();
    let mut next = || all.next().ok_or_else(|| invalid("a parameter lacks an array"));
    let params = next()?;
    let dims = params.1.dims();
    let (number, decays) = ((leaf >> 1).cast_unsigned(), leaf & 1 != 0);
    let grads = grads(arrays.grads, dims)?;
    let params = match params.1.dtype() {
        DType::F32 => Params::F32(in_its_place(params, dims)?),
        DType::Bf16 => Params::Bf16(in_its_place(params, dims)?),
        other => return Err(dtype::wrong("params", other, "f32 or bf16")),
    };
    let moments = if target == ADAMW {
        Moments::F32([in_its_place(next()?, dims)?, in_its_place(next()?, dims)?])
    } else {
        let mut block = 0;
        let mut codes = || -> Result<Codes<'_>> {
            let (codes, scales) = (in_its_place(next()?, dims)?, next()?);
            let of_scales = scales.1.dims();
            block = block_size(dims, of_scales)?;
            Ok(Codes { codes, scales: in_its_place(scales, of_scales)? })
        };
        let mu = codes()?;
        if target == LION_8BIT {
            Moments::Lion(mu, block)
        } else {
            Moments::Codes([mu, codes()?], block)
        }
    };
    Ok(Step { number, decays, grads, params, moments })
}

fn steps<const TARGET: usize>(
    scalars: Words,
    leaves: Words,
    all: All<'_, TARGET>,
    pool: ThreadPool,
) -> Result {
    check_shape("leaves", leaves.dims(), &[all.0.len()])?;
    check_shape("scalars", scalars.dims(), &[WORDS])?;
    let words = scalars.as_slice().first_chunk().ok_or_else(|| invalid("no scalars"))?;
    let each = leaves.as_slice().iter().zip(all.0);
    let steps = each.map(|(leaf, arrays)| prepare(*leaf, arrays, TARGET));
    let launch = Launch { isa: Isa::detect(), pool: &Pool(pool) };
    step(&Scalars::from_words(words), steps.collect::<Result<_>>()?, launch).map_err(invalid)
}
