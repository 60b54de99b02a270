"""Notebooks read the user's runs and the reference records, or one folder that is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.report import notebook


def record(folder: Path, name: str) -> None:
    (folder / name).mkdir(parents=True)
    (folder / name / "manifest.json").write_text(json.dumps({"status": "failed"}))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("DECODEBENCH_RESULTS", raising=False)
    monkeypatch.setattr(notebook, "checkout", lambda: tmp_path)
    record(tmp_path / "results", "a")
    record(tmp_path / "results" / "reference", "b")
    return tmp_path / "results"


def test_both_folders_are_read_and_told_apart(home: Path) -> None:
    assert {each.path.name: each.source for each in notebook.records()} == {"a": "own", "b": "reference"}


def test_one_folder_is_read_if_it_is_named(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(home.parent / "other", "c")
    for folder, expected in ((home.parent / "other", {"c": "own"}), (home / "reference", {"b": "reference"})):
        monkeypatch.setenv("DECODEBENCH_RESULTS", str(folder))
        assert {each.path.name: each.source for each in notebook.records()} == expected
