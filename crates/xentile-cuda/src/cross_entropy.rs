//! Cross-entropy over logits: forward, backward from saved lse, and both at once.
//!
//! On GPUs that have clusters, rows stream through shared memory and stay there between the two
//! halves of the fused pass: device memory sees each byte of logits once in and once out
//! (kernels/ring.cuh). Rows of small vocabularies come several to a CTA (kernels/packed.cuh), in every
//! pass. On others, and for rows that no cluster holds, a CTA takes a row and the fused
//! pass reads it twice (kernels/plain.cuh). The backward pass needs no row whole, and takes tiles
//! (kernels/flat.cuh). [`plan`] chooses. Kernels multiply by the reciprocal of any temperature. Passes with
//! entropy and argmax (kernels/distribution.cuh) have the same schedules; but the backward pass packs no
//! rows, and without clusters the forward pass is kernels/whole.cuh, followed by the backward pass of
//! losses in a fused pass.

mod arguments;
pub mod plan;

use std::f32::consts::LOG2_E;
use std::ffi::c_void;
use std::ptr::{null, null_mut};

pub(crate) use arguments::Arguments;
use plan::{Plan, Shape};
use xentile::cross_entropy::CrossEntropy;
use xentile::{DType, LogitsShape, Tile};

use crate::cache::Cache;
use crate::driver::{Driver, Extent, Kernel as Code, RawStream};
use crate::{Device, Error, Result, check_alignment, check_places, library};

/// What a kernel does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pass {
    /// Per-token outputs.
    Forward,
    /// dlogits, from saved lse and the cotangents of per-token outputs.
    Backward,
    /// Per-token outputs and dlogits, from the cotangents of the losses.
    Fused,
}

impl Pass {
    /// The name that kernels and tuned tables have for it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::Fused => "fused",
        }
    }
}

/// Which of the options kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Variant {
    /// Neither smoothing nor softcap.
    Basic,
    /// No softcap.
    Smooth,
    /// All, but that some schedules have no temperature.
    Capped,
    /// All.
    Tempered,
}

impl Variant {
    pub(crate) fn of(options: &CrossEntropy) -> Self {
        if options.softcap.is_some() {
            if options.is_tempered() { Self::Tempered } else { Self::Capped }
        } else if options.label_smoothing != 0.0 {
            Self::Smooth
        } else {
            Self::Basic
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Basic => "basic",
            Self::Smooth => "smooth",
            Self::Capped => "capped",
            Self::Tempered => "tempered",
        }
    }
}

/// The outputs of a pass for each token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum OutputSet {
    /// Losses, or their gradient.
    Loss,
    /// Outputs about the distribution too.
    Distribution,
}

/// Labels `[T]` on a GPU, of either width.
#[derive(Clone, Copy, Debug)]
pub enum Labels {
    /// 32-bit labels.
    I32(*const i32),
    /// 64-bit labels.
    I64(*const i64),
}

impl Labels {
    /// Those from a token on.
    pub(crate) fn from(self, first: usize) -> Self {
        match self {
            Self::I32(labels) => Self::I32(labels.wrapping_add(first)),
            Self::I64(labels) => Self::I64(labels.wrapping_add(first)),
        }
    }
}

/// Where per-token outputs go on a GPU, each `[T]` in f32; null for one that is not wanted.
#[derive(Clone, Copy, Debug)]
pub struct TokenOutputs {
    /// `per_token_loss`.
    pub loss: *mut f32,
    /// `per_token_logps`.
    pub logps: *mut f32,
    /// `lse`, rounded to f32.
    pub lse: *mut f32,
    /// What that rounding lost, `lse - f32(lse)`.
    pub lse_low: *mut f32,
    /// Whether a token that takes no part (one that is ignored or, in a fused pass, whose loss has
    /// no cotangent) gets 0 in every output, without its logits being read, rather than what the
    /// contract says of its row.
    pub zero_masked: bool,
}

/// The place of an array's elements from `first` on; null where there is no array.
pub(crate) fn past<T>(at: *mut T, first: usize) -> *mut T {
    if at.is_null() { at } else { at.wrapping_add(first) }
}

