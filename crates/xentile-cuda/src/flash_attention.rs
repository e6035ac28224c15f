//! Attention by tiles: o and lse, or every gradient.
//!
//! The backward pass is four launches, of which each reads what the one before it wrote: notes of rows and
//! blocks, which lie where dq will; what sinks get; dk and dv; dq. Products are made again for the last two
//! instead of added atomically, so that every sum has one order. Nothing is allocated. Hopper has kernels of
//! its own of bf16 and f16 for all but notes and sinks.

mod arguments;
pub mod decode;
mod hopper;

use std::ffi::c_void;
use std::ptr::{null, null_mut};

use arguments::{Arguments, BLOCK, NARROW_THREADS, SINK_THREADS, THREADS};
use xentile::DType;
use xentile::flash_attention::{AttentionShape, FlashAttention};

use crate::driver::{Driver, Extent, Kernel, RawStream};
use crate::{Device, Error, Result, check_alignment, library};

/// The columns of heads must be a multiple of this.
pub const COLUMNS_STEP: usize = 8;

/// Of more keys for each query, blocks of keys would only wait for their turns at the same few sums of dq.
const MOST_KEYS_A_QUERY: usize = 8;

/// The elements of a token that lies whole must be fewer, so that those of a tile are below 2^31.
const MOST_APART: usize = 1 << 24;

/// Attention of arrays of one shape and dtype, on a GPU.
#[derive(Clone, Copy, Debug)]
pub struct Attention {
    options: FlashAttention,
    shape: AttentionShape,
    dtype: DType,
    layout: Layout,
}

/// How q, k, v and o lie in memory, and so do their cotangents and gradients. Columns are always last, and all
/// other arrays lie as their axes stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// As their axes stand.
    HeadsFirst,
    /// A token with all of its heads after another: `[N / inner, S, inner, G, D]` and `[N / inner, K, inner,
    /// D]`.
    TokensFirst {
        /// The heads of keys that a token has; it divides N.
        inner: usize,
    },
}

/// What both passes read. Segments are both null or neither, and sinks null where there are none.
#[derive(Clone, Copy, Debug)]
pub struct Operands {
    /// `[N, G, S, D]`.
    pub q: *const c_void,
    /// `[N, K, D]`.
    pub k: *const c_void,
    /// `[N, K, E]`.
    pub v: *const c_void,
    /// `[N, S, 2]`, the first key that a query sees and the one behind its last.
    pub ranges: *const i32,
    /// `[N, S]`.
    pub q_segments: *const i32,
    /// `[N, K]`.
    pub kv_segments: *const i32,
    /// `[N, G]`.
    pub sinks: *const f32,
}

/// What the forward pass gave, and cotangents of it.
#[derive(Clone, Copy, Debug)]
pub struct Saved {
    /// `[N, G, S, E]`.
    pub o: *const c_void,
    /// `[N, G, S]`.
    pub lse: *const f32,
    /// As `o`.
    pub dout: *const c_void,
    /// As `lse`.
    pub dlse: *const f32,
}

/// Where gradients go, each of the shape of what it is of; that of sinks is null where there are none.
#[derive(Clone, Copy, Debug)]
pub struct Gradients {
    /// Of q.
    pub q: *mut c_void,
    /// Of k.
    pub k: *mut c_void,
    /// Of v.
    pub v: *mut c_void,
    /// Of sinks.
    pub sinks: *mut f32,
}

/// Memory that the backward pass may work in.
#[derive(Clone, Copy, Debug)]
pub struct Scratch {
    /// `[N, G, S / 128, scratch_words]`.
    pub at: *mut f32,
    /// Whether sums have one order, so that gradients have the same bits in every run.
    pub has_order: bool,
}

/// A pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// o and lse.
    Forward,
    /// Gradients.
    Backward,
}

/// A kernel, on so many CTAs.
#[derive(Debug, PartialEq, Eq)]
struct Step {
    name: String,
    ctas: Option<usize>,
    threads: u32,
    shared_bytes: u32,
}

impl Attention {
    /// That of arrays of `shape`, heads first.
    ///
    /// # Errors
    /// Columns that are no multiple of 8.
    pub fn new(options: FlashAttention, shape: AttentionShape, dtype: DType) -> Result<Self> {
        for (name, columns) in [("q", shape.width), ("v", shape.value_width)] {
            if !columns.is_multiple_of(COLUMNS_STEP) {
                return invalid(format!(
                    "{name} has heads of {columns} columns; on GPUs it must be a multiple of \
                     {COLUMNS_STEP}"
                ));
            }
        }
        Ok(Self { options, shape, dtype, layout: Layout::HeadsFirst })
    }

