"""Beam search of ctc: against all alignments, with n-grams; the n-gram model; and from the decoder."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Generator

from methods.engine.sampling import Sampling
from methods.non_autoregressive.ctc import Ctc, CtcBeam, CtcPass, CtcStudent, CtcTraining, join
from methods.non_autoregressive.ctc_beam import Scores, search
from methods.non_autoregressive.ngram_model import FILE, NgramModel
from methods.non_autoregressive.student import pad_sources
from methods.training.translation import TranslationConfig
from tests.helpers.tiny_students import context, save, sources, student, teacher

TEXTS = [[3, 4, 5], [3, 4, 6, 4], [4, 5], [3, 4, 5, 5]]
END, SIZE = 1, 9


def joined(alignment: tuple[int, ...], blank: int) -> tuple[int, ...]:
    places = torch.tensor([alignment])
    tokens, count = join(places, torch.ones_like(places, dtype=torch.bool), blank)
    return tuple(tokens[0, : int(count[0])].tolist())


@pytest.mark.parametrize("scores", [Scores(), Scores(0.4, 0.0), Scores(0.7, 0.9)], ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_the_search_finds_the_best_text_over_all_alignments(seed: int, scores: Scores) -> None:
    """Five places, three tokens and a blank: 1,024 alignments."""
    ngrams, blank, tokens = NgramModel.learn(TEXTS, 3, SIZE, END), 0, (3, 4, 5)
    probs = np.random.default_rng(seed).dirichlet([0.7] * 4, size=5)
    sums: dict[tuple[int, ...], float] = {}
    for alignment in product(range(4), repeat=5):
        text = joined(tuple(blank if n == 0 else tokens[n - 1] for n in alignment), blank)
        likely = math.prod(probs[place, n] for place, n in enumerate(alignment))
        sums[text] = sums.get(text, 0.0) + likely

    def value(text: tuple[int, ...]) -> float:
        known = sum(ngrams.log_prob(text[:place], token) for place, token in enumerate([*text, END]))
        return math.log(sums[text]) + scores.lm_weight * known + scores.length_bonus * len(text)

    logs = np.log(probs)
    found = search(logs[:, 0].tolist(), [tokens] * 5, logs[:, 1:].tolist(), 1000, scores, ngrams)
    assert tuple(found) == max(sums, key=value)


def test_the_likeliest_text_need_not_have_the_likeliest_alignment() -> None:
    """Of one token in two places there are three alignments, each less likely than two blanks."""
    logs = np.log([[0.6, 0.4]] * 2)
    assert search(logs[:, 0].tolist(), [[3]] * 2, logs[:, 1:].tolist(), 4, Scores(), None) == [3]


# ------------------------------------------------------------------------------------------------------------- n-grams


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_probabilities_add_up_to_one(order: int) -> None:
    model = NgramModel.learn(TEXTS, order, SIZE, END)
    for text in ([], [3], [3, 4], [4, 5, 5, 6], [8, 8]):
        assert sum(math.exp(model.log_prob(text, token)) for token in range(SIZE)) == pytest.approx(1)


def test_kneser_ney_by_hand() -> None:
    """Bigrams of two texts."""
    model = NgramModel.learn([[4, 5], [4]], 2, SIZE, END)
    # kinds of tokens in front: 4: {begin}, 5: {4}, end: {5, 4}; in all 4, of 3 kinds
    of_five = (1 - 0.75) / 4 + 0.75 * 3 / 4 / SIZE
    assert math.exp(model.log_prob([4], 5)) == pytest.approx((1 - 0.75) / 2 + 0.75 * 2 / 2 * of_five)
    assert math.exp(model.log_prob([], 4)) == pytest.approx((2 - 0.75) / 2 + 0.75 / 2 * of_five)
    assert math.exp(model.log_prob([7], 5)) == pytest.approx(of_five)


def test_a_saved_model_is_the_same(tmp_path: Path) -> None:
    model = NgramModel.learn(TEXTS, 3, SIZE, END)
    model.save(tmp_path)
    read = NgramModel.load(tmp_path)
    assert (read.order, read.vocabulary, read.end) == (3, SIZE, END) and list(read.counts) == list(model.counts)
    assert read.log_prob([3, 4], 5) == model.log_prob([3, 4], 5)


# ------------------------------------------------------------------------------------------------------------- decoder


def test_a_search_finds_likelier_texts_than_the_likeliest_alignments_in_any_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = teacher()
    made: CtcStudent = student(CtcStudent, target, upsample=2)
    logits_of = made.logits
    monkeypatch.setattr(made, "logits", lambda states: logits_of(states) / 4)  # less sure than a random network is
    likely_blanks = -2.5
    batch = sources(5, 3, 7)

    def texts(writer: CtcPass | CtcBeam, rows: list[torch.Tensor]) -> list[list[int]]:
        padded_rows, lengths, whole = pad_sources(rows, 48, torch.device("cpu"))
        found = writer(made, made.network.encode(padded_rows, lengths, whole), Generator())
        return [row[: int(n)].tolist() for row, n in zip(found.tokens[:, 0], found.lengths[:, 0], strict=True)]

    def likelihood(rows: list[list[int]]) -> torch.Tensor:
        padded_rows, lengths, whole = pad_sources(batch, 48, torch.device("cpu"))
        logits, present = CtcPass(likely_blanks).read(made, made.network.encode(padded_rows, lengths, whole))
        log_probs = logits.new_zeros(*present.shape, logits.shape[-1])
        log_probs[present] = logits.log_softmax(-1)
        flat = torch.tensor([token for row in rows for token in row], dtype=torch.long)
        counts = torch.tensor([len(row) for row in rows])
        log_probs, places = log_probs.transpose(0, 1), present.sum(1)
        return -torch.nn.functional.ctc_loss(log_probs, flat, places, counts, made.blank, reduction="none")

    search_wide = CtcBeam(20, blank_penalty=likely_blanks)
    beam, plain = texts(search_wide, batch), texts(CtcPass(likely_blanks), batch)
    assert (likelihood(beam) >= likelihood(plain) - 1e-9).all() and beam != plain
    assert [texts(search_wide, [row])[0] for row in batch] == beam


def test_a_training_counts_n_grams_and_a_decoder_reads_them(tmp_path: Path) -> None:
    target = teacher(torch.float32)
    pairs = [([*range(3, 3 + n), 1], list(range(4, 4 + n))) for n in range(3, 11)] * 5
    recipe = TranslationConfig(steps=2, tokens=64, warmup=1, evaluations=1, average=1, precision="float32")
    at_work = context(target, pairs, tmp_path)
    facts = CtcTraining(data="raw", recipe=recipe).fit(at_work)
    assert set(facts["validation_bleu"]) == {"one_pass", "beam_10", "beam_10_ngrams"}
    assert (at_work.output / FILE).is_file()
    decoder = Ctc(target, Sampling(), beam=4, lm_weight=0.5, length_bonus=0.1, checkpoint=at_work.output)
    assert decoder.student.ngrams is not None and decoder.student.ngrams.order == 3
    (step,) = decoder.decode(sources(5, 6), 40, Generator())
    assert len(step.tokens) == 2 and all(row[-1] == 1 for row in step.tokens)


def test_what_cannot_be_searched_is_refused(tmp_path: Path) -> None:
    target = teacher()
    folder = save(student(CtcStudent, target, upsample=2), tmp_path / "part", target)
    assert Ctc(target, Sampling(), beam=4, checkpoint=folder).writer == CtcBeam(4)
    with pytest.raises(ValueError, match=r"must have ngrams\.npz.*Train it again"):
        Ctc(target, Sampling(), beam=4, lm_weight=0.5, checkpoint=folder)
    with pytest.raises(ValueError, match="lm_weight and length_bonus must be 0 without a search, got 0.5 and 0.0"):
        Ctc(target, Sampling(), lm_weight=0.5, checkpoint=folder)
    with pytest.raises(ValueError, match="beam must be at least 1, got 0"):
        Ctc(target, Sampling(), beam=0, checkpoint=folder)
