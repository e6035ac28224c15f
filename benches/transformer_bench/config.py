"""What is measured: sizes, and settings from a YAML file and the command line."""

import dataclasses
import itertools
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from train.config import InputError

from . import described

GIB = 2**30
KERNELS = ("norm", "attention", "mlp", "loss")
ATTENTION = ("xla", "ours", "cudnn")
PHASES = ("training", "prefill", "decode")
POLICIES = ("float32", "bfloat16", "mixed")
MODES = ("forward", "forward_backward", "step")


class Dims(NamedTuple):
    """A decoder's dimensions: hidden size D, columns F of the gate, blocks, heads.

    Of 0 heads of keys there are as many as of queries, and 0 columns of a head are D / heads.
    `qk_norm` is 1 where queries and keys are normalised by head, and `tied` where the head is the
    embedding.
    """

    width: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int = 0
    head_width: int = 0
    qk_norm: int = 0
    tied: int = 0

    def parameters(self, vocab: int) -> int:
        """The number of parameters; SwiGLU has three matrices, and an untied head one."""
        columns = 2 * (self.heads + self.kv_heads) * self.head_width
        matrices = self.width * columns + 3 * self.width * self.ffn
        norms = 2 * self.width + (2 * self.head_width if self.qk_norm else 0)
        tables = (1 if self.tied else 2) * vocab * self.width
        return self.layers * (matrices + norms) + self.width + tables


SIZES = {
    # For tests.
    "test": Dims(32, 64, 2, 4),
    "tiny": Dims(128, 384, 4, 4),
    # Of GPT-2 (Radford et al., 2019), and GPT-3's 2.7B (Brown et al., 2020, arXiv:2005.14165).
    "small": Dims(768, 3072, 12, 12),
    "medium": Dims(1024, 4096, 24, 16),
    "large": Dims(1280, 5120, 36, 20),
    "xl": Dims(1600, 6400, 48, 25),
    "2.7B": Dims(2560, 10240, 32, 32),
    # Dimensions of Qwen3-0.6B, from its published configuration.
    "qwen3-0.6b": Dims(1024, 3072, 28, 16, 8, 128, 1, 1),
}


@dataclass(frozen=True)
class Spec:
    """What a command measures; each command reads the keys that it needs.

    Attributes:
        sizes: Names, of `SIZES` or of `dims`.
        dims: Sizes of one's own: name to [width, ffn, layers, heads], and where they are others
            than these say, heads of keys and columns of a head; then 1 or 0 for norms of heads of
            queries and keys, and for a head that is the embedding.
        lengths: Tokens of a sequence.
        batch: Sequences of a step.
        vocab: Columns of the logits.
        policies: `float32`; `bfloat16`, parameters and optimizer too; `mixed`, float32 parameters.
        norm, attention, mlp, loss: Kernels, `xla` or `ours`; attention may be `cudnn`. `auto` is
            `ours`, which is what the operation takes by itself.
        remat: Whether the backward pass recomputes each block.
        modes: `forward`, `forward_backward`, or `step`, which has the optimizer.
        warmups: Steps before those that are timed; a row for each.
        steps: Steps that are timed.
        phases: What `layers` is of: `training`, `prefill`, or `decode` of one token a sequence.
        head_sizes, heads, implementations: Of `attention`, which takes them in place of sizes.
        memory_limit: The most device memory, in GiB; None for what there is.
        gpu: Of `memory`: an NVIDIA GPU that need not be there, for which programs are compiled.
        seed: Of parameters and data.
    """

    sizes: tuple[str, ...] = ("small",)
    dims: dict[str, tuple[int, ...]] = field(default_factory=dict)
    lengths: tuple[int, ...] = (128,)
    batch: int = 4
    vocab: int = 10000
    policies: tuple[str, ...] = ("float32",)
    norm: str = "xla"
    attention: str = "xla"
    mlp: str = "xla"
    loss: str = "xla"
    remat: bool = False
    modes: tuple[str, ...] = ("forward", "forward_backward")
    warmups: tuple[int, ...] = (0, 1, 5)
    steps: int = 10
    phases: tuple[str, ...] = PHASES
    head_sizes: tuple[int, ...] = (16, 32, 64, 128)
    heads: int = 1
    implementations: tuple[str, ...] = ("xla", "ours")
    memory_limit: float | None = None
    gpu: str | None = None
    seed: int = 0

    def dims_of(self, size: str) -> Dims:
        """The dimensions of a size.

        Raises:
            InputError: There is no such size, or its heads don't divide its width.
        """
        known = {**SIZES, **{name: Dims(*of) for name, of in self.dims.items()}}
        if size not in known:
            raise InputError(f"size {size} is unknown: choose from {', '.join(known)}")
        dims = known[size]
        if min(dims[:4]) < 1 or min(dims) < 0:
            raise InputError(f"size {size} has {tuple(dims)}: give whole numbers of 1 or more")
        if not dims.head_width and dims.width % dims.heads:
            raise InputError(
                f"size {size} has {dims.heads} heads, which do not divide its width {dims.width}: "
                "give a number that does"
            )
        if max(dims.qk_norm, dims.tied) > 1:
            raise InputError(
                f"size {size} has {tuple(dims)}: give 0 or 1 for norms of heads and a tied head"
            )
        of_head = dims.head_width or dims.width // dims.heads
        if of_head % 8:
            raise InputError(
                f"size {size} has heads of {of_head} columns: give a width and heads that make it "
                "a multiple of 8"
            )
        kv_heads = dims.kv_heads or dims.heads
        if dims.heads % kv_heads:
            raise InputError(
                f"size {size} has {kv_heads} heads of keys, which do not divide its {dims.heads} "
                "heads: give a number that does"
            )
        return dims._replace(kv_heads=kv_heads, head_width=of_head)

    def parameter_bytes(self, size: str, policy: str) -> int:
        """The bytes of the parameters."""
        return parameter_bytes({**self.dims_of(size)._asdict(), "vocab": self.vocab}, policy)


