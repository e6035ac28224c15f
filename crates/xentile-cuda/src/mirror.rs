//! Structs and numbers that are declared once more in C++. The build script reads these declarations in
//! every file of this crate, and compares them with those of the kernels, so that one that changed alone
//! does not compile. It reads a field a line, and `mirror! {` and `numbers! {` at the beginning of a line.

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
    };
}

/// Numbers of C++.
macro_rules! numbers {
    ($($name:ident: $type:ty = $cpp:ident, $value:literal;)*) => {
        $(#[allow(dead_code, reason = "some are for the build script alone")]
        pub(crate) const $name: $type = $value;)*
    };
}
