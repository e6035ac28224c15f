//! Arrays from a `.safetensors` file.

use std::borrow::Cow;
use std::fs::File;
use std::path::Path;

use anyhow::{Context, Result, anyhow};
use bytemuck::Pod;
use memmap2::Mmap;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use xentile::Error;
use xentile::operation::{Array, ArrayElement, Stored};

/// A file mapped into memory.
#[derive(Debug)]
pub struct Mapped(Mmap);

impl Mapped {
    /// Maps the file at `path`.
    ///
    /// # Errors
    /// It cannot be opened or mapped.
    pub fn open(path: &Path) -> Result<Self> {
        let shown = path.display();
        let file = File::open(path).with_context(|| {
            format!("cannot open {shown} (scripts/make_real_logits makes one from a real model)")
        })?;
        // SAFETY: the map is only read. Another process that cuts the file short meanwhile makes
        // this one stop at a signal, as with every mapped file; it cannot make it write.
        let map = unsafe { Mmap::map(&file) }.with_context(|| format!("cannot map {shown}"))?;
        Ok(Self(map))
    }

    /// The tensors in the file.
    ///
    /// # Errors
    /// As for [`Tensors::from_bytes`].
    pub fn tensors(&self) -> Result<Tensors<'_>> {
        Tensors::from_bytes(&self.0)
    }
}

/// The tensors of a file.
#[derive(Debug)]
pub struct Tensors<'a>(SafeTensors<'a>);

impl<'a> Tensors<'a> {
    /// Those in `bytes`.
    ///
    /// # Errors
    /// The bytes are cut short or not safetensors.
    pub fn from_bytes(bytes: &'a [u8]) -> Result<Self> {
        SafeTensors::deserialize(bytes)
            .map(Self)
            .map_err(|error| anyhow!("cut short, or not safetensors: {error}"))
    }

    fn tensor(&self, name: &str) -> xentile::Result<TensorView<'a>> {
        self.0.tensor(name).map_err(|_| {
            Error::Invalid(format!("no tensor `{name}` among [{}]", self.names().join(", ")))
        })
    }
}

impl Stored for Tensors<'_> {
    fn names(&self) -> Vec<String> {
        let mut names: Vec<_> = self.0.names().into_iter().map(str::to_owned).collect();
        names.sort_unstable();
        names
    }

    fn extents(&self, name: &str) -> xentile::Result<Vec<usize>> {
        Ok(self.tensor(name)?.shape().to_vec())
    }

    fn floats(&self, name: &str) -> xentile::Result<Array<'_>> {
        let tensor = self.tensor(name)?;
        let bytes = tensor.data();
        Ok(match tensor.dtype() {
            Dtype::F32 => <f32 as ArrayElement>::array(cast(bytes)),
            Dtype::BF16 => <half::bf16 as ArrayElement>::array(cast(bytes)),
            Dtype::F16 => <half::f16 as ArrayElement>::array(cast(bytes)),
            other => {
                return Err(Error::Invalid(format!(
                    "`{name}` has dtype {other:?}; it must be F32, BF16 or F16"
                )));
            }
        })
    }

    fn integers(&self, name: &str) -> xentile::Result<Vec<i64>> {
        let tensor = self.tensor(name)?;
        let bytes = tensor.data();
        Ok(match tensor.dtype() {
            Dtype::I64 => cast::<i64>(bytes).into_owned(),
            Dtype::I32 => cast::<i32>(bytes).iter().map(|&id| i64::from(id)).collect(),
            Dtype::U32 => cast::<u32>(bytes).iter().map(|&id| i64::from(id)).collect(),
            other => {
                return Err(Error::Invalid(format!(
                    "`{name}` has dtype {other:?}; it must be I32, U32 or I64"
                )));
            }
        })
    }
}

/// Bytes as elements: in place where they are aligned.
fn cast<E: Pod>(bytes: &[u8]) -> Cow<'_, [E]> {
    match bytemuck::try_cast_slice(bytes) {
        Ok(elements) => Cow::Borrowed(elements),
        Err(_) => Cow::Owned(bytemuck::pod_collect_to_vec(bytes)),
    }
}
