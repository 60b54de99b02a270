"""publish= stores a checkpoint in fewer bits: it still decodes, and its card has the quality before and after."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.models import artifacts
from bench.train import command
from bench.utils.files import digest
from methods.engine.checkpoint_files import is_packed
from tests.helpers.tiny_translation import MACHINE, make_model, write_data


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DECODEBENCH_DATA", str(write_data(tmp_path / "data")))
    monkeypatch.setattr(artifacts, "project_data", lambda: tmp_path / "shipped")
    return tmp_path / "cache"


def test_a_model_and_a_student_are_stored_in_fewer_bits(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_model([1, 1], cache)
    folder = cache / "trained" / "teacher-multi30k_1_1"
    before = artifacts.read_card(folder) or {}
    make_model([1, 1], cache, "publish=int8")  # made already: only stored anew
    card = artifacts.read_card(folder) or {}
    stored = card["stored"]
    assert is_packed(folder / "model.safetensors") and stored["form"] == "int8" and stored["sha256"] == before["sha256"]
    assert card["sha256"] == digest(artifacts.files(folder)) != before["sha256"]
    assert card["bytes"]["model.safetensors"] < 0.8 * before["bytes"]["model.safetensors"]
    assert stored["before"]["prompts"] == stored["after"]["prompts"] == 4 and stored["before"]["bleu"] > 0
    assert stored["after"]["same_texts"] >= 0.5 and card["facts"] == before["facts"]

    words = ["method=cmlm", "model=hf", f"model.name={folder}", "corpus=multi30k", *MACHINE, f"paths.cache={cache}"]
    words += ["train.recipe.steps=2", "train.recipe.evaluations=1", "train.recipe.average=1", f"out={cache / 'cmlm'}"]
    assert command.main([*words, "publish=int4"]) == 0
    student = artifacts.read_card(cache / "cmlm") or {}
    assert is_packed(cache / "cmlm" / "head.safetensors") and student["stored"]["after"]["tokens_per_step"] > 0
    assert "is stored as int4" in capsys.readouterr().err
    assert command.main([*words, "publish=int4"]) == 2
    assert "force=true" in capsys.readouterr().err
    assert command.main([*words, "publish=int3"]) == 2
    assert "int8" in capsys.readouterr().err


def test_heads_are_judged_by_mt_bench(cache: Path, tmp_path: Path) -> None:
    for folder in ("dolly", "mt_bench"):
        (tmp_path / "data" / folder).mkdir()
    rows = [{"instruction": f"Count to {n}.", "input": "", "output": "One, two."} for n in range(12)]
    (tmp_path / "data" / "dolly" / "dolly_3k.json").write_text(json.dumps(rows))
    asked = [{"question_id": n, "category": "maths", "turns": ["What is a prime?", "And two?"]} for n in range(20)]
    (tmp_path / "data" / "mt_bench" / "question.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in asked))
    words = ["method=blockwise", "model=random", "corpus=dolly", *MACHINE, f"paths.cache={cache}"]
    words += [f"paths.data={tmp_path / 'data'}", "train.k=2", "train.answers.tokens=200"]
    words += ["train.answers.limit=16", "train.recipe.steps=2", "train.recipe.evaluations=1"]
    assert command.main([*words, "publish=int8"]) == 0
    stored = (artifacts.read_card(cache / "trained" / "blockwise-random") or {})["stored"]
    for found in (stored["before"], stored["after"]):
        assert found["prompts"] == 16 and found["tokens_per_step"] >= 1 and found["agreement"] == 1.0
    assert stored["after"]["same_texts"] == 1.0
