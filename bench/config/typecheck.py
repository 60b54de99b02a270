"""Checks values from YAML against the type hints of the class or function they are for, before it is called."""

from __future__ import annotations

import difflib
import inspect
import os
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum
from functools import lru_cache
from typing import Any, Literal

from bench.errors import UserError


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`` Did you mean 'x'?`` for the closest known word, or nothing."""
    close = difflib.get_close_matches(word, list(known), 1)
    return f" Did you mean '{close[0]}'?" if close else ""


def check_arguments(
    target: Callable[..., Any], given: Mapping[str, Any], where: str = "", provided: Collection[str] = ()
) -> dict[str, Any]:
    """Check arguments from a config against the signature of what they are for, without calling it.

    Args:
        target: a class or function with type hints; a hint that cannot be resolved is not checked.
        given: argument name to value, as a YAML file gives it.
        where: the config key of ``given``, for messages.
        provided: parameters filled by the caller; a config may not set them.

    Returns:
        The arguments, whole numbers turned into floats where the hint asks for a float.

    Raises:
        UserError: an argument the target does not take, one it needs and did not get, or one of the wrong type.
    """
    prefix = f"{where}." if where else ""
    parameters = _parameters(target)
    named = {n: p for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    allowed = [n for n in named if n not in provided]
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for key in given:
        if key not in allowed and not open_ended:
            hint = did_you_mean(key, allowed)
            listing = ", ".join(prefix + n for n in allowed) or "none"
            raise UserError(f"Unknown setting '{prefix}{key}'.{hint} Allowed: {listing}.")
    for name in allowed:
        if name not in given and named[name].default is inspect.Parameter.empty:
            raise UserError(f"{prefix}{name} must be set: {prefix}{name}=VALUE.")
    for name, value in given.items():
        expected = hint_of(target, name)
        if not fits(value, expected):
            choices = [kind for kind in typing.get_args(expected) if isinstance(kind, str)]
            hint = did_you_mean(value, choices) if isinstance(value, str) else ""
            raise UserError(
                f"{prefix}{name} must be {describe(expected)}, got {_show(value)}.{hint} Set {prefix}{name}=VALUE."
            )
    return {name: _as_float(value, hint_of(target, name)) for name, value in given.items()}


def fits(value: Any, expected: Any) -> bool:
    """Whether a value from YAML is acceptable where a type hint says ``expected``.

    Lists stand for any sequence, text for paths, names or values for enums, and a dictionary with
    ``_target_`` for an object that is built later. A whole number is a float, a boolean is no number.
    """
    if expected is Any or isinstance(expected, typing.TypeVar):
        return True
    if isinstance(value, Mapping) and "_target_" in value:
        return expected not in _SCALARS
    origin, args = typing.get_origin(expected), typing.get_args(expected)
    if origin is typing.Annotated:
        return fits(value, args[0])
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, arg) for arg in args)
    if origin is Literal:
        return any(type(value) is type(arg) and value == arg for arg in args)
    return _fits_container(value, origin or expected, args)


def _as_float(value: Any, expected: Any) -> Any:
    """``temperature: 1`` and ``temperature: 1.0`` are one value, and one identity."""
    kinds = (expected, *typing.get_args(expected))
    whole = isinstance(value, int) and not isinstance(value, bool)
    return float(value) if whole and float in kinds and int not in kinds else value


def _fits_container(value: Any, kind: Any, args: tuple[Any, ...]) -> bool:
    if not isinstance(kind, type):
        return True
    if kind in _SCALARS:
        return _SCALARS[kind](value)
    if issubclass(kind, Enum):
        return isinstance(value, kind) or value in kind.__members__ or value in [member.value for member in kind]
    if issubclass(kind, os.PathLike):
        return isinstance(value, str | os.PathLike)
    if issubclass(kind, Mapping):
        return isinstance(value, Mapping) and all(fits(v, args[1]) for v in value.values() if len(args) == 2)
    if kind is not str and issubclass(kind, Collection):
        return isinstance(value, list | tuple | set | frozenset) and _fits_items(list(value), kind, args)
    return isinstance(value, kind)


def _fits_items(items: list[Any], kind: type, args: tuple[Any, ...]) -> bool:
    if not args:
        return True
    if issubclass(kind, tuple) and args[-1] is not Ellipsis:
        return len(items) == len(args) and all(map(fits, items, args))
    return all(fits(item, args[0]) for item in items)


_SCALARS: dict[Any, Callable[[Any], bool]] = {
    bool: lambda v: isinstance(v, bool),
    int: lambda v: isinstance(v, int) and not isinstance(v, bool),
    float: lambda v: isinstance(v, int | float) and not isinstance(v, bool),
    str: lambda v: isinstance(v, str),
    types.NoneType: lambda v: v is None,
    None: lambda v: v is None,
}
_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", types.NoneType: "null"}
_PLURALS = {int: "whole numbers", float: "numbers", str: "texts"}


def describe(expected: Any) -> str:
    """A type hint in words: ``int | None`` is ``a whole number or null``."""
    origin, args = typing.get_origin(expected), typing.get_args(expected)
    if expected in _WORDS:
        return _WORDS[expected]
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(arg) for arg in args)
    if origin is Literal:
        return "one of " + ", ".join(str(arg) for arg in args)
    if isinstance(expected, type) and issubclass(expected, Enum):
        return "one of " + ", ".join(expected.__members__)
    if isinstance(kind := origin or expected, type):
        return _describe_class(kind, args)
    return str(expected)


def _describe_class(kind: type, args: tuple[Any, ...]) -> str:
    if issubclass(kind, os.PathLike):
        return "a path"
    if issubclass(kind, Mapping):
        return "a group of settings"
    if issubclass(kind, Sequence | set | frozenset):
        items = [_PLURALS.get(arg) or describe(arg) for arg in args if arg is not Ellipsis]
        return "a list" + (f" of {', '.join(items)}" if items else "")
    return f"a {kind.__name__} (a group with _target_)"


def hint_of(target: Callable[..., Any], name: str) -> Any:
    """The evaluated type hint of one parameter; Any without one, or where it is imported for type checkers only."""
    return _hint(target, name)


@lru_cache(maxsize=8192)  # a sweep asks for each class thousands of times
def _hint(target: Callable[..., Any], name: str) -> Any:
    parameter = _parameters(target).get(name)
    hint = Any if parameter is None or parameter.annotation is inspect.Parameter.empty else parameter.annotation
    if not isinstance(hint, str):
        return hint
    try:
        return eval(hint, _namespace(target))  # annotations of our own and of registered classes
    except (NameError, AttributeError, TypeError):
        return Any


@lru_cache(maxsize=1024)
def _parameters(target: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(target).parameters


def _namespace(target: Callable[..., Any]) -> dict[str, Any]:
    """Names that annotations may use; a dataclass has those of its bases."""
    owner = getattr(target, "__init__", target) if inspect.isclass(target) else target
    places = [each.__module__ for each in reversed(getattr(target, "__mro__", ()))]
    places.append(getattr(inspect.unwrap(owner), "__module__", None) or target.__module__)
    return {name: value for place in places if place in sys.modules for name, value in vars(sys.modules[place]).items()}


def _show(value: Any) -> str:
    words = {bool: "true/false", int: "a whole number", float: "a number", str: "text", list: "a list", dict: "a group"}
    return "null" if value is None else f"{value!r} ({words.get(type(value), type(value).__name__)})"
