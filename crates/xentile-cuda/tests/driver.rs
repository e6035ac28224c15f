//! From the first call to the launch, with a driver that `driver.c` plays: which errors there are,
//! and what is launched. Every case is a process of its own, because a driver is opened once.

#![cfg(all(feature = "kernels", target_os = "linux"))]

mod fake;

use std::ffi::c_void;
use std::process::Command;
use std::ptr::{null, null_mut, without_provenance, without_provenance_mut};
use std::sync::LazyLock;

use xentile::cross_entropy::CrossEntropy;
use xentile::fp8_quantize::{Format, Fp8Quantize, QuantizeShape};
use xentile::norm::{Norm as NormOptions, NormShape};
use xentile::{DType, LogitsShape};
use xentile_cuda::Result;
use xentile_cuda::cross_entropy::{Cotangents, Kernel, Labels, Pass, SavedLse, TokenOutputs};
use xentile_cuda::decode_step::{Arrays, DecodeStep, Dims, Extents};
use xentile_cuda::fp8_quantize::{NormOperands, Normed, Operands as Fp8Operands};
use xentile_cuda::fused_product::{Columns, DLogits, FusedProduct};
use xentile_cuda::kl_divergence::{self, KlDivergence};
use xentile_cuda::linear_cross_entropy::{Operands, Scratch};
use xentile_cuda::muon::NewtonSchulz;
use xentile_cuda::norm::{Backward, Forward, Norm, PartialSums, Weight};
use xentile_cuda::sample::{self, Sample};
use xentile_cuda::scale::Scale;

/// The folder with the driver.
static DRIVER: LazyLock<tempfile::TempDir> = LazyLock::new(|| fake::driver(&["driver.c"], &[]));

/// What the driver and [`calls`] print, with such a driver.
fn printed(settings: &[(&str, &str)]) -> String {
    printed_by("calls", settings)
}

/// What the driver and an ignored test print, with such a driver.
fn printed_by(test: &str, settings: &[(&str, &str)]) -> String {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--include-ignored", "--nocapture", "--test-threads", "1"])
        .env("LD_LIBRARY_PATH", DRIVER.path())
        .envs(settings.iter().copied())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    text
}

const V: usize = 151_643;

fn kernel(tokens: usize, options: CrossEntropy) -> Kernel {
    let shape = LogitsShape::new(tokens, V).unwrap();
    Kernel::new(options, shape, DType::Bf16).unwrap()
}

fn at(address: usize) -> *mut c_void {
    without_provenance_mut(address)
}

/// The fused pass on a stream, by its number, in place.
fn fused(kernel: &Kernel, stream: usize) -> Result<()> {
    let none = null_mut();
    let outputs =
        TokenOutputs { loss: none, logps: none, lse: none, lse_low: none, zero_masked: true };
    let labels = Labels::I64(without_provenance(0x30));
    let matrices = (at(0x10_000).cast_const(), at(0x10_000));
    // SAFETY: the driver that plays here touches no memory.
    unsafe { kernel.fused(at(stream), matrices, labels, without_provenance(0x20), outputs) }
}

/// A product with cross-entropy in its epilogue.
fn product(pass: Pass, [tokens, width, vocab]: [usize; 3], vocab_is_last: bool) -> Result<()> {
    let (dtype, options) = (DType::Bf16, CrossEntropy::default());
    let product = FusedProduct { tokens, width, vocab, vocab_is_last, dtype, options };
    let labels = Labels::I32(without_provenance(0x30));
    let operands = Operands { hidden: at(0x10_000), weight: at(0x20_000), labels, bias: null() };
    let scratch = Scratch { at: at(0x30_000), bytes: product.scratch_bytes() };
    let (none, some) = (null_mut(), without_provenance(0x40));
    // SAFETY: the driver that plays here touches no memory.
    unsafe {
        if pass == Pass::Forward {
            let outputs = TokenOutputs {
                loss: none,
                logps: none,
                lse: none,
                lse_low: none,
                zero_masked: true,
            };
            let columns = Columns { first: 0, count: vocab, carried: none.cast() };
            return product.forward(at(1), operands, columns, outputs, scratch);
        }
        let saved = SavedLse { lse: some, lse_low: some };
        let cotangents = Cotangents { loss: some, logps: some, lse: some };
        let dlogits = DLogits { at: at(0x40_000), stride: 1024, first_column: 7, columns: 1001 };
        let token_scalars = at(0x50_000);
        product.prepare(at(1), labels, saved, cotangents, token_scalars)?;
        product.backward(at(1), operands, saved, cotangents, (token_scalars, 0), dlogits)
    }
}

