"""What a run ran on: processor, GPU, memory, versions, load."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch


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
        "vectors": vectors(),
        "cores": psutil.cpu_count(logical=False),
        "logical_cores": psutil.cpu_count(),
        "usable_cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "device": device.type,
        "gpu": _gpu(device),
    }


def versions(more: Iterable[str] = ()) -> dict[str, str | None]:
    """Versions of what the numbers depend on.

    Args:
        more: optional packages that did the work.
    """
    packages = ("torch", "transformers", "numpy", "decodebench", *more)
    return {"python": platform.python_version(), **{name: _version(name) for name in packages}}


def git_state(root: Path | None = None) -> dict[str, Any]:
    """Commit and whether the checkout differs from it; both None outside a git checkout.

    There the variable DECODEBENCH_COMMIT may name the commit.
    """
    root = Path(__file__).resolve().parents[2] if root is None else root
    if not (root / ".git").exists():  # an installed package inside another project's checkout
        return {"sha": os.environ.get("DECODEBENCH_COMMIT") or None, "dirty": None}  # a tree that was copied without it
    sha, changes = _git(root, "rev-parse", "HEAD"), _git(root, "status", "--porcelain", "--", ".", ":!results")
    return {"sha": sha, "dirty": None if changes is None else bool(changes)}


def load_average() -> list[float] | None:
    """Runnable processes over 1, 5 and 15 minutes; None where the system does not report it."""
    try:
        return [round(load, 2) for load in os.getloadavg()]
    except OSError:
        return None


def gpu_utilisation(device: torch.device) -> float | None:
    """Percent of the last moments in which the GPU was busy; None on a CPU or where it is not known."""
    if device.type != "cuda":
        return None
    answer = _nvidia_smi("utilization.gpu", device)
    return float(answer) if answer and answer.isdigit() else None


def gpu_state(device: torch.device) -> dict[str, str | float | None] | None:
    """Power limit (W), clocks (MHz), temperature (Celsius), throttle bits; None on a CPU, a value None if unknown."""
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
    """The processor's model name."""
    with suppress(OSError):
        if found := re.search(r"^(?:model name|Model)\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return found[1].strip()
    return platform.processor() or None


def vectors() -> str:
    """Vector instructions of the CPU, with BF16 where it multiplies bfloat16 itself: ``AVX512 BF16``, ``AVX2``."""
    return torch.backends.cpu.get_cpu_capability() + " BF16" * multiplies_bfloat16()


def multiplies_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16 itself. oneDNN's own answer is wider: it emulates it on any AVX-512."""
    if platform.machine().lower() in ("x86_64", "amd64"):
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


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
    query = ["nvidia-smi", f"--query-gpu={question}", "--format=csv,noheader,nounits", f"--id={gpu_uuid(device)}"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.split("\n")[0].strip() or None


def gpu_uuid(device: torch.device) -> str:
    """The GPU's name for NVML and nvidia-smi, which ignore CUDA_VISIBLE_DEVICES and so number devices differently."""
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
