//! Where tiles run: on threads of our own, or on those that a host hands over.

use std::marker::PhantomData;

use rayon::prelude::*;

/// Something that runs independent tasks, possibly on several threads.
pub trait Parallel: Sync {
    /// Calls `body` once with every number below `tasks`, in any order and on any thread, and
    /// returns when all calls have returned. Kernels fetch ahead what the next number reads, so a
    /// thread should get numbers that follow one another.
    fn run(&self, tasks: usize, body: &(dyn Fn(usize) + Sync));

    /// How many tasks may run at a time, at least 1.
    fn threads(&self) -> usize;
}

/// A pool of threads of this process.
#[derive(Debug)]
pub struct Threads(rayon::ThreadPool);

impl Threads {
    /// A pool of `count` threads; 0 asks for one a core.
    ///
    /// # Errors
    /// The system refuses to start them.
    pub fn new(count: usize) -> Result<Self, rayon::ThreadPoolBuildError> {
        rayon::ThreadPoolBuilder::new().num_threads(count).build().map(Self)
    }

    /// The number of threads.
    #[must_use]
    pub fn count(&self) -> usize {
        self.0.current_num_threads()
    }
}

impl Parallel for Threads {
    fn run(&self, tasks: usize, body: &(dyn Fn(usize) + Sync)) {
        self.0.install(|| (0..tasks).into_par_iter().for_each(body));
    }

    fn threads(&self) -> usize {
        self.count()
    }
}

/// A mutable slice whose disjoint pieces are written by several tasks.
pub(crate) struct Shared<'a, T> {
    start: *mut T,
    length: usize,
    borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: a `Shared` only hands out pieces through the unsafe `slice`, whose caller promises that
// no piece is used by two tasks, and `read`, whose caller promises that none is written meanwhile;
// sending a `T` to another thread, and sharing one, is all that remains.
unsafe impl<T: Send + Sync> Sync for Shared<'_, T> {}

impl<'a, T> Shared<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Self { start: slice.as_mut_ptr(), length: slice.len(), borrow: PhantomData }
    }

    /// The `length` elements from `start`.
    ///
    /// # Safety
    /// While the returned slice lives, no other piece that overlaps it may be in use.
    #[allow(clippy::mut_from_ref)] // the caller's promise of disjointness replaces the borrow
    pub(crate) unsafe fn slice(&self, start: usize, length: usize) -> &mut [T] {
        assert!(start <= self.length && length <= self.length - start);
        // SAFETY: in bounds of the borrowed slice, and unaliased by this function's contract.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(start), length) }
    }

    /// The `length` elements from `start`, to read.
    ///
    /// # Safety
    /// While the returned slice lives, no piece of [`Self::slice`] that overlaps it may be in use.
    pub(crate) unsafe fn read(&self, start: usize, length: usize) -> &[T] {
        assert!(start <= self.length && length <= self.length - start);
        // SAFETY: in bounds of the borrowed slice, and not written by this function's contract.
        unsafe { std::slice::from_raw_parts(self.start.add(start), length) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn every_task_runs_once() {
        for threads in [1, 2, 5] {
            let pool = Threads::new(threads).unwrap();
            assert_eq!(pool.count(), threads);
            let calls: Vec<_> = (0..100).map(|_| AtomicUsize::new(0)).collect();
            pool.run(100, &|task| _ = calls[task].fetch_add(1, Ordering::Relaxed));
            assert!(calls.iter().all(|count| count.load(Ordering::Relaxed) == 1));
        }
    }
}
