"""A run is sent to a real HTTP server that takes OTLP; what arrives is decoded."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

pytest.importorskip("opentelemetry.sdk")
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from ridethrough.ledger.recorder import Recorder
from ridethrough.ledger.rundir import create_run
from ridethrough.ledger.summary import read_run
from ridethrough.report.otel import OtelError, send_run

_S = 1_000_000_000


@pytest.fixture
def collector() -> Iterator[tuple[str, dict[str, bytes]]]:
    got: dict[str, bytes] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                import gzip

                body = gzip.decompress(body)
            got[self.path] = body
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            return

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", got
    server.shutdown()
    thread.join(10)
    server.server_close()


def _run(tmp_path: Path) -> Path:
    run = create_run(tmp_path, run_id="a", config={"x": 1}, command=["x"], schedule_hash=None)
    agent, worker = Recorder(run.path, "agent"), Recorder(run.path, "worker")
    agent.emit("job_start", t_ns=0, slots=1, nodes=1, run_id="a")
    for generation, first, last, begin in ((1, 1, 2, 1 * _S), (2, 1, 4, 6 * _S)):
        agent.emit("plan", t_ns=begin - 1, generation=generation, epoch=0, world_size=1, members=[], resume={})
        worker.emit("enter", t_ns=begin, generation=generation, rank=0)
        worker.emit("loop", t_ns=begin, generation=generation, rank=0, step=first - 1)
        for step in range(first, last + 1):
            t0, t1 = begin + (step - first) * _S, begin + (step - first + 1) * _S
            worker.emit("step", t_ns=t1, generation=generation, rank=0, step=step, t0_ns=t0, t1_ns=t1, parts=[])
        if generation == 1:
            report = {"rank": 0, "worker": "w", "host": "h", "phase": "step", "step": 3, "cause": "boom", "pid": 1}
            report |= {"detected_by": "exception", "fault_ns": 4 * _S, "class": "exception", "generation": 1}
            agent.emit("fault", t_ns=4 * _S, **report)
            agent.emit("all_out", t_ns=5 * _S, generation=1)
            worker.emit("leave", t_ns=5 * _S, generation=1, rank=0)
    agent.emit("job_end", t_ns=10 * _S, code=0, reason="done")
    run.finish(0, "done")
    return run.path


def test_a_run_arrives_as_trace_and_metrics(tmp_path: Path, collector: tuple[str, dict[str, bytes]]) -> None:
    endpoint, got = collector
    path = _run(tmp_path)
    count = send_run(path, endpoint)
    trace = ExportTraceServiceRequest()
    trace.ParseFromString(got["/v1/traces"])
    spans = [s for r in trace.resource_spans for scope in r.scope_spans for s in scope.spans]
    assert len(spans) == count
    by_name = {s.name: s for s in spans}
    ledger = read_run(path)
    assert by_name["run"].end_time_unix_nano - by_name["run"].start_time_unix_nano == ledger.part.wall_ns
    incident = by_name["incident exception"]
    assert incident.parent_span_id == by_name["run"].span_id
    first_step_s = ledger.incidents[0].first_step_s
    assert first_step_s is not None
    assert incident.end_time_unix_nano - incident.start_time_unix_nano == pytest.approx(first_step_s * _S, abs=10)
    metrics = ExportMetricsServiceRequest()
    metrics.ParseFromString(got["/v1/metrics"])
    found = {m.name: m for r in metrics.resource_metrics for scope in r.scope_metrics for m in scope.metrics}
    goodput = found["ridethrough.training_goodput"].gauge.data_points[0].as_double
    assert goodput == pytest.approx(ledger.part.training_goodput)
    states = {p.attributes[0].value.string_value for p in found["ridethrough.state_seconds"].gauge.data_points}
    assert states == set(ledger.part.states_ns)


def test_nobody_there_is_said_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(OtelError, match="4318"):
        send_run(_run(tmp_path), "http://127.0.0.1:9")
