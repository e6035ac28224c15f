"""A training step as one XLA program, its parameters' places on a mesh, and the memory it takes."""

import dataclasses
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

from .config import AUTO, LOSS_KERNELS, Config, InputError
from .losses import loss_of
from .model import Kernels, Transformer

WARMUP_STEPS = 10


@dataclass(frozen=True)
class Program:
    """A run's functions, by its configuration.

    The state is a dict of `params` and `optimizer` (trees of arrays); the model's other parts are
    in `graph`.
    """

    config: Config
    graph: Any
    optimizer: optax.GradientTransformation
    mesh: Mesh | None

    def initial(self) -> Any:
        """The state before the first step, from the seed, placed on the mesh."""
        return jax.jit(self._initial, out_shardings=self.shardings())()

    def abstract(self) -> Any:
        """The state's shapes, dtypes and shardings."""
        return jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
            jax.eval_shape(self._initial),
            self.shardings(),
        )

    def _initial(self) -> Any:
        params = nnx.to_pure_dict(nnx.split(make_model(self.config))[1])
        return {"params": params, "optimizer": self.optimizer.init(params)}

    def shardings(self) -> Any:
        """Where each array of the state lies: matrices split by hidden size over `fsdp`.

        The embedding and the head are split by vocabulary over `model`, too.
        """
        state = jax.eval_shape(self._initial)
        mesh = self.mesh
        if mesh is None:
            device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
            return jax.tree.map(lambda _: device, state)
        fsdp, model = (axis if axis in mesh.axis_names else None for axis in ("fsdp", "model"))
        width = self.config.model.width

        def place(path: Any, leaf: Any) -> NamedSharding:
            names = {getattr(key, "key", None) for key in path}
            if names & {"embedding", "untied"}:
                return NamedSharding(mesh, P(model, fsdp))
            axes: list[str | None] = [None] * leaf.ndim
            # The axis that is the hidden size, of what has a layer axis and two others.
            if leaf.ndim == 3:
                axes[1 if leaf.shape[1] == width else 2] = fsdp
            return NamedSharding(mesh, P(*axes))

        return jax.tree_util.tree_map_with_path(place, state)

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
        model = nnx.merge(self.graph, params)
        tokens = None if self.mesh is None else self.batch_sharding()
        hidden = model(batch, jnp.dtype(self.config.options.dtype), tokens)
        kernel: Any = self.config.options.ce_kernel_type
        return loss_of(kernel, hidden, model.head, batch["labels"], self.mesh)

    def step(self, state: Any, batch: dict[str, jax.Array]) -> tuple[Any, dict[str, jax.Array]]:
        """One step: the state after it, with the loss before it and the gradient's norm."""
        loss, gradients = jax.value_and_grad(self.loss)(state["params"], batch)
        with jax.named_scope("optimizer"):
            norm = optax.tree.norm(gradients)
            updates, optimizer = self.optimizer.update(
                gradients, state["optimizer"], state["params"]
            )
            params = optax.apply_updates(state["params"], updates)
        return {"params": params, "optimizer": optimizer}, {"loss": loss, "gradient_norm": norm}

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

    Where the platform has no implementation of it, `auto` is the baseline.
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
    ):
        if getattr(options, option) == AUTO:
            row = next((row for row in rows[operation] if row.platform == platform), None)
            runs = row is not None and row.implementation is not None
            named[option] = ours if runs else "baseline"
    return dataclasses.replace(config, options=dataclasses.replace(options, **named))


def make_model(config: Config) -> Transformer:
    """The model with parameters from the seed."""
    options: Any = config.options
    kernels = Kernels(options.norm_kernel, options.mlp_kernel, options.attention_kernel)
    return Transformer(
        config.model,
        kernels,
        remat=options.remat,
        loop=options.layer_loop,
        rngs=nnx.Rngs(options.seed),
    )


def make_optimizer(learning_rate: float) -> optax.GradientTransformation:
    """AdamW with gradients clipped to norm 1; warmed up over `WARMUP_STEPS`, then constant.

    No length of the run is in it, so that a run which is resumed and made longer has one curve.
    """
    schedule = optax.linear_schedule(0.0, learning_rate, WARMUP_STEPS)
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule, b2=0.95, weight_decay=0.1, mask=lambda tree: is_matrix(tree)),
    )


def is_matrix(tree: Any) -> Any:
    """Which parameters decay: those in which a layer has two axes; no norm's weight, no bias."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf.ndim - any(getattr(key, "key", "") == "blocks" for key in path) > 1,
        tree,
    )


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
    return Program(config, graph, make_optimizer(config.options.learning_rate), mesh)


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
