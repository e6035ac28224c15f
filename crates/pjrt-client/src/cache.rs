//! Compiled programs on disk.

use std::{
    fmt, fs,
    io::{ErrorKind, Write},
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use sha2::{Digest, Sha256};

use crate::{Client, CompileOptions, Error, LoadedExecutable, Program, Result};

/// What an entry starts with; the number is the version of the layout: magic, key, checksum of the
/// program, program.
const MAGIC: &[u8; 16] = b"pjrt-client 1\n\0\0";
const HASH: usize = 32;
const HEAD: usize = MAGIC.len() + 2 * HASH;

/// A directory of compiled programs, which any number of processes share.
///
/// An entry is found by what the compiler was given: program, options, the variables `XLA_FLAGS`
/// and `LIBTPU_INIT_ARGS`, the plug-in's platform and versions, the devices that it sees, and what
/// the caller adds, such as the version of a library of custom calls. It is written under another
/// name and renamed, so that none is ever half there.
///
/// Nothing is ever removed; a file that is deleted is compiled anew when it is wanted.
///
/// Nothing about a cache is fatal: what cannot be loaded is compiled and stored again, what cannot
/// be stored is compiled each time, and a [`CacheError`] tells of both.
#[derive(Clone, Debug)]
pub struct Cache {
    directory: PathBuf,
}

/// A program, and whether it had to be compiled.
#[derive(Debug)]
pub struct Cached {
    /// The program.
    pub executable: LoadedExecutable,
    /// Whether it was loaded rather than compiled.
    pub is_hit: bool,
    /// Why the cache was of no use, or will be of none next time.
    pub problem: Option<CacheError>,
}

/// Why an entry was not loaded, or not stored.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CacheError {
    /// There is an entry, and not one that this client loads.
    #[error("cannot load the cached program {path}: {reason}; compiled it anew", path = .path.display())]
    Entry {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },

    /// The plug-in does not give its programs out.
    #[error("this plug-in cannot serialise programs, so none is cached: {0}")]
    Serialize(Error),

    /// The entry cannot be written.
    #[error("cannot store the compiled program {path}: {reason}", path = .path.display())]
    Store {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        reason: String,
    },
}

impl Cache {
    /// The cache in `directory`, which is made when the first program is stored.
    ///
    /// # Safety
    /// Only caches write to the directory: entries hold machine code, which is run. Their
    /// checksums tell of accidents and not of intent.
    #[must_use]
    pub unsafe fn new(directory: impl Into<PathBuf>) -> Self {
        Self { directory: directory.into() }
    }

    /// The directory.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The program, loaded where it is there, else compiled and stored. `extra` is what it depends
    /// on beyond what the client knows of.
    ///
    /// Handlers of its custom calls must be registered, in either case.
    ///
    /// # Errors
    /// As for [`Client::compile`].
    pub fn compile(
        &self,
        client: &Client,
        program: &Program<'_>,
        options: &CompileOptions,
        extra: &[&str],
    ) -> Result<Cached> {
        let key = key(client, program, options, extra)?;
        let path = self.directory.join(format!("{}.pjrt", hex(&key)));
        let mut problem = match load(client, &path, &key) {
            Ok(Some(executable)) => return Ok(Cached { executable, is_hit: true, problem: None }),
            Ok(None) => None,
            Err(reason) => Some(CacheError::Entry { path: path.clone(), reason }),
        };
        let executable = client.compile(program, options)?;
        match executable.executable().serialize() {
            Err(error) => problem = Some(CacheError::Serialize(error)),
            Ok(bytes) => {
                if let Err(error) = self.store(&path, &entry(&key, &bytes)) {
                    problem = Some(CacheError::Store { path, reason: error.to_string() });
                }
            }
        }
        Ok(Cached { executable, is_hit: false, problem })
    }

    fn store(&self, path: &Path, entry: &[u8]) -> std::io::Result<()> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        fs::create_dir_all(&self.directory)?;
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let part = path.with_extension(format!("{}.{count}.part", std::process::id()));
        let written = fs::File::create(&part)
            .and_then(|mut file| {
                file.write_all(entry)?;
                // Else a machine that goes down may leave the name and not the bytes.
                file.sync_data()
            })
            .and_then(|()| fs::rename(&part, path));
        written.inspect_err(|_| _ = fs::remove_file(&part))
    }
}

