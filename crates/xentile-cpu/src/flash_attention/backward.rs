//! The backward pass.

use std::ops::Range;

use xentile::Element;

use super::rows::{Differentials, Dots, Factor, Scaling, Seen, differentials, dots};
use super::tiles::{Block, HeadView, KEYS, ROWS, Tile, pack, unfit};
use super::{Cotangents, Gradients, Kernel, Operands, Saved};
use crate::convert::{multiply_by, narrow, widen};
use crate::parallel::Shared;
use crate::product::{Matrix, Panels, multiply};

/// Tiles, or half as many blocks, of a task that has no whole head.
const TILES: usize = 4;

/// Writes every gradient.
pub(super) fn run<E: Element>(
    kernel: &Kernel<'_>,
    operands: Operands<'_, E>,
    saved: Saved<'_, E>,
    cotangents: Cotangents<'_, E>,
    gradients: Gradients<'_, E>,
) {
    let (shape, pool) = (kernel.shape, kernel.launch.pool);
    let mut delta = vec![0.0; shape.heads * shape.rows()];
    deltas(kernel, saved, cotangents, &mut delta, gradients.sinks);
    let views: Vec<_> = (0..shape.heads).map(|head| HeadView::new(kernel, head)).collect();
    let [dq, dk, dv] = [gradients.q, gradients.k, gradients.v].map(Shared::new);
    let sweep = |head: usize| Sweep {
        kernel,
        operands,
        lse: saved.lse,
        delta: &delta,
        dout: cotangents.o,
        head,
        view: &views[head],
        dq: &dq,
        dk: &dk,
        dv: &dv,
    };
    let (rows, keys) = (0..shape.rows(), 0..shape.keys);
    if shape.heads >= pool.threads() {
        pool.run(shape.heads, &|head| sweep(head).run(rows.clone(), keys.clone(), [true; 2]));
        return;
    }
    let part = |all: &Range<usize>, step: usize, index: usize| {
        index * step..all.end.min((index + 1) * step)
    };
    let (by_keys, by_rows) = (TILES * KEYS, TILES * ROWS);
    let tasks = keys.len().div_ceil(by_keys);
    pool.run(shape.heads * tasks, &|index| {
        let keys = part(&keys, by_keys, index % tasks);
        sweep(index / tasks).run(rows.clone(), keys, [false, true]);
    });
    let tasks = rows.len().div_ceil(by_rows);
    pool.run(shape.heads * tasks, &|index| {
        let rows = part(&rows, by_rows, index % tasks);
        sweep(index / tasks).run(rows, keys.clone(), [true, false]);
    });
}

/// Writes `delta` `[N, G, S]`, and what sinks get.
fn deltas<E: Element>(
    kernel: &Kernel<'_>,
    saved: Saved<'_, E>,
    cotangents: Cotangents<'_, E>,
    delta: &mut [f32],
    dsinks: Option<&mut [f32]>,
) {
    let (shape, isa) = (kernel.shape, kernel.launch.isa);
    let (queries, width) = (shape.queries, shape.value_width);
    let mut unused = Vec::new();
    let dsinks = dsinks.unwrap_or_else(|| {
        unused.resize(shape.heads * shape.group, 0.0);
        &mut unused
    });
    let (delta, dsinks) = (Shared::new(delta), Shared::new(dsinks));
    kernel.launch.pool.run(shape.heads * shape.group, &|head| {
        // SAFETY: each task has a head of its own.
        let (delta, dsink) =
            unsafe { (delta.slice(head * queries, queries), dsinks.slice(head, 1)) };
        let sink = kernel.sinks.map(|sinks| f64::from(sinks[head]));
        let (mut total, mut wide) = (0.0, [vec![0.0; width], vec![0.0; width]]);
        for (query, delta) in delta.iter_mut().enumerate() {
            let row = head * queries + query;
            let (lse, dlse) = (saved.lse[row], cotangents.lse[row]);
            *delta = 0.0;
            if lse == f32::NEG_INFINITY {
                continue;
            }
            let [o, dout] = &mut wide;
            widen(isa, &saved.o[row * width..][..width], o);
            widen(isa, &cotangents.o[row * width..][..width], dout);
            let whole = dots(isa, Dots { left: o, right: dout }) - f64::from(dlse);
            *delta = whole as f32;
            if let Some(sink) = sink {
                total -= (sink - f64::from(lse)).exp() * whole;
            }
        }
        dsink[0] = total as f32;
    });
}

struct Sweep<'a, E> {
    kernel: &'a Kernel<'a>,
    operands: Operands<'a, E>,
    lse: &'a [f32],
    delta: &'a [f32],
    dout: &'a [E],
    head: usize,
    view: &'a HeadView<'a>,
    dq: &'a Shared<'a, E>,
    dk: &'a Shared<'a, E>,
    dv: &'a Shared<'a, E>,
}

