"""What this installation is, whether it works, and how a loss would be computed.

python -m pallas_bridge info     which implementation runs where; with --all also why
python -m pallas_bridge doctor   what keeps kernels from running, and what to do; exit code 1 then
python -m pallas_bridge explain  how linear_cross_entropy would be chunked, and the memory it takes
"""

import argparse
import sys

import jax
import jax.numpy as jnp

from pallas_bridge import explain, info
from pallas_bridge._src import doctor

DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16}
UNITS = {"": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def size(text: str) -> int:
    """Returns bytes, for a number that KiB, MiB or GiB may follow."""
    number = text.strip().lower()
    unit = next((unit for unit in UNITS if unit and number.endswith(unit)), "")
    try:
        return int(float(number.removesuffix(unit)) * UNITS[unit])
    except ValueError:
        message = f"{text!r} is no size; 16MiB, 1.5GiB or a number of bytes would be right"
        raise argparse.ArgumentTypeError(message) from None


def count(text: str) -> int:
    """Returns a number of elements along an axis."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; it must be a whole number above 0")
    return int(text)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit code: 1 for what is wrong here, 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m pallas_bridge",
        description=(__doc__ or "").partition("\n")[0],
    )
    commands = parser.add_subparsers(dest="command", required=True)
    informs = commands.add_parser(
        "info", help="which implementation runs where; with --all also why"
    )
    informs.add_argument("--all", action="store_true", help="with the reasons, and all targets")
    commands.add_parser(
        "doctor", help="what keeps kernels from running, and what to do; exit code 1"
    )
    explains = commands.add_parser(
        "explain", help="how linear_cross_entropy would be chunked, and its memory"
    )
    explains.add_argument("--tokens", type=count, required=True, metavar="N")
    explains.add_argument("--hidden", type=count, required=True, metavar="D")
    explains.add_argument("--vocab", type=count, required=True, metavar="V")
    explains.add_argument("--dtype", choices=DTYPES, default="bf16")
    explains.add_argument("--bias", action="store_true", help="with a bias")
    explains.add_argument("--reduction", choices=["mean", "sum", "none"], default="mean")
    explains.add_argument("--max-scratch", type=size, metavar="SIZE", help="such as 256MiB")
    explains.add_argument(
        "--batch-invariant", action="store_true", help="with GEMMs of a fixed number of tokens"
    )
    explains.add_argument("--platform", help="cpu, cuda, tpu or a kind of TPU; by default JAX's")
    given = parser.parse_args(arguments)
    if given.command == "doctor":
        return doctor.main()
    if given.command == "info":
        print(info().details() if given.all else info())
        return 0
    dtype = DTYPES[given.dtype]
    try:
        plan = explain(
            jax.ShapeDtypeStruct((given.tokens, given.hidden), dtype),
            jax.ShapeDtypeStruct((given.vocab, given.hidden), dtype),
            bias=jax.ShapeDtypeStruct((given.vocab,), jnp.float32) if given.bias else None,
            reduction=given.reduction,
            vocab_axis=0,
            max_scratch_bytes=given.max_scratch,
            batch_invariant=given.batch_invariant,
            platform=given.platform,
        )
    except (TypeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(plan)
    return 0


if __name__ == "__main__":
    sys.exit(main())