/// The program at `path`; none where there is no such file.
fn load(client: &Client, path: &Path, key: &[u8]) -> Result<Option<LoadedExecutable>, String> {
    let bytes = match fs::read(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        bytes => bytes.map_err(|error| error.to_string())?,
    };
    let program = program_of(&bytes, key)?;
    // SAFETY: the key says that the same version of the same plug-in made the bytes for these
    // devices, the checksum that they are whole, and whoever made the cache that nobody else wrote
    // them.
    unsafe { client.deserialize(program, None) }.map(Some).map_err(|error| error.to_string())
}

fn entry(key: &[u8], program: &[u8]) -> Vec<u8> {
    [MAGIC, key, &Sha256::digest(program)[..], program].concat()
}

/// The program in an entry, if it is whole and that of `key`.
fn program_of<'a>(entry: &'a [u8], key: &[u8]) -> Result<&'a [u8], String> {
    let Some((head, program)) = entry.split_at_checked(HEAD) else {
        return Err(format!("it has {} bytes; an entry has at least {HEAD}", entry.len()));
    };
    let (magic, hashes) = head.split_at(MAGIC.len());
    let (its_key, checksum) = hashes.split_at(HASH);
    if magic != MAGIC {
        return Err("it does not start as an entry does".into());
    }
    if its_key != key {
        return Err("it is the entry of another program, plug-in or device".into());
    }
    if checksum != &Sha256::digest(program)[..] {
        return Err("its checksum does not fit its bytes".into());
    }
    Ok(program)
}

/// All that the compiler's work depends on. What a plug-in does not tell is part of it as nothing.
fn key(
    client: &Client,
    program: &Program<'_>,
    options: &CompileOptions,
    extra: &[&str],
) -> Result<[u8; HASH]> {
    let plugin = client.plugin();
    let mut key = Key(Sha256::new());
    key.part(MAGIC);
    key.part(program.format().as_bytes());
    key.part(program.code());
    key.part(&options.encode()?);
    for variable in ["XLA_FLAGS", "LIBTPU_INIT_ARGS"] {
        key.part(std::env::var_os(variable).unwrap_or_default().as_encoded_bytes());
    }
    key.part(plugin.version().to_string().as_bytes());
    key.part(client.platform_name()?.as_bytes());
    key.part(client.platform_version().unwrap_or_default().as_bytes());
    for (name, value) in plugin.attributes().unwrap_or_default() {
        key.part(format!("{name}={value:?}").as_bytes());
    }
    // Nightly builds may share their versions.
    let bytes = fs::metadata(plugin.path()).map_or(0, |metadata| metadata.len());
    key.part(&bytes.to_le_bytes());
    for device in client.addressable_devices()? {
        key.part(device.kind().unwrap_or_default().as_bytes());
    }
    // The CPU's lists the processor's features, which machine code is for.
    let topology = client.topology().and_then(|topology| topology.serialize());
    key.part(&topology.unwrap_or_default());
    for part in extra {
        key.part(part.as_bytes());
    }
    Ok(key.0.finalize().into())
}

struct Key(Sha256);

impl Key {
    /// Its length first, so that no two lists of parts look the same.
    fn part(&mut self, bytes: &[u8]) {
        self.0.update((bytes.len() as u64).to_le_bytes());
        self.0.update(bytes);
    }
}

fn hex(bytes: &[u8]) -> impl fmt::Display {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_broken_cache_entry_is_refused() {
        let key = [7; HASH];
        let whole = entry(&key, b"program");
        assert_eq!(program_of(&whole, &key).unwrap(), b"program");
        assert!(program_of(&whole, &[8; HASH]).unwrap_err().contains("another program"));
        for length in 0..whole.len() {
            program_of(&whole[..length], &key).unwrap_err();
        }
        for index in 0..whole.len() {
            let mut broken = whole.clone();
            broken[index] ^= 1;
            program_of(&broken, &key).unwrap_err();
        }
        assert!(program_of(b"", &key).unwrap_err().contains("0 bytes"));
    }

    #[test]
    fn parts_of_a_cache_key_are_separated() {
        let of = |parts: &[&[u8]]| {
            let mut key = Key(Sha256::new());
            parts.iter().for_each(|part| key.part(part));
            key.0.finalize()
        };
        assert_ne!(of(&[b"ab", b"c"]), of(&[b"a", b"bc"]));
        assert_ne!(of(&[b"a", b""]), of(&[b"a"]));
    }
}
