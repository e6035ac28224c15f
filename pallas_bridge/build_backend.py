"""Builds the package in this folder for a frontend that was called at the root of the repository.

Each function is hatchling's of PEP 517 or PEP 660, run in this folder.
"""

import os
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import Any

from hatchling import build


def _here(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a hook of hatchling's that runs in this folder; its folder arguments stay right."""

    def run(*folders: Any, **keywords: Any) -> Any:
        absolute = [os.path.abspath(one) if isinstance(one, str) else one for one in folders]
        with chdir(Path(__file__).resolve().parent):
            return hook(*absolute, **keywords)

    return run


build_wheel = _here(build.build_wheel)
build_sdist = _here(build.build_sdist)
build_editable = _here(build.build_editable)
get_requires_for_build_wheel = _here(build.get_requires_for_build_wheel)
get_requires_for_build_sdist = _here(build.get_requires_for_build_sdist)
get_requires_for_build_editable = _here(build.get_requires_for_build_editable)
