//! Logits from a `.safetensors` file: as they are, or as hidden states times an embedding.

use std::borrow::Cow;
use std::fs::File;
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail, ensure};
use bytemuck::Pod;
use memmap2::Mmap;
use ndarray::ArrayView2;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use xentile::{DType, Element};

use super::Tokens;
use crate::config::Shape;

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

/// Where logits come from.
#[derive(Debug)]
enum Source<'a> {
    /// `logits` `[B, S, V]`.
    Logits(TensorView<'a>),
    /// `hidden` `[B, S, D]` and `weight` `[V, D]`: logits are `hidden x weight^T`.
    Product { hidden: TensorView<'a>, weight: TensorView<'a> },
}

/// What a loss needs of a file, with every shape checked against the others.
#[derive(Debug)]
pub struct Tensors<'a> {
    source: Source<'a>,
    input_ids: Vec<i64>,
    shape: Shape,
}

impl<'a> Tensors<'a> {
    /// Finds `input_ids` `[B, S]` beside `logits`, or beside `hidden` and `weight`.
    ///
    /// # Errors
    /// The bytes are cut short or not safetensors, a tensor is missing, or has the wrong dtype, rank
    /// or shape.
    pub fn from_bytes(bytes: &'a [u8]) -> Result<Self> {
        let file = SafeTensors::deserialize(bytes)
            .map_err(|error| anyhow!("cut short, or not safetensors: {error}"))?;
        let names = || {
            let mut names = file.names();
            names.sort_unstable();
            names.join(", ")
        };
        let tensor = |name: &str| {
            file.tensor(name).map_err(|_| {
                anyhow!(
                    "no tensor `{name}` among [{}]; needed are input_ids with logits, or with \
                     hidden and weight",
                    names()
                )
            })
        };
        let ids = tensor("input_ids")?;
        let [batch, seq_len] = extents("input_ids", "[B, S]", &ids)?;
        let input_ids = integers(&ids)?;
        let agree = |name: &str, found: [usize; 2]| {
            ensure!(
                found == [batch, seq_len],
                "`{name}` starts with {found:?} and `input_ids` is {:?}; they must agree",
                [batch, seq_len]
            );
            Ok(())
        };
        let (source, vocab) = if file.names().contains(&"logits") {
            let logits = tensor("logits")?;
            let [b, s, vocab] = extents("logits", "[B, S, V]", &logits)?;
            agree("logits", [b, s])?;
            dtype_of("logits", &logits)?;
            (Source::Logits(logits), vocab)
        } else {
            let (hidden, weight) = (tensor("hidden")?, tensor("weight")?);
            let [b, s, width] = extents("hidden", "[B, S, D]", &hidden)?;
            let [vocab, weight_width] = extents("weight", "[V, D]", &weight)?;
            agree("hidden", [b, s])?;
            ensure!(
                width == weight_width,
                "`hidden` has D = {width} and `weight` has D = {weight_width}; they must agree"
            );
            dtype_of("hidden", &hidden)?;
            dtype_of("weight", &weight)?;
            (Source::Product { hidden, weight }, vocab)
        };
        Ok(Self { source, input_ids, shape: Shape { batch, seq_len, vocab } })
    }

    /// D where the file has hidden states.
    #[must_use]
    pub fn width(&self) -> Option<usize> {
        match &self.source {
            Source::Logits(_) => None,
            Source::Product { weight, .. } => weight.shape().get(1).copied(),
        }
    }

    /// Hidden states `[T, D]` of rows that have a next token, the weight `[V, D]`, and labels, all
    /// rounded to `E`.
    ///
    /// # Errors
    /// The file holds logits.
    pub fn hidden<E: Element>(&self) -> Result<(Vec<E>, Vec<E>, Vec<i64>)> {
        let Source::Product { hidden, weight } = &self.source else {
            bail!("it holds `logits`; linear_cross_entropy takes `hidden` and `weight`");
        };
        let rounded = |all: &[f32]| all.iter().map(|&x| E::from_f32(x)).collect();
        let (all, width) = (widened(hidden)?, weight.shape()[1]);
        let used = self.shape.seq_len.saturating_sub(1) * width;
        let sequences = all.chunks((self.shape.seq_len * width).max(1));
        let rows: Vec<f32> = sequences.flat_map(|sequence| &sequence[..used]).copied().collect();
        Ok((rounded(&rows), rounded(&widened(weight)?), self.labels()))
    }

    fn labels(&self) -> Vec<i64> {
        let sequences = self.input_ids.chunks(self.shape.seq_len.max(1));
        sequences.flat_map(|ids| ids.get(1..).unwrap_or(&[])).copied().collect()
    }

    /// `[B, S, V]`.
    #[must_use]
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// The dtype of the logits in the file; none where they are a product yet to be made.
    #[must_use]
    pub fn dtype(&self) -> Option<DType> {
        match &self.source {
            Source::Logits(logits) => dtype_of("logits", logits).ok(),
            Source::Product { .. } => None,
        }
    }

