"""Runs a program that a model wrote, where it can harm neither the machine nor its own verdict.

Bubblewrap provides the isolation where it works; elsewhere the kernel's namespaces do, entered by
``bench.scoring.sandbox_child``. Either way the program has a root folder with Python alone, read-only, and an empty
working folder in memory. It sees no network, no other processes and no environment, has an ordinary user's rights and
no capabilities, writes what Landlock allows (Linux 5.13 and later), and calls what ``bench.scoring.seccomp`` allows. It
can start neither process nor thread, so its own limits are those of the whole. Where neither isolation works, the
program is not run.

The check is executed by another process, which calls the program's functions and gets plain values from them.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from bench.errors import RunFailed, UserError
from bench.scoring import seccomp

_CHILD, _CHILD_INSIDE = Path(__file__).with_name("sandbox_child.py"), "/sandbox_child.py"
_FOLDER = "/sandbox"
_START_S = 5.0  # of wall time for starting the interpreter on a busy machine
_MIB = 2**20
_SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/nix/store", "/gnu/store", "/etc/ld.so.cache", "/etc/localtime")
_CAPABILITIES = ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP")  # to give up the others, and being root
_NOBODY = "65534"
_PROBE = """
import os, socket
assert os.getuid() and not os.path.exists("/proc/self")
try:
    socket.socket()
except PermissionError:
    pass
else:
    raise SystemExit
"""
Name = Literal["bubblewrap", "namespaces"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a program may use.

    Attributes:
        cpu_s: seconds of processor time.
        memory_bytes: of address space; as much again for the process that judges it.
        file_bytes: of any file it writes.
        open_files: file descriptors.
        disk_bytes: of all its files together, which are in memory.
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


class _Broken(Exception):
    """The isolation could not be set up; nothing of the program was executed."""


def run(program: str, limits: Limits | None = None, check: str = "") -> str | None:
    """Execute a Python program, then a check of it.

    Args:
        program: what is not trusted.
        limits: what it may use.
        check: a trusted program in which ``remote(NAME)`` is that function of ``program``, in the other process. Its
            arguments are copied there. Its results are copied back: Python's built-in numbers, texts and containers,
            values of classes derived from these, iterators and NumPy's arrays. Any other result ends the program.

    Returns:
        None if both ran to their last line; else why not, e.g. ``AssertionError``, ``time limit``. Without a check it
        is the program's own word.

    Raises:
        UserError: this machine offers no isolation.
        RunFailed: the isolation broke, and the program was not executed.
    """
    try:
        return _execute(isolation().name, program, check, limits or Limits())
    except _Broken as error:
        raise RunFailed(f"The sandbox failed: {error}. No verdict is kept; run the same command again.") from None


@dataclass(frozen=True, slots=True)
class Isolation:
    """What keeps programs from this machine.

    Attributes:
        name: who provides it.
        text: the same, and why it is not bubblewrap.
    """

    name: Name
    text: str


@cache
def isolation() -> Isolation:
    """The isolation of this machine: bubblewrap, else namespaces. The first call tries them.

    Raises:
        UserError: neither works.
    """
    reasons: dict[str, str] = {}
    names: tuple[Name, ...] = ("bubblewrap", "namespaces")
    for name in names:
        try:
            ended = _execute(name, _PROBE, "", Limits())
        except _Broken as error:
            reasons[name] = str(error)
        else:
            if ended is None:
                return Isolation(name, "".join([name, *(f" ({other}: {why})" for other, why in reasons.items())]))
            reasons[name] = f"a harmless program failed: {ended}"
    found = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    raise UserError(
        f"dataset.allow_code_execution=true needs an isolation that works, got {found}. "
        "On Linux, install bubblewrap or allow user namespaces (sysctl user.max_user_namespaces, on Ubuntu "
        "kernel.apparmor_restrict_unprivileged_userns=0); a container needs the right to make namespaces and mounts, "
        "as docker run --privileged gives it. Elsewhere use such a container. Or set "
        "dataset.allow_code_execution=false, without which pass@1 is not measured."
    )


def _execute(name: Name, program: str, check: str, limits: Limits) -> str | None:
    command = _command(name, limits)
    request = {
        "enter": name == "namespaces",
        "program": program,
        "limits": asdict(limits),
        "wall_s": int(limits.wall_s) + 1,
        "folder": _FOLDER,
        "readable": _readable(),
        "filter": _filter().hex(),
    }
    head = json.dumps(request).encode()
    with tempfile.TemporaryFile() as given:
        given.write(b"%10d%s%s" % (len(head), head, check.encode(errors="replace")))
        given.seek(0)
        try:
            process = subprocess.Popen(
                command,
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd="/",
                env={"PATH": os.defpath, "HOME": _FOLDER, "TMPDIR": _FOLDER, "OPENBLAS_NUM_THREADS": "1"},
                start_new_session=True,
            )
        except OSError as error:
            raise _Broken(str(error)) from None
    with process:
        try:
            report, said = process.communicate(timeout=limits.wall_s)
        except subprocess.TimeoutExpired:
            _end(process)
            report, said = process.communicate()
        finally:
            _end(process)
    return _verdict(report.decode().splitlines(), said.decode(errors="replace"))


def _end(process: subprocess.Popen[bytes]) -> None:
    """With what it started: those processes are of its group, or end when it does."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def _verdict(report: list[str], said: str) -> str | None:
    """What the judge reports: that the program is about to start, and how it ended unless it was ended."""
    first = json.loads(report[0]) if report else {}
    if "started" not in first:
        raise _Broken(first.get("broken") or said.strip() or "it did not start in time")
    ends: str | None = json.loads(report[1])["ends"] if len(report) > 1 else "time limit"
    return ends


