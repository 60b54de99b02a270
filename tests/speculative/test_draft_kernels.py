"""Draft networks by the C++ kernels compute what they do by torch's operators."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from methods.drafting import Context, Draft
from methods.engine import cpu_kernels
from methods.engine.causal_lm import CausalLM, Output
from methods.engine.draft_vocabulary import DraftVocabulary
from methods.engine.sampling import Sampling
from methods.speculative.dflash import network as block_network
from methods.speculative.dflash.checkpoint import Part as BlockPart
from methods.speculative.dflash.decoder import BlockDrafter
from methods.speculative.dflash.trees import Chain as BlockChain
from methods.speculative.eagle import network as eagle_network
from methods.speculative.eagle.checkpoint import Part
from methods.speculative.eagle.decoder import EagleDrafter
from methods.speculative.eagle.training import spec_of
from methods.speculative.eagle.trees import Chain as EagleChain
from methods.speculative.eagle.trees import Dynamic
from methods.speculative.p_eagle import network as p_eagle_network
from methods.speculative.p_eagle.decoder import PEagleDrafter
from tests.engine.test_causal_lm import tiny
from tests.helpers.tiny_block_drafter import DSPARK, random_part
from tests.helpers.tiny_block_drafter import spec_of as block_spec_of
from tests.helpers.tiny_p_eagle import random_part as parallel_part
from tests.helpers.tiny_p_eagle import spec_of as parallel_spec_of

pytestmark = pytest.mark.skipif(cpu_kernels.library() is None, reason="the kernels cannot be compiled here")
TYPES = [torch.float32, torch.bfloat16]
LAYERS = {"heads": 4, "kv_heads": 2, "head_dim": 16, "intermediate_size": 48}
BLOCKS = {
    "dflash": LAYERS,
    "no norms of heads": {**LAYERS, "qk_norm": False, "draft_layers": 1, "heads": 2},
    "dspark": {**LAYERS, **DSPARK},
}


def targets(dtype: torch.dtype) -> tuple[CausalLM, CausalLM]:
    """One model twice: for the kernels, and without them."""
    fused = CausalLM.from_hf(tiny("llama", head_dim=16).to(dtype), linear="panels")
    fused.draft_weights = "full"
    return fused, CausalLM.from_hf(tiny("llama", head_dim=16).to(dtype), linear="plain")


def close(found: Tensor, wanted: Tensor) -> bool:
    return bool((found.double() - wanted.double()).norm() < _MOST[found.dtype] * wanted.double().norm())


_MOST = {torch.float32: 1e-5, torch.bfloat16: 0.03}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("sizes", BLOCKS.values(), ids=BLOCKS.keys())
@pytest.mark.usefixtures("two_threads")
def test_a_block_of_dflash(sizes: dict[str, Any], dtype: torch.dtype) -> None:
    made, both = [], targets(dtype)
    part: BlockPart = random_part(block_spec_of(both[0], **sizes), DraftVocabulary.all(97))
    for target in both:
        network = block_network.Network(target, part)
        assert (network.fused is None) == (target is both[1])
        made.append(block_network.Reader(network, 3, 40))
    for reads, rows in (((7, 7, 7), [0, 1, 2]), ((5, 1, 3), [0, 1, 2]), ((0, 4), [2, 0])):
        torch.manual_seed(max(reads))
        for reader in made:
            reader.keep_rows(rows)
        taps = [torch.randn(len(reads), max(reads), 48).to(dtype) for _ in part.spec.taps]
        anchors = torch.randint(0, 97, (len(reads),))
        for reader in made:
            reader.read(taps, reads)
        found, wanted = (reader.block(anchors) for reader in made)
        assert close(found, wanted)


def eagle_part(target: CausalLM, version: int, **options: bool) -> Part:
    spec = replace(spec_of(target, version), **options)
    torch.manual_seed(1)
    tensors = {
        name: torch.randn(shape) * 0.2 + (1.0 if "norm" in name else 0.0)
        for name, shape in (spec.shapes() | spec.optional()).items()
    }
    return Part(spec, tensors, DraftVocabulary.all(97))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("version", "options"),
    [(1, {}), (3, {}), (3, {"norm_before_residual": True})],
    ids=["eagle", "eagle 3", "norm before the residual"],
)
@pytest.mark.parametrize("prompts", [(9, 9, 9), (9, 40, 3)], ids=["of a length", "in groups"])
@pytest.mark.parametrize("most", [1024, 6], ids=["at once", "in pieces"])
@pytest.mark.usefixtures("two_threads")
def test_pairs_and_guesses_of_eagle(
    version: int,
    options: dict[str, bool],
    most: int,
    dtype: torch.dtype,
    prompts: Sequence[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(eagle_network, "_MOST_ROWS", most)
    both = targets(dtype)
    part, made = eagle_part(both[0], version, **options), []
    for target in both:
        network = eagle_network.Network(target, part)
        assert (network.fused is None) == (target is both[1])
        made.append(eagle_network.Reader(network, 3, 60))
    torch.manual_seed(2)

    def same(act: str, *given: Any) -> Tensor:
        found, wanted = (getattr(reader, act)(*given) for reader in made)
        assert close(found, wanted), act
        return wanted

    def read(counts: Sequence[int]) -> Tensor:
        feature = torch.randn(len(counts), max(counts), 48).to(dtype)
        return same("read", feature, torch.randint(0, 97, feature.shape[:2]), counts)

    read(prompts)
    for counts in ((8, 1, 5), (4, 4, 4)):
        feature = read(counts)
        feature = same("guess", feature, torch.randint(0, 97, (3, 1)), 0, None)
        wide = feature.expand(-1, 3, -1)
        reach = torch.tensor([[[1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]]], dtype=torch.bool)
        feature = same("guess", wide, torch.randint(0, 97, (3, 3)), 1, reach)
        sees = torch.tensor([[1, 1, 0, 0, 1, 0], [1, 0, 0, 1, 0, 1]], dtype=torch.bool).expand(3, -1, -1)
        same("guess", feature[:, [0, 2]], torch.randint(0, 97, (3, 2)), 2, sees)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("sizes", [{}, {"layers": 1}, {"layers": 3, "norm_before_residual": True, "mask": 5}])
@pytest.mark.parametrize("most", [1024, 6], ids=["at once", "in pieces"])
@pytest.mark.usefixtures("two_threads")
def test_pairs_and_masked_places_of_p_eagle(
    sizes: dict[str, Any], most: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(p_eagle_network, "_MOST_ROWS", most)
    made, both = [], targets(dtype)
    part = parallel_part(replace(parallel_spec_of(both[0], **sizes), **LAYERS), DraftVocabulary.all(97))
    for target in both:
        network = p_eagle_network.Network(target, part)
        assert (network.first is None) == (target is both[1])
        made.append(p_eagle_network.Reader(network, 3, 60))
    torch.manual_seed(3)
    for counts, rows in (((9, 9, 9), [0, 1, 2]), ((5, 1, 3), [0, 1, 2]), ((0, 4), [2, 0])):
        for reader in made:
            reader.keep_rows(rows)
        feature = torch.randn(len(counts), max(counts), 48).to(dtype)
        tokens = torch.randint(0, 97, feature.shape[:2])
        there = [row for row, count in enumerate(counts) if count]
        found, wanted = (reader.draft(feature, tokens, counts, 3)[there] for reader in made)
        assert close(found, wanted)


def drafter_of(kind: str, target: Any) -> Any:
    layers = {**LAYERS, "intermediate_size": target.hidden_size}
    if kind == "eagle":
        network = eagle_network.Network(target, eagle_part(target, 3))
        return EagleDrafter(network, EagleChain(2, False), target.n_layers - 1)
    if kind == "p_eagle":
        part = parallel_part(replace(parallel_spec_of(target), **layers), DraftVocabulary.all(97))
        return PEagleDrafter(p_eagle_network.Network(target, part), BlockChain(2, False))
    part = random_part(block_spec_of(target, **layers, **DSPARK), DraftVocabulary.all(97))
    return BlockDrafter(block_network.Network(target, part), BlockChain(2, False))


KINDS = ["eagle", "p_eagle", "dspark"]


@pytest.mark.parametrize("bits", ["int8", "int4"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_network_of_rounded_weights_takes_less_memory_and_drafts_nearly_the_same_in_8_bits(
    kind: str, bits: Any
) -> None:
    drafts, bytes_of = [], []
    for form in ("full", bits):
        target = CausalLM.from_hf(tiny("llama", hidden_size=64, num_attention_heads=4).to(torch.bfloat16))
        target.draft_weights = form
        drafter = drafter_of(kind, target)
        bytes_of.append(sum(drafter.nbytes.values()))
        prompts = [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]]
        drafter.reset(prompts, 40)
        torch.manual_seed(0)
        states = torch.randn(2, 6, 64).to(torch.bfloat16)
        output = Output(torch.zeros(2, 1, 97), states, dict.fromkeys(drafter.hidden_layers, states))
        texts = [[*prompt, 13] for prompt in prompts]
        context = Context(texts, torch.tensor([13, 13]), output, None, Sampling(), torch.Generator())
        drafts.append(drafter.propose(context))
    assert bytes_of[1] < (0.8 if bits == "int8" else 0.65) * bytes_of[0]
    whole, rounded = (draft.gains for draft in drafts)
    assert not torch.equal(whole, rounded)
    assert bits == "int4" or torch.allclose(whole, rounded, rtol=0.3)


@pytest.mark.parametrize("kind", KINDS)
def test_keys_and_values_of_a_token_take_what_is_planned(kind: str) -> None:
    drafter = drafter_of(kind, targets(torch.float32)[1])
    drafter.reset([[1, 2, 3], [4, 5, 6]], 40)
    cache = drafter._reader._cache
    assert cache.nbytes == 2 * cache.capacity * drafter.token_bytes


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_waits_for_one_that_sits_out_rounds_at_its_limit(kind: str, kernels: bool) -> None:
    """One row has reached its limit; the other, of which little was read, is then read at once."""
    drafter = drafter_of(kind, targets(torch.float32)[0 if kernels else 1])
    limit, prompts = 40, [[1, 2, 3], [4, 5, 6]]
    drafter.reset(prompts, limit)
    torch.manual_seed(0)

    def passed(nodes: int, path: Tensor | None, tokens: list[list[int]]) -> Context:
        states = torch.randn(2, nodes, 48)
        output = Output(torch.zeros(2, 1, 97), states, dict.fromkeys(drafter.hidden_layers, states))
        return Context(tokens, torch.tensor([row[-1] for row in tokens]), output, path, Sampling(), torch.Generator())

    tokens = [[*row, 7] for row in prompts]
    drafter.propose(passed(3, None, tokens))
    tokens = [tokens[0] + [8] * (limit - 1), tokens[1] + [9]]
    every = torch.stack([torch.arange(limit - 1), torch.full((limit - 1,), -1)])
    every[1, 0] = 0
    drafter.propose(passed(limit - 1, every, tokens))
    for _ in range(limit - 3):
        tokens = [tokens[0], tokens[1] + [9]]
        drafter.skip(passed(1, torch.zeros(2, 1, dtype=torch.long), tokens))
    draft = drafter.propose(passed(1, torch.zeros(2, 1, dtype=torch.long), [tokens[0], tokens[1] + [9]]))
    assert draft.tokens.shape[0] == 2


def drafts_of_eagle(
    sizes: tuple[Any, ...], dtype: torch.dtype, weights: Any = "full", **options: bool
) -> list[tuple[Draft, Draft]]:
    """Round by round the tree in one call of the kernels, and that of the operators; sizes: see ``Dynamic``."""
    sixteens = {"head_dim": 16, "hidden_size": 64, "num_attention_heads": 4}
    target = CausalLM.from_hf(tiny("llama", **sixteens).to(dtype), linear="panels")
    target.draft_weights = weights
    part = eagle_part(target, 3, **options)
    vocabulary = DraftVocabulary(torch.arange(97)[torch.arange(97) % 3 > 0], 97)
    part = Part(part.spec, part.tensors, vocabulary)
    growth = Dynamic(*sizes[:3], torch.device("cpu"), *sizes[3:])
    made = [EagleDrafter(eagle_network.Network(target, part), growth, target.n_layers - 1) for _ in range(2)]
    assert all(drafter._tree is not None for drafter in made)
    made[1]._tree = None
    torch.manual_seed(3)
    text, greedy, rng = torch.randint(0, 97, (200,)).tolist(), Sampling(), torch.Generator()
    for drafter in made:
        drafter.reset([text[:90]], 100)
    place, new = 0, 90  # a prompt, and then what passes completed
    rounds, skipped = [], list[None]()
    while place + new < len(text):
        nodes = 2 * new if place else new  # of a tree, of which every other node was kept
        taps = {tap: torch.randn(1, nodes, 64).to(dtype) for tap in part.spec.taps}
        path, kept = (torch.arange(0, nodes, 2)[None], [[*range(0, nodes, 2)]]) if place else (None, None)
        place += new
        output = Output(torch.empty(1, nodes, 0), torch.randn(1, nodes, 64).to(dtype), taps)
        context = Context([text[: place + 1]], torch.tensor([text[place]]), output, path, greedy, rng, kept=kept)
        if len(rounds) % 3 == 2 and not skipped:  # the next one reads two passes
            skipped = [drafter.skip(context) for drafter in made]
        else:
            rounds.append((made[0].propose(context), made[1].propose(context)))
            skipped = []
        new = 1 + place % 4
    assert len({tuple(found.tokens[0].tolist()) for found, _ in rounds}) > 15
    return rounds


def require_same(found: Draft, wanted: Draft) -> None:
    assert found.tokens.tolist() == wanted.tokens.tolist()
    assert found.parents.tolist() == wanted.parents.tolist()
    assert isinstance(found.gains, Tensor) and isinstance(wanted.gains, Tensor)
    assert torch.equal(found.gains, wanted.gains)
    assert found.levels == wanted.levels == found.passes == wanted.passes


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    "options",
    [{}, {"norm_before_residual": True}, {"norm_output": True}, {"fc_norm": True}],
    ids=lambda each: str(*each),
)
@pytest.mark.parametrize("sizes", [(5, 2, 3), (4, 1, 6), (24, 4, 5)], ids=str)
@pytest.mark.parametrize("weights", ["full", "int8"])
@pytest.mark.usefixtures("two_threads")
def test_a_tree_of_eagle_in_one_call_has_the_bits_of_the_operators(
    options: dict[str, bool], sizes: tuple[int, int, int], weights: Any, dtype: torch.dtype
) -> None:
    for found, wanted in drafts_of_eagle(sizes, dtype, weights, **options):
        require_same(found, wanted)
        assert found.levels == sizes[1]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.usefixtures("two_threads")
def test_a_tree_of_eagle_grows_no_level_after_unlikely_paths(dtype: torch.dtype) -> None:
    """Below a probability that half of the second levels have there is no third one; the nodes are those of a tree of
    as many levels.
    """
    whole = [draft for draft, _ in drafts_of_eagle((24, 4, 5), dtype)]
    second = [float(draft.gains[draft.parents >= 0].max()) for draft in whole]  # type: ignore[index, union-attr]
    between = math.sqrt(sorted(second)[len(second) // 2 - 1] * sorted(second)[len(second) // 2])
    short, levels = [draft for draft, _ in drafts_of_eagle((24, 2, 5), dtype)], set()
    for (found, wanted), most, both in zip(drafts_of_eagle((24, 4, 5, between), dtype), second, short, strict=True):
        require_same(found, wanted)
        assert (found.levels == 2) == (most < between)
        if found.levels == 2:
            assert found.tokens.tolist() == both.tokens.tolist() and found.parents.tolist() == both.parents.tolist()
        levels.add(found.levels)
    assert 2 in levels and len(levels) > 1
