"""Beam search on our engine: transformers' own texts, whatever the batch, and what it reports."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench.contract import checks
from methods.beam_search import BeamSearch
from methods.decoder import generate
from methods.engine import beam_search
from methods.engine.beam_search import BeamSettings
from methods.engine.causal_lm import CausalLM
from methods.engine.sampling import Sampling
from methods.engine.seq2seq_lm import Seq2SeqLM
from methods.external.transformers_beam import HFBeam
from tests.engine.test_seq2seq_lm import EOS, ids, tiny

SETTINGS = [
    {"num_beams": 2},
    {"num_beams": 5},
    {"num_beams": 4, "length_penalty": 0.6},
    {"num_beams": 4, "length_penalty": 2.0},
    {"num_beams": 3, "early_stopping": True},
]


def translator(variant: str, bias: float = 2.0) -> Seq2SeqLM:
    """A random model that ends its texts now and then."""
    model: Any = tiny(variant, torch.float64)
    if getattr(model, "final_logits_bias", None) is not None:
        model.final_logits_bias[0, EOS] = bias
    found = Seq2SeqLM.from_hf(model, keep_hf=True)
    assert isinstance(found, Seq2SeqLM)
    return found


def with_end() -> CausalLM:
    """A causal model that ends its texts: each id is as likely to be the end as any."""
    target = checks.tiny_target()
    target.eos_ids = (7, 23)
    return target


def texts(decoder: Any, prompts: list[torch.Tensor], limit: int) -> list[list[int]]:
    return generate(decoder, prompts, limit, decoder.target.eos_ids)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("variant", ["marian", "bart_forced", "t5"])
def test_translations_are_those_of_transformers(variant: str, settings: dict[str, Any]) -> None:
    target, prompts = translator(variant), ids(5, 1, 9, 7, 3, seed=11)
    wanted = [texts(HFBeam(target, Sampling(), **settings), [prompt], 20)[0] for prompt in prompts]
    ours = BeamSearch(target, Sampling(), **settings)
    assert [texts(ours, [prompt], 20)[0] for prompt in prompts] == wanted
    assert texts(ours, prompts, 20) == wanted, "a batch changes nothing"
    assert len({len(text) for text in wanted}) > 1 or variant == "t5"


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_answers_are_those_of_transformers(settings: dict[str, Any]) -> None:
    target, prompts = with_end(), checks.prompts(61, (4, 11, 1, 30))
    wanted = [texts(HFBeam(target, Sampling(), **settings), [prompt], 24)[0] for prompt in prompts]
    ours = BeamSearch(target, Sampling(), **settings)
    assert [texts(ours, [prompt], 24)[0] for prompt in prompts] == wanted
    assert texts(ours, prompts, 24) == wanted
    assert any(len(text) < 24 for text in wanted)


def test_the_text_is_the_likeliest_of_all_where_the_beams_hold_all() -> None:
    target = checks.tiny_target(vocab_size=5, layers=2)
    prompt, limit = torch.tensor([1, 2, 3]), 3
    best, likeliest = None, -torch.inf
    for text in torch.cartesian_prod(*[torch.arange(5)] * limit).tolist():
        logits = target.score(torch.tensor([1, 2, 3, *text[:-1]]), start=2).log_softmax(-1)
        value = float(logits.gather(1, torch.tensor(text)[:, None]).sum())
        if value > likeliest:
            best, likeliest = text, value
    assert beam_search.search(target, [prompt], limit, BeamSettings(25)) == [best]


def test_rows_that_are_done_leave_and_passes_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    target, prompts = translator("marian", bias=3.0), ids(5, 1, 9, 7, 3, 8, 2, 6, seed=4)
    rows: dict[bool, list[int]] = {}
    written = {}
    for drops in (True, False):
        monkeypatch.setattr(Seq2SeqLM, "pays_to_drop", lambda self, left, rows, drops=drops: drops)
        rows[drops] = []
        written[drops] = beam_search.search(target, prompts, 20, BeamSettings(4), rows[drops].append)
    assert written[True] == written[False]
    assert (
        set(rows[False][1:]) == {32}
        and rows[True][-1] < 32
        and rows[True] == sorted(rows[True][:1]) + sorted(rows[True][1:], reverse=True)
    )
    ours = BeamSearch(target, Sampling(), num_beams=4)
    steps = list(ours.decode(prompts, 20, torch.Generator()))
    assert sum(step.target_passes for step in steps) == len(rows[False])
    assert [step.at_ns for step in steps] == sorted(step.at_ns or 0 for step in steps)
    assert ours.stats()["num_beams"] == 4 and ours.most_nodes == 4


def test_what_it_refuses() -> None:
    target = checks.tiny_target()
    with pytest.raises(ValueError, match="num_beams must be at least 2, got 1"):
        BeamSearch(target, Sampling(), num_beams=1)
    with pytest.raises(ValueError, match="must be greedy, got temperature=0.7"):
        BeamSearch(target, Sampling(0.7))
