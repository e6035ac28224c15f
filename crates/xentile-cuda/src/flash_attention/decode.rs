//! The forward pass of few queries over many keys, as of decoding: every CTA reads chunks of keys, and a second
//! kernel merges each row's chunks in their order.

use std::ffi::c_void;
use std::ptr::null;

use xentile::DType;
use xentile::flash_attention::AttentionShape;

use super::arguments::{
    Arguments, DECODE_BYTES, DECODE_THREADS, DECODE_WIDE_BYTES, DecodeArguments,
};
use super::{Attention, Operands, invalid, kernel};
use crate::driver::{Driver, Extent, RawStream};
use crate::{Device, Result, check_alignment};

/// The least keys of a chunk.
pub const LEAST_CHUNK: usize = 64;

/// There must be fewer keys: tiles beyond the last are counted in 32 bits.
const MOST_KEYS: usize = 1 << 30;

/// The entries of a launch, each of which takes `ENTRY_BYTES` of shared memory in every CTA.
const MOST_ENTRIES: usize = 1024;
const ENTRY_BYTES: usize = 16;

/// Rows of the two kinds of blocks: of a warp, and of all four.
const ROWS: usize = 16;
const WIDE_ROWS: usize = 64;

/// What a CTA has besides dynamic shared memory: its own, and the system's.
const FIXED_BYTES: usize = 2 << 10;

/// Keys and values in pages of a pool.
#[derive(Clone, Copy, Debug)]
pub struct Pages {
    /// The pages of each entry of `inner` heads of keys, `[N / inner, pages]`, in which position `p` is in page
    /// `p / page_size`. Those of positions that no query sees are not read.
    pub block_tables: *const i32,
    /// Pages of an entry.
    pub pages: usize,
    /// Positions of a page.
    pub page_size: usize,
}

/// What chunks leave to the second kernel.
#[derive(Clone, Copy, Debug)]
pub struct Partials {
    /// `[N, chunks, G, S, E]`.
    pub o: *mut f32,
    /// `[N, chunks, G, S]`.
    pub lse: *mut f32,
}

/// Attention of bf16 or f16 over chunks of keys.
///
/// With pages, keys and values are pools `[P, page_size, inner, D]`, the shape's keys those of all pages of an entry,
/// ranges `[N / inner, S, 2]` and sinks `[inner, G]`.
#[derive(Clone, Copy, Debug)]
pub struct Decode {
    attention: Attention,
    chunk: usize,
    pages: Option<Pages>,
}

/// How the heads of a call are launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Plan {
    /// Rows of a block.
    block: usize,
    chunks: usize,
    /// Entries of each launch, the last but for fewer.
    entries: usize,
    shared_bytes: usize,
    /// CTAs that run at a time.
    ctas: usize,
}

impl Decode {
    /// That of `attention`, without segments, in chunks of so many keys.
    ///
    /// # Errors
    /// float32, 2^30 keys or more, or a chunk that is no power of two from 64 on.
    pub fn new(attention: Attention, chunk: usize, pages: Option<Pages>) -> Result<Self> {
        if attention.dtype == DType::F32 {
            return invalid("q has dtype f32; it must be bf16 or f16".into());
        }
        if attention.shape.keys >= MOST_KEYS {
            return invalid(format!("{:?}: there must be fewer than 2^30 keys", attention.shape));
        }
        if !chunk.is_power_of_two() || !(LEAST_CHUNK..=MOST_KEYS).contains(&chunk) {
            return invalid(format!(
                "chunk_keys is {chunk}; it must be a power of two, at least {LEAST_CHUNK}"
            ));
        }
        Ok(Self { attention, chunk, pages })
    }

    /// Loads the kernels of [`run`](Self::run).
    ///
    /// # Errors
    /// No driver or GPU that will do.
    ///
    /// # Safety
    /// `stream` is a `CUstream` of the calling thread's current context.
    pub unsafe fn load(&self, stream: *mut c_void) -> Result<()> {
        let device = Device::current()?;
        let Some(plan) = self.plan(device)? else {
            // SAFETY: passed on from this function's contract.
            return unsafe { self.attention.load(super::Pass::Forward, stream) };
        };
        // SAFETY: passed on from this function's contract.
        unsafe {
            kernel(&self.chunks_kernel(&plan), stream)?;
            kernel(&self.merge_kernel(), stream)?;
        }
        Ok(())
    }

