"""From a command line to a checked configuration, or to one message that says what to do instead."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.config.schema import RunConfig, conf_dir, set_path_defaults
from bench.config.typecheck import did_you_mean
from bench.errors import UserError
from bench.utils.text import first_line, flatten

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig

VERSION_BASE = "1.3"
TRAIN, SWEEP, CLUSTER = "train", "sweep", "cluster"  # groups that are no part of a run
_LONGEST_WORD = 20_000
_ASKS_HYDRA = re.compile(r"^defaults:|@package|\$\{|\?\?\?", re.MULTILINE)
_SEARCHPATH = "hydra.searchpath"
_REFERS = re.compile(r"\$\{(?!oc\.env|now|hydra)")  # an interpolation of another setting


def groups() -> dict[str, list[str]]:
    """The config groups of a run and their choices: ``{"dataset": ["demo", ...], ...}``."""
    return {name: choices for name, choices in every_group().items() if name not in (TRAIN, SWEEP, CLUSTER)}


def every_group() -> dict[str, list[str]]:
    """All config groups and their choices, read from the folder."""
    folders = sorted(folder for folder in conf_dir().iterdir() if folder.is_dir())
    return _listed(tuple((folder, folder.stat().st_mtime_ns) for folder in folders))


@cache
def _listed(folders: tuple[tuple[Path, int], ...]) -> dict[str, list[str]]:
    """Choices by group; each folder with the time of its last change."""
    found = {folder.name: sorted(file.stem for file in folder.glob("*.yaml")) for folder, _ in folders}
    return {name: choices for name, choices in found.items() if choices}


def compose(overrides: Sequence[str]) -> RunConfig:
    """One run from the words of a command line.

    Raises:
        UserError: a word that cannot be read, an unknown group, choice or setting, a missing or mistyped value.
    """
    with _hydra():
        _check_words(overrides)
        return RunConfig.from_dict(_resolve(_compose(overrides)))


def compose_partly(overrides: Sequence[str]) -> dict[str, Any]:
    """The configuration as plain data, with ``???`` where a setting still has to be given."""
    from omegaconf import OmegaConf

    with _hydra():
        found: Any = OmegaConf.to_container(_compose(overrides), resolve=True)
        return dict(found)


def compose_training(overrides: Sequence[str], choice: str) -> tuple[RunConfig, dict[str, Any]]:
    """What training needs of a run's configuration, and the ``train`` group of one choice.

    Raises:
        UserError: see ``compose``.
    """
    words = [f"+{TRAIN}={choice}", *overrides]
    with _hydra():
        _check_words(words)
        resolved = _resolve(_compose(words))
        return RunConfig.from_dict({key: value for key, value in resolved.items() if key != TRAIN}), resolved[TRAIN]


def compose_cluster(overrides: Sequence[str]) -> dict[str, Any]:
    """The ``cluster`` group, ``local`` unless the words choose another.

    Raises:
        UserError: see ``compose``.
    """
    chosen = [word.partition("=")[2] for word in overrides if word.partition("=")[0] == CLUSTER] or ["local"]
    words = [word for word in overrides if word.partition("=")[0] != CLUSTER]
    if len(chosen) > 1 or chosen[0] not in every_group()[CLUSTER]:
        raise unknown_choice(CLUSTER, " and ".join(chosen))
    words = [f"+{CLUSTER}={chosen[0]}", *words]
    with _hydra():
        _check_words(words)
        group: dict[str, Any] = _resolve(_compose(words))[CLUSTER]
        return group


def compose_jobs(overrides: Sequence[str]) -> list[tuple[list[str], RunConfig]]:
    """The words and the run of every job of a sweep, so that a mistake in the last job shows before the first starts.

    Hydra composes what the jobs share once, and each choice that is more than a plain file; plain files and the other
    settings of a job replace values in the result, which is a hundred times faster.

    Raises:
        UserError: see ``compose``.
    """
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.errors import HydraException

    with _hydra():
        parsed = _check_words(overrides)
        try:
            (jobs,) = BasicSweeper.split_arguments(parsed, max_batch_size=None)
        except HydraException as error:
            raise UserError(_one_line(error)) from error
        swept = {override.get_key_element() for override in parsed if override.is_sweep_override()}
        composed = _Composed(swept & set(groups()), swept - set(groups()))
        return [(_kept(job), composed.run(job)) for job in jobs]


def compose_each(lines: Sequence[Sequence[str]]) -> list[RunConfig]:
    """The runs of several command lines. What they share is composed once, see ``compose_jobs``.

    Raises:
        UserError: see ``compose``.
    """
    with _hydra():
        _check_words(list(dict.fromkeys(word for line in lines for word in line)))
        shared = set.intersection(*map(set, lines)) if lines else set()
        varied = {word.partition("=")[0] for line in lines for word in line if word not in shared}
        composed = _Composed(varied & set(groups()), varied - set(groups()))
        return [composed.run(line) for line in lines]


def _kept(words: Sequence[str]) -> list[str]:
    """Without settings of Hydra itself, but for the folders in which a job finds its own methods."""
    return [word for word in words if not word.startswith("hydra") or word.startswith(f"{_SEARCHPATH}=")]


class _Composed:
    """Remembers resolved configurations by choices of groups; None where a setting refers to another one.

    Args:
        groups: in which the jobs differ. A choice that is a plain file takes the place of the one before it.
        settings: in which the jobs differ.
    """

    def __init__(self, groups: Collection[str], settings: Collection[str]) -> None:
        self._groups, self._settings = groups, settings
        self._known: dict[tuple[str, ...], tuple[dict[str, Any] | None, list[str]]] = {}
        self._read: dict[str, list[Override]] = {}

    def run(self, words: Sequence[str]) -> RunConfig:
        """The run of one job."""
        own = [word for word in words if self._is_own(word)]
        common = [word for word in words if word not in own]
        choices = {group: choice for group, _, choice in (w.partition("=") for w in common) if group in self._groups}
        tree = self._chosen(common, choices)
        for word in own:
            tree = self._with(tree, word)
        return RunConfig.from_dict(_resolve(_compose(words)) if tree is None else tree)

    def _is_own(self, word: str) -> bool:
        """Whether it sets a value in which jobs differ, or one of a group in which they do."""
        key = word.partition("=")[0]
        group = re.split(r"[.@]", key.lstrip("+~"))[0]
        return key in self._settings or (group in self._groups and key not in self._groups)

    def _chosen(self, common: Sequence[str], choices: Mapping[str, str]) -> dict[str, Any] | None:
        files = {group: _plain_file(conf_dir(), group, choice) for group, choice in choices.items()}
        found, shared = self._beside(common, files)
        if changed := [group for group in shared if files.get(group)]:
            files |= dict.fromkeys(changed)  # composed with its choice, where another choice has a say: measure=quick
            found, _ = self._beside(common, files)
        return None if found is None else deepcopy(found | {group: tree for group, tree in files.items() if tree})

    def _beside(self, common: Sequence[str], files: Mapping[str, Any]) -> tuple[dict[str, Any] | None, list[str]]:
        """What all words compose but those of files, and its groups that are not as any of their files."""
        words = tuple(word for word in common if files.get(word.partition("=")[0]) is None)
        if words not in self._known:
            tree = _settled(words)
            self._known[words] = tree, [group for group in self._groups if tree and not _is_a_file(tree, group)]
        return self._known[words]

    def _with(self, tree: dict[str, Any] | None, word: str) -> dict[str, Any] | None:
        """The tree with a value replaced; None where the word does more than replace one plain value by another."""
        if word not in self._read:
            self._read[word] = _check_words([word])
        for override in self._read[word] if tree else ():
            *path, last = override.key_or_group.split(".")
            place: Any = tree
            for key in path:
                place = place.get(key) if isinstance(place, dict) else None
            value = override.value()
            plain = not (override.is_add() or override.is_delete() or isinstance(value, dict) or "${" in str(value))
            if not plain or not isinstance(place, dict) or last not in place or isinstance(place[last], dict):
                return None
            place[last] = deepcopy(value)
        return tree


@cache
def _plain_file(conf: Path, group: str, choice: str) -> dict[str, Any] | None:
    """What a choice puts under its group; None where Hydra has more to do than to read its file."""
    from omegaconf import OmegaConf

    file = conf / group / f"{choice}.yaml"
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    if not text or _ASKS_HYDRA.search(text) or (conf / "local.yaml").exists():
        return None
    shared: Any = OmegaConf.load(conf / "config.yaml")
    merged: Any = OmegaConf.to_container(OmegaConf.merge(shared.get(group, {}), OmegaConf.load(file)))
    return dict(merged)


def _is_a_file(tree: Mapping[str, Any], group: str) -> bool:
    """Whether a group has what one of its choices puts there, and nothing by a choice of another group."""
    found = tree.get(group)
    return any(found == _plain_file(conf_dir(), group, choice) for choice in groups()[group])


def _settled(words: Sequence[str]) -> dict[str, Any] | None:
    from omegaconf import OmegaConf

    try:
        cfg = _compose(words)
        return None if _REFERS.search(OmegaConf.to_yaml(cfg)) else _resolve(cfg)
    except UserError:  # a later word may supply what is missing; if not, composing the whole job fails likewise
        return None


def _resolve(cfg: DictConfig) -> dict[str, Any]:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        missing = sorted(OmegaConf.missing_keys(cfg))
        resolved: Any = OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key}: {_one_line(error)}. Correct the value with ${{...}} in it.") from error
    if missing:
        raise UserError(f"{missing[0]} must be set: {missing[0]}=VALUE.")
    return dict(resolved)


def unknown_choice(group: str, choice: str) -> UserError:
    """``Unknown method 'egle'. Did you mean 'eagle'? (python -m bench list methods)``"""
    hint = did_you_mean(choice, every_group().get(group, []))
    return UserError(f"Unknown {group} '{choice}'.{hint} (python -m bench list {plural(group)})")


def plural(group: str) -> str:
    """The group as a heading: ``methods``, ``datasets``; ``hardware`` has no plural."""
    return group + "s" if group in {"method", "model", "dataset", "tracker", "sweep"} else group


@contextmanager
def _hydra() -> Iterator[None]:
    from hydra import initialize_config_dir

    set_path_defaults()
    with initialize_config_dir(str(conf_dir()), job_name="bench", version_base=VERSION_BASE):
        yield


def _compose(overrides: Sequence[str]) -> DictConfig:
    from hydra import compose as hydra_compose
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        return hydra_compose("config", overrides=list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise _diagnose(overrides, error) from error


def _check_words(overrides: Sequence[str]) -> list[Override]:
    """Parse every word as an override."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    parsed = []
    for word in overrides:
        if len(word) > _LONGEST_WORD:
            raise UserError(f"'{word[:40]}...' must have at most {_LONGEST_WORD} characters, got {len(word)}.")
        if word in groups():
            raise UserError(f"'{word}' has no value. Choose one: {word}=NAME (python -m bench list {plural(word)})")
        try:
            found = parser.parse_overrides([word])  # unlike parse_override it makes glob(*) work
        except HydraException as error:
            raise UserError(
                f"Cannot read '{word}'. A setting is written key=value; quote a value with blanks, commas or "
                f"""brackets: 'key="a, b"'."""
            ) from error
        for override in found:
            _check_choice(override)
        parsed += found
    return parsed


