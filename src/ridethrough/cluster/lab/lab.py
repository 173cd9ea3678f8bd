"""The lab's cluster: keeps Jobs and JobSets by their controllers' rules, and does to pods what clusters do.

with Lab(folder) as lab:
    lab.apply(render(spec, token=...))
    lab.wait_running("train-trainer-0-0")
    lab.kill("train-trainer-0-1")             # replaced after the Job controller's back-off
    lab.lose_node("train-trainer-0-0", replaced_after_s=5)   # cut off, still running, and a successor
    lab.wait()
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ridethrough.cluster.kubelet import ContainerBackoff, JobBackoff
from ridethrough.cluster.lab.cgroup import MemoryCgroup, pods_cgroup
from ridethrough.cluster.lab.network import LabError, Switch, ip
from ridethrough.cluster.lab.pod import Pod, Volumes, private_etc, start
from ridethrough.cluster.objects import Object
from ridethrough.cluster.workloads import Workload, workloads

_TICK_S = 0.02
_NAME = "rtlab"


def needs() -> str | None:
    """Why there can be no lab on this machine, or None."""
    if os.geteuid() != 0:
        return "the pod lab needs root"
    if shutil.which("ip") is None:
        return "the pod lab needs `ip`: apt-get install iproute2"
    probe = f"rtp{secrets.token_hex(2)}"
    try:
        Switch(probe).close()
        MemoryCgroup(probe, 64 << 20).remove()
    except LabError as error:
        return f"the pod lab needs network namespaces and a memory cgroup ({error})"
    return None


@dataclass
class _Index:
    """One completion index of a Job: its pod now, and when the next is due. A successor starts on the same node, unless
    that is lost or drained."""

    pod: Pod | None = None
    node: str = ""
    due: float = 0.0
    backoff: ContainerBackoff = field(default_factory=ContainerBackoff)
    lives: int = 0
    done: bool = False


@dataclass
class JobState:
    """One Job. `result` is None while it runs, then "complete" or the reason of its failure."""

    load: Workload
    indices: list[_Index]
    backoff: JobBackoff = field(default_factory=JobBackoff)
    failures: int = 0
    result: str | None = None


@dataclass(frozen=True)
class Event:
    """What happened, for measurements: `at` is time.monotonic()."""

    at: float
    what: str
    pod: str


class Lab:
    """One thread keeps the Jobs; methods may be called from the thread that made the lab."""

    def __init__(self, folder: Path, *, env: dict[str, str] | None = None, wait_scale: float = 1.0) -> None:
        """`folder` holds the shared volume and the pods' logs; `env` is added to every container's environment.
        `wait_scale` shortens the controllers' waits, for tests of the lab; measurements leave it alone."""
        why = needs()
        if why is not None:
            raise LabError(why)
        _sweep()
        self.name = f"{_NAME}{os.getpid()}-{secrets.token_hex(2)}"
        self.folder = folder
        self.events: list[Event] = []
        self.jobs: dict[str, JobState] = {}
        self._env = dict(env or {})
        self._wait_scale = wait_scale
        self.pods: list[Pod] = []
        self._lost: list[Pod] = []
        self._num_nodes = 0
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._failed: BaseException | None = None
        (folder / "shared").mkdir(parents=True, exist_ok=True)
        self.switch = Switch(self.name)
        self._volumes = Volumes(folder / "shared", {}, private_etc(folder, self.switch.dns_address))
        self._thread = threading.Thread(target=self._keep, name="lab-keeper")
        self._thread.start()

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- what a user does ---

    def apply(self, rendered: list[Object]) -> None:
        """Take objects as a cluster would; kinds that the lab has no use for are ignored."""
        with self._lock:
            for thing in rendered:
                if thing["kind"] in ("ConfigMap", "Secret"):
                    self._volumes.named[(thing["kind"], thing["metadata"]["name"])] = self._files(thing)
            for load in workloads(rendered):
                if load.job is None:
                    raise LabError(f"{load.where}: the lab keeps Jobs and JobSets only")
                self.jobs[load.base] = JobState(load, [_Index() for _ in range(load.num_pods)])

    def wait(self, timeout_s: float, job: str | None = None) -> str:
        """The result of a Job, by the end of its name, else of the one whose pods join a coordinator."""
        state = self._job(job)
        self.until(lambda: state.result is not None, timeout_s, f"{state.load.base} has not ended")
        assert state.result is not None
        return state.result

    def wait_running(self, host: str, timeout_s: float = 60.0) -> Pod:
        """The pod with this host name, once it runs."""
        self.until(lambda: self._find(host) is not None, timeout_s, f"{host} does not run")
        return self.pod(host)

    def pod(self, host: str) -> Pod:
        """The pod that has this host name now. Raises LabError."""
        found = self._find(host)
        if found is None:
            raise LabError(f"no pod {host} is running")
        return found

    def is_current(self, pod: Pod) -> bool:
        """Whether a Job counts it as its own: not ended, and not given up with its node."""
        with self._lock:
            return any(index.pod is pod for state in self.jobs.values() for index in state.indices)

    def log(self) -> str:
        """The output of all pods, in the order of their starts."""
        with self._lock:
            return "\n".join(f"== {pod.name}\n{pod.log}" for pod in self.pods)

    # --- what befalls a cluster ---

    def kill(self, host: str) -> Pod:
        """All processes of a pod die at once."""
        pod = self.pod(host)
        self._event("killed", pod)
        pod.kill()
        return pod

    def drain(self, host: str) -> Pod:
        """Its node is drained: SIGTERM, grace, and the end counts as a disruption."""
        with self._lock:
            pod = self.pod(host)
            pod.disrupted = True
            self._place(pod).node = ""
            self._event("drained", pod)
            pod.terminate()
            return pod

    def lose_node(self, host: str, *, replaced_after_s: float) -> Pod:
        """Its node falls silent: the pod is cut off and goes on running. After a while Kubernetes gives it up and makes
        a successor of the same name (that is decided from outside, so the time is the caller's)."""
        with self._lock:
            pod = self.pod(host)
            index = self._place(pod)
            self.switch.pull(pod.cable)
            self._lost.append(pod)
            index.pod, index.node = None, ""
            index.due = time.monotonic() + replaced_after_s
            self._event("lost", pod)
            return pod

    def heal(self, pod: Pod) -> None:
        """A lost node is heard again, with its old pod on it."""
        self._event("healed", pod)
        self.switch.plug(pod.cable)

    # --- the controllers ---

    def _keep(self) -> None:
        try:
            while not self._stop.wait(_TICK_S):
                with self._lock:
                    for state in self.jobs.values():
                        self._keep_job(state)
                    self._keep_set()
                    for pod in self._lost:  # no Job counts it any more, but its kubelet ends it
                        pod.poll()
        except BaseException as error:  # told to whoever waits
            self._failed = error

    def _keep_job(self, state: JobState) -> None:
        for number, index in enumerate(state.indices):
            if index.pod is not None and index.pod.poll() is not None:
                self._ended(state, index, index.pod)
            if index.pod is None and not index.done and state.result is None and time.monotonic() >= index.due:
                index.pod = self._start(state, number, index)
        if state.result is None and all(index.done for index in state.indices):
            state.result = "complete"

    def _ended(self, state: JobState, index: _Index, pod: Pod) -> None:
        index.pod = None
        self.switch.dns.remove(_dns_name(pod), pod.address)
        self._event(f"ended {pod.exit_code}", pod)
        if pod.exit_code == 0 and not pod.disrupted:
            index.done = True
            state.backoff = state.backoff.succeeded()
            return
        action = _action(state.load, pod)
        if action == "FailJob":
            state.result = "PodFailurePolicy"
            return
        if action == "Count":
            state.failures += 1
            if state.failures > (state.load.job or {}).get("backoffLimit", 6):
                state.result = "BackoffLimitExceeded"
                return
        ended = pod.ended or time.monotonic()
        if state.load.pod.get("restartPolicy") == "OnFailure" and not pod.disrupted:  # the kubelet's, in the same pod
            wait_s, index.backoff = index.backoff.ended(ended - pod.started)
        else:
            index.backoff = ContainerBackoff()
            wait_s, state.backoff = state.backoff.failed()
        index.due = ended + wait_s * self._wait_scale

    def _keep_set(self) -> None:
        """When training has ended, well or not, what is left is ended too, as a JobSet does."""
        results = [state.result for state in self.jobs.values() if state.load.option("--rdzv-endpoint")]
        failed = any(state.result not in (None, "complete") for state in self.jobs.values())
        if not failed and (not results or any(result is None for result in results)):
            return
        for state in self.jobs.values():
            if state.result is None:
                state.result = "ended with the set"
            for index in state.indices:
                if index.pod is not None and not index.pod.ending:
                    index.pod.terminate()

    def _start(self, state: JobState, number: int, index: _Index) -> Pod:
        if not index.node:
            self._num_nodes += 1
            index.node = f"node-{self._num_nodes}"
        pod = start(
            state.load,
            number,
            index.lives,
            switch=self.switch,
            volumes=self._volumes,
            folder=self.folder / "pods" / f"{state.load.base}-{number}-{index.lives}",
            lab=self.name,
            number=len(self.pods),
            node=index.node,
            env=self._env,
        )
        index.lives += 1
        self.pods.append(pod)
        self.switch.dns.set(_dns_name(pod), pod.address)
        self._event("started", pod)
        return pod

    # --- ends and odds ---

    def close(self) -> None:
        """Nothing is left running, no namespace and no cgroup; logs and the volume stay."""
        self._stop.set()
        self._thread.join()
        for pod in self.pods:
            with contextlib.suppress(LabError):
                pod.remove(self.switch)
        self.switch.close()

    def _files(self, thing: Object) -> Path:
        path: Path = self.folder / thing["kind"] / thing["metadata"]["name"]
        path.mkdir(parents=True, exist_ok=True)
        for key, value in {**(thing.get("data") or {}), **(thing.get("stringData") or {})}.items():
            (path / key).write_text(value)
        for load_path in ("token", "job"):  # mount points of pods, in the private /etc
            (self._volumes.etc / "ridethrough" / load_path).mkdir(parents=True, exist_ok=True)
        return path

    def _find(self, host: str) -> Pod | None:
        with self._lock:
            for state in self.jobs.values():
                for index in state.indices:
                    if index.pod is not None and index.pod.host == host and index.pod.exit_code is None:
                        return index.pod
        return None

    def _place(self, pod: Pod) -> _Index:
        for state in self.jobs.values():
            for index in state.indices:
                if index.pod is pod:
                    return index
        raise LabError(f"{pod.name} is no pod of a Job any more")

    def _job(self, name: str | None) -> JobState:
        for base, state in self.jobs.items():
            if (name is None and state.load.option("--rdzv-endpoint")) or (name and base.endswith(name)):
                return state
        raise LabError(f"no job {name or 'that trains'}: {', '.join(self.jobs)}")

    def until(self, good: Callable[[], bool], timeout_s: float, what: str) -> None:
        end = time.monotonic() + timeout_s
        while not good():
            if self._failed is not None:
                raise LabError(f"the lab broke: {self._failed}") from self._failed
            results = {base: state.result for base, state in self.jobs.items()}
            if time.monotonic() >= end or (results and None not in results.values() and not good()):
                raise LabError(f"{what} after {timeout_s:g} s at most; results {results}\n{self.log()[-4000:]}")
            time.sleep(_TICK_S)

    def _event(self, what: str, pod: Pod) -> None:
        self.events.append(Event(time.monotonic(), what, pod.name))


