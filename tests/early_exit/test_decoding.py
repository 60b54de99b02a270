"""Early exit: the loops and their caches, each method, and the defects of published code that ours must not have."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.contract import checks
from methods.decoder import Guarantee
from methods.early_exit.calm import Calm
from methods.early_exit.confidence import LowRank, Saturation, Softmax, gap, usual_screen
from methods.early_exit.exits import Exits, Lens
from methods.early_exit.free import Free
from methods.early_exit.free_threshold import BetaMixture
from methods.early_exit.hash_ee import HashEE
from methods.early_exit.hash_tables import Corpus, HashTable, make_table, mutual_information, settling_depths
from methods.early_exit.loop import EarlyExitDecoder, ExitDecision, ExitPoint, Policy, fill_share, head_share
from methods.early_exit.static_depth import StaticDepth
from methods.early_exit.threshold import Threshold
from methods.engine.causal_layers import PROVEN
from methods.engine.causal_lm import CausalLM
from methods.engine.checkpoint_files import MissingPart
from methods.engine.kv_cache import Cache
from methods.engine.sampling import Sampling
from methods.speculative.verification import ChainRejection
from methods.training.interface import Example
from tests.engine.test_causal_lm import tiny
from tests.helpers.host_reads import no_host_reads

GREEDY = Sampling()


@pytest.fixture(scope="module")
def target() -> CausalLM:
    return checks.tiny_target()


@pytest.fixture(scope="module")
def deep() -> CausalLM:
    return checks.tiny_target(layers=6, seed=2)


class Recorder:
    """Counts what a target really runs, by layer and rows, without changing it."""

    def __init__(self, target: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run: list[int] = []
        self.filled: list[int] = []
        self.heads = 0
        attend, project, head = CausalLM._attend, CausalLM._project, CausalLM.head

        def counted_attend(lm: CausalLM, attention: object, index: int, state: object) -> torch.Tensor:
            self.run.append(index)
            return attend(lm, attention, index, state)  # type: ignore[arg-type]

        def counted_project(lm: CausalLM, index: int, hidden: torch.Tensor) -> torch.Tensor:
            self.filled.append(index)
            return project(lm, index, hidden)

        def counted_head(lm: CausalLM, hidden: torch.Tensor) -> torch.Tensor:
            self.heads += 1
            return head(lm, hidden)

        monkeypatch.setattr(CausalLM, "_attend", counted_attend)
        monkeypatch.setattr(CausalLM, "_project", counted_project)
        monkeypatch.setattr(CausalLM, "head", counted_head)

    def clear(self) -> None:
        self.run.clear()
        self.filled.clear()
        self.heads = 0


class Scripted(Policy):
    """A policy that sends the token at each place to a depth that a test says."""

    guarantee, nbytes = Guarantee.RELAXED, 0

    def __init__(self, target: CausalLM, depths: list[list[int]]) -> None:
        self.deepest, self.depths, self.step = target.n_layers, depths, -1

    def reset(self, limit: int) -> None:
        self.step = -1

    def stops(self, roots: object) -> list[int]:
        self.step += 1
        return sorted(set(self.depths[self.step]))

    def decide(self, point: ExitPoint) -> ExitDecision:
        return ExitDecision([wanted == point.depth for wanted in self.depths[self.step]])


# ------------------------------------------------------------------------------------------- caches of what was skipped


def propagated(target: CausalLM, text: list[int], prompt: int, depths: list[int]) -> list[torch.Tensor]:
    """A slow twin on the original model: states behind every layer, frozen from each token's exit on, [T, D] each.

    One token after the other; every layer attends to the keys and values that it makes itself of the states below it.
    """
    assert target.hf is not None
    model, rows = target.hf.model, []
    for place in range(len(text)):
        wanted = target.n_layers if place < prompt else depths[place - prompt]
        hidden = model.embed_tokens(torch.tensor([[text[place]]]))
        column = [hidden]
        for index, layer in enumerate(model.layers):
            below = torch.cat([row[index] for row in rows] + [column[index]], dim=1)  # what this layer projects
            if index < wanted:
                places = torch.arange(place + 1)[None]
                mask = torch.full((place + 1, place + 1), -torch.inf, dtype=below.dtype).triu(1)[None, None]
                out = layer(below, attention_mask=mask, position_embeddings=model.rotary_emb(below, places))
                hidden = (out[0] if isinstance(out, tuple) else out)[:, -1:]
            column.append(hidden)
        rows.append(column)
    return [torch.cat([row[depth] for row in rows], dim=1)[0] for depth in range(target.n_layers + 1)]


@pytest.mark.parametrize("depths", [[1, 2, 3, 4, 1], [2, 2, 2, 2, 2], [4, 1, 4, 1, 3]])
def test_text_is_that_of_a_model_whose_states_are_frozen(target: CausalLM, depths: list[int]) -> None:
    """Every layer attends to its own projections of the state each token left with: all texts equal the slow twin's."""
    prompt = checks.prompts(target.vocab_size, (5,))[0]
    with torch.no_grad():
        text = checks.outputs(_scripted(target, [[d] for d in depths]), [prompt], len(depths) + 1)[0]
        states = propagated(target, prompt.tolist() + text[:-1], len(prompt), depths)
        for place, wanted in enumerate(depths):
            logits = target.hf.lm_head(target.hf.model.norm(states[wanted][len(prompt) + place]))
            assert int(logits.argmax()) == text[place + 1]


def _scripted(target: CausalLM, depths: list[list[int]]) -> EarlyExitDecoder:
    return EarlyExitDecoder(target, GREEDY, Scripted(target, depths), Lens(target))


