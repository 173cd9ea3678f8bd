"""The memory tier without an agent: the script's own keeper holds the snapshots, for the next Checkpointer of the
process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ridethrough.checkpoint import client, layout
from ridethrough.checkpoint.errors import CheckpointError


def test_the_next_checkpointer_of_a_process_goes_on_from_memory(job: Any, undisturbed: Any) -> None:
    one = job(memory=1)
    assert one.checkpointer.load().tier == "fresh"
    one.run(0, 7)
    one.checkpointer.fence()
    one.checkpointer.abandon()
    two = job(memory=1)
    report = two.checkpointer.load()
    assert (report.step, report.tier) == (7, "memory")
    assert two.bytes() == undisturbed(7)
    two.run(7, 9)
    assert two.checkpointer.save(9).committed(20)
    assert two.bytes() == undisturbed(9)
    two.checkpointer.close(20)


@pytest.mark.parametrize("loads", [True, False])
def test_what_memory_holds_of_a_time_line_that_is_over_is_not_gone_back_to(job: Any, loads: bool) -> None:
    """Between two Checkpointers with the memory tier, one without it has gone on from storage, or begun anew."""
    one = job(memory=1)
    one.checkpointer.load()
    one.run(0, 4)
    assert one.checkpointer.save(4).committed(20)
    one.run(4, 6)
    one.checkpointer.close(20)
    between = job()
    if loads:
        assert between.checkpointer.load().step == 4
    between.run(4, 5)
    assert between.checkpointer.save(5).committed(20)
    state = between.bytes()
    between.checkpointer.close(20)
    three = job(memory=1)
    report = three.checkpointer.load()
    assert (report.step, report.tier) == (5, "storage")
    assert three.bytes() == state
    three.run(5, 6)
    assert three.checkpointer.save(6).committed(20)
    three.checkpointer.close(20)


def test_a_last_save_that_failed_leaves_the_state_in_memory(
    job: Any, tmp_path: Path, undisturbed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = job(memory=1)
    one.checkpointer.load()
    one.run(0, 3)
    folder = tmp_path / "ckpt"
    folder.rename(tmp_path / "aside")  # storage that is gone, for a while
    folder.write_text("")
    with pytest.raises(CheckpointError):
        one.checkpointer.save(3).committed(20)
    with pytest.raises(CheckpointError):
        one.checkpointer.close(20)
    folder.unlink()
    (tmp_path / "aside").rename(folder)
    two = job(memory=1)
    report = two.checkpointer.load()
    assert (report.step, report.tier) == (3, "memory")
    assert two.bytes() == undisturbed(3)
    two.checkpointer.close(20)


def test_after_going_back_the_end_of_the_job_writes_what_memory_holds(
    job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint with more steps was committed, and is damaged: it does not count as newer."""
    monkeypatch.setattr(client, "_clients", {})
    folder = tmp_path / "k"
    folder.mkdir(mode=0o700)
    keeper = client.client_for(folder / "keeper.sock", owned=True)
    keeper.connect()
    assert keeper.process is not None
    one = job(memory=1)
    one.checkpointer.load()
    for step in (4, 8):
        one.run(step - 4, step)
        path = one.checkpointer.save(step).committed(20)
    one.checkpointer.close(20)
    data = next(Path(str(path)).glob("*.distcp"))
    data.write_bytes(bytes(len(data.read_bytes())))
    two = job(memory=1)
    with pytest.warns(UserWarning, match="not used"):
        assert two.checkpointer.load().step == 4
    two.run(4, 6)
    two.checkpointer.fence()
    keeper.ask({"op": "ping"}, 5.0)
    keeper.process.terminate()
    assert keeper.process.wait(20) == 0
    assert [a.step for a in layout.scan(tmp_path / "ckpt") if a.state == "committed"] == [6, 4]


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_ranks_of_a_script_leave_a_generation_and_go_on_from_memory(ranks: Any, tmp_path: Path, kind: str) -> None:
    """Then further Checkpointers in the same processes, each loaded twice, with and without the memory tier."""
    again = [1, "off", 1]
    straight = ranks(2, root=str(tmp_path / "a"), total=10, kind=kind)
    faulty = ranks(2, root=str(tmp_path / "b"), total=10, kind=kind, memory=1, fault=7, generations=2, again=again)
    assert [code for code, _ in faulty] == [0, 0], faulty
    for (_, want), (_, got) in zip(straight, faulty, strict=True):
        assert (got["loaded"], got["tier"]) == (6, "memory")
        assert (got["hash"], got["draw"]) == (want["hash"], want["draw"])
        first = straight[0][1]["full_hash"]  # storage has the lowest rank's buffers, memory each rank's own
        memory, storage = ("memory", want["full_hash"]), ("storage", first)
        tail = [[step, *storage] for step in (11, 11, 12, 12)]
        assert got["again"] == [[10, *memory], [10, *memory], *tail]


@pytest.mark.ranks
def test_ranks_that_have_their_share_do_not_take_it_while_another_has_not(ranks: Any, tmp_path: Path) -> None:
    """Memory has lost part of rank 1's share and storage has nothing: a fresh start for both, to the bit."""
    straight = ranks(2, root=str(tmp_path / "a"), total=6, kind="ddp")
    faulty = ranks(2, root=str(tmp_path / "b"), total=6, kind="ddp", memory=1, fault=4, generations=2, spoil=1)
    assert [code for code, _ in faulty] == [0, 0], faulty
    for (_, want), (_, got) in zip(straight, faulty, strict=True):
        assert (got["loaded"], got["tier"]) == (0, "fresh")
        assert got["loaded_hash"] == want["loaded_hash"]
        assert (got["hash"], got["draw"]) == (want["hash"], want["draw"])
        assert any(path.startswith("memory: step") and "rank 1" in reason for path, reason in got["rejected"])
