//! Rotary position embedding beside copies of the bytes that it must move: `cargo run --release -p
//! xentile-cpu --example rope [ROUNDS [THREADS [ISA]]]`.
//!
//! Copy and kernel take turns, and a row of the table has the median of the rounds' ratios, and the ratio
//! of the best: what is left of other programs on the machine is in both.

use std::hint::black_box;

use half::bf16;
use xentile::Element;
use xentile::rope::{Layout, Rope, RopeShape};
use xentile_cpu::rope::{Kernel, Launch};
use xentile_cpu::{InOut, Threads, copy};

mod timing;

use timing::{Arguments, arguments, array, compare_best, median, timed};

/// Sequences, tokens, heads and columns.
const SHAPES: [[usize; 4]; 3] = [[1, 1024, 32, 128], [2, 2048, 14, 64], [4, 4096, 32, 128]];

fn main() {
    let Arguments { rounds, isa, pool, .. } = arguments();
    println!("| shape | dtype | layout | bytes | copy | kernel | kernel / copy | of the best |");
    println!("| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |");
    for shape in SHAPES {
        for layout in Layout::ALL {
            let launch = Launch { isa, pool: &pool };
            measure::<bf16>(shape, layout, launch, &pool, rounds);
            measure::<f32>(shape, layout, launch, &pool, rounds);
        }
    }
}

fn measure<E: Element>(
    shape: [usize; 4],
    layout: Layout,
    launch: Launch<'_>,
    pool: &Threads,
    rounds: usize,
) {
    let [batch, tokens, heads, columns] = shape;
    let (rows, pairs) = (batch * tokens * heads, columns / 2);
    let n = rows * columns;
    let ((x, of_x), (mut y, of_y)) = (array::<E>(n), array::<E>(n));
    let (x, y) = (&x[of_x..][..n], &mut y[of_y..][..n]);
    let indices: Vec<_> = (0..rows).map(|row| (row / heads % tokens) as i32).collect();
    let table: Vec<_> = (0..tokens * pairs).map(|i| (i as f32 * 0.37).sin()).collect();
    let of_call = RopeShape::new(rows, columns, pairs, tokens).expect("a shape");
    let kernel = Kernel::new(Rope { layout, inverse: false }, of_call, launch);
    // As many bytes as x has.
    let words = n * size_of::<E>() / size_of::<f32>();
    let ((from, of_from), (mut to, of_to)) = (array::<f32>(words), array::<f32>(words));
    let (from, to) = (&from[of_from..][..words], &mut to[of_to..][..words]);
    let times: Vec<[f64; 2]> = (0..rounds + 2)
        .map(|_| {
            let copy = timed(|| copy::copy(pool, launch.isa, from, to));
            let rope = timed(|| {
                kernel
                    .run(InOut::apart(x, y), &indices, [&table, &table])
                    .expect("right arguments");
            });
            [copy, rope]
        })
        .skip(2)
        .collect();
    black_box((&*y, &*to));
    println!(
        "| {shape:?} | {} | {layout} | {} MiB | {:.2} ms | {:.2} ms | {:.3} | {:.3} |",
        E::DTYPE,
        (2 * n * size_of::<E>()) >> 20,
        1e3 * median(&times, |time| time[0]),
        1e3 * median(&times, |time| time[1]),
        median(&times, |time| time[1] / time[0]),
        compare_best(&times),
    );
}
