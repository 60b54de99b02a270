"""Errors a user can act on, exit codes, and failures of the machine in words."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Callable

OK, FAILED, BAD_INPUT, INVALID, INTERRUPTED = 0, 1, 2, 3, 130  # exit codes of every command
TRACEBACK = "DECODEBENCH_TRACEBACK"  # environment variable: print tracebacks
_OWN = ("bench", "methods", "decodebench")
_INSTALL = "Activate the environment (. .venv/bin/activate), or install it: make bench, or pip install -e ."
_CPU_ALLOCATOR = ("can't allocate memory", "not enough memory", "out of memory")
_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_FOLDER = (errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP, errno.EFBIG)
_NO_PATH, _SHOWN = (errno.ENAMETOOLONG, errno.ELOOP), 80
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)


class UserError(Exception):
    """Bad input. The command line prints the message alone and exits with code 2."""


class RunFailed(Exception):
    """A run that broke on its way (out of memory, full disk). Message alone, exit code 1; samples are kept."""


def guard(command: Callable[[], int], *, measures: bool = True) -> int:
    """Run a command; a failure becomes one message on stderr and an exit code.

    Args:
        command: returns its exit code.
        measures: False for commands without the settings that help against a full memory or disk.
    """
    try:
        code = command()
        if sys.stdout is not None:  # None where it was closed before the start (>&-)
            sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of a pipe closed it, as in `python -m bench list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        return report_failure(error, measures=measures)


def report_failure(error: BaseException, *, measures: bool = True) -> int:
    """Print what went wrong as one message on stderr; returns the exit code."""
    code, message, expected = classify(error, measures=measures)
    if not expected or os.environ.get(TRACEBACK, "0") not in ("", "0"):
        traceback.print_exception(type(error), error, error.__traceback__)
    print(message, file=sys.stderr)
    return code


def classify(error: BaseException, *, measures: bool = True) -> tuple[int, str, bool]:
    """Exit code, message, and whether this kind of failure is expected."""
    if isinstance(error, UserError):
        return BAD_INPUT, str(error), True
    if isinstance(error, ModuleNotFoundError) and (missing := missing_package(error)):
        return BAD_INPUT, str(missing), True
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, f"Interrupted. {_resume(getattr(error, 'kept', None))}.", True
    if isinstance(error, OSError) and error.errno in _NO_PATH and error.filename:
        name = str(error.filename)
        shown = name if len(name) <= _SHOWN else f"{name[:_SHOWN]}..."
        said = f"{shown} must be a path that can be opened, got: {os.strerror(error.errno)}. Correct it."
        return BAD_INPUT, said, True
    if failed := explain(error, measures=measures):
        return FAILED, str(failed), True
    return FAILED, f"The run failed: {type(error).__name__}: {error}", False


def missing_package(error: ModuleNotFoundError) -> UserError | None:
    """A package of others that is not installed, as a message; None: a module of this project is missing."""
    if (error.name or "").startswith(_OWN):
        return None
    return UserError(f"{error.name} is not installed for this Python, {sys.executable}. {_INSTALL}")


def explain(
    error: BaseException, where: str = "", kept: int | None = None, *, measures: bool = True
) -> RunFailed | None:
    """The failure as a message a user can act on, or None if the machine did not cause it.

    Args:
        error: what was raised.
        where: where it happened, as in ``prompt 17 (context 3,904)``.
        kept: prompts whose samples are on disk; None if unknown.
        measures: name the settings of a run that help.
    """
    if isinstance(error, RunFailed):
        return error
    resume, folder = _resume(kept), ", or set paths.results=FOLDER" * measures
    if _out_of_memory(error):
        smaller = ", or lower max_context or batch_size" * measures
        return RunFailed(f"Out of memory{f' at {where}' if where else ''}. {resume}{smaller}.")
    if isinstance(error, OSError) and error.errno in _FULL:
        return RunFailed(f"The disk is full{_file(error)}. {resume} once there is space{folder}.")
    if isinstance(error, OSError) and error.errno in _NO_FOLDER and error.filename:
        return RunFailed(f"{error.filename} cannot be written: {os.strerror(error.errno)}. {resume}{folder}.")
    if isinstance(error, OSError) and error.errno in _REFUSED:
        return RunFailed(f"Writing is not permitted{_file(error)}. {resume} once it is{folder}.")
    return None


def is_of_cluster(error: SystemExit) -> bool:
    """Whether submitit's handler of a signal ends the process, so that the cluster resumes the job later."""
    trace = error.__traceback__
    while trace is not None:
        if str(trace.tb_frame.f_globals.get("__name__")).startswith("submitit."):
            return True
        trace = trace.tb_next
    return False


def _resume(kept: int | None) -> str:
    done = "Finished work is" if kept is None else "1 prompt is" if kept == 1 else f"{kept} prompts are"
    return f"{done} kept; run the same command to resume"


def _out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True  # torch's own class, known by name so that torch need not be imported
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _CPU_ALLOCATOR)


def _file(error: OSError) -> str:
    return f": {error.filename}" if error.filename else ""
