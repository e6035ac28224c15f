//! Names the shared library for those who link it, says where it is tested, and lists the operations: the
//! folders of `src` with handlers, which are files by the platform's name.
//!
//! `XENTILE_SONAME` is the name, `libxentile_xla.so` without it: scripts/install.sh, which makes the links
//! to versions that a prefix has, gives one with a version.

use std::collections::BTreeSet;
use std::path::Path;
use std::{env, fs, io};

fn main() -> io::Result<()> {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=src");
    println!("cargo::rerun-if-env-changed=XENTILE_SONAME");
    let target = |part: &str| env::var(format!("CARGO_CFG_TARGET_{part}")).unwrap_or_default();
    let (system, environment) = (target("OS"), target("ENV"));
    if system == "linux" {
        let name = env::var("XENTILE_SONAME").unwrap_or_else(|_| "libxentile_xla.so".into());
        println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,{name}");
    }
    if (system.as_str(), environment.as_str()) != ("linux", "gnu") {
        println!(
            "cargo::warning=xentile is tested on Linux with glibc, on x86-64 and aarch64: on {system} \
             {environment} its kernels for CPUs are untested, and there are none for GPUs (on Windows, \
             WSL 2 runs all of them)"
        );
    }
    let folder = env::var_os("OUT_DIR").unwrap_or_default();
    let folder = Path::new(&folder);
    let (host, cuda) = (with_file("cpu.rs")?, with_file("cuda.rs")?);
    let operations = BTreeSet::from_iter(host.iter().chain(&cuda).cloned());
    fs::write(folder.join("declarations.rs"), list(&operations, "DECLARATIONS"))?;
    fs::write(folder.join("host_targets.rs"), list(&host, "cpu::TARGETS"))?;
    fs::write(folder.join("cuda_targets.rs"), list(&cuda, "cuda::TARGETS"))
}

/// The names of folders that have a file `name`, in order.
fn with_file(name: &str) -> io::Result<Vec<String>> {
    let mut found = Vec::new();
    for entry in fs::read_dir("src")? {
        let path = entry?.path();
        if path.join(name).is_file() {
            found.extend(path.file_name().map(|name| name.to_string_lossy().into_owned()));
        }
    }
    found.sort();
    Ok(found)
}

/// The constant `item` of each module, as an array.
fn list<'a>(modules: impl IntoIterator<Item = &'a String>, item: &str) -> String {
    let items: String =
        modules.into_iter().map(|name| format!("crate::{name}::{item},\n")).collect();
    format!("&[\n{items}]\n")
}
