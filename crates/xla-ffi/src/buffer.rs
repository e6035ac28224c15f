//! Arguments and results: arrays that are borrowed for the call.

use std::{
    ffi::c_void,
    fmt,
    marker::PhantomData,
    ops::{Deref, DerefMut, Range},
};

use crate::{
    DType, Element, Error, Result, Stage, abi,
    frame::{Decoder, Frame, list},
    handler::Parameter,
};

/// As `RANK` of a buffer: any number of axes.
pub const ANY_RANK: usize = usize::MAX;

/// Where a buffer stands in the call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) result: bool,
    pub(crate) index: usize,
    /// Empty for one that is looked at beside the handler's parameters.
    pub(crate) name: &'static str,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { result, index, name } = self;
        write!(f, "{} {index}", if *result { "result" } else { "argument" })?;
        if name.is_empty() { Ok(()) } else { write!(f, " (`{name}`)") }
    }
}

/// A checked buffer of any type, whose memory nothing has touched yet.
#[derive(Clone, Copy, Debug)]
pub struct Raw<'a> {
    place: Place,
    dtype: DType,
    data: *mut u8,
    dims: &'a [usize],
    elements: usize,
}

impl<'a> Raw<'a> {
    /// # Safety
    /// `dims` is null, misaligned, or leads to `rank` extents alive for `'a`.
    pub(crate) unsafe fn new(place: Place, buffer: &abi::Buffer) -> Result<Self> {
        let abi::Buffer { dtype, data, rank, dims, .. } = *buffer;
        let dtype = DType::from_u32(dtype).ok_or_else(|| {
            Error::invalid_argument(format!("{place} has dtype {dtype}, which is unknown here"))
        })?;
        // SAFETY: passed on from this function's contract.
        let dims = unsafe { list(dims, rank, format_args!("dimensions of {place}")) }?;
        if dims.iter().any(|&extent| extent < 0) {
            return Err(Error::invalid_argument(format!(
                "{place} has shape {dims:?}; no extent may be below 0"
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
                        "{place} has shape {dims:?} of {dtype}, more than memory holds"
                    ))
                })?
        };
        let data = data.cast::<u8>();
        if data.is_null() && elements * dtype.size() > 0 {
            return Err(Error::invalid_argument(format!(
                "the data of {place} is null, and its shape is {dims:?}"
            )));
        }
        Ok(Self { place, dtype, data, dims, elements })
    }

    /// The addresses that the buffer covers.
    fn range(&self) -> Range<usize> {
        let start = self.data.addr();
        start..start.saturating_add(self.elements * self.dtype.size())
    }

    fn overlaps(&self, other: &Self) -> bool {
        let (a, b) = (self.range(), other.range());
        !a.is_empty() && !b.is_empty() && a.start < b.end && b.start < a.end
    }

    /// Checks type, rank and alignment.
    fn check<T: Element, const RANK: usize>(&self) -> Result {
        let Self { place, dtype, data, dims, elements } = self;
        if *dtype != T::DTYPE {
            return Err(Error::invalid_argument(format!(
                "{place} has dtype {dtype}; it must be {}",
                T::DTYPE
            )));
        }
        if RANK != ANY_RANK && dims.len() != RANK {
            return Err(Error::invalid_argument(format!(
                "{place} has shape {dims:?}, of rank {}; its rank must be {RANK}",
                dims.len()
            )));
        }
        if *elements > 0 && !data.cast::<T>().is_aligned() {
            return Err(Error::invalid_argument(format!(
                "the data of {place} is at {data:p}, which is no multiple of {}",
                align_of::<T>()
            )));
        }
        Ok(())
    }

    /// Checks that the handler may touch the memory: not before `Execute`, and not while a result
    /// lies over it. `tolerate` is the result that may.
    fn check_memory(&self, frame: &Frame<'a>, tolerate: Option<usize>) -> Result {
        let Self { place, .. } = self;
        if frame.stage != Stage::Execute {
            return Err(Error::failed_precondition(format!(
                "{place} has no contents in stage {}; take it as OnDevice",
                frame.stage
            )));
        }
        for index in 0..frame.results() {
            if tolerate == Some(index) || (place.result && place.index == index) {
                continue;
            }
            let result = frame.buffer(Place { result: true, index, name: "" })?;
            if self.overlaps(&result) {
                return Err(self.must_be_apart(index));
            }
        }
        Ok(())
    }

    /// The error for memory that result `index` has too.
    fn must_be_apart(&self, index: usize) -> Error {
        Error::invalid_argument(format!(
            "{} shares memory with result {index}; the handler needs them apart",
            self.place
        ))
    }

    /// The first result that shares memory.
    fn shared_with(&self, frame: &Frame<'a>) -> Result<Option<usize>> {
        for index in 0..frame.results() {
            if self.overlaps(&frame.buffer(Place { result: true, index, name: "" })?) {
                return Ok(Some(index));
            }
        }
        Ok(None)
    }

    /// # Safety
    /// The memory is the host's, is not written during `'a`, and the type was checked.
    unsafe fn slice<T>(&self) -> &'a [T] {
        if self.elements == 0 {
            return &[];
        }
        // SAFETY: `new` checked null and extent, `check` type and alignment.
        unsafe { std::slice::from_raw_parts(self.data.cast(), self.elements) }
    }

    /// # Safety
    /// The memory is the host's, nothing else touches it during `'a`, and the type was checked.
    unsafe fn slice_mut<T>(&self) -> &'a mut [T] {
        if self.elements == 0 {
            return &mut [];
        }
        // SAFETY: `new` checked null and extent, `check` type and alignment.
        unsafe { std::slice::from_raw_parts_mut(self.data.cast(), self.elements) }
    }
}

