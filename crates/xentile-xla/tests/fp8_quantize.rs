//! Handlers of FP8 quantisation through real call frames, without XLA: what they compute, and what they
//! refuse.

#![allow(clippy::vec_box)] // frames keep the addresses of the items

use half::bf16;
use xentile::fp8_quantize::{Blocks, Format, Fp8Quantize, QuantizeShape};
use xentile_cpu::fp8_quantize::{Kernel, Launch, Quantized};
use xentile_cpu::{Isa, Threads};
use xentile_xla::Target;
use xla_ffi::testing::{Array, Call};
use xla_ffi::{DType, F8E4M3FN, F8E5M2, Pred, abi};

const ROWS: i64 = 6;
const COLUMNS: i64 = 10;
const SQUARE: Blocks = Blocks { rows: 4, columns: Some(4) };
const PARTS: Blocks = Blocks { rows: 1, columns: Some(4) };

/// Those of all platforms and stages.
fn handlers(pass: &str) -> impl Iterator<Item = &'static Target> {
    let target = format!("xentile_fp8_quantize{pass}");
    xentile_xla::targets().iter().filter(move |entry| entry.target() == target)
}

fn handler(pass: &str) -> abi::Handler {
    let found = handlers(pass).find(|entry| entry.platform() == "Host");
    found.unwrap_or_else(|| panic!("no target of {pass:?} in the table")).handler()
}

fn x() -> Vec<bf16> {
    (0..2 * ROWS * COLUMNS).map(|i| bf16::from_f32((i * 37 % 101) as f32 - 50.0)).collect()
}

fn attributes(call: Call, blocks: Blocks) -> Call {
    let call =
        call.scalar("block_rows", blocks.rows as i64).scalar("power_of_two", Pred::from(false));
    match blocks.columns {
        Some(columns) => call.scalar("block_columns", columns as i64),
        None => call,
    }
}

/// The shape of scales of [2, rows, columns].
fn scales(blocks: Blocks, rows: i64, columns: i64) -> Box<Array> {
    let [down, across] = blocks.count(rows as usize, columns as usize).map(|count| count as i64);
    let dims = [2, down, across];
    Array::new(DType::F32, if blocks.columns.is_none() { &dims[..2] } else { &dims })
}

/// x [2, 6, 10] in bf16.
fn call(pass: &str, blocks: Blocks, format: DType) -> Call {
    let (straight, transposed) = ([2, ROWS, COLUMNS], [2, COLUMNS, ROWS]);
    let values = |dims: &[i64]| Array::new(format, dims);
    let amax = || Array::new(DType::F32, &[2, ROWS]);
    let mut arguments = vec![Array::of(&straight, &x())];
    if pass.starts_with("_scaled") {
        arguments.push(Array::of(&[2], &[0.5_f32, 2.0]));
    }
    let results = match pass {
        "" => vec![values(&straight), scales(blocks, ROWS, COLUMNS)],
        "_transposed" => vec![
            values(&straight),
            scales(blocks, ROWS, COLUMNS),
            values(&transposed),
            scales(blocks, COLUMNS, ROWS),
        ],
        "_scaled" => vec![values(&straight), amax()],
        "_scaled_transposed" => vec![values(&straight), amax(), values(&transposed)],
        _ => vec![amax()],
    };
    let call = Call::new(arguments, results);
    if matches!(pass, "" | "_transposed") { attributes(call, blocks) } else { call }
}

fn bits(format: Format, array: &mut Array) -> Vec<u8> {
    match format {
        Format::E4M3Fn => F8E4M3FN::bits(&array.values()).to_vec(),
        Format::E5M2 => F8E5M2::bits(&array.values()).to_vec(),
    }
}

#[test]
fn values_are_those_of_the_kernels() {
    let pool = Threads::new(2).unwrap();
    let shape = QuantizeShape::new(2, ROWS as usize, COLUMNS as usize).unwrap();
    let n = shape.elements();
    for (format, dtype) in [(Format::E4M3Fn, DType::F8E4M3FN), (Format::E5M2, DType::F8E5M2)] {
        let options = Fp8Quantize { format, power_of_two: false };
        let kernel = Kernel::new(options, shape, Launch { isa: Isa::detect(), pool: &pool });
        for blocks in [Blocks::ROW, PARTS, SQUARE] {
            let (mut values, mut transposed) = (vec![1; n], vec![1; n]);
            let mut of_values = vec![0.0; shape.scales(blocks)];
            let mut of_transposed = vec![0.0; shape.transposed().scales(blocks)];
            let straight = Quantized { values: &mut values, scales: &mut of_values };
            let copy = Quantized { values: &mut transposed, scales: &mut of_transposed };
            kernel.quantize_transposed(blocks, &x(), straight, copy).unwrap();
            for pass in ["", "_transposed"] {
                let mut call = call(pass, blocks, dtype);
                call.call(handler(pass)).unwrap();
                assert_eq!(bits(format, &mut call.results[0]), values, "{pass} {blocks:?}");
                assert_eq!(call.results[1].values::<f32>(), of_values);
                if pass == "_transposed" {
                    assert_eq!(bits(format, &mut call.results[2]), transposed, "{blocks:?}");
                    assert_eq!(call.results[3].values::<f32>(), of_transposed);
                }
            }
        }
        let (mut values, mut transposed, mut amax) = (vec![1; n], vec![1; n], vec![0.0; 12]);
        kernel
            .scaled_transposed(&x(), &[0.5, 2.0], &mut values, &mut amax, &mut transposed)
            .unwrap();
        for pass in ["_scaled", "_scaled_transposed", "_amax"] {
            let mut call = call(pass, PARTS, dtype);
            call.call(handler(pass)).unwrap();
            let at = usize::from(pass != "_amax");
            assert_eq!(call.results[at].values::<f32>(), amax);
            if pass != "_amax" {
                assert_eq!(bits(format, &mut call.results[0]), values);
            }
            if pass == "_scaled_transposed" {
                assert_eq!(bits(format, &mut call.results[2]), transposed);
            }
        }
    }
}

