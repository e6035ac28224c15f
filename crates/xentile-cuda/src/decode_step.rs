//! Decodes a token of each sequence in one launch, for Hopper: kernels/decode_step.cuh for one sequence of the
//! smallest decoder, kernels/decode_step_wide.cuh for up to 8 sequences of every decoder.
//!
//! CTAs wait for each other, so all must run at once: the launch is cooperative, and a GPU without room
//! for all of them is refused before.

mod arguments;

use std::ffi::{c_uint, c_void};

use arguments::*;
use xentile::DType;

use crate::driver::{Driver, Extent, Kernel, RawStream, TensorMap};
use crate::{Device, Error, Result, check_alignment, library};

/// The columns of a box, which are 128 bytes.
const BOX: c_uint = 64;

/// Bytes of keys in a stage of the cache.
const KEY_BYTES: usize = STAGE_BYTES / 2;

/// The most sequences of each of the two kernels of a decoder.
const BATCHES: [usize; 2] = [4, 8];

/// A decoder that has kernels, for any number of layers, any vocabulary and RoPE.
#[derive(Debug)]
struct Decoder {
    name: &'static str,
    dims: Dims,
    layer_stages: usize,
    /// Of the kernels for up to 4 and 8 sequences.
    names: [&'static str; 2],
    shared_bytes: [u32; 2],
    state_words: [usize; 2],
    /// Copies in flight of a CTA, and the least clocks between two, for up to 6 sequences and for more: measured on an
    /// H200 for the two smallest decoders; closer together for larger ones, which exchange activations a smaller part of
    /// the time.
    in_flight: i32,
    pace: [i32; 2],
}

macro_rules! decoder {
    ($name:literal, $kernel:literal, $dims:expr, $in_flight:literal, $pace:expr, $stages:ident,
     $shared_4:ident, $shared_8:ident, $state_4:ident, $state_8:ident) => {
        Decoder {
            name: $name,
            dims: $dims,
            layer_stages: $stages,
            names: [concat!("decode_step_", $kernel, "_4"), concat!("decode_step_", $kernel, "_8")],
            shared_bytes: [$shared_4, $shared_8],
            state_words: [$state_4, $state_8],
            in_flight: $in_flight,
            pace: $pace,
        }
    };
}

const fn dims(
    hidden_size: usize,
    heads: usize,
    head_dim: usize,
    mlp_size: usize,
    qk_norm: bool,
) -> Dims {
    let kv_heads = KV_HEADS;
    Dims { hidden_size, heads, kv_heads, head_dim, mlp_size, qk_norm, qkv_bias: false }
}

const QWEN2_SMALL: Dims = Dims {
    hidden_size: 896,
    heads: 14,
    kv_heads: 2,
    head_dim: 64,
    mlp_size: 4864,
    qk_norm: false,
    qkv_bias: true,
};

const DECODERS: &[Decoder] = &[
    decoder!(
        "Qwen3-0.6B",
        "qwen3_small",
        dims(1024, 16, 128, 3072, true),
        3,
        [1000, 0],
        QWEN3_SMALL_LAYER_STAGES,
        QWEN3_SMALL_SHARED_BYTES_4,
        QWEN3_SMALL_SHARED_BYTES_8,
        QWEN3_SMALL_STATE_WORDS_4,
        QWEN3_SMALL_STATE_WORDS_8
    ),
    decoder!(
        "Qwen3-1.7B",
        "qwen3_medium",
        dims(2048, 16, 128, 6144, true),
        4,
        [900; 2],
        QWEN3_MEDIUM_LAYER_STAGES,
        QWEN3_MEDIUM_SHARED_BYTES_4,
        QWEN3_MEDIUM_SHARED_BYTES_8,
        QWEN3_MEDIUM_STATE_WORDS_4,
        QWEN3_MEDIUM_STATE_WORDS_8
    ),
    decoder!(
        "Llama-3.2-1B",
        "llama_small",
        dims(2048, 32, 64, 8192, false),
        4,
        [900; 2],
        LLAMA_SMALL_LAYER_STAGES,
        LLAMA_SMALL_SHARED_BYTES_4,
        LLAMA_SMALL_SHARED_BYTES_8,
        LLAMA_SMALL_STATE_WORDS_4,
        LLAMA_SMALL_STATE_WORDS_8
    ),
    decoder!(
        "Qwen3-8B",
        "qwen3_large",
        dims(4096, 32, 128, 12288, true),
        6,
        [800; 2],
        QWEN3_LARGE_LAYER_STAGES,
        QWEN3_LARGE_SHARED_BYTES_4,
        QWEN3_LARGE_SHARED_BYTES_8,
        QWEN3_LARGE_STATE_WORDS_4,
        QWEN3_LARGE_STATE_WORDS_8
    ),
    decoder!(
        "Llama-3.1-8B",
        "llama_large",
        dims(4096, 32, 128, 14336, false),
        6,
        [800; 2],
        LLAMA_LARGE_LAYER_STAGES,
        LLAMA_LARGE_SHARED_BYTES_4,
        LLAMA_LARGE_SHARED_BYTES_8,
        LLAMA_LARGE_STATE_WORDS_4,
        LLAMA_LARGE_STATE_WORDS_8
    ),
    decoder!(
        "Qwen2.5-0.5B",
        "qwen2_small",
        QWEN2_SMALL,
        3,
        [900; 2],
        QWEN2_SMALL_LAYER_STAGES,
        QWEN2_SMALL_SHARED_BYTES_4,
        QWEN2_SMALL_SHARED_BYTES_8,
        QWEN2_SMALL_STATE_WORDS_4,
        QWEN2_SMALL_STATE_WORDS_8
    ),
];

/// Dimensions of a decoder that a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dims {
    /// D.
    pub hidden_size: usize,
    /// Query heads.
    pub heads: usize,
    /// K.
    pub kv_heads: usize,
    /// H.
    pub head_dim: usize,
    /// Columns inside the MLP.
    pub mlp_size: usize,
    /// Whether heads of queries and keys have norms.
    pub qk_norm: bool,
    /// Whether queries, keys and values have biases.
    pub qkv_bias: bool,
}

