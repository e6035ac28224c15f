"""Steps that make parameters: XLA's program, or the library's kernels.

Arrays with state in 8 bits or all in float32, and parameters and gradients of one dtype each, are
one call, whose operands are scalars, a word for each parameter, and then each parameter's arrays.
The call writes parameters and state in the place of these; crates/xentile-xla/src/optimizers.rs
declares it.
"""

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.interpreters import xla as xla_interpreter

from .. import library
from ..operation import Implementation
from . import formula
from .formula import Rule, Scalars
from .trees import Leaf, is_quantized

Array = jax.Array
# A gradient, a parameter, its moments, and its place in the tree.
Arrays = tuple[Array, Array, list[Any], Leaf]
Result = tuple[Array, list[Any]]

# By rule, and whether state is in 8 bits.
TARGETS: dict[tuple[Rule, bool], str] = {
    ("adam", False): "xentile_adamw",
    ("adam", True): "xentile_adamw_8bit",
    ("lion", True): "xentile_lion_8bit",
}
# Arrays of a call, which looks through all of them for each that it takes.
ARRAYS_OF_CPU_CALL = 16
# Of parameters and of gradients.
KERNEL_DTYPES = tuple(map(np.dtype, (jnp.float32, jnp.bfloat16)))
# The number of words of scalars.
WORDS = 16


def run(
    rule: Rule,
    scalars: Scalars,
    arrays: list[Arrays],
    rounds: bool,
    implementation: Implementation | None,
) -> list[Result]:
    """Returns each parameter and its moments after a step."""
    groups: dict[Any, list[int]] = defaultdict(list)
    for index, (grad, param, moments, _) in enumerate(arrays):
        target = TARGETS.get((rule, is_quantized(moments[0])))
        has_kernel = target is not None and param.size > 0
        has_kernel &= {param.dtype, grad.dtype} <= {*KERNEL_DTYPES}
        kind = (target, param.dtype, grad.dtype) if has_kernel else None
        groups[kind].append(index)
    found: list[Any] = [None] * len(arrays)
    for kind, indices in groups.items():
        members = [arrays[index][:3] for index in indices]
        leaves = tuple(arrays[index][3] for index in indices)
        kernels = () if kind is None else _platforms(kind[0], implementation)
        if kernels:
            results = _bind(rule, leaves, rounds, kernels, scalars, members)
        else:
            results = _dense(rule, leaves, rounds, scalars, members)
        for index, result in zip(indices, results, strict=True):
            found[index] = result
    return found


def norm_and_clip(grads: list[Array], max_norm: Any) -> tuple[Array | None, Array]:
    """Returns the global norm of gradients, and what they are multiplied by for `max_norm`.

    Without `max_norm` these are None and 1, and for infinity the norm and 1.
    """
    if max_norm is None:
        return None, jnp.float32(1)
    squares = [jnp.sum(jnp.square(one.astype(jnp.float32))) for one in grads]
    norm = jnp.sqrt(sum(squares, jnp.float32(0)))
    return norm, formula.clipping(norm, max_norm)


def _platforms(target: str, implementation: Implementation | None) -> tuple[str, ...]:
    """Returns the platforms whose programs take a target's kernel.

    Unless it is named they do where there is one device: XLA would gather sharded arrays for it.

    Raises:
        LibraryError: it is named, and there is no library, or on a GPU none with kernels for GPUs.
    """
    if implementation == "reference":
        return ()
    if implementation == "custom_call":
        loaded = library.require()
        found = loaded.platforms_of(target)
        is_missing = jax.default_backend() == "gpu" and "cuda" not in found
        if is_missing and target == TARGETS["adam", True]:
            raise library.LibraryError(
                f'implementation is "custom_call", and {loaded.path} has no kernels for NVIDIA '
                f'GPUs: {library.BUILDS["cuda"]}; "reference" runs everywhere'
            )
        return tuple(sorted(found))
    return tuple(one for one in ("cpu", "cuda") if library.has(one, target) and is_single(one))


def is_single(platform: str) -> bool:
    """Returns whether there is one device of a platform."""
    try:
        return len(jax.devices(platform)) == 1
    except RuntimeError:
        return False


def _dense(
    rule: Rule, leaves: tuple[Leaf, ...], rounds: bool, scalars: Scalars, arrays: Any
) -> list[Result]:
    found = []
    for (grad, param, moments), leaf in zip(arrays, leaves, strict=True):
        change, new = formula.update(rule, scalars, grad, param, moments, leaf)
        found.append((formula.apply(scalars, param, change, leaf, rounds=rounds), new))
    return found


