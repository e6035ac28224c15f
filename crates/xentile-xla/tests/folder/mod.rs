//! Where the shared library is that a test was built with.

use std::env::consts::{DLL_PREFIX, DLL_SUFFIX};
use std::path::{Path, PathBuf};

/// The name of the shared library.
pub fn library_name() -> String {
    format!("{DLL_PREFIX}xentile_xla{DLL_SUFFIX}")
}

/// The folder of the shared library that this test was built with.
pub fn library_folder() -> PathBuf {
    let name = library_name();
    let test = std::env::current_exe().unwrap();
    let folders = test.ancestors().skip(1).take(2);
    let found = folders.filter(|folder| folder.join(&name).is_file()).collect::<Vec<_>>();
    let newest = |folder: &&Path| folder.join(&name).metadata().unwrap().modified().unwrap();
    let folder = found.into_iter().max_by_key(newest);
    folder.unwrap_or_else(|| panic!("no {name} beside {}", test.display())).to_path_buf()
}
