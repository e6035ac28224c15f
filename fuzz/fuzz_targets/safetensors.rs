//! Inputs from `.safetensors` files.

#![no_main]

use libfuzzer_sys::fuzz_target;
use xentile::operation::{Problem, TileExtents};
use xentile::{DType, operations};
use xentile_tools::input::file::Tensors;

fuzz_target!(|bytes: &[u8]| {
    let Ok(tensors) = Tensors::from_bytes(bytes) else { return };
    for operation in operations() {
        let Ok(found) = operation.stored_dims(&tensors) else { continue };
        let [batch, seq_len] = found.sequences;
        let used = seq_len.saturating_sub(usize::from(operation.predicts_next()));
        let Some(tokens) = batch.checked_mul(used) else { continue };
        let mut dims = found.dims;
        dims.push(("T", tokens));
        let options = operation.options().iter().map(|option| (option.name, option.default));
        let problem = Problem {
            dims,
            dtype: DType::F32,
            options: options.collect(),
            tile: TileExtents::default(),
            cotangent: 1.0,
        };
        // A product may be far larger than its factors; the binaries ask this too before they make it.
        if operation.stored_bytes(&problem, &tensors).is_none_or(|needed| needed > 1 << 20) {
            continue;
        }
        // What is refused is of another dtype.
        let Ok(inputs) = operation.stored(&problem, &tensors) else { continue };
        for spec in operation.signature(&problem, operation.passes()[0]).operands {
            // What files do not have is drawn.
            let Some(array) = inputs.get(spec.name) else { continue };
            assert_eq!(array.len(), spec.extents(&problem).iter().product::<usize>());
        }
    }
});
