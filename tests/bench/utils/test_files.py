"""Places that the user names with out=, and the text of files."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from bench.errors import UserError
from bench.utils import files


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("folder", "Is a directory"),
        ("file/t.md", "Not a directory"),
        ("file/a/t.md", "Not a directory"),
        ("x" * 300, ""),
    ],
)
def test_a_file_that_cannot_be_there_is_bad_input(place: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=rf"out must be a file that can be written, got .*{place} \(.*{reason}"):
        files.write_output(tmp_path / place, "x")


def test_a_file_is_written_and_its_folders_are_made(tmp_path: Path) -> None:
    for content in ("é\n", b"\0"):
        files.write_output(tmp_path / "a" / "b" / "t", content)
        assert (tmp_path / "a" / "b" / "t").read_bytes() == (content.encode() if isinstance(content, str) else content)


def test_a_folder_is_named_as_one_and_a_full_disk_is_no_matter_of_the_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused = pytest.raises(UserError, match=r"out must be a folder that can be written, got .*file \(File exists\)")
    with refused, files.output(tmp_path / "file", "folder"):
        (tmp_path / "file").mkdir(exist_ok=True)
    with pytest.raises(OSError, match="full"), files.output(tmp_path, "folder"):
        raise OSError(errno.ENOSPC, "full")


def test_a_line_for_each_entry_is_read_back_as_it_was() -> None:
    content = {"a": {"b": [1, 2.5, None], "c": "x\ny"}, "d": Path("e"), "f": []}
    text = files.entry_per_line(content)
    assert text.splitlines()[1:-1] == ['  "a": {"b": [1, 2.5, null], "c": "x\\ny"},', '  "d": "e",', '  "f": []']
    assert json.loads(text) == content | {"d": "e"}
