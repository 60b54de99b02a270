"""Triton's kernels make the trees that torch's operators make, to the last bit of a score.

Without a GPU they run in Triton's interpreter.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.contract import checks
from methods.engine import token_tree
from methods.engine.cuda_graphs import GraphedLM
from methods.engine.draft_vocabulary import DraftVocabulary
from methods.engine.sampling import Sampling
from methods.speculative import ranked_tree
from methods.speculative.eagle.network import FixedReader
from methods.speculative.ranked_tree import Beam, KernelPaths, RankedTree, TorchPaths
from methods.speculative.recorded_network import KeptTokens
from tests.engine.test_triton_kernels import DEVICE, ON_GPU, PROMPTS, both, kernels, random
from tests.speculative import test_rounds

triton = pytest.importorskip("triton", reason="no package named triton, which the dev extra brings on Linux")
pytestmark = [pytest.mark.gpu] if ON_GPU else []  # of a GPU's tests, too
with pytest.MonkeyPatch.context() as _patch:
    if not ON_GPU:
        _patch.setenv("TRITON_INTERPRET", "1")
    from methods.engine import triton_trees as trees

VOCABULARY = 50
GROWN = {"depth": 3, "top_k": 3, "nodes": 8}
SIZES = [  # rows, k, levels, nodes
    (1, 1, 1, 1),
    (2, 1, 3, 3),
    (1, 2, 2, 6),
    (3, 3, 1, 2),
    (2, 3, 4, 8),
    (1, 10, 5, 59),
    (2, 10, 6, 17),
    (1, 11, 2, 60),
    (1, 16, 5, 64),
]


def vocabulary(full: bool) -> DraftVocabulary:
    if full:
        return DraftVocabulary.all(VOCABULARY, DEVICE)
    return DraftVocabulary(torch.arange(VOCABULARY, device=DEVICE) * 3 + 1, 3 * VOCABULARY)


def levels_of(rows: int, k: int, levels: int, ties: bool, shared: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of each level the children of a beam: log-probabilities, the highest first, and places."""
    found = []
    for level in range(levels):
        nodes = 1 if shared or not level else k
        shape = rows, nodes, k
        gained = -torch.randint(0, 4, shape).float() if ties else torch.randn(rows, nodes, VOCABULARY).log_softmax(2)
        gained = gained[..., :k].sort(-1, descending=True).values
        found.append((gained.to(DEVICE), torch.randint(0, VOCABULARY, shape, device=DEVICE)))
    return found


def require_equal(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape and torch.equal(ours, theirs)


@pytest.mark.parametrize("full", [True, False], ids=["full", "reduced"])
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "own"])
@pytest.mark.parametrize("ties", [True, False], ids=["ties", "different"])
@pytest.mark.parametrize(("rows", "k", "levels", "nodes"), SIZES)
def test_trees_are_those_of_torch(
    rows: int, k: int, levels: int, nodes: int, ties: bool, shared: bool, full: bool
) -> None:
    torch.manual_seed(0)
    words, tree = vocabulary(full), RankedTree(nodes, levels, k, DEVICE)
    plain, ours = tree._paths(rows, words, False), tree._paths(rows, words, True)
    assert isinstance(plain, TorchPaths) and isinstance(ours, KernelPaths)
    given = levels_of(rows, k, levels, ties, shared)
    if ON_GPU and ties:
        pytest.skip("torch takes any of equal scores there")
    for number, level in enumerate(given):
        for paths in (plain, ours):
            paths.add(*level, last=number == levels - 1 > 0)
        if number < levels - 1:
            require_equal(ours.scores, plain.scores)
            require_equal(ours.beam.tokens, plain.beam.tokens)
            assert ours.beam.level == plain.beam.level == number
            if number:
                require_equal(ours.beam.source, plain.beam.source)
            else:
                assert ours.beam.source is None is plain.beam.source
    for part, name in enumerate(("scores", "tokens", "parents")):
        every = torch.cat([level[part] for level in plain._levels], 1)
        require_equal(getattr(ours._room, name), every)
    found, wanted = ours.best(nodes), plain.best(nodes)
    for number in range(2):
        require_equal(found[number], wanted[number])
    torch.testing.assert_close(found[2], wanted[2], rtol=1e-5, atol=0.0)
    assert found[0].shape == (rows, nodes)
    for row in found[1].tolist():
        assert all(-1 <= parent < column for column, parent in enumerate(row))


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "own"])
def test_trees_of_equal_scores_are_the_first_candidates(shared: bool) -> None:
    """Also where torch's operators take others."""
    k, levels, nodes = 3, 3, 9
    paths = KernelPaths(2, k, levels, vocabulary(True))
    for number in range(levels):
        shape = 2, 1 if shared or not number else k, k
        paths.add(torch.full(shape, -1.0, device=DEVICE), torch.zeros(shape, dtype=torch.long, device=DEVICE), False)
        if number:
            assert paths.beam.source.tolist() == 2 * [[0, 0, 0]]
    tokens, parents, gains = paths.best(nodes)
    assert parents.tolist() == 2 * [[-1, -1, -1, 0, 0, 0, 1, 1, 1]]
    assert not tokens.any() and gains.shape == (2, nodes)


