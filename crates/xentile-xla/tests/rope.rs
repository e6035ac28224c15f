//! The handler of rotary position embedding through real call frames, without XLA: what it computes, and
//! what it refuses.

#![allow(clippy::vec_box)] // frames keep the addresses of the items

use half::bf16;
use xentile::rope::{Layout, Rope, RopeShape};
use xentile_cpu::rope::{Kernel, Launch};
use xentile_cpu::{InOut, Isa, Threads};
use xla_ffi::testing::{Array, Call};
use xla_ffi::{DType, Pred, abi};

const INDICES: [i32; 12] = [0, 0, 2, 2, 1, 1, 3, -1, 1, 0, 2, 2];

fn handler() -> abi::Handler {
    let mut entries = xentile_xla::targets().iter();
    let found =
        entries.find(|entry| entry.target() == "xentile_rope" && entry.platform() == "Host");
    found.expect("a row of the table").handler()
}

/// x [2, 3, 2, 10], and tables [3, 4] or [2, 3, 4]; the last two columns are copied.
fn call(options: Rope, groups: bool) -> (Call, Vec<bf16>, [Vec<f32>; 2]) {
    let x: Vec<_> = (0..120).map(|i| bf16::from_f32(i as f32 * 0.25 - 9.0)).collect();
    let dims: &[i64] = if groups { &[2, 3, 4] } else { &[3, 4] };
    let count = dims.iter().product::<i64>();
    let table = |scale: f32| (0..count).map(|i| (i as f32 * scale).sin()).collect::<Vec<_>>();
    let tables = [0.5, 0.8].map(table);
    let arguments = vec![
        Array::of(&[2, 3, 2, 10], &x),
        Array::of(&[2, 3, 2], &INDICES),
        Array::of(dims, &tables[0]),
        Array::of(dims, &tables[1]),
    ];
    let interleaved = options.layout == Layout::Interleaved;
    let call = Call::new(arguments, vec![Array::new(DType::Bf16, &[2, 3, 2, 10])])
        .scalar("interleaved", Pred::from(interleaved))
        .scalar("inverse", Pred::from(options.inverse));
    (call, x, tables)
}

#[test]
fn values_are_those_of_the_kernel() {
    let pool = Threads::new(2).unwrap();
    for layout in Layout::ALL {
        for inverse in [false, true] {
            for groups in [false, true] {
                let options = Rope { layout, inverse };
                let (mut call, x, [cos, sin]) = call(options, groups);
                let shape = RopeShape::new(12, 10, 4, 3).unwrap();
                let shape = shape.with_groups(if groups { 2 } else { 1 }).unwrap();
                let launch = Launch { isa: Isa::detect(), pool: &pool };
                let mut y = x.clone();
                let kernel = Kernel::new(options, shape, launch);
                kernel.run(InOut::InPlace(&mut y), &INDICES, [&cos, &sin]).unwrap();
                call.call(handler()).unwrap();
                let bits = |all: Vec<bf16>| all.into_iter().map(bf16::to_bits).collect::<Vec<_>>();
                assert_eq!(bits(call.results[0].values::<bf16>()), bits(y), "{options:?} {groups}");
            }
        }
    }
}

#[test]
fn wrong_arrays_are_named() {
    let refused = |change: &dyn Fn(&mut Call), reason: &str| {
        let (mut call, ..) = call(Rope::default(), false);
        change(&mut call);
        call.link();
        let message = call.refused(handler());
        assert!(message.contains(reason), "{message:?} does not say {reason:?}");
    };
    let swap = |index: usize, dtype: DType, dims: &'static [i64]| {
        move |call: &mut Call| call.arguments[index] = Array::new(dtype, dims)
    };
    refused(&swap(0, DType::Bf16, &[]), "`x` has shape []; it must have an axis");
    refused(
        &swap(0, DType::Bf16, &[2, 3, 10]),
        "`y` has shape [2, 3, 2, 10]; it must be [2, 3, 10], as `x` is",
    );
    refused(&swap(0, DType::F64, &[2, 3, 2, 10]), "`x` has dtype f64; it must be f32, bf16 or f16");
    refused(
        &swap(1, DType::S32, &[2, 3]),
        "`indices` has shape [2, 3]; it must be [2, 3, 2], as `x` is",
    );
    refused(&swap(1, DType::S64, &[2, 3, 2]), "`indices`");
    refused(
        &swap(3, DType::F32, &[3, 5]),
        "`sin` has shape [3, 5]; it must be [3, 4], as `cos` is",
    );
    for dims in [&[4][..], &[3, 6], &[3, 3, 4], &[]] {
        let both = |call: &mut Call| {
            for index in [2, 3] {
                call.arguments[index] = Array::new(DType::F32, dims);
            }
        };
        refused(&both, "it must be positions by pairs, at most half the columns");
    }
    let dtype = |call: &mut Call| call.results[0] = Array::new(DType::F16, &[2, 3, 2, 10]);
    refused(&dtype, "f16");
}