@pytest.mark.parametrize("family", PROVEN)
def test_filled_keys_and_values_are_those_the_layer_itself_would_write(family: str) -> None:
    """At the right position, with the layer's own norm, bias and head norm, in rows of different length."""
    lm = CausalLM.from_hf(tiny(family), keep_hf=True)
    for lengths in ((7, 3), (4, 4)):
        written, filled = lm.new_cache(2, 16), lm.new_cache(2, 16)
        for cache in (written, filled):
            lm.prefill([torch.randint(3, 97, (n,), generator=torch.Generator().manual_seed(n)) for n in lengths], cache)
        tokens = torch.tensor([[5, 9], [11, 60]])
        for layer in range(lm.n_layers):
            state = lm.begin(tokens, None, written)
            lm.run(state, [layer])  # every layer sees the same state: the embeddings
        lm.fill(lm.begin(tokens, None, filled), range(lm.n_layers))
        torch.testing.assert_close(filled.store, written.store, rtol=1e-5, atol=1e-5)


def test_skipped_layers_get_the_state_of_the_exit_that_was_taken(deep: CausalLM) -> None:
    """t5x hands them the state behind its first exit."""
    prompt = checks.prompts(deep.vocab_size, (6,))[0]
    cache = deep.new_cache(1, 16)
    root = deep.prefill([prompt], cache).logits.argmax(-1)[0]
    decoder = _scripted(deep, [[4]])
    decoder.policy.depths = [[4]]  # type: ignore[attr-defined]
    decoder.policy.stops = lambda roots: [2, 4, 6]  # type: ignore[method-assign]
    decoder.policy.look = lambda depth, *rest: ExitDecision([depth == 4])  # type: ignore[method-assign]
    decoder._forward(root, root.tolist(), cache, [True], [1])
    twin = deep.new_cache(1, 16)
    deep.prefill([prompt], twin)
    state = deep.begin(root[None], None, twin)
    deep.run(state, range(4))
    deep.fill(state, [4, 5])
    torch.testing.assert_close(cache.store[:, :, :7], twin.store[:, :, :7])


def test_all_layers_have_keys_for_every_token(deep: CausalLM) -> None:
    """No holes, and no zeros in place of keys: they would take part in every softmax."""
    made = []
    new_cache = deep.new_cache
    deep_view = deep.skip()
    deep_view.new_cache = lambda *shape: made.append(new_cache(*shape)) or made[-1]  # type: ignore[method-assign]
    decoder = Calm(deep_view, GREEDY, threshold=0.0, exits=[1, 3], head="lens")
    checks.outputs(decoder, checks.prompts(deep.vocab_size, (5, 3)), 8)
    for row, length in enumerate(made[0].lengths):
        assert length == (5, 3)[row] + 7
        assert (made[0].store[:, row, :length].abs().amax((2, 3)) > 0).all()


# -------------------------------------------------------------------------------------------------------------- batches


CALMS = {
    "softmax": {"threshold": 0.05, "exits": [1, 2, 3]},
    "reduced": {"threshold": 0.1, "exits": [1, 3], "vocabulary": 20},
    "saturation": {"threshold": 0.75, "exits": [1, 2, 3], "confidence": "saturation"},
    "falling": {"threshold": 0.1, "exits": [2], "decay": "paper"},
}


@pytest.mark.parametrize("options", CALMS.values(), ids=CALMS.keys())
def test_rows_that_leave_at_different_layers_write_what_they_write_alone(target: CausalLM, options: dict) -> None:
    def make(lm: CausalLM, sampling: Sampling) -> Calm:
        return Calm(lm, sampling, head="lens", **options)

    checks.check_batch(make, target, limit=24)
    checks.check_no_leak(make, target)
    checks.check_counters(make, target)
    decoder = make(target, GREEDY)
    checks.outputs(decoder, checks.prompts(target.vocab_size, (5, 1, 14, 8)), 24)
    assert len(decoder.counters.exits) > 1, "all rows left at one layer, so nothing was tested"


def test_rows_are_read_by_the_map_of_the_exit_they_took(target: CausalLM, tmp_path: Path) -> None:
    """A row that left is not read again by the map of a later exit, at which the rest of its batch leaves."""
    generator = torch.Generator().manual_seed(4)
    maps = {depth: (torch.randn(32, 32, generator=generator), torch.zeros(32)) for depth in (1, 2, 3)}
    Exits((1, 2, 3), maps).save(tmp_path, target)
    checks.check_batch(lambda lm, s: Calm(lm, s, 0.3, checkpoint=tmp_path), target, limit=24)


def test_rows_at_their_limit_do_not_decide_how_deep_others_go(target: CausalLM) -> None:
    cache = target.new_cache(2, 8)
    root = target.prefill(checks.prompts(target.vocab_size, (3, 3)), cache).logits[:, 0].argmax(-1)
    for rows, deepest in (([True, False], 1), ([False, True], 4), ([True, True], 4)):
        assert _scripted(target, [[1, 4]])._forward(root, root.tolist(), cache, rows, [1] * len(rows))[1] == [
            deepest
        ] * len(rows)


