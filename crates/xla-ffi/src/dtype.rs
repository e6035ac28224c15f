//! Types of elements.

use half::{bf16, f16};

macro_rules! dtypes {
    ($($name:ident = $value:literal, $text:literal, $size:literal;)*) => {
        /// The type of the elements of a buffer, array or scalar, as XLA numbers them.
        #[allow(missing_docs)] // the names are XLA's
        #[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
        #[non_exhaustive]
        #[repr(u32)]
        pub enum DType {
            $($name = $value,)*
        }

        impl DType {
            /// Every type.
            pub const ALL: &[Self] = &[$(Self::$name),*];

            /// The type as StableHLO and XLA write it.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$name => $text,)*
                }
            }

            /// Bytes of an element. Those of less than a byte take a whole one.
            #[must_use]
            pub const fn size(self) -> usize {
                match self {
                    $(Self::$name => $size,)*
                }
            }

            /// The type that XLA numbers `value`.
            #[must_use]
            pub const fn from_u32(value: u32) -> Option<Self> {
                match value {
                    $($value => Some(Self::$name),)*
                    _ => None,
                }
            }
        }
    };
}

dtypes! {
    Pred = 1, "pred", 1;
    S1 = 30, "s1", 1;
    S2 = 26, "s2", 1;
    S4 = 21, "s4", 1;
    S8 = 2, "s8", 1;
    S16 = 3, "s16", 2;
    S32 = 4, "s32", 4;
    S64 = 5, "s64", 8;
    U1 = 31, "u1", 1;
    U2 = 27, "u2", 1;
    U4 = 22, "u4", 1;
    U8 = 6, "u8", 1;
    U16 = 7, "u16", 2;
    U32 = 8, "u32", 4;
    U64 = 9, "u64", 8;
    F16 = 10, "f16", 2;
    F32 = 11, "f32", 4;
    F64 = 12, "f64", 8;
    Bf16 = 16, "bf16", 2;
    C64 = 15, "c64", 8;
    C128 = 18, "c128", 16;
    Token = 17, "token", 0;
    F8E5M2 = 19, "f8e5m2", 1;
    F8E3M4 = 29, "f8e3m4", 1;
    F8E4M3 = 28, "f8e4m3", 1;
    F8E4M3FN = 20, "f8e4m3fn", 1;
    F8E4M3B11FNUZ = 23, "f8e4m3b11fnuz", 1;
    F8E5M2FNUZ = 24, "f8e5m2fnuz", 1;
    F8E4M3FNUZ = 25, "f8e4m3fnuz", 1;
    F4E2M1FN = 32, "f4e2m1fn", 1;
    F8E8M0FNU = 33, "f8e8m0fnu", 1;
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// A truth value in a buffer: unlike in a [`bool`], any byte is valid, and all but 0 are true.
#[derive(Clone, Copy, Debug, Default)]
#[repr(transparent)]
pub struct Pred(u8);

impl From<bool> for Pred {
    fn from(value: bool) -> Self {
        Self(u8::from(value))
    }
}

impl From<Pred> for bool {
    fn from(value: Pred) -> Self {
        value.0 != 0
    }
}

macro_rules! eight_bits {
    ($($(#[$doc:meta])* $name:ident;)*) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
            #[repr(transparent)]
            pub struct $name(pub u8);

            impl $name {
                /// The bits of `elements`.
                #[must_use]
                pub fn bits(elements: &[Self]) -> &[u8] {
                    // SAFETY: an element is its bits, by `repr(transparent)`.
                    unsafe { std::slice::from_raw_parts(elements.as_ptr().cast(), elements.len()) }
                }

                /// The same, to be written.
                #[must_use]
                pub fn bits_mut(elements: &mut [Self]) -> &mut [u8] {
                    let length = elements.len();
                    // SAFETY: as above, and any bits are an element.
                    unsafe { std::slice::from_raw_parts_mut(elements.as_mut_ptr().cast(), length) }
                }
            }
        )*
    };
}

eight_bits! {
    /// The bits of a float with 4 bits of exponent and 3 of mantissa, without infinities.
    F8E4M3FN;
    /// The bits of a float with 5 bits of exponent and 2 of mantissa.
    F8E5M2;
}

/// A Rust type with the layout of a [`DType`]. A pair of floats is a complex number.
///
/// # Safety
/// The type has the size of `DTYPE` and its layout, and every pattern of bits is a value of it.
pub unsafe trait Element: Copy + Send + Sync + 'static {
    /// The type in XLA.
    const DTYPE: DType;
}

macro_rules! elements {
    ($($rust:ty => $dtype:ident,)*) => {
        $(
            const _: () = assert!(size_of::<$rust>() == DType::$dtype.size());
            // SAFETY: the size is checked above; numbers and pairs of them take any bits.
            unsafe impl Element for $rust {
                const DTYPE: DType = DType::$dtype;
            }
        )*
    };
}

elements! {
    Pred => Pred,
    i8 => S8,
    i16 => S16,
    i32 => S32,
    i64 => S64,
    u8 => U8,
    u16 => U16,
    u32 => U32,
    u64 => U64,
    f16 => F16,
    bf16 => Bf16,
    f32 => F32,
    f64 => F64,
    F8E4M3FN => F8E4M3FN,
    F8E5M2 => F8E5M2,
    [f32; 2] => C64,
    [f64; 2] => C128,
}
