"""A run from its configuration to its folder, on a small random model: stages, resume, report, failures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.analysis import audit, metrics
from bench.config import compose
from bench.config.schema import PathsConfig, RunConfig
from bench.contract import checks
from bench.errors import UserError
from bench.measure import run as program
from bench.measure.run import run
from bench.models import loading
from bench.models.source import Loaded
from bench.records import run_folder
from bench.records.run_folder import read_manifest, read_samples, validate
from methods.engine.causal_lm import CausalLM
from methods.engine.cuda_graphs import GraphedLM
from methods.speculative.prompt_lookup import PromptLookup

PROMPTS = [
    {"question_id": i, "category": ("even", "odd")[i % 2], "turns": [f"Say {i} {i} {i} again.", "And once more?"]}
    for i in range(6)
]


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests keep the machine busy; noise is judged where a test says so."""
    for limit in ("LOAD", "JITTER", "PROCESSOR"):
        monkeypatch.setattr(audit, limit, (9.0, 9.0))
    monkeypatch.setattr(audit, "REPEAT_TOLERANCE", 9.0)
    monkeypatch.setattr(audit, "STALLED_SHARE", 9.0)


@pytest.fixture
def cfg(tmp_path: Path) -> RunConfig:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    words = ["model=random", "dataset=jsonl", f"dataset.path={file}", "dataset.limit=4", "hardware=cpu_fp32"]
    more = ["hardware.threads=1", "max_new_tokens=12", "measure.bootstrap_samples=100", "measure.warmup=1"]
    composed = compose.compose(["method=prompt_lookup", *words, *more])
    return replace(composed, paths=PathsConfig(results=str(tmp_path / "results"), cache=str(tmp_path / "cache")))


def test_a_run_leaves_a_sound_folder_and_a_true_summary(cfg: RunConfig, tmp_path: Path) -> None:
    outcome = run(cfg)
    manifest, samples = read_manifest(outcome.path) or {}, read_samples(outcome.path)
    assert validate(outcome.path) == []
    assert outcome.path.parent == tmp_path / "results" and outcome.path.name.startswith("prompt_lookup-jsonl-random-")
    assert {s.phase for s in samples} - {"stalled"} == {"warmup", "measure"}  # some, where the machine stalled
    assert manifest["n_pairs"] == manifest["n_done"] == 8
    assert manifest["cost_curve"]["nodes"][0] == 1 and manifest["seconds"]["timed"] > 0
    assert outcome.summary["agreement"]["exact"] == outcome.summary["agreement"]["identical_to_baseline"] == 1.0
    assert outcome.summary["speedup"]["total"]["value"] > 0 and outcome.summary["predicted_speedup"] > 0
    assert json.loads((outcome.path / "summary.json").read_text())["run_id"] == outcome.path.name
    warmed = {s.prompt_id for s in samples if s.phase == "warmup"}
    assert warmed.isdisjoint({s.prompt_id for s in samples if s.phase == "measure"})


@pytest.mark.parametrize(
    ("method", "batch"), [("prompt_lookup", 3), ("token_recycling", 1), ("speculative_sampling", 3)]
)
def test_with_graphs_nothing_is_captured_within_measured_time(
    cfg: RunConfig, monkeypatch: pytest.MonkeyPatch, method: str, batch: int
) -> None:
    """The form of passes that a GPU captures, run kernel by kernel; the last batch is a smaller one."""
    monkeypatch.setattr(loading, "_graphed", lambda lm, _: GraphedLM.of(lm, capture=False))
    more = {"skip_attention": [1], "skip_mlp": [0]} if method == "speculative_sampling" else {}
    outcome = run(replace(cfg, method=compose.compose([f"method={method}"]).method | more, batch_size=batch))
    manifest = read_manifest(outcome.path) or {}
    assert manifest["graphs"]["before"]["captured"] > 0
    assert manifest["graphs"]["in_all"] == manifest["graphs"]["before"], "captured and missed"
    assert outcome.summary["agreement"]["identical_to_baseline"] == 1.0


def test_no_file_of_a_run_names_a_path_of_this_machine(cfg: RunConfig, tmp_path: Path) -> None:
    outcome = run(cfg)
    for file in outcome.path.iterdir():
        assert str(tmp_path) not in file.read_text() and str(Path.home()) + "/" not in file.read_text(), file.name


