"""Checks of options and dtypes that a user passes, the same for every operation."""

import math
import operator
from collections.abc import Iterable
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

# What kernels read.
DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
# Of operations whose plain program takes wider ones.
REFERENCE_TAKES_OTHERS = ' (implementation="reference" takes others)'
FLOAT32 = np.finfo(np.float32)
INT64 = np.iinfo(np.int64)


def refuse_none(name: str, value: Any, right: str) -> None:
    """Checks that there is an array; `right` says of which shape.

    Raises:
        TypeError: it is None.
    """
    if value is None:
        raise TypeError(f"{name} is None; it must be an array {right}")


def as_array(name: str, value: Any, right: str) -> jax.Array:
    """Returns an array of what a user passes for one; `right` says of which shape it must be.

    Raises:
        TypeError: it is None, nothing that an array is made of, or has an integer that JAX's
            default integer does not hold.
    """
    refuse_none(name, value, right)
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "iu":
        # `jnp.asarray` would drop the upper bits.
        return jnp.asarray(_held(name, np.asarray(value), right))
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.extended):
        raise TypeError(f"{name} has dtype {value.dtype}; it must be an array of numbers, {right}")
    if isinstance(value, jax.Array) and not jax.typeof(value).weak_type:
        # Of a tracer, `jnp.asarray` makes another by an operation that changes nothing, whose
        # result `jax.debug_infs` looks at: logits of -inf, say.
        return value
    try:
        return jnp.asarray(value)
    except OverflowError as error:
        raise TypeError(_beyond(name, np.int64, right)) from error
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{name} is of type {type(value).__name__}, of which JAX makes no array; it must be an "
            f"array {right}"
        ) from error


def as_operand(name: str, value: Any, right: str) -> jax.Array:
    """Returns what `as_array` does, but arrays on the host in NumPy, which a jitted call transfers.

    Making arrays of JAX of them would start programs of their own.

    Raises:
        TypeError: as for `as_array`.
    """
    if isinstance(value, jax.Array):
        return value
    refuse_none(name, value, right)
    message = (
        f"{name} is of type {type(value).__name__}, of which NumPy makes no array of numbers; it "
        f"must be an array {right}"
    )
    try:
        array: Any = np.asarray(value)
    except ValueError as error:
        raise TypeError(message) from error
    if array.dtype.kind in "USOmM":
        raise TypeError(message)
    held: jax.Array = _held(name, array, right)
    return held


def _held(name: str, array: Any, right: str) -> Any:
    """Returns an array of NumPy's in the dtype that JAX has for its own.

    Raises:
        TypeError: an integer that this does not hold.
    """
    held = array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)
    if array.dtype.kind in "iu" and (held != array).any():
        raise TypeError(_beyond(name, held.dtype, right))
    return held


def _beyond(name: str, dtype: Any, right: str) -> str:
    dtype = jax.dtypes.canonicalize_dtype(dtype)
    return f"{name} has an integer that {dtype} does not hold; it must be an array {right}"


def is_traced(value: Any) -> TypeGuard[jax.Array]:
    """Whether a value is known only as a program runs."""
    return isinstance(value, jax.core.Tracer)


def refuse_traced(name: str, value: Any) -> None:
    """Checks that an option is known as a program is traced: it becomes a part of that.

    Raises:
        TypeError: it is traced.
    """
    if is_traced(value):
        raise TypeError(f"{name} is traced; it must be known when the program is")


def check_number(name: str, value: Any) -> float:
    """Returns a number of any kind.

    Raises:
        TypeError: it is no number, or traced.
    """
    refuse_traced(name, value)
    try:
        return math.fsum([value])  # takes every kind of number, and no text
    except (TypeError, ValueError):
        raise TypeError(f"{name} is {value!r}; it must be a number") from None


def check_integer(name: str, value: Any, least: int = INT64.min) -> int:
    """Returns an integer that is at least `least` and that 64 bits hold.

    Raises:
        TypeError: it is no integer, or traced.
        ValueError: it is out of range.
    """
    refuse_traced(name, value)
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}; it must be an integer") from None
    if number < least:
        raise ValueError(f"{name} is {number}; it must be at least {least}")
    if number > INT64.max:
        raise ValueError(f"{name} is {number}; it must be at most {INT64.max}")
    return number


