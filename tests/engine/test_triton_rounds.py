"""What Triton's kernels do around the layers of a round is what torch does."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from methods.autoregressive import Autoregressive
from methods.engine import greedy_round, sampling, token_tree
from methods.engine.causal_lm import CausalLM
from methods.engine.cuda_graphs import GraphedLM, padded
from methods.engine.kv_cache import Cache
from methods.engine.sampling import Sampling
from methods.engine.token_tree import ABSENT
from methods.speculative.prompt_lookup import PromptLookup
from methods.speculative.token_recycling import TokenRecycling
from tests.engine import test_triton_kernels as layers
from tests.engine.test_triton_kernels import DEVICE, ON_GPU, PROMPTS, TYPES, any_tree, kernels, random, triton

rounds = importlib.import_module("methods.engine.triton_rounds")  # where triton is, and interpreted without a GPU
pytestmark = [pytest.mark.gpu] if ON_GPU else []  # of a GPU's tests, too


def deep_tree(batch: int, nodes: int) -> torch.Tensor:
    """A line with a few branches."""
    rows = [[i - 1 if i % 5 else max(i - 4, -1) for i in range(nodes - 1)] for _ in range(batch)]
    return torch.tensor(rows, dtype=torch.long, device=DEVICE).view(batch, nodes - 1)


TREES = {"tree": any_tree, "deep": deep_tree, "chain": lambda batch, nodes: None}
SIZES = [(1, 1), (2, 2), (5, 7), (3, 12), (2, 33), (2, 64)]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("batch", "width"), [((2, 3), 5000), ((4,), 2048), ((1, 1), 61), ((0, 3), 61)])
def test_the_most_likely_token(dtype: torch.dtype, batch: tuple[int, ...], width: int) -> None:
    torch.manual_seed(0)
    logits = random(*batch, width, dtype=dtype)
    wide = torch.stack([logits, logits + 1.0], -2)[..., 0, :]  # rows that are not side by side
    few = (logits * 2).round()  # many equal ones
    for given in (logits, wide, few, -few.abs(), -logits.abs() - 1):
        assert rounds.argmax(given).tolist() == sampling.argmax(given.cpu().float()).tolist()


def test_of_equal_tokens_the_first_is_the_most_likely() -> None:
    logits = torch.full((2, 5000), -2.0, device=DEVICE)
    logits[0, 40], logits[0, 41], logits[0, 4000] = -0.0, 0.0, 0.0
    logits[1, 2100], logits[1, 4900], logits[1, 7] = 3.0, 3.0, -torch.inf
    assert rounds.argmax(logits).tolist() == [40, 2100]


@pytest.mark.parametrize("kind", TREES)
@pytest.mark.parametrize(("batch", "nodes"), SIZES)
def test_what_layers_read(kind: str, batch: int, nodes: int) -> None:
    torch.manual_seed(nodes)
    parents = TREES[kind](batch, nodes) if nodes > 1 else None
    embedding, cos, sin = random(50, 24), random(1, 200, 1, 12), random(1, 12, 1, 200).transpose(1, 3)
    tokens = torch.randint(-1, 50, (batch, nodes)).to(DEVICE)
    length = torch.tensor([7, 130, 0, 1, 2][:batch], device=DEVICE)
    reach = None if parents is None else token_tree.ancestors(parents, nodes)
    offsets = torch.arange(nodes, device=DEVICE)[None] if reach is None else token_tree.depths(reach)
    for factor in (None, torch.tensor(3.5, device=DEVICE)):
        laid = rounds.lay_out(tokens, parents, None, embedding, factor, cos, sin, length)
        rows = F.embedding(tokens.clamp(min=0), embedding)
        assert torch.equal(laid.hidden, rows if factor is None else rows * factor)
        for ours, table in ((laid.cos, cos), (laid.sin, sin)):
            assert torch.equal(ours, table[0][length[:, None] + offsets])
        assert laid.bits is None if reach is None else torch.equal(laid.bits, kernels.pack_bits(reach))


def wanted_texts(
    kind: str, batch: int, nodes: int
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Nodes over two tokens, so that siblings are often equal, some absent, and tokens that the target wants."""
    parents = TREES[kind](batch, nodes) if nodes > 1 else None
    tokens = torch.randint(0, 2, (batch, nodes), device=DEVICE)
    above = torch.arange(-1, nodes - 1, device=DEVICE).expand(batch, -1)
    if parents is not None:
        above = token_tree.with_root(parents)
    wanted = torch.randint(0, 2, (batch, nodes), device=DEVICE)
    for row in range(1, batch, 2):  # in half of the rows nearly all nodes are wanted
        wanted[row].scatter_(0, above[row, 1:], tokens[row, 1:])
    if nodes > 4:
        tokens[0, nodes - 2 :] = ABSENT
    return tokens, parents, wanted, above


