"""What the simulated fleets are made of: every value with where it is from. None is ours to choose.

A fleet's step and state follow from its model: 6 x parameters x tokens FLOP a step, and 14 bytes a parameter (weights
in bf16; weights and two moments of Adam in fp32).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

_LLAMA3 = '"The Llama 3 Herd of Models", arXiv 2407.21783'
_MEGASCALE = '"MegaScale", arXiv 2402.15627, section 3.5'
_HERE = "measured here: docs/benchmarks.md, recovery"
FLOP_PER_S = 400e12  # of one H100; Llama 3's table 4: 380 to 430


@dataclass(frozen=True)
class Value:
    """One assumed value. `source` begins with `published`, `measured` or `assumed`."""

    value: float
    unit: str
    source: str


COMMON: dict[str, Value] = {
    "detect_exception_s": Value(0.05, "s", f"{_HERE}: 0.01 to 0.05"),
    "detect_sigkill_s": Value(0.05, "s", f"{_HERE}: 0.01 to 0.05"),
    "detect_hang_steps": Value(4.0, "steps", "the product's policy: hang_factor x p99 of a step"),
    "detect_node_loss_s": Value(5.0, "s", "the product's policy: lease_s"),
    "teardown_s": Value(1.0, "s", f"{_HERE}: all out after 0.02 to 2.0 on 4 ranks"),
    "replace_process_extra_s": Value(1.5, "s", "measured on two H200 (docs/benchmarks/two-h200): a warm process"),
    "replace_node_extra_s": Value(3.0, "s", f"{_HERE}: a node of two lost takes 2.2 with a standby"),
    "memory_restore_s": Value(1.0, "s", "assumed: a rank's share of the state over PCIe takes less than 0.1 s"),
    "save_stall_s": Value(0.1, "s", "measured here: docs/benchmarks.md, checkpoints: 0.05 to 0.06 at 64 MiB a rank"),
    "replica_lag_steps": Value(2, "steps", "the product's promise for a lost node: k + 1 steps with k = 1"),
    "peer_detect_exception_s": Value(1.0, "s", f"{_HERE}: torchrun 0.5, NVRx 0.6 to 1.0"),
    "peer_detect_hang_s": Value(60.0, "s", "published: the reference's NCCL time-out"),
    "peer_teardown_s": Value(5.0, "s", "assumed: torchrun and ft_launcher wait so long for SIGTERM at most"),
    "launcher_restart_s": Value(17.0, "s", "published: the reference's recovery by ft_launcher"),
    "job_restart_s": Value(270.0, "s", "published: the reference's recovery by Kubernetes alone, 16 GPUs"),
    "peer_save_stall_s": Value(1.0, "s", "assumed: 0.1 measured here at 64 MiB a rank, PyTorch published 6.3 for 7 B"),
    "repair_s": Value(4 * 3600.0, "s", "assumed: a host is replaced within a shift"),
}


@dataclass(frozen=True)
class FleetModel:
    """One fleet. `days`: simulated."""

    num_gpus: int
    days: float
    parameters: Value
    tokens_per_step: Value
    storage_gb_s: Value
    group_s: Value  # making all process groups anew

    @property
    def step_s(self) -> float:
        return 6 * self.parameters.value * self.tokens_per_step.value / (self.num_gpus * FLOP_PER_S)

    @property
    def state_gb(self) -> float:
        return 14 * self.parameters.value / 1e9

    def as_json(self) -> dict[str, Any]:
        """All values with their sources."""
        named = ("parameters", "tokens_per_step", "storage_gb_s", "group_s")
        derived = {
            "step_s": Value(self.step_s, "s", f"derived: 6 x parameters x tokens / (GPUs x 400 TFLOP/s, {_LLAMA3})"),
            "state_gb": Value(self.state_gb, "GB", "derived: 14 bytes a parameter"),
        }
        return {name: asdict(value) for name, value in {**{n: getattr(self, n) for n in named}, **derived}.items()}


FLEETS = (
    FleetModel(
        1_024,
        27.0,
        Value(70e9, "", 'published: Llama 2 70B, "Llama 2", arXiv 2307.09288'),
        Value(4e6, "tokens", "published: Llama 2's batch"),
        Value(50.0, "GB/s", "assumed: FSx for Lustre, 100 TiB at 500 MB/s per TiB (it is sold with 125 to 1,000)"),
        Value(5.0, "s", f"published: below 5 s on 2,048 GPUs, {_MEGASCALE}"),
    ),
    FleetModel(
        16_384,
        7.0,
        Value(405e9, "", f"published: {_LLAMA3}"),
        Value(16e6, "tokens", f"published: {_LLAMA3}, table 4"),
        Value(2_000.0, "GB/s", f"published: Tectonic's sustained throughput, {_LLAMA3}, section 3.3.1"),
        Value(30.0, "s", f"published: below 30 s on more than 10,000 GPUs, {_MEGASCALE}"),
    ),
    FleetModel(
        100_000,
        1.0,
        Value(1e12, "", "assumed"),
        Value(64e6, "tokens", "assumed: Llama 3's 16 M with four times the GPUs, and six times"),
        Value(7_000.0, "GB/s", f"published: Tectonic's peak throughput, {_LLAMA3}, section 3.3.1"),
        Value(120.0, "s", "assumed: MegaScale's 30 s, growing slower than the fleet"),
    ),
)


def assumptions() -> dict[str, dict[str, Any]]:
    """Every value with its source: of `all` fleets, and by number of GPUs."""
    common = {name: asdict(assumed) for name, assumed in COMMON.items()}
    return {"all": common, **{str(model.num_gpus): model.as_json() for model in FLEETS}}
