"""What the records under a results folder say of a configuration: done, cut, failed; and how long its like took.

A record belongs to a configuration if it has the id that the configuration would get with the revisions of the record,
and if processor, threads, type and prepared part are those of today. What only a run finds out, a new revision of a
model on the hub or other files of a data set, is not looked at.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, Literal

import yaml

from bench.config.schema import RunConfig, identity, run_id
from bench.errors import UserError
from bench.models import artifacts
from bench.records import run_folder
from bench.utils import redact

State = Literal["new", "cut", "failed", "queued", "running", "done", "incompatible"]
_PREFERRED: tuple[State, ...] = ("done", "running", "cut", "failed")  # of several records for one configuration
_PARTS = ("loop", "warmup", "cost_curve", "quality", "agreement")  # that make up the time of a run
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True)
class Entry:
    """A recorded run: where, its manifest, and its configuration as written."""

    path: Path
    manifest: dict[str, Any]
    config: dict[str, Any]


@dataclass(slots=True)
class Archive:
    """The records of one results folder, by configuration.

    Attributes:
        here: jobs run on this machine, and only its own records count.
    """

    entries: dict[str, list[Entry]] = field(default_factory=dict)
    times: dict[str, list[float]] = field(default_factory=dict)
    here: bool = True
    _parts: dict[str, str | None] = field(default_factory=dict)

    @classmethod
    def read(cls, results: Path, *, here: bool) -> Archive:
        archive = cls(here=here)
        for file in sorted(results.glob(f"*/{run_folder.MANIFEST}")):
            config = _config(file.parent)
            if config is not None:
                archive._add(Entry(file.parent, run_folder.read_manifest(file.parent) or {}, config))
        return archive

    def _add(self, entry: Entry) -> None:
        self.entries.setdefault(_key(entry.config), []).append(entry)
        spent = entry.manifest.get("seconds") or {}
        if entry.manifest.get("status") == "finished" and spent and (not self.here or _is_of_this_machine(entry)):
            total = sum(spent.get(name, 0.0) for name in _PARTS)
            for key in _kin(entry.config):
                self.times.setdefault(key, []).append(total)

    def state(self, cfg: RunConfig) -> tuple[State, str, float]:
        """Of the job: its state, why it failed, and the share that is left."""
        found = [_state_of(entry) for entry in self.entries.get(_key(_public(cfg)), []) if self._fits(entry, cfg)]
        return min(found, key=lambda each: _PREFERRED.index(each[0]), default=("new", "", 1.0))

    def _fits(self, entry: Entry, cfg: RunConfig) -> bool:
        if run_id(cfg, **_resolved(entry.manifest)) != entry.manifest.get("run_id"):
            return False  # config.yaml shortens paths: two files of one name look the same in it, and have other ids
        recorded = (entry.manifest.get("part") or {}).get("sha256")
        return recorded == self._part(cfg) and (not self.here or _is_of_this_machine(entry, cfg))

    def _part(self, cfg: RunConfig) -> str | None:
        """sha256 of the part that the run would use, if its method takes one and has one."""
        key = json.dumps([cfg.method, cfg.model["name"], cfg.paths.cache], sort_keys=True)
        if key not in self._parts:
            found = artifacts.find(cfg.method, str(cfg.model["name"]), None, cfg.paths)
            self._parts[key] = found.sha256 if found else None
        return self._parts[key]

    def seconds(self, cfg: RunConfig) -> float | None:
        """What runs most like this one took: of the same method, else of any."""
        for key in _kin(_public(cfg)):
            if key in self.times:
                return median(self.times[key])
        return None


def _config(folder: Path) -> dict[str, Any] | None:
    try:
        found = yaml.load((folder / run_folder.CONFIG).read_text(encoding="utf-8"), Loader=_LOADER)
    except (OSError, yaml.YAMLError):
        return None
    return found if isinstance(found, dict) else None


def _public(cfg: RunConfig) -> dict[str, Any]:
    """The identity as config.yaml has it: without secrets and paths of the machine."""
    found: dict[str, Any] = redact.tree(identity(cfg))
    return found


def _key(config: dict[str, Any]) -> str:
    return json.dumps({key: value for key, value in config.items() if key != "tracker"}, sort_keys=True, default=str)


def _kin(config: dict[str, Any]) -> Iterator[str]:
    """Keys under which the time of a run is kept, the closest first."""
    shared = ("model", "dataset", "measure", "hardware", "max_new_tokens", "batch_size")
    like = [config.get(name) for name in shared]
    name = (config.get("method") or {}).get("name")
    yield json.dumps([*like, name], sort_keys=True, default=str)
    yield json.dumps(like, sort_keys=True, default=str)


def _resolved(manifest: dict[str, Any]) -> dict[str, Any]:
    """What the recorded run's machine decided, under the names that ``bench.measure.run`` gives it in the id."""
    part, dataset = manifest.get("part"), manifest.get("dataset") or {}
    return {
        **({"part": part.get("sha256")} if part else {}),
        **({"calibration": trial["corpus"]["sha256"]} if (trial := manifest.get("calibration")) else {}),
        "model_revision": (manifest.get("model") or {}).get("revision"),
        "data_revision": (dataset.get("revision") or {}).get("content"),
        "device": _processor(manifest),
        "threads": str((manifest.get("hardware") or {}).get("threads")),
        "dtype": manifest.get("dtype"),
    }


def _processor(manifest: dict[str, Any]) -> str | None:
    found = manifest.get("hardware") or {}
    return (found.get("gpu") or {}).get("name") or found.get("cpu")


def _is_of_this_machine(entry: Entry, cfg: RunConfig | None = None) -> bool:
    """Same processor; for a configuration also the type and the threads it would get here."""
    name, threads = _processor(entry.manifest), (entry.manifest.get("hardware") or {}).get("threads")
    if cfg is None:
        return name is not None and name in (_machine("cpu")[0], _machine("cuda")[0])
    from bench.models import loading

    try:
        device, dtype = loading.resolve_hardware(cfg.to_dict()["hardware"])
    except UserError:
        return True  # it could not run here; that it did elsewhere is of use all the same
    here, most = _machine(device.type)
    found = (name, threads, entry.manifest.get("dtype"))
    return found == (here, cfg.hardware.threads or most, str(dtype).removeprefix("torch."))


@cache
def _machine(kind: str) -> tuple[str | None, int]:
    """Name of the processor or the GPU as a manifest has it, and the threads a run gets by default."""
    import torch

    from bench.utils import machine

    before = torch.get_num_threads()
    threads = machine.set_threads(None)
    torch.set_num_threads(before)
    if kind == "cuda" and not torch.cuda.is_available():
        return None, threads
    facts = machine.facts(torch.device(kind))
    return facts["gpu"]["name"] if facts["gpu"] else facts["cpu"], threads


def _state_of(entry: Entry) -> tuple[State, str, float]:
    status, done = entry.manifest.get("status"), entry.manifest.get("n_done") or 0
    left = 1.0 - min(1.0, done / (entry.manifest.get("n_pairs") or 1))
    if status == "finished" and not run_folder.left_open(entry.path):
        return "done", "", 0.0
    if status in ("running", "finished") and run_folder.is_held(entry.path):
        return "running", "another process writes it", left
    if status == "failed":
        return "failed", _last_line(entry.manifest.get("error")), left
    return "cut", "", left


def _last_line(error: Any) -> str:
    lines = [line.strip() for line in str(error or "").splitlines() if line.strip()]
    return lines[-1] if lines else ""