/// Rows of no columns have scales, and so have none of them.
#[test]
fn empty_arrays_are_taken() {
    let of = |x: &[i64], scales: &[i64], blocks: Blocks| {
        let results = vec![Array::new(DType::F8E5M2, x), Array::new(DType::F32, scales)];
        let mut call = attributes(Call::new(vec![Array::new(DType::F32, x)], results), blocks);
        call.call(handler("")).unwrap();
        call.results[1].values::<f32>()
    };
    assert_eq!(of(&[2, 0], &[2], Blocks::ROW), [1.0, 1.0]);
    assert!(of(&[0, 3], &[0], Blocks::ROW).is_empty());
    assert!(of(&[2, 0], &[2, 0], PARTS).is_empty());
    assert!(of(&[0, 5], &[0, 2], SQUARE).is_empty());
}

/// By every handler.
fn refused(pass: &str, blocks: Blocks, change: impl Fn(&mut Call), reason: &str) {
    for entry in handlers(pass) {
        let mut call = call(pass, blocks, DType::F8E4M3FN);
        change(&mut call);
        call.link();
        call.frame.stage = entry.stage();
        let message = call.refused(entry.handler());
        let platform = entry.platform();
        assert!(message.contains(reason), "{platform} {pass}: {message:?} does not say {reason:?}");
    }
}

#[cfg(feature = "cuda")]
#[test]
fn without_a_gpu_handlers_for_one_say_what_is_missing() {
    let Err(missing) = xentile_cuda::available() else {
        println!("there is a GPU here");
        return;
    };
    for pass in ["", "_transposed", "_scaled", "_scaled_transposed", "_amax"] {
        let mut count = 0;
        for entry in handlers(pass).filter(|entry| entry.platform() == "CUDA") {
            let mut call = call(pass, PARTS, DType::F8E5M2);
            call.frame.stage = entry.stage();
            let (code, message) = call.call(entry.handler()).unwrap_err();
            assert_eq!(code, xla_ffi::ErrorCode::FailedPrecondition, "{message}");
            assert!(message.contains(&missing.to_string()), "{message}");
            count += 1;
        }
        assert_eq!(count, 2, "{pass}");
    }
}

#[test]
fn wrong_arrays_are_named() {
    let result = |index: usize, dtype: DType, dims: &'static [i64]| {
        move |call: &mut Call| call.results[index] = Array::new(dtype, dims)
    };
    let argument = |index: usize, dtype: DType, dims: &'static [i64]| {
        move |call: &mut Call| call.arguments[index] = Array::new(dtype, dims)
    };
    let reason = "`scales` has shape [2, 6, 2]; it must be [2, 6, 3], as `x` has shape [2, 6, 10]";
    refused("", PARTS, result(1, DType::F32, &[2, 6, 2]), reason);
    refused("", SQUARE, result(1, DType::F32, &[2, 6, 3]), "it must be [2, 2, 3], as `x`");
    refused("", PARTS, result(0, DType::F8E4M3FN, &[2, 6, 9]), "`values` has shape [2, 6, 9]");
    let reason = "`values` has dtype u8; it must be one of f8e4m3fn, f8e5m2";
    refused("", PARTS, result(0, DType::U8, &[2, 6, 10]), reason);
    let reason = "`x` has dtype f64; it must be f32, bf16 or f16";
    refused("", PARTS, argument(0, DType::F64, &[2, 6, 10]), reason);
    refused("_transposed", PARTS, result(2, DType::F8E4M3FN, &[2, 6, 10]), "`values_t` has shape");
    refused("_transposed", PARTS, result(3, DType::F32, &[2, 10, 3]), "`scales_t` has shape");
    let reason = "`values_t` has dtype f8e5m2; it must be f8e4m3fn";
    refused("_transposed", PARTS, result(2, DType::F8E5M2, &[2, 10, 6]), reason);
    let reason = "blocks are 2 x 5; of a transposed copy they must be parts of rows, or squares";
    let oblong = Blocks { rows: 2, columns: Some(5) };
    refused("_transposed", oblong, |_| (), reason);
    let zero = Blocks { rows: 1, columns: Some(0) };
    let results = vec![Array::new(DType::F8E5M2, &[2, 3]), Array::new(DType::F32, &[2, 1])];
    let mut wrong = attributes(Call::new(vec![Array::new(DType::F32, &[2, 3])], results), zero);
    let message = wrong.refused(handler(""));
    assert!(message.contains("block_columns is 0; it must be at least 1"), "{message}");
    for pass in ["_scaled", "_scaled_transposed"] {
        let reason = "`scale` has shape [3]; it must be that of none or some of the first axes";
        refused(pass, PARTS, argument(1, DType::F32, &[3]), reason);
        refused(
            pass,
            PARTS,
            result(1, DType::F32, &[2]),
            "`amax` has shape [2]; it must be [2, 6]",
        );
    }
    refused("_scaled_transposed", PARTS, argument(1, DType::F32, &[2, 6]), "`scale` has shape");
    refused("_amax", PARTS, argument(0, DType::F32, &[]), "`x` has shape []; it must have an axis");
}

