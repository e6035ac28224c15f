"""What a run is: the model's dimensions by preset, and all that the command line says."""

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

LossKernel = Literal["baseline", "fused", "fused_linear"]
LayerKernel = Literal["baseline", "ours"]
Dtype = Literal["bfloat16", "float32"]
Optimizer = Literal["adamw", "adamw8bit", "muon"]
Remat = Literal["none", "selective", "attention", "full"]
LayerLoop = Literal["scan", "unrolled"]
Matmul = Literal["default", "fp8"]

LOSS_KERNELS: tuple[LossKernel, ...] = get_args(LossKernel)
LAYER_KERNELS: tuple[LayerKernel, ...] = get_args(LayerKernel)
DTYPES: tuple[Dtype, ...] = get_args(Dtype)
OPTIMIZERS: tuple[Optimizer, ...] = get_args(Optimizer)
REMATS: tuple[Remat, ...] = get_args(Remat)
LAYER_LOOPS: tuple[LayerLoop, ...] = get_args(LayerLoop)
MATMULS: tuple[Matmul, ...] = get_args(Matmul)
# In the place of a kernel, or of a loop: the fastest that there is.
AUTO = "auto"
LOSS_CHOICES, LAYER_CHOICES = (AUTO, *LOSS_KERNELS), (AUTO, *LAYER_KERNELS)
LOOP_CHOICES = (AUTO, *LAYER_LOOPS)
# What selective keeps in the last N blocks, and attention in those before.
LAST = "selective:N"
REMAT_CHOICES = (*REMATS, LAST)
# data: the batch is split. fsdp: the batch, and every matrix by its hidden axis. model: the
# vocabulary, of the embedding and of the head, the heads, the feed-forward layer and between both
# the sequence.
MESH_AXES = ("data", "fsdp", "model")
# Letters of a hybrid's blocks: Mamba-2, gated DeltaNet, attention.
BLOCKS = ("M", "D", "A")


class InputError(ValueError):
    """Input that the user can correct; its text is the one line that they are shown."""


class RunError(RuntimeError):
    """A run that its machine ended: memory, disk; its text is the one line shown."""


@dataclass(frozen=True)
class Hybrid:
    """What the blocks of a hybrid are, and the dimensions of those without attention.

    Attributes:
        pattern: A letter a block, repeated over the layers: M, Mamba-2; D, gated DeltaNet; A,
            attention. D and A have a feed-forward layer each.
        ssm_heads: Heads of Mamba-2.
        ssm_head_width: Columns of such a head.
        ssm_state: Columns of B and C, rows of a head's state.
        ssm_groups: Heads of B and C, which divide `ssm_heads`.
        delta_heads: Heads of values of the delta rule.
        delta_key_heads: Heads of its queries and keys, which divide `delta_heads`.
        delta_key_width: Columns of a query and of a key.
        delta_value_width: Columns of a value.
        conv_width: Tokens of the causal convolution.
    """

    pattern: str
    ssm_heads: int
    ssm_head_width: int
    ssm_state: int
    ssm_groups: int
    delta_heads: int
    delta_key_heads: int
    delta_key_width: int
    delta_value_width: int
    conv_width: int = 4


@dataclass(frozen=True)
class Model:
    """A decoder's dimensions, as in Qwen and Llama.

    Attributes:
        vocab: V, rows of the embedding and of the head.
        width: D, the hidden size.
        layers: Blocks.
        heads: Query heads.
        kv_heads: Heads of keys and values, which divide `heads`.
        head_width: Columns of a head.
        ffn: F, columns of the gate, and as many of up.
        tied: Whether the head is the embedding.
        qk_norm: Whether queries and keys are normalised by head (Qwen3).
        qkv_bias: Whether queries, keys and values have a bias (Qwen2).
        rope_theta: The base of RoPE's wave lengths.
        norm_eps: What a norm adds to the mean square.
        hybrid: The blocks of a hybrid; None for attention alone.
    """

    vocab: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    ffn: int
    tied: bool = True
    qk_norm: bool = False
    qkv_bias: bool = False
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    hybrid: Hybrid | None = None


@dataclass(frozen=True)
class Preset:
    """A model, and the batch and length that it trains with unless the command line says others."""

    model: Model
    batch_size: int
    context_length: int


