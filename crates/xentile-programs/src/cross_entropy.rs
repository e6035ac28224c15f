//! Cross-entropy over logits: programs of the dense reference and of the kernels, with the same
//! arguments and results.
//!
//! | program | arguments | results |
//! | --- | --- | --- |
//! | [`forward`] | logits, labels | loss, logps, lse |
//! | [`value_and_grad`] | logits, labels, weights if any, cotangent if any | loss, dlogits |
//! | [`forward_and_backward`] | logits, labels, dloss, dlogps, dlse | loss, logps, lse, dlogits |
//!
//! Logits and dlogits are `[T, V]`, the loss of `value_and_grad` and its cotangent are scalars, and
//! everything else is `[T]`, in f32 but for labels. What is computed is the contract of
//! `xentile::cross_entropy`.

mod dense;
mod kernel;

use xentile::cross_entropy::{CrossEntropy, Reduction};
use xentile::{DType, LogitsShape};

pub use crate::Implementation;
use crate::stablehlo::{Builder, Comparison, ElementType, Program, TensorType, Value};

/// The problem that a program is for.
#[derive(Clone, Copy, Debug)]
pub struct Problem {
    /// `[T, V]`.
    pub shape: LogitsShape,
    /// The dtype of logits and dlogits.
    pub dtype: DType,
    /// The type of labels: [`ElementType::S32`] or [`ElementType::S64`].
    pub labels: ElementType,
    /// The options.
    pub options: CrossEntropy,
    /// Tokens of a tile; the tuned number where absent. The dense program has no tiles.
    pub time_block: Option<usize>,
    /// Vocabulary columns of a tile, likewise.
    pub block_size: Option<usize>,
}

/// A reduced loss.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Reduced {
    /// Mean or sum.
    pub reduction: Reduction,
    /// Whether each token has a weight, an argument of the program.
    pub weights: bool,
    /// Whether the cotangent of the loss is an argument of the program, rather than 1.
    pub cotangent: bool,
}

/// The program of `pass`, with labels of 32 bits.
///
/// # Errors
/// More elements than memory can address.
#[cfg(feature = "operation")]
pub fn program(
    problem: &xentile::operation::Problem,
    pass: xentile::operation::Pass,
    implementation: Implementation,
) -> xentile::Result<Program> {
    use xentile::cross_entropy::operation::{has_weights, logits_shape, options, reduction};
    use xentile::operation::Pass;

    let of = Problem {
        shape: logits_shape(problem)?,
        dtype: problem.dtype,
        labels: ElementType::S32,
        options: options(problem),
        time_block: problem.tile.time_block,
        block_size: problem.tile.block_size,
    };
    Ok(match pass {
        Pass::Forward => forward(&of, implementation),
        Pass::Backward | Pass::ForwardAndBackward => forward_and_backward(&of, implementation),
        Pass::Fused => {
            let reduced = Reduced {
                reduction: reduction(problem).unwrap_or(Reduction::Mean),
                weights: has_weights(problem),
                cotangent: problem.cotangent != 1.0,
            };
            value_and_grad(&of, reduced, implementation)
        }
    })
}

/// The program of the per-token outputs.
///
/// # Panics
/// `problem.labels` is no type of labels.
#[must_use]
pub fn forward(problem: &Problem, implementation: Implementation) -> Program {
    let mut b = builder("cross_entropy_forward", problem, &[]);
    let outputs = match implementation {
        Implementation::Dense => dense::Rows::new(&mut b, problem).outputs,
        Implementation::Kernel => kernel::forward(&mut b, problem, true).0,
    };
    b.finish(&[&outputs.loss, &outputs.logps, &outputs.lse])
}

/// The program of a reduced loss and its gradient.
///
/// # Panics
/// `problem.labels` is no type of labels.
#[must_use]
pub fn value_and_grad(
    problem: &Problem,
    reduced: Reduced,
    implementation: Implementation,
) -> Program {
    let tokens = tokens(problem);
    let mut more = Vec::new();
    if reduced.weights {
        more.push(tokens.clone());
    }
    if reduced.cotangent {
        more.push(scalar());
    }
    let mut b = builder("cross_entropy_value_and_grad", problem, &more);
    let factors = factors(&mut b, problem, reduced);
    // Known before the pass, it is part of what the pass is given, and costs no rounding.
    let dloss = if reduced.cotangent {
        let cotangent = b.argument(1 + more.len());
        let cotangent = b.broadcast(&cotangent, &[], &tokens.dims);
        b.binary("multiply", &factors, &cotangent)
    } else {
        factors.clone()
    };
    let (losses, dlogits) = match implementation {
        Implementation::Dense => {
            let rows = dense::Rows::new(&mut b, problem);
            let zeros = b.constant(0.0, &tokens);
            let dlogits = rows.gradient(&mut b, problem, [&dloss, &zeros, &zeros]);
            (rows.outputs.loss, dlogits)
        }
        Implementation::Kernel => kernel::fused(&mut b, problem, &dloss),
    };
    // A factor of 0 takes its token out, whatever its loss.
    let zeros = b.constant(0.0, &tokens);
    let out = b.compare(Comparison::Equal, &factors, &zeros);
    let terms = b.binary("multiply", &factors, &losses);
    let terms = b.select(&out, &zeros, &terms);
    let loss = b.reduce("add", 0.0, &terms, 0);
    b.finish(&[&loss, &dlogits])
}

