//! The passes over rows. Those of rows that are centred are functions of their own, so that the others are
//! what they would be without.

use super::backward::Backward;
use super::forward::Forward;

type Plain<'a, E> = Forward<'a, E, false>;
type Centred<'a, E> = Forward<'a, E, true>;
type PlainBackward<'a, E> = Backward<'a, E, false>;
type CentredBackward<'a, E> = Backward<'a, E, true>;

crate::compiled::passes! {
    /// Each pass over rows of `E`.
    pub(super) struct Passes {
        forward: Plain,
        centred_forward: Centred,
        backward: PlainBackward,
        centred_backward: CentredBackward,
    }
}
