"""What was compiled in one generation is not used in the next: its graphs may hold the old groups and addresses."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ridethrough.restart.compiled import forget_compiled


def test_compiled_code_is_compiled_anew_after_it_was_forgotten() -> None:
    compiled = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        compiled.append(graph)
        return graph.forward

    double = torch.compile(lambda x: x * 2, backend=backend)
    for _ in range(2):
        assert double(torch.ones(2)).tolist() == [2.0, 2.0]
    assert len(compiled) == 1
    assert forget_compiled()
    assert double(torch.ones(2)).tolist() == [2.0, 2.0]
    assert len(compiled) == 2
    assert forget_compiled()
    assert not forget_compiled(), "nothing was compiled since"


def test_where_nothing_was_compiled_nothing_is_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    assert not forget_compiled()
    assert "torch._dynamo" not in sys.modules, "its import takes seconds"


_COMPILES = """
import torch, torch.distributed as dist
import ridethrough as rt

compiled = []

def backend(graph, inputs):
    compiled.append(graph)
    return graph.forward

double = torch.compile(lambda x: x * 2, backend=backend)

def train(run):
    for step in run.steps(0, 8):
        dist.all_reduce(double(torch.ones(2)))
        if run.generation == 1 and step == 4 and run.rank == 1:
            raise ValueError("once")
    print("compiled", len(compiled), "times", flush=True)

rt.run(train)
"""


@pytest.mark.ranks
@pytest.mark.campaign
def test_every_generation_compiles_for_itself(jobs: Any, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_COMPILES)
    job = jobs(script, ranks=2)
    assert job.code == 0, job.out
    assert job.told("class", "rank", "rung") == [("exception", 1, "in_process")]
    assert job.out.count("compiled 2 times") == 2
