"""What runs inside the sandbox: a process that executes a program, and one that judges it.

Started by ``bench.scoring.sandbox`` as a script; imports nothing of this project and reads what it needs from standard
input. It enters namespaces, unless bubblewrap has done so, gives up its rights and forks. The worker executes the
program; the judge executes the check and reports. They share two pipes, for calls and for results, so the program can
neither see the check, nor change it, nor write the verdict.
"""

from __future__ import annotations

import builtins
import ctypes
import io
import json
import os
import pickle
import resource
import select
import signal
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NoReturn

_NOBODY = 65534
_NEW_NAMESPACES, _NEW_USER = 0x6E020000, 0x10000000  # of mounts, control groups, names, IPC, processes and network
_NOSUID, _NODEV, _NOEXEC, _BIND, _RECURSIVE, _PRIVATE, _DETACH = 2, 4, 8, 4096, 16384, 1 << 18, 2
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_MOUNT_SETATTR, _ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV, _AT_RECURSIVE = 442, 1, 2, 4, 0x8000
_CAPABILITY_VERSION_3, _CAPABILITIES = 0x20080522, 64
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 24, 38
_FILTER = 2
_DESCRIPTORS = 64  # more than are open
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_LANDLOCK_VERSION, _BENEATH = 1, 1
_WRITE_RIGHTS = sum(1 << bit for bit in (1, *range(4, 13)))  # write, remove and make files of every kind
_LATER_RIGHTS = {2: 1 << 13, 3: 1 << 14}  # by version of the interface: move between folders, truncate
_WRITE_FILE, _TRUNCATE = 1 << 1, 1 << 14
_LONGEST_MESSAGE = 16 * 2**20  # bytes
_LONGEST_NAME = 80
_LOOK_S = 0.05  # between looks at the number of files
_PLAIN: tuple[Any, ...] = (int, float, complex, str, bytes, bytearray, tuple, list, dict, set, frozenset, bool, range)
_NAMED = {kind.__name__: kind for kind in _PLAIN} | {"iter": iter}  # none can be altered, as a class in Python could

_kernel = ctypes.CDLL(None, use_errno=True)
_mount = _kernel.mount
_mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p)


class _Ended(BaseException):
    """Why the program did not run to its end. Not an Exception, so that no ``except Exception`` of a check holds it."""


def _call(function: Callable[..., int], *arguments: Any) -> int:
    """A function of the C library, or the error that it sets."""
    done = function(*arguments)
    if done < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{function.__name__}{arguments}: {os.strerror(number)}")
    return done


def _prctl(*arguments: int) -> None:
    _call(_kernel.prctl, *(ctypes.c_ulong(each) for each in (*arguments, 0, 0, 0, 0)[:5]))


def _die_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


# ---------------------------------------------------------------------------------------------------------- namespaces


def _enter_namespaces(request: dict[str, Any]) -> None:
    """Continue as the first process of new namespaces: no other process, no network, and a root folder of its own."""
    user, group, root = os.getuid(), os.getgid(), os.getuid() == 0
    _call(_kernel.unshare, _NEW_NAMESPACES | (0 if root else _NEW_USER))
    if not root:
        mappings = {"setgroups": "deny", "uid_map": f"{_NOBODY} {user} 1", "gid_map": f"{_NOBODY} {group} 1"}
        for name, text in mappings.items():
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    _change_root(request["readable"], request["folder"], request["limits"])
    if first := os.fork():
        _die_with_parent()
        os.closerange(3, _DESCRIPTORS)
        _, status = os.waitpid(first, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _change_root(readable: list[tuple[str, str]], folder: str, limits: dict[str, int]) -> None:
    """A root folder in memory with the readable places in it; nothing but ``folder`` can be written."""
    new, old = "/proc", "/old"  # a folder that every Linux has and that is not needed any more
    _call(_mount, None, b"/", None, _RECURSIVE | _PRIVATE, None)
    _call(_mount, b"tmpfs", os.fsencode(new), b"tmpfs", _NOSUID | _NODEV, b"size=1m,mode=0755")
    os.mkdir(new + old)
    _call(_kernel.syscall, _PIVOT_ROOT[os.uname().machine], os.fsencode(new), os.fsencode(new + old))
    os.chdir("/")
    for source, target in readable:
        _bind(old + source, target)
        _forbid(target, _ATTR_RDONLY | _ATTR_NOSUID | _ATTR_NODEV, _AT_RECURSIVE)
    _bind(old + os.devnull, os.devnull)
    os.mkdir(folder)
    _forbid("/", _ATTR_RDONLY, 0)
    _call(_kernel.umount2, os.fsencode(old), _DETACH)
    options = f"size={limits['disk_bytes']},nr_inodes={limits['files'] + 1},mode=0700,uid={_NOBODY},gid={_NOBODY}"
    _call(_mount, b"tmpfs", os.fsencode(folder), b"tmpfs", _NOSUID | _NODEV | _NOEXEC, options.encode())
    os.chdir(folder)


def _bind(source: str, target: str) -> None:
    os.makedirs(target if os.path.isdir(source) else os.path.dirname(target), exist_ok=True)
    if not os.path.isdir(source):
        os.close(os.open(target, os.O_CREAT))
    _call(_mount, os.fsencode(source), os.fsencode(target), None, _BIND | _RECURSIVE, None)


def _forbid(place: str, attributes: int, how: int) -> None:
    data = struct.pack("=4Q", attributes, 0, 0, 0)
    _call(_kernel.syscall, _MOUNT_SETATTR, -1, os.fsencode(place), how, data, ctypes.c_size_t(len(data)))


def _give_up_rights() -> None:
    """Become an ordinary user without any capability, now and in whatever is executed."""
    for capability in range(_CAPABILITIES):
        with suppress(OSError):  # one that this kernel does not have
            _prctl(_PR_CAPBSET_DROP, capability)
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    header, none = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0), bytes(24)
    _call(_kernel.capset, header, none)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_DUMPABLE, 0)  # no core dump, also where the kernel pipes it to a program
    _die_with_parent()  # which a change of the user would undo
    if 0 in (*os.getresuid(), *os.getresgid()):
        raise PermissionError("a program must not run as root")


