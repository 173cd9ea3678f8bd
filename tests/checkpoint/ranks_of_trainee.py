"""Starts gloo ranks of `trainee.py`."""

from __future__ import annotations

import json
from typing import Any

import pytest
from launch_job import free_port


def start_ranks(forker: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """run(world, env=..., **spec) runs that many ranks, forked by `forker`; returns [(exit code, {key: value})]."""

    def run(world: int, env: dict[str, str] | None = None, timeout_s: float = 60.0, **spec: Any) -> list[Any]:
        folder = tmp_path_factory.mktemp("ranks")
        base = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world), **(env or {})}
        specs = [[{**base, "RANK": str(rank)}, spec] for rank in range(world)]
        forker.stdin.write(json.dumps({"specs": specs, "out": str(folder), "timeout_s": timeout_s}) + "\n")
        forker.stdin.flush()
        codes = json.loads(forker.stdout.readline())
        results = []
        for index, code in enumerate(codes):
            said = [json.loads(line) for line in (folder / f"{index}.out").read_text().splitlines()]
            merged = {k: v for one in said for k, v in one.items()}
            results.append((code, {**merged, "stderr": (folder / f"{index}.err").read_text()}))
        return results

    return run
