"""Where the jobs of a sweep run (``cluster=local|process|slurm|ray``).

The plan comes first and is the same everywhere (``bench.sweep.plan``); so are the records, the table of failures and the
exit code. A job that is killed leaves its records, and goes on with them when it is run again.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from bench.errors import UserError
from bench.sweep import job as cluster_job
from bench.sweep.job import Result, Task

FOLDER = ".cluster"  # below the results: what jobs printed, one folder per submission
Answers = Iterator[
    tuple[int, Result]
]  # place in the sequence of tasks, and how it ended; in the order in which they end
Pending = dict[str, tuple[Literal["queued", "running"], str]]  # a task's name: how it stands, in words
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_PATIENCE = 10.0  # seconds that a process has to write its last records when it is told to stop


@runtime_checkable
class Cluster(Protocol):
    """Runs tasks."""

    @property
    def here(self) -> bool:
        """On this machine: what cannot run here cannot run, and records of other machines are no records of a job."""
        ...

    @property
    def threads(self) -> int | None:
        """CPU threads of each run; None: those of the machine."""
        ...

    def pending(self, results: Path) -> Pending:
        """Tasks of earlier sweeps into this results folder that have not ended."""
        ...

    def run(self, tasks: Sequence[Task], folder: Path) -> Answers:
        """Run them, if need be into the folder, and tell how each of them ended; none of those that were left running.

        Raises:
            UserError: they cannot be started.
        """
        ...


@dataclass(frozen=True, slots=True)
class Local:
    """One after the other in this process."""

    here = True
    threads = None

    def pending(self, results: Path) -> Pending:
        """None: it has no memory."""
        return {}

    def run(self, tasks: Sequence[Task], folder: Path) -> Answers:
        """See ``Cluster``; each prints what a single run prints."""
        from bench import cli

        for place, task in enumerate(tasks):
            print(f"\n[{place + 1}/{len(tasks)}] {' '.join(task.words)}", flush=True)
            yield place, cli.attempt(task.words, task.fresh)


@dataclass(frozen=True, slots=True)
class Process:
    """Each in a process of its own on this machine, which ends when this one does.

    Args:
        jobs: most of them side by side; they get equal shares of the cores, and of several GPUs one each.
    """

    jobs: int = 1

    here = True

    def __post_init__(self) -> None:
        at_least("cluster.jobs", self.jobs, 1)

    @property
    def threads(self) -> int | None:
        """See ``Cluster``."""
        if self.jobs == 1:
            return None
        from bench.utils import machine

        return max(1, machine.default_threads() // self.jobs)

    def pending(self, results: Path) -> Pending:
        """None: a process holds the lock of the folder it writes, by which the plan knows it."""
        return {}

    def run(self, tasks: Sequence[Task], folder: Path) -> Answers:
        """See ``Cluster``."""
        return told(self._run(tasks, folder), tasks, folder)

    def _run(self, tasks: Sequence[Task], folder: Path) -> Answers:
        waiting, running = deque(enumerate(tasks)), dict[int, _Running]()
        gpus, (theirs, ours) = visible_gpus(), os.pipe()  # a pipe that ends when this process does
        try:
            while waiting or running:
                while waiting and len(running) < self.jobs:
                    place, task = waiting.popleft()
                    gpu = _idlest(gpus, running.values())
                    running[place] = _Running(_start(task, folder, gpu, theirs), gpu)
                ended = [place for place, job in running.items() if job.process.poll() is not None]
                for place in ended:
                    yield place, _ending(folder / f"{tasks[place].name}.json", running.pop(place).process.returncode)
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


def visible_gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them; asking starts nothing on any of them."""
    import torch

    count = torch.cuda.device_count()
    given = os.environ.get(_VISIBLE)
    return given.split(",")[:count] if given else [str(number) for number in range(count)]


def _idlest(gpus: Sequence[str], running: Iterable[_Running]) -> str | None:
    """The GPU that the fewest jobs have, None where there is none."""
    jobs = Counter(job.gpu for job in running)
    return min(gpus, key=lambda gpu: jobs[gpu], default=None)


def _start(task: Task, folder: Path, gpu: str | None, alive: int) -> subprocess.Popen[bytes]:
    """In a session of its own, so that Ctrl-C reaches it once and by us."""
    cluster_job.write(file := folder / f"{task.name}.json", task)
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
    if answer := cluster_job.answer(file):
        return answer
    if code >= 0:
        return cluster_job.killed(f"The process ended with exit code {code} and without a word")
    cause = ", as the system does when memory runs out" if -code == signal.SIGKILL else ""
    return cluster_job.killed(f"Signal {-code} ({signal.Signals(-code).name}) ended the process{cause}")


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


def told(answers: Answers, tasks: Sequence[Task], folder: Path) -> Answers:
    """Make the folder, and print a line for every job that ends."""
    folder.mkdir(parents=True, exist_ok=True)
    print(f"What the jobs print: {folder}", flush=True)
    for done, (place, result) in enumerate(answers, start=1):
        how = result.message or ("VALID" if result.code == 0 else "INVALID")
        print(f"[{done}/{len(tasks)}] {tasks[place].label}: {how}", flush=True)
        yield place, result


def log_file(task: Task, folder: Path) -> Path:
    """What a task prints."""
    return folder / f"{task.name}.log"


def at_least(setting: str, value: int | float | None, least: int) -> None:
    """Check a number of the ``cluster`` group.

    Raises:
        UserError: it is lower.
    """
    if value is not None and value < least:
        raise UserError(f"{setting} came as {value}; it must be at least {least}. Set {setting}={max(least, 1)}.")


def missing(name: str, package: str) -> UserError:
    """An extra that is not installed."""
    return UserError(
        f"cluster={name} came, and {package} is not installed; it must be. Install it (pip install "
        f"'decodebench[{name}]'), or choose cluster=process."
    )
