//! What the integration tests share.

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// A generator seeded afresh in every run, or from `XENTILE_TEST_SEED`; the seed is printed, and
/// shown by the test harness when the test fails.
pub fn fresh_rng(what: &str) -> ChaCha8Rng {
    let seed = match std::env::var("XENTILE_TEST_SEED") {
        Ok(seed) => seed.parse().expect("XENTILE_TEST_SEED is a whole number"),
        Err(_) => {
            let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
            now.expect("a clock after 1970").as_nanos() as u64
        }
    };
    println!("{what}: XENTILE_TEST_SEED={seed}");
    ChaCha8Rng::seed_from_u64(seed)
}

/// All of `choices`; where programs run slowly, as `XENTILE_TEST_STRIDE` says, so few of them from one
/// that is drawn.
#[allow(dead_code, reason = "for those tests that run long")]
pub fn some_where_slow<T: Copy>(rng: &mut ChaCha8Rng, choices: &[T], few: usize) -> Vec<T> {
    if std::env::var_os("XENTILE_TEST_STRIDE").is_none() {
        return choices.to_vec();
    }
    let first = rng.random_range(0..choices.len());
    choices.iter().copied().cycle().skip(first).take(few).collect()
}
