"""Jobs of two real processes on the CPU, of which one fails: the other ends, and it is named."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# What names the second process; of one that is killed JAX does.
NAMED = {
    "shapes": "rank 1 of 2 has other arrays than rank 0: [0]: bfloat16[128,1024], where rank 0",
    "killed": "(stopped sending heartbeats)",
    "memory": "1",  # by JAX or by itself, whichever is read first
}
EXAMPLES = Path(__file__).parents[1]


@pytest.mark.few(1)
@pytest.mark.parametrize("fault", NAMED)
def test_a_process_that_fails_is_named(fault: str, tmp_path: Path) -> None:
    path = os.pathsep.join([str(EXAMPLES), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    found = tmp_path / "found.json"
    command = [sys.executable, "-m", "processes", fault, "--json", str(found)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (one,) = json.loads(found.read_text())
    assert NAMED[fault] in one["named"]
    assert one["code"] != 0 and one["second_code"] != 0
    if fault == "memory":
        line = "rank 1 of 2, on "
        assert any(text.startswith(line) and "RESOURCE_EXHAUSTED" in text for text in one["second"])


def test_a_fault_that_is_not_known() -> None:
    command = [sys.executable, "-m", "processes", "asleep"]
    done = subprocess.run(command, cwd=EXAMPLES, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no fault asleep: choose from killed, memory, shapes" in done.stderr
