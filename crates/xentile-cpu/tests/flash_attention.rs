//! Attention against the f64 reference, on fresh random input, with outputs poisoned first.

use half::{bf16, f16};
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use xentile::Element;
use xentile::flash_attention::reference::{Gradients as Sums, Head, Near};
use xentile::flash_attention::{AttentionShape, FlashAttention, Mask};
use xentile_cpu::flash_attention::{
    Cotangents, Gradients, Kernel, Launch, Operands, Saved, Visible,
};
use xentile_cpu::{Isa, Parallel, Threads};

mod common;

/// Held by every dtype.
const POISON: f32 = 7168.0;

fn draw<E: Element>(rng: &mut ChaCha8Rng, count: usize, size: f64) -> Vec<E> {
    let mut one = || size * (0..4).map(|_| rng.random_range(-0.75..0.75)).sum::<f64>();
    (0..count).map(|_| E::from_f64(one())).collect()
}

fn wide<E: Element>(row: &[E]) -> Vec<f64> {
    row.iter().map(|x| x.to_f64()).collect()
}

/// A problem with all that it takes.
#[derive(Clone)]
struct Problem<E> {
    options: FlashAttention,
    shape: AttentionShape,
    q: Vec<E>,
    k: Vec<E>,
    v: Vec<E>,
    dout: Vec<E>,
    dlse: Vec<f32>,
    ranges: Vec<i32>,
    segments: Option<[Vec<i32>; 2]>,
    sinks: Option<Vec<f32>>,
}

#[derive(Clone, Debug, PartialEq)]
struct Results<E> {
    o: Vec<E>,
    lse: Vec<f32>,
    dq: Vec<E>,
    dk: Vec<E>,
    dv: Vec<E>,
    dsinks: Vec<f32>,
}

impl<E: Element> Problem<E> {
    fn new(rng: &mut ChaCha8Rng, shape: AttentionShape, mask: Mask) -> Self {
        let AttentionShape { heads, queries, keys, width, value_width, .. } = shape;
        let rows = heads * shape.rows();
        let ranges = (0..heads).flat_map(|_| 0..queries).flat_map(|query| {
            let keys = mask.keys(query, queries, keys);
            [keys.start as i32, keys.end as i32]
        });
        Self {
            options: FlashAttention::new(width),
            shape,
            q: draw(rng, rows * width, 1.5),
            k: draw(rng, heads * keys * width, 1.5),
            v: draw(rng, heads * keys * value_width, 1.0),
            dout: draw(rng, rows * value_width, 1.0),
            dlse: draw(rng, rows, 1.0),
            ranges: ranges.collect(),
            segments: None,
            sinks: None,
        }
    }

    fn run(&self, isa: Isa, pool: &dyn Parallel) -> Results<E> {
        let Self { shape, ranges, segments, sinks, .. } = self;
        let segments = segments.as_ref().map(|all| [&*all[0], &*all[1]]);
        let visible = Visible { ranges, segments };
        let launch = Launch { isa, pool };
        let kernel = Kernel::new(self.options, *shape, visible, sinks.as_deref(), launch).unwrap();
        let rows = shape.heads * shape.rows();
        let poisoned = |count: usize| vec![E::from_f32(POISON); count];
        let mut found = Results {
            o: poisoned(rows * shape.value_width),
            lse: vec![POISON; rows],
            dq: poisoned(self.q.len()),
            dk: poisoned(self.k.len()),
            dv: poisoned(self.v.len()),
            dsinks: vec![POISON; shape.heads * shape.group],
        };
        let operands = Operands { q: &self.q, k: &self.k, v: &self.v };
        kernel.forward(operands, &mut found.o, &mut found.lse).unwrap();
        let saved = Saved { o: &found.o, lse: &found.lse };
        let cotangents = Cotangents { o: &self.dout, lse: &self.dlse };
        let gradients = Gradients {
            q: &mut found.dq,
            k: &mut found.dk,
            v: &mut found.dv,
            sinks: Some(&mut found.dsinks),
        };
        kernel.backward(operands, saved, cotangents, gradients).unwrap();
        found
    }

