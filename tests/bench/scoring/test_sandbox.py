"""Hostile programs in every isolation that this machine has, as the user who runs the tests and as an ordinary one."""

from __future__ import annotations

import os
import platform
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from bench import cli
from bench.errors import RunFailed, UserError
from bench.scoring import sandbox, sandbox_child, seccomp
from tests.bench.scoring.hostile_programs import ATTACKS, FORGERIES

ROOT = Path(__file__).resolve().parents[3]
QUICK = sandbox.Limits(cpu_s=1)
ASM_GENERIC = ("NEW_STAT", "RENAMEAT", "SET_GET_RLIMIT")  # what arm64 defines
HEADERS = {
    "x86_64": ("x86_64-linux-gnu/asm/unistd_64.h", ""),
    "aarch64": ("asm-generic/unistd.h", "".join(f"#define __ARCH_WANT_{name}\n" for name in ASM_GENERIC)),
}
IMPORTS = (
    "import ctypes, mmap, os, resource, signal, socket, subprocess, sys, threading, time\nlibc = ctypes.CDLL(None)\n"
)
ACHIEVES_NOTHING = """
try:
    got = remote("attack")()
except Exception:
    got = None
assert not got
"""
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has an isolation")


@cache
def possible(name: str) -> bool:
    """Whether this machine offers an isolation, by the judgement of another program."""
    unshare = ["unshare", "--mount", "--net", "--pid", "--fork", *(["--user"] if os.getuid() else []), "true"]
    words = {"bubblewrap": ["bwrap", "--unshare-net", "--ro-bind", "/", "/", "true"], "namespaces": unshare}[name]
    return bool(shutil.which(words[0])) and subprocess.run(words, capture_output=True).returncode == 0