/// RMSNorm of rows in bf16, with a residual or without: forward, then backward with so many blocks.
fn norm(shape: [usize; 2], adds: bool, blocks: usize) -> Result<()> {
    let weight = Weight { dtype: DType::F32, length: shape[1] };
    let shape = NormShape::new(shape[0], shape[1]).unwrap();
    let norm = Norm::new(NormOptions::RMS, shape, DType::Bf16, weight, adds)?;
    let [x, residual, w, dy] =
        [0x100_000, 0x200_000, 0x40, 0x300_000].map(|place| at(place).cast_const());
    let (y, sum) = (at(0x400_000_000), at(0x500_000_000));
    let residual = adds.then_some(residual);
    let forward = Forward {
        x,
        residual: residual.map(|residual| (residual, sum)),
        weight: w,
        bias: None,
        y,
        mean: null_mut(),
        rstd: without_provenance_mut(0x80),
    };
    let rstd = without_provenance(0x80);
    let dweight = without_provenance_mut(0x90);
    let (mean, dbias) = (null(), null_mut());
    let backward = Backward { x, weight: w, mean, rstd, dy, dsum: residual, dx: y, dweight, dbias };
    // SAFETY: the driver that plays here touches no memory.
    unsafe {
        norm.forward(at(1), forward)?;
        norm.backward(at(1), PartialSums { groups: 1, blocks }, backward)
    }
}

/// RMSNorm in FP8 with the transposed copy.
fn norm_in_fp8([matrices, rows, columns]: [usize; 3]) -> Result<()> {
    let weight = Weight { dtype: DType::F32, length: columns };
    let to = Fp8Quantize { format: Format::E4M3Fn, power_of_two: false };
    let shape = QuantizeShape::new(matrices, rows, columns)?;
    let norm = Normed::new(NormOptions::RMS, to, shape, DType::Bf16, weight, false, true)?;
    let operands = Fp8Operands {
        values: without_provenance_mut(0x100_000_000),
        numbers: without_provenance_mut(0x200_000_000),
        values_t: without_provenance_mut(0x300_000_000),
        scales_t: without_provenance_mut(0x400_000_000),
        ..Fp8Operands::of(at(0x10_000))
    };
    let of_norm = NormOperands {
        residual: None,
        weight: at(0x40).cast_const(),
        rstd: without_provenance_mut(0x80),
    };
    // SAFETY: the driver that plays here touches no memory.
    unsafe { norm.run(at(1), operands, of_norm) }
}