PRESETS = {
    # For tests: a second of compiling, milliseconds a step.
    "test": Preset(Model(512, 32, 2, 4, 2, 8, 64, qk_norm=True), 8, 32),
    # The default: a minute on two cores. V is the tokenizer's.
    "tiny": Preset(Model(30522, 128, 4, 4, 2, 32, 384), 4, 128),
    "small": Preset(Model(30522, 512, 8, 8, 4, 64, 1536, tied=False, qk_norm=True), 8, 512),
    # Dimensions of Qwen2.5-0.5B and 1.5B, from their published configurations.
    "qwen2.5-0.5b": Preset(
        Model(151936, 896, 24, 14, 2, 64, 4864, qkv_bias=True, rope_theta=1e6), 4, 8192
    ),
    "qwen2.5-1.5b": Preset(
        Model(151936, 1536, 28, 12, 2, 128, 8960, qkv_bias=True, rope_theta=1e6), 4, 8192
    ),
    # Of Qwen3-0.6B, likewise.
    "qwen3-0.6b": Preset(
        Model(151936, 1024, 28, 16, 8, 128, 3072, qk_norm=True, rope_theta=1e6), 4, 8192
    ),
    # Of Llama-3.2-1B, but for the scaling of its positions.
    "llama-3.2-1b": Preset(
        Model(128256, 2048, 16, 32, 8, 64, 8192, rope_theta=5e5, norm_eps=1e-5), 4, 8192
    ),
    "hybrid-test": Preset(
        Model(512, 32, 8, 4, 2, 8, 64, hybrid=Hybrid("MDMA", 4, 16, 8, 1, 2, 1, 16, 16)), 8, 32
    ),
    # 309 M parameters, half of them the embedding.
    "hybrid-0.5b": Preset(
        Model(
            *(151936, 1024, 16, 16, 4, 64, 2816),
            hybrid=Hybrid("MDMA", 32, 64, 128, 1, 8, 8, 128, 128),
        ),
        4,
        8192,
    ),
}


@dataclass(frozen=True)
class Options:
    """A run, as the command line says it; `resolve` fills in the preset."""

    model_size: str = "tiny"
    batch_size: int | None = None
    context_length: int | None = None
    vocab_size: int | None = None
    num_train_steps: int = 50
    ce_kernel_type: str = AUTO
    norm_kernel: str = AUTO
    mlp_kernel: str = AUTO
    attention_kernel: str = AUTO
    linear_attention_kernel: str = AUTO
    conv_kernel: str = AUTO
    matmul: str = "default"
    block_pattern: str | None = None
    dtype: str = "bfloat16"
    param_dtype: str = "float32"
    optimizer: str = "adamw"
    learning_rate: float = 1e-3
    remat: str = "none"
    layer_loop: str = AUTO
    mesh: str = ""
    sequence_parallel: str = "on"
    seed: int = 0
    permute_batch: bool = False
    text: tuple[Path, ...] = ()
    resume: Path | None = None
    checkpoint_dir: Path | None = None
    checkpoint_every: int = 0
    memory_budget: float | None = None
    log: Path | None = None
    wandb: bool = False
    profile: Path | None = None


@dataclass(frozen=True)
class Config:
    """A run whose values were all checked.

    Attributes:
        model: The dimensions.
        batch: Sequences of a step, B.
        length: Tokens of a sequence, T.
        mesh: Devices by axis, those of `MESH_AXES` that were named, in their order.
        options: What was asked for.
    """

    model: Model
    batch: int
    length: int
    mesh: dict[str, int]
    options: Options

    @property
    def devices(self) -> int:
        """How many devices the mesh has; 1 where there is none."""
        count = 1
        for size in self.mesh.values():
            count *= size
        return count

    @property
    def is_packed(self) -> bool:
        """Whether queries, keys and values are one array, and gate and up."""
        return "model" not in self.mesh

    def shape(self) -> dict[str, object]:
        """What a checkpoint's arrays depend on, by name."""
        kinds = {name: getattr(self.options, name) for name in ("optimizer", "param_dtype")}
        return {**dataclasses.asdict(self.model), **kinds, "packed": self.is_packed}


def _remat_choice(remat: str) -> str:
    """Returns which of REMAT_CHOICES an option is; what is none of them as it is shown."""
    if remat == LAST:
        return f"{LAST} with the letter N"
    return LAST if re.fullmatch(r"selective:[1-9][0-9]*", remat) else remat


def resolve(options: Options) -> Config:
    """Checks a run's values, and takes those that are not given from its preset.

    Raises:
        InputError: A value is out of range or unknown; the text says what would be right.
    """
    preset = PRESETS.get(options.model_size)
    if preset is None:
        raise InputError(
            f"--model_size {options.model_size} is no preset: choose from {', '.join(PRESETS)}"
        )
    for flag, chosen, known in (
        ("ce_kernel_type", options.ce_kernel_type, LOSS_CHOICES),
        ("norm_kernel", options.norm_kernel, LAYER_CHOICES),
        ("mlp_kernel", options.mlp_kernel, LAYER_CHOICES),
        ("attention_kernel", options.attention_kernel, LAYER_CHOICES),
        ("linear_attention_kernel", options.linear_attention_kernel, LAYER_CHOICES),
        ("conv_kernel", options.conv_kernel, LAYER_CHOICES),
        ("matmul", options.matmul, MATMULS),
        ("dtype", options.dtype, DTYPES),
        ("param_dtype", options.param_dtype, DTYPES),
        ("optimizer", options.optimizer, OPTIMIZERS),
        ("remat", _remat_choice(options.remat), REMAT_CHOICES),
        ("layer_loop", options.layer_loop, LOOP_CHOICES),
        ("sequence_parallel", options.sequence_parallel, ("on", "off")),
    ):
        if chosen not in known:
            raise InputError(f"--{flag} {chosen} is unknown: choose from {', '.join(known)}")
    model = preset.model
    if options.vocab_size is not None:
        model = dataclasses.replace(model, vocab=options.vocab_size)
    if options.block_pattern is not None:
        model = with_pattern(model, options)
    batch = preset.batch_size if options.batch_size is None else options.batch_size
    length = preset.context_length if options.context_length is None else options.context_length
    for flag, value, least in (
        ("vocab_size", model.vocab, 8),
        ("batch_size", batch, 1),
        ("context_length", length, 2),
        ("num_train_steps", options.num_train_steps, 1),
        ("checkpoint_every", options.checkpoint_every, 0),
    ):
        if value < least:
            raise InputError(f"--{flag} {value} is too small: give {least} or more")
    # Not `<= 0`, which a NaN is not.
    if not 0 < options.learning_rate < float("inf"):
        raise InputError(f"--learning_rate {options.learning_rate} is not a positive number")
    if options.memory_budget is not None and not 0 < options.memory_budget < float("inf"):
        raise InputError(f"--memory_budget {options.memory_budget} is not a positive number of GiB")
    config = Config(model, batch, length, parse_mesh(options.mesh), options)
    check_mesh(config)
    if options.matmul != "default" and "model" in config.mesh:
        raise InputError(
            f"--matmul {options.matmul} and --mesh {options.mesh} do not go together: shard by "
            "data and fsdp, or choose default"
        )
    return config


