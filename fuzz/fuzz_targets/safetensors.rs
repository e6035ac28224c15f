//! Inputs from `.safetensors` files.

#![no_main]

use half::{bf16, f16};
use libfuzzer_sys::fuzz_target;
use xentile::DType;
use xentile_tools::config::Shape;
use xentile_tools::input::Tokens;
use xentile_tools::input::file::Tensors;

fuzz_target!(|bytes: &[u8]| {
    let Ok(tensors) = Tensors::from_bytes(bytes) else { return };
    let dtype = tensors.dtype().unwrap_or(DType::F32);
    // A product may be far larger than its factors; the binaries ask this too before they make it.
    if tensors.needed_bytes(dtype).is_none_or(|needed| needed > 1 << 20) {
        return;
    }
    let shape = tensors.shape();
    if let Some(width) = tensors.width() {
        let (hidden, weight, labels) = tensors.hidden::<f32>().unwrap();
        assert_eq!(labels.len(), shape.batch * shape.seq_len.saturating_sub(1));
        assert_eq!(hidden.len(), labels.len() * width);
        assert_eq!(weight.len(), shape.vocab * width);
    }
    match dtype {
        DType::F32 => tensors.tokens::<f32>().map(|tokens| check(&tokens, shape)),
        DType::Bf16 => tensors.tokens::<bf16>().map(|tokens| check(&tokens, shape)),
        DType::F16 => tensors.tokens::<f16>().map(|tokens| check(&tokens, shape)),
    }
    .unwrap();
});

/// Every sequence gives its tokens but the last, and each has a row.
fn check<E: Clone>(tokens: &Tokens<'_, E>, shape: Shape) {
    assert_eq!(tokens.vocab, shape.vocab);
    assert_eq!(tokens.labels.len(), shape.batch * shape.seq_len.saturating_sub(1));
    assert_eq!(tokens.logits.len(), tokens.labels.len() * shape.vocab);
}
