"""`python -m ridethrough.launch.guard PARENT SIGNAL COMMAND...`: runs COMMAND so that it gets SIGNAL when PARENT ends.

The setting survives exec, so the program itself needs to know nothing of it.
"""

from __future__ import annotations

import os
import sys

from ridethrough.launch.linux import die_with_parent


def command(parent: int, sig: int, argv: list[str]) -> list[str]:
    """The command line that guards `argv`."""
    return [sys.executable, "-m", "ridethrough.launch.guard", str(parent), str(int(sig)), *argv]


def main() -> None:
    parent, sig, argv = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    die_with_parent(parent, sig)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        print(f"cannot run {argv[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    main()