    /// The same, of arrays that lie otherwise.
    ///
    /// # Errors
    /// Heads of keys that are no multiple of those of a token.
    pub fn with_layout(self, layout: Layout) -> Result<Self> {
        if let Layout::TokensFirst { inner } = layout {
            let heads = self.shape.heads;
            if heads != 0 && (inner == 0 || !heads.is_multiple_of(inner)) {
                return invalid(format!(
                    "a token has {inner} heads of keys; that must divide all heads, which are {heads}"
                ));
            }
        }
        Ok(Self { layout, ..self })
    }

    /// Loads the kernels of a pass, so that it has only to launch them.
    ///
    /// # Errors
    /// No driver or GPU that will do.
    ///
    /// # Safety
    /// `stream` is a `CUstream` of the calling thread's current context.
    pub unsafe fn load(&self, pass: Pass, stream: *mut c_void) -> Result<()> {
        let on_hopper = self.on_hopper()?;
        let mut steps = self.all_steps(pass, on_hopper);
        if pass == Pass::Backward
            && let Some(multiprocessors) = on_hopper
            && self.scratch_words().is_some()
        {
            let (before, after) = self.gradients_in_one(multiprocessors);
            steps.push(before);
            steps.extend(after);
        }
        for step in steps {
            // SAFETY: passed on from this function's contract.
            unsafe { kernel(&step.name, stream) }?;
        }
        Ok(())
    }

    /// Has `stream` write o and lse.
    ///
    /// # Errors
    /// No driver or GPU that will do, arrays that begin at no multiple of 16, more blocks than a grid
    /// has, a failure of the driver.
    ///
    /// # Safety
    /// `stream` is a `CUstream` of the calling thread's current context, and the pointers lead to arrays
    /// of these shapes on its device, those that are written apart from all others, which nothing else
    /// touches until it has run what was launched here.
    pub unsafe fn forward(
        &self,
        stream: *mut c_void,
        operands: Operands,
        o: *mut c_void,
        lse: *mut f32,
    ) -> Result<()> {
        check_alignment("o", o)?;
        let arguments = Arguments { o, lse, ..self.arguments(operands)? };
        let AttentionShape { heads, group, queries, .. } = self.shape;
        // SAFETY: passed on from this function's contract.
        unsafe {
            match self.on_hopper()? {
                Some(multiprocessors) if ![heads, group, queries].contains(&0) => {
                    let step = self.forward_on_hopper(multiprocessors);
                    let arguments = self.forward_arguments(arguments, multiprocessors)?;
                    self.launch(vec![step], stream, &arguments)
                }
                _ => self.launch(vec![self.forward_anywhere()], stream, &arguments),
            }
        }
    }

    /// Has `stream` write every gradient, on Hopper in five GEMMs if there is a scratch.
    ///
    /// # Errors
    /// As of [`forward`](Self::forward).
    ///
    /// # Safety
    /// As for [`forward`](Self::forward).
    pub unsafe fn backward(
        &self,
        stream: *mut c_void,
        operands: Operands,
        saved: Saved,
        gradients: Gradients,
        scratch: Option<Scratch>,
    ) -> Result<()> {
        for (name, address) in [
            ("o", saved.o),
            ("do", saved.dout),
            ("dq", gradients.q.cast_const()),
            ("dk", gradients.k.cast_const()),
            ("dv", gradients.v.cast_const()),
        ] {
            check_alignment(name, address)?;
        }
        let arguments = Arguments {
            o: saved.o.cast_mut(),
            lse: saved.lse.cast_mut(),
            dout: saved.dout,
            dlse: saved.dlse,
            dq: gradients.q,
            dk: gradients.k,
            dv: gradients.v,
            dsinks: gradients.sinks,
            ..self.arguments(operands)?
        };
        let has_sinks = !arguments.sinks.is_null();
        let on_hopper = self.on_hopper()?;
        let AttentionShape { heads, group, queries, keys, .. } = self.shape;
        if let (Some(multiprocessors), Some(scratch)) = (on_hopper, scratch)
            && self.scratch_words().is_some()
            && MOST_KEYS_A_QUERY.saturating_mul(queries) >= keys
            && ![heads, group, queries, keys].contains(&0)
        {
            check_alignment("scratch", scratch.at.cast::<c_void>())?;
            let all = self.gradient_arguments(arguments, scratch, multiprocessors)?;
            let (before, after) = self.gradients_in_one(multiprocessors);
            // SAFETY: passed on from this function's contract.
            return unsafe {
                self.launch(vec![before], stream, &all)?;
                if has_sinks {
                    self.launch(vec![self.sinks()], stream, &arguments)?;
                }
                self.launch(after, stream, &all)
            };
        }
        // SAFETY: passed on from this function's contract.
        unsafe {
            self.launch(self.before_gradients(has_sinks), stream, &arguments)?;
            if on_hopper.is_some() && ![self.shape.heads, self.shape.group].contains(&0) {
                let arguments = self.backward_arguments(arguments)?;
                return self.launch(self.gradients_on_hopper(), stream, &arguments);
            }
            self.launch(self.gradients_anywhere(), stream, &arguments)
        }
    }

