//! A vocabulary in parts, in float64: what parts of a row give, and how a whole is made of them.

use super::reference::{TokenCotangents, TokenForward, forward};
use super::{CrossEntropy, Target};

/// What a part of a token's columns gives for the whole.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenPart {
    /// `logsumexp` of the part; -inf where every logit is.
    pub lse: f64,
    /// `z_y - lse`, where the part has the label; -inf where it has no other logits than -inf.
    pub logps: Option<f64>,
    /// `lse - mean(z)`, where there is smoothing.
    pub spread: f64,
}

/// The options that a part runs its kernels with.
#[must_use]
pub fn options_of_part(options: &CrossEntropy) -> CrossEntropy {
    let label_smoothing = if options.label_smoothing == 0.0 { 0.0 } else { 1.0 };
    CrossEntropy { label_smoothing, z_loss: 0.0, ..*options }
}

/// What a part with `logits` `[V / n]` gives for a label at `column` of it, or of another part.
#[must_use]
pub fn part(options: &CrossEntropy, logits: &[f64], column: Option<usize>) -> TokenPart {
    let of = options_of_part(options);
    // No column is ignored.
    let of = CrossEntropy { ignore_index: -1, ..of };
    let given = forward(&of, logits, column.unwrap_or(0) as i64);
    if logits.iter().all(|&z| options.cap(z) == f64::NEG_INFINITY) {
        let lse = f64::NEG_INFINITY;
        return TokenPart { lse, logps: column.map(|_| lse), spread: f64::INFINITY };
    }
    // The mean of logits with -inf is that; as the label's it has no product with 0.
    let is_infinite = given.loss.is_nan() && !given.lse.is_nan();
    let spread = if is_infinite { f64::INFINITY } else { given.loss };
    TokenPart { lse: given.lse, logps: column.map(|_| given.logps), spread }
}

/// The forward pass of a token of whose columns `parts` are all, each of as many.
#[must_use]
pub fn merge(options: &CrossEntropy, parts: &[TokenPart], target: Target) -> TokenForward {
    let max = parts.iter().map(|part| part.lse).fold(f64::NEG_INFINITY, f64::max);
    let ln_s = parts.iter().map(|part| (part.lse - max).exp()).sum::<f64>().ln();
    let lse = max + ln_s;
    let (loss, logps) = match target {
        Target::Ignored => (0.0, 0.0),
        Target::OutOfRange => (f64::NAN, f64::NAN),
        Target::Column(_) => {
            let at_label = parts.iter().find_map(|part| Some(part.logps? + (part.lse - max)));
            let logps = at_label.map_or(f64::NAN, |at_label| match at_label {
                // Of a part without a logit.
                at_label if at_label.is_nan() && lse.is_finite() => f64::NEG_INFINITY,
                at_label => at_label - ln_s,
            });
            let (e, w) = (options.label_smoothing, options.z_loss);
            let mut loss = (1.0 - e) * -logps + w * lse * lse;
            if e != 0.0 {
                let spread: f64 = parts.iter().map(|part| part.spread - (part.lse - max)).sum();
                loss += e * (spread / parts.len() as f64 + ln_s);
            }
            (loss, logps)
        }
    };
    TokenForward { loss, logps, lse }
}

/// The entropy of a token of whose columns `parts` are all, of each its `lse` and entropy.
#[must_use]
pub fn merge_entropy(parts: &[(f64, f64)]) -> f64 {
    let max = parts.iter().map(|part| part.0).fold(f64::NEG_INFINITY, f64::max);
    let (mut sum, mut weighted) = (0.0, 0.0);
    for &(lse, entropy) in parts {
        let less = lse - max;
        if less == f64::NEG_INFINITY {
            continue;
        }
        sum += less.exp();
        weighted += less.exp() * (less - entropy);
    }
    sum.ln() - weighted / sum
}