impl TokenOutputs {
    /// Those from a token on.
    pub(crate) fn from(self, first: usize) -> Self {
        let from = |output| past(output, first);
        let Self { loss, logps, lse, lse_low, zero_masked } = self;
        let (loss, logps, lse, lse_low) = (from(loss), from(logps), from(lse), from(lse_low));
        Self { loss, logps, lse, lse_low, zero_masked }
    }
}

/// The outputs about each token's distribution, on a GPU, each `[T]`.
#[derive(Clone, Copy, Debug)]
pub struct DistributionOutputs {
    /// `entropy`, f32: 0 for ignored tokens.
    pub entropy: *mut f32,
    /// `highest`, f32; null where it is not wanted.
    pub highest: *mut f32,
    /// `argmax`: -1 over a row with no finite sum, and where its logits are not read; null likewise.
    pub argmax: *mut i32,
}

impl DistributionOutputs {
    /// Those from a token on.
    pub(crate) fn from(self, first: usize) -> Self {
        let Self { entropy, highest, argmax } = self;
        Self {
            entropy: entropy.wrapping_add(first),
            highest: past(highest, first),
            argmax: past(argmax, first),
        }
    }
}

/// What the gradient of entropies takes, each `[T]` in f32 on a GPU.
#[derive(Clone, Copy, Debug)]
pub struct EntropyCotangents {
    /// [`DistributionOutputs::entropy`].
    pub entropy: *const f32,
    /// The cotangents of it.
    pub dentropy: *const f32,
}

/// What a forward pass leaves for the backward pass, each `[T]` in f32 on a GPU.
#[derive(Clone, Copy, Debug)]
pub struct SavedLse {
    /// [`TokenOutputs::lse`].
    pub lse: *const f32,
    /// [`TokenOutputs::lse_low`].
    pub lse_low: *const f32,
}

impl SavedLse {
    /// Those from a token on.
    pub(crate) fn from(self, first: usize) -> Self {
        Self { lse: self.lse.wrapping_add(first), lse_low: self.lse_low.wrapping_add(first) }
    }
}

/// The cotangents of the per-token outputs, each `[T]` in f32 on a GPU; null for one that is 0.
#[derive(Clone, Copy, Debug)]
pub struct Cotangents {
    /// Of `per_token_loss`.
    pub loss: *const f32,
    /// Of `per_token_logps`.
    pub logps: *const f32,
    /// Of `lse`.
    pub lse: *const f32,
}

impl Cotangents {
    /// Those from a token on.
    pub(crate) fn from(self, first: usize) -> Self {
        let from = |cotangent: *const f32| past(cotangent.cast_mut(), first).cast_const();
        Self { loss: from(self.loss), logps: from(self.logps), lse: from(self.lse) }
    }
}

/// Cross-entropy over logits `[T, V]` on a GPU.
///
/// A label out of range makes its token's loss, logps and gradient row NaN.
#[derive(Clone, Copy, Debug)]
pub struct Kernel {
    options: CrossEntropy,
    shape: LogitsShape,
    dtype: DType,
    time_block: Option<usize>,
    block_size: Option<usize>,
    part: Part,
}

/// Which columns of a vocabulary the logits are, and how they lie.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    /// Columns of all of it.
    pub(crate) vocab: usize,
    /// The first that is here.
    pub(crate) first_column: usize,
    /// Elements from one row to the next.
    pub(crate) stride: usize,
    /// Where sums of rows are kept between parts, 16 bytes a token; null where the part is all.
    pub(crate) carried: *mut c_void,
}

impl Kernel {
    /// A kernel for logits of `shape` and `dtype`, in the tile of the plan.
    ///
    /// # Errors
    /// An option outside its range, or a vocabulary beyond `i32`.
    pub fn new(options: CrossEntropy, shape: LogitsShape, dtype: DType) -> Result<Self> {
        options.validate()?;
        if shape.tokens() > 0 && i32::try_from(shape.vocab()).is_err() {
            return Err(Error::Vocabulary { vocab: shape.vocab() });
        }
        let vocab = shape.vocab();
        let part = Part { vocab, first_column: 0, stride: vocab, carried: null_mut() };
        Ok(Self { options, shape, dtype, time_block: None, block_size: None, part })
    }

    /// The same where the logits are a part of the vocabulary's columns, all of whose outputs come
    /// with the last.
    pub(crate) fn with_part(self, part: Part) -> Self {
        Self { part, ..self }
    }