/// Not a test: what [`printed`] runs.
#[test]
#[ignore = "the tests run it, with a driver each"]
fn calls() {
    let plain = CrossEntropy::default();
    let say = |what: &str, result: Result<()>| match result {
        Ok(()) => println!("{what}: done"),
        Err(error) => println!("{what}: {error}"),
    };
    println!(); // after the harness's own words
    say("empty", fused(&kernel(0, plain), 1));
    // SAFETY: the driver that plays here touches no memory.
    say("load", unsafe { kernel(2048, plain).load(Pass::Fused, at(1)) });
    say("fused", fused(&kernel(2048, plain), 1));
    say("again", fused(&kernel(2048, plain), 2));
    say("few", fused(&kernel(3, plain), 1));
    say("tile", fused(&kernel(30, plain).with_tile(Some(8), Some(8192)).unwrap(), 1));
    say("capped", fused(&kernel(2048, CrossEntropy { softcap: Some(30.0), ..plain }), 1));
    let smooth = kernel(2048, CrossEntropy { label_smoothing: 0.1, ..plain });
    say("smooth", fused(&smooth, 1));
    // SAFETY: no other thread reads the environment.
    unsafe { std::env::set_var("FAKE_CURRENT", "1") };
    say("other", fused(&smooth, 100));
    // SAFETY: as above.
    unsafe { std::env::remove_var("FAKE_CURRENT") };
    let scale = Scale { dtype: DType::F32, rows: 2, columns: 8192 };
    // SAFETY: as above.
    say("scale", unsafe { scale.run(at(1), at(0x40), without_provenance(0x20), at(0x40)) });
    say("product", product(Pass::Forward, [8192, 2048, V], false));
    say("gradient", product(Pass::Backward, [300, 72, V], false));
    say("last", product(Pass::Forward, [300, 72, 1000], true));
    say("odd", product(Pass::Forward, [300, 72, V], true));
    say("narrow", product(Pass::Forward, [300, 12, V], false));
    say("empty", product(Pass::Backward, [0, 72, V], false));
    say("norm", norm([8192, 4096], false, 128));
    say("added", norm([300, 896], true, 9));
    say("ragged", norm([300, 1023], false, 9));
    say("no rows", norm([0, 64], false, 2));
    say("no block", norm([0, 64], false, 0));
    say("in one", norm_in_fp8([1, 8192, 4096]));
    say("in two", norm_in_fp8([2, 67, 896]));
}

/// What the driver says of calls.
const LINES: [&str; 3] = ["launch", "tensor", "fill"];

