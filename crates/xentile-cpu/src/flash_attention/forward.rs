//! The forward pass.

use std::ops::Range;

use xentile::Element;

use super::rows::{Factor, Probabilities, Scaling, Seen, probabilities};
use super::tiles::{Block, HeadView, KEYS, ROWS, pack};
use super::{Kernel, Operands};
use crate::convert::narrow;
use crate::parallel::Shared;
use crate::product::{Matrix, Panels, multiply};

/// The most blocks of a task: they share packed tiles.
const MOST_BLOCKS: usize = 8;

/// Tasks for each thread, where there are rows enough.
const TASKS: usize = 4;

/// Writes o and lse.
pub(super) fn run<E: Element>(
    kernel: &Kernel<'_>,
    operands: Operands<'_, E>,
    o: &mut [E],
    lse: &mut [f32],
) {
    let (shape, rows, pool) = (kernel.shape, kernel.shape.rows(), kernel.launch.pool);
    let blocks = rows.div_ceil(ROWS);
    let wanted = (shape.heads * blocks).div_ceil(TASKS * pool.threads());
    let each = wanted.clamp(1, MOST_BLOCKS) * ROWS;
    let tasks = rows.div_ceil(each);
    let views: Vec<_> = (0..shape.heads).map(|head| HeadView::new(kernel, head)).collect();
    let (o, lse) = (Shared::new(o), Shared::new(lse));
    pool.run(shape.heads * tasks, &|index| {
        // The last rows see the most under a causal mask.
        let (head, task) = (index / tasks, tasks - 1 - index % tasks);
        let part = task * each..rows.min((task + 1) * each);
        let first = head * rows + part.start;
        // SAFETY: tasks have rows of their own.
        let (o, lse) = unsafe {
            let width = shape.value_width;
            (o.slice(first * width, part.len() * width), lse.slice(first, part.len()))
        };
        Task { kernel, operands, head, view: &views[head] }.run(part, o, lse);
    });
}

struct Task<'a, E> {
    kernel: &'a Kernel<'a>,
    operands: Operands<'a, E>,
    head: usize,
    view: &'a HeadView<'a>,
}

impl<E: Element> Task<'_, E> {
    fn run(&self, rows: Range<usize>, o: &mut [E], lse: &mut [f32]) {
        let Self { kernel, operands, head, view } = *self;
        let (shape, isa) = (kernel.shape, kernel.launch.isa);
        let (width, value_width) = (shape.width, shape.value_width);
        let q = &operands.q[(head * shape.rows() + rows.start) * width..][..rows.len() * width];
        let k = &operands.k[head * shape.keys * width..][..shape.keys * width];
        let v = &operands.v[head * shape.keys * value_width..][..shape.keys * value_width];
        let q = Matrix::new(q, width);
        let blocks = view.blocks(rows.clone());
        let mut values = vec![0.0_f32; rows.len() * value_width];
        let mut largest = vec![f32::NEG_INFINITY; rows.len()];
        let mut sums = vec![0.0_f64; rows.len()];
        let mut products = vec![0.0_f32; ROWS * KEYS];
        let (mut of_keys, mut of_values) = (Vec::new(), Vec::new());
        let [mut padded_k, mut padded_v] = [const { Vec::new() }; 2];
        let scaling = Scaling::from(kernel.options);
        for tile in view.tiles(&(0..shape.keys)) {
            let seeing: Vec<&Block> = blocks.iter().filter(|block| block.sees(&tile)).collect();
            if seeing.is_empty() {
                continue;
            }
            let keys = tile.rows(view, k, width, &[], &mut padded_k);
            pack(isa, keys.transposed(), &mut of_keys);
            let unfit = tile.unfit(isa, view, seeing.iter().copied(), v, value_width);
            let fit = tile.rows(view, v, value_width, &unfit, &mut padded_v);
            let of_values = pack(isa, fit, &mut of_values);
            for block in seeing {
                let columns = block.columns(&tile);
                let own = block.rows.start - rows.start..block.rows.end - rows.start;
                let products = &mut products[..own.len() * columns];
                let right = Panels::new::<E>(isa, &of_keys, [width, columns]);
                multiply(isa, &q.rows(own.clone()), right, false, products);
                let values = &mut values[own.start * value_width..own.end * value_width];
                let seen = Seen::new(view, block, &tile);
                probabilities(
                    isa,
                    Probabilities {
                        scaling,
                        seen: &seen,
                        products,
                        largest: &mut largest[own.clone()],
                        sums: &mut sums[own],
                        values,
                    },
                );
                seen.add_unfit_keys(&unfit, products, v, value_width, values);
                let p = Factor::<E>::new(isa, products, columns);
                multiply(isa, p.left(), of_values.first_terms(columns), true, values);
            }
        }
        let sinks = kernel.sinks.map(|sinks| &sinks[head * shape.group..][..shape.group]);
        for (row, values) in values.chunks_exact_mut(value_width).enumerate() {
            let sink = sinks.map(|sinks| sinks[(rows.start + row) / shape.queries]);
            let (factor, of_row) = finished(largest[row], sums[row], sink);
            lse[row] = of_row;
            values.iter_mut().for_each(|x| *x *= factor);
            narrow(isa, values, &mut o[row * value_width..][..value_width]);
        }
    }
}

/// What sums of values are multiplied with to become o, and the lse, of the largest logit of a row and
/// the sum of exponentials beside it.
fn finished(largest: f32, sum: f64, sink: Option<f32>) -> (f32, f32) {
    let Some(sink) = sink else {
        if sum == 0.0 {
            return (0.0, f32::NEG_INFINITY);
        }
        return ((1.0 / sum) as f32, (f64::from(largest) + sum.ln()) as f32);
    };
    let (largest, sink) = (f64::from(largest), f64::from(sink));
    if sum == 0.0 {
        return (0.0, sink as f32);
    }
    // Beside the larger of the two, so that neither overflows.
    let most = largest.max(sink);
    let of_keys = (largest - most).exp();
    let whole = sum * of_keys + (sink - most).exp();
    ((of_keys / whole) as f32, (most + whole.ln()) as f32)
}
