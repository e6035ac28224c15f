"""Steps that make parameters: the library's kernel for NVIDIA GPUs, or XLA's program.

Arrays of one kind (dtypes of parameter and gradient, state in float32 or 8 bits) are one call,
whose operands are scalars, a word for each parameter, and then each parameter's arrays. The call
writes parameters and state in the place of these; crates/xentile-xla/src/optimizers.rs declares it.
"""

from collections import defaultdict
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.interpreters import xla as xla_interpreter

from .. import library
from ..operation import Implementation
from . import formula
from .codes import Quantized
from .formula import Rule, Scalars
from .trees import Leaf, is_quantized

Array = jax.Array
# A gradient, a parameter, its moments, and its place in the tree.
Arrays = tuple[Array, Array, list[Any], Leaf]
Result = tuple[Array, list[Any]]

TARGETS = {False: "xentile_adamw", True: "xentile_adamw_8bit"}
# Dtypes of parameters and gradients that kernels take.
KERNEL_DTYPES = tuple(map(np.dtype, (jnp.float32, jnp.bfloat16)))
# The number of words of scalars.
WORDS = 16
SUM_TARGET = "xentile_sum_squares"
# Entries of each partial sum of squares.
TILE = 8192


def check_implementation(name: str, implementation: Implementation | None) -> None:
    """Checks an option.

    Raises:
        ValueError: there is no implementation of that name.
    """
    named = ("reference",) if name == "lion8bit" else ("custom_call", "reference")
    if implementation is not None and implementation not in named:
        raise ValueError(
            f"{name}: implementation is {implementation!r}; it must be one of "
            f"{', '.join(map(repr, named))}, or None"
        )


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
        has_kernel = rule == "adam" and param.size > 0
        has_kernel &= {param.dtype, grad.dtype} <= {*KERNEL_DTYPES}
        kind = (param.dtype, grad.dtype, is_quantized(moments[0])) if has_kernel else None
        groups[kind].append(index)
    uses_kernel = implementation != "reference" and _is_usable(implementation)
    found: list[Any] = [None] * len(arrays)
    for kind, indices in groups.items():
        members = [arrays[index][:3] for index in indices]
        leaves = tuple(arrays[index][3] for index in indices)
        if kind is None or not uses_kernel:
            results = _dense(rule, leaves, rounds, scalars, members)
        else:
            results = _bind(leaves, rounds, scalars, members)
        for index, result in zip(indices, results, strict=True):
            found[index] = result
    return found


def norm_and_clip(
    grads: list[Array], max_norm: Any, implementation: Implementation | None
) -> tuple[Array | None, Array]:
    """Returns the global norm of gradients, and their factor for `max_norm`.

    Without `max_norm` these are None and 1, and for infinity the norm and 1.
    """
    if max_norm is None:
        return None, jnp.float32(1)
    norm = jnp.sqrt(sum_squares(grads, implementation))
    return norm, formula.clipping(norm, max_norm)


def sum_squares(arrays: list[Array], implementation: Implementation | None) -> Array:
    """Returns the sum of squares of all entries, float32; by one kernel for arrays of a dtype."""
    uses_kernel = implementation != "reference" and _is_usable(implementation)
    groups: dict[Any, list[Array]] = defaultdict(list)
    for one in arrays:
        has_kernel = uses_kernel and one.dtype in KERNEL_DTYPES and one.size > 0
        groups[one.dtype if has_kernel else None].append(one)
    rest = _dense_squares(*groups.pop(None, []))
    return sum((SUM.bind(*members)[0] for members in groups.values()), rest)


def _dense_squares(*arrays: Array) -> Array:
    squares = [jnp.sum(jnp.square(one.astype(jnp.float32))) for one in arrays]
    return sum(squares, jnp.float32(0))


