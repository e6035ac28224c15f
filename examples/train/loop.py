"""The training loop: steps, progress, records, checkpoints, and an end in good order."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

from . import breakdown, data, model
from . import log as logs
from .checkpoint import Checkpoints
from .config import Config, Options, RunError, resolve
from .step import Program, kernels_within, make_program, program_bytes, with_kernels

GIB = 2**30
# Steps that --profile records, the last of a run.
PROFILED = 3


@dataclass
class Outcome:
    """How a run ended: "finished" or "interrupted", after `step` steps; its losses by step."""

    status: str
    step: int
    losses: dict[int, float]


@contextmanager
def catch_interrupt() -> Iterator[Callable[[], bool]]:
    """Yields what tells whether Ctrl-C was pressed; a second one stops at once."""
    is_pressed = False

    def handler(*_: Any) -> None:
        nonlocal is_pressed
        if is_pressed:
            raise KeyboardInterrupt
        is_pressed = True

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield lambda: is_pressed
    finally:
        signal.signal(signal.SIGINT, before)


def train(options: Options, say: Callable[[str], None] = print) -> Outcome:
    """Runs what the options say.

    Args:
        options: The run.
        say: Takes each line for the terminal.

    Returns:
        How it ended.

    Raises:
        InputError: A value is wrong; nothing was computed.
        RunError: Memory or a disk has no room; the log's last record says so.
    """
    config = with_kernels(resolve(options))
    program = make_program(config)
    batches = data.load(config)
    is_resumed = options.resume is not None
    sinks: list[logs.Log] = []
    if options.log is not None:
        sinks.append(logs.Lines(options.log, is_resumed))
    if options.wandb:
        sinks.append(logs.WandB())
    tee = logs.Tee(sinks)
    try:
        with catch_interrupt() as is_interrupted:
            run = Run(config, program, batches, tee, say, is_interrupted)
            outcome = run.train()
        tee.write(logs.end(outcome.status, step=outcome.step))
        return outcome
    except BaseException as error:
        # The log itself may be what failed.
        with suppress(RunError):
            tee.write(logs.end("failed", error=str(error) or type(error).__name__))
        raise
    finally:
        tee.close()


@dataclass
class Run:
    """One run, from its first record to its last step."""

    config: Config
    program: Program
    batches: data.Batches
    log: logs.Log
    say: Callable[[str], None]
    is_interrupted: Callable[[], bool]

    def train(self) -> Outcome:
        """Compiles, trains, and writes checkpoints."""
        config, options = self.config, self.config.options
        folder = options.checkpoint_dir or options.resume
        checkpoints = None if folder is None else Checkpoints(folder, config)
        first = 0
        if options.resume is None:
            state = self.program.initial()
        else:
            first, state = Checkpoints(options.resume, config).restore(self.program.abstract())
            self.say(f"resumed at step {first} from {options.resume}")
        if first >= options.num_train_steps:
            self.say(f"--num_train_steps {options.num_train_steps} are done already")
        self.log.write(self.start_record(first))
        compiled = self.compile()
        losses: dict[int, float] = {}
        step = first
        try:
            state, step = self.steps(compiled, state, first, losses, checkpoints)
        except RunError:
            raise
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            # What compiles other programs on a GPU may need the room.
            for leaf in jax.tree.leaves(state):
                leaf.delete()
            raise self.out_of_memory(program_bytes(compiled)) from error
        if checkpoints is not None:
            checkpoints.save(step, state)
            self.say(f"checkpoint of step {step} in {checkpoints.folder}")
        status = "interrupted" if step < options.num_train_steps else "finished"
        return Outcome(status, step, losses)

    def steps(
        self,
        compiled: Any,
        state: Any,
        first: int,
        losses: dict[int, float],
        checkpoints: Checkpoints | None,
    ) -> tuple[Any, int]:
        """Runs the steps that are left, to the end or to Ctrl-C; returns the state and the step."""
        options = self.config.options
        profiler = None
        if options.profile is not None:
            last = options.num_train_steps
            profiler = breakdown.Profiler(options.profile, max(first, last - PROFILED), last)
        place = self.program.batch_sharding()
        step, tokens = first, self.config.batch * self.config.length
        while step < options.num_train_steps and not self.is_interrupted():
            if profiler is not None:
                profiler.before(step)
            started = time.perf_counter()
            batch = jax.device_put(self.batches(step), place)
            state, figures = compiled(state, batch)
            loss, norm = float(figures["loss"]), float(figures["gradient_norm"])
            seconds = time.perf_counter() - started
            step += 1
            if profiler is not None:
                profiler.after(step)
            losses[step] = loss
            record = {
                "record": "step",
                "step": step,
                "tokens": step * tokens,
                "loss": loss,
                "gradient_norm": norm,
                "tokens_per_second": tokens / seconds,
                **peak(compiled),
            }
            self.say(progress(record))
            try:
                self.log.write(record)
            except RunError:
                # A full disk of the log need not lose the run.
                if checkpoints is not None:
                    checkpoints.save(step, state)
                raise
            if checkpoints and options.checkpoint_every and step % options.checkpoint_every == 0:
                checkpoints.save(step, state)
        if profiler is not None:
            profiler.close()
        if profiler is not None and profiler.folder_of_trace is not None:
            found = breakdown.measure_shares(profiler.folder_of_trace, compiled.as_text())
            temp, logits = self.program.loss_bytes()
            self.say(breakdown.table(found, self.config, temp, logits))
            self.log.write(
                {
                    "record": "breakdown",
                    "share": found,
                    "loss_temporary_bytes": temp,
                    "logits_bytes": logits,
                }
            )
        return state, step

    def start_record(self, first: int) -> logs.Record:
        """The first record, and the lines that say what runs."""
        config = self.config
        params = self.program.abstract()["params"]
        count = sum(leaf.size for leaf in jax.tree.leaves(params))
        windows = len(self.batches.ids)
        attention = (
            "within segments"
            if model.is_masked(config.length)
            else f"over all of a sequence, as {config.length} tokens are too many for a mask"
        )
        vocab = int(self.batches.ids.max()) + 1
        device = jax.devices()[0]
        self.say(
            f"{config.options.model_size}: {count / 1e6:.2f} M parameters, V = "
            f"{config.model.vocab} (text uses ids below {vocab}), {config.batch} x "
            f"{config.length} tokens a step of {windows} sequences, "
            f"{config.devices} x {device.device_kind}"
        )
        options = config.options
        hybrid = config.model.hybrid
        blocks = (
            ""
            if hybrid is None
            else f"; blocks {hybrid.pattern}, linear attention {options.linear_attention_kernel}, "
            f"convolution {options.conv_kernel}, within segments"
        )
        self.say(
            f"loss {options.ce_kernel_type}, norm {options.norm_kernel}, mlp {options.mlp_kernel}, "
            f"attention {options.attention_kernel} {attention}{blocks}; {options.dtype}"
        )
        used = {
            "model": config.shape(),
            "batch_size": config.batch,
            "context_length": config.length,
        }
        return logs.start(
            "train",
            {**{key: plain(value) for key, value in asdict(config.options).items()}, **used},
            first_step=first,
            parameters=count,
            sequences=windows,
            text_sha256=self.batches.digest,
            attention=attention,
            device=device.device_kind,
        )

    def compile(self) -> Any:
        """The step, within the budget of memory where there is one.

        Raises:
            RunError: It does not fit.
        """
        started = time.perf_counter()
        try:
            compiled = self.program.compile()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise self.out_of_memory(None) from error
        needed = program_bytes(compiled)
        seconds = time.perf_counter() - started
        self.say(f"compiled in {seconds:.1f} s; the program holds {needed / GIB:.3f} GiB")
        self.log.write({"record": "compiled", "seconds": seconds, "program_bytes": needed})
        budget = self.config.options.memory_budget
        # On GPUs the allocator says when there is no more.
        is_held_here = jax.default_backend() != "gpu"
        if budget is not None and is_held_here and needed > budget * GIB:
            raise self.out_of_memory(needed)
        return compiled

    def out_of_memory(self, needed: int | None) -> RunError:
        """What to tell of a step that has no room: what it takes, and which kernel would fit."""
        budget = self.config.options.memory_budget
        limit = None if budget is None else int(budget * GIB)
        if limit is None:
            limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
        kernel = self.config.options.ce_kernel_type
        takes = "" if needed is None else f" takes {needed / GIB:.3f} GiB and"
        of = "" if limit is None else f" of {limit / GIB:.3f} GiB"
        fits = {} if limit is None else kernels_within(self.config, limit)
        names = [f"{name} ({size / GIB:.3f} GiB)" for name, size in fits.items()]
        hint = (
            f"--ce_kernel_type {' or '.join(names)} would fit"
            if names
            else "no other kernel fits: lower --batch_size or --context_length, or set --remat"
        )
        return RunError(f"out of memory: the step with {kernel}{takes} has no room{of}: {hint}")


def plain(value: Any) -> Any:
    """An option as JSON has it: paths as text, tuples as lists."""
    if isinstance(value, tuple):
        return [plain(one) for one in value]
    return str(value) if isinstance(value, Path) else value


def peak(compiled: Any) -> dict[str, Any]:
    """The peak of memory so far: of the device where it counts, else of the compiled program."""
    stats = jax.devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return {"peak_bytes": int(stats["peak_bytes_in_use"]), "peak_source": "device"}
    return {"peak_bytes": program_bytes(compiled), "peak_source": "compiled"}


def progress(record: logs.Record) -> str:
    """The line of a step."""
    return (
        f"step {record['step']:5d}  tokens {record['tokens']:9d}  loss {record['loss']:8.4f}  "
        f"{record['tokens_per_second']:9.0f} tokens/s  gradient norm "
        f"{record['gradient_norm']:8.4f}  peak {record['peak_bytes'] / GIB:.3f} GiB"
        f"{' (compiled)' if record['peak_source'] == 'compiled' else ''}"
    )
