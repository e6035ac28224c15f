"""The command line: see `python -m generate --help`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from command_line import INTERRUPTED, Parser


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line, from `argv` or else from the process."""
    parser = Parser(
        prog="generate",
        description="Continues prompts, and prints tokens/s, time to first token and memory.",
        epilog="Exit codes: 0 finished, 2 bad input, 130 Ctrl-C.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="with config.json, model.safetensors and tokenizer.json",
    )
    model.add_argument("--random", metavar="PRESET", help="random weights, such as qwen3-0.6b")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument(
        "--prompt", nargs="+", metavar="TEXT", help="texts to continue, as they are"
    )
    prompt.add_argument("--prompt_tokens", type=int, metavar="N", help="so many random tokens")
    add("--max_new_tokens", type=int, default=128)
    add("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    add("--top_k", type=int)
    add("--top_p", type=float)
    add("--min_p", type=float)
    add("--seed", type=int, default=0, help="of random weights and tokens, and of sampling")
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    options = parse(argv)
    try:
        from .run import InputError, run
    except ModuleNotFoundError as error:
        print(
            f"generate: error: the package {error.name} is not installed: run pip install "
            "'./pallas_bridge[generation]'",
            file=sys.stderr,
        )
        return 2
    try:
        run(options)
    except InputError as error:
        print(f"generate: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
