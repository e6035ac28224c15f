//! Where inputs come from: rows of generated ones, and files.

pub mod file;

/// The rows, counted over `[batch, seq_len]`, that tokens are of: all, or those that have a next one to
/// predict.
#[must_use]
pub fn rows(batch: usize, seq_len: usize, predicts_next: bool) -> Vec<u64> {
    let used = seq_len.saturating_sub(usize::from(predicts_next));
    let sequence = |b: usize| (0..used).map(move |s| (b * seq_len + s) as u64);
    (0..batch).flat_map(sequence).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_last_row_of_every_sequence_predicts_nothing() {
        assert_eq!(super::rows(2, 3, true), [0, 1, 3, 4]);
        assert_eq!(super::rows(2, 2, false), [0, 1, 2, 3]);
        assert!(super::rows(2, 1, true).is_empty());
    }
}
