"""From a file to a JobSpec: YAML with each key once, the profile's defaults beneath, mistakes with their place."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ridethrough.cluster.profiles import PROFILES
from ridethrough.cluster.spec import JobSpec, SpecError

_ALTERNATIVES = {"claim", "fsx", "storage_class"}


def load_spec(path: Path) -> JobSpec:
    """Read a spec from `path`. Raises SpecError."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SpecError(
            f"{path}: {error.strerror}; `ridethrough k8s init --profile cpu > job.yaml` makes one"
        ) from None
    except UnicodeDecodeError:
        raise SpecError(f"{path}: not text in UTF-8; give the YAML of a job or of objects") from None
    try:
        return parse_spec(text)
    except SpecError as error:
        raise SpecError("\n".join(f"{path}: {line}" for line in str(error).splitlines())) from None


def parse_spec(text: str) -> JobSpec:
    """A spec from the YAML `text`. Raises SpecError with one line for each mistake."""
    given = load_yaml(text)
    if not isinstance(given, dict):
        raise SpecError("expected the fields of a job (name, profile, ...); `ridethrough k8s init` makes a file")
    name = given.get("profile")
    if name not in PROFILES:
        raise SpecError(f"profile: {name!r} is none of {', '.join(PROFILES)}")
    try:
        return JobSpec.model_validate(_merged(PROFILES[name].defaults, given))
    except ValidationError as error:
        raise SpecError("\n".join(_line(detail) for detail in error.errors())) from None


def _line(detail: Any) -> str:
    place = ".".join(str(part) for part in detail["loc"]) or "job"
    if detail["type"] == "extra_forbidden":
        return f"{place}: no such field"
    message = detail["msg"].removeprefix("Value error, ")
    return f"{place}: {message}"


def _merged(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` on top of `under`, part by part; a chosen kind of storage replaces the profile's."""
    out = copy.deepcopy(under)
    for key, value in over.items():
        if key == "storage" and isinstance(value, dict) and _ALTERNATIVES & value.keys():
            out[key] = {k: v for k, v in out.get(key, {}).items() if k not in _ALTERNATIVES}
        if key not in ("env", "fsx") and isinstance(value, dict) and isinstance(out.get(key), dict):
            out[key] = _merged(out[key], value)
        else:
            out[key] = copy.deepcopy(value)
    return out


def load_yaml(text: str) -> Any:
    """One YAML document; a key that stands twice is an error, not the last one's win. Raises SpecError."""
    documents = load_yaml_documents(text)
    if len(documents) != 1:
        raise SpecError(f"expected one document, found {len(documents)}")
    return documents[0]


def load_yaml_documents(text: str) -> list[Any]:
    """All YAML documents of `text` that are not empty. Raises SpecError."""
    yaml = import_yaml()

    class Loader(yaml.SafeLoader):  # type: ignore[misc, name-defined]
        pass

    def mapping(loader: Any, node: Any) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = loader.construct_object(key_node, deep=True)
            if key in seen:
                raise SpecError(f"line {key_node.start_mark.line + 1}: {key!r} stands twice")
            seen.add(key)
        return dict(loader.construct_pairs(node, deep=True))

    Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    try:
        return [document for document in yaml.load_all(text, Loader=Loader) if document is not None]
    except yaml.YAMLError as error:
        raise SpecError(f"no YAML: {' '.join(str(error).split())}") from None


def import_yaml() -> Any:
    """PyYAML, which comes with the extra k8s. Raises SpecError if it is not there."""
    try:
        import yaml
    except ImportError:
        raise SpecError("needs PyYAML: pip install 'ridethrough[k8s]'") from None
    return yaml