    /// The same in another tile: `time_block` consecutive tokens for a cluster, and about
    /// `block_size` columns for a step of one, as far as shared memory allows; for a CTA in the
    /// backward pass. Either may be absent.
    ///
    /// # Errors
    /// An extent of 0.
    pub fn with_tile(self, time_block: Option<usize>, block_size: Option<usize>) -> Result<Self> {
        Tile::new(time_block.unwrap_or(1), block_size.unwrap_or(1))?;
        Ok(Self { time_block, block_size, ..self })
    }

    /// The tile that `pass` is worked on in on the device of `stream`.
    ///
    /// # Errors
    /// No driver or GPU that will do.
    ///
    /// # Safety
    /// `stream` is a `CUstream` of the calling thread's current context.
    pub unsafe fn tile(&self, pass: Pass, stream: *mut c_void) -> Result<Tile> {
        // SAFETY: passed on from this function's contract.
        Ok(unsafe { self.ready(pass, OutputSet::Loss, stream) }?.plan.tile(self.dtype))
    }

    /// Loads what `pass` runs, so that the call has only to launch it.
    ///
    /// # Errors
    /// No driver or GPU that will do.
    ///
    /// # Safety
    /// `stream` is a `CUstream` of the calling thread's current context.
    pub unsafe fn load(&self, pass: Pass, stream: *mut c_void) -> Result<()> {
        // SAFETY: passed on from this function's contract.
        unsafe { self.ready(pass, OutputSet::Loss, stream) }.map(drop)
    }

    /// As [`load`](Self::load), for [`distribution`](Self::distribution),
    /// [`distribution_fused`](Self::distribution_fused) and
    /// [`distribution_backward`](Self::distribution_backward).
    ///
    /// # Errors
    /// No driver or GPU that will do.
    ///
    /// # Safety
    /// `stream` is a `CUstream` of the calling thread's current context.
    pub unsafe fn load_distribution(&self, pass: Pass, stream: *mut c_void) -> Result<()> {
        // SAFETY: passed on from this function's contract.
        let ready = unsafe { self.ready(pass, OutputSet::Distribution, stream) }?;
        if pass != Pass::Fused || ready.plan != Plan::Plain {
            return Ok(());
        }
        // SAFETY: passed on from this function's contract.
        unsafe {
            self.load_distribution(Pass::Forward, stream)?;
            self.load(Pass::Backward, stream)
        }
    }

    /// What the options ask for.
    fn variant(&self) -> Variant {
        Variant::of(&self.options)
    }

    /// As [`forward`](Self::forward), and fills `distribution` too.
    ///
    /// # Errors
    /// As those of [`forward`](Self::forward).
    ///
    /// # Safety
    /// As for [`forward`](Self::forward).
    pub unsafe fn distribution(
        &self,
        stream: *mut c_void,
        logits: *const c_void,
        labels: Labels,
        outputs: TokenOutputs,
        distribution: DistributionOutputs,
    ) -> Result<()> {
        check_alignment("logits", logits)?;
        let arguments = self.arguments(logits, labels).with_outputs(outputs);
        let arguments = arguments.with_distribution(distribution);
        // SAFETY: passed on from this function's contract.
        unsafe { self.launch(Pass::Forward, OutputSet::Distribution, stream, arguments) }
    }

    /// As [`fused`](Self::fused), and fills `distribution` too, `outputs` also of tokens whose cotangent
    /// is 0. `outputs` has lse and `lse_low`.
    ///
    /// # Errors
    /// As those of [`fused`](Self::fused).
    ///
    /// # Safety
    /// As for [`forward`](Self::forward).
    pub unsafe fn distribution_fused(
        &self,
        stream: *mut c_void,
        (logits, dlogits): (*const c_void, *mut c_void),
        labels: Labels,
        dloss: *const f32,
        outputs: TokenOutputs,
        distribution: DistributionOutputs,
    ) -> Result<()> {
        check_places(("logits", logits), ("dlogits", dlogits), self.bytes())?;
        let (pass, set) = (Pass::Fused, OutputSet::Distribution);
        // SAFETY: passed on from this function's contract.
        if self.shape.tokens() > 0 && unsafe { self.ready(pass, set, stream) }?.plan == Plan::Plain
        {
            let (lse, lse_low) = (outputs.lse.cast_const(), outputs.lse_low.cast_const());
            let cotangents = Cotangents { loss: dloss, logps: null(), lse: null() };
            // SAFETY: passed on from this function's contract.
            return unsafe {
                self.distribution(stream, logits, labels, outputs, distribution)?;
                let saved = SavedLse { lse, lse_low };
                self.backward(stream, (logits, dlogits), labels, saved, cotangents)
            };
        }
        let arguments = Arguments { dlogits, dloss, ..self.arguments(logits, labels) };
        let arguments = arguments.with_outputs(outputs).with_distribution(distribution);
        // SAFETY: passed on from this function's contract.
        unsafe { self.launch(pass, set, stream, arguments) }
    }

