"""`ridethrough ckpt` and the functions below it, on a root written by a real keeper."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from ridethrough.cli.ckpt import app


@pytest.fixture
def root(job: Any, tmp_path: Path) -> Path:
    one = job(keep=5)
    one.checkpointer.load()
    for step in range(1, 5):
        one.train(step)
        one.checkpointer.save(step).committed(20)
    one.checkpointer.close(5)
    return tmp_path / "ckpt"


def call(*args: Any) -> Any:
    return CliRunner().invoke(app, [str(a) for a in args])


def answer(*args: Any) -> Any:
    result = call(*args, "--json")
    return json.loads(result.stdout)


def test_ls_show_and_verify_name_what_is_there_and_what_is_wrong(root: Path) -> None:
    data = next(root.glob("step-3.*/__0_0.distcp"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    next(root.glob("step-2.*/COMMIT")).unlink()
    next(root.glob("step-1.*/__0_1.distcp")).unlink()
    rows = answer("ls", root)
    assert [(r["step"], r["state"]) for r in rows] == [
        (4, "committed"), (3, "committed"), (2, "partial"), (1, "damaged"),
    ]  # fmt: skip
    assert set(rows[0]) == {"step", "attempt", "path", "state", "bytes", "world_size", "created", "reason"}
    assert rows[0]["bytes"] == sum(
        p.stat().st_size for p in Path(rows[0]["path"]).iterdir() if "__" in p.name or p.name == ".metadata"
    )
    shown = {k["key"]: k for k in answer("show", root)["keys"]}
    assert (shown["model.0.weight"]["dtype"], shown["model.0.weight"]["shape"]) == ("float32", [16, 16])
    assert call("verify", root).exit_code == 0
    assert call("verify", root, "--step", 3).exit_code == 1
    checked = answer("verify", root, "--all")
    assert [(r["step"], r["whole"]) for r in checked] == [(4, True), (3, False), (1, False)]
    assert "__0_0.distcp: bytes 0.." in checked[1]["reason"]
    lines = call("ls", root).stdout.splitlines()
    assert len(lines) == 5
    assert lines[4].rstrip().endswith("__0_1.distcp: No such file or directory")  # a pipe has no width to wrap to


@pytest.mark.parametrize("what", [["show"], ["export", "all.pt"]])
def test_a_damaged_newest_one_is_refused_and_the_newest_whole_one_is_named(
    root: Path, tmp_path: Path, what: Any
) -> None:
    next(root.glob("step-4.*/__0_1.distcp")).unlink()
    data = next(root.glob("step-3.*/__0_0.distcp"))
    data.write_bytes(b"x" * data.stat().st_size)
    command, targets = what[0], [tmp_path / name for name in what[1:]]
    refused = call(command, root, *targets)
    assert refused.exit_code == 2
    assert "step-4." in refused.stderr and "--step 2 is whole" in refused.stderr
    assert call(command, root, *targets, "--step", 2).exit_code == 0


def test_prune_keeps_the_newest_good_one(root: Path) -> None:
    next(root.glob("step-1.*/COMMIT")).unlink()
    assert [r["step"] for r in answer("prune", root, "--keep", 1, "--keep-every", 3, "--dry-run")] == [2]
    assert len(answer("ls", root)) == 4
    assert [r["step"] for r in answer("prune", root, "--keep", 1, "--damaged")] == [2, 3, 1]
    assert [r["step"] for r in answer("ls", root)] == [4]
    data = next(root.glob("step-4.*/__0_0.distcp"))
    data.write_bytes(b"x" * data.stat().st_size)
    refused = call("prune", root, "--keep", 1)
    assert refused.exit_code == 2


def test_export_gives_one_file_with_the_whole_state(root: Path, tmp_path: Path) -> None:
    assert answer("export", root, tmp_path / "all.pt", "--step", 2)["step"] == 2
    state = torch.load(tmp_path / "all.pt", weights_only=False)
    assert set(state) == {"model", "optimizer", "note", "rng"}
    assert state["optimizer"]["param_groups"][0]["lr"] == 1e-2
    assert state["optimizer"]["state"]["0.weight"]["step"].item() == 2
    answer("export", root, tmp_path / "model.pt", "--only", "model")
    model = torch.load(tmp_path / "model.pt", weights_only=True)
    torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Dropout(), torch.nn.BatchNorm1d(16)).load_state_dict(model)
    assert call("export", root, tmp_path / "model.pt").exit_code == 2
    unknown = call("export", root, tmp_path / "model.foo")
    assert unknown.exit_code == 2 and ".safetensors, .pt, .pth, .bin" in unknown.stderr
    pytest.importorskip("safetensors")
    from safetensors.torch import load_file

    answer("export", root, tmp_path / "m.safetensors", "--only", "model")
    assert torch.equal(load_file(tmp_path / "m.safetensors")["0.weight"], model["0.weight"])
