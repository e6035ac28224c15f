use half::{bf16, f16};
use std::time::Instant;
use xentile::cross_entropy::*;
use xentile::*;
use xentile_cpu::{cross_entropy::*, *};
fn bench(name: &str, mut f: impl FnMut()) -> f64 {
    f();
    let mut v: Vec<f64> = (0..9)
        .map(|_| {
            let t = Instant::now();
            f();
            t.elapsed().as_secs_f64() * 1e3
        })
        .collect();
    v.sort_by(f64::total_cmp);
    println!("{name}: med {:.2} min {:.2} ms", v[4], v[0]);
    v[4]
}
fn go<E: Element>(t: usize, v: usize, tb: usize, bs: usize) {
    let n = t * v;
    let mut x = 0x12345u64;
    let logits: Vec<E> = (0..n)
        .map(|_| {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            E::from_f32(((x >> 40) as f32 / 16777216.0 - 0.5) * 8.0)
        })
        .collect();
    let mut d = vec![E::from_f32(1.0); n];
    let labels: Vec<i32> = (0..t).map(|i| ((i * 7919) % v) as i32).collect();
    let pool = Threads::new(2).unwrap();
    let nf = n * E::DTYPE.size_bytes() / 4;
    let src = vec![1.5f32; nf];
    let mut dst = vec![0f32; nf];
    let c = bench("copy", || copy::copy(&pool, Isa::detect(), &src, &mut dst));
    let _c2 = bench("memcpy", || {
        let h = nf / 2;
        let (a, b) = dst.split_at_mut(h);
        std::thread::scope(|s| {
            s.spawn(|| a.copy_from_slice(&src[..h]));
            b.copy_from_slice(&src[h..]);
        })
    });
    for isa in Isa::available() {
        let k = Kernel::new(
            CrossEntropy::default(),
            LogitsShape::new(t, v).unwrap(),
            labels.as_slice().into(),
            Launch { isa, tile: Some(Tile::new(tb, bs).unwrap()), pool: &pool },
        )
        .unwrap();
        let f = bench(&format!("{isa} {} fused", E::DTYPE), || {
            k.value_and_grad(
                &logits,
                Reduce { reduction: Reduction::Mean, weights: None, cotangent: 1.0 },
                TokenOutputs::default(),
                &mut d,
            )
            .unwrap();
        });
        println!("  ratio {:.2}", f / c);
        let (mut a, mut b, mut e, mut g) =
            (vec![0f32; t], vec![0f32; t], vec![0f32; t], vec![1f32; t]);
        g[0] = 0.5;
        let fw = bench("forward", || {
            k.forward(
                &logits,
                TokenOutputs {
                    loss: Some(&mut a),
                    logps: None,
                    lse: Some(&mut b),
                    lse_low: Some(&mut e),
                },
            )
            .unwrap();
        });
        let bw = bench("backward", || {
            k.backward(
                &logits,
                SavedLse { lse: &b, lse_low: Some(&e) },
                Cotangents { loss: Some(&g), ..Default::default() },
                &mut d,
            )
            .unwrap();
        });
        println!("  pair ratio {:.2}", (fw + bw) / c);
    }
}
fn main() {
    let a: Vec<String> = std::env::args().collect();
    let p = |i: usize, d: usize| a.get(i).map_or(d, |s| s.parse().unwrap());
    let (t, v, tb, bs) = (p(2, 512), p(3, 151643), p(4, 1), p(5, 4096));
    match a.get(1).map_or("bf16", |s| s.as_str()) {
        "f32" => go::<f32>(t, v, tb, bs),
        "f16" => go::<f16>(t, v, tb, bs),
        _ => go::<bf16>(t, v, tb, bs),
    }
}
