"""The live dashboard: a small server over a root of runs, for `ridethrough dash`. Needs the extra `report`.

The browser gets pages from the index at once; runs that live are read anew in threads, at most one reading of a run at
a time, and sent as server-sent events. It reads run folders and writes nothing but the index.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator
from importlib import resources
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ridethrough.ledger.rundir import RunDirError
from ridethrough.report.index import Index
from ridethrough.report.scrape import Scraper

_LIVE = ("running", "recovering", "starting")
_EVERY_S = 2.0
_LIST_EVERY_S = 5.0
_COOKIE = "ridethrough_token"
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_LISTED = (
    *("run_id", "created", "host", "code", "reason", "steps", "slots", "training_goodput", "infrastructure_goodput"),
    *("num_incidents", "num_recovered", "final_loss", "wall_ns", "schedule_hash", "tags", "problem"),
)
_TYPES = {"html": "text/html; charset=utf-8", "js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class Runs:
    """Reads runs for the pages; one reading of a run at a time, and not more often than it takes time."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._locks: dict[str, asyncio.Lock] = {}
        self._read_at: dict[str, tuple[float, float]] = {}  # run -> when, how long it took
        self._scraper = Scraper(root)
        self._metrics: tuple[float, str] = (-1e9, "")

    async def listed(self) -> list[dict[str, Any]]:
        """From the index, which is refreshed beside; a run that it has not read yet has only its name."""
        self._refresh_soon()
        known, names = await asyncio.to_thread(self._with_index, lambda index: (index.runs(), index.names()))
        found = [{name: run[name] for name in _LISTED} for run in known]
        new = sorted(names - {run["run_id"] for run in known}, reverse=True)
        return [*({"run_id": name} for name in new), *found]

    async def view(self, run_id: str) -> dict[str, Any]:
        """A run as it is now, or was a moment ago. Raises RunDirError when there is none, or it can't be read."""
        lock = self._locks.setdefault(run_id, asyncio.Lock())
        async with lock:
            known = await asyncio.to_thread(self._stored, run_id)
            at, took = self._read_at.get(run_id, (-1e9, 0.0))
            old = time.monotonic() - at > max(_EVERY_S, 4 * took)
            if old and (known is None or known["status"]["state"] in _LIVE):
                begun = time.monotonic()
                await asyncio.to_thread(self._with_index, lambda index: index.refresh_run(run_id, always=True))
                self._read_at[run_id] = (time.monotonic(), time.monotonic() - begun)
                known = await asyncio.to_thread(self._stored, run_id)
        if known is None:
            record = await asyncio.to_thread(self._with_index, lambda index: index.run(run_id))
            raise RunDirError((record or {}).get("problem") or f"no run {run_id!r} in {self.root}")
        return known

    async def incidents(self, run_id: str, limit: int, offset: int) -> dict[str, Any]:
        def read(index: Index) -> dict[str, Any]:
            rows = index.incidents(run_id, limit=limit, offset=offset)
            return {"total": index.num_incidents(run_id), "incidents": rows}

        return dict(await asyncio.to_thread(self._with_index, read))

    async def search(self, query: str) -> list[dict[str, Any]]:
        def read(index: Index) -> list[dict[str, Any]]:
            hits = index.search(query)
            runs = {hit.run_id: index.run(hit.run_id) or {} for hit in hits}
            places = {hit.run_id: [{"source": s, "excerpt": e} for s, e in hit.places] for hit in hits}
            return [{**{n: run.get(n) for n in _LISTED}, "places": places[name]} for name, run in runs.items()]

        return list(await asyncio.to_thread(self._with_index, read))

    async def metrics(self) -> str:
        async with self._locks.setdefault("/metrics", asyncio.Lock()):
            at, text = self._metrics
            if time.monotonic() - at > _EVERY_S:
                text = await asyncio.to_thread(self._scraper.scrape)
                self._metrics = (time.monotonic(), text)
        return text

    def _refresh_soon(self) -> None:
        at, took = self._read_at.get("", (-1e9, 0.0))
        if time.monotonic() - at > max(_LIST_EVERY_S, 4 * took):
            begun = time.monotonic()
            self._read_at[""] = (begun, 0.0)
            task = asyncio.ensure_future(asyncio.to_thread(self._with_index, Index.refresh))
            task.add_done_callback(lambda _: self._read_at.update({"": (time.monotonic(), time.monotonic() - begun)}))

    def _stored(self, run_id: str) -> dict[str, Any] | None:
        found: dict[str, Any] | None = self._with_index(lambda index: index.view(run_id))
        return found

    def _with_index(self, use: Any) -> Any:
        with Index(self.root) as index:
            return use(index)