    /// Bytes that [`Self::tokens`] will allocate for logits of `dtype`.
    #[must_use]
    pub fn needed_bytes(&self, dtype: DType) -> Option<u64> {
        let Shape { batch, seq_len, vocab } = self.shape;
        let logits = (batch as u64).checked_mul(seq_len as u64)?.checked_mul(vocab as u64)?;
        match &self.source {
            Source::Logits(_) if batch == 1 => Some(0),
            Source::Logits(_) => logits.checked_mul(dtype.size_bytes() as u64),
            Source::Product { hidden, weight } => {
                // The result, one sequence of it in f32, and both factors in f32.
                let factors = 4 * (elements(hidden) + elements(weight)) as u64;
                let sequence = 4_u64.checked_mul(seq_len as u64)?.checked_mul(vocab as u64)?;
                logits
                    .checked_mul(dtype.size_bytes() as u64)?
                    .checked_add(sequence)?
                    .checked_add(factors)
            }
        }
    }

    /// The logits as `E` and the labels. Mapped memory is used as it is where the rows wanted lie
    /// together; otherwise they are copied.
    ///
    /// # Errors
    /// The file holds logits of another dtype than `E`.
    pub fn tokens<E: Element + Pod>(&self) -> Result<Tokens<'a, E>> {
        let Shape { batch, seq_len, vocab } = self.shape;
        let used = seq_len.saturating_sub(1);
        let logits = match &self.source {
            Source::Logits(logits) => {
                let found = dtype_of("logits", logits)?;
                ensure!(
                    found == E::DTYPE,
                    "`logits` is {found} and the config asks for {}; set dtype={found}",
                    E::DTYPE
                );
                let all: Cow<'a, [E]> = cast(logits.data());
                if batch == 1 {
                    match all {
                        Cow::Borrowed(all) => Cow::Borrowed(&all[..used * vocab]),
                        Cow::Owned(mut all) => {
                            all.truncate(used * vocab);
                            Cow::Owned(all)
                        }
                    }
                } else {
                    let sequences = all.chunks((seq_len * vocab).max(1));
                    Cow::Owned(
                        sequences.flat_map(|sequence| &sequence[..used * vocab]).copied().collect(),
                    )
                }
            }
            Source::Product { hidden, weight } => {
                let width = weight.shape()[1];
                let (hidden, weight) = (widened(hidden)?, widened(weight)?);
                let weight = ArrayView2::from_shape((vocab, width), &weight)?;
                let mut logits = Vec::with_capacity(batch * used * vocab);
                for sequence in hidden.chunks((seq_len * width).max(1)) {
                    let rows = ArrayView2::from_shape((used, width), &sequence[..used * width])?;
                    logits.extend(rows.dot(&weight.t()).iter().map(|&z| E::from_f32(z)));
                }
                Cow::Owned(logits)
            }
        };
        Ok(Tokens { vocab, logits, labels: self.labels() })
    }
}

fn elements(tensor: &TensorView<'_>) -> usize {
    tensor.shape().iter().product()
}

/// The extents of a tensor that must have `N` axes.
fn extents<const N: usize>(name: &str, axes: &str, tensor: &TensorView<'_>) -> Result<[usize; N]> {
    let shape = tensor.shape();
    ensure!(!shape.contains(&0), "`{name}` has shape {shape:?}; every extent must be at least 1");
    <[usize; N]>::try_from(shape)
        .map_err(|_| anyhow!("`{name}` has shape {shape:?}; it must be {axes}"))
}

fn dtype_of(name: &str, tensor: &TensorView<'_>) -> Result<DType> {
    Ok(match tensor.dtype() {
        Dtype::F32 => DType::F32,
        Dtype::BF16 => DType::Bf16,
        Dtype::F16 => DType::F16,
        other => bail!("`{name}` has dtype {other:?}; it must be F32, BF16 or F16"),
    })
}

/// Bytes as elements: in place where they are aligned.
fn cast<E: Pod>(bytes: &[u8]) -> Cow<'_, [E]> {
    match bytemuck::try_cast_slice(bytes) {
        Ok(elements) => Cow::Borrowed(elements),
        Err(_) => Cow::Owned(bytemuck::pod_collect_to_vec(bytes)),
    }
}

fn widened(tensor: &TensorView<'_>) -> Result<Vec<f32>> {
    fn widen<E: Element + Pod>(bytes: &[u8]) -> Vec<f32> {
        cast::<E>(bytes).iter().map(|x| x.to_f32()).collect()
    }
    Ok(match dtype_of("factor", tensor)? {
        DType::F32 => widen::<f32>(tensor.data()),
        DType::Bf16 => widen::<half::bf16>(tensor.data()),
        DType::F16 => widen::<half::f16>(tensor.data()),
    })
}

fn integers(tensor: &TensorView<'_>) -> Result<Vec<i64>> {
    let bytes = tensor.data();
    Ok(match tensor.dtype() {
        Dtype::I64 => cast::<i64>(bytes).into_owned(),
        Dtype::I32 => cast::<i32>(bytes).iter().map(|&id| i64::from(id)).collect(),
        Dtype::U32 => cast::<u32>(bytes).iter().map(|&id| i64::from(id)).collect(),
        other => bail!("`input_ids` has dtype {other:?}; it must be I32, U32 or I64"),
    })
}
