"""``python -m bench doctor``: is this machine ready, and if not, what to do."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from bench.config.schema import RunConfig
from bench.models.embedded import SMOLLM2

_NEEDS = {"torch": (2, 6), "transformers": (5, 0), "hydra-core": (1, 3)}
_FREE_GIB = 2.0  # the embedded model, converted, with room for the wheel it comes from


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        state: ``fail`` keeps a run from working, ``warn`` limits or slows it.
    """

    state: Literal["ok", "warn", "fail"]
    what: str
    text: str

    def line(self) -> str:
        return f"{self.state:5} {self.what:14} {self.text}"


def examine(cfg: RunConfig) -> list[Finding]:
    """Look at everything a run with this config would need. Starts nothing and downloads nothing."""
    looks: list[Callable[[], Finding]] = [
        _python,
        *(lambda name=name: _package(name) for name in _NEEDS),
        _device,
        _threads,
        lambda: _folder("results", cfg.paths.results),
        lambda: _disk(cfg.paths.cache),
        lambda: _data(cfg.paths.data),
        lambda: _model(cfg.paths.cache),
        _wandb,
    ]
    return [look() for look in looks]


def _python() -> Finding:
    good = (3, 10) <= sys.version_info[:2] < (3, 14)
    advice = "" if good else "; 3.10 to 3.13 are supported, make the environment anew with one of them"
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
        return Finding("warn", "device", "an NVIDIA driver is here, but this torch has no CUDA; pip install torch anew")
    return Finding("ok", "device", f"CPU, {torch.backends.cpu.get_cpu_capability()}")


def _threads() -> Finding:
    import psutil

    cores, load = psutil.cpu_count(logical=False) or os.cpu_count() or 1, os.getloadavg()[0]
    text = f"{cores} physical cores, load {load:.1f}"
    if load > 0.5 * cores:
        return Finding("warn", "threads", f"{text}; other work disturbs the times, wait until it has ended")
    return Finding("ok", "threads", text)


def _folder(what: str, path: str) -> Finding:
    existing = _existing(Path(path))
    if not os.access(existing, os.W_OK):
        return Finding("fail", what, f"{path} cannot be written; set paths.{what}=FOLDER")
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
        return Finding("warn", "model", "the embedded model is not here yet; python -m bench fetch models smollm2")
    return Finding("ok", "model", str(folder))


def _wandb() -> Finding:
    if importlib.util.find_spec("wandb") is None:
        return Finding("ok", "wandb", "not installed; only tracker=wandb needs it")
    logged_in = bool(os.environ.get("WANDB_API_KEY")) or _has_netrc_entry()
    return Finding("ok", "wandb", f"{version('wandb')}, {'logged in' if logged_in else 'no login: runs stay offline'}")


def _has_netrc_entry() -> bool:
    file = Path.home() / ".netrc"
    return file.is_file() and "wandb" in file.read_text(encoding="utf-8", errors="replace")


def _existing(path: Path) -> Path:
    """The deepest folder of ``path`` that exists."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