@pytest.fixture(params=["bubblewrap", "namespaces"])
def isolated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each isolation in turn."""
    if not possible(request.param):
        pytest.skip(f"this machine offers no {request.param}")
    monkeypatch.setattr(sandbox, "isolation", lambda: sandbox.Isolation(request.param, request.param))
    return str(request.param)


@pytest.fixture
def start() -> Iterator[Callable[[], int]]:
    """Starts a process with a secret in its environment and returns its number."""
    started = []

    def start() -> int:
        started.append(subprocess.Popen(["sleep", "600"], env={"WANDB_API_KEY": "secret"}))
        return started[-1].pid

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[dict[str, object]]:
    """A folder with a file and a socket, an abstract socket and a port, which programs must not reach."""
    place = tmp_path / "outside"
    place.mkdir()
    (place / "kept").write_text("mine")
    os.utime(place / "kept", (10**9, 10**9))
    (place / "kept").chmod(0o640)
    os.chdir(place)  # the path of a socket must be short
    abstract = f"\0decodebench-{os.getpid()}"
    sockets = [socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX), socket.socket()]
    for each, address in zip(sockets, ("socket", abstract, ("127.0.0.1", 0)), strict=True):
        each.bind(address)
        each.listen()
        each.setblocking(False)
    os.chdir(ROOT)
    yield {
        "outside": str(place), "kept": str(place / "kept"), "abstract": abstract, "sockets": sockets,
        "port": sockets[2].getsockname()[1],
    }  # fmt: skip
    for each in sockets:
        each.close()


def program(body: str, aims: dict[str, object], victim: int) -> str:
    """An attack with the places that it aims at."""
    places = "".join(f"{name} = {aims[name]!r}\n" for name in ("outside", "kept", "abstract", "port"))
    indented = "".join(f"    {line}\n" for line in body.splitlines())
    return f"{IMPORTS}{places}victim = {victim}\ndef attack():\n{indented}"


def status(file: Path) -> tuple[int, ...]:
    found = file.stat()
    return found.st_mode, found.st_uid, found.st_gid, found.st_nlink, found.st_size, found.st_mtime_ns


@pytest.fixture
def children() -> Callable[[], list[psutil.Process]]:
    """The processes that were started since, but for those of ``start``."""
    me = psutil.Process()
    before = set(me.children(recursive=True))
    return lambda: [each for each in me.children(recursive=True) if each not in before and name_of(each) != "sleep"]


def name_of(process: psutil.Process) -> str:
    """Of one that has ended meanwhile: nothing."""
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


# ---------------------------------------------------------------------------------------------------------- the attacks


@linux
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_achieves_nothing(
    name: str,
    isolated: str,
    start: Callable[[], int],
    outside: dict[str, object],
    children: Callable[[], list[psutil.Process]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setattr(sandbox, "_START_S", 8.0 if "sleep" in name else 60.0)
    victim, place = start(), Path(str(outside["outside"]))
    kept, before = place / "kept", status(place / "kept")
    grown, shown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, sorted(os.listdir(place))
    ended = sandbox.run(program(ATTACKS[name].body, outside, victim), QUICK, ACHIEVES_NOTHING)
    assert ended in ATTACKS[name].ends
    assert psutil.Process(victim).status() == psutil.STATUS_SLEEPING
    assert status(kept) == before
    assert kept.read_text() == "mine" and sorted(os.listdir(place)) == shown
    for each in outside["sockets"]:  # type: ignore[attr-defined]
        with pytest.raises(BlockingIOError):
            each.accept()
    assert not children()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - grown < 50 * 1024  # KiB


@linux
@pytest.mark.parametrize("name", [name for name, attack in ATTACKS.items() if attack.control != "never"])
def test_the_same_attack_succeeds_without_a_sandbox(
    name: str, start: Callable[[], int], outside: dict[str, object], tmp_path: Path
) -> None:
    if ATTACKS[name].control == "root" and os.getuid() != 0:
        pytest.skip("only root succeeds with it")
    (tmp_path / "work").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", program(ATTACKS[name].body, outside, start()) + "os._exit(42 if attack() else 1)"],
        cwd=tmp_path / "work",
        env={"WANDB_API_KEY": "secret", "PATH": os.defpath},
        stderr=subprocess.PIPE,
        text=True,
    )
    subprocess.run(["rm", "-rf", str(tmp_path / "work")], check=True)  # as deep as it may be
    assert done.returncode == 42, done.stderr


WANTS_42 = "import operator\nassert int(abs(remote('answer')())) == 42"


@linux
@pytest.mark.parametrize("name", FORGERIES)
def test_a_pass_is_not_forged(name: str, isolated: str) -> None:
    assert sandbox.run(FORGERIES[name], QUICK, WANTS_42) is not None
    assert sandbox.run(FORGERIES[name], QUICK, "assert 42 == remote('answer')()") is not None


@linux
def test_an_answer_that_is_right_passes(isolated: str) -> None:
    assert sandbox.run("def answer(): return 42", QUICK, WANTS_42) is None


@linux
def test_the_check_is_not_to_be_found_by_the_program(isolated: str) -> None:
    """Neither in its frames nor among its objects, where the search finds what is there."""
    search = (
        "import gc, sys\n"
        "planted = '-'.join(['PLANTED', '1'])\n"
        "def found(backwards):\n"
        "    frame, objects = sys._getframe(), gc.get_objects()\n"
        "    while frame: objects, frame = objects + [dict(frame.f_locals), dict(frame.f_globals)], frame.f_back\n"
        "    texts = (each for o in objects for each in [o, *gc.get_referents(o)] if isinstance(each, (str, bytes)))\n"
        "    return any(backwards in str(text)[::-1] for text in texts)\n"
        "def look(): return found('1-DETNALP'), found('1-NEDDIH')"
    )
    assert sandbox.run(search, check="x = 'HIDDEN-1'\nassert remote('look')() == (True, False)") is None


# ---------------------------------------------------------------------------------------------------- ordinary programs


@linux
@pytest.mark.parametrize(
    ("source", "ends"),
    [
        ("x = 1", None),
        ("import os; assert os.listdir() == []; open('a', 'w').write('x'); os.remove('a')", None),
        ("open('/dev/null', 'w').write('x'); print('done' * 10**7)", None),
        ("import tempfile, shutil; f = tempfile.NamedTemporaryFile(); shutil.copy2(f.name, 'copy')", None),
        ("import os; assert os.getuid() == os.geteuid() == os.getgid() == 65534", None),
        ("class A:\n    def __del__(self): raise ValueError\nA()", None),
        ("assert False", "AssertionError"),
        ("raise SystemExit(0)", "SystemExit"),
        ("def f(): f()\nf()", "RecursionError"),
        ("syntax error", "SyntaxError"),
        ("input()", "EOFError"),
        ("x = bytearray(3 * 2**29)", "MemoryError"),
        ("x = '\ud800'", "UnicodeEncodeError"),
        ("class Own(Exception): pass\nraise Own", "Own"),
    ],
)
def test_a_program_ends_as_it_should(source: str, ends: str | None, isolated: str) -> None:
    assert sandbox.run(source, QUICK) == ends


@linux
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("[1, 2.5, 'x', None, True, (1j,), {1: {2}}, b'y', float('inf'), range(3)]",) * 2,
        ("collections.Counter('aab')", "{'a': 2, 'b': 1}"),
        ("collections.namedtuple('P', 'x y')(1, 2)", "(1, 2)"),
        ("(n for n in 'ab')", None),
        ("{'a': map(str.upper, 'ab')}['a']", None),
        ("numpy.arange(4).sum()", "6"),
        ("[numpy.float64(0.5), numpy.arange(2)]", "[0.5, [0, 1]]"),
    ],
)
def test_results_are_copied(value: str, expected: str | None, isolated: str) -> None:
    made = f"import collections, numpy\ndef give(*a, **k): return a, k, {value}"
    check = "a, k, value = remote('give')([1], n={2: 3})\nassert (a, k) == (([1],), {'n': {2: 3}})\n"
    check += f"assert value == {expected}" if expected else "assert len(list(value)) == 2 and iter(value) is value"
    assert sandbox.run(made, QUICK, check) is None


@linux
def test_exceptions_reach_the_check(isolated: str) -> None:
    check = "try:\n    remote('f')()\nexcept {}:\n    pass"
    raising = "def f(): raise {}"
    assert sandbox.run(raising.format("KeyError(1)"), QUICK, check.format("KeyError")) is None
    assert sandbox.run(raising.format("KeyError(1)"), QUICK, check.format("ValueError")) == "KeyError"
    decoding = "def f(): b'\\xff'.decode()"
    assert sandbox.run(decoding, QUICK, check.format("UnicodeDecodeError")) is None


@linux
def test_a_program_that_calculates_is_ended_by_the_clock_of_the_processor(
    isolated: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "_START_S", 1e6)
    assert sandbox.run("while True: pass", QUICK) == "time limit"


# ----------------------------------------------------------------------------------------------- as the machine sees it


def confined(above: psutil.Process) -> list[dict[str, str]]:
    """The status of the processes below one that run under a filter of system calls, besides the caller's own."""
    found = []
    for process in above.children(recursive=True):
        try:
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        except OSError:
            continue
        status = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if status["Seccomp"] == "2" and status["Seccomp_filters"] != own_filters():
            found.append(status)
    return found


