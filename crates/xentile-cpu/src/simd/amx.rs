//! AMX: products of whole tiles of pairs of bf16, which a processor's matrix unit takes in one
//! instruction each.
//!
//! A tile has sixteen rows of sixteen words. Of the eight that there are, four hold sums, two rows by
//! two columns of them, so that each tile of a factor that is read takes part in two products.

use super::{LINE_BYTES, MAX_LANES};

/// Rows of a tile, and words of each.
pub(crate) const TILE: usize = 16;

/// Rows, and columns, of the sums that are taken at a time.
pub(crate) const BLOCK: usize = 2 * TILE;

const _: () = assert!(TILE == MAX_LANES && TILE * size_of::<f32>() == LINE_BYTES);

/// Who multiplies tiles.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Tiles {
    Amx(Amx),
    /// Plain Rust in the place of the instructions, so that tests of what is around them run anywhere.
    #[cfg(test)]
    Model,
}

/// What is multiplied for one block of sums, of [`BLOCK`] rows and as many columns.
///
/// A sum is cut into steps of some words, at most [`TILE`].
#[derive(Clone, Copy)]
pub(crate) struct Factors<'a> {
    /// Two tiles a step, one below the other. Of each row's [`TILE`] words a step has the first.
    pub(crate) left: &'a [f32],
    /// As many rows a step as it has words, of the words of each column.
    pub(crate) right: &'a [f32],
}

/// Where a block of sums goes: to rows that lie `step` apart.
pub(crate) struct Sums<'a> {
    pub(crate) to: &'a mut [f32],
    pub(crate) step: usize,
    /// Whether what is there is what sums begin with.
    pub(crate) add: bool,
}

/// Tiles of this thread that are set up for steps of so many words, until this is dropped.
pub(crate) struct Configured {
    tiles: Tiles,
    words: usize,
    /// A thread has its own.
    _thread: std::marker::PhantomData<*const ()>,
}

impl Tiles {
    /// Sets tiles up for steps of `words` words.
    ///
    /// # Safety
    /// This thread has no other [`Configured`], and lets nobody else use its tiles, while this lives.
    pub(crate) unsafe fn configure(self, words: usize) -> Configured {
        assert!((1..=TILE).contains(&words), "a step has {words} words, not 1 to {TILE}");
        match self {
            Self::Amx(amx) => amx.configure(words),
            #[cfg(test)]
            Self::Model => {}
        }
        Configured { tiles: self, words, _thread: std::marker::PhantomData }
    }
}

impl Configured {
    /// Takes a block of sums in f32, step after step: products of the first numbers of a step's words
    /// are added up, and those of the second, and both to the sum. Numbers below the normal range
    /// count as 0.
    pub(crate) fn multiply(&self, factors: Factors<'_>, sums: Sums<'_>) {
        let steps = factors.left.len() / (BLOCK * TILE);
        assert_eq!(factors.left.len(), steps * BLOCK * TILE);
        assert_eq!(factors.right.len(), steps * self.words * BLOCK);
        assert!(steps > 0 && (BLOCK - 1) * sums.step + BLOCK <= sums.to.len());
        match self.tiles {
            Tiles::Amx(amx) => {
                // SAFETY: the assertions say that the factors have `steps` steps of as many words as
                // the tiles are set up for, and that all of the block lies in `to`.
                unsafe { amx.multiply(steps, self.words, factors, sums) }
            }
            #[cfg(test)]
            Tiles::Model => model::multiply(steps, self.words, factors, sums),
        }
    }

    /// Asks for the cache lines of a block of sums, to write.
    #[inline(always)]
    pub(crate) fn prefetch(&self, to: &[f32], step: usize) {
        match self.tiles {
            Tiles::Amx(amx) => amx.prefetch(to, step),
            #[cfg(test)]
            Tiles::Model => {}
        }
    }
}

impl Drop for Configured {
    fn drop(&mut self) {
        match self.tiles {
            Tiles::Amx(amx) => amx.release(),
            #[cfg(test)]
            Tiles::Model => {}
        }
    }
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub(crate) use instructions::Amx;
#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
pub(crate) use nowhere::Amx;

/// In the place of the instructions where there are none.
#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
mod nowhere {
    use super::{Factors, Sums};

    /// Proof that the processor has them.
    #[derive(Clone, Copy, Debug)]
    pub(crate) enum Amx {}

    impl Amx {
        pub(super) fn configure(self, _words: usize) {
            match self {}
        }

        pub(super) fn release(self) {
            match self {}
        }

        /// As [`super::Configured::multiply`].
        ///
        /// # Safety
        /// None is needed: nobody can call it.
        pub(super) unsafe fn multiply(self, _: usize, _: usize, _: Factors<'_>, _: Sums<'_>) {
            match self {}
        }

