"""What the examples' command lines have in common."""

import argparse
from typing import NoReturn

INTERRUPTED = 130


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        """Prints `message` with where to look, and exits with 2."""
        self.exit(2, f"{self.prog}: error: {message}: see --help\n")
