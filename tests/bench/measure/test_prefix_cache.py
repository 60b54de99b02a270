"""Turns of a conversation that read only what is new in them (``measure.prefix_cache``)."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench.analysis import audit, stalls
from bench.analysis.summary import summarise
from bench.config import compose
from bench.contract import checks
from bench.measure.preconditions import check, check_loaded
from bench.measure.run import RunResult, run_together
from bench.models.source import Loaded
from bench.records.run_folder import Sample, read_samples, validate
from bench.report import terminal
from bench.tasks import prompts
from methods.autoregressive import Autoregressive
from methods.decoder import PrefixCaching, common_prefix
from methods.engine.byte_tokenizer import byte_tokenizer
from methods.engine.sampling import Sampling
from methods.engine.seq2seq_lm import Seq2SeqLM
from tests.bench.measure.test_interleave import make_runner, measured
from tests.helpers.fakes import FakeDecoder, FakeExample
from tests.helpers.random_runs import random_run


def test_a_prompt_is_read_from_where_it_differs_and_its_last_token_always() -> None:
    assert common_prefix([4, 5, 6, 7], [4, 5, 9, 7]) == 2
    assert common_prefix([4, 5, 6], [4, 5, 6]) == 2, "the last token says what follows"
    assert common_prefix([4, 5], [4, 5, 6, 7]) == 2
    assert common_prefix([], [4]) == common_prefix([4], [4]) == common_prefix([5, 6], [4, 6]) == 0


class KeepingFake(FakeDecoder, PrefixCaching):
    """Says that it keeps its text, and keeps none."""


def asked(decoder: object) -> list[int]:
    assert isinstance(decoder, FakeDecoder)
    return [len(rows[0]) for rows, *_ in decoder.calls]


@pytest.mark.parametrize(
    ("prompt", "read"),
    [
        ([4, 5, 6, 7, 8, 9], [[[4, 5, 6, 7]]]),
        ([4, 5, 6, 8], [[[4, 5, 6]]]),
        ([4, 5, 6, 7], [[[4, 5, 6]]]),
        ([8, 5], []),
    ],
    ids=["whole", "as far as the template writes it so", "never all of the prompt", "nothing is quoted"],
)
def test_history_is_what_a_prompt_begins_with(tmp_path: Path, prompt: list[int], read: list[list[list[int]]]) -> None:
    runner = make_runner(tmp_path, 1, turns=2, prefix_cache=True)
    runner.examples = [FakeExample("0", ["4 5", "9"])]
    runner._answers["0/1"] = "6 7"
    second = replace(runner._unit(prompts.plan(runner.examples, 1)[1], 0), rows=[prompt])
    runner._hold_history(second, runner.arms)
    for decoder in (runner.baseline, runner.arms[0].decoder):
        assert [rows for rows, *_ in decoder.calls] == read  # type: ignore[attr-defined]


def test_history_is_read_again_where_another_text_came_between(tmp_path: Path) -> None:
    """After a cut, and where a stalled pair is measured again; its time is in no sample."""
    runner = make_runner(tmp_path, 2, turns=2, width=2, limit=3, prefix_cache=True)
    clock = runner.instruments.clock
    runner.baseline, runner.arms[0].decoder = KeepingFake(clock), KeepingFake(clock, width=2)  # type: ignore[arg-type]
    units = runner._units()
    assert [(batch.index, batch.turn) for batch, _ in units] == [(0, 0), (1, 1), (2, 0), (3, 1)]
    for batch, repeat in units:
        runner._decode_all(runner._unit(batch, repeat), runner.arms)
    lengths = asked(runner.baseline)
    assert lengths == asked(runner.arms[0].decoder) and len(lengths) == 4, "each turn came after the one before"
    runner._decode_all(runner._unit(*units[1]), runner.arms, again=True)
    read = [lengths[0] + 3, lengths[1]]
    assert asked(runner.baseline) == asked(runner.arms[0].decoder) == [*lengths, *read], (
        "prompt and answer, then the turn"
    )
    assert len(measured(runner)) == 8
    runner._decode_all(runner._unit(*units[2]), runner.arms, again=True)
    runner._decode_all(runner._unit(*units[1]), [], again=True)
    assert asked(runner.baseline)[6:] == [lengths[2], *read], "the baseline alone, where no method is open"


def test_a_method_that_wrote_another_answer_reads_the_quoted_one_before_the_clock(tmp_path: Path) -> None:
    """As a drawn answer is another one; the baseline has just written what is quoted."""
    runner = make_runner(tmp_path, 2, turns=2, limit=12, prefix_cache=True)
    clock = runner.instruments.clock
    runner.baseline, runner.arms[0].decoder = KeepingFake(clock), KeepingFake(clock, wrap=9)  # type: ignore[arg-type]
    for batch, repeat in runner._units():
        runner._decode_all(runner._unit(batch, repeat), runner.arms)
    first, second = (len(runner._unit(batch, 0).rows[0]) for batch, _ in runner._units()[:2])
    assert asked(runner.baseline)[:2] == [first, second]
    assert asked(runner.arms[0].decoder)[:3] == [first, first + 12, second]
    assert [limit for _, limit, _ in runner.arms[0].decoder.calls][:3] == [12, 8, 12]  # type: ignore[attr-defined]
    assert [s.n_prompt_tokens for s in measured(runner, "method")][:2] == [first, second], "no sample of what was read"


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_the_run_decides_whether_decoders_keep_their_text(tmp_path: Path, prefix_cache: bool) -> None:
    runner = make_runner(tmp_path, 1, prefix_cache=prefix_cache)
    runner.arms[0].decoder = keeping = KeepingFake(runner.instruments.clock)  # type: ignore[arg-type]
    keeping.keeps_prefix = not prefix_cache
    again = replace(runner)
    assert keeping.keeps_prefix is again.settings.prefix_cache is prefix_cache


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    rows = [{"question_id": i, "turns": [f"Say {i} {i} {i} again.", "And once more?"]} for i in range(5)]
    return random_run(tmp_path, rows)


def check_later_turns(samples: list[Sample]) -> None:
    """Both arms keep what is quoted of the turn before, but the last token that they wrote, and read the rest."""
    quoted = {s.prompt_id: s for s in samples if s.turn == 1 and s.arm == "baseline"}
    later = [s for s in samples if s.turn == 2]
    assert len(later) == 10
    for sample in later:
        before = quoted[sample.prompt_id.replace("/2", "/1")]
        text = prompts.followed(byte_tokenizer(), before.prompt_ids, before.text)
        most = common_prefix(text, sample.prompt_ids)
        assert before.n_prompt_tokens <= most - 1 <= sample.n_kept_tokens <= most < sample.n_prompt_tokens


def test_later_turns_read_what_is_new_in_them_and_texts_are_the_same(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "CHECKS", tuple(check for check in audit.CHECKS if check not in audit.NOISE))
    monkeypatch.setattr(stalls, "stalled", lambda samples: [])
    found: dict[bool, list[list[Sample]]] = {}
    for cached in (False, True):
        measure = f"measure.prefix_cache={str(cached).lower()}"
        cfgs = [compose.compose([f"method={name}", *words, measure]) for name in ("autoregressive", "suffix")]
        done = [each for each in run_together(cfgs) if isinstance(each, RunResult)]
        assert len(done) == 2 and not any(validate(each.path) for each in done)
        found[cached] = [read_samples(each.path) for each in done]
        for each in done:
            assert each.summary.get("prefix_cache") == (cached or None) and each.summary["agreement"]["exact"] == 1.0
            assert ("prefix cached" in terminal.how(each.summary)) is cached
            assert summarise(each.path).content["verdict"] == each.summary["verdict"]
    for whole, kept in zip(found[False], found[True], strict=True):
        texts = [[(s.prompt_id, s.arm, s.phase, s.output_ids) for s in each] for each in (whole, kept)]
        assert sorted(texts[0]) == sorted(texts[1]) and not any(s.n_kept_tokens for s in whole)
        check_later_turns([s for s in kept if s.phase == "measure"])


def test_later_turns_of_drawn_texts_read_as_much_in_all_arms(words: list[str]) -> None:
    """The method drew another answer than the one that is quoted, and yet has it in its cache."""
    drawn = ["sampling.temperature=1.0", "measure.prefix_cache=true", "measure.ignore_eos=true"]
    (done,) = run_together([compose.compose(["method=staged", *words, *drawn])])
    assert isinstance(done, RunResult) and not validate(done.path)
    samples = [s for s in read_samples(done.path) if s.phase == "measure"]
    texts = {(s.prompt_id, s.arm): s.output_ids for s in samples}
    assert any(texts[name, "baseline"] != texts[name, "method"] for name, _ in texts)
    check_later_turns(samples)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["batch_size=2"], "needs batch_size=1, got 2"),
        (["method=hf_generate"], "method=hf_generate with model=.* reads every prompt whole"),
    ],
)
def test_it_is_refused_where_arms_would_not_read_alike(words: list[str], given: list[str], why: str) -> None:
    cfg = compose.compose(["method=suffix", *words[:1], *words[3:], *given, "measure.prefix_cache=true"])
    assert re.search(why, " ".join(check(cfg)))


def test_a_model_whose_kind_only_its_files_tell_is_refused_once_it_is_loaded() -> None:
    cfg = compose.compose(["method=suffix", "model=multi30k_4_4", "dataset=multi30k", "measure.prefix_cache=true"])
    loaded = Loaded(Seq2SeqLM.__new__(Seq2SeqLM), byte_tokenizer(), "multi30k_4_4", None, None)
    (why,) = check_loaded(cfg, SimpleNamespace(kind="seq2seq"), loaded)
    assert "model=multi30k_4_4 reads every prompt whole" in why


def test_a_text_is_forgotten_when_a_batch_comes_between() -> None:
    target = checks.tiny_target()
    decoder, prompts = Autoregressive(target, Sampling()), checks.prompts(target.vocab_size, (9, 4))
    decoder.keeps_prefix = True
    alone = checks.outputs(decoder, prompts[:1], 6)
    assert checks.outputs(decoder, prompts, 6)[:1] == alone
    kept = next(decoder.decode(prompts[:1], 6, torch.Generator())).kept
    assert kept == 0
    assert next(decoder.decode(prompts[:1], 6, torch.Generator())).kept == 8
