//! Blocks of rows, tiles of keys, and what of these sees what.

use std::ops::Range;

use xentile::Element;

use super::Kernel;
use crate::Isa;
use crate::convert::widen;
use crate::product::{Matrix, Panels, TERMS_STEP};

/// Rows of a block: whole strips of products, and whole tiles of them.
pub(super) const ROWS: usize = 96;

/// Keys of a tile, likewise.
pub(super) const KEYS: usize = 192;

/// Keys of a tile that are taken or left out together, where there are as many: a panel.
const KEYS_STEP: usize = 64;

/// What the rows of a head of keys see.
pub(super) struct HeadView<'a> {
    /// The keys of each query.
    pub(super) ranges: Vec<Range<usize>>,
    /// Segments of queries and keys.
    pub(super) segments: Option<[&'a [i32]; 2]>,
    /// Keys from the first to the last that any query sees.
    pub(super) seen: Range<usize>,
}

/// Rows of a head that follow one another, and what they see.
#[derive(Clone, Debug)]
pub(super) struct Block {
    pub(super) rows: Range<usize>,
    /// Keys from the first to the last that one of them sees.
    seen: Range<usize>,
    /// The least and the largest segment.
    segments: [i32; 2],
    /// Whether a row sees nothing.
    pub(super) has_blind: bool,
}

/// Keys that follow one another.
#[derive(Clone, Debug)]
pub(super) struct Tile {
    pub(super) keys: Range<usize>,
    segments: [i32; 2],
}

fn extremes(of: &[i32]) -> [i32; 2] {
    [of.iter().copied().min().unwrap_or(0), of.iter().copied().max().unwrap_or(0)]
}

/// The least range that has both.
fn hull(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    match (a.is_empty(), b.is_empty()) {
        (true, _) => b.clone(),
        (_, true) => a.clone(),
        _ => a.start.min(b.start)..a.end.max(b.end),
    }
}

impl<'a> HeadView<'a> {
    /// What queries of head `head` of keys see.
    pub(super) fn new(kernel: &Kernel<'a>, head: usize) -> Self {
        let (queries, keys) = (kernel.shape.queries, kernel.shape.keys);
        let (pairs, _) =
            kernel.visible.ranges[head * queries * 2..][..queries * 2].as_chunks::<2>();
        let within = |at: i32| usize::try_from(at).unwrap_or(0).min(keys);
        let ranges: Vec<_> = pairs
            .iter()
            .map(|&[first, end]| within(first)..within(end))
            .map(|range| if range.is_empty() { 0..0 } else { range })
            .collect();
        let segments = kernel.visible.segments.map(|[of_queries, of_keys]| {
            [&of_queries[head * queries..][..queries], &of_keys[head * keys..][..keys]]
        });
        let seen = ranges.iter().fold(0..0, |all, range| hull(&all, range));
        Self { ranges, segments, seen }
    }

    /// The query that a row is of.
    pub(super) fn query(&self, row: usize) -> usize {
        row % self.ranges.len()
    }

    /// The keys of a row.
    pub(super) fn keys(&self, row: usize) -> &Range<usize> {
        &self.ranges[self.query(row)]
    }

    /// The block of these rows, at most [`ROWS`].
    pub(super) fn block(&self, rows: Range<usize>) -> Block {
        let seen = rows.clone().fold(0..0, |all, row| hull(&all, self.keys(row)));
        let has_blind = rows.clone().any(|row| self.keys(row).is_empty());
        let segments = self.segments.map_or([0; 2], |[of_queries, _]| {
            let all: Vec<_> = rows.clone().map(|row| of_queries[self.query(row)]).collect();
            extremes(&all)
        });
        Block { rows, seen, segments, has_blind }
    }

    /// The blocks of some rows.
    pub(super) fn blocks(&self, rows: Range<usize>) -> Vec<Block> {
        let end = rows.end;
        rows.step_by(ROWS).map(|first| self.block(first..end.min(first + ROWS))).collect()
    }

    /// The tiles that have some of `keys` and that a row sees.
    pub(super) fn tiles(&self, keys: &Range<usize>) -> Vec<Tile> {
        let (first, end) = (keys.start.max(self.seen.start), keys.end.min(self.seen.end));
        if first >= end {
            return Vec::new();
        }
        let starts = (first / KEYS * KEYS..end).step_by(KEYS);
        // What lies behind the last key that is seen is not read, and neither is what lies before.
        let cut = |start: usize| start.max(self.seen.start)..(start + KEYS).min(self.seen.end);
        starts
            .map(|start| {
                let keys = start..(start + KEYS).min(self.seen.end);
                let segments =
                    self.segments.map_or([0; 2], |[_, of_keys]| extremes(&of_keys[cut(start)]));
                Tile { keys, segments }
            })
            .collect()
    }

