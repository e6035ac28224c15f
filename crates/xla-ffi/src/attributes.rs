//! Attributes: the values that a custom call carries by name, fixed when the program is built.

use std::ffi::c_void;
use std::fmt::Display;
use std::hash::{Hash, Hasher};

use half::{bf16, f16};

use crate::{
    DType, Element, Error, Pred, Result, abi,
    pointers::{Names, list, reference, sized},
};

/// The value of an attribute.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Attribute<'a> {
    /// A number or truth value.
    Scalar(Scalar<'a>),
    /// Text, not necessarily in UTF-8.
    String(&'a [u8]),
    /// Numbers of one type.
    Array(Array<'a>),
    /// Attributes within an attribute.
    Dictionary(Dictionary<'a>),
}

/// A number or truth value of some type.
#[derive(Clone, Copy, Debug)]
pub struct Scalar<'a>(Array<'a>);

/// Numbers of some type.
#[derive(Clone, Copy, Debug)]
pub struct Array<'a> {
    dtype: DType,
    /// Whole elements of `dtype`.
    bytes: &'a [u8],
}

/// Attributes by name.
#[derive(Clone, Copy)]
pub struct Dictionary<'a> {
    types: &'a [u32],
    names: &'a [*mut abi::ByteSpan],
    values: &'a [*mut c_void],
}

/// A type that an attribute can be read as. Implement it for an enum that is passed as a string, or
/// a struct that is passed as a dictionary:
///
/// ```
/// use xla_ffi::{Attribute, Error, FromAttribute, Result};
///
/// enum Reduction { Mean, Sum }
///
/// impl<'a> FromAttribute<'a> for Reduction {
///     fn from_attribute(attribute: Attribute<'a>) -> Result<Self> {
///         match <&str>::from_attribute(attribute)? {
///             "mean" => Ok(Self::Mean),
///             "sum" => Ok(Self::Sum),
///             other => Err(Error::invalid_argument(format!("is {other:?}; it must be mean or sum"))),
///         }
///     }
/// }
/// ```
pub trait FromAttribute<'a>: Sized {
    /// Reads the value.
    ///
    /// # Errors
    /// The value is of another type. The message goes on after the attribute's name: «is s64; it must
    /// be f32».
    fn from_attribute(attribute: Attribute<'a>) -> Result<Self>;

    /// What a call without the attribute means.
    ///
    /// # Errors
    /// There must be one; `Option` makes it optional.
    fn missing() -> Result<Self> {
        Err(Error::invalid_argument("is missing"))
    }
}

impl Attribute<'_> {
    /// The type, for an error.
    fn kind(&self) -> String {
        match self {
            Self::Scalar(scalar) => scalar.dtype().to_string(),
            Self::String(_) => "a string".into(),
            Self::Array(array) => format!("an array of {}", array.dtype),
            Self::Dictionary(_) => "a dictionary".into(),
        }
    }

    fn must_be(&self, right: impl Display) -> Error {
        Error::invalid_argument(format!("is {}; it must be {right}", self.kind()))
    }
}

impl Scalar<'_> {
    /// The type of the value.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.0.dtype
    }

    /// The value, if it is of type `T`.
    #[must_use]
    pub fn get<T: Element>(&self) -> Option<T> {
        self.0.get::<T>()?.first().copied()
    }
}

impl<'a> Array<'a> {
    /// # Safety
    /// `data` is null, misaligned or leads to `size` elements of `dtype`, alive for `'a`.
    unsafe fn new(
        dtype: u32,
        size: usize,
        data: *const c_void,
        what: &dyn Display,
    ) -> Result<Self> {
        let dtype = DType::from_u32(dtype).ok_or_else(|| {
            Error::invalid_argument(format!("{what} has dtype {dtype}, which is unknown here"))
        })?;
        let bytes = size
            .checked_mul(dtype.size())
            .and_then(|bytes| i64::try_from(bytes).ok())
            .ok_or_else(|| {
                Error::invalid_argument(format!(
                    "{what} has {size} elements, more than memory holds"
                ))
            })?;
        // SAFETY: passed on from this function's contract.
        let bytes = unsafe { list(data.cast::<u8>(), bytes, format_args!("bytes of {what}")) }?;
        Ok(Self { dtype, bytes })
    }

