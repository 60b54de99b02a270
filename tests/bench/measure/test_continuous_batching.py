"""Rows that are given new prompts while others go on: no text depends on it, and what of it is counted how."""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from bench import cli, errors
from bench.analysis import metrics
from bench.analysis.audit import audit
from bench.config import compose
from bench.config.identity import strip
from bench.config.schema import PathsConfig, RunConfig
from bench.contract import checks
from bench.cost import what_if
from bench.cost.settings import WhatIfQuery
from bench.errors import UserError
from bench.measure.instruments import Instruments
from bench.measure.interleave import Runner
from bench.measure.run import run
from bench.measure.timing import timed_decode
from bench.records.run_folder import read_manifest, read_samples, validate
from bench.report import terminal
from bench.sweep import plan
from bench.tasks.prompts import by_length, plan_queues
from bench.tasks.prompts import plan as plan_batches
from methods.autoregressive import Autoregressive
from methods.decoder import Decoder, Refillable, Step
from methods.engine.causal_lm import CausalLM
from methods.engine.sampling import Sampling
from methods.engine.seq2seq_lm import Seq2SeqLM
from methods.speculative.bild import Bild
from methods.speculative.prompt_lookup import PromptLookup
from methods.speculative.speculative_sampling import SpeculativeSampling
from tests.bench.measure.test_interleave import make_runner, measured
from tests.engine import test_cuda_graphs, test_seq2seq_lm
from tests.helpers import fakes
from tests.helpers.fakes import EOS, FakeClock, FakeDecoder, FakeExample
from tests.test_contract import DECODERS

LIMIT = 14
NAMES = (
    "autoregressive",
    "prompt_lookup",
    "prompt_lookup_prompt",
    "suffix",
    "rest",
    "token_recycling",
    "lookahead",
    "lookahead_prompt",
    "draft_model",
    "layer_skip",
    "blockwise",
    "medusa",
    "hydra_heads",
)

Round = tuple[tuple[int, ...], int, int, int]


def round_of(step: Step, row: int) -> Round:
    return tuple(step.tokens[row]), step.drafted[row], step.accepted[row], step.depth[row]


def refilled(
    decoder: Decoder, queue: Sequence[Tensor], rows: int, wanted: Sequence[int], schedule: random.Random
) -> list[list[Round]]:
    """The rounds of every prompt until it has ``wanted`` tokens; a finished row sometimes idles for a while."""
    assert isinstance(decoder, Refillable) and decoder.continuous_batching
    found: list[list[Round]] = [[] for _ in queue]
    waiting, places = deque(range(rows, len(queue))), list(range(rows))
    longest, told = max(map(len, queue)), set[int]()
    decode = decoder.decode_refilled(list(queue[:rows]), LIMIT, torch.Generator().manual_seed(0), longest)
    step = next(decode)
    while True:
        for row, place in enumerate(places):
            if _written(found[place]) < wanted[place] and (not step.admitted or row in step.admitted):
                found[place].append(round_of(step, row))
            elif step.admitted and row not in step.admitted:
                assert not step.tokens[row], "a row that waits commits nothing"
        if all(_written(rounds) >= want for rounds, want in zip(found, wanted, strict=True)):
            return found
        done = [row for row, place in enumerate(places) if _written(found[place]) >= wanted[place]]
        fresh: dict[int, Tensor | None] = {}
        for row in done:
            if waiting and (len(done) == rows or schedule.random() < 0.7):
                places[row] = waiting.popleft()
                fresh[row] = queue[places[row]]
            elif not waiting and row not in told and schedule.random() < 0.7:
                fresh[row] = None  # it ended, and may leave
                told.add(row)
        step = decode.send(fresh) if fresh else next(decode)
        assert step.admitted == {row for row, prompt in fresh.items() if prompt is not None}


def _written(rounds: list[Round]) -> int:
    return sum(len(tokens) for tokens, *_ in rounds)