    /// What everything should be, with its error bounds.
    fn reference(&self) -> [Vec<Near>; 6] {
        let AttentionShape { heads, group, queries, keys, width, value_width } = self.shape;
        let [mut o, mut lse, mut dq, mut dk, mut dv, mut dsinks] = [const { Vec::new() }; 6];
        for head in 0..heads {
            let sees = |query: usize, key: usize| {
                let row = head * queries + query;
                let within =
                    (self.ranges[2 * row]..self.ranges[2 * row + 1]).contains(&(key as i32));
                let same = |[a, b]: &[Vec<i32>; 2]| a[row] == b[head * keys + key];
                within && self.segments.as_ref().is_none_or(same)
            };
            let of_head = |all: &[E], width: usize| {
                wide(&all[head * keys * width..(head + 1) * keys * width])
            };
            let (k, v) = (of_head(&self.k, width), of_head(&self.v, value_width));
            let mut sums = Sums::zeros(keys, [width, value_width]);
            for of in head * group..(head + 1) * group {
                let q = wide(&self.q[of * queries * width..(of + 1) * queries * width]);
                let reference = Head {
                    options: self.options,
                    dtype: E::DTYPE,
                    widths: [width, value_width],
                    q: &q,
                    k: &k,
                    v: &v,
                    sees: &sees,
                    sink: self.sinks.as_ref().map(|sinks| f64::from(sinks[of])),
                };
                let mut dsink = Near::default();
                for query in 0..queries {
                    let row = of * queries + query;
                    let mut of_row = vec![Near::default(); value_width];
                    lse.push(reference.forward(query, &mut of_row));
                    o.extend(of_row);
                    let mut of_row = vec![Near::default(); width];
                    let dout = wide(&self.dout[row * value_width..(row + 1) * value_width]);
                    let dlse = f64::from(self.dlse[row]);
                    let part = reference.backward(query, &dout, dlse, &mut of_row, &mut sums);
                    dsink.value += part.value;
                    dsink.bound += part.bound;
                    dq.extend(of_row);
                }
                dsinks.push(dsink);
            }
            dk.extend(sums.k);
            dv.extend(sums.v);
        }
        [o, lse, dq, dk, dv, dsinks]
    }

    fn check(&self, isa: Isa, pool: &dyn Parallel) -> Results<E> {
        let found = self.run(isa, pool);
        let wanted = self.reference();
        let what = format!("{} {isa} {:?} {:?}", E::DTYPE, self.shape, self.options);
        let Results { o, lse, dq, dk, dv, dsinks } = &found;
        let arrays = [("o", o, 0), ("dq", dq, 2), ("dk", dk, 3), ("dv", dv, 4)];
        for (name, found, index) in arrays {
            close(&format!("{what} {name}"), found, &wanted[index]);
        }
        close(&format!("{what} lse"), lse, &wanted[1]);
        close(&format!("{what} dsinks"), dsinks, &wanted[5]);
        found
    }
}

fn close<E: Element>(what: &str, found: &[E], wanted: &[Near]) {
    assert_eq!(found.len(), wanted.len(), "{what}");
    for (index, (found, wanted)) in found.iter().zip(wanted).enumerate() {
        if found.to_f64() == wanted.value {
            continue;
        }
        let error = (found.to_f64() - wanted.value).abs();
        let allowed = wanted.bound + 0.5 * E::DTYPE.ulp(wanted.value) * (1.0 + 1e-9) + 1e-36;
        assert!(error <= allowed, "{what} {index}: {found:?}, {wanted:?}");
    }
}

fn shape(
    heads: usize,
    group: usize,
    [queries, keys]: [usize; 2],
    widths: [usize; 2],
) -> AttentionShape {
    let [width, value_width] = widths;
    AttentionShape { heads, group, queries, keys, width, value_width }
}

const CAUSAL: Mask = Mask { causal: true, window: [None; 2] };
const ALL: Mask = Mask { causal: false, window: [None; 2] };