def load(path: Path | None, overrides: list[str]) -> Spec:
    """Reads a config and the changes of `--set KEY=VALUE`.

    Raises:
        InputError: A file that cannot be read, an unknown key, or a value out of range.
    """
    values: Any = {}
    if path is not None:
        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        except (OSError, ValueError, yaml.YAMLError) as error:
            reason = str(error).splitlines()[0]
            raise InputError(f"config {path} cannot be read ({reason}): name a YAML file") from None
        if not isinstance(values, dict):
            raise InputError(f"config {path} is no mapping: give keys with values")
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise InputError(f"--set {override} has no value: give KEY=VALUE")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            raise InputError(
                f"--set {override} is no YAML: give a value such as 1 or [a, b]"
            ) from None
        place = values
        *outer, last = key.split(".", 1)
        for name in outer:
            place = place.setdefault(name, {})
            if not isinstance(place, dict):
                raise InputError(f"--set {override} looks in {name}, which is no mapping")
        place[last] = value
    return check(values)


def check(values: dict[str, Any]) -> Spec:
    """Returns checked values as a `Spec`.

    Raises:
        InputError: An unknown key, a value of another kind or out of range.
    """
    known = {one.name: one for one in dataclasses.fields(Spec)}
    default = Spec()
    taken: dict[str, Any] = {}
    for key, value in values.items():
        if key not in known:
            raise InputError(f"key {key} is unknown: choose from {', '.join(known)}")
        # `ours` is the operation with its default implementation.
        value = "ours" if key in KERNELS and value == "auto" else value
        taken[key] = converted(key, value, getattr(default, key))
    spec = Spec(**taken)
    for key, least in (("batch", 1), ("vocab", 8), ("steps", 1), ("heads", 1)):
        if getattr(spec, key) < least:
            raise InputError(f"{key} {getattr(spec, key)} is too small: give {least} or more")
    for key, least in (("lengths", 2), ("warmups", 0)):
        for value in getattr(spec, key):
            if value < least:
                raise InputError(f"{key} has {value}, which is too small: give {least} or more")
    for key, choices in (
        ("policies", POLICIES),
        ("modes", MODES),
        ("phases", PHASES),
        ("implementations", ATTENTION),
    ):
        for value in getattr(spec, key):
            if value not in choices:
                raise InputError(f"{key} has {value}: choose from {', '.join(choices)}")
    for key in KERNELS:
        kernels = ATTENTION if key == "attention" else ATTENTION[:2]
        if getattr(spec, key) not in kernels:
            names = ", ".join((*kernels, "auto"))
            raise InputError(f"{key} is {getattr(spec, key)}: choose from {names}")
    for value in spec.head_sizes:
        if value < 8 or value % 8:
            raise InputError(f"head_sizes has {value}: give multiples of 8")
    for size in spec.sizes:
        spec.dims_of(size)
    limit = spec.memory_limit
    # Written so that NaN is refused.
    if limit is not None and not 0 < limit < float("inf"):
        raise InputError(f"memory_limit {limit} is not a positive number of GiB")
    return spec


