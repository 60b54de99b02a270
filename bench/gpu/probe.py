"""Facts about a device on which every expectation of a step's time rests: bandwidth, clocks, launches, attention.

Rates are those of ``bench.measure.probes``. Times on a GPU are medians over replays of CUDA graphs by events, so that
launches do not count; on a CPU they are medians by the process clock. A part that fails is recorded with its error, and
the others go on.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.analysis import peaks
from bench.measure import probes
from bench.utils import machine
from methods.engine.stopwatch import synchronize

_REPEATS = 20
_CHAIN = 200  # dependent kernels of a graph
_ARRAY_BYTES = {"cuda": 2 << 30, "cpu": 64 << 20}
_ROWS = {"cuda": 8192, "cpu": 256}
_ATTENTION = {"smollm2": (3, 3, 64), "llama3_8b": (8, 4, 128)}  # key heads, queries per key head, size of a head
_PRODUCTS = {"smollm2 gate_up": (3072, 576), "llama3_8b gate_up": (28672, 4096), "llama3_8b head": (128256, 4096)}
_LEAST_WEIGHT_BYTES = 128 << 20  # of the copies of a matrix that are used in turn, so that no cache holds them


@dataclass(frozen=True, slots=True)
class Probing:
    """A device and the type of its numbers."""

    device: torch.device
    dtype: torch.dtype

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @torch.inference_mode()
    def run(self) -> dict[str, Any]:
        """All facts, by part."""
        parts: dict[str, Callable[[], Any]] = {
            "machine": lambda: {**machine.facts(self.device), **machine.versions(), **self._libraries()},
            "clocks": self._clocks,
            "peaks": self._peaks,
            "launches_us": self._launches,
            "products": self._products,
            "attention_us": self._attention,
        }
        return {name: _safely(part) for name, part in parts.items()}

    def _libraries(self) -> dict[str, Any]:
        if not self.on_gpu:
            return {}
        order = getattr(torch._C, "_get_sdp_priority_order", lambda: None)
        return {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(), "sdpa_order": str(order())}

    def _clocks(self) -> dict[str, Any]:
        """Idle, and right after a second of products."""
        idle = machine.gpu_state(self.device)
        x = torch.randn(_ROWS[self.device.type], _ROWS[self.device.type], device=self.device, dtype=self.dtype)
        end = time.perf_counter() + (1.0 if self.on_gpu else 0.05)
        while time.perf_counter() < end:
            x @ x
            synchronize(self.device)
        return {"idle": idle, "busy": machine.gpu_state(self.device)}

    def _peaks(self) -> dict[str, Any]:
        kind = self.device.type
        found = [
            *probes.of_memory(self.device, self.dtype, _ARRAY_BYTES[kind]),
            *probes.of_arithmetic(self.device, self.dtype, rows=_ROWS[kind]),
        ]
        times = {probe.name: [round(1e3 * self.us(probe.call)) for _ in range(3)] for probe in found}
        return peaks.peaks(times, {probe.name: probe.amount for probe in found})

    def _launches(self) -> dict[str, float]:
        """Of the host per eager kernel, copy to the device and read; of the device per dependent kernel of a graph."""
        x, values = torch.zeros(1024, device=self.device, dtype=self.dtype), [1, 2, 3]

        def chain() -> torch.Tensor:
            for _ in range(_CHAIN):
                x.add_(1)
            return x

        return {
            "eager_kernel": self._host_us(lambda: x.add_(1)),
            "tensor_to_device": self._host_us(lambda: torch.tensor(values, device=self.device)),
            "read_of_three": self._host_us(lambda: x[:3].tolist()),
            "kernel_in_a_graph": self.us(chain) / _CHAIN,
        }

    def _products(self) -> dict[str, dict[str, float]]:
        """Bytes of the weights per second, by rows of the other factor."""
        found: dict[str, dict[str, float]] = {}
        for name, (rows, columns) in _PRODUCTS.items() if self.on_gpu else list(_PRODUCTS.items())[:1]:
            size = rows * columns * self.dtype.itemsize
            copies = max(1, -(-(_LEAST_WEIGHT_BYTES if self.on_gpu else size) // size))
            weights = [torch.randn(rows, columns, device=self.device, dtype=self.dtype) for _ in range(copies)]
            found[name] = {}
            for nodes in (1, 8, 64):
                x = torch.randn(nodes, columns, device=self.device, dtype=self.dtype)
                took = self.us(partial(_multiply, x, weights))
                found[name][str(nodes)] = copies * size / took * 1e6
            del weights
        return found

    def _attention(self) -> dict[str, dict[str, float | str]]:
        """By model, context and nodes: each kernel of torch with a mask, flash without, and that of this project."""
        found: dict[str, dict[str, float | str]] = {}
        contexts, nodes = ((256, 1024, 4096), (1, 8, 60)) if self.on_gpu else ((256,), (1, 8))
        backends = {
            "cudnn": SDPBackend.CUDNN_ATTENTION,
            "efficient": SDPBackend.EFFICIENT_ATTENTION,
            "flash, no mask": SDPBackend.FLASH_ATTENTION,
            "math": SDPBackend.MATH,
        }
        for model, (heads, group, size) in _ATTENTION.items():
            for context in contexts:
                for count in nodes:
                    q = torch.randn(1, heads, count * group, size, device=self.device, dtype=self.dtype)
                    kv = torch.randn(2, 1, heads, context, size, device=self.device, dtype=self.dtype)
                    mask = torch.zeros(1, 1, count * group, context, device=self.device, dtype=self.dtype)
                    row = found.setdefault(f"{model}, {context} keys, {count} nodes", {})
                    for name, backend in backends.items():
                        bias = None if "no mask" in name else mask
                        row[name] = _safely(partial(self._attend, q, kv, bias, backend))
        return found

    def _attend(self, q: torch.Tensor, kv: torch.Tensor, mask: torch.Tensor | None, backend: SDPBackend) -> float:
        with sdpa_kernel(backend):
            return self.us(lambda: F.scaled_dot_product_attention(q, kv[0], kv[1], attn_mask=mask))

    def us(self, work: Callable[[], object]) -> float:
        """Median microseconds of some work on the device."""
        if not self.on_gpu:
            work()
            return statistics.median(_host_ns(work) for _ in range(3)) / 1e3
        graph, times = self._captured(work), []
        for _ in range(_REPEATS):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            graph.replay()
            last.record()
            last.synchronize()
            times.append(first.elapsed_time(last) * 1e3)
        return statistics.median(times)

    def _captured(self, work: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """Warmed up and captured on one stream, so that work space of libraries is not of the graph's memory."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()
            work()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            work()
        return graph

    def _host_us(self, call: Callable[[], object]) -> float:
        times = []
        for _ in range(_REPEATS):
            synchronize(self.device)
            times.append(_host_ns(lambda: [call() for _ in range(50)]) / 50 / 1e3)
        return statistics.median(times)


def dumped(found: dict[str, Any]) -> str:
    """As indented JSON."""
    return json.dumps(found, indent=1, default=str) + "\n"


def text(found: dict[str, Any]) -> str:
    """Everything but the long tables."""
    return dumped({name: part for name, part in found.items() if name != "attention_us"}).rstrip()


def _multiply(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> None:
    for weight in weights:
        F.linear(x, weight)


def _host_ns(call: Callable[[], object]) -> int:
    begin = time.perf_counter_ns()
    call()
    return time.perf_counter_ns() - begin


def _safely(part: Callable[[], Any]) -> Any:
    try:
        return part()
    except Exception as error:
        return f"failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]
