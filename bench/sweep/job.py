"""One job of a sweep, wherever it runs: what it is told and what it answers."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from bench.utils import files

FAILED = 1
AGAIN = "What was measured is kept; run the same command to go on."
_OURS = "DECODEBENCH_"


def now() -> str:
    """Date and time, to the second as manifests have them."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


@dataclass(frozen=True, slots=True)
class Task:
    """A job as plain data.

    Attributes:
        words: its command line.
        name: of its files, unique within the sweep.
        label: its command line without what all jobs of the sweep share.
        fresh: records from before ``submitted`` are forgotten; those of its own earlier attempts never are.
        folder: the current folder, which paths on the command line may refer to.
        environment: variables that say where things lie.
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


@dataclass(frozen=True, slots=True)
class Result:
    """How a job ended: the exit code its command would have, and what it failed of."""

    code: int
    message: str = ""


def perform(task: Task) -> Result:
    """Run a job in this process."""
    os.chdir(task.folder)
    os.environ.update(task.environment)
    from bench import cli

    return cli.attempt(task.words, datetime.fromisoformat(task.submitted) if task.fresh else False)


def killed(how: str) -> Result:
    """Of a job that ended without an answer.

    Args:
        how: what ended it, as in ``Signal 9 (SIGKILL) ended the process``.
    """
    return Result(FAILED, f"{how}. {AGAIN}")


def answer(file: Path) -> Result | None:
    """What the job of this file said at its end, if it came that far."""
    try:
        return Result(**json.loads(_answer_file(file).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


def write(file: Path, value: Any) -> None:
    """A dataclass or a plain value as JSON; the file is there as a whole or not at all."""
    files.replace(file, json.dumps(value if isinstance(value, dict) else asdict(value)) + "\n")


def _answer_file(file: Path) -> Path:
    return file.with_suffix(".result")


def main(argv: list[str]) -> int:
    """Run the job in a file and put the answer beside it."""
    file = Path(argv[0])
    try:
        result = perform(Task(**json.loads(file.read_text(encoding="utf-8"))))
    except KeyboardInterrupt:
        return 130
    write(_answer_file(file), result)
    return result.code


def interrupt_at_end_of(pipe: int) -> None:
    """Interrupt this process, as Ctrl-C would, when nobody can write into the pipe any more: the sweep is gone."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell started it in the background

    def watch() -> None:
        os.read(pipe, 1)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    interrupt_at_end_of(sys.stdin.fileno())
    sys.exit(main(sys.argv[1:]))
