//! How a problem is split into blocks of columns, and what lies where in the scratch.

use std::ops::Range;

use xentile::linear_cross_entropy::{LinearShape, VocabAxis};
use xentile::{DType, Error, Result};

use crate::product::Panels;

/// Where what stands for the logits of a column block waits for their gradient, counted in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kept {
    /// In the memory of dweight, which is written later.
    InWeight(usize),
    /// In the scratch.
    InScratch(usize),
}

/// Some columns of all tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ColumnBlock {
    pub(super) columns: Range<usize>,
    pub(super) kept: Option<Kept>,
}

/// The fewest columns of a block that is kept in 16 bits, if there are more: shifts take too much
/// beside fewer.
const FEWEST_KEPT: usize = 16;

/// Whether blocks of `columns` columns are kept, where there is room.
pub(super) fn keeps(shape: LinearShape, dtype: DType, columns: usize) -> bool {
    dtype == DType::F32 || columns >= FEWEST_KEPT.min(shape.vocab())
}

/// Blocks of at most `columns` columns, none of them kept.
pub(super) fn column_blocks(shape: LinearShape, columns: usize) -> Vec<ColumnBlock> {
    pieces(0..shape.vocab(), columns).collect()
}

/// Column blocks, and where their logits are saved: in the memory of dweight `[V, D]`, in `room` elements
/// of the scratch, or nowhere.
///
/// In the memory of dweight a column block is saved where its own gradient goes. With more tokens than
/// hidden columns it takes the place of the next columns too, whose logits are saved in the scratch or
/// recomputed. Gradients are written in the order of columns, so that nothing is overwritten before it
/// is read.
pub(super) fn keeping(shape: LinearShape, columns: usize, room: usize) -> Vec<ColumnBlock> {
    let ([tokens, width], vocab) = (shape.hidden(), shape.vocab());
    let mut found = Vec::new();
    let mut start = 0;
    while start < vocab {
        let left = vocab - start;
        let in_place = match shape.vocab_axis() {
            VocabAxis::First => columns.min(left).min(left * width / tokens.max(1)),
            VocabAxis::Last => 0,
        };
        if in_place == 0 {
            found.extend(pieces(start..vocab, columns));
            break;
        }
        let taken = (in_place * tokens).div_ceil(width).max(in_place);
        let kept = Some(Kept::InWeight(start * width));
        found.push(ColumnBlock { columns: start..start + in_place, kept });
        found.extend(pieces(start + in_place..start + taken, columns));
        start += taken;
    }
    let mut next = 0;
    for block in &mut found {
        let elements = block.columns.len() * tokens;
        if block.kept.is_none() && next + elements <= room {
            block.kept = Some(Kept::InScratch(next));
            next += elements;
        }
    }
    found
}

fn pieces(columns: Range<usize>, most: usize) -> impl Iterator<Item = ColumnBlock> {
    let end = columns.end;
    columns
        .step_by(most)
        .map(move |start| ColumnBlock { columns: start..end.min(start + most), kept: None })
}

/// Lengths in f32 of what lies in the scratch, one after the other.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    /// Panels of hidden states, which the weight's gradient is a product of.
    pub(super) hidden: usize,
    /// Panels of a column block of the weight, and later its gradient.
    pub(super) weight: usize,
    /// Logits.
    pub(super) logits: usize,
    /// Sums of the gradient of hidden states; nothing where these are f32.
    pub(super) dhidden: usize,
    /// What is known of a token beside the softmax that is kept: its label's logit, and its shift in
    /// each column block. Nothing where logits are kept themselves.
    pub(super) shifts: usize,
}

impl Layout {
    pub(super) fn new(
        shape: LinearShape,
        dtype: DType,
        columns: usize,
        makes_gradients: bool,
    ) -> Self {
        let ([tokens, width], columns) = (shape.hidden(), columns.min(shape.vocab()));
        let for_logits = Panels::most_words(width, columns);
        let logits = tokens * columns;
        if !makes_gradients {
            return Self { hidden: 0, weight: for_logits, logits, dhidden: 0, shifts: 0 };
        }
        let is_f32 = dtype == DType::F32;
        let shifts = match is_f32 || !keeps(shape, dtype, columns) {
            true => 0,
            false => tokens * (keeping(shape, columns, 0).len() + 1),
        };
        Self {
            hidden: Panels::most_words(tokens, width),
            weight: for_logits.max(Panels::most_words(columns, width)),
            logits,
            dhidden: if is_f32 { 0 } else { tokens * width },
            shifts,
        }
    }

