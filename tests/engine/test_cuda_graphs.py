"""Passes of fixed shape: the same texts and states as kernel by kernel, at addresses that do not move."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bench.contract import checks
from methods.autoregressive import Autoregressive
from methods.drafting import Draft, StatelessDrafter
from methods.engine.cuda_graphs import Form, GraphedLM, Recorded, Replay, bucket
from methods.engine.sampling import Sampling
from methods.engine.token_tree import ABSENT, closure_steps
from methods.speculative.loop import SpeculativeDecoder
from methods.speculative.prompt_lookup import PromptLookup
from methods.speculative.self_speculative.decoder import SelfSpeculative
from methods.speculative.speculative_sampling import SpeculativeSampling
from methods.speculative.token_recycling import TokenRecycling
from methods.speculative.verification import Greedy
from tests.helpers.tiny_block_drafter import DSPARK, block_drafter
from tests.helpers.tiny_eagle import eagle
from tests.helpers.tiny_head_trees import hydra, medusa

DECODERS = {
    "autoregressive": Autoregressive,
    "prompt_lookup": PromptLookup,
    "token_recycling": lambda target, sampling: TokenRecycling(target, sampling, tree="small"),
    "layer_skip": lambda target, sampling: SpeculativeSampling(target, sampling, skip_attention=[1], skip_mlp=[2]),
    "eagle": lambda target, sampling: eagle(target, sampling, 3, depth=3, top_k=3, nodes=8),
    "medusa": lambda target, sampling: medusa(target, sampling, nodes=12),
    "hydra_heads": lambda target, sampling: hydra(target, sampling, nodes=12),
    "dspark": lambda target, sampling: block_drafter(target, sampling, sizes=DSPARK),
}
PROMPTS = [[3, 5, 7, 5, 3, 5, 7], [11, 2], [4, 4, 4, 4, 9, 8, 1, 2, 3, 4, 4]]


def with_graphs(layers=4):
    return GraphedLM.of(checks.tiny_target(layers=layers), capture=False)


def decode(decoder, prompts, limit=40):
    rows = [[] for _ in prompts]
    for step in decoder.decode([torch.tensor(row) for row in prompts], limit, torch.Generator().manual_seed(0)):
        for row, new in zip(rows, step.tokens, strict=True):
            row.extend(new)
    return [row[:limit] for row in rows]


@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["one", "ragged"])
@pytest.mark.parametrize("name", DECODERS)
def test_texts_are_those_of_the_ordinary_passes(name, prompts):
    fixed = with_graphs()
    wanted = decode(Autoregressive(checks.tiny_target(), Sampling()), prompts)
    assert decode(DECODERS[name](fixed, Sampling()), prompts) == wanted
    assert fixed.graphs.captured > 0


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8)], ids=["greedy", "drawn"])
@pytest.mark.parametrize(
    "skipped", [{"skip_attention": [1], "skip_mlp": [2]}, {"layer_exit": 2}], ids=["inner", "exit"]
)
def test_drafts_in_the_cache_of_the_target_are_verified_by_replays(skipped, sampling):
    prompts, target, ordinary = checks.prompts(61, (5, 1, 14, 8)), with_graphs(), checks.tiny_target()
    ordinary.pays_to_drop = target.pays_to_drop  # rows that have ended draw too
    plain = SelfSpeculative(ordinary, sampling, **skipped)
    decoders = [SelfSpeculative(target, sampling, **skipped) for _ in range(2)]
    for seed, decoder in enumerate(decoders * 2):
        missed, wanted = target.graphs.missed, checks.outputs(plain, prompts, 40, seed)
        assert checks.outputs(decoder, prompts, 40, seed) == wanted
    assert target.graphs.captured > 0 and target.graphs.missed == missed, "the last decode is replayed"


@pytest.mark.parametrize("parents", [None, torch.tensor([[-1, -1, 0, 2]]).expand(3, -1)], ids=["chain", "tree"])
def test_states_and_taps_are_those_of_the_ordinary_pass(parents):
    plain, fixed = checks.tiny_target(), with_graphs()
    tokens = torch.arange(15).view(3, 5) + 1
    outputs = []
    for target in (plain, fixed, fixed, fixed):
        cache = target.new_cache(3, 60)
        target.prefill([torch.tensor(prompt) for prompt in PROMPTS], cache)
        output = target.forward(tokens, parents, cache, levels=3, hidden_layers=(0, 2))
        kept = [cache.view(layer, n)[part].clone() for layer in range(4) for part in (0, 1) for n in [20]]
        outputs.append((output, kept))
        del cache
    assert fixed.graphs.captured == 1  # of three passes: the first ran kernel by kernel, the third replayed
    wanted, written = outputs[0]
    for output, kept in outputs[1:]:
        torch.testing.assert_close(output.logits, wanted.logits)
        torch.testing.assert_close(output.hidden, wanted.hidden)
        for tap in (0, 2):
            torch.testing.assert_close(output.hidden_layers[tap], wanted.hidden_layers[tap])
        for ours, theirs in zip(kept, written, strict=True):
            for row, prompt in enumerate(PROMPTS):
                end = len(prompt) + 5
                torch.testing.assert_close(ours[row, :, :end], theirs[row, :, :end])


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("nodes", [1, 3, 5, 13, 70])
def test_passes_between_two_sizes_are_filled_up(nodes, tree):
    parents = (torch.arange(nodes - 1)[None] // 2 - 1).expand(2, -1) if tree and nodes > 1 else None
    tokens = torch.arange(2 * nodes).view(2, nodes) % 50 + 1
    found = []
    for target in (checks.tiny_target(), with_graphs(), with_graphs()):
        cache = target.new_cache(2, 200)
        target.prefill([torch.tensor(prompt) for prompt in PROMPTS[:2]], cache)
        for _ in range(3):
            output = target.forward(tokens, parents, cache, levels=7 if tree else None, hidden_layers=(1,))
        found.append(output)
    assert target.graphs.captured == 1 and target.graphs.missed == 1, "the first one runs kernel by kernel"
    for output in found[1:]:
        torch.testing.assert_close(output.logits, found[0].logits)
        torch.testing.assert_close(output.hidden_layers[1], found[0].hidden_layers[1])


def test_nodes_that_are_left_over_are_emptied_by_the_copy_of_the_others():
    """A draft of another length takes no launch more."""

    class Launches(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            launched.append(func._overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    launched, tokens, parents = [], torch.zeros(2, 8, dtype=torch.long), torch.full((2, 7), -1)
    replay = Replay(Form(8, 3, 128, (), True), tokens, parents, Recorded(lambda: None, ()), ())
    for seen, given in enumerate((5, 3, 8, 5, 3, 8)):
        nodes, above = torch.randint(9, (2, given)), torch.arange(-1, given - 2).expand(2, -1)
        parts = [nodes[:, :1], nodes[:, 1:]]
        launched.clear()
        with Launches():
            replay.run(parts, above, given)
        assert tokens.tolist() == [row + [ABSENT] * (8 - given) for row in nodes.tolist()]
        assert parents.tolist() == [row + [-1] * (8 - given) for row in above.tolist()]
        assert seen < 3 or launched == ["_foreach_copy_"], "the parts of the buffers are known by then"


def test_what_is_prepared_is_all_that_comes():
    """Texts of other lengths than the warm-up's, drafts of other sizes and smaller batches replay graphs."""
    target = with_graphs()
    decoder = PromptLookup(target, Sampling(), gamma=7)
    decode(decoder, PROMPTS)
    decode(Autoregressive(target, Sampling()), PROMPTS)
    GraphedLM.prepare({3: 230, 2: 230, 1: 230})
    captured = target.graphs.captured
    longer = [prompt * 12 for prompt in PROMPTS]
    for prompts in (longer, longer[1:], longer[:1], PROMPTS):
        wanted = decode(Autoregressive(checks.tiny_target(), Sampling()), prompts, 90)
        assert decode(decoder, prompts, 90) == decode(Autoregressive(target, Sampling()), prompts, 90) == wanted
    assert target.graphs.missed == 0 and target.graphs.captured == captured
    decode(Autoregressive(target, Sampling()), [prompt * 40 for prompt in PROMPTS[2:]])
    assert target.graphs.missed > 0 and target.graphs.captured == captured, "nothing is captured while a clock runs"


