"""The command line: see `python -m train --help`."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from command_line import INTERRUPTED, Parser

from .config import (
    DTYPES,
    LAYER_CHOICES,
    LOOP_CHOICES,
    LOSS_CHOICES,
    MATMULS,
    MESH_AXES,
    OPTIMIZERS,
    PRESETS,
    REMAT_CHOICES,
    InputError,
    Options,
    RunError,
    parse_mesh,
)


def parse(argv: Sequence[str] | None) -> Options:
    """Reads the command line, from `argv` or else from the process."""
    default = Options()
    parser = Parser(
        prog="train",
        description="Trains a decoder-only transformer, or a hybrid, on real text.",
        epilog="Exit codes: 0 finished, 1 memory or disk has no room, 2 bad input, 130 Ctrl-C.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    loss, layer = ", ".join(LOSS_CHOICES), ", ".join(LAYER_CHOICES)
    add("--model_size", default=default.model_size, help=f"preset: {', '.join(PRESETS)}")
    add("--batch_size", type=int, help="sequences of a step (default: the preset's)")
    add("--context_length", type=int, help="tokens of a sequence (default: the preset's)")
    add("--vocab_size", type=int, help="columns of the logits (default: the preset's)")
    add("--num_train_steps", type=int, default=default.num_train_steps)
    add("--ce_kernel_type", default=default.ce_kernel_type, help=f"the loss: {loss}")
    add("--norm_kernel", default=default.norm_kernel, help=f"RMSNorm: {layer}")
    add("--mlp_kernel", default=default.mlp_kernel, help=f"SwiGLU: {layer}")
    add("--attention_kernel", default=default.attention_kernel, help=f"attention: {layer}")
    linear = f"linear attention and the delta rule of a hybrid: {layer}"
    add("--linear_attention_kernel", default=default.linear_attention_kernel, help=linear)
    add("--conv_kernel", default=default.conv_kernel, help=f"convolution of a hybrid: {layer}")
    matmul = f"matrices of attention and feed-forward layers: {', '.join(MATMULS)}"
    add("--matmul", default=default.matmul, help=matmul)
    add("--block_pattern", help="blocks of a hybrid, such as MDMA: Mamba-2, DeltaNet, attention")
    add("--dtype", default=default.dtype, help=f"what is computed in: {', '.join(DTYPES)}")
    params = f"parameters: {', '.join(DTYPES)}; bfloat16 is rounded stochastically"
    add("--param_dtype", default=default.param_dtype, help=params)
    add("--optimizer", default=default.optimizer, help=", ".join(OPTIMIZERS))
    add("--learning_rate", type=float, default=default.learning_rate)
    remat = f"what the backward pass computes again: {', '.join(REMAT_CHOICES)}; alone, full"
    add("--remat", nargs="?", const="full", default=default.remat, help=remat)
    loop = f"how layers follow each other: {', '.join(LOOP_CHOICES)}"
    add("--layer_loop", default=default.layer_loop, help=loop)
    add("--mesh", default="", help=f"such as data=2,model=4; axes: {', '.join(MESH_AXES)}")
    sequence = "on, off: whether model shards the residual stream along the sequence"
    add("--sequence_parallel", default=default.sequence_parallel, help=sequence)
    add("--seed", type=int, default=default.seed, help="of parameters and of the data's order")
    add("--permute_batch", action="store_true", help="sum a batch in another order")
    add("--text", type=Path, nargs="+", default=(), help="UTF-8 files (default: this repository's)")
    add("--resume", type=Path, metavar="DIR", help="go on from the newest checkpoint there")
    add("--checkpoint_dir", type=Path, metavar="DIR", help="(default: that of --resume)")
    add("--checkpoint_every", type=int, default=0, help="steps; 0 for the end alone")
    add("--memory_budget", type=float, metavar="GIB", help="the most memory a step may take")
    add("--log", type=Path, metavar="FILE.jsonl", help="run log, docs/reference/run-log.md")
    add("--wandb", action="store_true", help="send the log to Weights & Biases")
    add("--profile", type=Path, metavar="DIR", help="profile the last steps, and say what took it")
    values = vars(parser.parse_args(argv))
    return Options(**{**values, "text": tuple(values["text"])})


def limit_gpu_memory(gib: float) -> None:
    """Has XLA's allocator on GPUs take no more; before JAX starts. Does nothing without a GPU."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return
    total = float(found.splitlines()[0]) / 1024
    # Its old name beside it is an error.
    os.environ.pop("XLA_PYTHON_CLIENT_MEM_FRACTION", None)
    os.environ["XLA_CLIENT_MEM_FRACTION"] = f"{min(gib / total, 1.0):.4f}"


def missing_package(error: ModuleNotFoundError) -> str:
    """Returns which package is not installed, and how to install it."""
    files = ("jax", "real", "train")
    listed = " ".join(f"-r scripts/requirements-{name}.txt" for name in files)
    install = "./pallas_bridge" if error.name == "pallas_bridge" else f"--no-deps {listed}"
    return f"the package {error.name} is not installed: run pip install {install}"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    options = parse(argv)
    try:
        if options.memory_budget is not None:
            limit_gpu_memory(options.memory_budget)
        devices = 1
        for size in parse_mesh(options.mesh).values():
            devices *= size
        import jax

        if options.profile is not None:
            from .breakdown import show_kernels

            show_kernels(os.environ)
        if devices > 1:
            # On a CPU, as many virtual devices as the mesh has, unless its backend runs already.
            with contextlib.suppress(RuntimeError):
                jax.config.update("jax_num_cpu_devices", devices)
        from .loop import train

        outcome = train(options, lambda line: print(line, flush=True))
    except (InputError, RunError) as error:
        print(f"train: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    except ModuleNotFoundError as error:
        print(f"train: error: {missing_package(error)}", file=sys.stderr)
        return 2
    return INTERRUPTED if outcome.status == "interrupted" else 0


if __name__ == "__main__":
    sys.exit(main())
