"""The records that the project ships say nothing of the machine's folders and users."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import validate
from bench.utils import redact

REFERENCE = Path(__file__).resolve().parents[3] / "results" / "reference"
FILES = sorted(file for file in REFERENCE.rglob("*") if file.suffix in (".json", ".yaml", ".jsonl", ".gz"))
PLACES = re.compile(r"(?<![\w.])/(?:home|Users|root|tmp|work|mnt|opt|var)/[\w.]|torchinductor_\w|\\\\Users\\\\")


def text_of(file: Path) -> str:
    raw = file.read_bytes()
    return (gzip.decompress(raw) if file.suffix == ".gz" else raw).decode()


def environments(tree: Any) -> Iterator[dict[str, str]]:
    if isinstance(tree, dict):
        yield from (value for key, value in tree.items() if key == "environment")
        yield from (found for value in tree.values() for found in environments(value))
    elif isinstance(tree, list):
        yield from (found for value in tree for found in environments(value))


def test_no_folder_of_a_machine_and_no_user_is_in_a_record() -> None:
    assert len(FILES) > 400
    found = {str(file): match[0] for file in FILES if (match := PLACES.search(f"{file.parent.name}\n{text_of(file)}"))}
    assert not found


@pytest.mark.parametrize("leak", ['"/home/alice/x"', "in /tmp/a", "torchinductor_alice", "paths=/work/b"])
def test_a_leak_would_be_found(leak: str) -> None:
    assert PLACES.search(leak)


def test_only_variables_of_todays_list_are_kept() -> None:
    manifests = [file for file in FILES if file.name == "manifest.json"]
    found = [each for file in manifests for each in environments(json.loads(file.read_text()))]
    assert len(found) > 140
    assert all(each == redact.environment(each) for each in found)


def test_the_digests_of_all_are_right() -> None:
    assert [check.line() for check in validate.check(REFERENCE) if check.problems] == []
