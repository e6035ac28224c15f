//! What the integration tests share.

use rand::SeedableRng;
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
