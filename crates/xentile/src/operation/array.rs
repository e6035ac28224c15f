//! Arrays of any element type, by name.

use std::borrow::Cow;

use half::{bf16, f16};

use crate::fp8::{Format, encode};
use crate::{DType, Element};

/// An array in row-major order; its extents are its [`ArraySpec`](super::ArraySpec)'s.
#[derive(Clone, Debug, PartialEq)]
pub enum Array<'a> {
    /// In f32.
    F32(Cow<'a, [f32]>),
    /// In bfloat16.
    Bf16(Cow<'a, [bf16]>),
    /// In float16.
    F16(Cow<'a, [f16]>),
    /// In float64: of scalars that hosts sum.
    F64(Cow<'a, [f64]>),
    /// Integers.
    I64(Cow<'a, [i64]>),
    /// Unsigned integers of 8 bits.
    U8(Cow<'a, [u8]>),
    /// The bits of numbers of 8 bits.
    F8(Format, Cow<'a, [u8]>),
}

/// An element of an [`Array`].
pub trait ArrayElement: Copy + 'static {
    /// The array of `elements`.
    fn array<'a>(elements: Cow<'a, [Self]>) -> Array<'a>;

    /// The elements of `array`, if it holds such.
    fn elements<'b>(array: &'b Array<'_>) -> Option<&'b [Self]>;

    /// The same, to be written.
    fn elements_mut<'b>(array: &'b mut Array<'_>) -> Option<&'b mut Vec<Self>>;
}

macro_rules! element {
    ($($element:ty: $variant:ident),*) => {
        $(impl ArrayElement for $element {
            fn array<'a>(elements: Cow<'a, [Self]>) -> Array<'a> {
                Array::$variant(elements)
            }

            fn elements<'b>(array: &'b Array<'_>) -> Option<&'b [Self]> {
                match array {
                    Array::$variant(elements) => Some(elements),
                    _ => None,
                }
            }

            fn elements_mut<'b>(array: &'b mut Array<'_>) -> Option<&'b mut Vec<Self>> {
                match array {
                    Array::$variant(elements) => Some(elements.to_mut()),
                    _ => None,
                }
            }
        })*

        impl Array<'_> {
            /// The number of elements.
            #[must_use]
            pub fn len(&self) -> usize {
                match self {
                    $(Self::$variant(elements) => elements.len(),)*
                    Self::F8(_, bits) => bits.len(),
                }
            }

            /// The element `index`, as f64; integers as far as that is exact.
            ///
            /// # Panics
            /// `index` is past the end.
            #[must_use]
            pub fn at(&self, index: usize) -> f64 {
                match self {
                    $(Self::$variant(elements) => elements[index].wide(),)*
                    Self::F8(format, bits) => format.decode(bits[index]).into(),
                }
            }
        }

        impl<'a> Array<'a> {
            /// The first `length` elements.
            ///
            /// # Panics
            /// There are fewer.
            #[must_use]
            pub fn cut(self, length: usize) -> Self {
                match self {
                    $(Self::$variant(elements) => Self::$variant(cut(elements, length)),)*
                    Self::F8(format, bits) => Self::F8(format, cut(bits, length)),
                }
            }
        }
    };
}

element!(f32: F32, bf16: Bf16, f16: F16, f64: F64, i64: I64, u8: U8);

fn cut<E: Clone>(elements: Cow<'_, [E]>, length: usize) -> Cow<'_, [E]> {
    match elements {
        Cow::Borrowed(elements) => Cow::Borrowed(&elements[..length]),
        Cow::Owned(mut elements) => {
            assert!(length <= elements.len(), "{length} of {}", elements.len());
            elements.truncate(length);
            Cow::Owned(elements)
        }
    }
}

/// Any element as f64.
trait Wide {
    fn wide(self) -> f64;
}

impl<E: Element> Wide for E {
    fn wide(self) -> f64 {
        self.to_f64()
    }
}

impl Wide for f64 {
    fn wide(self) -> f64 {
        self
    }
}

impl Wide for u8 {
    fn wide(self) -> f64 {
        self.into()
    }
}

impl Wide for i64 {
    fn wide(self) -> f64 {
        self as f64
    }
}

impl Array<'_> {
    /// An array of `elements`.
    #[must_use]
    pub fn of<E: ArrayElement>(elements: Vec<E>) -> Array<'static> {
        E::array(Cow::Owned(elements))
    }

    /// `length` elements of `dtype` that hold `value`.
    #[must_use]
    pub fn filled(dtype: DType, length: usize, value: f32) -> Array<'static> {
        crate::by_dtype!(dtype, E => Array::of(vec![E::from_f32(value); length]))
    }

    /// Whether there is no element.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Overwrites every element.
    pub fn fill(&mut self, value: f32) {
        match self {
            Self::F32(elements) => elements.to_mut().fill(value),
            Self::Bf16(elements) => elements.to_mut().fill(bf16::from_f32(value)),
            Self::F16(elements) => elements.to_mut().fill(f16::from_f32(value)),
            Self::F64(elements) => elements.to_mut().fill(value.into()),
            Self::I64(elements) => elements.to_mut().fill(value as i64),
            Self::U8(elements) => elements.to_mut().fill(value as u8),
            Self::F8(format, bits) => bits.to_mut().fill(encode(*format, value)),
        }
    }
}

