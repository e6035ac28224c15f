//! Products against whole numbers and float64, in the words of every instruction set.

#[path = "../../tests/common/mod.rs"]
mod common;

use std::time::Instant;

use half::{bf16, f16};
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use xentile::{DType, Element};

use super::*;
use crate::simd::{BLOCK, Factors, LINE_BYTES, Sums, TILE, Tiles};

/// Numbers whose products and sums are whole.
fn numbers<E: Element>(count: usize, step: usize) -> Vec<E> {
    (0..count).map(|i| E::from_f32((i * step % 17) as f32 - 8.0)).collect()
}

/// An instruction set, and words that its tests multiply.
type Form = (Isa, Words);

/// The words of every instruction set, and those of tiles wherever there are none.
fn forms<E: Element>() -> Vec<Form> {
    let mut forms: Vec<_> =
        Isa::available().into_iter().map(|isa| (isa, Words::of::<E>(isa))).collect();
    if E::DTYPE == DType::Bf16 {
        forms.push((Isa::detect(), Words::Tiles(Tiles::Model)));
    }
    forms
}

fn panels<E: Element>(form: Form, matrix: Matrix<'_, E>) -> Vec<f32> {
    let [terms, columns] = matrix.extents();
    let mut to = vec![f32::NAN; Panels::most_words(terms, columns)];
    pack(form, matrix, &mut to);
    to
}

fn pack<E: Element>(form: Form, matrix: Matrix<'_, E>, to: &mut [f32]) {
    let [count, length] = Panels::extents_as(form, matrix.extents());
    assert!(count * length <= to.len());
    for (panel, to) in to.chunks_exact_mut(length).take(count).enumerate() {
        Panels::pack_as(form, matrix, panel, to);
    }
}

/// Some numbers of `memory` that begin with a cache line, as XLA's memory does.
fn aligned(memory: &mut Vec<f32>, count: usize) -> &mut [f32] {
    memory.resize(count + LINE_BYTES / size_of::<f32>(), f32::NAN);
    let start = memory.as_ptr().align_offset(LINE_BYTES);
    &mut memory[start..][..count]
}

/// As [`multiply`], with words of tiles in pieces of `cut`.
fn multiply_in<E: Element>(
    (isa, words): Form,
    cut: Cut,
    left: &Matrix<'_, E>,
    right: Panels<'_>,
    add: bool,
    to: &mut [f32],
) {
    match words {
        Words::Tiles(tiles) => tiled::multiply(tiles, cut, Multiply { isa, left, right, add, to }),
        _ => multiply(isa, left, right, add, to),
    }
}

fn check<E: Element>(extents: [usize; 3], transposed: [bool; 2]) {
    for form in forms::<E>() {
        check_form::<E>((form, Cut::BEST), extents, transposed);
        if let Words::Tiles(_) = form.1 {
            let cut = Cut { steps: 2, rows: 2 * BLOCK };
            check_form::<E>((form, cut), extents, transposed);
        }
    }
}

