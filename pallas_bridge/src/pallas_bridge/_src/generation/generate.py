"""Text generation in one program: prefill, then a loop of steps on the device."""

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.typing import ArrayLike

from ..checks import as_array, is_traced
from ..keywords import hinted
from . import kernel, sampling_kernel
from .cache import Cache, init_cache
from .config import DecoderConfig
from .model import (
    LARGEST_PAGE,
    check_integers,
    check_tokens,
    decode_step,
    position_tables,
    prefill,
)
from .parameters import Params, check_params
from .sampling import Sampling, check_sampling, make_sampler

Array = jax.Array


class OnTokens(Protocol):
    """A function of a step and of tokens [B], on the host."""

    def __call__(self, step: int, tokens: np.ndarray, /) -> object:
        """Takes the tokens of a step."""


class _Listener:
    """A function that takes tokens on the host, and the first exception that it raised."""

    def __init__(self, function: OnTokens) -> None:
        self.function = function
        self.error: BaseException | None = None

    def give(self, step: int, tokens: np.ndarray) -> None:
        """Calls the function, unless it has raised: JAX runs no callback after one that raises."""
        if self.error is None:
            try:
                self.function(step, tokens)
            except BaseException as error:
                self.error = error


# Lists of prompts are padded to a multiple of this, so that few lengths are compiled.
PROMPT_STEP = 32
# The least tokens for which weights are packed.
LEAST_TOKENS = 8
# Steps of the kernel after which the host looks whether all sequences have ended: for each look the
# device waits. Steps after the end are empty launches.
STEPS_OF_BLOCK = 16
# Functions that running programs give tokens to, by a number that is an operand: a function that is
# a constant of the program would have it compiled for each.
_LISTENERS: dict[int, _Listener] = {}
_NUMBERS = itertools.count()


class Generated(NamedTuple):
    """What `generate` returns, of B sequences and N = `max_new_tokens`.

    Attributes:
      tokens: [B, N] int32: the generated tokens, then -1.
      lengths: [B] int32: how many there are, the stop token included. A sequence that is shorter
        than N without a stop token at its end had NaN logits.
      logps: [B, N] float32: the log-probability of each token, as `sample` returns it, then 0.
    """

    tokens: Array
    lengths: Array
    logps: Array


