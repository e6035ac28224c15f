//! The same mathematics in float64, from the inputs as they are stored: logits and their gradients
//! by the [row](crate::cross_entropy::reference), a few rows at a time, so that beside the gradients
//! a caller holds a few rows of V a thread and never `[T, V]`.

use std::num::NonZero;

use super::{Operands, VocabAxis};
use crate::Element;
use crate::cross_entropy::reference::{TokenCotangents, TokenForward, forward, gradient};
use crate::cross_entropy::{CrossEntropy, Reduction, TokenFactors};

/// Rows of a thread at a time: a column of the weight is read from memory once for all of them.
const ROWS: usize = 16;

/// The gradients of a problem.
#[derive(Clone, Debug, PartialEq)]
pub struct Gradients {
    /// `[T, D]`.
    pub hidden: Vec<f64>,
    /// As the weight lies.
    pub weight: Vec<f64>,
    /// `[V]`, whether or not there is a bias.
    pub bias: Vec<f64>,
}

/// What rows are multiplied with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Factors {
    /// Hidden states and weights.
    Signed,
    /// Their absolute values: of bounds of rows come bounds of gradients.
    Magnitudes,
}

impl Factors {
    fn of<E: Element>(self, x: E) -> f64 {
        match self {
            Self::Signed => x.to_f64(),
            Self::Magnitudes => x.to_f64().abs(),
        }
    }
}

/// The per-token outputs.
#[must_use]
pub fn outputs<E: Element>(
    options: &CrossEntropy,
    operands: &Operands<'_, E>,
) -> Vec<TokenForward> {
    map_rows(operands, |token, logits| forward(options, logits, operands.labels.get(token)))
}

/// The gradients for the cotangents of each token, given its [`outputs`].
#[must_use]
pub fn gradients<E: Element>(
    options: &CrossEntropy,
    operands: &Operands<'_, E>,
    outputs: &[TokenForward],
    cotangents: impl Fn(usize) -> TokenCotangents + Sync,
) -> Gradients {
    pull_back(operands, Factors::Signed, |token, logits, dlogits| {
        let label = operands.labels.get(token);
        gradient(options, logits, label, outputs[token].lse, cotangents(token), dlogits);
    })
}

/// The reduced loss and its gradients, for per-token `weights` `[T]` where given.
///
/// # Errors
/// `weights` are not `[T]`.
pub fn value_and_grad<E: Element>(
    options: &CrossEntropy,
    operands: &Operands<'_, E>,
    reduction: Reduction,
    weights: Option<&[f32]>,
) -> crate::Result<(f64, Gradients)> {
    let factors = TokenFactors::new(*options, reduction, operands.labels, weights)?;
    let outputs = outputs(options, operands);
    let loss = factors.reduce(outputs.iter().map(|token| token.loss));
    let cotangents =
        |token| TokenCotangents { loss: factors.of(token), ..TokenCotangents::default() };
    Ok((loss, gradients(options, operands, &outputs, cotangents)))
}

/// What `row` makes of each token and its logits `[V]`, in the order of tokens.
pub fn map_rows<E: Element, R: Send>(
    operands: &Operands<'_, E>,
    row: impl Fn(usize, &[f64]) -> R + Sync,
) -> Vec<R> {
    let tokens = operands.shape.tokens();
    let mut outputs: Vec<Option<R>> = (0..tokens).map(|_| None).collect();
    // Even shares, and none that is idle while the last rows are done.
    let share = tokens.div_ceil(threads()).max(1);
    std::thread::scope(|scope| {
        for (part, outputs) in outputs.chunks_mut(share).enumerate() {
            let row = &row;
            scope.spawn(move || {
                let mut logits = Vec::new();
                for (block, outputs) in outputs.chunks_mut(ROWS).enumerate() {
                    let first = part * share + block * ROWS;
                    fill_logits(operands, first, outputs.len(), &mut logits);
                    let rows = logits.chunks_exact(operands.shape.vocab());
                    for ((offset, output), logits) in outputs.iter_mut().enumerate().zip(rows) {
                        *output = Some(row(first + offset, logits));
                    }
                }
            });
        }
    });
    outputs.into_iter().map(|output| output.expect("every token has a thread")).collect()
}

