//! What ran, where a config leaves a choice.

use serde::Serialize;
use xentile_programs::Exported;

use crate::config::TileConfig;

/// What a backend settled on where the config left a choice.
#[derive(Clone, Debug, Default)]
pub(crate) struct Setup {
    /// None where the program has no tiles; an extent of none where the kernel chose it.
    pub(crate) tile: Option<TileConfig>,
    /// The instruction set; none where XLA chose.
    pub(crate) isa: Option<&'static str>,
    /// Threads; none where XLA chose.
    pub(crate) threads: Option<usize>,
    /// The PJRT plug-in: file, version, platform.
    pub(crate) plugin: Option<String>,
    /// The program from JAX; none where it is this build's own.
    pub(crate) exported: Option<ExportedBy>,
}

/// Which program ran, of those that JAX exported.
#[derive(Clone, Debug, Serialize)]
pub struct ExportedBy {
    /// The SHA-256 of the program.
    pub sha256: String,
    /// The version of JAX that exported it.
    pub jax_version: String,
    /// How it is cut, in words, where that is planned.
    pub plan: Option<String>,
}

impl From<&Exported> for ExportedBy {
    fn from(exported: &Exported) -> Self {
        Self {
            sha256: exported.sha256.clone(),
            jax_version: exported.jax_version.clone(),
            plan: exported.plan.clone(),
        }
    }
}
