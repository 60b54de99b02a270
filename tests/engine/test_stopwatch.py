"""Times between two events of a device are read only once it has come to the later one."""

from __future__ import annotations

import pytest
import torch

from methods.engine.stopwatch import Stopwatch


class Event:
    """An event as CUDA has them: without a time until the host has waited for it."""

    def __init__(self, enable_timing):
        assert enable_timing
        self.recorded = self.over = False

    def record(self):
        self.recorded, self.over = True, False

    def synchronize(self):
        assert self.recorded
        self.over = True

    def elapsed_time(self, end):
        if not end.over:
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return 1.5


def test_the_time_of_events_is_read_when_they_are_over(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    watch = Stopwatch(torch.device("cuda"))
    for _ in range(2):
        watch.start()
        watch.stop()
        assert watch.ns() == 1_500_000


def test_the_process_clock_runs_elsewhere():
    watch = Stopwatch(torch.device("cpu"))
    assert watch.ns() == 0
    watch.start()
    torch.ones(1000).sum()
    watch.stop()
    assert watch.ns() > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
def test_a_time_can_be_read_while_the_device_is_busy():
    device = torch.device("cuda")
    x, watch = torch.randn(4096, 4096, device=device), Stopwatch(device)
    watch.start()
    for _ in range(20):
        x = x @ x / 4096
    watch.stop()
    assert watch.ns() > 0
