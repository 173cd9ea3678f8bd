"""From the first report of a fault to the plan, or the end, that answers it."""

from __future__ import annotations

from collections.abc import Callable

from ridethrough.generation.decision import Decision
from ridethrough.generation.faults import FaultReport, root_cause
from ridethrough.generation.messages import IncidentDecided
from ridethrough.ledger.schema import Rung

_MAX_SECONDARY = 64
_MAX_CONSEQUENCES = 1024


class Incident:
    """`fatal`: some report is. `explained`: some report is more than the consequence of another one.

    Faults before a new generation's first step belong to the incident before: the same id, one more attempt.

    What was decided is kept back until the next plan is written, since only then it is known whether a lost node was
    replaced or the world has shrunk.
    """

    def __init__(self) -> None:
        self.reports: list[FaultReport] = []
        self.replaced = False
        self.fatal = False
        self.explained = False
        self._told: set[tuple[str, str, str]] = set()
        self._id = ""
        self._num_attempts = 0
        self._stepped = True
        self._first_s = 0.0
        self._decided: IncidentDecided | None = None

    @property
    def open(self) -> bool:
        return bool(self.reports)

    @property
    def has_stepped(self) -> bool:
        """Some step was finished since the last incident."""
        return self._stepped

    def add(self, report: FaultReport, now_s: float) -> bool:
        """False if it tells nothing new: this participant has said it, or very many that their peers were gone."""
        key = (report.worker, report.node, report.fault_class)
        if key in self._told or (report.is_consequence and len(self.reports) >= _MAX_CONSEQUENCES):
            return False
        if not self.reports:
            self._first_s = now_s
        self._told.add(key)
        self.reports.append(report)
        self.fatal |= bool(report.fatal)
        self.explained |= not report.is_consequence and not report.is_ours
        return True

    def age_s(self, now_s: float) -> float:
        return now_s - self._first_s

    def stepped(self) -> None:
        """A step was finished: the next fault is an incident of its own."""
        self._stepped = True

    def decide(
        self, name: str, generation: int, choose: Callable[[FaultReport], Decision]
    ) -> tuple[Decision, FaultReport, list[IncidentDecided]]:
        """Closes the reports; what was kept back from an earlier attempt comes out, and this one if it is the end."""
        root = root_cause(self.reports)
        if self._stepped or not self._id:
            self._id, self._num_attempts = name, 0
        self._num_attempts += 1
        self._stepped = False
        decision = choose(root)
        out = self.settle()
        self._decided = IncidentDecided(
            id=self._id,
            generation=generation,
            root=root,
            secondary=tuple(r for r in self.reports if r is not root)[:_MAX_SECONDARY],
            rung=decision.rung,
            attempts=self._num_attempts,
            why=decision.why,
        )
        if decision.rung == "give_up":
            out += self.settle()
        self.reports, self.replaced = [], False
        self.fatal = self.explained = False
        self._told.clear()
        return decision, root, out

    def takes_node(self, why: str) -> None:
        """What was decided also takes a node out."""
        if self._decided is not None:
            update = {"rung": "replace_node", "why": f"{self._decided.why}; {why}"}
            self._decided = self._decided.model_copy(update=update)

    def settle(self, rung: Rung | None = None) -> list[IncidentDecided]:
        """What was kept back, if anything; with the rung that it came to in the end."""
        decided, self._decided = self._decided, None
        if decided is None:
            return []
        return [decided if rung is None else decided.model_copy(update={"rung": rung})]
