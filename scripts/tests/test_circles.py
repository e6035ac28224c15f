"""Holds that no two files of a language need each other, directly or through others.

Python: modules by their imports, wherever these stand. Rust: modules of a crate by the paths
in their code outside tests. A module that declares one within it, or re-exports its items, does not
need it for that, and one within another may use what surrounds it: who needs such a one needs
both. CUDA: headers by their includes.
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
Sources = dict[Path, str]


def tracked(*patterns: str) -> list[Path]:
    """Returns the files of the repository that match, as paths from its root."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [Path(name) for name in found.splitlines() if (ROOT / name).is_file()]


def sources(folder: Path | str, suffix: str) -> Sources:
    """Returns the texts of files below a folder, by their paths from it."""
    files = tracked(f"{folder}/**{suffix}")
    return {file.relative_to(folder): (ROOT / file).read_text(encoding="utf-8") for file in files}


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


def python_graph(files: Sources) -> Graph:
    """Returns the modules below a folder that is on Python's path, by what they import."""
    names = {}
    for file in files:
        parts = file.with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    graph: Graph = {}
    for name, file in names.items():
        package = name if file.name == "__init__.py" else name.rpartition(".")[0]
        imported = {
            target for node in ast.walk(ast.parse(files[file])) for target in imports(node, package)
        }
        # Of `from a import b` the candidates are a.b, where that is a module, and a.
        needed = {next((one for one in found if one in names), name) for found in imported}
        graph[str(file)] = {str(names[one]) for one in needed - {name}}
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
MACRO = re.compile(r"(#\[macro_export\]\n)?macro_rules! (\w+)")
Module = tuple[str, ...]


def rust_graph(files: Sources) -> Graph:
    """Returns the modules of a crate, by those whose items their code names."""
    names: dict[Module, str] = {}
    for file in files:
        parts = file.with_suffix("").parts
        if parts[0] == "bin" or parts[-1] in ("tests", "main"):
            continue
        names[parts[:-1] if parts[-1] in ("lib", "mod") else parts] = str(file)
    texts = {module: rust_code(files[Path(name)]) for module, name in names.items()}
    exports = {module: dict(re_exports(text)) for module, text in texts.items()}
    for module, text in texts.items():
        for exported, macro in MACRO.findall(text):
            exports[module].pop(macro, None)
            if exported and module:
                # The crate's root has it, wherever it stands.
                exports[()][macro] = ["crate", *module, macro]

    def owner(module: Module, path: list[str]) -> Module | None:
        """Returns the module of the crate in which an item is that `module` names by a path."""
        at: Module = ()
        if path[0] == "crate":
            path = path[1:]
        elif path[0] == "super":
            at, path = module[:-1], path[1:]
            while path and path[0] == "super":
                at, path = at[:-1], path[1:]
        elif path[0] == "self" or (*module, path[0]) in names:
            at, path = module, path[path[0] == "self" :]
        else:
            return None
        while path and (*at, path[0]) in names:
            at, path = (*at, path[0]), path[1:]
        source = exports[at].get(path[0]) if path and at in exports else None
        return owner(at, source) if source else at

    needed: dict[Module, set[Module]] = {}
    for module, text in texts.items():
        code = USE.sub("", text)
        words = set(re.findall(r"\w+", code))
        found = {owner(module, match[0].split("::")) for match in PATH.finditer(code)}
        for match in USE.finditer(text):
            for name, path in expanded(match[2]):
                one = owner(module, path)
                is_within = one is not None and one[: len(module)] == module
                if not (match[1] and is_within) or name in words:
                    found.add(one)
        needed[module] = {one for one in found if one is not None and one in names}

    def with_surroundings(module: Module) -> Iterator[Module]:
        """Yields a module, and what it needs of those that it is within."""
        yield module
        for one in needed[module] - {module, ()}:
            if module[: len(one)] == one:
                yield from with_surroundings(one)

    graph: Graph = {}
    for module, targets in needed.items():
        around = {module[:length] for length in range(1, len(module) + 1)}
        others = {one for target in targets - around for one in with_surroundings(target)} - around
        graph[names[module]] = {names[one] for one in others}
    return graph


def rust_code(text: str) -> str:
    """Returns a file's text without comments, and without the tests at its end."""
    return re.sub(r"//[^\n]*", "", text.split("#[cfg(test)]\nmod tests {")[0])


