"""Run while an image is built: python check_image.py cpu|gpu|efa. What is wrong ends the build, not the first job."""

from __future__ import annotations

import glob
import importlib
import os
import pwd
import subprocess
import sys

MODULES = (
    "ridethrough",
    "ridethrough.launch.launcher",
    "ridethrough.restart.session",
    "ridethrough.checkpoint.keeper",
    "ridethrough.train.loop",
    "ridethrough.cluster.folder_server",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "transformers",
    "safetensors",
    "datasets",
)


def check(kind: str) -> list[str]:
    """What is wrong with this image, as lines; empty if nothing is."""
    wrong = []
    for name in MODULES + (("pynvml",) if kind != "cpu" else ()):
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever a broken package raises
            wrong.append(f"import {name}: {type(error).__name__}: {error}")
    import torch

    if kind != "cpu" and (torch.version.cuda is None or not torch.distributed.is_nccl_available()):
        wrong.append(f"torch {torch.__version__} has no CUDA or no NCCL")
    if kind == "cpu" and torch.version.cuda is not None:
        wrong.append(f"torch {torch.__version__} brings CUDA into the CPU image")
    if not torch.distributed.is_gloo_available():
        wrong.append(f"torch {torch.__version__} has no gloo")
    if kind == "efa" and not glob.glob("/opt/amazon/ofi-nccl/lib*/**/libnccl-net*.so", recursive=True):
        wrong.append("no NCCL plugin for EFA below /opt/amazon/ofi-nccl")
    if os.getuid() == 0:
        wrong.append("runs as root")
    elif pwd.getpwuid(os.getuid()).pw_name != "trainer":
        wrong.append("does not run as trainer")
    for command in (["ridethrough", "--version"], ["ridethrough", "exit-codes"], ["ridethrough", "run", "--help"]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            wrong.append(f"{' '.join(command)}: exit {done.returncode}: {done.stderr.strip()[-300:]}")
    return wrong


if __name__ == "__main__":
    problems = check(sys.argv[1])
    print("\n".join(problems) or f"{sys.argv[1]} image: all imports work", file=sys.stderr)
    sys.exit(1 if problems else 0)
