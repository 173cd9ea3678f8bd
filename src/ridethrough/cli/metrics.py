"""`ridethrough metrics`: the Prometheus endpoint, composed from the runs' events."""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Annotated

import typer

from ridethrough.cli.command import App
from ridethrough.cli.run_argument import Runs, find
from ridethrough.cli.usage import fail
from ridethrough.ledger.rundir import runs_root
from ridethrough.report.scrape import Scraper

app = App()

_FIRST_PORT = 9464
_PORTS = 100


@app.command()
def metrics(
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="One run; else all below the root that live.")
    ] = None,
    runs: Runs = None,
    listen: Annotated[
        str | None,
        typer.Option(
            "--listen", metavar="[HOST:]PORT", help="Answer scrapes there; `auto`: loopback, the first free port."
        ),
    ] = None,
    rules: Annotated[bool, typer.Option("--rules", help="Print the alert rules for Prometheus.")] = False,
    grafana: Annotated[bool, typer.Option("--grafana", help="Print the Grafana dashboard, to import.")] = False,
) -> None:
    """Print the metrics once, or answer Prometheus at /metrics.

    Everything is counted from the runs' events: no counter falls when a worker, a node or this command is started
    anew, and two jobs on one machine are two values of the label `run` at one endpoint. A run's series end a minute
    after it has.

    Examples:

        ridethrough metrics --listen 9464
        ridethrough metrics --rules > ridethrough-alerts.yml
    """
    if rules:
        sys.stdout.write(resources.files("ridethrough.report").joinpath("static", "alerts.yml").read_text("utf-8"))
        return
    if grafana:
        from ridethrough.report.grafana import dashboard

        print(json.dumps(dashboard(), indent=1))
        return
    root = runs_root(runs)
    if not root.is_dir():
        fail(f"{root} is no folder of runs: name one with --runs DIR, or start a run first")
    scraper = Scraper(root, find(runs, run) if run is not None else None)
    if listen is None:
        text = scraper.scrape()
        sys.stdout.write(text)
        if not text:
            print(f"no run of {root} lives or ended in the last minute, so there is no series", file=sys.stderr)
        return
    server = _server(listen, scraper)
    host, port = server.server_address[:2]
    print(f"http://{host!s}:{port}/metrics", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.server_close()


def _server(listen: str, scraper: Scraper) -> ThreadingHTTPServer:
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.split("?")[0] != "/metrics":
                self.send_error(404)
                return
            with lock:
                body = scraper.scrape().encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    host, _, text = listen.rpartition(":")
    if listen == "auto":
        ports = list(range(_FIRST_PORT, _FIRST_PORT + _PORTS))
    elif text.isdigit() and int(text) < 65536:
        ports = [int(text)]
    else:
        fail(f"--listen {listen}: give PORT, HOST:PORT or auto")
    for port in ports:
        try:
            return ThreadingHTTPServer((host or "127.0.0.1", port), Handler)
        except OSError as error:
            if port == ports[-1]:
                fail(f"--listen {listen}: {error.strerror or error}; another port, or `auto` for the first free one")
    raise AssertionError("no port")
