"""An event log made of the figures of the published recovery table, to see what they can and cannot mean.

The table (16 H100, 2,000 steps, a checkpoint every 500, 5 faults) gives for each mechanism a recovery time and two
goodputs, but no wall time, step time or cost of a save. Taken at their word, three unknowns follow:

    wall  = 5 x recovery / (1 - infrastructure goodput)        only recoveries are down time
    step  = training goodput x wall / 2000                     only the 2,000 steps that count are productive
    stall = (up - productive - rolled back) / 4 saves          what is left of the up time

with the rollback as large as it can be: every fault strikes 499 steps after a save. `python tests/ledger/published.py`
prints them; docs/ledger.md says what follows from it.
"""

from __future__ import annotations

from dataclasses import dataclass

STEPS, EVERY, FAULTS = 2000, 500, 5
WORST = EVERY - 1  # steps lost per fault at most
BASES = (0, 500, 1000, 1500, 1500)  # the newest save when each fault strikes


@dataclass(frozen=True)
class Row:
    mechanism: str
    recovery_s: float
    training: float
    infrastructure: float

    @property
    def wall_s(self) -> float:
        return FAULTS * self.recovery_s / (1 - self.infrastructure)

    @property
    def step_s(self) -> float:
        return self.training * self.wall_s / STEPS

    @property
    def stall_s(self) -> float:
        lost_s = FAULTS * WORST * self.step_s
        return ((self.infrastructure - self.training) * self.wall_s - lost_s) / (STEPS // EVERY)


TABLE = (
    Row("in-process", 10, 0.31, 0.87),
    Row("ft_launcher", 17, 0.255, 0.859),
    Row("Kubernetes alone", 270, 0.115, 0.358),
)


def events(row: Row) -> list[dict]:
    """The log of one rank that lives through the row: five times 499 steps and a fault, then the rest."""
    t = 0.0
    out: list[dict] = [_event("job_start", t, slots=1, nodes=1, run_id="published")]
    done = 0

    def run(generation: int, base: int, until: int) -> None:
        nonlocal t, done
        out.append(_event("enter", t, generation=generation, rank=0))
        out.append(_event("resumed", t, generation=generation, rank=0, step=base))
        out.append(_event("loop", t, generation=generation, rank=0, step=base))
        for step in range(base + 1, until + 1):
            begin, t = t, t + row.step_s
            fields = {"generation": generation, "rank": 0, "step": step}
            out.append(_event("step", t, **fields, t0_ns=_ns(begin), t1_ns=_ns(t), parts=[]))
            if step % EVERY == 0 and step > done:
                done = step
                for edge in ("begin", "end"):
                    out.append(_event("phase", t, generation=generation, rank=0, phase="save", edge=edge, step=step))
                    t += row.stall_s if edge == "begin" else 0

    base = 0
    for generation, newest in enumerate(BASES):
        out.append(_plan(t, generation))
        run(generation, base, newest + WORST)
        report = {"class": "exception", "detected_by": "exception", "fault_ns": _ns(t)}
        out.append(_event("fault", t, generation=generation, rank=0, **report))
        out.append(_event("all_out", t, generation=generation))
        t += row.recovery_s
        base = newest
    out.append(_plan(t, FAULTS))
    run(FAULTS, base, STEPS)
    out.append(_event("job_end", t, code=0, reason="done"))
    return out


def _plan(t: float, generation: int) -> dict:
    member = {"rank": 0, "local_rank": 0, "node": "n", "worker": "w"}
    return _event("plan", t, generation=generation, epoch=0, world_size=1, members=[member])


def _event(kind: str, t: float, **fields: object) -> dict:
    return {"t_ns": _ns(t), "kind": kind, **fields}


def _ns(t: float) -> int:
    return round(t * 1e9)


if __name__ == "__main__":
    for each in TABLE:
        figures = f"wall {each.wall_s:7.1f} s  step {each.step_s:.4f} s  stall per save {each.stall_s:5.1f} s"
        print(f"{each.mechanism:17} {figures}")
