"""How Sphinx builds the site: `python scripts/pages.py build`, which scripts/tiers/docs.sh runs."""

import os
import re
import sys
from pathlib import Path

from docutils.nodes import Element, reference
from jax.typing import ArrayLike, DTypeLike
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.pycode import ModuleAnalyzer
from sphinx.util import inspect, logging
from sphinx.util.nodes import make_refnode
from sphinx.util.typing import stringify_annotation

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "pallas_bridge" / "src"))
# Nothing is computed here: docstrings are read.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from pallas_bridge._src.optimizers.api import Schedule  # noqa: E402
from pallas_bridge._src.optimizers.trees import Mask  # noqa: E402

project = "xentile"
copyright = "The xentile authors, Apache-2.0"
author = "The xentile authors"
version = release = re.findall(
    r'^version = "(.*)"', (ROOT / "Cargo.toml").read_text(encoding="utf-8"), re.MULTILINE
)[0]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4
myst_enable_extensions = ["deflist"]
source_suffix = {".md": "markdown"}
html_theme = "sphinx_book_theme"
html_title = f"xentile {version}"
# The header of a page has the search; that of the site and the sidebar would have it again.
html_theme_options = {
    "show_toc_level": 2,
    "use_download_button": False,
    "navbar_persistent": [],
}
html_sidebars = {"**": ["navbar-logo.html", "sbt-sidebar-nav.html"]}
html_copy_source = False
# Fonts and mathematics come with the theme: a page asks no other site for anything.
html_static_path: list[str] = []

autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
# Docstrings write code as Markdown does.
default_role = "code"

# Types of other packages, and those of signatures that have no public name: no page has them.
nitpick_ignore_regex = [("py:.*", r"(?!pallas_bridge\.(?!_src)).*")]

# Unions that signatures name; those that have another as a part stand before it.
TYPES = {"Schedule": Schedule, "Mask": Mask, "ArrayLike": ArrayLike, "DTypeLike": DTypeLike}

API = "reference/python.md"
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")


def without_links_out(app: Sphinx, name: str, source: list[str]) -> None:
    """Turns links to files of the repository, outside of docs/, into their paths in the repository.

    On a page in the repository they lead to the file; the site holds docs/ alone. Functions' names
    that link to a section of the reference there link to the functions here.
    """
    docs = Path(app.srcdir)
    page = docs / f"{name}.md"

    def replaced(match: re.Match[str]) -> str:
        text, path, _ = match.groups()
        file = (page.parent / path).resolve()
        if not file.exists():
            logging.getLogger(__name__).warning("%s links to %s, which is not there", page, path)
        if file == docs / API and "`" in text:
            return re.sub(r"`([\w.]+)`", r"{py:obj}`\1 <pallas_bridge.\1>`", text)
        if file.is_relative_to(docs):
            return match[0]
        place = file.relative_to(ROOT).as_posix()
        return f"`{place}`" if place in text or text == path else f"{text} (`{place}`)"

    source[0] = LINK.sub(replaced, source[0])


def with_names_of_types(
    app: Sphinx,
    what: str,
    name: str,
    obj: type,
    options: dict[str, object],
    arguments: str | None,
    returns: str | None,
) -> tuple[str | None, str | None]:
    """Writes names of types in a signature in the place of the unions that they stand for.

    The arguments of a class are those of its constructor, not those of Flax's metaclass.
    """
    if what == "class" and "__init__" in vars(obj) and "**kwargs" in (arguments or ""):
        constructor = inspect.signature(obj.__init__, bound_method=True)
        arguments = inspect.stringify_signature(
            constructor, show_return_annotation=False, unqualified_typehints=True
        )
    for alias, union in TYPES.items():
        text = stringify_annotation(union, "smart")
        arguments, returns = (part and part.replace(text, alias) for part in (arguments, returns))
    return arguments and re.sub(r"<class 'jax\.numpy\.(\w+)'>", r"jnp.\1", arguments), returns


def link_public_name(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, shown: Element
) -> reference | None:
    """Links a type, which signatures name by the module that it is in, to its public name."""
    target = node.get("reftarget", "")
    if target.startswith("pallas_bridge._src."):
        for public, found in env.domains.python_domain.objects.items():
            if public.rpartition(".")[2] == target.rpartition(".")[2]:
                where = node["refdoc"], found.docname, found.node_id
                return make_refnode(app.builder, *where, shown, public)
    return None


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", without_links_out)
    app.connect("autodoc-process-signature", with_names_of_types)
    app.connect("missing-reference", link_public_name)

    analyze = ModuleAnalyzer.analyze

    def without_overloads(self: ModuleAnalyzer) -> None:
        """Forgets overloads, in whose signatures defaults are `...`."""
        analyze(self)
        self.overloads = {}

    ModuleAnalyzer.analyze = without_overloads