@pytest.mark.parametrize("options", CALMS.values(), ids=CALMS.keys())
def test_claimed_layers_and_heads_are_those_that_ran(
    target: CausalLM, options: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A canary for decoders that run every layer and report what they could have saved."""
    decoder = Calm(target, GREEDY, head="lens", **options)
    seen, saved = Recorder(target, monkeypatch), 0
    heads = 0
    for number, step in enumerate(decoder.decode(checks.prompts(target.vocab_size, (5, 8)), 20, torch.Generator())):
        assert [share * target.n_layers for share in step.layers] == [len(seen.run)] * 2
        assert sorted(seen.run + seen.filled) == list(range(target.n_layers)), "a layer ran twice, or has no keys"
        saved += len(seen.filled)
        heads += seen.heads if number else 0
        seen.clear()
    assert saved > 0
    assert decoder.counters.layers + decoder.counters.fills == target.n_layers * decoder.counters.steps
    reduced = (decoder.counters.columns - heads * target.vocab_size) / (options.get("vocabulary") or target.vocab_size)
    assert reduced >= 0 and reduced == round(reduced) and (reduced == 0) == ("vocabulary" not in options)
    assert sum(decoder.counters.exits.values()) == 2 * decoder.counters.steps
    facts, columns = decoder.stats(), decoder.counters.columns / target.vocab_size
    spent = decoder.counters.layers + columns * head_share(target) + saved * fill_share(target)
    assert facts["layer_equivalents_per_step"] == pytest.approx(spent / decoder.counters.steps)
    alike = (
        decoder.counters.layers / target.n_layers * (target.n_layers + head_share(target))
    )  # had the head shrunk, too
    assert facts["cost_over_layers"] == pytest.approx(spent / alike) and spent > alike


# ------------------------------------------------------------------------------------------------- screened confidence


@pytest.mark.parametrize("ids", [2, 20, 61])
def test_a_screen_makes_no_token_leave_and_keeps_only_those_outside_it(target: CausalLM, ids: int) -> None:
    ready = torch.randn(400, 32, dtype=torch.double, generator=torch.Generator().manual_seed(1)) * 3
    logits = target.head(ready)
    whole, likeliest = gap(logits), logits.argmax(-1)
    screen, least = Softmax(target, ids), 0.3
    for row in range(len(ready)):
        one = ready[row : row + 1]
        found = screen(one, one, lambda confidence: bool(confidence > least))
        leaves, should = bool(found.confidence > least), bool(whole[row] > least)
        assert leaves <= should and (leaves == should or likeliest[row] >= ids)
        assert (found.logits is None) == (found.columns == ids) and (found.logits is not None or not leaves)
        assert found.logits is None or found.columns == ids + 61
    assert 0 < int((whole > least).sum()) < 400


@pytest.mark.parametrize("ids", [None, 20])
def test_a_screen_of_low_rank_is_the_nearest_matrix_of_that_rank(target: CausalLM, ids: int | None) -> None:
    weight, _ = target.output_rows(torch.arange(ids or 61))
    left, sizes, right = torch.linalg.svd(weight.double(), full_matrices=False)
    ready = torch.randn(50, 32, dtype=torch.double, generator=torch.Generator().manual_seed(1)) * 3
    found = LowRank(target, 6, ids)
    torch.testing.assert_close(found(ready), ready @ (left[:, :6] * sizes[:6] @ right[:6]).T)
    assert found.columns == math.ceil(6 * ((ids or 61) + 32) / 32)
    screen = Softmax(target, "auto" if ids is None else ids, 6)
    for row in ready[:, None]:
        asked = gap(found(row))
        kept, open_ = screen(row, row, lambda _: False), screen(row, row, lambda _: True)
        assert kept.logits is None and torch.equal(kept.confidence, asked) and kept.columns == screen.screen
        assert open_.confidence <= gap(target.head(row)) and open_.columns == screen.screen + 61


@pytest.mark.parametrize("options", [{"rank": 0}, {"rank": 32}, {"rank": 4, "confidence": "saturation"}])
def test_a_rank_without_use_is_refused(target: CausalLM, options: dict) -> None:
    with pytest.raises(ValueError, match="rank must be"):
        Calm(target, GREEDY, head="lens", **options)


@pytest.mark.parametrize("make", [
    lambda lm: Calm(lm, GREEDY, 0.3, exits=[1, 3], head="lens"),
    lambda lm: Calm(lm, GREEDY, 0.3, exits=[1, 3], head="lens", accept="verify"),
    lambda lm: Free(lm, GREEDY, 2, 0.3, head="lens"),
])  # fmt: skip
def test_the_time_of_decisions_is_a_part_of_that_of_the_steps(make, deep: CausalLM) -> None:
    decoder = make(deep)
    checks.outputs(decoder, checks.prompts(deep.vocab_size, (5,)), 20)
    facts, counters = decoder.stats(), decoder.counters
    assert 0 < counters.deciding_ns < counters.spent_ns and facts["confidence_share"] < 1
    assert facts["looks_per_step"] == pytest.approx(counters.looks / counters.steps) and counters.looks >= 10


def test_the_usual_screen_costs_a_layer_and_stands_only_before_dear_heads(target: CausalLM) -> None:
    assert head_share(target) < 2 and usual_screen(target) is None and Softmax(target, "auto").screen == 0
    dear = target.skip()
    dear.vocab_size = 10_000  # of which the costs are told
    share = (usual_screen(dear) or 0) * head_share(dear) / dear.vocab_size
    assert head_share(dear) > 2 and share == pytest.approx(1, rel=0.01)


def test_rows_that_left_do_not_open_the_screen(target: CausalLM) -> None:
    """Their states say nothing any more; the whole vocabulary is asked for the sake of those who stay."""
    policy = Calm(target, GREEDY, 0.5, exits=[1, 2], head="lens", vocabulary=20).policy
    screen = policy.confidence
    sure = torch.zeros(2, 32, dtype=torch.double)
    generator = torch.Generator().manual_seed(0)
    while not (gap(target.head(sure)[:1, :20]) > 0.5).all():  # the first row tempts, the second does not
        sure[0] = 10 * torch.randn(32, dtype=torch.double, generator=generator)
    policy.reset(9)
    policy.stops([0])
    asked = [policy.decide(ExitPoint(1, sure, sure, [0, 0], rows)).columns for rows in ([True, True], [False, True])]
    assert screen.screen == 20 and asked == [20 + 61, 20]


# ------------------------------------------------------------------------------------------------------- the full model


@pytest.mark.parametrize("confidence", ["softmax", "saturation"])
@pytest.mark.parametrize("decay", ["none", "paper", "code", "linear"])
def test_threshold_one_is_the_full_model_under_every_decay(target: CausalLM, confidence: str, decay: str) -> None:
    """Eq. 5 lets 1 fall to 0.9, and a softmax in 32 bit reaches 1: the fallback of the guarantee must not."""

    def make(lm: CausalLM, sampling: Sampling) -> Calm:
        return Calm(lm, sampling, 1.0, confidence, [1, 2, 3], "lens", decay=decay)  # type: ignore[arg-type]

    assert make(target, GREEDY).guarantee is Guarantee.EXACT
    checks.check_greedy_identity(make, target, lengths=(2, 9))


def test_threshold_one_asks_no_exit(target: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its step costs what an autoregressive one costs."""
    seen = Recorder(target, monkeypatch)
    decoder = Calm(target, GREEDY, 1.0, exits=[1, 2], head="lens")
    steps = list(decoder.decode(checks.prompts(target.vocab_size, (4,)), 6, torch.Generator()))
    assert seen.heads == len(steps) and not seen.filled


def test_sure_to_the_last_bit_is_not_above_one() -> None:
    certain = torch.tensor([[200.0, 0.0, 0.0]])
    assert gap(certain).item() == 1.0 and not gap(certain).item() > Threshold(1.0, "paper").at(50, 50)


def test_static_depth_of_all_layers_is_the_full_model(target: CausalLM) -> None:
    def make(lm: CausalLM, sampling: Sampling) -> StaticDepth:
        return StaticDepth(lm, sampling, depth=lm.n_layers)

    assert make(target, GREEDY).guarantee is Guarantee.EXACT
    checks.check_greedy_identity(make, target, lengths=(2, 9))


# ----------------------------------------------------------------------------------------------------------- thresholds


def test_a_line_ends_where_the_text_does() -> None:
    line = Threshold(0.5, "linear", tau=1.0)
    assert [line.at(place, 10) for place in (0, 5, 10, 12)] == pytest.approx([0.55, 0.5, 0.45, 0.45])
    assert Threshold(0.5, "linear", tau=2.0).at(5, 10) == pytest.approx(0.45)


def test_decay_follows_eq_5_and_the_code_scales_instead() -> None:
    paper, code = Threshold(0.8, "paper", tau=4.0), Threshold(0.8, "code", tau=4.0)
    for place in (0, 10, 64):
        assert paper.at(place, 64) == pytest.approx(0.72 + 0.1 * math.exp(-4.0 * place / 64))
        counted = place + 1  # FREE's code counts the token itself
        assert code.at(place, 64) == pytest.approx(0.8 * (0.9 + 0.1 * math.exp(-4.0 * counted / 64)))
    assert Threshold(0.8, "paper", horizon=16).at(16, 64) == Threshold(0.8, "paper").at(64, 64)
    assert Threshold(0.8).at(50, 64) == 0.8 and Threshold(0.8, "paper", tau=0.0).at(50, 64) == pytest.approx(0.82)


def test_the_threshold_really_falls_along_a_text(deep: CausalLM) -> None:
    """t5x never tells its threshold where it is, so that nothing decays."""
    seen = []
    decoder = Calm(deep, GREEDY, 0.5, exits=[3], head="lens", decay="code", tau=4.0)
    at = Threshold.at
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Threshold, "at", lambda self, *where: seen.append(where) or at(self, *where))
        checks.outputs(decoder, checks.prompts(deep.vocab_size, (4,)), 6)
    assert seen == [(place, 6) for place in range(1, 6)]