/// A right call of SwiGLU [3, 256] of two arrays, or of RMSNorm of sums [3, 640], with transposed copies.
#[cfg(feature = "cuda")]
fn fused(name: &str) -> Call {
    let bf16 = |dims: &[i64]| Array::new(DType::Bf16, dims);
    let f32 = |dims: &[i64]| Array::new(DType::F32, dims);
    let columns = if name == "swiglu" { 256 } else { 640 };
    let (x, blocks): (&[i64], _) = (&[3, columns], columns / 128);
    let f8 = |dims: &[i64]| Array::new(DType::F8E4M3FN, dims);
    let mut results = vec![f8(x), f32(&[3, blocks]), f8(&[columns, 3]), f32(&[columns, 1])];
    let call = if name == "swiglu" {
        let packing: &'static str = "apart";
        let packing = abi::ByteSpan { ptr: packing.as_ptr().cast(), len: packing.len() };
        Call::new(vec![bf16(x), bf16(x)], results)
            .attribute("packing", abi::ATTR_TYPE_STRING, packing)
            .scalar("alpha", 1.0)
            .scalar("up_offset", 0.0)
    } else {
        results.extend([bf16(x), f32(&[3])]);
        Call::new(vec![bf16(x), bf16(x), f32(&[columns])], results)
            .scalar("eps", 1e-6)
            .scalar("zero_centred", Pred::from(false))
    };
    call.scalar("power_of_two", Pred::from(false))
}

#[cfg(feature = "cuda")]
#[test]
fn wrong_arrays_of_fused_calls_are_named() {
    let missing = xentile_cuda::available().err().map(|missing| missing.to_string());
    let refused = |name: &str, change: &dyn Fn(&mut Call), reason: &str| {
        let mut count = 0;
        let pass = format!("_{name}_transposed");
        for entry in handlers(&pass).filter(|entry| entry.platform() == "CUDA") {
            let mut call = fused(name);
            change(&mut call);
            call.link();
            call.frame.stage = entry.stage();
            let message = call.call(entry.handler()).unwrap_err().1;
            assert!(message.contains(reason), "{message:?} does not say {reason:?}");
            count += 1;
        }
        assert_eq!(count, 2, "{name}");
    };
    for name in ["swiglu", "rms_norm_add"] {
        if let Some(missing) = &missing {
            refused(name, &|_| (), missing);
        }
        let scales = |call: &mut Call| call.results[1] = Array::new(DType::F32, &[3, 1]);
        refused(name, &scales, "`scales` has shape [3, 1]");
        let transposed = |call: &mut Call| call.results[3] = Array::new(DType::F32, &[1, 3]);
        refused(name, &transposed, "`scales_t` has shape [1, 3]");
        let format =
            |call: &mut Call| call.results[0] = Array::new(DType::U8, &call.results[0].dims);
        refused(name, &format, "`values` has dtype u8");
    }
    let up = |call: &mut Call| call.arguments[1] = Array::new(DType::Bf16, &[3, 128]);
    refused("swiglu", &up, "`up` has shape [3, 128]; it must be [3, 256]");
    let dtype = |call: &mut Call| {
        for argument in &mut call.arguments {
            *argument = Array::new(DType::F16, &[3, 256]);
        }
    };
    refused("swiglu", &dtype, "rows have 256 columns in f16; kernels take whole blocks of 128");
    let weight = |call: &mut Call| call.arguments[2] = Array::new(DType::F32, &[3, 640]);
    refused("rms_norm_add", &weight, "`weight` has shape [3, 640]; it must be [640]");
    let rstd = |call: &mut Call| call.results[5] = Array::new(DType::F32, &[3, 1]);
    refused("rms_norm_add", &rstd, "`rstd` has shape [3, 1]");
}
