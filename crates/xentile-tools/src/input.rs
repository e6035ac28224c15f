//! What a kernel is run on: made up from a seed, or mapped from a file.

pub mod file;
pub mod linear;
pub mod synthetic;
mod trained;

use std::borrow::Cow;

/// Logits and labels as a language model's loss sees them: `logits[:, :-1, :]` against
/// `input_ids[:, 1:]`, flattened to tokens.
#[derive(Debug)]
pub struct Tokens<'a, E: Clone> {
    /// Vocabulary columns, V.
    pub vocab: usize,
    /// `[T, V]`, `T = batch * (seq_len - 1)`.
    pub logits: Cow<'a, [E]>,
    /// `[T]`.
    pub labels: Vec<i64>,
}

/// The rows, counted over `[batch, seq_len]`, that have a next token to predict.
#[must_use]
pub fn predicting_rows(batch: usize, seq_len: usize) -> Vec<u64> {
    let sequence = |b: usize| (0..seq_len.saturating_sub(1)).map(move |s| (b * seq_len + s) as u64);
    (0..batch).flat_map(sequence).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_last_row_of_every_sequence_predicts_nothing() {
        assert_eq!(super::predicting_rows(2, 3), [0, 1, 3, 4]);
        assert!(super::predicting_rows(2, 1).is_empty());
    }
}
