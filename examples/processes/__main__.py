"""What becomes of a job of two processes, a device each, when one of them fails in a step.

    python -m processes [--json FILE] [FAULT ...]

Both train by linear cross-entropy with the tokens sharded over them, on two GPUs, or on CPUs where
JAX_PLATFORMS is cpu. Faults, of the second process after some steps: `killed` (SIGKILL), `memory`
(its device is full; a process on a CPU has a limit set), `shapes` (it has other shapes than the
first). The report has for each how long the first process lived on, how it ended, the last
lines of both, and the line that names the second. Where the first lives on for LIMIT seconds, or
nothing names the second, the exit code is 1.
"""

import argparse
import faulthandler
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

FAULTS = ("killed", "memory", "shapes")
# Seconds: without heartbeats of a process, of waiting for the other at the end, for a job to end.
HEARTBEAT, SHUTDOWN, LIMIT = 10, 20, 60
STEPS_BEFORE = 5
# By `told_by_rank` and `check_alike`, and by JAX.
NAMES_THE_SECOND = re.compile(r"rank 1 of 2.*|\(stopped sending heartbeats\):\s+(\S*task:)?1\b")


def worker(rank: int, address: str, fault: str) -> None:
    """One process of the job, for ever."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    from pallas_bridge import linear_cross_entropy

    from . import check_alike, told_by_rank

    faulthandler.register(signal.SIGUSR1)
    on_cpus = os.environ.get("JAX_PLATFORMS") == "cpu"
    if on_cpus:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        address,
        2,
        rank,
        local_device_ids=None if on_cpus else [rank],
        heartbeat_timeout_seconds=HEARTBEAT,
        shutdown_timeout_seconds=SHUTDOWN,
    )
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))
    jax.set_mesh(mesh)

    def arrays(tokens: int) -> tuple[jax.Array, ...]:
        # By no program of JAX's: one over both GPUs waits, as it compiles, for the other to do so.
        def put(spec: P, value: float, dtype: Any, *shape: int) -> jax.Array:
            own = np.full(shape, value, dtype)
            sharding = NamedSharding(mesh, spec)
            array: jax.Array = jax.make_array_from_process_local_data(sharding, own)
            return array

        hidden = put(P("data"), 1, jnp.bfloat16, tokens // 2, 1024)
        labels = put(P("data"), 0, np.int32, tokens // 2)
        return hidden, put(P(), 1, jnp.bfloat16, vocab, 1024), labels

    step = jax.jit(jax.value_and_grad(linear_cross_entropy, (0, 1)))
    most, vocab = (256, 1000) if on_cpus else (4096, 32000)
    given, done = arrays(most), 0
    with told_by_rank(HEARTBEAT):
        while True:
            if done == STEPS_BEFORE and rank == 1 and fault == "shapes":
                given = arrays(most // 2)
            if done == STEPS_BEFORE and rank == 1 and fault == "memory":
                fill(jax.local_devices()[0])
            check_alike(given)
            jax.block_until_ready(step(*given))
            done += 1
            print(f"rank {rank}: step {done}", flush=True)
            time.sleep(0.1)


def fill(device: Any) -> None:
    """Puts arrays of 2 GiB on a device until it has no room."""
    import jax
    import numpy as np

    block = np.ones(2**31, np.int8)
    if device.platform == "cpu":
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + 2**30, resource.RLIM_INFINITY))
    made = [jax.device_put(block, device, may_alias=False) for _ in range(1000)]
    jax.block_until_ready(made)


def outcome(fault: str, folder: Path) -> dict[str, Any]:
    """Starts a job, has the fault happen, and tells what the first process made of it."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "processes", "--address", address, fault, "--rank"]
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    logs = [folder / f"{fault}-{rank}.log" for rank in range(2)]
    jobs = [
        subprocess.Popen(
            [*command, str(rank)],
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        for rank, log in enumerate(logs)
    ]
    first, second = jobs
    ready = f"rank 1: step {STEPS_BEFORE}"
    started = time.monotonic()
    while ready not in logs[1].read_text() and time.monotonic() - started < LIMIT:
        time.sleep(0.05)
    if fault == "killed":
        second.send_signal(signal.SIGKILL)
    since = time.monotonic()
    while first.poll() is None and time.monotonic() - since < LIMIT:
        time.sleep(0.1)
    found = {"fault": fault, "seconds": round(time.monotonic() - since, 1), "code": first.poll()}
    hung = [job for job in jobs if job.poll() is None]
    for job in hung:
        # Python says where it is.
        job.send_signal(signal.SIGUSR1)
    if hung:
        time.sleep(2)
    for job in jobs:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    found["second_code"] = second.returncode
    texts = [log.read_text() for log in logs]
    names = [match for text in texts if (match := NAMES_THE_SECOND.search(text))]
    found["named"] = names[0][0][:300] if names else None
    for name, text in zip(("first", "second"), texts, strict=True):
        # Without the frames of a stack trace.
        lines = [line[:300] for line in text.splitlines() if line.strip()]
        found[name] = [line for line in lines if not line.startswith("    @ ")][-6:]
    return found


def main() -> int:
    """Has every fault happen; 1 where a process hung, or none named the one that failed."""
    parser = argparse.ArgumentParser(prog="processes", description=__doc__.splitlines()[0])
    parser.add_argument("faults", nargs="*", metavar="FAULT", default=[*FAULTS])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    options = parser.parse_args()
    unknown = {*options.faults} - {*FAULTS}
    if unknown:
        parser.error(f"no fault {', '.join(sorted(unknown))}: choose from {', '.join(FAULTS)}")
    if options.rank is not None:
        worker(options.rank, options.address, options.faults[0])
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for fault in options.faults:
            found.append(outcome(fault, Path(folder)))
            print(json.dumps(found[-1], indent=1), flush=True)
            if options.json:
                options.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(any(one["code"] is None or one["named"] is None for one in found))


if __name__ == "__main__":
    sys.exit(main())
