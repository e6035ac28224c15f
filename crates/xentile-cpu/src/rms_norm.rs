//! RMSNorm: forward, with a residual or without, and backward with partial sums of dweight. How rows are
//! walked is in `norm`.

#[cfg(feature = "operation")]
pub(crate) mod operation;

use xentile::rms_norm::{NormShape, RmsNorm};
use xentile::{Element, Result};

use crate::InOut;
pub use crate::Launch;
use crate::norm::Norm;
pub use crate::norm::{Gradient, PartialSums, Weight};

/// RMSNorm of rows `[T, D]` for one weight.
#[derive(Clone, Copy)]
pub struct Kernel<'a>(Norm<'a>);

impl<'a> Kernel<'a> {
    /// A kernel for rows of `shape` and a `weight` `[D]`, or `[G, D]`, of which each is for T / G
    /// rows that follow one another.
    ///
    /// # Errors
    /// An option outside its range, or a weight of another shape.
    pub fn new(
        options: RmsNorm,
        shape: NormShape,
        weight: impl Into<Weight<'a>>,
        launch: Launch<'a>,
    ) -> Result<Self> {
        options.validate()?;
        let RmsNorm { eps, zero_centred } = options;
        Ok(Self(Norm::new(eps, zero_centred, shape, weight.into(), launch)?))
    }

    /// Writes the norm of `x` `[T, D]` to y, its output, and `rstd` `[T]`.
    ///
    /// # Errors
    /// An argument of another shape.
    pub fn forward<E: Element>(&self, x: InOut<'_, E>, rstd: &mut [f32]) -> Result<()> {
        self.0.forward(x, None, None, rstd)
    }

    /// Writes `x` + `residual`, each `[T, D]`, to the output of `residual`, the norm of that sum to
    /// the output of `x`, and `rstd` `[T]`.
    ///
    /// # Errors
    /// An argument of another shape.
    pub fn add_forward<E: Element>(
        &self,
        x: InOut<'_, E>,
        residual: InOut<'_, E>,
        rstd: &mut [f32],
    ) -> Result<()> {
        self.0.forward(x, Some(residual), None, rstd)
    }

    /// Writes the gradient of what was normalised to dx, from `rstd` `[T]` as the forward pass gave it
    /// and dy, and partial sums of dweight. With `dsum` `[T, D]`, the cotangent of a sum with a
    /// residual, which is what was normalised then, dx is the gradient of both of its terms.
    ///
    /// # Errors
    /// An argument of another shape.
    pub fn backward<E: Element>(
        &self,
        gradient: Gradient<'_, E>,
        rstd: &[f32],
        dsum: Option<&[E]>,
        partial: PartialSums<'_>,
    ) -> Result<()> {
        self.0.backward(gradient, None, rstd, dsum, partial)
    }
}
