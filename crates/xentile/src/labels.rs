//! Labels of either integer width, read without a copy.

/// The labels of `[T]` tokens.
#[derive(Clone, Copy, Debug)]
pub enum Labels<'a> {
    /// 32-bit labels.
    I32(&'a [i32]),
    /// 64-bit labels.
    I64(&'a [i64]),
}

impl Labels<'_> {
    /// The number of labels.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::I32(labels) => labels.len(),
            Self::I64(labels) => labels.len(),
        }
    }

    /// Whether there is no label.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The label of `token`.
    ///
    /// # Panics
    /// `token` is not below [`Self::len`].
    #[must_use]
    #[inline]
    pub fn get(&self, token: usize) -> i64 {
        match self {
            Self::I32(labels) => i64::from(labels[token]),
            Self::I64(labels) => labels[token],
        }
    }

    /// Every label in order.
    pub fn iter(&self) -> impl Iterator<Item = i64> + '_ {
        (0..self.len()).map(|token| self.get(token))
    }
}

impl<'a> From<&'a [i32]> for Labels<'a> {
    fn from(labels: &'a [i32]) -> Self {
        Self::I32(labels)
    }
}

impl<'a> From<&'a [i64]> for Labels<'a> {
    fn from(labels: &'a [i64]) -> Self {
        Self::I64(labels)
    }
}