    /// Has `stream` write o and lse. Where a CTA of the device has too little shared memory, the kernels of
    /// [`Attention::forward`] do so.
    ///
    /// # Errors
    /// As of [`Attention::forward`]; pages on such a device.
    ///
    /// # Safety
    /// As for [`Attention::forward`]. Block tables name pages of the pool wherever a query sees a position.
    pub unsafe fn run(
        &self,
        stream: *mut c_void,
        operands: Operands,
        o: *mut c_void,
        lse: *mut f32,
        partials: Partials,
    ) -> Result<()> {
        let device = Device::current()?;
        let Some(plan) = self.plan(device)? else {
            // SAFETY: passed on from this function's contract.
            return unsafe { self.attention.forward(stream, operands, o, lse) };
        };
        check_alignment("o", o)?;
        check_alignment("partials", partials.o.cast())?;
        let of = Arguments { o, lse, ..self.attention.arguments(operands)? };
        let (entries, rows) = (self.entries(), self.attention.shape.rows());
        let (tables, pages, page_size) =
            self.pages.map_or((null(), 0, 0), |all| (all.block_tables, all.pages, all.page_size));
        for first in (0..entries).step_by(plan.entries) {
            let own = plan.entries.min(entries - first);
            let arguments = DecodeArguments {
                of,
                block_tables: tables,
                partials: partials.o,
                partial_lse: partials.lse,
                pages: number(pages)?,
                page_size: number(page_size)?,
                chunk_log2: self.chunk.ilog2().cast_signed(),
                chunks: number(plan.chunks)?,
                first_entry: number(first)?,
                entries: number(own)?,
            };
            let heads = own * self.inner();
            let units = heads * rows.div_ceil(plan.block) * plan.chunks;
            let extent = Extent {
                ctas: number(units.min(plan.ctas))?.cast_unsigned(),
                rows: 1,
                threads: DECODE_THREADS,
                shared_bytes: number(plan.shared_bytes)?.cast_unsigned(),
                cluster: None,
            };
            // SAFETY: passed on from this function's contract.
            unsafe { self.launch(&plan, extent, heads * rows, stream, &arguments) }?;
        }
        Ok(())
    }

    /// # Safety
    /// As for [`run`](Self::run).
    unsafe fn launch(
        &self,
        plan: &Plan,
        extent: Extent,
        rows: usize,
        stream: RawStream,
        arguments: &DecodeArguments,
    ) -> Result<()> {
        let driver = Driver::get()?;
        // SAFETY: passed on from this function's contract.
        unsafe {
            driver.launch(kernel(&self.chunks_kernel(plan), stream)?, extent, stream, arguments)?;
        }
        if plan.chunks == 1 {
            return Ok(());
        }
        let extent = Extent { ctas: number(rows)?.cast_unsigned(), shared_bytes: 0, ..extent };
        // SAFETY: passed on from this function's contract.
        unsafe {
            let merge = kernel(&self.merge_kernel(), stream)?;
            if Device::current()?.limits().clusters {
                driver.launch_early(merge, extent, stream, arguments)
            } else {
                driver.launch(merge, extent, stream, arguments)
            }
        }
    }

    /// The launches on a device, if its CTAs have enough shared memory, or there is nothing to read.
    fn plan(&self, device: &Device) -> Result<Option<Plan>> {
        let limits = device.limits();
        let found =
            self.plan_for(limits.multiprocessors as usize, limits.shared_bytes_per_block as usize);
        if found.is_none() && self.pages.is_some() {
            return invalid(format!(
                "{} has {} bytes of shared memory for a CTA, which are too few for attention of pages",
                device.name(),
                limits.shared_bytes_per_block
            ));
        }
        Ok(found)
    }

    fn plan_for(&self, multiprocessors: usize, shared_bytes: usize) -> Option<Plan> {
        let AttentionShape { keys, .. } = self.attention.shape;
        let (rows, columns) = (self.attention.shape.rows(), self.attention.padded_columns());
        let chunks = keys.div_ceil(self.chunk).max(1);
        let block = if rows <= ROWS { ROWS } else { WIDE_ROWS };
        // The units and the rows of a launch are counted in 32 bits.
        let of_entry = self.inner().checked_mul(rows.max(1))?.checked_mul(chunks)?;
        let entries = (i32::MAX as usize / of_entry).min(MOST_ENTRIES).min(self.entries());
        if entries == 0 && self.entries() != 0 {
            return None;
        }
        let stages = if columns == 256 { DECODE_WIDE_BYTES } else { DECODE_BYTES } as usize;
        // What warps exchange: columns of sums, in one slice or in several.
        let slices = if rows <= 4 {
            1
        } else if rows <= 8 {
            2
        } else {
            4
        };
        let sums = if block == ROWS { 4 * rows * (columns / slices + 8) * 4 } else { 0 };
        let bytes = stages + entries * ENTRY_BYTES + sums;
        // A multiprocessor has a KiB more than a CTA may.
        let at_once = (shared_bytes + (1 << 10)) / (bytes + FIXED_BYTES);
        (at_once > 0).then_some(Plan {
            block,
            chunks,
            entries: entries.max(1),
            shared_bytes: bytes,
            ctas: at_once * multiprocessors,
        })
    }