    /// Whether all that rows of `block` see within a tile are of one segment with them.
    pub(super) fn is_uniform(&self, block: &Block, tile: &Tile) -> bool {
        let [a, b] = [block.segments, tile.segments];
        self.segments.is_none() || (a[0] == a[1] && a == b)
    }
}

impl Block {
    /// Whether a row may see a key of `tile`.
    pub(super) fn sees(&self, tile: &Tile) -> bool {
        let [a, b] = [self.segments, tile.segments];
        self.seen.start < tile.keys.end
            && tile.keys.start < self.seen.end
            && a[0] <= b[1]
            && b[0] <= a[1]
    }

    /// How many keys of `tile` are taken: all up to the last that is seen, in whole steps.
    pub(super) fn columns(&self, tile: &Tile) -> usize {
        let last = self.seen.end.min(tile.keys.end) - tile.keys.start;
        last.next_multiple_of(KEYS_STEP).min(tile.padded())
    }
}

impl Tile {
    /// Its keys, with zeros behind the last: whole steps of products.
    pub(super) fn padded(&self) -> usize {
        self.keys.len().next_multiple_of(TERMS_STEP)
    }

    /// Which rows of keys or values `[K, width]` of a head are not finite, counted from the tile's
    /// first. None where nobody looks: where all that `blocks` see is of one segment with them.
    pub(super) fn unfit<'b, E: Element>(
        &self,
        isa: Isa,
        view: &HeadView<'_>,
        mut blocks: impl Iterator<Item = &'b Block>,
        all: &[E],
        width: usize,
    ) -> Vec<usize> {
        if blocks.all(|block| !block.sees(self) || view.is_uniform(block, self)) {
            return Vec::new();
        }
        let first = self.keys.start.max(view.seen.start);
        let found = unfit(isa, &all[first * width..self.keys.end * width], width);
        found.into_iter().map(|row| row + first - self.keys.start).collect()
    }

    /// Rows `[padded, width]` of keys or values `[K, width]` of a head; zeros for what no row sees, and
    /// for rows `unfit`.
    pub(super) fn rows<'b, E: Element>(
        &self,
        view: &HeadView<'_>,
        all: &'b [E],
        width: usize,
        unfit: &[usize],
        memory: &'b mut Vec<E>,
    ) -> Matrix<'b, E> {
        let Range { start, end } = self.keys;
        let first = start.max(view.seen.start);
        if start == first && self.padded() == self.keys.len() && unfit.is_empty() {
            return Matrix::new(&all[start * width..end * width], width);
        }
        memory.clear();
        memory.resize(self.padded() * width, E::from_f32(0.0));
        let place = (first - start) * width;
        memory[place..(end - start) * width].copy_from_slice(&all[first * width..end * width]);
        for row in unfit {
            memory[row * width..][..width].fill(E::from_f32(0.0));
        }
        Matrix::new(memory, width)
    }
}

/// Which rows `[.., width]` hold something that is not finite.
pub(super) fn unfit<E: Element>(isa: Isa, rows: &[E], width: usize) -> Vec<usize> {
    let mut wide = vec![0.0_f32; width];
    let mut is_unfit = |row: &[E]| {
        widen(isa, row, &mut wide);
        // Without a branch, as vectors.
        !wide.iter().fold(true, |all, x| all & x.is_finite())
    };
    let rows = rows.chunks_exact(width).enumerate();
    rows.filter_map(|(index, row)| is_unfit(row).then_some(index)).collect()
}

/// Packs a right factor into `memory`.
pub(super) fn pack<'b, E: Element>(
    isa: Isa,
    matrix: Matrix<'_, E>,
    memory: &'b mut Vec<f32>,
) -> Panels<'b> {
    let [count, length] = Panels::extents::<E>(isa, matrix.extents());
    memory.resize(count * length, 0.0);
    for (panel, to) in memory.chunks_exact_mut(length.max(1)).enumerate() {
        Panels::pack(isa, matrix, panel, to);
    }
    Panels::new::<E>(isa, memory, matrix.extents())
}
