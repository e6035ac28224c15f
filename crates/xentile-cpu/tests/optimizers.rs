//! Steps of optimizers with 8-bit moments, on every instruction set.

use half::bf16;
use xentile::optimizers::{Scalars, zero_code};
use xentile_cpu::optimizers::{self, Codes, Grads, Moments, Parameter, Params};
use xentile_cpu::{Isa, Launch, Threads};

const SCALARS: Scalars = Scalars {
    learning_rate: 0.01,
    b1: 0.9,
    rest1: 0.1,
    b2: 0.999,
    rest2: 0.001,
    eps: 1e-8,
    eps_root: 0.0,
    weight_decay: 0.1,
    mu_scale: 2.0,
    grad_scale: 0.5,
    nu_scale: 50.0,
    clip: 0.5,
    step: 7,
    seed: 3,
    rounds: true,
};

/// Parameters, codes and scales after a step of more than a tile.
fn step(
    isa: Isa,
    threads: usize,
    block: usize,
    is_lion: bool,
) -> (Vec<bf16>, [Vec<u8>; 2], [Vec<u32>; 2]) {
    let length = if cfg!(miri) { 128 } else { (1 << 14) + 128 };
    let number = |seed: usize| (0..length).map(move |k| ((k * 37 + seed) % 101) as f32 - 50.0);
    let grads: Vec<_> = number(1).map(|x| 0.01 * x).collect();
    let mut params: Vec<_> = number(2).map(bf16::from_f32).collect();
    let mut codes = [1, 2].map(|by| (0..length).map(|k| (k * by) as u8).collect::<Vec<_>>());
    let mut scales = [0.1, 0.3].map(|scale| vec![scale; length / block]);
    // A block of zeros.
    let mut grads = grads;
    grads[..block].fill(0.0);
    scales.iter_mut().for_each(|all| all[0] = 0.0);
    let mut pairs = codes.iter_mut().zip(&mut scales);
    let [mu, nu] = [0, 1].map(|_| {
        let (codes, scales) = pairs.next().unwrap();
        Codes { codes, scales }
    });
    let moments = if is_lion { Moments::Lion(mu, block) } else { Moments::Codes([mu, nu], block) };
    let parameter = Parameter {
        number: 5,
        decays: true,
        grads: Grads::F32(&grads),
        params: Params::Bf16(&mut params),
        moments,
    };
    let pool = Threads::new(threads).unwrap();
    optimizers::step(&SCALARS, vec![parameter], Launch { isa, pool: &pool }).unwrap();
    let bits = scales.map(|all| all.iter().map(|x| x.to_bits()).collect::<Vec<_>>());
    (params, codes, bits)
}

/// No bit depends on threads, tiles or the instruction set.
#[test]
fn every_instruction_set_gives_the_same() {
    for (block, is_lion) in [(128, false), (64, false), (64, true)] {
        let right = step("portable".parse().unwrap(), 1, block, is_lion);
        assert!(right.1[0][..block].iter().all(|code| *code == zero_code(true)));
        assert!(right.2.iter().all(|scales| scales[0] == 0 && scales[1] != 0));
        for isa in Isa::available() {
            assert!(step(isa, 3, block, is_lion) == right, "{isa}");
        }
    }
}

#[test]
fn wrong_lengths_are_refused() {
    let pool = Threads::new(1).unwrap();
    let launch = Launch { isa: Isa::detect(), pool: &pool };
    let (mut params, mut moments) = ([1.0; 4], [[0.0; 4]; 2]);
    let [mu, nu] = &mut moments;
    let parameter = Parameter {
        number: 0,
        decays: false,
        grads: Grads::F32(&[0.0; 3]),
        params: Params::F32(&mut params),
        moments: Moments::F32([mu, nu]),
    };
    let error = optimizers::step(&SCALARS, vec![parameter], launch).unwrap_err().to_string();
    assert!(error.contains("grads"), "{error}");
}
