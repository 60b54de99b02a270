"""What a run ran on, and the instruments that watch it: device, memory, energy, processor time."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

Clock = Callable[[], int]  # nanoseconds, monotonic

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = b"5"  # proc(5): resets VmHWM, the process's peak resident set, to its current value


def set_threads(wanted: int | None) -> int:
    """Let torch use ``wanted`` CPU threads, or one per physical core this process may use; returns how many."""
    torch.set_num_threads(wanted or default_threads())
    return torch.get_num_threads()


def default_threads() -> int:
    """One per physical core that this process may use."""
    return min(psutil.cpu_count(logical=False) or 1, usable_cores())


# ------------------------------------------------------------------------------------------- facts for the manifest


def facts(device: torch.device) -> dict[str, Any]:
    """The machine, without its name, its user or its paths."""
    return {
        "cpu": cpu_model(),
        "cores": psutil.cpu_count(logical=False),
        "logical_cores": psutil.cpu_count(),
        "usable_cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "device": device.type,
        "gpu": _gpu(device),
    }


def versions() -> dict[str, str | None]:
    """Versions of what the numbers depend on."""
    packages = ("torch", "transformers", "numpy", "decodebench")
    return {"python": platform.python_version(), **{name: _version(name) for name in packages}}


def git_state(root: Path | None = None) -> dict[str, Any]:
    """Commit and whether the checkout differs from it; both None outside a git checkout."""
    root = Path(__file__).resolve().parents[2] if root is None else root
    if not (root / ".git").exists():  # an installed package inside somebody else's checkout is not that checkout
        return {"sha": None, "dirty": None}
    sha, changes = _git(root, "rev-parse", "HEAD"), _git(root, "status", "--porcelain", "--", ".", ":!results")
    return {"sha": sha, "dirty": None if changes is None else bool(changes)}


def load_average() -> list[float] | None:
    """Runnable processes over 1, 5 and 15 minutes; None where the system does not say."""
    try:
        return [round(load, 2) for load in os.getloadavg()]
    except OSError:
        return None


def gpu_utilisation(device: torch.device) -> float | None:
    """Percent of the last moments in which the GPU computed for anybody; None on a CPU or where nobody knows."""
    if device.type != "cuda":
        return None
    answer = _nvidia_smi("utilization.gpu", device)
    return float(answer) if answer and answer.isdigit() else None


def gpu_state(device: torch.device) -> dict[str, str | float | None] | None:
    """Power limit (watts), clocks now and at most (MHz), temperature (Celsius) and the bits of what throttles the GPU.

    None on a CPU; a value is None where the driver does not tell.
    """
    if device.type != "cuda":
        return None
    answer = _nvidia_smi(",".join(_GPU_STATE.values()), device)
    cells = [cell.strip() for cell in (answer or "").split(",")]
    known = cells if len(cells) == len(_GPU_STATE) else [""] * len(_GPU_STATE)
    return {name: _reading(cell) for name, cell in zip(_GPU_STATE, known, strict=True)}


_GPU_STATE = {  # as nvidia-smi calls it
    "power_limit_w": "power.limit",
    "clock_mhz": "clocks.sm",
    "most_clock_mhz": "clocks.max.sm",
    "memory_clock_mhz": "clocks.mem",
    "temperature_c": "temperature.gpu",
    "throttled_by": "clocks_throttle_reasons.active",
}


def _reading(cell: str) -> str | float | None:
    """A number, a mask of bits as it is, or None for ``[N/A]`` and the like."""
    if cell.startswith("0x"):
        return cell
    try:
        return float(cell)
    except ValueError:
        return None


def usable_cores() -> int:
    """Logical cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_model() -> str | None:
    """The processor's own name for itself."""
    with suppress(OSError):
        if found := re.search(r"^(?:model name|Model)\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return found[1].strip()
    return platform.processor() or None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return _own_version() if package == "decodebench" else None


def _own_version() -> str | None:
    import bench

    return getattr(bench, "__version__", None)


def _git(root: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _gpu(device: torch.device) -> dict[str, Any] | None:
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
        "count": torch.cuda.device_count(),
        "cuda": torch.version.cuda,
        "driver": _nvidia_smi("driver_version", device),
    }


def _nvidia_smi(question: str, device: torch.device) -> str | None:
    query = ["nvidia-smi", f"--query-gpu={question}", "--format=csv,noheader,nounits", f"--id={_uuid(device)}"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.split("\n")[0].strip() or None


def _uuid(device: torch.device) -> str:
    """NVML and nvidia-smi ignore CUDA_VISIBLE_DEVICES, so the number of a device means nothing to them."""
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


# ---------------------------------------------------------------------------------------------------- instruments


class MemoryMeter:
    """Peak memory between ``reset`` and ``peak_bytes``.

    On a GPU the allocator's peak: weights, caches and activations. On Linux the process's peak resident set above
    ``floor_bytes``, the resident set before the model was loaded, so that it too counts weights, caches and
    activations but not the interpreter and its libraries. None elsewhere.

    Args:
        device: where the model is.
        floor_bytes: resident set before the model was loaded, see ``settled_bytes``.
    """

    def __init__(self, device: torch.device, floor_bytes: int | None = None) -> None:
        self.device, self.floor_bytes = device, floor_bytes
        self._ready = False

    def reset(self) -> None:
        """Start anew. Freed memory goes back to the system first, or one arm would pay for the other's."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        _give_back_freed()
        self._ready = False
        with suppress(OSError):
            _CLEAR.write_bytes(_RESET_PEAK)
            self._ready = True

    def peak_bytes(self) -> int | None:
        """The peak since ``reset``; None where it cannot be measured."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        peak = _status_bytes("VmHWM") if self._ready and self.floor_bytes is not None else None
        return None if peak is None or self.floor_bytes is None else max(0, peak - self.floor_bytes)


def settled_bytes() -> int | None:
    """Memory this process holds once what an earlier run let go of is given back; None where the system does not say.

    The next model reuses freed memory that the C library keeps: counted here, it would be missing from its peak.
    """
    gc.collect()
    _give_back_freed()
    return _status_bytes("VmRSS")


def _status_bytes(name: str) -> int | None:
    with suppress(OSError):
        if found := re.search(rf"^{name}:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE):
            return int(found[1]) * 1024
    return None


def _give_back_freed() -> None:
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class EnergyMeter:
    """Energy of the whole GPU in joules, by NVML's counter (Volta and later); None without it."""

    def __init__(self, device: torch.device) -> None:
        self._read: Callable[[], int] | None = None
        if device.type == "cuda":
            with suppress(Exception):  # no module, no driver, no permission, no counter: all mean "not measured"
                self._read = _nvml_counter(device)

    def joules(self) -> float | None:
        """The counter now; only differences mean something."""
        return None if self._read is None else self._read() / 1000


def _nvml_counter(device: torch.device) -> Callable[[], int]:
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(_uuid(device).encode())
    pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)  # raises where the GPU has no such counter

    def millijoules() -> int:
        return int(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle))

    return millijoules


@dataclass(slots=True)
class Reading:
    """What the instruments saw of one timed section."""

    cpu_ns: int | None = None
    peak_bytes: int | None = None
    energy_j: float | None = None


@dataclass(slots=True)
class Instruments:
    """Clock and meters of one device.

    Attributes:
        clock: monotonic nanoseconds.
        cpu_clock: processor time of all threads of this process, nanoseconds.
    """

    device: torch.device
    floor_bytes: int | None = None
    clock: Clock = time.perf_counter_ns
    cpu_clock: Clock = time.process_time_ns
    memory: MemoryMeter = field(init=False)
    energy: EnergyMeter = field(init=False)

    def __post_init__(self) -> None:
        self.memory = MemoryMeter(self.device, self.floor_bytes)
        self.energy = EnergyMeter(self.device)

    def synchronise(self) -> None:
        """Wait until the device has done all it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @contextmanager
    def watch(self) -> Iterator[Reading]:
        """Fill a reading with what happens inside; the device is idle at both ends."""
        reading = Reading()
        self.memory.reset()
        self.synchronise()
        energy, cpu_ns = self.energy.joules(), self.cpu_clock()
        yield reading
        self.synchronise()
        reading.cpu_ns = self.cpu_clock() - cpu_ns
        reading.energy_j = None if energy is None else _since(energy, self.energy.joules())
        reading.peak_bytes = self.memory.peak_bytes()


def _since(before: float, after: float | None) -> float | None:
    return None if after is None else after - before
