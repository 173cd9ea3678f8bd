"""Strict schema checks: Kubernetes' own JSON schemas for each version, our models for custom resources.

Kubernetes' schemas come with the package kubernetes-validate; where it isn't installed that part is left out, and said.
Job and pod templates inside custom resources are checked as the Jobs and Pods that will be made of them.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from ridethrough.cluster.crd_models import MODELS
from ridethrough.cluster.objects import Object

OLDEST = "1.30"
"""First version where the Jobs that are rendered work with nothing switched on by hand (podReplacementPolicy)."""
DRA_SINCE = (1, 34)


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with one object: `rule` names the check, `where` the object and the field."""

    rule: str
    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message} [{self.rule}]"


def identity(thing: Object) -> str:
    """Kind/name, for messages."""
    metadata = thing.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    return f"{thing.get('kind', '?')}/{name or '?'}"


def versions() -> list[str]:
    """Kubernetes versions from OLDEST on whose schemas are at hand, oldest first; none without kubernetes-validate."""
    root = _schema_root()
    if root is None:
        return []
    found = {folder.name[1:].rsplit(".", 1)[0] for folder in root.iterdir() if folder.name.endswith("-local-strict")}
    return sorted((v for v in found if _key(v) >= _key(OLDEST)), key=_key)


def check_schemas(rendered: list[Object], kubernetes: list[str]) -> list[Problem]:
    """Problems of all objects against the schemas of the Kubernetes versions given, newest last."""
    problems: list[Problem] = []
    if any(thing.get("apiVersion") == "resource.k8s.io/v1" for thing in rendered):
        kubernetes = [version for version in kubernetes if _key(version) >= DRA_SINCE]
    for thing in rendered:
        kind = (thing.get("apiVersion", ""), thing.get("kind", ""))
        model = MODELS.get(kind)
        if model is not None:
            try:
                model.model_validate(thing)
            except ValidationError as error:
                problems += [_model_problem(thing, detail) for detail in error.errors()]
            inner = list(_templates(thing))
        else:
            inner = [(identity(thing), thing)]
        for where, candidate in inner:
            for version in kubernetes:
                found = _against(candidate, version, where)
                problems += found
                if found:  # once is enough: the other versions say the same
                    break
    return problems


def _model_problem(thing: Object, detail: Any) -> Problem:
    place = ".".join(str(part) for part in detail["loc"])
    message = "no such field" if detail["type"] == "extra_forbidden" else detail["msg"].removeprefix("Value error, ")
    return Problem("schema", f"{identity(thing)} {place}".rstrip(), message)


def _templates(thing: Object) -> Iterator[tuple[str, Object]]:
    """The Jobs and Pods that a controller makes of a custom resource."""
    spec = thing.get("spec", {})
    if thing["kind"] == "TrainingRuntime":
        spec = spec.get("template", {}).get("spec", {})
    for entry in spec.get("replicatedJobs", []) if isinstance(spec, dict) else []:
        if isinstance(entry, dict) and isinstance(entry.get("template"), dict):
            job = {"apiVersion": "batch/v1", "kind": "Job"} | entry["template"]
            yield f"{identity(thing)} replicatedJobs.{entry.get('name')}.template", job
    for entry in spec.get("replicaSpecs", []) if isinstance(spec, dict) else []:
        if isinstance(entry, dict) and isinstance(entry.get("template"), dict):
            pod = {"apiVersion": "v1", "kind": "Pod"} | entry["template"]
            yield f"{identity(thing)} replicaSpecs.{entry.get('name')}.template", pod


def _against(thing: Object, version: str, where: str) -> list[Problem]:
    validator = _validator(thing.get("apiVersion", ""), thing.get("kind", ""), version)
    if validator is None:
        message = f"Kubernetes {version} has no {thing.get('kind')} in {thing.get('apiVersion')}"
        return [Problem("schema", where, message)]
    problems = []
    for error in validator.iter_errors(thing):
        place = ".".join(str(part) for part in error.absolute_path)
        problems.append(Problem("schema", f"{where} {place}".rstrip(), f"{error.message[:300]} (Kubernetes {version})"))
    return problems


def _key(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _schema_root() -> Any:
    try:
        return importlib.resources.files("kubernetes_validate").joinpath("kubernetes-json-schema")
    except ModuleNotFoundError:
        return None


@functools.lru_cache(maxsize=4)
def _registry(folder: str) -> Any:
    import referencing

    definitions = json.loads(_schema_root().joinpath(folder, "_definitions.json").read_text(encoding="utf-8"))
    return referencing.Resource.from_contents(definitions) @ referencing.Registry()


@functools.lru_cache(maxsize=256)
def _validator(api_version: str, kind: str, version: str) -> Any:
    import jsonschema

    folder = f"v{version}.0-local-strict"
    group, _, number = api_version.rpartition("/")
    prefix = f"{group.split('.')[0]}-" if group else ""
    path = _schema_root().joinpath(folder, f"{kind.lower()}-{prefix}{number}.json")
    if not path.is_file():
        return None
    schema = json.loads(path.read_text(encoding="utf-8"))
    return jsonschema.Draft202012Validator(schema, registry=_registry(folder))
