"""Metrics, alert rules and alerts: by the conventions, few series, and a counter never falls whatever restarts."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import resources
from pathlib import Path

import pytest
from ledger_cases import around, event, fault, plan, step, worked_case, write

from ridethrough.ledger.rundir import RunDir, create_run
from ridethrough.ledger.summary import read_run
from ridethrough.report.alerts import Alert, Watch
from ridethrough.report.grafana import dashboard
from ridethrough.report.metrics import counts, exposition
from ridethrough.report.scrape import Scraper
from ridethrough.report.status import status_of
from ridethrough.report.webhook import WebhookError, check_url, send

RULES = resources.files("ridethrough.report").joinpath("static", "alerts.yml").read_text("utf-8")
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="no promtool here: `make system-deps` installs it"
)


def values(text: str) -> dict[str, float]:
    """Series -> value of an exposition."""
    pairs = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    assert len({name for name, _ in pairs}) == len(pairs), "a series stands there twice"
    return {name: float(value) for name, value in pairs}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = create_run(tmp_path, run_id="a", config={"steps": 10, "max_restarts": 5}, command=[], schedule_hash=None)
    incident = event("incident", 9.5, id="0.1", generation=0, rank=0, host="h", phase="forward", step=8)
    incident |= {"rung": "in_process", "detected_by": "exception", "attempts": 1, "root_cause": "boom", "secondary": []}
    incident |= {"class": "exception", "declared_ns": 8 * 10**9, "fault_ns": None, "all_out_ns": 9 * 10**9}
    write(run.path, "h-coordinator-1", [*around(), incident])
    saves = [
        event("save", t, generation=0, rank=0, step=s, event="committed", seconds=0.5) for t, s in ((2.5, 2), (4.5, 4))
    ]
    events = worked_case()
    for e in events:
        if e["kind"] == "step":
            e |= {"tokens": 100, "loss": 2.0}
    write(run.path, "h-worker-2", sorted([*events, *saves], key=lambda e: e["t_ns"]))
    run.finish(0, "done")
    return run


def text_of(run: RunDir) -> str:
    ledger = read_run(run.path)
    return exposition([(status_of(ledger, running=False), counts(ledger.past, ledger.incidents))])


def test_the_figures(run: RunDir) -> None:
    found = values(text_of(run))
    assert found['ridethrough_steps_total{run="a"}'] == 13  # 7, then 5 to 10
    assert found['ridethrough_useful_steps{run="a"}'] == 10
    assert found['ridethrough_steps_lost_total{run="a"}'] == 3
    assert found['ridethrough_tokens_total{run="a"}'] == 1300
    assert found['ridethrough_incidents_total{run="a",class="exception"}'] == 1
    assert found['ridethrough_restarts_total{run="a"}'] == 1
    assert found['ridethrough_training_goodput_ratio{run="a"}'] == pytest.approx(10 / 18.5)
    assert found['ridethrough_checkpoint_age_seconds{run="a",tier="disk"}'] == 14.0
    assert found['ridethrough_rollback_steps{run="a",tier="disk"}'] == 6
    assert found['ridethrough_checkpoint_interval_seconds{run="a"}'] == 2.0


def test_names_and_labels_follow_the_conventions(run: RunDir) -> None:
    text = text_of(run)
    for name, kind in re.findall(r"# TYPE (\S+) (\S+)", text):
        assert re.fullmatch(r"ridethrough_[a-z_]+", name)
        assert (kind == "counter") == name.endswith("_total")
        assert f"# HELP {name} " in text
    labels = set(re.findall(r'(\w+)="', text))
    assert labels <= {"run", "class", "tier", "event"}


@needs_promtool
def test_promtool_has_nothing_to_say(run: RunDir, tmp_path: Path) -> None:
    answer = subprocess.run(
        ["promtool", "check", "metrics"], input=text_of(run), capture_output=True, text=True, check=False
    )
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, "", "")
    (tmp_path / "rules.yml").write_text(RULES)
    answer = subprocess.run(
        ["promtool", "check", "rules", tmp_path / "rules.yml"], capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stderr


def test_rules_and_dashboard_ask_only_for_what_there_is(run: RunDir) -> None:
    asked = set(re.findall(r"ridethrough_[a-z_]+", RULES + json.dumps(dashboard()))) - {"ridethrough"}
    source = Path(sys.modules["ridethrough.report.metrics"].__file__ or "").read_text()
    there = {f"ridethrough_{name}" for name in re.findall(r'add\(\s*"(\w+)"', source)}
    assert asked <= there
    places = [panel["gridPos"] for panel in dashboard()["panels"]]
    assert all(place["x"] + place["w"] <= 24 for place in places)


def test_series_end_a_minute_after_the_run(run: RunDir) -> None:
    scraper = Scraper(run.path.parent)
    assert 'ridethrough_up{run="a"} 0' in scraper.scrape()
    data = json.loads((run.path / "run.json").read_text())
    data["result"]["ended"] = "2020-01-01T00:00:00+00:00"
    (run.path / "run.json").write_text(json.dumps(data))
    assert scraper.scrape() == ""


def test_no_counter_falls_while_a_run_is_told(tmp_path: Path) -> None:
    """Every prefix of the events is a moment at which somebody may scrape."""
    run = create_run(tmp_path, run_id="a", config={"steps": 10}, command=[], schedule_hash=None)
    events = [*around(2), *worked_case(), *(e for e in worked_case(1) if e["kind"] != "fault_injected")]
    events.append(fault(7.9, rank=1, **{"class": "collective"}))  # told first, and is not the root
    decided = {"id": "0.1", "rung": "in_process", "detected_by": "exception", "attempts": 1, "root_cause": "x"}
    decided |= {"class": "exception", "declared_ns": 8 * 10**9, "fault_ns": None, "all_out_ns": 9 * 10**9}
    events.append(event("incident", 9.4, generation=0, rank=0, host="h", phase="x", step=8, secondary=[], **decided))
    events.sort(key=lambda e: e["t_ns"])
    last: dict[str, float] = {}
    for count in range(3, len(events) + 1):
        write(run.path, "h-coordinator-1", events[:count])
        (run.path / "events" / "h-worker-2.jsonl").unlink(missing_ok=True)
        told = [e for e in events[:count] if e["kind"] not in ("job_start", "plan", "all_out", "fault", "incident")]
        write(run.path, "h-coordinator-1", [e for e in events[:count] if e not in told])
        write(run.path, "h-worker-2", told)
        now = {name: v for name, v in values(text_of(run)).items() if "_total" in name}
        assert {name: v for name, v in last.items() if now.get(name, -1) < v} == {}
        last = now
    assert last['ridethrough_incidents_total{run="a",class="exception"}'] == 1


# --- alerts ---------------------------------------------------------------------------------------------------------


def looks(run: RunDir, watch: Watch) -> list[Alert]:
    ledger = read_run(run.path)
    return watch.look(status_of(ledger, running=False), ledger.incidents)


def test_each_is_told_once_and_recovered_is_not_recurring(run: RunDir) -> None:
    watch = Watch()
    assert [alert.kind for alert in looks(run, watch)] == ["incident", "recovered", "ended"]
    assert looks(run, watch) == []


def test_a_fault_that_comes_back_is_recurring(tmp_path: Path) -> None:
    run = create_run(tmp_path, run_id="a", config={}, command=[], schedule_hash=None)
    launcher, worker = [around()[0]], []
    for g in range(4):
        t = 10 * g
        launcher += [
            plan(t, g, [0]),
            *([fault(t + 8, generation=g), event("all_out", t + 9, generation=g)] if g < 3 else []),
        ]
        worker += [event("enter", t, generation=g, rank=0), event("loop", t, generation=g, rank=0, step=0)]
        worker.append(step(t, t + 1, 1, generation=g))
    write(run.path, "h-coordinator-1", launcher)
    write(run.path, "h-worker-2", worker)
    kinds = [alert.kind for alert in looks(run, Watch())]
    assert kinds.count("recovered") == 3
    assert kinds.count("recurring") == 2  # the rank, and the step
    (alert,) = [a for a in looks(run, Watch()) if a.kind == "recurring" and "rank" in a.fields]
    assert alert.severity == "critical" and "rank 0, 3 incidents" in alert.text


@pytest.fixture
def hook() -> Iterator[tuple[str, list[dict], list[int]]]:
    got: list[dict] = []
    answers: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(answers.pop(0) if answers else 200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/secret-path", got, answers
    server.shutdown()
    server.server_close()


def test_the_webhook(hook: tuple[str, list[dict], list[int]]) -> None:
    url, got, answers = hook
    alert = Alert("recovered", "info", "a", "text", {"id": "0.1"})
    answers += [500, 503]
    send(url, alert, wait_s=0.01)
    assert len(got) == 3 and got[-1]["text"] == "[info] a: text" and got[-1]["kind"] == "recovered"
    answers += [404]
    with pytest.raises(WebhookError, match="answered 404") as refused:
        send(url, alert, wait_s=0.01)
    assert "secret" not in str(refused.value)
    with pytest.raises(WebhookError, match="http"):
        check_url("file:///etc/passwd")


# --- a real job -----------------------------------------------------------------------------------------------------


@pytest.mark.ranks
@pytest.mark.campaign
def test_scraped_through_three_restarts_nothing_falls(tmp_path: Path) -> None:
    """C53: 30 steps, three restarts, a scrape every 0.3 s from a server that is itself started anew half way."""
    command = [sys.executable, "-m", "ridethrough", "train", "--nproc-per-node", "2", "--steps", "30", "--quiet"]
    command += ["--checkpoint-every", "5", "--runs", str(tmp_path), "--run-id", "job"]
    for at in ("exception:0:7", "sigkill:1:14", "exception:1:21"):
        command += ["--fault-at", at]
    job = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    serve = [sys.executable, "-m", "ridethrough", "metrics", "--runs", str(tmp_path), "--listen", "auto"]
    servers = [subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) for _ in range(2)]  # each finds a port
    try:
        assert servers[0].stdout is not None and servers[1].stdout is not None
        urls = [servers[0].stdout.readline().strip(), servers[1].stdout.readline().strip()]
        assert len(set(urls)) == 2
        last: dict[str, float] = {}
        num_scrapes, deadline = 0, time.monotonic() + 100
        over = False
        while not over and time.monotonic() < deadline:
            over = job.poll() is not None
            with urllib.request.urlopen(urls[num_scrapes % 2], timeout=30) as answer:
                now = values(answer.read().decode())
            counters = {name: v for name, v in now.items() if "_total" in name}
            assert {name: v for name, v in last.items() if counters.get(name, -1) < v} == {}
            assert all('run="job"' in name for name in now)
            last, num_scrapes = counters, num_scrapes + 1
            time.sleep(0.3)
        assert job.wait(timeout=60) == 0
        assert num_scrapes > 10
        assert last['ridethrough_restarts_total{run="job"}'] == 3
        assert now['ridethrough_useful_steps{run="job"}'] == 30
        assert last['ridethrough_steps_total{run="job"}'] == 30 + last['ridethrough_steps_lost_total{run="job"}']
    finally:
        for process in (job, *servers):
            process.terminate()
            process.wait(timeout=30)
