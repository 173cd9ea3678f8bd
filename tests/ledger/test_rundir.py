"""Run folders: private, created once, and never shared by two configs."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from ridethrough.ledger.rundir import RunDir, RunDirError, config_hash, create_run, differences

CONFIG = {"steps": 200, "model": {"preset": "tiny", "lr": 1e-3}}


def make(root: Path, config: dict | None = None, run_id: str | None = "a", schedule: str | None = "s1") -> RunDir:
    return create_run(root, run_id=run_id, config=config or CONFIG, command=["train"], schedule_hash=schedule)


def test_folders_and_files_are_private_under_a_lax_umask(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        run = make(tmp_path)
    finally:
        os.umask(old)
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
    assert stat.S_IMODE(run.events_dir.stat().st_mode) == 0o700
    assert stat.S_IMODE((run.path / "run.json").stat().st_mode) == 0o600


def test_result_is_written_and_cleared_when_the_job_goes_on(tmp_path: Path) -> None:
    run = make(tmp_path)
    assert run.run_json()["result"] is None
    run.finish(82, "preempted")
    assert RunDir.open(run.path).run_json()["result"]["code"] == 82
    assert make(tmp_path).run_json()["result"] is None
    assert [p.name for p in run.path.iterdir() if p.name.startswith(".")] == []


def test_another_config_is_refused_with_both_named_and_nothing_changed(tmp_path: Path) -> None:
    run = make(tmp_path)
    before = (run.path / "run.json").read_bytes()
    other = {"steps": 200, "model": {"preset": "tiny", "lr": 2e-3}}
    with pytest.raises(RunDirError) as error:
        make(tmp_path, other)
    text = str(error.value)
    assert config_hash(CONFIG) in text and config_hash(other) in text
    assert "model.lr is 0.001 there, 0.002 here" in text and "steps" not in text
    assert "\n" not in text
    assert (run.path / "run.json").read_bytes() == before


def test_another_schedule_is_refused(tmp_path: Path) -> None:
    make(tmp_path)
    with pytest.raises(RunDirError, match="s1 there, s2 here"):
        make(tmp_path, schedule="s2")


@pytest.mark.parametrize("bad", ["../x", "a/b", ".hidden", "a b", ""])
def test_ids_that_are_no_folder_name(tmp_path: Path, bad: str) -> None:
    with pytest.raises(RunDirError, match="run id"):
        make(tmp_path, run_id=bad)
    assert not list(tmp_path.iterdir())


def test_a_run_without_an_id_gets_a_fresh_one(tmp_path: Path) -> None:
    assert make(tmp_path, run_id=None).run_id != make(tmp_path, run_id=None).run_id


def test_a_foreign_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "thesis.txt").write_text("mine")
    with pytest.raises(RunDirError, match="no run folder"):
        make(tmp_path)
    assert os.listdir(tmp_path / "a") == ["thesis.txt"]


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirError, match="--runs DIR"):
        make(tmp_path / "file")


def test_opening_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match=r"no run\.json"):
        RunDir.open(tmp_path)
    (tmp_path / "run.json").write_text('{"schema": 99}')
    with pytest.raises(RunDirError, match="upgrade"):
        RunDir.open(tmp_path)


def test_config_hash_ignores_order_and_differences_are_dotted() -> None:
    assert config_hash({"a": 1, "b": 2}) == config_hash({"b": 2, "a": 1}) == "43258cff783fe703"
    assert differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1}, "d": None}) == {"a.c": (2, None)}
