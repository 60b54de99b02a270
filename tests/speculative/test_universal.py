"""Drafts of a model with other tokens: what it reads, what it drafts, and that the text stays the target's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from bench.contract import checks
from methods.engine.byte_tokenizer import byte_tokenizer
from methods.engine.sampling import Sampling
from methods.engine.vocabulary import ForeignModel, Vocabulary, complete
from methods.speculative.speculative_sampling import SpeculativeSampling
from methods.speculative.universal import Reader, way_of
from tests.helpers.tiny_vocabularies import END, LETTERS, pair, pieces, vocabulary

TEXT = "the wörld\n  is 🙂 round"


@pytest.fixture(scope="module")
def target():
    return checks.tiny_target(40)


def sentencepiece() -> PreTrainedTokenizerFast:
    """With a space in front of every text, characters, and bytes for those it lacks."""
    plain = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"thewisroundlabc", "th", "\u2581th"]
    words = {token: id for id, token in enumerate(dict.fromkeys(plain))}
    merges = [("t", "h"), ("\u2581", "th")]
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<unk>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


@pytest.mark.parametrize("make", [byte_tokenizer, sentencepiece])
def test_pieces_are_the_bytes_of_the_text(make) -> None:
    tokenizer = make()
    found = Vocabulary.of(tokenizer)
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    assert found.text(ids).lstrip() == TEXT.encode()
    assert all(found.piece(id) is None for id in tokenizer.all_special_ids)
    assert found.piece(10_000) is None


def test_a_tokenizer_of_another_kind_is_refused() -> None:
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    with pytest.raises(ValueError, match="byte-level or of SentencePiece, got "):
        Vocabulary.of(PreTrainedTokenizerFast(tokenizer_object=words))


def test_a_continuation_begins_at_the_border() -> None:
    found = vocabulary([b"a", b"b", b"c", b"ab", b"bc"])
    assert found.continuation(b"c", b"ab") == [3]
    assert found.continuation(b"a", b"bc") == [4], "ab would reach over the border: written alone"
    assert found.continuation(b"", b"") == []
    metaspace = Vocabulary.of(sentencepiece())
    assert metaspace.text(metaspace.continuation(b"the", b" the")) == b" the"
    assert metaspace.continuation(b"", b"the") == [], "it would write a space in front"
    assert metaspace.text(metaspace.spelled(b"", b"the")) == b"the"


def test_bytes_of_half_a_character_wait_for_the_rest() -> None:
    smile = "🙂".encode()
    assert complete(b"a", b"b" + smile[:3]) == b"b" and complete(smile[2:], b"b") == b"b"
    found = Vocabulary.of(byte_tokenizer())
    assert found.text(found.spelled(b"a", b"b" + smile[:3])) == b"b" + smile[:3]
    assert found.continuation(b"a", smile[:3]) == []


def test_the_draft_model_reads_the_text_of_the_target(target) -> None:
    """Tokens of the intersection one for one, others by its own tokenizer, in any portions."""
    foreign = pair(target)
    known = foreign.shared()
    tokens = torch.randint(0, 40, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    for reader in (Reader(foreign, known), Reader(foreign, {39: foreign.own.specials[END]})):
        whole, pieced = reader.read([], tokens), []
        for token in tokens:
            pieced += reader.read(pieced, [token])
        for ids in (whole, pieced):
            assert foreign.own.text(ids) == foreign.target.text(tokens)
            assert ids.count(foreign.own.specials[END]) == tokens.count(39)
    assert [reader.read([], [token]) for token in known] == [[id] for id in known.values()]
    lacking = replace(foreign, own=vocabulary(LETTERS[:20], end=False))
    assert Reader(lacking, lacking.shared()).read([], [39, 0]) == [0], "an unknown special token is left out"


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0)])
def test_tli_with_the_target_itself_has_everything_accepted(target, sampling) -> None:
    same = vocabulary(pieces(39))
    decoder = SpeculativeSampling(target, sampling, draft_model=ForeignModel(target, same, same), vocabulary="tli")
    for step in decoder.decode(checks.prompts(40, (9, 4)), 16, torch.Generator().manual_seed(0)):
        assert step.accepted == step.drafted


def test_slem_with_the_target_itself_has_everything_accepted() -> None:
    """Where a text can be written in one way only."""
    letters, lm = vocabulary(LETTERS[:12], end=False), checks.tiny_target(12)
    decoder = SpeculativeSampling(lm, Sampling(), draft_model=ForeignModel(lm, letters, letters), vocabulary="slem")
    steps = list(decoder.decode(checks.prompts(12, (9, 4)), 17, torch.Generator().manual_seed(0)))
    assert all(step.accepted == step.drafted for step in steps)
    assert steps[1].drafted == [3, 3], "of four the last one is dropped"


def test_a_special_token_ends_a_draft_and_nothing_is_dropped(target) -> None:
    foreign = pair(target, letters_only=True)
    drafter = SpeculativeSampling(target, Sampling(), draft_model=foreign, vocabulary="slem").drafter
    a, b = foreign.own.ids[b"a"], foreign.own.ids[b"b"]
    assert drafter.as_targets([3], [a, foreign.own.specials[END], b]) == [0, 39]
    assert drafter.as_targets([3], [a]) == [0]
    assert foreign.target.text(drafter.as_targets([3], [a, b, a, b])) in (b"ab", b"aba")


def test_tli_drafts_shared_tokens_only_and_reports_how_likely_they_were(target) -> None:
    foreign = pair(target)
    shared = set(foreign.shared())
    assert 0 < len(shared) < 40
    decoder = SpeculativeSampling(target, Sampling(1.0), draft_model=foreign, vocabulary="tli", gamma=3)
    seen, propose = [], decoder.drafter.propose
    decoder.drafter.propose = lambda context: seen.append(propose(context)) or seen[-1]
    list(decoder.decode(checks.prompts(40, (9, 4)), 12, torch.Generator().manual_seed(0)))
    for draft in seen:
        assert set(draft.tokens.flatten().tolist()) <= shared
        outside = [id for id in range(40) if id not in shared]
        assert draft.probs[..., outside].amax() == 0
        torch.testing.assert_close(draft.probs.sum(-1), torch.ones_like(draft.probs.sum(-1)))


@pytest.mark.parametrize("way", ["tli", "slem"])
def test_texts_beyond_the_positions_of_the_draft_model(target, way) -> None:
    """It reads the last half of its positions; the passes never reach beyond them."""
    foreign, ends = pair(target, max_positions=12), []
    forward = foreign.model.forward

    def watched(tokens, parents, cache):
        ends.append(max(cache.lengths))
        return forward(tokens, parents, cache)

    foreign.model.forward = watched

    def make(t, s):
        return SpeculativeSampling(t, s, draft_model=foreign, vocabulary=way, gamma=3)

    checks.check_greedy_identity(make, target, lengths=(40, 3))
    assert ends and max(ends) <= 12


def test_auto_prefers_the_intersection_where_it_is_half_of_the_target(target) -> None:
    few, many = (ForeignModel(target, vocabulary(pieces(39)[:n]), vocabulary(pieces(39))) for n in (18, 20))
    assert (way_of(few), way_of(many)) == ("slem", "tli")
    for foreign, way in ((few, "slem"), (many, "tli")):
        decoder = SpeculativeSampling(target, Sampling(), draft_model=foreign)
        assert decoder.stats() == {"vocabulary": way, "shared_tokens": len(foreign.shared())}
        assert decoder.memory() == {"draft_model": foreign.model.weight_bytes}


def test_what_does_not_fit_is_refused(target) -> None:
    foreign = pair(target)
    none = ForeignModel(target, vocabulary([b"x", b"y"], end=False), vocabulary([b"a", b"b"]))
    for draft, way, message in (
        (foreign, "same", "method.vocabulary=same needs a draft model with the target's tokens"),
        (target, "tli", "method.vocabulary=tli needs a draft model with its tokenizer, got a model alone"),
        (None, "slem", "got none"),
        (none, "tli", "needs tokens that both models have, got none"),
    ):
        with pytest.raises(ValueError, match=message):
            SpeculativeSampling(target, Sampling(), draft_model=draft, vocabulary=way, skip_mlp=[1])
