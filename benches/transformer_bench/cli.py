"""What the command line takes and runs; __main__.py starts it."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from command_line import INTERRUPTED, Parser
from train.config import InputError, RunError

from . import described, report
from .commands import COMMANDS
from .config import KERNELS, check_cudnn, check_limit, load
from .process import child
from .runner import run


def parser() -> Parser:
    """The command line."""
    top = Parser(
        prog="transformer_bench",
        description="Takes a transformer apart: times, memory, precision.",
        epilog="Exit codes: 0 finished (out of memory is a row), 1 a row failed or a disk is full, "
        "2 bad input, 130 Ctrl-C.",
        allow_abbrev=False,
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        one = commands.add_parser(name, help=command.help, allow_abbrev=False)
        one.add_argument("--config", type=Path, metavar="FILE.yaml")
        one.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE")
        # `attention` has `implementations`.
        for kernel in KERNELS if name != "attention" else ():
            one.add_argument(f"--{kernel}", metavar="KERNEL", help=f"as --set {kernel}=KERNEL")
        one.add_argument("--json", type=Path, metavar="FILE.jsonl", help="takes rows as they come")
        if name == "memory":
            one.add_argument(
                "--jobs", type=at_least_one, default=1, metavar="N", help="cells at once (1)"
            )
        one.add_argument("--resume", action="store_true", help="leave rows as --json has them")
        one.add_argument(
            "--report",
            type=Path,
            metavar="PAGE.md",
            help="then writes a page of the rows in --json, as HTML too, with pictures",
        )
    one = commands.add_parser("report", help="a page with pictures of files that --json made")
    one.add_argument("files", nargs="+", type=Path, metavar="FILE.jsonl")
    one.add_argument("--out", type=Path, metavar="PAGE.md", help="(default: the terminal)")
    one.add_argument("--html", type=Path, metavar="PAGE.html")
    return top


def at_least_one(text: str) -> int:
    """A whole number of 1 or more."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text} is no number of 1 or more")
    return int(text)


def write(path: Path, text: str) -> None:
    """Writes a page.

    Raises:
        RunError: It cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise RunError(f"page {path} cannot be written ({reason}): name another file") from None


def measure(arguments: argparse.Namespace) -> int:
    """Runs a command that measures; returns the exit status."""
    page: Path | None = arguments.report
    if page is not None and arguments.json is None:
        raise InputError("--report is made of the rows in --json: name that file too")
    if page is not None and page.suffix == ".html":
        raise InputError(f"--report {page} is the page in Markdown: its HTML goes beside PAGE.md")
    given = {kernel: getattr(arguments, kernel, None) for kernel in KERNELS}
    flags = [f"{kernel}={one}" for kernel, one in given.items() if one is not None]
    spec = load(arguments.config, [*arguments.set, *flags])
    if spec.gpu is not None:
        if arguments.command != "memory":
            raise InputError(f"gpu is of memory alone: leave it out of {arguments.command}")
        described.check(spec.gpu)
    if arguments.command != "attention":
        # Most rows of `layers` need less than all parameters.
        if arguments.command != "layers":
            check_limit(spec)
        if spec.attention == "cudnn":
            check_cudnn(spec.policies)

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    jobs = getattr(arguments, "jobs", 1)
    rows = run(arguments.command, spec, arguments.json, arguments.resume, say, jobs)
    print(report.section(arguments.command, rows))
    if page is not None:
        make_page([arguments.json], page, page.with_suffix(".html"))
    return int(any(row["status"] == "failed" for row in rows))


def make_page(files: Sequence[Path], out: Path | None, html: Path | None) -> None:
    """Writes a page of files; pictures lie beside one of Markdown, and in one of HTML.

    Args:
        files: What `--json` made.
        out: The page in Markdown; without it that goes to the terminal, with no pictures.
        html: The page in HTML, if it is wanted.
    """

    def save_beside(command: str, picture: str) -> str:
        assert out is not None
        file = out.with_name(f"{out.stem}-{command}.svg")
        write(file, picture)
        return file.name

    if out is None:
        print(report.page(files))
    else:
        write(out, report.page(files, save_beside))
    if html is not None:
        page = report.page(files, lambda _, picture: report.embedded(picture))
        write(html, report.html(page))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    given = sys.argv[1:] if argv is None else list(argv)
    if given == ["cell"]:
        # What runner.py starts: a task on standard input, rows on standard output.
        def put(row: dict[str, Any]) -> None:
            print(json.dumps(row), flush=True)

        child(sys.stdin.read, put)
        return 0
    arguments = parser().parse_args(given)
    try:
        if arguments.command == "report":
            make_page(arguments.files, arguments.out, arguments.html)
            return 0
        return measure(arguments)
    except (InputError, RunError) as error:
        print(f"transformer_bench: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    except KeyboardInterrupt:
        print("transformer_bench: interrupted: go on with --resume", file=sys.stderr)
        return INTERRUPTED