def test_a_draft_may_be_larger_than_those_of_the_warm_up():
    class Growing(StatelessDrafter):
        nodes = 24

        def propose(self, context):
            return Draft.chains([[4] * (len(text) // 4) for text in context.tokens], context.root.device)

    target = with_graphs()
    decoder = SpeculativeDecoder(target, Sampling(), Growing(), Greedy())
    decode(decoder, [PROMPTS[0]], 5)
    GraphedLM.prepare({1: 96})
    plain = Autoregressive(checks.tiny_target(), Sampling())
    assert decode(decoder, [[4] * 40], 56) == decode(plain, [[4] * 40], 56)
    assert target.graphs.missed == 0


@pytest.mark.parametrize("nodes, levels", [(1, None), (4, None), (3, 2), (8, 5), (8, 7)])
@pytest.mark.parametrize("whole", [False, True], ids=["pass", "round"])
@torch.inference_mode()
def test_once_prepared_a_larger_pass_does_for_a_smaller_one(whole, nodes, levels):
    """One over a deeper tree, over more nodes, or with the states of more layers."""
    texts = torch.tensor([checks.greedy_reference(checks.tiny_target(), torch.tensor(text), 7) for text in PROMPTS[:2]])
    above = torch.tensor([-1, 0, -1, 1, 3, 4, 5]).expand(2, -1)
    tokens = texts[:, [0, 1, 2, 0, 3, 4, 5, 6]]
    tokens[1, 5:] = 9

    def scored(target, taps, nodes=8, parents=above, levels=7):
        cache = target.new_cache(2, 60)
        target.prefill([torch.tensor(prompt) for prompt in PROMPTS[:2]], cache)
        given = {"levels": levels, "hidden_layers": taps}
        if not whole:
            return target.forward(tokens[:, :nodes], parents, cache, **given)
        return target.round([tokens[:, :nodes]], parents, cache, **given)

    fixed, own = with_graphs(), with_graphs()
    for _ in range(2):
        scored(fixed, (1, 2))
        wanted = scored(own, (1,), nodes, None if levels is None else above[:, : nodes - 1], levels)
    GraphedLM.prepare({2: 30})
    found = scored(fixed, (1,), nodes, None if levels is None else above[:, : nodes - 1], levels)
    assert fixed.graphs.missed == 0
    kept = [range(nodes)] * 2
    if whole:
        assert found.read() == wanted.read()
        kept = [range(1 + len(columns)) for columns, _ in found.read()]
    for row, places in enumerate(kept):
        torch.testing.assert_close(found.hidden[row, places], wanted.hidden[row, places])
        torch.testing.assert_close(found.hidden_layers[1][row, places], wanted.hidden_layers[1][row, places])


def test_a_cache_made_in_inference_mode_is_used_outside_of_it():
    target = with_graphs()
    with torch.inference_mode():
        cache = target.new_cache(2, 50)
        del cache
    gc.collect()
    target.new_cache(2, 50).set_lengths([3, 4])


def test_caches_of_other_batch_sizes_are_kept():
    target = with_graphs()
    addresses = []
    for batch in (1, 4, 1, 4):
        cache = target.new_cache(batch, 50)
        addresses.append(cache.store.data_ptr())
        del cache
        gc.collect()
    assert addresses[:2] == addresses[2:], "with their graphs: bench.cost measures several sizes in turn"


def test_what_a_pass_returned_survives_the_next_one():
    target = with_graphs()
    cache = target.new_cache(1, 60)
    target.prefill([torch.tensor(PROMPTS[0])], cache)
    outputs = [target.forward(torch.tensor([[token]]), None, cache, hidden_layers=(1,)) for token in (3, 3, 3, 9, 3)]
    assert target.graphs.captured == 1
    assert torch.equal(outputs[2].hidden, outputs[4].hidden) and torch.equal(
        outputs[2].hidden_layers[1], outputs[4].hidden_layers[1]
    )
    assert not torch.equal(outputs[2].hidden, outputs[3].hidden)


def test_a_cache_in_use_is_not_handed_out_again():
    target = with_graphs()
    first, second = target.new_cache(2, 50), target.new_cache(2, 50)
    assert first.store.data_ptr() != second.store.data_ptr()
    address = first.store.data_ptr()
    first.set_lengths([7, 8])
    del first
    gc.collect()
    third = target.new_cache(2, 100)
    assert third.store.data_ptr() == address and third.lengths == [0, 0] and third.length.tolist() == [0, 0]
    assert target.new_cache(2, 129).capacity >= 129 and target.new_cache(1, 50).batch == 1


def test_rows_that_leave_a_batch_leave_the_graphs():
    target = with_graphs()
    cache = target.new_cache(3, 60)
    target.prefill([torch.tensor(prompt) for prompt in PROMPTS], cache)
    cache.select([0, 2])
    tokens = torch.tensor([[1], [2]])
    for _ in range(3):
        output = target.forward(tokens, None, cache)
    assert target.graphs.captured == 0
    plain = checks.tiny_target()
    other = plain.new_cache(2, 60)
    plain.prefill([torch.tensor(PROMPTS[0]), torch.tensor(PROMPTS[2])], other)
    torch.testing.assert_close(output.logits, plain.forward(tokens, None, other).logits)


def test_a_view_has_graphs_of_its_own():
    target = with_graphs()
    view = target.skip(attention=[1])
    assert view.graphs is not target.graphs
    wanted = decode(Autoregressive(checks.tiny_target().skip(attention=[1]), Sampling()), PROMPTS)
    assert decode(Autoregressive(view, Sampling()), PROMPTS) == wanted
    assert view.graphs.captured > 0 and target.graphs.captured == 0


@pytest.mark.parametrize("slots, wanted", [(1, 128), (128, 128), (129, 192), (193, 256), (257, 384), (1025, 1536)])
def test_buckets(slots, wanted):
    assert bucket(slots) == wanted


def test_levels_of_a_form_take_the_same_products():
    for levels in range(1, 70):
        assert closure_steps(1 << closure_steps(levels)) == closure_steps(levels)
        assert 1 << closure_steps(levels) >= levels


def test_only_cuda_captures():
    with pytest.raises(AssertionError, match="only CUDA"):
        GraphedLM.of(checks.tiny_target())
