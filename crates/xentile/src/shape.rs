//! The shape of a loss over a vocabulary.

use crate::error::check_length;
use crate::{Error, Result};

/// Whether memory can address as many bytes as the product of `factors`, multiplied in their order.
pub(crate) fn is_addressable<const N: usize>(factors: [usize; N]) -> bool {
    let bytes = factors.into_iter().try_fold(1, usize::checked_mul);
    bytes.is_some_and(|bytes| isize::try_from(bytes).is_ok())
}

/// The shape `[T, V]` of logits: tokens (batch x time, flattened) by vocabulary columns, row major.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogitsShape {
    tokens: usize,
    vocab: usize,
}

impl LogitsShape {
    /// A shape of `tokens` rows and `vocab` columns. No token at all is a valid (empty) problem.
    ///
    /// # Errors
    /// A vocabulary of 0, or more elements than memory can address.
    pub fn new(tokens: usize, vocab: usize) -> Result<Self> {
        let wrong = |requirement| Err(Error::Shape { tokens, vocab, requirement });
        if vocab == 0 {
            return wrong("the vocabulary must have at least 1 column");
        }
        // Four bytes is the widest element.
        if !is_addressable([tokens, vocab, 4]) {
            return wrong("tokens x vocab must fit the address space");
        }
        Ok(Self { tokens, vocab })
    }

    /// T, the number of rows.
    #[must_use]
    pub fn tokens(self) -> usize {
        self.tokens
    }

    /// V, the number of columns.
    #[must_use]
    pub fn vocab(self) -> usize {
        self.vocab
    }

    /// T x V.
    #[must_use]
    pub fn elements(self) -> usize {
        self.tokens * self.vocab
    }

    /// Checks the length of a `[T, V]` buffer called `name`.
    ///
    /// # Errors
    /// The length is not T x V.
    pub fn check_matrix(self, name: &'static str, length: usize) -> Result<()> {
        check_length(name, length, "[T, V]", self.elements())
    }

    /// Checks the length of a `[T]` buffer called `name`.
    ///
    /// # Errors
    /// The length is not T.
    pub fn check_tokens(self, name: &'static str, length: usize) -> Result<()> {
        check_length(name, length, "[T]", self.tokens)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_what_cannot_be_addressed() {
        assert!(LogitsShape::new(3, 0).is_err());
        assert!(LogitsShape::new(usize::MAX / 8, 3).is_err());
        assert_eq!(LogitsShape::new(0, 7).unwrap().elements(), 0);
        let message = LogitsShape::new(2, 5).unwrap().check_matrix("logits", 9).unwrap_err();
        assert_eq!(message.to_string(), "logits holds 9 elements; [T, V] needs 10");
    }
}
