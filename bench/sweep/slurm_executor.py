"""``cluster=slurm``: the jobs of a sweep as one SLURM array, through submitit.

submitit writes the batch file, transfers task and result, and requeues a job that is preempted or runs out of time; a
requeued job resumes in its record folder. States come from ``squeue``, since not every site keeps the accounts
that submitit reads with ``sacct``.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.errors import UserError
from bench.sweep.executors import FOLDER, Answers, Pending, at_least, missing, reported
from bench.sweep.job import Result, Task, killed, perform, write

if TYPE_CHECKING:
    from submitit import Job
    from submitit.helpers import DelayedSubmission

JOBS = "slurm.json"  # in the folder of a submission: SLURM job id -> names of its runs
MOST = 1000  # jobs in an array, SLURM's own default
_POLL, _GRACE = 2.0, 10.0  # seconds between two polls; between a job's end and its result on a shared file system
_WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")  # states in which nothing runs


class Work:
    """What submitit calls in a job."""

    def __call__(self, task: Task) -> Result:
        return perform(task)

    def checkpoint(self, task: Task) -> DelayedSubmission:
        """What a requeued job does: the same, resuming from its records."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, task)


@dataclass(frozen=True, slots=True)
class Slurm:
    """Jobs of SLURM, see conf/cluster/slurm.yaml."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    job_timeout: int = 4 * 60 * 60
    requeue: int = 3
    gpus_per_node: int = 0
    cpus_per_task: int = 4
    mem_gb: float | None = None
    array_parallelism: int = 32
    setup: list[str] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    wait: bool = True

    here = one_by_one = False

    def __post_init__(self) -> None:
        for name in ("job_timeout", "cpus_per_task", "array_parallelism"):
            at_least(f"cluster.{name}", getattr(self, name), 1)
        for name in ("requeue", "gpus_per_node", "mem_gb"):
            at_least(f"cluster.{name}", getattr(self, name), 0)

    @property
    def threads(self) -> int:
        return self.cpus_per_task

    def pending(self, results: Path) -> Pending:
        submitted: dict[str, list[str]] = {}
        for file in results.glob(f"{FOLDER}/*/{JOBS}"):
            submitted |= json.loads(file.read_text(encoding="utf-8"))
        active = _active() if submitted else None
        return {
            name: ("queued" if state.startswith(_WAITING) else "running", f"SLURM job {job}: {state}")
            for job, state in (active or {}).items()
            for name in submitted.get(job, [])
        }

    def run(self, tasks: Sequence[Task], folder: Path) -> Answers:
        return reported(self._run(tasks, folder), tasks, folder)

    def _run(self, tasks: Sequence[Task], folder: Path) -> Answers:
        jobs = self._submit(tasks, folder)
        arrays = " ".join(sorted({job.job_id.split("_")[0] for job in jobs}))
        print(f"Submitted to SLURM: {arrays}; the jobs listen on no port.", flush=True)
        if not self.wait:
            print(f"The same command shows their state; scancel {arrays} ends them.")
            return
        try:
            yield from _follow(jobs)
        except KeyboardInterrupt:
            print(f"The jobs continue without this command; scancel {arrays} ends them.")
            raise

    def _submit(self, tasks: Sequence[Task], folder: Path) -> list[Job[Result]]:
        try:
            import submitit
            from submitit.core.utils import FailedJobError, FailedSubmissionError
        except ImportError as error:
            raise missing("slurm", "submitit") from error
        if shutil.which("sbatch") is None or shutil.which("srun") is None:
            raise UserError(
                "cluster=slurm needs sbatch on PATH. Log in to a machine of the cluster, or choose cluster=process."
            )
        executor = submitit.SlurmExecutor(folder, max_num_timeout=self.requeue)
        executor.update_parameters(**self._parameters())
        jobs: list[Job[Result]] = []
        try:
            for start in range(0, len(tasks), MOST):
                with contextlib.redirect_stderr(io.StringIO()):  # the error repeats what sbatch prints
                    jobs += executor.map_array(Work(), tasks[start : start + MOST])
                write(folder / JOBS, {job.job_id: t.names for job, t in zip(jobs, tasks, strict=False)})
        except (FailedJobError, FailedSubmissionError) as error:
            raise self._refused(str(error)) from error
        return jobs

    def _parameters(self) -> dict[str, Any]:
        """The settings under submitit's names."""
        given = {
            "job_name": "decodebench",
            "partition": self.partition,
            "account": self.account,
            "qos": self.qos,
            "time": math.ceil(self.job_timeout / 60),
            "gpus_per_node": self.gpus_per_node or None,
            "cpus_per_task": self.cpus_per_task,
            "mem": None if self.mem_gb is None else f"{round(1024 * self.mem_gb)}MB",
            "setup": self.setup or None,
            "array_parallelism": self.array_parallelism,
            "additional_parameters": {"requeue": True} | self.options,
            "srun_args": [f"--cpus-per-task={self.cpus_per_task}"],  # since SLURM 22.05 a step does not inherit it
            "stderr_to_stdout": True,
        }
        return {name: value for name, value in given.items() if value is not None}

    def _refused(self, said: str) -> UserError:
        """What sbatch said, in one line, and what the settings may be."""
        errors = re.findall(r"error: *(.+)", said) or said.splitlines() or ["nothing"]
        asked = {"partition": self.partition, "account": self.account, "qos": self.qos, **self.options}
        came = " ".join(f"cluster.{name}={value}" for name, value in asked.items() if value is not None)
        partitions = _ask("sinfo", "-h", "-o", "%P")
        known = f"Partitions: {', '.join(partitions.split())}. " if partitions else ""
        return UserError(
            f"SLURM refused cluster=slurm {came}".rstrip() + f": {'; '.join(dict.fromkeys(errors))}. {known}"
            "Correct the setting it names (python -m bench show cluster/slurm)."
        )


# ------------------------------------------------------------------------------------------------------ following


def _follow(jobs: Sequence[Job[Result]]) -> Answers:
    """Until every job has a result or has left the queue without one."""
    left, gone = dict(enumerate(jobs)), dict[int, float]()
    while left:
        active = _active()
        for place, job in list(left.items()):
            if job.paths.result_pickle.exists():
                yield place, _answer(left.pop(place))
            elif active is None or job.job_id in active:
                gone.pop(place, None)
            elif time.monotonic() - gone.setdefault(place, time.monotonic()) > _GRACE:
                yield place, killed(f"SLURM ended job {left.pop(place).job_id}{_why(job.job_id)}")
        if left:
            time.sleep(_POLL)


def _answer(job: Job[Result]) -> Result:
    from submitit.core.utils import UncompletedJobError

    try:
        return job.result()
    except UncompletedJobError as error:  # its last line names the cause
        return killed(str(error).strip().splitlines()[-1].rstrip("."))


def _active() -> dict[str, str] | None:
    """Own jobs in SLURM's queue: id -> state and reason; None if SLURM does not answer."""
    lines = _ask("squeue", "--me", "--noheader", "--array", "--format=%i %T %r")
    return None if lines is None else dict(line.split(" ", 1) for line in lines.splitlines())


def _why(job: str) -> str:
    """State and exit code of a job that ended, which SLURM knows for a few minutes."""
    known = _ask("scontrol", "show", "job", "--oneliner", job) or ""
    found = dict(re.findall(r"\b(JobState|ExitCode)=(\S+)", known))
    return f" ({found['JobState']}, exit code:signal {found['ExitCode']})" if len(found) == 2 else ""


def _ask(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return None
