"""The platform that the tests run on."""

import os

PLATFORM = os.environ.get("XENTILE_TEST_PLATFORM", "cpu")
if PLATFORM not in ("cpu", "cuda"):
    raise ValueError(f"XENTILE_TEST_PLATFORM is {PLATFORM!r}; it must be cpu or cuda")
