"""Memory planned before a run: caches as they are made, refusals that name what fits, and the plan in the record."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.config import compose
from bench.config.schema import PathsConfig, RunConfig
from bench.contract import checks
from bench.errors import UserError
from bench.measure import instruments, memory_plan
from bench.measure.memory_plan import Plan
from bench.measure.run import prepare, run
from bench.models import loading
from bench.records.run_folder import read_manifest, validate
from bench.utils import memory
from methods.autoregressive import Autoregressive
from methods.engine.causal_lm import CausalLM
from methods.engine.sampling import Sampling
from methods.speculative.prompt_lookup import PromptLookup
from methods.speculative.speculative_sampling import SpeculativeSampling

MIB = 1 << 20


@pytest.fixture
def cfg(tmp_path: Path) -> RunConfig:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{i} " * 300}) + "\n" for i in range(8)))
    large = ["model=random", "model.hidden_size=512", "model.heads=8", "model.layers=6", "model.vocab_size=16000"]
    words = [*large, "dataset=jsonl", f"dataset.path={file}", "hardware=cpu_fp32", "hardware.threads=1", "batch_size=8"]
    quick = ["measure.warmup=0", "measure.cost_curve=false", "measure.agreement=false", "measure.bootstrap_samples=100"]
    composed = compose.compose(["method=prompt_lookup", "method.costs=null", *words, *quick, "max_new_tokens=3"])
    return replace(composed, paths=PathsConfig(results=str(tmp_path / "results"), cache=str(tmp_path / "cache")))


@pytest.mark.parametrize("name", ["autoregressive", "prompt_lookup", "speculative_sampling"])
def test_planned_caches_are_those_that_are_made(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = checks.tiny_target(), checks.tiny_target(layers=1, seed=5)
    decoder = {
        "autoregressive": lambda: Autoregressive(target, Sampling()),
        "prompt_lookup": lambda: PromptLookup(target, Sampling()),
        "speculative_sampling": lambda: SpeculativeSampling(target, Sampling(), draft_model=draft),
    }[name]()
    made: dict[int, int] = {}
    plain = CausalLM._make_cache

    def noted(lm: CausalLM, batch: int, capacity: int) -> Any:
        cache = plain(lm, batch, capacity)
        made[lm.n_layers] = cache.nbytes
        return cache

    monkeypatch.setattr(CausalLM, "_make_cache", noted)
    prompts = [torch.arange(4, 4 + length) for length in (20, 11)]
    next(iter(decoder.decode(prompts, 7, torch.Generator())))
    found = decoder.planned_caches(2, 20, 7)
    assert found["cache"] == made[target.n_layers]
    assert found.get("draft_cache", 0) == (made[draft.n_layers] if name == "speculative_sampling" else 0)


def test_a_run_that_cannot_fit_is_refused_before_its_model_is_loaded(
    cfg: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 180 * MIB)
    monkeypatch.setattr(loading, "load", lambda *_, **__: pytest.fail("loaded"))
    many = replace(cfg, max_new_tokens=4000, model=cfg.model | {"max_positions": 8192})
    with pytest.raises(UserError) as refused:
        run(many)
    said = str(refused.value)
    assert re.match(
        r"A batch of 8 rows of up to 4,\d{3} tokens needs [\d.]+ MiB, and 180\.0 MiB are free in memory", said
    )
    assert re.search(r"Memory planned: weights \d+\.\d MiB, cache \d+\.\d MiB, work", said)
    assert re.search(r"What fits: batch_size=\d", said), said


def test_what_the_message_names_fits_and_one_more_does_not() -> None:
    def total(found: Plan) -> int:
        return found.total

    def planned(rows: int, longest: int) -> Plan:
        return Plan(1000, 0, 10 * rows * (longest + 5), 0, rows)

    free = 1000 + 10 * 3 * 25 + 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "free_bytes", lambda device: free)
        with pytest.raises(UserError, match=r"What fits: batch_size=3 or max_context=9\.$"):
            memory_plan._require(planned, 8, 20, 5, torch.device("cpu"), total)
        memory_plan._require(planned, 3, 20, 5, torch.device("cpu"), total)
        memory_plan._require(planned, 8, 4, 5, torch.device("cpu"), total)
        with pytest.raises(UserError, match="or choose a smaller model"):
            memory_plan._require(lambda rows, longest: Plan(free + 1, 0, 0, 0, 0), 8, 20, 5, torch.device("cpu"), total)


def test_with_the_model_loaded_only_what_is_to_come_must_fit(cfg: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_plan, "require_before", lambda *_: None)
    monkeypatch.setattr(loading, "_require_memory", lambda *_: None)
    monkeypatch.setattr(memory, "free_bytes", lambda device: 160 * MIB)
    prepare(cfg)
    monkeypatch.setattr(memory, "free_bytes", lambda device: 50 * MIB)
    with pytest.raises(UserError, match=r"needs [\d.]+ MiB beside what is loaded, and 50\.0 MiB are free"):
        prepare(cfg)


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists() or instruments.settled_bytes() is None, reason="Linux only"
)
def test_the_plan_is_in_the_record_beside_what_was_measured(cfg: RunConfig) -> None:
    run(cfg)  # what the first run of a process imports is no memory of a model
    outcome = run(replace(cfg, seed=1))
    found = (read_manifest(outcome.path) or {})["memory_plan"]
    measured = found.pop("measured")
    assert found.pop("total") == sum(found.values())
    assert (
        found["weights"] == outcome.summary["memory"]["weights"]
        and found["cache"] >= outcome.summary["memory"]["cache"]
    )
    assert validate(outcome.path) == []
    if measured is None:
        pytest.skip("this system does not let a process reset its peak")
    assert sum(found.values()) == pytest.approx(measured, rel=0.2)
