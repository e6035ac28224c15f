//! Attention of bf16 and f16, by tiles: o and lse, or every gradient.
//!
//! The backward pass is four launches, of which each reads what the one before it wrote: notes of rows and
//! blocks, which lie where dq will; what sinks get; dk and dv; dq. On Hopper the last two are others. Products are made again for the last two
//! instead of added atomically, so that every sum has one order. Nothing is allocated.

mod arguments;
mod backward;

use std::ffi::c_void;
use std::ptr::{null, null_mut};

use arguments::{Arguments, BLOCK, SINK_THREADS, THREADS};
use xentile::DType;
use xentile::flash_attention::{AttentionShape, FlashAttention};

use crate::driver::{Driver, Extent, Kernel, RawStream};
use crate::{Device, Error, Result, check_alignment, library};

/// The columns of heads must be a multiple of this.
pub const COLUMNS_STEP: usize = 8;

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

/// How q, k, v and o of the forward pass lie in memory. Columns are always last, and all other arrays as
/// their axes stand, as every array of the backward pass does.
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

impl Step {
    /// Whether it is one that gradients' kernels of every kind need.
    fn is_before_gradients(&self) -> bool {
        ["flash_attention_notes_", "flash_attention_sinks_"]
            .iter()
            .any(|start| self.name.starts_with(start))
    }
}

