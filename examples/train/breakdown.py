"""Where a step's time goes, by the scopes of the model, from a JAX profile."""

import re
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from .config import Config

# The scopes (`jax.named_scope`) of model.py, mixers.py, losses.py and step.py, as they are printed.
PARTS = (
    "attention",
    "linear_attention",
    "delta_rule",
    "convolution",
    "gates",
    "projections",
    "norms",
    "activation",
    "position",
    "loss",
    "optimizer",
    "embedding",
)
OTHER = "other"
# What holds other instructions, whose time is counted at these.
CONTAINERS = {"while", "call", "conditional", "async-start", "async-done"}
INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = .*?[\]})] ([a-z][\w\-]*)\(")
COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")


def show_kernels(environment: MutableMapping[str, str]) -> None:
    """Has XLA start each kernel by itself on GPUs, in processes that JAX starts in after this.

    A profile has no names of what a CUDA graph starts.
    """
    flags = environment.get("XLA_FLAGS", "")
    environment["XLA_FLAGS"] = f"{flags} --xla_gpu_enable_command_buffer=".strip()


class Profiler:
    """Records steps `first` to `last` of a run."""

    def __init__(self, folder: Path, first: int, last: int, is_of_kernels: bool = False) -> None:
        """Writes to `folder`; steps count from 0, and `last` is not in.

        With `is_of_kernels` a GPU's profile has kernels alone, without what the host did.
        """
        self.folder, self.first, self.last = folder, first, last
        self.is_of_kernels = is_of_kernels
        self.folder_of_trace: Path | None = None
        self.is_running = False

    def before(self, step: int) -> None:
        """Starts at the first step."""
        if step == self.first:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0
            if self.is_of_kernels and jax.default_backend() == "gpu":
                # Kernels have their names without the host's events, and are started sooner.
                options.host_tracer_level = 0
            jax.profiler.start_trace(self.folder, profiler_options=options)
            self.is_running = True

    def after(self, step: int) -> None:
        """Stops after the last."""
        if step == self.last:
            self.close()

    def close(self) -> None:
        """Stops, where steps were recorded: all of them, or those up to Ctrl-C."""
        if self.is_running:
            jax.profiler.stop_trace()
            self.is_running, self.folder_of_trace = False, self.folder


def part_of(op_name: str) -> str:
    """The part that a scope's name has, the innermost; "" for none."""
    words = re.findall(r"[A-Za-z_]+", op_name)
    return next((word for word in reversed(words) if word in PARTS), "")


def parts_of_program(
    text: str, part_of: Callable[[str], str] = part_of
) -> tuple[dict[str, str], set[str]]:
    """Reads a compiled program's text; `part_of` gives the part of a scope's name, "" for none.

    Returns:
        The part of each instruction by its name: its own scope's, or else that of most of the
        instructions in the computation that it calls; and the names of containers.
    """
    own: dict[str, str] = {}
    called: dict[str, str] = {}
    inside: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    containers: set[str] = set()
    computation = ""
    for line in text.splitlines():
        if opened := COMPUTATION.match(line):
            computation = opened[1]
        if not (found := INSTRUCTION.match(line)):
            continue
        name, opcode = found.groups()
        scope = re.search(r'op_name="([^"]*)"', line)
        own[name] = part_of(scope[1]) if scope else ""
        if own[name]:
            inside[computation][own[name]] += 1
        if opcode in CONTAINERS:
            containers.add(name)
        if calls := re.search(r"calls=%?([\w.\-]+)", line):
            called[name] = calls[1]
    for name, computation in called.items():
        votes = inside.get(computation)
        if not own[name] and votes:
            own[name] = max(votes, key=lambda part: votes[part])
    return {name: part or OTHER for name, part in own.items()}, containers


def measure_shares(folder: Path, text: str) -> dict[str, float]:
    """The share of each part in the time of a trace's instructions, of the program `text`.

    Instructions that ran at the same time on several threads or streams count each.

    Raises:
        ValueError: The trace has no instruction of the program.
    """
    parts, containers = parts_of_program(text)
    times: dict[str, float] = defaultdict(float)
    traced = instructions_of_trace(folder, parts.keys() - containers)
    for name, (took, _) in traced.instructions.items():
        times[parts[name]] += took
    total = sum(times.values())
    return {part: times.get(part, 0.0) / total for part in (*PARTS, OTHER)}


@dataclass(frozen=True)
class Traced:
    """What a trace has of a program's instructions."""

    # The nanoseconds of each by its name, and how often it ran.
    instructions: dict[str, tuple[float, int]]
    # Nanoseconds from the first to the last in which a device ran none of them; None of a host's
    # threads.
    idle: float | None


def instructions_of_trace(folder: Path, names: Container[str]) -> Traced:
    """What a trace has of the instructions in `names`, on devices where it has any, or on a host.

    Raises:
        ValueError: The trace has no time of any instruction in `names`.
    """
    files = sorted(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    if not files:
        raise ValueError(f"folder {folder} has no profile: name one that JAX wrote")
    on_device: dict[str, tuple[float, int]] = {}
    on_host: dict[str, tuple[float, int]] = {}
    idle = []
    for plane in jax.profiler.ProfileData.from_file(str(files[-1])).planes:
        is_device = plane.name.startswith("/device:")
        found = on_device if is_device else on_host
        spans = []
        for line in plane.lines:
            for event in line.events:
                name = instruction(event)
                if name is not None and name in names:
                    took, count = found.get(name, (0.0, 0))
                    found[name] = took + event.duration_ns, count + 1
                    spans.append((event.start_ns, event.start_ns + event.duration_ns))
        if is_device and spans:
            idle.append(between(spans))
    # What a host says of a device's instructions is that it launched them.
    instructions = on_device or on_host
    if not sum(took for took, _ in instructions.values()):
        raise ValueError(f"profile {files[-1]} has no instruction of the step")
    return Traced(instructions, max(idle, default=None))


def between(spans: Iterable[tuple[float, float]]) -> float:
    """How much of the time from the first start to the last end lies in none of the spans."""
    gaps, reached = 0.0, None
    for start, end in sorted(spans):
        if reached is not None and start > reached:
            gaps += start - reached
        reached = end if reached is None else max(reached, end)
    return gaps


def instruction(event: Any) -> str | None:
    """The instruction that an event is of, or None."""
    return next((str(value) for key, value in event.stats if key == "hlo_op"), None)


def table(shares: dict[str, float], config: Config, temporary: int, logits: int) -> str:
    """What `measure_shares` found as a table without shares of 0, with what the loss holds."""
    rows = [f"| {part} | {share:.1%} |" for part, share in shares.items() if share]
    kernel = config.options.ce_kernel_type
    memory = (
        f"the loss by {kernel} holds {temporary / 2**20:.1f} MiB beyond operands and results; "
        f"its logits would take {logits / 2**20:.1f} MiB"
    )
    return "\n".join(["| part of a step | share of time |", "| --- | --- |", *rows, memory])
