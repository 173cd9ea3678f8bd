"""A generation that ends in a planned way: all ranks agree on one last step, save, and return."""

from __future__ import annotations

from ridethrough.generation.membership import Worker


class PlannedEnd:
    """`code`: the job ends with it. None: the world changes (it grows, a node leaves), and the job goes on."""

    def __init__(self, cause: str, code: int | None, deadline_s: float) -> None:
        self.cause = cause
        self.code = code
        self.deadline_s = deadline_s
        self.asked = False
        self.agreed = False
        self._num_answers = 0
        self._last_step = 0

    def generation_begins(self) -> None:
        """The agreement is per generation: a fault may have come between."""
        self.asked = self.agreed = False
        self._num_answers = self._last_step = 0

    def answer(self, worker: Worker, step: int) -> None:
        """A rank holds at this step, or has finished with it. Only its first word counts."""
        if worker.step is None:
            worker.step = step
            self._num_answers += 1
            self._last_step = max(self._last_step, step)

    def agree(self, world_size: int) -> int | None:
        """The last step, once every rank has answered; only the first time."""
        if not self.asked or self.agreed or self._num_answers < world_size:
            return None
        self.agreed = True
        return self._last_step
