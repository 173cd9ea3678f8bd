"""How long the generation machine needs at scale, on paper: `python -m ridethrough.bench.planning --nodes 10000`.

One worker of a running world dies, every survivor reports the broken collective and then ready, the new process of the
dead one as well, and the machine writes the next plan. Only the machine's own CPU time counts:
no sockets, no processes, no waiting.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable

from ridethrough.generation import messages as m
from ridethrough.generation.faults import FaultReport
from ridethrough.generation.machine import GenerationMachine
from ridethrough.generation.policy import Policy


def simulate(num_nodes: int, num_workers: int) -> dict[str, float]:
    """CPU seconds of this process: `start_s` from the first node to the first plan, `entered_s` until all have entered
    it, `death_to_leave_s` from a worker's death to the word to leave, `death_to_plan_s` on to the next plan,
    and `encode_s` and `enter_bytes` for what all nodes are told of that plan, as JSON, and the longest of it."""
    machine = GenerationMachine(
        num_workers=num_workers, min_nodes=num_nodes, max_nodes=num_nodes, policy=Policy(last_call_s=0)
    )
    joins = [m.NodeJoined(node=f"n{i}", name=f"host{i}", num_workers=num_workers) for i in range(num_nodes)]
    begun = time.process_time()
    actions = _feed(machine, joins)
    store = next(a for a in actions if isinstance(a, m.OpenStore))
    spawned = _feed(machine, [m.StoreOpened(serial=store.serial, endpoint="n0:1")])
    workers = [a.worker for a in spawned if isinstance(a, m.Spawn)]
    _feed(machine, [m.WorkerReady(worker=w) for w in workers])
    start_s = time.process_time() - begun
    assert machine.generation == 1
    entered_s, _ = _timed(machine, [m.WorkerEntered(worker=w, generation=1) for w in workers])

    victim = workers[len(workers) // 2]
    report = FaultReport(generation=1, worker=victim, fault_class="sigkill", detected_by="waitpid", signal=9)
    leave_s, actions = _timed(machine, [m.WorkerExited(worker=victim, report=report)])
    spawn = next(a for a in actions if isinstance(a, m.Spawn))
    store = next(a for a in actions if isinstance(a, m.OpenStore))
    answers: list[m.Event] = [m.StoreOpened(serial=store.serial, endpoint="n0:2")]
    for worker in workers:
        if worker != victim:
            cut = FaultReport(generation=1, worker=worker, fault_class="collective", detected_by="collective")
            answers += [m.WorkerFaulted(report=cut), m.WorkerReady(worker=worker, left=1)]
    rest_s, actions = _timed(machine, [*answers, m.WorkerReady(worker=spawn.worker)])
    assert machine.generation == 2 and machine.plan is not None

    begun = time.process_time()
    sizes = [len(a.model_dump_json()) for a in actions if isinstance(a, m.Enter)]
    return {
        "num_nodes": num_nodes,
        "num_workers": num_workers,
        "start_s": start_s,
        "entered_s": entered_s,
        "death_to_leave_s": leave_s,
        "death_to_plan_s": leave_s + rest_s,
        "encode_s": time.process_time() - begun,
        "enter_bytes": max(sizes),
    }


def _feed(machine: GenerationMachine, events: Iterable[m.Event]) -> list[m.Action]:
    handle: Callable[[m.Event, float], list[m.Action]] = machine.handle
    out: list[m.Action] = []
    for event in events:
        out += handle(event, 1.0)
    return out


def _timed(machine: GenerationMachine, events: Iterable[m.Event]) -> tuple[float, list[m.Action]]:
    begun = time.process_time()
    out = _feed(machine, events)
    return time.process_time() - begun, out


def main() -> None:
    parser = argparse.ArgumentParser(description="The generation machine's CPU time at scale.")
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=8, help="ranks on each node")
    asked = parser.parse_args()
    print(json.dumps(simulate(asked.nodes, asked.workers), indent=2))


if __name__ == "__main__":
    main()
