"""The repository stays small: a clone is quick, and no checkpoint or record slips in unnoticed."""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MOST_MIB = 84  # checkpoints 62 of them, records 12
NOTEBOOKS, PICTURE = 2_000_000, 140_000  # bytes of all notebooks, and of one picture in base64


def tracked() -> list[Path]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("no git checkout")
    return [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_tracked_files_fit() -> None:
    sizes: Counter[str] = Counter()
    for path in tracked():
        sizes["/".join(path.relative_to(ROOT).parts[:2])] += path.stat().st_size
    assert sum(sizes.values()) <= MOST_MIB * 2**20, sizes.most_common(8)


def test_notebooks_are_small() -> None:
    found = [path for path in tracked() if path.suffix == ".ipynb"]
    assert found and sum(path.stat().st_size for path in found) <= NOTEBOOKS
    pictures = [line for path in found for line in path.read_text().splitlines() if '"image/png"' in line]
    assert pictures and max(map(len, pictures)) <= PICTURE