@pytest.mark.parametrize("kind", TREES)
@pytest.mark.parametrize(("batch", "nodes"), SIZES)
@pytest.mark.parametrize("seed", range(4))
def test_the_end_of_a_round(kind: str, batch: int, nodes: int, seed: int) -> None:
    """Report, path, states and the cache; some trees have another bound of the depth, which cuts the path of some."""
    torch.manual_seed(seed)
    tokens, parents, wanted, _ = wanted_texts(kind, batch, nodes)
    reach = None if parents is None else token_tree.ancestors(parents, nodes)
    levels = nodes - 1
    if reach is not None and seed % 2:
        levels = 2 if seed == 3 else 1 << token_tree.closure_steps(int(token_tree.depths(reach).max()))
    places = nodes if parents is None else min(nodes, padded(1 + levels))
    states = [random(batch, nodes, 6), random(batch, nodes, 10)]
    lengths = torch.tensor([7, 30, 0, 1, 2][:batch], device=DEVICE)
    found = []
    before = random(3, batch, 4, 100, 20)
    for end, seen in (
        (greedy_round.end_round, reach),
        (rounds.end_round, None if reach is None else kernels.pack_bits(reach)),
    ):
        cache = Cache(range(3), batch, 100, 2, 20, dtype=torch.float32, device=DEVICE)
        cache.store.copy_(before.transpose(2, 3))
        cache.length.copy_(lengths)
        strided = torch.stack([wanted, wanted + 5], -1)[..., 0]
        bonus, path, report, kept = end(tokens, parents, seen, levels, places, strided, states, cache)
        some = (path >= 0)[:, :, None]
        found.append([bonus, path, report, *(each * some for each in kept), cache.store, cache.length])
    for ours, theirs in zip(*found[::-1], strict=True):
        assert torch.equal(ours, theirs)
    assert not torch.equal(found[0][-1], lengths)


def test_paths_of_these_tests_are_long() -> None:
    torch.manual_seed(0)
    tokens, parents, wanted, _ = wanted_texts("tree", 4, 64)
    assert parents is not None
    found = rounds.settle(
        *(tokens, parents, kernels.pack_bits(token_tree.ancestors(parents, 64)), 63, 64, wanted),
        torch.zeros(4, dtype=torch.long, device=DEVICE),
    )
    assert found.moved.max() > 4 and found.moved.min() < found.moved.max()


def test_of_equal_siblings_the_one_with_the_longer_continuation_is_kept() -> None:
    tokens = torch.tensor([[9, 4, 4, 5, 4], [9, 4, 4, 6, 6]], device=DEVICE)
    parents = torch.tensor([[-1, -1, 1, -1], [-1, -1, 1, 0]], device=DEVICE)
    wanted = torch.tensor([[4, 5, 5, 8, 5], [4, 6, 6, 8, 7]], device=DEVICE)
    bits, length = kernels.pack_bits(token_tree.ancestors(parents, 2)), torch.tensor([3, 0], device=DEVICE)
    found = rounds.settle(tokens, parents, bits, 2, 4, wanted, length)
    assert found.report.tolist() == [[8, 0, 2, 3, -1, 4, 5, 9], [8, 0, 2, 3, -1, 4, 6, 9]]
    assert found.path.tolist() == [[0, 1, 2, -1]] * 2 and found.kept.tolist() == [[0, 2, 3, 0]] * 2
    assert (found.bonus.tolist(), found.moved.tolist(), length.tolist()) == ([8, 8], [3, 3], [6, 3])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("nodes", "dim"), [(9, 64), (64, 128)])