@hinted
def generate(
    params: Params,
    config: DecoderConfig,
    prompts: ArrayLike | Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    prompt_lengths: ArrayLike | Sequence[int] | None = None,
    seeds: ArrayLike | Sequence[int] = 0,
    temperature: ArrayLike = 0.0,
    top_k: ArrayLike | None = None,
    top_p: ArrayLike | None = None,
    min_p: ArrayLike | None = None,
    stop_tokens: Sequence[int] = (),
    on_tokens: OnTokens | None = None,
) -> Generated:
    """Continues prompts, in one program on the device that ends when all sequences have.

    A sequence's tokens depend on its own prompt and seed only, but for the rounding of matrix
    products, whose order may change with the number of sequences.

    Args:
      params: as `init_params` or `load_hugging_face` make them.
      config: the decoder's.
      prompts: a list of B lists of token ids, of any lengths but 0; or integers [B, T], padded at
        the right. The program is compiled for each T, a list's rounded up to a multiple of 32.
      max_new_tokens: the most tokens to generate for a sequence, N.
      prompt_lengths: integers [B], for prompts [B, T]; None for T.
      seeds: integers [B], or [] for seeds, seeds + 1, ..
      temperature: as of `sample`; 0 is greedy.
      top_k: as of `sample`; this and the next two do nothing if greedy.
      top_p: see there.
      min_p: see there.
      stop_tokens: token ids that end a sequence.
      on_tokens: called on the host after each step while the device goes on, with the step, from 0,
        and tokens [B], -1 for sequences that have ended. `generate` then returns after the last
        call, or raises the first exception of these calls.

    Returns:
      `Generated`. A row with a token outside the vocabulary in an array on the device has length 0.

    Raises:
      TypeError: an argument of the wrong type, or traced prompts with `on_tokens`.
      ValueError: shapes that disagree; an empty prompt; on the host, a token or length outside its
        range; an option outside its range.
    """
    check_params(params, config)
    if isinstance(prompts, Sequence):
        if prompt_lengths is not None:
            raise ValueError("prompt_lengths is given and prompts is a list, which has its lengths")
        prompts, prompt_lengths = _padded(prompts)
    tokens = check_tokens("prompts", prompts, config, 2)
    batch, most = tokens.shape
    if prompt_lengths is None:
        prompt_lengths = np.full(batch, most)
    lengths = check_integers(
        "prompt_lengths", prompt_lengths, (batch,), 1, most, "the columns of prompts"
    )
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int | np.integer):
        raise TypeError(f"max_new_tokens is {max_new_tokens!r}; it must be an integer")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
    seeds = as_array("seeds", seeds, "of integers, [B] or []")
    if seeds.ndim == 0:
        seeds = seeds + jnp.arange(batch, dtype=seeds.dtype)
    if seeds.shape != (batch,) or not jnp.issubdtype(seeds.dtype, jnp.integer):
        raise ValueError(
            f"seeds has shape {seeds.shape} and dtype {seeds.dtype}; it must be {batch} integers"
        )
    stops = check_tokens("stop_tokens", np.asarray(stop_tokens, np.int32), config, 1)
    sampling = check_sampling(temperature, top_k, top_p, min_p)
    # Weights are packed in the program, unless they are: that takes as long as a few tokens.
    has_kernel = kernel.is_packed(params, config, batch) or (
        max_new_tokens >= LEAST_TOKENS and kernel.is_usable(params, config, batch)
    )
    has_sampler = sampling_kernel.is_usable(jax.tree.leaves(params), config.vocab_size)
    static = config, int(max_new_tokens), has_kernel, has_sampler
    run = partial(_generate, static, params, tokens, lengths, seeds, sampling)
    found: Generated
    if on_tokens is None:
        found = run(stops, None)
        return found
    if is_traced(tokens):
        raise TypeError("prompts is traced and on_tokens is given; call generate outside of jit")
    number, listener = next(_NUMBERS), _Listener(on_tokens)
    _LISTENERS[number] = listener
    try:
        found = jax.block_until_ready(run(stops, number))
        jax.effects_barrier()
    finally:
        del _LISTENERS[number]
    if listener.error is not None:
        raise listener.error
    return found


# The config, `max_new_tokens`, and whether there is a kernel of a step and one that draws.
Static = tuple[DecoderConfig, int, bool, bool]
# Tokens [B] and their log-probabilities [B].
Drawn = tuple[Array, Array]


@partial(jax.jit, static_argnums=0)
def _generate(static: Static, *operands: Any) -> Generated:
    """Runs `_run` with the kernel where there is one, and without it on other platforms."""
    config, max_new_tokens, has_kernel, has_sampler = static
    run = partial(_run, (config, max_new_tokens, False, has_sampler))
    if not has_kernel:
        return run(*operands)
    found: Generated = jax.lax.platform_dependent(
        *operands, cuda=partial(_run, static), default=run
    )
    return found


