//! Cross-entropy by the custom calls of `libxentile_xla`; docs/internals/custom-calls.md says what each takes.

use super::{Outputs, Problem, logits, tokens};
use crate::stablehlo::{Attribute, Builder, Value};

/// The attributes of a call; `every_token` where it has that.
fn attributes(problem: &Problem, every_token: Option<bool>) -> Vec<(&'static str, Attribute)> {
    let options = &problem.options;
    let extent = |extent: Option<usize>| {
        extent.map(|extent| Attribute::S64(i64::try_from(extent).unwrap_or(i64::MAX)))
    };
    let all = [
        ("ignore_index", Some(Attribute::S64(options.ignore_index))),
        ("label_smoothing", Some(Attribute::F64(options.label_smoothing))),
        ("z_loss", Some(Attribute::F64(options.z_loss))),
        ("softcap", options.softcap.map(Attribute::F64)),
        ("temperature", options.is_tempered().then_some(Attribute::F64(options.temperature))),
        ("time_block", extent(problem.time_block)),
        ("block_size", extent(problem.block_size)),
        ("every_token", every_token.map(Attribute::Bool)),
    ];
    all.into_iter().filter_map(|(name, value)| Some((name, value?))).collect()
}

/// The per-token outputs, and what rounding lse lost. With `every_token` also those of ignored
/// tokens.
pub(super) fn forward(b: &mut Builder, problem: &Problem, every_token: bool) -> (Outputs, Value) {
    let results = b.custom_call(
        "xentile_cross_entropy_forward",
        &[&b.argument(0), &b.argument(1)],
        &attributes(problem, Some(every_token)),
        &std::array::from_fn::<_, 4, _>(|_| tokens(problem)),
    );
    let [loss, logps, lse, lse_low] = results.try_into().expect("four results were asked for");
    (Outputs { loss, logps, lse }, lse_low)
}

/// The loss of each token, and dlogits for the cotangents `dloss` of these losses.
pub(super) fn fused(b: &mut Builder, problem: &Problem, dloss: &Value) -> (Value, Value) {
    let (tokens, logits) = (tokens(problem), logits(problem));
    let results = b.custom_call(
        "xentile_cross_entropy_fused",
        &[&b.argument(0), &b.argument(1), dloss],
        &attributes(problem, Some(false)),
        &[tokens.clone(), tokens.clone(), tokens, logits],
    );
    let [loss, _, _, dlogits] = results.try_into().expect("four results were asked for");
    (loss, dlogits)
}

/// The per-token outputs, and dlogits for cotangents of loss, logps and lse.
pub(super) fn recomputed(
    b: &mut Builder,
    problem: &Problem,
    [g, h, k]: [&Value; 3],
) -> (Outputs, Value) {
    let (outputs, lse_low) = forward(b, problem, true);
    let results = b.custom_call(
        "xentile_cross_entropy_backward",
        &[&b.argument(0), &b.argument(1), &outputs.lse, &lse_low, g, h, k],
        &attributes(problem, None),
        &[logits(problem)],
    );
    let [dlogits] = results.try_into().expect("one result was asked for");
    (outputs, dlogits)
}
