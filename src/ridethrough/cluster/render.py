"""From a spec to objects and to YAML: the same text for the same spec, everywhere and always."""

from __future__ import annotations

from typing import Any

from ridethrough.cluster import naming, objects
from ridethrough.cluster.backends import BACKENDS
from ridethrough.cluster.objects import Object
from ridethrough.cluster.reading import import_yaml
from ridethrough.cluster.spec import JobSpec


def render(spec: JobSpec, *, token: str | None = None, extras: list[Object] | None = None) -> list[Object]:
    """All objects in the order of creation. `token` adds the job's Secret; `extras` (dashboards, alerts) come last."""
    return [*objects.before_the_job(spec, token), *BACKENDS[spec.backend](spec), *(extras or [])]


def to_yaml(rendered: list[Object], spec: JobSpec | None = None) -> str:
    """The objects as one YAML stream, for people and for `kubectl apply`."""
    yaml = import_yaml()

    class Dumper(yaml.SafeDumper):  # type: ignore[misc, name-defined]
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: Any, value: str) -> Any:
        style = "|" if "\n" in value else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    parts = []
    if spec is not None and not any(thing["kind"] == "Secret" for thing in rendered):
        secret, namespace = naming.token_secret(spec), spec.namespace
        more = " --from-literal=metrics=$(openssl rand -hex 32)" if spec.options.monitoring else ""
        parts.append(
            "# `ridethrough k8s submit` makes the job's token. With kubectl, make it first:\n"
            f"#   kubectl -n {namespace} create secret generic {secret} "
            f"--from-literal=token=$(openssl rand -hex 32){more}\n"
        )
    for thing in rendered:
        body = yaml.dump(thing, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=110)
        parts.append(f"---\n{body}")
    return "".join(parts)
