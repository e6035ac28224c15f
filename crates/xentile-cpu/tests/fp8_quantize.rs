//! FP8 quantisation against the reference, bit by bit, on fresh random input, with outputs poisoned first.

use half::{bf16, f16};
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use xentile::Element;
use xentile::fp8_quantize::{Blocks, Format, Fp8Quantize, QuantizeShape, reference};
use xentile_cpu::fp8_quantize::{Kernel, Launch, Quantized};
use xentile_cpu::{Isa, Threads};

mod common;

/// No value of either format that is made here, and no scale.
const POISON: u8 = 0x5a;
const POISONED: f32 = -7168.0;

/// Numbers of every size, with some that are special, and rows and columns of one size.
fn draw<E: Element>(rng: &mut ChaCha8Rng, rows: usize, columns: usize) -> Vec<E> {
    let sizes = [1e-44, 1e-39, 3e-38, 1e-20, 1e-5, 0.01, 1.0, 300.0, 1e20, 3e38];
    let special = [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0, -0.0, 1e-40, 6e-8];
    let is_special = rng.random_range(0..3) == 0;
    let all = sizes[rng.random_range(0..sizes.len())];
    let mut x = Vec::new();
    for _ in 0..rows {
        let size = if rng.random_range(0..2) == 0 { all } else { sizes[rng.random_range(0..10)] };
        for _ in 0..columns {
            let drawn: f32 = rng.random_range(-1.0..1.0);
            x.push(E::from_f32(match rng.random_range(0..40) {
                0 if is_special => special[rng.random_range(0..special.len())],
                1 => drawn * size * 0.01,
                _ => drawn * size,
            }));
        }
    }
    x
}

fn all_options() -> impl Iterator<Item = Fp8Quantize> {
    Format::ALL
        .into_iter()
        .flat_map(|format| [false, true].map(|power_of_two| Fp8Quantize { format, power_of_two }))
}

/// Values and scales of matrices, or of their transposed.
fn expected<E: Element>(
    options: &Fp8Quantize,
    blocks: Blocks,
    shape: QuantizeShape,
    x: &dyn Fn(usize, usize, usize) -> E,
) -> (Vec<u8>, Vec<f32>) {
    let [down, across] = blocks.count(shape.rows(), shape.columns());
    let wide = blocks.columns_of(shape.columns());
    let (mut values, mut scales) = (vec![0; shape.elements()], Vec::new());
    for matrix in 0..shape.matrices() {
        for row in 0..down {
            let row = row * blocks.rows;
            for column in 0..across {
                let column = column * wide;
                let rows = row..shape.rows().min(row + blocks.rows);
                let columns = column..shape.columns().min(column + wide);
                let places = || rows.clone().flat_map(|row| columns.clone().map(move |c| (row, c)));
                let amax = reference::amax(places().map(|(row, c)| x(matrix, row, c).to_f32()));
                let scale = options.scale(amax);
                scales.push(scale);
                for (row, column) in places() {
                    let at = (matrix * shape.rows() + row) * shape.columns() + column;
                    values[at] = reference::value(options, x(matrix, row, column).to_f32(), scale);
                }
            }
        }
    }
    (values, scales)
}

#[track_caller]
fn same(what: &str, found: &[u8], expected: &[u8]) {
    assert_eq!(found.len(), expected.len());
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert_eq!(found, expected, "{what} {index}: {found:#x}, expected {expected:#x}");
    }
}

