"""The flight recorder's file of a rank: what `torchfrtrace` would read."""

from __future__ import annotations

import datetime
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ridethrough.restart import flight_recorder


def test_the_collectives_of_a_group_are_kept_once(tmp_path: Path) -> None:
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, datetime.timedelta(seconds=5))
    path = tmp_path / "flight_0"
    sizes = (3, 5, 7)
    for size in sizes:
        group.allreduce([torch.ones(size)]).wait()
    flight_recorder.keep(path)
    entries = pickle.loads(path.read_bytes())["entries"][-3:]
    assert [e["input_sizes"] for e in entries] == [[[size]] for size in sizes]
    assert [e["collective_seq_id"] for e in entries] == [1, 2, 3]
    group.barrier().wait()
    flight_recorder.keep(path)  # the first moment counts
    assert pickle.loads(path.read_bytes())["entries"][-3:] == entries


def test_a_folder_that_is_gone_is_said_and_no_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flight_recorder.keep(tmp_path / "gone" / "flight_0")
    assert "no flight recorder's dump in" in capsys.readouterr().err