    /// The heads of keys that one of the last leading axis has; 1 where heads come first.
    fn inner(&self) -> usize {
        match self.layout {
            Layout::HeadsFirst => 1,
            Layout::TokensFirst { inner } => inner,
        }
    }

    fn arguments(&self, operands: Operands) -> Result<Arguments> {
        let Operands { q, k, v, ranges, q_segments, kv_segments, sinks } = operands;
        for (name, address) in [("q", q), ("k", k), ("v", v), ("ranges", ranges.cast())] {
            check_alignment(name, address)?;
        }
        let AttentionShape { heads, group, queries, keys, width, value_width } = self.shape;
        // How far apart, in rows: heads of keys, heads of a group, and rows of a head.
        let inner = self.inner();
        let ([q_head, q_group, q_row], [k_head, k_row]) = match self.layout {
            Layout::HeadsFirst => ([group * queries, queries, 1], [keys, 1]),
            Layout::TokensFirst { .. } => ([group, 1, inner * group], [1, inner]),
        };
        let count = |count: usize| {
            i32::try_from(count).map_err(|_| {
                Error::Problem(xentile::Error::Invalid(format!(
                    "{:?} is too large; on GPUs each extent must be below 2^31",
                    self.shape
                )))
            })
        };
        // Kernels have the elements between rows of a tile in 32 bits.
        let apart = q_row.max(k_row).saturating_mul(width.max(value_width));
        if apart >= MOST_APART {
            return invalid(format!(
                "{:?} has {apart} elements a token; on GPUs it must be below {MOST_APART}",
                self.shape
            ));
        }
        Ok(Arguments {
            q,
            k,
            v,
            ranges,
            q_segments,
            kv_segments,
            sinks,
            o: null_mut(),
            lse: null_mut(),
            dout: null(),
            dlse: null(),
            dq: null_mut(),
            dk: null_mut(),
            dv: null_mut(),
            dsinks: null_mut(),
            heads: heads as i64,
            group: count(group)?,
            queries: count(queries)?,
            keys: count(keys)?,
            width: count(width)?,
            value_width: count(value_width)?,
            scale: self.options.scale as f32,
            softcap: self.options.softcap.unwrap_or(0.0) as f32,
            inner: count(inner)?,
            q_row: count(q_row)?,
            k_row: count(k_row)?,
            q_group: q_group as i64,
            q_head: q_head as i64,
            k_head: k_head as i64,
        })
    }

    /// # Safety
    /// As for [`forward`](Self::forward).
    unsafe fn launch<A>(&self, steps: Vec<Step>, stream: RawStream, arguments: &A) -> Result<()> {
        for step in steps {
            let ctas = step.ctas.and_then(|ctas| i32::try_from(ctas).ok()).ok_or_else(|| {
                Error::Problem(xentile::Error::Invalid(format!(
                    "{:?} has 2^31 blocks or more, which fit no grid",
                    self.shape
                )))
            })?;
            if ctas == 0 {
                continue;
            }
            let extent = Extent {
                ctas: ctas.cast_unsigned(),
                rows: 1,
                threads: step.threads,
                shared_bytes: step.shared_bytes,
                cluster: None,
            };
            // SAFETY: passed on from this function's contract.
            unsafe {
                let kernel = kernel(&step.name, stream)?;
                Driver::get()?.launch(kernel, extent, stream, arguments)?;
            }
        }
        Ok(())
    }

    /// The multiprocessors of the current device where it has kernels of its own for this.
    fn on_hopper(&self) -> Result<Option<u32>> {
        if self.dtype == DType::F32 {
            return Ok(None);
        }
        Ok(hopper::multiprocessors(Device::current()?))
    }

