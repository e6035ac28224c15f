//! Names the shared library for those who link it, and says where it is tested.
//!
//! `XENTILE_SONAME` is the name, `libxentile_xla.so` without it: scripts/install.sh, which makes the links
//! to versions that a prefix has, gives one with a version.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=XENTILE_SONAME");
    let target = |part: &str| std::env::var(format!("CARGO_CFG_TARGET_{part}")).unwrap_or_default();
    let (system, environment) = (target("OS"), target("ENV"));
    if system == "linux" {
        let name = std::env::var("XENTILE_SONAME").unwrap_or_else(|_| "libxentile_xla.so".into());
        println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,{name}");
    }
    if (system.as_str(), environment.as_str()) != ("linux", "gnu") {
        println!(
            "cargo::warning=xentile is tested on Linux with glibc, on x86-64 and aarch64: on {system} \
             {environment} its kernels for CPUs are untested, and there are none for GPUs (on Windows, \
             WSL 2 runs all of them)"
        );
    }
}
