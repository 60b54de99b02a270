"""Digests over the files of a finished run, so that what was changed afterwards is found by name.

The manifest has them under ``digest``: by file, sha256 over its bytes, of samples and pairs over what is packed, so
that packing changes none; of the manifest over its content without them. They find changes and prove no origin,
as anyone can make new ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.errors import UserError
from bench.records import run_folder
from bench.records.run_folder import CALIBRATION, CONFIG, DIGEST, MANIFEST, PAIRS, SAMPLES, SUMMARY
from bench.utils.files import entry_per_line, json_sha256, sha256

ADDED = "added_at"  # beside the files: when a record got its digests that was made before there were any
_RESTORE = "Restore it, or measure again with --fresh"
_DERIVE = "Derive it again (python -m bench report rebuild=true)"


def sealed(folder: Path, manifest: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """The manifest of a run with the digests of its files, as they are.

    Args:
        more: what else to note beside the digests.
    """
    content = _plain(manifest)
    files = {name: found for name in (CONFIG, *_data(folder), SUMMARY, CALIBRATION) if (found := _digest(folder, name))}
    return content | {DIGEST: {MANIFEST: json_sha256(content), **files, **more}}


def resealed(folder: Path, manifest: Mapping[str, Any], **more: Any) -> str:
    """The text of the manifest with new digests of all files."""
    return entry_per_line(sealed(folder, manifest, **more))


def changed(folder: Path, manifest: Mapping[str, Any], *, data: bool = True) -> list[str]:
    """What is not as it was when the run ended, in words; empty too for a manifest without digests.

    Args:
        data: check samples and pairs too, which takes longer.

    Raises:
        UserError: packed samples are damaged.
    """
    kept = manifest.get(DIGEST)
    if kept is None or manifest.get("status") != "finished":
        return []
    return [f"{name} {said}" for name, said in _differences(folder, manifest, kept, data)]


def damaged_summary_alone(folder: Path, manifest: Mapping[str, Any]) -> bool:
    """Whether all that a summary is derived from is as it was when the run ended."""
    kept = manifest.get(DIGEST) or {}
    return all(name == SUMMARY for name, _ in _differences(folder, manifest, kept, data=True))


def _differences(
    folder: Path, manifest: Mapping[str, Any], kept: Mapping[str, Any], data: bool
) -> Iterator[tuple[str, str]]:
    if kept.get(MANIFEST) != json_sha256(_plain(manifest)):
        yield MANIFEST, f"was changed after the run ended. {_RESTORE}"
    known = [name for name in kept if name not in (MANIFEST, ADDED)]
    for name in [*known, *(name for name in _data(folder) if name not in kept)]:
        if name in (SAMPLES, PAIRS) and not data:
            continue
        found = _digest(folder, name)
        if found != kept.get(name):
            what = "was added" if name not in kept else "was changed" if found else "was removed"
            yield name, f"{what} after the run ended. {_DERIVE if name == SUMMARY else _RESTORE}"


def _data(folder: Path) -> list[str]:
    """What holds the measured times: samples, or what a condensed run keeps of them."""
    return [PAIRS] if (folder / PAIRS).is_file() else [SAMPLES]


def _plain(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """As it is read back from its file, without the digests."""
    found: dict[str, Any] = json.loads(json.dumps(manifest, default=str))
    found.pop(DIGEST, None)
    return found


def _digest(folder: Path, name: str) -> str | None:
    """Of a file of a run; None where there is none."""
    file = run_folder.samples_file(folder) if name == SAMPLES else folder / name
    if not file.is_file():
        return None
    try:
        return sha256(run_folder.unpacked(file))
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}. Correct its permissions.") from error