    /// All kernels of a pass, in their order, on Hopper's multiprocessors or on another GPU.
    fn all_steps(&self, pass: Pass, on_hopper: Option<u32>) -> Vec<Step> {
        match (pass, on_hopper) {
            (Pass::Forward, Some(multiprocessors)) => {
                vec![self.forward_on_hopper(multiprocessors)]
            }
            (Pass::Forward, None) => vec![self.forward_anywhere()],
            (Pass::Backward, on_hopper) => {
                let mut steps = self.before_gradients(true);
                steps.extend(match on_hopper {
                    Some(_) => self.gradients_on_hopper(),
                    None => self.gradients_anywhere(),
                });
                steps
            }
        }
    }

    fn forward_anywhere(&self) -> Step {
        let columns = self.padded_columns();
        let (rows, tile) = match (self.dtype, columns) {
            (DType::F32, 64) => (64, 64),
            (DType::F32, 128) => (64, 32),
            // There is one tile at a time.
            (DType::F32, _) => (64, 16 / 2),
            (_, 256) => (64, 32),
            _ => (128, 64),
        };
        self.step(&format!("forward_{columns}"), self.blocks_of_queries(rows), rows, tile)
    }

    /// Notes, and what sinks get.
    fn before_gradients(&self, has_sinks: bool) -> Vec<Step> {
        let mut steps = vec![self.step("notes", self.blocks_of_queries(BLOCK), 0, 0)];
        if has_sinks {
            steps.push(self.sinks());
        }
        steps
    }

    fn sinks(&self) -> Step {
        let heads = self.shape.heads.checked_mul(self.shape.group);
        Step { threads: SINK_THREADS, ..self.step("sinks", heads, 0, 0) }
    }

    /// What makes dk and dv, and dq, from notes.
    fn gradients_anywhere(&self) -> Vec<Step> {
        let columns = self.padded_columns();
        // Of 256 columns there is one tile at a time.
        let (threads, tile) = match (self.dtype, columns) {
            (DType::F32, 64) => (THREADS, 32),
            (DType::F32, 128) => (THREADS, 16),
            (DType::F32, _) => (NARROW_THREADS, 16 / 2),
            (_, 256) => (THREADS, 32 / 2),
            _ => (THREADS, 64),
        };
        // A warp has 16 rows.
        let block = threads as usize / 2;
        let of_keys = self.shape.heads.checked_mul(self.shape.keys.div_ceil(block));
        let step = |name: &str, ctas| {
            let name = format!("{name}_{columns}");
            Step { threads, ..self.step(&name, ctas, 2 * block, tile) }
        };
        let mut steps = vec![step("keys", of_keys)];
        if columns == 256 {
            steps.push(step("values", of_keys));
        }
        steps.push(step("queries", self.blocks_of_queries(block)));
        steps
    }

    /// A kernel whose CTAs keep so many rows, and have two tiles of keys and of values at a time.
    fn step(&self, name: &str, ctas: Option<usize>, kept: usize, tile: usize) -> Step {
        let row = self.padded_columns() * self.dtype.size_bytes();
        Step {
            name: format!("flash_attention_{name}_{}", self.dtype),
            ctas,
            threads: THREADS,
            shared_bytes: u32::try_from((kept + 4 * tile) * row).expect("fits a CTA"),
        }
    }

    /// The columns that kernels have for those of heads.
    fn padded_columns(&self) -> usize {
        match self.shape.width.max(self.shape.value_width) {
            ..=64 => 64,
            65..=128 => 128,
            _ => 256,
        }
    }

    /// How many blocks of so many queries all heads have.
    fn blocks_of_queries(&self, rows: usize) -> Option<usize> {
        let AttentionShape { heads, group, queries, .. } = self.shape;
        heads.checked_mul(group)?.checked_mul(queries.div_ceil(rows))
    }
}

fn invalid<T>(message: String) -> Result<T> {
    Err(Error::Problem(xentile::Error::Invalid(message)))
}

