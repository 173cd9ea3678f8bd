"""The reference job as a script: `python -m ridethrough.train --preset tiny --steps 200`.

Runs under `ridethrough run`, under torchrun, and as one plain process. `ridethrough train` parses the same options.
"""

from __future__ import annotations

import functools
import gc
import os
import sys

from ridethrough.train.config import ConfigError, check
from ridethrough.train.options import parse_args as parse_args


def main(argv: list[str] | None = None) -> None:
    """Parse, check and train. Exits with 2 and one line on standard error if an option cannot be used."""
    try:
        config = parse_args(sys.argv[1:] if argv is None else argv)
        # Under the launcher it has been checked before the ranks started.
        if os.environ.get("RIDETHROUGH_AGENT", "none") == "none":
            check(config, int(os.environ.get("WORLD_SIZE", "1")))
    except ConfigError as e:
        print(f"ridethrough train: {e}", file=sys.stderr)
        raise SystemExit(2) from None

    from ridethrough.restart.entry import run
    from ridethrough.restart.groups import forget_meshes
    from ridethrough.train.loop import train

    run(functools.partial(train, config=config))
    # A process group that is alive when the interpreter ends may abort it: its thread then drops a tensor that Python
    # knows, wants the GIL, and is unwound through C++ (seen in 1 of 20 exits). DTensor's caches keep it alive.
    forget_meshes()
    gc.collect()


if __name__ == "__main__":
    main()