def _sweep() -> None:
    """Removes what a lab that was killed has left: namespaces and, by now empty, cgroups."""
    stale = re.compile(rf"{_NAME}(\d+)-")
    spaces = Path("/var/run/netns")
    for path in [*(spaces.iterdir() if spaces.is_dir() else []), *pods_cgroup().iterdir()]:
        match = stale.match(path.name)
        if match is None or Path(f"/proc/{match[1]}").exists():
            continue
        with contextlib.suppress(LabError, OSError):
            if path.parent == spaces:
                ip("netns", "del", path.name)
            else:
                path.rmdir()


def _dns_name(pod: Pod) -> str:
    return f"{pod.host}.{pod.load.subdomain}" if pod.load.subdomain else pod.host


def _action(load: Workload, pod: Pod) -> str:
    """What the failure policy says about a pod that ended: the first rule that matches, else Count."""
    for rule in ((load.job or {}).get("podFailurePolicy") or {}).get("rules") or []:
        conditions = [condition["type"] for condition in rule.get("onPodConditions") or []]
        if pod.disrupted and "DisruptionTarget" in conditions:
            return str(rule["action"])
        codes = rule.get("onExitCodes")
        if codes and (pod.exit_code in codes["values"]) == (codes["operator"] == "In"):
            return str(rule["action"])
    return "Count"
