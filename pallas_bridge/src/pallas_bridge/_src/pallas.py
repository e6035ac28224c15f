"""Kernels in Pallas: for which TPU one is compiled."""

from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class Target:
    """What a kernel must know of the TPU that it is for; of one core of it."""

    # As JAX names the kind of device.
    name: str
    vmem_bytes: int
    # Whether its vector units compare bf16 as it is, two to a word.
    compares_bf16: bool
    # What rows of 16-bit arrays in HBM are padded to a multiple of.
    rows_of_16_bits: int
    # Pallas' interpreter in the place of a TPU.
    interpret: Any = False


# JAX's own table (`pltpu.get_tpu_info`) wants a device or a mesh in scope, which there need not be
# where a program is compiled ahead of time; a test compares.
TARGETS = {
    "TPU v5 lite": Target("TPU v5 lite", 128 << 20, False, 8),
    "TPU v5": Target("TPU v5", 64 << 20, False, 8),
    "TPU v6 lite": Target("TPU v6 lite", 128 << 20, True, 8),
    "TPU7x": Target("TPU7x", 64 << 20, True, 16),
}
# For a program that does not say what it is for: what fits in all of these.
ANY = Target("any TPU from v5e on", 64 << 20, False, 8)
# For Pallas' interpreter, which pads nothing.
INTERPRETER = Target("the interpreter", 64 << 20, True, 8)

# Tests set it to `pltpu.InterpretParams`: then "pallas" runs on the CPU.
interpret_params: Any = None


def target(module_context: Any) -> Target:
    """Returns what a module is lowered for.

    Raises:
        NotImplementedError: its devices are TPUs that nobody has tried.
    """
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    devices = getattr(module_context.axis_context, "device_assignment", None) or ()
    kinds = [device.device_kind for device in devices if device.platform == "tpu"]
    if abstract is not None:
        kinds.insert(0, abstract.device_kind)
    if not kinds:
        return ANY
    kind = kinds[0]
    if kind not in TARGETS:
        raise NotImplementedError(
            f"no kernels for {kind}; there are for {', '.join(TARGETS)}, and "
            'implementation="reference" runs everywhere'
        )
    return TARGETS[kind]
