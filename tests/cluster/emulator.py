"""A small API server: real HTTP, objects in memory, and faults on demand. What it does is what the real one documents.

    with Emulator() as cluster:
        cluster.fail("POST", "/jobsets", status=503, times=2)
        api = cluster.api()

Create, get, list (label selectors, pages, continue tokens that expire), delete (owned pods go too), logs, pod proxy,
access reviews, dry runs. `fail` makes the next matching requests fail: by status, by silence (no answer), or after
the deed (the object is made, the answer is lost).
"""

from __future__ import annotations

import json
import re
import threading
import time
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from kubernetes import client

from ridethrough.cluster.api import Api

PATH = re.compile(
    r"/(?:api/(?P<core>v1)|apis/(?P<group>[^/]+/[^/]+))(?:/namespaces/(?P<namespace>[^/]+))?/(?P<plural>[^/]+)"
    r"(?:/(?P<name>[^/]+))?(?:/(?P<part>[^/]+))?(?P<rest>/.*)?"
)


@dataclass
class Fault:
    method: str
    path: str
    status: int | None
    times: int
    silent: bool
    after: bool
    headers: dict[str, str]


@dataclass
class Emulator:
    """State of the cluster. `objects` by (plural, namespace, name); `requests` in order, "METHOD /path"."""

    objects: dict[tuple[str, str, str], dict[str, Any]] = field(default_factory=dict)
    logs: dict[str, list[str]] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    groups: dict[str, list[str]] = field(default_factory=dict)
    denied: set[tuple[str, str]] = field(default_factory=set)
    version: tuple[str, str] = ("1", "31+")
    page: int = 500
    ready_after_gets: int = 0
    proxied: tuple[str, int] | None = None

    def __enter__(self) -> Emulator:
        self.lock = threading.RLock()
        self.closing = threading.Event()
        emulator = self

        class Handler(_Handler):
            cluster = emulator

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.closing.set()
        self.server.shutdown()
        self.server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def api(self, timeout_s: float = 0.5) -> Api:
        configuration = client.Configuration()
        configuration.host = self.url
        configuration.api_key = {"authorization": "Bearer secret-of-the-user"}
        return Api(client.ApiClient(configuration), timeout_s=timeout_s, sleep=lambda s: time.sleep(min(s, 0.02)))

    def fail(
        self,
        method: str,
        path: str,
        *,
        status: int | None = None,
        times: int = 1,
        silent: bool = False,
        after: bool = False,
        headers: dict[str, str] | None = None,
    ) -> None:
        self.faults.append(Fault(method, path, status, times, silent, after, headers or {}))

    def put(self, plural: str, thing: dict[str, Any], namespace: str = "default") -> None:
        self.objects[(plural, namespace, thing["metadata"]["name"])] = thing

    def kinds(self) -> list[str]:
        return [thing["kind"] for thing in self.objects.values()]

    def pod(self, name: str, component: str, phase: str = "Running", **more: Any) -> dict[str, Any]:
        """A pod of the job `llama`; `more`: index, exit_code, reason, disrupted, node."""
        labels = {"app.kubernetes.io/instance": "llama", "app.kubernetes.io/component": component}
        if "index" in more:
            labels["batch.kubernetes.io/job-completion-index"] = str(more["index"])
        state: dict[str, Any] = {"running": {}} if phase == "Running" else {}
        if "exit_code" in more:
            state = {"terminated": {"exitCode": more["exit_code"], "reason": more.get("reason", "Error")}}
        elif "reason" in more:
            state = {"waiting": {"reason": more["reason"]}}
        conditions = (
            [{"type": "DisruptionTarget", "status": "True", "reason": more["disrupted"]}] if "disrupted" in more else []
        )
        thing = {
            "kind": "Pod",
            "metadata": {"name": name, "labels": labels},
            "spec": {"nodeName": more.get("node")},
            "status": {
                "phase": phase,
                "conditions": conditions,
                "containerStatuses": [{"name": "main", "restartCount": 0, "state": state}],
            },
        }
        self.put("pods", thing)
        return thing