/// The cotangents that a part's backward pass takes, with the whole's `lse`, for those of the whole's
/// outputs; `has_label` says whether the label is a column of this part, one of `count`.
#[must_use]
pub fn cotangents(
    options: &CrossEntropy,
    count: usize,
    has_label: bool,
    lse: f64,
    of: TokenCotangents,
) -> TokenCotangents {
    let TokenCotangents { loss: g, logps: h, lse: k, entropy } = of;
    if of.are_zero() {
        return of;
    }
    let (e, w) = (options.label_smoothing, options.z_loss);
    let share = e / count as f64;
    let (logps, lse) = if has_label {
        (h - (1.0 - e) * g, g * (2.0 * w * lse + e - share) + k)
    } else {
        (0.0, g * (1.0 + 2.0 * w * lse - share) - h + k)
    };
    TokenCotangents { loss: g * share, logps, lse, entropy }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cross_entropy::reference::{distribution, gradient};

    const MASKED: f64 = f64::NEG_INFINITY;

    /// Both passes of a row, whole and in parts.
    fn both(options: &CrossEntropy, row: &[f64], label: i64, count: usize) -> [Vec<f64>; 2] {
        let of = TokenCotangents { loss: 0.7, logps: -0.4, lse: 0.25, entropy: 0.0 };
        let whole = forward(options, row, label);
        let mut dlogits = vec![f64::NAN; row.len()];
        gradient(options, row, label, whole.lse, of, &mut dlogits);

        let (width, target) = (row.len() / count, options.target(label, row.len()));
        let column = |index: usize| match target {
            Target::Column(y) if y / width == index => Some(y % width),
            _ => None,
        };
        let of_part = CrossEntropy { ignore_index: -1, ..options_of_part(options) };
        let given: Vec<_> = (row.chunks(width).enumerate())
            .map(|(index, logits)| part(options, logits, column(index)))
            .collect();
        let merged = merge(options, &given, target);
        let mut found = vec![f64::NAN; row.len()];
        for (index, dz) in found.chunks_mut(width).enumerate() {
            let logits = &row[index * width..][..width];
            if target == Target::Ignored || given[index].lse == MASKED && !merged.lse.is_nan() {
                dz.fill(0.0);
                continue;
            }
            let label =
                if target == Target::OutOfRange { -2 } else { column(index).unwrap_or(0) as i64 };
            let cotangents = cotangents(options, count, column(index).is_some(), merged.lse, of);
            gradient(&of_part, logits, label, merged.lse, cotangents, dz);
        }
        [(whole, dlogits), (merged, found)].map(|(of, mut dz)| {
            dz.extend([of.loss, of.logps, of.lse]);
            dz
        })
    }

    #[test]
    fn parts_are_a_whole() {
        let row = [0.3, -1.2, 2.5, 0.0, 1.1, 40.0, -3.0, 0.7, MASKED, 0.1, MASKED, MASKED];
        let plain = CrossEntropy::default();
        let options = [
            plain,
            CrossEntropy { z_loss: 0.01, ..plain },
            CrossEntropy { label_smoothing: 0.1, z_loss: 0.01, softcap: Some(3.0), ..plain },
            CrossEntropy { label_smoothing: 1.0, ..plain },
        ];
        for options in &options {
            // A mean has no logits of -inf, but under a cap.
            let has_mean = options.label_smoothing > 0.0 && options.softcap.is_none();
            let row = if has_mean { &row[..8] } else { &row[..] };
            for count in [1, 2, 4] {
                for label in [0, 3, 5, 7, row.len() as i64 - 1, row.len() as i64, -1, -100] {
                    let [whole, merged] = both(options, row, label, count);
                    for (index, (a, b)) in whole.iter().zip(&merged).enumerate() {
                        let equal = a == b || a.is_nan() && b.is_nan();
                        assert!(
                            equal || (a - b).abs() < 1e-13 * a.abs().max(1.0),
                            "{options:?}, {count} parts, label {label}, {index}: {a} and {b}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn entropies_of_parts_are_that_of_the_whole() {
        let row = [0.3, -1.2, 2.5, 0.0, 1.1, 40.0, -3.0, 0.7, MASKED, 0.1, MASKED, MASKED];
        for softcap in [None, Some(3.0)] {
            let options = CrossEntropy { softcap, temperature: 0.6, ..CrossEntropy::default() };
            let whole = distribution(&options, &row).entropy;
            for count in [1, 2, 4] {
                let parts: Vec<_> = (row.chunks(row.len() / count))
                    .map(|logits| {
                        let entropy = distribution(&options, logits).entropy;
                        (part(&options, logits, None).lse, entropy)
                    })
                    .collect();
                let merged = merge_entropy(&parts);
                assert!((merged - whole).abs() < 1e-14, "{count} parts: {merged} and {whole}");
            }
        }
    }

    #[test]
    fn a_shard_without_logits_changes_no_sum() {
        let options = CrossEntropy::default();
        let [whole, merged] = both(&options, &[MASKED, MASKED, 1.0, 2.0], 3, 2);
        assert_eq!(whole[..2], [0.0; 2]);
        assert!(whole.iter().zip(&merged).all(|(a, b)| (a - b).abs() < 1e-15));
        for row in [[MASKED; 4], [f64::NAN, 1.0, 2.0, 3.0], [1.0, 2.0, 3.0, f64::INFINITY]] {
            let [whole, merged] = both(&options, &row, 1, 2);
            assert!(whole.iter().chain(&merged).all(|x| x.is_nan()), "{row:?}: {merged:?}");
        }
    }
}