/// A block, with its queries and cotangents as right factors, and which rows of these are zeros since
/// they are not finite.
struct Packed {
    block: Block,
    q: Vec<f32>,
    dout: Vec<f32>,
    unfit: [Vec<usize>; 2],
}

impl<E: Element> Sweep<'_, E> {
    /// Writes dq of `rows`, or dk and dv of `keys`, or all, as `wants` says. Whoever wants dq takes all
    /// keys, and whoever wants dk and dv all rows.
    fn run(&self, rows: Range<usize>, keys: Range<usize>, wants: [bool; 2]) {
        let Self { kernel, operands, head, view, .. } = *self;
        let (shape, isa) = (kernel.shape, kernel.launch.isa);
        let (width, value_width) = (shape.width, shape.value_width);
        let [wants_queries, wants_keys] = wants;
        let own = head * shape.rows() + rows.start;
        let of_rows = |all: &'_ [E], width: usize| -> Range<usize> {
            debug_assert!(all.len() >= (own + rows.len()) * width);
            own * width..(own + rows.len()) * width
        };
        let q = &operands.q[of_rows(operands.q, width)];
        let dout = &self.dout[of_rows(self.dout, value_width)];
        let k = &operands.k[head * shape.keys * width..][..shape.keys * width];
        let v = &operands.v[head * shape.keys * value_width..][..shape.keys * value_width];
        let (lse, delta) = (&self.lse[own..][..rows.len()], &self.delta[own..][..rows.len()]);
        let blocks: Vec<_> = view
            .blocks(rows.clone())
            .into_iter()
            .map(|block| self.packed(block, [q, dout], rows.start, lse, wants_keys))
            .collect();
        let (all_q, all_dout) = (q, dout);
        let (q, dout) = (Matrix::new(q, width), Matrix::new(dout, value_width));
        let mut sums = Sums {
            q: vec![0.0; if wants_queries { rows.len() * width } else { 0 }],
            k: vec![0.0; if wants_keys { KEYS * width } else { 0 }],
            v: vec![0.0; if wants_keys { KEYS * value_width } else { 0 }],
        };
        let mut written = keys.start;
        let [mut products, mut of_values] = [(); 2].map(|()| vec![0.0_f32; ROWS * KEYS]);
        let [mut transposed_k, mut transposed_v, mut packed_k] = [const { Vec::new() }; 3];
        let [mut padded_k, mut padded_v] = [const { Vec::new() }; 2];
        let scaling = Scaling::from(kernel.options);
        for tile in view.tiles(&keys) {
            sums.k.fill(0.0);
            sums.v.fill(0.0);
            let tile_v = tile.rows(view, v, value_width, &[], &mut padded_v);
            pack(isa, tile_v.transposed(), &mut transposed_v);
            let tile_k = tile.rows(view, k, width, &[], &mut padded_k);
            pack(isa, tile_k.transposed(), &mut transposed_k);
            let mut unfit_keys = Vec::new();
            if wants_queries {
                let all = blocks.iter().map(|packed| &packed.block);
                unfit_keys = tile.unfit(isa, view, all, k, width);
                pack(isa, tile.rows(view, k, width, &unfit_keys, &mut padded_k), &mut packed_k);
            }
            for Packed { block, q: right_q, dout: right_dout, unfit: [unfit_q, unfit_dout] } in
                &blocks
            {
                if !block.sees(&tile) {
                    continue;
                }
                let columns = block.columns(&tile);
                let own = block.rows.start - rows.start..block.rows.end - rows.start;
                let products = &mut products[..own.len() * columns];
                let of_values = &mut of_values[..own.len() * columns];
                let of_keys = |data, width| Panels::new::<E>(isa, data, [width, columns]);
                multiply(isa, &q.rows(own.clone()), of_keys(&transposed_k, width), false, products);
                let right = of_keys(&transposed_v, value_width);
                multiply(isa, &dout.rows(own.clone()), right, false, of_values);
                let seen = Seen::new(view, block, &tile);
                differentials(
                    isa,
                    Differentials {
                        scaling,
                        seen: &seen,
                        products,
                        of_values,
                        lse: &lse[own.clone()],
                        delta: &delta[own.clone()],
                    },
                );
                if wants_keys {
                    let q = &all_q[own.start * width..own.end * width];
                    seen.add_unfit_rows(unfit_q, of_values, q, width, &mut sums.k);
                    let dout = &all_dout[own.start * value_width..own.end * value_width];
                    seen.add_unfit_rows(unfit_dout, products, dout, value_width, &mut sums.v);
                }
                if wants_queries {
                    let to = &mut sums.q[own.start * width..own.end * width];
                    seen.add_unfit_keys(&unfit_keys, of_values, k, width, to);
                }
                let p = Factor::<E>::new(isa, products, columns);
                let ds = Factor::<E>::new(isa, of_values, columns);
                if wants_keys {
                    let of_rows = |data, width| Panels::new::<E>(isa, data, [own.len(), width]);
                    let to = &mut sums.v[..columns * value_width];
                    multiply(isa, &*p.transposed(), of_rows(right_dout, value_width), true, to);
                    let to = &mut sums.k[..columns * width];
                    multiply(isa, &*ds.transposed(), of_rows(right_q, width), true, to);
                }
                if wants_queries {
                    let right = Panels::new::<E>(isa, &packed_k, [tile.padded(), width]);
                    let to = &mut sums.q[own.start * width..own.end * width];
                    multiply(isa, ds.left(), right.first_terms(columns), true, to);
                }
            }
            if wants_keys {
                self.zero_keys(written..tile.keys.start.max(written));
                self.write_keys(&tile, &keys, &mut sums);
                written = tile.keys.end;
            }
        }
        if wants_keys {
            self.zero_keys(written..keys.end);
        }
        if wants_queries {
            multiply_by(isa, scaling.scale(), &mut sums.q);
            // SAFETY: no other task has these rows.
            narrow(isa, &sums.q, unsafe { self.dq.slice(own * width, rows.len() * width) });
        }
    }

    /// A block with its factors, if they are wanted: zeros in the place of rows that see nothing.
    fn packed(
        &self,
        block: Block,
        [q, dout]: [&[E]; 2],
        first: usize,
        lse: &[f32],
        is_wanted: bool,
    ) -> Packed {
        let (shape, isa) = (self.kernel.shape, self.kernel.launch.isa);
        let (q_rows, dout_rows) = (Vec::new(), Vec::new());
        let mut packed =
            Packed { block, q: q_rows, dout: dout_rows, unfit: [Vec::new(), Vec::new()] };
        if !is_wanted {
            return packed;
        }
        let own = packed.block.rows.start - first..packed.block.rows.end - first;
        let is_blind =
            |row: usize| lse[row] == f32::NEG_INFINITY || self.view.keys(first + row).is_empty();
        let has_blind = packed.block.has_blind || own.clone().any(is_blind);
        let [unfit_q, unfit_dout] = &mut packed.unfit;
        let pairs = [
            (q, shape.width, &mut packed.q, unfit_q),
            (dout, shape.value_width, &mut packed.dout, unfit_dout),
        ];
        for (all, width, to, unfit_rows) in pairs {
            let all = &all[own.start * width..own.end * width];
            if self.view.segments.is_some() {
                *unfit_rows = unfit(isa, all, width);
                unfit_rows.retain(|row| !is_blind(own.start + row));
            }
            if !has_blind && unfit_rows.is_empty() {
                pack(isa, Matrix::new(all, width), to);
                continue;
            }
            let mut all = all.to_vec();
            for (index, values) in all.chunks_exact_mut(width).enumerate() {
                if is_blind(own.start + index) || unfit_rows.contains(&index) {
                    values.fill(E::from_f32(0.0));
                }
            }
            pack(isa, Matrix::new(&all, width), to);
        }
        packed
    }

    /// Writes dk and dv of a tile.
    fn write_keys(&self, tile: &Tile, keys: &Range<usize>, sums: &mut Sums) {
        let (shape, isa) = (self.kernel.shape, self.kernel.launch.isa);
        let (first, count) = (self.head * shape.keys + tile.keys.start, tile.keys.len());
        debug_assert!(keys.start <= tile.keys.start && tile.keys.end <= keys.end);
        multiply_by(isa, Scaling::from(self.kernel.options).scale(), &mut sums.k);
        // SAFETY: no other task has these keys.
        let [dk, dv] = unsafe {
            let (width, value_width) = (shape.width, shape.value_width);
            [
                self.dk.slice(first * width, count * width),
                self.dv.slice(first * value_width, count * value_width),
            ]
        };
        narrow(isa, &sums.k[..dk.len()], dk);
        narrow(isa, &sums.v[..dv.len()], dv);
    }

    /// Writes dk and dv of keys that no row sees.
    fn zero_keys(&self, keys: Range<usize>) {
        let shape = self.kernel.shape;
        let first = self.head * shape.keys + keys.start;
        for (to, width) in [(self.dk, shape.width), (self.dv, shape.value_width)] {
            // SAFETY: no other task has these keys.
            unsafe { to.slice(first * width, keys.len() * width) }.fill(E::from_f32(0.0));
        }
    }
}

/// Sums of gradients in f32.
struct Sums {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}
