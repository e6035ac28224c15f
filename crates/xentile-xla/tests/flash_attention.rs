//! Handlers of attention through real call frames, without XLA: what they compute, and what they refuse.

#![allow(clippy::vec_box)] // frames keep the addresses of the items

use half::bf16;
use xentile::flash_attention::{AttentionShape, FlashAttention};
use xentile_cpu::flash_attention::{
    Cotangents, Gradients, Kernel, Launch, Operands, Saved, Visible,
};
use xentile_cpu::{Isa, Threads};
use xla_ffi::testing::{Array, Call};
use xla_ffi::{DType, Pred, abi};

const FORWARD: &str = "xentile_flash_attention_forward";
const BACKWARD: &str = "xentile_flash_attention_backward";

const SHAPE: AttentionShape =
    AttentionShape { heads: 2, group: 3, queries: 4, keys: 5, width: 8, value_width: 16 };
const OPTIONS: FlashAttention = FlashAttention { scale: 0.5, softcap: Some(20.0) };
const ROWS: usize = 2 * 3 * 4;

fn handler(target: &str) -> abi::Handler {
    let mut entries = xentile_xla::targets().iter();
    let found = entries.find(|entry| entry.target() == target && entry.platform() == "Host");
    found.unwrap_or_else(|| panic!("no {target} in the table")).handler()
}

fn values(count: usize) -> Vec<bf16> {
    (0..count).map(|i| bf16::from_f32((i * 37 % 29) as f32 * 0.125 - 1.75)).collect()
}

/// Arrays of a problem, its segments and sinks too.
struct Problem {
    q: Vec<bf16>,
    k: Vec<bf16>,
    v: Vec<bf16>,
    ranges: Vec<i32>,
    segments: [Vec<i32>; 2],
    sinks: Vec<f32>,
    dout: Vec<bf16>,
    dlse: Vec<f32>,
    o: Vec<bf16>,
    lse: Vec<f32>,
}

impl Problem {
    fn new() -> Self {
        Self {
            q: values(ROWS * 8),
            k: values(2 * 5 * 8),
            v: values(2 * 5 * 16),
            ranges: (0..8).flat_map(|row| [row % 2, 2 + row % 4]).collect(),
            segments: [vec![1, 1, 2, 2, 1, 1, 1, 1], vec![1, 1, 2, 2, 2, 1, 1, 1, 1, 1]],
            sinks: (0..6).map(|i| i as f32 * 0.25 - 1.0).collect(),
            dout: values(ROWS * 16),
            dlse: (0..ROWS).map(|i| i as f32 * 0.125 - 1.0).collect(),
            o: values(ROWS * 16),
            lse: vec![1.5; ROWS],
        }
    }

    fn call(&self, target: &str, has_more: bool) -> Box<Call> {
        let mut arguments = vec![
            Array::of(&[2, 3, 4, 8], &self.q),
            Array::of(&[2, 5, 8], &self.k),
            Array::of(&[2, 5, 16], &self.v),
            Array::of(&[2, 4, 2], &self.ranges),
        ];
        if has_more {
            arguments.push(Array::of(&[2, 4], &self.segments[0]));
            arguments.push(Array::of(&[2, 5], &self.segments[1]));
            arguments.push(Array::of(&[2, 3], &self.sinks));
        }
        let mut results =
            vec![Array::new(DType::Bf16, &[2, 3, 4, 16]), Array::new(DType::F32, &[2, 3, 4])];
        if target == BACKWARD {
            arguments.push(Array::of(&[2, 3, 4, 16], &self.o));
            arguments.push(Array::of(&[2, 3, 4], &self.lse));
            arguments.push(Array::of(&[2, 3, 4, 16], &self.dout));
            arguments.push(Array::of(&[2, 3, 4], &self.dlse));
            results = vec![
                Array::new(DType::Bf16, &[2, 3, 4, 8]),
                Array::new(DType::Bf16, &[2, 5, 8]),
                Array::new(DType::Bf16, &[2, 5, 16]),
            ];
            if has_more {
                results.push(Array::new(DType::F32, &[2, 3]));
            }
        }
        let call = Call::new(arguments, results).scalar("scale", OPTIONS.scale);
        let call =
            call.scalar("segments", Pred::from(has_more)).scalar("sinks", Pred::from(has_more));
        Box::new(call.scalar("softcap", OPTIONS.softcap.unwrap()))
    }
}