/// Arrays by name, in order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Arrays<'a>(Vec<(&'static str, Array<'a>)>);

impl<'a> Arrays<'a> {
    /// With an array more, in the place of one of this name.
    pub fn insert(&mut self, name: &'static str, array: Array<'a>) {
        match self.0.iter_mut().find(|(has, _)| *has == name) {
            Some((_, old)) => *old = array,
            None => self.0.push((name, array)),
        }
    }

    /// With an array more.
    #[must_use]
    pub fn with<E: ArrayElement>(mut self, name: &'static str, elements: Vec<E>) -> Self {
        self.insert(name, Array::of(elements));
        self
    }

    /// Adds all of `more`.
    pub fn extend(&mut self, more: Self) {
        for (name, array) in more.0 {
            self.insert(name, array);
        }
    }

    /// The bits of the array called `name`, of numbers of 8 bits; none where there is none.
    ///
    /// # Panics
    /// Its elements are of another type.
    #[must_use]
    pub fn bits(&self, name: &str) -> Option<&[u8]> {
        self.get(name).map(|array| match array {
            Array::F8(_, bits) => &**bits,
            _ => panic!("{name} is no array of 8 bits"),
        })
    }

    /// The array called `name`.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Array<'a>> {
        self.0.iter().find(|(has, _)| *has == name).map(|(_, array)| array)
    }

    /// The same, to be written.
    pub fn get_mut(&mut self, name: &str) -> Option<&mut Array<'a>> {
        self.0.iter_mut().find(|(has, _)| *has == name).map(|(_, array)| array)
    }

    /// The elements of the array called `name`; none where there is none.
    ///
    /// # Panics
    /// Its elements are of another type.
    #[must_use]
    pub fn slice<E: ArrayElement>(&self, name: &str) -> Option<&[E]> {
        self.get(name).map(|array| E::elements(array).expect("an array of this element"))
    }

    /// The elements of the array called `name`.
    ///
    /// # Panics
    /// There is none, or its elements are of another type.
    #[must_use]
    pub fn expect<E: ArrayElement>(&self, name: &str) -> &[E] {
        self.slice(name).unwrap_or_else(|| panic!("no array {name}"))
    }

    /// The elements of arrays, each by its name, to be written at once; none where there is none.
    ///
    /// # Panics
    /// Elements of one are of another type.
    pub fn slices_mut<E: ArrayElement, const N: usize>(
        &mut self,
        names: [&str; N],
    ) -> [Option<&mut [E]>; N] {
        let mut found = [const { None }; N];
        for (name, array) in &mut self.0 {
            if let Some(index) = names.iter().position(|wanted| wanted == name) {
                let elements = E::elements_mut(array).expect("an array of this element");
                found[index] = Some(elements.as_mut_slice());
            }
        }
        found
    }

    /// Every array, with its name.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, &Array<'a>)> {
        self.0.iter().map(|(name, array)| (*name, array))
    }

    /// Every array, to be written.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (&'static str, &mut Array<'a>)> {
        self.0.iter_mut().map(|(name, array)| (*name, array))
    }
}

/// Runs an expression with a type that stands for the element of a dtype.
#[macro_export]
macro_rules! by_dtype {
    ($dtype:expr, $element:ident => $body:expr) => {
        match $dtype {
            $crate::DType::F32 => {
                type $element = f32;
                $body
            }
            $crate::DType::Bf16 => {
                type $element = $crate::half::bf16;
                $body
            }
            $crate::DType::F16 => {
                type $element = $crate::half::f16;
                $body
            }
        }
    };
}
