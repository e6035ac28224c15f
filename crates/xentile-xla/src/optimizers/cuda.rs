//! Steps of optimizers on NVIDIA GPUs.

use xentile_cuda::optimizers::{AdamW, BLOCKS, Parameter as Step, SCALARS, State, SumSquares};
use xla_ffi::{Buffer, Context, DType, Decoder, Error, OnDevice, Parameter, Result};

use crate::cuda::{Any, AnyMut, FloatsMut};
use crate::dtype;
use crate::norm::cuda::run;
use crate::target::target_list;

type Words<'a> = OnDevice<Buffer<'a, i32>>;

target_list! {
    CUDA;

    super::ADAMW: fn xentile_adamw_cuda,
        initialize xentile_adamw_cuda_initialize = adamw(
        scalars, leaves, arrays, context,
    );
    super::ADAMW_8BIT: fn xentile_adamw_8bit_cuda,
        initialize xentile_adamw_8bit_cuda_initialize = adamw_8bit(
        scalars, leaves, arrays, context,
    );
    super::SUM_SQUARES: fn xentile_sum_squares_cuda,
        initialize xentile_sum_squares_cuda_initialize = sum_squares(
        x, partials, context,
    );
}

/// All arguments of a call, one at least.
struct Arguments<'a>(Vec<Any<'a>>);

impl<'a> Parameter<'a> for Arguments<'a> {
    fn decode(decoder: &mut Decoder<'a>, name: &'static str) -> Result<Self> {
        let mut found = vec![decoder.parameter(name)?];
        while let Some(one) = decoder.parameter(name)? {
            found.push(one);
        }
        Ok(Self(found))
    }
}

fn sum_squares(x: Arguments, partials: FloatsMut, context: Context) -> Result {
    let dtype = x.0[0].dtype();
    let kernel = SumSquares { dtype: to_dtype("x", x.0[0])? };
    let mut arrays = Vec::with_capacity(x.0.len());
    for one in x.0 {
        check("x", one, dtype, one.dims())?;
        arrays.push((one.as_ptr().cast_const(), one.elements()));
    }
    let sums = arrays.iter().map(|one| SumSquares::partials(one.1)).sum::<usize>();
    if partials.dims() != [sums] {
        return Err(Error::invalid_argument(format!(
            "`partials` has shape {:?}; it must be [{sums}]",
            partials.dims()
        )));
    }
    run(
        context,
        // SAFETY: XLA's stream.
        |stream| unsafe { kernel.load(stream) },
        // SAFETY: the same, and XLA's buffers, whose shapes were checked.
        |stream| unsafe { kernel.run(stream, &arrays, partials.as_ptr().cast()) },
    )
}

/// The arrays of every parameter, `OPERANDS` arguments and `OPERANDS - 1` results of each, all in place.
struct Arrays<'a, const OPERANDS: usize> {
    operands: Vec<[Any<'a>; OPERANDS]>,
    results: Vec<AnyMut<'a>>,
}

/// The names of a parameter's operands, and of its results.
const fn names(operands: usize) -> (&'static [&'static str], &'static [&'static str]) {
    if operands == 4 {
        (&["grads", "params", "mu", "nu"], &["new_params", "new_mu", "new_nu"])
    } else {
        (
            &["grads", "params", "mu", "mu_scales", "nu", "nu_scales"],
            &["new_params", "new_mu", "new_mu_scales", "new_nu", "new_nu_scales"],
        )
    }
}

impl<'a, const OPERANDS: usize> Parameter<'a> for Arrays<'a, OPERANDS> {
    fn decode(decoder: &mut Decoder<'a>, _: &'static str) -> Result<Self> {
        let (names, result_names) = names(OPERANDS);
        let mut operands = Vec::new();
        // A call has one parameter at least.
        let mut next = Some(decoder.parameter::<Any>(names[0])?);
        while let Some(grads) = next {
            let mut arrays = [grads; OPERANDS];
            for (array, name) in arrays.iter_mut().zip(names).skip(1) {
                *array = decoder.parameter(name)?;
            }
            operands.push(arrays);
            next = decoder.parameter(names[0])?;
        }
        let mut results = Vec::new();
        for _ in &operands {
            for name in result_names {
                results.push(decoder.parameter(name)?);
            }
        }
        Ok(Self { operands, results })
    }
}

fn adamw(scalars: Words, leaves: Words, arrays: Arrays<4>, context: Context) -> Result {
    let state = |[_, params, mu, nu]: &[Any; 4]| {
        for (name, array) in [("mu", mu), ("nu", nu)] {
            check(name, *array, DType::F32, params.dims())?;
        }
        Ok(State::Float32 { mu: mu.as_ptr(), nu: nu.as_ptr() })
    };
    step(scalars, leaves, &arrays, state, context)
}

