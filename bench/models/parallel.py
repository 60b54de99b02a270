"""``model.parallel``: start the other processes of a target on several devices, and end them.

On GPUs each process has one; on a CPU all have their share of it, which tests what a machine with several GPUs does.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.config.schema import PathsConfig
from bench.errors import UserError

if TYPE_CHECKING:
    import torch

    from methods.engine.tensor_parallel import Devices, DrivingLM

_START = timedelta(minutes=10)  # until all processes have read their weights
_IDLE = timedelta(days=7)  # between two passes
_END_S = 10.0


@dataclass
class _Running:
    """The processes of the target that is loaded, but the first."""

    processes: list[subprocess.Popen[bytes]]
    meeting: tempfile.TemporaryDirectory[str]
    lm: DrivingLM | None = None


_running: _Running | None = None


def require(size: int, device: torch.device) -> None:
    """Refuse more devices than there are.

    Raises:
        UserError: says how many there are.
    """
    import torch

    if device.type == "cuda" and torch.cuda.device_count() < size:
        raise UserError(
            f"model.parallel={size} needs {size} GPUs, and torch finds {torch.cuda.device_count()}. Lower "
            "model.parallel, or use a machine with more."
        )
    if not torch.distributed.is_available():
        raise UserError(f"model.parallel={size} needs torch.distributed, which this build of torch lacks.")


def start(
    size: int, model: Mapping[str, Any], hardware: Mapping[str, Any], paths: PathsConfig, device: torch.device
) -> Devices:
    """Start the processes of a target, and meet them. Those of an earlier target end.

    Args:
        model, hardware: groups of the configuration, as the first process loads them.
        device: of this process.
    """
    global _running
    stop()
    meeting = tempfile.TemporaryDirectory()
    given = {"model": dict(model), "hardware": dict(hardware), "paths": asdict(paths), "meeting": meeting.name}
    processes = []
    for rank in range(1, size):
        words = [sys.executable, "-m", "bench.models.follower", json.dumps({**given, "rank": rank, "size": size})]
        # stdout is the program's own; an interrupt is for the first process, which ends the others
        apart: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": sys.stderr, "start_new_session": True}
        processes.append(subprocess.Popen(words, env=_environment(), **apart))
    _running = _Running(processes, meeting)
    atexit.register(stop)
    return meet(0, size, Path(meeting.name), device)


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}


def drive(lm: DrivingLM) -> None:
    """Note the model whose end is that of the other processes."""
    assert _running is not None, "they were started"
    _running.lm = lm


def stop() -> None:
    """End the processes of the target that was loaded last; none is no error."""
    global _running
    if _running is None:
        return
    import torch.distributed as dist

    ending, _running = _running, None
    with suppress(Exception):  # they may be gone
        if ending.lm is not None:
            ending.lm.stop()
    for process in ending.processes:
        try:
            process.wait(_END_S if ending.lm is not None else 0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    with suppress(Exception):
        dist.destroy_process_group()
    ending.meeting.cleanup()


def meet(rank: int, size: int, meeting: Path, device: torch.device) -> Devices:
    """Join the processes of a target; returns when all are there."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from methods.engine.tensor_parallel import Devices

    store = dist.FileStore(str(meeting / "store"), size)
    store.set_timeout(_START)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=size)
    mesh = init_device_mesh(device.type, (size,))
    ranks = list(range(size))
    words = dist.new_group(ranks, backend="gloo", timeout=_IDLE)
    sums = dist.new_group(ranks, backend="nccl" if on_gpu else "gloo", timeout=_IDLE)
    assert words is not None and sums is not None, "this process is in both"
    return Devices(mesh, sums, words)
