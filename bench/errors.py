"""Errors a user can act on, exit codes, and failures of the machine in words."""

from __future__ import annotations

import errno
import os
import sys
import traceback

OK, FAILED, BAD_INPUT, INVALID, INTERRUPTED = 0, 1, 2, 3, 130  # exit codes of every command
TRACEBACK = "DECODEBENCH_TRACEBACK"  # environment variable: print tracebacks
_CPU_ALLOCATOR = ("can't allocate memory", "not enough memory", "out of memory")
_FULL = (errno.ENOSPC, errno.EDQUOT)
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)


class UserError(Exception):
    """Bad input. The command line prints the message alone and exits with code 2."""


class RunFailed(Exception):
    """A run that broke on its way (out of memory, full disk). Message alone, exit code 1; samples are kept."""


def report_failure(error: BaseException) -> int:
    """Print what went wrong as one message on stderr; returns the exit code."""
    code, message, expected = _classify(error)
    if not expected or os.environ.get(TRACEBACK, "0") not in ("", "0"):
        traceback.print_exception(type(error), error, error.__traceback__)
    print(message, file=sys.stderr)
    return code


def _classify(error: BaseException) -> tuple[int, str, bool]:
    """Exit code, message, and whether this kind of failure is foreseen."""
    if isinstance(error, UserError):
        return BAD_INPUT, str(error), True
    if isinstance(error, KeyboardInterrupt):
        kept = getattr(error, "kept", None)
        return INTERRUPTED, f"Interrupted. {kept_prompts(kept)}; run the same command to go on.", True
    if failed := explain(error):
        return FAILED, str(failed), True
    return FAILED, f"The run failed: {type(error).__name__}: {error}", False


def explain(error: BaseException, where: str = "", kept: int | None = None) -> RunFailed | None:
    """The failure as a message a user can act on, or None where it is nothing of the machine.

    Args:
        error: what was raised.
        where: where it happened, as in ``prompt 17 (context 3,904)``.
        kept: prompts whose samples are on disk; None where that is not known.
    """
    if isinstance(error, RunFailed):
        return error
    again = f"{kept_prompts(kept)}; run the same command to go on"
    if _out_of_memory(error):
        at = f" at {where}" if where else ""
        return RunFailed(f"Out of memory{at}. {again}, or lower max_context or batch_size.")
    if isinstance(error, OSError) and error.errno in _FULL:
        return RunFailed(f"The disk is full{_file(error)}. {again} once there is space, or set paths.results=FOLDER.")
    if isinstance(error, OSError) and error.errno in _REFUSED:
        return RunFailed(f"Not allowed to write{_file(error)}. {again} once it is, or set paths.results=FOLDER.")
    return None


def kept_prompts(kept: int | None) -> str:
    """``16 prompts are kept``."""
    if kept is None:
        return "What was measured is kept"
    return f"{kept} prompt{'s are' if kept != 1 else ' is'} kept"


def _out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True  # torch's own class, known by name so that torch need not be imported
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _CPU_ALLOCATOR)


def _file(error: OSError) -> str:
    return f": {error.filename}" if error.filename else ""
