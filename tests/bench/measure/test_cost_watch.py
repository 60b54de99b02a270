"""Costs of passes during a run: what decoders get, what the record says, and a run that was cut."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.analysis.cost_curve import CostCurve, CostSurface
from bench.config.schema import RunConfig
from bench.measure import cost_watch, draft_costs, verify_cost
from bench.measure.run import run
from bench.records.run_folder import read_manifest, read_samples
from methods.speculative.token_recycling import TokenRecycling
from tests.helpers.costed_runs import costed_run


@pytest.fixture
def cfg(tmp_path: Path) -> RunConfig:
    return costed_run(tmp_path, prompts=4)


def test_costs_have_the_passes_of_the_moment_and_larger_ones_change_as_the_largest() -> None:
    costs = [[0.0, 0.1], [1.0, 1.0], [4.0, 1.2], [16.0, 1.5], [32.0, 2.0]]
    found = cost_watch.scaled_costs(costs, {1: 0.010, 4: 0.015, 16: 0.030})
    assert found == [[0.0, 0.1], [1.0, 1.0], [4.0, 1.5], [16.0, 3.0], [32.0, 4.0]]
    noisy = cost_watch.scaled_costs(costs, {1: 0.010, 4: 0.015, 16: 0.012})
    assert noisy == [[0.0, 0.1], [1.0, 1.0], [4.0, 1.5], [16.0, 1.5], [32.0, 1.6]], "no larger pass takes less"


def test_passes_larger_than_the_costs_say_nothing_of_smaller_ones() -> None:
    costs = [[0.0, 0.1], [1.0, 1.0], [4.0, 1.2], [8.0, 1.4], [11.0, 1.6]]
    alike = {1: 0.010, 4: 0.012, 8: 0.014, 16: 0.030}
    assert cost_watch.scaled_costs(costs, alike) == costs


def test_the_moment_of_a_few_sizes_scales_a_finer_grid() -> None:
    """A step between six nodes and seven stays where it was."""
    costs = [[0.0, 0.1], [1.0, 1.0], [2.0, 1.0], [4.0, 1.0], [6.0, 1.0], [7.0, 1.5], [8.0, 1.5], [16.0, 1.5]]
    found = cost_watch.scaled_costs(costs, {1: 0.010, 2: 0.012, 4: 0.012, 8: 0.018, 16: 0.018})
    assert found == [[0.0, 0.1], [1.0, 1.0], [2.0, 1.2], [4.0, 1.2], [6.0, 1.2], [7.0, 1.8], [8.0, 1.8], [16.0, 1.8]]


def test_a_curve_is_scaled_at_all_contexts_alike() -> None:
    curve = CostCurve((1, 2, 4), 1, (10, 30), ((1.0, 1.5, 2.0), (2.0, 2.5, 3.0)))
    scaled = cost_watch.scaled_curve(CostSurface((curve,)), 1, 20, {1: 3.0, 4: 5.0})
    assert scaled.seconds(1, 1, 20) == pytest.approx(3.0) and scaled.seconds(4, 1, 20) == pytest.approx(5.0)
    assert scaled.seconds(1, 1, 10) == pytest.approx(2.0) and scaled.seconds(4, 1, 30) == pytest.approx(6.0)


def _another_machine(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """From the second look on a pass over n nodes takes n seconds, before it hardly more than one over one.

    Returns the costs that decoders get.
    """
    handed: list[Any] = []
    use = TokenRecycling.use_costs

    def use_costs(self: TokenRecycling, costs: Any) -> None:
        handed.append([list(pair) for pair in costs])
        use(self, costs)

    monkeypatch.setattr(TokenRecycling, "use_costs", use_costs)
    looks = [0]

    def measured(target: Any, batch: int, nodes: Any, contexts: Any, *_: Any, **__: Any) -> CostCurve:
        looks[0] += nodes == cost_watch.NODES
        share = 1.0 if looks[0] > 1 else 0.01
        row = tuple(1.0 + share * (n - 1) for n in nodes)
        return CostCurve(tuple(nodes), batch, tuple(contexts), (row,) * len(contexts))

    monkeypatch.setattr(verify_cost, "measure", measured)
    monkeypatch.setattr(draft_costs, "TOLERANCE", float("inf"))  # costs are not measured twice
    monkeypatch.setattr(cost_watch, "EVERY_S", 0.0)
    monkeypatch.setattr(cost_watch, "SELDOM", 0)
    return handed


def test_decoders_get_costs_that_changed_and_the_curve_is_that_of_the_run(
    cfg: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = run(cfg)
    handed = _another_machine(monkeypatch)
    outcome = run(replace(cfg, seed=1))
    manifest = read_manifest(outcome.path) or {}
    assert handed[0] == manifest["draft_costs"]
    assert dict(map(tuple, handed[-1]))[8.0] == pytest.approx(8.0), "a pass over 8 nodes takes 8 times as long now"
    assert len(handed) <= 3, "of four moments three are alike, whose costs are not handed over again"
    assert manifest["cost_watch"]["moments"] == 4
    assert manifest["cost_watch"]["seconds"]["16"] == pytest.approx((1.15 + 3 * 16.0) / 4)
    curve = CostSurface.from_manifest(manifest["cost_curve"])
    middle = (min(map(len, _prompts(plain))) + max(map(len, _prompts(plain))) + 12) // 2
    assert curve.seconds(8, 1, middle) == pytest.approx((1.07 + 3 * 8.0) / 4, rel=0.01)
    assert manifest["cost_curve_before"] != manifest["cost_curve"]
    assert manifest["method_facts"]["nodes_per_round"] > 0.0
    assert [s.text for s in read_samples(outcome.path)] == [s.text for s in read_samples(plain.path)]


def _prompts(outcome: Any) -> list[list[int]]:
    return [sample.prompt_ids for sample in read_samples(outcome.path) if sample.phase == "measure"]


def test_a_run_that_was_cut_has_the_mean_of_its_parts(cfg: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    _another_machine(monkeypatch)
    look, looks = cost_watch.CostWatch.look, [0]

    def cut(self: cost_watch.CostWatch) -> None:
        look(self)
        looks[0] += 1
        if looks[0] == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(cost_watch.CostWatch, "look", cut)
    with pytest.raises(KeyboardInterrupt):
        run(cfg)
    (path,) = Path(cfg.paths.results).iterdir()
    first = read_manifest(path) or {}
    assert first["cost_watch"]["moments"] == 2
    manifest = read_manifest(run(cfg).path) or {}
    assert manifest["cost_watch"]["moments"] == 4
    assert manifest["cost_watch"]["seconds"]["16"] == pytest.approx((1.15 + 3 * 16.0) / 4)
    assert manifest["cost_curve_before"] == first["cost_curve_before"]


def test_between_two_looks_is_a_while(cfg: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    handed = _another_machine(monkeypatch)
    monkeypatch.setattr(cost_watch, "EVERY_S", 3600.0)
    manifest = read_manifest(run(cfg).path) or {}
    assert "cost_watch" not in manifest and handed == [manifest["draft_costs"]]
