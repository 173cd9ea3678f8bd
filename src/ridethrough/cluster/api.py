"""The cluster's API over the official client's configuration: every error told, every retry bounded.

Which cluster and who we are (kubeconfig, EKS's exec plug-in, a pod's own account) is the client's business; the objects
are plain dicts, since half of them are custom resources. Needs the extra k8s.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, NoReturn
from urllib.parse import urlencode

from ridethrough.cluster.objects import Object
from ridethrough.cluster.schemas import identity

Kind = Literal[
    "forbidden",
    "unauthorized",
    "conflict",
    "not_found",
    "gone",
    "invalid",
    "timeout",
    "unreachable",
    "server",
    "no_cluster",
]

_TRIES = 5
_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 8.0
_PAGE = 500

PLURALS = {
    "PriorityClass": "priorityclasses",
    "NetworkPolicy": "networkpolicies",
    "StorageClass": "storageclasses",
}
CLUSTER_SCOPED = frozenset(
    {
        "CustomResourceDefinition",
        "Node",
        "PersistentVolume",
        "PriorityClass",
        "SelfSubjectAccessReview",
        "StorageClass",
    }
)


class ApiError(Exception):
    """A request that failed for good. The message is one line with the remedy."""

    def __init__(self, kind: Kind, message: str) -> None:
        super().__init__(message)
        self.kind: Kind = kind


@dataclass(frozen=True)
class Address:
    """Of a kind of object in the API."""

    api_version: str
    kind: str
    namespace: str

    def path(self, name: str | None = None, part: str | None = None) -> str:
        root = "/api/" if "/" not in self.api_version else "/apis/"
        place = "" if self.kind in CLUSTER_SCOPED else f"/namespaces/{self.namespace}"
        plural = PLURALS.get(self.kind, f"{self.kind.lower()}s")
        return "/".join(filter(None, [f"{root}{self.api_version}{place}/{plural}", name, part]))


def address(thing: Object) -> Address:
    """Where an object lives."""
    metadata = thing["metadata"]
    return Address(thing["apiVersion"], thing["kind"], metadata.get("namespace", "default"))


class Api:
    """Requests to one cluster. Several threads may read logs at once; all else is for one thread."""

    def __init__(self, client: Any, *, timeout_s: float = 15.0, sleep: Callable[[float], None] = time.sleep) -> None:
        """`client` is a `kubernetes.client.ApiClient`; `sleep` is for tests."""
        self._configuration = client.configuration
        self._pool = client.rest_client.pool_manager
        self._timeout_s = timeout_s
        self.sleep = sleep

    @classmethod
    def connect(cls, context: str | None = None) -> Api:
        """To the cluster of the current context, or from inside a pod to its own. Raises ApiError."""
        client: Any
        config: Any
        try:
            client, config = import_module("kubernetes.client"), import_module("kubernetes.config")
        except ImportError:
            raise ApiError("unreachable", "needs the Kubernetes client: pip install 'ridethrough[k8s]'") from None
        try:
            return cls(config.new_client_from_config(context=context))
        except config.ConfigException as error:
            first = str(error)
        try:
            configuration = client.Configuration()
            config.load_incluster_config(client_configuration=configuration)
            return cls(client.ApiClient(configuration))
        except config.ConfigException:
            message = f"no cluster is configured ({first}): aws eks update-kubeconfig --name CLUSTER, or set KUBECONFIG"
            raise ApiError("no_cluster", message) from None

    # --- objects ---

    def get(self, where: Address, name: str, part: str | None = None) -> Object:
        """Raises ApiError not_found if it isn't there."""
        found: Object = self.request("GET", where.path(name, part))
        return found

    def find(self, where: Address, name: str) -> Object | None:
        """The object, or None."""
        try:
            return self.get(where, name)
        except ApiError as error:
            if error.kind == "not_found":
                return None
            raise

    def list(self, where: Address, selector: str | None = None) -> list[Object]:
        """All objects, page by page; from the beginning (twice at most) if the server forgets the list (410)."""
        for _ in range(3):
            try:
                return list(self._pages(where, selector))
            except ApiError as error:
                if error.kind != "gone":
                    raise
        raise ApiError("gone", f"{where.kind}: the list changes faster than it can be read; try again")

    def _pages(self, where: Address, selector: str | None) -> Iterator[Object]:
        token = None
        while True:
            query = {"labelSelector": selector, "limit": _PAGE, "continue": token}
            page = self.request("GET", where.path(), query=query)
            yield from page.get("items") or []
            token = (page.get("metadata") or {}).get("continue")
            if not token:
                return

    def create(self, thing: Object, *, dry_run: bool = False) -> Object:
        """Make an object. An answer that got lost may have made it: then what is there with our mark is ours."""
        query = {"fieldManager": "ridethrough", "dryRun": "All" if dry_run else None, "fieldValidation": "Strict"}
        where = address(thing)
        lost = False
        for attempt in range(_TRIES):
            try:
                made: Object = self.request("POST", where.path(), query=query, body=thing, tries=1)
                return made
            except ApiError as error:
                if error.kind == "conflict" and lost:
                    there = self.find(where, thing["metadata"]["name"])
                    if there is not None and _mark(there) is not None and _mark(there) == _mark(thing):
                        return there
                if error.kind not in ("timeout", "unreachable", "server") or attempt == _TRIES - 1:
                    raise
                lost = True
                self.sleep(_wait_s(attempt))
        raise AssertionError("unreachable")

    def delete(self, where: Address, name: str) -> bool:
        """Delete an object and, behind it, what it owns. False if it wasn't there."""
        try:
            self.request("DELETE", where.path(name), body={"propagationPolicy": "Background"})
        except ApiError as error:
            if error.kind == "not_found":
                return False
            raise
        return True

    def log(self, namespace: str, pod: str, *, follow: bool, since_s: int | None, tail: int | None) -> Iterator[bytes]:
        """Lines of a pod's log, without their ends. With `follow` until the container ends."""
        query = {"container": None, "follow": follow or None, "sinceSeconds": since_s, "tailLines": tail}
        path = Address("v1", "Pod", namespace).path(pod, "log")
        response = self._send("GET", path, query, None, read_timeout_s=None if follow else self._timeout_s)
        if response.status >= 400:
            self._raise(response.status, response.read(), "GET", path)
        rest = b""
        for chunk in response.stream(1 << 16):
            *lines, rest = (rest + chunk).split(b"\n")
            yield from lines
        if rest:
            yield rest

    def content(self, path: str, query: dict[str, Any] | None = None) -> Iterator[bytes]:
        """The bytes behind `path` in pieces. Raises ApiError; a piece may be the last that comes before it."""
        response = self._send("GET", path, query or {}, None, read_timeout_s=60.0)
        if response.status >= 400:
            self._raise(response.status, response.read(), "GET", path)
        try:
            yield from response.stream(1 << 20)
        except Exception as error:
            raise ApiError("unreachable", f"GET {path}: cut off ({type(error).__name__}); call it again") from None

    # --- one request ---

    def request(
        self,
        method: str,
        path: str,
        *,
        query: dict[str, Any] | None = None,
        body: Object | None = None,
        tries: int = _TRIES,
    ) -> Any:
        """The decoded answer. What may be said twice (all but POST, unless `tries` says so) is retried after time-outs,
        broken connections, 429 and 5xx, waiting 0.5 to 8 s. Raises ApiError."""
        for attempt in range(tries):
            last = attempt == tries - 1
            try:
                response = self._send(method, path, query or {}, body, read_timeout_s=self._timeout_s)
                data = response.read()
            except ApiError:
                if last:
                    raise
                self.sleep(_wait_s(attempt))
                continue
            if response.status < 400:
                return json.loads(data) if data else {}
            if last or not (response.status == 429 or response.status >= 500):
                self._raise(response.status, data, method, path, body)
            asked = response.headers.get("Retry-After", "")
            self.sleep(min(float(asked), _LONGEST_WAIT_S) if asked.isdigit() else _wait_s(attempt))
        raise AssertionError("unreachable")

    def _send(self, method: str, path: str, query: dict[str, Any], body: Any, *, read_timeout_s: float | None) -> Any:
        import urllib3

        headers = {"Accept": "application/json", "User-Agent": "ridethrough"}
        for setting in self._configuration.auth_settings().values():
            if setting.get("value"):
                headers[setting["key"]] = setting["value"]
        data = None
        if body is not None:
            headers["Content-Type"] = "application/json"
            data = json.dumps(body).encode()
        asked = urlencode({key: _word(value) for key, value in query.items() if value is not None})
        url = f"{self._configuration.host}{path}{'?' if asked else ''}{asked}"
        timeout = urllib3.Timeout(connect=self._timeout_s, read=read_timeout_s)
        try:
            return self._pool.request(
                method, url, headers=headers, body=data, timeout=timeout, retries=False, preload_content=False
            )
        except urllib3.exceptions.NewConnectionError as error:  # a TimeoutError too, in some versions
            reason = str(error).rpartition(": ")[2]
            raise ApiError("unreachable", f"{self._configuration.host} cannot be reached: {reason}") from None
        except urllib3.exceptions.TimeoutError:
            message = f"{method} {path}: no answer within {self._timeout_s:g} s; is the cluster's endpoint reachable?"
            raise ApiError("timeout", message) from None
        except urllib3.exceptions.HTTPError as error:
            reason = " ".join(str(error).split())
            raise ApiError("unreachable", f"{self._configuration.host} cannot be reached: {reason}") from None

    def _raise(self, status: int, data: bytes, method: str, path: str, body: Object | None = None) -> NoReturn:
        try:
            said = str(json.loads(data).get("message") or "")
        except (ValueError, AttributeError):
            said = data.decode(errors="replace").strip()[:300]
        what = f"{method} {identity(body) if body and 'kind' in body else path}"
        if status == 401:
            raise ApiError("unauthorized", f"{what}: the credentials are not accepted; log in anew ({said})")
        if status == 403:
            message = f"{what}: forbidden; `ridethrough k8s doctor` lists the rights that are missing ({said})"
            raise ApiError("forbidden", message)
        if status == 404 and method == "POST":
            message = f"{what}: the cluster has no such kind or namespace; `ridethrough k8s doctor` says which ({said})"
            raise ApiError("not_found", message)
        if status == 404:
            raise ApiError("not_found", f"{what}: not there ({said})")
        if status == 409:
            raise ApiError("conflict", f"{what}: is there already ({said})")
        if status == 410:
            raise ApiError("gone", f"{what}: too old ({said})")
        if status in (400, 422):
            raise ApiError("invalid", f"{what}: not accepted: {said}")
        raise ApiError("server", f"{what}: the cluster answers {status} ({said})")


MARK = "ridethrough/submission"
"""Annotation with a word of its own for each submission: tells our objects from others of the same name."""


def _mark(thing: Object) -> str | None:
    mark = (thing["metadata"].get("annotations") or {}).get(MARK)
    return None if mark is None else str(mark)


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _wait_s(attempt: int) -> float:
    return float(min(_FIRST_WAIT_S * 2**attempt, _LONGEST_WAIT_S))
