//! FP8 quantisation beside copies of the bytes that it must move: `cargo run --release -p xentile-cpu
//! --example fp8_quantize [ROUNDS [THREADS [ISA [PASS]]]]`.
//!
//! Copy and kernel take turns, and a row of the table is the median of the rounds' ratios: what is left
//! of other programs on the machine is in both.

use std::hint::black_box;

use half::bf16;
use xentile::Element;
use xentile::fp8_quantize::{Blocks, Format, Fp8Quantize, QuantizeShape};
use xentile_cpu::fp8_quantize::{Kernel, Launch, Quantized};
use xentile_cpu::{Threads, copy};

mod timing;

use timing::{Arguments, arguments, array, compare_best, median, timed};

const SHAPES: [(usize, usize); 2] = [(2048, 4096), (1024, 14_336)];
const FORMAT: Format = Format::E4M3Fn;

fn main() {
    let Arguments { rounds, isa, pool, more: only } = arguments();
    println!("| M x D | dtype | pass | bytes | copy | kernel | kernel / copy | of the best |");
    println!("| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |");
    for (rows, columns) in SHAPES {
        let launch = Launch { isa, pool: &pool };
        measure::<bf16>([rows, columns], launch, &pool, rounds, only.as_deref());
        measure::<f32>([rows, columns], launch, &pool, rounds, only.as_deref());
    }
}

fn measure<E: Element>(
    extents: [usize; 2],
    launch: Launch<'_>,
    pool: &Threads,
    rounds: usize,
    only: Option<&str>,
) {
    let [rows, columns] = extents;
    let shape = QuantizeShape::new(1, rows, columns).expect("a shape");
    let n = shape.elements();
    let (memory, start) = array::<E>(n);
    let x = &memory[start..][..n];
    let (mut values, mut transposed) = (vec![1_u8; n], vec![1_u8; n]);
    let (mut scales, mut transposed_scales) = (vec![1.0_f32; n / 32], vec![1.0_f32; n / 32]);
    let options = Fp8Quantize { format: FORMAT, power_of_two: false };
    let kernel = Kernel::new(options, shape, launch);
    let one_d = Blocks { rows: 1, columns: Some(128) };
    let square = Blocks { rows: 128, columns: Some(128) };

    // With the bytes an entry that are read and written; amax is a read beside a scale's.
    let wide = size_of::<E>();
    let passes = [
        ("amax", wide),
        ("scaled", wide + 1),
        ("row", wide + 1),
        ("block_1d", wide + 1),
        ("block_2d", wide + 1),
        ("scaled, transposed", wide + 2),
        ("row, transposed", wide + 2),
        ("block_1d, transposed", wide + 2),
        ("block_2d, transposed", wide + 2),
    ];
    for (pass, moved) in passes {
        if only.is_some_and(|only| only != pass) {
            continue;
        }
        // A copy of half the bytes moves them all.
        let words = n * moved / 2 / size_of::<f32>();
        let (from, mut to) = (vec![1.0_f32; words], vec![0.0; words]);
        let blocks = match pass.split(',').next() {
            Some("block_1d") => one_d,
            Some("block_2d") => square,
            _ => Blocks::ROW,
        };
        let (count, transposed_count) = (shape.scales(blocks), shape.transposed().scales(blocks));
        let times: Vec<[f64; 2]> = (0..rounds + 2)
            .map(|_| {
                let copy = timed(|| copy::copy(pool, launch.isa, &from, &mut to));
                let kernel = timed(|| {
                    let values = &mut values[..];
                    let numbers = &mut scales[..count];
                    let outcome = match pass {
                        "amax" => kernel.amax(x, numbers),
                        "scaled" => kernel.scaled(x, &[0.25], values, numbers),
                        "scaled, transposed" => {
                            kernel.scaled_transposed(x, &[0.25], values, numbers, &mut transposed)
                        }
                        _ => {
                            let straight = Quantized { values, scales: numbers };
                            if pass.contains(',') {
                                let scales = &mut transposed_scales[..transposed_count];
                                let copy = Quantized { values: &mut transposed, scales };
                                kernel.quantize_transposed(blocks, x, straight, copy)
                            } else {
                                kernel.quantize(blocks, x, straight)
                            }
                        }
                    };
                    outcome.expect("right arguments");
                });
                [copy, kernel]
            })
            .skip(2)
            .collect();
        black_box((&values, &transposed, &scales, &to));
        println!(
            "| {rows} x {columns} | {} | {pass} | {} MiB | {:.2} ms | {:.2} ms | {:.2} | {:.2} |",
            E::DTYPE,
            (n * moved) >> 20,
            1e3 * median(&times, |time| time[0]),
            1e3 * median(&times, |time| time[1]),
            median(&times, |time| time[1] / time[0]),
            compare_best(&times),
        );
    }
}
