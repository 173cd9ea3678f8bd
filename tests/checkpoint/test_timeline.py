"""Generations on one root: who may write, and whose commits are believed (rules 1, 8 and 9)."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridethrough.checkpoint import dcpindex, fileops, layout, persist, retention, template, timeline
from ridethrough.checkpoint.dcpindex_torch import _SAMPLE, metadata, trusted
from ridethrough.checkpoint.errors import DamagedCheckpoint, StaleGeneration


def attempt(root: Path, step: int, lineage: layout.Lineage, sequence: int = 1) -> persist.Target:
    target = persist.Target(root, lineage, step, lineage.attempt(sequence), 1, commit_timeout_s=5)
    fileops.make_folder(target.folder)
    entries = [{"k": "v", "p": ["v"], "f": 0, "o": 0, "n": 4}]
    persist.write_part(target, persist.RankPart(0, [memoryview(b"data")], entries), 1, lambda: False)
    return target


def enter(monkeypatch: pytest.MonkeyPatch, root: Path, job: str, generation: int, resumed: int) -> layout.Lineage:
    monkeypatch.setenv("RIDETHROUGH_JOB", job)
    monkeypatch.setenv("RIDETHROUGH_GENERATION", str(generation))
    return timeline.claim(root, resumed, None, 1)


def believed(root: Path) -> list[int]:
    return [a.step for a in layout.scan(root) if a.state == "committed"]


def test_a_late_writer_of_an_older_generation_neither_commits_nor_is_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = enter(monkeypatch, tmp_path, "job", 0, 0)
    persist.commit(attempt(tmp_path, 10, old), lambda: None)
    late = attempt(tmp_path, 20, old, 2)
    enter(monkeypatch, tmp_path, "job", 1, 10)
    with pytest.raises(StaleGeneration, match=r"0\.1 has started"):
        persist.commit(late, lambda: None)
    assert believed(tmp_path) == [10]
    monkeypatch.setattr(persist, "check_fence", lambda *_: None)  # it had looked just before the new one entered
    persist.commit(late, lambda: None)
    assert believed(tmp_path) == [10]
    reason = next(a.reason for a in layout.scan(tmp_path) if a.step == 20)
    assert "steps above 10 were rolled back by generation 0.1" in reason


def test_generations_and_jobs_are_ordered_on_a_root_and_a_stale_one_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert enter(monkeypatch, tmp_path, "a", 0, 0) == layout.Lineage(0, 0)
    assert enter(monkeypatch, tmp_path, "a", 2, 0) == layout.Lineage(0, 2)
    with pytest.raises(StaleGeneration, match=r"0\.2 of this job has already started"):
        enter(monkeypatch, tmp_path, "a", 1, 0)
    assert enter(monkeypatch, tmp_path, "b", 0, 0) == layout.Lineage(1, 0)  # the next launch, from 0 again
    assert enter(monkeypatch, tmp_path, "b", 1, 0) == layout.Lineage(1, 1)
    with pytest.raises(StaleGeneration, match="another job"):
        enter(monkeypatch, tmp_path, "a", 3, 0)
    monkeypatch.delenv("RIDETHROUGH_GENERATION")
    assert timeline.claim(tmp_path, 0, None, 1) == layout.Lineage(2, 0)  # a plain script, each time a new epoch


def test_retention_keeps_the_newest_the_multiples_and_the_evidence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = enter(monkeypatch, tmp_path, "job", 0, 0)
    for sequence, step in enumerate((10, 20, 30, 40, 50), 1):
        persist.commit(attempt(tmp_path, step, old, sequence), lambda: None)
    attempt(tmp_path, 45, old, 9)  # partial, of an older generation: goes
    new = enter(monkeypatch, tmp_path, "job", 1, 40)
    persist.commit(attempt(tmp_path, 60, new), lambda: None)
    attempt(tmp_path, 55, new, 2)  # partial, of this generation: may still be under way
    gone = retention.apply(tmp_path, new, keep=2, keep_every=20)
    assert sorted(int(name.split(".")[0][5:]) for name in gone) == [10, 30, 45]
    assert believed(tmp_path) == [60, 40, 20]
    assert (tmp_path / layout.attempt_folder(50, old.attempt(5))).exists()  # rolled back: evidence
    assert retention.apply(tmp_path, old, keep=1, keep_every=None) == []  # only the newest generation deletes


def test_a_run_that_has_loaded_nothing_keeps_its_own_saves_beside_older_ones_with_more_steps(
    job: Any, tmp_path: Path
) -> None:
    first = job(keep=2)
    first.checkpointer.load()
    for step in (480, 490, 500):
        first.checkpointer.save(step).committed(20)
    first.checkpointer.close(20)
    second = job(keep=2)
    with pytest.warns(UserWarning, match="has loaded none of them"):
        ticket = second.checkpointer.save(10)
    assert Path(str(ticket.committed(20))).is_dir()
    second.checkpointer.save(20).committed(20)
    assert believed(tmp_path / "ckpt") == [20, 10]


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=9) | st.none(), max_size=5), st.data())
def test_a_sealed_record_survives_no_change_of_any_bit_or_length(record: dict[str, Any], data: st.DataObject) -> None:
    sealed = layout.seal(record)
    assert layout.unseal(sealed, "x") == record
    at = data.draw(st.integers(0, len(sealed) * 8 - 1))
    flipped = bytearray(sealed)
    flipped[at // 8] ^= 1 << at % 8
    for wrong in (bytes(flipped), sealed[: at // 8], sealed + b"\n"):
        with pytest.raises(DamagedCheckpoint):
            layout.unseal(wrong, "x")


def test_the_index_written_without_torch_is_torchs_own() -> None:
    assert trusted()
    assert pickle.loads(dcpindex.build(_SAMPLE)) == metadata(_SAMPLE)
    half = [{**_SAMPLE[0], "entries": _SAMPLE[0]["entries"][:1]}]
    with pytest.raises(ValueError, match=r"m\.w: the ranks wrote 6 of 12 elements"):
        dcpindex.build(half)


def test_where_torch_has_another_form_the_files_are_torchs_own_writers(
    job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: Any
) -> None:
    """The fallbacks: archives by torch.save, the index by a process with torch."""
    import torch.distributed.checkpoint as dcp

    from ridethrough.checkpoint import meeting, plan

    assert template.works()
    monkeypatch.setattr(plan, "works", lambda: False)
    monkeypatch.setattr(meeting, "trusted", lambda: False)
    one = job()
    one.checkpointer.load()
    one.run(0, 2)
    with pytest.warns(UserWarning, match="unknown form"):
        folder = one.checkpointer.save(2).committed(60)
    one.checkpointer.close(5)
    plain = {"model": {k: v.clone() * 0 for k, v in one.model.state_dict().items()}}
    dcp.load(plain, checkpoint_id=folder, no_dist=True)
    assert all((plain["model"][k] == v).all() for k, v in one.model.state_dict().items())
    again = job()
    assert again.checkpointer.load().step == 2
    assert again.bytes() == undisturbed(2)
