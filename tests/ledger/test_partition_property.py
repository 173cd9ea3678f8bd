"""Random histories: a small simulator lives through generations, faults, replacements, shrinking and rollbacks,
knows the truth at every nanosecond, and writes the events; the partition must find exactly that truth."""

from __future__ import annotations

import json
import random
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ridethrough.ledger.compact import compact
from ridethrough.ledger.incidents import incidents
from ridethrough.ledger.partition import partition, read_events
from ridethrough.ledger.reading import read_split
from ridethrough.ledger.schema import problems

HEADER = {"kind": "header", "schema": 1, "pid": 1, "boot_id": "b", "mono_ns": 0, "wall_ns": 0, "version": "0"}


@dataclass
class Truth:
    """One slot's life: `[state, t0, t1, generation, step]`, without gap from the start on."""

    lane: list[list[Any]] = field(default_factory=list)
    cursor: int = 0

    def to(self, t: int, state: str, generation: int = -1, step: int | None = None) -> None:
        if t > self.cursor:
            self.lane.append([state, self.cursor, t, generation, step])
            self.cursor = t


@dataclass
class Atom:
    """Something a rank does from `a` to `b`, as truth (`parts`) and as events written at its ends."""

    a: int
    b: int
    parts: list[tuple[str, int, int]]
    before: list[dict] = field(default_factory=list)
    after: list[dict] = field(default_factory=list)
    step: int | None = None