impl Attention {
    /// That of arrays of `shape`, heads first.
    ///
    /// # Errors
    /// A dtype of 32 bits; columns that are no multiple of 8.
    pub fn new(options: FlashAttention, shape: AttentionShape, dtype: DType) -> Result<Self> {
        if dtype == DType::F32 {
            return invalid(
                "q has dtype f32; kernels on GPUs take bf16 or f16, and XLA's own program \
                 (implementation=\"reference\") takes f32"
                    .to_owned(),
            );
        }
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
        for step in self.all_steps(pass, true, backward::is_for(Device::current()?)) {
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
        // SAFETY: passed on from this function's contract.
        unsafe { self.launch(self.steps(Pass::Forward, false), stream, &arguments) }
    }

    /// Has `stream` write every gradient.
    ///
    /// # Errors
    /// As of [`forward`](Self::forward), and tokens first.
    ///
    /// # Safety
    /// As for [`forward`](Self::forward).
    pub unsafe fn backward(
        &self,
        stream: *mut c_void,
        operands: Operands,
        saved: Saved,
        gradients: Gradients,
    ) -> Result<()> {
        if self.layout != Layout::HeadsFirst {
            return invalid(
                "arrays have tokens first; gradients are made of heads first".to_owned(),
            );
        }
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
        let mut steps = self.steps(Pass::Backward, !arguments.sinks.is_null());
        if self.shape.heads == 0 || self.shape.group == 0 || !backward::is_for(Device::current()?) {
            // SAFETY: passed on from this function's contract.
            return unsafe { self.launch(steps, stream, &arguments) };
        }
        steps.retain(Step::is_before_gradients);
        // SAFETY: passed on from this function's contract.
        unsafe {
            self.launch(steps, stream, &arguments)?;
            self.launch(self.backward_steps(), stream, &self.with_backward_maps(arguments)?)
        }
    }

    fn arguments(&self, operands: Operands) -> Result<Arguments> {
        let Operands { q, k, v, ranges, q_segments, kv_segments, sinks } = operands;
        for (name, address) in [("q", q), ("k", k), ("v", v), ("ranges", ranges.cast())] {
            check_alignment(name, address)?;
        }
        let AttentionShape { heads, group, queries, keys, width, value_width } = self.shape;
        // How far apart, in rows: heads of keys, heads of a group, and rows of a head.
        let (inner, [q_head, q_group, q_row], [k_head, k_row]) = match self.layout {
            Layout::HeadsFirst => (1, [group * queries, queries, 1], [keys, 1]),
            Layout::TokensFirst { inner } => (inner, [group, 1, inner * group], [1, inner]),
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

    /// The kernels of a pass on one kind of GPU.
    fn all_steps(&self, pass: Pass, has_sinks: bool, is_hopper: bool) -> Vec<Step> {
        let mut steps = self.steps(pass, has_sinks);
        if pass == Pass::Backward && is_hopper {
            steps.retain(Step::is_before_gradients);
            steps.extend(self.backward_steps());
        }
        steps
    }

    /// The kernels of a pass that every GPU has, in their order. Heads are padded to 64, 128 or 256 columns.
    fn steps(&self, pass: Pass, has_sinks: bool) -> Vec<Step> {
        let AttentionShape { heads, group, queries, keys, width, value_width } = self.shape;
        let columns = match width.max(value_width) {
            ..=64 => 64,
            65..=128 => 128,
            _ => 256,
        };
        let of_heads = |blocks: usize, heads: Option<usize>| heads?.checked_mul(blocks);
        let query_heads = heads.checked_mul(group);
        // Rows that a CTA keeps, and of a tile, of which two of keys and values are there at a time.
        let step = |name: &str, ctas, kept: usize, tile: usize| Step {
            name: format!("flash_attention_{name}_{}", self.dtype),
            ctas,
            threads: THREADS,
            shared_bytes: u32::try_from((kept + 4 * tile) * columns * 2).expect("fits a CTA"),
        };
        if pass == Pass::Forward {
            let (rows, tile) = if columns == 256 { (64, 32) } else { (128, 64) };
            let ctas = of_heads(queries.div_ceil(rows), query_heads);
            return vec![step(&format!("forward_{columns}"), ctas, rows, tile)];
        }
        let of_queries = of_heads(queries.div_ceil(BLOCK), query_heads);
        let of_keys = of_heads(keys.div_ceil(BLOCK), Some(heads));
        let (kept, tile) = (2 * BLOCK, if columns == 256 { 16 } else { 64 });
        let mut steps = vec![step("notes", of_queries, 0, 0)];
        if has_sinks {
            let sinks = step("sinks", query_heads, 0, 0);
            steps.push(Step { threads: SINK_THREADS, ..sinks });
        }
        steps.push(step(&format!("keys_{columns}"), of_keys, kept, tile));
        if columns == 256 {
            steps.push(step("values_256", of_keys, kept, tile));
        }
        steps.push(step(&format!("queries_{columns}"), of_queries, kept, tile));
        steps
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
        let of = |width, pass, has_sinks| {
            let shape = AttentionShape { width, ..SHAPE };
            let attention = Attention::new(FlashAttention::new(width), shape, DType::Bf16).unwrap();
            let steps = attention.steps(pass, has_sinks);
            assert!(steps.iter().all(|step| step.shared_bytes <= 96 << 10));
            let short = |step: Step| (step.name, step.ctas.unwrap(), step.shared_bytes >> 10);
            steps.into_iter().map(short).collect::<Vec<_>>()
        };
        let named =
            |name: &str, ctas: usize, kib: u32| (format!("flash_attention_{name}_bf16"), ctas, kib);
        assert_eq!(of(64, Pass::Forward, false), [named("forward_64", 48, 48)]);
        assert_eq!(of(72, Pass::Forward, true), [named("forward_128", 48, 96)]);
        assert_eq!(of(256, Pass::Forward, false), [named("forward_256", 72, 96)]);
        let backward = [
            named("notes", 72, 0),
            named("sinks", 24, 0),
            named("keys_128", 12, 96),
            named("queries_128", 72, 96),
        ];
        assert_eq!(of(128, Pass::Backward, true), backward);
        let backward = [
            named("notes", 72, 0),
            named("keys_256", 12, 96),
            named("values_256", 12, 96),
            named("queries_256", 72, 96),
        ];
        assert_eq!(of(136, Pass::Backward, false), backward);
    }

    #[test]
    fn hopper_has_gradients_of_its_own() {
        let of = |width, scale: f64| {
            let shape = AttentionShape { width, ..SHAPE };
            let mut options = FlashAttention::new(width);
            options.scale = scale;
            let attention = Attention::new(options, shape, DType::Bf16).unwrap();
            let steps = attention.all_steps(Pass::Backward, true, true).into_iter();
            steps
                .map(|step| (step.name, step.ctas.unwrap(), step.threads, step.shared_bytes >> 10))
                .collect::<Vec<_>>()
        };
        let named = |name: &str, ctas: usize, threads: u32, kib: u32| {
            (format!("flash_attention_{name}_bf16"), ctas, threads, kib)
        };
        let before = [named("notes", 72, 128, 0), named("sinks", 24, 256, 0)];
        let expected =
            [named("keys_128_hopper", 6, 384, 192), named("queries_128_hopper", 48, 384, 192)];
        assert_eq!(of(72, 0.1), [before.to_vec(), expected.to_vec()].concat());
        let expected = [
            named("keys_256_hopper_bent", 6, 384, 224),
            named("values_256_hopper_bent", 6, 384, 192),
            named("queries_256_hopper_bent", 48, 384, 224),
        ];
        assert_eq!(of(256, -0.1), [before.to_vec(), expected.to_vec()].concat());
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
    fn what_no_kernel_takes_is_refused() {
        let refuse = |shape, dtype| {
            let options = FlashAttention::new(64);
            Attention::new(options, shape, dtype).unwrap_err().to_string()
        };
        let message = refuse(SHAPE, DType::F32);
        assert!(
            message.starts_with("q has dtype f32; kernels on GPUs take bf16 or f16"),
            "{message}"
        );
        assert_eq!(
            refuse(AttentionShape { value_width: 12, ..SHAPE }, DType::F16),
            "v has heads of 12 columns; on GPUs it must be a multiple of 8"
        );
    }
}
