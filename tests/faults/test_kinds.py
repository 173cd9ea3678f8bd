"""Each kind does to a real process what its row says, and the hangs end by what their row says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from ridethrough.faults.kinds import HANG_VARIANTS, KINDS, Kind, register
from ridethrough.faults.schedule import by_hand
from ridethrough.faults.shot import SCHEDULE_VARIABLE, Shot
from ridethrough.ledger.schema import CLASSES, DETECTORS, RUNGS

STANDIN = Path(__file__).with_name("standin.py")


class Victim:
    """A stand-in worker that suffers one fault."""

    def __init__(self, run_dir: Path, entry: str, memory_group: Path | None = None) -> None:
        by_hand([entry], steps=100, world_size=1).save(run_dir / "faults.json")
        self.beat = run_dir / "beat-0"
        self.beat.touch()
        command = [sys.executable, str(STANDIN), str(run_dir), "0", "20"]
        if memory_group is not None:  # only the victim goes in: the kernel may kill whoever is in there
            command = ["sh", "-c", 'echo $$ > "$0"/cgroup.procs && exec "$@"', str(memory_group), *command]
        self.process = subprocess.Popen(
            command,
            env={"PATH": "/usr/bin:/bin", SCHEDULE_VARIABLE: str(run_dir / "faults.json")},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return dict(json.loads(self.process.stdout.readline()))

    def beats(self) -> bool:
        """Whether a Python thread of it still gets the GIL."""
        before = self.beat.stat().st_mtime_ns
        return until(lambda: self.beat.stat().st_mtime_ns != before, 1.0)

    def state(self) -> str:
        return Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def until(condition: Callable[[], bool], limit_s: float) -> bool:
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Callable[[str], Victim]]:
    victims = []

    def start(entry: str) -> Victim:
        victims.append(Victim(tmp_path, entry))
        return victims[-1]

    yield start
    for one in victims:
        one.process.kill()
        one.process.wait(10)


@pytest.mark.parametrize("kind", ["hang", *HANG_VARIANTS])
def test_hangs_are_freed_in_the_same_process_by_a_handler_that_raises(
    victim: Callable[[str], Victim], kind: str
) -> None:
    one = victim(f"{kind}:0:7")
    injected = one.line()
    assert (injected["event"], injected["fault_kind"], injected["step"]) == ("fault_injected", kind, 7)
    assert one.beats() and one.process.poll() is None
    if kind == "hang_lock":
        assert until(lambda: one.state() == "S", 5)
    os.kill(one.process.pid, signal.SIGUSR1)
    assert one.line() == {"pid": injected["pid"], "left": "freed"}
    assert one.line() == {"pid": injected["pid"], "finished": 20}
    assert one.process.wait(10) == 0


@pytest.mark.parametrize(("kind", "beats"), [("hang_native", True), ("hang_native_gil", False)])
def test_native_hangs_are_ended_by_sigkill_only(victim: Callable[[str], Victim], kind: str, beats: bool) -> None:
    one = victim(f"{kind}:0:7")
    assert one.line()["fault_kind"] == kind
    if not beats:
        until(lambda: not one.beats(), 5)
    assert one.beats() is beats
    os.kill(one.process.pid, signal.SIGUSR1)
    time.sleep(0.3)
    assert one.process.poll() is None
    one.process.kill()
    rest = one.process.communicate(timeout=10)[0]
    assert rest == "" and one.process.returncode == -signal.SIGKILL


def test_sigstop_stops_until_continued(victim: Callable[[str], Victim]) -> None:
    one = victim("sigstop:0:7")
    one.line()
    assert until(lambda: one.state() == "T", 5)
    os.kill(one.process.pid, signal.SIGCONT)
    assert one.line()["finished"] == 20


@pytest.mark.parametrize(
    ("kind", "status"),
    [("sigkill", -signal.SIGKILL), ("sigsegv", -signal.SIGSEGV), ("sigabrt", -signal.SIGABRT), ("exit", 17)],
)
def test_deaths_end_with_their_status_after_the_event_is_out(
    victim: Callable[[str], Victim], kind: str, status: int
) -> None:
    one = victim(f"{kind}:0:7")
    assert one.line()["fault_kind"] == kind
    assert one.process.wait(10) == status


def test_exception_leaves_and_comes_back(victim: Callable[[str], Victim]) -> None:
    one = victim("exception:0:7:data")
    one.line()
    left = one.line()
    assert left["left"] == "exception" and "step 7, phase data" in left["cause"]
    assert one.line()["finished"] == 20


@pytest.mark.root
def test_oom_is_killed_by_the_kernel_within_its_cgroup(tmp_path: Path) -> None:
    group = Path(f"/sys/fs/cgroup/memory/ridethrough-test-{os.getpid()}")
    limit = "memory.limit_in_bytes"
    if not group.parent.is_dir():
        group, limit = Path(f"/sys/fs/cgroup/ridethrough-test-{os.getpid()}"), "memory.max"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"cannot make a memory cgroup: {error}")
    try:
        try:
            (group / limit).write_text(str(300 << 20))
        except OSError as error:
            pytest.skip(f"cannot limit a memory cgroup: {error}")
        one = Victim(tmp_path, "oom:0:7", memory_group=group)
        assert one.process.wait(60) == -signal.SIGKILL
        assert one.line()["fault_kind"] == "oom"
    finally:
        group.rmdir()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("kind", "says"), [("device_assert", "device-side assert"), ("illegal_access", "illegal memory access")]
)
def test_gpu_errors_are_of_the_class_gpu(kind: str, says: str) -> None:
    """In a process of its own: no kernel runs there afterwards."""
    fire = (
        "import sys; from ridethrough.faults.kinds import KINDS; from ridethrough.faults.shot import Shot\n"
        "from ridethrough.restart.exceptions import classify\n"
        "try: KINDS[sys.argv[1]].fire(Shot('f01', {}, 'forward', 7, print))\n"
        "except Exception as error: print(classify(error), error)\n"
    )
    done = subprocess.run([sys.executable, "-c", fire, kind], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.startswith("gpu ") and says in done.stdout


def test_memory_pressure_holds_its_memory_for_its_steps() -> None:
    followers: list[Callable[[str, int], bool]] = []
    own = psutil.Process()
    before = own.memory_info().rss
    shot = Shot("f01", {"mib": 64, "num_steps": 3}, "forward", 7, followers.append)
    KINDS["memory_pressure"].fire(shot)
    assert own.memory_info().rss - before > 60 << 20
    (later,) = followers
    assert [later("step", step) for step in (8, 9, 10)] == [False, False, True]
    assert own.memory_info().rss - before < 30 << 20


def test_every_row_says_what_it_is() -> None:
    for name, kind in KINDS.items():
        assert name == kind.name and kind.does and kind.fires and kind.freed_by and kind.needs
        told = (kind.ledger_class, kind.seen_by, kind.rung)
        assert told == (None, None, None) or all(
            word in words for word, words in zip(told, (CLASSES, DETECTORS, RUNGS), strict=True)
        )
        assert kind.ends_generation is (kind.rung is not None)


def test_a_kind_of_ones_own_is_planned_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ridethrough.faults.kinds.KINDS", KINDS)
    monkeypatch.delitem(KINDS, "mine", raising=False)
    mine = Kind("mine", "does", "fires", "-", "exit", lambda shot: None)
    register(mine)
    assert by_hand(["mine:0:3"], 5, 1).faults[0].kind == "mine"
    with pytest.raises(ValueError, match="'mine' exists"):
        register(mine)
    del KINDS["mine"]
