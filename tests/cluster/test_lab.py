"""The pod lab with small commands: what a pod is, what befalls it, and that nothing of it is left."""

from __future__ import annotations

import os
import re
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ridethrough.cluster.exit_rules import pod_failure_policy
from ridethrough.cluster.lab.cgroup import nearest_parent
from ridethrough.cluster.lab.dns import DnsServer
from ridethrough.cluster.lab.lab import Lab, needs
from ridethrough.cluster.lab.network import LabError

root = pytest.mark.root
SCALE = 0.02  # ten seconds of the Job controller are 0.2 s


def job(name: str, script: str, num_pods: int = 1, **more: Any) -> dict[str, Any]:
    """A Job of Python one-liners; `more`: memory, grace, backoff_limit."""
    container = {
        "name": "main",
        "command": [sys.executable, "-u", "-c", script],
        "env": [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "URL", "value": "http://$(POD_IP):80/$(NONE)"},
        ],
        "resources": {"limits": {"memory": more.get("memory", "256Mi")}},
        "volumeMounts": [
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "shared", "mountPath": "/mnt"},
        ],
    }
    pod = {
        "restartPolicy": "Never",
        "subdomain": "svc",
        "terminationGracePeriodSeconds": more.get("grace", 5),
        "containers": [container],
        "volumes": [
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Mi"}},
            {"name": "shared", "persistentVolumeClaim": {"claimName": "c"}},
        ],
    }
    spec = {
        "completions": num_pods,
        "parallelism": num_pods,
        "completionMode": "Indexed",
        "backoffLimit": more.get("backoff_limit", 6),
        "podFailurePolicy": pod_failure_policy("main"),
        "template": {"metadata": {"labels": {}}, "spec": pod},
    }
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": spec}


def leftovers(name: str) -> list[str]:
    spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.split()
    out = [space for space in spaces if space.startswith(name)]
    for folder, folders, _ in os.walk("/sys/fs/cgroup"):
        out += [f"{folder}/{each}" for each in folders if each.startswith(f"{name}-")]
    return out


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    why = needs()
    if why is not None:
        pytest.skip(why)
    with Lab(tmp_path, wait_scale=SCALE) as running:
        yield running
    assert leftovers(running.name) == []


@root
def test_a_pod_has_its_own_host_network_shm_and_processes(lab: Lab) -> None:
    script = (
        "import os, socket, shutil; print(os.getpid(), socket.gethostname(), os.environ['URL']);"
        "print(shutil.disk_usage('/dev/shm').total, sorted(name for _, name in socket.if_nameindex()));"
        "print(sum(word.isdigit() for word in os.listdir('/proc')), open('/etc/resolv.conf').readline().strip());"
        "print(socket.gethostbyname(socket.gethostname()) == os.environ['POD_IP'])"
    )
    lab.apply([job("a", script)])
    assert lab.wait(60, "a") == "complete"
    pod = lab.pods[0]
    assert pod.log.splitlines() == [
        f"1 a-0 http://{pod.address}:80/$(NONE)",
        f"{8 << 20} ['eth0', 'lo']",
        "1 nameserver 10.77.0.1",
        "True",
    ]


@root
def test_pods_find_each_other_by_name_even_when_the_name_comes_late(lab: Lab) -> None:
    lab.switch.dns.hide("a-0.svc", 60.0)
    server = "import socket; s = socket.create_server(('0.0.0.0', 7000)); c, _ = s.accept(); c.sendall(b'hello')"
    client = (
        "import socket, time\n"
        "misses = 0\n"
        "while True:\n"
        "    try: c = socket.create_connection(('a-0.svc', 7000)); break\n"
        "    except OSError: misses += 1; time.sleep(0.1)\n"
        "print(c.recv(10), misses > 0)\n"
    )
    lab.apply([job("a", server), job("b", client)])
    lab.until(lambda: lab.switch.dns.asked.count("a-0.svc") > 2, 45, "nobody asks")
    lab.switch.dns.hide("a-0.svc", 0.0)
    assert lab.wait(60, "b") == "complete"
    assert lab.pods[1].log == "b'hello' True\n"


@root
def test_too_much_memory_kills_the_pod(lab: Lab) -> None:
    lab.apply([job("a", "x = bytearray(200 << 20); print(len(x))", memory="100Mi", backoff_limit=0)])
    assert lab.wait(60, "a") == "BackoffLimitExceeded"
    pod = lab.pods[0]
    assert pod.exit_code == 137 and pod.log == "" and pod.cgroup.oom_kills() >= 1