/// A kind of buffer: a handler takes it as itself, [`OnDevice`], or as [`MayAlias`].
pub trait BufferKind<'a>: Sized + sealed::Sealed {
    /// Whether it is a result, rather than an argument.
    const RESULT: bool;

    /// Checks type and rank.
    #[doc(hidden)]
    fn from_raw(raw: Raw<'a>) -> Result<Self>;

    #[doc(hidden)]
    fn raw(&self) -> &Raw<'a>;
}

mod sealed {
    pub trait Sealed {}
}

/// An argument of `T` in row-major order, in the memory of the host: a slice with a shape.
#[derive(Clone, Copy)]
pub struct Buffer<'a, T, const RANK: usize = ANY_RANK> {
    raw: Raw<'a>,
    contents: PhantomData<&'a [T]>,
}

/// A result of `T` in row-major order, in the memory of the host: a mutable slice with a shape.
///
/// Its values are arbitrary until the handler writes them.
pub struct BufferMut<'a, T, const RANK: usize = ANY_RANK> {
    raw: Raw<'a>,
    contents: PhantomData<&'a mut [T]>,
}

/// An argument whose type is known at run time, in the memory of the host.
#[derive(Clone, Copy)]
pub struct AnyBuffer<'a> {
    raw: Raw<'a>,
}

/// A result whose type is known at run time, in the memory of the host.
pub struct AnyBufferMut<'a> {
    raw: Raw<'a>,
}

/// A buffer of which the handler learns shape and address alone: one in the memory of a GPU, or one
/// in a stage before `Execute`, where it has no contents yet. It may share memory with others.
#[derive(Clone, Copy)]
pub struct OnDevice<B> {
    kind: B,
}

/// An argument that may lie in the memory of one result, because the caller donates it.
#[derive(Clone, Copy)]
pub struct MayAlias<B> {
    kind: B,
    shared_with: Option<usize>,
}

/// Where an argument and a result turned out to lie.
#[derive(Debug)]
pub enum Aliased<'a, T> {
    /// In the same memory: what is written replaces what is read.
    InPlace(&'a mut [T]),
    /// In memory of their own.
    Apart {
        /// The argument.
        argument: &'a [T],
        /// The result.
        result: &'a mut [T],
    },
}

impl<T> Aliased<'_, T> {
    /// The memory of the result.
    #[must_use]
    pub fn result(&self) -> &[T] {
        match self {
            Self::InPlace(both) => both,
            Self::Apart { result, .. } => result,
        }
    }
}