/// Extents of the arrays of a call, in bf16.
#[derive(Clone, Copy, Debug)]
pub struct DecodeStep {
    decoder: &'static Decoder,
    layers: i32,
    batch: i32,
    vocab: i32,
    length: i32,
    eps: f32,
}

/// Extents that a config or a call chooses.
#[derive(Clone, Copy, Debug)]
pub struct Extents {
    /// L.
    pub layers: usize,
    /// B, the sequences.
    pub batch: usize,
    /// V.
    pub vocab: usize,
    /// S, the positions of the cache.
    pub length: usize,
}

/// What a step reads and writes, on a GPU, each at a multiple of 16.
#[derive(Clone, Copy, Debug)]
pub struct Arrays {
    /// Weights of all layers and of the head, in stages of 16 KiB: [`DecodeStep::packed_rows`].
    pub packed: *const c_void,
    /// `[V, D]`.
    pub embedding: *const c_void,
    /// `[L, D]`, before attention.
    pub attention_norm: *const c_void,
    /// `[L, (heads + 2 K) H]`, read where there are biases.
    pub qkv_bias: *const c_void,
    /// `[L, H]`, read where heads have norms.
    pub q_norm: *const c_void,
    /// The same of keys.
    pub k_norm: *const c_void,
    /// `[L, D]`, before the MLP.
    pub mlp_norm: *const c_void,
    /// `[D]`, before the head.
    pub norm: *const c_void,
    /// `[S, H / 2]`.
    pub cosines: *const f32,
    /// `[S, H / 2]`.
    pub sines: *const f32,
    /// `[B]`; outside the vocabulary for no token.
    pub token: *const i32,
    /// `[B]`; outside the cache for no token.
    pub position: *const i32,
    /// `[L, B, S, K, H]`, of which the positions' rows are written.
    pub keys: *mut c_void,
    /// The same of values.
    pub values: *mut c_void,
    /// [`DecodeStep::state_words`] words of 4 bytes, zeros before the first call.
    pub state: *mut c_void,
    /// `[B, V]`.
    pub logits: *mut f32,
    /// `[B]`: the largest logit's token, or -1.
    pub best: *mut i32,
    /// `[B]`: its log-probability, or NaN.
    pub best_logp: *mut f32,
}

