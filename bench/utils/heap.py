"""What the C library does with freed memory."""

from __future__ import annotations

import ctypes


def keep_freed_memory() -> None:
    """Tell glibc to reuse what is freed: where megabytes come and go, fresh pages cost more than sums."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return
    for option in (-3, -1):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
        mallopt(option, 1 << 30)
