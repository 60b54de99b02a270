"""What earlier records say of a configuration: done, cut, failed; and how long similar runs took.

A record counts if it has the fingerprint that the configuration would get here: with the processor, threads and type of
this machine, the checkpoint and the local files of today, and the revisions of the record. A new revision of a model on
the hub or a changed data set is only found by the run itself.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, Literal

from bench.config import identity, instantiate
from bench.config.schema import RunConfig
from bench.errors import UserError
from bench.models import artifacts
from bench.records import lookup, run_folder
from bench.records.lookup import Entry
from bench.utils import files

State = Literal["new", "cut", "failed", "noisy", "queued", "running", "done", "invalid", "incompatible"]
# Of several records for one configuration the first of these counts.
_PREFERRED: tuple[State, ...] = ("done", "running", "invalid", "noisy", "cut", "failed")
_PARTS = ("loop", "warmup", "cost_curve", "quality", "agreement")  # that make up the time of a run


@dataclass(slots=True)
class Archive:
    """The records of one results folder.

    Attributes:
        entries: by the names of method, data set and model.
        here: jobs run on this machine, and only its own records count.
    """

    entries: dict[tuple[str, ...], list[Entry]] = field(default_factory=dict)
    here: bool = True
    _grouped: dict[tuple[str, ...], tuple[dict[str, list[Entry]], dict[str, list[float]]]] = field(default_factory=dict)
    _known: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, results: Path, *, here: bool) -> Archive:
        archive = cls(here=here)
        for entry in lookup.entries(results):
            archive.entries.setdefault(identity.names(entry.config), []).append(entry)
        return archive

    def state(self, cfg: RunConfig) -> tuple[State, str, float]:
        """Of the job: its state, why it failed or is INVALID, and the share that is left."""
        config, found = cfg.to_dict(), []
        if (names := identity.names(config)) in self.entries:
            known = self._group(names)[0].get(_key(identity.strip(config)), [])
            found = [_state_of(entry) for entry in known if self._fits(entry, cfg)]
        return min(found, key=lambda each: _PREFERRED.index(each[0]), default=("new", "", 1.0))

    def finished(self, cfg: RunConfig) -> Entry | None:
        """The latest finished record of the job."""
        known = (
            self._group(names)[0].get(_key(identity.strip(cfg.to_dict())), [])
            if (names := identity.names(cfg.to_dict())) in self.entries
            else []
        )
        found = [entry for entry in known if entry.manifest.get("status") == "finished" and self._fits(entry, cfg)]
        return max(found, key=lambda entry: str(entry.manifest.get("started_at")), default=None)

    def seconds(self, cfg: RunConfig) -> float | None:
        """What the most similar runs took: of the same method, else of any."""
        config = cfg.to_dict()
        names = identity.names(config)
        similar = [known for known in self.entries if known[1:] == names[1:]]
        like = _similar(identity.strip(config)) if similar else ""
        for found in ([names] if names in similar else [], similar):
            if times := [time for known in found for time in self._group(known)[1].get(like, [])]:
                return median(times)
        return None

    def _group(self, names: tuple[str, ...]) -> tuple[dict[str, list[Entry]], dict[str, list[float]]]:
        """Of the records with these names: by their settings, and the seconds of finished ones by ``_similar``."""
        if names not in self._grouped:
            by_settings: dict[str, list[Entry]] = {}
            times: dict[str, list[float]] = {}
            for entry in self.entries[names]:
                by_settings.setdefault(_key(entry.settings), []).append(entry)
                spent: dict[str, float] = entry.manifest.get("seconds") or {}
                finished = spent and entry.manifest.get("status") == "finished"
                if finished and (not self.here or _is_of_this_machine(entry)):
                    total = sum(spent.get(part, 0.0) for part in _PARTS)
                    times.setdefault(_similar(entry.settings), []).append(total)
            self._grouped[names] = by_settings, times
        return self._grouped[names]

    def _fits(self, entry: Entry, cfg: RunConfig) -> bool:
        """Whether the run would get the record's fingerprint here and now."""
        try:
            today = self._remembered("data", cfg.dataset, cfg) | self._remembered("method", cfg.method, cfg)
            today |= _this_machine(cfg) if self.here else {}
        except UserError:  # it cannot run here
            return False
        return identity.fingerprint(cfg.to_dict(), lookup.resolved(entry.manifest) | today) == entry.fingerprint

    def _remembered(self, what: str, group: dict[str, Any], cfg: RunConfig) -> dict[str, Any]:
        """What this machine has for the paths and the checkpoint of a group."""
        key = json.dumps([group, cfg.model["name"], cfg.paths.cache, cfg.paths.data], sort_keys=True)
        if key not in self._known:
            self._known[key] = _data(cfg) if what == "data" else _checkpoint(cfg)
        found: dict[str, Any] = self._known[key]
        return found


