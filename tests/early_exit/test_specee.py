"""SpecEE: candidates of a speculator, predictors over their logits, and the training of the predictors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.contract import checks
from methods.decoder import Guarantee
from methods.early_exit.specee import HEADS, Predictors, SpecEE, features_of
from methods.early_exit.specee_training import Asked, SpecEETraining, _fit
from methods.engine.causal_lm import CausalLM
from methods.engine.checkpoint_files import MissingPart
from methods.engine.sampling import Sampling
from methods.speculative.heads.medusa_training import MedusaLearner
from methods.training.answers import AnswerRecipe
from methods.training.exit_quality import quality
from tests.early_exit.test_exit_training import context
from tests.helpers.tiny_eagle import part_of
from tests.helpers.tiny_head_trees import FACTS, heads_of

GREEDY = Sampling()


@pytest.fixture(scope="module")
def target() -> CausalLM:
    return checks.tiny_target()


def training(speculator: str, folder: Path, target: CausalLM) -> SpecEETraining:
    heads = folder / "heads"
    heads.mkdir()
    if speculator == "medusa":
        heads_of(MedusaLearner, target, ()).save(heads, target, FACTS)
    else:
        part_of(target, 3, (), None).save(heads)
    return SpecEETraining(
        exits=[2, 3], tokens=200, answers=AnswerRecipe(tokens=300, limit=12, batch=16), recipe=None,
        speculator=speculator, heads=str(heads), candidates=5, width=8, places=200, limit=12,  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.fixture(scope="module", params=["medusa", "eagle"])
def checkpoint(request: pytest.FixtureRequest, target: CausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    out = folder / "out"
    out.mkdir()
    facts = training(request.param, folder, target).fit(context(target, out, folder / "common"))
    assert set(facts["predictors"]) == {"2", "3"} and facts["places"] >= 200
    assert any("predictor" in line for line in facts["summary"])
    return out


def make(checkpoint: Path, threshold: float = 0.02, **options):
    return lambda lm, sampling: SpecEE(lm, sampling, threshold, checkpoint=checkpoint, **options)


def test_a_checkpoint_is_read_as_it_was_written_with_its_speculator(checkpoint: Path, target: CausalLM) -> None:
    found = Predictors.load(checkpoint, target.device)
    found.save(checkpoint)
    again = Predictors.load(checkpoint, target.device)
    assert list(found.layers) == [2, 3] and found.candidates == 5 and (checkpoint / HEADS).is_dir()
    for depth in (2, 3):
        for ours, theirs in zip(found.layers[depth], again.layers[depth], strict=True):
            assert torch.equal(ours, theirs)


def test_rows_write_what_they_write_alone(checkpoint: Path, target: CausalLM) -> None:
    checks.check_batch(make(checkpoint), target, limit=20)
    checks.check_no_leak(make(checkpoint), target)
    checks.check_counters(make(checkpoint), target)
    decoder = make(checkpoint)(target, GREEDY)
    checks.outputs(decoder, checks.prompts(target.vocab_size, (5, 1, 14, 8)), 20)
    assert len(decoder.counters.exits) > 1, "no token left early, so nothing was tested"


def test_one_is_the_full_model_and_asks_nobody(checkpoint: Path, target: CausalLM) -> None:
    decoder = make(checkpoint, 1.0)(target, GREEDY)
    assert decoder.guarantee is Guarantee.EXACT
    checks.check_greedy_identity(make(checkpoint, 1.0), target, lengths=(2, 9))
    checks.outputs(decoder, checks.prompts(target.vocab_size, (5,)), 6)
    assert decoder.counters.columns == decoder.counters.steps * target.vocab_size


def test_a_token_leaves_early_only_if_it_was_drafted(
    checkpoint: Path, target: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = make(checkpoint, 0.0)(target, GREEDY)  # every predictor is sure
    seen, finish = [], decoder._finish

    def watched(walk, logits):
        found = finish(walk, logits)
        seen.append((walk.depths[0], int(found.argmax()), decoder._candidates.tokens[0].tolist()))
        return found

    monkeypatch.setattr(decoder, "_finish", watched)
    checks.outputs(decoder, checks.prompts(target.vocab_size, (5,)), 30)
    early = [(token, named) for depth, token, named in seen if depth < target.n_layers]
    assert early and len(early) < len(seen)
    assert all(token in named and len(set(named)) == 5 for token, named in early)


def test_an_exit_costs_the_candidates_and_the_rest_only_where_it_is_sure(checkpoint: Path, target: CausalLM) -> None:
    decoder = make(checkpoint, 0.9999999)(target, GREEDY)
    steps = list(decoder.decode(checks.prompts(target.vocab_size, (5,)), 6, torch.Generator()))
    assert len(steps) == 6 and decoder.counters.columns == 5 * (2 * 5 + target.vocab_size)


def test_features_are_logits_their_softmax_and_its_change() -> None:
    first, second = torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[3.0, 3.0, 3.0]])
    found, local = features_of(first, None)
    assert torch.equal(found, torch.cat([first, first.softmax(-1), first.softmax(-1)], -1))
    found, _ = features_of(second, local)
    assert torch.equal(found, torch.cat([second, second.softmax(-1), second.softmax(-1) - local], -1))


def test_candidates_have_the_logits_of_the_whole_output_matrix(checkpoint: Path, target: CausalLM) -> None:
    decoder = make(checkpoint)(target, GREEDY)
    checks.outputs(decoder, checks.prompts(target.vocab_size, (5, 3)), 4)
    ready, named = torch.randn(2, 32, dtype=torch.double), decoder._candidates.tokens
    torch.testing.assert_close(decoder._candidates.logits(ready), target.head(ready).gather(1, named))
    inside, outside = named[:, 2], torch.tensor([next(t for t in range(61) if t not in row) for row in named.tolist()])
    assert decoder._candidates.have(inside).all() and not decoder._candidates.have(outside).any()


def test_predictors_learn_what_no_line_separates() -> None:
    features = torch.rand(600, 12, generator=torch.Generator().manual_seed(1)) * 4 - 2
    right = features[:, 0] * features[:, 1] > 0
    predictors = Predictors("medusa", 4, {1: _fit(Asked(features[:500], right[:500]), 32)})
    found = quality(right[500:], predictors(1, features[500:]))
    sure = predictors(1, features[500:]) > 0.5
    assert float((sure == right[500:]).float().mean()) > 0.85 and found["agreement"] < 0.7


def test_what_is_missing_is_said(checkpoint: Path, target: CausalLM, tmp_path: Path) -> None:
    with pytest.raises(MissingPart, match="specee has no predictors"):
        SpecEE(target, GREEDY)
    with pytest.raises(MissingPart, match="train.heads=FOLDER"):
        SpecEETraining().fit(context(target, tmp_path))
    with pytest.raises(ValueError, match=r"among the depths .*\[2, 3\]"):
        SpecEE(target, GREEDY, exits=[1], checkpoint=checkpoint)
    with pytest.raises(ValueError, match="candidates must be at least 1"):
        SpecEETraining(candidates=0)
