//! Programs that JAX exported: portable StableHLO bytecode, and beside it a manifest in JSON that
//! says what it computes and for what. docs/internals/pjrt.md has an example.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use crate::{ElementType, TensorType};

/// The format of manifests that this reads.
pub const MANIFEST_VERSION: u32 = 1;

/// JAX's calling conventions that this knows: in both `main` takes the arguments alone.
pub const CALLING_CONVENTIONS: [u32; 2] = [9, 10];

/// The largest manifest read, in bytes.
const MAX_MANIFEST_BYTES: u64 = 1 << 20;

/// What MLIR bytecode begins with.
const MAGIC: &[u8] = b"ML\xefR";

/// A manifest, as written.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Manifest {
    manifest_version: u32,
    op: String,
    program: String,
    file: PathBuf,
    sha256: String,
    arguments: Vec<Tensor>,
    results: Vec<Tensor>,
    tile: Tile,
    options: Map<String, Value>,
    platforms: Vec<String>,
    jax_version: String,
    calling_convention_version: u32,
    /// Manifests of linear cross-entropy have had it by that name from the first.
    #[serde(default, alias = "linear")]
    settings: Option<Map<String, Value>>,
    #[serde(default)]
    plan: Option<String>,
    #[serde(default)]
    moved: BTreeMap<String, u64>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Tensor {
    dtype: String,
    shape: Vec<usize>,
}

/// The tile that a program was made with; an extent is none where kernels choose it as they run.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Tile {
    /// Tokens of a tile.
    #[serde(deserialize_with = "Option::deserialize")]
    pub time_block: Option<usize>,
    /// Vocabulary columns of a tile.
    #[serde(deserialize_with = "Option::deserialize")]
    pub block_size: Option<usize>,
}

/// A program that JAX exported for one platform, with what its manifest says.
#[derive(Clone)]
pub struct Exported {
    /// The operation, such as `cross_entropy`.
    pub op: String,
    /// What of it is computed: the name of a function of the operation's module, such as
    /// `value_and_grad`.
    pub program: String,
    /// What `main` takes, in order.
    pub arguments: Vec<TensorType>,
    /// What `main` gives, in order.
    pub results: Vec<TensorType>,
    /// The tile.
    pub tile: Tile,
    /// The operation's options, by the names that configs give them.
    pub options: Map<String, Value>,
    /// The platform it was exported for, by JAX's name: `cpu`, `cuda`, `tpu`.
    pub platform: String,
    /// The version of JAX that wrote it.
    pub jax_version: String,
    /// The calling convention of `jax.export`.
    pub calling_convention_version: u32,
    /// The SHA-256 of the bytecode, in lower-case hexadecimal digits.
    pub sha256: String,
    /// Extents and options that are keys of their own in configs; none where the manifest tells of none.
    pub settings: Option<Map<String, Value>>,
    /// How it is cut, in words, where that is planned.
    pub plan: Option<String>,
    /// Bytes that kernels move between HBM and VMEM, by their names, where that is planned.
    pub moved: BTreeMap<String, u64>,
    /// The portable StableHLO bytecode.
    pub bytecode: Vec<u8>,
}

/// Why a program cannot be loaded.
#[derive(Debug, thiserror::Error)]
#[error("{}: {kind}", path.display())]
pub struct Error {
    path: PathBuf,
    #[source]
    kind: ErrorKind,
}

#[derive(Debug, thiserror::Error)]
enum ErrorKind {
    #[error("cannot read it: {0}")]
    Read(io::Error),
    #[error("{0} bytes are no manifest; the most is {MAX_MANIFEST_BYTES}")]
    Length(u64),
    #[error("not a manifest: {0}")]
    Json(String),
    #[error("manifest_version is {0}; this reads {MANIFEST_VERSION}")]
    Version(u32),
    #[error("calling_convention_version is {0}; this reads {CALLING_CONVENTIONS:?}")]
    CallingConvention(u32),
    #[error("platforms are {0:?}; it must be one, as a program for several takes another argument")]
    Platforms(Vec<String>),
    #[error("{place}.dtype is `{dtype}`; it must be one of {}", dtypes())]
    DType { place: String, dtype: String },
    #[error("tile.{0} is 0; it must be at least 1")]
    Tile(&'static str),
    #[error("its file {} cannot be read: {error}", .file.display())]
    File { file: PathBuf, error: io::Error },
    #[error("its file {} has the sha256 {found}; the manifest says {expected}", .file.display())]
    Hash { file: PathBuf, found: String, expected: String },
    #[error("its file {} is no MLIR bytecode, which begins with the bytes {MAGIC:x?}", .0.display())]
    Bytecode(PathBuf),
}

fn dtypes() -> String {
    ElementType::ALL.map(|element| element.to_string()).join(", ")
}

impl Exported {
    /// Loads the program whose manifest is in the file `path`. The bytecode lies where the manifest's
    /// `file` says, seen from the manifest's folder.
    ///
    /// # Errors
    /// A file that cannot be read; a manifest with a key or value that is not known, or that lacks
    /// one; bytecode whose SHA-256 is not the manifest's.
    pub fn load(path: &Path) -> Result<Self, Error> {
        Self::read(path).map_err(|kind| Error { path: path.into(), kind })
    }

