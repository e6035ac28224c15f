//! Memory: what the system has left, what this process uses, and refusing before it runs out.

use anyhow::{Result, bail};

/// Bytes that can still be allocated: what the system calls available, or what is left of the
/// control group's limit, whichever is less. None where the system does not tell.
#[must_use]
pub fn available_bytes() -> Option<u64> {
    let field = |text: &str, name: &str| {
        let line = text.lines().find(|line| line.starts_with(name))?;
        line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib * 1024)
    };
    let system = field(&std::fs::read_to_string("/proc/meminfo").ok()?, "MemAvailable:");
    let number = |path: &str| std::fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let group = number("/sys/fs/cgroup/memory.max")
        .zip(number("/sys/fs/cgroup/memory.current"))
        .map(|(limit, used)| limit.saturating_sub(used));
    system.into_iter().chain(group).min()
}

/// A figure of this process from the kernel's status page, in bytes.
fn status(name: &str) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find(|line| line.starts_with(name))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib * 1024)
}

/// Bytes of memory that this process holds now, where the system tells.
#[must_use]
pub fn resident_bytes() -> Option<u64> {
    status("VmRSS:")
}

/// The most bytes of memory that this process ever held, where the system tells.
#[must_use]
pub fn peak_resident_bytes() -> Option<u64> {
    status("VmHWM:")
}

/// `bytes` as MiB or GiB.
#[must_use]
pub fn human(bytes: u64) -> String {
    const MIB: f64 = (1 << 20) as f64;
    let mib = bytes as f64 / MIB;
    if mib < 1024.0 { format!("{mib:.1} MiB") } else { format!("{:.2} GiB", mib / 1024.0) }
}

/// Refuses work that needs more than `needed` bytes beyond what is available. `None` stands for a
/// number too large to write down. `remedy` says what to change.
///
/// # Errors
/// Less is available, with both figures.
pub fn require(needed: Option<u64>, remedy: &str) -> Result<()> {
    let Some(needed) = needed else {
        bail!("this shape has more elements than an address can name; {remedy}");
    };
    match available_bytes() {
        Some(available) if needed > available => bail!(
            "this needs {} of memory and {} is available; {remedy}",
            human(needed),
            human(available)
        ),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_what_cannot_fit() {
        assert!(require(Some(0), "").is_ok());
        let message = require(Some(1 << 60), "lower it").unwrap_err().to_string();
        assert!(message.starts_with("this needs 1073741824.00 GiB of memory and "), "{message}");
        assert!(require(None, "").is_err());
    }

    #[test]
    fn the_peak_is_at_least_the_present() {
        let touched = std::hint::black_box(vec![1_u8; 1 << 24]);
        let (now, peak) = (resident_bytes().unwrap(), peak_resident_bytes().unwrap());
        assert!(now >= touched.len() as u64 && peak >= touched.len() as u64);
    }
}
