"""The first thing in the process of a program that a model wrote: sets its limits, then runs it.

Started by ``bench.quality.sandbox`` as a script, isolated from the environment; imports nothing of this project.
The program comes on standard input, the verdict goes to standard output, which the program itself cannot reach.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from contextlib import suppress
from typing import Any

_REFUSED = (  # audit events of what a solution to a programming exercise has no use for
    "os.fork",
    "os.forkpty",
    "os.exec",
    "os.posix_spawn",
    "os.system",
    "os.kill",
    "os.killpg",
    "os.chmod",
    "os.chown",
    "os.link",
    "os.symlink",
    "subprocess.",
    "pty.",
    "socket.",
    "webbrowser.",
)
_WRITING = {"os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.truncate", "os.utime", "shutil.rmtree"}


class _TimeUp(BaseException):
    """Not an Exception, so that no ``except Exception`` of the program holds it."""


def _time_up(*_: Any) -> None:
    raise _TimeUp


def _limit(limits: dict[str, int]) -> None:
    wanted = {
        "RLIMIT_CPU": limits["cpu_s"],
        "RLIMIT_AS": limits["memory_bytes"],
        "RLIMIT_FSIZE": limits["file_bytes"],
        "RLIMIT_NOFILE": limits["open_files"],
        "RLIMIT_NPROC": 0,
        "RLIMIT_CORE": 0,
    }
    for name, value in wanted.items():
        with suppress(AttributeError, ValueError, OSError):  # macOS has no address space limit that works
            _, hard = resource.getrlimit(getattr(resource, name))
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            most = value + 1 if name == "RLIMIT_CPU" and hard != value else value  # the second is for the report
            resource.setrlimit(getattr(resource, name), (value, most))
    signal.signal(signal.SIGXCPU, _time_up)


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook: it stays until the process ends."""
    if event.startswith(_REFUSED):
        raise PermissionError(f"{event} is not allowed")
    if event in _WRITING or (event == "open" and _writes(arguments[2])):
        for path in arguments[:2] if event == "os.rename" else arguments[:1]:
            if not _inside(path):
                raise PermissionError(f"{event} outside the working folder is not allowed")


def _writes(flags: Any) -> bool:
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND))


def _inside(path: Any) -> bool:
    if isinstance(path, int):  # an open file descriptor: it was judged when it was opened
        return True
    real = os.path.realpath(os.fsdecode(path))
    return real == _FOLDER or real.startswith(_FOLDER + os.sep)


def _silence() -> int:
    """Standard streams lead nowhere; what is reported goes to the descriptor that is returned."""
    report, nowhere = os.dup(1), os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    return report


def _run(program: str) -> str:
    try:
        exec(compile(program, "program.py", "exec"), {"__name__": "program"})
    except _TimeUp:
        return "time limit"
    except BaseException as error:
        return type(error).__name__
    return "done"


_FOLDER = os.path.realpath(os.getcwd())

if __name__ == "__main__":
    program = sys.stdin.buffer.read().decode()
    report = _silence()
    _limit(json.loads(sys.argv[1]))
    sys.addaudithook(_refuse)
    os.write(report, _run(program).encode())
    os._exit(0)  # no exit handlers, no waiting for threads of the program