    /// As [`backward`](Self::backward), with the gradient for cotangents of the entropies too.
    ///
    /// # Errors
    /// As those of [`backward`](Self::backward).
    ///
    /// # Safety
    /// As for [`forward`](Self::forward).
    pub unsafe fn distribution_backward(
        &self,
        stream: *mut c_void,
        (logits, dlogits): (*const c_void, *mut c_void),
        labels: Labels,
        saved: SavedLse,
        cotangents: Cotangents,
        of_entropy: EntropyCotangents,
    ) -> Result<()> {
        check_places(("logits", logits), ("dlogits", dlogits), self.bytes())?;
        let EntropyCotangents { entropy: saved_entropy, dentropy } = of_entropy;
        let arguments = self.arguments(logits, labels);
        let arguments = arguments.with_cotangents(dlogits, saved, cotangents);
        let arguments = Arguments { saved_entropy, dentropy, ..arguments };
        // SAFETY: passed on from this function's contract.
        unsafe { self.launch(Pass::Backward, OutputSet::Distribution, stream, arguments) }
    }

    /// Has `stream` fill what `outputs` asks for.
    ///
    /// # Errors
    /// No driver or GPU that will do, logits that begin at no multiple of 16, a failure of the driver.
    ///
    /// # Safety
    /// `stream` is a `CUstream` of the calling thread's current context, and pointers lead to arrays of the documented shapes on its
    /// device, which nothing else touches until it has run what was launched here.
    pub unsafe fn forward(
        &self,
        stream: *mut c_void,
        logits: *const c_void,
        labels: Labels,
        outputs: TokenOutputs,
    ) -> Result<()> {
        check_alignment("logits", logits)?;
        let arguments = self.arguments(logits, labels).with_outputs(outputs);
        // SAFETY: passed on from this function's contract.
        unsafe { self.launch(Pass::Forward, OutputSet::Loss, stream, arguments) }
    }

    /// Has `stream` write the gradient for `cotangents` to `dlogits` `[T, V]`, which may be `logits`.
    ///
    /// # Errors
    /// As those of [`forward`](Self::forward), and arrays that overlap in part.
    ///
    /// # Safety
    /// As for [`forward`](Self::forward).
    pub unsafe fn backward(
        &self,
        stream: *mut c_void,
        (logits, dlogits): (*const c_void, *mut c_void),
        labels: Labels,
        saved: SavedLse,
        cotangents: Cotangents,
    ) -> Result<()> {
        check_places(("logits", logits), ("dlogits", dlogits), self.bytes())?;
        let arguments = self.arguments(logits, labels);
        let arguments = arguments.with_cotangents(dlogits, saved, cotangents);
        // SAFETY: passed on from this function's contract.
        unsafe { self.launch(Pass::Backward, OutputSet::Loss, stream, arguments) }
    }

    /// Has `stream` fill what `outputs` asks for, and write the gradient for cotangents `dloss` `[T]`
    /// of the losses to `dlogits` `[T, V]`, which may be `logits`.
    ///
    /// A token whose cotangent is 0 takes no part: its gradient row is exactly 0, whatever its logits.
    ///
    /// # Errors
    /// As those of [`forward`](Self::forward), and arrays that overlap in part.
    ///
    /// # Safety
    /// As for [`forward`](Self::forward).
    pub unsafe fn fused(
        &self,
        stream: *mut c_void,
        (logits, dlogits): (*const c_void, *mut c_void),
        labels: Labels,
        dloss: *const f32,
        outputs: TokenOutputs,
    ) -> Result<()> {
        check_places(("logits", logits), ("dlogits", dlogits), self.bytes())?;
        let arguments = Arguments { dlogits, dloss, ..self.arguments(logits, labels) };
        let arguments = arguments.with_outputs(outputs);
        // SAFETY: passed on from this function's contract.
        unsafe { self.launch(Pass::Fused, OutputSet::Loss, stream, arguments) }
    }

