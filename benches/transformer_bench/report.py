"""`report`: one page of the JSON lines of other commands."""

import base64
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from train import log
from train.config import InputError

from . import plots
from .commands import COMMANDS, module_of
from .runner import read_rows
from .tables import Row


def section(command: str, rows: Sequence[Row]) -> str:
    """A command's table and sentences."""
    module = module_of(command)
    return f"{module.table(rows)}\n\n{module.words(rows)}\n"


def starts(path: Path) -> list[Row]:
    """The records of machines in a file that `read_rows` has read."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if record.get("record") == "start" and record.get("tool") == "transformer_bench":
            found.append(record)
    return found


def embedded(picture: str) -> str:
    """The address of a picture embedded in a page."""
    return f"data:image/svg+xml;base64,{base64.b64encode(picture.encode()).decode()}"


def page(paths: Sequence[Path], place: Callable[[str, str], str] | None = None) -> str:
    """The page of files, in Markdown.

    Args:
        paths: The files.
        place: Takes a command's name and its picture as SVG, and returns the picture's address;
            without it the page has no pictures.

    Raises:
        InputError: A file cannot be read.
    """
    rows = [row for path in paths for row in read_rows(path)]
    if not rows:
        names = ", ".join(map(str, paths))
        raise InputError(f"no row is in {names}: name files that --json made")
    parts = ["# A transformer taken apart\n"]
    for command, (_, _, title) in COMMANDS.items():
        of_command = [row for row in rows if row["command"] == command]
        if of_command:
            parts.append(f"## {title}\n\n{section(command, of_command)}")
            picture = plots.figure_of(command, of_command) if place is not None else None
            if place is not None and picture is not None:
                parts.append(f"![{title}]({place(command, picture)})\n")
    machines: dict[str, list[str]] = {}
    for path in paths:
        for record in starts(path):
            machine, load = record["machine"], record.get("load")
            versions = ", ".join(f"{name} {one}" for name, one in record["versions"].items())
            where = f"{machine['cpu']}, {machine['cores']} cores, {machine['system']}; {versions}"
            malloc = [f"{name}={value}" for name, value in record.get("malloc", {}).items()]
            where += "".join(f"; {one}" for one in malloc)
            busy = "" if load is None else f" at a load of {load:.1f}"
            ran = f"`{record['command']}` on {log.day(record['unix_time'])}{busy}"
            machines.setdefault(where, []).append(ran)
    lines = [f"- {where}: {', '.join(ran)}" for where, ran in machines.items()]
    parts.append("## Machines and versions\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def html(text: str) -> str:
    """A page of Markdown as HTML."""
    from markdown_it import MarkdownIt

    markdown = MarkdownIt("commonmark").enable("table")
    # By default it refuses embedded SVG.
    markdown.validateLink = lambda url: True  # type: ignore[method-assign]
    body = markdown.render(text)
    style = "body{font:16px sans-serif;margin:2em}td,th{padding:0 .6em}img{max-width:100%}"
    return (
        '<!doctype html>\n<html lang="en"><meta charset="utf-8">'
        f"<title>A transformer taken apart</title><style>{style}</style>\n{body}</html>\n"
    )
