"""The first thing in the process of a program that a model wrote: sets its limits, then runs it.

Started by ``bench.scoring.sandbox`` as a script, isolated from the environment; imports nothing of this project.
A secret line and the program come on standard input. The verdict goes to standard output: the secret if the program
ran to its end, else the name of what ended it, so that a program which merely writes something has not passed.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import struct
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
    "os.setxattr",
    "os.removexattr",
    "subprocess.",
    "pty.",
    "socket.",
    "sqlite3.",
    "ctypes.",
    "webbrowser.",
)
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446  # the same numbers on every architecture
_LANDLOCK_VERSION, _BENEATH, _PR_SET_NO_NEW_PRIVS = 1, 1, 38
_WRITE_RIGHTS = sum(1 << bit for bit in (1, *range(4, 13)))  # write, remove and make files of every kind
_LATER_RIGHTS = {2: 1 << 13, 3: 1 << 14}  # by version of the interface: move between folders, truncate
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


def _write_only_beneath(folder: str) -> bool:
    """Let the kernel refuse this process every write outside a folder (Landlock, Linux 5.13 and later).

    Unlike the audit hook it sees every way to a file: descriptors of folders, C libraries, paths that change.
    """
    with suppress(OSError, AttributeError):
        kernel = ctypes.CDLL(None)
        version = kernel.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), _LANDLOCK_VERSION)
        if version < 1:
            return False
        rights = _WRITE_RIGHTS | sum(right for since, right in _LATER_RIGHTS.items() if version >= since)
        handled = ctypes.c_uint64(rights)
        rules = kernel.syscall(_LANDLOCK_CREATE, ctypes.byref(handled), ctypes.c_size_t(8), 0)
        opened = os.open(folder, os.O_PATH | os.O_DIRECTORY)
        beneath = struct.pack("=Qi", rights, opened)
        done = (
            rules >= 0
            and kernel.syscall(_LANDLOCK_ADD, rules, _BENEATH, beneath, 0) == 0
            and kernel.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            and kernel.syscall(_LANDLOCK_RESTRICT, rules, 0) == 0
        )
        os.close(opened)
        return bool(done)
    return False


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
    return ""


def _main() -> None:
    secret, _, program = sys.stdin.buffer.read().decode().partition("\n")
    report = _silence()
    _limit(json.loads(sys.argv[1]))
    _write_only_beneath(_FOLDER)
    sys.addaudithook(_refuse)
    os.write(report, (_run(program) or secret).encode())
    os._exit(0)  # no exit handlers, no waiting for threads of the program


_FOLDER = os.path.realpath(os.getcwd())

if __name__ == "__main__":
    _main()
