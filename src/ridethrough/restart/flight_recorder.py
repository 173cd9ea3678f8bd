"""torch's flight recorder: which collectives this rank has begun on each group, and which of them are done."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import torch


def keep(path: Path) -> None:
    """Writes the recorder's entries, as `torchfrtrace` reads them: NCCL's where torch has it, else those that all
    backends share. Nothing if it is turned off (TORCH_FR_BUFFER_SIZE=0). Any thread.

    Without the stacks of the calls: torch takes seconds to look the first of them up.
    """
    c10d: Any = torch._C._distributed_c10d
    dump = getattr(c10d, "_dump_nccl_trace", None) or getattr(c10d, "_dump_fr_trace", None)
    if dump is None:
        return
    try:
        entries = dump(True, False, False)  # collectives, no stacks, finished ones too
        with contextlib.suppress(FileExistsError), open(path, "xb") as file:
            file.write(entries)
    except (RuntimeError, OSError) as error:  # RuntimeError: the recorder asks a GPU that has failed
        print(f"ridethrough: no flight recorder's dump in {path}: {error}", file=sys.stderr)
