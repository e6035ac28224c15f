//! Products of matrices of f32, by the crate `matrixmultiply`: one thread, blocked for the caches,
//! with kernels for AVX-512, AVX2 and NEON. Each sum is taken in the same order whatever rows and
//! columns are asked for beside it.

/// A matrix to multiply: a slice with steps from row to row and from column to column.
#[derive(Clone, Copy)]
pub(super) struct Factor<'a> {
    data: &'a [f32],
    rows: usize,
    columns: usize,
    row_step: usize,
    column_step: usize,
}

impl<'a> Factor<'a> {
    /// A matrix of rows of `columns` elements, one after another.
    pub(super) fn new(data: &'a [f32], columns: usize) -> Self {
        let rows = data.len() / columns;
        assert_eq!(data.len(), rows * columns);
        Self { data, rows, columns, row_step: columns, column_step: 1 }
    }

    /// The matrix with rows for columns.
    pub(super) fn transposed(self) -> Self {
        let Self { data, rows, columns, row_step, column_step } = self;
        Self { data, rows: columns, columns: rows, row_step: column_step, column_step: row_step }
    }

    /// Some of the rows.
    pub(super) fn rows(self, first: usize, count: usize) -> Self {
        assert!(first <= self.rows && count <= self.rows - first);
        let start = (first * self.row_step).min(self.data.len());
        Self { data: &self.data[start..], rows: count, ..self }
    }

    /// The number of columns.
    pub(super) fn columns(&self) -> usize {
        self.columns
    }

    /// Row number `row` of a matrix that is not transposed.
    pub(super) fn row(&self, row: usize) -> &'a [f32] {
        assert_eq!(self.column_step, 1);
        &self.data[row * self.row_step..][..self.columns]
    }

    /// Whether every element lies in the slice.
    fn is_whole(&self) -> bool {
        let last = |extent: usize, step: usize| (extent - 1) * step;
        self.rows == 0
            || self.columns == 0
            || last(self.rows, self.row_step) + last(self.columns, self.column_step)
                < self.data.len()
    }
}

/// Sets `to`, row after row, to `a x b`, or adds that to it.
pub(super) fn multiply(a: Factor, b: Factor, add: bool, to: &mut [f32]) {
    assert!(a.is_whole() && b.is_whole());
    assert!(a.columns == b.rows && to.len() == a.rows * b.columns);
    let step = |step: usize| step as isize; // of a slice, so that it fits
    // SAFETY: the assertions say that each element of the three lies in its slice, and those of
    // `to`, which nobody else has, are one after another.
    unsafe {
        matrixmultiply::sgemm(
            a.rows,
            a.columns,
            b.columns,
            1.0,
            a.data.as_ptr(),
            step(a.row_step),
            step(a.column_step),
            b.data.as_ptr(),
            step(b.row_step),
            step(b.column_step),
            if add { 1.0 } else { 0.0 },
            to.as_mut_ptr(),
            step(b.columns),
            1,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_of_pieces() {
        // 3 x 2 and 2 x 4.
        let (a, b) = ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [1.0, 0.0, 2.0, 1.0, 0.0, 1.0, 1.0, 3.0]);
        let (a, b) = (Factor::new(&a, 2), Factor::new(&b, 4));
        let mut to = [f32::NAN; 8];
        multiply(a.rows(1, 2), b, false, &mut to);
        assert_eq!(to, [3.0, 4.0, 10.0, 15.0, 5.0, 6.0, 16.0, 23.0]);
        multiply(a.rows(1, 2), b, true, &mut to);
        assert_eq!(to[7], 46.0);
        let mut to = [f32::NAN; 3];
        multiply(b.transposed().rows(3, 1), a.transposed(), false, &mut to);
        assert_eq!(to, [7.0, 15.0, 23.0]);
        // A sum over nothing.
        multiply(Factor::new(&[], 3).transposed(), Factor::new(&[], 1), false, &mut to);
        assert_eq!(to, [0.0; 3]);
    }
}
