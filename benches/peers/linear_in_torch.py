"""Peers in PyTorch, and the GEMMs: a worker of linear_cross_entropy.py."""

from collections.abc import Callable
from typing import Any

from harness import calls_for, first_run_of_torch, median_ms, torch_clock
from shared import LinearProblem, serve

PRODUCTS = "products, torch"
# The loss of hidden, weight and labels.
Loss = Callable[[Any, Any, Any], Any]


def loss_of(peer: str) -> Loss:
    """The mean of a peer, by the function that its documentation tells users to call."""
    import torch
    import torch.nn.functional as F

    def dense(x: Any, w: Any, y: Any) -> Any:
        return F.cross_entropy(x @ w.T, y)

    if peer == "torch.compile":
        compiled: Loss = torch.compile(dense, dynamic=False)
        return compiled
    if peer.startswith("Liger CuTe"):
        # For Hopper alone, bf16 alone; the mean's wants N in tiles of 128 and V in tiles of 256.
        if peer == "Liger CuTe, per token":
            from liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90 import (
                LigerFusedScaledCrossEntropySM90Function as PerToken,
            )

            return lambda x, w, y: PerToken.apply(x, w, y).mean()
        from liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90 import (
            LigerFusedLinearCrossEntropySM90Function as OfMean,
        )

        return lambda x, w, y: OfMean.apply(x, w, y)
    if peer.startswith("Liger"):
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        # Its sums over chunks have the weight's dtype by default.
        sums = torch.float32 if peer == "Liger, f32 sums" else None
        fused = LigerFusedLinearCrossEntropyLoss(accum_dtype=sums)
        return lambda x, w, y: fused(w, x, y)
    if peer == "QuACK":
        from quack.linear_cross_entropy import chunked_linear_cross_entropy

        return lambda x, w, y: chunked_linear_cross_entropy(x, w, y)
    if peer.startswith("CCE"):
        from cut_cross_entropy import linear_cross_entropy

        # It drops small gradients by default.
        options = {"filter_eps": None} if peer == "CCE, no filter" else {}
        return lambda x, w, y: linear_cross_entropy(x, w, y, **options)
    return dense


def operands(problem: LinearProblem) -> tuple[Any, Any, Any]:
    """Hidden and weight, of which gradients are wanted, and labels, as the driver wrote them."""
    import numpy as np
    import torch

    def read(name: str) -> Any:
        return torch.from_numpy(np.load(problem.file(name))).to(problem.platform)

    dtype = getattr(torch, problem.dtype)
    x, w = (read(name).view(dtype).requires_grad_() for name in ("hidden", "weight"))
    return x, w, read("labels").long()


def value_and_grads(problem: LinearProblem) -> Callable[[], tuple[Any, Any, Any]]:
    """Computes the loss and the gradients of hidden and weight."""
    import torch

    loss = loss_of(problem.peer)
    x, w, y = operands(problem)

    def call() -> tuple[Any, Any, Any]:
        value = loss(x, w, y)
        return value, *torch.autograd.grad(value, (x, w))

    return call


def products(problem: LinearProblem) -> Callable[[], tuple[Any, Any, Any]]:
    """Computes the three GEMMs that every peer needs, into preallocated memory."""
    import torch

    def normal(rows: int, columns: int) -> Any:
        empty = torch.empty(rows, columns, dtype=dtype, device=problem.platform)
        return empty.normal_()

    dtype = getattr(torch, problem.dtype)
    x, w = normal(problem.tokens, problem.hidden), normal(problem.vocab, problem.hidden)
    g, z = (normal(problem.tokens, problem.vocab) for _ in range(2))
    dx, dw = torch.empty_like(x), torch.empty_like(w)

    def call() -> tuple[Any, Any, Any]:
        torch.mm(x, w.T, out=z)
        torch.mm(g, w, out=dx)
        torch.mm(g.T, x, out=dw)
        return z, dx, dw

    return call


def time_of(problem: LinearProblem, call: Callable[[], Any], seconds: float) -> dict[str, Any]:
    """The median of a call that has run."""
    clock = torch_clock(call, problem.platform)
    return median_ms(clock, seconds, calls_for(clock, seconds), least=3)


def measure(problem: LinearProblem) -> dict[str, Any]:
    """Time, memory and loss of one peer on one problem."""
    bare = problem.peer == PRODUCTS
    call = (products if bare else value_and_grads)(problem)
    outputs, row = first_run_of_torch(call, problem.platform)
    found = row if bare else {**row, "loss": outputs[0].item()}
    del outputs
    return found | time_of(problem, call, problem.seconds)


def check(problem: LinearProblem) -> dict[str, Any]:
    """The loss; the gradients are written for the driver."""
    import numpy as np

    value, *gradients = value_and_grads(problem)()
    for name, gradient in zip(("dhidden", "dweight"), gradients, strict=True):
        np.save(problem.file(name), gradient.float().cpu().numpy())
    return {"loss": value.item(), "dtypes": [str(g.dtype).split(".")[-1] for g in gradients]}


def yardstick(problem: LinearProblem) -> dict[str, Any]:
    """Milliseconds of the GEMMs."""
    call = products(problem)
    call()
    found = time_of(problem, call, problem.seconds)
    return {"yardstick_ms": found["median_ms"]}


def prepare(mode: str, problem: LinearProblem) -> None:
    """Imports what a mode needs."""
    loss_of(PRODUCTS if mode == "yardstick" else problem.peer)


if __name__ == "__main__":
    modes = {"measure": measure, "check": check, "yardstick": yardstick}
    serve(LinearProblem, modes, prepare)
