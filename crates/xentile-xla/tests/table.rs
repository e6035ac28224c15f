//! The library as others link it: `table.cpp` is built with the system's compiler and run.

use std::path::Path;
use std::process::Command;

mod folder;

use folder::library_folder;

fn compiler(variable: &str, default: &str) -> Command {
    let mut command = Command::new(std::env::var_os(variable).unwrap_or_else(|| default.into()));
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("include");
    command.args(["-Wall", "-Wextra", "-Werror", "-pedantic"]).arg("-I").arg(include);
    command
}

fn run(command: &mut Command) {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let text =
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(output.status.success(), "{command:?}:\n{}", text.concat());
}

/// The handlers that the header declares, which is the list that everything is held to; those of GPUs
/// only where the library has them.
fn handlers() -> Vec<String> {
    let header = include_str!("../include/xentile_xla.h");
    let names = header.split(|c: char| !(c.is_alphanumeric() || c == '_'));
    let of_cuda = |name: &str| name.contains("_cuda");
    let is =
        |name: &str| name.starts_with("xentile_") && (name.ends_with("_host") || of_cuda(name));
    names
        .filter(|name| is(name) && (cfg!(feature = "cuda") || !of_cuda(name)))
        .map(String::from)
        .collect()
}

#[test]
fn a_program_in_cpp_finds_every_target() {
    let folder = tempfile::tempdir().unwrap();
    let (program, library) = (folder.path().join("table"), library_folder());
    let mut rpath = std::ffi::OsString::from("-Wl,-rpath,");
    rpath.push(&library);
    let list: String = handlers().iter().map(|name| format!("HANDLER({name})\n")).collect();
    std::fs::write(folder.path().join("handlers.inc"), list).unwrap();
    run(compiler("CXX", "c++")
        .arg("-std=c++17")
        .arg("-I")
        .arg(folder.path())
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/table.cpp"))
        .arg("-o")
        .arg(&program)
        .arg("-L")
        .arg(&library)
        .arg(rpath)
        .args(["-lxentile_xla", "-ldl"]));
    // Cargo's folders come before the one that was linked, and may hold a library of other features.
    run(Command::new(&program).env_remove("LD_LIBRARY_PATH"));
}

#[test]
fn the_header_is_c11() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("header.c");
    // Twice, as any header may be.
    let include = "#include \"xentile_xla.h\"\n".repeat(2);
    let text = format!("{include}int main(void) {{ return (int)sizeof(xentile_target) != 48; }}\n");
    std::fs::write(&source, text).unwrap();
    let program = folder.path().join("header");
    run(compiler("CC", "cc").arg("-std=c11").arg(source).arg("-o").arg(&program));
    run(&mut Command::new(program));
}