def _command(name: Name, limits: Limits) -> list[str]:
    """What starts the child; only this project's code runs before the isolation is complete."""
    if sys.platform != "linux":
        raise _Broken("only Linux has it")
    if name == "namespaces":
        return [sys.executable, "-I", str(_CHILD)]
    if not (program := shutil.which("bwrap")):
        raise _Broken("bwrap is not installed")
    words = [program, "--die-with-parent", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    words += ["--unshare-cgroup-try", "--cap-drop", "ALL"]
    if os.geteuid() == 0:  # it cannot become another user; the child does
        words += [word for capability in _CAPABILITIES for word in ("--cap-add", capability)]
    else:
        words += ["--unshare-user", "--uid", _NOBODY, "--gid", _NOBODY]
    places = [*_readable(), (str(_CHILD), _CHILD_INSIDE)]
    above = {str(folder) for _, target in [*places, ("", os.devnull)] for folder in Path(target).parents}
    for folder in sorted(above - {"/"}):  # which it would make for its own user alone
        words += ["--perms", "0755", "--dir", folder]
    for source, target in places:
        words += ["--ro-bind", source, target]
    words += ["--dev-bind", os.devnull, os.devnull, "--perms", "0777", "--size", str(limits.disk_bytes)]
    words += ["--tmpfs", _FOLDER, "--remount-ro", "/", "--chdir", _FOLDER]
    return [*words, sys.executable, "-I", _CHILD_INSIDE]


def _readable() -> list[tuple[str, str]]:
    """What Python needs: where it is, and where the program finds it. Folders within others are left out."""
    paths = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    paths += [str(sysconfig.get_config_var("LIBDIR")), sys.executable, str(Path(sys.prefix, "pyvenv.cfg"))]
    found: list[str] = []
    for path in sorted({*_SYSTEM, *map(os.path.abspath, paths)}):
        if os.path.exists(path) and not any(path.startswith(above + os.sep) for above in found):
            found.append(path)
    return [(os.path.realpath(path), path) for path in found]


def _filter() -> bytes:
    try:
        return seccomp.build(platform.machine())
    except ValueError as error:
        raise _Broken(str(error)) from None
