"""The command line in a process that has imported everything, with what it said and how it ended."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.sweeps import start_call

PATIENCE_S = 240.0


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Attributes:
        code: exit code; negative: the signal that ended it; None: it was still running and was killed.
        said: both streams.
    """

    code: int | None
    said: str

    @property
    def traceback(self) -> bool:
        return "Traceback (most recent call last)" in self.said

    @property
    def measured(self) -> bool:
        """Whether the measurement began."""
        return "warming up" in self.said


@dataclass(frozen=True)
class Shell:
    """Runs commands in a folder."""

    folder: Path

    def run(self, words: Sequence[str], environment: dict[str, str] | None = None) -> Ended:
        said = self.folder / "said.txt"
        process = start_call(_main, list(words), str(self.folder), str(said), dict(environment or {}))
        process.join(PATIENCE_S)
        code = process.exitcode
        if code is None:
            process.kill()
            process.join()
        return Ended(code, said.read_text(encoding="utf-8", errors="replace") if said.exists() else "")


def _main(words: list[str], folder: str, said: str, environment: dict[str, str]) -> None:
    import sys

    from bench import cli

    os.chdir(folder)
    os.environ.update(environment)
    with open(said, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.exit(cli.main(words))
