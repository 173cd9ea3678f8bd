"""What a script finds in its environment here and under torchrun."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.ranks

# Ours to choose: addresses, folders, and what keeps survivors alive after a remote error (rule of the launcher).
DIFFER = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_ERROR_FILE", "TORCH_NCCL_ASYNC_ERROR_HANDLING"}
ONLY_OURS = {"TORCH_NCCL_RETHROW_CUDA_ERRORS"}


def test_the_environment_is_torchruns(job: Any) -> None:
    script = job.folder / "env.py"
    script.write_text(
        "import json, os, sys\njson.dump(dict(os.environ), open(f\"{sys.argv[1]}-{os.environ['RANK']}.json\", 'w'))\n"
    )
    options = ["--nproc_per_node=2", "--role=trainer", "--rdzv_id=77", "--max-restarts=3", "--monitor-interval=1"]
    assert job.run("run", "--runs", "runs", *options, str(script), "ours") == 0, job.text()
    theirs = [sys.executable, "-m", "torch.distributed.run", "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0"]
    subprocess.run([*theirs, *options, str(script), "theirs"], cwd=job.folder, check=True, capture_output=True)
    for rank in (0, 1):
        ours, torchruns = (json.loads((job.folder / f"{who}-{rank}.json").read_text()) for who in ("ours", "theirs"))
        added = {name for name in ours if name not in torchruns and not name.startswith("RIDETHROUGH_")}
        assert added - {"JOB_MARK", "TMPDIR"} == ONLY_OURS
        torchruns = {name: value for name, value in torchruns.items() if name not in ("COLUMNS", "LINES")}
        assert set(torchruns) <= set(ours)
        assert {name for name in torchruns if ours[name] != torchruns[name]} <= DIFFER
        assert ours["MASTER_PORT"].isdigit() and ours["TORCHELASTIC_ERROR_FILE"].endswith(f"rank{rank}.error.json")


def test_a_virtual_local_rank_sees_its_own_gpu(job: Any) -> None:
    script = job.folder / "env.py"
    script.write_text(
        "import os, ridethrough as rt\n"
        "names = 'RANK', 'LOCAL_RANK', 'CUDA_VISIBLE_DEVICES'\n"
        "def train(run): print('saw', *(os.environ[name] for name in names))\n"
        "rt.run(train)\n"
    )
    args = ["run", "--nproc-per-node", "2", "--virtual-local-rank", "--runs", "runs", "-r", "0:1", str(script)]
    assert job.run(*args, env={"CUDA_VISIBLE_DEVICES": "5,7"}) == 0, job.text()
    assert "saw 1 0 7" in job.text() and "saw 0" not in job.text()
    (log,) = (job.folder / "runs").glob("*/logs/g0001-rank0.log")
    assert "saw 0 0 5" in log.read_text()
