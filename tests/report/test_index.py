"""The index: made of the run folders and of nothing else, searched by words, written by two at once."""

from __future__ import annotations

import csv
import json
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from ledger_cases import around, worked_case, write
from typer.testing import CliRunner

from ridethrough.cli.main import app
from ridethrough.ledger.rundir import RunDirError, create_run
from ridethrough.ledger.summary import read_run
from ridethrough.report.compare import IncomparableError, compare
from ridethrough.report.index import FILE, Index, find_run
from ridethrough.report.notes import add_note


def make(root: Path, run_id: str, timeout_s: int, schedule: str | None = "s1", cause: str = "NCCL watchdog") -> Path:
    config = {"timeout_s": timeout_s, "train": {"steps": 10}}
    run = create_run(root, run_id=run_id, config=config, command=["train", "--lr", "3e-4"], schedule_hash=schedule)
    events = around()
    events[2] |= {"cause": f"Traceback\nRuntimeError: {cause} caught collective operation timeout"}
    write(run.path, "h-coordinator-1", events)
    write(run.path, "h-worker-2", worked_case())
    run.finish(0, "done")
    return run.path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make(tmp_path, "a", 900)
    make(tmp_path, "b", 300)
    make(tmp_path, "c", 900, cause="gloo")
    return tmp_path


def cli(root: Path, *args: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [*args, "--runs", str(root)], env={"COLUMNS": "200"})
    return result.exit_code, result.stdout, result.stderr


def test_words_of_config_and_traceback_meet_in_one_run(root: Path) -> None:
    with Index(root) as index:
        assert index.refresh() == 3
        assert [hit.run_id for hit in index.search("nccl timeout 900")] == ["a"]
        assert {hit.run_id for hit in index.search("watchd")} == {"a", "b"}
        assert index.search('"; DROP') == [] and index.search("  ") == []
        assert index.search("nccl*") and index.search("NEAR(a)") == []


def test_it_follows_the_folders(root: Path) -> None:
    with Index(root) as index:
        index.refresh()
        assert index.refresh() == 0
        add_note(root / "b", "the new time-out", ["timeouts"])
        assert index.refresh() == 1
        assert [run["run_id"] for run in index.runs(tag="timeouts")] == ["b"]
        assert [hit.run_id for hit in index.search("the new time-out")] == ["b"]
        for file in sorted((root / "c").rglob("*"), reverse=True):
            file.unlink() if file.is_file() else file.rmdir()
        (root / "c").rmdir()
        index.refresh()
        assert {run["run_id"] for run in index.runs()} == {"a", "b"}
        (run,) = [run for run in index.runs() if run["run_id"] == "a"]
        assert run["training_goodput"] == pytest.approx(10 / 18.5)
        assert sum(run["states_ns"].values()) == run["wall_ns"] * run["slots"]
        assert index.incidents("a")[0]["class"] == "exception"


def test_gone_or_damaged_it_is_made_anew(root: Path) -> None:
    with Index(root) as index:
        index.refresh()
    file = root / FILE
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.write_bytes(b"no database at all" * 100)
    with Index(root) as index:
        assert index.refresh() == 3
        assert len(index.search("900")) == 2
    file.unlink()
    with Index(root) as index:
        assert index.refresh() == 3


def test_a_run_that_cannot_be_read_is_listed_with_its_problem(root: Path) -> None:
    (root / "a" / "run.json").write_text("{")
    events = root / "b" / "events" / "h-worker-2.jsonl"
    header, _, rest = events.read_text().partition("\n")
    events.write_text(f"{header}\ndamage\n{rest}")
    with Index(root) as index:
        index.refresh()
        problems = {run["run_id"]: run["problem"] for run in index.runs()}
    assert "cannot be read" in problems["a"]
    assert "h-worker-2.jsonl:2" in problems["b"]
    assert problems["c"] is None
    code, out, _ = cli(root, "runs", "ls")
    assert code == 0 and "cannot be read" in out


