"""The checkpoint sweep at its smallest size, with real ranks; and what makes a row count."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from ridethrough.bench import checkpoint_throttle
from ridethrough.bench.checkpoint_sweep import Sweep, run_sweep, why_not


def test_a_throttled_writer_takes_the_time_of_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_STORAGE_RATE", "1e6")
    file = checkpoint_throttle.SlowFile(str(tmp_path / "x"), share=2)
    begun = time.monotonic()
    for _ in range(4):
        file.write(b"x" * 50_000)
    file.close()
    assert time.monotonic() - begun >= 0.39, "200 kB at half of 1 MB/s"
    assert (tmp_path / "x").stat().st_size == 200_000


def test_a_row_counts_only_if_it_is_fresh_and_right() -> None:
    good: dict[str, Any] = {"error": None, "added_s_per_save": 0.1, "wrong_tensors": 0}
    good |= {"freshness_s": 2.0, "freshness_bound_s": 3.0}
    assert why_not(good) is None
    assert "wrong" in str(why_not({**good, "wrong_tensors": 1}))
    assert "load" in str(why_not({**good, "wrong_tensors": None}))
    assert "4.0 s old" in str(why_not({**good, "freshness_s": 4.0}))
    assert why_not({**good, "error": "exit codes [1]"}) == "exit codes [1]"


@pytest.mark.ranks
@pytest.mark.campaign
def test_modes_beside_each_other_save_what_can_be_loaded() -> None:
    said: list[str] = []
    sweep = Sweep(
        modes=["none", "torch-save", "ridethrough", "nvrx-async", "ridethrough-memory"],
        windows=(2.0,),
        state_bytes=(16 << 20,),
        saves=2,
        interval=4,
        storage_mbps=60.0,
        limit_s=100.0,
    )
    result = run_sweep(sweep, said.append)
    assert [row["mode"] for row in result["missing"]] == ["nvrx-async"], "a missing peer is said"
    rows = {row["mode"]: row for row in result["results"]}
    assert rows["none"]["efficiency"] == 1.0
    for mode in ("torch-save", "ridethrough", "ridethrough-memory"):
        row = rows[mode]
        assert row["error"] is None, row
        assert row["wrong_tensors"] == 0 and row["load_s"] > 0 and row["host_bytes"] > 32 << 20
        assert row["written"] + row["superseded"] == 2
    assert rows["torch-save"]["blocked_s_per_save"] > 0.4, "32 MiB at 60 MB/s, and training waits"
    assert rows["ridethrough"]["write_s"] > 0.4, "the keeper is as slow"
    assert rows["ridethrough"]["blocked_s_per_save"] < 0.4, "and nobody waits"
    assert result["calibrations"][0]["write_s"] > 0.4
