"""The mechanisms under comparison: how each is started, and what happens when a process of it ends.

A mechanism is one class with `start` and `ended`. All run the same workload; what a launcher does by itself is left to
it, what nobody does (a job that is submitted again, a kubelet) is done here.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ridethrough.bench.place import Place, clean_environment, free_port
from ridethrough.cluster.kubelet import ContainerBackoff
from ridethrough.cluster.lab.network import LabError, Switch

_FILES = ("workload.py", "workload_entries.py")
_FINISHED_LIMIT_S = 3.0


@dataclass(frozen=True)
class WorkloadSize:
    """The job of all mechanisms. Defaults: 20 M parameters, 240 MB of state."""

    world_size: int = 4
    steps: int = 10
    save_every: int = 4
    dim: int = 512
    layers: int = 5
    timeout_s: float = 10.0
    # A pod waits and times out so many times faster than in a cluster. Its processes do not start faster: above 1 they
    # may miss each other as they would not in a cluster, so that is for trying the bench, not for figures.
    clock_factor: float = 1.0
    # The rank to be struck stands still so long before: long enough, and its peers are in their collective by then.
    straggle_s: float = 0.0
    own_checkpoint: bool = True  # ridethrough with its Checkpointer; else torch.save like the others


@dataclass
class Mechanism:
    """One run of a job without help: what ends has ended. Subclasses do more."""

    place: Place
    size: WorkloadSize
    python: str
    name: str
    fault: dict[str, Any] | None
    container_restarts: int = 0
    network: str = "loopback"
    _finished_s: dict[str, float] = field(default_factory=dict)

    def prepare(self) -> None:
        """Writes the workload and its settings into the place."""
        for file in _FILES:
            shutil.copyfile(Path(__file__).with_name(file), self.place.folder / file)
        settings = {"mechanism": self.name, "out": str(self.place.folder), **asdict(self.size), "fault": self.fault}
        settings["timeout_s"] = self.timeout_s
        (self.place.folder / "settings.json").write_text(json.dumps(settings), encoding="utf-8")

    @property
    def timeout_s(self) -> float:
        return self.size.timeout_s

    @property
    def script(self) -> list[str]:
        return [str(self.place.folder / "workload.py"), str(self.place.folder / "settings.json")]

    def env(self, **more: str) -> dict[str, str]:
        """`clean_environment`, with the mechanism's own programs first."""
        path = f"{Path(self.python).parent}:{os.environ.get('PATH', '')}"
        return clean_environment(PATH=path, TORCH_CPP_LOG_LEVEL="ERROR", **more)

    def start(self) -> None:
        """Starts the job."""
        raise NotImplementedError

    def ended(self, name: str, code: int) -> None:
        """A process that `start` began is gone."""

    def poll(self) -> bool:
        """True when the job is over. Called all the time."""
        live = 0
        for name, process in list(self.place.processes.items()):
            started_again = process is not self.place.processes[name]
            code = None if started_again else process.poll()
            if code is None:
                live += 1
            elif name not in self._finished_s:
                self._finished_s[name] = time.monotonic()
                self.ended(name, code)
                live += name not in self._finished_s
        return live == 0

    def again(self, name: str) -> None:
        """The process of this name is to be looked at anew: it was started again."""
        self._finished_s.pop(name, None)

    def failed(self) -> str | None:
        """Why the job did not end well; None if it did."""
        codes = {name: process.poll() for name, process in self.place.processes.items()}
        bad = {name: code for name, code in codes.items() if code}
        return f"exit codes {bad}" if bad else None


