//! Rotary position embedding against the f64 reference, on fresh random input, with outputs poisoned first.

use half::{bf16, f16};
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use xentile::Element;
use xentile::rope::reference::rotate;
use xentile::rope::{Layout, Rope, RopeShape};
use xentile_cpu::rope::{Kernel, Launch};
use xentile_cpu::{InOut, Isa, Threads};

mod common;

/// Held by every dtype.
const POISON: f32 = 7168.0;

/// Both layouts, both ways.
fn all_options() -> impl Iterator<Item = Rope> {
    let both = |layout| [false, true].map(|inverse| Rope { layout, inverse });
    Layout::ALL.into_iter().flat_map(both)
}

/// Entries of every size.
fn draw<E: Element>(rng: &mut ChaCha8Rng, count: usize) -> Vec<E> {
    let mut one = || rng.random_range(-1.0..1.0) * [0.01, 3.0, 150.0][rng.random_range(0..3)];
    (0..count).map(|_| E::from_f64(one())).collect()
}

/// Arrays of one problem.
struct Arrays<E> {
    shape: RopeShape,
    x: Vec<E>,
    indices: Vec<i32>,
    tables: [Vec<f32>; 2],
}

impl<E: Element> Arrays<E> {
    /// Three rows of x in turn have one index, and some have one that is in no table.
    fn draw(rng: &mut ChaCha8Rng, shape: RopeShape) -> Self {
        let positions = shape.positions() as i32;
        let mut index = 0;
        let indices = (0..shape.rows())
            .map(|row| {
                if row % 3 == 0 {
                    index = rng.random_range(-1..=positions);
                }
                index
            })
            .collect();
        let count = shape.groups() * shape.positions() * shape.pairs();
        let mut table = || (0..count).map(|_| rng.random_range(-1.5..1.5)).collect();
        let tables = [table(), table()];
        Self { shape, x: draw(rng, shape.elements()), indices, tables }
    }

    fn tables(&self) -> [&[f32]; 2] {
        [&self.tables[0], &self.tables[1]]
    }

    /// Holds y to the reference.
    fn check(&self, options: Rope, y: &[E], what: &str) {
        let (columns, pairs) = (self.shape.columns(), self.shape.pairs());
        let wide = |all: &[f32]| all.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
        for (row, y) in y.chunks(columns.max(1)).enumerate() {
            let what = format!("{what} {} {options:?} {:?} row {row}", E::DTYPE, self.shape);
            let index = self.indices[row];
            if !(0..self.shape.positions() as i32).contains(&index) {
                assert!(y[..2 * pairs].iter().all(|y| y.to_f32().is_nan()), "{what}");
                assert!(
                    y[2 * pairs..] == self.x[row * columns + 2 * pairs..][..columns - 2 * pairs]
                );
                continue;
            }
            let group = row / self.shape.rows_of_group();
            let at = (group * self.shape.positions() + index as usize) * pairs;
            let [cos, sin] = self.tables().map(|table| wide(&table[at..][..pairs]));
            let x: Vec<_> = self.x[row * columns..][..columns].iter().map(|x| x.to_f64()).collect();
            let (mut expected, mut bound) = (vec![0.0; columns], vec![0.0; columns]);
            rotate(options, &x, [&cos, &sin], &mut expected, &mut bound);
            for (column, y) in y.iter().enumerate() {
                let (expected, bound) = (expected[column], bound[column]);
                // A tie may go either way.
                let allowed = bound + 0.5 * E::DTYPE.ulp(expected) * (1.0 + 1e-9);
                let error = (y.to_f64() - expected).abs();
                assert!(error <= allowed, "{what} column {column}: {y:?}, {expected} +- {bound}");
            }
        }
    }
}

/// One problem, in arrays that begin `skip` elements after a poisoned one, apart and in place.
fn case<E: Element>(rng: &mut ChaCha8Rng, isa: Isa, shape: RopeShape) {
    let skip = rng.random_range(0..5);
    let arrays = Arrays::<E>::draw(rng, shape);
    let pool = Threads::new(2).unwrap();
    for options in all_options() {
        let kernel = Kernel::new(options, shape, Launch { isa, pool: &pool });
        let mut memory = vec![E::from_f32(POISON); skip + shape.elements() + 3];
        let inner = skip..skip + shape.elements();
        let y = &mut memory[inner.clone()];
        kernel.run(InOut::apart(&arrays.x, y), &arrays.indices, arrays.tables()).unwrap();
        arrays.check(options, y, &format!("{isa} apart"));
        let apart = y.to_vec();
        y.copy_from_slice(&arrays.x);
        kernel.run(InOut::InPlace(y), &arrays.indices, arrays.tables()).unwrap();
        let same = |(a, b): (&E, &E)| a == b || (a.to_f32().is_nan() && b.to_f32().is_nan());
        assert!(apart.iter().zip(&*y).all(same), "{isa} {options:?} {shape:?} in place");
        let beside = memory[..skip].iter().chain(&memory[inner.end..]);
        assert!(beside.into_iter().all(|x| x.to_f32() == POISON), "wrote beside an array");
    }
}

