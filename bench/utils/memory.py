"""Whether something fits into a device's memory, asked before it is allocated."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from bench.errors import UserError

if TYPE_CHECKING:
    import torch

_GPU_GB = (80, 141)  # memory of an H100 and of an H200
_USABLE = 0.9  # of it: the rest is for caches and work space
_GROUP = Path("/sys/fs/cgroup")  # limits of a container (cgroup v2)


def free_bytes(device: torch.device) -> int:
    """Memory that can still be had on a device; of a container no more than its limit leaves."""
    if device.type == "cuda":
        import torch

        reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + reusable
    return min(psutil.virtual_memory().available, *_left_in_container())


def require(what: str, needed: int, device: torch.device, cure: str) -> None:
    """Refuse what does not fit.

    Args:
        what: what is to be allocated, as the beginning of a sentence.
        needed: bytes.
        cure: what to do instead.

    Raises:
        UserError: says how much is needed and how much there is.
    """
    if needed > (free := free_bytes(device)):
        place = "on the GPU" if device.type == "cuda" else "in memory"
        raise UserError(f"{what} needs {gib(needed)}, and {gib(free)} are free {place}. {cure}")


def gpus(needed: int) -> str:
    """How many GPUs of usual sizes hold so many bytes: ``2 GPUs of 80 GB or 1 of 141 GB``."""
    counts = [-(-needed // int(_USABLE * size * 1e9)) for size in _GPU_GB]
    first = f"{counts[0]} GPU{'s' if counts[0] > 1 else ''} of {_GPU_GB[0]} GB"
    if counts[0] == 1:
        return first
    return " or ".join([first, *(f"{count} of {size} GB" for count, size in zip(counts[1:], _GPU_GB[1:], strict=True))])


def gib(count: int | float) -> str:
    """``14.9 GiB``"""
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"


def _left_in_container() -> list[int]:
    with suppress(OSError, ValueError):  # ValueError: "max", no limit
        limit, used = (int((_GROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        return [max(0, limit - used)]
    return [2**63]


def keep_freed_memory() -> None:
    """Tell glibc to reuse what is freed: where megabytes come and go, fresh pages cost more than sums."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return
    for option in (-3, -1):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
        mallopt(option, 1 << 30)
