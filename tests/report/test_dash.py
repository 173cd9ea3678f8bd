"""The dashboard: who gets in, what it answers, and what a browser makes of it while a job runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import chromium, needs_chromium
from ledger_cases import around, worked_case, write
from typer.testing import CliRunner

from ridethrough.cli.main import app
from ridethrough.ledger.recorder import Recorder
from ridethrough.ledger.rundir import create_run

pytest.importorskip("starlette", reason="no starlette here: `pip install ridethrough[report]`")
pytest.importorskip("uvicorn", reason="no uvicorn here: `pip install ridethrough[report]`")

SCRIPT = "<img src=x onerror=alert(1)>"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    run = create_run(tmp_path / "runs", run_id="a", config={"timeout_s": 900}, command=[], schedule_hash=None)
    events = around()
    events[2] |= {"cause": f"Traceback\nRuntimeError: {SCRIPT}"}
    write(run.path, "h-coordinator-1", events)
    write(run.path, "h-worker-2", worked_case())
    run.finish(0, "done")
    return tmp_path / "runs"


@pytest.fixture
def serve(root: Path) -> Iterator:
    started: list[subprocess.Popen[str]] = []

    def start(*flags: str) -> str:
        command = [sys.executable, "-m", "ridethrough", "dash", str(root), "--port", "0", *flags]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert started[-1].stdout is not None
        return started[-1].stdout.readline().strip()

    yield start
    for process in started:
        process.terminate()
        assert process.wait(timeout=20) in (0, -15)


def ask(url: str, **headers: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_on_loopback(serve, root: Path) -> None:
    url = serve()
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", url)
    assert ask(url)[0] == 200
    listed = json.loads(ask(url + "api/runs")[1])["runs"]
    assert [run["run_id"] for run in listed] == ["a"], "also a run that the index has not read yet"
    assert ask(url, Host="evil.example")[0] == 421  # a page elsewhere whose name was pointed here
    view = json.loads(ask(url + "api/runs/a")[1])
    assert view["status"]["step"] == 10 and view["timeline"]["slots"] == 1
    (run,) = json.loads(ask(url + "api/runs")[1])["runs"]
    assert run["training_goodput"] == pytest.approx(10 / 18.5)
    found = json.loads(ask(url + "api/runs/a/incidents?limit=5")[1])
    assert found["total"] == 1 and SCRIPT in found["incidents"][0]["root_cause"]
    assert [hit["run_id"] for hit in json.loads(ask(url + "api/search?q=900")[1])] == ["a"]
    assert "ridethrough_up" in ask(url + "metrics")[1]
    for path in ("api/runs/none", "api/runs/..%2f..%2fetc", "static/..%2fdash.py", "api/runs/%2e%2e", "static/none.js"):
        assert ask(url + path)[0] == 404, path
    assert ask(url + "api/runs/a/incidents?limit=-1&offset=x")[0] == 200


def test_elsewhere_only_with_the_token(serve, tmp_path: Path) -> None:
    url = serve("--host", "0.0.0.0")
    match = re.fullmatch(r"http://0\.0\.0\.0:(\d+)/\?token=(\S{32})", url)
    assert match is not None
    base, token = f"http://127.0.0.1:{match[1]}/", match[2]
    assert [ask(base + path)[0] for path in ("", "api/runs", "metrics", "static/dash.js")] == [401] * 4
    assert ask(base + "?token=wrong")[0] == 401
    assert ask(base + "api/runs", Authorization=f"Bearer {token}")[0] == 200
    with urllib.request.urlopen(f"{base}?token={token}", timeout=20) as answer:
        cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
    assert ask(base + "api/runs", Cookie=cookie.split(";")[0])[0] == 200


def test_bad_use(tmp_path: Path, root: Path) -> None:
    short = tmp_path / "token"
    short.write_text("abc")
    for args in ([str(tmp_path / "none")], [str(root), "--token-file", str(short)], [str(root), "--host", "192.0.2.1"]):
        result = CliRunner().invoke(app, ["dash", *args])
        assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1, args


def test_without_its_extra_it_says_what_is_missing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    result = CliRunner().invoke(app, ["dash", str(root)])
    assert result.exit_code == 2
    assert "ridethrough[report]" in result.stderr and len(result.stderr.splitlines()) == 1


def test_a_run_is_sent_as_it_goes_on(serve, root: Path) -> None:
    run = create_run(root, run_id="live", config={"steps": 99}, command=[], schedule_hash=None)
    with Recorder(run.path, "agent") as agent:
        agent.emit("job_start", slots=1, nodes=1, run_id="live")
        now = time.monotonic_ns()
        agent.emit("enter", generation=0, rank=0, role="worker")
        agent.emit("loop", generation=0, rank=0, step=0, role="worker")
        url = serve()
        stream = urllib.request.urlopen(url + "api/runs/live/events", timeout=30)
        steps: list[int] = []
        with stream:
            for line in stream:
                if line.startswith(b"data: {") and b'"state"' in line:
                    status = json.loads(line[6:])
                    assert status["state"] in ("starting", "running")
                    steps.append(status["step"])
                    number, t = len(steps), time.monotonic_ns()
                    fields = {"generation": 0, "rank": 0, "step": number, "t0_ns": now, "t1_ns": t, "parts": []}
                    agent.emit("step", t_ns=t, role="worker", **fields)
                    now = t
                if len(steps) == 3:
                    break
        assert steps == [0, 1, 2]
    status = json.loads(ask(url + "api/runs/live")[1])["status"]
    assert status["state"] in ("died", "running")  # nobody holds its events any more; known at the next reading


@needs_chromium
def test_in_the_browser_nothing_of_a_traceback_runs(serve, tmp_path: Path) -> None:
    url = serve()
    dom = chromium(url + "#a", tmp_path / "profile", "--dump-dom")
    assert 'data-drawn="yes"' in dom
    assert "54.05 %" in dom
    assert "&lt;img src=x onerror=alert(1)&gt;" in dom and "<img" not in dom
    listed = chromium(url, tmp_path / "profile2", "--dump-dom")
    assert "1 run in" in listed and 'href="#a"' in listed