#[test]
fn rows_keep_the_contract() {
    fn body<E: Element>(rng: &mut ChaCha8Rng) {
        for isa in Isa::available() {
            // Rows, columns, pairs, positions and groups.
            for [rows, columns, pairs, positions, groups] in [
                [1, 2, 1, 1, 1],
                [7, 128, 64, 5, 1],
                [6, 64, 32, 3, 2],
                [5, 80, 16, 4, 1],
                [4, 99, 47, 3, 4],
                [3, 5, 0, 2, 1],
                [3, 5, 2, 0, 1],
                [0, 64, 32, 3, 1],
                [3, 0, 0, 3, 3],
            ] {
                let shape = RopeShape::new(rows, columns, pairs, positions).unwrap();
                case::<E>(rng, isa, shape.with_groups(groups).unwrap());
            }
        }
    }
    let mut rng = common::fresh_rng("rope");
    body::<f32>(&mut rng);
    body::<bf16>(&mut rng);
    body::<f16>(&mut rng);
}

/// Rows that go past the caches are those that do not, and those that stand alone.
#[test]
fn a_row_does_not_depend_on_the_others() {
    let mut rng = common::fresh_rng("rope");
    let pool = Threads::new(2).unwrap();
    let shape = RopeShape::new(34_000, 128, 64, 100).unwrap();
    let arrays = Arrays::<bf16>::draw(&mut rng, shape);
    for isa in Isa::available() {
        for options in all_options() {
            let run = |rows: std::ops::Range<usize>| {
                let shape = RopeShape::new(rows.len(), 128, 64, 100).unwrap();
                let kernel = Kernel::new(options, shape, Launch { isa, pool: &pool });
                let mut memory = vec![bf16::ZERO; shape.elements() + 32];
                let start = memory.as_ptr().align_offset(64);
                let y = &mut memory[start..][..shape.elements()];
                let x = &arrays.x[rows.start * 128..rows.end * 128];
                kernel.run(InOut::apart(x, y), &arrays.indices[rows], arrays.tables()).unwrap();
                y.iter().map(|y| y.to_bits()).collect::<Vec<_>>()
            };
            let (all, few) = (run(0..34_000), run(33_000..33_007));
            assert!(all[33_000 * 128..][..few.len()] == few, "{isa} {options:?}");
        }
    }
}

/// NaN and infinity stay in their pair, and a NaN of any bits in a table is a NaN of rows.
#[test]
fn no_pair_touches_another() {
    for isa in Isa::available() {
        let pool = Threads::new(1).unwrap();
        for options in all_options() {
            let shape = RopeShape::new(1, 66, 32, 1).unwrap();
            let kernel = Kernel::new(options, shape, Launch { isa, pool: &pool });
            let [first, second] = options.layout.columns(5, 32);
            let [of_table, beside] = options.layout.columns(9, 32);
            let mut x = vec![bf16::from_f32(1.0); 66];
            x[first] = bf16::INFINITY;
            x[65] = bf16::from_bits(0x7fff);
            let (mut cos, sin) = (vec![0.5; 32], vec![0.25; 32]);
            cos[9] = f32::from_bits(0x7fff_ffff);
            let mut y = vec![bf16::ZERO; 66];
            kernel.run(InOut::apart(&x, &mut y), &[0], [&cos, &sin]).unwrap();
            let odd: Vec<_> = (0..66).filter(|&column| !y[column].is_finite()).collect();
            let mut right = vec![first, second, of_table, beside, 65];
            right.sort_unstable();
            assert_eq!(odd, right, "{isa} {options:?}");
            assert!(y[first] == bf16::INFINITY && y[second].is_infinite());
            assert!(y[of_table].is_nan() && y[beside].is_nan());
            assert_eq!(y[65].to_bits(), 0x7fff, "a copied column keeps its bits");
        }
    }
}

#[test]
fn wrong_arguments_are_named() {
    let pool = Threads::new(1).unwrap();
    let shape = RopeShape::new(2, 4, 2, 3).unwrap();
    let kernel = Kernel::new(Rope::default(), shape, Launch { isa: Isa::detect(), pool: &pool });
    let (x, table) = ([1.0_f32; 8], [0.0; 6]);
    let refuse = |x: &[f32], indices: &[i32], tables: [&[f32]; 2]| {
        let mut y = [0.0; 8];
        kernel.run(InOut::apart(x, &mut y), indices, tables).unwrap_err().to_string()
    };
    let message = refuse(&x[..7], &[0, 0], [&table, &table]);
    assert_eq!(message, "x holds 7 elements; [N, D] needs 8");
    let message = refuse(&x, &[0], [&table, &table]);
    assert_eq!(message, "indices holds 1 elements; [N] needs 2");
    let message = refuse(&x, &[0, 0], [&table, &table[1..]]);
    assert_eq!(message, "sin holds 5 elements; [G, P, R / 2] needs 6");
}
