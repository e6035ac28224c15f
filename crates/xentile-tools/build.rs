//! Records the commit and the compiler, which every measurement carries, and embeds configs/.

use std::error::Error;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::Command;

fn main() -> Result<(), Box<dyn Error>> {
    embed_presets()?;
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
    Ok(())
}

/// Writes the list of `presets.rs`: tool, name and text of every config.
fn embed_presets() -> Result<(), Box<dyn Error>> {
    let configs = PathBuf::from(std::env::var("CARGO_MANIFEST_DIR")?).join("configs");
    let mut list = String::from("&[\n");
    for tool in ["decode", "gradcheck", "microbench", "suite", "sweep"] {
        let folder = configs.join(tool);
        println!("cargo::rerun-if-changed={}", folder.display());
        let mut files = std::fs::read_dir(&folder)?
            .map(|entry| Ok(entry?.path()))
            .collect::<std::io::Result<Vec<_>>>()?;
        let kind = if tool == "decode" { "json" } else { "yaml" };
        files.retain(|file| file.extension().is_some_and(|extension| extension == kind));
        files.sort();
        for file in files {
            let name = file.file_stem().ok_or("a config without a name")?;
            _ = writeln!(
                list,
                "({tool:?}, {:?}, include_str!({file:?})),",
                name.display().to_string()
            );
        }
    }
    list += "]\n";
    std::fs::write(PathBuf::from(std::env::var("OUT_DIR")?).join("presets.rs"), list)?;
    Ok(())
}