    /// Bytes of the logits.
    fn bytes(&self) -> usize {
        self.shape.tokens() * self.part.stride * self.dtype.size_bytes()
    }

    /// What every pass takes; the plan's fields are yet to be filled.
    pub(crate) fn arguments(&self, logits: *const c_void, labels: Labels) -> Arguments {
        let (labels, labels_are_64_bit) = match labels {
            Labels::I32(labels) => (labels.cast(), 0),
            Labels::I64(labels) => (labels.cast(), 1),
        };
        // Exactly as f32 has it, so that sums of exponentials, labels and gradients agree.
        let scale = (f64::from(LOG2_E) / self.options.temperature) as f32;
        Arguments {
            logits,
            dlogits: null_mut(),
            labels,
            dloss: null(),
            dlogps: null(),
            dlse: null(),
            saved_lse: null(),
            saved_lse_low: null(),
            loss: null_mut(),
            logps: null_mut(),
            lse: null_mut(),
            lse_low: null_mut(),
            carried: self.part.carried,
            tokens: self.shape.tokens() as i64,
            vocab: self.part.vocab as i64,
            columns: self.shape.vocab() as i64,
            stride: self.part.stride as i64,
            first_column: self.part.first_column as i64,
            ignore_index: self.options.ignore_index,
            label_smoothing: self.options.label_smoothing,
            z_loss: self.options.z_loss,
            softcap: self.options.softcap.unwrap_or(0.0),
            labels_are_64_bit,
            every_token: 1,
            time_block: 1,
            chunk_vectors: 0,
            chunks: 0,
            slots: 0,
            columns_of_pieces: 0,
            pieces_of_a_column: 1,
            lanes: 0,
            whole_vectors: 0,
            per_element: f64::from(scale) / f64::from(LOG2_E),
            scale,
            entropy: null_mut(),
            highest: null_mut(),
            argmax: null_mut(),
            saved_entropy: null(),
            dentropy: null(),
        }
    }

    /// # Safety
    /// `stream` is a `CUstream` of the calling thread's current context, and `arguments` suit it.
    unsafe fn launch(
        &self,
        pass: Pass,
        output_set: OutputSet,
        stream: RawStream,
        arguments: Arguments,
    ) -> Result<()> {
        if self.shape.tokens() == 0 {
            return Ok(());
        }
        // SAFETY: passed on from this function's contract.
        let Ready { code, plan, most } = unsafe { self.ready(pass, output_set, stream) }?;
        let tokens = self.shape.tokens();
        let blocks = |time_block: u32| tokens.div_ceil(time_block as usize) as u64;
        let at_most = |wanted: u64| u32::try_from(wanted).unwrap_or(u32::MAX).min(most);
        let (extent, arguments) = match plan {
            Plan::Ring(ring) => {
                let clusters = at_most(blocks(ring.time_block));
                let planned = Arguments {
                    time_block: ring.time_block,
                    chunk_vectors: ring.chunk_vectors,
                    chunks: ring.chunks,
                    slots: ring.slots,
                    columns_of_pieces: ring.columns,
                    pieces_of_a_column: ring.pieces,
                    ..arguments
                };
                (ring.extent(clusters), planned)
            }
            Plan::Packed(packed) => {
                let packed = packed.for_tokens(tokens, most);
                let planned = Arguments {
                    time_block: packed.rows,
                    lanes: packed.lanes,
                    whole_vectors: packed.whole_vectors.into(),
                    ..arguments
                };
                let ctas = u32::try_from(blocks(packed.rows)).unwrap_or(u32::MAX);
                let extent = extent_of(ctas, packed.threads);
                (Extent { shared_bytes: packed.shared_bytes(), ..extent }, planned)
            }
            Plan::Flat(flat) => {
                let planned = Arguments {
                    time_block: flat.time_block,
                    chunk_vectors: flat.tile_vectors,
                    chunks: flat.tiles,
                    ..arguments
                };
                let extent = extent_of(flat.tiles, arguments::FLAT_THREADS);
                (Extent { rows: at_most(blocks(flat.time_block)), ..extent }, planned)
            }
            Plan::Plain => {
                let threads = match output_set {
                    OutputSet::Distribution => arguments::WHOLE_THREADS,
                    OutputSet::Loss => arguments::PLAIN_THREADS,
                };
                (extent_of(at_most(blocks(1)), threads), arguments)
            }
        };
        // SAFETY: passed on from this function's contract.
        unsafe { Driver::get()?.launch(code, extent, stream, &arguments) }
    }

