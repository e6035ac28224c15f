//! LayerNorm: forward, and backward with partial sums of dweight and dbias. How rows are walked is in
//! `norm`.

#[cfg(feature = "operation")]
pub(crate) mod operation;

use xentile::layer_norm::{LayerNorm, NormShape};
use xentile::{Element, Result};

use crate::InOut;
pub use crate::Launch;
use crate::norm::{Centred, Centring, Norm};
pub use crate::norm::{Gradient, PartialSums, Weight};

/// LayerNorm of rows `[T, D]` for one weight.
#[derive(Clone, Copy)]
pub struct Kernel<'a>(Norm<'a>);

/// What the forward pass gives of rows beside their norm, and the backward pass takes: each `[T]`.
#[derive(Clone, Copy, Debug)]
pub struct Statistics<T> {
    /// The means.
    pub mean: T,
    /// One over each standard deviation.
    pub rstd: T,
}

impl<'a> Kernel<'a> {
    /// A kernel for rows of `shape` and a `weight` `[D]`, or `[G, D]`, of which each is for T / G
    /// rows that follow one another.
    ///
    /// # Errors
    /// An option outside its range, or a weight of another shape.
    pub fn new(
        options: LayerNorm,
        shape: NormShape,
        weight: impl Into<Weight<'a>>,
        launch: Launch<'a>,
    ) -> Result<Self> {
        options.validate()?;
        Ok(Self(Norm::new(options.eps, false, shape, weight.into(), launch)?))
    }

    /// Writes the norm of `x` `[T, D]` to y, its output, and its statistics. A `bias` is `[D]`, or
    /// `[G, D]` as the weight may be, and of any dtype.
    ///
    /// # Errors
    /// An argument of another shape.
    pub fn forward<E: Element>(
        &self,
        x: InOut<'_, E>,
        bias: Option<Weight<'_>>,
        into: Statistics<&mut [f32]>,
    ) -> Result<()> {
        let Statistics { mean, rstd } = into;
        self.0.forward(x, None, Some(Centring { bias, mean }), rstd)
    }

    /// Writes the gradient of x to dx, from statistics as the forward pass gave them and dy; partial sums
    /// of dweight, and of dbias to `dbias`, which is cut as they are.
    ///
    /// # Errors
    /// An argument of another shape.
    pub fn backward<E: Element>(
        &self,
        gradient: Gradient<'_, E>,
        of_rows: Statistics<&[f32]>,
        dweight: PartialSums<'_>,
        dbias: &mut [f32],
    ) -> Result<()> {
        let Statistics { mean, rstd } = of_rows;
        self.0.backward(gradient, Some(Centred { mean, sums: dbias }), rstd, None, dweight)
    }
}
