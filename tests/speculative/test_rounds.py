"""What rounds cost beside the target's pass, counted in operators; recorded drafts are those of the ordinary passes."""

from __future__ import annotations

import contextlib
import re
from contextlib import contextmanager
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
from methods.speculative.budget import ALLOWANCE, Account, Pace
from methods.speculative.heads.candidate_tree import TREES
from methods.speculative.hybrid import Hybrid
from methods.speculative.prompt_lookup import PromptLookup
from methods.speculative.suffix_decoding import SuffixDecoding
from methods.speculative.token_recycling import TokenRecycling
from tests.engine.test_causal_lm import tiny
from tests.helpers.launches import count_rounds
from tests.helpers.tiny_block_drafter import DSPARK, block_drafter
from tests.helpers.tiny_eagle import eagle, hybrid
from tests.helpers.tiny_head_trees import hydra, medusa
from tests.helpers.tiny_p_eagle import p_eagle

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
    "p_eagle": lambda target, sampling: p_eagle(target, sampling, tree="dynamic", nodes=7),
    "token_recycling": lambda target, sampling: TokenRecycling(target, sampling, tree="small"),
}
COSTS = [[0, 0.3], [1, 1.0], [2, 1.22], [4, 1.26], [8, 1.35], [16, 1.6], [32, 2.1]]  # drafts are sized
LATE = {  # networks that sit out rounds
    "hybrid": lambda target, sampling: hybrid(target, sampling),
    "hybrid_union": lambda target, sampling: hybrid(target, sampling, policy="union", alone=3, budget=12),
    "hybrid_costs": lambda target, sampling: hybrid(target, sampling, costs=COSTS),
    "eagle_costs": lambda target, sampling: eagle(target, sampling, 3, depth=3, top_k=3, nodes=8, costs=COSTS),
    "dflash_costs": lambda target, sampling: block_drafter(target, sampling, costs=COSTS),
    "dspark_costs": lambda target, sampling: block_drafter(target, sampling, sizes=DSPARK, costs=COSTS),
    "p_eagle_costs": lambda target, sampling: p_eagle(target, sampling, costs=COSTS),
}
OTHERS = {  # rounds of more launches: a layer is also read, a path is filled up to 81 nodes
    "token_recycling_paper": lambda target, sampling: TokenRecycling(target, sampling),
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


@pytest.mark.parametrize("texts", [PROMPTS[:1], PROMPTS], ids=["one", "ragged"])
@pytest.mark.parametrize("name", [name for name in DRAFTED if name != "hydra_prefix"])
def test_the_next_draft_and_its_round_are_launched_before_the_last_round_is_read(name, texts):
    prefill, first, launch, *found, last, end = events(DRAFTED[name], texts, limit=48)
    assert [prefill, first, launch] == ["step", "draft", "launch"], "the draft after the prompt is recorded too"
    ahead = ["draft", "launch", "read", "step"]
    count = next(number for number in range(0, len(found), 4) if found[number : number + 4] != ahead) // 4
    assert count > 4
    one_by_one = "".join({"launch": "l", "draft": "d", "read": "r", "step": "s"}[event] for event in found[4 * count :])
    assert re.fullmatch("(drsl)*d?(rsl)*", one_by_one), "near the limit a round may be the last"
    assert [last, end] == ["read", "step"]


@pytest.mark.parametrize("name", ["hybrid", "hybrid_union"])
def test_the_network_of_a_hybrid_drafts_while_the_host_reads_and_searches(name):
    _, first, *found, last, end = events(LATE[name], PROMPTS[:1], limit=48)
    rounds = [found[start : start + 4] for start in range(0, len(found) - 1, 4)]
    assert first in ("draft", "launch") and [last, end] == ["read", "step"]
    begun = sum(each == ["launch", "draft", "read", "step"] for each in rounds)
    assert begun > 4 and begun >= len(rounds) - 2


FLAT = [[0, 0.39], [1, 1.0], [64, 1.05]]  # nodes cost next to nothing, drafting does


def dear(name):
    def make(target, sampling):
        decoder = DRAFTED[name](target, sampling)
        decoder.use_costs(FLAT)
        return decoder

    return make


@pytest.mark.parametrize("texts", [PROMPTS[:1], PROMPTS], ids=["one", "ragged"])
@pytest.mark.parametrize("name", ["medusa", "hydra_heads", "token_recycling"])
def test_pauses_of_drafters_that_read_the_last_pass_are_launched_ahead(name, texts):
    found = "".join(
        {"launch": "l", "draft": "d", "read": "r", "step": "s"}[event] for event in events(dear(name), texts, 60)
    )
    pause = "l" + 7 * "lrs" + "rs"
    assert pause + "dl" in found, "eight rounds, then a draft after the last of them"
    target = GraphedLM.of(checks.tiny_target(), capture=False)
    decoder, limit = dear(name)(target, Sampling()), 60
    wanted = [checks.greedy_reference(checks.tiny_target(), text, limit) for text in prompts(texts)]
    for _ in range(3):
        assert checks.outputs(decoder, prompts(texts), limit) == wanted
    assert decoder.stats()["undrafted_rounds"] > 0.5


@pytest.mark.parametrize("texts", [PROMPTS[:1], PROMPTS], ids=["one", "ragged"])
@pytest.mark.parametrize("name", ["medusa", "eagle_dynamic"])
def test_a_round_that_is_under_way_when_drafting_ends_is_booked_and_the_pause_is_kept(name, texts):
    target, limit, gains = GraphedLM.of(checks.tiny_target(), capture=False), 60, []
    wanted = [checks.greedy_reference(checks.tiny_target(), text, limit) for text in prompts(texts)]
    decoder, book = DRAFTED[name](target, Sampling()), Account.book

    def booked(account, gain):
        waits = account.pausing
        book(account, gain)
        gains.append((waits, account.rounds, account.balance))

    for _ in range(3):
        assert checks.outputs(decoder, prompts(texts), limit) == wanted
    decoder.use_costs(FLAT)
    with mock.patch.object(Account, "book", booked):
        assert checks.outputs(decoder, prompts(texts), limit) == wanted
    assert any(waits and balance < 0.0 for waits, _, balance in gains), "a round was under way"
    assert all(balance >= -ALLOWANCE for *_, balance in gains)
    assert 0.1 < decoder.stats()["undrafted_rounds"] < 0.99


def test_a_text_that_ends_by_a_token_leaves_a_round_unread():
    target = GraphedLM.of(checks.tiny_target(), capture=False)
    decoder = DRAFTED["medusa"](target, Sampling())
    for _ in range(3):
        plain = checks.outputs(decoder, prompts(PROMPTS[:1]), 48)
    for end in range(1, 20):
        steps, written = decoder.decode(prompts(PROMPTS[:1]), 48, torch.Generator().manual_seed(0)), []
        changes = None
        with contextlib.suppress(StopIteration):
            while True:
                step = steps.send(changes)
                written += step.tokens[0]
                changes = {0: None} if len(written) >= end else None
        assert len(written) < end + 8 and written == plain[0][: len(written)]
    assert checks.outputs(decoder, prompts(PROMPTS[:1]), 48) == plain, "what was under way spoils no other text"


@pytest.mark.parametrize("name, exposed, hidden", [("autoregressive", 1, 6), ("suffix", 2, 7), ("medusa", 20, 8)])
def test_a_round_on_a_cpu_judges_a_greedy_draft_on_the_host(name, exposed, hidden):
    counts = count_rounds(EVERY[name], checks.tiny_target(), prompts(PROMPTS[:1]), 60)
    assert counts.reads == counts.rounds > 20
    assert counts.per_round("exposed") <= exposed and counts.per_round("hidden") <= hidden, counts.operators


def drafted(decoder, texts, limit=70):
    """The draft of every round of a decode, and its steps."""
    found, propose = [], Pace.propose

    def noted(*args, **kwargs):
        draft = propose(*args, **kwargs)
        found.append((draft.tokens.tolist(), draft.parents.tolist()))
        return draft

    with mock.patch.object(Pace, "propose", noted):
        steps = [
            (step.tokens, step.accepted, step.drafted, step.depth, step.nodes)
            for step in decoder.decode(prompts(texts), limit, torch.Generator().manual_seed(0))
        ]
    return found, steps


@pytest.mark.parametrize("texts", [PROMPTS[:1], PROMPTS], ids=["one", "ragged"])
@pytest.mark.parametrize("name", DRAFTED | OTHERS | {"hybrid": LATE["hybrid"]})
def test_recorded_drafts_and_steps_are_those_of_the_ordinary_passes(name, texts):
    make = (EVERY | OTHERS | LATE)[name]
    plain = drafted(make(checks.tiny_target(), Sampling()), texts)
    decoder = make(GraphedLM.of(checks.tiny_target(), capture=False), Sampling())
    for _ in range(2):  # the second decode uses what the first one recorded
        found, steps = drafted(decoder, texts)
        require_equal((found, steps), plain)
    assert any(any(step[1]) for step in plain[1]), "some of the drafts are accepted"


@pytest.mark.parametrize("name", EVERY | LATE | OTHERS)
def test_a_kept_text_outlives_what_others_record_over_it(name):
    """Buffers of recorded passes are used again by the next decode of any decoder."""
    target = GraphedLM.of(checks.tiny_target(), capture=False)
    others = [Autoregressive(target, Sampling()), eagle(target, Sampling(), 3, depth=3, top_k=3, nodes=8)]
    text = torch.tensor([8, 1] * 20)
    kept = checks.check_prefix_cache(
        (EVERY | LATE | OTHERS)[name],
        target,
        limit=24,
        between=lambda: [checks.outputs(other, [text], 30) for other in others],
    )
    assert kept[0] >= 13 and kept[1] == 17 - (15 - kept[0]) and kept[2] > 26 and kept[4] == 0


def require_equal(found, wanted):
    """The same steps, and the same drafts in rows that are open."""
    assert found[1] == wanted[1]
    open_rows = [[row for row, new in enumerate(step[0]) if new] for step in found[1][1:]]
    for draft, other, rows in zip(found[0], wanted[0], open_rows, strict=True):
        for ours, theirs in zip(draft, other, strict=True):  # tokens and parents
            assert [ours[row] for row in rows] == [theirs[row] for row in rows]


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


@pytest.mark.parametrize("name", ["token_recycling", "token_recycling_paper", "medusa"])
def test_rows_that_take_new_prompts_draft_as_in_the_ordinary_passes(name):
    found = []
    for target in (checks.tiny_target(), GraphedLM.of(checks.tiny_target(), capture=False)):
        decoder = (DRAFTED | OTHERS)[name](target, Sampling())
        for _ in range(2):  # the second decode uses what the first one recorded
            steps = decoder.decode_refilled(prompts(PROMPTS), 40, torch.Generator(), 20)
            refilled = [next(steps) for _ in range(9)] + [steps.send({1: torch.tensor([8, 3, 8, 3, 8])})]
            refilled += [next(steps) for _ in range(5)] + [steps.send({0: torch.tensor([5]), 2: torch.tensor([7, 6])})]
            refilled += [next(steps) for _ in range(14)]
            found.append([(step.tokens, step.accepted, step.drafted) for step in refilled])
    assert found[2] == found[3] == found[0] and any(any(accepted) for _, accepted, _ in found[0])


@pytest.mark.parametrize("texts", [PROMPTS[:1], PROMPTS], ids=["one", "ragged"])
@pytest.mark.parametrize("name", LATE)
def test_once_prepared_a_network_that_sits_out_rounds_drafts_by_recorded_calls_alone(name, texts):
    """Whatever it has not read: a prompt of more than a call's room, what a lookup drafted, rounds without a draft."""
    longer, limit, found = [text * 12 for text in texts], 110, []
    for recorded in (False, True):
        target = GraphedLM.of(checks.tiny_target(), capture=False)
        decoder = LATE[name](target, Sampling())
        network = decoder._network() if isinstance(decoder, Hybrid) else decoder.drafter
        network._recorded = network._recorded if recorded else None
        drafted(decoder, texts, 40)
        target.graphs.prepare({len(texts): max(map(len, longer)) + limit}, target._make_cache)
        captured = target.graphs.captured
        with replayed(type(network)) as drafts:
            found.append(drafted(decoder, longer, limit))
        assert len(drafts) > 4 and (all(drafts) if recorded else not any(drafts))
    assert target.graphs.missed == 0 and target.graphs.captured == captured
    require_equal(*found)
    for row, text in enumerate(longer):
        written = [token for step in found[1][1] for token in step[0][row]][:limit]
        assert written == checks.greedy_reference(target, torch.tensor(text), limit)


@contextmanager
def replayed(kind):
    """Yields a list that gets for every proposal of a kind of network whether one recorded call makes it."""
    propose, call, calls, found = kind.propose, Calls.__call__, [], []

    def called(*args, **kwargs):
        calls.append(args)
        return call(*args, **kwargs)

    def proposed(network, context):
        before = len(calls) - (network._launched is not None)
        draft = propose(network, context)
        found.append(len(calls) == before + 1)
        return draft

    with mock.patch.object(kind, "propose", proposed), mock.patch.object(Calls, "__call__", called):
        yield found