def alone(decoder: Decoder, prompt: Tensor, wanted: int) -> list[Round]:
    rounds: list[Round] = []
    for step in decoder.decode([prompt], LIMIT, torch.Generator().manual_seed(0)):
        rounds.append(round_of(step, 0))
        if _written(rounds) >= wanted:
            break
    return rounds


@pytest.fixture(scope="module")
def target() -> CausalLM:
    return checks.tiny_target()


def check(decoder: Decoder, vocab_size: int, schedule: random.Random, lengths: Sequence[int] = ()) -> None:
    lengths = lengths or [schedule.choice((1, 2, 9, 17, 30)) for _ in range(9)]
    queue = checks.prompts(vocab_size, lengths, schedule.randrange(100))
    wanted = [schedule.choice((1, 2, 6, LIMIT)) for _ in queue]
    found = refilled(decoder, queue, schedule.choice((2, 3, 4)), wanted, schedule)
    for place, prompt in enumerate(queue):
        assert found[place] == alone(decoder, prompt, wanted[place]), f"prompt {place} of {lengths[place]} tokens"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(2))
def test_every_prompt_takes_the_rounds_it_takes_alone(name: str, seed: int, target: CausalLM) -> None:
    """64 bit, ragged prompts, rows that leave at any time: some at their limit, some in the step that begins them."""
    check(DECODERS[name].make(target, Sampling()), target.vocab_size, random.Random(f"{name} {seed}"))


@pytest.mark.parametrize("name", ["prompt_lookup", "layer_skip"])
def test_passes_of_fixed_shape_as_well(name: str) -> None:
    target = test_cuda_graphs.with_graphs()
    check(DECODERS[name].make(target, Sampling()), target.vocab_size, random.Random(f"{name} fixed"))


