//! Structs and numbers that are declared once more in C++. The build script holds the two
//! declarations against each other, so that one that changed alone does not compile.

/// How a struct lies in memory.
#[allow(dead_code, reason = "the build script reads it")]
pub(crate) struct Layout {
    /// The struct's name in C++.
    pub(crate) name: &'static str,
    pub(crate) size: usize,
    /// Where every field begins.
    pub(crate) offsets: &'static [(&'static str, usize)],
}

macro_rules! mirror {
    (
        $(#[$doc:meta])*
        $visibility:vis struct $name:ident = $cpp:ident { $($field:ident: $type:ty,)* }
    ) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug)]
        #[repr(C)]
        #[allow(dead_code, reason = "kernels read the fields")]
        $visibility struct $name { $(pub(crate) $field: $type,)* }

        impl $name {
            #[allow(dead_code, reason = "the build script reads it")]
            pub(crate) const LAYOUT: $crate::mirror::Layout = $crate::mirror::Layout {
                name: stringify!($cpp),
                size: size_of::<Self>(),
                offsets: &[$((stringify!($field), std::mem::offset_of!($name, $field)),)*],
            };
        }
    };
}

/// Numbers of C++, and `NUMBERS` with all of them.
macro_rules! numbers {
    ($($name:ident: $type:ty = $cpp:ident, $value:literal;)*) => {
        $(#[allow(dead_code, reason = "some are for the build script alone")]
        pub(crate) const $name: $type = $value;)*

        #[allow(dead_code, reason = "the build script reads it")]
        pub(crate) const NUMBERS: &[(&str, i64)] = &[$((stringify!($cpp), $value),)*];
    };
}
