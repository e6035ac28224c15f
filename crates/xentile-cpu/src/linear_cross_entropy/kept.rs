//! What is kept of a slab's logits in 16 bits: their unnormalised softmax, rounded once.
//!
//! Each row of a slab has an origin of its own, which its largest element is near, so that no spread of
//! logits is out of range, and which is put right when the row's factor is known. One origin a row and
//! tile is the technique of QuACK (Guo et al., 2025); here it need be no power of two, since the factor
//! comes in f32.

use std::ops::Range;

use xentile::{DType, Element};

use super::convert::{Expand, largest, narrow, sum, widen};
use crate::Isa;
use crate::cross_entropy::{Kernel, Scaled};

/// Numbers that are summed in f32 before the sum goes to float64.
const PIECE: usize = 256;

/// What stands for a logit of -inf where gradients have a constant, which such a column has not.
const MASKED: f32 = -0.0;

/// The exponent that the largest element of a row has. Below the normal range of f16 an element has
/// fewer bits, which this makes rare.
fn exponent(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 15.0,
        DType::Bf16 | DType::F32 => 0.0,
    }
}

/// Sets `kept` to the unnormalised softmax of `columns` of the tokens from `first`, and `origins` to the
/// origin of each, of `logits`, whose place is lost. Rows that do not `count` hold no numbers to go by.
pub(super) fn keep<E: Element>(
    isa: Isa,
    kernel: &Kernel<'_>,
    (first, columns): (usize, &Range<usize>),
    counts: impl Fn(usize) -> bool,
    logits: &mut [f32],
    kept: &mut [E],
    origins: &mut [f32],
) {
    let width = columns.len();
    let mut masked = Vec::new();
    let mut tops = Vec::with_capacity(origins.len());
    for (row, logits) in logits.chunks_exact(width).enumerate() {
        if !counts(first + row) {
            tops.push(None);
            continue;
        }
        let top = kernel.cap(largest(isa, logits));
        tops.push(top.is_finite().then(|| top - exponent(E::DTYPE) * std::f64::consts::LN_2));
        if kernel.smooths() {
            let is_masked = |&(_, &z): &(usize, &f32)| z == f32::NEG_INFINITY;
            let found = logits.iter().enumerate().filter(is_masked);
            masked.extend(found.map(|(column, _)| row * width + column));
        }
    }
    kernel.columns_softmax(logits, width, &tops).expect("whole rows");
    let rows = logits.chunks_exact(width).zip(kept.chunks_exact_mut(width));
    for ((exact, kept), (top, origin)) in rows.zip(tops.iter().zip(origins)) {
        let Some(top) = top else {
            kept.fill(E::from_f32(0.0));
            *origin = f32::NEG_INFINITY;
            continue;
        };
        let [mut all, mut of_rounded] = [0.0; 2];
        let mut back = [0.0; PIECE];
        for (exact, kept) in exact.chunks(PIECE).zip(kept.chunks_mut(PIECE)) {
            let back = &mut back[..exact.len()];
            narrow(isa, exact, kept);
            widen(isa, kept, back);
            all += sum(isa, exact);
            of_rounded += sum(isa, back);
        }
        // What rounding made of the sum, which no more than a unit of it can be, is put right with the
        // factor. It is more only where a softcap leaves nothing but numbers with few bits.
        let ratio = all / of_rounded;
        let is_rounding = (ratio - 1.0).abs() <= E::DTYPE.ulp(1.0);
        *origin = (top + if is_rounding { ratio.ln() } else { 0.0 }) as f32;
    }
    for index in masked {
        kept[index] = E::from_f32(MASKED);
    }
}

/// Sets `to` to the gradient of a row, of what is `kept` of it.
pub(super) fn expand<E: Element>(isa: Isa, kept: &[E], scaled: Scaled, to: &mut [f32]) {
    match scaled {
        Scaled::Fill(value) => to.fill(value),
        Scaled::Times { factor, constant, label, at_label } => {
            widen(isa, kept, to);
            isa.run(Expand { numbers: to, factor, constant });
            if let Some(label) = label {
                to[label] = at_label;
            }
        }
    }
}
