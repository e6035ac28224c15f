"""How Sphinx builds the site: `python scripts/pages.py build`, which scripts/tiers/docs.sh runs."""

import os
import re
import sys
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.util import logging

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "pallas_bridge" / "src"))
# Nothing is computed here: docstrings are read.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

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
html_theme_options = {"show_toc_level": 2, "use_download_button": False}
html_copy_source = False
# Fonts and mathematics come with the theme: a page asks no other site for anything.
html_static_path: list[str] = []

# Docstrings tell types, and overloads would hide the defaults.
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
# Docstrings write code as Markdown does.
default_role = "code"

LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")


def without_links_out(app: Sphinx, name: str, source: list[str]) -> None:
    """Turns links to files of the repository, outside of docs/, into their paths in the repository.

    On a page in the repository they lead to the file; the site holds docs/ alone.
    """
    docs = Path(app.srcdir)
    page = docs / f"{name}.md"

    def replaced(match: re.Match[str]) -> str:
        text, path, _ = match.groups()
        file = (page.parent / path).resolve()
        if not file.exists():
            logging.getLogger(__name__).warning("%s links to %s, which is not there", page, path)
        if file.is_relative_to(docs):
            return match[0]
        place = file.relative_to(ROOT).as_posix()
        return f"`{place}`" if place in text or text == path else f"{text} (`{place}`)"

    source[0] = LINK.sub(replaced, source[0])


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", without_links_out)
