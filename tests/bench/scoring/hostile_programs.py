"""Programs that attack the machine or their own verdict, for ``test_sandbox``.

``attack`` does the harm and returns what it achieved; the places that it aims at are variables put in front of it. The
same program without a sandbox is the control: there it succeeds, where that is safe to try.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Attack:
    """A hostile program.

    Attributes:
        body: of ``attack``.
        control: who succeeds with it outside of the sandbox; ``never``: it would harm this machine.
        ends: its verdicts; None: it ends by itself and has achieved nothing.
    """

    body: str
    control: Literal["anyone", "root", "never"] = "anyone"
    ends: tuple[str | None, ...] = (None,)


_DISK = (None, "disk limit")
ATTACKS = {
    # -------------------------------------------------------------------------------------------- processes and threads
    "a fork": Attack("p = os.fork()\nif not p: os._exit(0)\nos.waitpid(p, 0)\nreturn p"),
    "a fork bomb": Attack("for _ in range(10): os.fork()\nreturn True", control="never"),
    "60 processes at once": Attack("return [subprocess.Popen(['sleep', '1']) for _ in range(60)]"),
    "a process that Python does not announce": Attack(
        "r, w = os.pipe()\nimport multiprocessing.util as u\nreturn u.spawnv_passfds(b'/bin/true', [b'true'], [w])"
    ),
    "a process by posix_spawn": Attack("return os.posix_spawn('/bin/true', ['true'], {})"),
    "a shell by the C library": Attack("return libc.system(b'exit 3') == 3 << 8"),
    "a fork by the C library": Attack("p = libc.fork()\nif not p: os._exit(0)\nreturn p > 0"),
    "another program in its place": Attack(
        "try: os.execv('/bin/true', ['true'])\nexcept OSError: return False", control="never"
    ),
    "a daemon that outlives the run": Attack(
        "if not os.fork():\n"
        "    os.setsid()\n"
        "    if not os.fork(): open(outside + '/daemon', 'w').close()\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        "for _ in range(100):\n"
        "    if os.path.exists(outside + '/daemon'): return True\n"
        "    time.sleep(0.1)"
    ),
    "threads": Attack("t = threading.Thread(target=int)\nt.start()\nreturn True"),
    # --------------------------------------------------------------------------------------- secrets of other processes
    "its own environment": Attack("return 'WANDB_API_KEY' in os.environ"),
    "the environment of a process": Attack("return 'WANDB_API_KEY' in open(f'/proc/{victim}/environ').read()"),
    "the environment of all processes": Attack(
        "for name in os.listdir('/proc'):\n"
        "    try:\n"
        "        if 'WANDB_API_KEY' in open(f'/proc/{name}/environ').read(): return True\n"
        "    except OSError: pass"
    ),
    "files that are no part of Python": Attack("return open(kept).read()"),
    "the working folder of a process": Attack("return os.listdir(f'/proc/{victim}/cwd')"),
    "the parent's folder": Attack("os.chdir('..')\nos.chdir('..')\nreturn os.path.exists('etc/passwd')", "never"),
    # ---------------------------------------------------------------------------------------------- signals and tracing
    "kill -9 of a process": Attack("os.kill(victim, 9)\nreturn True"),
    "a signal to every process": Attack("os.kill(-1, 0)\nreturn True"),
    "a signal by the C library": Attack("return libc.kill(victim, 0) == 0"),
    "ptrace of a process": Attack("return libc.ptrace(16, victim, None, None) == 0", control="root"),
    "ptrace of its parent": Attack("return libc.ptrace(16, os.getppid(), None, None) == 0", control="never"),
    "a kill of its parent": Attack("os.kill(os.getppid(), 9)\nreturn True", control="never"),
    "the memory of a process": Attack("return os.open(f'/proc/{victim}/mem', os.O_RDWR)", control="root"),
    # ------------------------------------------------------------------------------------------------------ the network
    "a UNIX socket of the machine": Attack(
        "s = socket.socket(socket.AF_UNIX)\ns.connect(outside + '/socket')\nreturn s.send(b'x')"
    ),
    "an abstract UNIX socket": Attack("s = socket.socket(socket.AF_UNIX)\ns.connect(abstract)\nreturn s.send(b'x')"),
    "TCP to this machine": Attack("return socket.create_connection(('127.0.0.1', port)).send(b'x')"),
    "a socket that could leave it": Attack("return socket.socket(socket.AF_INET, socket.SOCK_DGRAM)"),
    "a socket by the C library": Attack("return libc.socket(2, 1, 0) >= 0"),
    "a pair of sockets": Attack("return socket.socketpair()"),
    # ---------------------------------------------------------------------------------------------------- files outside
    "a write outside": Attack("open(kept, 'w').write('x')\nreturn True"),
    "a write by a folder's descriptor": Attack(
        "d = os.open(outside, os.O_RDONLY)\nreturn os.open('kept', os.O_WRONLY | os.O_TRUNC, dir_fd=d)"
    ),
    "chmod outside": Attack("os.chmod(kept, 0o777)\nreturn True"),
    "chown outside": Attack("os.chown(kept, os.getuid(), os.getgid())\nreturn True"),
    "utime outside": Attack("os.utime(kept, (0, 0))\nreturn True"),
    "an attribute outside": Attack("os.setxattr(kept, 'user.x', b'x')\nreturn True", control="never"),
    "a removal outside": Attack("os.remove(kept)\nreturn True"),
    "a move from outside": Attack("os.rename(kept, 'moved')\nreturn True"),
    "a named pipe outside": Attack("os.mkfifo(outside + '/pipe')\nreturn True"),
    "a symbolic link to outside": Attack("os.symlink(kept, 'link')\nreturn open('link', 'w')"),
    "a hard link to outside": Attack("os.link(kept, 'link')\nreturn open('link', 'w')"),
    "Python's own files": Attack("return os.open(os.__file__, os.O_WRONLY)", control="root"),
    "a file in the root folder": Attack("return open('/written', 'w')", control="never"),
    # -------------------------------------------------------------------------------------------- rights and the kernel
    "root again": Attack("os.setuid(0)\nreturn True", control="root"),
    "another user": Attack("os.setresuid(1, 1, 1)\nreturn True", control="root"),
    "a mount": Attack("return libc.mount(b'x', b'.', b'tmpfs', 0, None) == 0", control="never"),
    "a namespace of its own": Attack("return libc.unshare(0x10000000) == 0"),
    "another root folder": Attack("os.chroot('.')\nreturn True", control="root"),
    "settings of the kernel": Attack("return os.open('/proc/sys/kernel/hostname', os.O_WRONLY)", control="root"),
    "devices": Attack("return [name for name in os.listdir('/dev') if name != 'null']"),
    "a device of its own": Attack("os.mknod('null', 0o20666, os.makedev(1, 3))\nreturn True", control="root"),
    "higher limits": Attack("resource.setrlimit(resource.RLIMIT_NPROC, (50, 50))\nreturn True"),
    "a priority": Attack("return os.nice(1)"),
    "keys of the kernel": Attack("return libc.syscall(248, b'user', b'x', b'x', 1, -2) > 0", control="never"),
    "io_uring": Attack("return libc.syscall(425, 8, ctypes.create_string_buffer(256)) >= 0", control="never"),
    "another architecture's calls": Attack("return libc.syscall(0x40000000 + 39) > 0", control="never"),
    # ----------------------------------------------------------------------------------------------------------- floods
    "3,000 nested folders": Attack(
        "at = os.open('.', os.O_RDONLY)\n"
        "for _ in range(3000):\n"
        "    os.mkdir('d', dir_fd=at)\n"
        "    at, above = os.open('d', os.O_RDONLY, dir_fd=at), at\n"
        "    os.close(above)\n"
        "time.sleep(0.2)\n"
        "return True",
        ends=_DISK,
    ),
    "64 files of 1 MiB": Attack(
        "return [open(str(i), 'wb').write(bytes(2**20)) for i in range(64)]", ends=_DISK
    ),
    "a file of 64 MiB": Attack("return open('large', 'wb').write(bytes(2**26)) == 2**26"),
    "20,000 files": Attack("for i in range(20000): open(str(i), 'w').close()\nreturn True", ends=_DISK),
    "memory": Attack("return len(bytearray(2**31))"),
    "shared memory": Attack("return len(mmap.mmap(-1, 2**31))"),
    "memory that is a file": Attack("f = os.memfd_create('x')\nos.ftruncate(f, 2**31)\nreturn True"),
    "100 open files": Attack("return [open('f', 'w') for _ in range(100)]"),
    "a flood of every pipe": Attack(
        "for d in range(3, 32):\n"
        "    try:\n"
        "        while True: os.write(d, bytes([255]) * 2**20)\n"
        "    except OSError: pass",
        control="never",
        ends=("output limit", "time limit"),
    ),
    "a flood of results": Attack("return bytes(2**26)", control="never", ends=("output limit",)),
    # ----------------------------------------------------------------------------------------------------------- clocks
    "a sleep for ever": Attack("time.sleep(10**6)", control="never", ends=("time limit",)),
    "a loop for ever": Attack("while True: pass", control="never", ends=("time limit",)),
    "a loop that ignores every signal": Attack(
        "for s in signal.valid_signals() - {9, 19}: signal.signal(s, signal.SIG_IGN)\n"
        "while True:\n"
        "    try: pass\n"
        "    except BaseException: pass",
        control="never",
        ends=("time limit",),
    ),
    # ------------------------------------------------------------------------------------------------------ its verdict
    "an end with success": Attack("os._exit(0)", control="never", ends=("ended early with code 0",)),
    "sys.exit": Attack("sys.exit(0)", control="never", ends=("SystemExit",)),
    "a crash": Attack("ctypes.string_at(0)", control="never", ends=("ended early with code -11",)),
    "an abort with a core dump": Attack("os.abort()", control="never", ends=tuple(
        f"ended early with code -{signal}" for signal in (4, 5, 6, 11)
    )),
    "all descriptors closed": Attack("os.closerange(0, 64)", control="never", ends=(
        "ended early with code 1",
    )),
}  # fmt: skip
FORGERIES = {  # what a check that wants ``answer() == 42`` must not get as a pass
    "a result that equals everything": "class E:\n    __eq__ = lambda *_: True\ndef answer(): return E()",
    "a number that equals everything": "class E(int):\n    __eq__ = lambda *_: True\ndef answer(): return E()",
    "builtins of the check": (
        "import builtins\nbuiltins.AssertionError = builtins.int = type('E', (Warning,), {})\n"
        "builtins.abs = lambda x: 42\ndef answer(): return -1"
    ),
    "a result that is a command": (
        "class E:\n    def __reduce__(self): return eval, ('42',)\ndef answer(): return E()"
    ),
    "a message with a command": (
        "import os, struct\n"
        "def answer():\n"
        "    data = b'(X\\x05\\0\\0\\0valuecposix\\nsystem\\n(Vtouch /sandbox/x\\ntRt.'\n"
        "    for d in range(3, 32):\n"
        "        try: os.write(d, struct.pack('=I', len(data)) + data)\n"
        "        except OSError: pass"
    ),
    "a message that alters a class": (  # Fraction.__eq__ = bool, in the process of the check
        "import os, struct\n"
        "def answer():\n"
        "    data = b'(X\\x05\\0\\0\\0valuecfractions\\nFraction\\n(N}V__eq__\\ncbuiltins\\nbool\\nstb)Rt.'\n"
        "    for d in range(3, 32):\n"
        "        try: os.write(d, struct.pack('=I', len(data)) + data)\n"
        "        except OSError: pass"
    ),
    "a verdict": (
        "import os\nfor d in range(32):\n    try: os.write(d, b'{\"ends\": null}')\n    except OSError: pass\n"
        "os._exit(0)"
    ),
    "an end before the check": "import os\nos._exit(0)",
    "an end in the check": "import os\ndef answer(): os._exit(0)",
    "an exit in the check": "import sys\ndef answer(): sys.exit(0)",
    "an exception": "def answer(): raise AssertionError",
    "no function": "x = 42",
    "itself": "def answer(): return answer",
    "judge and check of its own": (
        "import sys\nsys.modules['__main__']._judge = lambda *_: None\nsys.modules['__main__'].check = b''\n"
        "def answer(): return 41"
    ),
    "a finaliser": "class E:\n    def __del__(self): raise SystemExit\nE()\ndef answer():\n    E()\n    return 41",
}  # fmt: skip