impl DecodeStep {
    /// Elements of a stage of packed weights.
    pub const STAGE_ELEMENTS: usize = STAGE_BYTES / 2;

    /// Plans a step of a decoder for a batch of sequences.
    ///
    /// # Errors
    /// Dims or extents that no kernel has.
    pub fn new(dims: Dims, extents: Extents, eps: f32) -> Result<Self> {
        let Extents { layers, batch, vocab, length } = extents;
        let Some(decoder) = DECODERS.iter().find(|decoder| decoder.dims == dims) else {
            let names: Vec<_> = DECODERS.iter().map(|decoder| decoder.name).collect();
            return Err(invalid(format!(
                "no kernel is for a decoder of {dims:?}; there are those of {}",
                names.join(", ")
            )));
        };
        if !(1..=BATCHES[1]).contains(&batch) {
            return Err(invalid(format!(
                "there are {batch} sequences; there must be 1 to {}",
                BATCHES[1]
            )));
        }
        let count = |name: &str, value: usize| match i32::try_from(value) {
            Ok(value) if value > 0 => Ok(value),
            _ => Err(invalid(format!("there are {value} {name}; there must be 1 to 2^31 - 1"))),
        };
        let rows = layers.saturating_mul(batch).saturating_mul(length);
        count("rows of layers of the cache", rows)?;
        let (layers, length) = (count("layers", layers)?, count("positions", length)?);
        let vocab = count("tokens of the vocabulary", vocab)?;
        Ok(Self { decoder, layers, batch: batch as i32, vocab, length, eps })
    }

    /// Words of 4 bytes of the state.
    #[must_use]
    pub fn state_words(&self) -> usize {
        2 * if self.is_single() { STATE_WORDS } else { self.decoder.state_words[self.size()] }
    }

    /// Whether the step runs the kernel for one sequence of the smallest decoder. By dims: a constant
    /// has no address of its own.
    fn is_single(&self) -> bool {
        self.batch == 1 && self.decoder.dims == DECODERS[0].dims
    }

    /// The index of the step's kernel among those of its decoder.
    fn size(&self) -> usize {
        usize::from(self.batch.unsigned_abs() as usize > BATCHES[0])
    }

    /// Rows of packed weights `[T, STAGE_ELEMENTS]`: a stage of each CTA for all stages of layers, then of the
    /// head.
    #[must_use]
    pub fn packed_rows(&self) -> usize {
        let [layers, vocab] = [self.layers, self.vocab].map(i32::unsigned_abs);
        layers as usize * self.decoder.layer_stages * CTAS
            + (vocab as usize).div_ceil(8) * self.decoder.dims.hidden_size.div_ceil(1024)
    }

    /// Loads the kernel, so that [`run`](Self::run) has only to launch it.
    ///
    /// # Errors
    /// No driver or GPU that will do.
    ///
    /// # Safety
    /// `stream` is a `CUstream` of the calling thread's current context.
    pub unsafe fn load(&self, stream: *mut c_void) -> Result<()> {
        // SAFETY: passed on from this function's contract.
        unsafe { self.ready(stream) }.map(drop)
    }