def test_a_sure_child_stays_behind_its_parent() -> None:
    """By one bit of its score, whatever that is."""
    least = torch.finfo(torch.float32).smallest_normal
    scores = [0.0, -0.0, -least, -1e-42, -1.0, -2.0, -3.4e38, -math.inf, 1.0, least, 5e-40, 3.0]
    above = torch.tensor([scores], device=DEVICE)
    k, empty = len(scores), torch.zeros(1, len(scores), dtype=torch.long, device=DEVICE)
    room = trees.Candidates.room(1, k * k, DEVICE)
    chosen, gained = trees.Chosen(above, empty, empty, empty), torch.zeros(1, k, k, device=DEVICE)
    trees.next_level(chosen, gained, gained.long(), None, room, 0, choose=False)
    wanted = ranked_tree._below(above.cpu()).repeat_interleave(k, 1)
    assert room.scores.cpu().view(torch.int32).tolist() == wanted.view(torch.int32).tolist()


@pytest.mark.parametrize("nodes", [1, 3, 7, 12])
def test_the_best_of_unusual_scores(nodes: int) -> None:
    """Infinite ones, both zeros, and positive ones."""
    scores = torch.tensor([[-math.inf, 0.0, -0.0, 2.0, -math.inf, -3.0, 1e-42, 2.0, -1e-42, 0.0, -3.0, -1e30]])
    columns = torch.arange(12)[None]
    room = trees.Candidates(*(part.to(DEVICE) for part in (scores, columns, torch.full((1, 12), -1))))
    wanted = sorted(range(12), key=lambda column: (-float(scores[0, column]), column))[:nodes]
    tokens, parents, gains = trees.best_nodes(room, 12, nodes)
    assert tokens.tolist() == [sorted(wanted)] and parents.tolist() == [[-1] * nodes]
    torch.testing.assert_close(gains.cpu(), scores[:, sorted(wanted)].exp())


def grown(tree: RankedTree, words: DraftVocabulary, rows: int, shared: bool) -> Any:
    """A tree over random logits, and the beams that were asked for."""
    torch.manual_seed(1)
    beams: list[Beam] = []

    def expand(beam: Beam) -> torch.Tensor:
        beams.append(beam)
        nodes = 1 if shared else beam.tokens.shape[1]
        return 3 * torch.randn(rows, nodes, VOCABULARY).to(DEVICE)

    draft = tree.grow(words, 3 * torch.randn(rows, 1, VOCABULARY).to(DEVICE), expand, 5, True)
    made = [(beam.level, beam.tokens.tolist(), None if beam.source is None else beam.source.tolist()) for beam in beams]
    return draft, made


