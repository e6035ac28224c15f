//! What the runtime lends a call besides buffers: its stream, memory and threads.

use std::{
    alloc::{Layout, alloc_zeroed, dealloc},
    any::Any,
    cell::RefCell,
    ffi::c_void,
    marker::PhantomData,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    ptr::{NonNull, null_mut},
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use crate::{
    Element, Error, Result, Stage, abi,
    api::{Api, function},
    decoder::{Decoder, Parameter},
    frame::Frame,
};

/// The call in progress, from which the others come.
#[derive(Clone, Copy)]
pub struct Context<'a> {
    api: Api<'a>,
    ctx: *mut abi::ExecutionContext,
    stage: Stage,
}

// SAFETY: the runtime's functions that are called with it take calls from its own threads.
unsafe impl Send for Context<'_> {}
// SAFETY: as above.
unsafe impl Sync for Context<'_> {}

impl<'a> Context<'a> {
    pub(crate) fn new(frame: &Frame<'a>) -> Self {
        Self { api: frame.api, ctx: frame.ctx, stage: frame.stage }
    }

    /// The stage of the call.
    #[must_use]
    pub fn stage(&self) -> Stage {
        self.stage
    }

    /// The version of the interface that the runtime speaks, major and minor.
    #[must_use]
    pub fn version(&self) -> (i32, i32) {
        self.api.version()
    }

    /// The stream that the call belongs to: on NVIDIA GPUs a `CUstream`.
    ///
    /// # Errors
    /// The platform has no streams, as the CPU, or the stage has none.
    pub fn stream(&self) -> Result<Stream<'a>> {
        let mut args = abi::StreamGetArgs {
            struct_size: size_of::<abi::StreamGetArgs>(),
            extension_start: null_mut(),
            ctx: self.ctx,
            stream: null_mut(),
        };
        let function = function!(self.api, stream_get);
        // SAFETY: the struct is whole.
        unsafe { self.api.call(function, "streams", &mut args) }?;
        Ok(Stream { stream: args.stream, lifetime: PhantomData })
    }

    /// The number of the device among those of its process.
    ///
    /// # Errors
    /// The runtime does not say.
    pub fn device_ordinal(&self) -> Result<i32> {
        let mut args = abi::DeviceOrdinalGetArgs {
            struct_size: std::mem::offset_of!(abi::DeviceOrdinalGetArgs, device_ordinal) + 4,
            extension_start: null_mut(),
            ctx: self.ctx,
            device_ordinal: 0,
        };
        let function = function!(self.api, device_ordinal_get);
        // SAFETY: the struct is whole.
        unsafe { self.api.call(function, "device ordinals", &mut args) }?;
        Ok(args.device_ordinal)
    }

    /// Memory for this call only.
    #[must_use]
    pub fn scratch(&self) -> Scratch<'a> {
        Scratch { context: *self, blocks: RefCell::default() }
    }

    /// The threads that the runtime computes on.
    #[must_use]
    pub fn thread_pool(&self) -> ThreadPool<'a> {
        ThreadPool { context: *self }
    }
}

/// The stream that a call belongs to.
#[derive(Clone, Copy, Debug)]
pub struct Stream<'a> {
    stream: *mut c_void,
    lifetime: PhantomData<&'a ()>,
}

impl Stream<'_> {
    /// The platform's own stream. It must not be used after the call.
    #[must_use]
    pub fn as_ptr(&self) -> *mut c_void {
        self.stream
    }
}

/// Memory that lasts until this is dropped, at the end of the call at the latest.
pub struct Scratch<'a> {
    context: Context<'a>,
    blocks: RefCell<Vec<Block>>,
}

enum Block {
    Device { size: usize, data: *mut c_void },
    Host { layout: Layout, data: NonNull<u8> },
}

