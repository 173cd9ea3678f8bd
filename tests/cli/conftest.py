"""Real jobs, started as a user starts them, with the launch tests' way to see that nothing of them is left."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if "launch_job" not in sys.modules:
    _spec = importlib.util.spec_from_file_location("launch_job", Path(__file__).parents[1] / "launch" / "job.py")
    assert _spec is not None and _spec.loader is not None
    sys.modules["launch_job"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["launch_job"])


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A launch_job.Job; what it leaves is checked after the module's last test."""
    from launch_job import Job

    with Job(tmp_path_factory.mktemp("job")) as job:
        yield job
        job.check_nothing_left()