def test_saturation_compares_exits_in_turn_and_begins_anew_with_each_token() -> None:
    measure, a, b = Saturation(), torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 1.0]])
    measure.begin()
    assert measure(a, a).confidence is None
    assert measure(b, b).confidence == pytest.approx(2**-0.5)
    measure.begin()
    assert measure(b, b).confidence is None


def test_gap_is_of_the_softmax_and_ties_have_none() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [5.0, 5.0, 0.0]])
    p = logits.softmax(-1).sort(descending=True).values
    torch.testing.assert_close(gap(logits), p[:, 0] - p[:, 1])
    assert gap(logits)[1] == 0


def test_lower_thresholds_never_run_more_layers_on_these_texts(deep: CausalLM) -> None:
    layers = []
    for threshold in (1.0, 0.9, 0.5, 0.2, 0.05, 0.0):
        decoder = Calm(deep, GREEDY, threshold, exits=[1, 2, 3, 4, 5], head="lens")
        checks.outputs(decoder, checks.prompts(deep.vocab_size, (5,)), 24)
        layers.append(decoder.stats()["layers_per_step"])
    assert layers == sorted(layers, reverse=True) and layers[0] == 6 and layers[-1] == 1


# --------------------------------------------------------------------------------------------------------- static depth


@pytest.mark.parametrize("depth", [1, 3])
def test_static_depth_runs_its_layers_and_nothing_else(
    target: CausalLM, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, seen = StaticDepth(target, GREEDY, depth=depth, head="lens"), Recorder(target, monkeypatch)
    steps = decoder.decode(checks.prompts(target.vocab_size, (5, 3)), 8, torch.Generator())
    next(steps)
    seen.clear()
    for step in steps:
        assert seen.run == list(range(depth)) and not seen.filled and seen.heads == 1
        assert step.layers == [depth / 4] * 2
        seen.clear()


def test_static_depth_is_the_truncated_model_over_the_same_caches(target: CausalLM) -> None:
    prompt = checks.prompts(target.vocab_size, (7,))[0]
    text = checks.outputs(StaticDepth(target, GREEDY, depth=2, head="lens"), [prompt], 9)[0]
    assert text == checks.outputs(_scripted(target, [[2]] * 8), [prompt], 9)[0]
    checks.check_batch(lambda lm, s: StaticDepth(lm, s, depth=2, head="lens"), target)


# -------------------------------------------------------------------------------------------------------- trained exits


def test_trained_exits_are_read_where_they_lie(target: CausalLM, tmp_path: Path) -> None:
    """A map of a depth takes the place of the lens there, and the whole model stays as it is."""
    weight, bias = torch.eye(32, dtype=torch.double), torch.arange(32, dtype=torch.double)
    exits = Exits((1, 3), {1: (weight, bias), 3: (2 * weight, -bias)}, (torch.ones(32), torch.tensor(0.5)), {"n": 3})
    exits.save(tmp_path, target)
    decoder = Calm(target, GREEDY, checkpoint=tmp_path)
    hidden, normed = torch.randn(2, 32, dtype=torch.double), target.norm
    torch.testing.assert_close(decoder.reader.read(1, hidden), normed(hidden) + bias)
    torch.testing.assert_close(decoder.reader.read(3, hidden), 2 * normed(hidden) - bias)
    torch.testing.assert_close(decoder.reader.read(4, hidden), normed(hidden))
    assert decoder.policy.stops([0]) == (1, 3, 4)
    assert Exits.load(tmp_path, target).facts == {"n": 3}
    judged = Calm(target, GREEDY, confidence="classifier", checkpoint=tmp_path).policy.confidence(hidden, hidden)
    torch.testing.assert_close(judged.confidence, torch.sigmoid(hidden.sum(1) + 0.5))


def test_exits_of_another_model_are_refused(target: CausalLM, tmp_path: Path) -> None:
    Exits((1,)).save(tmp_path, checks.tiny_target(layers=5))
    with pytest.raises(ValueError, match="must be of a model like .* got .*layers"):
        Calm(target, GREEDY, checkpoint=str(tmp_path))
    (tmp_path / "exits.safetensors").write_bytes(b"torn")
    with pytest.raises(ValueError, match="must hold .* as the training of method="):
        Calm(target, GREEDY, checkpoint=tmp_path)


@pytest.mark.parametrize("make", [Calm, StaticDepth, Free])
def test_the_untrained_lens_must_be_asked_for_by_name(make: type, target: CausalLM) -> None:
    with pytest.raises(MissingPart, match=r"python -m bench train method=(calm|static_depth|free) model=MODEL"):
        make(target, GREEDY)
    make(target, GREEDY, head="lens")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exits": [4]}, "1 to 3"),
        ({"exits": []}, "1 to 3"),
        ({"exits": [0, 1]}, "1 to 3"),
        ({"exits": [2, 1]}, "ascending"),
        ({"threshold": 1.1}, "threshold=1.1"),
        ({"tau": -1.0}, "tau >= 0"),
        ({"horizon": 0}, "horizon >= 1"),
        ({"vocabulary": 1}, "between 2 and 61"),
        ({"vocabulary": 62}, "between 2 and 61"),
        ({"vocabulary": 9, "confidence": "saturation"}, "reads no vocabulary"),
        ({"confidence": "classifier"}, r"python -m bench train method=calm"),
    ],
)
def test_calm_refuses(options: dict, message: str, target: CausalLM) -> None:
    with pytest.raises(ValueError, match=message):
        Calm(target, GREEDY, head="lens", **options)


