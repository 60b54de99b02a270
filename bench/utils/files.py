"""Files that appear whole or not at all, their digests, and locks."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout

from bench.errors import UserError

_BLOCK = 1 << 20
_PATIENCE_S = 0.3  # is_locked holds a free lock for a moment


def atomic_write(file: Path, content: str | bytes) -> None:
    """Write so that a reader, or a crash, sees the old content or the new one."""
    scratch = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        with open(scratch, "wb") as out:
            out.write(content.encode() if isinstance(content, str) else content)
            out.flush()
            os.fsync(out.fileno())
        os.replace(scratch, file)
        _sync_folder(file.parent)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


def write_output(file: Path, content: str | bytes) -> None:
    """Write a file that the user named with ``out=``; its folder is made.

    Raises:
        UserError: see ``output``.
    """
    with output(file, "file"):
        if not file.parent.exists():
            file.parent.mkdir(parents=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def output(place: Path, kind: Literal["file", "folder"]) -> Iterator[None]:
    """While a file or folder is made that the user named with ``out=``.

    Raises:
        UserError: it cannot be there, as it is of the other kind, below a file, or where writing is not possible.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):  # not a matter of the name
            raise
        reason = error.strerror or str(error)
        raise UserError(f"out must be a {kind} that can be written, got {place} ({reason}). Name another.") from error


def _sync_folder(folder: Path) -> None:
    """Make a rename survive a power cut; file systems that cannot are left alone."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def read_json(file: Path) -> dict[str, Any] | None:
    """A JSON object; None where the file has none, or is no regular file."""
    if not file.is_file():  # reading a named pipe would wait for a writer
        return None
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """``atomic_write``; numbers of numpy and torch become Python's, anything else unknown becomes text."""
    atomic_write(file, json.dumps(content, indent=1, ensure_ascii=False, default=plain) + "\n")


def write_entries(file: Path, content: Mapping[str, Any]) -> None:
    """``atomic_write`` of ``entry_per_line``."""
    atomic_write(file, entry_per_line(content))


def entry_per_line(content: Mapping[str, Any]) -> str:
    """JSON with a line for each entry: short, and a comparison shows what changed; unknown values as by ``plain``."""
    lines = (f"  {json.dumps(name)}: {json.dumps(value, default=plain)}" for name, value in content.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def plain(value: Any) -> Any:
    """For ``json.dumps``: numbers of numpy and torch as Python's, anything else as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


# ------------------------------------------------------------------------------------------------------------ digests


def sha256(content: str | bytes) -> str:
    """Hex digest of bytes, or of a text in UTF-8."""
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()


def json_sha256(value: Any) -> str:
    """Hex digest of plain data, independent of the order of keys."""
    return sha256(json.dumps(value, sort_keys=True, default=str))


def file_sha256(path: Path) -> str:
    """Hex digest of a file's bytes, whatever its size."""
    found = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            found.update(block)
    return found.hexdigest()


def digest(parts: Mapping[str, Path]) -> str:
    """One sha256 over names and contents."""
    return sha256("".join(f"{name}\0{file_sha256(path)}\n" for name, path in sorted(parts.items())))


def below(folder: Path) -> dict[str, Path]:
    """All files of a folder by their path in it, in order; of a file, itself."""
    if folder.is_file():
        return {folder.name: folder}
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}


# -------------------------------------------------------------------------------------------------------------- locks


@contextmanager
def locked(file: Path, refusal: str | None = None, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold a lock file, and remove it afterwards; the system releases it when the process ends, however it ends.

    Args:
        refusal: message where another process has the lock; None: wait for it.
        waiting: called once before waiting.

    Raises:
        UserError: another process has the lock, and there is a ``refusal``.
    """
    lock = FileLock(file)
    try:
        lock.acquire(timeout=_PATIENCE_S)
    except Timeout:
        if refusal is not None:
            raise UserError(refusal) from None
        if waiting is not None:
            waiting()
        lock.acquire()
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
        lock.release()


def is_locked(file: Path) -> bool:
    """Whether a living process holds the lock; the file that a killed one left is free."""
    if not file.exists():
        return False
    lock = FileLock(file)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return True
    lock.release()
    return False
