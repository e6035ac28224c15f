"""Programs of operations for tools that run no Python: all results and gradients.

`EXPORTS` has them by operation. [T] are the tokens of a config, other dims its own keys.

- activation: x [T, F], or [T, 2F] where it packs two arrays, dy [T, F]; gives y [T, F], dx.
- rms_norm: x [T, D], weight [D], residual, dy, dsum; gives y, sum, rstd [T], dx, dweight.
- layer_norm: x [T, D], weight [D], bias [D], dy; gives y, mean [T], rstd [T], dx, dweight, dbias.
- rope: x [T, H, D], positions [T], dy; gives y, dx.
- flash_attention: q [H, T, D], k and v [J, K, D], sinks [H], texts, do, dlse [H, T]; gives o, lse,
  dq, dk, dv, dsinks.
- linear_attention: q and k [T, H, D], v [T, J, E], g [T, J], do; gives o, dq, dk, dv, dg.
- gated_delta_rule: the same with b [T, J] behind g, and db behind dg.
- fp8_quantize: x [T, D]; gives values, scales, and those of the transposed copy if asked for.
- rms_norm_fp8: x [T, D], weight [D], residual; gives those of the norm, and the sum.
- swiglu_fp8: x [T, 2F], which packs gate and up; gives those of y [T, F].
- adamw, adamw8bit, lion8bit, muon: as `optimizers.exported` has them.

Residual, bias and sinks, and what follows from them, are there if the config has them; dx is the
residual's gradient too. Packed texts with as many keys as queries have segment ids [T]; others the
first key that each query sees, and the one behind the last, [T] each. `losses.exported` has
cross_entropy and linear_cross_entropy. An operation that is not here has `EXPORTS` in its `api`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

import jax
import jax.numpy as jnp

from .activation import custom_call as activation
from .activation.options import Kind
from .activation.options import Options as ActivationOptions
from .checks import check_float32
from .exporting import (
    DTYPES,
    Cell,
    ConfigError,
    Exports,
    Program,
    check_extent,
    checked,
    flag,
    tokens_of,
    weight_dtype_of,
)
from .flash_attention import custom_call as flash_attention
from .flash_attention.options import check_options as attention_options
from .flash_attention.options import ranges
from .fp8_quantize.api import fp8_quantize, rms_norm_fp8, swiglu_fp8
from .linear_attention.api import gated_delta_rule, linear_attention
from .losses import exported as losses
from .norm.api import layer_norm, rms_norm
from .optimizers.exported import EXPORTS as OPTIMIZERS
from .rope.api import rope

FORMATS = {"f8e4m3fn": jnp.float8_e4m3fn, "f8e5m2": jnp.float8_e5m2}
LAYOUTS = ("single", "halves", "interleaved")
Shape = jax.ShapeDtypeStruct


def _layout(config: Mapping[str, Any]) -> str:
    layout = config.get("layout") or "halves"
    if layout not in LAYOUTS:
        raise ConfigError(f"layout is {layout!r}; it must be one of {', '.join(LAYOUTS)}")
    return str(layout)


def _activation(cell: Cell, given: dict[str, Any]) -> Program:
    mlp, layout = cell.settings.mlp, cell.settings.layout
    kind = given.pop("kind", "silu")
    if kind not in get_args(Kind):
        raise ConfigError(
            f"options.kind is {kind!r}; it must be one of {', '.join(get_args(Kind))}"
        )
    for name, value in given.items():
        given[name] = check_float32(name, value, is_positive=name != "up_offset")
    if given.get("alpha", 1.0) != 1 and kind != "silu":
        raise ConfigError(f"options.alpha is {given['alpha']}; it must be 1 where kind is not silu")
    if layout == "single" and ("limit" in given or given.get("up_offset")):
        raise ConfigError("options.limit or up_offset is set; layout single has no gate")
    options = ActivationOptions(kind, layout, implementation=cell.implementation, **given)

    def forward_and_backward(x: Any, dy: Any) -> Any:
        y, vjp = jax.vjp(lambda x: activation.activation(options, x), x)
        return y, *vjp(dy)

    packs = 1 if layout == "single" else 2
    x, dy = (Shape((cell.tokens, columns), DTYPES[cell.dtype]) for columns in (mlp * packs, mlp))
    return Program("forward_and_backward", forward_and_backward, [x, dy])


def _norm(cell: Cell, options: dict[str, Any]) -> Program:
    arrays, is_layer = _norm_arrays(cell), cell.op == "layer_norm"
    outputs = 1 if is_layer else len(arrays) - 1
    options["implementation"] = cell.implementation

    def norm(x: Any, weight: Any, more: Any = None) -> Any:
        if is_layer:
            found = layer_norm(x, weight, more, return_statistics=True, **options)
        else:
            found = rms_norm(x, weight, residual=more, return_rstd=True, **options)
        return tuple(found[:outputs]), found[outputs:]

    def forward_and_backward(*arguments: Any) -> Any:
        found, vjp, statistics = jax.vjp(norm, *arguments[: len(arrays)], has_aux=True)
        gradients = vjp(arguments[len(arrays) :])
        # The gradient of a residual is dx.
        return *found, *statistics, *(gradients if is_layer else gradients[:2])

    arguments = [*arrays, *[arrays[0]] * outputs]
    return Program("forward_and_backward", forward_and_backward, arguments)


def _norm_arrays(cell: Cell) -> list[Shape]:
    """Returns x, weight, and a residual or bias if any."""
    hidden = cell.settings.hidden
    rows = Shape((cell.tokens, hidden), DTYPES[cell.dtype])
    columns = Shape((hidden,), DTYPES[cell.settings.weight_dtype])
    has_residual = getattr(cell.settings, "residual", False)
    has_bias = getattr(cell.settings, "bias", False)
    return [rows, columns, *[rows] * has_residual, *[columns] * has_bias]


def _rope(cell: Cell, given: dict[str, Any]) -> Program:
    heads, head_dim = cell.settings.heads, cell.settings.head_dim
    given.setdefault("rotary_dim", head_dim // 2 * 2)
    given["implementation"] = cell.implementation

    def forward_and_backward(x: Any, positions: Any, dy: Any) -> Any:
        def f(x: Any) -> Any:
            return rope(x, positions=positions, **given)

        y, vjp = jax.vjp(f, x)
        return y, *vjp(dy)

    rows = Shape((cell.tokens, heads, head_dim), DTYPES[cell.dtype])
    positions = Shape((cell.tokens,), jnp.int32)
    arguments = [rows, positions, rows]
    return checked(Program("forward_and_backward", forward_and_backward, arguments))


def _keys(config: Mapping[str, Any]) -> int:
    keys = config.get("keys")
    keys = tokens_of(config) if keys is None else keys
    check_extent("keys", keys)
    return int(keys)


def _kv_heads(config: Mapping[str, Any]) -> int:
    heads, kv_heads = int(config["heads"]), config.get("kv_heads")
    check_extent("kv_heads", kv_heads)
    if heads % int(kv_heads or 0):
        raise ConfigError(f"kv_heads is {kv_heads}; it must divide heads, which is {heads}")
    return int(kv_heads or 0)


def _flash_attention(cell: Cell, given: dict[str, Any]) -> Program:
    heads, head_dim, kv_heads = cell.settings.heads, cell.settings.head_dim, cell.settings.kv_heads
    keys, has_sinks = cell.settings.keys, cell.settings.sinks
    options = attention_options(
        scale=given.get("scale"),
        softcap=given.get("softcap"),
        causal=given.get("causal", True),
        window=(given.get("window_before"), given.get("window_after")),
        width=head_dim,
    )
    tokens, is_packed = cell.tokens, cell.settings.segments is not None
    has_one_length = keys == tokens
    options = replace(
        options,
        has_sinks=has_sinks,
        has_segments=is_packed and has_one_length,
        is_own_segment=is_packed and has_one_length,
        gives_lse=True,
        implementation=cell.implementation,
    )
    head_shape = (kv_heads, heads // kv_heads)

    def forward_and_backward(q: Any, k: Any, v: Any, *more: Any) -> Any:
        *beside, do, dlse = more
        sinks, texts = beside[: int(has_sinks)], beside[int(has_sinks) :]
        if is_packed and not has_one_length:
            seen, ids = jnp.stack(texts, -1), []
        else:
            seen = ranges(options, tokens, keys, None, None)
            ids = [jnp.broadcast_to(one, (kv_heads, tokens)) for one in texts]

        def function(q: Any, k: Any, v: Any, *sinks: Any) -> Any:
            grouped = q.reshape(*head_shape, tokens, head_dim)
            grouped_sinks = [one.reshape(head_shape) for one in sinks]
            every = jnp.broadcast_to(seen, (kv_heads, *seen.shape))
            arrays = (grouped, k, v, every, *ids, *ids, *grouped_sinks)
            o, lse = flash_attention.attention(options, *arrays)
            return o.reshape(q.shape), lse.reshape(heads, tokens)

        found, vjp = jax.vjp(function, q, k, v, *sinks)
        return *found, *vjp((do, dlse))

    q = Shape((heads, tokens, head_dim), DTYPES[cell.dtype])
    k = Shape((kv_heads, keys, head_dim), DTYPES[cell.dtype])
    rows = Shape((heads, tokens), jnp.float32)
    sinks = [Shape((heads,), jnp.float32)] if has_sinks else []
    texts = [Shape((tokens,), jnp.int32)] * (is_packed * (1 if has_one_length else 2))
    arguments = [q, k, k, *sinks, *texts, q, rows]
    return Program("forward_and_backward", forward_and_backward, arguments)


def _key_heads(config: Mapping[str, Any]) -> int:
    value_heads = int(config["value_heads"])
    heads = config.get("heads", value_heads)
    check_extent("heads", heads)
    if value_heads % heads:
        raise ConfigError(f"heads is {heads}; it must divide value_heads, which is {value_heads}")
    return int(heads)


def _value_dim(config: Mapping[str, Any]) -> int:
    columns = config.get("value_dim", config["head_dim"])
    check_extent("value_dim", columns)
    return int(columns)


def _linear_attention(cell: Cell, given: dict[str, Any]) -> Program:
    settings, is_delta = cell.settings, cell.op == "gated_delta_rule"
    given["implementation"] = cell.implementation

    def function(q: Any, k: Any, v: Any, g: Any, b: Any = None) -> Any:
        if is_delta:
            return gated_delta_rule(q, k, v, b, g, **given)
        return linear_attention(q, k, v, g, **given)

    def forward_and_backward(*arguments: Any) -> Any:
        *arrays, do = (one[None] for one in arguments)
        o, vjp = jax.vjp(function, *arrays)
        return tuple(one[0] for one in (o, *vjp(do)))

    shapes = ((settings.heads, settings.head_dim), (settings.value_heads, settings.value_dim))
    q, v = (Shape((cell.tokens, *shape), DTYPES[cell.dtype]) for shape in shapes)
    numbers = Shape((cell.tokens, settings.value_heads), jnp.float32)
    arguments = [q, q, v, *[numbers] * (1 + is_delta), v]
    return checked(Program("forward_and_backward", forward_and_backward, arguments))


def _fp8(
    function: Callable[..., Any],
    arguments: Sequence[Shape],
    cell: Cell,
    options: dict[str, Any],
) -> Program:
    """Returns the program of a function that quantises: all that it gives of its arguments."""
    name = options.pop("format", "f8e4m3fn")
    if name not in FORMATS:
        raise ConfigError(f"options.format is {name!r}; it must be one of {', '.join(FORMATS)}")
    options |= {"dtype": FORMATS[name], "implementation": cell.implementation}

    def forward(*arrays: Any) -> Any:
        return tuple(jax.tree.leaves(function(*arrays, **options)))

    return checked(Program("forward", forward, arguments))


def _fp8_quantize(cell: Cell, options: dict[str, Any]) -> Program:
    rows = Shape((cell.tokens, cell.settings.hidden), DTYPES[cell.dtype])
    return _fp8(fp8_quantize, [rows], cell, options)


def _swiglu_fp8(cell: Cell, options: dict[str, Any]) -> Program:
    x = Shape((cell.tokens, 2 * cell.settings.mlp), DTYPES[cell.dtype])
    return _fp8(swiglu_fp8, [x], cell, options)


def _rms_norm_fp8(cell: Cell, options: dict[str, Any]) -> Program:
    def normed(x: Any, weight: Any, residual: Any = None, **options: Any) -> Any:
        return rms_norm_fp8(x, weight, residual=residual, **options)

    return _fp8(normed, _norm_arrays(cell), cell, options)


GATE = ("alpha", "limit", "up_offset")
NORM = ("eps", "zero_centred")
QUANTIZATION = ("granularity", "block_size", "power_of_two", "format", "transposed")
RMS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "weight_dtype": weight_dtype_of,
    "residual": flag("residual"),
}
STATES: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "heads": _key_heads,
    "value_dim": _value_dim,
}
EXPORTS: Mapping[str, Exports | losses.LossExports] = {
    **losses.EXPORTS,
    "activation": Exports(_activation, ("kind", *GATE), ("mlp",), {"layout": _layout}),
    "rms_norm": Exports(_norm, NORM, ("hidden",), RMS),
    "layer_norm": Exports(
        _norm, ("eps",), ("hidden",), {"weight_dtype": weight_dtype_of, "bias": flag("bias")}
    ),
    "rope": Exports(_rope, ("base", "interleaved", "rotary_dim"), ("heads", "head_dim")),
    "flash_attention": Exports(
        _flash_attention,
        ("causal", "window_before", "window_after", "softcap", "scale"),
        ("heads", "head_dim"),
        {
            "kv_heads": _kv_heads,
            "keys": _keys,
            "sinks": flag("sinks"),
            "segments": lambda config: config.get("segments"),
        },
    ),
    "linear_attention": Exports(_linear_attention, ("scale",), ("value_heads", "head_dim"), STATES),
    "gated_delta_rule": Exports(_linear_attention, ("scale",), ("value_heads", "head_dim"), STATES),
    "fp8_quantize": Exports(_fp8_quantize, QUANTIZATION, ("hidden",)),
    "rms_norm_fp8": Exports(_rms_norm_fp8, (*NORM, *QUANTIZATION), ("hidden",), RMS),
    "swiglu_fp8": Exports(_swiglu_fp8, ("interleaved", *GATE, *QUANTIZATION), ("mlp",)),
    **OPTIMIZERS,
}
