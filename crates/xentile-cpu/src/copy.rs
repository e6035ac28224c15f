//! Copying bytes as fast as this processor can: the ceiling that kernels are measured against.

use crate::parallel::{Parallel, Shared};
use crate::{Isa, Job, Simd};

/// Bytes of a task: large enough to stream, small enough to share out.
const TASK_BYTES: usize = 1 << 18;

/// Copies `from` to `to` in tasks on `pool`, past the caches where `isa` can.
///
/// # Panics
/// The slices differ in length.
pub fn copy(pool: &dyn Parallel, isa: Isa, from: &[f32], to: &mut [f32]) {
    assert_eq!(from.len(), to.len());
    let task = TASK_BYTES / size_of::<f32>();
    let shared = Shared::new(to);
    pool.run(from.len().div_ceil(task), &|index| {
        let start = index * task;
        let from = &from[start..from.len().min(start + task)];
        // SAFETY: tasks have distinct indices, so their pieces are disjoint.
        let to = unsafe { shared.slice(start, from.len()) };
        isa.run(Stream { from, to });
    });
}

struct Stream<'a> {
    from: &'a [f32],
    to: &'a mut [f32],
}

impl Job for Stream<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let head = self.to.as_ptr().align_offset(64).min(self.to.len());
        let (to_head, to) = self.to.split_at_mut(head);
        let (from_head, from) = self.from.split_at(head);
        to_head.copy_from_slice(from_head);
        let (mut to, mut from) = (to.chunks_exact_mut(S::CHUNK), from.chunks_exact(S::CHUNK));
        for (to, from) in to.by_ref().zip(from.by_ref()) {
            // SAFETY: both have CHUNK elements; chunks of f32 start on their own size from the head.
            unsafe { s.stream(s.load(from.as_ptr()), to.as_mut_ptr()) };
        }
        to.into_remainder().copy_from_slice(from.remainder());
        s.fence();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Threads;

    #[test]
    fn copies_every_element() {
        let pool = Threads::new(2).unwrap();
        let from: Vec<f32> = (0..3 + 200_000 / crate::ONE_IN).map(|i| i as f32).collect();
        for isa in Isa::available() {
            for start in [0, 1, 5] {
                let mut to = vec![-1.0; from.len() - start];
                copy(&pool, isa, &from[start..], &mut to);
                assert!(to == from[start..], "{isa} from {start}");
            }
        }
    }
}