def _check_choice(override: Override) -> None:
    """Refuse what Hydra answers with an error of its own."""
    key, value = override.key_or_group, override.value()
    if not key:
        raise UserError(f"'{override.input_line}' has no key. A setting is written key=value.")
    if key in groups() and not override.is_sweep_override() and not isinstance(value, str | list):
        raise UserError(f"{key} must be a name, got {value}. (python -m bench list {plural(key)})")
    if override.is_sweep_override() and key in groups() and not list(override.sweep_string_iterator()):
        raise UserError(f"No {key} matches '{override.input_line}'. (python -m bench list {plural(key)})")
    if key == _SEARCHPATH:
        for path in value if isinstance(value, list) else [value]:
            place = str(path).removeprefix("file://")
            if "://" not in place and not Path(place).is_dir():
                raise UserError(f"hydra.searchpath must name folders that exist, got {place}.")


def _diagnose(overrides: Sequence[str], error: Exception) -> UserError:
    """The first word of the command line that does not fit, else Hydra's own reason."""
    for override in _check_words(overrides):
        if override.key_or_group.startswith("hydra"):
            continue
        if override.is_sweep_override():
            return UserError(f"'{override.input_line}' has several values. Add -m for a sweep over them.")
        if found := _misfit(override, overrides):
            return found
    return UserError(_one_line(error))


