//! A token of a decoder at batch 1 in one launch (kernels/decode_step.cuh), for Hopper.
//!
//! CTAs wait for each other, so all must run at once: the launch is cooperative, and a GPU without room
//! for all of them is refused before.

mod arguments;

use std::ffi::{c_uint, c_void};

use arguments::{
    Arguments, COLUMNS, CTAS, HIDDEN, KV_HEADS, LAYER_STAGES, SHARED_BYTES, STAGE_BYTES,
    STAGE_KEYS, STATE_WORDS, THREADS,
};
use xentile::DType;

use crate::driver::{Driver, Extent, Kernel, RawStream, TensorMap};
use crate::{Device, Error, Result, check_alignment, library};

/// The columns of a box, which are 128 bytes.
const BOX: c_uint = 64;

/// Copies in flight of a CTA, and the least clocks between two, by measurement on an H200.
const IN_FLIGHT: i32 = 3;
const PACE: i32 = 1000;

/// Extents of the arrays of a call, in bf16.
#[derive(Clone, Copy, Debug)]
pub struct DecodeStep {
    layers: i32,
    vocab: i32,
    length: i32,
    eps: f32,
}

/// Extents that a config chooses.
#[derive(Clone, Copy, Debug)]
pub struct Extents {
    /// L.
    pub layers: usize,
    /// D.
    pub hidden_size: usize,
    /// K.
    pub kv_heads: usize,
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
    /// `[L, 128]`.
    pub q_norm: *const c_void,
    /// `[L, 128]`.
    pub k_norm: *const c_void,
    /// `[L, D]`, before the MLP.
    pub mlp_norm: *const c_void,
    /// `[D]`, before the head.
    pub norm: *const c_void,
    /// `[S, 64]`.
    pub cosines: *const f32,
    /// `[S, 64]`.
    pub sines: *const f32,
    /// `[1]`; outside the vocabulary for no token.
    pub token: *const i32,
    /// `[1]`; outside the cache for no token.
    pub position: *const i32,
    /// `[L, S, K, 128]`, of which the position's rows are written.
    pub keys: *mut c_void,
    /// The same of values.
    pub values: *mut c_void,
    /// [`DecodeStep::STATE_WORDS`] words of 4 bytes, zeros before the first call.
    pub state: *mut c_void,
    /// `[V]`.
    pub logits: *mut f32,
    /// `[1]`: the largest logit's token, or -1.
    pub best: *mut i32,
    /// `[1]`: its log-probability, or NaN.
    pub best_logp: *mut f32,
}

impl DecodeStep {
    /// Words of 4 bytes of the state.
    pub const STATE_WORDS: usize = 2 * STATE_WORDS;
    /// Elements of a stage of packed weights.
    pub const STAGE_ELEMENTS: usize = STAGE_BYTES / 2;

    /// That of a decoder with 16 query heads of 128 columns and 3072 columns inside the MLP.
    ///
    /// # Errors
    /// Extents that no kernel has.
    pub fn new(extents: Extents, eps: f32) -> Result<Self> {
        let Extents { layers, hidden_size, kv_heads, vocab, length } = extents;
        if (hidden_size, kv_heads) != (HIDDEN, KV_HEADS) {
            return Err(invalid(format!(
                "hidden states have {hidden_size} columns and the cache {kv_heads} heads; the kernel is \
                 for {HIDDEN} and {KV_HEADS}"
            )));
        }
        let count = |name: &str, value: usize| match i32::try_from(value) {
            Ok(value) if value > 0 => Ok(value),
            _ => Err(invalid(format!("there are {value} {name}; there must be 1 to 2^31 - 1"))),
        };
        let rows = layers.saturating_mul(length);
        count("rows of layers of the cache", rows)?;
        let (layers, length) = (count("layers", layers)?, count("positions", length)?);
        Ok(Self { layers, vocab: count("tokens of the vocabulary", vocab)?, length, eps })
    }

