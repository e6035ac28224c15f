"""Peers in PyTorch, and the copy: a worker of cross_entropy.py."""

import sys
from collections.abc import Callable
from typing import Any

from shared import Problem, answer, await_turn, first_line, median_ms

Function = Callable[[Any, Any, Any], Any]


def functions_of(peer: str) -> dict[str, Function]:
    """Functions of logits, labels and cotangents that compute each measure."""
    import torch
    import torch.nn.functional as F

    if peer == "QuACK":
        from quack.cross_entropy import cross_entropy, cross_entropy_fwd

        def quack_pair(x: Any, y: Any, g: Any) -> Any:
            losses = cross_entropy(x, y, reduction="none")
            return losses, *torch.autograd.grad(losses, x, g)

        return {
            # The gradient of the sum, with no cotangent: what it has in two passes.
            "value_and_grad": lambda x, y, _: cross_entropy_fwd(x.detach(), y, return_dx=True),
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
        value = loss(x, y, "mean")
        return value, *torch.autograd.grad(value, x)

    def pair(x: Any, y: Any, g: Any) -> Any:
        losses = loss(x, y, "none")
        return losses, *torch.autograd.grad(losses, x, g.to(losses.dtype))

    return {
        "value_and_grad": value_and_grad,
        "pair": pair,
        "forward": lambda x, y, _: loss(x.detach(), y, "mean"),
    }


def timer(call: Callable[[], Any]) -> Callable[[int], float]:
    """Milliseconds a call by the device's clock, of calls enqueued together."""
    import torch

    def round_ms(calls: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / calls

    return round_ms


def measure(problem: Problem) -> dict[str, Any]:
    """All measures of one peer on one problem."""
    import torch

    functions = functions_of(problem.peer)
    torch.manual_seed(0)
    device = torch.device("cuda")
    dtype = getattr(torch, problem.dtype)
    x = torch.empty(problem.tokens, problem.vocab, device=device, dtype=dtype)
    y = torch.randint(0, problem.vocab, (problem.tokens,), device=device)
    g = torch.randn(problem.tokens, device=device)
    found: dict[str, Any] = {}
    for name, function in functions.items():
        x.requires_grad_(False).normal_(0, 2)  # Liger leaves its gradient there
        x.requires_grad_(name != "forward")
        try:

            def call() -> Any:
                return function(x, y, g)  # noqa: B023

            call()  # compiles
            call()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            outputs = call()
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated()
            del outputs
            timed = median_ms(timer(call), problem.seconds)
            found[name] = {"peak_bytes": peak, **timed}
        except Exception as error:
            found[name] = {"error": first_line(error)}
    return found


def copy_ms(problem: Problem) -> float:
    """Milliseconds to copy the logits on the device."""
    import torch

    dtype = getattr(torch, problem.dtype)
    x = torch.empty(problem.tokens, problem.vocab, device="cuda", dtype=dtype).normal_(0, 2)
    to = torch.empty_like(x)
    return median_ms(timer(lambda: to.copy_(x)), min(problem.seconds, 0.3))["median_ms"]


def main() -> None:
    """Serves the driver: one problem, or copies for as long as it asks."""
    mode, text = sys.argv[1:]
    problem = Problem.from_json(text)
    try:
        if problem.platform != "cuda":
            raise RuntimeError(f"measured on cuda only, not {problem.platform}")
        functions_of("torch eager" if mode == "copy" else problem.peer)
    except Exception as error:
        if await_turn():
            answer({"error": first_line(error)})
        return
    if not await_turn():
        return
    if mode == "copy":
        while line := sys.stdin.readline():
            answer({"copy_ms": copy_ms(Problem.from_json(line))})
            sys.modules["torch"].cuda.empty_cache()  # for the peer
        return
    try:
        answer(measure(problem))
    except Exception as error:
        answer({"error": first_line(error)})


if __name__ == "__main__":
    main()
