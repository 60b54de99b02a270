"""Self-speculation: where skipped sub-layers come from, the adaptive threshold, the shared cache, and the search."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.config import instantiate
from bench.config.schema import SamplingConfig
from bench.contract import checks
from methods.engine.causal_lm import CausalLM
from methods.engine.sampling import Sampling
from methods.speculative.self_speculative import skip_search
from methods.speculative.self_speculative.decoder import (
    PRESETS,
    SKIP_SET,
    SelfSpeculative,
    SharedTarget,
    SkipSet,
    Threshold,
    exit_set,
)
from methods.speculative.self_speculative.skip_objective import (
    Calibration,
    Costs,
    Rounds,
    Trial,
    best_prediction,
    measured_speedup,
    predict,
)
from methods.speculative.self_speculative.skip_search import (
    History,
    SkipSearch,
    finalists,
    joined_sets,
    random_set,
    single_sets,
    uniform_sets,
)
from methods.training.interface import Example, TrainingContext

COSTS = Costs((1, 3), (10.0, 14.0), (2.0, 4.0), draft=9.0, attention=1.0, mlp=0.5, layers=4)


@pytest.fixture(scope="module")
def target() -> CausalLM:
    return checks.tiny_target()


def build(target: CausalLM, **options: object) -> SelfSpeculative:
    return SelfSpeculative(target, Sampling(), **options)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------- where the set comes from


@pytest.fixture
def part(tmp_path: Path) -> Path:
    SkipSet(4, (2,), (1, 3), gamma=5, confidence=0.25).save(tmp_path)
    return tmp_path


def test_prepared_part_brings_its_draft_length_and_threshold(target: CausalLM, part: Path) -> None:
    decoder = build(target, checkpoint=part)
    assert (decoder.skips.attention, decoder.skips.mlp) == ((2,), (1, 3))
    assert (decoder.drafter.nodes, decoder.drafter.confidence) == (5, 0.25)  # type: ignore[attr-defined]
    own = build(target, checkpoint=part, gamma=2, confidence=0.0)
    assert (own.drafter.nodes, own.drafter.confidence) == (2, 0.0)  # type: ignore[attr-defined]


def test_without_a_recommendation_the_papers_draft_length_and_threshold(target: CausalLM) -> None:
    decoder = build(target, skip_mlp=[2])
    assert (decoder.drafter.nodes, decoder.drafter.confidence) == (12, 0.6)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("options", "attention", "mlp"),
    [
        ({"skip_attention": [3, 0, 3]}, (0, 3), ()),
        ({"skip_attention": [], "skip_mlp": [1]}, (), (1,)),
        ({"layer_exit": 1}, (1, 2, 3), (1, 2, 3)),
    ],
)
def test_what_the_user_names_goes_before_the_part(
    options: dict, attention: tuple, mlp: tuple, target: CausalLM, part: Path
) -> None:
    group = {"name": "self_speculative", "_target_": f"{SelfSpeculative.__module__}.SelfSpeculative", **options}
    found: Any = instantiate.build_decoder(group, target, SamplingConfig(), checkpoint=part)
    assert (found.skips.attention, found.skips.mlp) == (attention, mlp)
    assert found.drafter.model.skipped_attention == set(attention)


def test_checkpoint_may_be_a_folder_or_a_file(target: CausalLM, tmp_path: Path) -> None:
    SkipSet(4, (0,), ()).save(tmp_path)
    for path in (tmp_path, tmp_path / SKIP_SET, str(tmp_path)):
        assert build(target, checkpoint=path).skips == SkipSet(4, (0,), ())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "python -m bench train method=self_speculative model="),
        ({"skip_mlp": [1], "layer_exit": 2}, "skip_attention/skip_mlp and method.layer_exit together"),
        ({"preset": "llama2_13b", "checkpoint": "x"}, "x cannot be read as a skip set"),
        ({"preset": "llama2_13b", "layer_exit": 2}, "preset and method.layer_exit together"),
        ({"preset": "llama2_13b"}, "model with 4 layers.* got one of 40 layers"),
        ({"preset": "llama2_13b_chat"}, "model with 4 layers.* got one of 40 layers"),
        ({"skip_attention": [], "skip_mlp": []}, "at least one sub-layer, got none"),
        ({"skip_attention": [4]}, "0 to 3"),
        ({"layer_exit": 0}, "1 to 3"),
        ({"layer_exit": 4}, "1 to 3"),
        ({"skip_mlp": [1], "gamma": 0}, "gamma >= 1"),
        ({"skip_mlp": [1], "confidence": 1.0}, "confidence < 1"),
        ({"skip_mlp": [1], "acceptance": 0.0}, "0 < acceptance"),
    ],
)
def test_refuses(options: dict, words: str, target: CausalLM) -> None:
    with pytest.raises(ValueError, match=words):
        build(target, **options)


@pytest.mark.parametrize(
    "text", ["", "[1]", '{"attention": [1]}', '{"layers": 4, "attention": ["x"], "mlp": []}', "{}"]
)
def test_a_file_that_is_no_skip_set_is_refused(text: str, target: CausalLM, tmp_path: Path) -> None:
    (tmp_path / SKIP_SET).write_text(text)
    with pytest.raises(ValueError, match="cannot be read as a skip set"):
        build(target, checkpoint=tmp_path)


def test_presets_have_the_published_sizes() -> None:
    sizes = {name: (s.layers, len(s.attention), len(s.mlp)) for name, s in PRESETS.items()}
    assert sizes == {
        "llama2_13b": (40, 24, 10),
        "llama2_13b_chat": (40, 24, 10),
        "codellama_13b": (40, 22, 12),
        "llama2_70b": (80, 47, 37),
    }


def test_presets_fit_a_model_of_their_depth() -> None:
    deep = checks.tiny_target(layers=40, keep_hf=False)
    decoder = SelfSpeculative(deep, Sampling(), preset="llama2_13b")
    assert decoder.drafter.model.skipped_mlp == {6, 9, 10, 11, 15, 24, 25, 27, 28, 35}  # type: ignore[attr-defined]
    assert decoder.target.common == 3  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------------------- the threshold


def test_threshold_follows_the_formulas() -> None:
    threshold = Threshold(0.6, goal=0.9)
    threshold.update(accepted=1, drafted=2, full=False)
    assert threshold.rate == 0.25  # begun at 0, as the paper's code does
    assert threshold.value == pytest.approx(0.9 * 0.6 + 0.1 * 0.61)  # too few kept: stop earlier
    threshold.update(accepted=4, drafted=4, full=True)
    assert threshold.rate == 0.5 * 0.25 + 0.5 * 1.0
    assert threshold.value == pytest.approx(0.602)  # 0.625 is still below the goal
    for _ in range(3):
        threshold.update(4, 4, True)
    assert threshold.rate == pytest.approx(0.953125)  # 0.8125, 0.90625, 0.953125
    assert threshold.value == pytest.approx(0.603)  # above the goal, the draft was as long as it may be
    threshold.update(2, 2, False)
    assert threshold.value == pytest.approx(0.602)  # kept all, and could have drafted more
    threshold.reset()
    assert (threshold.value, threshold.rate) == (0.6, 0.0)


@pytest.mark.parametrize("threshold", [Threshold(0.6, goal=None), Threshold(0.0)], ids=["no goal", "never stops"])
def test_a_fixed_threshold_stays(threshold: Threshold) -> None:
    for _ in range(5):
        threshold.update(0, 4, True)
    assert threshold.value == threshold.start


def test_threshold_stays_a_probability() -> None:
    low, high = Threshold(0.0005, step=1.0), Threshold(0.9999, step=1.0)
    for _ in range(9):
        low.update(3, 3, False)
        high.update(0, 3, True)
    assert (low.value, high.value) == (0.0, 1.0)


def test_threshold_learns_from_all_open_rows_together(target: CausalLM) -> None:
    decoder = build(target, gamma=4, confidence=0.3, layer_exit=3)
    seen: list[tuple[int, int, bool]] = []
    threshold = decoder.drafter.threshold  # type: ignore[attr-defined]

    class Spy(Threshold):
        def update(self, accepted: int, drafted: int, full: bool) -> None:
            seen.append((accepted, drafted, full))
            threshold.update(accepted, drafted, full)
            self.value = threshold.value

    decoder.drafter.threshold = Spy(0.3)  # type: ignore[attr-defined]
    prompts = checks.prompts(target.vocab_size, (9, 4, 6))
    steps = list(decoder.decode(prompts, 12, torch.Generator().manual_seed(0)))
    expected = [(sum(s.accepted), sum(s.drafted), max(s.drafted) == 4) for s in steps[1:-1]]
    assert seen[1:] == expected and seen[0][1] == 0
    assert threshold.value != 0.3


# ---------------------------------------------------------------------------------------------------- the shared cache


def test_layers_that_draft_and_verification_share_run_once_per_token(
    target: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: Counter[tuple[int, int]] = Counter()
    attend = CausalLM._attend

    def counted(self, attention, index, state):  # type: ignore[no-untyped-def]
        ran[index, state.hidden.shape[1]] += 1
        return attend(self, attention, index, state)

    monkeypatch.setattr(CausalLM, "_attend", counted)
    steps = build(target, gamma=4, confidence=0.0, layer_exit=2).decode(
        checks.prompts(target.vocab_size, (7,)), 30, torch.Generator().manual_seed(0)
    )
    next(steps)
    ran.clear()
    step = next(steps)
    assert ran == {(0, 1): 5, (1, 1): 5, (2, 5): 1, (3, 5): 1}
    assert (step.nodes, step.draft_passes, step.target_passes) == (5, 4, 1)


@pytest.mark.parametrize("lengths", [(6,), (6, 6), (3, 8, 1)])
@pytest.mark.parametrize("common", [1, 3])
def test_verification_behind_known_layers_is_a_whole_pass(
    common: int, lengths: tuple[int, ...], target: CausalLM
) -> None:
    prompts = checks.prompts(target.vocab_size, lengths)
    tokens = torch.randint(target.vocab_size, (len(lengths), 4), generator=torch.Generator().manual_seed(2))
    whole_cache = target.new_cache(len(lengths), 20)
    target.prefill(prompts, whole_cache)
    whole = target.forward(tokens, None, whole_cache)

    shared = SharedTarget(target, common)
    cache = shared.new_cache(len(lengths), 20)
    shared.prefill(prompts, cache)
    with torch.inference_mode():
        for place in range(3):
            state = shared.begin(tokens[:, place : place + 1], None, cache)
            shared.run(state, range(common))
            shared.known.append(state.hidden)
            cache.advance([1] * len(lengths))
    cache.set_lengths(list(lengths))
    resumed = shared.forward(tokens, None, cache)
    torch.testing.assert_close(resumed.logits, whole.logits)
    for row, length in enumerate(lengths):
        torch.testing.assert_close(cache.store[:, row, : length + 4], whole_cache.store[:, row, : length + 4])
    assert cache.lengths == list(lengths) and not shared.known


def test_an_abandoned_decode_leaves_nothing_behind(target: CausalLM) -> None:
    decoder = build(target, gamma=3, confidence=0.5, layer_exit=3)
    prompt = checks.prompts(target.vocab_size, (5,))
    steps = decoder.decode(prompt, 30, torch.Generator().manual_seed(0))
    next(steps), next(steps)
    decoder.target.known.append(torch.zeros(1, 1, 32))  # type: ignore[attr-defined]  as if verification had failed
    assert checks.outputs(decoder, prompt, 9)[0] == checks.greedy_reference(target, prompt[0], 9)


# -------------------------------------------------------------------------------------------------------- the objective


def test_cost_of_a_draft_step_and_of_verification() -> None:
    skips = SkipSet(4, (2, 3), (1,))
    assert COSTS.draft_s(skips) == 9.0 - 2 * 1.0 - 0.5
    assert COSTS.rounds_s(0, 3).tolist() == [10.0, 12.0, 14.0]
    # all layers take 8 s for one node, 9 for two, 10 for three; one of the four runs for one node only
    assert COSTS.rounds_s(1, 3).tolist() == pytest.approx([10.0, 3 + 2 + 0.75 * 9, 4 + 2 + 0.75 * 10])


def test_rounds_end_at_the_threshold_and_at_the_first_miss() -> None:
    hits = torch.tensor([[1, 1, 0], [0, 1, 1], [1, 1, 1]]).bool()
    sure = torch.tensor([[0.9, 0.2, 0.9], [0.9, 0.9, 0.9], [0.1, 0.9, 0.9]])
    drafted, accepted = Rounds(hits, sure).outcome(3, 0.0)
    assert (drafted.tolist(), accepted.tolist()) == ([3, 3, 3], [2, 0, 3])
    drafted, accepted = Rounds(hits, sure).outcome(3, 0.5)
    assert (drafted.tolist(), accepted.tolist()) == ([2, 3, 1], [2, 0, 1])
    drafted, accepted = Rounds(hits, sure).outcome(1, 0.5)
    assert (drafted.tolist(), accepted.tolist()) == ([1, 1, 1], [1, 0, 1])


def test_predicted_speedup_by_hand() -> None:
    hits, sure = torch.tensor([[1, 1], [0, 1]]).bool(), torch.tensor([[0.9, 0.9], [0.3, 0.9]])
    skips = SkipSet(4, (0, 1, 2, 3), (0, 2))  # a draft step of 4 s
    rounds = Rounds(hits, sure)
    both = predict(rounds, COSTS, skips, 2, 0.0)
    assert both.speedup == pytest.approx((1 + 1) * 10 / (2 * 4 + 14))
    assert (both.tokens_per_round, both.rate) == (2.0, 0.5)
    stopped = predict(rounds, COSTS, skips, 2, 0.5)  # the second round drafts one token only
    assert stopped.speedup == pytest.approx((1 + 1) * 10 / ((2 * 4 + 14 + 4 + 12) / 2))
    best = best_prediction(rounds, COSTS, skips)
    assert (best.gamma, best.confidence, best.speedup) == (2, 0.4, stopped.speedup)  # 0.4: the least that stops it


def test_a_replay_keeps_what_real_drafts_from_the_same_places_have_kept(target: CausalLM) -> None:
    prompts, gamma, blocks = checks.prompts(target.vocab_size, (5, 12, 9)), 4, 5
    calibration = Calibration.make(target, prompts, blocks, gamma)
    for attention, mlp in (((1,), ()), ((), (2,)), ((3,), (3,)), ((0, 2), (1,))):
        rounds = calibration.replay(target.skip(attention, mlp))
        for confidence in (0.0, 0.5):
            accepted = rounds.outcome(gamma, confidence)[1].view(len(prompts), blocks)
            decoder = build(
                target, gamma=gamma, confidence=confidence, acceptance=None, skip_attention=attention, skip_mlp=mlp
            )
            for row, prompt in enumerate(prompts):
                for block in range(blocks):
                    text = torch.cat([prompt, calibration.inputs[row, : block * gamma]])
                    steps = decoder.decode([text], 40, torch.Generator().manual_seed(0))
                    assert next(steps).tokens[0][0] == calibration.inputs[row, block * gamma]
                    assert next(steps).accepted[0] == accepted[row, block]


def test_replay_of_the_target_itself_hits_everything(target: CausalLM) -> None:
    calibration = Calibration.make(target, checks.prompts(target.vocab_size, (5, 8)), 3, 4)
    assert bool(calibration.replay(target).hits.all())
    assert not bool(calibration.replay(target.skip([0], [0])).hits.all())


def test_blocks_behind_the_end_of_a_text_do_not_count() -> None:
    target = checks.tiny_target()
    prompts = checks.prompts(target.vocab_size, (5, 8))
    text = Calibration.make(target, prompts, 4, 3).inputs
    target.eos_ids = (int(text[0, 4]),)
    first = int((text[1] == text[0, 4]).nonzero()[0]) if bool((text[1] == text[0, 4]).any()) else 12
    calibration = Calibration.make(target, prompts, 4, 3)
    expected = [
        [3 * (block + 1) <= end for block in range(4)] for end in (int((text[0] == text[0, 4]).nonzero()[0]), first)
    ]
    assert calibration.blocks.tolist() == expected
    assert len(calibration.replay(target).hits) == sum(map(sum, expected))
    target.eos_ids = tuple(range(target.vocab_size))
    with pytest.raises(ValueError, match="must be longer than .* tokens, got none"):
        Calibration.make(target, prompts, 4, 3)


def test_costs_are_measured_in_the_loop(target: CausalLM, tmp_path: Path) -> None:
    for _ in range(3):  # beside other programs a measurement wavers
        costs = Costs.measure(target, checks.prompts(target.vocab_size, (9,))[0], 4)
        if costs.draft > 4 * (costs.attention + costs.mlp):
            break
    assert (costs.nodes, costs.layers) == ((1, 2, 3, 5), 4)
    assert min(costs.attention, costs.mlp) > 0 and costs.draft > 4 * (costs.attention + costs.mlp)
    assert all(full > bare > 0 for full, bare in zip(costs.full, costs.bare, strict=True))
    costs.save(tmp_path / "costs.json")
    assert Costs.load(tmp_path / "costs.json") == costs
    assert Costs.load(tmp_path / "none.json") is None


def test_measured_speedup_is_a_ratio_of_clocks(target: CausalLM) -> None:
    found = measured_speedup(target, SkipSet(4, (3,), (), 2, 0.0), checks.prompts(target.vocab_size, (5, 8)), tokens=10)
    assert 0.1 < found < 5


# ----------------------------------------------------------------------------------------------------------- the search


def test_uniform_sets_are_spaced_evenly_and_differ() -> None:
    sets = uniform_sets(12)
    assert SkipSet(12, (2, 6, 10), ()) in sets and SkipSet(12, (), (1, 3, 5, 7, 9, 11)) in sets
    assert exit_set(12, 9) in sets
    assert len({(s.attention, s.mlp) for s in sets}) == len(sets) and all(s.size for s in sets)


def test_joined_sets_take_the_best_singles() -> None:
    worth = [0.5, 0.9, 0.7, 0.8]
    singles = single_sets(2)
    assert [(s.attention, s.mlp) for s in singles] == [((0,), ()), ((1,), ()), ((), (0,)), ((), (1,))]
    trials = [Trial(s, value, 1, 0.0, 1.0, 0.0) for s, value in zip(singles, worth, strict=True)]
    found = [(s.attention, s.mlp) for s in joined_sets(trials, 2)]
    assert found == [((1,), (1,)), ((1,), (0, 1)), ((0, 1), (0, 1))]


def test_random_sets_keep_the_sizes() -> None:
    import random

    like = SkipSet(9, (0, 1, 2), (5,), 3, 0.5)
    found = [random_set(like, random.Random(seed)) for seed in range(9)]
    assert all((len(s.attention), len(s.mlp), s.gamma) == (3, 1, 3) for s in found)
    assert len({s.attention for s in found}) > 3 and all(list(s.attention) == sorted(set(s.attention)) for s in found)


SEARCH = SkipSearch(trials=6, prompts=3, new_tokens=12, gamma=4, context=30, random_sets=3)
CHEAP = Costs((1, 5), (10.0, 12.0), (2.0, 3.0), draft=10.0, attention=1.2, mlp=0.9, layers=4)


def context(target: CausalLM, folder: Path, seed: int = 3) -> TrainingContext:
    (folder / "training_log").mkdir(parents=True, exist_ok=True)
    CHEAP.save(folder / "training_log" / "costs.json")
    texts = checks.prompts(target.vocab_size, range(4, 16), seed=8)
    corpus = [Example(text.tolist(), [1]) for text in texts]
    return TrainingContext(output=folder, shared_cache=folder, model=target, examples=corpus, seed=seed)


@pytest.fixture(scope="module")
def searched(target: CausalLM, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    folder = tmp_path_factory.mktemp("search")
    return folder, SEARCH.fit(context(target, folder))


def trials_of(folder: Path) -> list[Trial]:
    return History(folder / "training_log" / "trials.jsonl", 4).trials


def test_search_ends_with_a_finalist_and_facts_of_held_out_prompts(
    searched: tuple[Path, dict], target: CausalLM
) -> None:
    folder, facts = searched
    trials = trials_of(folder)
    warm = len({*uniform_sets(4), *single_sets(4)})
    assert len(trials) == facts["sets_tried"] == warm + len(joined_sets(trials[:warm], 4)) + SEARCH.trials
    chosen = trials[facts["found_at"]]
    assert chosen.key in {trial.key for trial in finalists(trials)}
    assert chosen.speedup == facts["speedup_in_search"] and chosen.best_set == SkipSet.load(folder)
    assert max(t.speedup for t in finalists(trials)) == max(t.speedup for t in trials)
    assert facts["pays"] == (facts["held_out"]["speedup_measured"] > 1)
    assert set(facts["held_out"]) == {"speedup", "speedup_measured", "uniform", "random_mean", "random_best"}
    assert (folder / "training_log" / "search.png").stat().st_size > 5_000
    checks.check_greedy_identity(lambda t, s: SelfSpeculative(t, s, checkpoint=folder), target, lengths=(5,))


def test_search_tries_no_set_twice_once_the_sampler_leads(searched: tuple[Path, dict]) -> None:
    trials = trials_of(searched[0])
    led = [trial.key for trial in trials[-SEARCH.trials :]]
    assert len(set(led)) == len(led) and not set(led) & {trial.key for trial in trials[: -SEARCH.trials]}


def test_search_repeats_with_its_seed_and_differs_with_another(
    searched: tuple[Path, dict], target: CausalLM, tmp_path: Path
) -> None:
    facts = SEARCH.fit(context(target, tmp_path / "again"))
    assert trials_of(tmp_path / "again") == trials_of(searched[0])
    timeless = {key: value for key, value in facts.items() if key not in ("held_out", "pays")}
    assert timeless.items() <= searched[1].items()
    SEARCH.fit(context(target, tmp_path / "other", seed=4))
    assert trials_of(tmp_path / "other") != trials_of(searched[0])


@pytest.mark.parametrize("after", [5, -3])
def test_killed_search_goes_on_as_if_it_had_not_been(
    after: int, searched: tuple[Path, dict], target: CausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = (searched[0] / "training_log" / "trials.jsonl").read_text().splitlines(keepends=True)
    folder = tmp_path / "killed"
    shop = context(target, folder)
    torn = lines[after][:20]
    (folder / "training_log" / "trials.jsonl").write_text("".join(lines[:after]) + torn)
    tried: list[SkipSet] = []
    attempt = SkipSearch._try

    def counted(self, target, calibration, costs, skips):  # type: ignore[no-untyped-def]
        tried.append(skips)
        return attempt(self, target, calibration, costs, skips)

    monkeypatch.setattr(SkipSearch, "_try", counted)
    SEARCH.fit(shop)
    assert (folder / "training_log" / "trials.jsonl").read_text() == "".join(lines)
    assert len(tried) == len(lines[after:])


@pytest.mark.parametrize("options", [{"relaxation": "continuous"}, {"objective": "measured"}])
def test_other_ways_to_search(options: dict, target: CausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skip_search, "_MEASURED_TOKENS", 4)
    monkeypatch.setattr(skip_search, "_MEASURED_PROMPTS", 1)
    facts = replace(SEARCH, trials=2, **options).fit(context(target, tmp_path / "x"))
    trials = trials_of(tmp_path / "x")
    assert facts["speedup_in_search"] in {trial.speedup for trial in finalists(trials)}
    assert len({trial.key for trial in trials[-2:]}) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trials": -1}, "trials must be at least 0, got -1"),
        ({"prompts": 0}, "prompts must be at least 1, got 0"),
        ({"gamma": 0}, "gamma must be at least 1, got 0"),
        ({"new_tokens": 10, "gamma": 4}, "new_tokens must be a multiple of gamma, 4, got 10"),
        ({"gamma": 8, "new_tokens": 4}, "new_tokens must be a multiple of gamma, 8, got 4"),
    ],
)
def test_search_refuses(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SkipSearch(**options)


def test_search_refuses_a_corpus_that_is_too_small(target: CausalLM, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must have 18 prompts of at most 8 tokens"):
        replace(SEARCH, prompts=6, context=8).fit(context(target, tmp_path / "x"))


def test_finalists_are_the_best_and_the_best_small_ones_once_each() -> None:
    large = [Trial(SkipSet(40, (0, 1, i), ()), 0.5 + i / 100, 1, 0.0, 1.0, 0.0) for i in range(2, 15)]
    small = [Trial(SkipSet(40, (i,), ()), 0.3 + i / 100, 1, 0.0, 1.0, 0.0) for i in range(12)]
    found = finalists([*small, *large, large[-1]])
    assert found == [*large[:-11:-1], *small[:-11:-1]]


def test_the_winner_is_chosen_on_other_prompts(target: CausalLM) -> None:
    """A set that the search overrated loses to one that keeps its word."""
    other = Calibration.make(target, checks.prompts(target.vocab_size, (7, 11), seed=5), 3, 4)
    sets = [SkipSet(4, (i,), ()) for i in range(4)]
    honest = [predict(other.replay(target.skip(s.attention, s.mlp)), CHEAP, s, 1, 0.0) for s in sets]
    worst, best = (choose(honest, key=lambda trial: trial.speedup) for choose in (min, max))
    assert worst.speedup < best.speedup
    overrated = [replace(trial, speedup=9.0) if trial is worst else trial for trial in honest]
    assert skip_search._choose(target, overrated, other, CHEAP).skips == best.skips


def test_a_skip_set_file_is_what_people_can_read(searched: tuple[Path, dict]) -> None:
    stored = json.loads((searched[0] / SKIP_SET).read_text())
    assert set(stored) == {"layers", "attention", "mlp", "gamma", "confidence"} and stored["layers"] == 4