@root
def test_dev_shm_counts_as_memory_and_has_its_size(lab: Lab) -> None:
    script = "open('/dev/shm/x', 'wb').write(b'x' * (9 << 20))"
    lab.apply([job("a", script, backoff_limit=0)])
    assert lab.wait(60, "a") == "BackoffLimitExceeded"
    assert "No space left on device" in lab.pods[0].log


@root
@pytest.mark.parametrize(
    ("code", "result", "lives"),
    [(83, "PodFailurePolicy", 1), (2, "PodFailurePolicy", 1), (1, "BackoffLimitExceeded", 3)],
)
def test_exit_codes_decide(lab: Lab, code: int, result: str, lives: int) -> None:
    lab.apply([job("a", f"raise SystemExit({code})", backoff_limit=2)])
    assert lab.wait(60, "a") == result
    assert len(lab.pods) == lives


@root
def test_preempted_pods_use_up_nothing(lab: Lab) -> None:
    script = (
        "import os; n = len(os.listdir('/mnt')); open(f'/mnt/{n}', 'w').close(); raise SystemExit(82 if n < 3 else 0)"
    )
    lab.apply([job("a", script, backoff_limit=0)])
    assert lab.wait(60, "a") == "complete"
    assert [pod.exit_code for pod in lab.pods] == [82, 82, 82, 0]
    starts = [event.at for event in lab.events if event.what == "started"]
    ends = [event.at for event in lab.events if event.what.startswith("ended")]
    waits = [start - end for start, end in zip(starts[1:], ends, strict=False)]
    assert waits == sorted(waits), "10, 20, 40 seconds, shortened"


@root
def test_the_kubelet_restarts_at_once_and_then_ever_later(lab: Lab) -> None:
    thing = job("a", "raise SystemExit(1)", backoff_limit=3)
    thing["spec"]["template"]["spec"]["restartPolicy"] = "OnFailure"
    del thing["spec"]["podFailurePolicy"]  # Kubernetes allows it only with Never
    lab.apply([thing])
    assert lab.wait(60, "a") == "BackoffLimitExceeded"
    starts = [event.at for event in lab.events if event.what == "started"]
    ends = [event.at for event in lab.events if event.what.startswith("ended")]
    _at_once, second, third = (start - end for start, end in zip(starts[1:], ends, strict=False))
    assert second >= 10 * SCALE and third >= 20 * SCALE, "0, 10, 20 seconds, shortened"


@root
def test_a_drained_pod_gets_its_grace_and_is_replaced_uncounted(lab: Lab) -> None:
    script = (
        "import os, signal, time, sys\n"
        "if os.path.exists('/mnt/saved'): sys.exit(0)\n"
        "def stop(*_): time.sleep(0.3); open('/mnt/saved', 'w').close(); print('saved'); sys.exit(7)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "print('ready')\n"
        "while True: time.sleep(1)\n"
    )
    lab.apply([job("a", script, backoff_limit=0)])
    pod = lab.wait_running("a-0")
    lab.until(lambda: "ready" in pod.log, 45, "not ready")
    lab.drain("a-0")
    assert lab.wait(60, "a") == "complete"
    assert pod.log == "ready\nsaved\n" and pod.exit_code == 7


@root
def test_who_ignores_sigterm_is_killed_after_the_grace(lab: Lab) -> None:
    script = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready'); time.sleep(60)"
    lab.apply([job("a", script, grace=1)])
    pod = lab.wait_running("a-0")
    lab.until(lambda: "ready" in pod.log, 45, "not ready")
    began = time.monotonic()
    lab.drain("a-0")
    lab.until(lambda: pod.exit_code is not None, 45, "not dead")
    assert pod.exit_code == 137 and time.monotonic() - began >= 1


