//! Programs, before and after the compiler.

use std::ptr::null_mut;

use crate::abi::{self, Padded};

/// A program to compile.
#[derive(Clone, Copy, Debug)]
pub struct Program<'a> {
    code: &'a [u8],
    format: &'a str,
}

impl<'a> Program<'a> {
    /// StableHLO, as text or MLIR bytecode. The function `main` is what runs.
    #[must_use]
    pub fn mlir(code: &'a (impl AsRef<[u8]> + ?Sized)) -> Self {
        Self { code: code.as_ref(), format: "mlir" }
    }

    /// A serialised `HloModuleProto`.
    #[must_use]
    pub fn hlo(code: &'a (impl AsRef<[u8]> + ?Sized)) -> Self {
        Self { code: code.as_ref(), format: "hlo" }
    }

    /// A program in a format that the plug-in knows by this name.
    #[must_use]
    pub fn new(format: &'a str, code: &'a [u8]) -> Self {
        Self { code, format }
    }

    pub(crate) const fn code(&self) -> &'a [u8] {
        self.code
    }

    pub(crate) const fn format(&self) -> &'a str {
        self.format
    }

    /// As the plug-in takes it, for as long as the program's parts live.
    pub(crate) fn encode(&self) -> Padded<abi::Program> {
        let mut program = Padded::<abi::Program>::new();
        program.extension_start = null_mut();
        // It is written to only where a program is asked for.
        program.code = self.code.as_ptr().cast_mut().cast();
        program.code_size = self.code.len();
        program.format = self.format.as_ptr().cast();
        program.format_size = self.format.len();
        program
    }
}

/// What the compiler made of a program, before machine code.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct OptimizedProgram {
    /// `hlo`, `hlo_with_config` (protocol buffers of XLA) or `mlir`.
    pub format: String,
    /// The program in that format.
    pub code: Vec<u8>,
}
