//! Types of elements.

use half::{bf16, f16};

macro_rules! dtypes {
    ($($name:ident = $value:literal, $text:literal, $size:literal;)*) => {
        /// The type of the elements of a buffer, as PJRT numbers them.
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

            /// The type as XLA writes it.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$name => $text,)*
                }
            }

            /// Bytes of an element on the host. Those of less than a byte take a whole one.
            #[must_use]
            pub const fn size(self) -> usize {
                match self {
                    $(Self::$name => $size,)*
                }
            }

            /// The type that PJRT numbers `value`.
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
    S8 = 2, "s8", 1;
    S16 = 3, "s16", 2;
    S32 = 4, "s32", 4;
    S64 = 5, "s64", 8;
    U8 = 6, "u8", 1;
    U16 = 7, "u16", 2;
    U32 = 8, "u32", 4;
    U64 = 9, "u64", 8;
    F16 = 10, "f16", 2;
    F32 = 11, "f32", 4;
    F64 = 12, "f64", 8;
    Bf16 = 13, "bf16", 2;
    C64 = 14, "c64", 8;
    C128 = 15, "c128", 16;
    F8E5M2 = 16, "f8e5m2", 1;
    F8E4M3FN = 17, "f8e4m3fn", 1;
    F8E4M3B11FNUZ = 18, "f8e4m3b11fnuz", 1;
    F8E5M2FNUZ = 19, "f8e5m2fnuz", 1;
    F8E4M3FNUZ = 20, "f8e4m3fnuz", 1;
    S4 = 21, "s4", 1;
    U4 = 22, "u4", 1;
    Token = 23, "token", 0;
    S2 = 24, "s2", 1;
    U2 = 25, "u2", 1;
    F8E4M3 = 26, "f8e4m3", 1;
    F8E3M4 = 27, "f8e3m4", 1;
    F8E8M0FNU = 28, "f8e8m0fnu", 1;
    F4E2M1FN = 29, "f4e2m1fn", 1;
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// A Rust type with the layout of a [`DType`]. A pair of floats is a complex number.
///
/// # Safety
/// The type has the size of `DTYPE` and its layout, and no padding. After [`Element::repair`] any
/// bytes are values of it.
pub unsafe trait Element: Copy + Send + Sync + 'static {
    /// The type in XLA.
    const DTYPE: DType;

    /// Makes values of what a device wrote.
    #[doc(hidden)]
    fn repair(_: &mut [u8]) {}
}

// SAFETY: a byte each, and only 0 and 1 are left.
unsafe impl Element for bool {
    const DTYPE: DType = DType::Pred;

    fn repair(bytes: &mut [u8]) {
        // A custom call may have written anything.
        for byte in bytes {
            *byte = u8::from(*byte != 0);
        }
    }
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
    [f32; 2] => C64,
    [f64; 2] => C128,
}
