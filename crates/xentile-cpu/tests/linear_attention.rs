//! Linear attention and the gated delta rule against the recurrence in float64.

use half::{bf16, f16};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use xentile::linear_attention::{Gradients as Expected, Head as Reference};
use xentile::{Element, Error};

use xentile_cpu::linear_attention::{Cotangents, Gradients, Kernel, LinearAttention, Operands};
use xentile_cpu::{Isa, Launch, Threads};

/// Numbers from -1 to 1.
fn random(rng: &mut ChaCha8Rng, count: usize) -> Vec<f32> {
    (0..count).map(|_| rng.random_range(-1.0..1.0)).collect()
}

fn rounded<E: Element>(all: &[f32]) -> Vec<E> {
    all.iter().map(|x| E::from_f32(*x)).collect()
}

fn wide<E: Element>(all: &[E]) -> Vec<f64> {
    all.iter().map(|x| x.to_f64()).collect()
}

/// `[T, columns]` of a head of a sequence, of `[B, T, H, columns]`.
fn head_rows(all: &[f64], [tokens, heads, columns]: [usize; 3], [b, head]: [usize; 2]) -> Vec<f64> {
    let row = |t: usize| (((b * tokens + t) * heads + head) * columns)..;
    (0..tokens).flat_map(|t| &all[row(t)][..columns]).copied().collect()
}

/// Asserts that `found` is `right`, by norm.
fn assert_near(name: &str, found: &[f64], right: &[f64], off: f64) {
    let norm = |of: &mut dyn Iterator<Item = f64>| of.map(|x| x * x).sum::<f64>().sqrt();
    let error = norm(&mut found.iter().zip(right).map(|(a, b)| a - b));
    let size = norm(&mut right.iter().copied());
    assert!(error <= off * (size + 1e-3), "{name}: off by {error:e} of {size:e}");
}

fn check<E: Element>(isa: Isa, attention: LinearAttention, group: usize, seed: u64, off: f64) {
    let LinearAttention { delta, scale, sequences, tokens, key_heads, heads, keys, values } =
        attention;
    let rng = &mut ChaCha8Rng::seed_from_u64(seed);
    let per_token = |each: usize| sequences * tokens * each;
    let q = rounded::<E>(&random(rng, per_token(key_heads * keys)));
    let mut k = random(rng, per_token(key_heads * keys));
    for row in k.chunks_exact_mut(keys) {
        let norm = row.iter().map(|x| x * x).sum::<f32>().sqrt();
        row.iter_mut().for_each(|x| *x /= norm);
    }
    let k = rounded::<E>(&k);
    let v = rounded::<E>(&random(rng, per_token(heads * values)));
    // A decay of 0 begins a segment.
    let g: Vec<f32> = random(rng, per_token(heads))
        .iter()
        .enumerate()
        .map(|(at, x)| if at % 37 == 36 { f32::NEG_INFINITY } else { 0.1 * (x - 1.0) })
        .collect();
    let b: Vec<f32> = random(rng, per_token(heads)).iter().map(|x| 1.0 + x).collect();
    let states = sequences * heads * attention.state();
    let (state, dstate) = (random(rng, states), random(rng, states));
    let cotangent = rounded::<E>(&random(rng, per_token(heads * values)));
    let pool = Threads::new(2).unwrap();
    let kernel = Kernel::new(attention, group, Launch { isa, pool: &pool }).unwrap();
    let operands =
        Operands { q: &q, k: &k, v: &v, g: &g, b: delta.then_some(&b[..]), state: &state };
    let mut o = vec![E::from_f32(f32::NAN); v.len()];
    let mut saved = vec![f32::NAN; states * kernel.groups()];
    kernel.forward(operands, &mut o, &mut saved).unwrap();
    let cotangents = Cotangents { states: &saved, o: &cotangent, state: &dstate };
    let mut rows = [q.len(), k.len(), v.len()].map(|count| vec![E::from_f32(f32::NAN); count]);
    let mut numbers = [g.len(), b.len(), states].map(|count| vec![f32::NAN; count]);
    let ([dq, dk, dv], [dg, db, dinitial]) = (&mut rows, &mut numbers);
    let b_gradient = delta.then_some(&mut db[..]);
    let gradients = Gradients { q: dq, k: dk, v: dv, g: dg, b: b_gradient, state: dinitial };
    kernel.backward(operands, cotangents, gradients).unwrap();

    let shared = heads / key_heads;
    let [key_shape, value_shape] = [[tokens, key_heads, keys], [tokens, heads, values]];
    let number_shape = [tokens, heads, 1];
    for sequence in 0..sequences {
        for key_head in 0..key_heads {
            let at = [sequence, key_head];
            let [q, k] = [&q, &k].map(|all| head_rows(&wide(all), key_shape, at));
            let [mut dq, mut dk] = [0; 2].map(|_| vec![0.0; tokens * keys]);
            for head in key_head * shared..(key_head + 1) * shared {
                let at = [sequence, head];
                let name = |name| format!("{name} of {at:?}, {attention:?}, {isa}, seed {seed}");
                let [g, b] = [&g, &b].map(|all| head_rows(&wide(all), number_shape, at));
                let v = head_rows(&wide(&v), value_shape, at);
                let place = sequence * heads + head;
                let each = place * attention.state()..(place + 1) * attention.state();
                let (state, dstate) = (wide(&state[each.clone()]), wide(&dstate[each.clone()]));
                let reference = Reference {
                    scale: scale.into(),
                    columns: [keys, values],
                    q: &q,
                    k: &k,
                    v: &v,
                    g: &g,
                    b: delta.then_some(&b[..]),
                    state: &state,
                };
                let (right, last) = reference.forward();
                assert_near(&name("o"), &head_rows(&wide(&o), value_shape, at), &right, off);
                let end = (place + 1) * kernel.groups() * attention.state();
                let found = wide(&saved[end - attention.state()..end]);
                assert_near(&name("state"), &found, &last, 1e-6);
                let cotangent = head_rows(&wide(&cotangent), value_shape, at);
                let Expected {
                    q: want_q,
                    k: want_k,
                    v: want_v,
                    g: want_g,
                    b: want_b,
                    state: initial,
                } = reference.backward(&cotangent, &dstate);
                let sums = dq.iter_mut().zip(want_q).chain(dk.iter_mut().zip(want_k));
                sums.for_each(|(sum, x)| *sum += x);
                assert_near(
                    &name("dv"),
                    &head_rows(&wide(&rows[2]), value_shape, at),
                    &want_v,
                    off,
                );
                let [dg, db] = [0, 1].map(|of| head_rows(&wide(&numbers[of]), number_shape, at));
                assert_near(&name("dg"), &dg, &want_g, 3e-6);
                if delta {
                    assert_near(&name("db"), &db, &want_b, 3e-6);
                }
                assert_near(&name("dinitial"), &wide(&numbers[2][each]), &initial, 1e-6);
            }
            for (name, found, right) in [("dq", &rows[0], dq), ("dk", &rows[1], dk)] {
                assert_near(name, &head_rows(&wide(found), key_shape, at), &right, off);
            }
        }
    }
}