def own_filters() -> str:
    status = Path("/proc/self/status").read_text()
    return re.findall(r"^Seccomp_filters:\s*(\d+)", status, re.MULTILINE)[0]


def wait_until(true: Callable[[], object]) -> None:
    end = time.monotonic() + 120
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


@linux
def test_worker_and_judge_have_no_rights(isolated: str, children: Callable[[], list[psutil.Process]]) -> None:
    run = threading.Thread(target=sandbox.run, args=("import time; time.sleep(10**6)", sandbox.Limits(cpu_s=20)))
    run.start()
    me = psutil.Process()
    wait_until(lambda: len(confined(me)) == 2)
    found, user = confined(me), str(os.getuid() or 65534)
    limits = [Path(f"/proc/{each['Pid']}/limits").read_text() for each in found] if os.getuid() == 0 else []
    for process in children():
        with suppress(psutil.NoSuchProcess):
            if process.ppid() == me.pid:
                process.kill()  # which ends all of it
    run.join()
    wait_until(lambda: not children())
    for each in found:
        assert each["Uid"].split() == [user] * 4
        assert {each[f"Cap{kind}"] for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {"0" * 16}
        assert each["NoNewPrivs"] == "1" and len(each["NSpid"].split()) > 1
        assert os.getuid() or each["Groups"] == ""
    assert all(re.search(r"core file size +0 +0 ", text) for text in limits)


@linux
def test_programs_end_with_the_suite(isolated: str) -> None:
    code = "from bench.scoring import sandbox\n"
    code += f"sandbox._execute({isolated!r}, 'import time; time.sleep(10**6)', '', sandbox.Limits(cpu_s=200))"
    suite = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    wait_until(lambda: len(confined(psutil.Process(suite.pid))) == 2)
    begun = psutil.Process(suite.pid).children(recursive=True)
    os.kill(suite.pid, signal.SIGKILL)
    suite.wait()
    wait_until(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in begun))


