"""A sweep that takes seconds, and a look at what its jobs have recorded and which processes they are."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import psutil

from bench import cli
from bench.measure import run as _  # noqa: F401  so that a sweep in a process of its own begins at once
from bench.records import run_folder

COMMON = [
    "method.costs=null",  # first, as some methods have none: drafts sized by measured passes differ from run to run
    "model=random", "dataset=demo", "dataset.limit=2", "measure=quick", "measure.repeats=4", "max_new_tokens=24",
    "hardware=cpu_fp32", "hardware.threads=1", "measure.cost_curve=false", "measure.bootstrap_samples=100",
]  # fmt: skip
FILES = {run_folder.MANIFEST, run_folder.CONFIG, run_folder.SAMPLES, run_folder.SUMMARY}  # of a run that is through
_MEASURED = (
    "prefill_ns",
    "batch_ns",
    "step_ns",
    "step_draft_ns",
    "step_pass_ns",
    "peak_bytes",
    "energy_j",
    "cpu_ns",
    "jump_ns",
)


def outputs(results: Path) -> dict[str, list[dict[str, Any]]]:
    """What was recorded, by run and pair, without times; a run that is cut or holds anything twice is an error.

    A pair that the machine disturbed is measured again later, so the order of the lines is not compared.
    """
    found = {}
    for path in run_folders(results):
        assert not run_folder.validate(path) and {file.name for file in path.iterdir()} == FILES
        rows = [asdict(row) for row in run_folder.read_samples(path) if row.phase == "measure"]
        rows.sort(key=lambda row: (row["repeat"], row["prompt_id"], row["turn"], row["arm"]))
        found[path.name] = [{key: row[key] for key in row if key not in _MEASURED} for row in rows]
    return found


def run_folders(results: Path) -> list[Path]:
    return sorted(results.glob("[a-z]*-*"))


def folder_of(results: Path, seed: int) -> Path | None:
    manifests = ((path, run_folder.read_manifest(path)) for path in run_folders(results))
    return next((path for path, manifest in manifests if manifest and manifest["seed"] == seed), None)


def pairs(results: Path, seed: int) -> int:
    """How many the run with this seed has recorded."""
    folder = folder_of(results, seed)
    samples = folder / run_folder.SAMPLES if folder else None
    return samples.read_bytes().count(b'"phase": "measure"') // 2 if samples and samples.exists() else 0


def writers(results: Path, seed: int) -> list[psutil.Process]:
    """The process that holds the lock of the run with this seed."""
    folder = folder_of(results, seed)
    return [process for process in psutil.process_iter() if folder and lock_of(process) == folder]


def lock_of(process: psutil.Process) -> Path | None:
    """The run folder that a process writes."""
    try:
        locks = [Path(file.path) for file in process.open_files() if file.path.endswith("/.lock")]
    except psutil.Error:
        return None
    return locks[0].parent if locks else None


def start(words: Sequence[str], said: Path, environment: Mapping[str, str] | None = None) -> ForkServerProcess:
    """The command line in a process of its own, which has imported everything."""
    return start_call(_main, list(words), str(said), dict(environment or {}))


def start_call(function: Callable[..., None], *arguments: Any) -> ForkServerProcess:
    """A call in a process of its own, which has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    process = context.Process(target=function, args=arguments)
    process.start()
    return process


def _main(words: list[str], said: str, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    os.environ.pop("WANDB_SERVICE", None)  # as in a new shell: the caller's would hold a killed run as one in use
    with open(said, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.exit(cli.main(words))
