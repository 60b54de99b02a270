"""REST: the search against a naive one, the trie against counting, files that are not what they should be."""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.config import compose, instantiate
from bench.config.schema import SamplingConfig
from bench.contract import checks
from bench.errors import UserError
from methods.autoregressive import Autoregressive
from methods.drafting import ABSENT, Context
from methods.engine.causal_lm import Output
from methods.engine.sampling import Sampling
from methods.speculative import rest_datastore
from methods.speculative.rest import Rest, RestDrafter, cut_prefixes, frequent_prefixes
from methods.speculative.rest_datastore import HEADER, MARGIN, PLACES, SEPARATOR, TOKENS, Datastore, RestDatastore
from methods.training.answer_memo import AnswerMemo, Origin
from methods.training.answers import AnswerRecipe
from methods.training.interface import Example, TrainingContext
from tests.helpers.host_reads import no_host_reads

DOCUMENTS = [[5, 6, 7, 8], [1, 5, 6, 7, 9, 9], [5, 6, 7, 8, 2], [7], [9, 5]]


@pytest.fixture(scope="module")
def target():
    return checks.tiny_target()


@pytest.fixture
def folder(tmp_path):
    Datastore.build(DOCUMENTS, 61).save(tmp_path / "store")
    return tmp_path / "store"


def context_of(*texts):
    logits = torch.zeros(len(texts), 1, 61)
    root = torch.tensor([text[-1] for text in texts])
    return Context([list(text) for text in texts], root, Output(logits, logits), None, Sampling(), torch.Generator())


def drafter(store, nodes=8, max_ngram=4, min_ngram=1, continuation=3, occurrences=100, cut=False):
    return RestDrafter(store, nodes, max_ngram, min_ngram, continuation, occurrences, cut)


# -- the search -------------------------------------------------------------------------------------------------------


def naive_continuations(documents, text, longest, shortest, count):
    """Length of the longest ending of ``text`` that stands in a document with a token behind it; what follows it."""
    for size in range(min(longest, len(text)), shortest - 1, -1):
        found = [
            tuple(document[place + size : place + size + count])
            for document in documents
            for place in range(len(document) - size)
            if list(document[place : place + size]) == list(text[-size:])
        ]
        if found:
            return size, sorted(found)
    return 0, []


def found(store, text, longest, shortest=1, count=4):
    """The same by the datastore."""
    match = store.find(text, longest, shortest)
    if match is None:
        return 0, []
    paths = store.continuations(match, count, most=10**6).tolist()
    return match.length, [tuple(itertools.takewhile(lambda token: token != SEPARATOR, path)) for path in paths]


ids = st.sampled_from([0, 1, 2, 255, 256])  # bytes 0 and 255 in every place that could be mistaken
documents = st.lists(st.lists(ids, max_size=12), max_size=8).filter(any)


@settings(max_examples=200, deadline=None)
@given(documents, st.lists(ids, min_size=1, max_size=9), st.integers(1, 6), st.data())
def test_search_finds_what_a_naive_one_finds(documents, text, longest, data):
    shortest = data.draw(st.integers(1, longest))
    store = Datastore.build(documents, 300)
    length, continuations = found(store, text, longest, shortest)
    assert (length, sorted(continuations)) == naive_continuations(documents, text, longest, shortest, 4)
    closed = [path + (SEPARATOR,) * (4 - len(path)) for path in continuations]
    assert closed == sorted(closed)


@pytest.mark.parametrize("vocab_size, distinct", [(50, 50), (150_000, 90_000), (900_000, 400)])
def test_suffixes_are_in_order(vocab_size, distinct):
    """With few ids, with more than two bytes can tell apart, and with large ones."""
    rng = random.Random(0)
    used = rng.sample(range(vocab_size), distinct)
    documents = [[rng.choice(used) for _ in range(20)] for _ in range(20)] + [used]
    store = Datastore.build(documents, vocab_size)
    text = store.tokens[: len(store.tokens) - MARGIN].tolist()
    assert sorted(store.places.tolist()) == list(range(len(text)))
    some = sorted(rng.sample(range(len(text)), 300))
    for before, after in zip(some, some[1:], strict=False):
        start, end = int(store.places[before]), int(store.places[after])
        assert text[start:] < text[end:]
    assert (store.n_tokens, store.n_documents) == (400 + distinct, 21)