class Simulator:
    def __init__(self, draw: Any) -> None:
        self.rng = random.Random(draw(st.integers(0, 2**32)))
        self.slots = draw(st.integers(1, 3))
        self.start = draw(st.integers(0, 1000))
        self.truth = [Truth(cursor=self.start) for _ in range(self.slots)]
        self.idle = ["launch"] * self.slots
        self.files: dict[str, list[dict]] = {"h-coordinator-1": []}
        self.incarnation = [0] * self.slots
        self.checkpoints = draw(st.booleans())
        self.lineage: list[tuple[int, int | None, bool]] = []  # generation, base, finished a step
        self.reached = 0
        self.control("job_start", self.start, slots=self.slots, nodes=1, run_id="r")

    def span(self, low: int = 1, high: int = 50) -> int:
        return self.rng.randint(low, high)

    def control(self, kind: str, t: int, **fields: Any) -> None:
        self.files["h-coordinator-1"].append({"t_ns": t, "kind": kind, **fields})

    def worker(self, slot: int, events: list[dict]) -> None:
        name = f"h-worker-{100 * slot + self.incarnation[slot]}"
        self.files.setdefault(name, []).extend(events)

    def script(self, slot: int, g: int, t: int, base: int, total: int) -> list[Atom]:
        """What the rank would do in this generation if nothing happened."""
        out: list[Atom] = []

        def atom(state: str, kind: str | None, before: list[dict] | None = None, **fields: Any) -> None:
            nonlocal t
            b = t + self.span()
            events = [] if kind is None else [self.said(kind, b, g, slot, **fields)]
            out.append(Atom(t, b, [(state, t, b)], before or [], events))
            t = b

        atom(self.idle[slot], "enter")
        if self.checkpoints:
            atom("init", "phase", phase="load", edge="begin", step=0)
            atom("restore", "phase", phase="load", edge="end", step=base)
            out[-1].after.append(self.said("resumed", t, g, slot, step=base, tier="disk", source=None))
        atom("init", "loop", step=base)
        for number in range(base + 1, total + 1):
            out.append(self.step(slot, g, t, number))
            t = out[-1].b
            if self.rng.randint(0, 3) == 0:
                state, phase = self.rng.choice([("eval", "eval"), ("snapshot_stall", "save")])
                if number == total and phase == "save":
                    state = "finish"
                begin = self.said("phase", t, g, slot, phase=phase, edge="begin", step=number)
                atom(state, "phase", [begin], phase=phase, edge="end", step=number)
            if number < total and self.rng.randint(0, 5) == 0:
                atom("unattributed", None)
        atom("finish", "finish", step=total)
        atom("finish", "exit", code=0)
        return out

    def step(self, slot: int, g: int, t0: int, number: int) -> Atom:
        cuts = [t0, t0 + self.span(0, 5), 0, 0]
        cuts[2] = cuts[1] + self.span()
        cuts[3] = cuts[2] + self.span(0, 5)
        parts = [("data_wait", cuts[0], cuts[1]), ("step", cuts[1], cuts[2]), ("snapshot_stall", cuts[2], cuts[3])]
        carved = [list(part) for part in parts if part[0] != "step" and part[1] < part[2]]
        done = self.said("step", cuts[3], g, slot, step=number, t0_ns=t0, t1_ns=cuts[3], parts=carved)
        return Atom(t0, cuts[3], parts, [], [done], number)

    @staticmethod
    def said(kind: str, t: int, g: int, slot: int, **fields: Any) -> dict:
        return {"t_ns": t, "kind": kind, "generation": g, "rank": slot, **fields}

    def generation(self, g: int, t: int, base: int, last: bool) -> tuple[int, int]:
        """Returns when the next plan may come and the step to resume from."""
        total = base + self.span(1, 4)
        members = list(range(self.slots))
        if self.slots > 1 and g and self.rng.randint(0, 3) == 0:
            members = members[:-1]
        for slot in range(self.slots):
            if slot not in members:
                self.truth[slot].to(t, self.idle[slot])
                self.idle[slot] = "degraded"
            elif self.idle[slot] == "degraded":
                self.truth[slot].to(t, "degraded")
                self.idle[slot] = "rebuild"
        rows = [{"rank": m, "local_rank": m, "node": 0, "worker": f"w{m}", "pid": m} for m in members]
        self.control("plan", t, generation=g, epoch=0, world_size=len(members), members=rows)
        scripts = {slot: self.script(slot, g, t, base, total) for slot in members}
        if last:
            return self.calm(g, base, scripts), total
        return self.faulty(g, base, scripts), self.rng.randint(0, self.reached)

    def calm(self, g: int, base: int, scripts: dict[int, list[Atom]]) -> int:
        for slot, atoms in scripts.items():
            for atom in atoms:
                self.live(slot, g, atom)
        self.lineage.append((g, base, True))
        return max(atoms[-1].b for atoms in scripts.values())

    def live(self, slot: int, g: int, atom: Atom) -> None:
        for state, _, b in atom.parts:
            self.truth[slot].to(b, state, g, atom.step)
        self.worker(slot, atom.before + atom.after)
        if atom.step is not None:
            self.reached = max(self.reached, atom.step)

    def faulty(self, g: int, base: int, scripts: dict[int, list[Atom]]) -> int:
        guilty = self.rng.choice(sorted(scripts))
        own = scripts[guilty]
        how = self.rng.choice(["injected", "known", "sign"])
        index = self.rng.randint(0, min(len(own) - 3, self.rng.choice([4, 99])))
        fault = (
            own[index].b if how == "sign" or index == 0 else own[index].a + self.span(1, own[index].b - own[index].a)
        )
        if how == "sign" and not own[index].after:
            how = "known"
        declared = fault + self.span()
        out = declared + self.span()
        fields = {"class": self.rng.choice(["exception", "sigkill", "hang"]), "detected_by": "waitpid"}
        known = fault if how == "known" else None
        self.control("fault", declared, generation=g, rank=guilty, fault_ns=known, **fields)
        if len(scripts) > 1 and self.rng.random() < 0.5:  # a victim's later report changes nothing
            victim = next(slot for slot in sorted(scripts) if slot != guilty)
            report = {"class": "collective", "detected_by": "collective", "fault_ns": None}
            self.control("fault", declared + 1, generation=g, rank=victim, **report)
        self.control("all_out", out, generation=g)
        stepped = spoke = False
        for slot, atoms in scripts.items():
            self.cut(slot, g, atoms, fault, out, may_finish=slot != guilty)
            if slot == guilty and how == "injected":
                self.worker(
                    slot, [self.said("fault_injected", fault, g, slot, id=g, fault_kind="x", phase="data", step=1)]
                )
            self.truth[slot].to(declared, "detect")
            self.truth[slot].to(out, "teardown")
            self.idle[slot] = "rebuild"
            mine = self.files_of(slot, g)
            stepped = stepped or any(e["kind"] == "step" for e in mine)
            spoke = spoke or any(e["kind"] == "resumed" for e in mine)
            if self.rng.random() < 0.5:
                self.incarnation[slot] += 1  # replaced: another process and another file
            elif slot != guilty:
                self.worker(slot, [self.said("leave", out, g, slot, cause="x")])
        for slot in set(range(self.slots)) - set(scripts):
            self.truth[slot].to(out, "degraded")
        self.lineage.append((g, base if stepped or spoke else None, stepped))
        return out + self.span(0, 20)

    def cut(self, slot: int, g: int, atoms: list[Atom], fault: int, out: int, may_finish: bool) -> None:
        for atom in atoms:
            if atom.b <= fault or (
                may_finish and atom.step and atom.a < fault and atom.b <= out and self.rng.random() < 0.5
            ):
                self.live(slot, g, atom)
                continue
            finished = any(e["kind"] == "finish" for e in self.files_of(slot, g))
            last = self.truth[slot].lane[-1] if self.truth[slot].lane else ["", 0, 0, g, None]
            if last[0] == "unattributed":  # nobody can tell this gap from the step that never was
                last[0] = "partial_step"
            if last[0] == "finish" and not finished:
                last[0] = "snapshot_stall"
            if atom.a <= fault:
                state = atom.parts[0][0]
                if atom.step is not None or state == "unattributed" or (state == "finish" and not finished):
                    state = "snapshot_stall" if atom.before else "partial_step"
                self.truth[slot].to(fault, state)
                self.worker(slot, atom.before)
            return
        self.truth[slot].to(fault, "finish")

    def files_of(self, slot: int, g: int) -> list[dict]:
        events = [e for es in self.files.values() for e in es]
        return [e for e in events if e.get("generation") == g and e.get("rank") == slot and e["kind"] != "fault"]

    def kill(self, end: int) -> int:
        """The host dies: what was written until then is all there is."""
        for events in self.files.values():
            events[:] = [e for e in events if e["t_ns"] <= end]
        return max(e["t_ns"] for events in self.files.values() for e in events)

    def expected(self, end: int) -> list[list[tuple[str, int, int]]]:
        lost_above: dict[int, int] = {}
        lowest: int | None = None
        for g, base, stepped in reversed(self.lineage):
            if lowest is not None:
                lost_above[g] = lowest
            if base is not None and (stepped or lowest is None):
                lowest = base if lowest is None else min(lowest, base)
        lanes = []
        for truth in self.truth:
            truth.to(end, truth.lane[-1][0] if truth.lane and truth.lane[-1][0] == "finish" else "degraded")
            lane = []
            for state, a, b, g, step in truth.lane:
                lost = state == "step" and g in lost_above and step > lost_above[g]
                lane.append(("lost_step" if lost else state, a, b))
            lanes.append(lane)
        return lanes


