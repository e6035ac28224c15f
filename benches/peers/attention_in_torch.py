"""Attention by PyTorch: a worker of attention.py.

    python attention_in_torch.py FILE SECONDS

FILE holds cells as attention.py has them, `[[name, shape, options], ..]`, and the passes; a line of
JSON goes to standard output for each cell and pass, with milliseconds or the error by backend.
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
from harness import PROGRAMS, first_line, in_turns, torch_clock
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

Function = Callable[[Any, Any, Any], Any]


def by_backend(backend: SDPBackend) -> Function:
    """Causal attention of a backend; q, k and v are [B, H, S, D]."""

    def function(q: Any, k: Any, v: Any) -> Any:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True
            )

    return function


def by_flex(tokens: int, options: dict[str, Any]) -> Function:
    """Causal attention with a window before, texts of one length or a softcap."""
    window, length = options.get("window"), options.get("texts")

    def sees(batch: Any, head: Any, query: Any, key: Any) -> Any:
        seen = key <= query
        if window is not None:
            seen = seen & (query - key <= window[0])
        return seen & (query // length == key // length) if length else seen

    def bend(score: Any, *_: Any) -> Any:
        return options["softcap"] * torch.tanh(score / options["softcap"])

    return partial(
        torch.compile(flex_attention, dynamic=False),
        score_mod=bend if "softcap" in options else None,
        block_mask=create_block_mask(sees, None, None, tokens, tokens, device="cuda"),
        enable_gqa=True,
    )


def measured(shape: list[int], options: dict[str, Any], which: str, seconds: float) -> Any:
    """Milliseconds of each backend that has the options, timed in turns, or its error."""
    batch, tokens, heads, kv_heads, columns = shape
    values = options.get("value_columns", columns)
    # Programs of other cells count towards a limit, past which nothing is compiled.
    torch._dynamo.reset()
    torch.manual_seed(0)
    arrays = [
        torch.randn(batch, tokens, *of, device="cuda", dtype=torch.bfloat16)
        .transpose(1, 2)
        .requires_grad_()
        for of in ((heads, columns), (kv_heads, columns), (kv_heads, values))
    ]
    functions: dict[str, Callable[[], Function]] = {}
    if "keys" in options or isinstance(options.get("texts"), list):
        return {}
    if not {*options} - {"value_columns"}:
        functions["flash"] = partial(by_backend, SDPBackend.FLASH_ATTENTION)
        functions["cudnn"] = partial(by_backend, SDPBackend.CUDNN_ATTENTION)
    if "sinks" not in options:
        functions["flex"] = partial(by_flex, tokens, options)
    found: dict[str, Any] = {}
    turns: dict[str, Callable[[], float]] = {}
    for name, make in functions.items():
        try:
            function = make()
            if which == "forward":
                start = partial(torch.no_grad()(function), *arrays)
            else:
                out = function(*arrays)
                dout = torch.randn_like(out)
                start = partial(torch.autograd.grad, out, arrays, dout, retain_graph=True)
            start()
        # The backend has no such call; the others go on.
        except Exception as error:
            found[name] = first_line(error)
        else:
            turns[name] = partial(torch_clock(start), PROGRAMS)
    for name, times in in_turns(turns, least=5, seconds=seconds).items():
        found[name] = 1e3 * statistics.median(times)
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