def test_no_match_and_no_continuation_crosses_a_border():
    store = Datastore.build([[1, 2], [3, 4], [2, 3]], 10)
    # 1 2 3 stands only across a border; 2 3 and 4 only before one
    assert [found(store, text, 3) for text in ([1, 2, 3], [9], [2], [4])] == [
        (1, [(4,)]),
        (0, []),
        (1, [(3,)]),
        (0, []),
    ]


def test_longest_ending_at_a_documents_end_gives_way_to_a_shorter_one():
    assert found(Datastore.build([[1, 2, 3], [2, 3, 4]], 10), [1, 2, 3], 3) == (2, [(4,)])


def test_the_longest_ngram_and_continuation_stay_in_the_file():
    longest = rest_datastore.LONGEST
    store = Datastore.build([list(range(longest + 1))], 100)
    assert found(store, list(range(longest)), longest, count=longest) == (longest, [(longest,)])


def test_of_many_occurrences_evenly_spaced_ones_are_read():
    store = Datastore.build([[7, place] for place in range(100)], 101)
    match = store.find([7], 3)
    assert store.continuations(match, 1, 5)[:, 0].tolist() == [10, 30, 50, 70, 90]
    assert store.continuations(match, 1, 100)[:, 0].tolist() == list(range(100))
    assert store.continuations(match, 1, 99)[[0, 49, 98], 0].tolist() == [0, 50, 99]


def test_corpora_that_cannot_be_searched_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="got no token"):
        Datastore.build([[], []], 10)
    for wrong in (10, -1, SEPARATOR):
        with pytest.raises(ValueError, match=f"ids below 10, .*got {wrong}"):
            Datastore.build([[1, wrong]], 10)
    monkeypatch.setitem(sys.modules, "pydivsufsort", None)
    with pytest.raises(ValueError, match="pip install pydivsufsort"):
        Datastore.build([[1]], 10)


# -- the tree ---------------------------------------------------------------------------------------------------------


def naive_prefixes(paths, most):
    counts = Counter(tuple(path[:end]) for path in paths for end in range(1, len(path) + 1))
    return sorted(counts, key=lambda prefix: (-counts[prefix], len(prefix), prefix))[:most], counts


def prefixes_of(tree):
    """Prefix of every node, from its parents."""
    prefixes = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        assert parent < len(prefixes)
        prefixes.append((prefixes[parent] if parent >= 0 else ()) + (token,))
    return prefixes


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=20), st.integers(1, 12))
def test_tree_holds_the_most_frequent_prefixes(paths, most):
    ordered = sorted(path + [SEPARATOR] + [9] * (4 - len(path)) for path in paths)
    tree = frequent_prefixes(np.array(ordered, np.uint32).reshape(-1, 5), most)
    wanted, counts = naive_prefixes(paths, most)
    assert prefixes_of(tree) == wanted
    assert tree.counts == [counts[prefix] for prefix in wanted]
    assert tree.depths == [len(prefix) for prefix in wanted]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=20), st.integers(1, 12))
def test_the_cut_removes_the_longest_prefixes_until_their_tokens_are_few_enough(paths, most):
    ordered = sorted(path + [SEPARATOR] + [9] * (4 - len(path)) for path in paths)
    tree = frequent_prefixes(np.array(ordered, np.uint32).reshape(-1, 5), most)
    left = prefixes_of(tree)
    while sum(len(set(prefix)) for prefix in left) > most:
        longest = max(len(set(prefix)) for prefix in left)
        left.remove([prefix for prefix in left if len(set(prefix)) == longest][-1])
    wanted = {prefix[:end] for prefix in left for end in range(1, len(prefix) + 1)}
    cut = cut_prefixes(tree, most)
    assert set(prefixes_of(cut)) == wanted and len(cut.tokens) == len(wanted)
    counts = dict(zip(prefixes_of(tree), zip(tree.depths, tree.counts, strict=True), strict=True))
    assert list(zip(cut.depths, cut.counts, strict=True)) == [counts[prefix] for prefix in prefixes_of(cut)]


