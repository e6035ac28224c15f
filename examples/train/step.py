"""A training step as one XLA program, its parameters' places on a mesh, and the memory it takes."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_bridge
from pallas_bridge import optax as optimizers

from .config import AUTO, LOSS_KERNELS, Config, InputError
from .losses import loss_of
from .model import Kernels, Transformer
from .shards import Shards

WARMUP_STEPS = 10
# Parameters of blocks that are sharded over `model`, by name: matrices by columns and by rows, and
# what has a row or a number for each column of heads.
COLUMNS = {"qkv", "up", "gate", "inner", "steps", "rates"}
ROWS = {"out", "down"}
OF_HEADS = {"bias", "conv", "conv_bias", "dt_bias", "log_rate", "skip", "group_norm"}


@dataclass(frozen=True)
class Program:
    """A run's functions, by its configuration.

    The state is a dict of `params` and `optimizer` (trees of arrays); the model's other parts are
    in `graph`.
    """

    config: Config
    graph: Any
    optimizer: Any
    mesh: Mesh | None

    def initial(self) -> Any:
        """The state before the first step, from the seed, placed on the mesh."""
        return self.compile_initial()()

    def compile_initial(self) -> Any:
        """What makes the state before the first step, compiled."""
        return jax.jit(self._initial, out_shardings=self.shardings()).lower().compile()

    def abstract(self) -> Any:
        """The state's shapes, dtypes and shardings."""
        return jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
            jax.eval_shape(self._initial),
            self.shardings(),
        )

    def _initial(self) -> Any:
        params = initial_params(self.config)
        return {"params": params, "optimizer": self.optimizer.init(params)}

    def shardings(self) -> Any:
        """Where each array of the state lies (`shardings_of`)."""
        return shardings_of(self.config, self.mesh, jax.eval_shape(self._initial))

    def batch_sharding(self) -> Any:
        """Where a batch's arrays lie: split by sequences over `data` and `fsdp`."""
        if self.mesh is None:
            return jax.sharding.SingleDeviceSharding(jax.devices()[0])
        over = tuple(axis for axis in self.mesh.axis_names if axis in ("data", "fsdp"))
        return NamedSharding(self.mesh, P(over or None))

    def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """A batch's shapes."""
        one = jax.ShapeDtypeStruct(
            (self.config.batch, self.config.length), jnp.int32, sharding=self.batch_sharding()
        )
        return {name: one for name in ("tokens", "labels", "segments", "positions")}

    def loss(self, params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        """The mean loss of a batch."""
        kernel: Any = self.config.options.ce_kernel_type
        head = nnx.merge(self.graph, params).head
        hidden, axis = self.hidden(params, batch), self.shards.axis
        return loss_of(kernel, hidden, head, batch["labels"], self.mesh, sequence_axis=axis)

    @property
    def shards(self) -> Shards:
        """How blocks are sharded."""
        return Shards.of(self.config)

    def hidden(self, params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        """Hidden states [B, T, D] of a batch; T may be sharded over `model`."""
        dtype = jnp.dtype(self.config.options.dtype)
        if self.mesh is None or self.shards.is_whole:
            tokens = None if self.mesh is None else self.batch_sharding()
            whole: jax.Array = nnx.merge(self.graph, params)(batch, dtype, tokens)
            return whole
        places = shardings_of(self.config, self.mesh, params)
        tokens = self.batch_sharding().spec
        run: Any = jax.shard_map(
            lambda own, batch: nnx.merge(self.graph, own)(batch, dtype),
            mesh=self.mesh,
            in_specs=(jax.tree.map(lambda place: place.spec, places), tokens),
            out_specs=P(*tokens, self.shards.axis),
        )
        hidden: jax.Array = run(params, batch)
        return hidden

    def step(self, state: Any, batch: dict[str, jax.Array]) -> tuple[Any, dict[str, jax.Array]]:
        """One step: the state after it, with the loss before it and the gradient's norm."""
        loss, gradients = jax.value_and_grad(self.loss)(state["params"], batch)
        with jax.named_scope("optimizer"):
            state, norm = self.apply(gradients, state)
        return state, {"loss": loss, "gradient_norm": norm}

    def apply(self, gradients: Any, state: Any) -> tuple[Any, jax.Array]:
        """The state after a step by gradients, and their norm."""
        params, optimizer = self.optimizer.update_and_apply(
            gradients, state["optimizer"], state["params"]
        )
        return {"params": params, "optimizer": optimizer}, optimizer.norm

    def compile(self) -> Any:
        """The step, compiled, which takes its state's memory for the state after it."""
        places = self.shardings()
        jitted = jax.jit(self.step, donate_argnums=0, out_shardings=(places, None))
        return jitted.lower(self.abstract(), self.abstract_batch()).compile()

    def loss_bytes(self) -> tuple[int, int]:
        """What the loss with its gradients holds beyond operands and results, and what logits take.

        It is compiled by itself, on one device, of the shapes of this run.
        """
        config = self.config
        dtype = jnp.dtype(config.options.dtype)
        hidden = jax.ShapeDtypeStruct((config.batch, config.length, config.model.width), dtype)
        head = jax.ShapeDtypeStruct((config.model.vocab, config.model.width), jnp.float32)
        labels = jax.ShapeDtypeStruct((config.batch, config.length), jnp.int32)
        kernel: Any = config.options.ce_kernel_type
        both = jax.value_and_grad(lambda x, w, y: loss_of(kernel, x, w, y), (0, 1))
        compiled: Any = jax.jit(both).lower(hidden, head, labels).compile()
        logits = config.batch * config.length * config.model.vocab * dtype.itemsize
        return int(compiled.memory_analysis().temp_size_in_bytes), logits


def with_kernels(config: Config) -> Config:
    """A run whose kernels are named: `auto` is this project's function where `info()` has it run.

    Where the platform has no implementation of it, `auto` is the baseline. Layers are unrolled on
    GPUs, where that makes a step a sixth faster, and follow by a scan elsewhere, which compiles
    sooner.
    """
    options = config.options
    platform = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
    rows = pallas_bridge.info().operations
    named: dict[str, Any] = {}
    for option, operation, ours in (
        ("ce_kernel_type", "linear_cross_entropy", "fused_linear"),
        ("norm_kernel", "rms_norm", "ours"),
        ("mlp_kernel", "activation", "ours"),
        ("attention_kernel", "flash_attention", "ours"),
        ("linear_attention_kernel", "linear_attention", "ours"),
        ("conv_kernel", "causal_conv1d", "ours"),
    ):
        if getattr(options, option) == AUTO:
            row = next((row for row in rows.get(operation, ()) if row.platform == platform), None)
            runs = row is not None and row.implementation is not None
            named[option] = ours if runs else "baseline"
    if options.layer_loop == AUTO:
        named["layer_loop"] = "unrolled" if platform == "cuda" else "scan"
    return dataclasses.replace(config, options=dataclasses.replace(options, **named))


def make_model(config: Config) -> Transformer:
    """The model with parameters from the seed."""
    options: Any = config.options
    kernels = Kernels(
        options.norm_kernel,
        options.mlp_kernel,
        options.attention_kernel,
        options.linear_attention_kernel,
        options.conv_kernel,
        matmul=options.matmul,
        shards=Shards.of(config),
    )
    return Transformer(
        config.model,
        kernels,
        remat=options.remat,
        loop=options.layer_loop,
        rngs=nnx.Rngs(options.seed),
    )


def initial_params(config: Config) -> Any:
    """The model's parameters from the seed."""
    params = nnx.to_pure_dict(nnx.split(make_model(config))[1])
    dtype = jnp.dtype(config.options.param_dtype)
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)


def shardings_of(config: Config, mesh: Mesh | None, tree: Any) -> Any:
    """Where parameters or state of a tree lie: matrices split by hidden size over `fsdp`.

    The embedding and the head are split by vocabulary over `model`, too, and so are matrices of
    blocks with `Shards`: by their columns, or their rows where these are no hidden size.
    """
    if mesh is None:
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        return jax.tree.map(lambda _: device, tree)
    fsdp, model = (axis if axis in mesh.axis_names else None for axis in ("fsdp", "model"))
    width, shards = config.model.width, Shards.of(config)

    def place(path: Any, leaf: Any) -> NamedSharding:
        names = [getattr(key, "key", None) for key in path]
        if {"embedding", "untied"} & {*names}:
            return NamedSharding(mesh, P(model, fsdp))
        axes: list[str | None] = [None] * leaf.ndim
        if not shards.is_whole:
            over = None if is_shared(config, shards, names) else model
            if COLUMNS & {*names}:
                axes = [None, fsdp, over]
            elif ROWS & {*names}:
                axes = [None, model, fsdp]
            elif OF_HEADS & {*names}:
                axes = [None, over]
            return NamedSharding(mesh, P(*axes[: leaf.ndim]))
        # The axis that is the hidden size, of what has a layer axis and two others, if any is.
        if leaf.ndim == 3 and width in leaf.shape[1:]:
            axes[1 if leaf.shape[1] == width else 2] = fsdp
        return NamedSharding(mesh, P(*axes))

    return jax.tree_util.tree_map_with_path(place, tree)


def is_shared(config: Config, shards: Shards, names: Sequence[Any]) -> bool:
    """Whether every device has all of a mixer's columns, of heads that they do not divide."""
    hybrid = config.model.hybrid
    if hybrid is None or not {"inner", "conv", "conv_bias"} & {*names}:
        return False
    heads = {"b": hybrid.ssm_groups, "q": hybrid.delta_key_heads}
    heads |= {"c": heads["b"], "k": heads["q"]}
    return any(heads.get(name, shards.count) % shards.count for name in names)


def make_optimizer(config: Config, mesh: Mesh | None) -> Any:
    """The optimizer, with gradients clipped to norm 1; warmed up over `WARMUP_STEPS`.

    The learning rate is constant then: no length of the run is in it, so that a run which is
    resumed and made longer has one curve. Parameters in bfloat16 are rounded stochastically.
    """
    options = config.options
    schedule = optax.linear_schedule(0.0, options.learning_rate, WARMUP_STEPS)
    seed = options.seed if options.param_dtype == "bfloat16" else None
    if options.optimizer == "muon":
        return optimizers.muon(
            schedule,
            weight_decay=0.1,
            adam_b2=0.95,
            matrices=lambda tree: is_matrix(tree, of_blocks=True),
            # AdamW's learning rates fit.
            consistent_rms=0.2,
            max_norm=1.0,
            rounding_seed=seed,
        )
    common: dict[str, Any] = {"b2": 0.95, "weight_decay": 0.1, "max_norm": 1.0}
    if options.optimizer == "adamw":
        return optimizers.adamw(schedule, mask=is_matrix, rounding_seed=seed, **common)
    params = jax.eval_shape(lambda: initial_params(config))
    places = shardings_of(config, mesh, params)
    return optimizers.adamw8bit(
        schedule, mask=is_matrix, rounding_seed=seed, shardings=places, **common
    )


def is_matrix(tree: Any, *, of_blocks: bool = False) -> Any:
    """Which parameters decay: those in which a layer has two axes; no norm's weight, no bias.

    `of_blocks` leaves out the embedding and the head.
    """

    def found(path: Any, leaf: Any) -> bool:
        in_blocks = any(getattr(key, "key", "") == "blocks" for key in path)
        return (in_blocks or not of_blocks) and leaf.ndim - in_blocks > 1

    return jax.tree_util.tree_map_with_path(found, tree)


def make_program(config: Config) -> Program:
    """A run's functions.

    Raises:
        InputError: The mesh has more devices than there are.
    """
    mesh = None
    if config.mesh:
        devices = jax.devices()
        if config.devices > len(devices):
            raise InputError(
                f"--mesh {config.options.mesh} has {config.devices} devices and this machine "
                f"{len(devices)}: name fewer"
            )
        shape = tuple(config.mesh.values())
        chosen = np.array(devices[: config.devices]).reshape(shape)
        mesh = Mesh(chosen, tuple(config.mesh))
    graph = nnx.split(nnx.eval_shape(lambda: make_model(config)))[0]
    return Program(config, graph, make_optimizer(config, mesh), mesh)


def program_bytes(compiled: Any) -> int:
    """A compiled step's memory on a device: arguments, results that share none, temporaries."""
    of = compiled.memory_analysis()
    shared = of.output_size_in_bytes - of.alias_size_in_bytes
    return int(of.argument_size_in_bytes + shared + of.temp_size_in_bytes)


def kernels_within(config: Config, budget: int) -> dict[str, int]:
    """The bytes that the step takes by each other kernel of the loss that fits a budget."""
    found: dict[str, int] = {}
    for kernel in LOSS_KERNELS:
        if kernel == config.options.ce_kernel_type:
            continue
        options = dataclasses.replace(config.options, ce_kernel_type=kernel)
        other = make_program(dataclasses.replace(config, options=options))
        try:
            needed = program_bytes(other.compile())
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            continue
        if needed <= budget:
            found[kernel] = needed
    return found
