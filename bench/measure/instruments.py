"""Meters that run beside a measurement: memory, energy, clocks."""

from __future__ import annotations

import ctypes
import gc
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import psutil
import torch

from bench.utils.machine import gpu_uuid

Clock = Callable[[], int]  # nanoseconds, monotonic

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_WAKE_S, _WAKING = 1.0, 4096  # seconds, and rows of the product
_RESET_PEAK = b"5"  # proc(5): resets VmHWM, the process's peak resident set, to its current value


class MemoryMeter:
    """Peak memory between ``reset`` and ``peak_bytes``.

    Weights, caches and activations: on a GPU the allocator's peak, on Linux the process's peak resident set above
    ``floor_bytes``, the one before the model was loaded (``settled_bytes``). None elsewhere.
    """

    def __init__(self, device: torch.device, floor_bytes: int | None = None) -> None:
        self.device, self.floor_bytes = device, floor_bytes
        self._ready = False

    def reset(self) -> None:
        """Reset the peak. Freed memory goes back to the system first, so that it is not counted for the next arm."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        _release_freed()
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
    handle = pynvml.nvmlDeviceGetHandleByUUID(gpu_uuid(device).encode())
    pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)  # raises where the GPU has no such counter

    def millijoules() -> int:
        return int(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle))

    return millijoules


Sensor = Callable[[], tuple[float | None, ...] | None]


@dataclass(slots=True)
class ClockLog:
    """Clocks over time, read between the sections that are measured; at most once a second, or less often in long runs.

    Attributes:
        read: the values after the time in ``COLUMNS``; None where none is known.
        readings: rows of ``COLUMNS``.
    """

    COLUMNS: ClassVar[tuple[str, ...]] = ("s", "mhz", "memory_mhz", "power_w", "temperature_c", "limited_by")
    MOST: ClassVar[int] = 240

    read: Sensor
    clock: Callable[[], float] = time.monotonic
    readings: list[tuple[float | None, ...]] = field(default_factory=list)
    _every_s: float = 1.0
    _began: float | None = None
    _last: float | None = None

    def note(self) -> None:
        """Read the clocks, unless that was done lately."""
        now = self.clock()
        if self._last is not None and now - self._last < self._every_s:
            return
        found = self.read()
        if found is None:
            return
        self._began, self._last = now if self._began is None else self._began, now
        self.readings.append((round(now - self._began, 1), *found))
        if len(self.readings) > self.MOST:
            self.readings, self._every_s = self.readings[::2], 2 * self._every_s

    def to_manifest(self) -> dict[str, Any]:
        """All readings, without the columns that have no value; if none ever differed, the first and the last."""
        kept = [i for i, _ in enumerate(self.COLUMNS) if any(row[i] is not None for row in self.readings)]
        rows = [[row[i] for i in kept] for row in self.readings]
        if len({tuple(row[1:]) for row in rows}) == 1:
            del rows[1:-1]
        return {"columns": [self.COLUMNS[i] for i in kept], "readings": rows}


def clock_sensor(device: torch.device) -> Sensor:
    """Of a GPU its clocks (MHz), power (W), temperature (Celsius) and the bits that say what limits the clock, by NVML;
    of a CPU the mean clock of its cores.
    """
    if device.type != "cuda":
        return _cpu_clock
    with suppress(Exception):  # as with the energy: whatever is missing, nothing is read
        return _nvml_clocks(device)
    return lambda: None


def _cpu_clock() -> tuple[float | None, ...] | None:
    with suppress(OSError, NotImplementedError):
        if found := psutil.cpu_freq():
            return (round(found.current, 1), None, None, None, None)
    return None


def _nvml_clocks(device: torch.device) -> Sensor:
    import pynvml as nvml

    nvml.nvmlInit()
    handle = nvml.nvmlDeviceGetHandleByUUID(gpu_uuid(device).encode())
    reasons = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
    questions: tuple[Callable[[], float], ...] = (
        lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
        lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
        lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        lambda: (reasons or nvml.nvmlDeviceGetCurrentClocksThrottleReasons)(handle),
    )

    def read() -> tuple[float | None, ...]:
        return tuple(_or_none(question) for question in questions)

    return read


def _or_none(question: Callable[[], float]) -> float | None:
    with suppress(Exception):
        return question()
    return None


@dataclass(slots=True)
class Reading:
    """What the instruments saw of one timed section."""

    cpu_ns: int | None = None
    jump_ns: int | None = None
    peak_bytes: int | None = None
    energy_j: float | None = None


def clock_offset_ns() -> int:
    """The system's clock over the monotonic one."""
    return time.time_ns() - time.monotonic_ns()


@dataclass(slots=True)
class Instruments:
    """Clock and meters of one device.

    Attributes:
        clock: monotonic nanoseconds.
        cpu_clock: processor time of all threads of this process, nanoseconds.
        offset: the system's clock over the monotonic one, nanoseconds; it changes where the machine sleeps or the time
            is set.
    """

    device: torch.device
    floor_bytes: int | None = None
    clock: Clock = time.perf_counter_ns
    cpu_clock: Clock = time.process_time_ns
    offset: Clock = clock_offset_ns
    memory: MemoryMeter = field(init=False)
    energy: EnergyMeter = field(init=False)
    clocks: ClockLog = field(init=False)

    def __post_init__(self) -> None:
        self.memory = MemoryMeter(self.device, self.floor_bytes)
        self.energy = EnergyMeter(self.device)
        self.clocks = ClockLog(clock_sensor(self.device))

    def wake(self) -> None:
        """Keep a GPU busy for a second: an idle one runs at a fraction of its clock, and takes a while to raise it."""
        if self.device.type == "cuda":
            x = torch.ones(_WAKING, _WAKING, device=self.device)
            end = time.monotonic() + _WAKE_S
            while time.monotonic() < end:
                torch.mm(x, x)
                self.synchronise()

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
        energy, offset, cpu_ns = self.energy.joules(), self.offset(), self.cpu_clock()
        yield reading
        self.synchronise()
        reading.cpu_ns = self.cpu_clock() - cpu_ns
        reading.jump_ns = self.offset() - offset
        reading.energy_j = None if energy is None else _since(energy, self.energy.joules())
        reading.peak_bytes = self.memory.peak_bytes()


def _since(before: float, after: float | None) -> float | None:
    return None if after is None else after - before


def held_bytes(device: torch.device) -> int:
    """Memory that is in use now and that ``MemoryMeter`` would count; 0 where it cannot be measured."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return settled_bytes() or 0


def settled_bytes() -> int | None:
    """Resident set after freed memory went back to the system; None where the system does not report it.

    Without that, the next model would reuse freed memory and its peak would be too small.
    """
    gc.collect()
    _release_freed()
    return _status_bytes("VmRSS")


def _status_bytes(name: str) -> int | None:
    with suppress(OSError):
        if found := re.search(rf"^{name}:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE):
            return int(found[1]) * 1024
    return None


def _release_freed() -> None:
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