/// One problem, in arrays that begin `skip` elements after a poisoned one.
fn case<E: Element>(
    rng: &mut ChaCha8Rng,
    options: Fp8Quantize,
    isa: Isa,
    [matrices, rows, columns]: [usize; 3],
) {
    let skip = rng.random_range(0..5);
    let shape = QuantizeShape::new(matrices, rows, columns).unwrap();
    let pool = Threads::new(2).unwrap();
    let kernel = Kernel::new(options, shape, Launch { isa, pool: &pool });
    let drawn = draw::<E>(rng, skip + matrices * rows, columns.max(1));
    let x = &drawn[skip..][..shape.elements()];
    let what = format!("{isa} {} {options:?} {shape:?}", E::DTYPE);
    let straight =
        |matrix: usize, row: usize, column: usize| x[(matrix * rows + row) * columns + column];
    let transposed = |matrix: usize, row: usize, column: usize| straight(matrix, column, row);
    let end = skip + shape.elements();
    let poisoned = || vec![POISON; end + 3];
    let unharmed = |all: &[u8]| {
        assert!(all[..skip].iter().chain(&all[end..]).all(|&byte| byte == POISON), "{what}");
    };
    let [square, part] = [rng.random_range(1..9) * 16, rng.random_range(1..70)];
    for blocks in [
        Blocks::ROW,
        Blocks { rows: 1, columns: Some(128) },
        Blocks { rows: 1, columns: Some(part) },
        Blocks { rows: 128, columns: Some(128) },
        Blocks { rows: square, columns: Some(square) },
    ] {
        let what = format!("{what} {blocks:?}");
        let (values, scales) = expected(&options, blocks, shape, &straight);
        let mut found = (poisoned(), vec![POISONED; scales.len()]);
        let quantized = Quantized { values: &mut found.0[skip..end], scales: &mut found.1 };
        kernel.quantize(blocks, x, quantized).unwrap();
        same(&what, &found.0[skip..end], &values);
        assert_eq!(found.1, scales, "{what}");
        unharmed(&found.0);

        let (values_t, scales_t) = expected(&options, blocks, shape.transposed(), &transposed);
        let mut again = (poisoned(), vec![POISONED; scales.len()]);
        let mut found = (poisoned(), vec![POISONED; scales_t.len()]);
        let quantized = Quantized { values: &mut again.0[skip..end], scales: &mut again.1 };
        let transposed = Quantized { values: &mut found.0[skip..end], scales: &mut found.1 };
        kernel.quantize_transposed(blocks, x, quantized, transposed).unwrap();
        same(&what, &again.0[skip..end], &values);
        assert_eq!(again.1, scales, "{what}");
        same(&format!("{what} transposed"), &found.0[skip..end], &values_t);
        assert_eq!(found.1, scales_t, "{what} transposed");
        unharmed(&again.0);
        unharmed(&found.0);
    }
    given(&kernel, options, shape, x, rng.random_range(1..5) as f32 * 0.4);
}

/// By scales that are given, one a matrix or one for all.
fn given<E: Element>(
    kernel: &Kernel<'_>,
    options: Fp8Quantize,
    shape: QuantizeShape,
    x: &[E],
    scale: f32,
) {
    let (rows, columns) = (shape.rows(), shape.columns());
    let row = |row: usize| &x[row * columns..][..columns];
    let amax: Vec<f32> = (0..shape.matrices() * rows)
        .map(|index| reference::amax(row(index).iter().map(|x| x.to_f32())))
        .collect();
    for given in [vec![scale], (0..shape.matrices()).map(|i| scale * (1.0 + i as f32)).collect()] {
        let of_matrix = |matrix: usize| given[if given.len() == 1 { 0 } else { matrix }];
        let mut values = vec![POISON; shape.elements()];
        let mut transposed = values.clone();
        let mut found = vec![POISONED; amax.len()];
        if given.is_empty() {
            continue;
        }
        kernel.scaled(x, &given, &mut values, &mut found).unwrap();
        let expected: Vec<u8> = (0..shape.elements())
            .map(|at| {
                let scale = of_matrix(at / (rows * columns));
                reference::value(&options, x[at].to_f32(), scale)
            })
            .collect();
        same("given", &values, &expected);
        assert_eq!(found, amax);
        found.fill(POISONED);
        values.fill(POISON);
        kernel.scaled_transposed(x, &given, &mut values, &mut found, &mut transposed).unwrap();
        same("given", &values, &expected);
        assert_eq!(found, amax);
        for (at, value) in transposed.iter().enumerate() {
            let (matrix, at) = (at / (rows * columns), at % (rows * columns));
            let from = (matrix * rows + at % rows) * columns + at / rows;
            assert_eq!(*value, expected[from]);
        }
    }
    let mut found = vec![POISONED; amax.len()];
    kernel.amax(x, &mut found).unwrap();
    assert_eq!(found, amax);
}

#[test]
fn values_and_scales_are_the_references_bits() {
    fn body<E: Element>(rng: &mut ChaCha8Rng) {
        for isa in Isa::available() {
            for options in all_options() {
                for extents in [
                    [1, 1, 1],
                    [2, 3, 37],
                    [1, 17, 131],
                    [2, 33, 128],
                    [0, 2, 4],
                    [2, 0, 3],
                    [2, 3, 0],
                ] {
                    case::<E>(rng, options, isa, extents);
                }
            }
        }
    }
    let mut rng = common::fresh_rng("fp8_quantize");
    body::<f32>(&mut rng);
    body::<bf16>(&mut rng);
    body::<f16>(&mut rng);
}