    /// The type of the elements.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The elements, if they are of type `T` and lie as a `T` must.
    #[must_use]
    pub fn get<T: Element>(&self) -> Option<&'a [T]> {
        if self.dtype != T::DTYPE {
            return None;
        }
        // SAFETY: an `Element` takes any bits.
        let (before, elements, after) = unsafe { self.bytes.align_to::<T>() };
        (before.is_empty() && after.is_empty()).then_some(elements)
    }
}

impl<'a> Dictionary<'a> {
    /// # Safety
    /// The lists are null, misaligned or as long as `attrs` says, and they and what they lead to are
    /// alive for `'a`.
    pub(crate) unsafe fn new(attrs: &abi::Attrs) -> Result<Self> {
        // SAFETY: passed on from this function's contract.
        unsafe {
            Ok(Self {
                values: list(attrs.attrs, attrs.size, "attributes")?,
                types: list(attrs.types, attrs.size, "types of the attributes")?,
                names: list(attrs.names, attrs.size, "names of the attributes")?,
            })
        }
    }

    /// The number of attributes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.names.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.names.is_empty()
    }

    /// The attribute called `name`, read as a `T`.
    ///
    /// # Errors
    /// It is missing, or of another type.
    pub fn get<T: FromAttribute<'a>>(&self, name: &str) -> Result<T> {
        let named = |error: Error| {
            Error::new(error.code(), format!("attribute `{name}` {}", error.message()))
        };
        for index in 0..self.len() {
            if self.name(index)? == name {
                return T::from_attribute(self.value(index)?).map_err(named);
            }
        }
        T::missing().map_err(|error| {
            let names: Vec<_> = (0..self.len()).flat_map(|index| self.name(index)).collect();
            let error = named(error);
            Error::new(error.code(), format!("{}; the call has {}", error.message(), Names(&names)))
        })
    }

    /// Every attribute with its name.
    ///
    /// # Errors
    /// Of an item: the frame is broken there.
    pub fn iter(&self) -> impl Iterator<Item = Result<(&'a str, Attribute<'a>)>> + use<'a> {
        let dictionary = *self;
        (0..self.len()).map(move |index| Ok((dictionary.name(index)?, dictionary.value(index)?)))
    }

    /// Adds every name and value.
    ///
    /// # Errors
    /// The frame is broken.
    pub(crate) fn hash(&self, hasher: &mut impl Hasher) -> Result {
        self.len().hash(hasher);
        for item in self.iter() {
            let (name, value) = item?;
            (name, std::mem::discriminant(&value)).hash(hasher);
            match value {
                Attribute::Scalar(Scalar(array)) | Attribute::Array(array) => {
                    (array.dtype, array.bytes).hash(hasher);
                }
                Attribute::String(bytes) => bytes.hash(hasher),
                Attribute::Dictionary(dictionary) => dictionary.hash(hasher)?,
            }
        }
        Ok(())
    }

    /// The name of attribute `index`.
    pub(crate) fn name(&self, index: usize) -> Result<&'a str> {
        let what = format_args!("the name of attribute {index}");
        // SAFETY: as `new` was promised.
        let bytes = unsafe { text(self.names[index], &what) }?;
        str::from_utf8(bytes)
            .map_err(|_| Error::invalid_argument(format!("{what} is {bytes:?}, not UTF-8")))
    }

    fn value(&self, index: usize) -> Result<Attribute<'a>> {
        let (kind, value) = (self.types[index], self.values[index]);
        let name = self.name(index)?;
        let what: &dyn Display = &format_args!("attribute `{name}`");
        // SAFETY: as `new` was promised, the type says what the value leads to.
        unsafe {
            match kind {
                abi::ATTR_TYPE_SCALAR => {
                    let scalar: &abi::Scalar = reference(value.cast(), what)?;
                    Ok(Attribute::Scalar(Scalar(Array::new(scalar.dtype, 1, scalar.value, what)?)))
                }
                abi::ATTR_TYPE_ARRAY => {
                    let array: &abi::Array = reference(value.cast(), what)?;
                    Ok(Attribute::Array(Array::new(array.dtype, array.size, array.data, what)?))
                }
                abi::ATTR_TYPE_STRING => Ok(Attribute::String(text(value.cast(), what)?)),
                abi::ATTR_TYPE_DICTIONARY => {
                    Ok(Attribute::Dictionary(Self::new(sized(value.cast(), what)?)?))
                }
                _ => Err(Error::invalid_argument(format!(
                    "{what} has type {kind}, which is unknown here"
                ))),
            }
        }
    }
}

