"""Run stages one after another, each with a time limit, so that whatever ends the job loses nothing.

A stage that ended well is not repeated, nor one with INVALID runs, whose records are complete. One that failed, ran out
of time or was killed is run again by the next job, where its commands resume their own records. ``log/stages.log`` has
a line for every stage that ended. The archive of all that was found so far is written after each stage.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from bench.errors import INVALID, OK
from bench.gpu import start
from bench.gpu.plan import Stage
from bench.utils import files

State = Literal["done", "failed", "out of time", "not started"]
_POLL_S = 0.5
_PDEATHSIG = 1  # of prctl: a signal when the parent dies
_SHOWN = 4  # words of a command in the log of the stages


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a stage ended.

    Attributes:
        codes: exit code of each command that was started; None: it was stopped.
        note: why it was not started.
    """

    state: State
    seconds: float
    codes: tuple[int | None, ...] = ()
    note: str = ""


@dataclass
class Job:
    """A list of stages and the folder where they leave everything.

    Attributes:
        stages: in order.
        home: logs, states, records.
        out: where the archive is written after each stage; None: nowhere.
        limits: factor on all time limits.
        patience_s: how long a stage waits for what it needs.
        packed: items arrive with pieces; False: all of them are here.
        grace_s: between the interrupt of a command, after which a run keeps its samples, and its end.
    """

    stages: Sequence[Stage]
    home: Path
    out: Path | None = None
    limits: float = 1.0
    patience_s: float = 300.0
    packed: bool = False
    grace_s: float = 15.0
    clock: Callable[[], float] = time.monotonic
    _began: float = field(default=0.0, init=False)

    def run(self) -> dict[str, Outcome]:
        """Run what is not done yet; returns the outcomes of the stages of this job by name.

        A ``required`` stage that does not end well ends the job.

        Raises:
            UserError: another job works in the same folder.
        """
        for folder in ("log", "state"):
            (self.home / folder).mkdir(parents=True, exist_ok=True)
        refusal = f"Another job runs in {self.home}. Wait for it, or name another folder: home=FOLDER."
        with files.locked(self.home / "state" / "job.lock", refusal), _terminable():
            (self.home / "state" / start.DONE).unlink(missing_ok=True)
            self._began = self.clock()
            outcomes = self._run_all()
            if all(stage.name in outcomes or self._is_done(stage) for stage in self.stages) and not any(
                outcome.state == "not started" for outcome in outcomes.values()
            ):
                (self.home / "state" / start.DONE).touch()
            self._archive()
        return outcomes

    def _run_all(self) -> dict[str, Outcome]:
        outcomes: dict[str, Outcome] = {}
        for stage in self.stages:
            if self._is_done(stage):
                continue
            outcomes[stage.name] = outcome = self._run(stage)
            self._note(stage, outcome)
            self._archive()
            if stage.required and outcome.state != "done":
                self._log(f"stopped: {stage.name} is required for all that follows")
                break
        return outcomes

    def _run(self, stage: Stage) -> Outcome:
        missing = self._await(stage.needs)
        if missing:
            return Outcome("not started", 0.0, note=f"{', '.join(missing)} has not arrived")
        begin = self.clock()
        end = begin + stage.limit_s * self.limits
        codes: list[int | None] = []
        with (self.home / "log" / f"{stage.name}.log").open("ab") as log:
            for words in stage.commands:
                left = end - self.clock()
                code = self._command(words, left, log.fileno()) if left > 0 else None
                codes.append(code)
                if code is None:
                    break
        took = self.clock() - begin
        if codes and codes[-1] is None:
            return Outcome("out of time", took, tuple(codes))
        finished = all(code in (OK, INVALID) for code in codes)
        return Outcome("done" if finished else "failed", took, tuple(codes))

    def _command(self, words: Sequence[str], seconds: float, log: int) -> int | None:
        """Exit code of a command; None if its time was over, after an interrupt that lets it keep its records."""
        program = [sys.executable] if words[0] == "python" else [sys.executable, "-m", words[0]]
        os.write(log, f"$ {' '.join(words)}\n".encode())
        process = subprocess.Popen(
            [*program, *words[1:]],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            _end(process, self.grace_s)
            return None
        except BaseException:  # this job is being ended: so is what it started
            _end(process, self.grace_s)
            raise

    def _await(self, needs: Sequence[str]) -> list[str]:
        """The items that have not arrived after some patience."""
        have, end = self.home / "state" / "have", self.clock() + self.patience_s
        while True:
            missing = [name for name in needs if self.packed and not (have / name).is_file()]
            if not missing or self.clock() >= end:
                return missing
            time.sleep(_POLL_S)

    def _is_done(self, stage: Stage) -> bool:
        """Whether an earlier job ran these very commands to a good end."""
        found = files.read_json(self._state(stage)) or {}
        return found.get("state") == "done" and found.get("commands") == [list(words) for words in stage.commands]

    def _state(self, stage: Stage) -> Path:
        return self.home / "state" / f"{stage.name}.json"

    def _note(self, stage: Stage, outcome: Outcome) -> None:
        commands = [list(words) for words in stage.commands]
        content = {
            "state": outcome.state,
            "seconds": round(outcome.seconds, 1),
            "codes": list(outcome.codes),
            "note": outcome.note,
            "commands": commands,
        }
        files.write_json(self._state(stage), content)
        words = {OK: "", INVALID: "INVALID", None: "stopped"}
        bad = [
            f"{words.get(code, f'exit code {code}')}: {' '.join(command[:_SHOWN])}"
            for command, code in zip(commands, outcome.codes, strict=False)
            if code != OK
        ]
        rest = outcome.note or "; ".join(bad)
        self._log(f"{outcome.state:11} {stage.name:16} {outcome.seconds:6.0f} s  {rest}".rstrip())

    def _log(self, text: str) -> None:
        line = f"{self.clock() - self._began:6.0f} s  {text}"
        with (self.home / "log" / "stages.log").open("a", encoding="utf-8") as log:
            log.write(line + "\n")
        print(line, flush=True)

    def _archive(self) -> None:
        if self.out is not None:
            start.archive(self.home, self.out)


def _end_with_parent() -> None:
    """In a new process: end when the job that started it is gone, also where that was killed."""
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGTERM)


@contextmanager
def _terminable() -> Iterator[None]:
    """A request to terminate this process ends its command, as an interrupt does."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """Interrupt a command and all that it started, and after a while kill what is left."""
    for sign, patience in ((signal.SIGINT, grace_s), (signal.SIGKILL, None)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
