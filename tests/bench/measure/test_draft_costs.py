"""Costs of drafts: what the clock says of passes and of drafting; recorded, and used again by a run that goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.analysis.cost_curve import CostCurve, CostSurface
from bench.config.schema import RunConfig
from bench.contract import checks
from bench.measure import draft_costs
from bench.measure import run as program
from bench.measure.run import run
from bench.records.run_folder import read_manifest, read_samples
from methods.engine import cpu_kernels, stopwatch
from methods.engine.causal_lm import CausalLM
from methods.engine.sampling import Sampling
from methods.speculative.budget import Costs
from methods.speculative.prompt_lookup import PromptLookup
from methods.speculative.suffix_decoding import SuffixDecoding
from methods.speculative.token_recycling import TokenRecycling
from tests.engine.test_causal_lm import tiny
from tests.helpers.costed_runs import costed_run
from tests.helpers.fakes import FakeClock


@pytest.fixture
def cfg(tmp_path: Path) -> RunConfig:
    return costed_run(tmp_path, prompts=3)


def test_only_those_are_asked_that_want_costs() -> None:
    target = checks.tiny_target()
    assert draft_costs.wanted(PromptLookup(target, Sampling())) == 0
    assert draft_costs.wanted(SuffixDecoding(target, Sampling(), gamma=5, costs="auto")) == 6
    assert draft_costs.wanted(TokenRecycling(target, Sampling(), tree="small", costs=[[1, 1.0], [2, 1.1]])) == 0


def test_drafting_is_what_a_round_takes_beside_its_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    target, clock = checks.tiny_target(), FakeClock()
    monkeypatch.setattr(stopwatch, "time", SimpleNamespace(perf_counter_ns=clock))
    forward, decoder = target.forward, TokenRecycling(target, Sampling(), tree="small", costs="auto")

    def timed(tokens: Any, *args: Any, **kwargs: Any) -> Any:
        clock.spend(1_000 + 100 * tokens.shape[1])
        return forward(tokens, *args, **kwargs)

    def proposed(context: Any, inner: Any = decoder.drafter.propose) -> Any:
        clock.spend(220)
        return inner(context)

    target.forward, decoder.drafter.propose = timed, proposed  # type: ignore[method-assign]
    curve = draft_costs.passes(target, [decoder], 1, 20, repeats=1, clock=clock)
    found = draft_costs.measure(target, decoder, curve, clock)
    times = (1.0, 1.0909, 1.1818, 1.2727, 1.3636, 1.4545, 1.5455, 1.6364)
    assert curve.nodes == (1, 2, 3, 4, 5, 6, 7, 8)
    assert found == [[0.0, 0.2], *([float(nodes), time] for nodes, time in zip(curve.nodes, times, strict=True))]
    other = replace(curve, table=tuple(tuple(seconds / 2 for seconds in row) for row in curve.table))
    drafting = draft_costs.measure(target, decoder, other, clock)[0][1]
    assert drafting == pytest.approx(0.4, abs=1e-4), "the same time over passes that took half as long"
    decoder.use_costs(found)
    assert decoder.costs == Costs(curve.nodes, times, 0.2)


def test_a_run_hands_over_what_it_measured_and_one_that_goes_on_what_is_recorded(
    cfg: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[Any] = []
    pairs = [[0.0, 0.1], [1.0, 1.0], [8.0, 1.2]]
    told = TokenRecycling.use_costs

    def use_costs(self: TokenRecycling, costs: Any) -> None:
        used.append(costs)
        told(self, costs)

    monkeypatch.setattr(TokenRecycling, "use_costs", use_costs)
    monkeypatch.setattr(draft_costs, "measure", lambda *_: pairs)
    monkeypatch.setattr(draft_costs, "TOLERANCE", float("inf"))  # whatever the cost curve says
    with monkeypatch.context() as patch:
        patch.setattr(program.agreement, "check_run", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(cfg)
    (path,) = Path(cfg.paths.results).iterdir()
    kept = read_samples(path)
    monkeypatch.setattr(draft_costs, "measure", lambda *_: pytest.fail("measured again"))
    monkeypatch.setattr(draft_costs, "passes", lambda *_: pytest.fail("measured again"))
    outcome = run(cfg)
    manifest = read_manifest(outcome.path) or {}
    assert outcome.path == path and read_samples(path) == kept
    assert used == [pairs, pairs] and manifest["draft_costs"] == pairs
    assert {"nodes_per_round", "undrafted_rounds"} <= manifest["method_facts"].keys()


def test_a_method_with_costs_of_its_own_is_not_measured(cfg: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_costs, "passes", lambda *_: pytest.fail("measured"))
    for costs in (None, [[1, 1.0], [8, 1.5]]):
        outcome = run(replace(cfg, method=dict(cfg.method) | {"costs": costs}))
        assert "draft_costs" not in (read_manifest(outcome.path) or {})


def test_noise_does_not_make_a_larger_pass_cheaper() -> None:
    decoder = SuffixDecoding(checks.tiny_target(), Sampling(), gamma=3, min_match=9, costs="auto")
    curve = CostCurve((1, 2, 4), 1, (6,), ((2.0, 4.0, 3.0),))
    found = draft_costs.measure(decoder.target, decoder, curve)
    assert found == [[0.0, 0.0], [1.0, 1.0], [2.0, 1.75], [3.0, 1.75], [4.0, 1.75]], (
        "it finds nothing to draft, or less than free"
    )


@pytest.mark.skipif(cpu_kernels.library() is None, reason="no C++ compiler")
def test_a_search_costs_what_rounds_of_one_call_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass takes 1,100 ns, 200 more if a search finds nothing, and a round 100 where several are one call."""
    target, clock = CausalLM.from_hf(tiny("llama", head_dim=16), linear="panels"), FakeClock()
    monkeypatch.setattr(stopwatch, "time", SimpleNamespace(perf_counter_ns=clock))
    decoder = SuffixDecoding(target, Sampling(), gamma=3, min_match=9, costs="auto")
    forward, rounds, propose = target.forward, target.rounds, decoder.drafter.propose

    def timed(tokens: Any, *args: Any, **kwargs: Any) -> Any:
        clock.spend(1_000 + 100 * tokens.shape[1])
        return forward(tokens, *args, **kwargs)

    def together(*args: Any) -> Any:
        ran = rounds(*args)
        clock.spend(100 * len(ran.tokens))
        return ran

    def proposed(context: Any) -> Any:
        clock.spend(200)
        return propose(context)

    target.forward, target.rounds, decoder.drafter.propose = timed, together, proposed  # type: ignore[method-assign]
    curve = draft_costs.passes(target, [decoder], 1, 20, repeats=1, clock=clock)
    drafting = draft_costs.measure(target, decoder, curve, clock)[0][1]
    assert drafting == pytest.approx((200 + 1_100 - 100) / 1_100, abs=1e-3)
    monkeypatch.setattr(CausalLM, "runs_rounds", False)
    assert draft_costs.measure(target, decoder, curve, clock)[0][1] == 0.0, "it drafts nothing"


