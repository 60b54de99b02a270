"""Packing: pieces below the limit that join to the same files, and damage that is refused."""

from __future__ import annotations

import gzip
import json
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from bench.config import compose
from bench.config.schema import checkout
from bench.config.typecheck import did_you_mean
from bench.errors import UserError
from bench.gpu import pack, plan, start
from bench.gpu.command import RunOptions, values
from bench.models import embedded
from bench.tasks.sources import KNOWN, Sources

LIMIT = 200_000
CONTENTS = {
    "code": {"bench/a.py": b"print(1)\n", "conf/b.yaml": b"a: 1\n"},
    "wheels": {},
    "data": {"mt_bench/question.jsonl.gz": random.Random(1).randbytes(90_000)},
    "model": {"model.whl": random.Random(2).randbytes(400_000)},
    "heads": {"data/checkpoints/x/weights": random.Random(3).randbytes(50_000), "data/checkpoints/x/empty": b""},
}


def packed(folder: Path, limit: int = LIMIT) -> list[pack.Piece]:
    items = []
    for name, files in CONTENTS.items():
        members = {}
        for path, content in files.items():
            place = folder / "sources" / name / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)
            members[path] = place
        (folder / "items").mkdir(exist_ok=True)
        items.append(pack.tarred(name, members, folder / "items", compress=name == "code"))
    return pack.write_pieces(items, folder / "pieces", limit, "abc123")


