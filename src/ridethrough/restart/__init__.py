"""Inside the worker: `run` calls the training function once per generation and leaves it when a fault is reported."""

from ridethrough.restart.entry import heartbeat, restartable, run
from ridethrough.restart.exceptions import Fatal, LeaveGeneration
from ridethrough.restart.run_object import Run

__all__ = ["Fatal", "LeaveGeneration", "Run", "heartbeat", "restartable", "run"]
