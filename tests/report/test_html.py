"""The report page: says what the ledger says, refers to nothing outside, and cannot be broken by what users log."""

from __future__ import annotations

import re
import stat
from html.parser import HTMLParser
from pathlib import Path

import pytest
from ledger_cases import S, around, event, step, worked_case, write

from ridethrough.ledger.rundir import RunDir, create_run
from ridethrough.report.html import write_report

VOID = {"meta"}
SCRIPT = "<script>alert(1)</script>"


class Page(HTMLParser):
    """Collects text, tags and attributes, and checks that tags are closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + " "


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = create_run(tmp_path, run_id="a", config={"steps": 10}, command=["train", SCRIPT], schedule_hash=None)
    incident = event(
        "incident",
        9.5,
        id="i1",
        generation=0,
        rank=0,
        host="h",
        phase="forward",
        step=8,
        rung="in_process",
        detected_by="exception",
        attempts=1,
        root_cause=f"Traceback\nRuntimeError: {SCRIPT}",
        declared_ns=8 * S,
        fault_ns=None,
        all_out_ns=9 * S,
        secondary=[],
        **{"class": "exception"},
    )
    write(run.path, "h-coordinator-1", [*around(), incident])
    events = worked_case()
    for e in events:
        if e["kind"] == "step":
            e["loss"] = 5.0 - e["step"] / 10
    write(run.path, "h-worker-2", [*events, event("final", 18.5, generation=1, rank=0, final_hash="f00")])
    return run


def test_the_page_says_what_the_ledger_says(run: RunDir) -> None:
    path = write_report(run.path, control_hash="f00", plain=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    page = Page(path.read_text())
    assert "final parameters and optimizer equal to the undisturbed run, bit for bit: yes (f00)" in page.text
    assert "54.05%" in page.text and "Done: step 10 of 10." in page.text
    assert "54.1% of 18.5 s went into steps that count; the rest: 16.2% lost_step, " in page.text
    assert "1 incident (1 exception), all injected; 1 recovered, 3 steps lost." in page.text
    assert "config steps" in page.text
    assert "= wall x slots: 18500000000 ns x 1 = 18500000000 ns" in page.text
    assert "3 steps lost, resumed at step 4" in page.text
    lanes = [a for tag, a in page.tags if tag == "rect" and (a["class"] or "").startswith("s-")]
    assert [a["class"] for a in lanes] == [
        f"s-{state}"
        for state in (
            "step lost_step partial_step detect teardown rebuild init restore init step".split()  # noqa: SIM905
        )
    ]
    assert len([a for tag, a in page.tags if tag == "polyline" and a["class"] == "curve lost"]) == 2
    assert page.text.count("RuntimeError") >= 2  # in the table and unfolded


def test_nothing_is_loaded_from_outside_and_nothing_runs(run: RunDir) -> None:
    html = write_report(run.path, plain=True).read_text()
    page = Page(html)
    assert {"script", "link", "img", "iframe", "object"}.isdisjoint(tag for tag, _ in page.tags)
    links = [value for _, a in page.tags for name, value in a.items() if name in ("src", "href", "xlink:href")]
    assert all(link and link.startswith("#") for link in links)
    assert not any(name.startswith("on") for _, a in page.tags for name in a)
    assert not re.search(r"https?://|url\(|@import", html)
    assert SCRIPT in page.text and SCRIPT not in html
    assert "Not compared" in page.text


def test_it_can_be_read_in_the_dark_and_on_a_phone(run: RunDir) -> None:
    html = write_report(run.path, plain=True).read_text()
    assert "prefers-color-scheme:dark" in html and "width=device-width" in html
    for found in re.finditer(r"<svg|<table", html):  # what is wide scrolls in its own box
        assert html[: found.start()].endswith('<div class="wide">')


def test_a_verdict_of_no(run: RunDir) -> None:
    assert (
        "bit for bit: no (f00, undisturbed bad)"
        in Page(write_report(run.path, control_hash="bad", plain=True).read_text()).text
    )


def test_a_run_that_only_just_began(tmp_path: Path) -> None:
    run = create_run(tmp_path, run_id="b", config={}, command=[], schedule_hash=None)
    write(run.path, "h-coordinator-1", around(2)[:1])
    assert "No step was finished" in Page(write_report(run.path, plain=True).read_text()).text


def test_long_runs_stay_small(tmp_path: Path) -> None:
    run = create_run(tmp_path, run_id="c", config={}, command=[], schedule_hash=None)
    steps = [step(n - 1, n, n, parts=(("data_wait", n - 1, n - 0.9),)) for n in range(1, 8001)]
    write(run.path, "h-worker-2", [event("enter", 0, generation=0, rank=0), *steps])
    assert write_report(run.path, plain=True).stat().st_size < 400_000


def test_without_plotly_it_is_plain(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ridethrough.report.html.plotly_script", lambda: None)
    html = write_report(run.path).read_text()
    assert "<script" not in html and "<svg" in html
    assert html == write_report(run.path, plain=True).read_text()


def test_a_large_run_is_thinned(tmp_path: Path) -> None:
    from large_run import Writer

    path = Writer(tmp_path, ranks=40, steps=1500, incidents=60).write()
    size = write_report(path, plain=True).stat().st_size
    assert size < 2_000_000
    page = Page((path / "report.html").read_text())
    assert "The 60 slowest" not in page.text and "60 of 60" in page.text
