"""One job of a sweep, on any executor: a task goes in, a result comes out."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from bench.config import compose
from bench.config.schema import RunConfig
from bench.errors import BAD_INPUT, FAILED, INTERRUPTED, INVALID, OK, RunFailed, classify, is_of_cluster, report_failure
from bench.utils import files

ARMS = "arms"  # word of the command line: methods that are measured together
_OURS = "DECODEBENCH_"


def now() -> str:
    """Date and time to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


@dataclass(frozen=True, slots=True)
class Task:
    """A job as plain data.

    Attributes:
        words: its command line.
        together: by their names, command lines of other runs that are measured with it against one baseline.
        name: of its files, unique within the sweep.
        label: its command line without what all jobs of the sweep share.
        fresh: ignore records from before ``submitted``, but not those of its own earlier attempts.
        folder: the current folder, which paths on the command line may refer to.
        environment: this project's variables.
        timeout_s: after which it is ended and counts as failed; None: never.
    """

    words: list[str]
    name: str
    label: str
    fresh: bool = False
    submitted: str = field(default_factory=now)
    folder: str = field(default_factory=os.getcwd)
    environment: dict[str, str] = field(
        default_factory=lambda: {name: value for name, value in os.environ.items() if name.startswith(_OURS)}
    )
    together: dict[str, list[str]] = field(default_factory=dict)
    timeout_s: int | None = None

    @property
    def names(self) -> list[str]:
        """Of all its runs."""
        return [self.name, *self.together]


@dataclass(frozen=True, slots=True)
class Result:
    """How a job ended: the exit code its command would have, and why it failed."""

    code: int
    message: str = ""


def worst(codes: Collection[int]) -> int:
    """The exit code of several runs."""
    return next((code for code in (FAILED, BAD_INPUT, INVALID) if code in codes), OK)


def execute(cfg: RunConfig, fresh: bool | datetime, *, since: datetime | None = None, as_json: bool = False) -> int:
    """Measure one run; returns the exit code.

    Args:
        fresh, since: see ``bench.measure.run.run``.
        as_json: print the summary as JSON, with the run's folder as ``path``, in place of the table.
    """
    from bench.config import instantiate

    instantiate.check(cfg)
    from bench.measure.run import run

    found = run(cfg, fresh=fresh, since=since, quiet=as_json)
    if as_json:
        print(json.dumps({"path": str(found.path)} | found.summary, default=files.plain))
    return OK if found.verdict.valid else INVALID


def attempt(task: Task, fresh: bool | datetime, since: datetime | None = None) -> Result:
    """``execute`` for a sweep: a failure is printed and returned instead of raised."""
    try:
        with _ended_after(task.timeout_s):
            cfgs = compose.compose_each([task.words, *task.together.values()])
            if len(cfgs) == 1:
                return Result(execute(cfgs[0], fresh, since=since))
            return _execute_together(cfgs, fresh, since)
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and is_of_cluster(error):
            raise
        return Result(report_failure(error), classify(error)[1])


@contextmanager
def _ended_after(seconds: int | None) -> Iterator[None]:
    """Raise RunFailed in the main thread when the time is over; what runs outside of Python is not interrupted."""
    if seconds is None or threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGALRM"):
        yield
        return

    def end(*_: object) -> None:
        raise RunFailed(overtime(seconds).message)

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def overtime(seconds: int) -> Result:
    """The result of a job that took too long."""
    return killed(f"Its time limit ended the job (cluster.job_timeout={seconds}, in seconds)")


def _execute_together(cfgs: Sequence[RunConfig], fresh: bool | datetime, since: datetime | None) -> Result:
    """Several runs against one baseline; those that fail are named, the worst exit code is that of all."""
    from bench.config import instantiate
    from bench.measure.run import run_together

    for cfg in cfgs:
        instantiate.check(cfg)
    codes, failed = {OK}, []
    for cfg, found in zip(cfgs, run_together(cfgs, fresh=fresh, since=since), strict=True):
        if isinstance(found, Exception):
            codes.add(report_failure(found))
            failed.append(f"method={cfg.method['name']}: {classify(found)[1]}")
        elif not found.verdict.valid:
            codes.add(INVALID)
    return Result(worst(codes), " ".join(failed))


def perform(task: Task) -> Result:
    """Run a job in this process."""
    os.chdir(task.folder)
    os.environ.update(task.environment)
    submitted = datetime.fromisoformat(task.submitted)
    return attempt(task, submitted if task.fresh else False, since=submitted)


def killed(how: str) -> Result:
    """The result of a job that ended without one.

    Args:
        how: what ended it, as in ``Signal 9 (SIGKILL) ended the process``.
    """
    return Result(FAILED, f"{how}. Finished work is kept; run the same command to resume.")


def read_result(file: Path) -> Result | None:
    """The result of the job in a file, if it wrote one."""
    try:
        return Result(**json.loads(_result_file(file).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


def write(file: Path, value: Any) -> None:
    """A dataclass or a dictionary as JSON, atomically."""
    files.atomic_write(file, json.dumps(value if isinstance(value, dict) else asdict(value)) + "\n")


def _result_file(file: Path) -> Path:
    return file.with_suffix(".result")


def main(argv: list[str]) -> int:
    """Run the job in a file and write the result beside it."""
    file = Path(argv[0])
    try:
        result = perform(Task(**json.loads(file.read_text(encoding="utf-8"))))
    except KeyboardInterrupt:
        return INTERRUPTED
    write(_result_file(file), result)
    return result.code


def interrupt_at_end_of(pipe: int) -> None:
    """Interrupt this process, as Ctrl-C would, when the pipe has no writer left: the sweep has ended."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell started it in the background

    def watch() -> None:
        os.read(pipe, 1)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    interrupt_at_end_of(sys.stdin.fileno())
    sys.exit(main(sys.argv[1:]))
