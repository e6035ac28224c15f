"""The command line: see `python -m transformer_bench --help`."""

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status: 2 also where a package is missing."""
    try:
        from .cli import main as run

        return run(argv)
    except ModuleNotFoundError as error:
        print(f"transformer_bench: error: {_missing(error)}", file=sys.stderr)
        return 2


def _missing(error: ModuleNotFoundError) -> str:
    """Returns which package is missing, and what to do."""
    try:
        from train.__main__ import missing_package
    except ModuleNotFoundError:
        return "the package train is not found: set PYTHONPATH=benches:examples, in a clone's root"
    return missing_package(error)


if __name__ == "__main__":
    sys.exit(main())
