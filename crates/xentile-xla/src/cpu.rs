//! What the handlers of every operation on the CPU share.

use xentile_cpu::{InOut, Parallel};
use xla_ffi::{Aliased, ThreadPool};

/// XLA's threads, for kernels to run on.
pub(crate) struct Pool<'a>(pub(crate) ThreadPool<'a>);

impl Parallel for Pool<'_> {
    fn run(&self, tasks: usize, body: &(dyn Fn(usize) + Sync)) {
        self.0.run(tasks, body);
    }

    fn threads(&self) -> usize {
        self.0.threads()
    }
}

/// An argument and the result that may lie in its place, as kernels take them.
pub(crate) fn in_out<T>(aliased: Aliased<'_, T>) -> InOut<'_, T> {
    match aliased {
        Aliased::InPlace(both) => InOut::InPlace(both),
        Aliased::Apart { argument, result } => {
            ask_for_huge_pages(result);
            InOut::apart(argument, result)
        }
    }
}

/// Bytes of a huge page.
#[cfg(target_os = "linux")]
const HUGE_PAGE: usize = 2 << 20;

/// Asks that memory which nothing has touched yet come in huge pages, as numpy does for its arrays.
///
/// XLA takes each large result afresh from the system, which hands it out page by page as it is first
/// written. In pages of 4 KiB that takes longer than the kernel.
#[cfg(target_os = "linux")]
pub(crate) fn ask_for_huge_pages<T>(result: &mut [T]) {
    let bytes = std::ptr::from_mut(result).cast::<u8>();
    let skipped = bytes.align_offset(HUGE_PAGE);
    let whole = size_of_val(result).saturating_sub(skipped) / HUGE_PAGE * HUGE_PAGE;
    if whole > 0 {
        // SAFETY: the range lies in the result, and the advice changes no contents. Where it is not
        // taken, nothing is lost.
        unsafe { libc::madvise(bytes.add(skipped).cast(), whole, libc::MADV_HUGEPAGE) };
    }
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn ask_for_huge_pages<T>(_: &mut [T]) {}