def test_a_cut_draft_is_smaller():
    store = Datastore.build(DOCUMENTS, 61)
    draft = drafter(store, nodes=5, cut=True).propose(context_of([3, 5, 6], [60]))
    # 7, 7 8, 7 9, 7 8 2 and 7 9 9 have 1, 2, 2, 3 and 2 different tokens: without 7 8 2 and 7 9 9 they are five
    assert draft.tokens.tolist() == [[7, 8, 9], [ABSENT] * 3] and draft.parents[0].tolist() == [-1, 0, 0]


def test_draft_of_ragged_rows():
    store = Datastore.build(DOCUMENTS, 61)
    draft = drafter(store, nodes=5).propose(context_of([3, 5, 6], [60], [1, 5], [7]))
    # row 0: 5 6 | 7 8, 7 9 9, 7 8 2;  row 1: unknown;  row 2: 1 5 | 6 7 9;  row 3: 7 | 8, 9 9, 8 2
    assert draft.tokens[0].tolist() == [7, 8, 9, 2, 9] and draft.parents[0].tolist() == [-1, 0, 0, 1, 2]
    assert draft.tokens[1].tolist() == [ABSENT] * 5
    assert draft.tokens[2].tolist() == [6, 7, 9, ABSENT, ABSENT] and draft.parents[2, :3].tolist() == [-1, 0, 1]
    assert draft.tokens[3].tolist() == [8, 9, 2, 9, ABSENT] and draft.parents[3, :4].tolist() == [-1, -1, 0, 1]
    assert (draft.sizes, draft.depths, draft.levels, draft.width) == ([5, 0, 3, 4], [3, 0, 3, 2], 3, 2)
    assert draft.probs is None and draft.passes == 0


def test_one_path_is_a_chain_and_no_match_an_empty_draft():
    store = Datastore.build(DOCUMENTS, 61)
    chain = drafter(store).propose(context_of([1, 5], [60]))
    assert chain.is_chain and chain.tokens.tolist() == [[6, 7, 9], [ABSENT] * 3] and chain.sizes == [3, 0]
    empty = drafter(store).propose(context_of([60], [4, 3]))
    assert empty.is_chain and empty.tokens.shape == (2, 0) and empty.sizes == [0, 0]


def test_drafts_repeat_and_rows_do_not_meddle():
    rng = random.Random(1)
    store = Datastore.build([[rng.randrange(4) for _ in range(50)] for _ in range(20)], 61)
    texts = [[rng.randrange(4) for _ in range(rng.randrange(1, 20))] for _ in range(9)]
    options = {"nodes": 12, "max_ngram": 3, "continuation": 4, "occurrences": 7}
    together = drafter(store, **options).propose(context_of(*texts))
    for row, text in enumerate(texts):
        alone, again = (drafter(store, **options).propose(context_of(text)) for _ in range(2))
        assert torch.equal(alone.tokens, again.tokens) and torch.equal(alone.parents, again.parents)
        size = together.sizes[row]
        assert alone.sizes == [size] and torch.equal(alone.tokens[0], together.tokens[row, :size])
        assert torch.equal(alone.parents[0], together.parents[row, :size])


def test_proposing_reads_nothing_back():
    with no_host_reads():
        drafter(Datastore.build(DOCUMENTS, 61)).propose(context_of([3, 5, 6], [60]))


# -- files ------------------------------------------------------------------------------------------------------------


def test_files_give_back_what_was_built(folder):
    built, loaded = Datastore.build(DOCUMENTS, 61), Datastore.load(folder, 61)
    assert np.array_equal(built.tokens, loaded.tokens) and np.array_equal(built.places, loaded.places)
    assert isinstance(loaded.tokens.base, np.memmap) and not loaded.tokens.flags.writeable
    assert sorted(path.name for path in folder.iterdir()) == sorted([HEADER, TOKENS, PLACES])
    header = json.loads((folder / HEADER).read_text())
    assert (header["version"], header["vocab_size"], header["tokens"], header["documents"]) == (1, 61, 18, 5)
    assert found(loaded, [5, 6], 2) == found(built, [5, 6], 2) == (2, [(7, 8, 2), (7, 8), (7, 9, 9)])