/// The program of the per-token outputs and of the gradient for cotangents of all of them.
///
/// # Panics
/// `problem.labels` is no type of labels.
#[must_use]
pub fn forward_and_backward(problem: &Problem, implementation: Implementation) -> Program {
    let tokens = tokens(problem);
    let more = [tokens.clone(), tokens.clone(), tokens];
    let mut b = builder("cross_entropy_forward_and_backward", problem, &more);
    let cotangents = [2, 3, 4].map(|index| b.argument(index));
    let cotangents = cotangents.each_ref();
    let (outputs, dlogits) = match implementation {
        Implementation::Dense => {
            let rows = dense::Rows::new(&mut b, problem);
            let dlogits = rows.gradient(&mut b, problem, cotangents);
            (rows.outputs, dlogits)
        }
        Implementation::Kernel => kernel::recomputed(&mut b, problem, cotangents),
    };
    b.finish(&[&outputs.loss, &outputs.logps, &outputs.lse, &dlogits])
}

/// What there is of each token.
struct Outputs {
    loss: Value,
    logps: Value,
    lse: Value,
}

fn scalar() -> TensorType {
    TensorType::new(&[], ElementType::F32)
}

fn tokens(problem: &Problem) -> TensorType {
    TensorType::new(&[problem.shape.tokens()], ElementType::F32)
}

fn logits(problem: &Problem) -> TensorType {
    TensorType::new(&[problem.shape.tokens(), problem.shape.vocab()], problem.dtype.into())
}

/// A function of logits, labels and `more`.
fn builder(name: &str, problem: &Problem, more: &[TensorType]) -> Builder {
    let labels = problem.labels;
    assert!(matches!(labels, ElementType::S32 | ElementType::S64), "labels of {labels}");
    let labels = TensorType::new(&[problem.shape.tokens()], labels);
    let mut arguments = vec![logits(problem), labels];
    arguments.extend_from_slice(more);
    Builder::new(name, &arguments)
}

/// Which tokens are ignored.
fn ignored(b: &mut Builder, problem: &Problem) -> Value {
    let labels = b.argument(1);
    let ignore_index = problem.options.ignore_index;
    if problem.labels == ElementType::S32 && i32::try_from(ignore_index).is_err() {
        // No label of 32 bits can be it.
        return b.constant(0.0, &TensorType::new(&labels.ty().dims, ElementType::Pred));
    }
    let ignored = b.integer(ignore_index, labels.ty());
    b.compare(Comparison::Equal, &labels, &ignored)
}

/// The factor of each token's loss in the reduced loss.
fn factors(b: &mut Builder, problem: &Problem, reduced: Reduced) -> Value {
    let tokens = tokens(problem);
    let ignored = ignored(b, problem);
    let zeros = b.constant(0.0, &tokens);
    let weights = if reduced.weights { b.argument(2) } else { b.constant(1.0, &tokens) };
    let counted = b.select(&ignored, &zeros, &weights);
    if reduced.reduction == Reduction::Sum {
        return counted;
    }
    let total = b.reduce("add", 0.0, &counted, 0);
    let total = b.broadcast(&total, &[], &tokens.dims);
    let nothing = b.compare(Comparison::Equal, &total, &zeros);
    let share = b.binary("divide", &counted, &total);
    b.select(&nothing, &zeros, &share)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a reader should see; how it runs is tested through XLA.
    #[test]
    fn a_fused_program() {
        let problem = Problem {
            shape: LogitsShape::new(4, 10).unwrap(),
            dtype: DType::Bf16,
            labels: ElementType::S32,
            options: CrossEntropy::default(),
            time_block: None,
            block_size: Some(8),
        };
        let reduced = Reduced { reduction: Reduction::Sum, weights: false, cotangent: false };
        let program = value_and_grad(&problem, reduced, Implementation::Kernel);
        assert_eq!(program.arguments, [logits(&problem), TensorType::new(&[4], ElementType::S32)]);
        assert_eq!(program.results, [scalar(), logits(&problem)]);
        let call = program.text.lines().find(|line| line.contains("custom_call")).unwrap();
        for piece in [
            "@xentile_cross_entropy_fused(%arg0, %arg1, %4)",
            "ignore_index = -100 : i64, label_smoothing = 0x0000000000000000 : f64",
            "block_size = 8 : i64, every_token = false",
            "(tensor<4x10xbf16>, tensor<4xi32>, tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>, \
             tensor<4xf32>, tensor<4x10xbf16>)",
        ] {
            assert!(call.contains(piece), "no {piece} in {call}");
        }
    }

    #[test]
    #[should_panic(expected = "labels of f32")]
    fn labels_are_integers() {
        let shape = LogitsShape::new(1, 1).unwrap();
        let problem = Problem {
            shape,
            dtype: DType::F32,
            labels: ElementType::F32,
            options: CrossEntropy::default(),
            time_block: None,
            block_size: None,
        };
        drop(forward(&problem, Implementation::Dense));
    }
}