/// The gradients that rows of dlogits give: `row` writes that of a token, given its logits, both `[V]`.
/// Sums over tokens are in their order, however many threads there are.
pub fn pull_back<E: Element>(
    operands: &Operands<'_, E>,
    factors: Factors,
    row: impl Fn(usize, &[f64], &mut [f64]) + Sync,
) -> Gradients {
    let (tokens, width, vocab) =
        (operands.shape.tokens(), operands.shape.width(), operands.shape.vocab());
    let mut gradients = Gradients {
        hidden: vec![0.0; tokens * width],
        weight: vec![0.0; vocab * width],
        bias: vec![0.0; vocab],
    };
    let threads = threads();
    let mut dlogits = vec![0.0; (ROWS * threads).min(tokens) * vocab];
    for (block, of_hidden) in gradients.hidden.chunks_mut(ROWS * threads * width).enumerate() {
        let first = block * ROWS * threads;
        let count = of_hidden.len() / width;
        let dlogits = &mut dlogits[..count * vocab];
        std::thread::scope(|scope| {
            let parts = of_hidden.chunks_mut(ROWS * width).zip(dlogits.chunks_mut(ROWS * vocab));
            for (part, (of_hidden, dlogits)) in parts.enumerate() {
                let (row, first) = (&row, first + part * ROWS);
                scope.spawn(move || {
                    let mut logits = Vec::new();
                    fill_logits(operands, first, of_hidden.len() / width, &mut logits);
                    let rows = logits.chunks_exact(vocab).zip(dlogits.chunks_exact_mut(vocab));
                    for (offset, (logits, dlogits)) in rows.enumerate() {
                        row(first + offset, logits, dlogits);
                    }
                    add_of_hidden(operands, factors, dlogits, of_hidden);
                });
            }
        });
        let hidden: Vec<f64> = (first..first + count)
            .flat_map(|token| operands.hidden(token))
            .map(|&x| factors.of(x))
            .collect();
        let share = vocab.div_ceil(threads);
        std::thread::scope(|scope| {
            let parts = gradients.weight.chunks_mut(share * width);
            for (part, (weight, bias)) in parts.zip(gradients.bias.chunks_mut(share)).enumerate() {
                let (hidden, dlogits) = (&hidden, &*dlogits);
                scope.spawn(move || {
                    let rows = weight.chunks_exact_mut(width).zip(bias);
                    for (offset, (of_column, of_bias)) in rows.enumerate() {
                        let column = dlogits[part * share + offset..].iter().step_by(vocab);
                        for (&dz, x) in column.zip(hidden.chunks_exact(width)) {
                            *of_bias += dz;
                            add_product(of_column, dz, x);
                        }
                    }
                });
            }
        });
    }
    if operands.shape.vocab_axis() == VocabAxis::Last {
        gradients.weight = (0..width * vocab)
            .map(|index| gradients.weight[index % vocab * width + index / vocab])
            .collect();
    }
    gradients
}

fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, NonZero::get)
}

/// Puts the logits of `count` tokens, from `first` on, in `out`.
fn fill_logits<E: Element>(
    operands: &Operands<'_, E>,
    first: usize,
    count: usize,
    out: &mut Vec<f64>,
) {
    let (width, vocab) = (operands.shape.width(), operands.shape.vocab());
    let hidden: Vec<f64> = (first..first + count)
        .flat_map(|token| operands.hidden(token))
        .map(|x| x.to_f64())
        .collect();
    out.clear();
    out.resize(count * vocab, 0.0);
    let mut weights = Vec::with_capacity(width);
    for column in 0..vocab {
        weights.clear();
        weights.extend(operands.weights(column).map(E::to_f64));
        let bias = operands.bias(column);
        for (x, logits) in hidden.chunks_exact(width).zip(out.chunks_exact_mut(vocab)) {
            logits[column] = dot(x, &weights) + bias;
        }
    }
}

/// Adds rows of dlogits x weight to rows of `out`.
fn add_of_hidden<E: Element>(
    operands: &Operands<'_, E>,
    factors: Factors,
    dlogits: &[f64],
    out: &mut [f64],
) {
    let (width, vocab) = (operands.shape.width(), operands.shape.vocab());
    let mut weights = Vec::with_capacity(width);
    for column in 0..vocab {
        weights.clear();
        weights.extend(operands.weights(column).map(|x| factors.of(x)));
        for (dz, out) in dlogits.chunks_exact(vocab).zip(out.chunks_exact_mut(width)) {
            add_product(out, dz[column], &weights);
        }
    }
}

/// Sums of every eighth product, which a processor can take at once, then of those.
fn dot(a: &[f64], b: &[f64]) -> f64 {
    const LANES: usize = 8;
    let mut sums = [0.0; LANES];
    let (a, b) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let rest: f64 = a.remainder().iter().zip(b.remainder()).map(|(a, b)| a * b).sum();
    for (a, b) in a.zip(b) {
        for lane in 0..LANES {
            sums[lane] += a[lane] * b[lane];
        }
    }
    sums.iter().sum::<f64>() + rest
}

