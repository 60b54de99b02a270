"""Drafts by n-grams: trees of text and table, and texts that are the target's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.contract import checks
from methods.autoregressive import Autoregressive
from methods.drafting import Context
from methods.engine import cpu_kernels
from methods.engine.causal_lm import CausalLM
from methods.engine.checkpoint_files import MissingPart
from methods.engine.sampling import Sampling
from methods.speculative.ngram import Ngram, ngram_table
from methods.speculative.rest_datastore import Datastore

GREEDY = Sampling()
kernels = pytest.mark.skipif(cpu_kernels.library() is None, reason="the kernels cannot be compiled here")


@pytest.fixture(scope="module")
def target() -> CausalLM:
    return checks.tiny_target(seed=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """After 1 2 3 comes 4 six times and 5 three times, after 4 comes 6; 7 is followed by many."""
    made = tmp_path_factory.mktemp("datastore")
    documents = [*[[1, 2, 3, 4, 6]] * 6, *[[1, 2, 3, 5]] * 3, *[[7, other] for other in range(8, 20)]]
    Datastore.build(documents, 61).save(made)
    return made


def drafted(decoder: Ngram, *texts: list[int]) -> list[tuple[list[int], list[int], list[float], list[str]]]:
    root = torch.tensor([text[-1] for text in texts])
    context = Context(list(texts), root, None, None, GREEDY, torch.Generator())  # type: ignore[arg-type]
    draft = decoder.drafter.propose(context)
    tokens, parents = draft.lists()
    sizes = draft.sizes or []
    assert draft.gains is not None and draft.sources is not None
    rows = zip(tokens, parents, sizes, draft.gains, draft.sources, strict=True)
    return [(row[:n], above[:n], list(gains), list(source)) for row, above, n, gains, source in rows]


@kernels
def test_a_draft_has_what_followed_in_the_text_and_in_the_table(target: CausalLM, folder: Path) -> None:
    decoder = Ngram(target, GREEDY, nodes=8, checkpoint=folder)
    alone, both, nothing = drafted(decoder, [50, 1, 2, 3], [1, 2, 3, 60, 59, 1, 2, 3], [58, 59])
    tokens, parents, gains, sources = alone
    assert tokens[:2] == [4, 6] and parents[:2] == [-1, 0] and 5 in tokens and set(sources) == {"table"}
    assert parents[tokens.index(5)] == -1 and gains == sorted(gains, reverse=True)
    tokens, parents, gains, sources = both
    assert tokens[0] == 60 and sources[0] == "text" and "table" in sources, "the text comes first"
    assert gains[0] == pytest.approx(3 / 4), "three tokens have matched"
    roots = {token: gain for token, above, gain in zip(tokens, parents, gains, strict=True) if above == -1}
    assert 0.0 < roots[4] < 1 / 4, "the rest is for the table"
    assert nothing == ([], [], [], [])


@kernels
def test_texts_are_the_targets_and_drafts_are_kept(target: CausalLM, tmp_path: Path) -> None:
    prompts = checks.prompts(target.vocab_size, (9, 3, 14))
    wanted = checks.outputs(Autoregressive(target, GREEDY), prompts, 30)
    documents = [prompt.tolist() + text for prompt, text in zip(prompts, wanted, strict=True)] * 3
    Datastore.build(documents, target.vocab_size).save(tmp_path)
    decoder = Ngram(target, GREEDY, nodes=6, checkpoint=tmp_path)
    assert checks.outputs(decoder, prompts, 30) == wanted
    steps = list(decoder.decode([prompts[0]], 30, torch.Generator()))
    assert len(steps) < 15, "the table knows the text"
    assert decoder.memory()["ngram_table"]


def test_methods_of_one_datastore_share_its_table_until_it_is_written_anew(target: CausalLM, tmp_path: Path) -> None:
    Datastore.build([[1, 2, 3]] * 4, 61).save(tmp_path)
    first = ngram_table("rest", tmp_path, target)
    assert ngram_table("rest", tmp_path, target) is first
    assert 9 not in first.following([1, 2])
    Datastore.build([[1, 2, 9]] * 4, 61).save(tmp_path)
    assert 9 in ngram_table("rest", tmp_path, target).following([1, 2])


@kernels
def test_what_it_needs(target: CausalLM, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MissingPart, match="rest has no datastore"):
        Ngram(target, GREEDY)
    for options in ({"nodes": 0}, {"least": 1.0}):
        with pytest.raises(ValueError, match="nodes >= 1 and least from 0 to below 1"):
            Ngram(target, GREEDY, checkpoint=folder, **options)
    monkeypatch.setattr(cpu_kernels, "library", lambda: None)
    with pytest.raises(ValueError, match="needs a C\\+\\+ compiler"):
        Ngram(target, GREEDY, checkpoint=folder)