def test_of_three_measurements_a_noisy_one_does_not_count() -> None:
    """Noise at some sizes, at the pass over one node, which makes all others seem cheap, or while drafting."""
    quiet = [[0.0, 0.1], [1.0, 1.0], [2.0, 1.05], [4.0, 1.2], [8.0, 1.5]]
    own = {int(nodes): time for nodes, time in quiet[1:]}
    loaded = [[0.0, 1.2], [1.0, 1.0], [2.0, 1.7], [4.0, 1.8], [8.0, 2.1]]
    cheap = [[0.0, 0.1], [1.0, 1.0], [2.0, 0.8], [4.0, 0.9], [8.0, 0.95]]
    for noisy in (loaded, cheap):
        assert draft_costs.deviation(noisy, own) > draft_costs.TOLERANCE
        assert draft_costs.settled(noisy, own, quiet) == quiet
        assert draft_costs.settled(quiet, {int(nodes): time for nodes, time in noisy[1:]}, quiet) == quiet
    assert draft_costs.deviation(quiet, own) == 0 and draft_costs.deviation(quiet, {1: 1.0}) == 0
    fewer = [[0.0, 0.02], *quiet[1:4]]
    assert draft_costs.settled(loaded, own, fewer) == [[0.0, 1.2], *quiet[1:]], "sizes that the third one lacks"
    falling = [[0.0, 0.1], [1.0, 1.0], [2.0, 1.3], [4.0, 1.1], [8.0, 1.5]]
    assert draft_costs.settled(falling, {1: 1.0, 2: 1.3, 4: 1.1, 8: 1.5}, falling)[3] == [4.0, 1.3], "times rise"


def test_a_curve_is_read_by_the_pass_over_one_node() -> None:
    curve = CostCurve((1, 2, 8), 1, (10, 30), ((1.0, 1.5, 3.0), (2.0, 3.0, 8.0)))
    assert draft_costs.relative(curve, (1, 2, 8), 1, 20) == {1: 1.0, 2: 1.5, 8: pytest.approx(5.5 / 1.5)}


@pytest.mark.parametrize("noisy", [True, False])
def test_costs_that_differ_from_the_runs_own_curve_are_measured_again(
    noisy: bool, cfg: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of passes is a table: at first as in a loaded moment."""
    asked: list[int] = []

    def passes(target: Any, decoders: Any, *_: Any) -> CostCurve:
        asked.append(draft_costs.wanted(decoders[0]))
        slow = 2.0 if noisy and len(asked) == 1 else 1.0
        return CostCurve((1, 2, 4, 8), 1, (9,), ((1.0, 1.1 * slow, 1.2 * slow, 1.4 * slow),))

    own = CostCurve((1, 2, 4, 8), 1, (9,), ((1.0, 1.1, 1.2, 1.4),))
    monkeypatch.setattr(draft_costs, "passes", passes)
    monkeypatch.setattr(program, "_cost_curve", lambda *_: CostSurface((own,)))
    outcome = run(cfg)
    manifest = read_manifest(outcome.path) or {}
    assert asked == ([8, 8] if noisy else [8])
    assert [time for _, time in manifest["draft_costs"][1:]] == [1.0, 1.1, 1.15, 1.2, 1.25, 1.3, 1.35, 1.4]