        pub(super) fn prefetch(self, _to: &[f32], _step: usize) {
            match self {}
        }
    }
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod instructions {
    use std::arch::asm;
    use std::arch::x86_64::{__cpuid_count, _MM_HINT_ET0, _mm_prefetch};
    use std::sync::OnceLock;

    use super::{BLOCK, Factors, LINE_BYTES, Sums, TILE};
    use crate::simd::{Avx512, PairsOfBf16};

    /// Proof that the processor has AMX's tiles of bf16 besides AVX-512 BF16, and that this process
    /// may use them.
    #[derive(Clone, Copy, Debug)]
    pub(crate) struct Amx(PairsOfBf16);

    /// What `ldtilecfg` reads: columns in bytes, and rows, of every tile.
    #[repr(C, align(64))]
    #[derive(Default)]
    struct Config {
        palette: u8,
        start_row: u8,
        reserved: [u8; 14],
        row_bytes: [u16; 16],
        rows: [u8; 16],
    }

    const _: () = assert!(size_of::<Config>() == 64);

    /// Tiles 0 to 3 hold sums, 4 and 5 the left factor's words, 6 and 7 the right one's.
    fn config(words: usize) -> Config {
        let mut config = Config { palette: 1, ..Config::default() };
        let row_bytes = |words: usize| (words * size_of::<f32>()) as u16;
        for tile in 0..8 {
            let [rows, columns] = match tile {
                0..4 => [TILE, TILE],
                4..6 => [TILE, words],
                _ => [words, TILE],
            };
            (config.rows[tile], config.row_bytes[tile]) = (rows as u8, row_bytes(columns));
        }
        config
    }

    impl Amx {
        pub(crate) fn detect() -> Option<Self> {
            static FOUND: OnceLock<bool> = OnceLock::new();
            let pairs = PairsOfBf16::detect()?;
            FOUND
                .get_or_init(|| has_tiles() && saves_tiles() && may_use_tiles())
                .then_some(Self(pairs))
        }

        /// What else the processor has.
        pub(crate) fn avx512(self) -> Avx512 {
            self.0.avx512()
        }

        pub(super) fn configure(self, words: usize) {
            let config = config(words);
            // SAFETY: an `Amx` exists only where the instruction does, and it reads one `Config`,
            // whose rows and columns are within those of palette 1.
            unsafe {
                asm!("ldtilecfg [{config}]", config = in(reg) &raw const config,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(readonly, nostack, preserves_flags));
            }
        }

        pub(super) fn release(self) {
            // SAFETY: an `Amx` exists only where the instruction does.
            unsafe {
                asm!("tilerelease",
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nomem, nostack, preserves_flags));
            }
        }

        /// As [`super::Configured::multiply`].
        ///
        /// # Safety
        /// Tiles are set up for steps of `words` words, `factors` have `steps` steps, at least one,
        /// and `sums` has room for the block.
        pub(super) unsafe fn multiply(
            self,
            steps: usize,
            words: usize,
            factors: Factors<'_>,
            sums: Sums<'_>,
        ) {
            let upper = sums.to.as_mut_ptr();
            let lower = upper.wrapping_add(TILE * sums.step);
            macro_rules! block {
                ($($first:literal),*) => {
                    asm!(
                        $($first,)*
                        "2:",
                        "tileloadd tmm6, [{right} + 1*{right_row}]",
                        "tileloadd tmm4, [{left} + 1*{left_row}]",
                        "tdpbf16ps tmm0, tmm4, tmm6",
                        "tileloadd tmm7, [{right} + 1*{right_row} + 64]",
                        "tdpbf16ps tmm1, tmm4, tmm7",
                        "tileloadd tmm5, [{left} + 1*{left_row} + 1024]",
                        "tdpbf16ps tmm2, tmm5, tmm6",
                        "tdpbf16ps tmm3, tmm5, tmm7",
                        "add {left}, 2048",
                        "add {right}, {right_step}",
                        "dec {steps}",
                        "jnz 2b",
                        "tilestored [{upper} + 1*{row}], tmm0",
                        "tilestored [{upper} + 1*{row} + 64], tmm1",
                        "tilestored [{lower} + 1*{row}], tmm2",
                        "tilestored [{lower} + 1*{row} + 64], tmm3",
                        steps = inout(reg) steps => _,
                        left = inout(reg) factors.left.as_ptr() => _,
                        right = inout(reg) factors.right.as_ptr() => _,
                        left_row = in(reg) LINE_BYTES,
                        right_row = in(reg) BLOCK * size_of::<f32>(),
                        right_step = in(reg) words * BLOCK * size_of::<f32>(),
                        upper = in(reg) upper,
                        lower = in(reg) lower,
                        row = in(reg) sums.step * size_of::<f32>(),
                        out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                        out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                        options(nostack),
                    )
                };
            }
            // SAFETY: an `Amx` exists only where the instructions do; the contract says that what
            // they read and write is there, in tiles of the rows and columns of `config`.
            unsafe {
                if sums.add {
                    block!(
                        "tileloadd tmm0, [{upper} + 1*{row}]",
                        "tileloadd tmm1, [{upper} + 1*{row} + 64]",
                        "tileloadd tmm2, [{lower} + 1*{row}]",
                        "tileloadd tmm3, [{lower} + 1*{row} + 64]"
                    );
                } else {
                    block!("tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3");
                }
            }
        }

        #[inline(always)]
        pub(super) fn prefetch(self, to: &[f32], step: usize) {
            for row in 0..BLOCK {
                for tile in 0..2 {
                    let at = to.as_ptr().wrapping_add(row * step + tile * TILE);
                    // SAFETY: nothing is read.
                    unsafe { _mm_prefetch::<_MM_HINT_ET0>(at.cast()) };
                }
            }
        }
    }

