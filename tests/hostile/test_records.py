"""One bad record of several: it is named, and the others are shown, planned and validated."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench import validate
from bench.records import run_folder
from tests.hostile.commands import Shell
from tests.hostile.test_commands import RANDOM

REFERENCE = Path(__file__).parents[2] / "results" / "reference"
RUNS = sorted(REFERENCE.glob("*-mtbench-smollm2-*"))[:3]


def content(name: str, data: bytes) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_bytes(data)


def changed(name: str, **values: Any) -> Callable[[Path], Any]:
    def act(folder: Path) -> None:
        found = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(found | values))

    return act


def gone(name: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).unlink(missing_ok=True)


def folder(name: str) -> Callable[[Path], Any]:
    def act(place: Path) -> None:
        (place / name).unlink(missing_ok=True)
        (place / name).mkdir()

    return act


def fifo(name: str) -> Callable[[Path], Any]:
    def act(place: Path) -> None:
        (place / name).unlink(missing_ok=True)
        os.mkfifo(place / name)

    return act


M, S, C = run_folder.MANIFEST, run_folder.SUMMARY, run_folder.CONFIG
BAD = [b"", b"{", b"[]", b"null", b"17", b'"x"', b"\0" * 64, b"\xff\xfe", b"[" * 50_000, b'{"a": ' * 20_000]
DAMAGES: dict[str, Callable[[Path], Any]] = {
    **{f"{name} is {data[:6]!r}": content(name, data) for name in (M, S) for data in BAD},
    **{f"{C} is {data[:6]!r}": content(C, data) for data in (b"", b"a: [", b"- x\n", b"!!python/object:os.system x\n")},
    **{f"no {name}": gone(name) for name in (M, S, C)},
    **{f"{name} is a folder": folder(name) for name in (S, C)},
    **{f"{name} is a pipe": fifo(name) for name in (M, S, C)},
    **{
        f"{M} {key} is {value!r}": changed(M, **{key: value})
        for key in ("method", "model", "dataset", "hardware", "measure", "versions", "agreement", "cost_curve", "git")
        for value in (None, "x", 17, [], {})
    },
    **{
        f"{S} {key} is {value!r}": changed(S, **{key: value})
        for key in ("speedup", "verdict", "agreement", "memory", "baseline", "quality", "ranking", "method")
        for value in (None, "x", 17, [], {})
    },
}
LISTED = ["validate", "collect", "frontier", "report", "report rebuild=true"]  # the last two derive summaries again


def records(root: Path, damage: Callable[[Path], Any]) -> Path:
    results = root / "results"
    for run in RUNS:
        shutil.copytree(run, results / run.name)
    damage(results / RUNS[0].name)
    return results


@pytest.mark.parametrize("what", DAMAGES)
def test_one_damaged_record(what: str, shell: Shell) -> None:
    results = records(shell.folder, DAMAGES[what])
    for words in map(str.split, LISTED):
        place = ["results"] if words[0] == "validate" else [f"paths.results={results}"]
        out = ["out=page.html"] if words[0] == "report" else []
        ended = shell.run([*words, *place, *out])
        assert ended.code in ({0, 2} if words[0] == "validate" else {0}) and not ended.traceback, ended.said[-3000:]
        if words[0] == "validate" and not what.startswith("no manifest"):
            assert RUNS[0].name in ended.said
        if words[0] == "collect":
            names = {run.name.split("-")[0] for run in RUNS[1:]}
            assert all(name in ended.said for name in names)


@pytest.mark.parametrize("what", [what for what in DAMAGES if what.startswith(M)][::4])
def test_a_plan_goes_on(what: str, shell: Shell) -> None:
    results = records(shell.folder, DAMAGES[what])
    ended = shell.run(["-m", *RANDOM, "seed=1,2", f"paths.results={results}", "dry_run=true"])
    assert ended.code == 0 and not ended.traceback and "To run: 2," in ended.said, ended.said


def test_every_committed_summary_follows_from_manifest_and_samples() -> None:
    assert [each.line() for each in validate.check(REFERENCE, derive=True) if each.problems] == []
