//! The weight as kernels read it: in f32, in the order that chunks of rows have in registers.

use half::{bf16, f16};
use xentile::Element;
use xentile::norm::NormShape;

use super::{Kernel, ragged};
use crate::Job;
use crate::parallel::Shared;
use crate::simd::{MAX_CHUNK, Simd};

crate::compiled::passes! {
    /// The pass over a weight of `E`.
    struct Passes { arrange: Arrange }
}

/// A weight of any dtype.
#[derive(Clone, Copy, Debug)]
pub enum Weight<'a> {
    /// In f32.
    F32(&'a [f32]),
    /// In bf16.
    Bf16(&'a [bf16]),
    /// In f16.
    F16(&'a [f16]),
}

impl Weight<'_> {
    /// The number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::F32(weight) => weight.len(),
            Self::Bf16(weight) => weight.len(),
            Self::F16(weight) => weight.len(),
        }
    }

    /// Whether there is no element.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl<'a> From<&'a [f32]> for Weight<'a> {
    fn from(weight: &'a [f32]) -> Self {
        Self::F32(weight)
    }
}

impl<'a> From<&'a [bf16]> for Weight<'a> {
    fn from(weight: &'a [bf16]) -> Self {
        Self::Bf16(weight)
    }
}

impl<'a> From<&'a [f16]> for Weight<'a> {
    fn from(weight: &'a [f16]) -> Self {
        Self::F16(weight)
    }
}

/// The factors that weights `[G, D]` stand for, each `[D]` filled up to whole chunks.
pub(crate) struct Arranged {
    factors: Vec<f32>,
    /// Elements of one weight.
    padded: usize,
    /// Rows that a weight is for.
    rows: usize,
}

impl Arranged {
    /// The factors of `weight` for rows of `E` of a kernel.
    pub(super) fn new<E: Element>(
        kernel: &Kernel<'_>,
        weight: Weight<'_>,
        zero_centred: bool,
    ) -> Self {
        let (shape, isa) = (kernel.shape, kernel.launch.isa);
        let columns = shape.columns();
        let (count, padded) = (weight.len() / columns, columns.next_multiple_of(MAX_CHUNK));
        let mut factors = vec![0.0; count * padded];
        let to = Shared::new(&mut factors);
        let arrange = |index: usize| {
            let pass = Arrange {
                weight,
                start: index * columns,
                zero_centred,
                columns,
                // SAFETY: each index comes once, so pieces are disjoint.
                to: unsafe { to.slice(index * padded, padded) },
                row_dtype: std::marker::PhantomData::<E>,
            };
            (Passes::get().arrange)(isa, pass);
        };
        match count {
            1 => arrange(0),
            _ => kernel.launch.pool.run(count, &arrange),
        }
        Self { factors, padded, rows: shape.rows().checked_div(count).unwrap_or(0) }
    }

    /// Zeros for all rows.
    pub(super) fn zeros(shape: NormShape) -> Self {
        let padded = shape.columns().next_multiple_of(MAX_CHUNK);
        Self { factors: vec![0.0; padded], padded, rows: shape.rows() }
    }

    /// The first row after `row` with another weight.
    #[inline(always)]
    pub(super) fn end(&self, row: usize) -> usize {
        (row / self.rows + 1) * self.rows
    }

    /// The factors of `row`.
    #[inline(always)]
    pub(super) fn of(&self, row: usize) -> &[f32] {
        &self.factors[row / self.rows * self.padded..][..self.padded]
    }
}

/// Where elements of a chunk of `E` come to lie in its two vectors: lane by lane, which element.
#[inline(always)]
pub(super) fn order<S: Simd, E: Element>(s: S) -> [usize; MAX_CHUNK] {
    let numbers: [E; MAX_CHUNK] = std::array::from_fn(|index| E::from_f32(index as f32));
    // SAFETY: the array holds the largest chunk there is.
    let [first, second] = unsafe { s.load(numbers.as_ptr()) };
    let lanes = [s.to_array(first), s.to_array(second)];
    std::array::from_fn(|lane| match lane {
        lane if lane < S::CHUNK => lanes[lane / S::LANES][lane % S::LANES] as usize,
        lane => lane,
    })
}

/// Converts one weight.
pub(crate) struct Arrange<'a, E> {
    weight: Weight<'a>,
    /// The weight's first element among all.
    start: usize,
    zero_centred: bool,
    columns: usize,
    to: &'a mut [f32],
    row_dtype: std::marker::PhantomData<E>,
}

impl<E: Element> Job for Arrange<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let range = self.start..self.start + self.columns;
        match self.weight {
            Weight::F32(weight) => self.convert(s, &weight[range]),
            Weight::Bf16(weight) => self.convert(s, &weight[range]),
            Weight::F16(weight) => self.convert(s, &weight[range]),
        }
    }
}

impl<E: Element> Arrange<'_, E> {
    #[inline(always)]
    fn convert<S: Simd, W: Element>(self, s: S, weight: &[W]) {
        let (weight_order, row_order) = (order::<S, W>(s), order::<S, E>(s));
        let mut lane_of = [0; MAX_CHUNK];
        for (lane, element) in weight_order.into_iter().enumerate() {
            lane_of[element] = lane;
        }
        let lanes = row_order.map(|element| lane_of[element]);
        let offset = s.splat(if self.zero_centred { 1.0 } else { 0.0 });
        for (weight, to) in weight.chunks(S::CHUNK).zip(self.to.chunks_exact_mut(S::CHUNK)) {
            // SAFETY: at most a chunk.
            let mut chunk =
                unsafe { ragged::load::<S, W, false>(s, weight.as_ptr(), weight.len()) };
            if self.zero_centred {
                chunk = [s.add(chunk[0], offset), s.add(chunk[1], offset)];
            }
            let mut converted = [0.0_f32; MAX_CHUNK];
            // SAFETY: the array holds the largest chunk there is.
            unsafe { s.store(chunk, converted.as_mut_ptr()) };
            if weight_order == row_order {
                to.copy_from_slice(&converted[..S::CHUNK]);
            } else {
                to.iter_mut().zip(lanes).for_each(|(to, lane)| *to = converted[lane]);
            }
        }
    }
}

/// Writes sums in the order of chunks of `E` to `to`, in the order of columns.
#[inline(always)]
pub(super) fn in_columns<S: Simd, E: Element>(s: S, sums: &[f32], to: &mut [f32]) {
    let order = order::<S, E>(s);
    for (sums, to) in sums.chunks_exact(S::CHUNK).zip(to.chunks_mut(S::CHUNK)) {
        for (&sum, column) in sums.iter().zip(order) {
            to.get_mut(column).into_iter().for_each(|to| *to = sum);
        }
    }
}

const _: () = assert!(MAX_CHUNK.is_power_of_two(), "whole chunks of any instruction set fill it");