    fn read(path: &Path) -> Result<Self, ErrorKind> {
        let length = std::fs::metadata(path).map_err(ErrorKind::Read)?.len();
        if length > MAX_MANIFEST_BYTES {
            return Err(ErrorKind::Length(length));
        }
        let text = std::fs::read_to_string(path).map_err(ErrorKind::Read)?;
        let manifest = parse(&text)?;
        if manifest.manifest_version != MANIFEST_VERSION {
            return Err(ErrorKind::Version(manifest.manifest_version));
        }
        let convention = manifest.calling_convention_version;
        if !CALLING_CONVENTIONS.contains(&convention) {
            return Err(ErrorKind::CallingConvention(convention));
        }
        let Ok([platform]) = <[String; 1]>::try_from(manifest.platforms.clone()) else {
            return Err(ErrorKind::Platforms(manifest.platforms));
        };
        let Tile { time_block, block_size } = manifest.tile;
        for (name, extent) in [("time_block", time_block), ("block_size", block_size)] {
            if extent == Some(0) {
                return Err(ErrorKind::Tile(name));
            }
        }
        let arguments = types("arguments", manifest.arguments)?;
        let results = types("results", manifest.results)?;

        let file = path.parent().unwrap_or(Path::new("")).join(&manifest.file);
        let bytecode = match std::fs::read(&file) {
            Ok(bytecode) => bytecode,
            Err(error) => return Err(ErrorKind::File { file, error }),
        };
        let found = sha256(&bytecode);
        if found != manifest.sha256 {
            return Err(ErrorKind::Hash { file, found, expected: manifest.sha256 });
        }
        if !bytecode.starts_with(MAGIC) {
            return Err(ErrorKind::Bytecode(file));
        }
        Ok(Self {
            op: manifest.op,
            program: manifest.program,
            arguments,
            results,
            tile: manifest.tile,
            options: manifest.options,
            platform,
            jax_version: manifest.jax_version,
            calling_convention_version: convention,
            sha256: found,
            settings: manifest.settings,
            plan: manifest.plan,
            moved: manifest.moved,
            bytecode,
        })
    }
}

impl fmt::Debug for Exported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Exported")
            .field("op", &self.op)
            .field("program", &self.program)
            .field("platform", &self.platform)
            .field("sha256", &self.sha256)
            .finish_non_exhaustive()
    }
}

/// The SHA-256 of `bytes`, in lower-case hexadecimal digits.
fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn parse(text: &str) -> Result<Manifest, ErrorKind> {
    let mut json = serde_json::Deserializer::from_str(text);
    let manifest = serde_path_to_error::deserialize(&mut json).map_err(|error| {
        let place = error.path().to_string();
        let message = error.into_inner();
        ErrorKind::Json(match place.as_str() {
            "." | "?" => message.to_string(),
            place => format!("`{place}`: {message}"),
        })
    })?;
    json.end().map_err(|error| ErrorKind::Json(error.to_string()))?;
    Ok(manifest)
}

