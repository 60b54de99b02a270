"""``conf/gpu.yaml``: what travels to the machine with the GPU, and what is done there."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from bench.config.schema import conf_dir
from bench.config.typecheck import check_arguments, did_you_mean
from bench.errors import UserError

FILE = "gpu.yaml"
PROGRAMS = ("bench", "pytest", "python")  # first word of a command


@dataclass(frozen=True)
class Contents:
    """What is packed.

    Attributes:
        code: files and folders of the checkout.
        wheels: packages that the other machine lacks, in the versions of constraints.txt.
        built: those of ``wheels`` that exist as source only and are built here.
        platforms: of wheels with compiled parts, as pip names them.
        data: data sets by name.
        checkpoints: patterns in data/checkpoints by the name of the item that they travel as.
    """

    code: tuple[str, ...]
    wheels: tuple[str, ...]
    built: tuple[str, ...]
    platforms: tuple[str, ...]
    data: tuple[str, ...]
    checkpoints: Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Stage:
    """Some commands with one time limit.

    Attributes:
        name: of the stage and of its log.
        commands: words of each; the first is ``bench``, ``pytest`` or ``python``.
        limit_s: seconds for all commands together.
        needs: items of the pack without which it is not started.
        required: nothing else is run if it fails.
        group: ``measure`` is what runs unless stages are named, ``train`` takes long.
    """

    name: str
    commands: tuple[tuple[str, ...], ...]
    limit_s: float
    needs: tuple[str, ...] = ()
    required: bool = False
    group: str = "measure"

    def __post_init__(self) -> None:
        if self.limit_s <= 0:
            raise UserError(f"limit_s of the stage {self.name} must be above 0, got {self.limit_s}. Correct {FILE}.")
        for words in self.commands:
            if not words or words[0] not in PROGRAMS:
                raise UserError(
                    f"A command of the stage {self.name} must begin with {', '.join(PROGRAMS)}, got "
                    f"'{' '.join(words)}'. Correct {FILE}."
                )


@dataclass(frozen=True)
class Plan:
    """Contents and stages, in order of value."""

    contents: Contents
    stages: tuple[Stage, ...]

    def chosen(self, names: Sequence[str] | None) -> tuple[Stage, ...]:
        """The stages of some names or groups, in the order of the plan; None: the group ``measure``.

        Raises:
            UserError: no such stage.
        """
        wanted = ["measure"] if names is None else list(names)
        known = {stage.name for stage in self.stages} | {stage.group for stage in self.stages}
        for name in wanted:
            if name not in known:
                hint = did_you_mean(name, known)
                raise UserError(f"stage must be one of {', '.join(sorted(known))}, got '{name}'.{hint}")
        return tuple(stage for stage in self.stages if stage.name in wanted or stage.group in wanted)


def read(values: Mapping[str, str]) -> Plan:
    """The plan, with ``{name}`` in commands replaced.

    Args:
        values: by name; an empty one leaves nothing behind.

    Raises:
        UserError: the file has an error.
    """
    content: Any = yaml.safe_load((conf_dir() / FILE).read_text(encoding="utf-8"))
    packed = content["contents"]
    lists = {name: tuple(value) for name, value in packed.items() if isinstance(value, list)}
    return Plan(
        Contents(**{**packed, **lists}), tuple(_stage(name, entry, values) for name, entry in content["stages"].items())
    )


def _stage(name: str, entry: Mapping[str, Any], values: Mapping[str, str]) -> Stage:
    check_arguments(
        Stage, {key: value for key, value in entry.items() if key != "commands"}, provided=("name", "commands")
    )
    commands = tuple(tuple(shlex.split(text.format(**values))) for text in entry["commands"])
    needs = tuple(entry.get("needs", ()))
    return Stage(**{**entry, "name": name, "commands": commands, "needs": needs, "limit_s": float(entry["limit_s"])})