@root
def test_a_lost_node_runs_on_cut_off_beside_its_successor(lab: Lab) -> None:
    script = (
        "import os, socket, time\n"
        "life = len([n for n in os.listdir('/mnt') if n.startswith('life')]); open(f'/mnt/life{life}', 'w').close()\n"
        "s = socket.create_server(('0.0.0.0', 7000)); s.settimeout(0.1)\n"
        "while not os.path.exists('/mnt/end'):\n"
        "    open(f'/mnt/beat{life}', 'w').write(str(time.monotonic()))\n"
        "    try: s.accept()[0].sendall(str(life).encode())\n"
        "    except OSError: pass\n"
    )
    asker = (
        "import os, socket, sys, time\n"
        "while not os.path.exists('/mnt/end'):\n"
        "    try: print(socket.create_connection(('a-0.svc', 7000), 0.3).recv(9).decode(), flush=True)\n"
        "    except OSError as e: print('-', flush=True)\n"
        "    time.sleep(0.1)\n"
    )
    lab.apply([job("a", script), job("b", asker)])
    old = lab.wait_running("a-0")
    asking = lab.wait_running("b-0")
    lab.until(lambda: "0" in asking.log.split(), 45, "not asked")
    lab.lose_node("a-0", replaced_after_s=0.5)
    lab.until(lambda: "1" in asking.log.split(), 45, "no successor")
    assert lab.pod("a-0").life == 1 and old.exit_code is None, "both run"
    beat = lab.folder / "shared" / "beat0"
    before = beat.read_text()
    lab.until(lambda: beat.read_text() not in ("", before), 30, "the old pod has stopped")
    words = asking.log.split()
    assert "0" not in words[words.index("1") :], "nobody reaches the old one"
    lab.heal(old)
    (lab.folder / "shared" / "end").touch()
    assert lab.wait(60, "a") == "complete"


@root
def test_a_killed_pod_dies_with_its_whole_tree(lab: Lab) -> None:
    script = "import subprocess, time; subprocess.Popen(['sleep', '86399']); print('ready'); time.sleep(60)"
    lab.apply([job("a", script)])
    pod = lab.wait_running("a-0")
    lab.until(lambda: "ready" in pod.log, 45, "not ready")
    assert len(pod.cgroup.pids()) >= 2
    lab.kill("a-0")
    lab.until(lambda: pod.exit_code is not None, 45, "not dead")
    assert pod.exit_code == 137 and pod.cgroup.pids() == []
    assert lab.wait_running("a-0").life == 1


# --- the DNS server alone: no root needed ---


def ask(server: tuple[str, int], name: str, kind: int = 1) -> tuple[int, str | None]:
    query = struct.pack("!HHHHHH", 7, 0x0100, 1, 0, 0, 0)
    query += b"".join(bytes([len(part)]) + part.encode() for part in name.split(".")) + b"\0"
    query += struct.pack("!HH", kind, 1)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.settimeout(2)
        client.sendto(query, server)
        answer = client.recv(512)
    ident, flags, _, answers = struct.unpack("!HHHH", answer[:8])
    assert ident == 7 and flags & 0x8000
    return flags & 0xF, socket.inet_ntoa(answer[-4:]) if answers else None


def test_names_come_go_and_hide() -> None:
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind(("127.0.0.1", 0))
    dns, where = DnsServer(server), server.getsockname()
    assert ask(where, "a.svc") == (3, None)
    dns.set("A.svc", "10.0.0.1")
    assert ask(where, "a.SVC") == (0, "10.0.0.1")
    assert ask(where, "a.svc", kind=28) == (0, None), "there, without an IPv6 address"
    dns.remove("a.svc", "10.0.0.2")
    assert ask(where, "a.svc") == (0, "10.0.0.1"), "a successor's record is not taken away"
    dns.hide("a.svc", 0.2)
    assert ask(where, "a.svc") == (3, None)
    time.sleep(0.25)
    assert ask(where, "a.svc") == (0, "10.0.0.1")
    dns.remove("a.svc", "10.0.0.1")
    assert ask(where, "a.svc") == (3, None)
    dns.close()


@pytest.mark.parametrize("packet", [b"", b"x", b"\0" * 12, b"\xff" * 40, struct.pack("!HHHHHH", 1, 0x8000, 1, 0, 0, 0)])
def test_what_is_no_question_gets_no_answer(packet: bytes) -> None:
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind(("127.0.0.1", 0))
    dns = DnsServer(server)
    assert dns.answer(packet) is None
    dns.close()


def test_on_cgroup_v2_pods_are_made_where_memory_is_handed_on(tmp_path: Path) -> None:
    own = tmp_path / "user.slice" / "session-1.scope"
    own.mkdir(parents=True)
    for folder, given in ((own, ""), (own.parent, "memory pids"), (tmp_path, "cpu memory")):
        (folder / "cgroup.subtree_control").write_text(f"{given}\n")
    assert nearest_parent(own, tmp_path) == own.parent
    (own.parent / "cgroup.subtree_control").write_text("pids\n")
    assert nearest_parent(own, tmp_path) == tmp_path
    (tmp_path / "cgroup.subtree_control").write_text("\n")
    with pytest.raises(LabError, match=r"has memory in its cgroup\.subtree_control"):
        nearest_parent(own, tmp_path)


def test_where_there_can_be_no_lab_one_line_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert re.fullmatch("the pod lab needs root", needs() or "")