def app(root: Path, *, token: str | None, hosts: tuple[str, ...] = _LOOPBACK) -> ASGIApp:
    """The server's application. `token`: what a visitor must bring, None for anyone who reaches it. `hosts`: names
    under which it may be asked for (a page elsewhere that points its name at this machine is refused)."""
    runs = Runs(root)

    async def page(request: Request) -> Response:
        return _static("dash.html")

    async def static(request: Request) -> Response:
        return _static(request.path_params["name"])

    async def listed(request: Request) -> Response:
        return JSONResponse({"root": str(root), "runs": await runs.listed()})

    async def one(request: Request) -> Response:
        return JSONResponse(await runs.view(request.path_params["run"]))

    async def incidents(request: Request) -> Response:
        limit, offset = _number(request, "limit", 100, 500), _number(request, "offset", 0, 10**9)
        return JSONResponse(await runs.incidents(request.path_params["run"], limit, offset))

    async def search(request: Request) -> Response:
        return JSONResponse(await runs.search(request.query_params.get("q", "")[:500]))

    async def events(request: Request) -> Response:
        run_id = request.path_params["run"]
        await runs.view(run_id)  # a run that is not there is an error now
        return StreamingResponse(_events(runs, run_id, request), media_type="text/event-stream")

    async def metrics(request: Request) -> Response:
        return PlainTextResponse(await runs.metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def wrong_run(request: Request, error: Exception) -> Response:
        return JSONResponse({"error": str(error)}, status_code=404)

    inner = Starlette(
        routes=[
            Route("/", page),
            Route("/static/{name}", static),
            Route("/api/runs", listed),
            Route("/api/search", search),
            Route("/api/runs/{run}", one),
            Route("/api/runs/{run}/incidents", incidents),
            Route("/api/runs/{run}/events", events),
            Route("/metrics", metrics),
        ],
        exception_handlers={RunDirError: wrong_run},
    )
    return _Guard(inner, token, hosts)


class _Guard:
    """Lets in who asks for one of our names, and brings the token: as a bearer, a cookie, or once in the address."""

    def __init__(self, inner: ASGIApp, token: str | None, hosts: tuple[str, ...]) -> None:
        self._inner, self._token, self._hosts = inner, token, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._inner(scope, receive, send)
            return
        request = Request(scope)
        name = request.headers.get("host", "").rsplit(":", 1)[0] if request.headers.get("host", "")[-1:] != "]" else ""
        if self._hosts and name not in self._hosts:
            await PlainTextResponse("wrong host name", status_code=421)(scope, receive, send)
            return
        cookie = None
        if self._token is not None:
            given = [request.headers.get("authorization", "").removeprefix("Bearer ").strip()]
            given += [request.cookies.get(_COOKIE, ""), request.query_params.get("token", "")]
            if not any(hmac.compare_digest(each.encode(), self._token.encode()) for each in given):
                text = "a token is needed: open the address that `ridethrough dash` printed"
                await PlainTextResponse(text, status_code=401)(scope, receive, send)
                return
            if request.query_params.get("token"):
                cookie = f"{_COOKIE}={self._token}; HttpOnly; SameSite=Strict; Path=/"

        async def sent(message: Any) -> None:
            if message["type"] == "http.response.start":
                added = [(k.lower().encode(), v.encode()) for k, v in _HEADERS.items()]
                added += [(b"set-cookie", cookie.encode())] if cookie else []
                message["headers"] = [*message.get("headers", []), *added]
            await send(message)

        await self._inner(scope, receive, sent)


async def _events(runs: Runs, run_id: str, request: Request) -> AsyncIterator[str]:
    """The status whenever it changes, the timeline with every tenth; ends when the run does."""
    last = ""
    for count in range(1 << 30):
        try:
            view = await runs.view(run_id)
        except RunDirError as error:
            yield f"event: problem\ndata: {json.dumps(str(error))}\n\n"
            return
        status = json.dumps(view["status"], separators=(",", ":"))
        if status != last:
            last = status
            yield f"event: status\ndata: {status}\n\n"
            if count % 5 == 0 or view["status"]["state"] not in _LIVE:
                rest = {name: view[name] for name in ("timeline", "marks", "states_s", "wall_s")}
                yield f"event: timeline\ndata: {json.dumps(rest, separators=(',', ':'))}\n\n"
        else:
            yield ": still here\n\n"
        if view["status"]["state"] not in _LIVE:
            yield "event: over\ndata: {}\n\n"
            return
        await asyncio.sleep(_EVERY_S)
        if await request.is_disconnected():
            return


def _static(name: str) -> Response:
    suffix = name.rpartition(".")[2]
    file = resources.files("ridethrough.report").joinpath("static", name)
    if "/" in name or name.startswith(".") or suffix not in _TYPES or not file.is_file():
        return PlainTextResponse("no such file", status_code=404)
    return Response(file.read_bytes(), media_type=_TYPES[suffix])


def _number(request: Request, name: str, default: int, most: int) -> int:
    text = request.query_params.get(name, "")
    return min(int(text), most) if text.isascii() and text.isdigit() else default
