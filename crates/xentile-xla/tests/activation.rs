//! Handlers of activations through real call frames, without XLA: what they compute, and what they refuse.

#![allow(clippy::vec_box)] // frames keep the addresses of the items

use half::bf16;
use xentile::activation::{Activation, ActivationShape, Kind, Layout};
use xentile_cpu::activation::{Kernel, Launch};
use xentile_cpu::{Isa, Threads};
use xla_ffi::testing::{Array, Call};
use xla_ffi::{DType, abi};

const TARGETS: [&str; 3] = [
    "xentile_activation_forward",
    "xentile_activation_backward",
    "xentile_activation_backward_with_y",
];

fn handler(target: &str) -> abi::Handler {
    let mut entries = xentile_xla::targets().iter();
    let found = entries.find(|entry| entry.target() == target && entry.platform() == "Host");
    found.unwrap_or_else(|| panic!("no {target} in the table")).handler()
}

/// An attribute that is a text.
fn text(call: Call, name: &str, value: &'static str) -> Call {
    let span = abi::ByteSpan { ptr: value.as_ptr().cast(), len: value.len() };
    call.attribute(name, abi::ATTR_TYPE_STRING, span)
}

/// x [3, 5], or [3, 2, 5] or [3, 5, 2], with values in turn.
fn call(target: &str, options: Activation) -> (Call, Vec<bf16>, Vec<bf16>) {
    let packed: &[i64] = match options.layout {
        Layout::Single => &[3, 5],
        Layout::Halves => &[3, 2, 5],
        Layout::Interleaved => &[3, 5, 2],
    };
    let values = |count: usize| -> Vec<bf16> {
        (0..count).map(|i| bf16::from_f32(i as f32 * 0.25 - 2.0)).collect()
    };
    let (x, dy) = (values(15 * options.layout.packs()), values(15));
    let (arguments, results) = if target == TARGETS[0] {
        (vec![Array::of(packed, &x)], vec![Array::new(DType::Bf16, &[3, 5])])
    } else {
        let arguments = vec![Array::of(packed, &x), Array::of(&[3, 5], &dy)];
        let mut results = vec![Array::new(DType::Bf16, packed)];
        if target == TARGETS[2] {
            results.push(Array::new(DType::Bf16, &[3, 5]));
        }
        (arguments, results)
    };
    let call = Call::new(arguments, results)
        .scalar("alpha", options.alpha)
        .scalar("up_offset", options.up_offset);
    let call = text(text(call, "kind", options.kind.name()), "layout", options.layout.name());
    let call = match options.limit {
        Some(limit) => call.scalar("limit", limit),
        None => call,
    };
    (call, x, dy)
}

fn gpt_oss(layout: Layout) -> Activation {
    let bare = Activation::new(Kind::Silu, layout);
    Activation { alpha: 1.702, limit: Some(1.5), up_offset: 1.0, ..bare }
}

#[test]
fn values_are_those_of_the_kernels() {
    let pool = Threads::new(2).unwrap();
    let shape = ActivationShape::new(3, 5).unwrap();
    for kind in Kind::ALL {
        for layout in Layout::ALL {
            let mut all = vec![Activation::new(kind, layout)];
            if kind == Kind::Silu && layout != Layout::Single {
                all.push(gpt_oss(layout));
            }
            for options in all {
                let launch = Launch { isa: Isa::detect(), pool: &pool };
                let kernel = Kernel::new(options, shape, launch).unwrap();
                let (mut forward, x, dy) = call(TARGETS[0], options);
                let (mut y, mut dx) = (dy.clone(), x.clone());
                kernel.forward(&x, &mut y).unwrap();
                kernel.backward(&x, &dy, &mut dx).unwrap();
                forward.call(handler(TARGETS[0])).unwrap();
                assert_eq!(forward.results[0].values::<bf16>(), y, "{options:?}");
                let (mut backward, ..) = call(TARGETS[1], options);
                backward.call(handler(TARGETS[1])).unwrap();
                assert_eq!(backward.results[0].values::<bf16>(), dx, "{options:?}");
                let (mut both, ..) = call(TARGETS[2], options);
                both.call(handler(TARGETS[2])).unwrap();
                assert_eq!(both.results[0].values::<bf16>(), dx, "{options:?}");
                assert_eq!(both.results[1].values::<bf16>(), y, "{options:?}");
            }
        }
    }
}

fn refused(target: &str, options: Activation, change: impl FnOnce(&mut Call), reason: &str) {
    let (mut call, ..) = call(target, options);
    change(&mut call);
    call.link();
    let message = call.refused(handler(target));
    assert!(message.contains(reason), "{target}: {message:?} does not say {reason:?}");
}

#[test]
fn wrong_arrays_are_named() {
    let halves = Activation::new(Kind::GeluErf, Layout::Halves);
    let swap = |index: usize, dtype: DType, dims: &'static [i64]| {
        move |call: &mut Call| call.arguments[index] = Array::new(dtype, dims)
    };
    for target in TARGETS {
        for dims in [&[3, 5, 2][..], &[3, 5], &[3, 10], &[2, 5], &[3, 1, 5], &[]] {
            let reason = "it must be [3, 2, 5], as `";
            refused(target, halves, swap(0, DType::Bf16, dims), reason);
        }
        let reason = "`x` has dtype f64; it must be f32, bf16 or f16";
        refused(target, halves, swap(0, DType::F64, &[3, 2, 5]), reason);
        let bare = Activation::new(Kind::Relu, Layout::Single);
        for (options, reason) in [
            (
                Activation { limit: Some(-1.0), ..halves },
                "attribute limit is -1; it must be finite",
            ),
            (Activation { alpha: 0.0, ..halves }, "attribute alpha is 0; it must be finite"),
            (Activation { limit: Some(7.0), ..bare }, "attribute limit is 7; it must be absent"),
        ] {
            refused(target, options, |_| (), reason);
        }
    }
    let scalar = |call: &mut Call| call.results[0] = Array::new(DType::Bf16, &[]);
    refused(TARGETS[0], halves, scalar, "`y` has shape []; it must have an axis at least");
    refused(TARGETS[1], halves, swap(1, DType::F16, &[3, 5]), "`dy`");
    let narrow = |call: &mut Call| call.results[1] = Array::new(DType::Bf16, &[3, 4]);
    refused(TARGETS[2], halves, narrow, "`y` has shape [3, 4]; it must be [3, 5], as `dy`");
}
