"""A diagnosis as JSON, and the schema of that JSON. Units are in the keys, as in the dataclasses that it is made of."""

from __future__ import annotations

import json
import types
import typing
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any

from penstock.findings import Finding, findings
from penstock.profile import Profile
from penstock.whatif import Case, outlook

__all__ = ["Diagnosis", "diagnosis_json", "schema"]

_PLAIN = {int: "integer", float: "number", str: "string", bool: "boolean"}


@dataclass(frozen=True)
class Diagnosis:
    """What was measured, what it says, and what else could be."""

    profile: Profile
    findings: tuple[Finding, ...]
    cases: tuple[Case, ...]


def diagnosis_json(profile: Profile) -> str:
    """The diagnosis of a profile, as text."""
    diagnosis = Diagnosis(profile, tuple(findings(profile)), tuple(outlook(profile)))
    return json.dumps(asdict(diagnosis), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def schema() -> dict[str, Any]:
    """JSON Schema, draft 2020-12, of what `diagnosis_json` writes."""
    definitions: dict[str, Any] = {}
    whole = _schema_of(Diagnosis, definitions)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A diagnosis by Penstock",
        **whole,
        "$defs": definitions,
    }


def _schema_of(wanted: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    if wanted in _PLAIN:
        return {"type": _PLAIN[wanted]}
    origin, parts = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is typing.Literal:
        return {"enum": list(parts)}
    if origin is tuple:
        return {"type": "array", "items": _schema_of(parts[0], definitions)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema_of(parts[1], definitions)}
    if isinstance(wanted, types.UnionType):
        return {"anyOf": [_schema_of(parts[0], definitions), {"type": "null"}]}
    if not is_dataclass(wanted):
        raise TypeError(f"no schema is known for {wanted!r}")
    name = typing.cast("type[Any]", wanted).__name__
    if name not in definitions:
        definitions[name] = {}  # before its fields: one of them may be of the same kind
        definitions[name] = _object(wanted, definitions)
    return {"$ref": f"#/$defs/{name}"}


def _object(wanted: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(wanted)
    names = [field.name for field in fields(wanted)]
    return {
        "type": "object",
        "description": (wanted.__doc__ or "").strip(),
        "properties": {name: _schema_of(hints[name], definitions) for name in names},
        "required": names,
        "additionalProperties": False,
    }


if __name__ == "__main__":  # python -m penstock.report.document > docs/diagnosis.schema.json
    print(json.dumps(schema(), indent=2))
