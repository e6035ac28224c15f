"""The next token of each sequence from its logits."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ..checks import as_array, as_operand, check_float, check_number, is_traced
from ..keywords import hinted
from . import sampling_kernel

Array = jax.Array
# Bits of a logit that a pass of `_keep_largest` finds.
BITS = 4


class Sampling(NamedTuple):
    """Options of sampling as scalars, None where they are not set; temperature None is greedy."""

    temperature: ArrayLike | None
    top_k: ArrayLike | None
    top_p: ArrayLike | None
    min_p: ArrayLike | None


@hinted
def sample(
    logits: ArrayLike,
    seeds: ArrayLike | Sequence[int],
    steps: ArrayLike = 0,
    *,
    temperature: ArrayLike = 1.0,
    top_k: ArrayLike | None = None,
    top_p: ArrayLike | None = None,
    min_p: ArrayLike | None = None,
) -> tuple[Array, Array]:
    """Draws a token of each row of logits.

    With p = softmax(logits / temperature), `top_k` keeps the k tokens of the largest p, `top_p` the
    fewest tokens of the largest p whose sum is at least that share of what `top_k` kept (Holtzman
    et al., 2020), and `min_p` those with p of at least that share of the largest (Nguyen et al.,
    2024). Tokens as probable in float32 as the last one kept are kept too. A token is drawn from p
    of those that all options keep, divided by its sum, by the Gumbel-max trick.

    Args:
      logits: [B, V].
      seeds: integers [B]. A row's token depends on its own logits, seed and step only.
      steps: integers [B] or []: counts the draws of a seed.
      temperature: at least 0; 0 takes the largest logit, the first of equal ones.
      top_k: at least 1, or None.
      top_p: above 0 and at most 1, or None.
      min_p: 0 to 1, or None.

    Returns:
      tokens [B] in int32, and their logarithms of p [B] in float32, before anything is left out
      (of softmax(logits) at temperature 0): `cross_entropy_per_token` with that temperature gives
      the same. Rows with a NaN, or no finite largest logit, have token -1 and NaN.

    Raises:
      TypeError: an option that is no number.
      ValueError: logits of another shape, or an option outside its range.
    """
    logits = as_array("logits", logits, "[B, V]")
    if logits.ndim != 2 or logits.shape[1] == 0:
        raise ValueError(f"logits has shape {logits.shape}; it must be [B, V] with V at least 1")
    check_float("logits", logits)
    options = check_sampling(temperature, top_k, top_p, min_p)
    seeds = as_operand("seeds", seeds, "of integers, [B]")
    steps = as_operand("steps", steps, "of integers, [B] or []")
    batch = logits.shape[:1]
    for name, array, shapes in (("seeds", seeds, (batch,)), ("steps", steps, (batch, ()))):
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise TypeError(f"{name} has dtype {array.dtype}; it must be integers")
        if array.shape not in shapes:
            right = " or ".join(map(str, shapes))
            raise ValueError(f"{name} has shape {array.shape}; it must be {right}")
    has_kernel = sampling_kernel.is_usable([logits], logits.shape[1])
    found: tuple[Array, Array]
    if {seeds.dtype, steps.dtype} != {np.dtype(np.int32)} or any(
        isinstance(one, jax.Array) for one in (seeds, steps, *options)
    ):
        found = _sample(logits, seeds, steps, options, has_kernel)
        return found
    # All on the host, in one transfer: each takes 90 us.
    given = np.array([one or 0 for one in options], np.float32).view(np.int32)
    numbers = np.concatenate([seeds, np.broadcast_to(steps, seeds.shape), given])
    is_given = tuple(one is not None for one in options)
    found = _sample_by_numbers(logits, numbers, is_given, has_kernel)
    return found


@partial(jax.jit, static_argnums=(2, 3))
def _sample_by_numbers(
    logits: Array, numbers: Array, is_given: tuple[bool, ...], has_kernel: bool
) -> tuple[Array, Array]:
    count = logits.shape[0]
    values = jax.lax.bitcast_convert_type(numbers[2 * count :], jnp.float32)
    options = [one if given else None for one, given in zip(values, is_given, strict=True)]
    draw = make_sampler(make_keys(numbers[:count]), Sampling(*options), has_kernel)
    return draw(logits, numbers[count : 2 * count])


@partial(jax.jit, static_argnums=4)
def _sample(
    logits: Array, seeds: Array, steps: Array, options: Sampling, has_kernel: bool
) -> tuple[Array, Array]:
    steps = jnp.broadcast_to(steps, seeds.shape)
    return make_sampler(make_keys(seeds), options, has_kernel)(logits, steps)


def make_keys(seeds: Array) -> Array:
    """Returns the bits of a key of threefry2x32 for each seed, [B, 2]."""
    return jax.random.key_data(jax.vmap(_key)(seeds))


def check_sampling(
    temperature: ArrayLike,
    top_k: ArrayLike | None,
    top_p: ArrayLike | None,
    min_p: ArrayLike | None,
) -> Sampling:
    """Returns options of which those that change nothing are None.

    Raises:
        TypeError: one is no number.
        ValueError: one is outside its range.
    """
    if temperature is None:
        raise TypeError("temperature is None; it must be a number, 0 to take the largest logit")
    numbers: list[Any] = []
    for name, value, least, most, right in (
        ("temperature", temperature, 0.0, 1e30, "finite and at least 0"),
        ("top_k", top_k, 1.0, 2.0**31 - 1, "a whole number of at least 1"),
        ("top_p", top_p, 1e-30, 1.0, "above 0 and at most 1"),
        ("min_p", min_p, 0.0, 1.0, "0 to 1"),
    ):
        if is_traced(value) and (value.ndim or jnp.issubdtype(value.dtype, jnp.complexfloating)):
            raise TypeError(
                f"{name} is traced, of shape {value.shape} and dtype {value.dtype}; it must be a "
                "scalar: use jax.vmap for one of each row"
            )
        if value is None or is_traced(value):
            numbers.append(value)
            continue
        number = check_number(name, value)
        numbers.append(number)
        if not least <= number <= most or (name == "top_k" and number != int(number)):
            raise ValueError(f"{name} is {value}; it must be {right}")
    options = Sampling(*numbers)
    if not is_traced(options.temperature) and options.temperature == 0:
        return Sampling(None, None, None, None)
    is_whole = not is_traced(options.top_p) and options.top_p == 1
    return options._replace(top_p=None) if is_whole else options


def as_vector(options: Sampling) -> Array:
    """Returns the options as the kernel reads them, [4] in float32."""
    without = (1.0, jnp.inf, 1.0, 0.0)
    given = [out if one is None else one for one, out in zip(options, without, strict=True)]
    return jnp.stack([jnp.asarray(one, jnp.float32) for one in given])


def make_sampler(
    keys: Array,
    options: Sampling,
    has_kernel: bool,
    starts: Array | None = None,
    vector: Array | None = None,
) -> Callable[[Array, Array], tuple[Array, Array]]:
    """Returns a function of logits [B, V] and steps [B] that returns what `sample` does.

    Args:
        keys: As `make_keys` makes them.
        options: Those of `sample`, checked.
        has_kernel: Whether GPUs draw by their kernel.
        starts: What is added to steps, [B]; None for 0. The kernel adds it, and takes what its
            caller has at hand.
        vector: `as_vector` of the options, which a loop computes once.
    """
    starts = jnp.zeros(keys.shape[0], jnp.int32) if starts is None else starts
    if options.temperature is None or not has_kernel:
        return lambda logits, steps: _draw(
            logits.astype(jnp.float32), keys, steps + starts, options
        )
    vector = as_vector(options) if vector is None else vector

    def by_kernel(
        logits: Array, keys: Array, steps: Array, vector: Array, options: Sampling
    ) -> tuple[Array, Array]:
        is_few = options.top_k is not None
        return sampling_kernel.draw(logits, keys, steps, starts, vector, is_few)

    def by_xla(
        logits: Array, keys: Array, steps: Array, _: Array, options: Sampling
    ) -> tuple[Array, Array]:
        return _draw(logits, keys, steps + starts, options)

    def draw(logits: Array, steps: Array) -> tuple[Array, Array]:
        operands = (logits.astype(jnp.float32), keys, steps, vector, options)
        found: tuple[Array, Array] = jax.lax.platform_dependent(
            *operands, cuda=by_kernel, default=by_xla
        )
        return found

    return draw


def _draw(logits: Array, keys: Array, steps: Array, options: Sampling) -> tuple[Array, Array]:
    if options.temperature is None:
        tokens = logits.argmax(1)
    else:
        temperature = jnp.asarray(options.temperature, jnp.float32)
        scaled = (logits - logits.max(1, keepdims=True)) / jnp.maximum(temperature, 1e-30)
        noisy = truncate(scaled, options) + _gumbel(keys, steps, logits.shape[1])
        is_greedy = temperature <= 0
        tokens = jnp.where(is_greedy, logits, noisy).argmax(1)
        logits = jnp.where(is_greedy, logits, scaled)
    tokens = tokens.astype(jnp.int32)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]
    logps = chosen - jax.nn.logsumexp(logits, axis=1)
    # Of a row with a NaN or an infinite largest logit, and of no other; XLA's maximum for CPUs
    # loses NaN.
    return jnp.where(jnp.isnan(logps), -1, tokens), logps


def truncate(logits: Array, options: Sampling) -> Array:
    """Returns logits [B, V], whose largest is 0, with -inf where options leave a token out."""
    if options.top_k is not None:
        count = jnp.asarray(options.top_k, jnp.float32)
        logits = _keep_largest(logits, jnp.ones_like(logits), count)
    if options.top_p is not None:
        p = jnp.exp(logits)
        logits = _keep_largest(logits, p, options.top_p * p.sum(1))
    if options.min_p is not None:
        logits = jnp.where(jnp.exp(logits) >= options.min_p, logits, -jnp.inf)
    return logits


def _keep_largest(logits: Array, weights: Array, wanted: ArrayLike) -> Array:
    """Keeps the fewest of the largest logits whose weights sum to at least `wanted`, [B] or [].

    Logits that equal the least of them are kept too, and all where no sum is enough. Searches the
    31 bits of that least logit, which is at most 0, `BITS` at a time: a pass over the logits sums
    for all values of these bits, and nothing is sorted.
    """
    # Floats at most 0 order as the complement of their magnitude's bits.
    order = 2**31 - 1 - jax.lax.bitcast_convert_type(jnp.abs(logits), jnp.int32)
    wanted = jnp.broadcast_to(jnp.asarray(wanted, jnp.float32), logits.shape[:1])
    least = jnp.zeros(logits.shape[0], jnp.int32)
    for shift in range(31 - 31 % BITS, -1, -BITS):
        count = 1 << min(BITS, 31 - shift)
        tried = least[:, None] + (jnp.arange(1, count, dtype=jnp.int32) << shift)[None]
        is_kept = order[:, None] >= tried[:, :, None]
        totals = jnp.where(is_kept, weights[:, None], 0.0).sum(2)
        # The larger what is tried, the smaller its total.
        enough = (totals >= wanted[:, None]).sum(1, dtype=jnp.int32)
        least = least + (enough << shift)
    return jnp.where(order >= least[:, None], logits, -jnp.inf)


def _key(seed: Array) -> Array:
    return jax.random.key(seed, impl="threefry2x32")


def _gumbel(keys: Array, steps: Array, vocab_size: int) -> Array:
    """Returns Gumbel noise [B, V]; each row depends on its own key and step only."""

    def row(bits: Array, step: Array) -> Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(bits, impl="threefry2x32"), step)
        # The other mode has too few bits for the tails of large vocabularies.
        return jax.random.gumbel(key, (vocab_size,), jnp.float32, mode="high")

    return jax.vmap(row)(keys, steps)
