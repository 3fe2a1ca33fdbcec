"""Enough of JSON Schema to check a document against ours; a keyword it does not know is an error, never ignored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["violations"]

TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
    "boolean": (bool,),
    "null": (type(None),),
    "object": (dict,),
    "array": (list,),
}
KNOWN = {"$schema", "$defs", "$ref", "title", "description", "type", "enum", "anyOf", "items"} | {
    "properties",
    "required",
    "additionalProperties",
}


def violations(schema: dict[str, Any], value: Any, root: dict[str, Any] | None = None, at: str = "$") -> Iterator[str]:
    """What of a value the schema does not allow."""
    root = schema if root is None else root
    unknown = schema.keys() - KNOWN
    assert not unknown, f"cannot check {unknown}"
    if "$ref" in schema:
        yield from violations(root["$defs"][schema["$ref"].removeprefix("#/$defs/")], value, root, at)
    if "enum" in schema and value not in schema["enum"]:
        yield f"{at}: {value!r} is none of {schema['enum']}"
    if "anyOf" in schema and all(list(violations(one, value, root, at)) for one in schema["anyOf"]):
        yield f"{at}: {value!r} fits none of {schema['anyOf']}"
    if "type" in schema and not _is(value, schema["type"]):
        yield f"{at}: {value!r} is not of type {schema['type']}"
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from violations(schema.get("items", {}), item, root, f"{at}[{index}]")
    elif isinstance(value, dict):
        yield from _of_object(schema, value, root, at)


def _is(value: Any, wanted: str) -> bool:
    return isinstance(value, TYPES[wanted]) and not (isinstance(value, bool) and wanted != "boolean")


def _of_object(schema: dict[str, Any], value: dict[str, Any], root: dict[str, Any], at: str) -> Iterator[str]:
    known, others = schema.get("properties", {}), schema.get("additionalProperties", {})
    yield from (f"{at}: lacks {name}" for name in schema.get("required", ()) if name not in value)
    for name, item in value.items():
        if name in known or others is not False:
            yield from violations(known.get(name, others), item, root, f"{at}.{name}")
        else:
            yield f"{at}: has unknown {name}"