# ----------------------------------------------------------------------------------------------------- confinement


def _limit(limits: dict[str, int]) -> None:
    wanted = {
        resource.RLIMIT_CPU: limits["cpu_s"],
        resource.RLIMIT_AS: limits["memory_bytes"],
        resource.RLIMIT_FSIZE: limits["file_bytes"],
        resource.RLIMIT_NOFILE: limits["open_files"],
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_CORE: 0,
    }
    for name, value in wanted.items():
        hard = resource.getrlimit(name)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(name, (value, value))


def _write_only_beneath(folder: str) -> None:
    """Let the kernel refuse this process every write outside a folder (Landlock), where it can."""
    version = _kernel.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), _LANDLOCK_VERSION)
    if version < 1:
        return
    rights = _WRITE_RIGHTS | sum(right for since, right in _LATER_RIGHTS.items() if version >= since)
    handled = struct.pack("=Q", rights)
    rules = _call(_kernel.syscall, _LANDLOCK_CREATE, handled, ctypes.c_size_t(len(handled)), 0)
    for place, granted in ((folder, rights), (os.devnull, rights & (_WRITE_FILE | _TRUNCATE))):
        opened = os.open(place, os.O_PATH)
        _call(_kernel.syscall, _LANDLOCK_ADD, rules, _BENEATH, struct.pack("=Qi", granted, opened), 0)
        os.close(opened)
    _call(_kernel.syscall, _LANDLOCK_RESTRICT, rules, 0)
    os.close(rules)