fn add_product(out: &mut [f64], factor: f64, x: &[f64]) {
    for (out, x) in out.iter_mut().zip(x) {
        *out += factor * x;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linear_cross_entropy::LinearShape;

    /// Numbers of no pattern in [-1, 1), which f32 and f64 hold alike.
    fn numbers(count: usize, seed: u32) -> Vec<f32> {
        let mut state = seed;
        let next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        std::iter::repeat_with(next).take(count).collect()
    }

    const OPTIONS: CrossEntropy = CrossEntropy {
        ignore_index: -100,
        label_smoothing: 0.1,
        z_loss: 0.01,
        softcap: Some(3.0),
        temperature: 0.7,
    };

    /// More tokens than threads have rows for, with every option, each argument moved by itself.
    #[test]
    fn gradients_are_the_derivatives_of_outputs() {
        let (tokens, width, vocab) = (ROWS * threads() + 3, 5, 7);
        let labels: Vec<i64> =
            (0..tokens as i64).map(|token| if token == 4 { -100 } else { token % 7 }).collect();
        for weight_shape in [[vocab, width], [width, vocab]] {
            let shape = LinearShape::new([tokens, width], weight_shape, None).unwrap();
            let arrays = [tokens * width, vocab * width, vocab].map(|count| numbers(count, 7));
            let [g, h, k] = [1, 2, 3].map(|seed| numbers(tokens, seed));
            let cotangents = |token: usize| TokenCotangents {
                loss: g[token].into(),
                logps: h[token].into(),
                lse: k[token].into(),
                entropy: 0.0,
            };
            let run = |arrays: &[Vec<f32>; 3]| {
                let [hidden, weight, bias] = arrays;
                let labels = labels.as_slice().into();
                let operands =
                    Operands::new(&OPTIONS, shape, hidden, weight, Some(bias), labels).unwrap();
                let outputs = outputs(&OPTIONS, &operands);
                let gradients = gradients(&OPTIONS, &operands, &outputs, cotangents);
                // The lse of an ignored token has a value and no gradient.
                let counted = outputs.iter().enumerate().filter(|&(token, _)| token != 4);
                let terms = counted.map(|(token, output)| {
                    let of = cotangents(token);
                    of.loss * output.loss + of.logps * output.logps + of.lse * output.lse
                });
                (terms.sum::<f64>(), gradients)
            };
            let (_, found) = run(&arrays);
            let found = [&found.hidden, &found.weight, &found.bias];
            for (which, found) in found.into_iter().enumerate() {
                for index in (0..arrays[which].len()).step_by(arrays[which].len() / 5) {
                    let mut moved = [arrays.clone(), arrays.clone()];
                    moved[0][which][index] += 1e-3;
                    moved[1][which][index] -= 1e-3;
                    let step = f64::from(moved[0][which][index] - moved[1][which][index]);
                    let slope = (run(&moved[0]).0 - run(&moved[1]).0) / step;
                    let error = (slope - found[index]).abs();
                    assert!(error < 1e-5 * slope.abs().max(1.0), "{which} {index}: {error}");
                }
            }
        }
    }

    /// Two columns, one of which every token has: worked out by hand.
    #[test]
    fn a_case_by_hand() {
        let shape = LinearShape::new([2, 1], [2, 1], None).unwrap();
        let options = CrossEntropy::default();
        let (hidden, weight, labels) = ([0.0_f32, 2.0], [3.0_f32, 3.0], [0_i32, 1]);
        let operands =
            Operands::new(&options, shape, &hidden, &weight, None, labels.as_slice().into())
                .unwrap();
        let (loss, gradients) = value_and_grad(&options, &operands, Reduction::Mean, None).unwrap();
        // Logits are equal whatever the token, so that p is a half and dz a quarter of +-1.
        assert!((loss - 2f64.ln()).abs() < 1e-15);
        let are = |found: &[f64], expected: [f64; 2]| {
            assert!(found.iter().zip(expected).all(|(x, y)| (x - y).abs() < 1e-15), "{found:?}");
        };
        are(&gradients.hidden, [0.0, 0.0]);
        are(&gradients.weight, [0.5, -0.5]);
        are(&gradients.bias, [0.0, 0.0]);
        let bounds = pull_back(&operands, Factors::Magnitudes, |_, _, row| row.fill(1.0));
        assert_eq!((bounds.hidden, bounds.weight), (vec![6.0; 2], vec![2.0; 2]));
        let short = value_and_grad(&options, &operands, Reduction::Sum, Some(&[1.0]));
        assert_eq!(short.unwrap_err().to_string(), "weights holds 1 elements; [T] needs 2");
    }

    #[test]
    fn no_tokens_have_no_gradient() {
        let shape = LinearShape::new([0, 2], [2, 3], None).unwrap();
        let options = CrossEntropy::default();
        let weight = [1.0_f32; 6];
        let operands =
            Operands::new(&options, shape, &[], &weight, None, [0_i32; 0].as_slice().into())
                .unwrap();
        let (loss, gradients) = value_and_grad(&options, &operands, Reduction::Mean, None).unwrap();
        assert_eq!((loss, gradients.weight), (0.0, vec![0.0; 6]));
        assert!(gradients.hidden.is_empty());
    }
}