impl Scratch<'_> {
    /// `size` bytes on the device, at a multiple of `alignment`, with arbitrary contents.
    ///
    /// # Errors
    /// The device has no such memory left, or its runtime lends none, as on the CPU.
    pub fn on_device(&self, size: usize, alignment: usize) -> Result<*mut c_void> {
        let mut args = abi::DeviceMemoryAllocateArgs {
            struct_size: size_of::<abi::DeviceMemoryAllocateArgs>(),
            extension_start: null_mut(),
            ctx: self.context.ctx,
            size,
            alignment,
            data: null_mut(),
        };
        let function = function!(self.context.api, device_memory_allocate);
        // SAFETY: the struct is whole.
        unsafe { self.context.api.call(function, "device memory", &mut args) }?;
        if args.data.is_null() && size > 0 {
            return Err(Error::resource_exhausted(format!(
                "the runtime gives no {size} bytes of device memory"
            )));
        }
        self.blocks.borrow_mut().push(Block::Device { size, data: args.data });
        Ok(args.data)
    }

    /// `length` zeros in the memory of the host.
    ///
    /// # Errors
    /// There is no such memory.
    #[allow(clippy::mut_from_ref)] // every call allocates anew
    pub fn on_host<T: Element>(&self, length: usize) -> Result<&mut [T]> {
        // A line of cache, so that the blocks of two calls share none.
        let layout = Layout::array::<T>(length)
            .and_then(|layout| layout.align_to(64))
            .map_err(|_| Error::resource_exhausted(format!("{length} elements of scratch")))?;
        if layout.size() == 0 {
            return Ok(&mut []);
        }
        // SAFETY: the layout has bytes.
        let data = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(|| {
            Error::resource_exhausted(format!("no {} bytes of scratch memory", layout.size()))
        })?;
        self.blocks.borrow_mut().push(Block::Host { layout, data });
        // SAFETY: fresh, zeroed, aligned, as long as asked for, and freed when `self` is dropped; an
        // `Element` takes any bits.
        Ok(unsafe { std::slice::from_raw_parts_mut(data.cast().as_ptr(), length) })
    }
}

impl Drop for Scratch<'_> {
    fn drop(&mut self) {
        for block in self.blocks.get_mut().drain(..) {
            match block {
                // SAFETY: allocated with this layout, and its borrows ended with `self`.
                Block::Host { layout, data } => unsafe { dealloc(data.as_ptr(), layout) },
                Block::Device { size, data } => {
                    let mut args = abi::DeviceMemoryFreeArgs {
                        struct_size: size_of::<abi::DeviceMemoryFreeArgs>(),
                        extension_start: null_mut(),
                        ctx: self.context.ctx,
                        size,
                        data,
                    };
                    let api = self.context.api;
                    let function = function!(api, device_memory_free);
                    // SAFETY: the struct is whole, and the block came from this context. A failure
                    // to free is the runtime's to report; the call itself is done.
                    _ = unsafe { api.call(function, "device memory", &mut args) };
                }
            }
        }
    }
}

/// The threads on which the runtime computes; where it lends none, the calling thread alone.
#[derive(Clone, Copy)]
pub struct ThreadPool<'a> {
    context: Context<'a>,
}