def check_limit(spec: Spec) -> None:
    """Checks that the memory limit holds the parameters of some size.

    Raises:
        InputError: It is below the parameters of every size asked for.
    """
    limit = spec.memory_limit
    if limit is None:
        return
    each = {
        (size, policy): spec.parameter_bytes(size, policy)
        for size, policy in itertools.product(spec.sizes, spec.policies)
    }
    (size, policy), least = min(each.items(), key=lambda one: one[1])
    if limit * GIB < least:
        raise InputError(
            f"memory_limit {limit:g} GiB is below the parameters of {size} in {policy}, "
            f"{least / GIB:.3f} GiB: give more"
        )


def check_cudnn(policies: tuple[str, ...]) -> None:
    """Checks that cuDNN's attention can run.

    Raises:
        InputError: There is no NVIDIA GPU, or a policy is float32, which it does not take.
    """
    if shutil.which("nvidia-smi") is None:
        raise InputError("attention by cudnn needs an NVIDIA GPU: choose xla or ours")
    if "float32" in policies:
        raise InputError("attention by cudnn is of 16 bits: leave float32 out of policies")


def converted(key: str, value: Any, default: Any) -> Any:
    """Returns a value as the default's type; one value stands for a list of it.

    Raises:
        InputError: It is of another kind.
    """
    if key == "dims":
        is_right = isinstance(value, dict) and all(
            isinstance(one, list) and len(one) in (4, 6, 8) and all(type(n) is int for n in one)
            for one in value.values()
        )
        if not is_right:
            raise InputError(f"dims is {value}: give NAME: [width, ffn, layers, heads]")
        return {str(name): tuple(one) for name, one in value.items()}
    if key == "memory_limit":
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise InputError(f"memory_limit is {value}: give a number of GiB")
        return value
    if key == "gpu":
        if value is not None and value not in described.names():
            raise InputError(f"gpu is {value}: choose from {', '.join(described.names())}")
        return value
    if isinstance(default, tuple):
        found = value if isinstance(value, list) else [value]
        kind = type(default[0])
        if not found or any(type(one) is not kind for one in found):
            raise InputError(f"{key} is {value}: give a list of {kind.__name__}")
        if len(set(found)) < len(found):
            raise InputError(f"{key} is {value}, which has one twice: give each once")
        return tuple(found)
    if type(value) is not type(default):
        raise InputError(f"{key} is {value}: give a value of type {type(default).__name__}")
    return value


def parameter_bytes(cell: dict[str, Any], policy: str) -> int:
    """The bytes of the parameters of a cell, from its dimensions and vocabulary."""
    dims = Dims(**{name: cell[name] for name in Dims._fields})
    return dims.parameters(cell["vocab"]) * (2 if policy == "bfloat16" else 4)


def models(spec: Spec) -> Iterator[dict[str, Any]]:
    """A cell for each size, length and policy."""
    for size, length, policy in itertools.product(spec.sizes, spec.lengths, spec.policies):
        yield cell_of(spec, size, length, policy)


def cell_of(spec: Spec, size: str, length: int, policy: str) -> dict[str, Any]:
    """The plain values that describe a model to a process."""
    return {
        "size": size,
        **spec.dims_of(size)._asdict(),
        "length": length,
        "batch": spec.batch,
        "vocab": spec.vocab,
        "policy": policy,
        **{kernel: getattr(spec, kernel) for kernel in KERNELS},
        "remat": spec.remat,
        "seed": spec.seed,
        "memory_limit": spec.memory_limit,
    }
