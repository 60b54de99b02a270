"""Nested data and messages as plain text."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any


def flatten(tree: Mapping[str, Any], prefix: str = "", whole: Collection[str] = ()) -> Iterator[tuple[str, Any]]:
    """Leaves of nested dictionaries by dotted key: ``("method.name", "eagle")``; keys in ``whole`` are leaves."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and f"{prefix}{key}" not in whole:
            yield from flatten(value, f"{prefix}{key}.", whole)
        else:
            yield f"{prefix}{key}", value


def first_line(error: BaseException) -> str:
    """The first line of an error's message, else the name of its class."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
