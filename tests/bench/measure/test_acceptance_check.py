"""A checkpoint that was loaded wrongly is noticed by its acceptance; the right one on other prompts is not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from bench import cli, doctor
from bench.config import compose
from bench.config.schema import PathsConfig
from bench.measure import acceptance_check as check
from bench.models import artifacts
from bench.models.artifacts import Prepared
from bench.models.source import Loaded
from bench.records.run_folder import Sample
from bench.train import publish
from methods.autoregressive import Autoregressive
from methods.engine.checkpoint_files import load_tensors
from tests.helpers.sample_rows import row

SHIPPED = Path(__file__).parents[3] / "data" / "checkpoints"
HEADS = SHIPPED / "blockwise_translation-multi30k_4_4"
STUDENT = SHIPPED / "nat-multi30k_4_4"
FIRST = f"{(artifacts.read_card(HEADS) or {})['acceptance_check']['acceptance_at'][0]:.2f}"
Tensors = dict[str, Tensor]


def shuffled(tensors: Tensors) -> Tensors:
    order = torch.Generator().manual_seed(0)
    return {
        name: weight.flatten()[torch.randperm(weight.numel(), generator=order)].view_as(weight)
        if weight.is_floating_point() and weight.dim() > 1
        else weight
        for name, weight in tensors.items()
    }


def permuted(tensors: Tensors) -> Tensors:
    """Every head drafts for the position of the next one."""
    return tensors | {"second.weight": tensors["second.weight"].roll(128, 0)}


def altered(folder: Path, place: Path, change: Callable[[Tensors], Tensors]) -> Path:
    """A copy with other weights."""
    copied = Path(shutil.copytree(folder, place / folder.name))
    file = copied / "head.safetensors"
    save_file({name: weight.contiguous() for name, weight in change(load_tensors(file)).items()}, file)
    return copied


@pytest.fixture(scope="module")
def loaded(cache_root: Path) -> Loaded:
    return check.load(HEADS, card_of(HEADS), PathsConfig(cache=str(cache_root)))


def card_of(folder: Path) -> dict[str, Any]:
    return artifacts.read_card(folder) or {}


def wrong(folder: Path, loaded: Loaded, *, same_prompts: bool = True) -> str | None:
    card = card_of(folder)
    entry = card[check.ENTRY]
    seen = check.measure(folder, card, loaded, entry).seen
    return check.problem(folder.name, entry, seen, same_prompts=same_prompts)


@pytest.mark.parametrize(("folder", "change"), [(HEADS, permuted), (HEADS, shuffled), (STUDENT, shuffled)])
def test_other_weights_are_noticed(
    folder: Path, change: Callable[[Tensors], Tensors], loaded: Loaded, tmp_path: Path
) -> None:
    broken = altered(folder, tmp_path, change)
    assert wrong(folder, loaded) is None
    for same_prompts in (True, False):
        warning = wrong(broken, loaded, same_prompts=same_prompts) or ""
        assert warning.startswith(folder.name) and "wrong target revision, chat template, tokenizer" in warning
        assert (f"at position 1, its card says {FIRST}" in warning) == (folder == HEADS)
        assert ("python -m bench doctor checkpoints=true" in warning) == (not same_prompts)


@pytest.mark.parametrize("folder", [HEADS, STUDENT])
def test_a_right_checkpoint_is_believed_on_other_prompts(
    folder: Path, loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = (
        "A girl in a pink dress is eating ice cream.",
        "Several people are waiting for a train at the station.",
        "A dog with a red collar jumps over a fence.",
    )
    monkeypatch.setattr(check, "SENTENCES", {"en": others})
    assert wrong(folder, loaded, same_prompts=False) is None


# ---------------------------------------------------------------------------------------------------------- counters


def entry(**changes: Any) -> dict[str, Any]:
    facts = {"prompts": ["a", "b"], "max_new_tokens": 48, "dtype": "float32", "settings": {"name": "m", "nodes": 7}}
    seen = check.Seen(1.6, [0.6, 0.2], [200, 200], 1.0, 1.0, 240)
    return facts | replace(seen, **changes).__dict__


def seen(share: float, n: int) -> check.Seen:
    return check.Seen(1.0, [share, 0.2], [n, n], 1.0, 1.0, 0)


@pytest.mark.parametrize(
    ("share", "n", "same_prompts", "noticed"),
    [
        (0.55, 200, True, False),
        (0.45, 200, True, True),
        (0.31, 200, False, False),  # half of what the card has is a matter of prompts
        (0.20, 200, False, True),
        (0.20, 10, False, False),  # too few tokens to tell
        (0.90, 200, True, False),
    ],
)
def test_what_is_too_little(share: float, n: int, same_prompts: bool, noticed: bool) -> None:
    found = check.problem("part", entry(), seen(share, n), same_prompts=same_prompts)
    assert (found is not None) == noticed
    if found:
        assert found.startswith(f"part accepts {share:.2f} at position 1, its card says 0.60 on ")


def test_every_position_is_compared_on_the_same_prompts() -> None:
    swapped = check.Seen(1.6, [0.6, 0.05], [200, 200], 1.0, 1.0, 240)
    assert "at position 2" in (check.problem("part", entry(), swapped, same_prompts=True) or "")
    assert check.problem("part", entry(), swapped, same_prompts=False) is None


def test_exits_that_never_or_always_fire_are_noticed() -> None:
    card = entry(acceptance_at=[], judged=[], similarity=0.4, layers_per_token=0.7)
    full = check.Seen(1.0, [], [], 1.0, 1.0, 240)
    assert "likeness of 1.00" in (check.problem("exits", card, full, same_prompts=True) or "")
    early = replace(full, similarity=0.4, layers_per_token=0.5)
    assert "runs 0.50 of the layers" in (check.problem("exits", card, early, same_prompts=True) or "")
    assert check.problem("exits", card, full, same_prompts=False) is None, "other prompts may be surer"


def warm(accepted: int, steps: int = 120) -> list[Sample]:
    kept = [1 if step < accepted else 0 for step in range(steps)]
    counters = {"ms": [1.0] * (steps + 1), "tokens": [1, *(1 + one for one in kept)], "accepted": [0, *kept]}
    return [row("baseline"), row("method", depth=[0] + [1] * steps, **counters)]


@pytest.mark.parametrize(
    ("accepted", "changes", "noticed"),
    [(72, {}, False), (10, {}, True), (10, {"nodes": 3}, False), (10, {"temperature": 1.0}, False)],
)
def test_a_warm_up_is_compared_where_it_can_be(accepted: int, changes: dict[str, Any], noticed: bool) -> None:
    cfg = compose.compose(["method=autoregressive", "model=random", "dataset=demo"])
    cfg = replace(cfg, method={"name": "other", "nodes": changes.get("nodes", 7)})
    cfg = replace(cfg, sampling=replace(cfg.sampling, temperature=changes.get("temperature", 0.0)))
    part = Prepared(Path("part"), "shipped", {check.ENTRY: entry()})
    method = object.__new__(Autoregressive)
    found = check.doubt(cfg, method, part, warm(accepted))
    assert (found is not None) == noticed
    assert check.doubt(cfg, method, None, warm(accepted)) is None
    assert check.doubt(cfg, method, replace(part, card={}), warm(accepted)) is None


# ----------------------------------------------------------------------------------------------------------- commands


def test_doctor_names_what_was_loaded_wrongly(
    tmp_path: Path, cache_root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shipped = tmp_path / "checkpoints"
    shutil.copytree(SHIPPED / "teacher-multi30k_4_4", shipped / "teacher-multi30k_4_4")
    shutil.copytree(HEADS, shipped / HEADS.name)
    broken = altered(STUDENT, shipped, shuffled)
    unchecked = Path(shutil.copytree(SHIPPED / "ctc-multi30k_4_4", shipped / "ctc-multi30k_4_4"))
    card = card_of(unchecked)
    del card[check.ENTRY]
    (unchecked / artifacts.CARD).write_text(json.dumps(card))
    monkeypatch.setattr(doctor, "project_data", lambda: tmp_path)
    found = {f.what: f for f in doctor.examine_checkpoints(PathsConfig(cache=str(tmp_path / "cache")))}
    states = {name: finding.state for name, finding in found.items()}
    good = {"teacher-multi30k_4_4": "ok", HEADS.name: "ok"}
    assert states == good | {broken.name: "fail", unchecked.name: "warn"}
    assert f"acceptance {FIRST}" in found[HEADS.name].text and "bench train check" in found[unchecked.name].text
    monkeypatch.setattr(doctor, "examine", lambda cfg: [])
    monkeypatch.setattr(doctor, "examine_checkpoints", lambda paths: iter([found[broken.name]]))
    assert cli.main(["doctor", "checkpoints=true"]) == 1 and "its card says" in capsys.readouterr().out
    assert cli.main(["doctor"]) == 0


def test_the_entry_of_a_card_is_written_again_and_the_checkpoint_stays_the_same(
    tmp_path: Path, cache_root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(HEADS, tmp_path / HEADS.name))
    before, sha256 = card_of(folder), Prepared(folder, "trained").sha256
    (folder / artifacts.CARD).write_text(json.dumps({k: v for k, v in before.items() if k != check.ENTRY}))
    assert publish.main([str(folder)]) == 0
    assert f"acceptance {FIRST}" in capsys.readouterr().out
    again = card_of(folder)
    assert again.keys() == before.keys() and Prepared(folder, "trained").sha256 == sha256 == before["sha256"]
    assert again[check.ENTRY]["acceptance_at"] == pytest.approx(before[check.ENTRY]["acceptance_at"], abs=0.1)
    assert publish.main([str(tmp_path / "gone")]) == 2 and "folders with a card, got" in capsys.readouterr().err