def _run(
    static: Static,
    params: Params,
    prompts: Array,
    prompt_lengths: Array,
    seeds: Array,
    sampling: Sampling,
    stop_tokens: Array,
    listener: Any,
) -> Generated:
    config, max_new_tokens, has_kernel, has_sampler = static
    batch, most = prompts.shape
    dtype = params["embedding"].dtype
    length = -(-(most + max_new_tokens) // LARGEST_PAGE) * LARGEST_PAGE
    cache = init_cache(config, batch, length, dtype=dtype)
    logits, cache = prefill(params, config, cache, prompts, prompt_lengths)
    state = None
    if has_kernel:
        packed: Any = params.get("packed")
        packed = kernel.pack_weights(params, config) if packed is None else packed
        tables = position_tables(config, jnp.arange(length, dtype=jnp.int32))
        state = kernel.init_state(config, batch)
    # Steps until the host looks whether all have ended; a listener is called for each of them.
    count = STEPS_OF_BLOCK if has_kernel and listener is None else 1
    # A sampler's steps are positions, which are there for the decoder, less the first ones.
    sampler = make_sampler(seeds, sampling, has_sampler, 1 - prompt_lengths)

    def positions_of(step: Any) -> Any:
        return prompt_lengths + step - 1

    def finish(step: Any, drawn: Drawn) -> Drawn:
        if listener is not None:
            io_callback(_give, None, listener, step, drawn[0], ordered=True)
        return drawn

    def have_ended(tokens: Array) -> Array:
        """Returns which sequences have ended, by the last tokens drawn."""
        return (tokens < 0) | (tokens[:, None] == stop_tokens[None]).any(1)

    def run_step(carry: Any, positions: Array) -> tuple[Any, Drawn]:
        step, cache, state, tokens = carry
        # Of a sequence that has ended the token is -1: its row has NaN logits, of which -1 is
        # drawn, and is not written. Nothing but this is computed between two steps.
        tokens = jnp.where(have_ended(tokens) | (step >= max_new_tokens), -1, tokens)
        if has_kernel:
            one = kernel.step(params, config, packed, tables, cache, state, tokens, positions)
            cache, state = Cache(one.keys, one.values), one.state
            is_greedy = sampling.temperature is None
            drawn = (one.token, one.logp) if is_greedy else sampler(one.logits, positions)
        else:
            logits, cache = decode_step(params, config, cache, tokens, positions)
            drawn = sampler(logits, positions)
        drawn = finish(step, drawn)
        return (step + 1, cache, state, drawn[0]), drawn

    def run_block(carry: Any) -> Any:
        found, rest = carry
        start = jnp.int32(0), rest[0]
        block = []
        # Unrolled, appended at once, and all positions before: a small kernel between two steps
        # takes 2 us.
        positions = [positions_of(rest[0] + index) for index in range(count)]
        for one in jax.lax.optimization_barrier(positions):
            rest, drawn = run_step(rest, one)
            block.append(drawn)
        tokens, logps = (jnp.stack(ones, 1) for ones in zip(*block, strict=True))
        return [
            jax.lax.dynamic_update_slice(all_steps, ones, start)
            for all_steps, ones in zip(found, (tokens, logps), strict=True)
        ], rest

    def goes_on(carry: Any) -> Any:
        _, (step, *_, tokens) = carry
        return (step < max_new_tokens) & ~have_ended(tokens).all()

    drawn = finish(0, sampler(logits, positions_of(0)))
    columns = 1 + -(-max(max_new_tokens - 1, 1) // count) * count
    found = [
        jnp.full((batch, columns), rest, one.dtype).at[:, 0].set(one)
        for rest, one in zip((-1, 0.0), drawn, strict=True)
    ]
    carry = found, (jnp.int32(1), cache, state, drawn[0])
    tokens, logps = (
        one[:, :max_new_tokens] for one in jax.lax.while_loop(goes_on, run_block, carry)[0]
    )
    logps = jnp.where(tokens < 0, 0.0, logps)
    return Generated(tokens, (tokens >= 0).sum(1, dtype=jnp.int32), logps)


def _give(listener: Any, step: Any, tokens: Any) -> None:
    # None after an interrupt, when the program may still run.
    found = _LISTENERS.get(int(listener))
    if found is not None:
        found.give(int(step), np.asarray(tokens))


def _padded(prompts: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Returns prompts as one array [B, T], and their lengths [B].

    Raises:
        TypeError: one holds no integers.
        ValueError: there is none, one is empty, or one is no list of tokens.
    """
    rows = [np.asarray(one) for one in prompts]
    if not rows:
        raise ValueError("prompts is empty; it must have at least one prompt")
    for index, row in enumerate(rows):
        if row.ndim != 1 or not row.size:
            raise ValueError(
                f"prompts[{index}] has shape {row.shape}; it must be a list of at least one token"
            )
        if not np.issubdtype(row.dtype, np.integer):
            raise TypeError(f"prompts[{index}] has dtype {row.dtype}; it must be integers")
    lengths = np.array([row.size for row in rows], np.int32)
    padded = np.zeros((len(rows), -(-lengths.max() // PROMPT_STEP) * PROMPT_STEP), np.int64)
    for row, tokens in zip(padded, rows, strict=True):
        row[: tokens.size] = tokens
    return padded, lengths
