"""Peers in PyTorch, and the copy: a worker of cross_entropy.py."""

import sys
from collections.abc import Callable
from typing import Any

from shared import Problem, first_line, median_ms, serve
from torch_worker import first_run, released, timer

Function = Callable[[Any, Any, Any], Any]


def functions_of(peer: str, factor: Any = None) -> dict[str, Function]:
    """Functions of logits, labels and cotangents that compute each measure.

    The mean is multiplied by `factor`, a number or a tensor, if there is one.
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
    # The driver's rows, again and again.
    logits = torch.from_numpy(np.load(problem.file("logits"))).view(dtype)
    rows = torch.arange(problem.tokens) % len(logits)
    y = torch.from_numpy(np.load(problem.file("labels"))).long()[rows].to(device)
    g = torch.from_numpy(np.load(problem.file("cotangents")))[rows].to(device)
    found: dict[str, Any] = {}
    for name, function in functions.items():
        x.requires_grad_(False)
        for piece in x.split(len(logits)):  # again, as Liger leaves its gradient there
            piece.copy_(logits[: len(piece)])
        x.requires_grad_(name != "forward")
        try:

            def call() -> Any:
                return function(x, y, g)  # noqa: B023

            outputs, row = first_run(call, problem.platform)
            del outputs
            found[name] = row | median_ms(timer(call, problem.platform), problem.seconds)
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
    round_ms = timer(lambda: to.copy_(x), problem.platform)
    found = median_ms(round_ms, problem.seconds)
    return {"yardstick_ms": found["median_ms"]}


def main() -> None:
    """Serves the driver: one problem, or copies for as long as it asks."""
    mode, text = sys.argv[1:]
    problem = Problem.from_json(text)
    peer = "torch eager" if mode == "yardstick" else problem.peer
    modes = {"measure": measure, "yardstick": released(copy)}
    serve(problem, mode, modes, lambda: functions_of(peer))


if __name__ == "__main__":
    main()
