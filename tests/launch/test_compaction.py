"""The agent's compactor makes blocks of what a process has left behind, and nothing else."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path

from ridethrough.launch.compaction import keep_compact
from ridethrough.ledger.reading import read_split
from ridethrough.ledger.rundir import create_run


def test_a_closed_segment_becomes_a_block(tmp_path: Path) -> None:
    run = create_run(tmp_path, run_id="a", config={}, command=[], schedule_hash=None)
    fields = {"kind": "step", "generation": 0, "rank": 0, "parts": []}
    lines = [json.dumps({"t_ns": n, **fields, "step": n, "t0_ns": n - 1, "t1_ns": n}) for n in range(1, 4001)]
    header = {"t_ns": 0, "kind": "header", "role": "worker", "host": "h", "boot_id": "b", "mono_ns": 0, "wall_ns": 0}
    host = socket.gethostname()
    names = [f"{host}-worker-1.jsonl", f"{host}-worker-1.1.jsonl", "other-worker-1.jsonl", "other-worker-1.1.jsonl"]
    for name in names:
        (run.events_dir / name).write_text("\n".join([json.dumps(header), *lines]) + "\n")

    async def until_made() -> None:
        task = asyncio.ensure_future(keep_compact(run, look_s=0.05))
        while len(list(run.events_dir.glob("*.block"))) < 2:
            await asyncio.sleep(0.05)
        task.cancel()

    asyncio.run(asyncio.wait_for(until_made(), 60))
    made = [f"{host}-worker-1.block", f"{host}-worker-1.1.block"]  # the last one too: nobody holds it open
    assert {p.name for p in run.events_dir.iterdir()} - set(names[:2]) == {*made, *names[2:]}
    assert len(read_split(run.path).steps[0]) == 16_000
