"""`python -m ridethrough.launch.numa MODE N`: prints the cores near each of the first N GPUs, as JSON.

A process of its own, since asking for a GPU's place opens the device, and the agent must not.
"""

from __future__ import annotations

import asyncio
import json
import sys

_LIMIT_S = 120.0


async def cores_of_ranks(mode: str, num_workers: int) -> list[set[int]]:
    """The cores for each local rank; empty, with a line on standard error, where the machine does not tell."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "ridethrough.launch.numa", mode, str(num_workers)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), _LIMIT_S)
    except asyncio.TimeoutError:
        process.kill()
        out, err = b"", b"no answer"
    if process.returncode == 0:
        return [set(cores) for cores in json.loads(out)]
    why = (err.decode(errors="replace").strip().splitlines() or ["?"])[-1]
    print(f"ridethrough: --numa-binding {mode}: ranks are not bound: {why}", file=sys.stderr)
    return []


def main() -> None:
    from torch.numa import binding

    options = binding.NumaOptions(affinity_mode=binding.AffinityMode(sys.argv[1]))
    ask = binding._get_logical_cpus_to_bind_to  # what torchrun's own --numa-binding does, less its need for numactl
    print(json.dumps([sorted(ask(gpu_index=rank, numa_options=options)) for rank in range(int(sys.argv[2]))]))


if __name__ == "__main__":
    main()
