"""A trace of some rounds (``measure.profile=true``), and what it says of the device: taken after the measurement.

The trace is in the format of Chrome's viewer (chrome://tracing, ui.perfetto.dev). On a GPU the device is busy while a
kernel, a copy or a fill runs. A CPU's trace has the operators of torch, but not this project's kernels, so it does not
say when the processor is busy. Tracing slows the host down, so a traced round shows the structure of a round; times are
those of the measurement.
"""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from bench.records import run_folder
from bench.utils import files
from methods.decoder import Decoder

ROUNDS = 10  # that are traced
_BEFORE = 3  # steps that are not: the prefill and the first rounds
_ROUND = "round"  # name of the range of a round in a trace
_ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchKernelExC", "cudaGraphLaunch", "cudaMemcpyAsync")
_SHOWN = 12  # operators or kernels of the facts
_PRIVATE = ("traceName", "distributedInfo")  # of a trace: paths and names of this machine


@dataclass(frozen=True, slots=True)
class Trace:
    """Some rounds of one decoder, in Chrome's format."""

    content: dict[str, Any]

    def write(self, folder: Path, arm: str) -> str:
        """Into a run's folder; returns the name of the file."""
        name = run_folder.TRACE.format(arm=arm)
        files.atomic_write(folder / name, gzip.compress(json.dumps(self.content).encode(), mtime=0))
        return name

    def facts(self) -> dict[str, Any]:
        """See ``facts``."""
        return facts(self.content["traceEvents"])


def trace(decoder: Decoder, prompts: list[Tensor], limit: int, rng: Generator, rounds: int = ROUNDS) -> Trace:
    """Trace rounds of a decode after its first ones; fewer where the text is shorter.

    Args:
        decoder, prompts, limit, rng: see ``Decoder.decode``.
    """
    device = prompts[0].device
    steps = decoder.decode(prompts, limit, rng)
    for _ in range(_BEFORE):
        if next(steps, None) is None:
            break
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities) as profiled:
        for _ in range(rounds):
            with record_function(_ROUND):
                if next(steps, None) is None:
                    break
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "trace.json"
        profiled.export_chrome_trace(str(file))
        content = json.loads(file.read_text(encoding="utf-8"))
    return Trace({key: value for key, value in content.items() if key not in _PRIVATE})


def facts(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What the events of a trace say of its rounds.

    Returns:
        ``rounds``; ``round_us``, from the start of the first to the end of the last over their number; ``busy_share``
        of that time; ``launches`` and ``operations`` (on the device: kernels, copies and fills) per round; and
        ``longest``, operations by their share of the time of all. On a CPU there is no busy share and no launch.
    """
    timed = [event for event in events if event.get("ph") == "X" and "dur" in event]
    rounds = [event for event in timed if event["name"] == _ROUND and event.get("cat") == "user_annotation"]
    if not rounds:
        return {"rounds": 0}
    start, end = min(event["ts"] for event in rounds), max(event["ts"] + event["dur"] for event in rounds)
    on_device = [event for event in timed if event.get("cat") in _ON_DEVICE]
    work = on_device or list(_outermost(event for event in timed if event.get("cat") == "cpu_op"))
    within = [event for event in work if start <= event["ts"] < end]
    spans = list(_union((event["ts"], event["ts"] + event["dur"]) for event in within))
    busy = sum(last - first for first, last in spans)
    whole = max(end, *(last for _, last in spans)) - start if spans else end - start
    launches = sum(event["name"] in _LAUNCHES and start <= event["ts"] < end for event in timed)
    by_name: dict[str, float] = {}
    for event in within:
        by_name[event["name"]] = by_name.get(event["name"], 0.0) + event["dur"]
    longest = sorted(by_name, key=lambda name: -by_name[name])[:_SHOWN]
    total = sum(by_name.values())
    return {
        "rounds": len(rounds),
        "round_us": whole / len(rounds),
        "busy_share": busy / whole if on_device else None,
        "launches": launches / len(rounds) if on_device else None,
        "operations": len(within) / len(rounds),
        "longest": {name: by_name[name] / total for name in longest},
    }


def _outermost(events: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Operators that no other one of their thread calls."""
    ends: dict[Any, float] = {}
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        thread = (event.get("pid"), event.get("tid"))
        if event["ts"] >= ends.get(thread, 0.0):
            ends[thread] = event["ts"] + event["dur"]
            yield event


def _union(spans: Iterable[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Spans without overlaps that cover the same time."""
    known: tuple[float, float] | None = None
    for start, end in sorted(spans):
        if known is not None and start <= known[1]:
            known = (known[0], max(known[1], end))
            continue
        if known is not None:
            yield known
        known = (start, end)
    if known is not None:
        yield known
