"""A headless Chromium for tests; the tests are skipped, visibly, where there is none."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

BINARY = next((b for b in ("chromium", "chromium-browser", "google-chrome") if shutil.which(b)), None)
needs_chromium = pytest.mark.skipif(BINARY is None, reason="no Chromium here: `make system-deps` installs it")
_FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
_FLAGS += ["--disable-background-networking", "--disable-component-update", "--hide-scrollbars"]
_FLAGS += ["--allow-file-access-from-files", "--virtual-time-budget=10000"]


def chromium(url: str, profile: Path, *flags: str) -> str:
    """Loads a page with a fresh profile; returns what it prints (with `--dump-dom`: the page by then)."""
    assert BINARY is not None
    command = [BINARY, *_FLAGS, f"--user-data-dir={profile}", *flags, url]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
