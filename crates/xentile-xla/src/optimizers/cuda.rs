//! Steps of optimizers on NVIDIA GPUs.

use xentile::optimizers::WORDS;
use xentile_cuda::linear_cross_entropy::Scratch;
use xentile_cuda::muon::NewtonSchulz;
use xentile_cuda::optimizers::{AdamW8bit, Parameter as Step, State};
use xla_ffi::{Buffer, Context, DType, Decoder, Error, OnDevice, Parameter, Result};

use super::block_size;
use crate::arguments::{check_shape, invalid};
use crate::cuda::{Any, AnyMut, failed};
use crate::dtype;
use crate::norm::cuda::run;
use crate::target::target_list;

type Words<'a> = OnDevice<Buffer<'a, i32>>;

target_list! {
    CUDA;

    super::ADAMW_8BIT: fn xentile_adamw_8bit_cuda,
        initialize xentile_adamw_8bit_cuda_initialize = adamw_8bit(
        scalars, leaves, arrays, context,
    );
    super::NEWTON_SCHULZ: fn xentile_newton_schulz_cuda,
        initialize xentile_newton_schulz_cuda_initialize = newton_schulz(
        x, matrix, gram, sums, axis, coefficients, context,
    );
}

/// The arrays of every parameter, all in place but its gradient.
struct Arrays<'a> {
    operands: Vec<[Any<'a>; OPERANDS.len()]>,
    results: Vec<AnyMut<'a>>,
}

/// A parameter's operands, and its results, which are in the place of all operands but the first.
const OPERANDS: [&str; 6] = ["grads", "params", "mu", "mu_scales", "nu", "nu_scales"];
const RESULTS: [&str; OPERANDS.len() - 1] =
    ["new_params", "new_mu", "new_mu_scales", "new_nu", "new_nu_scales"];

impl<'a> Parameter<'a> for Arrays<'a> {
    fn decode(decoder: &mut Decoder<'a>, _: &'static str) -> Result<Self> {
        let mut operands = Vec::new();
        // A call has one parameter at least.
        let mut next = Some(decoder.parameter::<Any>(OPERANDS[0])?);
        while let Some(grads) = next {
            let mut arrays = [grads; OPERANDS.len()];
            for (array, name) in arrays.iter_mut().zip(OPERANDS).skip(1) {
                *array = decoder.parameter(name)?;
            }
            operands.push(arrays);
            next = decoder.parameter(OPERANDS[0])?;
        }
        let mut results = Vec::new();
        for _ in &operands {
            for name in RESULTS {
                results.push(decoder.parameter(name)?);
            }
        }
        Ok(Self { operands, results })
    }
}

/// The state of a parameter, from its operands.
fn state([_, params, mu, mu_scales, nu, nu_scales]: &[Any; OPERANDS.len()]) -> Result<State> {
    let block = block_size(params.dims(), mu_scales.dims())?;
    for (name, array) in [("mu", mu), ("nu", nu)] {
        check(name, *array, DType::U8, params.dims())?;
    }
    for (name, array) in [("mu_scales", mu_scales), ("nu_scales", nu_scales)] {
        check(name, *array, DType::F32, mu_scales.dims())?;
    }
    Ok(State {
        mu: mu.as_ptr(),
        mu_scales: mu_scales.as_ptr().cast(),
        nu: nu.as_ptr(),
        nu_scales: nu_scales.as_ptr().cast(),
        block,
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

fn adamw_8bit(scalars: Words, leaves: Words, arrays: Arrays, context: Context) -> Result {
    let count = arrays.operands.len();
    for (name, words, right) in [("scalars", scalars, WORDS), ("leaves", leaves, count)] {
        if words.dims() != [right] {
            return Err(Error::invalid_argument(format!(
                "`{name}` has shape {:?}; it must be [{right}]",
                words.dims()
            )));
        }
    }
    // `decode` found one.
    let first = arrays.operands[0];
    let kernel =
        AdamW8bit { params: to_dtype("params", first[1])?, grads: to_dtype("grads", first[0])? };
    let mut parameters = Vec::with_capacity(count);
    let mut results = arrays.results.iter();
    for operands in &arrays.operands {
        let [grads, params] = [operands[0], operands[1]];
        check("params", params, first[1].dtype(), params.dims())?;
        check("grads", grads, first[0].dtype(), params.dims())?;
        let pairs = OPERANDS.iter().zip(operands).skip(1);
        for ((pair, result_name), result) in pairs.zip(RESULTS).zip(&mut results) {
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

/// c0, c1 and c2.
struct Coefficients([f32; 3]);

impl<'a> Parameter<'a> for Coefficients {
    fn decode(decoder: &mut Decoder<'a>, _: &'static str) -> Result<Self> {
        let mut one = |name| Ok(decoder.parameter::<f64>(name)? as f32);
        Ok(Self([one("c0")?, one("c1")?, one("c2")?]))
    }
}

fn newton_schulz(
    x: Any,
    matrix: AnyMut,
    gram: AnyMut,
    sums: AnyMut,
    axis: i64,
    coefficients: Coefficients,
    context: Context,
) -> Result {
    let &[ref batch @ .., rows, columns] = x.dims() else {
        let dims = x.dims();
        return Err(invalid(format_args!("`x` has shape {dims:?}; it must be [.., R, C]")));
    };
    for (name, dtype) in [("x", x.dtype()), ("matrix", matrix.dtype()), ("gram", gram.dtype())] {
        if dtype != DType::Bf16 {
            return Err(dtype::wrong(name, dtype, "bf16"));
        }
    }
    let side = match axis {
        0 => rows,
        1 => columns,
        _ => return Err(invalid(format_args!("attribute `axis` is {axis}; it must be 0 or 1"))),
    };
    let square = [batch, &[side, side]].concat();
    check_shape("matrix", matrix.dims(), &square)?;
    check_shape("gram", gram.dims(), &square)?;
    let batch = batch.iter().product();
    let step = NewtonSchulz::new(batch, rows, columns, axis == 1).map_err(failed)?;
    let bytes = sums.elements() * sums.dtype().size();
    let sums = Scratch { at: sums.as_ptr(), bytes };
    run(
        context,
        // SAFETY: XLA's stream.
        |stream| unsafe { step.load(stream) },
        // SAFETY: the same, and XLA's buffers, whose shapes were checked.
        |stream| unsafe {
            let (x, matrix, gram) = (x.as_ptr().cast_const(), matrix.as_ptr(), gram.as_ptr());
            step.run(stream, x, matrix, gram, sums, coefficients.0)
        },
    )
}
