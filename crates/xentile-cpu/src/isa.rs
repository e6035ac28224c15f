//! The instruction sets that kernels are compiled for, and the choice between them at run time.

use std::fmt;
use std::str::FromStr;

use xentile::Error;

use crate::simd::{Job, MulAdd, PairsOfBf16, Portable, Simd, Tiles};

/// An instruction set that this processor is known to have.
#[derive(Clone, Copy, Debug)]
pub struct Isa(Kind);

#[derive(Clone, Copy, Debug)]
enum Kind {
    /// As `Avx512Bf16`, but for products of tiles.
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    AmxBf16(crate::simd::Amx),
    /// As `Avx512`, but for products of matrices in bf16.
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16(PairsOfBf16),
    #[cfg(target_arch = "x86_64")]
    Avx512(crate::simd::Avx512),
    #[cfg(target_arch = "x86_64")]
    Avx2(crate::simd::Avx2),
    #[cfg(target_arch = "aarch64")]
    Neon(crate::simd::Neon),
    Portable(Portable),
}

/// Work on factors whose words are pairs of bf16, or numbers.
pub(crate) trait PairsJob {
    /// Does the work, as [`Job::run`] does.
    fn run<S: Simd, M: MulAdd<S>>(self, simd: S, mul_add: M);
}

impl PairsOfBf16 {
    /// Runs `job` with the instructions that these are.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn run<J: PairsJob>(self, job: J) {
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,avx512bf16")]
        fn enter<J: PairsJob>(job: J, pairs: PairsOfBf16) {
            job.run(pairs.avx512(), pairs);
        }
        // SAFETY: a `PairsOfBf16` exists only where these features were detected.
        unsafe { enter(job, self) }
    }

    /// There are none to run `job` with.
    #[cfg(not(target_arch = "x86_64"))]
    pub(crate) fn run<J: PairsJob>(self, _job: J) {
        match self {}
    }
}

impl Isa {
    /// The best instruction set of this processor.
    #[must_use]
    pub fn detect() -> Self {
        Self::available()[0]
    }

    /// Every instruction set of this processor, best first.
    #[must_use]
    pub fn available() -> Vec<Self> {
        let kinds = [
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            crate::simd::Amx::detect().map(Kind::AmxBf16),
            #[cfg(target_arch = "x86_64")]
            PairsOfBf16::detect().map(Kind::Avx512Bf16),
            #[cfg(target_arch = "x86_64")]
            crate::simd::Avx512::detect().map(Kind::Avx512),
            #[cfg(target_arch = "x86_64")]
            crate::simd::Avx2::detect().map(Kind::Avx2),
            #[cfg(target_arch = "aarch64")]
            crate::simd::Neon::detect().map(Kind::Neon),
            Some(Kind::Portable(Portable)),
        ];
        kinds.into_iter().flatten().map(Self).collect()
    }

    /// The name that configs and reports use.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self.0 {
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            Kind::AmxBf16(_) => "amx_bf16",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512Bf16(_) => "avx512_bf16",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512(_) => "avx512",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2(_) => "avx2",
            #[cfg(target_arch = "aarch64")]
            Kind::Neon(_) => "neon",
            Kind::Portable(_) => "portable",
        }
    }

    /// The products of pairs of bf16, where they are part of this instruction set.
    pub(crate) fn pairs_of_bf16(self) -> Option<PairsOfBf16> {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512Bf16(pairs) => Some(pairs),
            _ => None,
        }
    }

    /// The products of tiles of pairs of bf16, where they are part of this instruction set.
    pub(crate) fn tiles(self) -> Option<Tiles> {
        match self.0 {
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            Kind::AmxBf16(amx) => Some(Tiles::Amx(amx)),
            _ => None,
        }
    }

    /// Runs `job` with this instruction set.
    #[inline]
    pub fn run<J: Job>(self, job: J) -> J::Output {
        match self.0 {
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            Kind::AmxBf16(amx) => Self(Kind::Avx512(amx.avx512())).run(job),
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512Bf16(pairs) => Self(Kind::Avx512(pairs.avx512())).run(job),
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512(simd) => {
                #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
                fn enter<J: Job>(job: J, simd: crate::simd::Avx512) -> J::Output {
                    job.run(simd)
                }
                // SAFETY: an `Avx512` exists only where these features were detected.
                unsafe { enter(job, simd) }
            }
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2(simd) => {
                #[target_feature(enable = "avx2,fma,f16c")]
                fn enter<J: Job>(job: J, simd: crate::simd::Avx2) -> J::Output {
                    job.run(simd)
                }
                // SAFETY: an `Avx2` exists only where these features were detected.
                unsafe { enter(job, simd) }
            }
            #[cfg(target_arch = "aarch64")]
            Kind::Neon(simd) => job.run(simd),
            Kind::Portable(simd) => job.run(simd),
        }
    }
}

impl Default for Isa {
    fn default() -> Self {
        Self::detect()
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Isa {
    type Err = Error;

    /// The instruction set called `name`, if this processor has it.
    fn from_str(name: &str) -> Result<Self, Error> {
        Self::available().into_iter().find(|isa| isa.name() == name).ok_or_else(|| Error::Unknown {
            what: "isa",
            value: name.to_owned(),
            choices: "those of this processor, out of amx_bf16, avx512_bf16, avx512, avx2, neon, portable",
        })
    }
}
