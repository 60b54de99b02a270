"""Memory for weights in huge pages, where Linux gives them to who asks.

A pass reads every weight once. With pages of 4 KiB the processor looks up 65,000 addresses for 269 MB, in a virtual
machine in two tables. Weights lie side by side in chunks, as most are smaller than a huge page.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap

import torch
from jaxtyping import UInt8
from torch import Tensor

_PAGE = 2 * 2**20  # bytes of a huge page
_CHUNK = 32 * 2**20
_ALIGNED = 64  # bytes
_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)


class _Chunk:
    """Some memory, which is freed when nothing that was taken from it is left."""

    def __init__(self, size: int, advice: int) -> None:
        self._memory = mmap.mmap(-1, size + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a system without huge pages
            self._memory.madvise(advice)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._next = -start % _PAGE
        self._end = self._next + size

    def take(self, size: int) -> UInt8[Tensor, "n"] | None:
        """Zeros; None: no room."""
        if self._next + size > self._end:
            return None
        taken = torch.frombuffer(self._memory, dtype=torch.uint8, count=size, offset=self._next)
        self._next += -(-size // _ALIGNED) * _ALIGNED
        return taken


_chunk: _Chunk | None = None


def zeros(size: int) -> UInt8[Tensor, "n"]:
    """So many bytes, at least one, that live as long as the tensor does."""
    global _chunk
    if _ADVICE is None:
        return torch.zeros(size, dtype=torch.uint8)
    taken = None if _chunk is None else _chunk.take(size)
    if taken is None:
        own = _Chunk(-(-size // _PAGE) * _PAGE if size > _CHUNK // 2 else _CHUNK, _ADVICE)
        taken = own.take(size)
        assert taken is not None, "a chunk has room for what it is made for"
        if size <= _CHUNK // 2:
            _chunk = own
    return taken