/// A right call of heads that are normalised and rotated: q [2, 3, 4, 16], k [2, 3, 2, 16], tables [3, 8].
#[cfg(feature = "cuda")]
fn qk_call(pass: &str) -> Call {
    let bf16 = |dims: &[i64]| Array::new(DType::Bf16, dims);
    let f32 = |dims: &[i64]| Array::new(DType::F32, dims);
    let (q, k): (&[i64], &[i64]) = (&[2, 3, 4, 16], &[2, 3, 2, 16]);
    let mut arguments = vec![bf16(q), bf16(k), f32(&[16]), bf16(&[16])];
    let rstd = [f32(&q[..3]), f32(&k[..3])];
    let tables = [Array::new(DType::S32, &[2, 3]), f32(&[3, 8]), f32(&[3, 8])];
    let mut results = vec![bf16(q), bf16(k)];
    if pass == "backward" {
        arguments.extend(rstd);
        arguments.extend(tables);
        arguments.extend([bf16(q), bf16(k)]);
        results.extend([f32(&[5, 16]), f32(&[5, 16])]);
    } else {
        arguments.extend(tables);
        results.extend(rstd);
    }
    Call::new(arguments, results)
        .scalar("eps", 1e-6)
        .scalar("zero_centred", Pred::from(false))
        .scalar("interleaved", Pred::from(false))
}

#[cfg(feature = "cuda")]
fn qk_handlers(pass: &str) -> impl Iterator<Item = &'static xentile_xla::Target> {
    let target = format!("xentile_qk_norm_rope_{pass}");
    xentile_xla::targets().iter().filter(move |entry| entry.target() == target)
}

#[cfg(feature = "cuda")]
#[test]
fn without_a_gpu_heads_are_not_normalised() {
    let Err(missing) = xentile_cuda::available() else {
        println!("there is a GPU here");
        return;
    };
    for pass in ["forward", "backward"] {
        let mut count = 0;
        for entry in qk_handlers(pass) {
            let mut call = qk_call(pass);
            call.frame.stage = entry.stage();
            let (code, message) = call.call(entry.handler()).unwrap_err();
            assert_eq!(code, xla_ffi::ErrorCode::FailedPrecondition, "{message}");
            assert!(message.contains(&missing.to_string()), "{message}");
            count += 1;
        }
        assert_eq!(count, 2, "{pass}");
    }
}

#[cfg(feature = "cuda")]
#[test]
fn wrong_heads_are_named() {
    let refused = |pass: &str, is_result: bool, index: usize, of: (DType, &[i64]), reason: &str| {
        for entry in qk_handlers(pass) {
            let mut call = qk_call(pass);
            let arrays = if is_result { &mut call.results } else { &mut call.arguments };
            arrays[index] = Array::new(of.0, of.1);
            call.link();
            call.frame.stage = entry.stage();
            let message = call.refused(entry.handler());
            assert!(message.contains(reason), "{message:?} does not say {reason:?}");
        }
    };
    let (bf16, f32) = (DType::Bf16, DType::F32);
    let k = "`k` has shape [2, 3, 2, 8] and `q` [2, 3, 4, 16]; they may differ in heads";
    refused("forward", false, 1, (bf16, &[2, 3, 2, 8]), k);
    refused("forward", false, 1, (f32, &[2, 3, 2, 16]), "`k` has dtype f32; it must be bf16");
    refused("forward", false, 0, (bf16, &[16]), "`q` has shape [16] and `k`");
    refused("forward", false, 2, (f32, &[8]), "`q_weight` has shape [8]; it must be [16]");
    refused("forward", false, 4, (DType::S32, &[2]), "`indices` has shape [2]; it must be [2, 3]");
    refused("forward", false, 5, (f32, &[3, 4]), "`sin` has shape [3, 8]; it must be [3, 4]");
    refused("forward", true, 2, (f32, &[2, 3]), "`q_rstd` has shape [2, 3]");
    refused("forward", true, 1, (bf16, &[2, 3, 1, 16]), "`k_rotated` has shape");
    refused("backward", false, 10, (f32, &[2, 3, 2, 16]), "`k_cotangent` has dtype f32");
    refused("backward", true, 2, (f32, &[0, 16]), "`dq_weight` has shape [0, 16]");
    refused("backward", true, 3, (f32, &[4, 16]), "`dk_weight` has shape [4, 16]");
}
