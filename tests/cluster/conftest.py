"""A cluster in memory for tests that talk to one."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_SPEC = importlib.util.spec_from_file_location("cluster_emulator", Path(__file__).with_name("emulator.py"))
assert _SPEC is not None and _SPEC.loader is not None
emulator = importlib.util.module_from_spec(_SPEC)
sys.modules["cluster_emulator"] = emulator
_SPEC.loader.exec_module(emulator)


@pytest.fixture
def cluster() -> Iterator[object]:
    with emulator.Emulator() as running:
        yield running
