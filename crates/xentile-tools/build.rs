//! Records the commit and the compiler, which every measurement carries.

use std::process::Command;

fn main() {
    let first_line = |program: &str, arguments: &[&str]| {
        let output = Command::new(program).args(arguments).output().ok()?;
        let text = String::from_utf8(output.stdout).ok()?;
        output.status.success().then(|| text.lines().next().unwrap_or_default().to_owned())
    };
    let unknown = || "unknown".to_owned();
    let git = |arguments: &[&str]| first_line("git", arguments);
    let commit = git(&["describe", "--always", "--dirty", "--abbrev=12"]).unwrap_or_else(unknown);
    println!("cargo::rustc-env=XENTILE_COMMIT={commit}");
    let rustc = std::env::var("RUSTC").unwrap_or_else(|_| "rustc".to_owned());
    let version = first_line(&rustc, &["--version"]).unwrap_or_else(unknown);
    println!("cargo::rustc-env=XENTILE_RUSTC={version}");
    if let Some(head) = git(&["rev-parse", "--git-path", "logs/HEAD"]) {
        println!("cargo::rerun-if-changed={head}");
    }
    println!("cargo::rerun-if-changed=build.rs");
}