def check_float32(name: str, value: Any, *, is_positive: bool) -> float:
    """Returns a number that is finite, and above 0 where it must be, in f32.

    Raises:
        TypeError: it is no number, or traced.
        ValueError: it is outside its range.
    """
    number = check_number(name, value)
    if not (abs(number) <= float(FLOAT32.max)) or (
        is_positive and not number >= float(FLOAT32.tiny)
    ):
        right = "finite and above 0, in f32" if is_positive else "finite, in f32"
        raise ValueError(f"{name} is {number}; it must be {right}")
    return number


def check_flag(name: str, value: Any) -> bool:
    """Returns a flag.

    Raises:
        TypeError: it is no bool, or traced.
    """
    refuse_traced(name, value)
    if isinstance(value, jax.Array | np.ndarray) and value.ndim == 0:
        value = value.item()
    if isinstance(value, jax.Array | np.ndarray) or value not in (False, True):
        raise TypeError(f"{name} is {value!r}; it must be True or False")
    return bool(value)


def check_word(name: str, value: Any, words: Iterable[str], *, or_none: bool = False) -> None:
    """Checks an option that is one of some words, or None where it may be.

    Raises:
        ValueError: it is something else.
    """
    words = tuple(words)
    if (value is None and or_none) or (isinstance(value, str) and value in words):
        return
    choices = ", ".join(map(repr, words)) + (", or None" if or_none else "")
    raise ValueError(f"{name} is {value!r}; it must be one of {choices}")


def check_dtype_named(name: str, dtype: Any, dtypes: Iterable[Any] = DTYPES) -> np.dtype[Any]:
    """Returns a dtype that an option names.

    Raises:
        TypeError: it is none of `dtypes`.
    """
    known = [np.dtype(one) for one in dtypes]
    try:
        # Of an array NumPy would take the dtype, and None stands for float64.
        is_array = isinstance(dtype, jax.Array | np.ndarray)
        found: np.dtype[Any] | None = None if dtype is None or is_array else np.dtype(dtype)
    except (TypeError, ValueError):
        found = None
    if found is None or found not in known:
        *others, last = (one.name for one in known)
        raise TypeError(f"{name} is {dtype!r}; it must be {', '.join(others)} or {last}")
    return found


def check_float(name: str, array: jax.Array) -> None:
    """Checks that an array is of floats, wider ones than kernels read among them.

    Raises:
        TypeError: it is not.
    """
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"{name} has dtype {array.dtype}; it must be bfloat16, float16 or float32")


def check_dtype(name: str, array: jax.Array, else_where: str = "") -> None:
    """Checks that kernels read an array; `else_where` says after a space what reads others.

    Raises:
        TypeError: they do not.
    """
    if array.dtype not in DTYPES:
        raise TypeError(
            f"{name} has dtype {array.dtype}; it must be bfloat16, float16 or float32"
            f"{cast_hint(array)}{else_where}"
        )


def check_operand(
    name: str, array: jax.Array, shape: tuple[Any, ...], dtype: Any, dims: str, of: str
) -> None:
    """Checks the shape of an array, `dims` for others `of` a call, and its dtype; None for floats.

    Raises:
        TypeError: another dtype.
        ValueError: another shape.
    """
    if array.shape != shape:
        raise ValueError(
            f"{name} has shape {array.shape}; it must be {dims}, which is {shape} for {of}"
        )
    if dtype is None:
        check_dtype(name, array)
    elif array.dtype != dtype:
        raise TypeError(f"{name} has dtype {array.dtype}; it must be {jnp.dtype(dtype)}")


def cast_hint(array: jax.Array) -> str:
    """Returns what to do of an array of float64; nothing of others."""
    return ": cast it, .astype(jnp.float32)" if array.dtype == jnp.float64 else ""


def promoted(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Returns arrays in the dtype that `jnp` promotes theirs to; as they are if one is no float.

    float8 counts as none: JAX promotes it to nothing.
    """
    dtypes = {array.dtype for array in arrays}
    if len(dtypes) == 1 or not all(dtype in (*DTYPES, jnp.float64) for dtype in dtypes):
        return arrays
    dtype = jnp.result_type(*arrays)
    return tuple(array.astype(dtype) for array in arrays)
