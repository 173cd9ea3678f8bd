"""The waits of Kubernetes, as published."""

from __future__ import annotations

from ridethrough.cluster.kubelet import ContainerBackoff, JobBackoff, container_waits


def test_a_container_that_keeps_ending_waits_longer_and_longer() -> None:
    assert container_waits([1.0] * 9) == [0, 10, 20, 40, 80, 160, 300, 300, 300]


def test_ten_minutes_of_running_are_a_new_beginning() -> None:
    assert container_waits([1, 1, 1, 600, 1, 1]) == [0, 10, 20, 0, 10, 20]
    assert container_waits([1, 1, 1, 599.9, 1]) == [0, 10, 20, 40, 80]


def test_the_memory_of_a_container_counts_its_restarts() -> None:
    _, memory = ContainerBackoff().ended(5)
    _, memory = memory.ended(5)
    assert memory == ContainerBackoff(restarts=2, next_wait_s=20.0)


def test_the_job_controller_doubles_to_ten_minutes_and_a_success_resets_it() -> None:
    memory, waits = JobBackoff(), []
    for _ in range(8):
        wait, memory = memory.failed()
        waits.append(wait)
    assert waits == [10, 20, 40, 80, 160, 320, 600, 600]
    assert memory.succeeded().failed()[0] == 10
