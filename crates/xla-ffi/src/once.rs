//! Which calls a handler has had before, for those that do a thing once.
//!
//! A runtime calls `Initialize` before every run of a program, for each of its calls, and starts the
//! first kernel afterwards. What a handler does there takes 6 us where it only finds that all is
//! loaded: little of its code and data is in the processor's caches by then. So a call that was
//! answered before is recognised by its frame, which the runtime wrote just now.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::{context::Context, frame::Frame};

/// A handler, the device, and what its function sees of a call but memory.
#[derive(Clone, Copy)]
pub(crate) struct Key(NonZeroU64);

impl Key {
    /// `None` where the frame is broken, or the runtime does not say which device it is.
    pub(crate) fn new(handler: &'static str, frame: &Frame<'_>) -> Option<Self> {
        let mut hasher = DefaultHasher::new();
        // No two handlers have one name, so that where it lies tells of it.
        (handler.as_ptr().addr(), handler.len()).hash(&mut hasher);
        Context::new(frame).device_ordinal().ok()?.hash(&mut hasher);
        frame.hash(&mut hasher).ok()?;
        NonZeroU64::new(hasher.finish()).map(Self)
    }
}

/// Keys, never taken out again. One that finds no room is as if it had not been put in, and of two
/// calls with one hash, of which there is one in 2^40 where the table is full, the second is taken
/// for the first.
pub(crate) struct Seen<const PLACES: usize>([AtomicU64; PLACES]);

/// The calls of this process. 32 KiB, of which a program touches a line for each call.
pub(crate) static SEEN: Seen<4096> = Seen::new();

/// Places that a key may have.
const PROBES: usize = 8;

impl<const PLACES: usize> Seen<PLACES> {
    const fn new() -> Self {
        Self([const { AtomicU64::new(0) }; PLACES])
    }

    fn places(&self, Key(key): Key) -> impl Iterator<Item = &AtomicU64> {
        let first = key.get() as usize;
        (0..PROBES).map(move |step| &self.0[first.wrapping_add(step) % PLACES])
    }

    /// Whether `key` was put in.
    pub(crate) fn has(&self, key: Key) -> bool {
        // What the handler wrote before it put the key in is to be seen, too.
        self.places(key).any(|place| place.load(Ordering::Acquire) == key.0.get())
    }

    /// Puts `key` in, if there is room.
    pub(crate) fn put(&self, key: Key) {
        let new = key.0.get();
        for place in self.places(key) {
            let was = place.compare_exchange(0, new, Ordering::AcqRel, Ordering::Acquire);
            if was.is_ok() || was == Err(new) {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(key: u64) -> Key {
        Key(NonZeroU64::new(key).unwrap())
    }

    #[test]
    fn keys_of_one_place_lie_side_by_side() {
        let seen = Seen::<16>::new();
        for number in [15, 31, 47] {
            assert!(!seen.has(key(number)));
            seen.put(key(number));
            seen.put(key(number));
            assert!(seen.has(key(number)));
        }
        let taken = seen.0.iter().filter(|place| place.load(Ordering::Relaxed) != 0).count();
        assert_eq!(taken, 3);
        assert!(!seen.has(key(63)));
    }

    #[test]
    fn a_full_table_takes_no_further_key() {
        let seen = Seen::<16>::new();
        for number in 0..9 {
            seen.put(key(1 + 16 * number));
            assert_eq!(seen.has(key(1 + 16 * number)), number < PROBES as u64);
        }
    }
}
