"""Runs a program that a model wrote: its own process, limits on everything, no network, an empty folder.

It keeps a faulty program from harming the machine by accident: on Linux the kernel refuses writes outside the folder
(Landlock) and the network (namespaces), elsewhere Python's audit events do what they can. It is no prison for a hostile
program, which shares a process with its judge and could find the secret that stands for a pass; that needs a
container or a virtual machine around the whole benchmark, and so nothing is executed unless the user allowed it.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

_CHILD = Path(__file__).with_name("sandbox_child.py")
_START_S = 5.0  # of wall time for starting the interpreter on a busy machine
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Limits:
    """What a program may use.

    Attributes:
        cpu_s: seconds of processor time.
        memory_bytes: of address space.
        file_bytes: of any file it writes.
        open_files: file descriptors.
    """

    cpu_s: int = 5
    memory_bytes: int = 1024 * _MIB
    file_bytes: int = 1 * _MIB
    open_files: int = 32

    @property
    def wall_s(self) -> float:
        """Twice the processor time, since the machine may be busy, and what starting takes."""
        return 2 * self.cpu_s + _START_S


def run(program: str, limits: Limits | None = None) -> str | None:
    """Run a Python program to its end.

    Returns:
        None if it ran to its last line; else why it did not, e.g. ``AssertionError``, ``time limit``.
    """
    limits, secret = limits or Limits(), secrets.token_hex()
    with tempfile.TemporaryDirectory(prefix="decodebench-", ignore_cleanup_errors=True) as folder:
        command = [*_isolation(), sys.executable, "-I", str(_CHILD), json.dumps(asdict(limits))]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PATH": os.defpath, "TMPDIR": folder, "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            report, _ = process.communicate(f"{secret}\n{program}".encode(errors="replace"), timeout=limits.wall_s)
        except subprocess.TimeoutExpired:
            return "time limit"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # with what it started: its session is one process group
                process.communicate()
    if not report:  # it was killed, or left without running to its end
        return f"ended early with code {process.returncode}"
    return None if report == secret.encode() else report.decode(errors="replace")[:80]


@cache
def _isolation() -> tuple[str, ...]:
    """A command prefix for namespaces without network and with own process ids, as far as this machine allows."""
    for user in ((), ("--user", "--map-root-user")):
        for spaces in (("--net", "--pid", "--fork", "--kill-child"), ("--net",)):
            prefix = ("unshare", *user, *spaces)
            if shutil.which("unshare") and _works(prefix):
                return prefix
    return ()


def _works(prefix: tuple[str, ...]) -> bool:
    try:
        return subprocess.run([*prefix, "true"], capture_output=True, timeout=10).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