fn types(list: &str, tensors: Vec<Tensor>) -> Result<Vec<TensorType>, ErrorKind> {
    let ty = |(index, Tensor { dtype, shape }): (usize, Tensor)| match ElementType::ALL
        .into_iter()
        .find(|element| element.to_string() == dtype)
    {
        Some(element) => Ok(TensorType::new(&shape, element)),
        None => Err(ErrorKind::DType { place: format!("{list}[{index}]"), dtype }),
    };
    tensors.into_iter().enumerate().map(ty).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const BYTECODE: &[u8] = b"ML\xefR and so on";

    fn manifest() -> Value {
        json!({
            "manifest_version": 1,
            "op": "cross_entropy",
            "program": "value_and_grad",
            "file": "program.mlirbc",
            "sha256": sha256(BYTECODE),
            "arguments": [
                {"dtype": "bf16", "shape": [16, 256]},
                {"dtype": "i32", "shape": [16]},
            ],
            "results": [
                {"dtype": "f32", "shape": []},
                {"dtype": "bf16", "shape": [16, 256]},
            ],
            "tile": {"time_block": 8, "block_size": 128},
            "options": {"reduction": "mean"},
            "platforms": ["tpu"],
            "jax_version": "0.12.0",
            "calling_convention_version": 10,
        })
    }

    fn load(manifest: &str, bytecode: Option<&[u8]>) -> Result<Exported, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("program.json");
        std::fs::write(&path, manifest).unwrap();
        if let Some(bytecode) = bytecode {
            std::fs::write(folder.path().join("program.mlirbc"), bytecode).unwrap();
        }
        Exported::load(&path).map_err(|error| error.to_string())
    }

    #[test]
    fn a_program_and_its_manifest() {
        let exported = load(&manifest().to_string(), Some(BYTECODE)).unwrap();
        assert_eq!(exported.bytecode, BYTECODE);
        assert_eq!(exported.arguments[0], TensorType::new(&[16, 256], ElementType::Bf16));
        assert_eq!(exported.results[0], TensorType::new(&[], ElementType::F32));
        assert_eq!(exported.tile, Tile { time_block: Some(8), block_size: Some(128) });
        assert_eq!((exported.settings, exported.plan), (None, None));
        assert_eq!((exported.platform.as_str(), exported.sha256.len()), ("tpu", 64));
        assert_eq!(exported.options["reduction"], "mean");
    }

    #[test]
    fn shapes_that_disagree_are_named() {
        let cases = [
            ("/manifest_version", json!(2), "manifest_version is 2; this reads 1"),
            (
                "/calling_convention_version",
                json!(8),
                "calling_convention_version is 8; this reads [9, 10]",
            ),
            (
                "/platforms",
                json!(["cpu", "tpu"]),
                r#"platforms are ["cpu", "tpu"]; it must be one"#,
            ),
            ("/platforms", json!([]), "platforms are []; it must be one"),
            (
                "/arguments/1/dtype",
                json!("int32"),
                "arguments[1].dtype is `int32`; it must be one of f32, bf16, f16, i32, i64, \
                 ui8, i1, f8E4M3FN, f8E5M2",
            ),
            ("/results/0/shape", json!([-1]), "`results[0].shape[0]`: invalid value"),
            ("/tile/block_size", json!(0), "tile.block_size is 0; it must be at least 1"),
            ("/tile", json!({"time_block": 1}), "`tile`: missing field `block_size`"),
            ("/sha256", json!("00"), "the manifest says 00"),
            ("/file", json!("other.mlirbc"), "other.mlirbc cannot be read: No such file"),
        ];
        for (place, value, message) in cases {
            let mut manifest = manifest();
            *manifest.pointer_mut(place).unwrap() = value;
            let error = load(&manifest.to_string(), Some(BYTECODE)).unwrap_err();
            assert!(error.contains("program.json: ") && error.contains(message), "{error}");
        }
        let mut extra = manifest();
        extra["tiles"] = json!(1);
        let error = load(&extra.to_string(), Some(BYTECODE)).unwrap_err();
        assert!(error.contains("unknown field `tiles`"), "{error}");
        let error = load("{", None).unwrap_err();
        assert!(error.contains("not a manifest"), "{error}");
        let error = load(&manifest().to_string(), None).unwrap_err();
        assert!(error.contains("program.mlirbc cannot be read"), "{error}");
        let error = load(&manifest().to_string(), Some(b"ML\xefR else")).unwrap_err();
        assert!(error.contains("has the sha256 "), "{error}");
        let error = Exported::load(Path::new("/nowhere/x.json")).unwrap_err().to_string();
        assert!(error.starts_with("/nowhere/x.json: cannot read it: "), "{error}");
    }

    #[test]
    fn a_program_of_hidden_states_has_a_plan_and_may_leave_the_tile_open() {
        let mut manifest = manifest();
        manifest["tile"] = json!({"time_block": null, "block_size": null});
        manifest["plan"] = json!("tokens: 16 at a time");
        manifest["moved"] = json!({"a_kernel": 7});
        manifest["linear"] =
            json!({"hidden": 8, "bias": true, "vocab_axis": 1, "max_scratch_bytes": null});
        let exported = load(&manifest.to_string(), Some(BYTECODE)).unwrap();
        assert_eq!(exported.tile, Tile { time_block: None, block_size: None });
        assert_eq!(exported.plan.as_deref(), Some("tokens: 16 at a time"));
        assert_eq!(exported.moved, BTreeMap::from([("a_kernel".to_owned(), 7)]));
        let settings = exported.settings.unwrap();
        assert_eq!((&settings["hidden"], &settings["bias"]), (&json!(8), &json!(true)));
        assert!(settings["max_scratch_bytes"].is_null());
        let by_its_name = manifest.as_object_mut().unwrap();
        let moved = by_its_name.remove("linear").unwrap();
        by_its_name.insert("settings".into(), moved);
        let exported = load(&manifest.to_string(), Some(BYTECODE)).unwrap();
        assert_eq!(exported.settings, Some(settings));
    }

    #[test]
    fn text_is_no_bytecode() {
        let mut manifest = manifest();
        manifest["sha256"] = sha256(b"module {}").into();
        let error = load(&manifest.to_string(), Some(b"module {}")).unwrap_err();
        assert!(error.contains("is no MLIR bytecode"), "{error}");
    }
}