impl ThreadPool<'_> {
    /// The number of threads, at least 1.
    #[must_use]
    pub fn threads(&self) -> usize {
        let mut threads = 0;
        let mut args = abi::ThreadPoolNumThreadsArgs {
            struct_size: size_of::<abi::ThreadPoolNumThreadsArgs>(),
            extension_start: null_mut(),
            ctx: self.context.ctx,
            num_threads: &raw mut threads,
        };
        let api = self.context.api;
        let function = function!(api, thread_pool_num_threads);
        // SAFETY: the struct is whole, and `threads` outlives the call.
        let result = unsafe { api.call(function, "thread pool", &mut args) };
        if result.is_ok() { usize::try_from(threads).unwrap_or(1).max(1) } else { 1 }
    }

    /// Calls `body` once with every number below `tasks`, in any order and on any thread, the calling
    /// one among them, and returns when all calls have returned. `body` may call `run` again.
    ///
    /// A thread mostly gets numbers that follow one another, so that a task may fetch from memory
    /// what the next one reads.
    ///
    /// # Panics
    /// When a call of `body` panics: the others under way finish, no more are begun, and the calling
    /// thread goes on with the first panic.
    pub fn run(&self, tasks: usize, body: &(dyn Fn(usize) + Sync)) {
        let helpers = if tasks > 1 { (self.threads() - 1).min(tasks - 1) } else { 0 };
        if helpers == 0 {
            (0..tasks).for_each(body);
            return;
        }
        // SAFETY: only the lifetime changes, and `wait` below ends it: a thread uses `body` between
        // taking a task and counting it done, and `wait` returns when every task is done.
        let body = unsafe {
            std::mem::transmute::<&(dyn Fn(usize) + Sync), &'static (dyn Fn(usize) + Sync)>(body)
        };
        let work = Arc::new(Work {
            body,
            tasks,
            shares: shares(tasks, helpers + 1),
            threads: AtomicUsize::new(0),
            done: AtomicUsize::new(0),
            stopped: AtomicBool::new(false),
            panic: Mutex::new(None),
            all_done: Condvar::new(),
        });
        for _ in 0..helpers {
            if !self.schedule(&work) {
                break;
            }
        }
        work.help();
        work.wait();
        let panic = work.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }

    /// Calls `body` with every piece of `length` elements of `slice`, the last of which may be
    /// shorter, and the index of its first element, as [`run`](Self::run) would.
    ///
    /// # Panics
    /// When `length` is 0, or a call of `body` panics.
    pub fn run_chunks<T: Send>(
        &self,
        slice: &mut [T],
        length: usize,
        body: impl Fn(usize, &mut [T]) + Sync,
    ) {
        /// The start of the slice, for threads that each take a piece of their own.
        struct Start<T>(*mut T);
        // SAFETY: the pieces are disjoint, so an element is sent to one thread.
        unsafe impl<T: Send> Sync for Start<T> {}

        let (start, total) = (&Start(slice.as_mut_ptr()), slice.len());
        self.run(total.div_ceil(length), &|task| {
            let first = task * length;
            // SAFETY: within the slice, which is borrowed until `run` returns, and every number
            // comes once.
            let chunk = unsafe {
                let chunk = start.0.add(first);
                std::slice::from_raw_parts_mut(chunk, length.min(total - first))
            };
            body(first, chunk);
        });
    }

    /// Asks for a thread; false where the runtime has none to lend.
    fn schedule(&self, work: &Arc<Work>) -> bool {
        let data = Arc::into_raw(Arc::clone(work));
        let mut args = abi::ThreadPoolScheduleArgs {
            struct_size: size_of::<abi::ThreadPoolScheduleArgs>(),
            extension_start: null_mut(),
            ctx: self.context.ctx,
            task: Some(help),
            data: data.cast_mut().cast(),
        };
        let api = self.context.api;
        let function = function!(api, thread_pool_schedule);
        // SAFETY: the struct is whole, and the task owns its data.
        let scheduled = unsafe { api.call(function, "thread pool", &mut args) }.is_ok();
        if !scheduled {
            // SAFETY: the task will not run, so the data is still ours.
            drop(unsafe { Arc::from_raw(data) });
        }
        scheduled
    }
}

/// Tasks that threads take one by one. Owned by every thread that was asked to help, because one may
/// come when all is done and the handler has returned; it then finds no task, and leaves.
struct Work {
    /// Valid for a thread that holds a task which is not counted as done.
    body: &'static (dyn Fn(usize) + Sync),
    tasks: usize,
    /// One for each thread that was asked for. Those that are through with theirs go on with others.
    shares: Vec<Share>,
    /// How many threads have come.
    threads: AtomicUsize,
    done: AtomicUsize,
    stopped: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    all_done: Condvar,
}

