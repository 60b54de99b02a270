"""Offline runs as Weights & Biases' own reader prints them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

Records = dict[str, list[dict[str, Any]]]  # by type


def without_account(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Weights & Biases keeps its caches in a folder and sees no account."""
    for name in ("CACHE", "DATA", "CONFIG"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(folder / name.lower()))
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)


def read_back(root: Path) -> Records:
    """Records of the one offline run below a folder."""
    (run,) = (root / "wandb").glob("offline-run-*")
    return inspected(run)


def inspected(run: Path) -> Records:
    """Records of an offline run."""
    command = [str(Path(sys.executable).with_name("wandb")), "leet", "inspect", "--json", str(run)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode and "No such command" in done.stderr:
        pytest.skip("this release of wandb has no reader for offline runs")
    assert not done.returncode, done.stderr
    found: Records = {}
    for line in done.stdout.splitlines():
        record = json.loads(line)
        found.setdefault(record["type"], []).append(record[record["type"]])
    return found


def summary_of(found: Records) -> dict[str, Any]:
    return {name: value for part in found["summary"] for name, value in part["update"].items()}