@pytest.mark.parametrize("name", ["prompt_lookup", "draft_model"])
def test_refilled_rows_sample_the_target(name: str) -> None:
    """Chi-square of the first three tokens of prompts that began while other rows went on, at 1e-4."""
    target, sampling = checks.tiny_target(vocab_size=8, seed=3), Sampling(0.9)
    prompt, rows, count, horizon = checks.prompts(8, (6,))[0], 256, 4096, 3
    decoder = DECODERS[name].make(target, sampling)
    timed = timed_decode(
        decoder,
        [*checks.prompts(8, [2] * (rows // 2)), *[prompt] * (rows // 2 + count)],
        horizon,
        (),
        torch.Generator().manual_seed(0),
        Instruments(target.device),
        rows,
    )
    begun = [row for row in timed.rows if row.first]
    assert len(begun) == count
    exact = checks.joint_distribution(target, prompt, sampling, horizon)
    counts = torch.zeros(exact.shape, dtype=torch.double)
    counts.index_put_(tuple(torch.tensor([row.ids for row in begun]).T), torch.ones(count).double(), accumulate=True)
    expected, seen = checks.pooled(exact.flatten() * count, counts.flatten())
    assert chisquare(seen, expected).pvalue > 1e-4


def test_a_little_model_under_a_relaxed_rule_as_well(target: CausalLM) -> None:
    decoder = Bild(target, Sampling(), checks.tiny_target(target.vocab_size, layers=2, seed=5), fallback=0.3)
    check(decoder, target.vocab_size, random.Random("bild"))


@pytest.mark.parametrize("variant", ["bart", "bart_forced", "t5"])
@pytest.mark.parametrize("name", ["prompt_lookup", "draft_model"])
def test_sources_of_an_encoder_decoder_as_well(name: str, variant: str) -> None:
    target = Seq2SeqLM.from_hf(test_seq2seq_lm.tiny(variant))
    decoder = test_seq2seq_lm.DECODERS[name](target, Sampling())
    grows = [9, 2, 5, 17, 1, 12, 30, 4, 33]  # sources that leave no room for those to come
    for seed in range(3):  # such small models write the same again and again: not every mistake shows in every text
        check(decoder, target.vocab_size, random.Random(seed), grows)


TOGETHER: dict[str, Any] = {
    "written": Autoregressive,
    "drafted": lambda target, sampling: SpeculativeSampling(target, sampling, gamma=3, draft_model=target),
    "searched": lambda target, sampling: PromptLookup(target, sampling, costs=[[0, 0.35], [1, 1.0], [2, 9.0]]),
}


@pytest.mark.parametrize("make", TOGETHER.values(), ids=TOGETHER.keys())
@pytest.mark.parametrize("variant", ["marian", "bart_forced"])
def test_rows_are_refilled_between_rounds_of_one_call(variant: str, make: Any) -> None:
    """A text is replaced while tokens of its row are still to be handed out."""
    family, options = test_seq2seq_lm.KERNELS[f"{variant}_kernels"]
    target = Seq2SeqLM.from_hf(test_seq2seq_lm.tiny(family, **options), linear=test_seq2seq_lm.FORM)
    assert target.runs_rounds == target.fused
    for seed in range(4):
        check(make(target, Sampling()), target.vocab_size, random.Random(seed), [9, 2, 5, 17, 1, 12, 30, 4])


# -------------------------------------------------------------------------------------------------- under the clock

# A fake decoder of two rows writes the ids behind a prompt's up to 10, which is 0 and ends it; 50 ns to read a prompt
# of one id, 100 ns a round. Prompts 7, 3, 8, 5 write 3, 7, 2, 5 tokens.
#   step   0    1    2    3    4    5    6    7    8    9
#   ns    50  100  100   50  100   50  100  100  100  100   = 850
#   row 0  8    9    0   [9]   0   [6]   7    8    9    0    prompts 0, 2, 3
#   row 1  4    5    6    -    7    -    8    9    0         prompt 1
TIMELINE = {
    "0/1": (0, [50, 100, 100], [1, 1, 1], [1, 1, 1]),
    "1/1": (0, [50, 100, 100, 50, 100, 50, 100, 100, 100], [1, 1, 1, 0, 1, 0, 1, 1, 1], [1, 1, 1, 0, 1, 0, 1, 1, 1]),
    "2/1": (3, [50, 100], [1, 1], [1, 1]),
    "3/1": (5, [50, 100, 100, 100, 100], [1, 1, 1, 1, 1], [1, 1, 1, 1, 1]),
}


def queue_runner(path: Path, prompts: Sequence[str] = ("7", "3", "8", "5"), **settings: Any) -> Runner:
    runner = make_runner(path, batch_size=2, refill=True, limit=50, **settings)
    clock = runner.instruments.clock
    assert isinstance(clock, FakeClock)
    runner.baseline, runner.arms[0].decoder = FakeDecoder(clock, wrap=10), FakeDecoder(clock, wrap=10, step_ns=50)
    runner.examples = [FakeExample(str(number), [text]) for number, text in enumerate(prompts)]
    return runner


def test_a_queue_is_timed_prompt_by_prompt(tmp_path: Path) -> None:
    runner = queue_runner(tmp_path)
    runner.measure()
    rows = {s.prompt_id: s for s in measured(runner, "baseline")}
    found = {name: (s.admitted, s.step_ns, s.step_tokens, s.step_target_passes) for name, s in rows.items()}
    assert found == TIMELINE
    assert {s.output_ids[-1] for s in rows.values()} == {EOS} and rows["1/1"].output_ids == [4, 5, 6, 7, 8, 9, 0]
    assert {(s.batch_ns, s.queue, s.batch_size, s.batch) for s in rows.values()} == {(850, 4, 2, 0)}
    assert {s.batch_ns for s in measured(runner, "method")} == {50 + 100 + 50 + 50 + 50 + 200}
    runner.arms[0].folder.update(status="finished", eos_ids=[EOS])
    runner.arms[0].folder.write_summary({})
    assert validate(runner.arms[0].folder.path) == []


def test_rates_of_a_queue_by_hand(tmp_path: Path) -> None:
    runner = queue_runner(tmp_path)
    runner.measure()
    summary = metrics.summarise(
        runner.arms[0].folder.samples, guarantee="EXACT", n_bootstrap=100, cost_curve=lambda nodes, rows, context: 1e-7
    )
    base, ns = summary["baseline"], 1e-9
    assert base["tokens_per_s"] == pytest.approx(17 / (850 * ns)) and base["prompts_per_s"] == pytest.approx(
        4 / (850 * ns)
    )
    assert base["time_s"] == pytest.approx({"total": 850 * ns, "prefill": 150 * ns, "decode": 700 * ns})
    # rounds behind the prefill: 2 + 6 + 1 + 4 of one token each; that a row waited is no round of it
    assert base["tokens_per_step"] == 1.0
    assert base["latency_s"]["mean"] == pytest.approx((250 + 750 + 150 + 450) / 4 * ns)
    assert base["ttft_s"]["mean"] == pytest.approx(50 * ns)
    speedup = summary["speedup"]
    assert speedup["total"]["value"] == pytest.approx(850 / 500) and speedup["total"]["n"] == 1
    assert speedup["total"]["low"] is None and "measure.refill_queue" in speedup["total"]["reason"]
    assert (speedup["prefill"], speedup["decode"]) == (pytest.approx(1.0), pytest.approx(2.0))
    assert speedup["latency"]["n"] == 4 and speedup["latency"]["low"] is None, "an interval needs five"
    assert speedup["latency"]["value"] == pytest.approx(1600 / (150 + 450 + 100 + 250))
    assert speedup["by_category"] == {} and summary["spread"] is None and summary["jitter"] is None
    assert summary["predicted_speedup"] == pytest.approx(1.0)  # both arms take the same rounds, whatever they took
    found = audit(runner.arms[0].folder.samples, summary, {"eos_ids": [EOS]})
    assert found.valid, found.reasons


def test_what_a_waiting_row_did_is_noticed(tmp_path: Path) -> None:
    runner = queue_runner(tmp_path)
    runner.measure()
    summary = metrics.summarise(runner.arms[0].folder.samples, guarantee="EXACT", n_bootstrap=100)
    (sample,) = (s for s in measured(runner, "method") if s.prompt_id == "1/1")
    sample.step_tokens[3:5] = [1, 0]
    (reason,) = audit(runner.arms[0].folder.samples, summary, {"eos_ids": [EOS]}).reasons
    assert "although the row waited" in reason


def test_contexts_of_a_queue_are_the_means_of_its_rows(tmp_path: Path) -> None:
    runner = queue_runner(tmp_path)
    runner.measure()
    seen: list[tuple[int, int, int]] = []
    metrics.predicted_speedup(
        metrics.paired(metrics.frame(runner.arms[0].folder.samples)), lambda *asked: seen.append(asked) or 1e-7
    )
    # Before the rounds 1, 2, 4, 6, 7, 8, 9: (2 + 2) / 2, (3 + 3) / 2, (2 + 4) / 2, (2 + 5) / 2, (3 + 6) / 2,
    # (4 + 7) / 2, (5 + 8) / 2, rounded down; each price is asked for once.
    assert seen == [(1, 2, context) for context in (2, 3, 4, 5, 6)]


def test_long_queues_are_split_evenly_and_every_turn_is_a_unit() -> None:
    parts = plan_queues(fakes.examples(11), 3)
    assert [len(batch.examples) for batch in parts] == [3, 4, 4]
    assert [example.id for batch in parts for example in batch.examples] == [str(i) for i in range(11)]
    (whole,) = plan_queues(fakes.examples(5), None)
    assert len(whole.examples) == 5
    turns = plan_queues([FakeExample("a", ["1", "2"]), FakeExample("b", ["1"]), FakeExample("c", ["3", "4"])], None)
    assert [batch.prompt_ids for batch in turns] == [["a/1", "b/1", "c/1"], ["a/2", "c/2"]]


def test_batches_of_similar_length_keep_conversations_and_the_order_of_equals() -> None:
    given = [
        FakeExample("a", ["1 2 3", "4"]),
        FakeExample("b", ["1"]),
        FakeExample("c", ["2"]),
        FakeExample("d", ["5 6"]),
    ]
    assert [example.id for example in by_length(given)] == ["b", "c", "d", "a"]
    found = [batch.prompt_ids for batch in plan_batches(by_length(given), 2)]
    assert found == [["b/1", "c/1"], ["d/1", "a/1"], ["a/2"]]
    with pytest.raises(UserError, match=r"sort_by_length must be false with measure\.refill=true"):
        compose.compose(["measure.sort_by_length=true", "measure.refill=true", "batch_size=2"])


def test_a_run_over_prompts_by_length(cfg: RunConfig) -> None:
    sorted_run = run(with_measure(cfg, refill=False, sort_by_length=True))
    samples = [s for s in read_samples(sorted_run.path) if (s.phase, s.turn, s.arm) == ("measure", 1, "method")]
    first_turns: dict[int, set[str]] = {}
    for sample in samples:
        first_turns.setdefault(sample.batch, set()).add(sample.prompt_id)
    # of the even ones by their first turns, of the odd ones with a second one of 10 characters: 0 2 1 4 3 6 5
    in_order = [first_turns[batch] for batch in sorted(first_turns)]  # one that stalled was measured again at the end
    assert in_order == [{"0/1", "1/1", "2/1"}, {"3/1", "4/1", "6/1"}, {"5/1"}]
    assert validate(sorted_run.path) == [] and sorted_run.summary["sort_by_length"] is True
    assert "prompts by length" in terminal.render(sorted_run.summary, sorted_run.path)
    manifest = read_manifest(sorted_run.path)
    assert manifest is not None and [curve["batch"] for curve in manifest["cost_curve"]["fewer_rows"]] == [1]
    assert all(len(s.step_rows or ()) == len(s.step_ns) for s in samples)


def test_a_queue_that_broke_is_measured_again_as_a_whole(tmp_path: Path) -> None:
    runner = queue_runner(tmp_path, ["7", "3", "8", "5", "6", "4", "7", "2"], refill_queue=3)
    runner.measure()
    lines = (runner.arms[0].folder.path / "samples.jsonl").read_bytes().splitlines(keepends=True)
    runner.arms[0].folder.close()
    file = runner.arms[0].folder.path / "samples.jsonl"
    file.write_bytes(b"".join(lines[:-3]))  # two queues of 4 prompts, twice each
    again = queue_runner(tmp_path, ["7", "3", "8", "5", "6", "4", "7", "2"], refill_queue=3)
    assert {s.prompt_id for s in measured(again)} == {f"{i}/1" for i in range(4)}
    again.measure()
    assert len(measured(again)) == 16 and len(again.arms[0].decoder.calls) == 1  # type: ignore[attr-defined]


def test_the_warm_up_refills_too(tmp_path: Path) -> None:
    runner = queue_runner(tmp_path, warmup=1)
    assert {s.queue for s in runner.warm_up()[0]} == {4}


# ------------------------------------------------------------------------------------------------------ a whole run


@pytest.fixture
def cfg(tmp_path: Path) -> RunConfig:
    file = tmp_path / "prompts.jsonl"
    rows = [
        {
            "question_id": i,
            "category": "chat",
            "turns": [f"Say {i} {i} {'and more ' * i}again.", "Once more?"][: 1 + i % 2],
        }
        for i in range(7)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["model=random", "dataset=jsonl", f"dataset.path={file}", "hardware=cpu_fp32", "hardware.threads=1"]
    more = ["max_new_tokens=12", "measure.bootstrap_samples=100", "measure.refill=true", "batch_size=3"]
    composed = compose.compose(["method=prompt_lookup", *words, *more])
    return replace(composed, paths=PathsConfig(results=str(tmp_path / "results"), cache=str(tmp_path / "cache")))


def with_measure(cfg: RunConfig, **changes: Any) -> RunConfig:
    return replace(cfg, measure=replace(cfg.measure, **changes))


def test_a_run_with_refilled_rows(cfg: RunConfig) -> None:
    outcome = run(cfg)
    assert validate(outcome.path) == []
    assert outcome.summary["refill"] is True and ", refilled" in terminal.render(outcome.summary, outcome.path)
    assert outcome.summary["agreement"]["exact"] == outcome.summary["agreement"]["identical_to_baseline"] == 1.0
    assert outcome.summary["speedup"]["latency"]["n"] == 7 and outcome.summary["predicted_speedup"] > 0
    lockstep = run(with_measure(cfg, refill=False))
    texts = [
        {(s.prompt_id, s.arm): s.output_ids for s in read_samples(o.path) if s.phase == "measure"}
        for o in (outcome, lockstep)
    ]
    assert texts[0] == texts[1]
    with pytest.raises(UserError, match="refill"):
        terminal.leaderboard([outcome.summary, lockstep.summary])
    with pytest.raises(UserError, match="was measured with continuous batching"):
        what_if.answer(WhatIfQuery(outcome.path))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["batch_size=1"], r"batch_size of at least 2, got 1\. Raise it, or set measure\.refill=false"),
        (["batch_size=7"], r"got 7 prompts for batch_size=7\. .*dataset\.limit"),
        (["measure.refill_queue=3"], r"refill_queue must be larger than batch_size=3, got 3"),
        (
            ["method=hf_generate"],
            r"method=hf_generate does not support .*autoregressive, .*prompt_lookup, .*token_recycling",
        ),
        (["method=eagle"], r"method=eagle does not support"),
    ],
)
def test_what_cannot_be_refilled_is_refused(words: list[str], said: str, cfg: RunConfig) -> None:
    method = compose.compose(words).method if words[0].startswith("method") else cfg.method
    batch_size = int(words[0].partition("=")[2]) if words[0].startswith("batch") else cfg.batch_size
    queue = 3 if words[0].startswith("measure") else None
    asked = with_measure(replace(cfg, method=method, batch_size=batch_size), refill_queue=queue)
    with pytest.raises(UserError, match=said):
        run(asked)
    assert not Path(cfg.paths.results).exists()


@pytest.mark.parametrize(
    "method", ["eagle", "self_speculative", "specdec", "calm", "static_depth", "nat", "hf_generate"]
)
def test_the_command_line_refuses_in_one_message(method: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Before a part, a model or a data set is looked for."""
    assert cli.main([f"method={method}", "batch_size=4", "measure.refill=true"]) == errors.BAD_INPUT
    said = capsys.readouterr().err
    assert f"method={method} does not support continuous batching" in said and "Traceback" not in said
    assert "Choose one of autoregressive," in said and "set measure.refill=false" in said
    able = said.partition("one of ")[2].partition(", or")[0].split(", ")
    assert method not in able and {"prompt_lookup", "medusa", "rest", "bild"} <= set(able)


def test_the_named_sweep_leaves_out_what_cannot_and_says_why(tmp_path: Path) -> None:
    _, words = plan.read_words(["sweep=batch_refilled", f"paths.results={tmp_path}", "batch_size=4"])
    jobs = {job.cfg.method["name"]: job for job in plan.make(words, plan.Options()).jobs}
    assert jobs["prompt_lookup"].state == "new" and jobs["prompt_lookup"].cfg.measure.refill
    assert jobs["eagle"].state == "incompatible" and "does not support continuous batching" in jobs["eagle"].reason


def test_queues_without_refilling_are_refused() -> None:
    with pytest.raises(UserError, match="needs measure.refill=true, got 8 without it"):
        compose.compose(["measure.refill_queue=8"])


def test_the_id_of_a_run_in_lockstep_is_what_it_was(cfg: RunConfig) -> None:
    known = strip(with_measure(cfg, refill=False).to_dict())["measure"]
    assert "refill" not in known and strip(cfg.to_dict())["measure"]["refill"] is True
