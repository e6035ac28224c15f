"""Checks the arguments of a linear loss, and chooses what computes it."""

import copy
import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from .. import gathering, meshes, one_program
from ..bound import Bound
from ..checks import as_array, check_flag, is_traced, refuse_traced
from ..chunk_loops import make_alike, map_chunks, pad_tokens
from ..cross_entropy import reference
from ..implementations import choose
from ..logits_gemms import (
    Gemms,
    Operands,
    dense_logits,
    find_vocab_axis,
    operand_dtype,
    promote_operands,
)
from ..losses.aux_outputs import Request, TokenOutputs, check_columns
from ..losses.layouts import Layout, find_layout
from ..losses.options import AxisName, check_tokens, narrow_labels
from ..losses.traced import Coefficients, check_with_mapping, divided, map_logits
from ..losses.vocab_shards import WHOLE, shard_options
from ..operation import Implementation
from . import derivative
from .declaration import OPERATION
from .derivative import LinearLoss
from .plan import plan_output_chunk
from .schedule import Planner
from .sharding import PartitionedSchedule


class Call:
    """Checked arguments, and what computes their loss."""

    def __init__(
        self,
        hidden: ArrayLike,
        weight: ArrayLike,
        labels: ArrayLike,
        weights: ArrayLike | None,
        every_token: bool = False,
        takes_traced: bool = True,
        *,
        bias: ArrayLike | None = None,
        vocab_axis: int | None = None,
        label_smoothing: float | jax.Array = 0.0,
        z_loss: float | jax.Array = 0.0,
        softcap: float | jax.Array | None = None,
        temperature: float | jax.Array = 1.0,
        max_scratch_bytes: int | None = None,
        implementation: Implementation | None = None,
        batch_invariant: bool = False,
        **others: Any,
    ) -> None:
        """Checks the arguments of the public functions; `others` are those of `check_options`.

        `every_token` is whether lse of ignored tokens is read, `takes_traced` whether label
        smoothing, z-loss, softcap and temperature may be traced.
        """
        batch_invariant = check_flag("batch_invariant", batch_invariant)
        self.coefficients = Coefficients(label_smoothing, z_loss)
        if not takes_traced:
            mapping_options = {"softcap": softcap, "temperature": temperature}
            for name, value in (vars(self.coefficients) | mapping_options).items():
                refuse_traced(name, value)
        if is_traced(temperature) and softcap is None:
            hidden, bias = divided(hidden, bias, temperature)
            temperature = 1.0
        options, mapping = check_with_mapping(
            softcap,
            temperature,
            **self.coefficients.known,
            **others,
            every_token=every_token,
            # Nothing else reads the logits of a chunk.
            donate_logits=True,
            implementation=implementation,
        )
        # Whether all is XLA's own program.
        self.is_dense = choose(OPERATION, implementation) == "reference"
        self.hidden, self.weight = promote_operands(
            as_array("hidden", hidden, "[.., D]"), as_array("weight", weight, "[V, D] or [D, V]")
        )
        labels = as_array("labels", labels, "[..], a label a token")
        if weights is not None:
            weights = as_array("weights", weights, "[..], a number a token")
        self.bias = None if bias is None else as_array("bias", bias, "[V]")
        self.axis = find_vocab_axis(self.hidden, self.weight, self.bias, vocab_axis)
        meshes.check_whole(OPERATION, "hidden", self.hidden, columns=-1)
        # Every chunk takes all of D.
        self.weight = meshes.with_whole_axis(self.weight, 1 - self.axis, self.hidden)
        self.shape = self.hidden.shape[:-1]
        check_tokens(labels, weights, "hidden", self.hidden)
        self.labels, self.options = narrow_labels(labels, self.coefficients.for_kernels(options))
        if not all(isinstance(extent, int) for extent in self.shape):
            self.options = self.options.in_xla()
        self.weights = None if weights is None else weights.astype(jnp.float32)
        if batch_invariant and self.is_dense:
            raise ValueError(
                "batch_invariant is True with the implementation 'reference', whose products have "
                "as many rows as there are tokens: it takes 'custom_call' or 'pallas'"
            )
        if batch_invariant and mapping is not None:
            raise TypeError(
                "softcap or temperature is traced and batch_invariant is True; both must be "
                "Python numbers then"
            )
        # Softcap and temperature of each token [..], where XLA applies them; else None.
        self.mapping: Any = jax.tree.map(
            lambda one: jnp.broadcast_to(jnp.asarray(one, jnp.float32), self.shape), mapping
        )
        gemms = Gemms(self.axis, batch_invariant)
        self.planner = Planner(gemms, self.options.tile, max_scratch_bytes)
        # How arrays are known to be sharded; None where they are not. On devices, arrays are a
        # device's.
        self.layout: Layout | None = None

    @property
    def flat(self) -> Operands:
        """The operands, with one axis of tokens."""
        hidden = self.hidden.reshape(-1, self.hidden.shape[-1])
        return Operands(hidden, self.weight, self.bias, self.labels.reshape(-1))

    @property
    def unflattened(self) -> Operands:
        """The same, with all axes of tokens where XLA may shard any (`PartitionedSchedule`)."""
        # A single token has no axis, and nothing to shard.
        is_known = self.shape and all(isinstance(extent, int) for extent in self.shape)
        is_open = self.layout is None and not self.is_dense
        if is_known and is_open and meshes.are_left_to_xla(self.hidden, self.weight):
            return Operands(self.hidden, self.weight, self.bias, self.labels)
        return self.flat

    def place(
        self, requested: Request, columns: ArrayLike | None, *, axis_name: AxisName | None = None
    ) -> Request:
        """Finds how arrays are known to be sharded; else warns where XLA gathers some.

        Returns the request with checked columns.
        """
        self.layout = layout = find_layout(self.hidden, self.weight, self.axis, axis_name)
        if layout is not None:
            self.labels = layout.place(self.labels)
            self.weights = None if self.weights is None else layout.place(self.weights)
            self.mapping = jax.tree.map(layout.place, self.mapping)
        elif not self.is_dense:
            watched = partial(gathering.watched, OPERATION)
            self.hidden = watched("hidden", self.hidden, -1, axis_of="D")
            self.weight = watched("weight", self.weight, self.axis, calls_ask=True)
        columns = check_columns(OPERATION, columns, self.shape)
        return dataclasses.replace(requested, columns=columns)

    def outputs(self, requested: Request, factors: jax.Array | None = None) -> TokenOutputs:
        """Returns loss, logps, lse and the `requested` outputs of each token [..].

        With `factors` [..] the loss is the scalar sum of factor * loss, and there are no logps.
        With a `mapping` they must be None.
        """
        layout = self.layout
        if layout is None:
            return self._outputs(requested, factors)
        fields = dict.fromkeys(requested.fields, layout.tokens)
        if factors is not None:
            del fields["logps"]
            fields["loss"] = PartitionSpec()

        def on_device(hidden: Any, weight: Any, bias: Any, per_token: Any) -> dict[str, jax.Array]:
            own = copy.copy(self)
            own.hidden, own.weight, own.bias = hidden, layout.gather(weight), bias
            own.labels, own.mapping, factors, columns = per_token
            own.shape = own.labels.shape
            found = own._outputs(dataclasses.replace(requested, columns=columns), factors)
            if factors is not None:
                found = found._replace(loss=layout.total(found.loss))
            return {name: getattr(found, name) for name in fields}

        columns = None if requested.columns is None else layout.place(requested.columns)
        per_token = self.labels, self.mapping, factors, columns
        found = layout.run(on_device, fields, self.hidden, self.weight, self.bias, per_token)
        return TokenOutputs(**{"logps": found["loss"], **found})

    def _outputs(self, requested: Request, factors: jax.Array | None) -> TokenOutputs:
        """Returns the outputs of whole arrays, or a device's; `factors` reduce the loss."""
        if self.mapping is not None:
            return self._mapped_outputs(requested)
        loss = self.choose_loss(requested, is_reduced=factors is not None)
        if requested.any and loss.exchange.is_whole and not self.is_dense:
            # Flattening leaves tokens where they are if the first axis alone is sharded.
            for axis in range(1, self.hidden.ndim - 1):
                self.hidden = gathering.watched(
                    OPERATION, "hidden", self.hidden, axis, axis_of="tokens"
                )
        operands = self.flat if requested.any else self.unflattened
        hidden, labels, columns = operands.hidden, operands.labels, requested.columns
        if columns is not None:
            columns = columns.reshape(-1, columns.shape[-1])
        factors = None if factors is None else factors.reshape(labels.shape)
        has_chunks = requested.any and not self.is_dense
        if has_chunks and (loss.gemms.isolated or not isinstance(labels.shape[0], int)):
            arrays = pad_tokens(loss.chunk_tokens, hidden, labels, columns, factors)
            hidden, labels, columns, factors = arrays
        operands = operands._replace(hidden=hidden, labels=labels)
        requested = dataclasses.replace(requested, columns=columns)
        run = Bound(derivative.compute_outputs, loss)
        found: TokenOutputs = one_program.run(run, requested, operands, factors)
        return found if labels.shape == self.shape else self._unflatten(found)

    def _unflatten(self, found: TokenOutputs) -> TokenOutputs:
        """Returns outputs [N, ..], of padding after all tokens too, as outputs of tokens [..]."""
        count = self.labels.size

        def shape(one: jax.Array) -> jax.Array:
            # A scalar is a loss that is reduced.
            return one[:count].reshape(*self.shape, *one.shape[1:]) if one.ndim else one

        return TokenOutputs(*jax.tree.map(shape, tuple(found)))

    def _mapped_outputs(self, requested: Request) -> TokenOutputs:
        """Returns the outputs by XLA's program, for chunks of tokens whose logits it recomputes."""
        operands = self.flat
        loss = dataclasses.replace(self._unplanned_loss(requested), is_dense=True)
        total: Any = operands.labels.shape[0]
        vocab, chunk = operands.weight.shape[self.axis], total
        if not self.is_dense:
            plan, *_ = self.planner.plan_passes(operands, reduced=False)
            chunk = max(plan_output_chunk(plan, total, vocab) // 2, 1)

        def flatten(one: jax.Array) -> jax.Array:
            return one.reshape(total, *one.shape[len(self.shape) :])

        per_token = jax.tree.map(flatten, (requested.columns, *self.mapping))
        operands, *per_token = derivative.alike(loss, operands, *per_token)
        hidden, weight, bias, labels = operands
        bias = None if bias is None else bias.astype(jnp.float32)
        gemms = dataclasses.replace(loss.gemms, dtype=operand_dtype(hidden, weight))
        loss = dataclasses.replace(loss, gemms=gemms)
        # Gradients of chunks are summed in f32, and rounded once.
        weight = weight.astype(jnp.float32)

        def run(x: Any, labels: Any, columns: Any, *mapping: Any) -> TokenOutputs:
            z, probe = dense_logits(loss.gemms, x, weight, bias)
            scalars = (None if one is None else one[:, None] for one in mapping)
            z = map_logits(*make_alike(z, *scalars))
            own = dataclasses.replace(requested, columns=columns)
            return reference.requested_outputs(loss, own, z, labels, probe)

        arrays = hidden, labels, *per_token
        if not isinstance(total, int):
            arrays = tuple(pad_tokens(chunk, *arrays))
        return self._unflatten(map_chunks(jax.checkpoint(run), arrays, chunk))

    def _unplanned_loss(self, requested: Request) -> LinearLoss:
        """Returns the loss but for what runs chunks of it."""
        return LinearLoss(
            options=self.options,
            gemms=self.planner.gemms,
            exchange=WHOLE if self.layout is None else self.layout.exchange(),
            is_dense=self.is_dense,
            distribution=requested.distribution,
            correct=requested.correct,
        )

    def choose_loss(self, requested: Request, *, is_reduced: bool) -> LinearLoss:
        """Returns how the loss and what is requested are computed, by implementation and plan."""
        operands, planner, layout = self.flat, self.planner, self.layout
        loss = self._unplanned_loss(requested)
        if self.is_dense:
            return loss
        is_left_to_xla = meshes.are_left_to_xla(*operands[:2])
        if requested.any:
            tokens, vocab = operands.labels.shape[0], operands.weight.shape[self.axis]
            plan, *_ = planner.plan_passes(operands, reduced=False)
            chunk = plan_output_chunk(plan, tokens, vocab)
            options = planner.row_options(self.options, vocab)
            loss = dataclasses.replace(loss, options=options, chunk_tokens=chunk)
            # A weight [D, V] has no rows to gather for the columns.
            has_rows = requested.columns is None or self.axis == 0
            is_alone = layout is None and not is_left_to_xla and not planner.gemms.isolated
            if not (is_reduced and has_rows and is_alone):
                return loss
            # The pass that makes gradients makes the outputs too, if it can.
            planned = planner.schedule(self.options, operands, reduced=True)
            cuda = planned.cuda if planned.cuda is not None and planned.cuda.products < 4 else None
            # Nobody pads the chunks of this pass.
            is_fused = planned.is_fused and not planned.plan.any_count
            return dataclasses.replace(loss, is_fused=is_fused, cuda=cuda)
        if layout is not None and not loss.exchange.is_whole:
            options = shard_options(self.options, loss.exchange)
            own = planner.schedule(options, operands, reduced=False)
            chunk = 0
            if is_reduced:
                chunk = planner.fused_shard_tokens(operands, no_calls=layout.leaves_axes)
            return dataclasses.replace(loss, schedule=own, is_fused=chunk > 0, chunk_tokens=chunk)
        planned = planner.schedule(self.options, operands, reduced=is_reduced)
        # Nothing shards a symbolic number of tokens.
        if is_left_to_xla and not planned.plan.any_count:
            planned = PartitionedSchedule(**vars(planned))
        is_fused = is_reduced and planned.is_fused
        return dataclasses.replace(
            loss, options=planned.options, schedule=planned, is_fused=is_fused
        )