#[test]
fn launch_sizes() {
    let text = printed(&[]);
    let lines: Vec<_> = text
        .lines()
        .filter(|line| LINES.iter().any(|start| line.starts_with(start)) || line.ends_with("done"))
        .collect();
    let ring = |rest: &str| format!("launch cross_entropy_ring_fused_bf16_{rest}");
    let expected = [
        "empty: done".into(),
        "load: done".into(),
        ring("basic stream 1 grid 132 block 384 shared 223488 cluster 2 first 0x10000 loads 1"),
        "fused: done".into(),
        ring("basic stream 2 grid 132 block 384 shared 223488 cluster 2 first 0x10000 loads 1"),
        "again: done".into(),
        ring("basic stream 1 grid 48 block 224 shared 89920 cluster 16 first 0x10000 loads 2"),
        "few: done".into(),
        ring("basic stream 1 grid 16 block 512 shared 148704 cluster 4 first 0x10000 loads 3"),
        "tile: done".into(),
        ring("capped stream 1 grid 132 block 384 shared 223488 cluster 2 first 0x10000 loads 4"),
        "capped: done".into(),
        ring("smooth stream 1 grid 132 block 384 shared 223488 cluster 2 first 0x10000 loads 5"),
        "smooth: done".into(),
        ring("smooth stream 100 grid 132 block 384 shared 223488 cluster 2 first 0x10000 loads 6"),
        "other: done".into(),
        "launch scale_f32 stream 1 grid 4 block 256 shared 0 cluster 0 first 0x40 loads 7".into(),
        "scale: done".into(),
    ];
    let (lines, rest) = lines.split_at(expected.len());
    assert_eq!(lines, expected, "{text}");
    let launch = |rest: &str| format!("launch fused_product_{rest}");
    let expected = [
        "tensor 0x10000 dtype 9 extents 2048 8192 stride 4096 box 64 128".into(),
        "tensor 0x20000 dtype 9 extents 2048 151643 stride 4096 box 64 128".into(),
        launch(
            "forward_bf16_basic_vd stream 1 grid 132 block 384 shared 230464 cluster 2 first 0x10000 \
             loads 8",
        ),
        launch("merge stream 1 grid 64 block 128 shared 0 cluster 0 first 0x10000 loads 9"),
        "product: done".into(),
        launch("prepare stream 1 grid 3 block 128 shared 0 cluster 0 first (nil) loads 10"),
        "tensor 0x40000 dtype 9 extents 1001 300 stride 2048 box 64 16".into(),
        "tensor 0x10000 dtype 9 extents 72 300 stride 144 box 64 128".into(),
        "tensor 0x20000 dtype 9 extents 72 151643 stride 144 box 64 128".into(),
        launch(
            "backward_bf16_basic_vd stream 1 grid 16 block 384 shared 230464 cluster 2 first 0x10000 \
             loads 11",
        ),
        "gradient: done".into(),
        "tensor 0x10000 dtype 9 extents 72 300 stride 144 box 64 128".into(),
        "tensor 0x20000 dtype 9 extents 1000 72 stride 2000 box 64 64".into(),
        launch(
            "forward_bf16_basic_dv stream 1 grid 16 block 384 shared 230464 cluster 2 first 0x10000 \
             loads 12",
        ),
        launch("merge stream 1 grid 3 block 128 shared 0 cluster 0 first 0x10000 loads 12"),
        "last: done".into(),
        "empty: done".into(),
    ];
    let (of_products, of_norms) = rest.split_at(expected.len());
    assert_eq!(of_products, expected, "{text}");
    let launch = |name: &str, rest: &str, first: &str, loads: u32| {
        format!("launch rms_norm_{name}_bf16 stream 1 {rest} cluster 0 first {first} loads {loads}")
    };
    let expected = [
        launch("forward_held4", "grid 8192 block 128 shared 0", "0x100000", 13),
        launch("backward_ring2", "grid 128 block 512 shared 69632", "0x100000", 14),
        "norm: done".into(),
        // Few rows, ahead of which their weight comes: 896 numbers of f32.
        launch("add_forward_held4", "grid 75 block 128 shared 3584", "0x100000", 15),
        launch("add_backward_ring2", "grid 9 block 640 shared 128000", "0x100000", 16),
        "added: done".into(),
        launch("forward_elements", "grid 75 block 128 shared 0", "0x100000", 17),
        launch("backward_elements", "grid 9 block 512 shared 0", "0x100000", 18),
        "ragged: done".into(),
        launch("backward_ring1", "grid 2 block 1024 shared 73728", "0x100000", 19),
        "no rows: done".into(),
        // rstd that is awaited; then 64 bands of 32 tiles and 16 times statistics, and 17 bands ahead.
        "fill 32768 bytes from 80 with 255 stream 1".into(),
        "launch fp8_quantize_norm_transposed_f8e4m3fn_bf16 stream 1 grid 3344 block 256 shared 0 \
         cluster 0 first 0x10000 loads 20"
            .into(),
        "in one: done".into(),
        "launch fp8_quantize_norm_forward_held4_bf16 stream 1 grid 34 block 128 shared 3584 \
         cluster 0 first 0x10000 loads 21"
            .into(),
        "launch fp8_quantize_transposed_norm_f8e4m3fn_bf16 stream 1 grid 14 block 256 shared 0 \
         cluster 0 first 0x10000 loads 22"
            .into(),
        "in two: done".into(),
    ];
    assert_eq!(of_norms, expected, "{text}");
    assert!(text.contains("no block: blocks is 0; it must be at least 1"), "{text}");
    for refused in [
        "narrow: hidden states are bf16 and 12 wide, and rows of the weight have 12 elements; products",
        "odd: hidden states are bf16 and 72 wide, and rows of the weight have 151643 elements; products",
    ] {
        assert!(text.contains(refused), "{text}");
    }
    assert_eq!(text.matches("library 1").count(), 1, "{text}");
}

#[test]
fn gpus_without_clusters_or_without_room_for_one_run_the_plain_schedule() {
    let plain = "launch cross_entropy_plain_fused_bf16_smooth stream 1 grid 396 block 512 shared 0 \
                 cluster 0 first 0x10000";
    for settings in [("FAKE_CAPABILITY", "80"), ("FAKE_CAPABILITY", "89"), ("FAKE_CLUSTERS", "0")] {
        let text = printed(&[settings]);
        assert!(text.contains(plain), "{text}");
        assert!(!text.contains("launch cross_entropy_ring"), "{text}");
        assert!(!text.contains("launch fused_product_forward"), "{text}");
        assert!(!text.contains("launch fused_product_backward"), "{text}");
        let reason = match settings {
            ("FAKE_CAPABILITY", "89") => {
                "product: fake 0 has compute capability 8.9; products with"
            }
            ("FAKE_CLUSTERS", _) => "product: fake 0 has no room for a cluster of two CTAs",
            _ => "product: fake 0 has compute capability 8.0; products with",
        };
        assert!(text.contains(reason), "{text}");
    }
}