def with_pattern(model: Model, options: Options) -> Model:
    """Returns a hybrid with the blocks of `--block_pattern`.

    Raises:
        InputError: The preset is no hybrid, a letter is unknown, or the layers are no multiple.
    """
    pattern = options.block_pattern or ""
    if model.hybrid is None:
        hybrids = [name for name, preset in PRESETS.items() if preset.model.hybrid is not None]
        raise InputError(
            f"--block_pattern {pattern} needs a hybrid, which --model_size {options.model_size} "
            f"is not: choose from {', '.join(hybrids)}"
        )
    if not pattern or set(pattern) - set(BLOCKS) or model.layers % len(pattern):
        raise InputError(
            f"--block_pattern {pattern!r} is no pattern of {model.layers} blocks: give letters of "
            f"{', '.join(BLOCKS)}, as many as divide {model.layers}"
        )
    return dataclasses.replace(model, hybrid=dataclasses.replace(model.hybrid, pattern=pattern))


def parse_mesh(text: str) -> dict[str, int]:
    """Reads "data=2,model=4".

    Raises:
        InputError: It is not of that form, or names an axis that there is not.
    """
    sizes: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        axis, _, size = part.partition("=")
        if axis not in MESH_AXES:
            raise InputError(
                f"--mesh {text} names the axis {axis!r}: choose from {', '.join(MESH_AXES)}"
            )
        if axis in sizes:
            raise InputError(f"--mesh {text} names {axis} twice: name it once")
        if not size.isdecimal() or int(size) == 0:
            raise InputError(
                f"--mesh {text} has size {size!r} for {axis}: give a whole number of devices"
            )
        sizes[axis] = int(size)
    return {axis: sizes[axis] for axis in MESH_AXES if axis in sizes}


def check_mesh(config: Config) -> None:
    """Checks that what the mesh splits can be split evenly.

    Raises:
        InputError: Something cannot.
    """
    mesh = config.mesh
    over_batch = mesh.get("data", 1) * mesh.get("fsdp", 1)
    model, count = config.model, mesh.get("model", 1)
    split: list[tuple[str, int, int, str]] = [
        ("--batch_size", config.batch, over_batch, "data x fsdp"),
        ("the hidden size", model.width, mesh.get("fsdp", 1), "fsdp"),
        ("--vocab_size", model.vocab, count, "model"),
    ]
    if config.options.sequence_parallel == "on":
        split.append(("--context_length", config.length, count, "model"))
    hybrid = model.hybrid
    blocks = "A" if hybrid is None else hybrid.pattern
    # Devices may share a head of keys, or a group.
    shared: list[tuple[str, int]] = []
    if "M" in blocks and hybrid is not None:
        split.append(("the heads of Mamba-2", hybrid.ssm_heads, count, "model"))
        shared.append(("the groups of Mamba-2", hybrid.ssm_groups))
    if "D" in blocks and hybrid is not None:
        split.append(("the heads of the delta rule", hybrid.delta_heads, count, "model"))
        shared.append(("the heads of keys of the delta rule", hybrid.delta_key_heads))
    if "A" in blocks:
        split.append(("the heads", model.heads, count, "model"))
        # Each device has some of their columns.
        if model.kv_heads * model.head_width % count:
            split.append(("the heads of keys", model.kv_heads, count, "model"))
        shared.append(("the heads of keys", model.kv_heads))
    if {"A", "D"} & {*blocks}:
        split.append(("the feed-forward columns", model.ffn, count, "model"))
    split += [(what, size, count, "model") for what, size in shared if count % size]
    for what, size, parts, over in split:
        if size % parts:
            raise InputError(
                f"--mesh {config.options.mesh} splits {what} {size} over {parts} devices ({over}), "
                f"which do not divide it: choose sizes that do"
            )
