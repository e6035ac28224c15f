"""Lets processes of tests share a folder of programs that XLA compiled.

    python -m pytest -p scripts.pytest_programs

JAX writes an entry of its compilation cache in place, so that a process beside this one would find
half of it. Here an entry gets its name once it is whole.
"""

import os
import tempfile
from unittest import mock

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart() -> None:
    """Replaces how JAX writes entries, where there is JAX."""
    try:
        from jax._src.lru_cache import _CACHE_SUFFIX, LRUCache
    except ImportError:
        return

    def put(self: LRUCache, key: str, value: bytes) -> None:
        path = os.path.join(str(self.path), key + _CACHE_SUFFIX)
        if os.path.exists(path):
            return
        with tempfile.NamedTemporaryFile(dir=str(self.path), delete=False) as file:
            file.write(value)
        os.replace(file.name, path)

    mock.patch.object(LRUCache, "put", put).start()
