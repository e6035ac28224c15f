"""Holds that no two files of a language need each other, directly or through others.

Python: modules by their imports, wherever these stand. Rust: modules of a crate by the paths
in their code outside tests. A module that declares or re-exports another does not need it for
that, and one within another may use what surrounds it: both are one to the rest of the crate.
CUDA: headers by their includes.
"""

import ast
import re
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
Graph = dict[str, set[str]]


def tracked(*patterns: str) -> list[Path]:
    """Returns the files of the repository that match, as paths from its root."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [Path(name) for name in found.splitlines() if (ROOT / name).is_file()]


def circles(graph: Graph) -> list[list[str]]:
    """Returns the strongly connected components of two nodes and more (Tarjan 1972)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(node: str) -> None:
        order[node] = low[node] = len(order)
        stack.append(node)
        for other in sorted(graph[node]):
            if other not in order:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == order[node]:
            component = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(component) > 1:
                found.append(sorted(component))

    for node in sorted(graph):
        if node not in order:
            visit(node)
    return found


def python_graph(folder: str) -> Graph:
    """Returns the modules below a folder that is on Python's path, by what they import."""
    files = {}
    for file in tracked(f"{folder}/**.py"):
        parts = file.relative_to(folder).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    graph: Graph = {}
    for name, file in files.items():
        package = name if file.name == "__init__.py" else name.rpartition(".")[0]
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        imported = {target for node in ast.walk(tree) for target in imports(node, package)}
        # Of `from a import b` the candidates are a.b, where that is a module, and a.
        needed = {next((one for one in names if one in files), name) for names in imported}
        graph[str(file)] = {str(files[one]) for one in needed - {name}}
    return graph


def imports(node: ast.AST, package: str) -> Iterator[tuple[str, ...]]:
    """Yields what a statement imports: the names that it may be known by, the longest first."""
    if isinstance(node, ast.Import):
        yield from ((alias.name,) for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        parts = package.split(".")
        base = parts[: len(parts) + 1 - node.level] if node.level else []
        module = ".".join([*base, *(node.module or "").split(".")]).strip(".")
        yield from ((f"{module}.{alias.name}", module) for alias in node.names)


USE = re.compile(r"^\s*(pub(?:\([^)]*\))? )?use ([^;]+);", re.MULTILINE)
PATH = re.compile(r"\b(?:\w+::)+\w+")


def rust_graph(crate: Path) -> Graph:
    """Returns the modules of a crate, by those whose items their code names."""
    files: dict[tuple[str, ...], Path] = {}
    for file in tracked(f"{crate}/src/**.rs"):
        parts = file.relative_to(crate / "src").with_suffix("").parts
        if parts[0] == "bin" or parts[-1] in ("tests", "main"):
            continue
        files[parts[:-1] if parts[-1] in ("lib", "mod") else parts] = file
    texts = {module: rust_code(ROOT / file) for module, file in files.items()}
    exports = {module: dict(re_exports(text)) for module, text in texts.items()}

    def owner(module: tuple[str, ...], path: list[str]) -> tuple[str, ...] | None:
        """Returns the module of the crate in which an item is that `module` names by a path."""
        at: tuple[str, ...] = ()
        if path[0] == "crate":
            path = path[1:]
        elif path[0] == "super":
            at, path = module[:-1], path[1:]
            while path and path[0] == "super":
                at, path = at[:-1], path[1:]
        elif path[0] == "self" or (*module, path[0]) in files:
            at, path = module, path[path[0] == "self" :]
        else:
            return None
        while path and (*at, path[0]) in files:
            at, path = (*at, path[0]), path[1:]
        source = exports[at].get(path[0]) if path and at in exports else None
        return owner(at, source) if source else at

    graph: Graph = {}
    for module, text in texts.items():
        own = USE.sub(lambda match: "" if match[1] else match[0], text)
        paths = [path for match in USE.finditer(own) for path in expanded(match[2])]
        paths += [match[0].split("::") for match in PATH.finditer(USE.sub("", own))]
        around = {module[:length] for length in range(1, len(module) + 1)}
        needed = {owner(module, path) for path in paths} - {None, *around}
        graph[str(files[module])] = {str(files[one]) for one in needed if one in files}
    return graph


def rust_code(file: Path) -> str:
    """Returns a file without comments, and without the tests at its end."""
    text = file.read_text(encoding="utf-8").split("#[cfg(test)]\nmod tests {")[0]
    return re.sub(r"//[^\n]*", "", text)


def expanded(tree: str) -> Iterator[list[str]]:
    """Yields the paths of a tree of `use`, without their aliases."""
    head, brace, rest = tree.strip().partition("{")
    if not brace:
        yield [
            part.strip() for part in head.partition(" as ")[0].split("::") if part.strip() != "self"
        ] or ["self"]
        return
    depth, begin, inner = 0, 0, rest.rpartition("}")[0]
    commas = [-1]
    for index, character in enumerate(inner):
        depth += (character == "{") - (character == "}")
        if character == "," and depth == 0:
            commas.append(index)
    for begin, end in pairwise([*commas, len(inner)]):
        if part := inner[begin + 1 : end].strip():
            yield from expanded(head + part)


def re_exports(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yields the names that a module re-exports, each with the path that it takes it from."""
    for match in USE.finditer(text):
        if match[1]:
            yield from ((path[-1], path) for path in expanded(match[2]))


def cuda_graph() -> Graph:
    """Returns the files of kernels, by the headers that they include."""
    graph: Graph = {}
    for file in tracked("crates/xentile-cuda/kernels/*"):
        text = (ROOT / file).read_text(encoding="utf-8")
        included = re.findall(r'^#include "([^"]+)"', text, re.MULTILINE)
        graph[str(file)] = {str(file.parent / name) for name in included}
    return graph


PYTHON = ["pallas_bridge/src", "benches", "examples", "scripts"]
CRATES = sorted({file.parents[0] for file in tracked("crates/*/Cargo.toml")})


@pytest.mark.parametrize("folder", PYTHON)
def test_python_modules(folder: str) -> None:
    graph = python_graph(folder)
    assert any(graph.values())
    assert circles(graph) == []


@pytest.mark.parametrize("crate", CRATES, ids=[crate.name for crate in CRATES])
def test_rust_modules(crate: Path) -> None:
    graph = rust_graph(crate)
    assert any(graph.values())
    assert circles(graph) == []


def test_cuda_headers() -> None:
    graph = cuda_graph()
    assert any(graph.values()) and {file for needed in graph.values() for file in needed} <= {
        *graph
    }
    assert circles(graph) == []


def test_circles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"e"}, "e": set()}
    assert circles(graph) == [["a", "b", "c"]]
    assert [*expanded("crate::{a::B as C, d::{self, E}}")] == [
        ["crate", "a", "B"],
        ["crate", "d"],
        ["crate", "d", "E"],
    ]