def _filter_system_calls(code: bytes) -> None:
    instructions = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("@HP", len(code) // 8, ctypes.addressof(instructions))
    _call(_kernel.prctl, _PR_SET_SECCOMP, ctypes.c_ulong(_FILTER), program, 0, 0)


def _confine(request: dict[str, Any]) -> None:
    _limit(request["limits"])
    _write_only_beneath(request["folder"])
    _filter_system_calls(bytes.fromhex(request["filter"]))


# ----------------------------------------------------------------------------------------------------------- messages


def _send(pipe: int, data: bytes) -> None:
    rest = memoryview(struct.pack("=I", len(data)) + data)
    while rest:
        rest = rest[os.write(pipe, rest) :]


def _receive(pipe: int, look: Callable[[], None] = lambda: None) -> bytes:
    """A message; ``look`` is called before it and while it is awaited.

    Raises:
        _Ended: the other side has closed the pipe, or sends too much.
    """

    def read(count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            look()
            if select.select([pipe], [], [], _LOOK_S)[0]:
                if not (block := os.read(pipe, count - len(data))):
                    raise _Ended
                data += block
        return bytes(data)

    (length,) = struct.unpack("=I", read(4))
    if length > _LONGEST_MESSAGE:
        raise _Ended("output limit")
    return read(length)


class _Encoder(pickle.Pickler):
    """Sends a value of a derived class as a plain one, e.g. a Counter as a dict, and an iterator with its items."""

    def reducer_override(self, value: Any) -> Any:
        for kind in _PLAIN:
            if isinstance(value, kind) and type(value) is not kind:
                return kind, (kind(value),)
        if isinstance(value, Iterator):
            return iter, (list(value),)
        if type(value).__module__ == "numpy":
            return type(plain := value.tolist()), (plain,)
        return NotImplemented


class _Decoder(pickle.Unpickler):
    """Reads plain values; there is nothing else that a message could name."""

    def find_class(self, module: str, name: str) -> Any:
        if module != "builtins":
            raise pickle.UnpicklingError(module)
        return _NAMED[name]


def _encode(message: Any) -> bytes:
    data = io.BytesIO()
    _Encoder(data, protocol=4).dump(message)
    return data.getvalue()


# ------------------------------------------------------------------------------------------------- worker and judge


def _work(program: str, calls: int, answers: int) -> NoReturn:
    """Execute the program, then what of it the judge calls."""
    space: dict[str, Any] = {"__name__": "program"}
    try:
        exec(compile(program, "program.py", "exec"), space)
    except BaseException as error:
        _send(answers, _encode(("raised", type(error).__name__)))
        os._exit(0)
    _send(answers, _encode(("value", None)))
    while True:
        name, arguments, named = pickle.loads(_receive(calls))
        try:
            answer = _encode(("value", space[name](*arguments, **named)))
        except BaseException as error:
            answer = _encode(("raised", type(error).__name__))
        _send(answers, answer)


class _Worker:
    """The process of the program, as the judge sees it.

    Args:
        request: what the parent sent.
    """

    def __init__(self, request: dict[str, Any]) -> None:
        self.limits, self.folder = request["limits"], request["folder"]
        (calls, self._calls), (self._answers, answers) = os.pipe(), os.pipe()
        self._process = os.fork()
        if not self._process:
            try:
                _die_with_parent()
                for descriptor in set(range(3, _DESCRIPTORS)) - {calls, answers}:
                    with suppress(OSError):
                        os.close(descriptor)
                _confine(request)
                _send(answers, b"confined")
                _work(request["program"], calls, answers)
            finally:
                os._exit(1)
        os.close(calls)
        os.close(answers)
        _confine(request)
        _receive(self._answers)  # it is confined

    def answer(self) -> Any:
        """What the program says next.

        Raises:
            _Ended: it is at its end, or exceeds a limit.
            Exception: the one that it raised, as far as it is one of Python's own.
        """
        try:
            data = _receive(self._answers, self._look)
        except _Ended as ended:
            raise _Ended(str(ended) or self._reason()) from None
        try:
            kind, value = _Decoder(io.BytesIO(data)).load()
        except Exception:
            raise _Ended("result of another kind") from None
        if kind == "value":
            return value
        name = str(value)[:_LONGEST_NAME]
        error = vars(builtins).get(name)
        if isinstance(error, type) and issubclass(error, Exception):
            raise error.__new__(error)
        raise _Ended(name)

    def remote(self, name: str) -> Callable[..., Any]:
        """A function of the program."""

        def call(*arguments: Any, **named: Any) -> Any:
            with suppress(BrokenPipeError):  # ``answer`` finds out why
                _send(self._calls, pickle.dumps((name, arguments, named)))
            return self.answer()

        return call

    def _look(self) -> None:
        state = os.statvfs(self.folder)
        if state.f_files - state.f_ffree > self.limits["files"] + 1:
            raise _Ended("disk limit")

    def _reason(self) -> str:
        _, status, used = os.wait4(self._process, 0)
        code = os.waitstatus_to_exitcode(status)
        if code == -signal.SIGKILL and used.ru_utime + used.ru_stime > self.limits["cpu_s"] - 0.5:
            return "time limit"
        return f"ended early with code {code}"


def _judge(check: bytes, worker: _Worker) -> str | None:
    """Why the program does not pass its check; None: it passes."""
    try:
        worker.answer()
        exec(compile(check, "check.py", "exec"), {"__name__": "check", "remote": worker.remote})
    except _Ended as ended:
        return str(ended)
    except BaseException as error:
        return type(error).__name__
    return None


def _main() -> None:
    request = json.loads(os.read(0, int(os.read(0, 10))))
    report, nowhere = os.dup(1), os.open(os.devnull, os.O_RDWR)
    signal.signal(signal.SIGALRM, lambda *_: os._exit(1))  # should the parent be gone
    os.umask(0o022)
    try:
        if request["enter"]:
            _die_with_parent()
            _enter_namespaces(request)
        _give_up_rights()
        signal.alarm(request["wall_s"])
        given = os.dup(0)
        for stream in (0, 1, 2):
            os.dup2(nowhere, stream)
        worker = _Worker(request)
        check = os.read(given, _LONGEST_MESSAGE)
    except BaseException as error:
        os.write(report, json.dumps({"broken": f"{type(error).__name__}: {error}"}).encode())
        os._exit(1)
    os.write(report, b'{"started": true}\n')
    os.write(report, json.dumps({"ends": _judge(check, worker)}).encode())
    os._exit(0)  # no exit handlers


if __name__ == "__main__":
    _main()