def test_a_finished_run_is_reported_and_not_measured_again(
    cfg: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = run(cfg)
    monkeypatch.setattr(program, "_measure", lambda *_: pytest.fail("measured again"))
    again = run(cfg)
    assert again.summary == first.summary and again.verdict == first.verdict
    assert "Use --fresh to repeat" in capsys.readouterr().err


def test_a_method_that_doubts_its_part_warns_early_and_in_the_verdict(
    cfg: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[list[list[float]]] = []

    def warning(self: PromptLookup, rates: list[list[float]]) -> str:
        told.append(rates)
        return "This head is of another model."

    monkeypatch.setattr(PromptLookup, "acceptance_warning", warning)
    monkeypatch.setattr(PromptLookup, "min_warmup", 3)
    outcome = run(cfg)
    warmed = [s for s in read_samples(outcome.path) if s.phase == "warmup" and s.arm == "method"]
    assert len(warmed) >= 3 and told == [[metrics.kept_at(sample) for sample in warmed]]
    assert "This head is of another model." in outcome.verdict.warnings
    assert "warning: This head is of another model." in capsys.readouterr().err


def test_facts_that_a_method_tells_are_recorded(cfg: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PromptLookup, "stats", lambda self: {"exits": {"3": 7}})
    assert (read_manifest(run(cfg).path) or {})["method_facts"] == {"exits": {"3": 7}}


def test_fresh_replaces_a_record_only_when_the_new_one_is_complete(
    cfg: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run(cfg).path
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    check = program.agreement.check_run

    def broken(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(program.agreement, "check_run", broken)
    with pytest.raises(KeyboardInterrupt):
        run(cfg, fresh=True)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    assert run_folder.folders(path.parent) == [path], "a repetition that was cut is no record"
    beside = path.with_name(path.name + run_folder.REPEATED)
    cut = read_samples(beside)
    monkeypatch.setattr(program.agreement, "check_run", check)
    again = run(cfg, fresh=True)
    assert again.path == path and read_samples(path) == cut, "the same command resumes it"
    assert validate(path) == [] and list(path.parent.iterdir()) == [path]


def test_a_swap_that_was_killed_in_its_middle_is_undone(cfg: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    path = run(cfg).path
    path.rename(path.with_name(path.name + run_folder.REPLACED))
    monkeypatch.setattr(program, "_measure", lambda *_: pytest.fail("measured again"))
    assert run(cfg).path == path and path.is_dir()


def test_what_noise_made_invalid_is_measured_again(
    cfg: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(audit, "JITTER", (-2.0, -1.0))
    first = run(cfg)
    assert not first.verdict.valid and first.verdict.noisy
    monkeypatch.setattr(audit, "JITTER", (9.0, 9.0))
    second = run(cfg)
    assert "Measuring again" in capsys.readouterr().err
    assert second.verdict.valid and not second.verdict.noisy and second.path == first.path


def test_the_reference_record_is_shown_beside_and_never_written(
    cfg: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reference = tmp_path / "reference"
    known = run(replace(cfg, paths=replace(cfg.paths, results=str(reference)))).path
    manifest = read_manifest(known) or {}
    other = {"cpu": "A CPU of another make"}
    (known / "manifest.json").write_text(json.dumps(manifest | {"hardware": manifest["hardware"] | other}))
    summary = json.loads((known / "summary.json").read_text())
    (known / "summary.json").write_text(json.dumps(summary | {"hardware": other["cpu"]}))
    before = {file.name: file.read_bytes() for file in known.iterdir()}
    capsys.readouterr()
    outcome = run(replace(cfg, paths=replace(cfg.paths, reference=str(reference))))
    text = capsys.readouterr().out
    assert outcome.path.parent == tmp_path / "results" and "reference " in text and other["cpu"] in text
    assert {file.name: file.read_bytes() for file in known.iterdir()} == before


def test_a_failure_is_noted_and_the_same_command_goes_on(cfg: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("in the middle")

    with monkeypatch.context() as patch:
        patch.setattr(program.agreement, "check_run", broken)
        with pytest.raises(ZeroDivisionError):
            run(cfg)
    (path,) = Path(cfg.paths.results).iterdir()
    manifest = read_manifest(path) or {}
    assert manifest["status"] == "failed" and "ZeroDivisionError: in the middle" in manifest["error"]
    kept = read_samples(path)
    outcome = run(cfg)
    assert outcome.path == path and read_samples(path) == kept, "what was measured is not measured again"
    assert (read_manifest(path) or {})["status"] == "finished"


def test_a_prompt_that_does_not_fit_leaves_no_folder(cfg: RunConfig) -> None:
    with pytest.raises(UserError, match=r"Prompt \S+/2 has up to"):
        run(replace(cfg, max_context=64))
    assert not Path(cfg.paths.results).exists()


def test_sampling_runs_are_judged_by_log_probability(cfg: RunConfig) -> None:
    outcome = run(replace(cfg, sampling=replace(cfg.sampling, temperature=1.0), batch_size=3))
    found = outcome.summary["agreement"]
    assert found["exact"] is None and found["mean_logprob"] < 0
    assert run_folder.validate(outcome.path) == []


@pytest.mark.parametrize(
    "methods, left",
    [
        ([["method=prompt_lookup"]], False),
        ([["method=static_depth", "method.depth=2"]], True),
        ([["method=self_speculative", "method.layer_exit=2"]], True),
        ([["method=self_speculative", "method.skip_attention=[1]"]], False),
        ([["method=prompt_lookup"], ["method=static_depth", "method.depth=2"]], True),
    ],
)
def test_both_arms_go_without_graphs_if_the_method_runs_layers_in_portions(methods, left):
    graphed = GraphedLM.of(checks.tiny_target(), capture=False)
    loaded = Loaded(graphed, None, "tiny", None, None)
    cfgs = [compose.compose([*words, "model=random", "dataset=demo"]) for words in methods]
    found = program._alike_in_both_arms(cfgs, loaded)
    assert found.graphs_left is left and (found.lm is graphed) is not left
    if left:
        assert type(found.lm) is CausalLM and not hasattr(found.lm, "graphs")
        prompt = torch.tensor([3, 5, 7])
        assert torch.equal(found.lm.score(prompt), checks.tiny_target().score(prompt))
