"""Time on a device: synchronisation, and a stopwatch that waits only when it is read."""

from __future__ import annotations

import time

import torch


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Stopwatch:
    """Time between ``start`` and ``stop``, read later: events on a GPU, the process clock elsewhere.

    ``ns`` waits until the device has come to ``stop``. Call it after the host has read what the step made, when nothing
    is left to wait for but the end of that.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        if self._cuda:
            self._events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        self._start = self._stop = 0

    def start(self) -> None:
        if self._cuda:
            self._events[0].record()
        else:
            self._start = time.perf_counter_ns()

    def stop(self) -> None:
        if self._cuda:
            self._events[1].record()
        else:
            self._stop = time.perf_counter_ns()

    def ns(self) -> int:
        """Nanoseconds between the last ``start`` and ``stop``."""
        if self._cuda:
            self._events[1].synchronize()
            return round(self._events[0].elapsed_time(self._events[1]) * 1e6)
        return self._stop - self._start
