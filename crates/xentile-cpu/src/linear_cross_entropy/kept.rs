//! What is kept of a column block's logits in 16 bits: their unnormalised softmax, rounded once.
//!
//! Each row of a block has a shift of its own, which its largest element is near, so that no spread of
//! logits is out of range, and which is put right when the row's factor is known. One shift a row and
//! tile is the technique of QuACK (Guo et al., 2025); here it need be no power of two, since the factor
//! comes in f32.

use std::ops::Range;

use xentile::{DType, Element};

use crate::Isa;
use crate::convert::{largest, narrow, scale, sum, widen};
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

/// Sets `kept` to the unnormalised softmax of `columns` of the tokens from `first`, and `shifts` to the
/// shift of each, of `logits`, whose place is lost. Rows that do not `count` are 0.
pub(super) fn keep<E: Element>(
    isa: Isa,
    kernel: &Kernel<'_>,
    (first, columns): (usize, &Range<usize>),
    counts: impl Fn(usize) -> bool,
    logits: &mut [f32],
    kept: &mut [E],
    shifts: &mut [f32],
) {
    let width = columns.len();
    let rows = logits.chunks_exact_mut(width).zip(kept.chunks_exact_mut(width));
    for (token, ((logits, kept), shift)) in (first..).zip(rows.zip(shifts)) {
        let top = kernel.cap(if counts(token) { largest(isa, logits) } else { f32::NAN });
        if !top.is_finite() {
            // No gradient is made of it.
            kept.fill(E::from_f32(0.0));
            *shift = f32::NEG_INFINITY;
            continue;
        }
        let is_masked = |&(_, &z): &(usize, &f32)| z == f32::NEG_INFINITY;
        let masked: Vec<_> = match kernel.smooths() {
            true => logits.iter().enumerate().filter(is_masked).map(|(column, _)| column).collect(),
            false => Vec::new(),
        };
        let top = top - exponent(E::DTYPE) * std::f64::consts::LN_2;
        kernel.row_softmax(logits, top);
        let ratio = round(isa, logits, kept);
        // What rounding made of the sum, which no more than a unit of it can be, is put right with the
        // factor. It is more only where a softcap leaves nothing but numbers with few bits.
        let is_rounding = (ratio - 1.0).abs() <= E::DTYPE.ulp(1.0);
        *shift = (top + if is_rounding { ratio.ln() } else { 0.0 }) as f32;
        for column in masked {
            kept[column] = E::from_f32(MASKED);
        }
    }
}

/// Sets `kept` to `exact`, rounded, and returns the ratio of the latter's sum to that of the former.
fn round<E: Element>(isa: Isa, exact: &[f32], kept: &mut [E]) -> f64 {
    let [mut all, mut of_rounded] = [0.0; 2];
    let mut back = [0.0; PIECE];
    for (exact, kept) in exact.chunks(PIECE).zip(kept.chunks_mut(PIECE)) {
        let back = &mut back[..exact.len()];
        narrow(isa, exact, kept);
        widen(isa, kept, back);
        all += sum(isa, exact);
        of_rounded += sum(isa, back);
    }
    all / of_rounded
}

/// Sets `to` to the gradient of a row, of what is `kept` of it.
pub(super) fn expand<E: Element, Z: Element>(isa: Isa, kept: &[E], scaled: Scaled, to: &mut [Z]) {
    match scaled {
        Scaled::Fill(value) => to.fill(Z::from_f32(value)),
        Scaled::Times { factor, constant, label, at_label } => {
            scale(isa, kept, [factor, constant], to);
            if let Some(label) = label {
                to[label] = Z::from_f32(at_label);
            }
        }
    }
}
