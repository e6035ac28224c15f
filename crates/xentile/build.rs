//! Lists the operations for tools: the folders of `src` with a file `operation.rs`.

use std::path::Path;
use std::{env, fs, io};

fn main() -> io::Result<()> {
    println!("cargo::rerun-if-changed=src");
    let mut names = Vec::new();
    for entry in fs::read_dir("src")? {
        let path = entry?.path();
        if path.join("operation.rs").is_file() {
            names.extend(path.file_name().map(|name| name.to_string_lossy().into_owned()));
        }
    }
    names.sort();
    let list: String =
        names.iter().map(|name| format!("crate::{name}::operation::ALL,\n")).collect();
    let folder = env::var_os("OUT_DIR").unwrap_or_default();
    fs::write(Path::new(&folder).join("operations.rs"), format!("&[\n{list}]\n"))
}