    pub(super) fn bytes(self) -> usize {
        let Self { hidden, weight, logits, dhidden, shifts } = self;
        // Scratch that begins within an f32 loses the rest of that.
        (hidden + weight + logits + dhidden + shifts + 1) * size_of::<f32>()
    }

    /// Checks that `actual` bytes are enough.
    pub(super) fn check(self, actual: usize) -> Result<()> {
        match self.bytes() {
            expected if actual < expected => {
                Err(Error::Length { name: "scratch", actual, axes: "[bytes]", expected })
            }
            _ => Ok(()),
        }
    }

    /// The pieces of `scratch`, and what is left of it.
    pub(super) fn split(self, scratch: &mut [u8]) -> Result<([&mut [f32]; 5], &mut [u8])> {
        self.check(scratch.len())?;
        let offset = scratch.as_ptr().align_offset(align_of::<f32>());
        let (mut rest, kept) = scratch[offset..].split_at_mut(self.bytes() - size_of::<f32>());
        let lengths = [self.hidden, self.weight, self.logits, self.dhidden, self.shifts];
        let pieces = lengths.map(|length| {
            let (piece, others) = std::mem::take(&mut rest).split_at_mut(length * size_of::<f32>());
            rest = others;
            numbers::<f32>(piece)
        });
        Ok((pieces, kept))
    }
}

/// The numbers that fit into memory, of a type that any bits are a value of.
pub(super) fn numbers<T: xentile::Element>(bytes: &mut [u8]) -> &mut [T] {
    // SAFETY: f32, bf16 and f16 take any bits.
    unsafe { bytes.align_to_mut::<T>() }.1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(tokens: usize, width: usize, weight: [usize; 2]) -> LinearShape {
        LinearShape::new([tokens, width], weight, None).unwrap()
    }

    /// Walks gradients in order and sees that no logits are written over before they are read.
    fn check(shape: LinearShape, columns: usize, room: usize) {
        let column_blocks = keeping(shape, columns, room);
        let (tokens, width) = (shape.tokens(), shape.width());
        let mut next = 0;
        let mut in_scratch = 0;
        let mut in_weight = 0;
        for block in &column_blocks {
            assert_eq!(block.columns.start, next);
            assert!(!block.columns.is_empty() && block.columns.len() <= columns);
            let elements = block.columns.len() * tokens;
            match block.kept {
                Some(Kept::InWeight(first)) => {
                    assert!(first >= next * width && first >= in_weight);
                    in_weight = first + elements;
                    assert!(in_weight <= shape.vocab() * width);
                }
                Some(Kept::InScratch(first)) => {
                    assert_eq!(first, in_scratch);
                    in_scratch += elements;
                    assert!(in_scratch <= room);
                }
                None => assert!(in_scratch + elements > room),
            }
            next = block.columns.end;
        }
        assert_eq!(next, shape.vocab());
        let plain = super::column_blocks(shape, columns);
        assert_eq!(plain.last().unwrap().columns.end, next);
    }

    #[test]
    #[cfg_attr(miri, ignore = "takes minutes when it is interpreted, and has nothing unsafe")]
    fn logits_are_read_before_gradients_take_their_place() {
        for (tokens, width) in [(1, 1), (7, 9), (9, 7), (100, 3), (3, 100), (0, 5), (64, 64)] {
            for vocab in [2, 5, 31, 1000] {
                for columns in [1, 4, 32, 5000] {
                    for room in [0, 100, 100_000] {
                        if vocab != width {
                            check(shape(tokens, width, [vocab, width]), columns, room);
                            check(shape(tokens, width, [width, vocab]), columns, room);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn columns_beyond_the_gradient_go_to_scratch() {
        let kept = |tokens, room| {
            let column_blocks = keeping(shape(tokens, 6, [24, 6]), 6, room);
            let lengths = |wanted: fn(&ColumnBlock) -> bool| {
                column_blocks
                    .iter()
                    .filter(|block| wanted(block))
                    .map(|block| block.columns.len())
                    .sum()
            };
            let in_weight: usize = lengths(|block| matches!(block.kept, Some(Kept::InWeight(_))));
            let in_scratch: usize = lengths(|block| matches!(block.kept, Some(Kept::InScratch(_))));
            (in_weight, in_scratch)
        };
        assert_eq!(kept(6, 0), (24, 0));
        assert_eq!(kept(8, 0), (18, 0));
        assert_eq!(kept(8, 16), (18, 2));
        assert_eq!(kept(8, 48), (18, 6));
        assert_eq!(kept(24, 0), (6, 0));
    }
}
