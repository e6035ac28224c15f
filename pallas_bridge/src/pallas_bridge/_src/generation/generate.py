"""Text generation in one program: prefill, then a loop of steps on the device."""

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ..checks import as_array, is_traced
from ..keywords import hinted
from . import kernel, sampling_kernel
from .cache import Cache, make_cache
from .config import DecoderConfig
from .model import (
    LARGEST_PAGE,
    check_lengths,
    check_tokens,
    decode_step,
    position_tables,
    prefill,
)
from .parameters import Params, check_params
from .sampling import Sampling, as_vector, check_sampling, make_keys, make_sampler

Array = jax.Array


class OnTokens(Protocol):
    """A function of a step and of tokens [B], on the host."""

    def __call__(self, step: int, tokens: np.ndarray, /) -> object:
        """Takes the tokens of a step."""


# Lists of prompts are padded to a multiple of this, so that few lengths are compiled.
PROMPT_STEP = 32
# The least tokens for which weights are packed.
LEAST_TOKENS = 8
# Steps of the kernel after which the host looks whether all sequences have ended: for each look the
# device waits. Steps after the end are empty launches.
STEPS_OF_BLOCK = 16
# Calls of a step that are started before the tokens of the first of them are read.
CALLS_AHEAD = 2


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


# Exported programs give it back.
jax.export.register_namedtuple_serialization(Generated, serialized_name="pallas_bridge.Generated")


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

    With `on_tokens` each step is a call, a few of which are started before tokens are read.

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
      on_tokens: called after each step while the device goes on, with the step, from 0, and tokens
        [B], -1 for sequences that have ended. An exception that it raises ends `generate`.

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
    batch = tokens.shape[0]
    lengths = check_lengths("prompt_lengths", prompt_lengths, "prompts", tokens)
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
    stops = check_tokens(
        "stop_tokens", stop_tokens if np.size(stop_tokens) else np.zeros(0, np.int32), config, 1
    )
    sampling = check_sampling(temperature, top_k, top_p, min_p)
    # Weights are packed in the program, unless they are: that takes as long as a few tokens.
    has_kernel = kernel.is_packed(params, config, batch) or (
        max_new_tokens >= LEAST_TOKENS and kernel.is_usable(params, config, batch)
    )
    has_sampler = sampling_kernel.is_usable(jax.tree.leaves(params), config.vocab_size)
    static = config, int(max_new_tokens), has_kernel, has_sampler
    operands = (tokens, lengths, seeds, sampling, stops)
    if on_tokens is not None:
        if is_traced(tokens):
            raise TypeError(
                "prompts is traced and on_tokens is given; call generate outside of jit"
            )
        return _stream(static, params, *operands, on_tokens)
    found: Generated = _generate(static, params, *operands)
    return found


# The config, `max_new_tokens` or None for no end, and whether there is a kernel of a step and one
# that draws.
Static = tuple[DecoderConfig, int | None, bool, bool]
# Tokens [B] and their log-probabilities [B].
Drawn = tuple[Array, Array]


class _Given(NamedTuple):
    """What all steps read: for the kernel, else None, weights packed here and RoPE's tables.

    And keys [B, 2] of noise, `starts` [B], a token's step less its position, and the sampler's
    options as a vector.
    """

    packed: Array | None
    tables: list[Array] | None
    keys: Array
    starts: Array
    vector: Array


class _State(NamedTuple):
    """What a step updates: its number, the cache, and the kernel's state, else None."""

    step: Array
    cache: Cache
    words: Array | None


def _on_each_platform(function: Any, static: Static, *operands: Any) -> Any:
    """Runs a function of `static` with the kernel where there is one, and without it elsewhere."""
    config, max_new_tokens, has_kernel, has_sampler = static
    without = partial(function, (config, max_new_tokens, False, has_sampler))
    if not has_kernel:
        return without(*operands)
    return jax.lax.platform_dependent(*operands, cuda=partial(function, static), default=without)