fn adamw_8bit(scalars: Words, leaves: Words, arrays: Arrays<6>, context: Context) -> Result {
    let state = |[_, params, mu, mu_scales, nu, nu_scales]: &[Any; 6]| {
        let block = block_size(params.dims(), mu_scales.dims())?;
        for (name, array) in [("mu", mu), ("nu", nu)] {
            check(name, *array, DType::U8, params.dims())?;
        }
        for (name, array) in [("mu_scales", mu_scales), ("nu_scales", nu_scales)] {
            check(name, *array, DType::F32, mu_scales.dims())?;
        }
        Ok(State::Quantized {
            mu: mu.as_ptr(),
            mu_scales: mu_scales.as_ptr().cast(),
            nu: nu.as_ptr(),
            nu_scales: nu_scales.as_ptr().cast(),
            block,
        })
    };
    step(scalars, leaves, &arrays, state, context)
}

/// The extent of blocks of an array `[.., D]` with scales `[.., D / block]`.
fn block_size(params: &[usize], scales: &[usize]) -> Result<usize> {
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

/// Checks the dtype and the shape of an array.
fn check(name: &str, array: Any, dtype: DType, dims: &[usize]) -> Result {
    if array.dtype() != dtype {
        return Err(dtype::wrong(name, array.dtype(), &dtype.to_string()));
    }
    if array.dims() != dims {
        return Err(Error::invalid_argument(format!(
            "`{name}` has shape {:?}; it must be {dims:?}",
            array.dims()
        )));
    }
    Ok(())
}

/// The dtype of parameters or gradients.
fn to_dtype(name: &str, array: Any) -> Result<xentile::DType> {
    match array.dtype() {
        DType::F32 => Ok(xentile::DType::F32),
        DType::Bf16 => Ok(xentile::DType::Bf16),
        other => Err(dtype::wrong(name, other, "f32 or bf16")),
    }
}

fn step<const OPERANDS: usize>(
    scalars: Words,
    leaves: Words,
    arrays: &Arrays<OPERANDS>,
    state: impl Fn(&[Any; OPERANDS]) -> Result<State>,
    context: Context,
) -> Result {
    let count = arrays.operands.len();
    for (name, words, right) in [("scalars", scalars, SCALARS), ("leaves", leaves, count)] {
        if words.dims() != [right] {
            return Err(Error::invalid_argument(format!(
                "`{name}` has shape {:?}; it must be [{right}]",
                words.dims()
            )));
        }
    }
    // `decode` found one.
    let first = arrays.operands[0];
    let kernel = AdamW {
        params: to_dtype("params", first[1])?,
        grads: to_dtype("grads", first[0])?,
        is_quantized: OPERANDS == 6,
    };
    let mut parameters = Vec::with_capacity(count);
    let mut results = arrays.results.iter();
    for operands in &arrays.operands {
        let [grads, params] = [operands[0], operands[1]];
        check("params", params, first[1].dtype(), params.dims())?;
        check("grads", grads, first[0].dtype(), params.dims())?;
        let (names, result_names) = names(OPERANDS);
        let pairs = names.iter().zip(operands).skip(1);
        for ((pair, result_name), result) in pairs.zip(result_names).zip(&mut results) {
            check_in_place((pair.0, *pair.1), (result_name, result))?;
        }
        let (size, state) = (params.elements(), state(operands)?);
        let (grads, params) = (grads.as_ptr().cast_const(), params.as_ptr());
        parameters.push(Step { size, grads, params, state });
    }
    run(
        context,
        // SAFETY: XLA's stream.
        |stream| unsafe { kernel.load(stream) },
        // SAFETY: the same, and XLA's buffers, whose shapes were checked; results are in the place of operands,
        // and XLA keeps all others apart.
        |stream| unsafe {
            kernel.run(stream, scalars.as_ptr().cast(), leaves.as_ptr().cast(), &parameters)
        },
    )
}

/// Checks that a result, with its name, is the operand that it overwrites.
fn check_in_place((name, operand): (&str, Any), (result_name, result): (&str, &AnyMut)) -> Result {
    if result.dtype() != operand.dtype() {
        return Err(dtype::wrong(result_name, result.dtype(), &operand.dtype().to_string()));
    }
    if result.dims() != operand.dims() {
        return Err(Error::invalid_argument(format!(
            "`{result_name}` has shape {:?}; it must be {:?}, that of `{name}`",
            result.dims(),
            operand.dims()
        )));
    }
    if result.as_ptr() != operand.as_ptr() {
        return Err(Error::invalid_argument(format!(
            "`{result_name}` is apart from `{name}`; it must lie in its place"
        )));
    }
    Ok(())
}
