"""The command line that composes a configuration: the way back from ``compose``."""

from __future__ import annotations

import inspect
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import yaml

from bench.config import compose, instantiate
from bench.config.identity import MOVED_NAMES
from bench.config.schema import conf_dir
from bench.errors import UserError
from bench.utils.text import flatten

_GROUPS = ("method", "model", "dataset", "sampling", "measure", "hardware")
_IN_MEMORY = frozenset({"InMemoryModel", "GivenPrompts"})
_PLAIN = re.compile(r"[\w./%-]+")  # values that Hydra reads as they are


def command(config: Mapping[str, Any], *options: str, method: str | None = None) -> str:
    """``python -m bench OPTIONS WORDS``, quoted for a shell; see ``words``."""
    return shlex.join(["python", "-m", "bench", *options, *words(config, method)])


def words(config: Mapping[str, Any], method: str | None = None) -> list[str]:
    """The shortest overrides that compose a run's configuration.

    Settings that no longer exist are left out. A setting of the method that is newer than the configuration has the
    default of the class, which is what the method did before, whatever the default of today's file is.

    Args:
        config: as ``RunConfig.to_dict`` has it today, or as an earlier run stored it.
        method: another value for ``method=``, such as ``glob(*)``; its settings are left out then.

    Raises:
        UserError: model or prompts were in the memory of a Python program.
    """
    choices = {group: _choice(group, config.get(group) or {}) for group in _GROUPS}
    chosen = {group: f"{group}={choice}" for group, choice in choices.items()}
    base, usual = _composed(tuple(chosen.values())), _usual()
    kept = {key: value for key, value in config.items() if not (method and key == "method")}
    changed = [
        f"{key}={written(value)}"
        for key, value in _settings(kept, base)
        if key in base and not key.endswith("._target_") and not _equal(value, base[key]) and not _moved(key, value)
    ]
    changed += [] if method else _newer(config.get("method") or {}, base)
    chosen["method"] = f"method={method or choices['method']}"
    return [word for group, word in chosen.items() if group == "method" or choices[group] != usual.get(group)] + changed


def _settings(values: Mapping[str, Any], base: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """As ``flatten``, but what stands for a single value of ``base``, such as a draft model for null, stays whole."""
    for name, value in values.items():
        key = f"{above}{name}"
        if isinstance(value, Mapping) and key not in base:
            yield from _settings(value, base, f"{key}.")
        else:
            yield key, value


def _choice(group: str, values: Mapping[str, Any]) -> str:
    """Which file of conf/ the values started from: by name, by class, by their number of differences."""
    choices = compose.every_group()[group]
    name = str(values.get("name"))
    name = MOVED_NAMES.get(group, {}).get(name, name)
    if name in choices:
        return name
    flat, target = dict(flatten(values)), str(values.get("_target_")).rpartition(".")[2]
    if target in _IN_MEMORY:
        raise UserError(
            f"{group}={name} was in the memory of a Python program. Repeat the run with decodebench.benchmark."
        )
    same = [each for each in choices if target == str(_file(group, each).get("_target_")).rpartition(".")[2]]
    plain = [each for each in same or choices if _file(group, each).get("name") == "???"]
    return min(plain or same or choices, key=lambda each: _differences(flat, dict(flatten(_file(group, each)))))


def _differences(values: Mapping[str, Any], known: Mapping[str, Any]) -> int:
    return sum(not _equal(values.get(key), value) for key, value in known.items())


@cache
def _file(group: str, choice: str) -> dict[str, Any]:
    found = yaml.safe_load(compose.config_file(group, choice).read_text(encoding="utf-8"))
    return dict(found or {})


@cache
def _composed(chosen: tuple[str, ...]) -> dict[str, Any]:
    return dict(flatten(compose.compose_partly(chosen)))


@cache
def _usual() -> dict[str, str]:
    """The choices of config.yaml."""
    listed = yaml.safe_load((conf_dir() / "config.yaml").read_text(encoding="utf-8"))["defaults"]
    return {group: choice for each in listed if isinstance(each, dict) for group, choice in each.items()}


def _newer(stored: Mapping[str, Any], base: Mapping[str, Any]) -> list[str]:
    parameters = _parameters(base["method._target_"])
    defaults = {f"method.{name}": found.default for name, found in parameters.items() if f"method.{name}" in base}
    return [
        f"{key}={written(default)}"
        for key, default in defaults.items()
        if key.removeprefix("method.") not in stored
        and default is not inspect.Parameter.empty
        and not _equal(default, base[key])
    ]


@cache
def _parameters(target: str) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(instantiate.locate(target)).parameters


def _moved(key: str, value: Any) -> bool:
    """A former name of the choice."""
    group, _, last = key.rpartition(".")
    return last == "name" and value in MOVED_NAMES.get(group, {})


def _equal(a: Any, b: Any) -> bool:
    return bool(json.dumps(a, default=list) == json.dumps(b, default=list) or a == b)


def written(value: Any) -> str:
    """A value as Hydra reads it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(map(written, value))}]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{written(each)}" for key, each in value.items()) + "}"
    text = str(value)
    quoted = text.replace("\\", "\\\\").replace("'", "\\'")
    plain = _PLAIN.fullmatch(text) and isinstance(yaml.safe_load(text), str)  # "null" is a value of its own
    return text if not isinstance(value, str) or plain else f"'{quoted}'"
