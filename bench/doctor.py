"""``python -m bench doctor``: whether this machine is ready, and what to do if not."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from bench.config.schema import PathsConfig, RunConfig
from bench.errors import UserError
from bench.models.embedded import SMOLLM2
from bench.scoring import sandbox
from bench.tasks.sources import project_data

if TYPE_CHECKING:
    from bench.models.source import Loaded

_NEEDS = {"torch": (2, 6), "transformers": (5, 0), "hydra-core": (1, 3)}
_FREE_GIB = 2.0  # the embedded model, converted, with room for the wheel it comes from


@dataclass(frozen=True, slots=True)
class Finding:
    """One check; ``fail`` prevents a run, ``warn`` limits or slows it."""

    state: Literal["ok", "warn", "fail"]
    what: str
    text: str

    def line(self) -> str:
        return f"{self.state:5} {self.what:14} {self.text}"


def examine(cfg: RunConfig) -> list[Finding]:
    """Check what a run with this config needs; downloads nothing."""
    return [
        _python(),
        *map(_package, _NEEDS),
        _device(),
        _threads(),
        _folder("results", cfg.paths.results),
        _disk(cfg.paths.cache),
        _data(cfg.paths.data),
        _model(cfg.paths.cache),
        _sandbox(),
        _wandb(),
    ]


def examine_checkpoints(paths: PathsConfig) -> Iterator[Finding]:
    """Decode fixed prompts with every checkpoint of the project and of this machine, and compare with its card.

    A checkpoint that does clearly less than its card says was loaded wrongly, or beside another model: ``fail``.
    """
    from bench.measure import acceptance_check as check
    from bench.models import artifacts

    roots = (project_data() / "checkpoints", Path(paths.cache) / "trained")
    cards = {card.parent: artifacts.read_card(card.parent) or {} for root in roots for card in root.glob("*/card.json")}
    target: tuple[str, Loaded, list[list[int]]] | None = None
    for folder, card in sorted(cards.items(), key=lambda each: (str(check.model_of(*each)), each[0])):
        if not (entry := card.get(check.ENTRY)):
            text = f"its card has no {check.ENTRY}; python -m bench train check {folder} adds it"
            yield Finding("warn", folder.name, text)
            continue
        try:
            name = str(check.model_of(folder, card))
            if target is None or target[0] != name:
                target = None  # its memory is needed
                loaded = check.load(folder, card, paths, entry["dtype"])
                target = (name, loaded, check.full_texts(loaded))
            seen = check.measure(folder, card, target[1], entry, target[2]).seen
        except (UserError, ValueError) as error:
            yield Finding("warn", folder.name, f"not checked: {error}")
            continue
        wrong = check.problem(folder.name, entry, seen, same_prompts=True)
        yield Finding("fail", folder.name, wrong) if wrong else Finding("ok", folder.name, seen.text())


def _python() -> Finding:
    good = (3, 10) <= sys.version_info[:2] < (3, 14)
    advice = "" if good else "; create the environment with Python 3.10 to 3.13"
    return Finding("ok" if good else "warn", "python", f"{platform.python_version()} on {platform.platform()}{advice}")


def _package(name: str) -> Finding:
    least = ".".join(map(str, _NEEDS[name]))
    try:
        found = version(name)
    except PackageNotFoundError:
        return Finding("fail", name, f"not installed; pip install '{name}>={least}'")
    numbers = tuple(int(part) for part in found.split("+")[0].split(".")[:2])
    if numbers < _NEEDS[name]:
        return Finding("fail", name, f"{found} is too old; pip install '{name}>={least}'")
    return Finding("ok", name, found)


def _device() -> Finding:
    try:
        import torch
    except ImportError as error:
        return Finding("fail", "device", f"torch cannot be imported: {error}")
    if torch.cuda.is_available():
        card = torch.cuda.get_device_properties(0)
        return Finding("ok", "device", f"{card.name}, {card.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}")
    if shutil.which("nvidia-smi"):
        return Finding("warn", "device", "there is an NVIDIA driver, but this torch has no CUDA; reinstall torch")
    from bench.utils import machine

    known = f"CPU, {machine.vectors()}"
    if machine.multiplies_bfloat16():
        return Finding("ok", "device", known)
    return Finding("ok", "device", f"{known}: runs are in float32; hardware=cpu_bf16 reads half the bytes of a token")


def _threads() -> Finding:
    import psutil

    cores, load = psutil.cpu_count(logical=False) or os.cpu_count() or 1, os.getloadavg()[0]
    text = f"{cores} physical cores, load {load:.1f}"
    if load > 0.5 * cores:
        return Finding("warn", "threads", f"{text}; other processes disturb the times, wait until they end")
    return Finding("ok", "threads", text)


def _folder(what: str, path: str) -> Finding:
    existing = _existing(Path(path))
    if not os.access(existing, os.W_OK):
        return Finding("fail", what, f"{path} is not writable; set paths.{what}=FOLDER")
    return Finding("ok", what, path)


def _disk(cache: str) -> Finding:
    free = shutil.disk_usage(_existing(Path(cache))).free / 2**30
    if free < _FREE_GIB:
        return Finding("warn", "disk", f"{free:.1f} GiB free at {cache}; the embedded model needs {_FREE_GIB:.0f}")
    return Finding("ok", "disk", f"{free:.0f} GiB free at {cache}")


def _data(folder: str | None) -> Finding:
    if folder is None:
        return Finding("ok", "data", "DECODEBENCH_DATA is not set; data sets are fetched when first used")
    if not Path(folder).is_dir():
        return Finding("fail", "data", f"{folder} does not exist; correct DECODEBENCH_DATA or unset it")
    return Finding("ok", "data", f"{folder}: {', '.join(sorted(p.name for p in Path(folder).iterdir() if p.is_dir()))}")


def _model(cache: str) -> Finding:
    folder = SMOLLM2.folder(Path(cache))
    if not (folder / "model.safetensors").is_file():
        return Finding("warn", "model", "the embedded model is not downloaded; python -m bench fetch models smollm2")
    return Finding("ok", "model", str(folder))


def _sandbox() -> Finding:
    try:
        return Finding("ok", "sandbox", f"{sandbox.isolation().text}; only dataset.allow_code_execution=true needs it")
    except UserError as error:
        return Finding("warn", "sandbox", str(error))


def _wandb() -> Finding:
    if importlib.util.find_spec("wandb") is None:
        return Finding("ok", "wandb", "not installed; only tracker=wandb needs it")
    netrc = Path.home() / ".netrc"
    known = netrc.is_file() and "wandb" in netrc.read_text(encoding="utf-8", errors="replace")
    login = "logged in" if known or os.environ.get("WANDB_API_KEY") else "no login: runs stay offline"
    return Finding("ok", "wandb", f"{version('wandb')}, {login}")


def _existing(path: Path) -> Path:
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
