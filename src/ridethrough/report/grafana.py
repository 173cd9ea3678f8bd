"""The Grafana dashboard over the metrics, as JSON to import: `ridethrough metrics --grafana > dashboard.json`."""

from __future__ import annotations

from typing import Any

_RUN = '{run=~"$run"}'
# title, unit, width (of 24), kind, queries with their legend
_PANELS: tuple[tuple[str, str, int, str, tuple[tuple[str, str], ...]], ...] = (
    ("Training goodput", "percentunit", 4, "stat", ((f"ridethrough_training_goodput_ratio{_RUN}", "{{run}}"),)),
    (
        "Infrastructure goodput",
        "percentunit",
        4,
        "stat",
        ((f"ridethrough_infrastructure_goodput_ratio{_RUN}", "{{run}}"),),
    ),
    ("Step", "none", 4, "stat", ((f"ridethrough_step{_RUN}", "{{run}}"),)),
    ("Open incident", "none", 4, "stat", ((f"ridethrough_incident_open{_RUN}", "{{run}}"),)),
    ("Restarts", "none", 4, "stat", ((f"ridethrough_restarts_total{_RUN}", "{{run}}"),)),
    ("Since the last step", "s", 4, "stat", ((f"ridethrough_seconds_since_step{_RUN}", "{{run}}"),)),
    ("Loss", "none", 12, "timeseries", ((f"ridethrough_loss{_RUN}", "{{run}}"),)),
    ("Tokens per second", "none", 12, "timeseries", ((f"ridethrough_tokens_per_second{_RUN}", "{{run}}"),)),
    ("Steps per second", "none", 12, "timeseries", ((f"rate(ridethrough_steps_total{_RUN}[5m])", "{{run}}"),)),
    ("Incidents by class", "none", 12, "timeseries", ((f"ridethrough_incidents_total{_RUN}", "{{run}} {{class}}"),)),
    (
        "Age of the newest state",
        "s",
        12,
        "timeseries",
        ((f"ridethrough_checkpoint_age_seconds{_RUN}", "{{run}} {{tier}}"),),
    ),
    ("Rollback distance", "none", 12, "timeseries", ((f"ridethrough_rollback_steps{_RUN}", "{{run}} {{tier}}"),)),
    (
        "Write time and interval",
        "s",
        12,
        "timeseries",
        (
            (f"ridethrough_checkpoint_write_seconds{_RUN}", "{{run}} write"),
            (f"ridethrough_checkpoint_interval_seconds{_RUN}", "{{run}} interval"),
        ),
    ),
    (
        "Saves",
        "none",
        12,
        "timeseries",
        (
            (f"ridethrough_saves_total{_RUN}", "{{run}} {{event}}"),
            (f"ridethrough_save_backlog{_RUN}", "{{run}} waiting"),
        ),
    ),
    (
        "Host memory of snapshots",
        "bytes",
        12,
        "timeseries",
        (
            (f"ridethrough_snapshot_host_bytes{_RUN}", "{{run}} all"),
            (f"ridethrough_save_backlog_bytes{_RUN}", "{{run}} waiting for storage"),
        ),
    ),
)
_HEIGHTS = {"stat": 4, "timeseries": 8}


def dashboard() -> dict[str, Any]:
    """Asks for the data source and the runs to show when it is imported."""
    panels, x, y, height = [], 0, 0, 0
    for number, (title, unit, width, kind, queries) in enumerate(_PANELS, 1):
        if x + width > 24:
            x, y = 0, y + height
        height = _HEIGHTS[kind]
        targets = [
            {"expr": expr, "legendFormat": legend, "refId": chr(65 + n)} for n, (expr, legend) in enumerate(queries)
        ]
        panels.append(
            {
                "id": number,
                "title": title,
                "type": kind,
                "datasource": {"type": "prometheus", "uid": "${source}"},
                "gridPos": {"x": x, "y": y, "w": width, "h": height},
                "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
                "targets": targets,
            }
        )
        x += width
    source = {"name": "source", "type": "datasource", "query": "prometheus", "label": "Data source"}
    run = {
        "name": "run",
        "type": "query",
        "label": "Run",
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "query": {"query": "label_values(ridethrough_up, run)", "refId": "run"},
        "multi": True,
        "includeAll": True,
        "refresh": 2,
    }
    return {
        "title": "ridethrough",
        "uid": "ridethrough",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [source, run]},
        "panels": panels,
    }