#[test]
fn a_missing_library_is_named() {
    for (settings, reason) in [
        (
            ("FAKE_VERSION", "11040"),
            "the CUDA driver is for CUDA 11.4; the kernels here need one for CUDA 1",
        ),
        (("FAKE_DEVICES", "0"), "the CUDA driver finds no GPU; the kernels here need one"),
        (
            ("FAKE_CAPABILITY", "75"),
            "fake 0 has compute capability 7.5; the kernels here need 8.0 or later",
        ),
        (("FAKE_FAILURE", "700"), "cuLaunchKernelEx failed: CUDA_ERROR_FAKE, as requested"),
    ] {
        let text = printed(&[settings]);
        assert!(text.contains(&format!("fused: {reason}")), "{text}");
        assert!(
            text.contains(&format!("again: {reason}")) || settings.0 == "FAKE_CAPABILITY",
            "{text}"
        );
        assert!(text.contains("empty: done") && !text.contains("\nlaunch"), "{text}");
    }
}

#[test]
#[ignore = "a test runs it, with a driver each"]
fn token() {
    println!();
    let extents = Extents { layers: 28, batch: 1, vocab: V, length: 2048 };
    let small = Dims {
        hidden_size: 1024,
        heads: 16,
        kv_heads: 8,
        head_dim: 128,
        mlp_size: 3072,
        qk_norm: true,
        qkv_bias: false,
    };
    let step = DecodeStep::new(small, extents, 1e-6).unwrap();
    let (some, float) = (at(0x10_000), at(0x10_000).cast::<f32>());
    let arrays = Arrays {
        packed: some,
        embedding: some,
        attention_norm: some,
        qkv_bias: some,
        q_norm: some,
        k_norm: some,
        mlp_norm: some,
        norm: some,
        cosines: float,
        sines: float,
        token: some.cast(),
        position: some.cast(),
        keys: at(0x20_000),
        values: at(0x30_000),
        state: some,
        logits: float,
        best: some.cast(),
        best_logp: float,
    };
    // SAFETY: the driver that plays here touches no memory.
    match unsafe { step.run(at(1), arrays) } {
        Ok(()) => println!("done"),
        Err(error) => println!("{error}"),
    }
    // SAFETY: as above.
    let odd = unsafe { step.run(at(1), Arrays { keys: at(0x20_008), ..arrays }) };
    println!("{}", odd.unwrap_err());
    let llama = Dims {
        hidden_size: 2048,
        heads: 32,
        head_dim: 64,
        mlp_size: 8192,
        qk_norm: false,
        ..small
    };
    let step = DecodeStep::new(llama, Extents { layers: 16, batch: 5, ..extents }, 1e-5).unwrap();
    // SAFETY: as above.
    let batch = unsafe { step.run(at(1), Arrays { keys: at(0x40_000), ..arrays }) };
    if let Err(error) = batch {
        println!("{error}");
    }
}

#[test]
fn all_ctas_of_a_token_run_at_once() {
    let text = printed_by("token", &[]);
    for line in [
        "tensor 0x20000 dtype 9 extents 1024 57344 stride 2048 box 64 32",
        "tensor 0x30000 dtype 9 extents 1024 57344 stride 2048 box 64 32",
        "launch decode_step_qwen3_small stream 1 grid 128 block 640 shared 221152 cluster 1 first 0x20000 loads \
         1 cooperative",
        "done",
        "`keys` is at 0x20008; it must be at a multiple of 16",
        "tensor 0x40000 dtype 9 extents 512 163840 stride 1024 box 64 64",
        "launch decode_step_llama_small_8 stream 1 grid 128 block 640 shared 226000 cluster 1 first 0x40000 loads \
         2 cooperative",
    ] {
        assert!(text.lines().any(|one| one == line), "{line}\n{text}");
    }
    for (settings, reason) in [
        (
            ("FAKE_CAPABILITY", "80"),
            "fake 0 has compute capability 8.0 and 132 multiprocessors; the",
        ),
        (("FAKE_CAPABILITY", "100"), "fake 0 has compute capability 10.0 and 132 multiprocessors"),
        (("FAKE_MULTIPROCESSORS", "114"), "fake 0 has compute capability 9.0 and 114 multiproc"),
        (("FAKE_FAILURE", "720"), "cuLaunchKernelEx failed: CUDA_ERROR_FAKE, as requested"),
    ] {
        let text = printed_by("token", &[settings]);
        assert!(text.contains(reason) && !text.contains("launch decode"), "{text}");
    }
}

