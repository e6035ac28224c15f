"""Peers in PyTorch, and the copy: a worker of cross_entropy.py."""

from collections.abc import Callable
from typing import Any

from harness import first_line, first_run_of_torch, median_ms, torch_clock
from shared import Problem, serve

Function = Callable[[Any, Any, Any], Any]


def functions_of(peer: str, factor: Any = None) -> dict[str, Function]:
    """Functions of logits, labels and cotangents that compute each measure.

    Args:
        peer: A peer in PyTorch.
        factor: What the mean is multiplied by, a number or a tensor; None for no factor.
    """
    import torch
    import torch.nn.functional as F

    if peer == "QuACK":
        from quack.cross_entropy import cross_entropy, cross_entropy_fwd

        def quack_pair(x: Any, y: Any, g: Any) -> Any:
            losses = cross_entropy(x, y, reduction="none")
            return losses, *torch.autograd.grad(losses, x, g)

        def scaled(x: Any, y: Any, _: Any) -> Any:
            value = factor * cross_entropy(x, y, reduction="mean")
            return value, *torch.autograd.grad(value, x)

        # The gradient of the sum, with no cotangent: what it has in two passes.
        plain_pass: Function = lambda x, y, _: cross_entropy_fwd(x.detach(), y, return_dx=True)  # noqa: E731
        return {
            "value_and_grad": plain_pass if factor is None else scaled,
            "pair": quack_pair,
            "forward": lambda x, y, _: cross_entropy_fwd(x.detach(), y),
        }

    def plain(x: Any, y: Any, reduction: str) -> Any:
        return F.cross_entropy(x, y, reduction=reduction)

    loss: Callable[[Any, Any, str], Any] = plain
    if peer == "Liger":
        from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

        def liger(x: Any, y: Any, reduction: str) -> Any:
            return LigerCrossEntropyFunction.apply(x, y, None, -100, 0.0, 0.0, reduction)[0]

        loss = liger
    elif peer == "torch.compile":
        loss = torch.compile(plain, dynamic=False)

    def value_and_grad(x: Any, y: Any, _: Any) -> Any:
        value = loss(x, y, "mean") if factor is None else factor * loss(x, y, "mean")
        return value, *torch.autograd.grad(value, x)

    def pair(x: Any, y: Any, g: Any) -> Any:
        losses = loss(x, y, "none")
        return losses, *torch.autograd.grad(losses, x, g.to(losses.dtype))

    return {
        "value_and_grad": value_and_grad,
        "pair": pair,
        "forward": lambda x, y, _: loss(x.detach(), y, "mean"),
    }


def measure(problem: Problem) -> dict[str, Any]:
    """All measures of one peer on one problem."""
    import numpy as np
    import torch

    device = torch.device(problem.platform)
    factor: Any = problem.factor
    if problem.is_traced:
        factor = torch.tensor(factor, device=device)
    functions = functions_of(problem.peer, factor)
    dtype = getattr(torch, problem.dtype)
    x = torch.empty(problem.tokens, problem.vocab, device=device, dtype=dtype)
    # The driver's rows, repeated.
    logits = torch.from_numpy(np.load(problem.file("logits"))).view(dtype)
    rows = torch.arange(problem.tokens) % len(logits)
    y = torch.from_numpy(np.load(problem.file("labels"))).long()[rows].to(device)
    g = torch.from_numpy(np.load(problem.file("cotangents")))[rows].to(device)
    found: dict[str, Any] = {}
    for name, function in functions.items():
        x.requires_grad_(False)
        for piece in x.split(len(logits)):  # in every measure, as Liger overwrites it
            piece.copy_(logits[: len(piece)])
        x.requires_grad_(name != "forward")
        try:

            def call() -> Any:
                return function(x, y, g)  # noqa: B023

            row = first_run_of_torch(call, problem.platform)[1]
            clock = torch_clock(call, problem.platform)
            found[name] = row | median_ms(clock, problem.seconds)
        except Exception as error:
            found[name] = {"error": first_line(error)}
    return found


def copy(problem: Problem) -> dict[str, Any]:
    """Milliseconds to copy the logits on the device."""
    import torch

    dtype = getattr(torch, problem.dtype)
    shape = (problem.tokens, problem.vocab)
    x = torch.empty(shape, device=problem.platform, dtype=dtype).normal_(0, 2)
    to = torch.empty_like(x)
    clock = torch_clock(lambda: to.copy_(x), problem.platform)
    return {"yardstick_ms": median_ms(clock, problem.seconds)["median_ms"]}


def prepare(mode: str, problem: Problem) -> None:
    """Imports what a mode needs."""
    functions_of("torch eager" if mode == "yardstick" else problem.peer)


if __name__ == "__main__":
    serve(Problem, {"measure": measure, "yardstick": copy}, prepare)
