//! What libtpu needs from the environment, most of all where there is no TPU. It reads variables when
//! it is loaded, so each is set for a process of its own: this program, once more.

use std::io::Write;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

use crate::schedule;

/// Keeps libtpu from asking the cloud's metadata server about its machine. Where there is no such
/// server it asks for minutes.
pub const SKIP_QUERY: &str = "TPU_SKIP_MDS_QUERY";

/// Lets several processes load libtpu at a time, which one that uses devices may not.
const SHARE: &str = "ALLOW_MULTIPLE_LIBTPU_LOAD";

/// Topologies as libtpu knows them: a generation, and chips along each axis of a slice.
const TOPOLOGIES: &str =
    "v4:2x2x1, v5e:2x2, v5p:2x2x1, v6e:2x2, tpu7x:2x2x1 and larger slices of these";

/// Whether a PCI device of this machine is a TPU.
fn present() -> bool {
    // As JAX has them, from v2 to the eighth generation.
    const CHIPS: [&str; 9] =
        ["0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076", "0x007c", "0x0083"];
    let devices = std::fs::read_dir("/sys/bus/pci/devices").into_iter().flatten().flatten();
    let mut devices = devices.map(|device| device.path());
    devices.any(|device| {
        let read = |file| std::fs::read_to_string(device.join(file)).unwrap_or_default();
        read("vendor").trim() == "0x1ae0" && CHIPS.contains(&read("device").trim())
    })
}

/// Whether libtpu would look for a TPU, for minutes and in vain.
#[must_use]
pub fn would_wait() -> bool {
    std::env::var_os(SKIP_QUERY).is_none() && !present()
}

/// Refuses to run on a TPU where there is none.
pub(crate) fn require() -> Result<()> {
    ensure!(
        !would_wait(),
        "no TPU in this machine, and running needs one; microbench --topology v6e:2x2 compiles without \
         ({SKIP_QUERY}=1 has libtpu look for itself)"
    );
    Ok(())
}

/// Says what topologies there are where libtpu knows none of that `name`.
pub(crate) fn explain(name: &str) -> String {
    format!("topology {name} is none that libtpu knows; it knows {TOPOLOGIES}")
}

/// Runs this program once more with the same arguments, and with libtpu set to expect no TPU to
/// ask about.
///
/// # Errors
/// It does not start.
pub fn again() -> Result<u8> {
    let status = this_program()?.status().context("cannot start this program once more")?;
    Ok(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(crate::cli::BAD_INPUT))
}

/// Runs this program once more with the same arguments, where libtpu dumps its schedules and may
/// crash; none where the environment is like that already.
///
/// # Errors
/// It does not start, or libtpu ends it with a signal.
pub fn compile_apart(topology: &str) -> Result<Option<u8>> {
    let mut arguments = std::env::var(schedule::INIT_ARGS).unwrap_or_default();
    let dumps = schedule::folder(&arguments).is_some();
    let is_set = |name| std::env::var_os(name).is_some();
    if dumps && is_set(SKIP_QUERY) && is_set(SHARE) {
        return Ok(None);
    }
    let folder = tempfile::tempdir().context("cannot make a folder for libtpu's schedules")?;
    if !dumps {
        arguments = schedule::init_args(&arguments, folder.path());
    }
    // libtpu complains of the machine on standard error, whatever comes of it.
    let output = this_program()?
        .env(schedule::INIT_ARGS, arguments)
        .env(SHARE, "1")
        .stdin(Stdio::null())
        .stdout(Stdio::inherit())
        .stderr(Stdio::piped())
        .spawn()
        .and_then(std::process::Child::wait_with_output)
        .context("cannot start this program once more")?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    let Some(code) = output.status.code() else {
        let last = stderr.lines().rfind(|line| !line.trim().is_empty()).unwrap_or_default();
        bail!("libtpu crashed over topology {topology} ({}): {last}", output.status);
    };
    for line in stderr.lines().filter(|line| line.starts_with("error: ")) {
        // There is nobody left to tell.
        _ = writeln!(std::io::stderr(), "{line}");
    }
    Ok(Some(u8::try_from(code).unwrap_or(crate::cli::BAD_INPUT)))
}

/// This program with the same arguments.
fn this_program() -> Result<Command> {
    let program = std::env::current_exe().context("cannot find this program's own file")?;
    let mut command = Command::new(program);
    command.args(std::env::args_os().skip(1));
    if std::env::var_os(SKIP_QUERY).is_none() {
        command.env(SKIP_QUERY, "1");
    }
    Ok(command)
}