REFRESH = "import sys; from pathlib import Path; from ridethrough.report.index import Index\n"
REFRESH += "with Index(Path(sys.argv[1])) as index:\n    for _ in range(5): index.refresh(rebuild=True)\n"


def test_two_processes_may_write(root: Path) -> None:
    both = [subprocess.Popen([sys.executable, "-c", REFRESH, str(root)]) for _ in range(2)]
    assert [process.wait(timeout=60) for process in both] == [0, 0]
    with Index(root) as index:
        assert index.refresh() == 0
        assert len(index.runs()) == 3
        assert len(index.search("watchdog")) == 2


def test_which_run_is_meant(root: Path) -> None:
    make(root, "abc", 1)
    assert find_run(root, "abc") == root / "abc"
    assert find_run(root, "a") == root / "a"  # an exact name wins
    assert find_run(root, "ab") == root / "abc"
    assert find_run(root, str(root / "b")) == root / "b"
    assert find_run(root, "latest") == root / "abc"
    with pytest.raises(RunDirError, match="no run 'x'"):
        find_run(root, "x")
    with pytest.raises(RunDirError, match="no folder of runs"):
        find_run(root / "none", "x")
    make(root, "abd", 1)
    with pytest.raises(RunDirError, match="2 runs"):
        find_run(root, "ab")


def test_compare_names_what_differs_and_refuses_other_schedules(root: Path) -> None:
    found = compare(read_run(root / "a"), read_run(root / "b"))
    assert found.config == {"timeout_s": (900, 300)}
    assert found.figures["steps_lost"] == (3, 3)
    other = read_run(make(root, "d", 900, schedule="s2"))
    with pytest.raises(IncomparableError, match=r"s1.*s2"):
        compare(read_run(root / "a"), other)
    assert compare(read_run(root / "a"), other, any_schedule=True).config == {}
    code, _, err = cli(root, "runs", "compare", "a", "d")
    assert code == 2 and "--any-schedule" in err and len(err.splitlines()) == 1


def test_the_commands(root: Path) -> None:
    code, out, _ = cli(root, "runs", "ls", "--json")
    assert code == 0 and {run["run_id"] for run in json.loads(out)} == {"a", "b", "c"}
    code, out, _ = cli(root, "runs", "show", "a", "--json")
    assert json.loads(out)["ledger"]["slots"] == 1
    code, out, _ = cli(root, "runs", "search", "nccl", "900", "--json")
    assert [run["run_id"] for run in json.loads(out)] == ["a"]
    assert cli(root, "runs", "search", "nothing at all")[0] == 1
    assert cli(root, "runs", "show", "zzz")[0] == 2
    assert cli(root / "none", "runs", "ls")[0] == 2
    code, out, _ = cli(root, "runs", "note", "a", "why", "--tag", "x")
    assert code == 0 and "why" in out


@pytest.mark.parametrize("what", ["runs", "incidents", "steps"])
@pytest.mark.parametrize("suffix", [".csv", ".json", ".jsonl"])
def test_export(root: Path, tmp_path_factory: pytest.TempPathFactory, what: str, suffix: str) -> None:
    to = tmp_path_factory.mktemp("out") / f"x{suffix}"
    code, out, _ = cli(root, "runs", "export", "--what", what, "--to", str(to))
    count = {"runs": 3, "incidents": 3, "steps": 39}[what]
    assert code == 0 and out.startswith(f"{count} {what}")
    text = to.read_text()
    lines = list(csv.reader(text.splitlines(keepends=True))) if suffix == ".csv" else text.splitlines()
    rows = json.loads(text) if suffix == ".json" else lines
    assert len(rows) == count + (suffix == ".csv")


def test_export_says_what_it_cannot_do(root: Path) -> None:
    for args in (["--to", "x.txt"], ["--to", "x.csv", "--what", "events"], ["--to", "/proc/x.csv"]):
        code, _, err = cli(root, "runs", "export", *args)
        assert code == 2 and err.startswith("ridethrough: "), args