@partial(jax.jit, static_argnums=0)
def _generate(static: Static, *operands: Any) -> Generated:
    found: Generated = _on_each_platform(_run, static, *operands)
    return found


def _begin(
    static: Static,
    params: Params,
    prompts: Array,
    prompt_lengths: Array,
    seeds: Array,
    sampling: Sampling,
) -> tuple[Drawn, _State, _Given]:
    """Returns the first tokens, and what steps after them take."""
    config, max_new_tokens, has_kernel, has_sampler = static
    batch, most = prompts.shape
    length = -(-(most + (max_new_tokens or 0)) // LARGEST_PAGE) * LARGEST_PAGE
    cache = make_cache(config, batch, length, params["embedding"].dtype)
    logits, cache = prefill(params, config, cache, prompts, prompt_lengths)
    packed: Any = None
    tables = words = None
    if has_kernel:
        packed = None if "packed" in params else kernel.pack_weights(params, config)
        tables = position_tables(config, jnp.arange(length, dtype=jnp.int32))
        words = kernel.init_state(config, batch)
    given = _Given(packed, tables, make_keys(seeds), 1 - prompt_lengths, as_vector(sampling))
    # A sampler's steps are positions, which are there for the decoder, less the first ones.
    drawn = _sampler(given, sampling, has_sampler)(logits, -given.starts)
    return drawn, _State(jnp.int32(1), cache, words), given


def _sampler(given: _Given, sampling: Sampling, has_kernel: bool) -> Any:
    return make_sampler(given.keys, sampling, has_kernel, given.starts, given.vector)


def _have_ended(tokens: Array, stop_tokens: Array) -> Array:
    """Returns which sequences have ended, by the last tokens drawn."""
    return (tokens < 0) | (tokens[:, None] == stop_tokens[None]).any(1)


def _advance(
    static: Static,
    params: Params,
    sampling: Sampling,
    stop_tokens: Array,
    given: _Given,
    state: _State,
    tokens: Array,
    positions: Array,
) -> tuple[Drawn, _State]:
    """Returns the tokens that follow the last ones, which are at `positions`."""
    config, max_new_tokens, has_kernel, has_sampler = static
    step, cache, words = state
    has_ended = _have_ended(tokens, stop_tokens)
    if max_new_tokens is not None:
        has_ended |= step >= max_new_tokens
    # Of a sequence that has ended the token is -1: its row has NaN logits, of which -1 is drawn,
    # and is not written. Nothing but this is computed between two steps.
    tokens = jnp.where(has_ended, -1, tokens)
    sampler = _sampler(given, sampling, has_sampler)
    if has_kernel:
        packed: Any = params["packed"] if given.packed is None else given.packed
        operands: Any = (given.tables, cache, words, tokens, positions)
        one = kernel.step(params, config, packed, *operands)
        cache, words = Cache(one.keys, one.values), one.state
        is_greedy = sampling.temperature is None
        drawn = (one.token, one.logp) if is_greedy else sampler(one.logits, positions)
    else:
        logits, cache = decode_step(params, config, cache, tokens, positions)
        drawn = sampler(logits, positions)
    return drawn, _State(step + 1, cache, words)


def _run(
    static: Static,
    params: Params,
    prompts: Array,
    prompt_lengths: Array,
    seeds: Array,
    sampling: Sampling,
    stop_tokens: Array,
) -> Generated:
    _, most, has_kernel, _ = static
    max_new_tokens = most or 0
    drawn, state, given = _begin(static, params, prompts, prompt_lengths, seeds, sampling)
    # Steps until the host looks whether all have ended.
    count = STEPS_OF_BLOCK if has_kernel else 1
    advance = partial(_advance, static, params, sampling, stop_tokens, given)

    def run_block(carry: Any) -> Any:
        found, state, tokens = carry
        start = jnp.int32(0), state.step
        block = []
        # Unrolled, appended at once, and all positions before: a small kernel between two steps
        # takes 2 us.
        positions = [state.step + index - given.starts for index in range(count)]
        for one in jax.lax.optimization_barrier(positions):
            drawn, state = advance(state, tokens, one)
            tokens, _ = drawn
            block.append(drawn)
        stacked = [jnp.stack(ones, 1) for ones in zip(*block, strict=True)]
        found = [
            jax.lax.dynamic_update_slice(all_steps, ones, start)
            for all_steps, ones in zip(found, stacked, strict=True)
        ]
        return found, state, tokens

    def goes_on(carry: Any) -> Any:
        _, state, tokens = carry
        return (state.step < max_new_tokens) & ~_have_ended(tokens, stop_tokens).all()

    columns = 1 + -(-max(max_new_tokens - 1, 1) // count) * count
    found = [
        jnp.full((one.shape[0], columns), rest, one.dtype).at[:, 0].set(one)
        for rest, one in zip((-1, 0.0), drawn, strict=True)
    ]
    found, *_ = jax.lax.while_loop(goes_on, run_block, (found, state, drawn[0]))
    tokens, logps = (one[:, :max_new_tokens] for one in found)
    logps = jnp.where(tokens < 0, 0.0, logps)
    return Generated(tokens, (tokens >= 0).sum(1, dtype=jnp.int32), logps)


_first = jax.jit(_begin, static_argnums=0)


@partial(jax.jit, static_argnums=0, donate_argnums=5)
def _next(
    static: Static,
    params: Params,
    sampling: Sampling,
    stop_tokens: Array,
    given: _Given,
    state: _State,
    tokens: Array,
) -> tuple[Drawn, _State]:
    operands = (params, sampling, stop_tokens, given, state, tokens, state.step - given.starts)
    found: tuple[Drawn, _State] = _on_each_platform(_advance, static, *operands)
    return found


def _stream(
    static: Static,
    params: Params,
    prompts: Array,
    prompt_lengths: Array,
    seeds: Array,
    sampling: Sampling,
    stop_tokens: Array,
    on_tokens: OnTokens,
) -> Generated:
    """Runs a step a call, and hands out its tokens."""
    config, most, has_kernel, has_sampler = static
    max_new_tokens = most or 0
    if has_kernel and "packed" not in params:
        params = {**params, "packed": kernel.pack_alone(params, config)}
    sampling, stops = jax.device_put((sampling, stop_tokens))
    drawn, state, given = _first(static, params, prompts, prompt_lengths, seeds, sampling)
    advance = partial(_next, (config, None, has_kernel, has_sampler), params, sampling, stops)
    tokens = np.full((len(prompts), max_new_tokens), -1, np.int32)
    logps = np.zeros(tokens.shape, np.float32)
    waiting = deque([drawn])
    for step in range(max_new_tokens):
        while len(waiting) <= min(CALLS_AHEAD, max_new_tokens - step - 1):
            drawn, state = advance(given, state, drawn[0])
            jax.tree.map(lambda one: one.copy_to_host_async(), drawn)
            waiting.append(drawn)
        last, logps[:, step] = map(np.asarray, waiting.popleft())
        tokens[:, step] = last
        on_tokens(step, last)
        if ((last < 0) | np.isin(last, stop_tokens)).all():
            break
    logps[tokens < 0] = 0.0
    lengths = (tokens >= 0).sum(1, dtype=np.int32)
    return Generated(*map(jnp.asarray, (tokens, lengths, logps)))


def _padded(prompts: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Returns prompts as one array [B, T], and their lengths [B].

    Raises:
        TypeError: one holds no integers.
        ValueError: there is none, one is empty, or one is no list of tokens.
    """
    try:
        rows = [np.asarray(one) for one in prompts]
    except ValueError as error:
        raise TypeError(
            "prompts has lists of other lists; it must be a list of lists of tokens"
        ) from error
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