class Torchrun(Mechanism):
    def start(self) -> None:
        env = self.env(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")  # else its restarts read the addresses of before
        options = ["--nproc-per-node", str(self.size.world_size), "--max-restarts", "3", "--monitor-interval", "0.1"]
        self.place.start(
            [self.python, "-m", "torch.distributed.run", "--standalone", *options, *self.script], "agent", env
        )


class FtLauncher(Mechanism):
    def start(self) -> None:
        env = self.env(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
        options = ["--nproc-per-node", str(self.size.world_size), "--max-restarts", "3", "--monitor-interval", "0.1"]
        options += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
        options += ["--ft-workload-check-interval", "1", "--ft-rank-heartbeat-timeout", "8"]
        options += ["--ft-initial-rank-heartbeat-timeout", "60", "--workers-stop-timeout", "5"]
        launcher = str(Path(self.python).with_name("ft_launcher"))
        self.place.start([launcher, *options, *self.script], "agent", env)


class Ridethrough(Mechanism):
    """`ridethrough run` with its defaults."""

    policy: Mapping[str, Any] = {}

    def start(self) -> None:
        options = ["--nproc-per-node", str(self.size.world_size), "--runs", str(self.place.folder / "runs")]
        if self.policy:
            path = self.place.folder / "policy.json"
            path.write_text(json.dumps(dict(self.policy)), encoding="utf-8")
            options += ["--policy", str(path)]
        command = [self.python, "-m", "ridethrough", "run", *options, "--run-id", "bench", *self.script]
        self.place.start(command, "agent", self.env())


class RidethroughProcess(Ridethrough):
    """The same, but a guilty rank always gets a new process."""

    policy = {"replace_process_after": 1}


class RidethroughNode(Mechanism):
    """A coordinator, two nodes that train and one that stands by; the fault ends a whole node. Each is in a network
    namespace of its own where this user may make them (root), else all are on the loopback."""

    def start(self) -> None:
        token = self.place.folder / "token"
        token.write_text(secrets.token_hex(32), encoding="utf-8")
        hosts = self._hosts("coordinator", "a", "b", "standby")
        endpoint = f"{hosts['coordinator'][1]}:{free_port()}"
        shared = ["--nnodes", "2", "--nproc-per-node", str(self.size.world_size // 2), "--token-file", str(token)]
        shared += ["--runs", str(self.place.folder / "runs"), "--run-id", "bench"]
        ridethrough = [self.python, "-m", "ridethrough"]
        command = [*hosts["coordinator"][0], *ridethrough, "coordinator", "--bind", endpoint, *shared]
        self.place.start(command, "coordinator", self.env())
        for node in ("a", "b", "standby"):
            if node == "standby":
                time.sleep(1.0)  # after those that are to train
            command = [*hosts[node][0], *ridethrough, "run", "--join", "--rdzv-endpoint", endpoint]
            env = self.env(BENCH_NODE=f"{self.place.mark}-{node}")
            env["GLOO_SOCKET_IFNAME"] = "eth0" if self.network == "namespaces" else "lo"
            self.place.start([*command, *shared, *self.script], node, env)

    def _hosts(self, *names: str) -> dict[str, tuple[list[str], str]]:
        """Of each host what goes before its commands, and its address."""
        tag = f"rt{self.place.mark[:6]}"
        try:
            switch = Switch(tag)
        except (LabError, OSError):  # not root, or no `ip`
            return {name: ([], "127.0.0.1") for name in names}
        self.network = "namespaces"
        self.place.cleanup.callback(switch.close)
        hosts = {}
        for name in names:
            space = f"{tag}-{name}"
            address, _ = switch.connect(space)
            self.place.cleanup.callback(switch.remove, space)
            hosts[name] = (["ip", "netns", "exec", space], address)
        return hosts

    def failed(self) -> str | None:
        code = self.place.processes["coordinator"].poll()
        return f"the coordinator's exit code is {code}" if code else None


class Ranks(Mechanism):
    """One process per rank, started here. The store is rank 0's, as in a script without launcher."""

    def start(self) -> None:
        self.port = free_port(3)
        for rank in range(self.size.world_size):
            self.start_rank(rank)

    def start_rank(self, rank: int) -> None:
        world = str(self.size.world_size)
        env = self.env(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=world)
        env.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(self.port))
        self.place.start([self.python, *self.script], f"rank{rank}", env)
        self.again(f"rank{rank}")


class NvrxInProcess(Ranks):
    def poll(self) -> bool:
        """Also over when only ranks are left that hang for ever."""
        over = super().poll()
        done = [at for name, at in self._finished_s.items() if self.place.processes[name].poll() == 0]
        if len(done) >= self.size.world_size - 1 and time.monotonic() > max(done) + _FINISHED_LIMIT_S:
            return True
        return over

    def failed(self) -> str | None:
        codes = [process.poll() for process in self.place.processes.values()]
        return f"exit codes {codes}" if any(codes) or None in codes else None


class RestartJob(Ranks):
    """The first failure ends everything, and the job is submitted again at once."""

    def ended(self, name: str, code: int) -> None:
        if code == 0 or self.container_restarts >= 3:
            return
        self.container_restarts += 1
        for rank in range(self.size.world_size):
            self.place.kill(f"rank{rank}")
        self.start()


class KubernetesPods(Ranks):
    """A pod per rank. Each container is started again by the kubelet's rules, whatever the others do."""

    def start(self) -> None:
        self._backoff = {f"rank{rank}": ContainerBackoff() for rank in range(self.size.world_size)}
        self._begun_s: dict[str, float] = {}
        self._due_s: dict[str, float] = {}
        super().start()

    @property
    def timeout_s(self) -> float:
        return 60.0 / self.size.clock_factor  # gloo's limit in the published experiment

    def start_rank(self, rank: int) -> None:
        self._begun_s[f"rank{rank}"] = time.monotonic()
        super().start_rank(rank)

    def ended(self, name: str, code: int) -> None:
        if code == 0:
            return
        now, factor = time.monotonic(), self.size.clock_factor
        wait_s, self._backoff[name] = self._backoff[name].ended((now - self._begun_s[name]) * factor)
        self._due_s[name] = now + wait_s / factor
        self.container_restarts += 1

    def poll(self) -> bool:
        over = super().poll()
        for name, due_s in list(self._due_s.items()):
            if time.monotonic() >= due_s:
                del self._due_s[name]
                self.start_rank(int(name.removeprefix("rank")))
                over = False
        return over and not self._due_s


class Torchft(Ranks):
    """Replica groups of one rank; the dead one is started again at once."""

    def start(self) -> None:
        port = free_port()
        self.lighthouse = f"http://127.0.0.1:{port}"
        command = [str(Path(self.python).with_name("torchft_lighthouse")), "--bind", f"[::]:{port}"]
        command += ["--min_replicas", "1", "--join_timeout_ms", "2000", "--quorum_tick_ms", "50"]
        self.place.start([*command, "--heartbeat_timeout_ms", "2000"], "lighthouse", self.env())
        time.sleep(0.5)
        super().start()

    def env(self, **more: str) -> dict[str, str]:
        return {**super().env(**more), "TORCHFT_LIGHTHOUSE": getattr(self, "lighthouse", "")}

    def ended(self, name: str, code: int) -> None:
        if name != "lighthouse" and code != 0 and self.container_restarts < 3:
            self.container_restarts += 1
            self.start_rank(int(name.removeprefix("rank")))

    def poll(self) -> bool:
        super().poll()
        ranks = [p for name, p in self.place.processes.items() if name != "lighthouse"]
        done = [name for name in self._finished_s if self.place.processes[name].poll() == 0]
        last = max((self._finished_s[name] for name in done), default=time.monotonic())
        late = len(done) >= len(ranks) - 1 and time.monotonic() > last + _FINISHED_LIMIT_S
        return late or all(process.poll() is not None for process in ranks)

    def failed(self) -> str | None:
        codes = [process.poll() for name, process in self.place.processes.items() if name != "lighthouse"]
        return f"exit codes {codes}" if any(code != 0 for code in codes) else None


@dataclass(frozen=True)
class Row:
    """A mechanism's class, the environment that it needs (a name for `--peer-env`; None: this one), how results
    of it may be compared (`family`: equal ends are expected within one), and one line for people."""

    make: type[Mechanism]
    env: str | None
    family: str
    about: str


MECHANISMS: dict[str, Row] = {
    "ridethrough": Row(Ridethrough, None, "ddp", "ridethrough run: the rung that its policy picks"),
    "ridethrough-process": Row(RidethroughProcess, None, "ddp", "ridethrough run, the guilty process replaced"),
    "ridethrough-node": Row(RidethroughNode, None, "ddp", "ridethrough run, a node of two lost, one stands by"),
    "torchrun": Row(Torchrun, "torchrun", "ddp", "torchrun --max-restarts 3"),
    "nvrx-inprocess": Row(NvrxInProcess, "nvrx", "ddp", "NVRx inprocess.Wrapper, stock"),
    "nvrx-inprocess-mended": Row(NvrxInProcess, "nvrx", "ddp", "NVRx inprocess.Wrapper, its abort also shuts gloo"),
    "nvrx-launcher": Row(FtLauncher, "nvrx", "ddp", "NVRx ft_launcher --max-restarts 3"),
    "torchft": Row(Torchft, "torchft", "torchft", "torchft: replicas of one rank, the dead one started again at once"),
    "restart-job": Row(RestartJob, None, "ddp", "all ended and started anew at the first failure"),
    "kubernetes-pods": Row(KubernetesPods, None, "ddp", "a pod per rank, restarted by the kubelet's rules"),
}


def python_of(env: str | None, peers: Mapping[str, Path]) -> str:
    """The interpreter for an environment: the given one's, else this process's for torchrun.

    Raises FileNotFoundError with the remedy.
    """
    if env is None or (env == "torchrun" and env not in peers):
        return sys.executable
    if env not in peers:
        raise FileNotFoundError(f"no environment for {env}: give --peer-env {env}=PATH (`make peers` makes them)")
    path = peers[env] / "bin" / "python"
    if not path.exists():
        raise FileNotFoundError(f"--peer-env {env}={peers[env]}: there is no {path}")
    return str(path)