    /// What a launch needs, from the first call of its kind or kept from there.
    ///
    /// # Safety
    /// `stream` is a `CUstream` of the calling thread's current context.
    unsafe fn ready(&self, pass: Pass, output_set: OutputSet, stream: RawStream) -> Result<Ready> {
        static READY: Cache<Key, Ready> = Cache::new();
        let device = Device::current()?;
        let room = plan::room(device.limits(), self.shape.tokens());
        let key = Key {
            device: device.number(),
            pass,
            output_set,
            dtype: self.dtype,
            variant: self.variant(),
            vocab: self.shape.vocab(),
            is_whole: [self.part.stride, self.part.vocab] == [self.shape.vocab(); 2],
            room,
            few: if room > 1 { self.shape.tokens() } else { 0 },
            tile: [self.time_block, self.block_size],
        };
        // SAFETY: passed on from this function's contract.
        READY.get(key, |key| unsafe { self.make_ready(key, device, stream) })
    }

    /// # Safety
    /// `stream` is a stream of `device`.
    unsafe fn make_ready(&self, key: &Key, device: &Device, stream: RawStream) -> Result<Ready> {
        let Key { pass, output_set, dtype, vocab, is_whole, room, .. } = *key;
        let has_distribution = output_set == OutputSet::Distribution;
        let shape = Shape { pass, dtype, vocab, is_whole, room, has_distribution };
        let choose = |shape| plan::choose(device, shape, self.time_block, self.block_size);
        let mut plan = choose(shape);
        let pass = match (output_set, pass) {
            (OutputSet::Distribution, Pass::Backward) => "distribution_backward",
            (OutputSet::Distribution, Pass::Fused) => "distribution_fused",
            (OutputSet::Distribution, Pass::Forward) => "distribution",
            (OutputSet::Loss, pass) => pass.name(),
        };
        // Softcap with a temperature has kernels of its own where those without are slower for it.
        let variant = match key.variant {
            Variant::Tempered => Variant::Capped,
            other => other,
        };
        let of_schedule = if has_distribution { variant } else { key.variant };
        let load = |schedule: &str, pass: &str, variant: Variant| {
            let name = format!("cross_entropy_{schedule}_{pass}_{dtype}_{}", variant.name());
            // SAFETY: passed on from this function's contract.
            unsafe { library::kernel(&name, device, stream) }
        };
        match plan {
            Plan::Ring(ring) => {
                let code = load("ring", pass, of_schedule)?;
                // The wider ones have the same sums, but a part of a GPU may have no room for them,
                // and no CTA of those beyond PORTABLE_CTAS.
                let usual = choose(Shape { room: 1, ..shape });
                let usual = if let Plan::Ring(usual) = usual { Some(usual) } else { None };
                let rings = [ring].into_iter().chain(ring.narrower().filter(|_| ring.is_spread()));
                for ring in rings.chain(usual) {
                    if ring.ctas > plan::PORTABLE_CTAS {
                        library::allow_wide_clusters(code, device)?;
                    }
                    // SAFETY: passed on from this function's contract.
                    let most =
                        unsafe { Driver::get()?.max_active_clusters(code, ring.extent(1), stream) };
                    let most = if ring.is_spread() { most.unwrap_or(0) } else { most? };
                    // Wider clusters are worth it while none has to wait for another to end.
                    let wanted = if ring.is_spread() {
                        key.few.div_ceil(ring.time_block as usize)
                    } else {
                        1
                    };
                    if most > 0 && most as usize >= wanted {
                        plan = Plan::Ring(ring);
                        return Ok(Ready { code, plan, most });
                    }
                }
            }
            Plan::Packed(_) => {
                let code = load("packed", pass, variant)?;
                return Ok(Ready { code, plan, most: device.limits().multiprocessors });
            }
            Plan::Flat(_) => {
                let code = load("flat", pass, of_schedule)?;
                return Ok(Ready { code, plan, most: GRID_ROWS });
            }
            Plan::Plain => {}
        }
        let (schedule, pass, variant, ctas) = match (output_set, variant) {
            // No pass has a gradient too.
            (OutputSet::Distribution, _) => ("whole", "distribution", Variant::Capped, WHOLE_CTAS),
            (OutputSet::Loss, Variant::Basic) => ("plain", pass, Variant::Smooth, plan::PLAIN_CTAS),
            (OutputSet::Loss, other) => ("plain", pass, other, plan::PLAIN_CTAS),
        };
        let code = load(schedule, pass, variant)?;
        let most = device.limits().multiprocessors * ctas;
        Ok(Ready { code, plan: Plan::Plain, most: most.max(1) })
    }
}