#[test]
fn values_are_those_of_the_kernels() {
    let pool = Threads::new(2).unwrap();
    let problem = Problem::new();
    let Problem { q, k, v, ranges, segments, sinks, dout, dlse, o, lse } = &problem;
    for has_more in [false, true] {
        let segments = has_more.then_some([&*segments[0], &*segments[1]]);
        let visible = Visible { ranges, segments };
        let sinks = has_more.then_some(&**sinks);
        let launch = Launch { isa: Isa::detect(), pool: &pool };
        let kernel = Kernel::new(OPTIONS, SHAPE, visible, sinks, launch).unwrap();
        let operands = Operands { q, k, v };
        let (mut of_o, mut of_lse) = (values(ROWS * 16), vec![0.0; ROWS]);
        kernel.forward(operands, &mut of_o, &mut of_lse).unwrap();
        let mut call = problem.call(FORWARD, has_more);
        call.call(handler(FORWARD)).unwrap();
        assert_eq!(call.results[0].values::<bf16>(), of_o);
        assert_eq!(call.results[1].values::<f32>(), of_lse);
        let [mut dq, mut dk, mut dv] = [q, k, v].map(Clone::clone);
        let mut dsinks = vec![0.0; 6];
        let gradients = Gradients {
            q: &mut dq,
            k: &mut dk,
            v: &mut dv,
            sinks: has_more.then_some(&mut dsinks),
        };
        let cotangents = Cotangents { o: dout, lse: dlse };
        kernel.backward(operands, Saved { o, lse }, cotangents, gradients).unwrap();
        let mut call = problem.call(BACKWARD, has_more);
        call.call(handler(BACKWARD)).unwrap();
        for (index, wanted) in [dq, dk, dv].into_iter().enumerate() {
            assert_eq!(call.results[index].values::<bf16>(), wanted);
        }
        if has_more {
            assert_eq!(call.results[3].values::<f32>(), dsinks);
        }
    }
}

fn refused(target: &str, change: impl FnOnce(&mut Call), reason: &str) {
    let mut call = Problem::new().call(target, true);
    change(&mut call);
    call.link();
    let message = call.refused(handler(target));
    assert!(message.contains(reason), "{target}: {message:?} does not say {reason:?}");
}

#[test]
fn wrong_arrays_are_named() {
    let swap = |index: usize, dtype: DType, dims: &'static [i64]| {
        move |call: &mut Call| call.arguments[index] = Array::new(dtype, dims)
    };
    for target in [FORWARD, BACKWARD] {
        let change = |index, dims, reason: &str| {
            refused(target, swap(index, DType::Bf16, dims), reason);
        };
        change(0, &[4, 8], "`q` has shape [4, 8], `k` [2, 5, 8] and `v` [2, 5, 16]; they must be");
        change(1, &[2, 5, 16], "`k` has shape [2, 5, 16]; it must be [2], K and 8");
        change(2, &[2, 4, 16], "`v` has shape [2, 4, 16]; it must be [2], 5 and E");
        change(2, &[2, 5, 264], "v has heads of 264 columns; it must be from 1 to 256");
        refused(target, swap(0, DType::F64, &[2, 3, 4, 8]), "`q` has dtype f64; it must be f32");
        let of = |index, dims, reason: &str| refused(target, swap(index, DType::S32, dims), reason);
        of(3, &[2, 4], "`ranges` has shape [2, 4]; it must be [2, 4, 2]");
        of(4, &[2, 5], "`q_segments` has shape [2, 5]; it must be [2, 4]");
        of(5, &[2, 4], "`kv_segments` has shape [2, 4]; it must be [2, 5]");
        let wrong = swap(6, DType::F32, &[6]);
        refused(target, wrong, "`sinks` has shape [6]; it must be [2, 3]");
    }
    let few = |call: &mut Call| call.results[1] = Array::new(DType::F32, &[2, 3]);
    refused(FORWARD, few, "`lse` has shape [2, 3]; it must be [2, 3, 4]");
    let few = |call: &mut Call| call.results[3] = Array::new(DType::F32, &[6]);
    refused(BACKWARD, few, "`dsinks` has shape [6]; it must be [2, 3]");
    let few = |call: &mut Call| _ = call.results.pop();
    refused(BACKWARD, few, "the call must have the result `dsinks` where it has `sinks`");
}

#[test]
fn attributes_outside_their_range_are_named() {
    let message = |scale: f64, tokens_first: bool| {
        let problem = Problem::new();
        let arguments = vec![
            Array::of(&[2, 3, 4, 8], &problem.q),
            Array::of(&[2, 5, 8], &problem.k),
            Array::of(&[2, 5, 16], &problem.v),
            Array::of(&[2, 4, 2], &problem.ranges),
        ];
        let results =
            vec![Array::new(DType::Bf16, &[2, 3, 4, 16]), Array::new(DType::F32, &[2, 3, 4])];
        let call = Call::new(arguments, results).scalar("scale", scale);
        let call = call.scalar("segments", Pred::from(false)).scalar("sinks", Pred::from(false));
        call.scalar("tokens_first", Pred::from(tokens_first)).refused(handler(FORWARD))
    };
    let found = message(f64::NAN, false);
    assert!(found.contains("attribute scale is NaN; it must be finite, in f32"), "{found}");
    let found = message(0.5, true);
    assert!(found.contains("attribute `tokens_first` is true; on CPUs heads must be"), "{found}");
}
