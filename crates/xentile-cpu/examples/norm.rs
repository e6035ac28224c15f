//! Times RMSNorm against copies of as many bytes: `cargo run --release -p xentile-cpu --example norm
//! [ROUNDS [THREADS [ISA]]]`.
//!
//! Copy and kernel take turns, and a row of the table is the median of the rounds' ratios, so that both
//! include the load of other programs on the machine.

use std::hint::black_box;

use half::bf16;
use xentile::Element;
use xentile::norm::{Norm, NormShape};
use xentile_cpu::norm::{Gradient, Kernel, Launch, PartialSums, Statistics};
use xentile_cpu::{InOut, Threads, copy};

mod timing;

use timing::{Arguments, arguments, array, compare_best, median, timed};

const SHAPES: [(usize, usize); 3] = [(8192, 4096), (32_768, 896), (2048, 8192)];
const BLOCKS: usize = 32;

fn main() {
    let Arguments { rounds, isa, pool, .. } = arguments();
    println!(
        "| T x D | dtype | pass | bytes | copy | kernel | kernel / copy | of the best | GB/s |"
    );
    println!("| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |");
    for (rows, columns) in SHAPES {
        let shape = NormShape::new(rows, columns).expect("a shape");
        let launch = Launch { isa, pool: &pool };
        measure::<bf16>(shape, launch, &pool, rounds);
        measure::<f32>(shape, launch, &pool, rounds);
    }
}

fn measure<E: Element>(shape: NormShape, launch: Launch<'_>, pool: &Threads, rounds: usize) {
    let n = shape.elements();
    let mut arrays: [_; 5] = std::array::from_fn(|_| array::<E>(n));
    let [x, residual, dsum, y, sum] =
        arrays.each_mut().map(|(memory, start)| &mut memory[*start..][..n]);
    let weight: Vec<bf16> =
        (0..shape.columns()).map(|i| bf16::from_f32(1.0 + (i % 7) as f32 / 8.0)).collect();
    let kernel = Kernel::new(Norm::RMS, shape, &weight[..], launch).expect("a kernel");
    let mut rstd = vec![0.0; shape.rows()];
    let mut sums = vec![0.0; BLOCKS * shape.columns()];
    // As many bytes as x has.
    let words = n * size_of::<E>() / size_of::<f32>();
    let (from, mut to) = (vec![1.0_f32; words], vec![0.0; words]);

    // The number of arrays of x's length that each pass reads and writes.
    let passes = [("forward", 2), ("add_forward", 4), ("backward", 3), ("add_backward", 4)];
    for (pass, moved) in passes {
        let times: Vec<[f64; 2]> = (0..rounds + 2)
            .map(|_| {
                let copy = timed(|| copy::copy(pool, launch.isa, &from, &mut to));
                let norm = timed(|| {
                    let outcome = if pass.ends_with("forward") {
                        let residual =
                            (pass == "add_forward").then(|| InOut::apart(&*residual, &mut *sum));
                        let statistics = Statistics::rms(&mut rstd[..]);
                        kernel.forward(InOut::apart(x, y), residual, None, statistics)
                    } else {
                        let dsum = (pass == "add_backward").then_some(&*dsum);
                        let partial = PartialSums { sums: &mut sums, groups: 1, blocks: BLOCKS };
                        let gradient = Gradient::Apart { x, dy: residual, dx: y };
                        let statistics = Statistics::rms(&rstd[..]);
                        kernel.backward(gradient, statistics, dsum, partial, &mut [])
                    };
                    outcome.expect("right arguments");
                });
                // A copy moves two arrays.
                [copy * f64::from(moved) / 2.0, norm]
            })
            .skip(2)
            .collect();
        black_box((&*y, &*sum, &sums, &to));
        let bytes = moved as usize * n * size_of::<E>();
        let norm = median(&times, |time| time[1]);
        println!(
            "| {} x {} | {} | {pass} | {} MiB | {:.2} ms | {:.2} ms | {:.3} | {:.3} | {:.1} |",
            shape.rows(),
            shape.columns(),
            E::DTYPE,
            bytes >> 20,
            1e3 * median(&times, |time| time[0]),
            1e3 * norm,
            median(&times, |time| time[1] / time[0]),
            compare_best(&times),
            bytes as f64 / norm / 1e9,
        );
    }
}
