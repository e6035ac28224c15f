//! Files that are never half there.

use std::path::{Path, PathBuf};
use std::{fs, io};

/// A file under a name of this process's own, which becomes the real one when it is whole, and goes
/// when it is dropped before that. No reader and no interruption ever finds half of the real one.
#[derive(Debug)]
pub struct Draft {
    path: PathBuf,
    whole: PathBuf,
}

impl Draft {
    /// For the file `path`, beside it and with the same extension. Missing folders are made.
    ///
    /// # Errors
    /// A folder cannot be made.
    pub fn new(path: &Path) -> io::Result<Self> {
        if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            fs::create_dir_all(folder)?;
        }
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let own = path.with_file_name(format!(".{}.{name}", std::process::id()));
        Ok(Self { path: own, whole: path.into() })
    }

    /// Where to write.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Gives the file its real name, in the place of what has it.
    ///
    /// # Errors
    /// Nothing was written, or the system refuses.
    pub fn finish(self) -> io::Result<()> {
        fs::rename(&self.path, &self.whole)
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        // It may never have been made or have its real name, and there is nobody left to tell.
        _ = fs::remove_file(&self.path);
    }
}

/// Writes a file as a [`Draft`]. Missing folders are made.
///
/// # Errors
/// The folder or the file cannot be written.
pub fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let draft = Draft::new(path)?;
    fs::write(draft.path(), bytes)?;
    draft.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_written_atomically() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new/file.txt");
        let draft = Draft::new(&path).unwrap();
        fs::write(draft.path(), "half").unwrap();
        assert!(!path.exists());
        drop(draft);
        assert_eq!(fs::read_dir(folder.path().join("new")).unwrap().count(), 0);
        write_whole(&path, b"whole").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"whole");
        assert_eq!(fs::read_dir(folder.path().join("new")).unwrap().count(), 1);
        Draft::new(&path).unwrap().finish().unwrap_err();
    }
}
