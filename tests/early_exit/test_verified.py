"""Exits that draft and a whole model that judges; that the texts are the model's is in ``tests/test_contract.py``."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bench.contract import checks
from methods.decoder import Guarantee
from methods.early_exit.calibrator import RiskTarget
from methods.early_exit.calm import Calm
from methods.early_exit.hash_ee import HashEE
from methods.early_exit.hash_tables import HashTable
from methods.early_exit.static_depth import StaticDepth
from methods.early_exit.threshold import Threshold
from methods.early_exit.verified import verification
from methods.engine.causal_lm import CausalLM
from methods.engine.sampling import Sampling
from methods.speculative.verification import ChainRejection

GREEDY = Sampling()


@pytest.fixture(scope="module")
def target() -> CausalLM:
    return checks.tiny_target()


def test_a_draft_ends_at_its_size_and_at_the_limit(target: CausalLM) -> None:
    decoder = StaticDepth(target, GREEDY, 3, "lens", accept="verify", max_pending=3)
    steps = list(decoder.decode(checks.prompts(target.vocab_size, (5,)), 9, torch.Generator()))[1:]
    done = 1
    for step in steps:
        assert step.drafted == [min(3, 9 - done - 1)] and step.nodes == step.drafted[0] + 1
        assert step.draft_passes == step.drafted[0] and step.layers == [1.0]
        done += len(step.tokens[0])
    assert done == 9 and len({tuple(step.drafted) for step in steps}) > 1, "no draft was cut at the limit"


def test_a_token_that_does_not_exit_ends_the_draft_before_the_last_layers(target: CausalLM) -> None:
    """Its layers above the last exit run in the pass that judges, and once."""
    decoder = Calm(target, GREEDY, 0.999999, exits=[1, 2], head="lens", accept="verify")
    steps = list(decoder.decode(checks.prompts(target.vocab_size, (5,)), 7, torch.Generator()))[1:]
    assert all(step.drafted == [0] and step.nodes == 1 for step in steps)
    assert [step.draft_passes for step in steps] == [1] * 5 + [0], "the last token needs no draft"
    assert decoder.counters.layers == 5 * 2 + 6 * 4


def test_counters_follow_what_was_kept(target: CausalLM) -> None:
    decoder = StaticDepth(target, GREEDY, 3, "lens", accept="verify", max_pending=4)
    steps = list(decoder.decode(checks.prompts(target.vocab_size, (5, 8)), 12, torch.Generator()))[1:]
    kept = sum(sum(step.accepted) for step in steps)
    rows = sum(1 for step in steps for new in step.tokens if new)
    assert decoder.counters.exits == {3: kept, 4: rows} and kept > 0
    assert decoder.counters.layers == sum(3 * step.draft_passes + 4 for step in steps)
    assert decoder.counters.columns == sum(target.vocab_size * (2 * step.nodes - 1) for step in steps)
    assert "cost_over_layers" not in decoder.stats(), "drafts are recorded by their own time"


def test_the_threshold_falls_with_the_text_and_not_with_what_was_taken_back(
    target: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    places, at = [], Threshold.at
    monkeypatch.setattr(Threshold, "at", lambda self, *where: places.append(where[0]) or at(self, *where))
    decoder = Calm(target, GREEDY, 0.05, exits=[1], head="lens", decay="code", accept="verify", max_pending=2)
    done, wanted = 1, []
    for step in list(decoder.decode(checks.prompts(target.vocab_size, (4,)), 12, torch.Generator()))[1:]:
        wanted += range(done, done + step.draft_passes)
        done += len(step.tokens[0])
    assert places == wanted and len(set(places)) < len(places), "nothing was taken back"


def test_methods_that_exit_nowhere_decode_as_ever(target: CausalLM) -> None:
    decoder = StaticDepth(target, GREEDY, depth=4, accept="verify")
    steps = list(decoder.decode(checks.prompts(target.vocab_size, (4,)), 5, torch.Generator()))
    assert decoder.guarantee is Guarantee.EXACT and all(step.nodes == 1 and not step.draft_passes for step in steps)


def test_options_are_checked(target: CausalLM, tmp_path) -> None:
    assert verification("all", None, 16, GREEDY) is None
    assert verification("verify", ChainRejection(), 2, Sampling(1.0)).drawn  # type: ignore[union-attr]
    assert not verification("verify", ChainRejection(), 2, GREEDY).drawn  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="max_pending must be at least 1, got 0"):
        verification("verify", None, 0, GREEDY)
    with pytest.raises(ValueError, match=r"method\.rule must be null with accept=all"):
        verification("all", ChainRejection(), 4, GREEDY)
    with pytest.raises(ValueError, match="loses nothing"):
        Calm(target, GREEDY, head="lens", accept="verify", calibration=RiskTarget(tolerance=0.1, prompts=100))
    HashTable(np.resize([2, 4], target.vocab_size), 4).save(tmp_path)
    with pytest.raises(ValueError, match=r"method\.prompt must be full with accept=verify"):
        HashEE(target, GREEDY, "hash", "lens", accept="verify", checkpoint=tmp_path)
