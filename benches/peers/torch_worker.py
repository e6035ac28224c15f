"""What workers in PyTorch have in common. PyTorch may be missing: it is imported when asked for."""

import time
from collections.abc import Callable
from typing import Any

from shared import P


def synchronize(platform: str) -> None:
    """Waits for the device."""
    import torch

    if platform == "cuda":
        torch.cuda.synchronize()


def first_run(call: Callable[[], Any], platform: str) -> tuple[Any, dict[str, Any]]:
    """The outputs of a call after those that compile and tune, and the most memory then held."""
    import torch

    call()
    call()
    if platform != "cuda":
        return call(), {}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    outputs = call()
    torch.cuda.synchronize()
    return outputs, {"peak_bytes": torch.cuda.max_memory_allocated()}


def timer(call: Callable[[], Any], platform: str) -> Callable[[int], float]:
    """Milliseconds a call, of calls enqueued together; on GPUs by the device's clock."""
    import torch

    def by_events(calls: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / calls

    def by_the_wall(calls: int) -> float:
        started = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - started) * 1e3 / calls

    return by_events if platform == "cuda" else by_the_wall


def released(work: Callable[[P], dict[str, Any]]) -> Callable[[P], dict[str, Any]]:
    """`work`, after which the device's memory is free for other processes."""

    def working(problem: P) -> dict[str, Any]:
        import torch

        found = work(problem)
        if problem.platform == "cuda":
            torch.cuda.empty_cache()
        return found

    return working