/// Shapes and masks that are awkward together.
fn cases() -> Vec<(AttentionShape, Mask)> {
    let window = |before, after| Mask { causal: false, window: [Some(before), Some(after)] };
    vec![
        (shape(1, 1, [1, 1], [8, 8]), ALL),
        (shape(2, 1, [5, 7], [8, 16]), CAUSAL),
        (shape(1, 3, [7, 5], [24, 8]), CAUSAL),
        (shape(1, 2, [101, 203], [16, 8]), CAUSAL),
        (shape(1, 1, [200, 390], [8, 24]), window(33, 5)),
        (shape(3, 1, [97, 193], [64, 64]), window(0, 0)),
        (shape(1, 1, [40, 450], [40, 72]), Mask { causal: true, window: [Some(70), None] }),
        (shape(2, 2, [3, 70], [256, 256]), ALL),
        (shape(2, 1, [0, 4], [8, 8]), ALL),
        (shape(2, 1, [4, 0], [8, 8]), ALL),
        (shape(0, 1, [4, 4], [8, 8]), ALL),
    ]
}

fn every_case<E: Element>() {
    let mut rng = common::fresh_rng("flash_attention");
    let pool = Threads::new(2).unwrap();
    for (shape, mask) in cases() {
        for isa in Isa::available() {
            let mut problem = Problem::<E>::new(&mut rng, shape, mask);
            problem.check(isa, &pool);
            problem.options.softcap = Some(rng.random_range(0.5..4.0));
            problem.options.scale = rng.random_range(-0.4..0.4);
            problem.sinks = Some(draw(&mut rng, shape.heads * shape.group, 2.0));
            problem.check(isa, &pool);
        }
    }
}

#[test]
fn values_and_gradients_in_f32() {
    every_case::<f32>();
}

#[test]
fn values_and_gradients_in_bf16() {
    every_case::<bf16>();
}

#[test]
fn values_and_gradients_in_f16() {
    every_case::<f16>();
}

/// Segments in runs, as packed text has them, and strewn about.
#[test]
fn segments() {
    let mut rng = common::fresh_rng("flash_attention");
    let pool = Threads::new(2).unwrap();
    let shape = shape(2, 2, [230, 410], [16, 16]);
    for is_strewn in [false, true] {
        for isa in Isa::available() {
            let mut problem = Problem::<bf16>::new(&mut rng, shape, CAUSAL);
            let mut of = |count: usize, length: usize| -> Vec<i32> {
                let mut at = 0;
                let mut one = |index: usize| {
                    at += i32::from(index.is_multiple_of(length) && rng.random_bool(0.8));
                    if is_strewn { rng.random_range(-3..4) } else { at }
                };
                (0..shape.heads * count).map(|index| one(index % count)).collect()
            };
            problem.segments = Some([of(shape.queries, 50), of(shape.keys, 90)]);
            problem.check(isa, &pool);
        }
    }
}

/// Tasks by heads and by parts of heads, on any number of threads, and rows beside others or alone.
#[test]
fn bits_depend_on_nothing_but_a_head() {
    let mut rng = common::fresh_rng("flash_attention");
    let shape = shape(3, 2, [100, 800], [32, 16]);
    for isa in Isa::available() {
        let mut problem = Problem::<bf16>::new(&mut rng, shape, CAUSAL);
        problem.sinks = Some(draw(&mut rng, 6, 1.0));
        let [one, many] = [1, 7].map(|count| problem.run(isa, &Threads::new(count).unwrap()));
        assert_eq!(one, many, "{isa}");
        let of_head = |per_head: usize| per_head..2 * per_head;
        let (rows, keys) = (shape.rows(), shape.keys);
        let alone = Problem {
            shape: AttentionShape { heads: 1, ..shape },
            q: problem.q[of_head(rows * 32)].to_vec(),
            k: problem.k[of_head(keys * 32)].to_vec(),
            v: problem.v[of_head(keys * 16)].to_vec(),
            dout: problem.dout[of_head(rows * 16)].to_vec(),
            dlse: problem.dlse[of_head(rows)].to_vec(),
            ranges: problem.ranges[of_head(shape.queries * 2)].to_vec(),
            sinks: problem.sinks.as_ref().map(|sinks| sinks[of_head(2)].to_vec()),
            ..problem.clone()
        };
        let alone = alone.run(isa, &Threads::new(2).unwrap());
        assert!(alone.o == one.o[of_head(rows * 16)] && alone.dq == one.dq[of_head(rows * 32)]);
        assert!(alone.dk == one.dk[of_head(keys * 32)] && alone.dv == one.dv[of_head(keys * 16)]);
        assert!(alone.lse == one.lse[of_head(rows)] && alone.dsinks == one.dsinks[of_head(2)]);
    }
}

