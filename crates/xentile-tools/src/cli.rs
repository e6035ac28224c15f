//! What the binaries have in common: exit codes and how an error is shown.

use std::path::Path;
use std::process::ExitCode;

/// Everything asked for was done, and what was judged is within tolerance.
pub const PASSED: u8 = 0;
/// Something judged is outside tolerance.
pub const FAILED: u8 = 1;
/// The input is bad; nothing was written.
pub const BAD_INPUT: u8 = 2;

/// Turns the outcome of a binary into its exit code. An error is one line on standard error, its
/// causes after colons.
#[must_use]
pub fn finish(outcome: anyhow::Result<u8>) -> ExitCode {
    match outcome {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            let line = format!("{error:#}").split_whitespace().collect::<Vec<_>>().join(" ");
            eprintln!("error: {line}");
            ExitCode::from(BAD_INPUT)
        }
    }
}

/// Writes a file under a temporary name beside it and renames it, so that no reader and no
/// interruption ever finds half of it. Missing folders are made.
///
/// # Errors
/// The folder or the file cannot be written.
pub fn write_whole(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    if let Some(folder) = folder {
        std::fs::create_dir_all(folder)?;
    }
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(format!(".{}.part", std::process::id()));
    std::fs::write(&temporary, bytes)?;
    std::fs::rename(&temporary, path).inspect_err(|_| _ = std::fs::remove_file(&temporary))
}
