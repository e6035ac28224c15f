"""Unknown keywords: what functions answer, and that they look as they did."""

import inspect
import pickle
from typing import Any

import jax.numpy as jnp
import pytest
from pallas_bridge._src import keywords

import pallas_bridge
from pallas_bridge import generation, losses, nn, optax

FUNCTIONS = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in (pallas_bridge, generation, losses, nn, optax)
    for name in module.__all__
    if inspect.isfunction(getattr(module, name))
}
# They take nothing.
WITHOUT_ARGUMENTS = {f"pallas_bridge.{name}" for name in ("get_include", "get_library", "info")}


@pytest.mark.parametrize("name", sorted(FUNCTIONS.keys() - WITHOUT_ARGUMENTS))
def test_every_function_answers(name: str) -> None:
    function = FUNCTIONS[name]
    message = rf"{function.__name__}\(\) got an unexpected keyword argument 'quux'; it takes \w+"
    with pytest.raises(TypeError, match=message):
        function(quux=1)
    first = next(iter(inspect.signature(function).parameters))
    assert first not in ("arguments", "args")
    assert inspect.getdoc(function)
    assert pickle.loads(pickle.dumps(function)) is function


@pytest.mark.parametrize(
    ("name", "keyword", "answer"),
    [
        ("flash_attention", "is_causal", "did you mean causal?"),
        ("flash_attention", "mask", "pallas_bridge.nn.dot_product_attention takes mask"),
        ("flash_attention", "window_size", "did you mean window?"),
        ("flash_attention", "sliding_window", "window=(sliding_window - 1, 0)"),
        ("flash_attention", "softmax_scale", "did you mean scale?"),
        ("flash_attention", "cu_seqlens_k", "did you mean kv_cumulative?"),
        ("rope", "theta", "did you mean base?"),
        ("rope", "position_ids", "did you mean positions?"),
        ("rms_norm", "epsilon", "did you mean eps?"),
        ("rms_norm", "scale", "did you mean weight?"),
        ("rms_norm_fp8", "epsilon", "did you mean eps?"),
        ("swiglu_fp8", "fp8_dtype", "did you mean dtype?"),
        ("layer_norm", "beta", "did you mean bias?"),
        ("nn.rms_norm", "eps", "did you mean epsilon?"),
        ("nn.dot_product_attention", "causal", "did you mean is_causal?"),
        ("cross_entropy", "mask", "did you mean weights?"),
        ("cross_entropy", "labelsmoothing", "did you mean label_smoothing?"),
        ("linear_cross_entropy", "lse_square_scale", "did you mean z_loss?"),
        ("linear_cross_entropy", "targets", "did you mean labels?"),
        ("losses.ppo_policy_loss", "eps_clip", "did you mean clip?"),
        ("losses.dpo_loss", "reference_chosen_logps", "did you mean ref_chosen?"),
        ("generation.generate", "eos_token_id", "did you mean stop_tokens?"),
        ("optax.softmax_cross_entropy_with_integer_labels", "mask", "did you mean where?"),
        ("optax.adamw", "lr", "did you mean learning_rate?"),
        ("optax.adamw8bit", "max_grad_norm", "did you mean max_norm?"),
    ],
)
def test_names_of_other_libraries(name: str, keyword: str, answer: str) -> None:
    with pytest.raises(TypeError) as raised:
        FUNCTIONS[f"pallas_bridge.{name}"](**{keyword: 1})
    assert f"unexpected keyword argument '{keyword}'" in str(raised.value)
    assert answer in str(raised.value)


def test_known_keywords_pass() -> None:
    x: Any = jnp.ones((2, 8))
    pallas_bridge.rms_norm(x, weight=None, eps=0.1)
    pallas_bridge.rms_norm_fp8(x, jnp.ones(8), granularity="row")
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'weight'"):
        pallas_bridge.rms_norm(x)  # type: ignore[call-overload]


def test_table_names_arguments_of_ours() -> None:
    ours = {name for one in FUNCTIONS.values() for name in inspect.signature(one).parameters}
    assert keywords.OTHERS.keys() <= ours
    assert keywords.ADVICE.keys() <= {one.__name__ for one in FUNCTIONS.values()}
