"""The report with plotly in a real browser: drawn on a phone, by keyboard, in the dark, without network."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from browser import chromium, needs_chromium
from ledger_cases import around, event, worked_case, write

from ridethrough.ledger.rundir import create_run
from ridethrough.report.html import plotly_script, write_report

pytestmark = [
    needs_chromium,
    pytest.mark.skipif(plotly_script() is None, reason="no plotly here: `pip install ridethrough[report]`"),
]

# Shows the report in a frame as wide as a phone and tells what it finds there.
WATCHER = """<!doctype html><meta charset="utf-8"><iframe id="f" src="report.html" width="390" height="800"></iframe>
<pre id="out"></pre><script>
const wait = (ms) => new Promise((done) => setTimeout(done, ms));
document.getElementById("f").addEventListener("load", async (e) => {
  const page = e.target.contentDocument, shown = (id) => page.getElementById(id);
  await wait(500);
  const press = async (key) => {
    shown("fig-loss").dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
    await wait(100);
    return shown("fig-loss")._fullLayout.xaxis.range.map(Number);
  };
  const found = {
    drawn: page.documentElement.dataset.drawn,
    figures: [...page.querySelectorAll(".fig")].map(
      (f) => [f.id, f.tabIndex, f.querySelectorAll("svg.main-svg").length]),
    bars: [...shown("fig-timeline").querySelectorAll(".bars .point")].length,
    width: page.scrollingElement.scrollWidth, asked: performance.getEntriesByType("resource").map((r) => r.name),
    dark: matchMedia("(prefers-color-scheme: dark)").matches,
    background: getComputedStyle(page.body).backgroundColor, fonts: getComputedStyle(page.body).fontSize,
    start: await press("Home"), zoomed: await press("+"), moved: await press("ArrowRight"), all: await press("0"),
  };
  document.getElementById("out").textContent = JSON.stringify(found);
});
</script>"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = create_run(tmp_path, run_id="a", config={}, command=["train", "<b>x</b>"], schedule_hash=None)
    write(run.path, "h-coordinator-1", around())
    events = worked_case()
    for e in events:
        if e["kind"] == "step":
            e["loss"] = 5.0 - e["step"] / 10
    saves = [event("save", 4.2, generation=0, rank=0, step=4, event="committed", bytes=5, seconds=0.2)]
    write(run.path, "h-worker-2", sorted([*events, *saves], key=lambda e: e["t_ns"]))
    write_report(run.path)
    (run.path / "watch.html").write_text(WATCHER)
    return run.path


def watch(folder: Path, tmp_path: Path, *flags: str) -> dict:
    dom = chromium((folder / "watch.html").as_uri(), tmp_path / "profile", "--dump-dom", *flags)
    answer = re.search(r'<pre id="out">(.*?)</pre>', dom, re.S)
    assert answer is not None and answer[1], dom[-2000:]
    return dict(json.loads(answer[1].replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">")))


def test_everything_is_drawn_on_a_phone_and_obeys_the_keyboard(folder: Path, tmp_path: Path) -> None:
    found = watch(folder, tmp_path)
    assert found["drawn"] == "yes"
    names = ["timeline", "time", "loss", "recovery", "classes", "saves"]
    assert [f[0] for f in found["figures"]] == [f"fig-{name}" for name in names]
    assert all(tab == 0 and drawn >= 1 for _, tab, drawn in found["figures"])
    assert found["bars"] == 10  # the pieces of the worked case's only lane
    assert found["width"] <= 390, "the page is wider than a phone"
    assert all(name.endswith("report.html") for name in found["asked"])
    start, zoomed, moved = found["start"], found["zoomed"], found["moved"]
    width = zoomed[1] - zoomed[0]
    assert width == pytest.approx((start[1] - start[0]) / 2, rel=1e-3)
    assert moved == pytest.approx([zoomed[0] + width / 5, zoomed[1] + width / 5], rel=1e-3)
    assert found["all"] == pytest.approx(start)


def test_in_the_dark(folder: Path, tmp_path: Path) -> None:
    found = watch(folder, tmp_path, "--blink-settings=preferredColorScheme=0")
    assert found["dark"] is True
    assert found["background"] == "rgb(21, 24, 27)"


def test_the_picture_is_not_empty(folder: Path, tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    url = (folder / "report.html").as_uri()
    chromium(url, tmp_path / "profile", "--window-size=1000,3000", f"--screenshot={picture}")
    assert picture.stat().st_size > 100_000  # an empty page of that size has 10 kB
