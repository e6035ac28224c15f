"""What activations are to the rest of the package."""

from typing import get_args

from ..operation import Operation
from .options import Kind, Layout

OPERATION = Operation(
    "activation",
    target="xentile_activation_forward",
    falls_back=True,
    variants=tuple(
        f"{kind} {layout}"
        for kind in get_args(Kind)
        for layout in get_args(Layout)
        if layout != "apart"
    ),
    # Of docs/internals/activation.md, which has the figures.
    notes=tuple(
        (platform, "of gate and up in two arrays XLA's own program") for platform in ("cpu", "cuda")
    ),
)
