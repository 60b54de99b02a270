"""transformers' beam search behind the interface: its own hypotheses, and greedy search with one beam."""

from __future__ import annotations

import pytest
import torch

from bench.contract import checks
from methods.autoregressive import Autoregressive
from methods.engine.sampling import Sampling
from methods.engine.seq2seq_lm import Seq2SeqLM
from methods.external.transformers_beam import HFBeam
from methods.external.transformers_generate import HFGenerate, HFPromptLookup
from tests.engine.test_seq2seq_lm import EOS, VARIANTS, VOCAB, begun, full, ids, tiny


@pytest.fixture(scope="module", params=["marian", "bart_forced", "t5"])
def target(request):
    assert request.param in VARIANTS
    model = tiny(request.param)
    model.generation_config.no_repeat_ngram_size = 1  # a policy of the model, which is left out
    return Seq2SeqLM.from_hf(model, keep_hf=True)


def cut(rows):
    """Up to the end-of-sequence token, as the runner cuts."""
    return [row[: row.index(EOS) + 1] if EOS in row else row for row in rows]


def test_one_beam_is_greedy_search_of_a_ragged_batch(target):
    batch = checks.prompts(VOCAB, (5, 1, 14))
    ours = cut(checks.outputs(Autoregressive(target, Sampling()), batch, 11))
    assert cut(checks.outputs(HFBeam(target, Sampling(), num_beams=1), batch, 11)) == ours
    assert target.hf.generation_config.no_repeat_ngram_size == 1


def test_causal_models_too():
    target = checks.tiny_target()
    batch = checks.prompts(target.vocab_size, (5, 1, 14))
    ours = checks.outputs(Autoregressive(target, Sampling()), batch, 9)
    assert checks.outputs(HFBeam(target, Sampling(), num_beams=1), batch, 9) == ours


def logprob(target, source, row):
    logits = full(target.hf, source, begun(target, *row))[len(target.start) - 1 : -1]
    return float(logits.log_softmax(-1).gather(1, torch.tensor(row)[:, None]).sum())


def test_beams_find_what_is_likelier_and_a_wide_beam_the_likeliest(target):
    """Two tokens, all V first ones kept: the search is exhaustive, and the best pair is that of the enumeration."""
    source = ids(6)[0]
    (found,) = cut(checks.outputs(HFBeam(target, Sampling(), num_beams=VOCAB), [source], 2))
    pairs = [[EOS]] + [[a, b] for a in range(VOCAB) if a != EOS for b in range(VOCAB)]
    first = full(target.hf, source, begun(target))[-1].log_softmax(-1)
    scores = {}
    for a in range(VOCAB):
        second = full(target.hf, source, begun(target, a))[-1].log_softmax(-1)
        scores |= {(a, b): float(first[a] + second[b]) / 2 for b in range(VOCAB) if a != EOS}
    scores[EOS,] = float(first[EOS])
    assert len(scores) == len(pairs)
    assert tuple(found) == max(scores, key=scores.__getitem__)
    assert logprob(target, source, found) / len(found) == pytest.approx(max(scores.values()))


def test_steps_and_times(target):
    batch = checks.prompts(VOCAB, (7, 4))
    steps = list(HFBeam(target, Sampling(), num_beams=3).decode(batch, 6, torch.Generator()))
    times = [step.at_ns for step in steps]
    assert times == sorted(times) and len(steps) <= 6
    assert {step.nodes for step in steps} == {3} and all(step.drafted == [0, 0] for step in steps)


@pytest.mark.parametrize(
    ("sampling", "options", "said"),
    [(Sampling(), {"num_beams": 0}, "num_beams must be at least 1, got 0"), (Sampling(0.7), {}, "temperature=0.7")],
)
def test_what_is_no_beam_search_is_refused(target, sampling, options, said):
    with pytest.raises(ValueError, match=said):
        HFBeam(target, sampling, **options)


@pytest.mark.parametrize("peer", [HFGenerate, HFPromptLookup])
def test_peers_of_causal_models_point_here(target, peer):
    with pytest.raises(ValueError, match=r"needs a causal model, got an encoder-decoder.*method=hf_beam"):
        peer(target, Sampling())
