//! What plug-ins run programs on.

/// What a plug-in runs programs on.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum Platform {
    /// The processor.
    Cpu,
    /// NVIDIA GPUs.
    Cuda,
    /// Google's TPUs.
    Tpu,
}

impl Platform {
    /// Every platform.
    pub const ALL: &[Self] = &[Self::Cpu, Self::Cuda, Self::Tpu];

    /// `cpu`, `cuda`, `tpu`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
            Self::Tpu => "tpu",
        }
    }

    /// The environment variable that names the plug-in's file.
    #[must_use]
    pub const fn variable(self) -> &'static str {
        match self {
            Self::Cpu => "XENTILE_PJRT_CPU",
            Self::Cuda => "XENTILE_PJRT_CUDA",
            Self::Tpu => "XENTILE_PJRT_TPU",
        }
    }

    /// The command that installs the plug-in.
    #[must_use]
    pub const fn install(self) -> &'static str {
        match self {
            Self::Cpu => "pip install xla-cpu-pjrt==0.0.1",
            Self::Cuda => "pip install 'jax-cuda13-plugin[with-cuda]'",
            Self::Tpu => "pip install libtpu",
        }
    }
}

impl std::fmt::Display for Platform {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}
