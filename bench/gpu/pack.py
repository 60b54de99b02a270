"""Write what a bare machine lacks into pieces that are each below a size.

The items (code, wheels, data sets, the embedded model's wheel, checkpoints) are tar files, laid end to end over the
pieces in the order in which they are needed. ``bench.gpu.start``, a copy of which is in every piece, joins them again
and compares their digests.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.config.schema import checkout, conf_dir
from bench.errors import UserError
from bench.gpu import start
from bench.gpu.plan import Contents
from bench.models import embedded
from bench.tasks.sources import KNOWN, Sources, parse_rows, project_data
from bench.utils import files, machine

MODEL_WHEEL = "smollm2.whl"  # as it is called on the other machine
DOWNLOADS = "downloads"  # beside the pieces: wheels, which are fetched once
_MANIFEST_BYTES = 64 << 10  # most that pieces.json and start.py take
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class Item:
    """A tar file that travels."""

    name: str
    file: Path


@dataclass(frozen=True, slots=True)
class Piece:
    """A folder of the pack; ``bytes`` of all its files."""

    folder: Path
    bytes: int


def pack(contents: Contents, out: Path, most_bytes: int, python: str, wheel: Path | None = None) -> list[Piece]:
    """Collect everything and write the pieces; those of an earlier pack are replaced.

    Args:
        contents: what travels.
        out: folder of the pieces.
        most_bytes: of each piece.
        python: version of the other machine's Python, as in ``3.12``.
        wheel: the wheel of the embedded model, where it was downloaded by other means.

    Raises:
        UserError: something cannot be had.
    """
    downloads, scratch = out / DOWNLOADS, out / "items"
    shutil.rmtree(scratch, ignore_errors=True)
    for folder in (downloads, scratch):
        folder.mkdir(parents=True, exist_ok=True)
    root = checkout()
    if root is None:
        raise UserError("gpu pack needs a checkout of the project, got an installed package. Run it in a checkout.")
    items = [
        tarred("code", {name: root / name for name in tracked(root, contents.code)}, scratch, compress=True),
        tarred("wheels", files.below(wheels(contents, downloads / python, python)), scratch),
        tarred("data", data_sets(contents.data, scratch / "sets"), scratch),
        tarred("model", model_wheel(wheel, downloads), scratch),
        *(tarred(name, checkpoints(patterns), scratch) for name, patterns in contents.checkpoints.items()),
    ]
    pieces = write_pieces(items, out, most_bytes, machine.git_state(root)["sha"])
    shutil.rmtree(scratch)
    return pieces


# ------------------------------------------------------------------------------------------------------------ pieces


def write_pieces(items: Sequence[Item], out: Path, most_bytes: int, commit: str | None = None) -> list[Piece]:
    """Lay items end to end over folders a, b, c, ... of ``out``, none above a size.

    Args:
        commit: of the code, for the records.

    Raises:
        UserError: the size leaves no room beside the list of items, or there are too many pieces.
    """
    room = most_bytes - _MANIFEST_BYTES
    if room <= 0:
        raise UserError(f"limit_mib must leave room for more than {_MANIFEST_BYTES} bytes, got {most_bytes}. Raise it.")
    for letter in _LETTERS:
        shutil.rmtree(out / letter, ignore_errors=True)
    at, left = 0, room
    entries = []
    for item in items:
        slices: list[dict[str, str]] = []
        with item.file.open("rb") as stream:
            while True:
                if left == 0:
                    at, left = at + 1, room
                if at == len(_LETTERS):
                    raise UserError(
                        f"The pack takes more than {len(_LETTERS)} pieces of {most_bytes} bytes. Raise limit_mib."
                    )
                name = f"{item.name}.{len(slices):02}"
                written = _copy(stream, out / _LETTERS[at] / name, left)
                if not written and slices:
                    break
                digest = files.file_sha256(out / _LETTERS[at] / name)
                slices.append({"piece": _LETTERS[at], "file": name, "sha256": digest})
                left -= written
        entries.append({"name": item.name, "sha256": files.file_sha256(item.file), "slices": slices})
    for letter in _LETTERS[: at + 1]:
        files.write_json(out / letter / start.PIECES, {"commit": commit, "items": entries})
        shutil.copyfile(start.__file__, out / letter / start.START)
    return [Piece(out / letter, _bytes(out / letter)) for letter in _LETTERS[: at + 1]]


def _copy(stream: io.BufferedReader, target: Path, most: int) -> int:
    """Write at most so many bytes to a new file; no file where there are none left, unless it is the first."""
    first, written = stream.tell() == 0, 0
    block = stream.read(min(_BLOCK, most))
    if not block and not first:
        return 0
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as out:
        while block:
            out.write(block)
            written += len(block)
            block = stream.read(min(_BLOCK, most - written))
    return written


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in files.below(folder).values())


def tarred(name: str, members: Mapping[str, Path], scratch: Path, *, compress: bool = False) -> Item:
    """A tar file of some files by their path in it, the same bytes for the same content."""
    file = scratch / f"{name}.tar"
    with file.open("wb") as out:
        packed = gzip.GzipFile(filename="", fileobj=out, mode="wb", mtime=0) if compress else out
        with tarfile.open(fileobj=packed, mode="w") as archive:
            for path, source in sorted(members.items()):
                header = tarfile.TarInfo(path)
                header.size, header.mode = source.stat().st_size, 0o755 if os.access(source, os.X_OK) else 0o644
                with source.open("rb") as stream:
                    archive.addfile(header, stream)
        if compress:
            packed.close()
    return Item(name, file)


# ------------------------------------------------------------------------------------------------------------- items


def tracked(root: Path, wanted: Sequence[str]) -> list[str]:
    """Files of a checkout that git tracks or would track, below some of its paths.

    Raises:
        UserError: it is no git checkout.
    """
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *wanted]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"{root} must be a git checkout, got: {done.stderr.strip()}. Clone the project with git.")
    return sorted({name for name in done.stdout.split("\0") if name and (root / name).is_file()})


def wheels(contents: Contents, folder: Path, python: str) -> Path:
    """The folder with the wheels, fetched or built unless they are there.

    Raises:
        UserError: pip cannot get one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pins = _pins()
    wanted = {name: f"{name}=={pins[name.lower().replace('-', '_')]}" for name in contents.wheels}
    missing = [wanted[name] for name in wanted if not _has(folder, wanted[name])]
    built = [each for each in missing if each.partition("==")[0] in contents.built]
    fetched = [each for each in missing if each not in built]
    platforms = [word for platform in contents.platforms for word in ("--platform", platform)]
    target = ["--only-binary=:all:", "--python-version", python, "--implementation", "cp", *platforms]
    if fetched:
        _pip("download", "--no-deps", *target, "--dest", str(folder), *fetched)
    if built:
        _pip("wheel", "--no-deps", "--wheel-dir", str(folder), *built)
    for file in folder.glob("*.whl"):  # of an older pin
        if not any(_is(file, requirement) for requirement in wanted.values()):
            file.unlink()
    return folder


