"""What it takes to host a job's coordinator, beside an agent or alone: the machine, the server, the run's records."""

from __future__ import annotations

import socket
from typing import Literal

from ridethrough.generation import messages as m
from ridethrough.generation.machine import GenerationMachine
from ridethrough.launch.config import LaunchConfig
from ridethrough.launch.coordinator import Coordinator
from ridethrough.launch.epoch import claim_epoch, planned_before
from ridethrough.launch.last_words import last_words, write_result
from ridethrough.launch.server import CoordinatorServer
from ridethrough.ledger.recorder import Recorder
from ridethrough.ledger.rundir import RunDir

GOODBYE_LIMIT_S = 20.0


class HostedJob:
    """Claims the run's next epoch. `server` is None until `listen`. One event loop, one thread.

    It takes over a world that may still train, unless that was this one machine's: its workers ended with the launcher.
    """

    def __init__(self, config: LaunchConfig, run: RunDir, role: Literal["agent", "coordinator"]) -> None:
        self._config, self._run = config, run
        self.recorder = Recorder(run.path, role)
        self.machine = GenerationMachine(
            num_workers=config.num_workers,
            min_nodes=config.min_nodes,
            max_nodes=config.max_nodes,
            policy=config.policy,
            epoch=claim_epoch(run.path),
            earlier=0 if role == "agent" and config.max_nodes == 1 else planned_before(run.path),
        )
        self.coordinator = Coordinator(self.machine, self.recorder, run.path)
        self.server: CoordinatorServer | None = None

    async def listen(self, listening: socket.socket | None = None) -> int:
        """Lets agents in at the endpoint, or through a socket that listens there; returns the port. Raises OSError if
        it is taken."""
        config = self._config
        assert config.endpoint is not None
        welcome = {"epoch": self.machine.epoch, "run_id": self._run.run_id, "num_workers": config.num_workers}
        self.server = CoordinatorServer(self.coordinator, config.token, welcome, config.policy.lease_s)
        tls = config.tls.server() if config.tls is not None else None
        return await self.server.start(*config.endpoint, tls, listening)

    def begin(self) -> None:
        """Time begins for the job."""
        config = self._config
        slots = config.num_workers * config.max_nodes
        self.recorder.emit(
            "job_start",
            slots=slots,
            nodes=config.max_nodes,
            run_id=self._run.run_id,
            policy=config.policy.changed(),
        )

    def end(self, done: m.JobDone) -> int:
        """Closes the records, unless the run is another coordinator's by now, and says how it ended; returns the exit
        code."""
        if not self.coordinator.deposed:
            self.recorder.emit("job_end", code=done.code, reason=done.reason)
            write_result(self._run, done)
        last_words(self.coordinator.last_incident, done)
        return done.code