class _Handler(BaseHTTPRequestHandler):
    cluster: Emulator
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self._serve("GET")

    def do_POST(self) -> None:
        self._serve("POST")

    def do_DELETE(self) -> None:
        self._serve("DELETE")

    def _serve(self, method: str) -> None:
        cluster = self.cluster
        length = int(self.headers.get("Content-Length", "0"))
        body = json.loads(self.rfile.read(length)) if length else None
        parts = urlsplit(self.path)
        query = {key: values[-1] for key, values in parse_qs(parts.query).items()}
        with cluster.lock:
            cluster.requests.append(f"{method} {parts.path}")
            fault = next((f for f in cluster.faults if f.method == method and re.search(f.path, parts.path)), None)
            if fault is not None:
                fault.times -= 1
                if fault.times == 0:
                    cluster.faults.remove(fault)
        if self.headers.get("Authorization") != "Bearer secret-of-the-user":
            return self._answer(401, {"message": "Unauthorized"})
        if fault is not None and not fault.after:
            if fault.silent:
                cluster.closing.wait(3)
                self.close_connection = True
                return None
            return self._answer(fault.status or 500, {"message": f"fault {fault.status}"}, fault.headers)
        if fault is not None:
            self._act(method, parts.path, query, body, answer=False)
            self.close_connection = True
            self.connection.close()
            return None
        return self._act(method, parts.path, query, body)

    def _act(self, method: str, path: str, query: dict[str, str], body: Any, answer: bool = True) -> None:
        status, value = self._result(method, path, query, body)
        if answer and status:
            self._answer(status, value)

    def _result(self, method: str, path: str, query: dict[str, str], body: Any) -> tuple[int, Any]:
        cluster = self.cluster
        if path == "/version":
            return 200, {"major": cluster.version[0], "minor": cluster.version[1]}
        if path in cluster.groups:
            return 200, {"resources": [{"kind": kind} for kind in cluster.groups[path]]}
        match = PATH.fullmatch(path)
        if match is None:
            return 404, {"message": "the server could not find the requested resource"}
        plural, namespace, name = match["plural"], match["namespace"] or "", match["name"]
        if plural == "selfsubjectaccessreviews":
            wanted = body["spec"]["resourceAttributes"]
            resource = "/".join(filter(None, [wanted["resource"], wanted["subresource"]]))
            return 201, {"status": {"allowed": (resource, wanted["verb"]) not in cluster.denied}}
        if match["part"] == "log":
            self._log(name, query)
            return 0, None
        if match["part"] == "proxy":
            self._proxy(match["rest"] or "/")
            return 0, None
        with cluster.lock:
            key = (plural, namespace, name or "")
            if method == "GET" and name:
                return self._get(key)
            if method == "GET":
                return self._list(plural, namespace, query)
            if method == "DELETE":
                return self._delete(key)
            return self._create(plural, namespace, query, body)

    def _get(self, key: tuple[str, str, str]) -> tuple[int, Any]:
        found = self.cluster.objects.get(key)
        if found is None:
            return 404, {"message": f"{key[0]} {key[2]!r} not found"}
        if key[0] == "pods" and "collect" in key[2]:
            self.cluster.ready_after_gets -= 1
            if self.cluster.ready_after_gets < 0:
                found["status"] = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
        return 200, found

    def _list(self, plural: str, namespace: str, query: dict[str, str]) -> tuple[int, Any]:
        wanted = dict(part.split("=") for part in query.get("labelSelector", "").split(",") if part)
        items = [
            thing
            for (kind, place, _), thing in self.cluster.objects.items()
            if kind == plural
            and place == namespace
            and all((thing["metadata"].get("labels") or {}).get(k) == v for k, v in wanted.items())
        ]
        start = int(query.get("continue", "0"))
        page = items[start : start + self.cluster.page]
        following = start + self.cluster.page
        token = str(following) if following < len(items) else None
        return 200, {"items": page, "metadata": {"continue": token} if token else {}}

    def _delete(self, key: tuple[str, str, str]) -> tuple[int, Any]:
        if key not in self.cluster.objects:
            return 404, {"message": f"{key[0]} {key[2]!r} not found"}
        del self.cluster.objects[key]
        for other in [k for k, v in self.cluster.objects.items() if v.get("owner") == key[2]]:
            del self.cluster.objects[other]
        return 200, {"status": "Success"}

    def _create(self, plural: str, namespace: str, query: dict[str, str], body: Any) -> tuple[int, Any]:
        key = (plural, namespace, body["metadata"]["name"])
        if key in self.cluster.objects:
            return 409, {"message": f"{plural} {key[2]!r} already exists"}
        if query.get("dryRun") != "All":
            self.cluster.objects[key] = body
        return 201, body

    def _log(self, name: str, query: dict[str, str]) -> None:
        lines = self.cluster.logs.get(name, [])
        if "tailLines" in query:
            lines = lines[-int(query["tailLines"]) :]
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write("".join(f"{line}\n" for line in lines).encode())
        self.close_connection = True

    def _proxy(self, rest: str) -> None:
        assert self.cluster.proxied is not None
        connection = HTTPConnection(*self.cluster.proxied, timeout=5)
        query = urlsplit(self.path).query
        connection.request("GET", rest + (f"?{query}" if query else ""))
        response = connection.getresponse()
        data = response.read()
        self.send_response(response.status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        cut = getattr(self.cluster, "cut_after", None)
        if cut is not None and "/file" in rest and len(data) > cut:
            self.wfile.write(data[:cut])
            del self.cluster.cut_after  # type: ignore[attr-defined]
            self.close_connection = True
        else:
            self.wfile.write(data)
        connection.close()

    def _answer(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        for key, word in (headers or {}).items():
            self.send_header(key, word)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""