def _misfit(override: Override, overrides: Sequence[str]) -> UserError | None:
    key, choices = override.key_or_group, groups()
    if key in choices:
        value = str(override.value())
        return None if value in choices[key] else unknown_choice(key, value)
    if override.is_add():
        return None
    if (known := _settings(overrides, choices)) and key not in known:
        group = key.split(".")[0]
        choice = known.get(f"{group}.name")
        where = f"show {group}/{choice}" if choice in every_group().get(group, []) else "--help"
        return UserError(f"Unknown setting '{key}'.{did_you_mean(key, known)} (python -m bench {where})")
    return None


def _settings(overrides: Sequence[str], choices: dict[str, list[str]]) -> dict[str, Any]:
    """All keys that the chosen groups offer, with their values."""
    from hydra import compose as hydra_compose
    from hydra.errors import HydraException
    from omegaconf import OmegaConf

    chosen = [o for o in overrides if (p := o.split("=")[0]) in choices and o.split("=", 1)[1] in choices[p]]
    chosen += [o for o in overrides if o.startswith((f"+{TRAIN}=", f"+{CLUSTER}="))]
    try:
        plain: Any = OmegaConf.to_container(hydra_compose("config", overrides=chosen), resolve=False)
    except HydraException:  # the files themselves do not compose; the first error says why
        return {}
    parents = {key.rsplit(".", depth)[0]: None for key, _ in flatten(plain) for depth in range(1, key.count(".") + 1)}
    return dict.fromkeys(choices) | parents | dict(flatten(plain))


def _one_line(error: Exception) -> str:
    """The first line of a message that Hydra spreads over many."""
    return re.sub(r"\s+", " ", first_line(error)).rstrip(".")


def config_file(group: str, choice: str) -> Path:
    """The YAML file of one choice.

    Raises:
        UserError: no such group or choice.
    """
    choices = every_group()
    if group not in choices:
        raise UserError(f"Unknown group '{group}'.{did_you_mean(group, choices)} Groups: {', '.join(choices)}.")
    if choice not in choices[group]:
        raise unknown_choice(group, choice)
    return conf_dir() / group / f"{choice}.yaml"


def merged(group: str, choice: str) -> str:
    """The YAML of one choice, with what it inherits.

    Raises:
        UserError: no such group or choice.
    """
    from omegaconf import OmegaConf

    text = config_file(group, choice).read_text(encoding="utf-8").rstrip()
    if "\ndefaults:" not in text or text.startswith("# @package"):
        return text
    comments = takewhile(lambda line: line.startswith("#"), text.splitlines())
    with _hydra():
        found = _compose([f"{'' if group in groups() else '+'}{group}={choice}"])[group]
    return "\n".join([*comments, OmegaConf.to_yaml(found).rstrip()])
