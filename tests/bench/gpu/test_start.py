"""``start.py`` as a machine runs it: pieces, the job in the background, an archive that comes back whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.errors import UserError
from bench.gpu import bring_back, pack, start

# Stands for the code that travels: the job writes what it was given and what it sees, then a record.
JOB = """
import os, pathlib, sys, time
words = dict(word.split("=", 1) for word in sys.argv[3:])
home = pathlib.Path(words["home"])
(home / "results").mkdir(exist_ok=True)
seen = [os.environ[name] for name in ("DECODEBENCH_DATA", "DECODEBENCH_COMMIT", "HF_HUB_OFFLINE")]
(home / "results" / "seen.txt").write_text(" ".join([*sys.argv[1:3], os.getcwd(), *seen, words["hardware"]]))
end = time.monotonic() + 30
while not (home / "state" / "have" / "model").exists() and time.monotonic() < end:
    time.sleep(0.1)
(home / "results" / "record.txt").write_text((home / "model" / "smollm2.whl").read_text())
(home / "log" / "stages.log").write_text("a stage ended\\n")
(home / "state" / "done").touch()
"""


@pytest.fixture
def pieces(tmp_path: Path) -> list[Path]:
    sources = {
        "code": {"bench/__init__.py": "", "bench/__main__.py": JOB},
        "wheels": {},
        "model": {"smollm2.whl": "m" * 90_000},
    }
    items = []
    (tmp_path / "items").mkdir()
    for name, files in sources.items():
        for path, text in files.items():
            (tmp_path / name / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / path).write_text(text)
        members = {path: tmp_path / name / path for path in files}
        items.append(pack.tarred(name, members, tmp_path / "items"))
    found = pack.write_pieces(items, tmp_path / "pieces", 150_000, "abc123")
    assert len(found) == 2
    return [piece.folder for piece in found]


def call(piece: Path, home: Path, out: Path, *words: str) -> str:
    command = [sys.executable, str(piece / "start.py"), f"out={out}", *words]
    environment = os.environ | {start.HOME: str(home)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def kill_job(home: Path) -> None:
    os.kill(int((home / "state" / "job.pid").read_text()), 9)
    end = time.monotonic() + 10
    while start.running(home) and time.monotonic() < end:
        time.sleep(0.1)


def test_the_job_starts_with_the_code_and_outlives_the_call(tmp_path: Path, pieces: list[Path]) -> None:
    home, out = tmp_path / "home", tmp_path / "out"
    said = call(pieces[0], home, out, "hardware=cpu_bf16")
    assert "unpacked: code, wheels" in said
    assert "job: running" in said
    pid = (home / "state" / "job.pid").read_text()
    said = call(pieces[1], home, out, "wait=40")
    assert "unpacked: model" in said
    assert "started" not in said  # the job of the first call goes on
    assert (home / "state" / "job.pid").read_text() == pid
    assert "a stage ended\njob: done" in said
    seen = (home / "results" / "seen.txt").read_text().split()
    assert seen == ["gpu", "run", str(home / "repo"), str(home / "data"), "abc123", "1", "cpu_bf16"]
    bring_back.unpack([out / start.ARCHIVE], tmp_path / "back")
    assert (tmp_path / "back" / "results" / "record.txt").read_text() == "m" * 90_000


def test_a_job_that_dies_says_why(tmp_path: Path, pieces: list[Path]) -> None:
    home, out = tmp_path / "home", tmp_path / "out"
    call(pieces[0], home, out, "hardware=cpu_bf16")
    kill_job(home)
    code = home / "repo" / "bench" / "__main__.py"
    code.write_text("raise SystemExit('no such library')\n")
    command = [sys.executable, str(pieces[1] / "start.py"), f"out={out}", "wait=5"]
    done = subprocess.run(command, env=os.environ | {start.HOME: str(home)}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "job: not running" in done.stdout and "no such library" in done.stderr


def test_what_a_machine_lacks_is_named() -> None:
    assert start.lacking(["json", "no_such_library"]) == ["no_such_library"]
    assert start.lacking() == [], "all that does not travel is a dependency of the project"


def test_a_job_that_was_killed_is_started_again(tmp_path: Path, pieces: list[Path]) -> None:
    home, out = tmp_path / "home", tmp_path / "out"
    call(pieces[0], home, out, "hardware=cpu_bf16")
    kill_job(home)
    said = call(pieces[1], home, out, "wait=40", "hardware=cuda_bf16")
    assert "started" in said
    assert (home / "results" / "seen.txt").read_text().endswith("cuda_bf16")
    assert "started" not in call(pieces[1], home, out)  # it is done


def test_a_damaged_piece_is_one_message(tmp_path: Path, pieces: list[Path]) -> None:
    with (pieces[0] / "code.00").open("r+b") as file:
        file.write(b"?")
    command = [sys.executable, str(pieces[0] / "start.py"), f"out={tmp_path / 'out'}"]
    environment = os.environ | {start.HOME: str(tmp_path / "home")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.strip().endswith("Carry the piece again.")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("most", [10_000, 1 << 20])
def test_an_archive_is_cut_below_a_size_and_joined_again(tmp_path: Path, most: int) -> None:
    home, out = tmp_path / "home", tmp_path / "out"
    record = home / "results" / "run" / "samples.jsonl"
    record.parent.mkdir(parents=True)
    record.write_bytes(os.urandom(95_000))
    (home / "cache").mkdir()
    (home / "cache" / "large").write_text("stays")
    start.archive(home, out, most)
    record.write_bytes(os.urandom(55_000))
    (home / "results" / "run" / "more").write_text("1")
    files = start.archive(home, out, most)  # in place of the first one
    assert sorted(out.iterdir()) == sorted(files)
    assert all(file.stat().st_size <= most for file in files)
    assert (len(files) > 1) == (most < 55_000)
    bring_back.unpack(files[::-1], tmp_path / "back")
    assert (tmp_path / "back" / "results" / "run" / "samples.jsonl").read_bytes() == record.read_bytes()
    assert (tmp_path / "back" / "results" / "run" / "more").read_text() == "1"
    assert not (tmp_path / "back" / "cache").exists()
    if len(files) > 1:
        with pytest.raises(UserError, match="damaged or incomplete"):
            bring_back.unpack(files[:-1], tmp_path / "other")


def test_a_folder_belongs_to_one_pack(tmp_path: Path, pieces: list[Path]) -> None:
    home = tmp_path / "home"
    start.receive(pieces[0], home)
    content = json.loads((pieces[1] / start.PIECES).read_text())
    (pieces[1] / start.PIECES).write_text(json.dumps(content | {"commit": "another"}))
    with pytest.raises(start.Damaged, match="another pack"):
        start.receive(pieces[1], home)