impl Arguments {
    pub(crate) fn with_distribution(self, to: DistributionOutputs) -> Self {
        let DistributionOutputs { entropy, highest, argmax } = to;
        Self { entropy, highest, argmax, ..self }
    }

    pub(crate) fn with_outputs(self, outputs: TokenOutputs) -> Self {
        let TokenOutputs { loss, logps, lse, lse_low, zero_masked } = outputs;
        Self { loss, logps, lse, lse_low, every_token: (!zero_masked).into(), ..self }
    }

    pub(crate) fn with_cotangents(
        self,
        dlogits: *mut c_void,
        saved: SavedLse,
        cotangents: Cotangents,
    ) -> Self {
        let SavedLse { lse: saved_lse, lse_low: saved_lse_low } = saved;
        let Cotangents { loss: dloss, logps: dlogps, lse: dlse } = cotangents;
        Self { dlogits, dloss, dlogps, dlse, saved_lse, saved_lse_low, ..self }
    }
}

/// What decides how a pass runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    device: i32,
    pass: Pass,
    output_set: OutputSet,
    dtype: DType,
    variant: Variant,
    vocab: usize,
    /// Whether rows are whole and lie without gaps.
    is_whole: bool,
    /// As of [`Shape`].
    room: u32,
    /// Tokens, where they are few enough to have room for more than a multiprocessor each.
    few: usize,
    tile: [Option<usize>; 2],
}

/// A kernel that is loaded, and how to launch it.
#[derive(Clone, Copy, Debug)]
struct Ready {
    code: Code,
    plan: Plan,
    /// Clusters that are launched at most; rows of CTAs of the flat schedule, CTAs of the plain one,
    /// multiprocessors for the packed one.
    most: u32,
}

/// CTAs of kernels/whole.cuh that a multiprocessor has room for.
const WHOLE_CTAS: u32 = 4;

/// Rows of CTAs that a launch may have.
const GRID_ROWS: u32 = 65_535;

/// A launch without clusters.
fn extent_of(ctas: u32, threads: u32) -> Extent {
    Extent { ctas, rows: 1, threads, shared_bytes: 0, cluster: None }
}

impl plan::Ring {
    /// The launch of so many clusters.
    fn extent(&self, clusters: u32) -> Extent {
        Extent {
            ctas: clusters * self.ctas,
            rows: 1,
            threads: self.warps * 32,
            shared_bytes: self.shared_bytes,
            cluster: Some(self.ctas),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_without_a_kernel_are_refused() {
        let new =
            |options, vocab| Kernel::new(options, LogitsShape::new(1, vocab).unwrap(), DType::Bf16);
        let message = |kernel: Result<Kernel>| kernel.unwrap_err().to_string();
        let plain = CrossEntropy::default();
        assert_eq!(
            message(new(plain, 1 << 31)),
            "the vocabulary is 2147483648; CUDA kernels take at most 2147483647"
        );
        let smooth = CrossEntropy { label_smoothing: 2.0, ..plain };
        assert_eq!(message(new(smooth, 5)), "label_smoothing is 2; it must be in [0, 1]");
        assert_eq!(
            message(new(plain, 5).unwrap().with_tile(Some(0), None)),
            "tile time_block is 0; it must be at least 1"
        );
    }
}
