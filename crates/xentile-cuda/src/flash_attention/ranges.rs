//! Ranges of keys that end where segments do, by which kernels of attention skip tiles.

use std::ffi::c_void;

use super::arguments::{RANGES_THREADS, RangesArguments};
use super::{kernel, number};
use crate::driver::{Driver, Extent};
use crate::{Result, check_alignment};

/// The most buckets of ids, of `BUCKET_BYTES` of shared memory each.
const MOST_BUCKETS: usize = 8192;
const BUCKET_BYTES: usize = 8;

const NAME: &str = "flash_attention_ranges";

/// Ranges and segments of so many batch entries.
#[derive(Clone, Copy, Debug)]
pub struct SegmentRanges {
    /// Batch entries.
    pub entries: usize,
    /// Queries of an entry.
    pub queries: usize,
    /// Keys of an entry.
    pub keys: usize,
}

/// Arrays of `i32`: ranges `[entries, queries, 2]`, and segments of queries and of keys.
#[derive(Clone, Copy, Debug)]
pub struct Segmented<P> {
    /// The first key that a query sees and the one behind its last.
    pub ranges: P,
    /// `[entries, queries]`.
    pub q_segments: P,
    /// `[entries, keys]`; at the address of `q_segments` where queries and keys have the same.
    pub kv_segments: P,
}

impl SegmentRanges {
    /// Loads the kernel of [`run`](Self::run).
    ///
    /// # Errors
    /// No driver or GPU that will do.
    ///
    /// # Safety
    /// `stream` is a `CUstream` of the calling thread's current context.
    pub unsafe fn load(&self, stream: *mut c_void) -> Result<()> {
        // SAFETY: passed on from this function's contract.
        unsafe { kernel(NAME, stream) }.map(drop)
    }

    /// Has `stream` write ranges and segments that say the same: ranges end at the first and the last key of a query's
    /// segment, and segments of an entry are 0 where its ranges alone say what queries see.
    ///
    /// # Errors
    /// No driver or GPU that will do, ranges that begin at no multiple of 16, 2^31 entries, queries or keys, a failure
    /// of the driver.
    ///
    /// # Safety
    /// `stream` is a `CUstream` of the calling thread's current context, and the pointers lead to arrays of these shapes
    /// on its device, those of `to` apart from all others, which nothing else touches until it has run what was launched
    /// here.
    pub unsafe fn run(
        &self,
        stream: *mut c_void,
        of: Segmented<*const i32>,
        to: Segmented<*mut i32>,
    ) -> Result<()> {
        check_alignment("ranges", of.ranges.cast())?;
        check_alignment("narrowed", to.ranges.cast())?;
        let entries = number(self.entries)?.cast_unsigned();
        let buckets = (self.keys + 1).next_power_of_two().min(MOST_BUCKETS);
        let arguments = RangesArguments {
            ranges: of.ranges,
            q_segments: of.q_segments,
            kv_segments: of.kv_segments,
            narrowed: to.ranges,
            of_queries: to.q_segments,
            of_keys: to.kv_segments,
            queries: number(self.queries)?,
            keys: number(self.keys)?,
            buckets: number(buckets)?,
        };
        if entries == 0 {
            return Ok(());
        }
        let extent = Extent {
            ctas: entries,
            rows: 1,
            threads: RANGES_THREADS,
            shared_bytes: number(buckets * BUCKET_BYTES)?.cast_unsigned(),
            cluster: None,
        };
        // SAFETY: passed on from this function's contract.
        unsafe { Driver::get()?.launch(kernel(NAME, stream)?, extent, stream, &arguments) }
    }
}
