//! What stands in for NVIDIA's libraries.

use std::path::Path;
use std::process::Command;

/// A folder with a `libcuda.so.1` of these files of this folder's parent, which have `sizes` for macros.
pub fn driver(sources: &[&str], sizes: &[(&str, usize)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let compiler = std::env::var_os("CC").unwrap_or_else(|| "cc".into());
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    let output = Command::new(compiler)
        .args(["-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o"])
        .arg(folder.path().join("libcuda.so.1"))
        .args(sizes.iter().map(|(name, bytes)| format!("-D{name}={bytes}")))
        .args(sources.iter().map(|source| tests.join(source)))
        .arg("-lm")
        .output()
        .expect("a C compiler");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    folder
}
