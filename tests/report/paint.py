"""How long the dashboard takes in a real Chromium: to the first paint of a run, and to turn its pages of incidents.

    python tests/report/paint.py /tmp/large large
    python tests/report/paint.py /tmp/many --combined     # 1,000 ranks and 10,000 incidents in one run's record

Reading 10,000 generations of 1,000 ranks from files takes a quarter of an hour, and the dashboard does it beside; so
`--combined` puts the incidents of a run of 2 ranks into the record of one of 1,000, both made and read in full.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from browser import BINARY
from large_run import Writer

from ridethrough.report.documents import fingerprint, read_record
from ridethrough.report.index import Index
from ridethrough.report.view import packed, unpacked

_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
_DRAWN = """new Promise((done) => {
  const look = () => document.documentElement.dataset.drawn
    ? requestAnimationFrame(() => requestAnimationFrame(() => done({
        drawn_ms: performance.now(),
        first_paint_ms: performance.getEntriesByName("first-contentful-paint")[0].startTime })))
    : setTimeout(look, 5);
  look();
})"""
_TURNED = """(async () => {
  const rows = () => document.querySelector(".pager").textContent, turns = [];
  let gap = 0, last = performance.now(), on = true;
  const frame = (now) => { gap = Math.max(gap, now - last); last = now; if (on) requestAnimationFrame(frame); };
  requestAnimationFrame(frame);
  for (let n = 0; n < 10; n++) {
    const before = rows(), begun = performance.now();
    const earlier = [...document.querySelectorAll("button")].find((b) => b.textContent === "earlier");
    if (earlier.disabled) break;
    earlier.click();
    while (rows() === before) await new Promise((next) => setTimeout(next, 2));
    await new Promise(requestAnimationFrame);
    turns.push(performance.now() - begun);
  }
  on = false;
  return { slowest_turn_ms: Math.max(...turns), longest_frame_ms: gap };
})()"""


class Browser:
    """A headless Chromium, told what to do over its debugging pipe (descriptors 3 and 4, JSON ended by a NUL)."""

    def __init__(self, profile: str) -> None:
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        os.dup2(to_read, 3), os.dup2(to_write, 4)
        assert BINARY is not None, "no Chromium here: `make system-deps` installs it"
        command = [BINARY, *_FLAGS, "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]
        self.process = subprocess.Popen(command, pass_fds=(3, 4), stderr=subprocess.DEVNULL)
        os.close(3), os.close(4)
        self._count, self._buffer = 0, b""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def ask(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        self._count += 1
        about = {"id": self._count, "method": method, "params": params}
        os.write(self._write, json.dumps({**about, **({"sessionId": session} if session else {})}).encode() + b"\0")
        while True:
            while b"\0" not in self._buffer:
                self._buffer += os.read(self._read, 1 << 20)
            text, _, self._buffer = self._buffer.partition(b"\0")
            answer = json.loads(text)
            if answer.get("id") == self._count:
                return dict(answer["result"])

    def evaluate(self, script: str) -> Any:
        """The value of a promise; raises KeyError if the page threw, or went away under it."""
        found = self.ask("Runtime.evaluate", self._session, expression=script, awaitPromise=True, returnByValue=True)
        return found["result"]["value"]

    def open(self, url: str) -> None:
        self.ask("Page.navigate", self._session, url=url)


def measure(root: Path, run: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "ridethrough", "dash", str(root), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    url = server.stdout.readline().strip()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(profile)
        try:
            found = []
            for _ in range(3):
                browser.open("about:blank")
                browser.open(f"{url}#{run}")
                while browser.evaluate("location.href") == "about:blank":
                    time.sleep(0.001)
                found.append(browser.evaluate(_DRAWN))
            turned = browser.evaluate(_TURNED)
        finally:
            browser.process.terminate()
            browser.process.wait(20)
            server.terminate()
            server.wait(20)
    return {"loads": found, **turned}


def combined(root: Path) -> None:
    """A record of 1,000 ranks and 10,000 incidents in the index of `root`."""
    for name, sizes in (("ranks", (1_000, 1_000, 20)), ("incidents", (2, 40_000, 10_000))):
        folder = root / name
        if not folder.exists():
            Writer(folder, *sizes).write()
    wide, long = (read_record(root / name / "large", "") for name in ("ranks", "incidents"))
    runs = root / "runs"
    runs.mkdir(exist_ok=True)
    if not (runs / "large").exists():
        (runs / "large").symlink_to(root / "ranks" / "large")
    wide.incidents, wide.num_incidents, wide.fingerprint = long.incidents, 10_000, fingerprint(runs / "large")
    assert wide.view is not None and long.view is not None
    view = unpacked(wide.view)
    view["status"]["num_incidents"], view["marks"] = 10_000, unpacked(long.view)["marks"]
    wide.view = packed(view)
    with Index(runs) as index:
        index._put(wide)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("run", nargs="?", default="large")
    parser.add_argument("--combined", action="store_true")
    options = parser.parse_args()
    if options.combined:
        combined(options.root)
    where = options.root / "runs" if options.combined else options.root
    print(json.dumps(measure(where, options.run), indent=1))
