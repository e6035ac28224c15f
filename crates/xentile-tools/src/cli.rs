//! What the binaries have in common: exit codes and how an error is shown.

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
            eprintln!("error: {}", one_line(&format!("{error:#}")));
            ExitCode::from(BAD_INPUT)
        }
    }
}

/// `text` without its line breaks, for a message that is one line.
pub(crate) fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
