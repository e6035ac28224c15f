"""Norms by PyTorch's compiler and by Liger's Triton kernels: a worker of norms.py.

Each program is captured as a CUDA graph of calls on inputs of their own, so that Python starts none
of them, as it starts none of the kernels of a program of XLA's. First calls tune and compile.
"""

import json
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

Function = Callable[..., Any]
EPS = 1e-6


def _norm(x: Any, w: Any) -> Any:
    z = x.float()
    return (z * torch.rsqrt(z.square().mean(-1, keepdim=True) + EPS) * w.float()).to(x.dtype)


def _add(x: Any, r: Any, w: Any) -> Any:
    total = x + r
    return _norm(total, w), total


def _layer(x: Any, w: Any, b: Any) -> Any:
    return torch.nn.functional.layer_norm(x, w.shape, w, b, EPS)


def by_compiler() -> dict[str, Function]:
    """The functions of a norm by what they are of."""
    compiled = partial(torch.compile, dynamic=False)
    return {
        "rms_norm.": compiled(_norm),
        "rms_norm.add_": compiled(_add),
        "layer_norm.": compiled(_layer),
    }


def by_liger() -> dict[str, Function]:
    """The same of Liger, none of which overwrites what it is given."""
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return {
        "rms_norm.": lambda x, w: LigerRMSNormFunction.apply(x, w, EPS, 0.0, "llama", False),
        "rms_norm.add_": lambda x, r, w: LigerFusedAddRMSNormFunction.apply(
            x, r, w, EPS, 0.0, "llama", False
        ),
        "layer_norm.": lambda x, w, b: LigerLayerNormFunction.apply(x, w, b, EPS),
    }


PEERS: dict[str, Callable[[], dict[str, Function]]] = {"torch": by_compiler, "liger": by_liger}


def step_of(function: Function, operation: str, shape: Sequence[int], dtype: str) -> Function:
    """Returns a call of the operation on inputs of its own; the backward pass alone may be one."""
    row = partial(torch.randn, *shape, device="cuda", dtype=getattr(torch, dtype))
    weight = partial(torch.ones, shape[-1], device="cuda", dtype=getattr(torch, dtype))
    adds, centred = ".add_" in operation, operation.startswith("layer")
    arrays = [row(), *([row()] if adds else []), weight(), *([weight()] if centred else [])]
    cotangents = [row() for _ in range(1 + adds)]
    if operation.endswith("forward"):

        def forward() -> Any:
            with torch.no_grad():
                return function(*arrays)

        return forward
    wanted = [one.requires_grad_() for one in arrays]

    def results() -> list[Any]:
        found = function(*wanted)
        return [*found] if adds else [found]

    if operation.endswith("both"):
        return lambda: torch.autograd.grad(results(), wanted, cotangents)
    found = results()
    return lambda: torch.autograd.grad(found, wanted, cotangents, retain_graph=True)


def microseconds(make: Callable[[], Function], calls: int) -> float:
    """Returns the median microseconds of a call."""
    # Autograd runs a backward pass on the stream of its forward pass.
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        steps = [make() for _ in range(calls)]
        for step in [*steps, *steps[:1]]:
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for step in steps:
            step()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found = []
    for _ in range(15):
        begin.record()
        for _ in range(3):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) * 1e3 / 3 / len(steps))
    return statistics.median(found)


def work(
    cells: Sequence[tuple[str, tuple[int, ...], str]], peers: Sequence[str], calls: int
) -> None:
    """Prints, as JSON, each peer's microseconds a call of each cell, or what went wrong."""
    for peer in peers:
        try:
            functions = PEERS[peer]()
        except ImportError as error:
            print(json.dumps([peer, None, None, f"{error}"[:160]]), flush=True)
            continue
        for operation, shape, dtype in cells:
            kind = operation[: operation.index(".") + 1]
            kind += "add_" if ".add_" in operation else ""
            try:
                torch._dynamo.reset()
                make = partial(step_of, functions[kind], operation, shape, dtype)
                found: Any = microseconds(make, calls)
            except Exception as error:
                found = f"{type(error).__name__}: {error}".splitlines()[0][:160]
            print(json.dumps([peer, operation, shape, found]), flush=True)
