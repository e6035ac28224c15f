"""Linear cross-entropy at a temperature: logits of any spread, dtype and option, against float64.

In multiples of what the dense program is off by, whose logits are sums in f32 that nothing rounds.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import Oracle

from pallas_bridge import linear_cross_entropy

# On CPUs a temperature has no pass of its own: test_aux_outputs.py holds it, and other files.
pytestmark = pytest.mark.only("cuda", "where it is in products that have the cross-entropy in them")

TOKENS, WIDTH, VOCAB = 300, 128, 2008
OPTIONS = {
    "plain": {},
    "smooth": {"label_smoothing": 0.1, "z_loss": 1e-4},
    "capped": {"softcap": 15.0, "z_loss": 1e-4},
    "both": {"label_smoothing": 0.1, "softcap": 15.0},
}
# Norms of gradients' errors in multiples of the dense one's. Calls add f32 in another order.
BOUNDS = {"bfloat16": 1.5, "float16": 1.5, "float32": 3.0}


# Products of f32 have no cross-entropy in them, and XLA takes long to choose the dense program's.
@pytest.mark.parametrize(
    ("dtype", "std"),
    [
        *((dtype, std) for dtype in ("bfloat16", "float16") for std in (0.5, 8.0, 64.0)),
        ("float32", 8.0),
    ],
)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_any_spread(
    rng: np.random.Generator, dtype: str, reduction: str, options: dict[str, Any], std: float
) -> None:
    axis, has_bias = rng.integers(2), rng.integers(2)
    temperature = float(rng.choice([0.01, 0.3, 0.7, 1.6, 30.0], p=[0.1, 0.2, 0.3, 0.3, 0.1]))
    print(f"vocab_axis {axis}, bias {has_bias}, temperature {temperature}")
    options = {"temperature": temperature, "ignore_index": 7, **options}
    hidden = jnp.asarray(rng.normal(size=(TOKENS, WIDTH)), dtype)
    weight = jnp.asarray(rng.normal(size=(VOCAB, WIDTH)) * (std / WIDTH**0.5), dtype)
    bias = jnp.asarray(rng.normal(size=VOCAB) * std / 4, jnp.float32) if has_bias else None
    labels = rng.integers(0, VOCAB, TOKENS)
    labels[rng.random(TOKENS) < 0.1] = 7
    factors = jnp.asarray(rng.uniform(0.5, 2, TOKENS), jnp.float32)

    x, w = np.asarray(hidden, np.float64), np.asarray(weight, np.float64)
    logits = x @ w.T + (0 if bias is None else np.asarray(bias, np.float64))
    oracle = Oracle(logits, labels, **options)
    dlogits = oracle.gradient(np.where(labels == 7, 0, np.asarray(factors, np.float64)))
    of_weight = dlogits.T @ x
    expected = [dlogits @ w, of_weight.T if axis else of_weight, dlogits.sum(0)]
    weight = weight.T if axis else weight

    def of(**how: Any) -> Any:
        f = partial(linear_cross_entropy, labels=labels, vocab_axis=int(axis), **options, **how)

        @jax.jit
        def both(x: Any, w: Any, b: Any) -> Any:
            def total(x: Any, w: Any, b: Any) -> Any:
                return f(x, w, bias=b, reduction=reduction, weights=factors).sum()

            losses = f(x, w, bias=b, reduction="none")
            return losses, jax.grad(total, (0, 1) if b is None else (0, 1, 2))(x, w, b)

        return both(hidden, weight, bias)

    (losses, gradients), (dense_losses, dense) = of(), of(implementation="reference")
    wanted = oracle.__dict__["loss"]
    off, other = (np.abs(np.asarray(one) - wanted).max() for one in (losses, dense_losses))
    # What both have of f32 grows with the logits over the temperature.
    unit = 2.0**-23 * max(1.0, np.abs(oracle.__dict__["z"]).max())
    assert off <= 1.5 * other + 4 * unit + 2e-5
    for actual, other_one, want in zip(gradients[:2], dense, expected, strict=False):
        norms = [np.linalg.norm(np.asarray(one, np.float64) - want) for one in (actual, other_one)]
        assert norms[0] <= BOUNDS[dtype] * norms[1] + 2 * unit * np.linalg.norm(want)
    if bias is not None:
        # It may be summed of what is an operand, rounded as it is.
        norms = [np.linalg.norm(np.asarray(one[2]) - expected[2]) for one in (gradients, dense)]
        terms = np.linalg.norm(np.abs(dlogits).sum(0))
        of_terms = float(jnp.finfo(dtype).eps) * terms
        assert norms[0] <= BOUNDS[dtype] * norms[1] + of_terms
