"""The oracle: the target's own text, accepted as often as set, whatever the network beside it guesses."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from bench.contract import checks
from methods.decoder import generate
from methods.engine.sampling import Sampling
from methods.speculative.eagle.random_network import random_part
from methods.speculative.oracle import Oracle, Recorded

LIMIT = 40


@pytest.fixture(scope="module")
def target():
    return checks.tiny_target()


def steps_of(decoder, batch, limit=LIMIT):
    found = []
    generate(decoder, batch, limit, watch=lambda step, rows: found.append(step))
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"acceptance": [1.0, 1.0]},
        {"acceptance": [0.0]},
        {"acceptance": [0.5, 0.5, 0.5], "nodes": 8},
        {"acceptance": [0.6, 0.5], "network": "eagle"},
        {"acceptance": [0.6, 0.5, 0.4], "nodes": 12, "network": "eagle"},
    ],
    ids=str,
)
def test_the_text_is_the_targets(options, target):
    batch = checks.prompts(target.vocab_size, (7, 1, 12))
    decoder = Oracle(target, Sampling(), **options)
    wanted = [checks.greedy_reference(target, prompt, LIMIT) for prompt in batch]
    assert generate(decoder, batch, LIMIT) == wanted
    assert decoder.stats() == {"oracle": True, "off_text_rounds": 0.0}


def test_all_or_nothing(target):
    batch = checks.prompts(target.vocab_size, (7,))
    always = steps_of(Oracle(target, Sampling(), [1.0] * 4), batch)
    assert [step.accepted for step in always[1:-1]] == [[4]] * 7
    never = steps_of(Oracle(target, Sampling(), [0.0] * 4), batch)
    assert all(step.accepted == [0] and step.drafted == [4] for step in never[1:])
    assert len(never) == LIMIT


@pytest.mark.parametrize("nodes", [None, 9])
def test_positions_are_accepted_as_often_as_set(nodes, target):
    """Each position within 4.4 standard deviations: a false alarm in 1 of 30,000 runs, if the seeds were drawn anew."""
    acceptance = [0.8, 0.6, 0.5]
    reached, kept = Counter(), Counter()
    batch = checks.prompts(target.vocab_size, tuple(range(2, 22)))
    decoder = Oracle(target, Sampling(), acceptance, nodes)
    for step in steps_of(decoder, batch, 60)[1:]:
        for drafted, accepted, tokens in zip(step.drafted, step.accepted, step.tokens, strict=True):
            if drafted and tokens:
                reached.update(range(min(accepted + 1, 3)))
                kept.update(range(accepted))
    for level, probability in enumerate(acceptance):
        spread = math.sqrt(probability * (1 - probability) / reached[level])
        # The last round of a text ends beyond what was recorded: at most one round of some ten counts less.
        assert kept[level] / reached[level] < probability + 4.4 * spread
        assert kept[level] / reached[level] > probability * 0.9 - 4.4 * spread
    assert reached[2] > 150


def test_the_seed_decides_which_positions_are_right(target):
    batch = checks.prompts(target.vocab_size, (7, 5))
    rounds = [[s.accepted for s in steps_of(Oracle(target, Sampling(), seed=seed), batch)] for seed in (1, 1, 2)]
    assert rounds[0] == rounds[1] != rounds[2]


def test_a_prompt_is_right_at_the_same_positions_in_any_batch(target):
    batch = checks.prompts(target.vocab_size, (7, 5))
    together = [step.accepted[1] for step in steps_of(Oracle(target, Sampling()), batch) if step.tokens[1]]
    alone = [step.accepted[0] for step in steps_of(Oracle(target, Sampling()), batch[1:])]
    assert together[: len(alone)] == alone


def test_nothing_is_recorded_while_a_rehearsed_text_is_decoded(target, monkeypatch):
    batch = checks.prompts(target.vocab_size, (7,))
    decoder = Oracle(target, Sampling(), [1.0] * 4)
    decoder.rehearse(batch, LIMIT)
    passes = []
    forward = target.forward
    monkeypatch.setattr(target, "forward", lambda *words, **more: passes.append(1) or forward(*words, **more))
    steps = steps_of(decoder, batch)
    assert len(passes) == len(steps) - 1 == 8
    decoder.rehearse(batch, LIMIT)
    assert len(passes) == 8


def test_a_text_that_parts_from_the_recorded_one_stays_the_targets(target):
    batch = checks.prompts(target.vocab_size, (7,))
    wanted = checks.greedy_reference(target, batch[0], LIMIT)
    decoder = Oracle(target, Sampling(), [1.0] * 3)
    decoder.rehearse(batch, LIMIT)
    ((key, text),) = decoder._known.items()
    wrong = [*text.tokens[:20], *((token + 1) % target.vocab_size for token in text.tokens[20:])]
    decoder._known[key] = Recorded(wrong, decoder._drafter.recorded(wrong, "0").drafts)
    steps = steps_of(decoder, batch)
    assert [token for step in steps for token in step.tokens[0]][:LIMIT] == wanted
    assert all(step.accepted == [0] for step in steps[7:])
    assert {step.nodes for step in steps[1:]} == {4}  # of the same shape to the end
    assert decoder.stats()["off_text_rounds"] > 0.5


def test_a_tree_has_the_nodes_that_were_asked_for(target):
    steps = steps_of(Oracle(target, Sampling(), [0.5] * 4, nodes=10), checks.prompts(target.vocab_size, (7,)))
    assert {step.nodes for step in steps[1:]} == {11}
    assert {step.depth[0] for step in steps[1:]} == {4}


@pytest.mark.parametrize(("nodes", "passes"), [(None, 3), (12, 3)])
def test_the_network_runs_and_decides_nothing(nodes, passes, target):
    batch = checks.prompts(target.vocab_size, (7, 4))
    with_network = Oracle(target, Sampling(), [0.7, 0.6, 0.5], nodes, "eagle")
    without = Oracle(target, Sampling(), [0.7, 0.6, 0.5], nodes)
    found, plain = steps_of(with_network, batch), steps_of(without, batch)
    assert [step.accepted for step in found] == [step.accepted for step in plain]
    assert {step.draft_passes for step in found[1:]} == {passes}
    assert {step.draft_passes for step in plain} == {0}
    assert sum(with_network.memory().values()) > 0 == len(without.memory())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"acceptance": []}, "one for each position"),
        ({"acceptance": [0.5, 1.2]}, "from 0 to 1"),
        ({"acceptance": [0.5, 0.4], "nodes": 1}, "nodes must be at least the number of positions"),
        ({"acceptance": [0.5], "nodes": 5000}, "fewer siblings than the vocabulary"),
    ],
)
def test_options_out_of_range_are_refused(options, message, target):
    with pytest.raises(ValueError, match=message):
        Oracle(target, Sampling(), **options)


def test_published_heads_have_the_targets_sizes(target):
    part = random_part(target, draft_tokens=40)
    part.require_shapes("here")
    assert part.spec.hidden_size == target.hidden_size
    assert part.tensors["lm_head.weight"].shape == (40, target.hidden_size)
    assert torch.equal(part.tensors["fc.weight"], random_part(target, draft_tokens=40).tensors["fc.weight"])
