"""What a run measured, as a hash: configurations with one fingerprint are the same run.

Class paths, values equal to a default, and paths of the machine do not count, so a class can move and an option with a
default can be added without orphaning a record.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from enum import Enum
from functools import cache
from pathlib import Path, PurePath
from typing import Any, get_args

import yaml

from bench.config.instantiate import locate
from bench.config.schema import WEIGHTS, RunConfig, conf_dir, sanitise
from bench.config.typecheck import hint_of
from bench.errors import UserError
from bench.utils import redact
from bench.utils.files import json_sha256

_NAMED = ("method", "dataset", "model")
OUTSIDE = frozenset({"paths", "tracker"})  # groups that do not change what is measured
_LABELLED = frozenset({"measure", "hardware"})  # groups whose name is a label: their values say everything
_SHORT = 12
_OWN = ("methods.", "bench.")
# Former names of choices, and of settings by group and choice, as stored configurations and cards have them.
MOVED_NAMES = {"method": {"bild_6_1": "bild", "speculative_sampling_6_1": "speculative_sampling"}}
MOVED_KEYS: dict[str, dict[str, str]] = {}  # "method.eagle": {"gamma": "num_draft_tokens"}; "train": for every choice
# Settings that are of no class, and their values in records that lack them.
_OF_GROUP = {("model", "weights"): WEIGHTS[0], ("model", "parallel"): 1}
# Settings that were measured once and for all, and are measured for each run today.
_GONE = {"method.medusa": {"draft_cost"}, "method.hydra_heads": {"draft_cost", "level_cost"}}
# Settings that do not count where another one takes their place.
_REPLACED = {"draft_model": ("skip_attention", "skip_mlp")}


def run_id(cfg: RunConfig, resolved: Mapping[str, Any]) -> str:
    """Name of a new run's folder: ``<method>-<dataset>-<model>-<fingerprint>``."""
    return _named(cfg, fingerprint(cfg.to_dict(), resolved))


def job_id(cfg: RunConfig) -> str:
    """Name of a sweep's job, whose revisions are not resolved yet; here paths do count."""
    return _named(cfg, json_sha256({key: value for key, value in cfg.to_dict().items() if key not in OUTSIDE})[:_SHORT])


def names(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Method, data set and model of a configuration, as they are called today; a quick look before ``fingerprint``."""
    found = ((group, redact.text(str((config.get(group) or {}).get("name")))) for group in _NAMED)
    return tuple(MOVED_NAMES.get(group, {}).get(name, name) for group, name in found)


def fingerprint(config: Mapping[str, Any], resolved: Mapping[str, Any]) -> str:
    """Hash of a configuration and of what it leaves open: revisions, machine, type, checkpoint.

    Args:
        config: composed today, or as an earlier run stored it.
        resolved: plain data by name; None counts as absent.
    """
    decided = {key: value for key, value in resolved.items() if value is not None}
    return json_sha256({"config": strip(config), "resolved": decided})[:_SHORT]


def definition_sha256(definition: Mapping[str, Any]) -> str:
    """Hash of what defines a checkpoint: method, ``train`` group, model, corpus, seed; as a job or a card has them."""
    kept = redact.tree(definition)
    train = _strip({"name": str(kept["method"]), **kept["train"]}, "train", None)
    return json_sha256({**kept, "train": train})


def strip(config: Mapping[str, Any]) -> dict[str, Any]:
    """A run's configuration without class paths, defaults, machine paths and the groups in ``OUTSIDE``."""
    kept = {key: value for key, value in redact.tree(config).items() if key not in OUTSIDE}
    found: dict[str, Any] = _strip(kept, "", RunConfig)
    for group in _LABELLED & found.keys():
        found[group].pop("name", None)
    return {key: value for key, value in found.items() if value != {}}


def _strip(group: Mapping[str, Any], where: str, kind: type | None) -> dict[str, Any]:
    """A group without its class and its defaults.

    Args:
        where: ``method``, ``train``, ...; empty for the configuration itself and for groups within groups.
        kind: the class where the group is known to be for one.
    """
    name = group.get("name")
    if where and isinstance(name, str):
        name = MOVED_NAMES.get(where, {}).get(name, name)
        renamed = MOVED_KEYS.get(where, {}) | MOVED_KEYS.get(f"{where}.{name}", {})
        gone = _GONE.get(f"{where}.{name}", ())
        group = {renamed.get(key, key): value for key, value in group.items() if key not in gone} | {"name": name}
    kind = kind or _class_of(where, name, group.get("_target_"))
    parameters = inspect.signature(kind).parameters if kind else {}
    found = {}
    for key, value in group.items():
        if key == "_target_":
            if not str(value).startswith(_OWN):  # of another package: its name says what it is
                found[key] = value
            continue
        default = parameters[key].default if key in parameters else _OF_GROUP.get((where, key), inspect.Parameter.empty)
        hint = _own_class(hint_of(kind, key)) if kind else None
        plain = _strip(value, key if kind is RunConfig else "", hint) if isinstance(value, Mapping) else _plain(value)
        both_default = plain == {} and default is not inspect.Parameter.empty and default is not None
        if not both_default and json.dumps(plain) != json.dumps(_plain(default), default=str):
            found[key] = plain
    unused = [key for replacement, keys in _REPLACED.items() if replacement in found for key in keys]
    return {key: value for key, value in found.items() if key not in unused}


def _plain(value: Any) -> Any:
    """``1.0`` and ``1`` are one value, and so are a tuple and a list."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Enum):
        return value.value
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _own_class(hint: Any) -> type | None:
    """The class of this project that a type hint names, if it names exactly one that is no dictionary's."""
    own = [kind for kind in (hint, *get_args(hint)) if inspect.isclass(kind) and kind.__module__.startswith(_OWN)]
    return own[0] if len(own) == 1 and not inspect.isabstract(own[0]) else None


def _class_of(group: str, name: Any, target: Any) -> type | None:
    """The class a stored group is for, wherever that is today: by its path, else by the group's name in conf/."""
    if not isinstance(target, str) and not group:
        return None
    for path in (target, _targets(group).get(name), _targets("").get(str(target).rpartition(".")[2])):
        found = _located(path) if path else None
        if found is not None:
            return found
    return None


@cache
def _located(path: str) -> type | None:
    try:
        return locate(path)
    except (UserError, ImportError):
        return None


@cache
def _targets(group: str) -> dict[str, str]:
    """Class paths in conf/: of a group by the name of the choice, of all groups by the name of the class."""
    found: dict[str, str] = {}
    for file in sorted(conf_dir().glob(f"{group or '**'}/*.yaml")):
        tree = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
        if group and "_target_" in tree:
            found[tree["name"]] = tree["_target_"]
        elif not group:
            found |= {path.rpartition(".")[2]: path for path in _paths(tree)}
    return found


def _paths(tree: Any) -> list[str]:
    nested = [path for value in tree.values() for path in _paths(value)] if isinstance(tree, Mapping) else []
    return [*nested, tree["_target_"]] if isinstance(tree, Mapping) and "_target_" in tree else nested


def _named(cfg: RunConfig, end: str) -> str:
    return "-".join((*(sanitise(_public(str(part["name"]))) for part in (cfg.method, cfg.dataset, cfg.model)), end))


def _public(name: str) -> str:
    """A name without the folders of this machine: of a path its last part."""
    shown = redact.text(name)
    return PurePath(shown).name if shown != name or Path(name).is_dir() else name
