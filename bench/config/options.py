"""``key=value`` words of a command line into a dataclass, checked as a configuration is; and the text of ``--help``."""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeVar

from bench.config.typecheck import check_arguments, did_you_mean, fits, hint_of
from bench.errors import OK, UserError, guard

T = TypeVar("T")
_PLACEHOLDERS = {Path: "PATH", tuple: "N,N", int: "N", float: "N"}
_COLUMN, _WIDTH = 27, 110  # of a help screen: where meanings start, and where lines end


def keys(kind: type) -> dict[str, str]:
    """Options of a dataclass and their fields; ``field(metadata={"key": ...})`` gives an option another name."""
    return {field.metadata.get("key", field.name): field.name for field in fields(kind)}


def parse(kind: type[T], words: Iterable[str], **given: Any) -> tuple[T, list[str]]:
    """The options among the words of a command line, and the other words.

    A list may lack its brackets, and a single value is a list of one.

    Args:
        kind: a dataclass.
        words: of the command line.
        given: fields that are no options.

    Raises:
        UserError: a value that cannot be read, is of the wrong type, or is missing.
    """
    names = {key: name for key, name in keys(kind).items() if name not in given}
    values: dict[str, Any] = {}
    others: list[str] = []
    for word in words:
        key, equals, text = word.partition("=")
        if equals and key in names:
            values[names[key]] = _read(key, text, hint_of(kind, names[key]))
        else:
            others.append(word)
    checked = check_arguments(kind, values, provided=given)
    return kind(**{name: _built(value, hint_of(kind, name)) for name, value in checked.items()}, **given), others


def refuse(words: Sequence[str], command: str, known: Iterable[str]) -> None:
    """Refuse the words that no option took.

    Args:
        words: what is left of the command line.
        command: as in ``cost what-if``.
        known: its options.

    Raises:
        UserError: there is such a word.
    """
    if not words:
        return
    key, equals, _ = words[0].partition("=")
    what = f"Unknown setting '{key}'." if equals else f"Cannot read '{words[0]}'."
    hint = did_you_mean(key, known) or ("" if equals else " A setting is written key=value.")
    raise UserError(f"{what}{hint} (python -m bench {command} --help)")


def _read(key: str, text: str, hint: Any) -> Any:
    """The value as YAML reads it; text and paths as they are, and only true and false are booleans."""
    import yaml

    kinds = {typing.get_origin(kind) or kind for kind in (hint, *typing.get_args(hint))}
    if NoneType in kinds and text == "null":
        return None
    listed = tuple in kinds or list in kinds
    if not listed and kinds & {str, Path, Literal}:
        return text
    try:
        found = yaml.safe_load(f"[{text}]" if listed and "," in text and not text.startswith("[") else text)
    except yaml.YAMLError:
        raise UserError(f"{key} cannot be read, got '{text}'. Set {key}=VALUE or {key}=[VALUE,VALUE].") from None
    if isinstance(found, bool) and text not in ("true", "false"):
        return text
    if isinstance(found, str) and float in kinds and re.fullmatch(r"[-+\d.]+e[-+\d]+", found, re.IGNORECASE):
        return float(found)  # YAML reads 1e-3 as text
    return [found] if listed and fits([found], hint) else found


def _built(value: Any, hint: Any) -> Any:
    """What the dataclass holds for a value of YAML."""
    kinds = (hint, *typing.get_args(hint))
    if isinstance(value, list):
        numbers = any(float in typing.get_args(kind) for kind in kinds)
        return tuple(float(item) if numbers else item for item in value)
    return Path(value) if isinstance(value, str) and Path in kinds else value


def command(
    run: Callable[[list[str]], int], help_text: Callable[[], str], argv: Sequence[str] | None, *, measures: bool = True
) -> int:
    """Run a command, or print its help; returns the exit code.

    Args:
        run: takes the words of the command line.
        help_text: for ``-h`` and ``--help``.
        argv: the words; None: those of the process.
        measures: see ``bench.errors.guard``.
    """
    words = list(sys.argv[1:] if argv is None else argv)

    def act() -> int:
        if "-h" in words or "--help" in words:
            print(help_text())
            return OK
        return run(words)

    return guard(act, measures=measures)


# -------------------------------------------------------------------------------------------------------------- help


def help_text(usage: str, summary: str, examples: Sequence[str], options: Mapping[str, type]) -> str:
    """The ``--help`` of a command.

    Args:
        usage: what follows ``python -m bench``.
        summary: what it does.
        examples: command lines.
        options: heading of each group of options, and its dataclass.
    """
    parts = [f"Usage: python -m bench {usage}", summary.strip()]
    parts += [f"{name}:\n{describe(kind)}" for name, kind in options.items()]
    return "\n\n".join([*parts, "\n".join(["Example:", *(f"  {line}" for line in examples)])])


def describe(kind: type) -> str:
    """One line for each option: its default, and its meaning from ``Attributes`` in the docstring."""
    meanings: dict[str, str] = {}
    for each in kind.__mro__:
        documented = inspect.cleandoc(each.__doc__ or "").partition("Attributes:\n")[2]
        meanings |= dict(re.findall(r"^ {4}(\w+): ((?:.+\n?)(?: {8}.+\n?)*)", documented, re.MULTILINE))
    defaults = {field.name: field.default for field in fields(kind)}
    return "\n".join(
        _line(f"{key}={_shown(defaults[name], hint_of(kind, name))}", meanings[name])
        for key, name in keys(kind).items()
        if name in meanings
    )


def _line(option: str, meaning: str) -> str:
    first, rest = f"  {option}".ljust(_COLUMN - 1) + " ", " " * _COLUMN
    return textwrap.fill(" ".join(meaning.split()), _WIDTH, initial_indent=first, subsequent_indent=rest)


def _shown(default: Any, hint: Any) -> str:
    if default in (None, MISSING, ""):
        kinds = {typing.get_origin(kind) or kind for kind in (hint, *typing.get_args(hint))}
        return next((name for kind, name in _PLACEHOLDERS.items() if kind in kinds), "NAME")
    if isinstance(default, tuple):
        return f"[{','.join(map(str, default))}]"
    return str(default).lower() if isinstance(default, bool) else str(default)
