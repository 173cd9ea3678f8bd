"""Logs of a job's pods as one stream, through replacements; of one rank by the prefix of its lines."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

from ridethrough.cluster import naming
from ridethrough.cluster.api import Api, ApiError
from ridethrough.cluster.status import JobStatus, PodStatus, job_status

_POLL_S = 2.0
_WAITING = 10_000
"""Lines held for a slow reader; then the readers of pods wait too."""


def stream(
    api: Api,
    name: str,
    namespace: str,
    *,
    follow: bool,
    rank: int | None = None,
    component: str | None = None,
    tail: int | None = None,
    since_s: int | None = None,
) -> Iterator[tuple[str, str]]:
    """(pod, line) of all pods of a job, or of one component, or the lines of one rank, wherever it runs.

    With `follow` pods that come later join, and the stream ends with the job. Without it each pod's log is read once.
    Raises ApiError if there is no such job, or its logs may not be read. One thread per pod reads; the caller's joins.
    """
    lines: queue.Queue[tuple[str, str] | ApiError | None] = queue.Queue(_WAITING)
    reading: dict[str, threading.Thread] = {}
    prefix = None if rank is None else f"[rank{rank}]"
    wanted = naming.TRAINER if rank is not None else component

    def read(pod: str) -> None:
        try:
            for raw in api.log(namespace, pod, follow=follow, since_s=since_s, tail=tail):
                line = raw.decode(errors="replace")
                if prefix is None or line.startswith(prefix):
                    lines.put((pod, line))
        except ApiError as error:
            if error.kind == "not_found":  # deleted meanwhile
                return
            lines.put(error)
        except Exception as error:  # a connection that broke: the thread's end must not be silent
            lines.put((pod, f"(log cut off: {type(error).__name__})"))
        finally:
            lines.put(None)

    running = 0
    while True:
        status = job_status(api, name, namespace)
        if status.phase == "missing" and not status.pods:
            raise ApiError("not_found", f"no job {name} in namespace {namespace}")
        for pod in _readable(status, wanted):
            if pod.name not in reading:
                thread = threading.Thread(target=read, args=(pod.name,), name=f"log-{pod.name}", daemon=True)
                reading[pod.name] = thread
                thread.start()
                running += 1
        over = not follow or status.phase in ("succeeded", "failed", "missing")
        while running or not over:
            try:
                item = lines.get(timeout=None if over else _POLL_S)
            except queue.Empty:
                break  # look for new pods
            if item is None:
                running -= 1
                if not over and not running:
                    break
            elif isinstance(item, ApiError):
                raise item
            else:
                yield item
        if over and not running:
            return


def _readable(status: JobStatus, component: str | None) -> list[PodStatus]:
    return [
        pod
        for pod in status.pods
        if (component is None or pod.component == component) and (pod.phase != "Pending" or pod.exit_code is not None)
    ]