macro_rules! kinds {
    ($([$($generics:tt)*] $type:ident [$($names:tt)*] $result:literal,
       |$raw:ident| $check:expr, { $($contents:tt)* };)*) => {
        $(
            impl<'a, $($generics)*> $type<'a, $($names)*> {
                /// The extent of every axis.
                #[must_use]
                pub fn dims(&self) -> &'a [usize] {
                    self.raw.dims
                }

                /// The type of the elements.
                #[must_use]
                pub fn dtype(&self) -> DType {
                    self.raw.dtype
                }

                /// The number of elements.
                #[must_use]
                pub fn elements(&self) -> usize {
                    self.raw.elements
                }
            }

            impl<$($generics)*> sealed::Sealed for $type<'_, $($names)*> {}

            impl<'a, $($generics)*> BufferKind<'a> for $type<'a, $($names)*> {
                const RESULT: bool = $result;

                fn from_raw($raw: Raw<'a>) -> Result<Self> {
                    $check?;
                    Ok(Self { raw: $raw, $($contents)* })
                }

                fn raw(&self) -> &Raw<'a> {
                    &self.raw
                }
            }

            impl<'a, $($generics)*> Parameter<'a> for $type<'a, $($names)*> {
                fn decode(decoder: &mut Decoder<'a>, name: &'static str) -> Result<Self> {
                    let buffer = Self::from_raw(decoder.buffer(name, $result)?)?;
                    buffer.raw.check_memory(&decoder.frame, None)?;
                    Ok(buffer)
                }
            }

            /// The next one, if any is left.
            impl<'a, $($generics)*> Parameter<'a> for Option<$type<'a, $($names)*>> {
                fn decode(decoder: &mut Decoder<'a>, name: &'static str) -> Result<Self> {
                    if decoder.left($result) == 0 {
                        return Ok(None);
                    }
                    decoder.parameter(name).map(Some)
                }
            }

            impl<$($generics)*> fmt::Debug for $type<'_, $($names)*> {
                fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                    write!(f, "{:?}", self.raw)
                }
            }

            // SAFETY: elements may be shared by threads, and a mutable buffer is no copy.
            unsafe impl<$($generics)*> Send for $type<'_, $($names)*> {}
            // SAFETY: as above.
            unsafe impl<$($generics)*> Sync for $type<'_, $($names)*> {}
        )*
    };
}

kinds! {
    [T: Element, const RANK: usize] Buffer [T, RANK] false,
        |raw| raw.check::<T, RANK>(), { contents: PhantomData };
    [T: Element, const RANK: usize] BufferMut [T, RANK] true,
        |raw| raw.check::<T, RANK>(), { contents: PhantomData };
    [] AnyBuffer [] false, |raw| Ok::<(), Error>(()), {};
    [] AnyBufferMut [] true, |raw| Ok::<(), Error>(()), {};
}

impl<'a, T: Element, const RANK: usize> Buffer<'a, T, RANK> {
    /// The elements, for as long as the call.
    #[must_use]
    pub fn as_slice(&self) -> &'a [T] {
        // SAFETY: the handler of a host was called in `Execute`, no result shares the memory, and
        // `from_raw` checked the type.
        unsafe { self.raw.slice() }
    }
}

impl<T: Element, const RANK: usize> Deref for Buffer<'_, T, RANK> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        self.as_slice()
    }
}

impl<'a, T: Element, const RANK: usize> BufferMut<'a, T, RANK> {
    /// The elements, for as long as the call.
    #[must_use]
    pub fn into_slice(self) -> &'a mut [T] {
        // SAFETY: the handler of a host was called in `Execute`, nothing that it can reach shares the
        // memory, `from_raw` checked the type, and the buffer ends here.
        unsafe { self.raw.slice_mut() }
    }
}

impl<T: Element, const RANK: usize> Deref for BufferMut<'_, T, RANK> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: as in `into_slice`, and the buffer is borrowed meanwhile.
        unsafe { self.raw.slice() }
    }
}

impl<T: Element, const RANK: usize> DerefMut for BufferMut<'_, T, RANK> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `into_slice`, and the buffer is borrowed meanwhile.
        unsafe { self.raw.slice_mut() }
    }
}

impl<'a> AnyBuffer<'a> {
    /// The buffer, if its elements are `T` and its rank is `RANK`.
    ///
    /// # Errors
    /// They are not.
    pub fn typed<T: Element, const RANK: usize>(self) -> Result<Buffer<'a, T, RANK>> {
        Buffer::from_raw(self.raw)
    }
}

impl<'a> AnyBufferMut<'a> {
    /// The buffer, if its elements are `T` and its rank is `RANK`.
    ///
    /// # Errors
    /// They are not.
    pub fn typed<T: Element, const RANK: usize>(self) -> Result<BufferMut<'a, T, RANK>> {
        BufferMut::from_raw(self.raw)
    }
}

macro_rules! wrappers {
    ($($type:ident,)*) => {
        $(
            impl<'a, B: BufferKind<'a>> $type<B> {
                /// The extent of every axis.
                #[must_use]
                pub fn dims(&self) -> &'a [usize] {
                    self.kind.raw().dims
                }

                /// The type of the elements.
                #[must_use]
                pub fn dtype(&self) -> DType {
                    self.kind.raw().dtype
                }

                /// The number of elements.
                #[must_use]
                pub fn elements(&self) -> usize {
                    self.kind.raw().elements
                }

                /// The address of the first element; any value if there is none.
                #[must_use]
                pub fn as_ptr(&self) -> *mut c_void {
                    self.kind.raw().data.cast()
                }
            }

            impl<B: fmt::Debug> fmt::Debug for $type<B> {
                fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                    write!(f, "{}({:?})", stringify!($type), self.kind)
                }
            }
        )*
    };
}