fn check_form<E: Element>(
    (form, cut): (Form, Cut),
    [rows, terms, columns]: [usize; 3],
    transposed: [bool; 2],
) {
    let matrix = |data, extents: [usize; 2], transposed: bool| match transposed {
        false => Matrix::new(data, extents[1]),
        true => Matrix::new(data, extents[0]).transposed(),
    };
    let (a, b) = (numbers::<E>(rows * terms, 5), numbers::<E>(terms * columns, 7));
    let left = matrix(&a, [rows, terms], transposed[0]);
    let right = matrix(&b, [terms, columns], transposed[1]);
    let at = |matrix: Matrix<'_, E>, row, column| matrix.at(row, column).to_f32();
    let data = panels(form, right);
    let panels = Panels::new_as(form.1, &data, [terms, columns]);
    let mut to = vec![f32::NAN; rows * columns];
    for add in [false, true] {
        multiply_in(form, cut, &left, panels, add, &mut to);
        let times = if add { 2.0 } else { 1.0 };
        for (i, &found) in to.iter().enumerate() {
            let (row, column) = (i / columns, i % columns);
            let sum: f32 = (0..terms).map(|k| at(left, row, k) * at(right, k, column)).sum();
            assert_eq!(found, times * sum, "{form:?} {rows} {terms} {columns} {transposed:?} {i}");
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "takes hours when it is interpreted")]
fn products_of_all_extents() {
    for transposed in [[false, false], [true, false], [false, true], [true, true]] {
        for rows in [1, 3, 4, 6, 7, 29] {
            check::<f32>([rows, 5, 1], transposed);
            check::<bf16>([rows, 3, 33], transposed);
            check::<f16>([rows, 1, 80], transposed);
        }
        check::<f32>([STRIPS * ROWS + 2, 2 * DEPTH + 67, 67], transposed);
        for (rows, terms, columns) in [(33, 64, 32), (64, 35, 31), (32, 129, 64), (16, 31, 95)] {
            check::<bf16>([rows, terms, columns], transposed);
        }
        check::<bf16>([100, 6 * 2 * TILE + 29, 67], transposed);
    }
}

/// The first terms of panels are those of panels of the first.
#[test]
#[cfg_attr(miri, ignore = "takes hours when it is interpreted")]
fn products_of_the_first_terms() {
    let (rows, columns, held) = (7, 67, 6 * TERMS_STEP);
    let right = numbers::<bf16>(held * columns, 7);
    for form in forms::<bf16>() {
        let all = panels(form, Matrix::new(&right, columns));
        for terms in [TERMS_STEP, 3 * TERMS_STEP, held] {
            let left = numbers::<bf16>(rows * terms, 5);
            let left = Matrix::new(&left, terms);
            let few = panels(form, Matrix::new(&right[..terms * columns], columns));
            let few = Panels::new_as(form.1, &few, [terms, columns]);
            let first = Panels::new_as(form.1, &all, [held, columns]).first_terms(terms);
            let [mut wanted, mut found] = [(); 2].map(|()| vec![f32::NAN; rows * columns]);
            multiply_in(form, Cut::BEST, &left, few, false, &mut wanted);
            multiply_in(form, Cut::BEST, &left, first, false, &mut found);
            assert_eq!(found, wanted, "{form:?} {terms}");
        }
    }
}

#[test]
fn a_sum_over_no_tokens() {
    for isa in Isa::available() {
        let mut to = [f32::NAN; 3];
        let left = Matrix::new(&[0.0_f32; 0], 3).transposed();
        multiply(isa, &left, Panels::new::<f32>(isa, &[], [0, 1]), false, &mut to);
        assert_eq!(to, [0.0; 3]);
    }
}

fn check_alone<E: Element>(form: Form) {
    let [rows, terms, columns] = [31, 301, 70];
    let numbers =
        |count: usize| -> Vec<E> { (0..count).map(|i| E::from_f32((i as f32).sin())).collect() };
    let (a, b) = (numbers(rows * terms), numbers(terms * columns));
    let (left, right) = (Matrix::new(&a, terms), Matrix::new(&b, columns));
    let product = |left: Matrix<'_, E>, right: Matrix<'_, E>| {
        let mut to = vec![0.0; left.extents()[0] * right.extents()[1]];
        let (data, [terms, columns]) = (panels(form, right), right.extents());
        let right = Panels::new_as(form.1, &data, [terms, columns]);
        multiply(form.0, &left, right, false, &mut to);
        to
    };
    let whole = product(left, right);
    for (row, column) in [(0, 0), (13, 69), (30, 31)] {
        let one = right.transposed().rows(column..column + 1).transposed();
        let alone = product(left.rows(row..row + 1), one);
        assert_eq!(alone, [whole[row * columns + column]], "{form:?} {row} {column}");
    }
}

#[test]
#[cfg_attr(miri, ignore = "takes hours when it is interpreted")]
fn sums_do_not_depend_on_what_is_asked_for_beside_them() {
    forms::<f32>().into_iter().for_each(check_alone::<f32>);
    forms::<bf16>().into_iter().for_each(check_alone::<bf16>);
}

/// Random numbers about 0, of size 1.
fn drawn<E: Element>(rng: &mut ChaCha8Rng, count: usize) -> Vec<E> {
    (0..count).map(|_| E::from_f32(rng.random_range(-1.0..1.0))).collect()
}

/// Of some sums, the farthest that one is from float64, in multiples of what float64 makes of
/// magnitudes.
fn farthest<E: Element>(
    [left, right]: [Matrix<'_, E>; 2],
    sums: &[f32],
    samples: impl Iterator<Item = usize>,
) -> f64 {
    let [terms, columns] = right.extents();
    samples.fold(0.0, |farthest: f64, i| {
        let (row, column) = (i / columns, i % columns);
        let products = (0..terms).map(|k| left.at(row, k).to_f64() * right.at(k, column).to_f64());
        let (sum, size) = products.fold((0.0, 0.0), |(sum, size), x| (sum + x, size + x.abs()));
        farthest.max((f64::from(sums[i]) - sum).abs() / size)
    })
}

#[test]
fn products_follow_float64() {
    fn check<E: Element>(rng: &mut ChaCha8Rng) {
        let [rows, terms, columns] = if cfg!(miri) { [3, 5, 9] } else { [37, 601, 45] };
        let (a, b) = (drawn::<E>(rng, rows * terms), drawn::<E>(rng, terms * columns));
        let (left, right) = (Matrix::new(&a, rows).transposed(), Matrix::new(&b, columns));
        for form in forms::<E>() {
            let mut to = vec![f32::NAN; rows * columns];
            let data = panels(form, right);
            let panels = Panels::new_as(form.1, &data, [terms, columns]);
            multiply(form.0, &left, panels, false, &mut to);
            let farthest = farthest([left, right], &to, 0..rows * columns);
            assert!(farthest < 1e-6, "{form:?} {} is off by {farthest:e}", E::DTYPE);
        }
    }
    let mut rng = common::fresh_rng("products");
    check::<f32>(&mut rng);
    if cfg!(miri) {
        // A minute a dtype.
        return;
    }
    check::<bf16>(&mut rng);
    check::<f16>(&mut rng);
}

/// GFLOP/s of blocks whose factors and sums stay in the cache closest by.
fn blocks_alone(tiles: Tiles) -> f64 {
    const TIMES: usize = 20_000;
    let (steps, [mut left, mut right, mut sums]) = (Cut::BEST.steps, [(); 3].map(|()| Vec::new()));
    let [left, right] = [&mut left, &mut right].map(|memory| aligned(memory, steps * TILE * BLOCK));
    let to = aligned(&mut sums, BLOCK * BLOCK);
    [&mut *left, right, to].into_iter().for_each(|numbers| numbers.fill(0.0));
    // SAFETY: this thread multiplies nothing else meanwhile.
    let tiles = unsafe { tiles.configure(TILE) };
    let start = Instant::now();
    for _ in 0..TIMES {
        tiles.multiply(Factors { left, right }, Sums { to, step: BLOCK, add: true });
    }
    let operations = 2 * TIMES * steps * BLOCK * BLOCK * 2 * TILE;
    1e-9 * operations as f64 / start.elapsed().as_secs_f64()
}

/// What products of a task make on one thread, of bf16, in every instruction set and in tiles cut
/// one way or another: `cargo test --release -p xentile-cpu rates -- --ignored --nocapture`.
#[test]
#[ignore = "prints rates, for which nothing else may run"]
fn rates() {
    let mut rng = common::fresh_rng("rates");
    let mut rate = |form: Form, cut: Cut, [rows, terms, columns]: [usize; 3], transposed: bool| {
        let (a, b) = (drawn::<bf16>(&mut rng, rows * terms), drawn(&mut rng, terms * columns));
        // As for logits, or for the gradient of the weight.
        let (left, right) = match transposed {
            false => (Matrix::new(&a, terms), Matrix::<bf16>::new(&b, terms).transposed()),
            true => (Matrix::new(&a, rows).transposed(), Matrix::new(&b, columns)),
        };
        let (mut memory, mut sums) = (Vec::new(), Vec::new());
        let data = aligned(&mut memory, Panels::most_words(terms, columns));
        pack(form, right, data);
        let packing = Instant::now();
        pack(form, right, data);
        let packing = packing.elapsed().as_secs_f64();
        let panels = Panels::new_as(form.1, data, [terms, columns]);
        let to = aligned(&mut sums, rows * columns);
        let mut times: Vec<_> = (0..15)
            .map(|_| {
                let start = Instant::now();
                multiply_in(form, cut, &left, panels, false, to);
                start.elapsed().as_secs_f64()
            })
            .collect();
        times.sort_by(f64::total_cmp);
        let farthest = farthest([left, right], to, (0..rows * columns).step_by(97));
        assert!(farthest < 1e-6, "{form:?} is off by {farthest:e}");
        let name = match form.1 {
            Words::Tiles(_) => format!("{}, {cut:?}", form.0),
            _ => form.0.to_string(),
        };
        println!(
            "{rows} x {terms} x {columns}{}: {:7.1} GFLOP/s, panels in {:6.3} ms, off by \
             {farthest:.1e}, {name}",
            if transposed { ", transposed" } else { "" },
            2e-9 * (rows * terms * columns) as f64 / times[times.len() / 2],
            1e3 * packing,
        );
    };
    for isa in Isa::available() {
        if let Some(tiles) = isa.tiles() {
            println!("{:7.1} GFLOP/s, blocks alone, {isa}", blocks_alone(tiles));
        }
    }
    for extents in [[256, 1024, 1024], [256, 2048, 1024], [256, 896, 1024], [256, 512, 896]] {
        for transposed in [false, true] {
            for isa in Isa::available() {
                let form = (isa, Words::of::<bf16>(isa));
                let steps: &[usize] = match form.1 {
                    Words::Tiles(_) => &[4, 8, 16, 32, 64],
                    _ => &[Cut::BEST.steps],
                };
                for &steps in steps {
                    for rows in [64, 128, 256] {
                        if rows == Cut::BEST.rows || matches!(form.1, Words::Tiles(_)) {
                            rate(form, Cut { steps, rows }, extents, transposed);
                        }
                    }
                }
            }
        }
    }
}
