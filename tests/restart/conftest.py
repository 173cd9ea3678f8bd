"""Lets the tests of this folder share `restart_job`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def jobs(tmp_path: Path) -> Any:
    from restart_job import Jobs

    return Jobs(tmp_path)