/// # Safety
/// `stream` is a `CUstream` of the calling thread's current context.
unsafe fn kernel(name: &str, stream: RawStream) -> Result<Kernel> {
    // SAFETY: passed on from this function's contract.
    unsafe { library::kept_kernel(name, Device::current()?, stream) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: AttentionShape =
        AttentionShape { heads: 6, group: 4, queries: 130, keys: 65, width: 128, value_width: 64 };

    #[test]
    fn steps_cover_every_row() {
        let all = |width, pass, dtype| {
            let shape = AttentionShape { width, ..SHAPE };
            let attention = Attention::new(FlashAttention::new(width), shape, dtype).unwrap();
            let steps = attention.all_steps(pass, None);
            // Of 99 KiB, the least that a CTA may have.
            assert!(steps.iter().all(|step| step.shared_bytes <= 96 << 10));
            steps
        };
        let of = |width, pass| {
            let short = |step: Step| (step.name, step.ctas.unwrap(), step.shared_bytes >> 10);
            all(width, pass, DType::Bf16).into_iter().map(short).collect::<Vec<_>>()
        };
        let named =
            |name: &str, ctas: usize, kib: u32| (format!("flash_attention_{name}_bf16"), ctas, kib);
        assert_eq!(of(64, Pass::Forward), [named("forward_64", 48, 48)]);
        assert_eq!(of(72, Pass::Forward), [named("forward_128", 48, 96)]);
        assert_eq!(of(256, Pass::Forward), [named("forward_256", 72, 96)]);
        let backward = [
            named("notes", 72, 0),
            named("sinks", 24, 0),
            named("keys_128", 12, 96),
            named("queries_128", 72, 96),
        ];
        assert_eq!(of(128, Pass::Backward), backward);
        let backward = [
            named("notes", 72, 0),
            named("sinks", 24, 0),
            named("keys_256", 12, 96),
            named("values_256", 12, 96),
            named("queries_256", 72, 96),
        ];
        assert_eq!(of(136, Pass::Backward), backward);
        let of = |width, pass| {
            let short = |step: Step| (step.ctas.unwrap(), step.threads, step.shared_bytes >> 10);
            all(width, pass, DType::F32).into_iter().map(short).collect::<Vec<_>>()
        };
        let before = [(72, 128, 0), (24, 256, 0)];
        let after = |steps: &[(usize, u32, u32)]| [&before[..], steps].concat();
        assert_eq!(of(64, Pass::Forward), [(72, 128, 80)]);
        assert_eq!(of(128, Pass::Forward), [(72, 128, 96)]);
        assert_eq!(of(256, Pass::Forward), [(72, 128, 96)]);
        assert_eq!(of(64, Pass::Backward), after(&[(12, 128, 64), (72, 128, 64)]));
        assert_eq!(of(128, Pass::Backward), after(&[(12, 128, 96), (72, 128, 96)]));
        let wide = [(18, 64, 96), (18, 64, 96), (120, 64, 96)];
        assert_eq!(of(256, Pass::Backward), after(&wide));
    }

    #[test]
    fn rows_are_found_in_either_layout() {
        let attention = Attention::new(FlashAttention::new(64), SHAPE, DType::F16).unwrap();
        let (all, integers) = (null(), null());
        let operands = Operands {
            q: all,
            k: all,
            v: all,
            ranges: integers,
            q_segments: integers,
            kv_segments: integers,
            sinks: null(),
        };
        let rows = |layout| {
            let a = attention.with_layout(layout).unwrap().arguments(operands).unwrap();
            ([a.inner, a.q_row, a.k_row], [a.q_group, a.q_head, a.k_head])
        };
        assert_eq!(rows(Layout::HeadsFirst), ([1, 1, 1], [130, 520, 65]));
        assert_eq!(rows(Layout::TokensFirst { inner: 3 }), ([3, 12, 3], [1, 4, 1]));
        let message = attention.with_layout(Layout::TokensFirst { inner: 4 }).unwrap_err();
        assert_eq!(
            message.to_string(),
            "a token has 4 heads of keys; that must divide all heads, which are 6"
        );
        let wide = AttentionShape { heads: 1 << 15, group: 4, ..SHAPE };
        let wide = Attention::new(FlashAttention::new(64), wide, DType::F16).unwrap();
        let whole = wide.with_layout(Layout::TokensFirst { inner: 1 << 15 }).unwrap();
        let message = whole.arguments(operands).unwrap_err().to_string();
        assert!(
            message.ends_with("has 16777216 elements a token; on GPUs it must be below 16777216")
        );
    }

    #[test]
    fn shapes_without_a_kernel_are_refused() {
        let refuse = |shape, dtype| {
            let options = FlashAttention::new(64);
            Attention::new(options, shape, dtype).unwrap_err().to_string()
        };
        assert_eq!(
            refuse(AttentionShape { value_width: 12, ..SHAPE }, DType::F16),
            "v has heads of 12 columns; on GPUs it must be a multiple of 8"
        );
    }
}