#[test]
#[ignore = "a test runs it, with a driver each"]
fn draw() {
    println!();
    let some = at(0x10_000);
    let mut arrays = sample::Arrays {
        logits: at(0x20_000).cast(),
        keys: some.cast(),
        steps: some.cast(),
        starts: some.cast(),
        options: some.cast(),
        tokens: some.cast(),
        logps: some.cast(),
        bounds: null_mut(),
    };
    for (rows, vocab) in [(3, V), (2, 2049), (0, V), (1, V)] {
        arrays.bounds = if rows == 1 { some.cast() } else { arrays.bounds };
        // SAFETY: the driver that plays here touches no memory.
        match unsafe { Sample::new(rows, vocab).unwrap().run(at(1), arrays) } {
            Ok(()) => println!("done"),
            Err(error) => println!("{error}"),
        }
    }
}

#[test]
fn a_cluster_draws_the_token_of_a_row() {
    let text = printed_by("draw", &[]);
    for line in [
        "launch sample stream 1 grid 48 block 1024 shared 133032 cluster 16 first 0x20000 loads 2 early",
        "launch sample stream 1 grid 4 block 1024 shared 99220 cluster 2 first 0x20000 loads 2 early",
        "launch sample_noise stream 1 grid 64 block 1024 shared 0 cluster 16 first 0x20000 loads 2 early",
        "launch sample stream 1 grid 16 block 1024 shared 133032 cluster 16 first 0x20000 loads 2 early",
    ] {
        assert!(text.lines().any(|one| one == line), "{line}\n{text}");
    }
    assert_eq!(text.lines().filter(|line| *line == "done").count(), 4, "{text}");
    let text = printed_by("draw", &[("FAKE_CLUSTERS", "0")]);
    let line = "launch sample stream 1 grid 24 block 1024 shared 170944 cluster 8 first 0x20000 loads 2 early";
    assert!(text.lines().any(|one| one == line), "{text}");
    let text = printed_by("draw", &[("FAKE_CAPABILITY", "80")]);
    let reason =
        "fake 0 has compute capability 8.0; the kernel that draws tokens needs 9.0 or later";
    assert!(text.contains(reason) && !text.contains("launch"), "{text}");
    // A GPU of GeForce: it has clusters, and room for a small vocabulary.
    let text = printed_by("draw", &[("FAKE_CAPABILITY", "120"), ("FAKE_SHARED", "101376")]);
    let reason =
        "a kernel needs 170944 bytes of shared memory, and this GPU gives a CTA 101376 at most";
    assert_eq!(text.matches(reason).count(), 2, "{text}");
    assert_eq!(text.matches("launch sample").count(), 1, "{text}");
}

#[test]
#[ignore = "a test runs it, with a driver each"]
fn newton_schulz() {
    println!();
    let coefficients = [3.0, -4.0, 2.0];
    for ([batch, rows, columns], bytes) in
        [([2, 896, 1152], 0), ([1, 151_936, 896], 1 << 24), ([1, 384, 64], 0), ([0, 8, 8], 0)]
    {
        let step = NewtonSchulz::new(batch, rows, columns, rows > columns).unwrap();
        let sums = Scratch { at: at(0x40_000), bytes };
        let (x, matrix, gram) = (at(0x10_000).cast_const(), at(0x20_000), at(0x30_000));
        // SAFETY: the driver that plays here touches no memory.
        match unsafe { step.run(at(1), x, matrix, gram, sums, coefficients) } {
            Ok(()) => println!("done"),
            Err(error) => println!("{error}"),
        }
    }
}

