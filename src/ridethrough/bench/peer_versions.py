"""The versions that a peer's environment has, asked of its own interpreter."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from typing import Any

_PACKAGES = ("torch", "numpy", "nvidia-resiliency-ext", "torchft", "torchft-nightly")
_CODE = """
import importlib.metadata as m, json, platform
found = {"python": platform.python_version()}
for name in NAMES:
    try:
        found[name] = m.version(name)
    except m.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def peer_versions(pythons: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Mechanism -> package -> version. An interpreter that gives no answer in 30 s has none."""
    answers: dict[str, dict[str, Any]] = {}
    for python in set(pythons.values()):
        command = [python, "-c", _CODE.replace("NAMES", repr(_PACKAGES))]
        try:
            text = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
            answers[python] = json.loads(text)
        except (OSError, subprocess.SubprocessError, ValueError):
            answers[python] = {}
    return {name: answers[python] for name, python in pythons.items()}
