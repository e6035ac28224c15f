//! The kernels of attention, as tools run them.

use xentile::flash_attention::AttentionShape;
use xentile::flash_attention::operation::{KEYS_SEEN, OPERATION, mask, options, shape};
use xentile::operation::{ArrayElement, Arrays, Operation, Pass, Problem};
use xentile::{Element, Result, by_dtype};

use super::{Cotangents, Gradients, Kernel, Launch, Operands, Saved, Visible};
use crate::operation::{Kernels, Run};

/// The kernels of attention.
pub(crate) const KERNELS: OfSequence = OfSequence;

/// The kernels of this module.
pub(crate) const ALL: &[&dyn Kernels] = &[&KERNELS];

/// The kernels of attention of one sequence.
pub(crate) struct OfSequence;

impl Kernels for OfSequence {
    fn name(&self) -> &'static str {
        OPERATION.name()
    }

    fn open<'a>(
        &self,
        problem: &'a Problem,
        inputs: &'a Arrays<'a>,
        launch: Launch<'a>,
    ) -> Result<Box<dyn Run + 'a>> {
        let (shape, mask) = (shape(problem)?, mask(problem));
        let AttentionShape { queries, keys, .. } = shape;
        let given = KEYS_SEEN.map(|name| inputs.slice::<i64>(name));
        let of_head = (0..queries).flat_map(|query| match given {
            [Some(first), Some(end)] => [first[query] as i32, end[query] as i32],
            _ => {
                let seen = mask.keys(query, queries, keys);
                [seen.start as i32, seen.end as i32]
            }
        });
        let ranges = of_head.collect::<Vec<_>>().repeat(shape.heads);
        let ids = inputs.slice::<i64>("segment_ids");
        let segments =
            ids.map(|ids| ids.iter().map(|id| *id as i32).collect::<Vec<_>>().repeat(shape.heads));
        Ok(by_dtype!(problem.dtype, E => Box::new(Sequence::<E> {
            problem,
            inputs,
            shape,
            launch,
            ranges,
            segments,
            o: Vec::new(),
            lse: Vec::new(),
        })))
    }
}

struct Sequence<'a, E> {
    problem: &'a Problem,
    inputs: &'a Arrays<'a>,
    shape: AttentionShape,
    launch: Launch<'a>,
    ranges: Vec<i32>,
    segments: Option<Vec<i32>>,
    /// What the last forward pass gave.
    o: Vec<E>,
    lse: Vec<f32>,
}

impl<E: Element + ArrayElement> Run for Sequence<'_, E> {
    fn run(&mut self, pass: Pass, given: &Arrays<'_>, results: &mut Arrays<'_>) -> Result<()> {
        let Self { problem, inputs, shape, launch, ranges, segments, o: kept, lse: kept_lse } =
            self;
        // Queries and keys are of the same tokens.
        let segments = segments.as_deref().map(|ids| [ids, ids]);
        let visible = Visible { ranges, segments };
        let sinks = inputs.slice::<f32>("sinks");
        let kernel = Kernel::new(options(problem), *shape, visible, sinks, *launch)?;
        let [q, k, v] = ["q", "k", "v"].map(|name| inputs.expect::<E>(name));
        let operands = Operands { q, k, v };
        if pass != Pass::Backward {
            kept_lse.resize(shape.heads * shape.rows(), 0.0);
            let [o] = results.slices_mut::<E, 1>(["o"]);
            let o = o.expect("an o to fill");
            kernel.forward(operands, o, kept_lse)?;
            if !pass.has_gradients() {
                // For a backward pass by itself.
                kept.clear();
                kept.extend_from_slice(o);
            }
        }
        if pass.has_gradients() {
            let mut dsinks = sinks.map(|sinks| vec![0.0; sinks.len()]);
            let [o, dq, dk, dv] = results.slices_mut::<E, 4>(["o", "dq", "dk", "dv"]);
            let o = o.map_or(&**kept, |o| &*o);
            let gradients = Gradients {
                q: dq.expect("a gradient to fill"),
                k: dk.expect("a gradient to fill"),
                v: dv.expect("a gradient to fill"),
                sinks: dsinks.as_deref_mut(),
            };
            let cotangents = Cotangents { o: given.expect("do"), lse: given.expect("dlse") };
            kernel.backward(operands, Saved { o, lse: kept_lse }, cotangents, gradients)?;
            if let (Some(dsinks), [Some(to)]) = (dsinks, results.slices_mut(["dsinks"])) {
                to.copy_from_slice(&dsinks);
            }
        }
        if let [Some(lse)] = results.slices_mut(["lse"]) {
            lse.copy_from_slice(kept_lse);
        }
        Ok(())
    }
}
