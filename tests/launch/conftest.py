from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def _load(name: str, file: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


launch_job = _load("launch_job", "job.py")
_load("launch_namespaces", "namespaces.py")


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Any]:
    with launch_job.Job(tmp_path) as job:
        yield job
        job.check_nothing_left()
