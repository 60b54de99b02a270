"""Find the record of a run: by what was measured, not by the name of its folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import yaml

from bench.config import identity
from bench.config.schema import RunConfig
from bench.errors import UserError
from bench.records import run_folder
from bench.utils import files, redact

LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast where libyaml is there


@dataclass(frozen=True)
class Entry:
    """A recorded run: where, its manifest, and its configuration as stored."""

    path: Path
    manifest: dict[str, Any]
    config: dict[str, Any]

    @cached_property
    def settings(self) -> dict[str, Any]:
        """See ``identity.strip``."""
        return identity.strip(self.config)

    @cached_property
    def fingerprint(self) -> str:
        """See ``identity.fingerprint``."""
        return identity.fingerprint(self.config, resolved(self.manifest))


def find(results: Path, cfg: RunConfig, decided: Mapping[str, Any]) -> Path | None:
    """The folder that holds this run, whatever it is called; a finished one first.

    Args:
        decided: as ``resolved`` has it.
    """
    wanted, names = identity.fingerprint(cfg.to_dict(), decided), identity.names(cfg.to_dict())
    found = [e for e in entries(results) if identity.names(e.config) == names and e.fingerprint == wanted]
    return min(found, key=lambda entry: entry.manifest.get("status") != "finished").path if found else None


def similar(results: Path, cfg: RunConfig) -> list[Path]:
    """Folders of finished records of such a run on any machine, those with most settings in common first.

    Its number of prompts and tokens may differ, and how thoroughly it was measured; all else is the same.
    """
    config = cfg.to_dict()
    names, wanted = identity.names(config), identity.strip(config)
    same = [entry for entry in entries(results) if identity.names(entry.config) == names]
    found = [entry for entry in same if entry.manifest.get("status") == "finished"]
    found = [entry for entry in found if _core(entry.settings) == _core(wanted)]
    found.sort(key=lambda entry: sum(entry.settings.get(key) != wanted.get(key) for key in entry.settings))
    return [entry.path for entry in found]


def _core(settings: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in settings.items() if key not in ("hardware", "measure", "max_new_tokens")}
    kept |= {key: (settings.get("measure") or {}).get(key) for key in ("refill", "prefix_cache")}
    return kept | {"dataset": {key: value for key, value in kept["dataset"].items() if key != "limit"}}


def entries(results: Path) -> Iterator[Entry]:
    """The recorded runs of a folder; those that cannot be read are left out."""
    for folder in run_folder.folders(results):
        config = _config(folder)
        try:
            manifest = run_folder.read_manifest(folder) or {}
        except UserError as error:
            _warn(f"left out: {error}")
        else:
            if config is not None:
                yield Entry(folder, manifest, config)


@cache
def _warn(message: str) -> None:
    """Once for each message, as every job of a sweep looks at all records."""
    print(message, file=sys.stderr)


def resolved(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What a recorded run's configuration left open: revisions, checkpoint, processor, threads, type."""
    model, dataset = manifest.get("model") or {}, manifest.get("dataset") or {}
    trial = manifest.get("calibration") or {}
    return {
        "part": (manifest.get("part") or {}).get("sha256"),
        "calibration": (trial.get("corpus") or {}).get("sha256"),
        "files": manifest.get("files"),
        "model_revision": model.get("revision"),
        "data_revision": (dataset.get("revision") or {}).get("content"),
        **machine_of(manifest.get("hardware") or {}),
        "dtype": manifest.get("dtype"),
    }


def machine_of(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Of the facts of a machine those that distinguish runs: ``device_name``, cores and threads."""
    return {
        "device": run_folder.device_name(facts) if facts else None,
        "cores": facts.get("cores"),
        "threads": facts.get("threads"),
    }


def local_files(method: Mapping[str, Any]) -> dict[str, str] | None:
    """sha256 of the files and folders that a method's settings name by a path, which a stored configuration hides.

    The checkpoint is left out: it counts by its content anyway.
    """
    paths = {key: Path(value).expanduser() for key, value in method.items() if isinstance(value, str)}
    hidden = {key: path for key, path in paths.items() if redact.text(method[key]) != method[key] and path.exists()}
    found = {key: files.digest(files.below(path)) for key, path in hidden.items() if key != "checkpoint"}
    return found or None


def _config(folder: Path) -> dict[str, Any] | None:
    file = folder / run_folder.CONFIG
    try:
        found = yaml.load(file.read_text(encoding="utf-8"), Loader=LOADER) if file.is_file() else None
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return None
    return found if isinstance(found, dict) else None
