"""Files that are there as a whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any


def replace(file: Path, content: str | bytes) -> None:
    """Write a file so that a reader, or a crash, meets the old content or the new one; for one writer at a time."""
    scratch = file.with_name(f".{file.name}.tmp")
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


def _sync_folder(folder: Path) -> None:
    """Make a rename survive a power cut; file systems that cannot are left alone."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


_BLOCK = 1 << 20


def read_json(file: Path) -> dict[str, Any] | None:
    """An object that ``write_json`` wrote; None without one."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write so that a reader sees the old file or the new one."""
    replace(file, json.dumps(content, indent=1, ensure_ascii=False, default=_plain) + "\n")


def digest(parts: Mapping[str, Path]) -> str:
    """One sha256 over names and contents."""
    whole = hashlib.sha256()
    for name, path in sorted(parts.items()):
        whole.update(f"{name}\0{file_sha256(path)}\n".encode())
    return whole.hexdigest()


def file_sha256(path: Path) -> str:
    """Of a file's bytes, whatever its size."""
    found = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            found.update(block)
    return found.hexdigest()


def _plain(value: Any) -> Any:
    """Numbers of numpy and torch as Python's; anything else as text: a card must not fail after hours of work."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
