"""A finished run as OpenTelemetry data: a trace of the run with its incidents and their stages, and its goodput.

    send_run(Path("runs/a"), "http://localhost:4318")

Needs the extra [otel]. OTLP over HTTP; times are the wall clock that the run's first event file notes beside its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ridethrough.ledger.incidents import Incident
from ridethrough.ledger.reading import event_files
from ridethrough.ledger.summary import RunLedger, read_run

_LIMIT_S = 10.0


class OtelError(RuntimeError):
    """The run cannot be sent; the message is one line with the remedy."""


def send_run(run_dir: Path, endpoint: str) -> int:
    """Sends the run to `endpoint`/v1/traces and /v1/metrics; returns the number of spans. Waits 10 s at most for each.

    Raises OtelError: the extra is missing, or nobody took the data; RunDirError and LedgerError as `read_run`.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    except ImportError as error:
        raise OtelError(f"OpenTelemetry is not installed ({error}): pip install 'ridethrough[otel]'") from None
    ledger = read_run(run_dir)
    base = endpoint.rstrip("/")
    resource = Resource.create({"service.name": "ridethrough", "ridethrough.run_id": ledger.run["run_id"]})
    kept = InMemorySpanExporter()
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(SimpleSpanProcessor(kept))
    _trace(provider, ledger, _wall_offset_ns(run_dir))
    spans = kept.get_finished_spans()
    traces = OTLPSpanExporter(endpoint=f"{base}/v1/traces", timeout=_LIMIT_S)
    sent = traces.export(spans)
    traces.shutdown()
    if sent is not SpanExportResult.SUCCESS:
        raise OtelError(f"{base}/v1/traces did not take the trace: name an OTLP/HTTP endpoint, often port 4318")
    reader = PeriodicExportingMetricReader(
        OTLPMetricExporter(endpoint=f"{base}/v1/metrics", timeout=_LIMIT_S), export_interval_millis=float("inf")
    )
    meters = MeterProvider(resource=resource, metric_readers=[reader])
    meter = meters.get_meter("ridethrough")
    meter.create_gauge("ridethrough.training_goodput", "1").set(ledger.part.training_goodput)
    meter.create_gauge("ridethrough.infrastructure_goodput", "1").set(ledger.part.infrastructure_goodput)
    seconds = meter.create_gauge("ridethrough.state_seconds", "s", "time of all ranks in each state of the ledger")
    for state, ns in ledger.part.states_ns.items():
        seconds.set(ns / 1e9, {"state": state})
    meters.force_flush(_LIMIT_S * 1000)
    meters.shutdown()
    return len(spans)


def _trace(provider: Any, ledger: RunLedger, offset_ns: int) -> None:
    from opentelemetry import trace

    tracer = provider.get_tracer("ridethrough")
    begin = ledger.past.start_ns + offset_ns
    run = tracer.start_span("run", start_time=begin, attributes={"ridethrough.slots": ledger.part.slots})
    inside = trace.set_span_in_context(run)
    for incident in ledger.incidents:
        at = incident.fault_ns + offset_ns
        span = tracer.start_span(f"incident {incident.class_}", inside, start_time=at, attributes=_attributes(incident))
        within = trace.set_span_in_context(span)
        for stage, seconds in incident.stages_s.items():
            child = tracer.start_span(stage, within, start_time=at)
            at += round(seconds * 1e9)
            child.end(at)
        span.end(at)
    run.end(begin + ledger.part.wall_ns)


def _attributes(incident: Incident) -> dict[str, str | int]:
    found = {
        "id": incident.id,
        "rank": incident.rank,
        "host": incident.host,
        "phase": incident.phase,
        "step": incident.step,
        "rung": incident.rung,
        "steps_lost": incident.steps_lost,
        "root_cause": incident.root_cause,
        "injected": " ".join(incident.injected) or None,
    }
    return {f"ridethrough.{name}": value for name, value in found.items() if value is not None}


def _wall_offset_ns(run_dir: Path) -> int:
    for file in event_files(run_dir):
        with file.open("rb") as stream:
            header = json.loads(stream.readline())
        if header.get("kind") == "header":
            return int(header["wall_ns"]) - int(header["mono_ns"])
    return 0
