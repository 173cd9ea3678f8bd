"""`ridethrough dash`: the live dashboard over a root of runs."""

from __future__ import annotations

import ipaddress
import secrets
import socket
import sys
from pathlib import Path
from typing import Annotated

import typer

from ridethrough.cli.command import App
from ridethrough.cli.usage import fail
from ridethrough.ledger.rundir import runs_root

app = App()


@app.command()
def dash(
    root: Annotated[
        Path | None, typer.Argument(metavar="[ROOT]", help="Where runs are kept; else RIDETHROUGH_RUNS, else ./runs.")
    ] = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on; other than loopback needs a token.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0 takes a free one.")] = 8765,
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file", metavar="FILE", help="The token that visitors need; else one is made and printed."
        ),
    ] = None,
) -> None:
    """Show all runs below ROOT in the browser, those that live as they go, with incidents, tracebacks and search.

    Also answers `/metrics` for Prometheus. Listens on loopback unless told otherwise; on any other address visitors
    need a token, which stands in the printed address. It only reads the runs (and keeps an index of them).

    Example:

        ridethrough dash runs/ --port 8080
    """
    where = runs_root(root)
    if not where.is_dir():
        fail(f"{where} is no folder of runs: name one, or start a run first")
    try:
        import uvicorn

        from ridethrough.report.dash import app as dash_app
    except ImportError as error:
        fail(f"the dashboard needs the extra `report` ({error.name} is missing): pip install 'ridethrough[report]'")
    local = _is_loopback(host)
    token = _token(token_file) if token_file is not None else None if local else secrets.token_urlsafe(24)
    try:
        listener = _listen(host, port)
    except OSError as error:
        fail(f"--host {host} --port {port}: {error.strerror or error}; choose another, --port 0 takes a free one")
    actual = listener.getsockname()[1]
    shown = f"[{host}]" if ":" in host else host
    print(f"http://{shown}:{actual}/" + (f"?token={token}" if token else ""), flush=True)
    hosts = ("127.0.0.1", "localhost", "[::1]") if local else ()
    config = uvicorn.Config(
        dash_app(where, token=token, hosts=hosts),
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    try:
        uvicorn.Server(config).run(sockets=[listener])
    except KeyboardInterrupt:
        sys.exit(0)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen(128)
    return listener


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _token(file: Path) -> str:
    try:
        token = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        fail(f"--token-file {file} cannot be read ({getattr(error, 'strerror', None) or 'it is no text'})")
    if len(token) < 16 or not token.isascii() or any(c in token for c in ' ;,"'):
        fail(f"--token-file {file}: the token must have at least 16 plain characters")
    return token