/// Tiles that are cut on both sides, and several tasks.
#[test]
fn tiles_are_the_references_bits() {
    let mut rng = common::fresh_rng("fp8_quantize");
    let isa = Isa::detect();
    let options = Fp8Quantize { format: Format::E4M3Fn, power_of_two: false };
    case::<bf16>(&mut rng, options, isa, [1, 300, 269]);
    case::<f32>(&mut rng, options, isa, [2, 129, 256]);
}

/// Every number of bf16 by the scale 1, and every f32 beside a middle between two values.
#[test]
fn every_number_is_rounded_to_nearest_even() {
    let pool = Threads::new(1).unwrap();
    let every: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).collect();
    for format in Format::ALL {
        let options = Fp8Quantize { format, power_of_two: false };
        let mut middles = Vec::new();
        for bits in 0..format.nan() {
            let [below, above] = [bits, bits + 1].map(|bits| format.decode(bits));
            let middle = if above.is_finite() { (below + above) / 2.0 } else { below * 1.05 };
            for by in -2..3 {
                let bits = (middle.to_bits() as i32 + by).max(0) as u32;
                middles.extend([f32::from_bits(bits), -f32::from_bits(bits)]);
            }
        }
        for isa in Isa::available() {
            let launch = Launch { isa, pool: &pool };
            fn check<E: Element>(options: Fp8Quantize, launch: Launch<'_>, x: &[E]) {
                let shape = QuantizeShape::new(1, 1, x.len()).unwrap();
                let (mut values, mut amax) = (vec![POISON; x.len()], [0.0]);
                let kernel = Kernel::new(options, shape, launch);
                kernel.scaled(x, &[1.0], &mut values, &mut amax).unwrap();
                for (x, value) in x.iter().zip(values) {
                    let expected = reference::encode(options.format, x.to_f32());
                    assert_eq!(value, expected, "{} of {x:?} on {}", options.format, launch.isa);
                }
            }
            check(options, launch, &every);
            check(options, launch, &middles);
        }
    }
}

#[test]
fn wrong_arguments_are_named() {
    let pool = Threads::new(1).unwrap();
    let launch = Launch { isa: Isa::detect(), pool: &pool };
    let shape = QuantizeShape::new(1, 2, 3).unwrap();
    let options = Fp8Quantize { format: Format::E5M2, power_of_two: false };
    let kernel = Kernel::new(options, shape, launch);
    let (x, mut values, mut scales) = ([1.0_f32; 6], [0; 6], [0.0; 2]);
    fn of<'a>(values: &'a mut [u8], scales: &'a mut [f32]) -> Quantized<'a> {
        Quantized { values, scales }
    }
    let wrong = Blocks { rows: 1, columns: Some(0) };
    let found = kernel.quantize(wrong, &x, of(&mut values, &mut scales)).unwrap_err();
    assert_eq!(found.to_string(), "block_columns is 0; it must be at least 1");
    let found = kernel.quantize(Blocks::ROW, &x[1..], of(&mut values, &mut scales)).unwrap_err();
    assert_eq!(found.to_string(), "x holds 5 elements; it must hold 6 where x is [1, 2, 3]");
    let found = kernel.quantize(Blocks::ROW, &x, of(&mut values, &mut scales[1..])).unwrap_err();
    assert_eq!(found.to_string(), "scales holds 1 elements; it must hold 2 where x is [1, 2, 3]");
    let oblong = Blocks { rows: 2, columns: Some(3) };
    let (mut more, mut of_more) = ([0; 6], [0.0; 2]);
    let found = kernel
        .quantize_transposed(
            oblong,
            &x,
            of(&mut values, &mut scales[1..]),
            of(&mut more, &mut of_more),
        )
        .unwrap_err();
    assert_eq!(
        found.to_string(),
        "blocks are 2 x 3; of a transposed copy they must be parts of rows, or squares"
    );
    let found = kernel.scaled(&x, &[1.0; 4], &mut values, &mut scales).unwrap_err();
    assert_eq!(
        found.to_string(),
        "scale holds 4 elements; it must hold one for every so many of 2 rows"
    );
    let found = kernel.scaled_transposed(&x, &[1.0; 2], &mut values, &mut scales, &mut more);
    assert_eq!(
        found.unwrap_err().to_string(),
        "scale holds 2 elements; it must hold one for every so many of 1 matrices"
    );
}
