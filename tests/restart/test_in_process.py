"""Faults that leave every process alive: all ranks go on in the same processes."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.ranks


FULL = pytest.mark.campaign


@pytest.mark.parametrize("kind", ["fsdp", pytest.param("ddp", marks=FULL), pytest.param("fsdp1", marks=FULL)])
def test_exceptions_and_hangs_in_a_row_keep_every_process(jobs: Any, kind: str) -> None:
    faults = ["exception:0:12", "hang_loop:-1:18", "hang_lock:1:24", "hang_skip_collective:2:30", "exception:-1:36"]
    job = jobs(options={"kind": kind, "total": 40}, faults=faults)
    assert job.code == 0, job.out
    want = [("exception", 0), ("hang", 3), ("hang", 1), ("hang", 2), ("exception", 3)]
    assert job.told("class", "rank") == want
    assert {i["rung"] for i in job.incidents} == {"in_process"}
    assert job.spawns() == {0: 1, 1: 1, 2: 1, 3: 1}
    assert {n["entries"] for n in job.notes().values()} == {6}
    hangs = sorted({path.parent for path in job.run.glob("incidents/*/flight_*")})
    assert len(hangs) == 3
    for folder, guilty in zip(hangs, (3, 1, 2), strict=True):
        begun = [num_collectives(folder / f"flight_{rank}") for rank in range(4)]
        assert begun[guilty] < min(begun[:guilty] + begun[guilty + 1 :]), (folder, begun)


def num_collectives(flight: Path) -> int:
    """Begun by the rank on all its groups, by torch's flight recorder."""
    last: dict[str, int] = {}
    for entry in pickle.loads(flight.read_bytes())["entries"]:
        last[str(entry["process_group"])] = entry["collective_seq_id"]
    return sum(last.values())


@pytest.mark.parametrize("kind", ["mesh2d", pytest.param("hsdp", marks=pytest.mark.campaign)])
@pytest.mark.campaign
def test_meshes_with_sub_groups(jobs: Any, kind: str) -> None:
    """The guilty rank is found although each collective is on a group that only some ranks are in."""
    faults = ["hang_loop:2:12:backward", "exception:1:18", "hang_lock:0:24:optimizer", "hang_skip_collective:3:30"]
    job = jobs(options={"kind": kind, "total": 36}, faults=faults)
    assert job.code == 0, job.out
    assert job.told("class", "rank", "rung") == [
        ("hang", 2, "in_process"),
        ("exception", 1, "in_process"),
        ("hang", 0, "in_process"),
        ("hang", 3, "in_process"),
    ]
