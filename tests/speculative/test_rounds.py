"""What rounds cost beside the target's pass, counted in operators; recorded drafts are those of the ordinary passes."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from unittest import mock

import pytest
import torch

from bench.contract import checks
from methods.autoregressive import Autoregressive
from methods.engine import cpu_kernels
from methods.engine.causal_lm import CausalLM
from methods.engine.cuda_graphs import Calls, GraphedLM
from methods.engine.host_copies import Reading
from methods.engine.sampling import Sampling
from methods.speculative.heads.candidate_tree import TREES
from methods.speculative.prompt_lookup import PromptLookup
from methods.speculative.suffix_decoding import SuffixDecoding
from tests.engine.test_causal_lm import tiny
from tests.helpers.launches import count_rounds
from tests.helpers.tiny_block_drafter import DSPARK, block_drafter
from tests.helpers.tiny_eagle import eagle, hybrid
from tests.helpers.tiny_head_trees import hydra, medusa

PROMPTS = [[3, 5, 7, 5, 3, 5, 7], [11, 2], [4, 4, 4, 4, 9, 8, 1, 2, 3, 4, 4]]
LOOKUPS = {"autoregressive": Autoregressive, "prompt_lookup": PromptLookup, "suffix": SuffixDecoding}
DRAFTED = {
    "medusa": lambda target, sampling: medusa(target, sampling, nodes=12),
    "medusa_paper": lambda target, sampling: medusa(target, sampling, tree=next(iter(TREES))),
    "hydra_heads": lambda target, sampling: hydra(target, sampling, nodes=12),
    "eagle_chain": lambda target, sampling: eagle(target, sampling, 3, tree="chain"),
    "eagle_static": lambda target, sampling: eagle(target, sampling, 1, tree="static", shape="small"),
    "eagle_dynamic": lambda target, sampling: eagle(target, sampling, 3, depth=3, top_k=3, nodes=8),
    "dflash": lambda target, sampling: block_drafter(target, sampling),
    "dspark": lambda target, sampling: block_drafter(target, sampling, sizes=DSPARK, tree="dynamic"),
    "eagle_2": lambda target, sampling: eagle(target, sampling, 2, depth=2, top_k=4, nodes=9),
}
UNRECORDED = {  # drafts of several parts, or of a layer that is also read
    "hybrid": lambda target, sampling: hybrid(target, sampling),
    "hydra_prefix": lambda target, sampling: hydra(target, sampling, nodes=12, prefix=0.3),
}
EVERY = LOOKUPS | DRAFTED


def prompts(texts):
    return [torch.tensor(text) for text in texts]


@pytest.mark.parametrize("name", EVERY)
def test_a_recorded_round_takes_three_launches_one_read_and_no_copy_that_waits(name):
    target = GraphedLM.of(checks.tiny_target(), capture=False)
    counts = count_rounds(EVERY[name], target, prompts(PROMPTS[:1]), 60)
    launches = counts.operators["exposed"] + counts.operators["hidden"]
    assert counts.rounds > 20 and counts.reads == counts.rounds and counts.copies == 0
    assert launches.total() <= 3 * counts.rounds, launches
    assert target.graphs.missed < 20, "after the first rounds all are recorded"


def events(make, texts, limit=24):
    """What a decode asks of the device, in order, after other decodes have recorded it."""
    target = GraphedLM.of(checks.tiny_target(), capture=False)
    decoder, found = make(target, Sampling()), []
    for _ in range(3):
        for _ in decoder.decode(prompts(texts), limit, torch.Generator().manual_seed(0)):
            pass

    def noted(owner, name, event):
        plain = getattr(owner, name)

        def call(*args, **kwargs):
            made = plain(*args, **kwargs)
            found.append(event if made is not None else "missed")
            return made

        return mock.patch.object(owner, name, call)

    with noted(GraphedLM, "round", "launch"), noted(Calls, "__call__", "draft"), noted(Reading, "read", "read"):
        for _ in decoder.decode(prompts(texts), limit, torch.Generator().manual_seed(0)):
            found.append("step")
    return found


@pytest.mark.parametrize("texts", [PROMPTS[:1], PROMPTS], ids=["one", "ragged"])
def test_the_next_round_of_the_baseline_is_launched_before_the_last_one_is_read(texts):
    found = events(Autoregressive, texts)
    assert found == ["step", "launch", *["launch", "read", "step"] * 22, "read", "step"]


@pytest.mark.parametrize("texts", [PROMPTS[:1], PROMPTS], ids=["one", "ragged"])
def test_a_text_that_a_network_sits_out_runs_as_the_baseline_does(texts):
    costs = [[0, 50.0], [1, 1.0], [16, 1.4]]  # no draft pays
    assert events(lambda *given: eagle(*given, 3, costs=costs), texts) == events(Autoregressive, texts)
    decoder = eagle(GraphedLM.of(checks.tiny_target(), capture=False), Sampling(), 3, costs=costs)
    wanted = [checks.greedy_reference(checks.tiny_target(), text, 20) for text in prompts(texts)]
    assert checks.outputs(decoder, prompts(texts), 20) == wanted
    assert decoder.stats() == {"nodes_per_round": 0.0, "undrafted_rounds": 1.0}


LOSES = [[0, 0.35], [1, 1.0], [2, 9.0], [16, 99.0]]  # a search takes a third of a pass, and no node pays
DEAR = [[0, 0.6], *LOSES[1:]]  # and here so long that the next texts go without it


@pytest.mark.parametrize("texts", [PROMPTS[:1], PROMPTS], ids=["one", "ragged"])
@pytest.mark.parametrize("make", [PromptLookup, SuffixDecoding])
def test_pauses_of_a_search_are_launched_ahead(make, texts):
    target, limit = GraphedLM.of(checks.tiny_target(), capture=False), 24
    wanted = [checks.greedy_reference(checks.tiny_target(), text, limit) for text in prompts(texts)]
    decoder = make(target, Sampling(), costs=LOSES)
    for _ in range(3):
        assert checks.outputs(decoder, prompts(texts), limit) == wanted
    found = events(partial(make, costs=LOSES), texts)
    starts = [place for place, pair in enumerate(pairwise(found)) if pair == ("launch", "launch")]
    pause = ["launch", *["launch", "read", "step"] * 7, "read", "step"]
    assert starts and found[starts[0] : starts[0] + len(pause)] == pause, "eight rounds"
    assert decoder.stats()["undrafted_rounds"] == 1.0


@pytest.mark.parametrize("make", [PromptLookup, SuffixDecoding])
def test_a_search_that_takes_long_sits_out_texts(make):
    first, second = (events(partial(make, costs=costs), PROMPTS[:1]) for costs in (LOSES, DEAR))
    baseline = events(Autoregressive, PROMPTS[:1])
    assert second == baseline != first


@pytest.mark.skipif(cpu_kernels.library() is None, reason="no C++ compiler")
@pytest.mark.parametrize("texts", [PROMPTS[:1], PROMPTS], ids=["one", "ragged"])
@pytest.mark.parametrize("make", [PromptLookup, SuffixDecoding])
def test_pauses_of_a_search_are_one_call_of_the_kernels(make, texts):
    target, limit, calls = CausalLM.from_hf(tiny("llama", head_dim=16), linear="panels"), 40, []
    plain, rounds = checks.outputs(Autoregressive(target, Sampling()), prompts(texts), limit), target.rounds
    assert target.runs_rounds

    def noted(roots, cache, most, *rest):
        calls.append(most)
        return rounds(roots, cache, most, *rest)

    decoder = make(target, Sampling(), costs=LOSES)
    with mock.patch.object(target, "rounds", noted):
        steps = list(decoder.decode(prompts(texts), limit, torch.Generator().manual_seed(0)))
    assert [[token for step in steps for token in step.tokens[row]][:limit] for row in range(len(texts))] == plain
    assert calls[:2] == [8, 16], "longer and longer pauses"
    assert decoder.stats()["undrafted_rounds"] == 1.0 and decoder._tally.rounds == len(steps) - 1


@pytest.mark.parametrize("name", [name for name in DRAFTED if name.startswith(("eagle", "dflash", "dspark"))])
def test_the_next_draft_of_a_network_is_launched_before_the_last_round_is_read(name):
    _, *found, last, end = events(DRAFTED[name], PROMPTS[:1])
    first = found.index("draft") - 1  # the draft after the prompt is none of a fixed shape
    rounds = [found[start : start + 4] for start in range(first, len(found), 4)]
    assert len(rounds) > 4 and all(each == ["launch", "draft", "read", "step"] for each in rounds[:-1])
    assert [last, end] == ["read", "step"]


@pytest.mark.parametrize("name, exposed, hidden", [("autoregressive", 1, 6), ("suffix", 2, 7), ("medusa", 20, 8)])
def test_a_round_on_a_cpu_judges_a_greedy_draft_on_the_host(name, exposed, hidden):
    counts = count_rounds(EVERY[name], checks.tiny_target(), prompts(PROMPTS[:1]), 60)
    assert counts.reads == counts.rounds > 20
    assert counts.per_round("exposed") <= exposed and counts.per_round("hidden") <= hidden, counts.operators


def drafted(decoder, texts, limit=70):
    """All drafts of a decode, and its steps."""
    found, propose = [], decoder.drafter.propose

    def noted(context):
        draft = propose(context)
        found.append((draft.tokens.tolist(), draft.parents.tolist()))
        return draft

    decoder.drafter.propose = noted
    steps = [
        (step.tokens, step.accepted, step.drafted, step.depth, step.nodes)
        for step in decoder.decode(prompts(texts), limit, torch.Generator().manual_seed(0))
    ]
    return found, steps


@pytest.mark.parametrize("texts", [PROMPTS[:1], PROMPTS], ids=["one", "ragged"])
@pytest.mark.parametrize("name", DRAFTED | UNRECORDED)
def test_recorded_drafts_and_steps_are_those_of_the_ordinary_passes(name, texts):
    make = (DRAFTED | UNRECORDED)[name]
    plain = drafted(make(checks.tiny_target(), Sampling()), texts)
    decoder = make(GraphedLM.of(checks.tiny_target(), capture=False), Sampling())
    for _ in range(2):  # the second decode uses what the first one recorded
        found, steps = drafted(decoder, texts)
        assert steps == plain[1]
        open_rows = [[row for row, new in enumerate(step[0]) if new] for step in steps[1:]]
        for (tokens, parents), (wanted, above), rows in zip(found[-len(plain[0]) :], plain[0], open_rows, strict=True):
            assert [tokens[row] for row in rows] == [wanted[row] for row in rows]
            assert [parents[row] for row in rows] == [above[row] for row in rows]
    assert any(any(step[1]) for step in plain[1]), "some of the drafts are accepted"


@pytest.mark.parametrize("name", DRAFTED)
def test_drafts_are_prepared_for_other_batch_sizes_and_longer_texts(name):
    target = GraphedLM.of(checks.tiny_target(), capture=False)
    decoder = DRAFTED[name](target, Sampling())
    drafted(decoder, PROMPTS[:2])
    target.graphs.prepare({1: 200, 2: 200, 3: 200}, target._make_cache)
    captured = target.graphs.captured
    longer = [text * 8 for text in PROMPTS]
    plain = drafted(DRAFTED[name](checks.tiny_target(), Sampling()), longer, 60)[1]
    assert drafted(decoder, longer, 60)[1] == plain
    assert target.graphs.missed == 0 and target.graphs.captured == captured