    /// Has `stream` decode a token of each sequence. A token or position outside its range, or a NaN among
    /// logits, gives token -1; the former NaN logits and an unchanged cache too.
    ///
    /// # Errors
    /// No driver or GPU that will do, arrays that begin at no multiple of 16, a failure of the driver, as where a
    /// process may not use all of the GPU.
    ///
    /// # Safety
    /// `stream` is a `CUstream` of the calling thread's current context, and the pointers lead to arrays of these
    /// shapes on its device, which nothing else touches until it has run what was launched here.
    pub unsafe fn run(&self, stream: *mut c_void, arrays: Arrays) -> Result<()> {
        for (name, array) in [
            ("packed", arrays.packed),
            ("embedding", arrays.embedding),
            ("attention_norm", arrays.attention_norm),
            ("mlp_norm", arrays.mlp_norm),
            ("norm", arrays.norm),
            ("keys", arrays.keys.cast_const()),
            ("values", arrays.values.cast_const()),
            ("state", arrays.state.cast_const()),
        ] {
            check_alignment(name, array)?;
        }
        // SAFETY: passed on from this function's contract.
        let kernel = unsafe { self.ready(stream) }?;
        let driver = Driver::get()?;
        let extent = Extent {
            ctas: CTAS as u32,
            rows: 1,
            threads: THREADS,
            shared_bytes: self.shared_bytes(),
            cluster: None,
        };
        let arguments = Arguments {
            key_boxes: self.boxes(driver, arrays.keys)?,
            value_boxes: self.boxes(driver, arrays.values)?,
            packed: arrays.packed,
            embedding: arrays.embedding,
            attention_norm: arrays.attention_norm,
            qkv_bias: arrays.qkv_bias,
            q_norm: arrays.q_norm,
            k_norm: arrays.k_norm,
            mlp_norm: arrays.mlp_norm,
            norm: arrays.norm,
            cosines: arrays.cosines,
            sines: arrays.sines,
            keys: arrays.keys,
            values: arrays.values,
            state: arrays.state,
            token: arrays.token,
            position: arrays.position,
            logits: arrays.logits,
            best: arrays.best,
            best_logp: arrays.best_logp,
            layers: self.layers,
            vocab: self.vocab,
            length: self.length,
            eps: self.eps,
            in_flight: self.decoder.in_flight,
            pace: self.decoder.pace[usize::from(self.batch > 6)],
            batch: self.batch,
        };
        // SAFETY: passed on from this function's contract.
        unsafe { driver.launch_cooperative(kernel, extent, stream, &arguments) }
    }

    fn name(&self) -> &'static str {
        if self.is_single() { "decode_step_qwen3_small" } else { self.decoder.names[self.size()] }
    }

    fn shared_bytes(&self) -> u32 {
        if self.is_single() { SHARED_BYTES } else { self.decoder.shared_bytes[self.size()] }
    }

    /// A side of the cache as a matrix of a row for each layer, sequence and position.
    fn boxes(&self, driver: &Driver, at: *mut c_void) -> Result<TensorMap> {
        let [layers, batch, length] = [self.layers, self.batch, self.length].map(i32::unsigned_abs);
        let rows = layers as usize * batch as usize * length as usize;
        let Dims { kv_heads, head_dim, .. } = self.decoder.dims;
        let columns = kv_heads * head_dim;
        let keys = (KEY_BYTES / 2 / head_dim) as c_uint;
        driver.tensor_map(DType::Bf16, at, (rows, columns), columns, (BOX, keys))
    }

    /// # Safety
    /// `stream` is a `CUstream` of the calling thread's current context.
    unsafe fn ready(&self, stream: RawStream) -> Result<Kernel> {
        let device = Device::current()?;
        let limits = device.limits();
        let is_large = limits.multiprocessors >= CTAS as u32
            && limits.shared_bytes_per_block >= self.shared_bytes();
        if device.capability() != (9, 0) || !is_large {
            return Err(Error::DecodeStep {
                name: device.name().into(),
                capability: device.capability(),
                multiprocessors: limits.multiprocessors,
            });
        }
        // SAFETY: passed on from this function's contract.
        unsafe { library::kept_kernel(self.name(), device, stream) }
    }
}

