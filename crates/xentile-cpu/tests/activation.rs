//! Activations against the f64 reference, on fresh random input, with outputs poisoned first.

use half::{bf16, f16};
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use xentile::Element;
use xentile::activation::reference::{self, Bound};
use xentile::activation::{Activation, ActivationShape, Kind, Layout};
use xentile_cpu::activation::{Kernel, Launch};
use xentile_cpu::{Isa, Threads};

mod common;

/// Held by every dtype.
const POISON: f32 = 7168.0;

/// Every kind in every layout, with and without what a gate may have.
fn all_options() -> Vec<Activation> {
    let mut all = Vec::new();
    for kind in Kind::ALL {
        for layout in Layout::ALL {
            let bare = Activation::new(kind, layout);
            all.push(bare);
            if layout != Layout::Single {
                let alpha = if kind == Kind::Silu { 1.702 } else { 1.0 };
                all.push(Activation { alpha, limit: Some(2.5), up_offset: 1.0, ..bare });
            }
        }
    }
    all
}

/// Entries of every size.
fn draw<E: Element>(rng: &mut ChaCha8Rng, count: usize) -> Vec<E> {
    let mut one = || rng.random_range(-1.0..1.0) * [0.01, 3.0, 12.0, 150.0][rng.random_range(0..4)];
    (0..count).map(|_| E::from_f64(one())).collect()
}

fn wide<E: Element>(row: &[E]) -> Vec<f64> {
    row.iter().map(|x| x.to_f64()).collect()
}

fn check<E: Element>(what: &str, found: &[E], bounds: &[Bound]) {
    for (index, (found, bound)) in found.iter().zip(bounds).enumerate() {
        // Beyond the dtype both are infinite.
        if *found == E::from_f64(bound.expected) {
            continue;
        }
        let error = (found.to_f64() - bound.expected).abs();
        // A tie may go either way.
        let allowed = bound.total() + 0.5 * E::DTYPE.ulp(bound.expected) * (1.0 + 1e-9);
        assert!(error <= allowed, "{what} {index}: {found:?}, {bound:?}");
    }
}

/// One problem, in arrays that begin `skip` elements after a poisoned one, on an instruction set.
fn case<E: Element>(
    rng: &mut ChaCha8Rng,
    options: Activation,
    isa: Isa,
    extents: [usize; 2],
    skip: usize,
) {
    let [rows, columns] = extents;
    let shape = ActivationShape::new(rows, columns).unwrap();
    let width = columns * options.layout.packs();
    let pool = Threads::new(2).unwrap();
    let kernel = Kernel::new(options, shape, Launch { isa, pool: &pool }).unwrap();
    let (x, dy) = (draw::<E>(rng, skip + rows * width), draw::<E>(rng, skip + rows * columns));
    let (x, dy) = (&x[skip..], &dy[skip..]);
    let poisoned = |count: usize| vec![E::from_f32(POISON); skip + count + 3];
    let (mut y, mut dx) = (poisoned(rows * columns), poisoned(rows * width));
    kernel.forward(x, &mut y[skip..skip + rows * columns]).unwrap();
    kernel.backward(x, dy, &mut dx[skip..skip + rows * width]).unwrap();
    let (mut y_again, mut dx_again) = (poisoned(rows * columns), poisoned(rows * width));
    let results = (&mut dx_again[skip..][..rows * width], &mut y_again[skip..][..rows * columns]);
    kernel.backward_with_y(x, dy, results.0, results.1).unwrap();
    assert!(y_again == y && dx_again == dx, "not the results of the two passes");
    for (all, count) in [(&y, rows * columns), (&dx, rows * width)] {
        let beside = all[..skip].iter().chain(&all[skip + count..]);
        assert!(beside.into_iter().all(|x| x.to_f32() == POISON), "wrote beside an array");
    }
    for row in 0..rows {
        let what = format!("{} {isa} {options:?} {extents:?} row {row}", E::DTYPE);
        let x = wide(&x[row * width..][..width]);
        let mut bounds = vec![Bound::default(); columns];
        reference::forward(&options, &x, &mut bounds);
        check(&format!("{what} y"), &y[skip + row * columns..][..columns], &bounds);
        let mut bounds = vec![Bound::default(); width];
        reference::backward(&options, &x, &wide(&dy[row * columns..][..columns]), &mut bounds);
        check(&format!("{what} dx"), &dx[skip + row * width..][..width], &bounds);
    }
}

#[test]
fn values_and_gradients_keep_the_contract() {
    fn body<E: Element>(rng: &mut ChaCha8Rng) {
        for options in all_options() {
            for isa in Isa::available() {
                for extents in [[1, 1], [3, 37], [2, 256], [5, 131], [0, 4], [2, 0]] {
                    let skip = rng.random_range(0..5);
                    case::<E>(rng, options, isa, extents, skip);
                }
            }
        }
    }
    let mut rng = common::fresh_rng("activation");
    body::<f32>(&mut rng);
    body::<bf16>(&mut rng);
    body::<f16>(&mut rng);
}

/// Results that go past the caches are those that do not.
#[test]
fn large_results_are_those_of_small_ones() {
    let mut rng = common::fresh_rng("activation");
    for layout in Layout::ALL {
        let options = Activation::new(Kind::GeluErf, layout);
        let (rows, columns) = (2100, 2048);
        let width = columns * layout.packs();
        let x = draw::<bf16>(&mut rng, rows * width);
        let pool = Threads::new(2).unwrap();
        for isa in Isa::available() {
            let run = |rows: usize| {
                let shape = ActivationShape::new(rows, columns).unwrap();
                let kernel = Kernel::new(options, shape, Launch { isa, pool: &pool }).unwrap();
                let mut y = vec![bf16::NAN; rows * columns];
                let mut dx = vec![bf16::NAN; rows * width];
                let x = &x[..rows * width];
                kernel.forward(x, &mut y).unwrap();
                kernel.backward(x, &y, &mut dx).unwrap();
                (y, dx)
            };
            let ((y, dx), (few_y, few_dx)) = (run(rows), run(7));
            assert!(y[..7 * columns] == few_y && dx[..7 * width] == few_dx, "{isa} {layout}");
            assert!(y.iter().chain(&dx).all(|x| !x.is_nan()));
        }
    }
}

#[test]
fn wrong_arguments_are_named() {
    let pool = Threads::new(1).unwrap();
    let launch = Launch { isa: Isa::detect(), pool: &pool };
    let shape = ActivationShape::new(2, 3).unwrap();
    let options = Activation::new(Kind::Silu, Layout::Halves);
    let wrong = Activation { limit: Some(0.0), ..options };
    let message = Kernel::new(wrong, shape, launch).map(drop).unwrap_err().to_string();
    assert_eq!(message, "limit is 0; it must be finite and above 0, in f32");
    let kernel = Kernel::new(options, shape, launch).unwrap();
    let (x, mut y) = ([1.0_f32; 12], [0.0; 6]);
    let message = kernel.forward(&x[..6], &mut y).unwrap_err().to_string();
    assert_eq!(message, "x holds 6 elements; [T, 2F] needs 12");
    let message = kernel.backward(&x, &x, &mut [0.0; 12]).unwrap_err().to_string();
    assert_eq!(message, "dy holds 12 elements; [T, F] needs 6");
}
