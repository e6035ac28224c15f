"""Attention by PyTorch: a worker of attention.py.

    python attention_in_torch.py FILE SECONDS

FILE holds cells as attention.py has them, `[[name, shape, options], ..]`, and the passes; a line of
JSON goes to standard output for each cell and pass, with milliseconds or what failed by backend.
`flash` is FlashAttention 2 as PyTorch has it and `cudnn` its cuDNN, both by
`scaled_dot_product_attention`; `flex` is `flex_attention` compiled for the mask and the softcap.
"""

import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

Function = Callable[[Any, Any, Any], Any]
CALLS = 8


def by_backend(backend: SDPBackend) -> Function:
    """Causal attention of a backend; q, k and v are [B, H, S, D]."""

    def function(q: Any, k: Any, v: Any) -> Any:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True
            )

    return function


def by_flex(tokens: int, options: dict[str, Any]) -> Function:
    """The same with a window before, segments of equal lengths or a softcap."""
    window, segments = options.get("window"), options.get("segments")
    length = tokens // segments if segments else tokens

    def sees(batch: Any, head: Any, query: Any, key: Any) -> Any:
        seen = key <= query
        if window is not None:
            seen = seen & (query - key <= window[0])
        return seen & (query // length == key // length) if segments else seen

    def bend(score: Any, *_: Any) -> Any:
        return options["softcap"] * torch.tanh(score / options["softcap"])

    return partial(
        torch.compile(flex_attention, dynamic=False),
        score_mod=bend if "softcap" in options else None,
        block_mask=create_block_mask(sees, None, None, tokens, tokens, device="cuda"),
        enable_gqa=True,
    )


def milliseconds(run: Callable[[], Any], seconds: float) -> float:
    """The median over rounds of calls in a row."""
    for _ in range(3):
        run()
    times: list[float] = []
    while len(times) < 5 or sum(times) * CALLS < 1e3 * seconds:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(CALLS):
            run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / CALLS)
    return statistics.median(times)


def measured(shape: list[int], options: dict[str, Any], which: str, seconds: float) -> Any:
    """Milliseconds of each backend that has the options, or what it said."""
    batch, tokens, heads, kv_heads, columns = shape
    # What was compiled for other cells counts towards a limit, past which nothing is compiled.
    torch._dynamo.reset()
    torch.manual_seed(0)
    arrays = [
        torch.randn(batch, tokens, count, columns, device="cuda", dtype=torch.bfloat16)
        .transpose(1, 2)
        .requires_grad_()
        for count in (heads, kv_heads, kv_heads)
    ]
    functions: dict[str, Callable[[], Function]] = {}
    if not options:
        functions["flash"] = partial(by_backend, SDPBackend.FLASH_ATTENTION)
        functions["cudnn"] = partial(by_backend, SDPBackend.CUDNN_ATTENTION)
    if "sinks" not in options:
        functions["flex"] = partial(by_flex, tokens, options)
    found: dict[str, Any] = {}
    for name, make in functions.items():
        try:
            function = make()
            if which == "forward":
                with torch.no_grad():
                    found[name] = milliseconds(partial(function, *arrays), seconds)
                continue
            out = function(*arrays)
            dout = torch.randn_like(out)
            grad = partial(torch.autograd.grad, out, arrays, dout, retain_graph=True)
            found[name] = milliseconds(grad, seconds)
        # A backend that has no such call is told of; the others go on.
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return found


def main() -> int:
    """Measures the cells of a file."""
    given, seconds = json.loads(Path(sys.argv[1]).read_text()), float(sys.argv[2])
    for name, shape, options in given["cells"]:
        for which in given["passes"]:
            found = measured(shape, options, which, seconds)
            print(json.dumps({"cell": name, "pass": which, "torch": found}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
