"""A run: load or make a model, compile, generate, report."""

import json
import resource
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from pallas_bridge import generation

from .presets import PRESETS


class InputError(Exception):
    """Bad input: a sentence for the user."""


class Text:
    """Prints a text while its tokens arrive; without a tokenizer, their numbers."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        """Begins without tokens."""
        self.tokenizer, self.shown = tokenizer, ""
        self.tokens: list[int] = []

    def decode(self) -> str:
        """The text so far, without a character that more tokens may complete."""
        if self.tokenizer is None:
            return " ".join(map(str, self.tokens))
        text: str = self.tokenizer.decode(self.tokens)
        return text.rstrip("\N{REPLACEMENT CHARACTER}")

    def add(self, token: int) -> None:
        """Prints what a token adds."""
        if token >= 0:
            self.tokens.append(token)
            text = self.decode()
            print(text[len(self.shown) :], end="", flush=True)
            self.shown = text


def read_tokenizer(folder: Path) -> Tokenizer:
    """Returns the tokenizer of a checkpoint."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise InputError(f"{folder} has no tokenizer.json")
    return Tokenizer.from_file(str(path))


def stop_tokens(folder: Path) -> list[int]:
    """The tokens that end a text by generation_config.json, or else config.json."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        found = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        if found is not None:
            return [found] if isinstance(found, int) else list(found)
    return []


def peak_memory() -> str:
    """The allocator's peak, or where it counts none the process's."""
    found = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    if found is not None:
        return f"{found / 2**30:.2f} GiB"
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return f"{peak / 2**30:.2f} GiB (process)"


def run(options: Namespace) -> generation.Generated:
    """Generates by the command line's options, and prints texts, then speed and memory.

    Raises:
        InputError: a model, prompt or option that cannot be used.
    """
    try:
        return _run(options)
    except (OSError, TypeError, ValueError) as error:
        raise InputError(str(error)) from error


def _run(options: Namespace) -> generation.Generated:
    for name in ("top_k", "top_p", "min_p"):
        if getattr(options, name) is not None and not options.temperature:
            raise InputError(f"--{name} needs a temperature; add one, such as --temperature 1")
    tokenizer, stops = None, []
    if options.model is not None:
        tokenizer, stops = read_tokenizer(options.model), stop_tokens(options.model)
        config, params = generation.load_hugging_face(
            options.model, dtype=options.dtype, packed=True
        )
    elif options.random in PRESETS:
        config = PRESETS[options.random]
        params = generation.init_params(config, options.seed, dtype=options.dtype)
        params = generation.pack(params, config, donate=True)
    else:
        raise InputError(f"no preset {options.random}: choose from {', '.join(PRESETS)}")
    if options.prompt_tokens is not None:
        if options.prompt_tokens < 1:
            raise InputError(f"--prompt_tokens is {options.prompt_tokens}; it must be at least 1")
        rng = np.random.default_rng(options.seed)
        prompts = [rng.integers(0, config.vocab_size, options.prompt_tokens).tolist()]
    elif tokenizer is not None:
        prompts = [tokenizer.encode(text).ids for text in options.prompt]
    else:
        raise InputError("--random has no tokenizer: give --prompt_tokens in the place of --prompt")
    size = sum(one.nbytes for one in jax.tree.leaves(jax.block_until_ready(params)))
    print(f"{size / 2**30:.2f} GiB of parameters, {jax.devices()[0].device_kind}", file=sys.stderr)
    lengths = [len(one) for one in prompts]
    if not min(lengths):
        raise InputError("a prompt has no tokens")
    padded = np.zeros((len(prompts), max(lengths)), np.int32)
    for row, one in zip(padded, prompts, strict=True):
        row[: len(one)] = one

    texts = [Text(tokenizer) for _ in prompts]
    arrived: list[float] = []

    def show(step: int, tokens: np.ndarray) -> None:
        arrived.append(time.perf_counter())
        if len(texts) == 1:
            texts[0].add(int(tokens[0]))

    def generate(prompts: Any, on_tokens: Any) -> generation.Generated:
        found: generation.Generated = generation.generate(
            params,
            config,
            prompts,
            prompt_lengths=lengths,
            max_new_tokens=options.max_new_tokens,
            seeds=options.seed,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
            stop_tokens=stops,
            on_tokens=on_tokens,
        )
        jax.block_until_ready(found)
        return found

    # Compiles: tokens that there are none of end every sequence at once.
    begun = time.perf_counter()
    generate(jnp.full(padded.shape, -1), lambda step, tokens: None)
    compiled = time.perf_counter()
    found = generate(padded, show)
    print()
    if len(texts) > 1:
        for text, tokens, length in zip(texts, found.tokens, found.lengths, strict=True):
            text.tokens = tokens[:length].tolist()
            print(text.decode(), end="\n\n")
    report(np.asarray(found.lengths), compiled - begun, np.array(arrived) - compiled)
    return found


def report(lengths: np.ndarray, compiling: float, arrived: np.ndarray) -> None:
    """Prints speed and memory of sequences of these lengths, whose steps arrived at these times."""
    rate = "-"
    if len(arrived) > 1:
        rate = f"{(lengths.sum() - len(lengths)) / (arrived[-1] - arrived[0]):.1f}"
    print(
        f"{lengths.sum()} tokens, {rate} tokens/s, first token after {1e3 * arrived[0]:.0f} ms, "
        f"compiled in {compiling:.1f} s, peak memory {peak_memory()}",
        file=sys.stderr,
    )
