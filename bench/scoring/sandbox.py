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
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

_CHILD = Path(__file__).with_name("sandbox_child.py")
_START_S = 5.0  # of wall time for starting the interpreter on a busy machine
_MIB = 2**20
_LONGEST_REPORT = 4096  # bytes; the secret or a name
_LOOK_S = 0.05  # between looks at what a program has written
_BLOCK = 512  # bytes, of st_blocks
_DEEPEST = 16  # folders within folders


@dataclass(frozen=True, slots=True)
class Limits:
    """What a program may use.

    Attributes:
        cpu_s: seconds of processor time.
        memory_bytes: of address space.
        file_bytes: of any file it writes.
        open_files: file descriptors.
        disk_bytes: of all its files together, as seen every ``_LOOK_S``.
        files: number of files and folders at a time.
    """

    cpu_s: int = 5
    memory_bytes: int = 1024 * _MIB
    file_bytes: int = 1 * _MIB
    open_files: int = 32
    disk_bytes: int = 16 * _MIB
    files: int = 1000

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
    folder = Path(tempfile.mkdtemp(prefix="decodebench-"))
    try:
        with tempfile.TemporaryFile() as given:
            given.write(f"{secret}\n{program}".encode(errors="replace"))
            given.seek(0)
            process = subprocess.Popen(
                [*_isolation(), sys.executable, "-I", str(_CHILD), json.dumps(asdict(limits))],
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env={"PATH": os.defpath, "TMPDIR": str(folder), "OPENBLAS_NUM_THREADS": "1"},
                start_new_session=True,
            )
        try:
            report, ended = _watch(process, folder, limits)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # with what it started: its session is one process group
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
    finally:
        _remove(folder)
    if ended:
        return ended
    if not report:  # it was killed, or left without running to its end
        return f"ended early with code {process.returncode}"
    return None if report == secret.encode() else report.decode(errors="replace")[:80]


def _watch(process: subprocess.Popen[bytes], folder: Path, limits: Limits) -> tuple[bytes, str]:
    """What a program reports, and the limit that it exceeded; empty if none."""
    assert process.stdout is not None
    report, pipe, end = b"", process.stdout.fileno(), time.monotonic() + limits.wall_s
    while (left := end - time.monotonic()) > 0:
        if select.select([pipe], [], [], min(left, _LOOK_S))[0]:
            block = os.read(pipe, _LONGEST_REPORT + 1)
            report += block
            if len(report) > _LONGEST_REPORT:
                return b"", "output limit"
            if not block:
                return (report, "") if _ends(process, end) else (b"", "time limit")
        if not _fits(folder, limits):
            return b"", "disk limit"
    return b"", "time limit"


def _ends(process: subprocess.Popen[bytes], end: float) -> bool:
    """Whether a process that has closed its report ends in time."""
    try:
        process.wait(max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        return False
    return True


def _fits(folder: Path, limits: Limits) -> bool:
    """Whether what a program has written so far is within its limits: bytes, number of files, depth."""
    used, count, folders = 0, 0, [(str(folder), 0)]
    while folders:
        place, depth = folders.pop()
        with suppress(OSError), os.scandir(place) as entries:  # it may be removed meanwhile
            for entry in entries:
                count += 1
                with suppress(OSError):
                    used += entry.stat(follow_symlinks=False).st_blocks * _BLOCK
                if used > limits.disk_bytes or count > limits.files or depth >= _DEEPEST:
                    return False
                if entry.is_dir(follow_symlinks=False):
                    folders.append((entry.path, depth + 1))
    return True


def _remove(folder: Path) -> None:
    """Remove a folder of any depth, which Python's own function does by recursion."""
    subprocess.run(["rm", "-rf", "--", str(folder)], stderr=subprocess.DEVNULL)


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
