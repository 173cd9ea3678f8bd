"""What can go wrong with a checkpoint, in the words that the trainer sees."""

from __future__ import annotations

HALF_WRITTEN = "The state is written in part: build it anew before the next load"


class CheckpointError(RuntimeError):
    """A save or a load failed. The message names the file, the rank and the step, and says what to do."""


class StorageFull(CheckpointError):
    """No space or no quota is left for a save. Under the launcher it ends the job: a restart frees no disk."""


class CheckpointTimeout(CheckpointError):
    """What was asked for did not happen within its limit; it may still happen later."""


class NoUsableCheckpoint(CheckpointError):
    """The root holds committed checkpoints, and none of them can be used. Nothing was deleted."""


class StateMismatch(CheckpointError):
    """The checkpoint is sound but is of another state: keys or shapes differ. Trying an older one would not
    help."""


class StaleGeneration(CheckpointError):
    """A newer generation of this job has already started from this root; this process must not write there."""


class DamagedCheckpoint(CheckpointError):
    """A file of a checkpoint is missing, cut, or differs from its hash. The next older checkpoint is tried."""
