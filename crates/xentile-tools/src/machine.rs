//! What a measurement was made on: hardware, versions and commit.

use serde::Serialize;
use xentile_cpu::Isa;

/// The machine and the build.
#[derive(Clone, Debug, Serialize)]
pub struct Machine {
    /// The processor's own name.
    pub processor: String,
    /// Cores this process may use.
    pub cores: usize,
    /// The best instruction set among those that kernels are compiled for.
    pub isa: &'static str,
    /// Operating system and architecture.
    pub platform: String,
    /// This package's version.
    pub xentile: &'static str,
    /// The commit that the binary was built from; `-dirty` when files differed from it.
    pub commit: &'static str,
    /// The compiler.
    pub rustc: &'static str,
    /// Seconds since 1970 when the measurement began.
    pub unix_time: u64,
}

impl Machine {
    /// This machine.
    #[must_use]
    pub fn current() -> Self {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        Self {
            processor: processor(),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            isa: Isa::detect().name(),
            platform: format!("{}-{}", std::env::consts::OS, std::env::consts::ARCH),
            xentile: env!("CARGO_PKG_VERSION"),
            commit: env!("XENTILE_COMMIT"),
            rustc: env!("XENTILE_RUSTC"),
            unix_time: now.map_or(0, |elapsed| elapsed.as_secs()),
        }
    }
}

/// The processor's name with the family and model that tell generations of one name apart.
fn processor() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field = |name: &str| {
        let line = text.lines().find(|line| line.split(':').next().unwrap_or("").trim() == name)?;
        line.split_once(':').map(|(_, value)| value.trim().to_owned())
    };
    match (field("model name"), field("cpu family"), field("model")) {
        (Some(name), Some(family), Some(model)) => {
            format!("{name} (family {family}, model {model})")
        }
        (Some(name), ..) => name,
        _ => std::env::consts::ARCH.to_owned(),
    }
}
