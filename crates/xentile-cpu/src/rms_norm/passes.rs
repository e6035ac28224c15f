//! The passes over rows.

use super::backward::Backward;
use super::forward::Forward;

crate::compiled::passes! {
    /// Each pass over rows of `E`.
    pub(super) struct Passes { forward: Forward, backward: Backward }
}
