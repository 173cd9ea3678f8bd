"""Real jobs, with the launch tests' way to start them and to see that nothing of them is left."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

for _name, _file in (("launch_job", "job.py"), ("launch_namespaces", "namespaces.py")):
    if _name not in sys.modules:
        _spec = importlib.util.spec_from_file_location(_name, Path(__file__).parents[1] / "launch" / _file)
        assert _spec is not None and _spec.loader is not None
        sys.modules[_name] = importlib.util.module_from_spec(_spec)
        _spec.loader.exec_module(sys.modules[_name])


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Any]:
    from launch_job import Job

    with Job(tmp_path) as job:
        yield job
        job.check_nothing_left()