@linux
@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="the tests run as an ordinary user already")
def test_all_of_this_as_an_ordinary_user(tmp_path: Path) -> None:
    """In a copy of the folder tree where Python and the checkout can be read, should they be in a private place."""
    if not possible("namespaces"):
        pytest.skip("this machine offers no namespaces")
    needed = [sys.base_prefix, sys.prefix, str(ROOT)]
    private = {
        str(next(folder for folder in reversed([path, *path.parents]) if not folder.stat().st_mode & 0o001))
        for path in map(Path, needed)
        if any(not folder.stat().st_mode & 0o001 for folder in [path, *path.parents])
    }
    lines = ["set -e", f"cd {shlex.quote(str(tmp_path))}", "mkdir 0 1 2"]
    lines += [f"mount --bind {shlex.quote(path)} {number}" for number, path in enumerate(needed)]
    lines += [f"mount -t tmpfs -o mode=755 tmpfs {shlex.quote(path)}" for path in sorted(private)]
    for number, path in enumerate(needed):
        if any(path == above or path.startswith(f"{above}/") for above in private):
            lines += [f"mkdir -p {shlex.quote(path)}", f"mount --bind {number} {shlex.quote(path)}"]
    words = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", sys.executable, "-m", "pytest", "-q"]
    words += ["-p", "no:cacheprovider", "--color=no", str(Path(__file__).relative_to(ROOT))]
    lines += [f"cd {shlex.quote(str(ROOT))}", f"exec {shlex.join(words)}"]
    environment = os.environ | {"HOME": "/tmp", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        ["unshare", "--mount", "bash", "-c", "\n".join(lines)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) > len(ATTACKS) + len(FORGERIES)


# ----------------------------------------------------------------------------------------------------- the choice of it


@linux
def test_an_isolation_that_is_possible_is_offered(isolated: str) -> None:
    assert sandbox._execute(isolated, sandbox._PROBE, "", sandbox.Limits()) is None


@pytest.fixture
def undecided() -> Iterator[None]:
    sandbox.isolation.cache_clear()
    yield
    sandbox.isolation.cache_clear()


def bwrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    (tmp_path / "bwrap").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")


@linux
@pytest.mark.skipif(not possible("namespaces"), reason="this machine offers no namespaces")
def test_namespaces_are_taken_where_bubblewrap_does_not_work(
    undecided: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bwrap(tmp_path, monkeypatch, "echo no permission >&2; exit 1")
    chosen = sandbox.isolation()
    assert chosen == sandbox.Isolation("namespaces", "namespaces (bubblewrap: no permission)")


@linux
def test_a_bwrap_that_isolates_nothing_is_not_trusted(
    undecided: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one that starts its command as it is."""
    bwrap(tmp_path, monkeypatch, f"exec {shlex.quote(sys.executable)} -I {shlex.quote(sandbox_child.__file__)}")
    with pytest.raises(sandbox._Broken):
        sandbox._execute("bubblewrap", "raise SystemExit", "", sandbox.Limits())


@pytest.mark.parametrize("system", ["darwin", "linux"])
def test_without_an_isolation_code_is_refused_before_anything_is_measured(
    system: str,
    undecided: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sandbox, "sys", SimpleNamespace(platform=system, executable=sys.executable, prefix=sys.prefix))
    monkeypatch.setattr(sandbox, "platform", SimpleNamespace(machine=lambda: "riscv64"))
    monkeypatch.setenv("PATH", str(tmp_path))
    words = ["dataset=humaneval", "model=random", f"paths.results={tmp_path}/results"]
    assert cli.main([*words, "dataset.allow_code_execution=true"]) == 2
    said = capsys.readouterr().err
    why = "only Linux has it" if system == "darwin" else "must be x86_64 or aarch64, got riscv64"
    assert "dataset.allow_code_execution=true needs an isolation that works" in said and why in said
    assert not (tmp_path / "results").exists()
    with pytest.raises(UserError, match="install bubblewrap"):
        sandbox.run("x = 1")
    assert "sandbox" in [line.split()[1] for line in doctor(capsys) if line.startswith("warn")]


def doctor(capsys: pytest.CaptureFixture[str]) -> list[str]:
    cli.main(["doctor"])
    return capsys.readouterr().out.splitlines()


@linux
@pytest.mark.skipif(subprocess.run(["unshare", "-Ur", "true"]).returncode != 0, reason="no user namespaces")
def test_root_that_cannot_become_another_user_runs_nothing() -> None:
    code = "from bench.scoring import sandbox\nsandbox.run(\"raise SystemExit('executed')\")"
    done = subprocess.run(["unshare", "-Ur", sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "UserError" in done.stderr and "needs an isolation" in done.stderr


@linux
def test_a_sandbox_that_breaks_gives_no_verdict(isolated: str) -> None:
    with pytest.raises(RunFailed, match="No verdict is kept"):
        sandbox.run("x = 1", sandbox.Limits(memory_bytes=1))


# -------------------------------------------------------------------------------------------------- the filter of calls


@pytest.mark.parametrize("machine", HEADERS)
def test_numbers_are_those_of_the_kernel(machine: str) -> None:
    header, wants = HEADERS[machine]
    if not Path("/usr/include", header).exists():
        pytest.skip("the headers of the kernel are not installed")
    text = f"#define __BITS_PER_LONG 64\n{wants}#include <{header}>\n"
    found = subprocess.run(["gcc", "-E", "-dM", "-"], input=text, capture_output=True, text=True, check=True).stdout
    names = dict(re.findall(r"#define (__NR\w*?_\w+) (\w+)", found))
    for name, number in {**seccomp.allowed(machine), "ioctl": seccomp._IOCTL[machine]}.items():
        value = names[f"__NR_{name}"]
        assert int(names.get(value, value)) == number, name
    pivot = names["__NR_pivot_root"]
    assert int(pivot) == sandbox_child._PIVOT_ROOT[machine]


@pytest.mark.parametrize("machine", HEADERS)
def test_the_filter_allows_what_is_listed_and_nothing_else(machine: str) -> None:
    """By an interpreter of the four instructions that it has."""
    import struct

    code = list(struct.iter_unpack("=HBBI", seccomp.build(machine)))

    def verdict(number: int, architecture: int) -> int:
        at, value = 0, 0
        while True:
            kind, yes, no, constant = code[at]
            at += 1
            if kind == seccomp._LOAD:
                value = {0: number, 4: architecture}[constant]
            elif kind == seccomp._RETURN:
                return constant
            else:
                at += yes if (value == constant if kind == seccomp._EQUAL else value >= constant) else no

    allowed = set(seccomp.allowed(machine).values())
    for number in range(500):
        code_of_error = 38 if number >= seccomp._LATER else 25 if number == seccomp._IOCTL[machine] else 1
        expected = seccomp._ALLOW if number in allowed else seccomp._ERRNO | code_of_error
        assert verdict(number, seccomp._AUDIT_ARCH[machine]) == expected
        assert verdict(number, 0x40000003) == seccomp._KILL, "of 32 bits"
    assert verdict(0x40000000, seccomp._AUDIT_ARCH[machine]) != seccomp._ALLOW, "of the x32 interface"


def test_other_processors_have_no_filter() -> None:
    with pytest.raises(ValueError, match=r"must be x86_64 or aarch64, got riscv64"):
        seccomp.build("riscv64")
    assert platform.machine()
