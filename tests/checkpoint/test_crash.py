"""A save stopped at every one of its file operations, and every kind of damage: always the old or the new
state, never a lie."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import trainee
from ranks_of_trainee import start_ranks

from ridethrough.checkpoint import Checkpointer, State, fileops, layout, persist, retention
from ridethrough.checkpoint.errors import CheckpointError, NoUsableCheckpoint

HERE = Path(__file__).parent


class PowerCut(BaseException):
    """Stops the writer in the middle of an operation, as a kill would: nothing after it runs."""


def parts(world: int = 2) -> list[persist.RankPart]:
    found = []
    for rank in range(world):
        data = memoryview(bytes([rank + 1]) * 9000)
        entries = [
            {"k": f"m.{rank}", "p": ["m", str(rank)], "d": "uint8", "s": [8192], "c": [0], "z": [8192],
             "f": 0, "o": 0, "n": 9000, "x": 700},
        ]  # fmt: skip
        found.append(persist.RankPart(rank, [data, memoryview(b"v" * 10)], entries))
    return found


def save(root: Path, step: int, lineage: layout.Lineage, keep: int = 2) -> None:
    target = persist.Target(root, lineage, step, lineage.attempt(step), world_size=2, commit_timeout_s=5)
    fileops.make_folder(target.folder)
    for part in parts():
        persist.write_part(target, part, 1, lambda: False)
    persist.commit(target, lambda: None)
    retention.apply(root, lineage, keep, None)


def usable(root: Path) -> list[int]:
    good = []
    for attempt in layout.scan(root):
        if attempt.state == "committed":
            layout.read_manifests(attempt)
            good.append(attempt.step)
    return good


def test_a_cut_at_any_file_operation_leaves_the_old_or_the_new_checkpoint(tmp_path: Path) -> None:
    """Case A09. Steps 2 and 4 are there with keep=2; the save of 6 (and the pruning of 2 behind it) is cut at
    operation k."""
    operations: list[tuple[str, str]] = []
    newest: set[int] = set()
    lineage = layout.Lineage(0, 0, "aa")
    (tmp_path / "start").mkdir()
    save(tmp_path / "start", 2, lineage)
    save(tmp_path / "start", 4, lineage)
    for k in itertools.count():
        root = tmp_path / str(k)
        shutil.copytree(tmp_path / "start", root)
        seen = 0

        def cut(operation: str, path: str, k: int = k) -> None:
            nonlocal seen
            if seen == k:
                operations.append((operation, Path(path).name))
                raise PowerCut
            seen += 1

        fileops.set_hook(cut)
        try:
            save(root, 6, lineage)
            whole = True
        except PowerCut:
            whole = False
        finally:
            fileops.set_hook(None)
        good = usable(root)
        assert good[0] in (4, 6), (k, operations[-1])
        assert 4 in good
        newest.add(good[0])
        again = layout.Lineage(1, 0, "bb")  # the next job saves and prunes without anybody's help
        save(root, 8, again)
        assert usable(root)[0] == 8
        assert not [a for a in layout.scan(root) if a.state == "damaged"]
        shutil.rmtree(root)
        if whole:
            break
    assert newest == {4, 6}
    assert len(operations) > 25
    assert {"mkdir", "create", "allocate", "write", "fsync", "fsync_folder", "unlink", "rmdir"} <= {
        o for o, _ in operations
    }


@pytest.fixture
def saved(job: Any, tmp_path: Path) -> Path:
    """A root with steps 2, 4 and 6 committed by a real keeper."""
    one = job(every=2, keep=3)
    one.checkpointer.load()
    for step in range(1, 7):
        one.train(step)
        ticket = one.checkpointer.step(step)
        if ticket is not None:
            assert ticket.committed(30) is not None
    one.checkpointer.close(30)
    return tmp_path / "ckpt"


def damage(file: Path, kind: str, rng: random.Random) -> str:
    size = file.stat().st_size
    if kind == "flip":
        at = rng.randrange(size)
        data = bytearray(file.read_bytes())
        data[at] ^= 1 << rng.randrange(8)
        file.write_bytes(data)
        return f"{file.name}: byte {at}"
    if kind == "cut":
        os.truncate(file, size - 1)
    elif kind == "empty":
        os.truncate(file, 0)
    else:
        file.unlink()
    return f"{file.name}: {kind}"


def try_damages(saved: Path, job: Any, undisturbed: Any, count: int, seed: int) -> None:
    rng = random.Random(seed)
    newest = next(saved.glob("step-6.*"))
    files = sorted(p.name for p in newest.iterdir())
    want = {4: undisturbed(4), 6: undisturbed(6)}
    for number in range(count):
        root = saved.parent / f"copy-{number}"
        shutil.copytree(saved, root)
        name, kind = files[number % len(files)], ("flip", "flip", "cut", "empty", "missing")[number // len(files) % 5]
        what = damage(root / newest.name / name, kind, rng)
        one = job(root=root)
        with pytest.warns(UserWarning, match="not used") if name != "COMMIT" or kind != "missing" else _nothing():
            report = one.checkpointer.load()
        assert report.step == 4, what
        assert one.bytes() == want[4], what
        (path, reason) = report.rejected[0]
        assert newest.name in path and reason, what
        assert (root / newest.name).exists(), "evidence stays"
        one.checkpointer.abandon()
        shutil.rmtree(root)


class _nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_exc: object) -> None: ...


def test_damage_of_any_file_is_found_named_and_stepped_over(saved: Path, job: Any, undisturbed: Any) -> None:
    """Cases A09, C47."""
    try_damages(saved, job, undisturbed, 30, seed=1)


@pytest.mark.campaign
@pytest.mark.timeout(1800)
def test_five_hundred_damages(saved: Path, job: Any, undisturbed: Any) -> None:
    try_damages(saved, job, undisturbed, 500, seed=2)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_all_damaged_is_an_error_that_lists_them_and_deletes_nothing(saved: Path, job: Any, tmp_path: Path) -> None:
    """Case B29."""
    six, four, two = (next(saved.glob(f"step-{n}.*")) for n in (6, 4, 2))
    (six / "COMMIT").unlink()
    os.truncate(four / "__0_0.distcp", 0)
    (two / ".metadata").write_bytes(b"junk")
    before = contents(saved)
    with pytest.raises(NoUsableCheckpoint, match="0 of 3 checkpoints usable") as raised:
        job(root=saved).checkpointer.load()
    assert all(str(path) in str(raised.value) for path in (six, four, two))
    assert {path: held for path, held in contents(saved).items() if path.name != layout.REJECTED} == before
    with pytest.warns(UserWarning, match="not used"):
        fresh = job(root=saved, allow_fresh=True).checkpointer.load()
    assert (fresh.step, fresh.tier) == (0, "fresh")
    empty = job(root=tmp_path / "empty").checkpointer.load()
    assert (empty.step, empty.tier, empty.rejected) == (0, "fresh", [])
    with pytest.raises(CheckpointError, match="cannot be written"):
        job(root=Path("/proc/nowhere"))
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="it is a file, not a folder"):
        job(root=tmp_path / "file")


def test_a_fresh_start_behind_damage_finds_the_state_as_it_was(saved: Path, job: Any) -> None:
    """One byte of each file in turn: nothing of the rejected checkpoint is in the weights, the optimizer, the values
    or the random streams."""
    newest = next(saved.glob("step-6.*"))
    for older in [*saved.glob("step-4.*"), *saved.glob("step-2.*"), *newest.glob(layout.REJECTED)]:
        shutil.rmtree(older)
    for number, name in enumerate(sorted(p.name for p in newest.iterdir())):
        root = saved.parent / f"fresh-{number}"
        shutil.copytree(saved, root)
        damage(root / newest.name / name, "flip", random.Random(number))
        one = job(root=root, allow_fresh=True)
        one.state["note"] = "mine"
        before = one.bytes(), torch.get_rng_state(), random.getstate()
        with pytest.warns(UserWarning, match="not used"):
            report = one.checkpointer.load()
        assert (report.step, report.tier) == (0, "fresh"), name
        assert one.bytes() == before[0] and not one.optimizer.state, name
        assert torch.equal(torch.get_rng_state(), before[1]) and random.getstate() == before[2], name
        assert one.state["note"] == "mine", name


def test_what_an_older_checkpoint_lacks_is_not_taken_from_a_damaged_one(job: Any) -> None:
    for step in (1, 2):
        one = job()
        if step == 2:
            one.model.register_buffer("extra", torch.ones(5))
        assert one.checkpointer.save(step).committed(30)
        one.checkpointer.close(30)
    damage(next(one.checkpointer.root.glob("step-2.*/__0_1.distcp")), "flip", random.Random(0))
    two = job(allow_missing=["model.extra"])
    two.model.register_buffer("extra", torch.zeros(5))
    with pytest.warns(UserWarning, match="not used"):
        report = two.checkpointer.load()
    assert (report.step, report.missing) == (1, ["model.extra"])
    assert torch.equal(two.model.extra, torch.zeros(5))


def test_a_file_that_changes_under_the_load_is_an_error_and_no_fresh_start(saved: Path, job: Any) -> None:
    """It was whole when it was verified; the second time that it is read it is not, and the state is half written."""
    data = next(saved.glob("step-6.*/__0_0.distcp"))
    times_read = itertools.count(1)

    def change(operation: str, path: str) -> None:
        if operation == "read" and path == str(data) and next(times_read) == 2:
            damage(data, "flip", random.Random(0))

    one = job(root=saved, allow_fresh=True)
    fileops.set_hook(change)
    try:
        with pytest.raises(CheckpointError, match="written in part"):
            one.checkpointer.load()
    finally:
        fileops.set_hook(None)


def kill_everything(ranks: Any, root: Path, **when: str) -> str:
    """A real keeper is killed in the save of step 6, at file operation KILL_AT or KILL_AFTER seconds after the first,
    and the rank soon after it. Returns the step and the marks of what the next job loads."""
    env = {"RIDETHROUGH_FILE_HOOK": "hooks:die_in_step_6", "PYTHONPATH": str(HERE), **when}
    die = {"step": 6, "after": float(when.get("KILL_AFTER", "0.02"))}
    ((code, said),) = ranks(1, root=str(root), kind="plain", total=8, durable=[2, 4], every=6, die=die, env=env)
    assert code == -signal.SIGKILL, said["stderr"]
    deadline = time.monotonic() + 20
    while _in_use(root) and time.monotonic() < deadline:
        time.sleep(0.02)
    model, optimizer = trainee.build("plain", 32)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 0.99**s)
    again = Checkpointer(root, State(model=model, optimizer=optimizer, schedule=schedule, note=""))
    step = again.load().step
    again.close(20)
    return f"{step} {trainee.digest(model, optimizer)}"


def _in_use(root: Path) -> bool:
    """Whether a process still has a file under `root` open."""
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(link).startswith(str(root)):
                return True
        except OSError:
            continue
    return False


@pytest.fixture(scope="module")
def whole(forker: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What an undisturbed run has at steps 4 and 6."""
    run = start_ranks(forker, tmp_path_factory)
    marks = []
    for step in (4, 6):
        ((_code, said),) = run(1, root=str(tmp_path_factory.mktemp("whole")), kind="plain", total=step)
        marks.append(f"{step} {said['hash']}")
    return marks


@pytest.mark.ranks
@pytest.mark.parametrize("operation", [1, 7, 14])
def test_killed_keeper_and_rank_resume_without_help(ranks: Any, whole: Any, tmp_path: Path, operation: int) -> None:
    assert kill_everything(ranks, tmp_path / "c", KILL_AT=str(operation)) in whole


@pytest.mark.campaign
@pytest.mark.ranks
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(4))
def test_two_hundred_kills(ranks: Any, whole: Any, tmp_path: Path, part: int) -> None:
    """Half of them at each file operation in turn, half at random moments."""
    chance = random.Random(part)
    seen = set()
    for number in range(50):
        operation = (part * 25 + number // 2) % 34 + 1
        at = {"KILL_AFTER": f"{chance.uniform(0, 0.2):.4f}"} if number % 2 else {"KILL_AT": str(operation)}
        found = kill_everything(ranks, tmp_path / "c", **at)
        assert found in whole, at
        seen.add(found)
        shutil.rmtree(tmp_path / "c")
    assert seen == set(whole)