def _pins() -> dict[str, str]:
    """Versions of constraints.txt by normalised name."""
    lines = (conf_dir().parent / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = (line.partition(";")[0].strip().split("==") for line in lines if "==" in line.partition(";")[0])
    return {name.lower().replace("-", "_"): version for name, version in pinned}


def _has(folder: Path, requirement: str) -> bool:
    return any(_is(file, requirement) for file in folder.glob("*.whl"))


def _is(file: Path, requirement: str) -> bool:
    name, version = requirement.lower().replace("-", "_").split("==")
    return file.name.lower().replace("-", "_").startswith(f"{name}_{version}_")


def _pip(*words: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *words]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise UserError(
            f"pip {words[0]} failed: {last}. Check the network, or put the wheels into the folder yourself."
        )


def data_sets(names: Sequence[str], scratch: Path) -> dict[str, Path]:
    """The files of data sets in the layout of DECODEBENCH_DATA, checked and gzipped.

    Args:
        names: data sets.
        scratch: folder for the files.

    Raises:
        UserError: a data set is neither in DECODEBENCH_DATA nor in the cache, and cannot be fetched.
    """
    sources, found = Sources(), {}
    for name in names:
        content, revision = sources.content(name, KNOWN[name])
        parse_rows(content, revision.file)
        target = scratch / f"{KNOWN[name].file}.gz"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(gzip.compress(content, mtime=0))
        found[f"{KNOWN[name].file}.gz"] = target
    return found


def model_wheel(wheel: Path | None, downloads: Path) -> dict[str, Path]:
    """The wheel of the embedded model, downloaded unless it is there.

    Raises:
        UserError: it cannot be had, or is another one.
    """
    origin = embedded.SMOLLM2
    stem = origin.requirement.replace("-", "_").replace("==", "-")
    file = wheel or next(iter(downloads.glob(f"{stem}-*.whl")), None) or embedded.download(downloads, origin)
    if not file.is_file() or (found := files.file_sha256(file)) != origin.wheel_sha256:
        got = found if file.is_file() else "no such file"
        raise UserError(
            f"{file} must be the wheel {origin.requirement}, got {got}. Remove it, or correct model_wheel=."
        )
    return {MODEL_WHEEL: file}


def checkpoints(patterns: Sequence[str]) -> dict[str, Path]:
    """Files of checkpoints by their path in a checkout."""
    return dict(_checkpoint_files(project_data() / "checkpoints", patterns))


def _checkpoint_files(folder: Path, patterns: Sequence[str]) -> Iterator[tuple[str, Path]]:
    for pattern in patterns:
        for each in sorted(folder.glob(pattern)):
            for path, file in files.below(each).items():
                yield f"data/checkpoints/{each.name}/{path}", file


def summary(pieces: Sequence[Piece], most_bytes: int) -> str:
    """A line for each piece, and what is in it."""
    content = json.loads((pieces[0].folder / start.PIECES).read_text(encoding="utf-8"))
    held: dict[str, list[str]] = {piece.folder.name: [] for piece in pieces}
    for item in content["items"]:
        for slice_ in item["slices"]:
            held[slice_["piece"]].append(item["name"] if len(item["slices"]) == 1 else slice_["file"])
    limit = most_bytes / 2**20
    lines = [
        f"{piece.folder}: {piece.bytes / 2**20:5.1f} of {limit:g} MiB: {', '.join(held[piece.folder.name])}"
        for piece in pieces
    ]
    return "\n".join(
        [*lines, f"There, for each piece in turn: python3 {pieces[0].folder.name}/{start.START} wait=60 out=FOLDER"]
    )
