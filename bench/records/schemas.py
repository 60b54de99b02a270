"""The documented form of a run's files: JSON Schema, draft 2020-12, with a ``unit`` for every number.

``python -m bench show schema/summary`` prints one of them. The schemas use no keyword that draft 7 lacks, so that
``fastjsonschema`` reads them, which checks all records of a results folder in milliseconds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

Kind = Literal["summary", "manifest", "sample"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_OTHERS = "additionalProperties"


@dataclass(frozen=True, slots=True)
class Field:
    """A key of a file.

    Attributes:
        key: dotted path; ``*`` stands for any name, ``[]`` for the items of a list.
        type: of JSON, several with "or" between them.
        unit: of numbers; empty for anything else.
        meaning: a sentence.
    """

    key: str
    type: str
    unit: str
    meaning: str


@cache
def load(kind: Kind) -> dict[str, Any]:
    """The schema of summary.json, of manifest.json, or of a line of samples.jsonl."""
    file = Path(__file__).parent / "schema" / f"{kind}.schema.json"
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


@cache
def _checker(kind: Kind) -> Callable[[Any], Any]:
    import fastjsonschema

    check: Callable[[Any], Any] = fastjsonschema.compile(load(kind), use_default=False)
    return check


def problem(kind: Kind, content: Any) -> str:
    """The first field that is not as the schema says, in words; empty if there is none."""
    from fastjsonschema import JsonSchemaValueException

    try:
        _checker(kind)(content)
    except JsonSchemaValueException as error:
        got = json.dumps(error.value, default=str)
        words = re.sub(r"^data\b\.?", "" if error.name != "data" else "it", error.message)
        return f"{words}, got {got if len(got) <= 40 else got[:40] + '...'}"
    return ""


def fields(kind: Kind) -> list[Field]:
    """Every key, in the order of the file."""
    return list(_fields(load(kind), load(kind), ""))


def unit(kind: Kind, path: Sequence[str]) -> str:
    """The unit of a key, given as the names on the way to it; empty if it has none."""
    schema = load(kind)
    node = schema
    for name in path:
        node = resolved(schema, node)
        others = node.get(_OTHERS)
        node = (node.get("properties") or {}).get(name) or (others if isinstance(others, dict) else {})
    return str(resolved(schema, node).get("unit", ""))


def resolved(schema: Mapping[str, Any], node: Mapping[str, Any]) -> dict[str, Any]:
    """A node with what it refers to; its own description is the one that counts."""
    if "anyOf" in node:
        first, *_ = node["anyOf"]
        found = resolved(schema, first)
        return found | {"type": [found["type"], "null"], "description": node["description"]}
    if "$ref" in node:
        return resolved(schema, schema["$defs"][node["$ref"].rpartition("/")[2]]) | dict(node)
    return dict(node)


def _fields(schema: Mapping[str, Any], node: Mapping[str, Any], path: str) -> Iterator[Field]:
    found = resolved(schema, node)
    if path:
        kinds = found["type"] if isinstance(found["type"], list) else [found["type"]]
        yield Field(path, " or ".join(kinds), str(found.get("unit", "")), found.get("description", ""))
    prefix = f"{path}." if path else ""
    for name, inner in (found.get("properties") or {}).items():
        yield from _fields(schema, inner, prefix + name)
    if isinstance(found.get(_OTHERS), dict):
        yield from _fields(schema, found[_OTHERS], f"{prefix}*")
    if "properties" in (items := resolved(schema, found.get("items") or {})):
        yield from list(_fields(schema, items, f"{path}[]"))[1:]


def text(kind: Kind) -> str:
    """The schema as a table: key, type, unit and meaning."""
    from tabulate import tabulate

    schema = load(kind)
    rows = [(field.key, field.type, field.unit or "-", field.meaning) for field in fields(kind)]
    table = tabulate(rows, headers=("key", "type", "unit", "meaning"), tablefmt="plain", disable_numparse=True)
    return f"{schema['title']}: {schema['description']}\n\n{table}"
