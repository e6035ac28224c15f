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
fn what_is_wrong_is_named() {
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
