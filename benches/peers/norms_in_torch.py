"""Norms by PyTorch's compiler and by Liger's Triton kernels: a worker of norms.py.

Each program is captured as a CUDA graph of calls on inputs of their own, so that Python starts no
kernel of it, as in a program of XLA's. First calls tune and compile.
"""

import json
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from harness import first_line, in_turns, torch_clock

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
    """Compiled norms by name."""
    compiled = partial(torch.compile, dynamic=False)
    return {
        "rms_norm.": compiled(_norm),
        "rms_norm.add_": compiled(_add),
        "layer_norm.": compiled(_layer),
    }


def by_liger() -> dict[str, Function]:
    """Liger's norms by name, without those that overwrite their input."""
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
    turn = partial(torch_clock(graph.replay), 3)
    times = in_turns({"": turn}, least=15, most=15)[""]
    return 1e6 * statistics.median(times) / len(steps)


def work(
    cells: Sequence[tuple[str, tuple[int, ...], str]], peers: Sequence[str], calls: int
) -> None:
    """Prints, as JSON, each peer's microseconds a call of each cell, or its error."""
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
                found = first_line(error)
            print(json.dumps([peer, operation, shape, found]), flush=True)