/// Numbers that follow one another, in a cache line of their own.
#[repr(align(64))]
struct Share {
    next: AtomicUsize,
    end: usize,
}

impl Share {
    fn take(&self) -> Option<usize> {
        let task = self.next.fetch_add(1, Ordering::Relaxed);
        (task < self.end).then_some(task)
    }
}

/// The numbers below `tasks` in `count` shares of nearly one size.
fn shares(tasks: usize, count: usize) -> Vec<Share> {
    let (size, larger) = (tasks / count, tasks % count);
    let start = |index: usize| index * size + index.min(larger);
    (0..count)
        .map(|index| Share { next: AtomicUsize::new(start(index)), end: start(index + 1) })
        .collect()
}

impl Work {
    /// Runs tasks until none is left to take.
    fn help(&self) {
        let first = self.threads.fetch_add(1, Ordering::Relaxed);
        for index in 0..self.shares.len() {
            let share = &self.shares[(first + index) % self.shares.len()];
            while let Some(task) = share.take() {
                self.run(task);
            }
        }
    }

    fn run(&self, task: usize) {
        if !self.stopped.load(Ordering::Relaxed)
            && let Err(panic) = catch_unwind(AssertUnwindSafe(|| (self.body)(task)))
        {
            self.stopped.store(true, Ordering::Relaxed);
            let mut first = self.panic.lock().unwrap_or_else(PoisonError::into_inner);
            if first.is_none() {
                *first = Some(panic);
            } else {
                // Its destructor might panic in turn, on a thread that is not ours.
                std::mem::forget(panic);
            }
        }
        if self.done.fetch_add(1, Ordering::AcqRel) + 1 == self.tasks {
            // Under the lock, so that `wait` cannot miss it between its check and its sleep.
            let _lock = self.panic.lock().unwrap_or_else(PoisonError::into_inner);
            self.all_done.notify_all();
        }
    }

    /// Blocks until every task is done. Those not begun when [`help`](Self::help) returns are none,
    /// so the wait is for threads at work, never for one that has yet to come.
    fn wait(&self) {
        let mut lock = self.panic.lock().unwrap_or_else(PoisonError::into_inner);
        while self.done.load(Ordering::Acquire) < self.tasks {
            lock = self.all_done.wait(lock).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// A thread of the runtime comes to help.
///
/// # Safety
/// `data` is an `Arc<Work>` to own.
unsafe extern "C" fn help(data: *mut c_void) {
    // SAFETY: as this function's contract has it.
    let work = unsafe { Arc::from_raw(data.cast_const().cast::<Work>()) };
    work.help();
}

impl<'a> Parameter<'a> for Context<'a> {
    fn decode(decoder: &mut Decoder<'a>, _: &'static str) -> Result<Self> {
        Ok(Self::new(&decoder.frame))
    }
}

impl<'a> Parameter<'a> for Stream<'a> {
    fn decode(decoder: &mut Decoder<'a>, name: &'static str) -> Result<Self> {
        Context::decode(decoder, name)?.stream()
    }
}

impl<'a> Parameter<'a> for Scratch<'a> {
    fn decode(decoder: &mut Decoder<'a>, name: &'static str) -> Result<Self> {
        Ok(Context::decode(decoder, name)?.scratch())
    }
}

impl<'a> Parameter<'a> for ThreadPool<'a> {
    fn decode(decoder: &mut Decoder<'a>, name: &'static str) -> Result<Self> {
        Ok(Context::decode(decoder, name)?.thread_pool())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_is_in_one_share() {
        for (tasks, count) in [(0, 1), (1, 1), (5, 2), (6, 3), (7, 3), (512, 16), (2, 5)] {
            let shares = shares(tasks, count);
            assert_eq!(shares.len(), count);
            let taken: Vec<_> =
                shares.iter().flat_map(|share| std::iter::from_fn(|| share.take())).collect();
            assert_eq!(taken, (0..tasks).collect::<Vec<_>>(), "{tasks} in {count}");
        }
    }
}