wrappers!(OnDevice, MayAlias,);

impl<'a, B: BufferKind<'a>> Parameter<'a> for OnDevice<B> {
    fn decode(decoder: &mut Decoder<'a>, name: &'static str) -> Result<Self> {
        Ok(Self { kind: B::from_raw(decoder.buffer(name, B::RESULT)?)? })
    }
}

/// The next one, if any is left.
impl<'a, B: BufferKind<'a>> Parameter<'a> for Option<OnDevice<B>> {
    fn decode(decoder: &mut Decoder<'a>, name: &'static str) -> Result<Self> {
        if decoder.left(B::RESULT) == 0 {
            return Ok(None);
        }
        decoder.parameter(name).map(Some)
    }
}

impl<'a> OnDevice<AnyBuffer<'a>> {
    /// The buffer, if its elements are `T` and its rank is `RANK`.
    ///
    /// # Errors
    /// They are not.
    pub fn typed<T: Element, const RANK: usize>(self) -> Result<OnDevice<Buffer<'a, T, RANK>>> {
        Ok(OnDevice { kind: self.kind.typed()? })
    }
}

impl<'a> OnDevice<AnyBufferMut<'a>> {
    /// The buffer, if its elements are `T` and its rank is `RANK`.
    ///
    /// # Errors
    /// They are not.
    pub fn typed<T: Element, const RANK: usize>(self) -> Result<OnDevice<BufferMut<'a, T, RANK>>> {
        Ok(OnDevice { kind: self.kind.typed()? })
    }
}

impl<'a> MayAlias<AnyBuffer<'a>> {
    /// The buffer, if its elements are `T` and its rank is `RANK`.
    ///
    /// # Errors
    /// They are not.
    pub fn typed<T: Element, const RANK: usize>(self) -> Result<MayAlias<Buffer<'a, T, RANK>>> {
        Ok(MayAlias { kind: self.kind.typed()?, shared_with: self.shared_with })
    }
}

impl<'a, T: Element, const RANK: usize> MayAlias<Buffer<'a, T, RANK>> {
    /// The elements of the argument and of the result that may have its memory.
    ///
    /// # Errors
    /// They overlap in part, or the argument lies in another result.
    pub fn with<const R: usize>(self, result: BufferMut<'a, T, R>) -> Result<Aliased<'a, T>> {
        let (argument, other) = (&self.kind.raw, &result.raw);
        match self.shared_with {
            None => {
                Ok(Aliased::Apart { argument: self.kind.as_slice(), result: result.into_slice() })
            }
            Some(index) if index == other.place.index && argument.range() == other.range() => {
                Ok(Aliased::InPlace(result.into_slice()))
            }
            Some(index) => Err(Error::invalid_argument(format!(
                "{} lies over a part of result {index}; it must lie exactly in {}, or apart",
                argument.place, other.place,
            ))),
        }
    }
}

impl<B> MayAlias<B> {
    /// Whether the argument shares memory with some result.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        self.shared_with.is_some()
    }
}

impl<'a, T: Element, const RANK: usize> MayAlias<Buffer<'a, T, RANK>> {
    /// The argument, where the result that it might have lain in lies elsewhere.
    ///
    /// # Errors
    /// It shares memory with a result.
    pub fn apart(self) -> Result<Buffer<'a, T, RANK>> {
        match self.shared_with {
            None => Ok(self.kind),
            Some(index) => Err(self.kind.raw.must_be_apart(index)),
        }
    }
}

impl<'a, B: BufferKind<'a>> Parameter<'a> for MayAlias<B> {
    fn decode(decoder: &mut Decoder<'a>, name: &'static str) -> Result<Self> {
        const { assert!(!B::RESULT, "MayAlias is for arguments") };
        let kind = B::from_raw(decoder.buffer(name, B::RESULT)?)?;
        let shared_with = kind.raw().shared_with(&decoder.frame)?;
        kind.raw().check_memory(&decoder.frame, shared_with)?;
        Ok(Self { kind, shared_with })
    }
}

/// All arguments, or all results, that are left.
impl<'a, B: BufferKind<'a> + Parameter<'a>> Parameter<'a> for Vec<B> {
    fn decode(decoder: &mut Decoder<'a>, name: &'static str) -> Result<Self> {
        (0..decoder.left(B::RESULT)).map(|_| B::decode(decoder, name)).collect()
    }
}