    fn inner(&self) -> usize {
        self.attention.inner().max(1)
    }

    fn entries(&self) -> usize {
        if self.attention.shape.rows() == 0 { 0 } else { self.attention.shape.heads / self.inner() }
    }

    fn chunks_kernel(&self, plan: &Plan) -> String {
        let Attention { dtype, .. } = self.attention;
        let columns = self.attention.padded_columns();
        format!("flash_attention_decode_{columns}_{}_{dtype}", plan.block)
    }

    fn merge_kernel(&self) -> String {
        format!("flash_attention_decode_merge_{}", self.attention.dtype)
    }
}

/// A number that kernels take in 32 bits.
fn number(count: usize) -> Result<i32> {
    i32::try_from(count)
        .or_else(|_| invalid(format!("{count} is too large; it must be below 2^31")))
}

#[cfg(test)]
mod tests {
    use xentile::DType;
    use xentile::flash_attention::{AttentionShape, FlashAttention};

    use super::super::{Attention, Layout};
    use super::{Decode, Plan};

    const SHAPE: AttentionShape = AttentionShape {
        heads: 64,
        group: 4,
        queries: 1,
        keys: 8192,
        width: 128,
        value_width: 128,
    };

    fn decode(shape: AttentionShape, chunk: usize) -> Decode {
        let attention = Attention::new(FlashAttention::new(128), shape, DType::Bf16).unwrap();
        let attention = attention.with_layout(Layout::TokensFirst { inner: 8 }).unwrap();
        Decode::new(attention, chunk, None).unwrap()
    }

    #[test]
    fn two_ctas_share_a_multiprocessor() {
        let of = |shape, chunk| decode(shape, chunk).plan_for(132, 227 << 10).unwrap();
        let plan = of(SHAPE, 2048);
        let shared_bytes = (96 << 10) + 128 + 4 * 4 * 136 * 4;
        assert_eq!(plan, Plan { block: 16, chunks: 4, entries: 8, shared_bytes, ctas: 264 });
        let plan = of(AttentionShape { queries: 4, keys: 1000, ..SHAPE }, 64);
        assert_eq!((plan.block, plan.chunks, plan.ctas), (16, 16, 264));
        let plan = of(AttentionShape { queries: 5, width: 64, value_width: 8, ..SHAPE }, 64);
        assert_eq!((plan.block, plan.shared_bytes, plan.ctas), (64, (96 << 10) + 128, 264));
        let wide = AttentionShape { queries: 4, width: 136, ..SHAPE };
        assert_eq!(of(wide, 64).ctas, 132);
        // What fits no CTA is the other kernels'.
        assert_eq!(decode(wide, 64).plan_for(108, 163 << 10), None);
        assert_eq!(decode(SHAPE, 64).plan_for(108, 163 << 10).unwrap().ctas, 108);
        assert_eq!(decode(SHAPE, 64).plan_for(108, 99 << 10), None);
    }

    #[test]
    fn many_entries_have_several_launches() {
        let of = |shape| decode(shape, 64).plan_for(132, 227 << 10).unwrap();
        assert_eq!(of(AttentionShape { heads: 8 * 5000, ..SHAPE }).entries, 1024);
        let long = AttentionShape { keys: (1 << 30) - 1, ..SHAPE };
        assert_eq!(of(AttentionShape { heads: 8 * 5000, ..long }).entries, 3);
        assert_eq!(of(AttentionShape { heads: 0, ..SHAPE }).entries, 1);
    }

    #[test]
    fn shapes_without_a_kernel_are_refused() {
        let attention = |dtype, keys| {
            let shape = AttentionShape { keys, ..SHAPE };
            Attention::new(FlashAttention::new(128), shape, dtype).unwrap()
        };
        let refuse = |dtype, keys, chunk| {
            Decode::new(attention(dtype, keys), chunk, None).unwrap_err().to_string()
        };
        assert_eq!(refuse(DType::F32, 8, 64), "q has dtype f32; it must be bf16 or f16");
        assert!(refuse(DType::F16, 1 << 30, 64).ends_with("there must be fewer than 2^30 keys"));
        for chunk in [0, 32, 96] {
            let right = format!("chunk_keys is {chunk}; it must be a power of two, at least 64");
            assert_eq!(refuse(DType::F16, 8, chunk), right);
        }
    }
}
