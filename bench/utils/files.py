"""Files that are there as a whole or not at all."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


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