/// The bytes of a string.
///
/// # Safety
/// `span` is null, misaligned, or leads to a string alive for `'a`.
unsafe fn text<'a>(span: *const abi::ByteSpan, what: &dyn Display) -> Result<&'a [u8]> {
    // SAFETY: passed on from this function's contract.
    unsafe {
        let span = reference(span, what)?;
        let length = i64::try_from(span.len).unwrap_or(-1);
        list(span.ptr.cast::<u8>(), length, format_args!("bytes of {what}"))
    }
}

impl std::fmt::Debug for Dictionary<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names = (0..self.len()).map(|index| self.name(index).unwrap_or("?"));
        f.debug_set().entries(names).finish()
    }
}

impl<'a> FromAttribute<'a> for Attribute<'a> {
    fn from_attribute(attribute: Attribute<'a>) -> Result<Self> {
        Ok(attribute)
    }
}

impl<'a, T: FromAttribute<'a>> FromAttribute<'a> for Option<T> {
    fn from_attribute(attribute: Attribute<'a>) -> Result<Self> {
        T::from_attribute(attribute).map(Some)
    }

    fn missing() -> Result<Self> {
        Ok(None)
    }
}

impl<'a, T: Element> FromAttribute<'a> for &'a [T] {
    fn from_attribute(attribute: Attribute<'a>) -> Result<Self> {
        let right = || attribute.must_be(format_args!("an array of {}", T::DTYPE));
        match attribute {
            Attribute::Array(array) => array.get().ok_or_else(right),
            _ => Err(right()),
        }
    }
}

impl<'a> FromAttribute<'a> for &'a str {
    fn from_attribute(attribute: Attribute<'a>) -> Result<Self> {
        match attribute {
            Attribute::String(bytes) => str::from_utf8(bytes).map_err(|_| {
                Error::invalid_argument(format!("is {bytes:?}; it must be text in UTF-8"))
            }),
            _ => Err(attribute.must_be("a string")),
        }
    }
}

impl<'a> FromAttribute<'a> for Dictionary<'a> {
    fn from_attribute(attribute: Attribute<'a>) -> Result<Self> {
        match attribute {
            Attribute::Dictionary(dictionary) => Ok(dictionary),
            _ => Err(attribute.must_be("a dictionary")),
        }
    }
}

impl<'a> FromAttribute<'a> for bool {
    fn from_attribute(attribute: Attribute<'a>) -> Result<Self> {
        Pred::from_attribute(attribute).map(Self::from)
    }
}

macro_rules! scalars {
    ($($type:ty),*) => {
        $(
            impl<'a> FromAttribute<'a> for $type {
                fn from_attribute(attribute: Attribute<'a>) -> Result<Self> {
                    let right = || attribute.must_be(<$type>::DTYPE);
                    match attribute {
                        Attribute::Scalar(scalar) => scalar.get().ok_or_else(right),
                        _ => Err(right()),
                    }
                }
            }
        )*
    };
}

scalars!(Pred, i8, i16, i32, i64, u8, u16, u32, u64, f16, bf16, f32, f64, [f32; 2], [f64; 2]);
