"""Every committed record and every shipped checkpoint is found again from the configuration of today."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.analysis import summary
from bench.config import compose, identity, instantiate, overrides
from bench.config.schema import RunConfig, checkout
from bench.errors import UserError
from bench.measure import preconditions
from bench.models import loading
from bench.records import lookup
from bench.records.lookup import Entry
from bench.sweep import history, plan
from bench.utils import redact

ROOT = checkout()
assert ROOT is not None
REFERENCE = ROOT / "results" / "reference"
RECORDS = list(lookup.entries(REFERENCE))
ON_CPU = [entry for entry in RECORDS if entry.manifest["hardware"]["device"] == "cpu"]
CARDS = sorted((ROOT / "data" / "checkpoints").glob("*/card.json"))


@cache
def todays() -> dict[Path, RunConfig]:
    lines = [[*overrides.words(entry.config), f"paths.results={REFERENCE}"] for entry in RECORDS]
    return dict(zip((entry.path for entry in RECORDS), compose.compose_each(lines), strict=True))


def today(entry_path: Path) -> RunConfig:
    return todays()[entry_path]


@pytest.mark.parametrize("entry", RECORDS, ids=lambda entry: entry.path.name)
def test_a_committed_record_is_found_from_todays_configuration(entry: Entry) -> None:
    cfg, decided = today(entry.path), lookup.resolved(entry.manifest)
    assert identity.fingerprint(cfg.to_dict(), decided) == entry.fingerprint
    assert identity.names(cfg.to_dict()) == identity.names(entry.config)


def test_a_run_gets_the_folder_that_has_its_record() -> None:
    for entry in (RECORDS[0], next(e for e in RECORDS if "6_1_distilled-" in e.path.name)):
        cfg, decided = today(entry.path), lookup.resolved(entry.manifest)
        assert lookup.find(entry.path.parent, cfg, decided) == entry.path
        assert lookup.find(entry.path.parent, replace(cfg, seed=99), decided) is None


@pytest.mark.parametrize("name", ["/home/alice/models/mymodel", "~/alice/mymodel", "../alice/mymodel", "alice/mymodel"])
def test_a_run_id_has_no_folder_of_the_machine(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "alice" / "mymodel").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    cfg = compose.compose(["model=hf", f"model.name='{name}'"])
    found = identity.run_id(cfg, {})
    assert found.startswith("prompt_lookup-demo-mymodel-") and "alice" not in found
    stored = {**cfg.to_dict(), "model": redact.tree(cfg.model)}
    assert identity.names(stored) == identity.names(cfg.to_dict())
    written = [json.dumps(redact.tree(cfg.to_dict() | {"paths": None})), *redact.argv([f"model.name={name}", name])]
    assert all("mymodel" in each and "alice" not in each for each in written)


@pytest.mark.parametrize("given", ["alice/mymodel", "{name:alice/mymodel,weights:int4}"])
def test_a_draft_model_leaves_no_folder_in_a_record(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "alice" / "mymodel").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    cfg = compose.compose(["method=speculative_sampling", f"method.draft_model={given}"])
    written = json.dumps(redact.tree(cfg.to_dict() | {"paths": None}))
    assert "mymodel" in written and "alice" not in written


def test_a_run_id_has_the_owner_of_a_model_of_the_hub() -> None:
    found = identity.run_id(compose.compose(["model=hf", "model.name=Qwen/Qwen3-0.6B"]), {})
    assert found.startswith("prompt_lookup-demo-Qwen_Qwen3_0.6B-")


def test_no_two_records_are_one_run() -> None:
    assert len(RECORDS) >= 100 and len({entry.fingerprint for entry in RECORDS}) == len(RECORDS)


@pytest.mark.parametrize(
    "change",
    [
        {"device": "NVIDIA H200"}, {"device": "Intel(R) Xeon(R)"}, {"threads": 3}, {"cores": 64}, {"dtype": "float16"},
        {"model_revision": "x"}, {"data_revision": "x"}, {"part": "x"}, {"calibration": "x"}, {"files": {"a": "x"}},
    ],
)  # fmt: skip
def test_another_machine_or_revision_is_another_run(change: dict[str, Any]) -> None:
    entry = ON_CPU[0]
    resolved = lookup.resolved(entry.manifest)
    assert change.keys() <= resolved.keys()
    assert identity.fingerprint(entry.config, resolved | change) != entry.fingerprint
    assert lookup.find(entry.path.parent, today(entry.path), resolved | change) is None


def test_what_is_not_measured_does_not_count() -> None:
    stored = RECORDS[0].config
    moved = json.loads(json.dumps(stored).replace("bench.", "bench.elsewhere."))
    moved |= {"tracker": {"name": "wandb"}, "paths": {"results": "elsewhere"}}
    moved["measure"] = moved["measure"] | {"name": "another label", "refill": False}
    assert identity.strip(moved) == identity.strip(stored)
    moved["measure"]["refill"] = True
    assert identity.strip(moved) != identity.strip(stored)


def test_other_weights_are_another_run_and_another_model() -> None:
    stored = next(record.config for record in RECORDS if record.config["model"].get("weights", "full") == "full")
    full, rounded = (stored | {"model": stored["model"] | {"weights": weights}} for weights in ("full", "int4"))
    assert identity.strip(full) == identity.strip(stored) != identity.strip(rounded)
    drafts = [
        {"method": stored["method"] | {"draft_model": {"name": "a"} | more}} for more in ({}, {"weights": "int4"})
    ]
    assert identity.strip(stored | drafts[0]) != identity.strip(stored | drafts[1])
    assert compose.compose(["model.weights=int4"]).model["weights"] == "int4"
    with pytest.raises(UserError, match="model.weights must be one of full, int4, fp8, got int8"):
        instantiate.check(compose.compose(["model.weights=int8"]))
    names = [summary.model_name({"name": "a"} | more) for more in ({}, {"weights": "full"}, {"weights": "int4"})]
    assert names == ["a", "a", "a, int4 weights"]


def test_a_class_of_another_package_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = RECORDS[0].config
    theirs = stored | {"method": stored["method"] | {"_target_": "somewhere.Else"}}
    assert identity.strip(theirs) != identity.strip(stored)


def test_moved_keys_and_names(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = RECORDS[0].config
    old = stored | {"method": {"name": "bild_6_1", "_target_": "old.path.Bild", "smallest": 3}}
    new = stored | {"method": {"name": "bild", "_target_": "old.path.Bild", "least": 3}}
    assert identity.strip(old) != identity.strip(new)
    monkeypatch.setitem(identity.MOVED_KEYS, "method.bild", {"smallest": "least"})
    assert identity.strip(old) == identity.strip(new)


def test_a_sweep_over_the_records_is_done_on_their_machine_only(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [e for e in ON_CPU if e.config["dataset"]["name"] == "mtbench" and "part" not in e.manifest]
    there = lookup.machine_of(entries[0].manifest["hardware"])
    best = [e.config["hardware"]["dtype"] != "auto" or e.manifest["dtype"] == "bfloat16" for e in entries]
    assert sum(best) >= 9 and not all(best), "there are records of a processor that computes faster in another type"
    jobs = [(overrides.words(e.config), today(e.path)) for e in entries]
    monkeypatch.setattr(compose, "compose_jobs", lambda _: jobs)
    monkeypatch.setattr(preconditions, "check", lambda *_: [])
    monkeypatch.setattr(loading, "_best_dtype", lambda _: torch.bfloat16)
    for changed, state in (({}, "done"), ({"device": "another CPU"}, "new"), ({"threads": 64}, "new")):
        machine = there | changed
        monkeypatch.setattr(history, "_machine", lambda _, found=machine: found)
        found = plan.make([], plan.Options()).jobs
        assert [job.state for job in found] == [state if is_best else "new" for is_best in best]


# --------------------------------------------------------------------------------------------------------------- cards


@pytest.mark.parametrize("file", CARDS, ids=lambda file: file.parent.name)
def test_a_shipped_card_is_accepted(file: Path) -> None:
    """By today's configuration with the settings that its command names."""
    card = json.loads(file.read_text())
    theirs = card["definition"]
    own = [word for word in shlex.split(card["command"]) if word.startswith("train.")]
    _, train = compose.compose_training(own, theirs["method"])
    ours = theirs | {"train": {"_target_": train["_target_"], **instantiate.arguments(train, compose.TRAIN)}}
    assert identity.definition_sha256(ours) == identity.definition_sha256(theirs)
    changed = ours | {"seed": 17}
    assert identity.definition_sha256(changed) != identity.definition_sha256(theirs)


def test_a_definition_with_a_path_is_that_of_its_own_card(tmp_path: Path) -> None:
    """A card has no paths of a machine, so without it no training with one is found again or resumed."""
    train = {"_target_": "methods.early_exit.specee_training.SpecEETraining", "heads": str(tmp_path / "medusa-smollm2")}
    definition = {"method": "specee", "train": train, "model": {"name": "smollm2"}, "seed": 0}
    card = redact.tree(definition)
    assert card != definition
    assert identity.definition_sha256(card) == identity.definition_sha256(definition)
    other = definition | {"train": train | {"heads": str(tmp_path / "other")}}
    assert identity.definition_sha256(other) != identity.definition_sha256(definition)
