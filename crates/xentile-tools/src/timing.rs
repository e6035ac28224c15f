//! One clock for every figure in seconds.

use std::time::Instant;

/// The seconds that `work` took, and what it returned.
pub(crate) fn timed<T>(work: impl FnOnce() -> T) -> (f64, T) {
    let start = Instant::now();
    let result = work();
    (start.elapsed().as_secs_f64(), result)
}
