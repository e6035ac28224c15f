//! The passes over logits.

use super::gradient::Gradient;
use super::short::{Exponentials, Gradients};
use super::statistics::Statistics;
use super::whole::{WholeGradient, WholeSums};

crate::compiled::passes! {
    /// Each pass over logits `E`.
    pub(super) struct Passes {
        statistics: Statistics,
        gradient: Gradient,
        exponentials: Exponentials,
        gradients: Gradients,
        whole_sums: WholeSums,
        whole_gradient: WholeGradient,
    }
}
