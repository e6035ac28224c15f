//! The passes over logits.

use super::gradient::Gradient;
use super::short::{Exponentials, Gradients};
use super::statistics::Statistics;

crate::compiled::passes! {
    /// Each pass over logits `E`.
    pub(super) struct Passes {
        statistics: Statistics,
        gradient: Gradient,
        exponentials: Exponentials,
        gradients: Gradients,
    }
}
