"""Executors of a sweep's jobs on this machine: ``cluster=local`` and ``cluster=process``; and what all executors share.

The plan (``bench.sweep.plan``), the records, the list of failures and the exit code are the same with every executor.
A job that is killed keeps its records and resumes from them when it runs again.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from bench.errors import UserError
from bench.sweep.job import Result, Task, attempt, killed, overtime, read_result, write

FOLDER = ".cluster"  # below the results: logs of jobs, one folder per submission
Answers = Iterator[tuple[int, Result]]  # index of a task, and its result, in the order in which they end
Pending = dict[str, tuple[Literal["queued", "running"], str]]  # task name: state, and the state in words
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_DAY = 24 * 60 * 60
_PATIENCE = 10.0  # seconds that a process has to write its last records after SIGINT


@runtime_checkable
class Cluster(Protocol):
    """Runs tasks."""

    @property
    def here(self) -> bool:
        """Whether jobs run on this machine, so that they must fit it and only its records count."""
        ...

    @property
    def one_by_one(self) -> bool:
        """Whether jobs run one after another in this process, so that methods may share a baseline at no loss."""
        ...

    @property
    def threads(self) -> int | None:
        """CPU threads of each run; None: all."""
        ...

    @property
    def job_timeout(self) -> int | None:
        """Seconds after which a job is ended and counts as failed; None: never."""
        ...

    def pending(self, results: Path) -> Pending:
        """Tasks of earlier sweeps into this results folder that have not ended."""
        ...

    def run(self, tasks: Sequence[Task], folder: Path) -> Answers:
        """Run tasks and yield the result of each, except of those that are left running.

        Args:
            tasks: to run.
            folder: for logs and files of the executor.

        Raises:
            UserError: they cannot be started.
        """
        ...


@dataclass(frozen=True, slots=True)
class Local:
    """One after another in this process, with the output of single runs.

    Args:
        job_timeout: see ``Cluster``; code outside of Python, such as a kernel that never ends, is not interrupted.
    """

    job_timeout: int | None = _DAY

    here = one_by_one = True
    threads = None

    def __post_init__(self) -> None:
        at_least("cluster.job_timeout", self.job_timeout, 1)

    def pending(self, results: Path) -> Pending:
        return {}

    def run(self, tasks: Sequence[Task], folder: Path) -> Answers:
        total, done = sum(len(task.names) for task in tasks), 0
        for place, task in enumerate(tasks):
            numbers = f"{done + 1}-{done + len(task.names)}" if task.together else str(done + 1)
            print(f"\n[{numbers}/{total}] {task.label if task.together else ' '.join(task.words)}", flush=True)
            yield place, attempt(replace(task, timeout_s=self.job_timeout), task.fresh)
            done += len(task.names)


@dataclass(frozen=True, slots=True)
class Process:
    """Each in its own process on this machine, which ends when this one does.

    Args:
        jobs: number of parallel jobs; they share the cores equally, and each uses one of several GPUs.
        job_timeout: see ``Cluster``.
    """

    jobs: int = 1
    job_timeout: int | None = _DAY

    here, one_by_one = True, False

    def __post_init__(self) -> None:
        at_least("cluster.jobs", self.jobs, 1)
        at_least("cluster.job_timeout", self.job_timeout, 1)

    @property
    def threads(self) -> int | None:
        if self.jobs == 1:
            return None
        from bench.utils import machine

        return max(1, machine.default_threads() // self.jobs)

    def pending(self, results: Path) -> Pending:
        return {}  # the plan sees the lock of a folder that is being written

    def run(self, tasks: Sequence[Task], folder: Path) -> Answers:
        return reported(self._run(tasks, folder), tasks, folder)

    def _run(self, tasks: Sequence[Task], folder: Path) -> Answers:
        waiting, running = deque(enumerate(tasks)), dict[int, _Running]()
        gpus, (theirs, ours) = visible_gpus(), os.pipe()  # a pipe that ends when this process does
        try:
            while waiting or running:
                while waiting and len(running) < self.jobs:
                    place, task = waiting.popleft()
                    gpu = _idlest(gpus, running.values())
                    limited = replace(task, timeout_s=self.job_timeout)
                    running[place] = _Running(_start(limited, folder, gpu, theirs), gpu, _latest_end(self.job_timeout))
                ended = [place for place, job in running.items() if job.process.poll() is not None]
                for place in ended:
                    yield place, _ending(folder / f"{tasks[place].name}.json", running.pop(place).process.returncode)
                for place in [place for place, job in running.items() if time.monotonic() > job.until]:
                    _stop([running.pop(place).process])
                    yield place, overtime(self.job_timeout or 0)
                if not ended:
                    time.sleep(0.05)
        finally:
            _stop([job.process for job in running.values()])
            os.close(ours)
            os.close(theirs)


@dataclass(frozen=True, slots=True)
class _Running:
    process: subprocess.Popen[bytes]
    gpu: str | None
    until: float  # when it is ended if its own alarm did not


def _latest_end(seconds: int | None) -> float:
    return math.inf if seconds is None else time.monotonic() + seconds + _PATIENCE


def visible_gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them; none of them is initialised."""
    import torch

    count = torch.cuda.device_count()
    given = os.environ.get(_VISIBLE)
    return given.split(",")[:count] if given else [str(number) for number in range(count)]


def _idlest(gpus: Sequence[str], running: Iterable[_Running]) -> str | None:
    """The GPU with the fewest jobs."""
    jobs = Counter(job.gpu for job in running)
    return min(gpus, key=lambda gpu: jobs[gpu], default=None)


def _start(task: Task, folder: Path, gpu: str | None, alive: int) -> subprocess.Popen[bytes]:
    """Start a task in its own session, so that Ctrl-C reaches it only through ``_stop``."""
    write(file := folder / f"{task.name}.json", task)
    with log_file(task, folder).open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "bench.sweep.job", str(file)],
            stdin=alive,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=None if gpu is None else {**os.environ, _VISIBLE: gpu},
        )


def _ending(file: Path, code: int) -> Result:
    if result := read_result(file):
        return result
    if code >= 0:
        return killed(f"The process ended with exit code {code} and without a result")
    cause = ", as the system does when memory runs out" if -code == signal.SIGKILL else ""
    return killed(f"Signal {-code} ({signal.Signals(-code).name}) ended the process{cause}")


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.send_signal(signal.SIGINT)
    until = time.monotonic() + _PATIENCE
    for process in processes:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def reported(answers: Answers, tasks: Sequence[Task], folder: Path) -> Answers:
    """Make the folder, and print a line for every job that ends."""
    folder.mkdir(parents=True, exist_ok=True)
    print(f"Job logs: {folder}", flush=True)
    total, done = sum(len(task.names) for task in tasks), 0
    for place, result in answers:
        how = result.message or ("done" if result.code == 0 else "INVALID")
        done += len(tasks[place].names)
        print(f"[{done}/{total}] {tasks[place].label}: {how}", flush=True)
        yield place, result


def log_file(task: Task, folder: Path) -> Path:
    return folder / f"{task.name}.log"


def at_least(setting: str, value: int | float | None, least: int) -> None:
    """Raise a UserError if a number of the ``cluster`` group is too low."""
    if value is not None and value < least:
        raise UserError(f"{setting} must be at least {least}, got {value}. Set {setting}={max(least, 1)}.")


def missing(name: str, package: str) -> UserError:
    """The error for an extra that is not installed."""
    return UserError(
        f"cluster={name} needs {package}, which is not installed. Install it (pip install 'decodebench[{name}]'), or "
        "choose cluster=process."
    )
