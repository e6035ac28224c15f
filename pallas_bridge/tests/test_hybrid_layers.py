"""Layers of Mamba-2 and gated DeltaNet of examples/train, against those of transformers.

On the same random weights in float32: outputs, and gradients of the input and of all weights. What
needs torch runs in an environment that scripts/tiers/frameworks.sh makes.
"""

import inspect
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

pytestmark = [pytest.mark.needs(name) for name in ("torch", "transformers", "flax", "train")]

WIDTH, BATCH, LENGTH = 32, 2, 83
ALLOWED = 1e-4


def randomise(module: Any, rng: np.random.Generator) -> None:
    """Gives all weights random numbers; rates of decays by logarithms, steps by biases."""
    import torch

    with torch.no_grad():
        for name, weight in module.named_parameters():
            low, high = {"A_log": (-2.0, 2.0), "dt_bias": (-4.0, 1.0)}.get(name, (-1.0, 1.0))
            scale = 1.7 * weight.shape[-1] ** -0.5 if weight.ndim > 1 else 1.0
            weight.copy_(torch.asarray(scale * rng.uniform(low, high, tuple(weight.shape))))


def hybrid(**changes: int) -> Any:
    from train.config import Hybrid, Model

    given = {"ssm_heads": 4, "ssm_head_width": 16, "ssm_state": 8, "ssm_groups": 2}
    given |= {"delta_heads": 4, "delta_key_heads": 2, "delta_key_width": 16}
    given |= {"delta_value_width": 8}
    return Model(512, WIDTH, 2, 4, 2, 8, 64, norm_eps=1e-5, hybrid=Hybrid("MD", **given | changes))


def numbers(weight: Any) -> Any:
    return weight.detach().numpy()


def mamba2_weights(of: Any, theirs: dict[str, Any]) -> dict[str, Any]:
    """Weights of `Mamba2Mixer`, or gradients, by the names of ours."""
    inner = of.ssm_heads * of.ssm_head_width
    rows = theirs["in_proj.weight"]
    mixed = len(theirs["conv1d.weight"])
    return {
        "gate": rows[:inner].T,
        "inner": rows[inner : inner + mixed].T,
        "steps": rows[inner + mixed :].T,
        "conv": theirs["conv1d.weight"][:, 0],
        "conv_bias": theirs["conv1d.bias"],
        "dt_bias": theirs["dt_bias"],
        "log_rate": theirs["A_log"],
        "skip": theirs["D"],
        "group_norm": {"weight": theirs["norm.weight"]},
        "out": theirs["out_proj.weight"].T,
    }


def delta_weights(of: Any, theirs: dict[str, Any]) -> dict[str, Any]:
    """Weights of `Qwen3NextGatedDeltaNet`, or gradients: its rows go by heads of keys."""
    heads, keys = of.delta_key_heads, of.delta_key_width
    values = of.delta_heads // heads * of.delta_value_width
    rows = theirs["in_proj_qkvz.weight"].reshape(heads, -1, WIDTH)
    ends = (keys, 2 * keys, 2 * keys + values)
    q, k, v, z = (one.reshape(-1, WIDTH) for one in np.split(rows, ends, axis=1))
    rates = theirs["in_proj_ba.weight"].reshape(heads, 2, -1, WIDTH)
    return {
        "gate": z.T,
        "inner": np.concatenate([q, k, v]).T,
        "rates": rates.swapaxes(0, 1).reshape(-1, WIDTH).T,
        "conv": theirs["conv1d.weight"][:, 0],
        "dt_bias": theirs["dt_bias"],
        "log_rate": theirs["A_log"],
        "norm": {"weight": theirs["norm.weight"]},
        "out": theirs["out_proj.weight"].T,
    }


def layers_of(kind: str, of: Any, kernels: Any) -> tuple[Any, Any, Any]:
    """Theirs, ours, and what renames weights."""
    import transformers
    from flax import nnx
    from train.mixers import GatedDeltaNet, Mamba2
    from train.model import mixer_parts
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer, MambaRMSNormGated
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    dimensions = of.hybrid
    parts = mixer_parts(of, kernels)
    if kind == "mamba2":
        is_by_group = "group_size" in inspect.signature(MambaRMSNormGated.__init__).parameters
        if dimensions.ssm_groups > 1 and not is_by_group:
            pytest.skip(f"transformers {transformers.__version__} normalises all groups as one")
        config = transformers.Mamba2Config(
            hidden_size=WIDTH,
            num_hidden_layers=2,
            num_heads=dimensions.ssm_heads,
            head_dim=dimensions.ssm_head_width,
            expand=dimensions.ssm_heads * dimensions.ssm_head_width // WIDTH,
            state_size=dimensions.ssm_state,
            n_groups=dimensions.ssm_groups,
            layer_norm_epsilon=of.norm_eps,
            chunk_size=32,
        )
        return Mamba2Mixer(config, 0), Mamba2(parts, nnx.Rngs(0)), mamba2_weights
    config = transformers.Qwen3NextConfig(
        hidden_size=WIDTH,
        num_hidden_layers=2,
        linear_num_value_heads=dimensions.delta_heads,
        linear_num_key_heads=dimensions.delta_key_heads,
        linear_key_head_dim=dimensions.delta_key_width,
        linear_value_head_dim=dimensions.delta_value_width,
        rms_norm_eps=of.norm_eps,
    )
    return Qwen3NextGatedDeltaNet(config, 0), GatedDeltaNet(parts, nnx.Rngs(0)), delta_weights


@pytest.mark.parametrize("kernel", ["baseline", "ours"])
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("mamba2", {}),
        ("mamba2", {"ssm_groups": 1}),
        ("gated_delta_net", {}),
        ("gated_delta_net", {"delta_heads": 2, "delta_value_width": 24}),
    ],
)
def test_layers_are_those_of_transformers(
    rng: np.random.Generator, kind: str, changes: dict[str, int], kernel: Any
) -> None:
    import torch
    from flax import nnx
    from train.model import Kernels

    of = hybrid(**changes)
    theirs, ours, renamed = layers_of(kind, of, Kernels(*[kernel] * 5))
    randomise(theirs, rng)
    given = {name: numbers(one) for name, one in theirs.named_parameters()}
    weights = jax.tree.map(jnp.asarray, renamed(of.hybrid, given))
    graph, state = nnx.split(ours)
    shapes = jax.tree.map(jnp.shape, nnx.to_pure_dict(state))
    assert jax.tree.map(jnp.shape, weights) == shapes
    u, cotangent = (rng.standard_normal((BATCH, LENGTH, WIDTH), np.float32) for _ in range(2))

    x = torch.tensor(u, requires_grad=True)
    right = theirs(x)
    right.backward(torch.asarray(cotangent))
    gradients = {name: numbers(one.grad) for name, one in theirs.named_parameters()}
    expected = [numbers(right), numbers(x.grad), renamed(of.hybrid, gradients)]

    @jax.jit
    def run(u: Any, weights: Any) -> Any:
        y, vjp = jax.vjp(lambda u, weights: nnx.merge(graph, weights)(u), u, weights)
        return [y, *vjp(jnp.asarray(cotangent))]

    found, names = jax.tree.flatten_with_path(run(jnp.asarray(u), weights))[0], []
    for (path, one), other in zip(found, jax.tree.leaves(expected), strict=True):
        names.append(jax.tree_util.keystr(path))
        assert np.abs(other).max() > 1e-3, names[-1]
        off = np.linalg.norm(one - other) / np.linalg.norm(other)
        assert off < ALLOWED, (names[-1], off)
    assert len(names) == 2 + len(jax.tree.leaves(weights))