def expanded(tree: str) -> Iterator[tuple[str, list[str]]]:
    """Yields the names that a tree of `use` brings, each with its path."""
    head, brace, rest = tree.strip().partition("{")
    if not brace:
        item, _, alias = head.partition(" as ")
        path = [part.strip() for part in item.split("::") if part.strip() != "self"] or ["self"]
        yield alias.strip() or path[-1], path
        return
    depth, inner = 0, rest.rpartition("}")[0]
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
            assert "*" not in match[2], f"what `{match[0].strip()}` re-exports cannot be followed"
            yield from expanded(match[2])


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
    graph = python_graph(sources(folder, ".py"))
    assert any(graph.values())
    assert circles(graph) == []


@pytest.mark.parametrize("crate", CRATES, ids=[crate.name for crate in CRATES])
def test_rust_modules(crate: Path) -> None:
    graph = rust_graph(sources(crate / "src", ".rs"))
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
        ("C", ["crate", "a", "B"]),
        ("d", ["crate", "d"]),
        ("E", ["crate", "d", "E"]),
    ]


def test_python_imports_are_resolved() -> None:
    files = {
        "p/__init__.py": "from .a import A\n",
        "p/a.py": "import json\nfrom p import b\n",
        "p/b.py": "def f():\n    from .c import d, E\n",
        "p/c/__init__.py": "from .. import VERSION\n",
        "p/c/d.py": "from ..a import A\nimport p.b\n",
    }
    assert python_graph({Path(name): text for name, text in files.items()}) == {
        "p/__init__.py": {"p/a.py"},
        "p/a.py": {"p/b.py"},
        "p/b.py": {"p/c/__init__.py", "p/c/d.py"},
        "p/c/__init__.py": {"p/__init__.py"},
        "p/c/d.py": {"p/a.py", "p/b.py"},
    }


def rust_needs(**code: str) -> Graph:
    """Returns what the modules of a small crate need, of which some have this code."""
    files = {
        "lib": "mod a;\npub use a::{A, inner::Inner};\npub use std::fmt;",
        "a": "mod inner;\nmod other;\npub(crate) use inner::Inner as Renamed;\npub struct A;",
        "a/inner": "pub struct Inner;",
        "a/other": "#[macro_export]\nmacro_rules! global { () => {} }",
        "b/mod": "macro_rules! local { () => {} }\npub(crate) use local;",
        "c": "",
    } | {name.replace("_", "/"): text for name, text in code.items()}
    graph = rust_graph({Path(f"{name}.rs"): text for name, text in files.items()})
    return {file: needed for file, needed in graph.items() if needed}


@pytest.mark.parametrize(
    ("code", "needed"),
    [
        ("use crate::A;", {"a.rs"}),
        ("use crate::{\n    c::{self, C as D},\n    fmt,\n};", {"c.rs"}),
        ("fn f() { super::c::g::<u8>() }", {"c.rs"}),
        ("use crate::Inner;", {"a/inner.rs"}),
        ("use crate::a::{self, Renamed};", {"a.rs", "a/inner.rs"}),
        ("use crate::a::inner::Inner;", {"a/inner.rs"}),
        ("crate::global!();", {"a/other.rs"}),
        ("crate::f();", {"lib.rs"}),
        ("pub use crate::c::C;", {"c.rs"}),
        ("use std::a::A; // crate::a::A\n#[cfg(test)]\nmod tests {\n    use crate::c;\n}", set()),
    ],
)
def test_rust_names_are_resolved(code: str, needed: set[str]) -> None:
    assert rust_needs(b_mod=code) == ({"b/mod.rs": needed} if needed else {})


def test_rust_modules_within_modules_are_resolved() -> None:
    assert rust_needs() == {}
    assert rust_needs(c="use crate::b::local;") == {"c.rs": {"b/mod.rs"}}
    # What surrounds a module is no need of its own, but it is one of whoever needs the module.
    inner = "use super::other::F;\nuse super::A;\npub struct Inner;"
    assert rust_needs(a_inner=inner) == {"a/inner.rs": {"a/other.rs"}}
    assert rust_needs(a_inner=inner, c="use crate::Inner;") == {
        "a/inner.rs": {"a/other.rs"},
        "c.rs": {"a/inner.rs", "a.rs"},
    }
    # A module needs those within it that it uses, re-exported or not.
    assert rust_needs(a="mod inner;\nuse inner::Inner;") == {"a.rs": {"a/inner.rs"}}
    assert rust_needs(a="mod inner;\npub use inner::Inner;\nfn f(_: Inner) {}") == {
        "a.rs": {"a/inner.rs"}
    }