def test_resident_memory_is_part_of_the_files(folder, target):
    decoder = Rest(target, Sampling(), checkpoint=folder)
    checks.outputs(decoder, [torch.tensor([5, 6, 7])], 5)
    own = decoder.memory()
    assert own["datastore_mapped"] == Datastore.build(DOCUMENTS, 61).mapped_bytes
    assert own["datastore_resident"] is None or 0 < own["datastore_resident"] < 2**16


def flip(path):
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def edit_header(folder, **changes):
    header = json.loads((folder / HEADER).read_text()) | changes
    (folder / HEADER).write_text(json.dumps(header))


@pytest.mark.parametrize(
    "harm, message",
    [
        (lambda f: (f / HEADER).unlink(), "holds no datastore"),
        (lambda f: (f / HEADER).write_text("{"), "is damaged"),
        (lambda f: (f / HEADER).write_text("[1]"), "is damaged"),
        (lambda f: edit_header(f, version=2), "must have version 1, got 2"),
        (lambda f: edit_header(f, files={}), "files are missing"),
        (lambda f: edit_header(f, vocab_size="61"), "is damaged"),
        (lambda f: edit_header(f, vocab_size=62), "vocabulary of the model, 61 ids, got 62"),
        (lambda f: flip(f / TOKENS), f"{TOKENS} is damaged"),
        (lambda f: flip(f / PLACES), f"{PLACES} is damaged"),
        (lambda f: (f / PLACES).write_bytes((f / PLACES).read_bytes()[:-8]), f"{PLACES} is damaged"),
        (lambda f: (f / PLACES).write_bytes(b""), f"{PLACES} is damaged"),
        (lambda f: (f / TOKENS).unlink(), f"{TOKENS} belongs to the datastore and cannot be read"),
    ],
)
def test_files_that_are_not_what_was_written_are_refused(harm, message, folder, target):
    harm(folder)
    with pytest.raises(ValueError, match=message) as refused:
        Rest(target, Sampling(), checkpoint=folder)
    assert "python -m bench train method=rest" in str(refused.value)


