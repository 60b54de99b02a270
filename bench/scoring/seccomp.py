"""The system calls that a program in the sandbox has, as a filter of the Linux kernel (seccomp, classic BPF).

The list holds what files, memory, clocks and waiting need. Everything else is refused: processes and threads, programs,
sockets, signals, mounts, namespaces, tracing, keys, limits, and what the kernel learns later.
"""

from __future__ import annotations

import errno
import struct

_ALLOWED = """
read:0:63 write:1:64 readv:19:65 writev:20:66 pread64:17:67 pwrite64:18:68 preadv:295:69 pwritev:296:70 open:2:
openat:257:56 creat:85: close:3:57 close_range:436:436 dup:32:23 dup2:33: dup3:292:24 fcntl:72:25 flock:73:32 lseek:8:62
stat:4: fstat:5:80 lstat:6: newfstatat:262:79 statx:332:291 statfs:137:43 fstatfs:138:44 access:21: faccessat:269:48
faccessat2:439:439 readlink:89: readlinkat:267:78 getcwd:79:17 chdir:80:49 fchdir:81:50 getdents64:217:61 umask:95:166
mkdir:83: mkdirat:258:34 rmdir:84: unlink:87: unlinkat:263:35 rename:82: renameat:264:38 renameat2:316:276 symlink:88:
symlinkat:266:36 link:86: linkat:265:37 truncate:76:45 ftruncate:77:46 fallocate:285:47 fsync:74:82 fdatasync:75:83
chmod:90: fchmod:91:52 fchmodat:268:53 utime:132: utimes:235: utimensat:280:88 fadvise64:221:223 sendfile:40:71
copy_file_range:326:285 getxattr:191:8 lgetxattr:192:9 fgetxattr:193:10 listxattr:194:11 llistxattr:195:12
flistxattr:196:13 mmap:9:222 munmap:11:215 mprotect:10:226 mremap:25:216 madvise:28:233 brk:12:214 msync:26:227
rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139 sigaltstack:131:132 rt_sigpending:127:136
rt_sigtimedwait:128:137 rt_sigsuspend:130:133 pause:34: restart_syscall:219:128 pipe:22: pipe2:293:59 select:23:
pselect6:270:72 poll:7: ppoll:271:73 epoll_create1:291:20 epoll_ctl:233:21 epoll_wait:232: epoll_pwait:281:22
nanosleep:35:101 clock_nanosleep:230:115 clock_gettime:228:113 clock_getres:229:114 gettimeofday:96:169 time:201:
times:100:153 alarm:37: getitimer:36:102 setitimer:38:103 getpid:39:172 gettid:186:178 getppid:110:173 getuid:102:174
geteuid:107:175 getgid:104:176 getegid:108:177 getresuid:118:148 getresgid:120:150 getgroups:115:158 getpgid:121:155
getpgrp:111: getsid:124:156 getrusage:98:165 getrlimit:97:163 getpriority:140:141 sysinfo:99:179 uname:63:160
getcpu:309:168 sched_yield:24:124 sched_getaffinity:204:123 getrandom:318:278 futex:202:98 set_robust_list:273:99
get_robust_list:274:100 set_tid_address:218:96 rseq:334:293 membarrier:324:283 exit:60:93 exit_group:231:94 wait4:61:260
"""  # name:number on x86_64:number on aarch64, which lacks some
_IOCTL, _LATER = {"x86_64": 16, "aarch64": 29}, 451  # from there on, calls of later kernels, with the same numbers
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_NUMBER_AT, _ARCHITECTURE_AT = 0, 4  # in struct seccomp_data
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000


def allowed(machine: str) -> dict[str, int]:
    """Numbers of the allowed system calls by name, on a machine as ``platform.machine`` names it.

    Raises:
        ValueError: the machine must be x86_64 or aarch64.
    """
    if machine not in _AUDIT_ARCH:
        raise ValueError(f"the processor must be {' or '.join(_AUDIT_ARCH)}, got {machine}")
    rows = (entry.split(":") for entry in _ALLOWED.split())
    column = 1 + list(_AUDIT_ARCH).index(machine)
    return {row[0]: int(row[column]) for row in rows if row[column]}


def build(machine: str) -> bytes:
    """The filter, 8 bytes an instruction. A refused call gets EPERM, ioctl ENOTTY, one of a later kernel ENOSYS.

    Calls by the table of another architecture, such as 32-bit ones, end the process.
    """
    numbers = sorted(allowed(machine).values())
    code = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_EQUAL, 1, 0, _AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_AT_LEAST, len(numbers) + 3, 0, _LATER),
        (_EQUAL, len(numbers) + 1, 0, _IOCTL[machine]),
        *((_EQUAL, len(numbers) + 2 - place, 0, number) for place, number in enumerate(numbers)),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
        (_RETURN, 0, 0, _ERRNO | errno.ENOTTY),
        (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)