/// What no query may see, and queries that see nothing, may hold anything.
#[test]
fn masked_entries_are_not_read() {
    let mut rng = common::fresh_rng("flash_attention");
    let pool = Threads::new(2).unwrap();
    let shape = shape(2, 1, [120, 250], [16, 8]);
    for isa in Isa::available() {
        let mut problem = Problem::<bf16>::new(&mut rng, shape, ALL);
        // Of the first head, keys from 20 to 190 and queries from 10 on; of the second, all.
        for query in 0..120 {
            let range = if query < 10 { [40, 40] } else { [20, 190] };
            problem.ranges[2 * query..][..2].copy_from_slice(&range);
        }
        let wanted = problem.check(isa, &pool);
        let blind = 0..10 * 16;
        problem.q[blind].fill(bf16::NAN);
        problem.dout[..10 * 8].fill(bf16::NAN);
        for keys in [0..20, 190..250] {
            problem.k[keys.start * 16..keys.end * 16].fill(bf16::NAN);
            problem.v[keys.start * 8..keys.end * 8].fill(bf16::INFINITY);
        }
        assert_eq!(problem.run(isa, &pool), wanted, "{isa}");
        assert!(wanted.lse[..10].iter().all(|&lse| lse == f32::NEG_INFINITY));
        assert!(wanted.dq[..10 * 16].iter().all(|dq| dq.to_f32() == 0.0));
    }
}

/// What is not finite of another segment changes no bit, and of its own it is not hidden.
#[test]
fn nan_and_inf_stay_in_their_segment() {
    let mut rng = common::fresh_rng("flash_attention");
    let pool = Threads::new(2).unwrap();
    let shape = shape(2, 2, [230, 230], [16, 16]);
    for isa in Isa::available() {
        every_segment::<f32>(&mut rng, isa, &pool, shape);
        every_segment::<bf16>(&mut rng, isa, &pool, shape);
    }
}

fn every_segment<E: Element>(
    rng: &mut ChaCha8Rng,
    isa: Isa,
    pool: &dyn Parallel,
    shape: AttentionShape,
) {
    const LENGTH: usize = 50;
    let mask = if rng.random_bool(0.5) { CAUSAL } else { ALL };
    let mut problem = Problem::<E>::new(rng, shape, mask);
    let ids: Vec<i32> = (0..2).flat_map(|_| 0..230).map(|at| at / LENGTH as i32).collect();
    problem.segments = Some([ids.clone(), ids]);
    let wanted = problem.run(isa, pool);
    // A token of the third segment of the first head, but its last.
    let token = rng.random_range(2 * LENGTH..3 * LENGTH - 1);
    let (width, column) = (16, rng.random_range(0..16));
    for array in 0..4 {
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut bad = problem.clone();
            let arrays = [&mut bad.q, &mut bad.k, &mut bad.v, &mut bad.dout];
            let [q, k, v, dout] = arrays;
            [q, k, v, dout][array][token * width + column] = E::from_f32(value);
            let found = bad.run(isa, pool);
            let own = 2 * LENGTH..3 * LENGTH;
            // Of two query heads, each has a token's row.
            for row in
                (0..shape.heads * 2 * 230).filter(|row| *row >= 460 || !own.contains(&(row % 230)))
            {
                let of = row * width..(row + 1) * width;
                assert_eq!(
                    found.o[of.clone()],
                    wanted.o[of.clone()],
                    "{isa} {array} {value} {row}"
                );
                assert_eq!(found.dq[of.clone()], wanted.dq[of], "{isa} {array} {value} {row}");
                assert_eq!(found.lse[row], wanted.lse[row], "{isa} {array} {value} {row}");
            }
            for key in (0..shape.heads * 230).filter(|key| !own.contains(key)) {
                let of = key * width..(key + 1) * width;
                assert_eq!(
                    found.dk[of.clone()],
                    wanted.dk[of.clone()],
                    "{isa} {array} {value} {key}"
                );
                assert_eq!(found.dv[of.clone()], wanted.dv[of], "{isa} {array} {value} {key}");
            }
            let is_lost = |all: &[E], row: usize| {
                all[row * width..][..width].iter().any(|x| !x.to_f32().is_finite())
            };
            // The last token of the segment sees it. Logits of -inf are of what is not seen.
            match array {
                0 if !value.is_nan() => (),
                0 | 3 => assert!(is_lost(&found.dk, token) || is_lost(&found.dv, token), "{isa}"),
                _ => assert!(is_lost(&found.dq, 3 * LENGTH - 1), "{isa} {array} {value}"),
            }
        }
    }
}