@pytest.mark.parametrize("depth", [0, 5])
def test_static_depth_refuses(depth: int, target: CausalLM) -> None:
    with pytest.raises(ValueError, match="1 to 4"):
        StaticDepth(target, GREEDY, depth=depth, head="lens")


# -------------------------------------------------------------------------------------------- shallow and deep (FREE)


class Caches:
    """A view of a target that keeps the caches it hands out."""

    def __init__(self, target: CausalLM) -> None:
        self.made: list[Cache] = []
        self.target = target.skip()
        new_cache = target.new_cache
        self.target.new_cache = lambda *shape: self.made.append(new_cache(*shape)) or self.made[-1]  # type: ignore[method-assign]


FREES = {
    "all": {"accept": "all", "threshold": 0.1},
    "rollback": {"accept": "rollback", "threshold": 0.1, "distance": 1.0},
    "verify": {"accept": "verify", "threshold": 0.1},
    "few_wait": {"accept": "all", "threshold": 0.05, "max_pending": 2},
    "reduced": {"accept": "all", "threshold": 0.2, "vocabulary": 20},
    "reduced_verify": {"accept": "verify", "threshold": 0.2, "vocabulary": 20},
}
every_free = pytest.mark.parametrize("options", FREES.values(), ids=FREES.keys())


@every_free
def test_deep_caches_hold_what_the_whole_model_writes_for_the_same_text(target: CausalLM, options: dict) -> None:
    """The only error of the scheme is a shallow token that was kept: at each deep pass nothing is left behind."""
    prompt, seen = checks.prompts(target.vocab_size, (6,))[0], Caches(target)
    decoder, text, checked = Free(seen.target, GREEDY, depth=2, head="lens", **options), prompt.tolist(), 0
    for step in decoder.decode([prompt], 24, torch.Generator()):
        text += step.tokens[0]
        if step.layers[0] < 1:
            continue
        checked += step.nodes > 1
        cache = seen.made[0]
        assert cache.lengths == [len(text) - 1]
        twin = target.new_cache(1, cache.capacity)
        target.prefill([torch.tensor(text[:-1])], twin)
        torch.testing.assert_close(cache.store[:, :, : len(text) - 1], twin.store[:, :, : len(text) - 1])
    assert checked > 0, "no token ever waited"