def _kernel_squares(*arrays: Array) -> Array:
    count = sum(-(-one.size // TILE) for one in arrays)
    shape = jax.ShapeDtypeStruct((count,), jnp.float32)
    return jnp.sum(jax.ffi.ffi_call(SUM_TARGET, shape)(*arrays))


def _is_usable(implementation: Implementation | None) -> bool:
    """Returns whether programs for CUDA take the kernel.

    Unless it is named they do on machines with one GPU: XLA would gather sharded arrays for it.

    Raises:
        LibraryError: it is named, and there is no library, or none with kernels for GPUs.
    """
    if implementation == "custom_call":
        loaded = library.require()
        if "cuda" not in loaded.platforms_of(TARGETS[False]):
            raise library.LibraryError(
                f'implementation is "custom_call", and {loaded.path} has no kernels for NVIDIA '
                f'GPUs: {library.BUILDS["cuda"]}; "reference" runs everywhere'
            )
        return True
    outcome = library.attempt()
    if isinstance(outcome, library.LibraryError):
        return False
    if "cuda" not in outcome[1].platforms_of(TARGETS[False]):
        return False
    try:
        return len(jax.devices("cuda")) == 1
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


def _bind(leaves: tuple[Leaf, ...], rounds: bool, scalars: Scalars, arrays: Any) -> list[Result]:
    """Returns parameters and moments by a call that has a kernel."""
    operands, structure = jax.tree.flatten((scalars, arrays))
    results = STEP.bind(*operands, leaves=leaves, rounds=rounds, structure=structure)
    after: Any = jax.tree.structure([(param, new) for _, param, new in arrays])
    found: list[Result] = jax.tree.unflatten(after, results)
    return found


def _outputs(operands: Any, structure: Any) -> list[Any]:
    """Returns the operands that a step overwrites: parameters and moments, in order."""
    _, arrays = jax.tree.unflatten(structure, operands)
    return jax.tree.leaves([(param, moments) for _, param, moments in arrays])


def _lower(ctx: Any, *operands: Any, leaves: Any, rounds: bool, structure: Any) -> Any:
    platforms = ctx.module_context.platforms
    function = _kernel if tuple(platforms) == ("cuda",) else partial(_dense, "adam")

    def flat(*arrays: Any) -> list[Any]:
        scalars, of = jax.tree.unflatten(structure, arrays)
        return jax.tree.leaves(function(leaves, rounds, scalars, of))

    return mlir.lower_fun(flat, multiple_results=True)(ctx, *operands)


# One lowering rule for all platforms: a result of a conditional over the platform could not take
# the memory of an operand.
STEP = Primitive("xentile_adamw")
STEP.multiple_results = True
STEP.def_impl(partial(xla_interpreter.apply_primitive, STEP))
STEP.def_abstract_eval(lambda *avals, structure, **_: _outputs(avals, structure))
mlir.register_lowering(STEP, _lower)


def _lower_squares(ctx: Any, *operands: Any) -> Any:
    platforms = tuple(ctx.module_context.platforms)
    function = _kernel_squares if platforms == ("cuda",) else _dense_squares
    return mlir.lower_fun(lambda *arrays: [function(*arrays)], multiple_results=True)(
        ctx, *operands
    )


SUM = Primitive("xentile_sum_squares")
SUM.multiple_results = True
SUM.def_impl(partial(xla_interpreter.apply_primitive, SUM))
SUM.def_abstract_eval(lambda *_: [jax.core.ShapedArray((), jnp.dtype(jnp.float32))])
mlir.register_lowering(SUM, _lower_squares)


def _kernel(leaves: tuple[Leaf, ...], rounds: bool, scalars: Scalars, arrays: Any) -> list[Result]:
    target = TARGETS[is_quantized(arrays[0][2][0])]
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
    flat = iter(jax.ffi.ffi_call(target, results, input_output_aliases=aliases)(*operands))
    found: list[Result] = []
    for _, _, moments in arrays:
        param = next(flat)
        new = [
            Quantized(next(flat), next(flat)) if is_quantized(one) else next(flat)
            for one in moments
        ]
        found.append((param, new))
    return found
