"""Records that came back from a machine with a GPU: checked, packed, and laid beside the project's own."""

from __future__ import annotations

import io
import shutil
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bench import validate
from bench.analysis import audit, pairs
from bench.errors import UserError
from bench.gpu import start
from bench.records import run_folder
from bench.utils import files

_OTHERS = ("costs", "lossless", "promise")  # folders of records that are no runs


@dataclass(frozen=True, slots=True)
class Brought:
    """What became of one folder of the archive."""

    path: Path
    state: Literal["new", "here already", "refused", "copied"]
    note: str = ""

    def line(self) -> str:
        return f"{self.state:12} {self.path.name}{f': {self.note}' if self.note else ''}"


def unpack(archives: Sequence[Path], folder: Path) -> None:
    """Extract an archive from its files, in the order of their names.

    Raises:
        UserError: a file is missing or damaged.
    """
    for file in archives:
        if not file.is_file():
            raise UserError(f"{file} must be a file that a job brought back, as {start.ARCHIVE}. Correct the path.")
    content = b"".join(file.read_bytes() for file in sorted(archives, key=lambda file: file.name))
    try:
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            for member in archive.getmembers():
                if not member.isfile() or member.name.startswith("/") or ".." in Path(member.name).parts:
                    raise UserError(f"{member.name} is no plain file below a folder, as those of a job are. Refused.")
                target = folder / member.name
                target.parent.mkdir(parents=True, exist_ok=True)
                stream = archive.extractfile(member)
                assert stream is not None, "it is a file"
                target.write_bytes(stream.read())
    except (tarfile.TarError, EOFError, OSError) as error:
        raise UserError(
            f"The archive is damaged or incomplete ({error}). Name all its files, or bring it back again."
        ) from error


def bring_back(folder: Path, target: Path, *, condense: bool = False, invalid: bool = False) -> Iterator[Brought]:
    """Copy finished and sound records into a folder, with their samples packed.

    Args:
        folder: of an unpacked archive.
        target: as ``results/reference``.
        condense: keep only the times of each prompt, see ``bench.analysis.pairs``.
        invalid: take INVALID runs too.
    """
    for source in _records(folder / "results"):
        place = target / source.relative_to(folder / "results")
        if place.exists():
            yield Brought(place, "here already")
            continue
        is_run = (source / run_folder.MANIFEST).is_file() and source.parent.name not in _OTHERS
        if is_run and (run_folder.read_manifest(source) or {}).get("status") != "finished":
            yield Brought(place, "refused", "it is not finished")
            continue
        if problems := validate.check_one(source).problems:
            yield Brought(place, "refused", problems[0])
            continue
        summary = (files.read_json(source / run_folder.SUMMARY) or {}) if is_run and not invalid else {}
        if summary and audit.result(summary) == "INVALID":
            yield Brought(place, "refused", f"it is INVALID: {audit.explained(summary)[0]}")
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, place, ignore=shutil.ignore_patterns("*.lock"))
        if is_run:
            run_folder.pack(place)
            if condense:
                pairs.condense(place)
        yield Brought(place, "new")
    for source in sorted((folder / "trained").glob("*/card.json")):
        place = target.parent / "trained" / source.parent.name
        if place.exists():
            yield Brought(place, "here already")
            continue
        shutil.copytree(source.parent, place)
        yield Brought(place, "copied", f"a checkpoint, into {place}")


def _records(results: Path) -> Iterator[Path]:
    """Folders of records: runs, and below ``costs`` and ``lossless``."""
    for folder in sorted(results.iterdir()) if results.is_dir() else []:
        if folder.name in _OTHERS:
            yield from (each for each in sorted(folder.iterdir()) if each.is_dir())
        elif folder.is_dir():
            yield folder