@every_free
def test_rows_that_wait_differently_write_what_they_write_alone(target: CausalLM, options: dict) -> None:
    def make(lm: CausalLM, sampling: Sampling) -> Free:
        return Free(lm, sampling, depth=2, head="lens", **options)

    checks.check_batch(make, target, limit=24)
    checks.check_no_leak(make, target)
    checks.check_counters(make, target)


@every_free
def test_layers_of_free_are_those_that_ran(target: CausalLM, options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, seen, ran = Free(target, GREEDY, depth=1, head="lens", **options), Recorder(target, monkeypatch), 0
    for step in decoder.decode(checks.prompts(target.vocab_size, (5, 8)), 20, torch.Generator()):
        claimed = step.target_passes * step.layers[0] * target.n_layers + step.draft_passes * 1
        assert claimed == len(seen.run), f"{step} ran {seen.run}"
        ran += len(seen.run)
        seen.clear()
    assert decoder.counters.layers == ran - target.n_layers  # without the prompts


def test_a_shallow_token_is_kept_by_all_taken_back_by_rollback_and_replaced_by_verify(target: CausalLM) -> None:
    prompt = checks.prompts(target.vocab_size, (9,))[0]
    own = checks.greedy_reference(target, prompt, 20)
    texts = {
        accept: checks.outputs(Free(target, GREEDY, 1, 0.05, accept, head="lens", **more), [prompt], 20)[0]
        for accept, more in (("all", {}), ("verify", {}), ("rollback", {"distance": 1e9}))
    }
    assert texts["verify"] == own != texts["all"]
    assert texts["rollback"] == texts["all"], "nothing is too far, so nothing is taken back"
    strict = Free(target, GREEDY, 1, 0.05, "rollback", head="lens", distance=0.0)
    assert checks.outputs(strict, [prompt], 20)[0] == own, "no probability is 1, so everything is taken back"


def test_verify_drafts_and_is_cheaper_than_the_whole_model_where_the_exit_is_right() -> None:
    """The top layers of this model do nothing, so the exit below them is always right."""
    easy = checks.tiny_target(layers=4)
    for index in (2, 3):
        for part in (easy.layers[index].attention.out, easy.layers[index].mlp.down):
            part.weight.zero_()
    for threshold, accept in ((0.0, "verify"), (0.0, "rollback")):
        decoder = Free(easy, GREEDY, 2, threshold, accept, head="lens", max_pending=4)
        steps = list(decoder.decode(checks.prompts(easy.vocab_size, (5,)), 21, torch.Generator()))[1:]
        assert [step.accepted for step in steps] == [[4]] * 4 and [len(step.tokens[0]) for step in steps] == [5] * 4
    checks.check_greedy_identity(lambda lm, s: Free(lm, s, 2, 0.0, head="lens"), easy, lengths=(5,))


def test_all_commits_shallow_tokens_as_they_come_and_the_pass_is_as_wide_as_what_waited(target: CausalLM) -> None:
    decoder = Free(target, GREEDY, 2, 0.0, head="lens", max_pending=3)
    steps = list(decoder.decode(checks.prompts(target.vocab_size, (5,)), 9, torch.Generator()))[1:]
    assert [step.layers[0] for step in steps] == [0.5, 0.5, 0.5, 1.0] * 2
    assert [step.nodes for step in steps] == [1, 1, 1, 4] * 2
    assert decoder.stats()["exits"] == {"2": 8, "4": 0}, "the last one of each pass was sure too"


class Watched:
    """A threshold that notes what it is told."""

    def __init__(self, value: float) -> None:
        self.value, self.seen = value, []

    def __deepcopy__(self, memo: dict) -> Watched:
        return self  # so that the test sees what its copies are told

    def update(self, confidence: float, agreed: bool) -> None:
        self.seen.append((confidence, agreed))

    def threshold(self) -> float:
        return self.value


def test_the_threshold_is_told_of_every_token_once_and_rightly(target: CausalLM) -> None:
    prompt = checks.prompts(target.vocab_size, (6,))[0]
    watched = Watched(0.1)
    text = checks.outputs(Free(target, GREEDY, 2, adaptive=watched, max_pending=3, head="lens"), [prompt], 21)[0]
    output = target.prefill([torch.cat([prompt, torch.tensor(text)])], target.new_cache(1, 64), hidden_layers=(1,))
    shallow, deep = (target.head(x[0, len(prompt) :]) for x in (target.norm(output.hidden_layers[1]), output.hidden))
    wanted = list(zip(gap(shallow).tolist(), (shallow.argmax(-1) == deep.argmax(-1)).tolist(), strict=True))
    assert len(watched.seen) >= 16 and {agreed for _, agreed in watched.seen} == {True, False}
    for (confidence, agreed), (exact, right) in zip(watched.seen, wanted, strict=False):
        assert confidence == pytest.approx(exact) and agreed == right


def test_what_the_threshold_learns_begins_anew_unless_it_shall_remember(target: CausalLM) -> None:
    first, second = checks.prompts(target.vocab_size, (11, 7))
    for remember in (False, True):
        mixture = BetaMixture(wished_rate=0.5, fewest=2)
        decoder = Free(target, GREEDY, 2, adaptive=mixture, remember=remember, head="lens")
        checks.outputs(decoder, [first, second], 40)
        assert (mixture.agreeing.n + mixture.disagreeing.n > 0) == remember
    checks.check_no_leak(lambda lm, s: Free(lm, s, 2, adaptive=BetaMixture(0.5, fewest=2), head="lens"), target, 30)


def test_a_mixture_that_knows_nothing_yet_lets_no_token_exit(target: CausalLM) -> None:
    """The published code starts from its most permissive threshold."""
    decoder = Free(target, GREEDY, 2, adaptive=BetaMixture(0.5, fewest=1000), head="lens")
    prompt = checks.prompts(target.vocab_size, (6,))[0]
    assert checks.outputs(decoder, [prompt], 20)[0] == checks.greedy_reference(target, prompt, 20)


def test_free_at_threshold_one_asks_no_exit(target: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, seen = Free(target, GREEDY, 2, 1.0, head="lens"), Recorder(target, monkeypatch)
    assert decoder.guarantee is Guarantee.EXACT
    steps = list(decoder.decode(checks.prompts(target.vocab_size, (4,)), 6, torch.Generator()))
    assert seen.heads == len(steps) and [step.layers for step in steps] == [[1.0]] * 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": 4}, "1 to 3"),
        ({"threshold": -0.1}, "threshold=-0.1"),
        ({"distance": -1.0}, "at least 0"),
        ({"max_pending": -1}, "at least 0"),
        ({"vocabulary": 1}, "between 2 and 61"),
        ({"rule": ChainRejection()}, "accept=verify"),
    ],
)
def test_free_refuses(options: dict, message: str, target: CausalLM) -> None:
    with pytest.raises(ValueError, match=message):
        Free(target, GREEDY, head="lens", **options)