const SHAPE: LinearAttention = LinearAttention {
    delta: false,
    scale: 0.5,
    sequences: 2,
    tokens: 150,
    key_heads: 2,
    heads: 4,
    keys: 20,
    values: 40,
};

/// Chunks and groups that are not whole, heads that share keys, and rows that are no whole vectors.
#[test]
fn values_and_gradients_are_those_of_the_recurrence() {
    let seed = 7;
    for isa in Isa::available() {
        for delta in [false, true] {
            let shape = LinearAttention { delta, ..SHAPE };
            check::<f32>(isa, shape, 64, seed, 1e-6);
            check::<f32>(isa, LinearAttention { tokens: 3, scale: 1.0, ..shape }, 128, seed, 1e-6);
        }
    }
    for delta in [false, true] {
        let shape = LinearAttention { delta, heads: 2, keys: 64, values: 64, ..SHAPE };
        check::<f32>(Isa::detect(), shape, 70, seed, 1e-6);
        check::<bf16>(Isa::detect(), shape, 64, seed, 2.5e-3);
        check::<f16>(Isa::detect(), shape, 64, seed, 3e-4);
    }
}

#[test]
fn arguments_of_another_shape_are_refused() {
    let pool = Threads::new(1).unwrap();
    let launch = Launch { isa: Isa::detect(), pool: &pool };
    let message = Kernel::new(SHAPE, 0, launch).err().unwrap().to_string();
    assert_eq!(message, "group is 0; it must be at least 1");
    let kernel = Kernel::new(LinearAttention { tokens: 1, ..SHAPE }, 64, launch).unwrap();
    let (rows, numbers) = ([0.0_f32; 2 * 4 * 40], [0.0; 8]);
    let state = vec![0.0; 8 * 20 * 40];
    let right =
        Operands { q: &rows[..80], k: &rows[..80], v: &rows, g: &numbers, b: None, state: &state };
    let forward = |operands| kernel.forward(operands, &mut rows.clone(), &mut state.clone());
    assert_eq!(forward(right), Ok(()));
    for (wrong, named) in [
        (Operands { q: &rows, ..right }, "q"),
        (Operands { v: &rows[1..], ..right }, "v"),
        (Operands { g: &numbers[1..], ..right }, "g"),
        (Operands { state: &state[1..], ..right }, "initial_state"),
    ] {
        assert!(matches!(forward(wrong), Err(Error::Length { name, .. }) if name == named));
    }
    let error = forward(Operands { b: Some(&numbers), ..right }).unwrap_err().to_string();
    assert_eq!(error, "b is 8; it must be given for the delta rule alone");
}
