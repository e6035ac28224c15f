//! A buffer as a call frame has it: its type, extents and address, checked for what they say.

use std::{fmt, ops::Range};

use crate::{DType, Element, Error, Result, abi, pointers::list};

/// As `RANK` of a buffer: any number of axes.
pub const ANY_RANK: usize = usize::MAX;

/// Where a buffer stands in the call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Position {
    pub(crate) result: bool,
    pub(crate) index: usize,
    /// Empty for one that is looked at beside the handler's parameters.
    pub(crate) name: &'static str,
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { result, index, name } = self;
        write!(f, "{} {index}", if *result { "result" } else { "argument" })?;
        if name.is_empty() { Ok(()) } else { write!(f, " (`{name}`)") }
    }
}

/// A checked buffer of any type, whose memory nothing has touched yet.
#[derive(Clone, Copy, Debug)]
pub struct Raw<'a> {
    pub(crate) position: Position,
    pub(crate) dtype: DType,
    pub(crate) data: *mut u8,
    pub(crate) dims: &'a [usize],
    pub(crate) elements: usize,
}

impl<'a> Raw<'a> {
    /// # Safety
    /// `dims` is null, misaligned, or leads to `rank` extents alive for `'a`.
    pub(crate) unsafe fn new(position: Position, buffer: &abi::Buffer) -> Result<Self> {
        let abi::Buffer { dtype, data, rank, dims, .. } = *buffer;
        let dtype = DType::from_u32(dtype).ok_or_else(|| {
            Error::invalid_argument(format!("{position} has dtype {dtype}, which is unknown here"))
        })?;
        // SAFETY: passed on from this function's contract.
        let dims = unsafe { list(dims, rank, format_args!("dimensions of {position}")) }?;
        if dims.iter().any(|&extent| extent < 0) {
            return Err(Error::invalid_argument(format!(
                "{position} has shape {dims:?}; no extent may be below 0"
            )));
        }
        // SAFETY: none is negative, and the two types have one layout where pointers have 64 bits.
        let dims: &[usize] =
            unsafe { std::slice::from_raw_parts(dims.as_ptr().cast(), dims.len()) };
        let elements = if dims.contains(&0) {
            0
        } else {
            dims.iter()
                .try_fold(1_usize, |product, &extent| product.checked_mul(extent))
                .filter(|&elements| elements <= isize::MAX as usize / dtype.size().max(1))
                .ok_or_else(|| {
                    Error::invalid_argument(format!(
                        "{position} has shape {dims:?} of {dtype}, more than memory holds"
                    ))
                })?
        };
        let data = data.cast::<u8>();
        if data.is_null() && elements * dtype.size() > 0 {
            return Err(Error::invalid_argument(format!(
                "the data of {position} is null, and its shape is {dims:?}"
            )));
        }
        Ok(Self { position, dtype, data, dims, elements })
    }

    /// The addresses that the buffer covers.
    pub(crate) fn range(&self) -> Range<usize> {
        let start = self.data.addr();
        start..start.saturating_add(self.elements * self.dtype.size())
    }

    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        let (a, b) = (self.range(), other.range());
        !a.is_empty() && !b.is_empty() && a.start < b.end && b.start < a.end
    }

    /// Checks type, rank and alignment.
    pub(crate) fn check<T: Element, const RANK: usize>(&self) -> Result {
        let Self { position, dtype, data, dims, elements } = self;
        if *dtype != T::DTYPE {
            return Err(Error::invalid_argument(format!(
                "{position} has dtype {dtype}; it must be {}",
                T::DTYPE
            )));
        }
        if RANK != ANY_RANK && dims.len() != RANK {
            return Err(Error::invalid_argument(format!(
                "{position} has shape {dims:?}, of rank {}; its rank must be {RANK}",
                dims.len()
            )));
        }
        if *elements > 0 && !data.cast::<T>().is_aligned() {
            return Err(Error::invalid_argument(format!(
                "the data of {position} is at {data:p}, which is no multiple of {}",
                align_of::<T>()
            )));
        }
        Ok(())
    }

    /// The error for memory that result `index` has too.
    pub(crate) fn must_be_apart(&self, index: usize) -> Error {
        Error::invalid_argument(format!(
            "{} shares memory with result {index}; the handler needs them apart",
            self.position
        ))
    }

    /// # Safety
    /// The memory is the host's, is not written during `'a`, and the type was checked.
    pub(crate) unsafe fn slice<T>(&self) -> &'a [T] {
        if self.elements == 0 {
            return &[];
        }
        // SAFETY: `new` checked null and extent, `check` type and alignment.
        unsafe { std::slice::from_raw_parts(self.data.cast(), self.elements) }
    }

    /// # Safety
    /// The memory is the host's, nothing else touches it during `'a`, and the type was checked.
    pub(crate) unsafe fn slice_mut<T>(&self) -> &'a mut [T] {
        if self.elements == 0 {
            return &mut [];
        }
        // SAFETY: `new` checked null and extent, `check` type and alignment.
        unsafe { std::slice::from_raw_parts_mut(self.data.cast(), self.elements) }
    }
}
