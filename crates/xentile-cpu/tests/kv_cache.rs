//! Attention over a cache of keys and values, and appending to one, on every instruction set.

use half::{bf16, f16};

use xentile::Element;
use xentile_cpu::kv_cache::{Extents, Operands, append, attend};
use xentile_cpu::{Isa, Launch, Threads};

fn numbers<E: Element>(count: usize, seed: usize) -> Vec<E> {
    (0..count).map(|i| E::from_f32(((i * i % 9973 + seed) as f32).sin())).collect()
}

/// The attention of one head of queries in f64.
fn attention<E: Element>(q: &[E], rows: &[(&[E], &[E])], scale: f64) -> Vec<f64> {
    let dot = |key: &[E]| -> f64 {
        q.iter().zip(key).map(|(q, key)| q.to_f64() * key.to_f64()).sum::<f64>() * scale
    };
    let powers: Vec<f64> = rows.iter().map(|(key, _)| dot(key).exp()).collect();
    let total: f64 = powers.iter().sum();
    (0..q.len())
        .map(|column| {
            let terms = rows.iter().zip(&powers);
            terms.map(|((_, value), power)| power / total * value[column].to_f64()).sum()
        })
        .collect()
}

fn check<E: Element>(isa: Isa, extents: Extents, lengths: &[i32], window: usize) {
    let Extents { sequences, length, kv_heads, group, head_dim } = extents;
    let heads = kv_heads * group;
    let size = sequences * length * kv_heads * head_dim;
    let (keys, values) = (numbers::<E>(size, 1), numbers::<E>(size, 2));
    let q = numbers::<E>(sequences * heads * head_dim, 3);
    let pool = Threads::new(2).unwrap();
    let scale = 0.25;
    let operands = Operands { q: &q, keys: &keys, values: &values, lengths, window, scale };
    let mut o = vec![E::from_f32(f32::NAN); q.len()];
    attend(Launch { isa, pool: &pool }, extents, operands, &mut o).unwrap();
    for (index, found) in o.chunks_exact(head_dim).enumerate() {
        let (sequence, head) = (index / heads, index % heads);
        let end = usize::try_from(lengths[sequence]).ok().filter(|end| *end <= length);
        let end = end.unwrap_or(0);
        let first = end.saturating_sub(window);
        let rows: Vec<_> = (first..end)
            .map(|t| {
                let at = ((sequence * length + t) * kv_heads + head / group) * head_dim;
                (&keys[at..at + head_dim], &values[at..at + head_dim])
            })
            .collect();
        let q = &q[index * head_dim..][..head_dim];
        for (found, wanted) in found.iter().zip(attention(q, &rows, scale.into())) {
            let bound = 2e-6 + E::DTYPE.ulp(1.0) * wanted.abs();
            assert!((found.to_f64() - wanted).abs() <= bound, "{found:?}, not {wanted}");
        }
    }
}

#[test]
fn every_instruction_set_attends() {
    for isa in Isa::available() {
        for (kv_heads, group, head_dim) in [(1, 7, 64), (2, 2, 128), (2, 1, 20)] {
            let extents = Extents { sequences: 4, length: 1100, kv_heads, group, head_dim };
            for window in [2000, 300] {
                check::<f32>(isa, extents, &[1100, 1, 0, 513], window);
                check::<bf16>(isa, extents, &[1030, -1, 1101, 512], window);
                check::<f16>(isa, extents, &[7, 0, 0, 0], window);
            }
        }
    }
}

#[test]
fn rows_are_appended_where_there_is_room() {
    let extents = Extents { sequences: 4, length: 3, kv_heads: 1, group: 1, head_dim: 2 };
    let rows: Vec<f32> = (1..=16).map(|x| x as f32).collect();
    let mut cache = vec![0.0; 24];
    append(extents, &rows, &[0, 2, -1, i32::MIN], &mut cache).unwrap();
    let expected = [
        [1.0, 2.0, 3.0, 4.0, 0.0, 0.0],
        [0.0, 0.0, 0.0, 0.0, 5.0, 6.0],
        [11.0, 12.0, 0.0, 0.0, 0.0, 0.0],
        [0.0; 6],
    ];
    assert_eq!(cache, expected.concat());
}