fn invalid(message: String) -> Error {
    Error::Problem(xentile::Error::Invalid(message))
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXTENTS: Extents = Extents { layers: 28, batch: 1, vocab: 151_936, length: 2048 };

    fn step(dims: Dims, extents: Extents) -> DecodeStep {
        DecodeStep::new(dims, extents, 1e-6).unwrap()
    }

    #[test]
    fn packed_weights_are_stages_of_all_ctas_and_tiles_of_the_head() {
        let dims = DECODERS[0].dims;
        assert_eq!(step(dims, EXTENTS).packed_rows(), 28 * 15 * 128 + 151_936 / 8);
        let ragged = Extents { layers: 1, vocab: 9, ..EXTENTS };
        assert_eq!(step(dims, ragged).packed_rows(), 15 * 128 + 2);
        for decoder in DECODERS {
            // The smallest decoder of Qwen 2.5 is filled up with zeros, and has copies of KV heads.
            let Dims { hidden_size, heads, kv_heads, head_dim, mlp_size, .. } =
                if decoder.dims == QWEN2_SMALL {
                    super::dims(1024, 16, 64, 5120, false)
                } else {
                    decoder.dims
                };
            let rows = (2 * heads + 2 * kv_heads) * head_dim + 3 * mlp_size;
            let elements = rows * hidden_size + 16 * hidden_size;
            let found = step(decoder.dims, ragged).packed_rows() * DecodeStep::STAGE_ELEMENTS;
            assert_eq!(found, elements, "{}", decoder.name);
        }
    }

    #[test]
    fn a_batch_has_the_smallest_kernel_that_holds_it() {
        let name = |decoder: usize, batch| {
            step(DECODERS[decoder].dims, Extents { batch, ..EXTENTS }).name()
        };
        assert_eq!(name(0, 1), "decode_step_qwen3_small");
        assert_eq!([2, 4].map(|batch| name(0, batch)), ["decode_step_qwen3_small_4"; 2]);
        assert_eq!([5, 8].map(|batch| name(0, batch)), ["decode_step_qwen3_small_8"; 2]);
        assert_eq!([1, 4].map(|batch| name(2, batch)), ["decode_step_llama_small_4"; 2]);
        assert_eq!(name(4, 8), "decode_step_llama_large_8");
        assert_eq!(name(5, 1), "decode_step_qwen2_small_4");
    }

    #[test]
    fn a_state_is_that_of_the_kernel() {
        for decoder in DECODERS {
            let words = |batch| step(decoder.dims, Extents { batch, ..EXTENTS }).state_words() / 2;
            let [small, large] = decoder.state_words;
            let one = if decoder.name == "Qwen3-0.6B" { STATE_WORDS } else { small };
            assert_eq!([1, 2, 4, 5, 8].map(words), [one, small, small, large, large]);
        }
    }

    #[test]
    fn other_extents_are_refused() {
        let dims = DECODERS[0].dims;
        let message = |dims, extents| DecodeStep::new(dims, extents, 1e-6).unwrap_err().to_string();
        assert_eq!(
            message(Dims { heads: 32, ..dims }, EXTENTS),
            "no kernel is for a decoder of Dims { hidden_size: 1024, heads: 32, kv_heads: 8, head_dim: 128, \
             mlp_size: 3072, qk_norm: true, qkv_bias: false }; there are those of Qwen3-0.6B, Qwen3-1.7B, \
             Llama-3.2-1B, Qwen3-8B, Llama-3.1-8B, Qwen2.5-0.5B"
        );
        assert_eq!(
            message(dims, Extents { batch: 9, ..EXTENTS }),
            "there are 9 sequences; there must be 1 to 8"
        );
        assert_eq!(
            message(dims, Extents { layers: 0, ..EXTENTS }),
            "there are 0 rows of layers of the cache; there must be 1 to 2^31 - 1"
        );
        let long = Extents { length: 1 << 30, ..EXTENTS };
        assert!(message(dims, long).contains("rows of layers"));
    }
}
