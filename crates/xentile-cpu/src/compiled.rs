//! Passes over elements of each dtype, compiled in this crate.
//!
//! A generic function is compiled by every crate that calls it, and a pass, with its variants for each
//! instruction set, takes longer than all else that such a crate has. So what callers compile ends at
//! a table of functions, which an operation makes of its passes with `passes!`.

/// Makes a table with a function for each pass, over elements `E`, and `get`, which gives the compiled
/// one of a dtype.
macro_rules! passes {
    ($(#[$doc:meta])* $visibility:vis struct $name:ident { $($pass:ident: $ty:ident),* $(,)? }) => {
        $(#[$doc])*
        $visibility struct $name<E> {
            $($visibility $pass: fn($crate::Isa, $ty<'_, E>),)*
        }

        impl<E: xentile::Element> $name<E> {
            const fn new() -> Self {
                Self { $($pass: |isa, pass| isa.run(pass),)* }
            }

            /// Those that are compiled.
            $visibility fn get() -> &'static Self {
                static F32: $name<f32> = $name::new();
                static BF16: $name<half::bf16> = $name::new();
                static F16: $name<half::f16> = $name::new();
                let passes: &dyn std::any::Any = match E::DTYPE {
                    xentile::DType::F32 => &F32,
                    xentile::DType::Bf16 => &BF16,
                    xentile::DType::F16 => &F16,
                };
                passes.downcast_ref().expect("a dtype is of one type")
            }
        }
    };
}
pub(crate) use passes;