#[test]
fn newton_schulz_is_two_launches_or_three() {
    let text = printed_by("newton_schulz", &[]);
    let launch = |rest: &str| format!("launch muon_{rest}");
    let square = |grid: u32, loads: u32| {
        launch(&format!(
            "square stream 1 grid {grid} block 384 shared 230400 cluster 2 first 0x30000 loads {loads}"
        ))
    };
    let of = |name: &str, grid: u32, loads: u32| {
        launch(&format!(
            "{name} stream 1 grid {grid} block 384 shared 230400 cluster 2 first 0x10000 loads {loads}"
        ))
    };
    let expected = [
        "tensor 0x10000 dtype 9 extents 1152 896 2 stride 2304 box 64 64".into(),
        "tensor 0x30000 dtype 9 extents 896 896 2 stride 1792 box 64 64".into(),
        "tensor 0x20000 dtype 9 extents 896 896 2 stride 1792 box 64 64".into(),
        of("gram_wide", 32, 1),
        square(32, 2),
        "done".into(),
        "tensor 0x10000 dtype 9 extents 896 151936 1 stride 1792 box 64 64".into(),
        "tensor 0x30000 dtype 9 extents 896 896 1 stride 1792 box 64 64".into(),
        "tensor 0x20000 dtype 9 extents 896 896 1 stride 1792 box 64 64".into(),
        of("partial_tall", 128, 3),
        launch("sum stream 1 grid 16 block 256 shared 33792 cluster 0 first 0x10000 loads 4"),
        square(16, 4),
        "done".into(),
        "tensor 0x10000 dtype 9 extents 64 384 1 stride 128 box 64 64".into(),
        "tensor 0x30000 dtype 9 extents 64 64 1 stride 128 box 64 64".into(),
        "tensor 0x20000 dtype 9 extents 64 64 1 stride 128 box 64 64".into(),
        of("gram_tall", 2, 5),
        square(2, 5),
        "done".into(),
        "done".into(),
    ];
    let lines: Vec<_> = text
        .lines()
        .filter(|line| ["tensor", "launch", "done"].iter().any(|&start| line.starts_with(start)))
        .collect();
    assert_eq!(lines, expected, "{text}");
    let text = printed_by("newton_schulz", &[("FAKE_CAPABILITY", "80")]);
    assert!(text.contains("fake 0") && !text.contains("launch"), "{text}");
}

#[test]
#[ignore = "a test runs it, with a driver each"]
fn diverge() {
    println!();
    let some = at(0x10_000);
    let arrays = kl_divergence::Arrays {
        student: at(0x20_000).cast(),
        teacher: some.cast(),
        factors: some.cast(),
        first: some.cast(),
        losses: some.cast(),
        dlogits: some,
    };
    for (rows, vocab) in [(3, 128_256), (1024, 32_000), (0, 32_000), (2, 262_144)] {
        let divergence = KlDivergence::new(DType::Bf16, rows, rows, vocab, 1.0).unwrap();
        // SAFETY: the driver that plays here touches no memory.
        match unsafe { divergence.run(at(1), arrays) } {
            Ok(()) => println!("done"),
            Err(error) => println!("{error}"),
        }
    }
}

#[test]
fn clusters_take_rows_by_turns() {
    let text = printed_by("diverge", &[]);
    for line in [
        "launch kl_divergence_bf16_few stream 1 grid 24 block 512 shared 143504 cluster 8 first 0x20000 loads 1",
        "launch kl_divergence_bf16_few stream 1 grid 132 block 512 shared 143504 cluster 2 first 0x20000 loads 1",
        "launch kl_divergence_bf16_few stream 1 grid 32 block 512 shared 143504 cluster 16 first 0x20000 loads 1",
    ] {
        assert!(text.lines().any(|one| one == line), "{line}\n{text}");
    }
    assert_eq!(text.lines().filter(|line| *line == "done").count(), 4, "{text}");
    for (variable, reason) in [
        (("FAKE_CLUSTERS", "0"), "fake 0 has no room for a cluster that holds a row of 128256"),
        (("FAKE_CAPABILITY", "80"), "fake 0 has compute capability 8.0; the kernel of the diverg"),
    ] {
        let text = printed_by("diverge", &[variable]);
        assert!(text.contains(reason) && !text.contains("launch"), "{text}");
    }
}
