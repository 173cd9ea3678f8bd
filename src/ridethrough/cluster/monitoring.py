"""Objects for the Prometheus operator and Grafana around what the report room makes: metrics, alert rules, dashboard.

The rules and the dashboard are handed in as data (the command line composes the rooms); here they get their envelopes.
"""

from __future__ import annotations

import json
from typing import Any

from ridethrough.cluster import naming
from ridethrough.cluster.spec import JobSpec

DASHBOARD_LABEL = "grafana_dashboard"
"""The label by which Grafana's sidecar (kube-prometheus-stack) finds dashboards."""


def pod_monitor(spec: JobSpec) -> dict[str, Any]:
    """Prometheus asks the container beside the coordinator: it reads the run's record, so no counter falls when a pod,
    a node or itself is replaced."""
    secret = {"name": naming.token_secret(spec), "key": "metrics"}
    endpoint = {
        "port": "metrics",
        "path": "/metrics",
        "interval": "15s",
        "authorization": {"type": "Bearer", "credentials": secret},
    }
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": _meta(spec, spec.name),
        "spec": {
            "selector": {"matchLabels": naming.selector(spec, naming.COORDINATOR)},
            "podMetricsEndpoints": [endpoint],
            "podTargetLabels": [naming.INSTANCE_LABEL],
        },
    }


def alert_rules(spec: JobSpec, groups: list[dict[str, Any]]) -> dict[str, Any]:
    """`groups` as in a Prometheus rules file."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": _meta(spec, spec.name),
        "spec": {"groups": groups},
    }


def dashboard(spec: JobSpec, content: dict[str, Any]) -> dict[str, Any]:
    """`content` is Grafana's JSON."""
    metadata = _meta(spec, f"{spec.name}-dashboard")
    metadata["labels"] |= {DASHBOARD_LABEL: "1"}
    text = json.dumps(content, indent=1, sort_keys=True) + "\n"
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {f"{spec.name}.json": text}}


def _meta(spec: JobSpec, name: str) -> dict[str, Any]:
    return {"name": name, "namespace": spec.namespace, "labels": naming.labels(spec)}
