"""What the ledger costs a step of training, in CPU seconds of the rank's process:

    python tests/ledger/overhead.py            # 20,000 steps of what `run.steps` records, with two metrics and one wait

Prints CPU and wall microseconds per step, and both as a share of a step of 50 ms.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

from ridethrough.ledger.recorder import Recorder

STEP_NS = 50_000_000


def measure(steps: int = 20_000) -> dict[str, float]:
    """Microseconds per step of recording it: its times, one carved-out wait, loss and tokens."""
    with tempfile.TemporaryDirectory() as folder, Recorder(Path(folder), "worker") as recorder:
        cpu, wall = time.process_time(), time.monotonic()
        for step in range(1, steps + 1):
            t0 = time.monotonic_ns()
            parts = [("data_wait", t0 + 100, t0 + 900)]
            t1 = time.monotonic_ns()
            fields = {"step": step, "t0_ns": t0, "t1_ns": t1, "parts": [p for p in parts if p[2] > t0]}
            recorder.emit("step", t_ns=t1, generation=3, rank=1, **fields, loss=2.5381264, tokens=8192)
        cpu, wall = time.process_time() - cpu, time.monotonic() - wall
    return {
        "cpu_us_per_step": cpu / steps * 1e6,
        "wall_us_per_step": wall / steps * 1e6,
        "cpu_share_of_50_ms": cpu / steps / (STEP_NS / 1e9),
        "wall_share_of_50_ms": wall / steps / (STEP_NS / 1e9),
    }


if __name__ == "__main__":
    print(json.dumps(measure(), indent=1))