@pytest.mark.parametrize("least", [-math.inf, -0.7], ids=["all levels", "ends early"])
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "own"])
@pytest.mark.parametrize(
    ("rows", "k", "levels", "nodes"), [(2, 4, 5, 20), (1, 10, 4, 59), (3, 2, 8, 10), (1, 17, 2, 9)]
)
def test_whole_growth(
    rows: int, k: int, levels: int, nodes: int, shared: bool, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, words = RankedTree(nodes, levels, k, DEVICE, least), vocabulary(False)
    assert trees.takes(k, levels) == (k <= 16)
    draft, beams = grown(tree, words, rows, shared)
    monkeypatch.setattr(trees, "takes", lambda *sizes: False)
    wanted, theirs = grown(tree, words, rows, shared)
    assert beams == theirs
    assert (draft.levels, draft.width, draft.passes) == (wanted.levels, wanted.width, wanted.passes)
    if least > -math.inf and not ON_GPU:
        assert draft.levels < levels, "the tree ends early"
    require_equal(draft.tokens, wanted.tokens)
    require_equal(draft.parents, wanted.parents)
    torch.testing.assert_close(draft.gains, wanted.gains, rtol=1e-5, atol=0.0)


def test_large_trees_are_left_to_torch() -> None:
    assert trees.takes(16, 16) and not trees.takes(16, 17) and not trees.takes(17, 1)
    assert isinstance(RankedTree(5, 2, 17, DEVICE)._paths(1, vocabulary(True), True), TorchPaths)
    assert isinstance(RankedTree(5, 2, 16, DEVICE)._paths(1, vocabulary(True), False), TorchPaths)


@pytest.mark.skipif(ON_GPU, reason="the other tests compile the kernels")
def test_kernels_compile_for_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To machine code, which takes no GPU, and within the memory of one multiprocessor."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    floats = {"ABOVE", "GAINED", "SCORES", "BEST", "GAINS"}
    sizes = {"K": 10, "COUNT": 100, "BLOCK": 128, "ROOT": False, "SHARED": False, "TABLE": True, "CHOOSE": True}
    entered = {"BLOCK": 1024, "TURNED_BLOCK": 128, "FOLLOW": True, "SHARED": False, "CHAIN": False, "NORM": True}
    entered |= {"NORM_RESIDUAL": False}
    wide = {"FEATURE", "EMBEDDING", "RESIDUAL", "READ", "COS", "SIN"}
    wide |= {"TOKEN_WEIGHT", "FEATURE_WEIGHT", "COS_TABLE", "SIN_TABLE"}
    for kernel, constants, warps in (
        (trees._next_level, sizes, 4),
        (trees._next_level, sizes | {"COUNT": 10, "BLOCK": 16, "ROOT": True, "SHARED": True}, 4),
        (trees._next_level, sizes | {"K": 16, "COUNT": 256, "BLOCK": 256, "SHARED": True, "TABLE": False}, 8),
        (trees._best_nodes, {"NODES": 59, "BLOCK": 512}, 4),
        (trees._best_nodes, {"NODES": 8, "BLOCK": 16}, 4),
        (trees._best_nodes, {"NODES": 64, "BLOCK": 4096}, 8),
        (trees._kept_tokens, {"BLOCK": 64}, 1),
        (trees._enter_pairs, entered, 4),
        (trees._enter_pairs, entered | {"BLOCK": 4096, "FOLLOW": False, "CHAIN": True}, 8),
    ):
        function = triton.runtime.JITFunction(kernel.fn)
        types = {
            name: "constexpr" if name in constants else "fp32" if name == "eps"
            else "i32" if name.islower() or name in ("WIDTH", "TURNED")
            else "*fp32" if name in floats else "*bf16" if name in wide else "*i64"
            for name in function.arg_names
        }  # fmt: skip
        source = ASTSource(function, types, constexprs=constants)
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
        assert made.asm["cubin"] and made.metadata.shared <= 48 << 10


# -- what a draft network reads ---------------------------------------------------------------------------------------


def test_what_a_round_kept() -> None:
    absent = token_tree.ABSENT
    rows = [[9, 0, 2, absent, absent, 5, absent, absent], [7, 0, absent, absent, absent, absent, absent, absent]]
    rows += [[3, 0, 1, 4, 5, 8, 6, 2], [0, 0, 3, 4, absent, 1, 2, absent]]
    report = torch.tensor(rows, device=DEVICE)
    for given in (report, report[:, [0, 1, 5]][:, :2], report.repeat(1, 2)[:, :8]):
        ours, theirs = KeptTokens.of(given, True), KeptTokens.of(given)
        for part in ("following", "counts", "bonus"):
            require_equal(getattr(ours, part), getattr(theirs, part))
    assert KeptTokens.of(report, True).following.tolist() == [[5, 9, 0, 0], [7, 0, 0, 0], [8, 6, 2, 3], [1, 2, 0, 0]]


@pytest.mark.parametrize("normed", ["neither", "both", "residual"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [24, 2304])
def test_pairs_enter_a_layer(width: int, dtype: torch.dtype, normed: str) -> None:
    torch.manual_seed(0)
    rows, nodes, before, turned, most = 2, 5, 7, 12, 1e-5 if dtype == torch.float32 else 2e-2
    feature, embedding = (random(*shape, width, dtype=dtype) for shape in ((rows, nodes), (30,)))
    weights, table = random(2, width, dtype=dtype), random(2, 40, 1, turned, dtype=dtype)
    norms = None if normed == "neither" else (weights[0], weights[1], 1e-5)
    tokens, length = torch.randint(0, 30, (rows, nodes), device=DEVICE), torch.tensor([3, 33], device=DEVICE)
    source = torch.randint(0, nodes, (rows, nodes), device=DEVICE)
    reach = torch.rand(rows, nodes, before, device=DEVICE) < 0.5
    above, last = kernels.pack_bits(reach), 36
    own = torch.eye(nodes, dtype=torch.bool, device=DEVICE).expand(rows, -1, -1)
    followed = torch.cat([reach.gather(1, source[:, :, None].expand(-1, -1, before)), own], 2)
    columns = torch.arange(nodes, device=DEVICE)
    tree = {"level": 3, "source": source, "above": above, "earlier": before}
    for given, more, places, from_, seen in (
        (feature, {}, length[:, None] + columns, columns.expand(rows, -1), None),
        (feature, {"level": 2}, length[:, None] + 2, columns.expand(rows, -1), own),
        (feature[:, :1], {"level": 0}, length[:, None], torch.zeros_like(source), own),
        (feature, tree, length[:, None] + 3, source, followed),
    ):
        states, tokens_of = given.gather(1, from_[:, :, None].expand(-1, -1, width)), embedding[tokens]
        read = [tokens_of, states]
        if norms is not None:
            pairs = zip((tokens_of, states), weights, strict=True)
            read = [kernels.add_norm_eager(x.flatten(0, 1), None, weight, 1e-5)[1].view_as(x) for x, weight in pairs]
        residual, found, cos, sin, bits = trees.enter_pairs(
            given, tokens, embedding, norms, normed == "residual", (table[0], table[1]), length, last, **more
        )
        torch.testing.assert_close(residual, read[1] if normed == "residual" else states, rtol=most, atol=most)
        torch.testing.assert_close(found, torch.cat(read, 2), rtol=most, atol=most)
        places = places.clamp(max=last).expand(rows, nodes)
        require_equal(cos, table[0][places])
        require_equal(sin, table[1][places])
        if seen is None:
            assert bits is None
        else:
            require_equal(bits, kernels.pack_bits(seen))


@pytest.mark.parametrize("version", [2, 3])
def test_a_tree_is_drafted_by_kernels_from_its_tokens_on(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the same tree where they follow no ancestors."""
    asked, made, enter_pairs, best_nodes = [], [], trees.enter_pairs, trees.best_nodes
    monkeypatch.setattr(trees, "best_nodes", lambda *given: made.append(given[1:]) or best_nodes(*given))
    monkeypatch.setattr(trees, "enter_pairs", lambda *given, **more: asked.append(more) or enter_pairs(*given, **more))
    found = []
    for follows in (True, False):
        _, target = both(lambda: checks.tiny_target(layers=3).hf.float())
        decoder = test_rounds.eagle(GraphedLM.of(target, capture=ON_GPU), Sampling(), version, **GROWN)
        if not follows:
            asked.clear()
            monkeypatch.setattr(FixedReader, "follows", lambda *given: False)
        found.append(test_rounds.drafted(decoder, PROMPTS[:2], 3))
        levels = [more.get("level") for more in asked]
        assert set(levels) == {None, 0, 1} if follows else not levels
        assert set(made) == {(3 + 2 * 9, 8)}
    test_rounds.require_equal(*found)