def test_a_cut_write_leaves_no_datastore(folder, monkeypatch):
    """Not the new one, and not the old one with half of its files replaced."""
    monkeypatch.setattr(rest_datastore.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        Datastore.build([[1, 2]], 61).save(folder)
    with pytest.raises(ValueError, match="holds no datastore"):
        Datastore.load(folder, 61)


# -- the decoder ------------------------------------------------------------------------------------------------------


def test_text_of_the_target_is_drafted_in_full(target, tmp_path):
    prompt = checks.prompts(target.vocab_size, (9,))[0]
    text = checks.outputs(Autoregressive(target, Sampling()), [prompt], 40)[0]
    Datastore.build([prompt.tolist() + text], target.vocab_size).save(tmp_path)
    decoder = Rest(target, Sampling(), nodes=6, continuation=6, checkpoint=tmp_path)
    steps = list(decoder.decode([prompt], 22, torch.Generator()))
    assert [step.accepted for step in steps[1:]] == [[6]] * 3 and all(step.draft_ns for step in steps[1:])


def test_own_checkpoint_comes_before_the_prepared_part(folder, tmp_path, target):
    Datastore.build([[1, 2, 3]], 61).save(tmp_path / "own")

    def build(name):
        group = compose.compose(["method=rest", f"method.checkpoint={tmp_path / name}"]).method
        return instantiate.build_decoder(group, target, SamplingConfig(), checkpoint=folder)

    assert build("own").drafter.store.n_tokens == 3
    with pytest.raises(UserError, match="nowhere holds no datastore"):
        build("nowhere")


def test_without_a_datastore_the_command_is_named(target):
    with pytest.raises(ValueError, match="python -m bench train method=rest model=MODEL"):
        Rest(target, Sampling())


@pytest.mark.parametrize(
    "options",
    [
        {"nodes": 0},
        {"occurrences": 0},
        {"continuation": 0},
        {"continuation": 64},
        {"min_ngram": 0},
        {"max_ngram": 64},
        {"max_ngram": 1, "min_ngram": 2},
    ],
)
def test_rest_refuses(options, folder, target):
    with pytest.raises(ValueError, match=f"{next(iter(options))}={next(iter(options.values()))}"):
        Rest(target, Sampling(), checkpoint=folder, **options)


# -- the preparation --------------------------------------------------------------------------------------------------


def context(target, folder, answers, stages=None):
    corpus = [Example(prompt=[50, 51], answer=list(answer)) for answer in answers]
    report = (lambda *stage: stages.append(stage)) if stages is not None else (lambda *_: None)
    return TrainingContext(output=folder, shared_cache=folder, model=target, examples=corpus, report_progress=report)


def test_preparation_writes_what_the_decoder_reads(target, tmp_path):
    trainable, stages = RestDatastore(), []
    facts = trainable.fit(context(target, tmp_path, DOCUMENTS, stages))
    store = Datastore.load(tmp_path, target.vocab_size)
    assert facts == {"tokens": 18, "documents": 5, "bytes": store.mapped_bytes, "answers": "corpus"}
    assert stages[:5] == [("tokens", done, 5) for done in range(1, 6)]
    assert stages[5:] == [("suffix array", 0, 1), ("suffix array", 1, 1)]
    assert checks.outputs(Rest(target, Sampling(), checkpoint=tmp_path), [torch.tensor([5, 6])], 3)


def test_documents_are_answers_or_whole_dialogues(target, tmp_path):
    for prompts in (False, True):
        RestDatastore(prompts=prompts).fit(context(target, tmp_path, DOCUMENTS))
        store = Datastore.load(tmp_path, target.vocab_size)
        assert (store.find([50, 51], 2) is not None) == prompts


def test_what_is_there_is_kept_and_anything_else_replaced(target, tmp_path):
    RestDatastore().fit(context(target, tmp_path, DOCUMENTS))
    before = (tmp_path / PLACES).stat()
    facts = RestDatastore().fit(context(target, tmp_path, DOCUMENTS))
    assert facts["documents"] == 5 and (tmp_path / PLACES).stat().st_ino == before.st_ino
    flip(tmp_path / PLACES)
    RestDatastore().fit(context(target, tmp_path, DOCUMENTS))
    assert Datastore.load(tmp_path, target.vocab_size).n_documents == 5
    RestDatastore().fit(context(target, tmp_path, DOCUMENTS[:2]))
    assert Datastore.load(tmp_path, target.vocab_size).n_documents == 2


# -- whose answers ----------------------------------------------------------------------------------------------------


def remembered(*answers):
    """Of the target, to the prompts [50, 51], [50, 52], ..."""
    rows = [([50, 51 + n], list(answer)) for n, answer in enumerate(answers)]
    return AnswerMemo.pack(Origin("random", None, None, "float64", 256), rows)


def test_documents_are_the_targets_answers_where_they_are_known(target, tmp_path):
    shop = context(target, tmp_path, DOCUMENTS)
    examples = [Example([50, 51], [1, 2]), Example([50, 52], []), Example([50, 53], [3, 4])]
    known = replace(shop, examples=examples, memo=remembered([7, 8, 9], [9, 9]))
    facts = RestDatastore().fit(known)
    assert (facts["answers"], facts["documents"], facts["tokens"]) == ("own", 2, 5)
    assert RestDatastore(documents="corpus").fit(known)["tokens"] == 4
    other = replace(known, memo=AnswerMemo.pack(remembered([1]).origin, [([1], [1])]))
    assert RestDatastore().fit(other)["answers"] == "corpus", "it knows none of these prompts"
    decoded = RestDatastore(documents="own", answers=AnswerRecipe(tokens=1, limit=6)).fit(shop)
    assert decoded["answers"] == "own" and decoded["tokens"] >= 6


def test_a_datastore_has_at_most_so_many_tokens(target, tmp_path):
    for most, kept in ((18, 18), (17, 16), (14, 10), (2, 2)):
        facts = RestDatastore(documents="corpus", most=most).fit(context(target, tmp_path, DOCUMENTS))
        assert facts["tokens"] == kept
    with pytest.raises(ValueError, match="most must be at least 1, got 0"):
        RestDatastore(most=0)