def files_below(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("order", [1, -1])
def test_pieces_are_below_the_limit_and_join_to_what_was_packed(tmp_path: Path, order: int) -> None:
    pieces = packed(tmp_path)
    assert len(pieces) > 3
    assert all(piece.bytes <= LIMIT for piece in pieces)
    assert [piece.bytes for piece in pieces] == [sum(map(len, files_below(p.folder).values())) for p in pieces]
    home = tmp_path / "home"
    unpacked = [name for piece in pieces[::order] for name in start.receive(piece.folder, home)]
    assert sorted(unpacked) == sorted(CONTENTS)
    for name, place in {"code": "repo", "data": "data", "model": "model", "heads": "repo"}.items():
        found = files_below(home / place)
        assert {path: found[path] for path in CONTENTS[name]} == CONTENTS[name]
    assert not list((home / "incoming").iterdir())
    assert start.receive(pieces[0].folder, home) == []  # the same piece again does no harm


def test_an_item_is_there_only_with_its_last_piece(tmp_path: Path) -> None:
    pieces, home = packed(tmp_path), tmp_path / "home"
    with_model = [json.loads((piece.folder / start.PIECES).read_text()) for piece in pieces][0]["items"][3]
    letters = [slice_["piece"] for slice_ in with_model["slices"]]
    assert len(letters) > 2
    for piece in pieces:
        start.receive(piece.folder, home)
        assert (home / "state" / "have" / "model").is_file() == (piece.folder.name >= letters[-1])


def test_a_damaged_slice_is_refused_and_the_right_one_taken_later(tmp_path: Path) -> None:
    pieces, home = packed(tmp_path), tmp_path / "home"
    damaged = pieces[1].folder / "model.01"
    good = damaged.read_bytes()
    damaged.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    start.receive(pieces[0].folder, home)
    with pytest.raises(start.Damaged, match="model.01 is damaged"):
        start.receive(pieces[1].folder, home)
    damaged.write_bytes(good)
    for piece in pieces[1:]:
        start.receive(piece.folder, home)
    assert (home / "model" / "model.whl").read_bytes() == CONTENTS["model"]["model.whl"]


def test_slices_that_join_to_something_else_are_refused(tmp_path: Path) -> None:
    pieces, home = packed(tmp_path), tmp_path / "home"
    for piece in pieces:
        content = json.loads((piece.folder / start.PIECES).read_text())
        content["items"][3]["sha256"] = "0" * 64
        (piece.folder / start.PIECES).write_text(json.dumps(content))
    with pytest.raises(start.Damaged, match="item model is damaged"):
        for piece in pieces:
            start.receive(piece.folder, home)
    assert not (home / "state" / "have" / "model").exists()
    assert not (home / "model").exists()


def test_pieces_of_another_pack_are_refused(tmp_path: Path) -> None:
    home = tmp_path / "home"
    start.receive(packed(tmp_path)[0].folder, home)
    other = packed(tmp_path / "other" if (tmp_path / "other").mkdir() is None else tmp_path, LIMIT // 2)
    with pytest.raises(start.Damaged, match="another pack"):
        start.receive(other[1].folder, home)


@pytest.mark.parametrize(("limit", "words"), [(60_000, "leave room"), (66_000, "more than 26 pieces")])
def test_a_limit_that_is_too_small_is_refused(tmp_path: Path, limit: int, words: str) -> None:
    with pytest.raises(UserError, match=words):
        packed(tmp_path, limit)


def test_the_same_content_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        packed(tmp_path / name)
    assert files_below(tmp_path / "one" / "items") == files_below(tmp_path / "two" / "items")


def test_start_needs_nothing_but_the_standard_library(tmp_path: Path) -> None:
    folder = packed(tmp_path)[0].folder
    done = subprocess.run(
        ["python3", "-I", "-S", str(folder / "start.py"), f"out={tmp_path / 'out'}"],
        env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", start.HOME: str(tmp_path / "home")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "unpacked: code, wheels" in done.stdout


def test_code_is_what_git_knows_or_would(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    for name in ("bench/a.py", "bench/ignored.log", "docs/b.md", "bench/new.py", "bench/deleted.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / ".gitignore").write_text("*.log\n")
    subprocess.run(["git", "-C", str(tmp_path), "add", "bench/a.py", "bench/deleted.py"], check=True)
    (tmp_path / "bench/deleted.py").unlink()
    assert pack.tracked(tmp_path, ["bench"]) == ["bench/a.py", "bench/new.py"]
    shutil.rmtree(tmp_path / ".git")
    with pytest.raises(UserError, match="must be a git checkout"):
        pack.tracked(tmp_path, ["bench"])


def test_data_sets_travel_gzipped_with_the_same_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known, folder = KNOWN["nq_open"], tmp_path / "given"
    rows = b'{"question": "who", "answer": ["me"]}\n' * 50
    (folder / known.file).parent.mkdir(parents=True)
    (folder / known.file).write_bytes(rows)
    monkeypatch.setenv("DECODEBENCH_DATA", str(folder))
    found = pack.data_sets(["nq_open"], tmp_path / "scratch")
    assert list(found) == [f"{known.file}.gz"]
    assert gzip.decompress(found[f"{known.file}.gz"].read_bytes()) == rows
    before, after = (
        Sources(data, tmp_path / "cache", fetch=False).get("nq_open") for data in (folder, tmp_path / "scratch")
    )
    assert after.revision.sha256 == before.revision.sha256
    assert after.rows == before.rows


def test_another_wheel_than_the_model_s_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "model.whl"
    wheel.write_bytes(b"something else")
    with pytest.raises(UserError, match=embedded.SMOLLM2.requirement):
        pack.model_wheel(wheel, tmp_path)


def test_versions_of_wheels_come_from_the_constraints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []

    def pip(*words: str) -> None:
        asked.append(words)
        for word in words:
            if "==" in word:
                name, version = word.split("==")
                (tmp_path / f"{name.replace('-', '_')}-{version}-py3-none-any.whl").write_bytes(b"")

    monkeypatch.setattr(pack, "_pip", pip)
    contents = plan.read(values(RunOptions())).contents
    (tmp_path / "hydra_core-0.0.1-py3-none-any.whl").write_bytes(b"")
    pack.wheels(contents, tmp_path, "3.12")
    assert [words[0] for words in asked] == ["download", "wheel"]
    assert {word.partition("==")[0] for words in asked for word in words if "==" in word} == set(contents.wheels)
    assert {word.partition("==")[0] for word in asked[1] if "==" in word} == set(contents.built)
    assert len(list(tmp_path.glob("hydra_core-*.whl"))) == 1  # the old one is gone
    pack.wheels(contents, tmp_path, "3.12")
    assert len(asked) == 2  # nothing is fetched twice


# ------------------------------------------------------------------------------------------------ the committed plan


PLAN = plan.read(values(RunOptions()))


def test_what_the_plan_packs_exists() -> None:
    root = checkout()
    assert root is not None
    assert all((root / name).exists() for name in PLAN.contents.code)
    assert set(PLAN.contents.built) <= set(PLAN.contents.wheels)
    assert set(PLAN.contents.data) <= set(KNOWN)
    for patterns in PLAN.contents.checkpoints.values():
        assert pack.checkpoints(patterns)


def test_stages_need_only_what_is_packed() -> None:
    items = {"code", "wheels", "data", "model", *PLAN.contents.checkpoints}
    assert all(set(stage.needs) <= items for stage in PLAN.stages)
    assert len({stage.name for stage in PLAN.stages}) == len(PLAN.stages)
    assert [stage.name for stage in PLAN.stages[:3]] == ["probe", "model", "smoke"]
    assert not any(stage.group == "train" for stage in PLAN.chosen(None))
    assert [stage.name for stage in PLAN.chosen(["cost", "probe"])] == ["probe", "cost"]


def test_an_unknown_stage_is_refused() -> None:
    with pytest.raises(UserError, match="Did you mean 'smoke'"):
        PLAN.chosen(["smoek"])
    assert did_you_mean("smoek", ["smoke"])


@pytest.mark.parametrize("stage", PLAN.stages, ids=lambda stage: stage.name)
def test_the_commands_of_a_stage_can_be_read(stage: plan.Stage) -> None:
    root = checkout()
    assert root is not None
    for program, *words in stage.commands:
        if program == "pytest":
            assert all((root / word).is_file() for word in words if word.startswith("tests/"))
        elif words[0] == "train":
            settings = [word for word in words[1:] if word.partition("=")[0] not in ("out", "force", "corpus")]
            name = next(word for word in words if word.startswith("method=")).partition("=")[2]
            compose.compose_training([word for word in settings if not word.startswith("method=")], name)
        elif words[0] == "cost":
            from bench.cost import command

            _, others, _ = command.split(words[1:])
            compose.compose(others)
        elif words[0] == "lossless":
            from bench.lossless import command as lossless

            compose.compose(lossless.split(words[1:])[2])
        elif words[0] not in ("gpu", "fetch"):
            arms = next((word for word in words if word.startswith("arms=")), "arms=[autoregressive]")
            named = arms.removeprefix("arms=[").removesuffix("]").split(",")
            rest = [word for word in words if not word.startswith("arms=")]
            compose.compose_each([[f"method={method}", *rest] for method in named] if arms in words else [rest])