def test_kept_nodes_are_moved_together(dtype: torch.dtype, nodes: int, dim: int) -> None:
    torch.manual_seed(0)
    cache = Cache(range(2), 3, 80, 2, dim, dtype=dtype, device=DEVICE)
    cache.store.copy_(random(*cache.store.shape, dtype=dtype))
    cache.length.copy_(torch.tensor([7, 0, 16], device=DEVICE))
    path = torch.full((3, nodes), ABSENT, device=DEVICE)
    for row, count in enumerate((1, nodes // 2, nodes - 1)):
        path[row, :count] = torch.tensor([0, *sorted((torch.randperm(nodes - 1) + 1)[: count - 1].tolist())])
    ours, moved = cache.store.clone(), (path >= 0).sum(1)
    rounds.pack(ours, path, cache.length + moved, moved)
    cache.pack(path[:, 1:] - 1)
    for row, end in enumerate((cache.length + moved).tolist()):
        assert torch.equal(ours[:, row, :end], cache.store[:, row, :end])
        assert torch.equal(ours[:, row, end + nodes :], cache.store[:, row, end + nodes :])


@pytest.mark.skipif(ON_GPU, reason="the other tests compile the kernels")
def test_kernels_compile_for_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To machine code, which takes no GPU, and within the memory of one multiprocessor."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    floats = ("EMBEDDING", "FACTOR", "COS", "SIN", "HIDDEN", "TURN_COS", "TURN_SIN", "LOGITS", "STORE")
    laid = {"TURNED": 80, "SCALE": True, "NODES": 64, "BLOCK": 1024, "TABLE": 128}
    for kernel, constants, warps in (
        (rounds._lay_out, laid | {"TREE": True}, 1),
        (rounds._lay_out, laid | {"TREE": False, "BLOCK": 4096}, 4),
        (rounds._best_of_chunk, {"BLOCK": 2048}, 4),
        (rounds._best_of_row, {"CHUNKS": 64}, 1),
        (rounds._settle, {"TREE": True, "NODES": 64}, 1),
        (rounds._settle, {"TREE": False, "NODES": 1}, 1),
        (rounds._pack, {"BATCH": 4, "HEADS": 6, "DIM": 80, "PLACES": 32, "BLOCK": 128}, 4),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(rounds, "_count_bits", triton.runtime.JITFunction(rounds._count_bits.fn))
            function = triton.runtime.JITFunction(kernel.fn)
            types = {
                name: "constexpr" if name in constants
                else "*bf16" if name in floats else "*i64" if name.isupper() else "i32"
                for name in function.arg_names
            }  # fmt: skip
            source = ASTSource(function, types, constexprs=constants)
            made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
        assert made.asm["cubin"] and made.metadata.shared <= 48 << 10


# -- whole texts ------------------------------------------------------------------------------------------------------

DECODERS: dict[str, Any] = {
    "autoregressive": Autoregressive,
    "prompt_lookup": PromptLookup,
    "token_recycling": lambda target, sampling: TokenRecycling(target, sampling, tree="small"),
}


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", DECODERS)
def test_texts_of_recorded_rounds_are_those_of_torch(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ended, end_round = [], rounds.end_round
    monkeypatch.setattr(rounds, "end_round", lambda *given: ended.append(given[1] is not None) or end_round(*given))
    plain, ours = layers.both()
    target, prompts = GraphedLM.of(ours, capture=ON_GPU), PROMPTS[:rows]
    wanted = layers.decode(Autoregressive(plain, Sampling()), prompts, 10)
    assert layers.decode(DECODERS[name](target, Sampling()), prompts, 10) == wanted
    assert (name == "token_recycling") in ended, "chains and trees"


def rounds_of(lm: CausalLM, nodes: int, texts: list[list[int]]) -> list[tuple[list[Any], list[torch.Tensor]]]:
    """Of recorded rounds over a tree whose deepest path is the text that follows: what they keep, and its states."""
    torch.manual_seed(nodes)
    target, found, done = GraphedLM.of(lm, capture=ON_GPU), [], [0, 0]
    parents, cache = any_tree(2, nodes), target.new_cache(2, 300)
    reach = token_tree.ancestors(parents, nodes)
    lines = [reach[row, int(token_tree.depths(reach)[row].argmax())].nonzero()[:, 0] for row in range(2)]
    target.prefill([torch.tensor(prompt, device=DEVICE) for prompt in PROMPTS[:2]], cache)
    with torch.inference_mode():
        for candidates in (0, 0, 0, 3, 3):
            tokens = torch.arange(2 * nodes, device=DEVICE).view(2, nodes) % 50
            tokens[0, nodes - 2 :] = ABSENT
            for row, line in enumerate(lines):
                tokens[row, line] = torch.tensor(texts[row][done[row] :][: len(line)], device=DEVICE)
            made = target.round([tokens], parents, cache, hidden_layers=(0, 1), candidates=candidates)
            if made is None:
                continue
            read, likely = made.read(), made.candidates
            assert all(len(columns) >= len(line) - 1 > 1 for (columns, _), line in zip(read, lines, strict=True))
            cache.advanced([len(new) for _, new in read])
            done = [before + len(new) for before, (_, new) in zip(done, read, strict=True)]
            assert cache.length.tolist() == cache.lengths
            kept = [read, made.bonus.tolist(), made.path.tolist(), made.report.tolist(), cache.lengths]
            some = (made.path >= 0)[:, :, None]
            states = [each * some for each in (made.hidden, made.hidden_layers[0], made.hidden_layers[1])]
            found.append(([*kept, None if likely is None else likely[:, :nodes].tolist()], states))
    return found


@pytest.mark.parametrize("nodes", [7, 70])
def test_recorded_rounds_are_those_of_torch(nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those over more nodes than the kernels take are recorded without them."""
    begun, lay_out = [], rounds.lay_out
    monkeypatch.setattr(
        rounds, "lay_out", lambda tokens, *more: begun.append(tokens.shape[1]) or lay_out(tokens, *more)
    )
    made = layers.both()
    texts = layers.decode(Autoregressive(made[0], Sampling()), PROMPTS[:2], 60)
    theirs, ours = (rounds_of(lm, nodes, texts) for lm in made)
    assert len(theirs) == len(ours) == 3
    for (kept, states), (ours_kept, our_states) in zip(theirs, ours, strict=True):
        assert ours_kept == kept
        for one, other in zip(our_states, states, strict=True):
            layers.close(one, other)
    assert set(begun) == ({8} if nodes == 7 else set())