def totals(lanes: list[list[tuple[str, int, int]]]) -> dict[str, int]:
    out: dict[str, int] = {}
    for lane in lanes:
        for state, a, b in lane:
            out[state] = out.get(state, 0) + b - a
    return out


def joined(lane: list[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    out: list[tuple[str, int, int]] = []
    for state, a, b in lane:
        if out and out[-1][0] == state:
            out[-1] = (state, out[-1][1], b)
        else:
            out.append((state, a, b))
    return out


def write(folder: Path, files: dict[str, list[dict]], torn: list[bool]) -> None:
    (folder / "events").mkdir()
    for (name, events), cut in zip(sorted(files.items()), torn, strict=False):
        header = {**HEADER, "t_ns": 0, "role": name.split("-")[1], "host": "h"}
        lines = [json.dumps(e) for e in [header, *events]]
        (folder / "events" / f"{name}.jsonl").write_text("\n".join(lines) + "\n" + ('{"t_ns": 12, "ki' if cut else ""))


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.data())
def test_the_partition_is_the_truth(data: Any) -> None:
    sim = Simulator(data.draw)
    t, base = sim.start + sim.span(), 0
    num_faults = data.draw(st.integers(0, 3))
    for g in range(num_faults + 1):
        t, base = sim.generation(g, t, base if sim.checkpoints else 0, last=g == num_faults)
    end = t + sim.span()
    sim.control("job_end", end, code=0, reason="done")
    assert [p for events in sim.files.values() for e in events for p in problems(e)] == []

    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), sim.files, [data.draw(st.booleans(), "torn")] * len(sim.files))
        events = [e for e in read_events(folder) if e["kind"] != "header"]
        if data.draw(st.booleans(), "blocks"):
            assert len(compact(folder, smallest_bytes=0)) == len(sim.files)
        split = read_split(folder)
    split.rest = [e for e in split.rest if e["kind"] != "header"]
    part = partition(split)
    assert part.segments == partition(events).segments
    expected = sim.expected(end)
    for slot, lane in enumerate(part.segments):
        assert joined([(s.state, s.t0, s.t1) for s in lane]) == joined(expected[slot]), slot
    assert {state: ns for state, ns in part.states_ns.items() if ns} == totals(expected)
    assert sum(part.states_ns.values()) == part.wall_ns * part.slots
    for incident in incidents(events):
        if incident.first_step_s is not None:
            assert abs(sum(incident.stages_s.values()) - incident.first_step_s) < 1e-12
            assert min(incident.stages_s.values()) >= 0


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.data())
def test_killed_anywhere_the_sum_is_still_the_wall(data: Any) -> None:
    sim = Simulator(data.draw)
    t, base = sim.start + sim.span(), 0
    for g in range(data.draw(st.integers(1, 3))):
        t, base = sim.generation(g, t, base, last=False)
    sim.generation(9, t, base, last=True)
    events = [e for file in sim.files.values() for e in file]
    end = sim.kill(data.draw(st.integers(sim.start, max(e["t_ns"] for e in events))))
    kept = [e for file in sim.files.values() for e in file]
    part = partition(kept)
    assert (part.start_ns, part.end_ns) == (sim.start, end)
    for lane in part.segments:
        assert [s.t0 for s in lane[1:]] == [s.t1 for s in lane[:-1]]
        assert all(s.t0 < s.t1 for s in lane)
    assert sum(part.states_ns.values()) == part.wall_ns * part.slots
    done = [e for e in kept if e["kind"] == "step"]  # every finished step is there, lost or not, and nothing else
    carved = sum(b - a for e in done for _, a, b in e["parts"])
    assert part.states_ns["step"] + part.states_ns["lost_step"] == sum(e["t1_ns"] - e["t0_ns"] for e in done) - carved
    incidents(kept)