    /// Whether the processor has AMX-TILE and AMX-BF16. It has AVX-512, and so leaf 7.
    fn has_tiles() -> bool {
        #[allow(unused_unsafe)] // compilers differ on whether it is needed
        // SAFETY: every processor of 64 bits has the instruction.
        let features = unsafe { __cpuid_count(7, 0) }.edx;
        features >> 22 & 1 == 1 && features >> 24 & 1 == 1
    }

    /// Whether the system saves tiles and their set-up when it changes threads.
    fn saves_tiles() -> bool {
        let saved: u32;
        // SAFETY: the processor has AVX-512, which is found by this instruction.
        unsafe {
            asm!("xgetbv", in("ecx") 0, out("eax") saved, out("edx") _,
                options(nomem, nostack, preserves_flags));
        }
        saved >> 17 & 3 == 3
    }

    /// Asks Linux for leave to use tiles: for the process, all of its threads, and those to come. It
    /// is refused where a thread has a signal stack too small to save tiles on.
    fn may_use_tiles() -> bool {
        const ARCH_PRCTL: usize = 158;
        const REQUEST_PERMISSION: usize = 0x1023;
        const TILE_DATA: usize = 18;
        let result: isize;
        // SAFETY: a call of the system that writes no memory of the process.
        unsafe {
            asm!("syscall", inlateout("rax") ARCH_PRCTL => result, in("rdi") REQUEST_PERMISSION,
                in("rsi") TILE_DATA, out("rcx") _, out("r11") _, options(nostack));
        }
        result == 0
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn a_config_is_what_the_manual_says() {
            let config = config(5);
            // SAFETY: any memory is bytes, and a `Config` has no gaps.
            let bytes = unsafe { std::mem::transmute::<Config, [u8; 64]>(config) };
            let mut expected = [0; 64];
            expected[0] = 1;
            for tile in 0..8 {
                let is_left = (4..6).contains(&tile);
                expected[16 + 2 * tile] = if is_left { 20 } else { 64 };
                expected[48 + tile] = if tile < 6 { 16 } else { 5 };
            }
            assert_eq!(bytes, expected);
        }
    }
}

/// The instructions as Intel's manual describes them (Software Developer's Manual, volume 2,
/// TDPBF16PS).
#[cfg(test)]
mod model {
    use half::bf16;

    use super::{BLOCK, Factors, Sums, TILE};

    fn flush(x: f32) -> f32 {
        if x.is_subnormal() { 0.0_f32.copysign(x) } else { x }
    }

    fn pair(word: f32) -> [f32; 2] {
        let bits = word.to_bits();
        [bits as u16, (bits >> 16) as u16].map(|half| flush(bf16::from_bits(half).to_f32()))
    }

    pub(super) fn multiply(steps: usize, words: usize, factors: Factors<'_>, sums: Sums<'_>) {
        let Sums { to, step, add } = sums;
        for row in 0..BLOCK {
            let to = &mut to[row * step..][..BLOCK];
            for (column, to) in to.iter_mut().enumerate() {
                let mut sum = if add { *to } else { 0.0 };
                for at in 0..steps {
                    let left = &factors.left[(at * BLOCK + row) * TILE..][..words];
                    let right = &factors.right[at * words * BLOCK..];
                    let mut both = [0.0_f32; 2];
                    for (left, right) in left.iter().zip(right.chunks_exact(BLOCK)) {
                        let [left, right] = [pair(*left), pair(right[column])];
                        both = [0, 1].map(|i| flush(left[i].mul_add(right[i], both[i])));
                    }
                    sum = flush(flush(sum) + flush(both[0] + both[1]));
                }
                *to = sum;
            }
        }
    }
}