def _words(scalars: Scalars, rounds: bool) -> Array:
    """Returns the scalars as int32 of the same bits, and whether parameters are rounded."""
    cast = partial(jax.lax.bitcast_convert_type, new_dtype=jnp.int32)
    words = [cast(one) for one in scalars]
    rest = [jnp.int32(rounds)] + [jnp.int32(0)] * (WORDS - len(words) - 1)
    return jnp.stack([*words, *rest])


def _bind(
    rule: Rule,
    leaves: tuple[Leaf, ...],
    rounds: bool,
    kernels: tuple[str, ...],
    scalars: Scalars,
    arrays: Any,
) -> list[Result]:
    """Returns parameters and moments by a call that has a kernel on some platforms."""
    operands, structure = jax.tree.flatten((scalars, arrays))
    results = STEP.bind(
        *operands, rule=rule, leaves=leaves, rounds=rounds, kernels=kernels, structure=structure
    )
    after: Any = jax.tree.structure([(param, new) for _, param, new in arrays])
    found: list[Result] = jax.tree.unflatten(after, results)
    return found


def _outputs(operands: Any, structure: Any) -> list[Any]:
    """Returns the operands that a step overwrites: parameters and moments, in order."""
    _, arrays = jax.tree.unflatten(structure, operands)
    return jax.tree.leaves([(param, moments) for _, param, moments in arrays])


def _lower(
    ctx: Any,
    *operands: Any,
    rule: Rule,
    leaves: Any,
    rounds: bool,
    kernels: tuple[str, ...],
    structure: Any,
) -> Any:
    platforms = tuple(ctx.module_context.platforms)
    step: Any = _dense
    if len(platforms) == 1 and platforms[0] in kernels:
        step = _kernels if platforms == ("cpu",) else _kernel
    flat = _flat(partial(step, rule), leaves, rounds, structure)
    return mlir.lower_fun(flat, multiple_results=True)(ctx, *operands)


def _flat(step: Any, leaves: Any, rounds: bool, structure: Any) -> Callable[..., list[Any]]:
    """Returns a step as a function of the operands of the primitive."""

    def flat(*arrays: Any) -> list[Any]:
        scalars, of = jax.tree.unflatten(structure, arrays)
        return jax.tree.leaves(step(leaves, rounds, scalars, of))

    return flat


def _reference(rule: Rule, leaves: Any, rounds: bool, structure: Any, **_: Any) -> Any:
    """Returns XLA's program of the primitive, for all but kernels."""
    return _flat(partial(_dense, rule), leaves, rounds, structure)


def _batch(operands: Any, axes: Any, **params: Any) -> Any:
    """Maps XLA's program: many steps at once are no program of training."""
    results = jax.vmap(_reference(**params), axes)(*operands)
    return results, [0] * len(results)


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    """Differentiates XLA's program."""
    tangents = tuple(map(ad.instantiate_zeros, tangents))
    return jax.jvp(_reference(**params), tuple(primals), tangents)


# One rule for all platforms: under a conditional over the platform no result could take the memory
# of an operand.
STEP = Primitive("xentile_adamw")
STEP.multiple_results = True
STEP.def_impl(partial(xla_interpreter.apply_primitive, STEP))
STEP.def_abstract_eval(lambda *avals, structure, **_: _outputs(avals, structure))
mlir.register_lowering(STEP, _lower)
batching.primitive_batchers[STEP] = _batch
ad.primitive_jvps[STEP] = _jvp


def _kernels(
    rule: Rule, leaves: tuple[Leaf, ...], rounds: bool, scalars: Scalars, arrays: Any
) -> list[Result]:
    """Returns the results of calls of a few arrays each."""
    found = []
    for start in range(0, len(leaves), ARRAYS_OF_CPU_CALL):
        some = slice(start, start + ARRAYS_OF_CPU_CALL)
        found += _kernel(rule, leaves[some], rounds, scalars, arrays[some])
    return found


def _kernel(
    rule: Rule, leaves: tuple[Leaf, ...], rounds: bool, scalars: Scalars, arrays: Any
) -> list[Result]:
    # Twice the number of a parameter, and whether it decays.
    named = np.array([2 * leaf.number + leaf.decays for leaf in leaves], np.int32)
    operands: list[Array] = [_words(scalars, rounds), jnp.asarray(named)]
    results: list[Any] = []
    aliases: dict[int, int] = {}
    for grad, param, moments in arrays:
        operands.append(grad)
        for one in [param, *jax.tree.leaves(moments)]:
            aliases[len(operands)] = len(results)
            operands.append(one)
            results.append(jax.ShapeDtypeStruct(one.shape, one.dtype))
    target = TARGETS[rule, is_quantized(arrays[0][2][0])]
    flat = iter(jax.ffi.ffi_call(target, results, input_output_aliases=aliases)(*operands))
    after: Any = jax.tree.structure([(param, moments) for _, param, moments in arrays])
    found: list[Result] = jax.tree.unflatten(after, flat)
    return found