def _data(cfg: RunConfig) -> dict[str, Any]:
    """The content of a data set that is a file of the user's; of all others the record's revision counts."""
    if not isinstance(cfg.dataset.get("path"), str):
        return {}
    task = instantiate.build_task(cfg.dataset, cfg.paths)
    task.load()
    return {"data_revision": task.revision["content"]}


def _checkpoint(cfg: RunConfig) -> dict[str, Any]:
    found = artifacts.find(cfg.method, str(cfg.model["name"]), None, cfg.paths)
    return {"part": found.sha256 if found else None, "files": lookup.local_files(cfg.method)}


def _key(settings: dict[str, Any]) -> str:
    return json.dumps(settings, sort_keys=True, default=str)


def _similar(settings: dict[str, Any]) -> str:
    """Equal for runs that differ in method, seed and sampling at most."""
    shared = ("model", "dataset", "measure", "hardware", "max_new_tokens", "batch_size")
    return _key({name: settings.get(name) for name in shared})


def _is_of_this_machine(entry: Entry) -> bool:
    name = lookup.resolved(entry.manifest)["device"]
    return name is not None and name in (_machine("cpu")["device"], _machine("cuda")["device"])


def _this_machine(cfg: RunConfig) -> dict[str, Any]:
    """What a run would get here: processor, cores, threads, type.

    Raises:
        UserError: it cannot run here.
    """
    from bench.models import loading

    device, dtype = loading.resolve_hardware(cfg.to_dict()["hardware"])
    here = _machine(device.type)
    return here | {"threads": cfg.hardware.threads or here["threads"], "dtype": str(dtype).removeprefix("torch.")}


@cache
def _machine(kind: str) -> dict[str, Any]:
    """Of this machine what distinguishes runs on its processor or GPU, with the threads a run gets by default."""
    import torch

    from bench.utils import machine

    if kind == "cuda" and not torch.cuda.is_available():
        return {"device": None}
    return lookup.machine_of(machine.facts(torch.device(kind)) | {"threads": machine.default_threads()})


def _state_of(entry: Entry) -> tuple[State, str, float]:
    status, done = entry.manifest.get("status"), entry.manifest.get("n_done") or 0
    left = 1.0 - min(1.0, done / (entry.manifest.get("n_pairs") or 1))
    if status == "finished" and not run_folder.left_open(entry.path):
        return _judged(entry.path)
    if status in ("running", "finished") and run_folder.is_held(entry.path):
        return "running", "another process writes it", left
    if status == "failed":
        return "failed", _last_line(entry.manifest.get("error")), left
    return "cut", "", left


def _judged(path: Path) -> tuple[State, str, float]:
    """Of a finished run: done, INVALID because of noise alone, or INVALID."""
    verdict = (files.read_json(path / run_folder.SUMMARY) or {}).get("verdict") or {}
    if verdict.get("valid", True):
        return "done", "", 0.0
    first, *more = verdict["reasons"]
    reason = f"{first}{f' And {len(more)} more.' if more else ''}"
    return ("noisy", reason, 1.0) if verdict.get("noisy") else ("invalid", reason, 0.0)


def _last_line(error: Any) -> str:
    lines = [line.strip() for line in str(error or "").splitlines() if line.strip()]
    return lines[-1] if lines else ""
