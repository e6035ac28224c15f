"""What optimizers are to the rest of the package."""

from ..operation import Operation

BY_XLA = "XLA's own program"
ADAMW = Operation("adamw", "xentile_adamw", falls_back=True, without=(("cuda", BY_XLA),))
ADAMW_8BIT = Operation("adamw8bit", "xentile_adamw_8bit", falls_back=True)
LION_8BIT = Operation("lion8bit", "xentile_lion_8bit", falls_back=True, without=(("cuda", BY_XLA),))
MUON = Operation(
    "muon",
    "xentile_newton_schulz",
    implementations=("reference",),
    notes=(("cuda", "Newton-Schulz products of large matrices have kernels on Hopper"),),
    without=tuple((platform, BY_XLA) for platform in ("cpu", "tpu")),
)
