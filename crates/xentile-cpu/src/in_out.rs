//! What a kernel reads and what it writes, which may be the same memory.

/// An array to read and one of the same length to write.
#[derive(Debug)]
pub enum InOut<'a, E> {
    /// In memory of their own.
    Apart {
        /// What is read.
        input: &'a [E],
        /// What is written.
        output: &'a mut [E],
    },
    /// In the same memory: what is written replaces what is read.
    InPlace(&'a mut [E]),
}

impl<'a, E> InOut<'a, E> {
    /// `input` and `output` in memory of their own.
    pub fn apart(input: &'a [E], output: &'a mut [E]) -> Self {
        Self::Apart { input, output }
    }

    /// Elements read and elements written.
    pub(crate) fn lengths(&self) -> (usize, usize) {
        match self {
            Self::Apart { input, output } => (input.len(), output.len()),
            Self::InPlace(both) => (both.len(), both.len()),
        }
    }

    /// Where to read and where to write.
    pub(crate) fn into_pointers(self) -> (*const E, *mut E) {
        match self {
            Self::Apart { input, output } => (input.as_ptr(), output.as_mut_ptr()),
            Self::InPlace(both) => {
                let both = both.as_mut_ptr();
                (both, both)
            }
        }
    }
}
