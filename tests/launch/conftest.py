from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_spec = importlib.util.spec_from_file_location("launch_job", Path(__file__).parent / "job.py")
assert _spec is not None and _spec.loader is not None
launch_job: Any = importlib.util.module_from_spec(_spec)
sys.modules["launch_job"] = launch_job
_spec.loader.exec_module(launch_job)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Any]:
    with launch_job.Job(tmp_path) as job:
        yield job
        job.check_nothing_left()