# ------------------------------------------------------------------------------------------------- tables of tokens


def zipf(vocab_size: int = 61, rows: int = 40, seed: int = 3) -> list[Example]:
    """Texts in which low ids are frequent and 0 follows every 5."""
    generator = torch.Generator().manual_seed(seed)
    weights = 1.0 / torch.arange(1, vocab_size)
    made = []
    for _ in range(rows):
        ids = (1 + torch.multinomial(weights, 24, True, generator=generator)).tolist()
        ids = [0 if place and ids[place - 1] == 5 else token for place, token in enumerate(ids)]
        made.append(Example(ids[:8], ids[8:]))
    return made


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus.of([row.prompt + row.answer for row in zipf()], 61)


KINDS = ["random", "frequency", "mutual_information", "clustered", "learnt"]


def table_of(corpus: Corpus, kind: str, balance: str = "types", seed: int = 0, depths: tuple = (1, 2, 4)) -> HashTable:
    embeddings = np.random.default_rng(9).normal(size=(61, 8))
    special = {2, 60}
    settling = np.random.default_rng(8).uniform(1, 4, size=61)
    return make_table(
        kind,
        depths,
        corpus,
        4,
        balance=balance,
        special=special,
        seed=seed,
        embeddings=embeddings,
        settling=settling,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("balance", ["types", "mass"])
def test_buckets_are_balanced_by_what_was_asked_for(corpus: Corpus, kind: str, balance: str) -> None:
    facts = table_of(corpus, kind, balance).facts
    assert min(facts["types"]) > 0 and sum(facts["mass"]) == pytest.approx(1)
    if balance == "types":
        assert max(facts["types"]) - min(facts["types"]) <= 1
    else:
        assert max(facts["mass"]) - min(facts["mass"]) < 0.35, "one type holds a quarter of the corpus"


def test_by_types_nearly_all_running_tokens_fall_into_the_first_bucket(corpus: Corpus) -> None:
    """What balance=mass is for: texts are Zipfian."""
    by_types, by_mass = (table_of(corpus, "frequency", balance).facts["mass"] for balance in ("types", "mass"))
    assert by_types[0] > 0.6 > 0.5 > by_mass[0]


@pytest.mark.parametrize("kind", KINDS)
def test_unseen_and_special_tokens_take_the_whole_model(corpus: Corpus, kind: str) -> None:
    table = table_of(corpus, kind)
    unseen = np.flatnonzero(corpus.counts == 0)
    assert len(unseen) and (table.depths[unseen] == 4).all() and (table.depths[[2, 60]] == 4).all()


def test_frequent_types_leave_first(corpus: Corpus) -> None:
    table = table_of(corpus, "frequency")
    by_depth = [corpus.counts[(table.depths == depth) & (corpus.counts > 0)] for depth in (1, 2)]
    assert by_depth[0].min() >= by_depth[1].max()


def test_mutual_information_equals_the_definition(corpus: Corpus) -> None:
    """Against the sum over the full table of two by V; token 5, which settles its successor, says most."""
    joint = np.zeros((61, 61))
    joint[corpus.pairs[:, 0], corpus.pairs[:, 1]] = corpus.pair_counts
    joint /= joint.sum()
    wanted = []
    for v in range(61):
        two = np.stack([joint[v], joint.sum(0) - joint[v]])
        free = two.sum(1, keepdims=True) * two.sum(0)
        wanted.append(float(np.sum(two[two > 1e-12] * np.log(two[two > 1e-12] / free[two > 1e-12]))))
    found = mutual_information(np.arange(61), corpus)
    np.testing.assert_allclose(found, wanted, atol=1e-9)
    assert found[5] == max(found)


def test_clusters_are_those_of_the_embeddings_small_ones_first() -> None:
    counts = np.ones(30, np.int64)
    corpus = Corpus(counts, np.zeros((0, 2), np.int64), np.zeros(0, np.int64))
    rng = np.random.default_rng(1)
    group = np.arange(30) % 3
    embeddings = np.eye(3)[group] * np.array([9.0, 1.0, 4.0])[group][:, None] + rng.normal(size=(30, 3)) * 0.05
    for balance in ("types", "none"):
        table = make_table("clustered", (1, 2, 3), corpus, 3, balance=balance, embeddings=embeddings)  # type: ignore[arg-type]
        assert table.depths.tolist() == [(3, 1, 2)[g] for g in group]


def test_types_settle_where_all_exits_from_there_on_agree() -> None:
    """Type 3 settles at 1 and at 2; type 5 never, though its first exit is right; type 7 was never read."""
    tokens = np.array([3, 3, 5])
    agrees = np.array([[True, True, True], [False, True, True], [True, True, False]])
    found = settling_depths(tokens, agrees, (1, 2, 3), 4, 8)
    mean = (1 + 2 + 4) / 3
    np.testing.assert_allclose(found[[3, 5, 7]], [(1 + 2 + 4 * mean) / 6, (4 + 4 * mean) / 5, mean])


def test_types_that_settle_early_leave_first(corpus: Corpus) -> None:
    settling = np.random.default_rng(8).uniform(1, 4, size=61)
    table, seen = table_of(corpus, "learnt"), corpus.counts > 0
    by_depth = [settling[(table.depths == depth) & seen] for depth in (1, 2)]
    assert by_depth[0].max() <= by_depth[1].min()


def test_tables_are_the_same_in_another_process_and_differ_by_seed(corpus: Corpus) -> None:
    """Python's own hash is salted; a table must not depend on it."""
    code = (
        "from tests.early_exit.test_decoding import *\n"
        "corpus = Corpus.of([row.prompt + row.answer for row in zipf()], 61)\n"
        "print(*(table_of(corpus, kind).checksum for kind in KINDS))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.split() == [table_of(corpus, kind).checksum for kind in KINDS]
    assert table_of(corpus, "random", seed=1).checksum != table_of(corpus, "random").checksum


def test_tables_are_read_back_and_torn_ones_refused(corpus: Corpus, tmp_path: Path) -> None:
    table = table_of(corpus, "frequency")
    table.save(tmp_path)
    again = HashTable.load(tmp_path)
    assert (again.depths == table.depths).all() and again.checksum == table.checksum and again.facts == table.facts
    np.save(tmp_path / "hash_table.npy", table.depths[::-1])
    with pytest.raises(ValueError, match="checksum"):
        HashTable.load(tmp_path)


@pytest.fixture
def hashed(corpus: Corpus, tmp_path: Path) -> Path:
    """A part whose table sends tokens to depths 1, 2 and 4."""
    table_of(corpus, "random", depths=(1, 2, 4)).save(tmp_path)
    return tmp_path


@pytest.mark.parametrize("prompt", ["full", "hash"])
def test_rows_hashed_to_different_depths_write_what_they_write_alone(
    target: CausalLM, hashed: Path, prompt: str
) -> None:
    def make(lm: CausalLM, sampling: Sampling) -> HashEE:
        return HashEE(lm, sampling, prompt, head="lens", checkpoint=hashed)  # type: ignore[arg-type]

    checks.check_batch(make, target, limit=24)
    checks.check_no_leak(make, target)
    checks.check_counters(make, target)
    decoder = make(target, GREEDY)
    checks.outputs(decoder, checks.prompts(target.vocab_size, (5, 1, 14, 8)), 24)
    assert set(decoder.counters.exits) == {1, 2, 4}


def test_the_token_that_is_read_decides_and_nothing_comes_back_on_the_way(target: CausalLM, hashed: Path) -> None:
    decoder = HashEE(target, GREEDY, head="lens", checkpoint=hashed)
    prompt = checks.prompts(target.vocab_size, (6,))[0]
    text: list[int] = []
    for number, step in enumerate(decoder.decode([prompt], 20, torch.Generator())):
        if number:
            assert step.layers == [decoder.table.depths[text[-1]] / 4]
        text += step.tokens[0]
    cache = target.new_cache(2, 16)
    root = target.prefill(checks.prompts(target.vocab_size, (6, 4)), cache).logits[:, 0].argmax(-1)
    roots = root.tolist()
    with no_host_reads():
        decoder._forward(root, roots, cache, [True, True], [1, 1])


@pytest.mark.parametrize("lengths", [(7,), (3, 9, 1)])
def test_hashed_prompts_freeze_each_token_at_its_own_depth(
    target: CausalLM, hashed: Path, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the slow twin on the original model, in chunks and ragged rows."""
    monkeypatch.setattr("methods.early_exit.hash_ee._CHUNK", 4)
    decoder = HashEE(target, GREEDY, "hash", head="lens", checkpoint=hashed)
    prompts = checks.prompts(target.vocab_size, lengths)
    cache = target.new_cache(len(prompts), 16)
    with torch.inference_mode():
        logits = decoder.read_prompts(prompts, cache)
    for row, prompt in enumerate(prompts):
        depths = [int(decoder.table.depths[token]) for token in prompt.tolist()]
        with torch.no_grad():
            states = propagated(target, prompt.tolist(), 0, depths)
            wanted = target.hf.lm_head(target.hf.model.norm(states[depths[-1]][-1]))  # type: ignore[union-attr]
        torch.testing.assert_close(logits[row], wanted, rtol=1e-4, atol=1e-4)  # its norms are in 32 bit
    assert cache.lengths == list(lengths)


def test_a_table_of_the_whole_model_is_exact_and_needs_no_exits(target: CausalLM, tmp_path: Path) -> None:
    HashTable(np.full(61, 4), 4).save(tmp_path)
    assert HashEE(target, GREEDY, checkpoint=tmp_path).guarantee is Guarantee.EXACT
    for prompt in ("full", "hash"):
        checks.check_greedy_identity(
            lambda lm, s, p=prompt: HashEE(lm, s, p, checkpoint=tmp_path), target, lengths=(2, 9)
        )


def test_hash_ee_refuses(target: CausalLM, hashed: Path) -> None:
    with pytest.raises(MissingPart, match=r"python -m bench train method=hash_ee"):
        HashEE(target, GREEDY)
    with pytest.raises(MissingPart, match="needs trained exits, and there are none"):
        HashEE(target, GREEDY, checkpoint=hashed)
    with pytest.raises(ValueError, match="61 tokens and 4 layers"):
        HashEE(checks.tiny_target(layers=5), GREEDY, head="lens", checkpoint=hashed)
