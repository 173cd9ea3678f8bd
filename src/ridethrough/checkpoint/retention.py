"""Which committed checkpoints stay. Deleting happens only behind a commit that has just been read back.

Run by rank 0's keeper after each commit. Never touched: the newest good one (what this generation resumed
from goes only once a newer one is whole), and what was rejected or damaged: it is evidence, and `ridethrough
ckpt prune` removes it when asked. Knows nothing of torch.
"""

from __future__ import annotations

import os
from pathlib import Path

from ridethrough.checkpoint import fileops, layout


def victims(
    attempts: list[layout.Attempt], lineage: layout.Lineage, keep: int, keep_every: int | None
) -> list[layout.Attempt]:
    """The attempts to delete, oldest first: committed ones beyond the newest `keep` that are no multiple of
    `keep_every`, older attempts of the same step, and partial ones of older generations."""
    committed = newest_first(attempts, lineage)
    kept: set[int] = set()
    gone: list[layout.Attempt] = []
    for attempt in committed:
        if attempt.step in kept:
            gone.append(attempt)
            continue
        if len(kept) < max(1, keep) or (keep_every and attempt.step % keep_every == 0):
            kept.add(attempt.step)
        else:
            gone.append(attempt)
    newest = max((a.step for a in committed), default=-1)
    for attempt in attempts:
        if attempt.state == "partial" and attempt.step < newest and is_older(attempt.attempt, lineage):
            gone.append(attempt)
    return sorted(gone, key=lambda a: a.order)


def newest_first(attempts: list[layout.Attempt], lineage: layout.Lineage) -> list[layout.Attempt]:
    """The committed ones. A run that has loaded nothing may be far behind what is there: its own saves are the newest
    all the same, and are not deleted behind their own commit."""
    committed = [a for a in attempts if a.state == "committed"]
    return sorted(committed, key=lambda a: (not is_older(a.attempt, lineage), a.order), reverse=True)


def is_older(attempt: str, lineage: layout.Lineage) -> bool:
    """Whether an attempt's name is of a generation before `lineage`; a foreign name is nobody's, and stays."""
    parts = attempt.split(".")
    try:
        mine = (int(parts[0].removeprefix("e")), int(parts[1].removeprefix("g")))
    except (ValueError, IndexError):
        return False
    return mine < (lineage.epoch, lineage.generation)


def remove(attempt: layout.Attempt) -> None:
    """Delete one attempt: COMMIT first, so that a crash on the way leaves a partial one and never a lie."""
    fileops.unlink(attempt.path / layout.COMMIT)
    fileops.sync_folder(attempt.path)
    try:
        names = os.listdir(attempt.path)
    except FileNotFoundError:
        return
    for name in names:
        fileops.unlink(attempt.path / name)
    fileops.remove_folder(attempt.path)


def apply(root: Path, lineage: layout.Lineage, keep: int, keep_every: int | None) -> list[str]:
    """Delete what may go; returns the names of the folders deleted. Raises OSError."""
    generations = layout.read_generations(root)
    newest = max(generations, default=(-1, -1))
    if newest > (lineage.epoch, lineage.generation):
        return []
    attempts = layout.scan(root)
    good = newest_first(attempts, lineage)
    if not good:
        return []
    layout.read_manifests(good[0])  # the newest is whole before anything older goes
    gone = []
    for attempt in victims(attempts, lineage, keep, keep_every):
        again = max(layout.read_generations(root), default=(-1, -1))
        if again > (lineage.epoch, lineage.generation):
            break
        remove(attempt)
        gone.append(attempt.path.name)
    return gone
