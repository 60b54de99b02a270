"""Runs of the baseline against itself in a process that is suspended for a while."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from bench.analysis import metrics
from bench.records import run_folder
from bench.records.run_folder import Sample
from bench.utils import files
from tests.helpers.sweeps import COMMON, run_folders, start

SLOWER = (0.97, 1.03)  # a VALID run of the baseline against itself shows nothing beyond
_WORDS = [
    *COMMON[1:], "method=autoregressive", "dataset.limit=10", "measure.repeats=1", "max_new_tokens=96",
    "measure.agreement=false",
]  # fmt: skip
_PAIRS = 10
_PATIENCE_S = 180.0


@dataclass(frozen=True)
class Outcome:
    """What a paused run recorded.

    Attributes:
        value: the speed-up that it shows.
    """

    summary: dict[str, Any]
    samples: list[Sample]

    @property
    def value(self) -> float:
        return float(metrics.headline(self.summary)["value"])

    @property
    def result(self) -> str:
        return str(self.summary["verdict"]["result"])

    @property
    def misleads(self) -> bool:
        """Whether it is VALID and shows a speed-up or a slow-down."""
        return self.result == "VALID" and not SLOWER[0] <= self.value <= SLOWER[1]

    def idle_s(self, phase: str) -> float:
        """The longest time without a processor in any decode of this phase."""
        found = (s.batch_ns - (s.cpu_ns or 0) for s in self.samples if s.phase == phase)
        return max(found, default=0) / 1e9


def paused_run(results: Path, rng: Random, pause_s: float) -> Outcome:
    """Measure; at a random moment stop the process for so long."""
    process = start([*_WORDS, f"seed={rng.randrange(10**6)}", f"paths.results={results}"], results.with_suffix(".txt"))
    moment, deadline = rng.randrange(_PAIRS), time.monotonic() + _PATIENCE_S
    while process.is_alive() and _recorded(results) < moment and time.monotonic() < deadline:
        time.sleep(0.002)
    time.sleep(rng.uniform(0, 0.05))
    if process.is_alive():
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(pause_s)
        os.kill(process.pid, signal.SIGCONT)
    process.join(_PATIENCE_S)
    assert process.exitcode is not None, results.with_suffix(".txt").read_text()
    (folder,) = run_folders(results)
    summary = files.read_json(folder / run_folder.SUMMARY)
    assert summary is not None, results.with_suffix(".txt").read_text()
    return Outcome(summary, run_folder.read_samples(folder))


def _recorded(results: Path) -> int:
    """Pairs on the disk; -1 before the first measurement begins."""
    folders = run_folders(results)
    if not folders or not (folders[0] / run_folder.SAMPLES).exists():
        return -1
    rows = (folders[0] / run_folder.SAMPLES).read_bytes()
    return rows.count(b'"phase": "measure"') // 2 if b'"phase": "warmup"' in rows else -1
