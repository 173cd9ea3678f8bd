"""B35: the coordinator's name does not resolve yet, or never. A hosts file of its own, in a mount namespace."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
import time
from typing import Any

import pytest
from launch_job import free_port, wait_until

from ridethrough.launch import endpoint

pytestmark = [pytest.mark.ranks, pytest.mark.root]


@pytest.fixture
def hosts(job: Any) -> Any:
    if os.getuid() != 0 or subprocess.run(["unshare", "-m", "true"], check=False).returncode:
        pytest.skip("needs root and mount namespaces")
    file = job.folder / "hosts"
    file.write_text("127.0.0.1 localhost\n")
    return file


def launch(job: Any, hosts: Any, *more: str) -> Any:
    script = job.folder / "hello.py"
    script.write_text("import os; print('hello', os.environ['RANK'])\n")
    own = ["unshare", "-m", "sh", "-c", f'mount --bind {hosts} /etc/hosts; exec "$@"', "sh"]
    endpoint = ["--rdzv-endpoint", f"trainer-0.jobs.invalid:{free_port()}", "--token-file", str(job.token)]
    args = ["run", "--nproc-per-node", "2", "--runs", "runs", "--run-id", "a", *endpoint, *more, str(script)]
    return job.start(*args, before=own)


def test_b35_a_name_that_appears_late(job: Any, hosts: Any) -> None:
    process = launch(job, hosts)
    wait_until(lambda: "trainer-0.jobs.invalid is not resolvable" in job.text(), job.text)
    time.sleep(2.0)
    with open(hosts, "a") as file:
        file.write("127.0.0.1 trainer-0.jobs.invalid\n")
    assert job.wait(process) == 0, job.text()
    assert job.text().count("hello") == 2 and not job.events("a", "incident")


def test_b35_a_name_that_never_appears(job: Any, hosts: Any) -> None:
    process = launch(job, hosts, "--rdzv-conf", "join_timeout=5")
    assert job.wait(process) == 80, job.text()
    last = job.text("agent").splitlines()[-1]
    assert re.search(r"trainer-0.jobs.invalid is not resolvable after 5 s", last), last


def test_of_two_launches_at_the_same_moment_one_hosts() -> None:
    """Both find the port free; a socket that listens at once is what tells them apart."""
    port = free_port()

    async def settle() -> socket.socket | None:
        waiting = endpoint.settle("127.0.0.1", port, must_host=True, limit_s=1.0, tls=None)
        return await asyncio.wait_for(waiting, 3.0)

    async def both() -> list[socket.socket | BaseException | None]:
        return await asyncio.gather(settle(), settle(), return_exceptions=True)

    results = asyncio.run(both())
    hosts = [result for result in results if isinstance(result, socket.socket)]
    assert len(hosts) == 1 and hosts[0].getsockname()[1] == port
    assert any(isinstance(result, asyncio.TimeoutError) for result in results), "the other one waits for the port"
    hosts[0].close()
