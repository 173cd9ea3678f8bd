"""Jobs of real ranks under `ridethrough run`, and what they leave behind: nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


@dataclass
class Result:
    """A finished job. `events` by time; `run` is its folder."""

    code: int
    out: str
    run: Path
    events: list[dict[str, Any]]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [e for e in self.events if e["kind"] == kind]

    @property
    def incidents(self) -> list[dict[str, Any]]:
        return self.of("incident")

    def told(self, *fields: str) -> list[tuple[Any, ...]]:
        """(field, ...) of each incident, in order."""
        return [tuple(i[name] for name in fields) for i in self.incidents]

    def spawns(self) -> dict[int, int]:
        """Rank -> how many processes held it."""
        return dict(Counter(e["rank"] for e in self.of("worker_spawn") if e["rank"] is not None))

    def notes(self) -> dict[int, dict[str, Any]]:
        """Rank -> what it noted at its end."""
        return {e["rank"]: e for e in self.of("note")}


def read(run: Path) -> list[dict[str, Any]]:
    lines = [line for path in run.glob("events/*.jsonl") for line in path.read_text().splitlines()]
    return sorted((json.loads(line) for line in lines), key=lambda e: e.get("t_ns", 0))


def left_behind(mark: str) -> list[str]:
    """Command lines of processes that carry the mark in their environment."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if mark.encode() in Path(f"/proc/{name}/environ").read_bytes():
                found.append(Path(f"/proc/{name}/cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


class Jobs:
    """`jobs(script, options, ranks=, faults=[...])` runs one to its end and checks that nothing is left."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0

    def __call__(
        self,
        script: str | Path = HERE / "trainee.py",
        options: dict[str, Any] | str | None = None,
        *,
        ranks: int = 4,
        faults: list[str] | None = None,
        policy: dict[str, Any] | None = None,
        flags: list[str] | None = None,
        env: dict[str, str] | None = None,
        timeout_s: float = 240.0,
    ) -> Result:
        self._count += 1
        home = self._folder / f"job{self._count}"
        scratch = home / "tmp"
        scratch.mkdir(parents=True)
        command = [sys.executable, "-m", "ridethrough", "run", "--nproc-per-node", str(ranks)]
        command += ["--runs", str(home / "runs"), "--run-id", "job", *(flags or [])]
        if policy:
            (home / "policy.json").write_text(json.dumps(policy))
            command += ["--policy", str(home / "policy.json")]
        for fault in faults or []:
            command += ["--fault-at", fault]
        command += [str(script)]
        if options is not None:
            command += [options if isinstance(options, str) else json.dumps(options)]
        mark = f"RESTART_TEST={home}"
        full_env = {**os.environ, "TMPDIR": str(scratch), "RESTART_TEST": str(home), "OMP_NUM_THREADS": "1"}
        full_env.update(env or {})
        with subprocess.Popen(
            command, env=full_env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=home
        ) as job:
            try:
                out, _ = job.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                job.kill()
                out, _ = job.communicate()
                pytest.fail(f"the job did not end in {timeout_s} s:\n{out[-6000:]}")
        run = home / "runs" / "job"
        assert left_behind(mark) == []
        left = [p.name for p in scratch.iterdir() if not p.name.startswith("torchinductor")]
        assert left == [], left
        return Result(job.returncode, out, run, read(run))
