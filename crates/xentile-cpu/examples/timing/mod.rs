//! What examples share that time a kernel beside a copy: arguments, arrays, medians.

use std::time::Instant;

use xentile::Element;
use xentile_cpu::{Isa, Threads};

/// What the command line says.
pub struct Arguments {
    /// How often copy and kernel take turns.
    pub rounds: usize,
    /// The instruction set.
    pub isa: Isa,
    /// The threads.
    pub pool: Threads,
    /// What comes after these.
    #[allow(dead_code, reason = "not every example takes more")]
    pub more: Option<String>,
}

/// Reads `[ROUNDS [THREADS [ISA [MORE]]]]`, and prints what was understood.
pub fn arguments() -> Arguments {
    let mut arguments = std::env::args().skip(1);
    let mut number = |default| {
        arguments.next().map_or(default, |text| text.parse().expect("ROUNDS THREADS ISA"))
    };
    let (rounds, threads) = (number(15), number(0));
    let isa = arguments.next().map_or_else(Isa::detect, |name| name.parse().expect("an ISA"));
    let pool = Threads::new(threads).expect("threads");
    println!("{isa}, {} threads, {rounds} rounds", pool.count());
    Arguments { rounds, isa, pool, more: arguments.next() }
}

/// Memory that was written, and where in it an array of `length` begins on a line, as XLA's do.
pub fn array<E: Element>(length: usize) -> (Vec<E>, usize) {
    let value = |i: usize| E::from_f32(((i * 2_654_435_761) >> 16 & 0xff) as f32 / 64.0 - 2.0);
    let memory: Vec<_> = (0..length + 64).map(value).collect();
    let start = memory.as_ptr().align_offset(64);
    (memory, start)
}

/// Seconds that `body` takes.
pub fn timed(body: impl FnOnce()) -> f64 {
    let start = Instant::now();
    body();
    start.elapsed().as_secs_f64()
}

/// The median over rounds of what `of` makes of the seconds of copy and kernel.
pub fn median(times: &[[f64; 2]], of: impl Fn(&[f64; 2]) -> f64) -> f64 {
    let mut found: Vec<_> = times.iter().map(of).collect();
    found.sort_by(f64::total_cmp);
    found[found.len() / 2]
}

/// The kernel's least time over the copy's.
pub fn compare_best(times: &[[f64; 2]]) -> f64 {
    let best = |of: usize| times.iter().map(|time| time[of]).fold(f64::INFINITY, f64::min);
    best(1) / best(0)
}