    /// Rows of packed weights `[T, STAGE_ELEMENTS]`: a stage of each CTA for all stages of layers, then of the
    /// head.
    #[must_use]
    pub fn packed_rows(&self) -> usize {
        let [layers, vocab] = [self.layers, self.vocab].map(i32::unsigned_abs);
        layers as usize * LAYER_STAGES * CTAS + (vocab as usize).div_ceil(8)
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
        unsafe { Self::ready(stream) }.map(drop)
    }

    /// Has `stream` decode a token. A token or position outside its range, or a NaN among logits, gives
    /// token -1; the former NaN logits and an unchanged cache too.
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
            ("keys", arrays.keys.cast_const()),
            ("values", arrays.values.cast_const()),
            ("state", arrays.state.cast_const()),
        ] {
            check_alignment(name, array)?;
        }
        // SAFETY: passed on from this function's contract.
        let kernel = unsafe { Self::ready(stream) }?;
        let driver = Driver::get()?;
        let extent = Extent {
            ctas: CTAS as u32,
            rows: 1,
            threads: THREADS,
            shared_bytes: SHARED_BYTES,
            cluster: None,
        };
        let arguments = Arguments {
            key_boxes: self.boxes(driver, arrays.keys)?,
            value_boxes: self.boxes(driver, arrays.values)?,
            packed: arrays.packed,
            embedding: arrays.embedding,
            attention_norm: arrays.attention_norm,
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
            in_flight: IN_FLIGHT,
            pace: PACE,
        };
        // SAFETY: passed on from this function's contract.
        unsafe { driver.launch_cooperative(kernel, extent, stream, &arguments) }
    }

    /// A side of the cache as a matrix of a row for each layer and position.
    fn boxes(&self, driver: &Driver, at: *mut c_void) -> Result<TensorMap> {
        let rows = self.layers.unsigned_abs() as usize * self.length.unsigned_abs() as usize;
        let columns = KV_HEADS * COLUMNS;
        driver.tensor_map(DType::Bf16, at, (rows, columns), columns, (BOX, STAGE_KEYS))
    }

    /// # Safety
    /// `stream` is a `CUstream` of the calling thread's current context.
    unsafe fn ready(stream: RawStream) -> Result<Kernel> {
        let device = Device::current()?;
        let limits = device.limits();
        let is_large =
            limits.multiprocessors >= CTAS as u32 && limits.shared_bytes_per_block >= SHARED_BYTES;
        if device.capability() != (9, 0) || !is_large {
            return Err(Error::DecodeStep {
                name: device.name().into(),
                capability: device.capability(),
                multiprocessors: limits.multiprocessors,
            });
        }
        // SAFETY: passed on from this function's contract.
        unsafe { library::kept_kernel("decode_step_qwen3_small", device, stream) }
    }
}

fn invalid(message: String) -> Error {
    Error::Problem(xentile::Error::Invalid(message))
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXTENTS: Extents =
        Extents { layers: 28, hidden_size: 1024, kv_heads: 8, vocab: 151_936, length: 2048 };

    #[test]
    fn packed_weights_are_stages_of_all_ctas_and_tiles_of_the_head() {
        let step = DecodeStep::new(EXTENTS, 1e-6).unwrap();
        assert_eq!(step.packed_rows(), 28 * 15 * 128 + 151_936 / 8);
        let ragged = DecodeStep::new(Extents { layers: 1, vocab: 9, ..EXTENTS }, 1e-6).unwrap();
        assert_eq!(ragged.packed_rows(), 15 * 128 + 2);
    }

    #[test]
    fn other_extents_are_refused() {
        let message = |extents| DecodeStep::new(extents, 1e-6).unwrap_err().to_string();
        assert_eq!(
            message(Extents { hidden_size: 2048, ..EXTENTS }),
            "hidden states have 2048 columns and the cache 8 heads; the kernel is for 1024 and 8"
        );
        assert_eq!(
            message(Extents { layers: 0, ..EXTENTS }),
            "there are 0 rows of layers of the cache; there must be 1 to 2^31 - 1"
        );
        let long = Extents { length: 1 << 30, ..EXTENTS };
        assert!(message(long).contains("rows of layers"));
    }
}