#[test]
fn nan_stays_in_its_head() {
    let mut rng = common::fresh_rng("flash_attention");
    let pool = Threads::new(2).unwrap();
    let shape = shape(2, 1, [100, 100], [16, 16]);
    for isa in Isa::available() {
        let mut problem = Problem::<f32>::new(&mut rng, shape, CAUSAL);
        let wanted = problem.run(isa, &pool);
        // A query of the first head, so that only its own row of o is.
        problem.q[7 * 16] = f32::NAN;
        let found = problem.run(isa, &pool);
        for row in 0..200 {
            let of = row * 16..(row + 1) * 16;
            if row == 7 {
                assert!(found.o[of].iter().all(|x| x.is_nan()) && found.lse[row].is_nan(), "{isa}");
            } else {
                assert_eq!(found.o[of], wanted.o[row * 16..(row + 1) * 16], "{isa} {row}");
            }
        }
        assert!(found.dk[..16].iter().all(|x| x.is_nan()));
        assert_eq!(found.dk[1600..], wanted.dk[1600..]);
        assert_eq!(found.dq[1600..], wanted.dq[1600..]);
    }
}

/// Logits far from 0, of either sign, with an offset that all of a row have.
#[test]
fn logits_far_from_zero() {
    let mut rng = common::fresh_rng("flash_attention");
    let pool = Threads::new(2).unwrap();
    for isa in Isa::available() {
        for size in [20.0, -300.0] {
            let mut problem = Problem::<f32>::new(&mut rng, shape(1, 1, [50, 400], [8, 8]), CAUSAL);
            for (index, k) in problem.k.iter_mut().enumerate() {
                *k += if index % 8 == 0 { size as f32 } else { 0.0 };
            }
            problem.q.iter_mut().step_by(8).for_each(|q| *q = 3.0);
            problem.check(isa, &pool);
        }
    }
}

#[test]
fn wrong_arguments_are_named() {
    let pool = Threads::new(1).unwrap();
    let launch = Launch { isa: Isa::detect(), pool: &pool };
    let shape = shape(1, 1, [2, 3], [8, 8]);
    let options = FlashAttention::new(8);
    let visible = Visible { ranges: &[0, 3, 0, 3], segments: None };
    let refuse = |options, shape, visible, sinks| {
        Kernel::new(options, shape, visible, sinks, launch).map(drop).unwrap_err().to_string()
    };
    let wrong = FlashAttention { softcap: Some(0.0), ..options };
    let found = refuse(wrong, shape, visible, None);
    assert_eq!(found, "softcap is 0; it must be finite and above 0, in f32");
    let few = Visible { ranges: &[0, 3], segments: None };
    let found = refuse(options, shape, few, None);
    assert_eq!(found, "ranges holds 2 elements; [N, S, ..] needs 4");
    let few = Visible { segments: Some([&[0, 0], &[0, 0]]), ..visible };
    let found = refuse(options, shape, few, None);
    assert_eq!(found, "kv_segments holds 2 elements; [N, K, ..] needs 3");
    let found = refuse(options, shape, visible, Some(&[0.0, 0.0]));
    assert_eq!(found, "sinks holds 2 elements; [N, G, S, ..] needs 1");
    let kernel = Kernel::new(options, shape, visible, None, launch).unwrap();
    let (q, k) = ([1.0_f32; 16], [1.0_f32; 24]);
    let operands = Operands { q: &q, k: &k, v: &k };
    let found = kernel.forward(operands, &mut [0.0; 16], &mut [0.0; 3]).unwrap_err();
    assert_eq!(found.to_string(), "lse holds 3 elements; [N, G, S, ..] needs 2");
    let operands = Operands { k: &k[1..], ..operands };
    let found = kernel.forward(operands, &mut [0.0; 16], &mut [0.0; 2]).unwrap_err();
    assert_eq!(found.to_string(), "k holds 23 elements; [N, K, ..] needs 24");
}
