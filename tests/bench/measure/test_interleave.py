"""The measuring loop under a fake clock: what is timed, cut, ordered, seeded, recorded and resumed."""

from __future__ import annotations

import gc
import hashlib
import random
import signal
import time
from collections import Counter
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.contract import checks
from bench.errors import RunFailed, UserError
from bench.measure.agreement import check_run
from bench.measure.instruments import Instruments
from bench.measure.interleave import MethodArm, Runner, Settings, derive_seed, random_order
from bench.measure.timing import Row, timed_decode
from bench.records.run_folder import RunFolder, Sample, read_samples, validate
from bench.tasks import prompts
from bench.utils.progress import Progress
from methods.autoregressive import Autoregressive
from methods.decoder import Decoder, Rehearsed, Step
from methods.engine.sampling import Sampling
from methods.speculative.prompt_lookup import PromptLookup
from tests.helpers import fakes, heap
from tests.helpers.fakes import EOS, FakeClock, FakeDecoder, FakeExample, FakeTask, FakeTokenizer
from tests.helpers.sweeps import start_call


def make_runner(path: Path, count: int = 4, *, turns: int = 1, width: int = 3, **settings: Any) -> Runner:
    clock = FakeClock()
    folder = RunFolder.create(path, "run", {}, "")
    chosen: dict[str, Any] = {"seed": 7, "limit": 8, "context": 512, "eos_ids": (EOS,), "warmup": 0} | settings
    return Runner(
        baseline=FakeDecoder(clock),
        arms=[MethodArm(FakeDecoder(clock, width=width, step_ns=130), folder)],
        task=FakeTask(),
        examples=fakes.examples(count, turns),
        tokenizer=FakeTokenizer(),
        settings=Settings(**chosen),
        instruments=fakes.instruments(clock),
    )


def measured(runner: Runner, arm: str | None = None) -> list[Sample]:
    return [s for s in runner.arms[0].folder.samples if s.phase == "measure" and arm in (None, s.arm)]


# ------------------------------------------------------------------------------------------------------- cutting


def test_row_keeps_the_end_of_text_and_nothing_behind_it() -> None:
    row = Row(limit=10, eos_ids={EOS})
    row.take([5, 6])
    row.take([7, EOS, 8, EOS])
    row.take([9])
    assert (row.ids, row.counts, row.finish) == ([5, 6, 7, EOS], [2, 2], "eos")


def test_row_is_cut_at_the_limit_inside_a_step() -> None:
    row = Row(limit=4, eos_ids={EOS})
    row.take([1])
    row.take([2, 3, 4, 5, EOS])
    assert (row.ids, row.counts, row.finish) == ([1, 2, 3, 4], [1, 3], "length")


def test_end_of_text_on_the_last_place_counts_as_end_of_text() -> None:
    row = Row(limit=2, eos_ids={EOS})
    row.take([1, EOS, 2])
    assert (row.ids, row.finish) == ([1, EOS], "eos")


# -------------------------------------------------------------------------------------------------------- timing


def test_steps_are_timed_one_by_one_and_the_first_is_the_prefill() -> None:
    clock = FakeClock()
    decoder = FakeDecoder(clock, width=3, step_ns=130)
    prompt = torch.tensor([4, 5])
    timed = timed_decode(decoder, [prompt], 8, [EOS], torch.Generator(), fakes.instruments(clock))
    assert timed.step_ns == [100, 130, 130, 130]
    assert timed.rows[0].counts == [1, 3, 3, 1]
    assert (timed.batch_ns, timed.wall_ns, timed.reading.cpu_ns) == (490, 490, 490)
    assert decoder.closed == 1


def test_decoding_stops_when_the_last_row_has_ended_and_earlier_rows_have_no_further_steps() -> None:
    clock = FakeClock()
    decoder = FakeDecoder(clock, wrap=10)
    batch = [torch.tensor([7]), torch.tensor([3])]  # they reach the id 0 after 3 and 7 tokens
    timed = timed_decode(decoder, batch, 50, [EOS], torch.Generator(), fakes.instruments(clock))
    assert [row.ids for row in timed.rows] == [[8, 9, 0], [4, 5, 6, 7, 8, 9, 0]]
    assert [len(row.counts) for row in timed.rows] == [3, 7] and len(timed.steps) == 7


class Blocking(Decoder):
    """Like a wrapped ``generate``: everything happens first, the steps say when they did."""

    guarantee = FakeDecoder.guarantee

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock

    def decode(self, batch: list[torch.Tensor], limit: int, rng: torch.Generator) -> Any:
        begin = self.clock()
        self.clock.spend(1_000)
        for end in (100, 250, 450):
            yield Step([[1, 2]], [1], [1], [1.0], [1], at_ns=begin + end)


def test_a_blocking_decoder_tells_its_own_times() -> None:
    clock = FakeClock()
    timed = timed_decode(Blocking(clock), [torch.tensor([1])], 5, [EOS], torch.Generator(), fakes.instruments(clock))
    assert timed.step_ns == [100, 150, 200] and timed.batch_ns == 450
    assert timed.rows[0].counts == [2, 2, 1]


def test_a_decoder_that_stops_early_is_refused() -> None:
    clock = FakeClock()
    with pytest.raises(RunFailed, match="Blocking stopped after 6 of 9 tokens"):
        timed_decode(Blocking(clock), [torch.tensor([1])], 9, [EOS], torch.Generator(), fakes.instruments(clock))


# ----------------------------------------------------------------------------------------------------- the loop


def test_every_prompt_is_measured_by_both_arms_next_to_each_other(tmp_path: Path) -> None:
    runner = make_runner(tmp_path, 5, repeats=2)
    runner.measure()
    rows = measured(runner)
    assert Counter(s.arm for s in rows) == {"method": 10, "baseline": 10}
    for first, second in zip(rows[::2], rows[1::2], strict=True):
        assert (first.prompt_id, first.repeat, first.seed) == (second.prompt_id, second.repeat, second.seed)
        assert (first.order, second.order) == (0, 1) and first.arm != second.arm
    assert {s.arm for s in rows if s.order == 0} == {"method", "baseline"}
    assert [s.output_ids for s in rows[::2]] == [s.output_ids for s in rows[1::2]]


def test_sample_holds_what_the_steps_said(tmp_path: Path) -> None:
    runner = make_runner(tmp_path, 1)
    runner.measure()
    (sample,) = measured(runner, "method")
    assert sample.prompt_id == "0/1" and sample.turn == 1 and sample.prompt_ids == [1]
    assert sample.output_ids == [2, 3, 4, 5, 6, 7, 8, 9] and sample.finish == "length"
    assert sample.step_ns == [50, 130, 130, 130] and sample.prefill_ns == 50 and sample.batch_ns == 440
    assert sample.step_tokens == [1, 3, 3, 1] and sample.step_accepted == [0, 2, 2, 2]
    assert sample.quality == {"words": 8.0} and sample.error is None


def test_order_and_seeds_depend_on_the_prompt_and_not_on_what_ran_before(tmp_path: Path) -> None:
    whole, tail = make_runner(tmp_path / "a", 6), make_runner(tmp_path / "b", 6)
    tail.examples = tail.examples[3:]
    whole.measure()
    tail.measure()
    seen = {(s.prompt_id, s.arm): (s.seed, s.order) for s in measured(whole)}
    assert all(seen[s.prompt_id, s.arm] == (s.seed, s.order) for s in measured(tail))
    assert len({s.seed for s in measured(whole)}) == 6
    assert all(call[2] in {s.seed for s in measured(whole)} for call in whole.arms[0].decoder.calls)  # type: ignore[attr-defined]


def test_arm_order_is_a_fair_coin() -> None:
    first = sum(random_order(["", "run"], 0, [str(i)], 0)[0] == "run" for i in range(2_000))
    assert abs(first - 1_000) < 4.9 * 500**0.5  # five standard deviations: one false alarm in a million seeds
    assert random_order(["x", "y"], 0, ["a", "b"], 1) == random_order(["y", "x"], 0, ["a", "b"], 1)


def test_seeds_are_pinned() -> None:
    """A changed derivation would make every recorded run irreproducible."""
    assert derive_seed(0, "81/1", 0) == int.from_bytes(hashlib.sha256(b"0\x1f81/1\x1f0").digest()[:6], "big")
    assert derive_seed(0, "1", 11) != derive_seed(0, "11", 1)


def test_second_turn_quotes_the_baselines_first_answer_in_both_arms(tmp_path: Path) -> None:
    runner = make_runner(tmp_path, 2, turns=2, width=2, limit=3, repeats=2)
    runner.arms[0].decoder = FakeDecoder(runner.instruments.clock, wrap=5)  # type: ignore[arg-type]  # answers differently
    runner.examples = [FakeExample("x", ["3", "7"]), FakeExample("y", ["1"])]
    runner.measure()
    second = [s for s in measured(runner) if s.prompt_id == "x/2"]
    assert len(second) == 4 and all(s.prompt_ids == [3, 4, 5, 6, 7] for s in second)
    first = {s.arm: s.output_ids for s in measured(runner) if s.prompt_id == "x/1"}
    assert first == {"baseline": [4, 5, 6], "method": [4, 0]}
    assert {s.prompt_id for s in measured(runner)} == {"x/1", "x/2", "y/1"}


def test_batch_rows_carry_what_each_prompt_gives_alone(tmp_path: Path) -> None:
    alone, together = make_runner(tmp_path / "1", 5), make_runner(tmp_path / "4", 5, batch_size=4)
    alone.measure()
    together.measure()
    ids = {(s.prompt_id, s.arm): (s.output_ids, s.step_tokens) for s in measured(alone)}
    assert ids == {(s.prompt_id, s.arm): (s.output_ids, s.step_tokens) for s in measured(together)}
    assert Counter(s.batch_size for s in measured(together)) == {4: 8, 1: 2}
    assert len({s.batch for s in measured(together)}) == 2
    rows = [s for s in measured(together, "method") if s.batch == 0]
    assert len({s.batch_ns for s in rows}) == 1 and max(sum(s.step_ns) for s in rows) == rows[0].batch_ns


def test_warm_up_prefers_spare_examples_and_is_recorded_as_such(tmp_path: Path) -> None:
    runner = make_runner(tmp_path, 3, warmup=2)
    runner.spare = [FakeExample("spare", ["9 9"])]
    assert {s.prompt_id for s in runner.warm_up()[0]} == {"spare/1", "2/1"}
    assert runner.seconds.timed == 0 and not measured(runner)
    runner.measure()
    assert Counter(s.phase for s in read_samples(runner.arms[0].folder.path)) == {"warmup": 4, "measure": 6}


def test_a_scorer_that_fails_leaves_the_times_and_says_so(tmp_path: Path) -> None:
    class Broken(FakeTask):
        def score(self, example: FakeExample, turn: int, text: str) -> dict[str, float]:
            raise KeyError("reference")

    runner = make_runner(tmp_path, 1)
    runner.task = Broken()
    runner.measure()
    assert all(s.error == "scoring failed: KeyError: 'reference'" and s.step_ns for s in measured(runner))


def test_time_between_decodes_is_harness_time(tmp_path: Path) -> None:
    runner = make_runner(tmp_path, 2)
    runner.measure()
    timed = sum(s.batch_ns for s in measured(runner)) / 1e9
    assert runner.seconds.timed == pytest.approx(timed)
    runner.seconds.loop, runner.seconds.timed, runner.seconds.scoring = 11.0, 9.5, 1.0
    assert runner.seconds.harness_share == pytest.approx(0.05)


class Prepared(FakeDecoder, Rehearsed):
    """Takes 10 us for each prompt that it may see beforehand."""

    def rehearse(self, prompts: Any, limit: int) -> None:
        self.clock.spend(10_000 * len(prompts))


def test_a_rehearsal_is_before_the_clock_and_no_time_of_the_loop(tmp_path: Path) -> None:
    runner = make_runner(tmp_path, 3, warmup=1)
    clock = runner.baseline.clock
    runner.wall = lambda: clock() / 1e9
    runner.arms[0].decoder = Prepared(clock, width=3, step_ns=130)
    runner.warm_up()
    assert runner.seconds.loop == 0
    assert runner.seconds.warmup < 20e-6
    runner.measure()
    assert all(sample.batch_ns < 10_000 for sample in measured(runner))
    assert runner.seconds.loop == pytest.approx(runner.seconds.timed)
    assert 40e-6 < runner.seconds.warmup < 50e-6


# ------------------------------------------------------------------------------------------------ bad prompts


def test_the_collector_does_not_search_what_was_measured_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: list[int] = []

    def watched(*args: Any) -> Any:
        searched.append(len(gc.get_objects()))
        return timed_decode(*args)

    monkeypatch.setattr("bench.measure.interleave.timed_decode", watched)
    monkeypatch.setattr(gc, "unfreeze", heap.unfreeze)
    gc.unfreeze()
    make_runner(tmp_path, 4).measure()
    assert len(searched) == 8 and max(searched) < len(gc.get_objects()) / 10
    assert gc.get_freeze_count() == 0


def check(examples: list[FakeExample], limit: int = 8, context: int = 20) -> list[int]:
    return prompts.check(FakeTask(), examples, FakeTokenizer(), limit, context)


def test_prompts_that_fit_are_counted() -> None:
    assert check([FakeExample("a", ["1 2 3", "4"])]) == [3, 12]  # turn 2: four ids and an answer of at most eight


@pytest.mark.parametrize(
    ("example", "words"),
    [
        (FakeExample("long", ["1 " * 13]), r"Prompt long/1 has 13 tokens; .* of 20 allows 12\..*max_new_tokens to 7"),
        (FakeExample("two", ["1 2 3", "4 5"]), r"Prompt two/2 has up to 13 tokens"),
        (FakeExample("gap", ["1", "  "]), r"Prompt gap/2 is empty"),
        (FakeExample("none", []), r"Prompt none is empty"),
    ],
)
def test_prompts_that_cannot_be_decoded_are_named(example: FakeExample, words: str) -> None:
    with pytest.raises(UserError, match=words):
        check([FakeExample("fine", ["1"]), example])


def test_an_empty_data_set_and_a_repeated_id_are_refused() -> None:
    with pytest.raises(UserError, match="holds no example"):
        check([])
    with pytest.raises(UserError, match="The id a is used twice"):
        check([FakeExample("a", ["1"]), FakeExample("a", ["2"])])


class ChatTokenizer(FakeTokenizer):
    chat_template = "{{ messages }}"

    def __init__(self, shape: str) -> None:
        self.shape = shape

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> Any:
        assert options["add_generation_prompt"] and options["tokenize"]
        ids = [len(messages), 42]
        return {"flat": ids, "nested": [ids], "tensor": torch.tensor([ids]), "dict": {"input_ids": ids}}[self.shape]


@pytest.mark.parametrize("shape", ["flat", "nested", "tensor", "dict"])
def test_chat_templates_of_every_shape_give_ids(shape: str) -> None:
    assert prompts.encode(ChatTokenizer(shape), [{"role": "user", "content": "1"}]) == [1, 42]


# ------------------------------------------------------------------------------------- interruption and resume


class Fails(FakeDecoder):
    """Raises on the n-th call."""

    def __init__(self, clock: FakeClock, call: int, error: BaseException) -> None:
        super().__init__(clock)
        self.call, self.error = call, error

    def decode(self, batch: list[torch.Tensor], limit: int, rng: torch.Generator) -> Any:
        if len(self.calls) == self.call:
            raise self.error
        return super().decode(batch, limit, rng)


def test_out_of_memory_keeps_what_was_measured_and_the_same_run_goes_on(tmp_path: Path) -> None:
    runner = make_runner(tmp_path, 4)
    runner.arms[0].decoder = Fails(FakeClock(), 2, RuntimeError("CUDA out of memory. Tried to allocate"))
    with pytest.raises(RunFailed, match=r"Out of memory at prompt 2/1 \(context 11\)\. 2 prompts are kept"):
        runner.measure()
    runner.arms[0].folder.close()
    again = make_runner(tmp_path, 4)
    again.measure()
    wanted = {(f"{i}/1", arm): 1 for i in range(4) for arm in ("method", "baseline")}
    assert Counter((s.prompt_id, s.arm) for s in measured(again)) == wanted
    assert len(again.arms[0].decoder.calls) == 2  # type: ignore[attr-defined]


def test_ctrl_c_says_how_many_prompts_are_kept(tmp_path: Path) -> None:
    runner = make_runner(tmp_path, 4)
    runner.baseline = Fails(FakeClock(), 3, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt) as caught:
        runner.measure()
    assert caught.value.kept == 3  # type: ignore[attr-defined]


def test_a_bug_in_a_method_is_not_dressed_up(tmp_path: Path) -> None:
    runner = make_runner(tmp_path, 2)
    runner.arms[0].decoder = Fails(FakeClock(), 0, RuntimeError("shapes do not match"))
    with pytest.raises(RuntimeError, match="shapes do not match"):
        runner.measure()


def test_resume_after_a_first_turn_quotes_the_recorded_answer(tmp_path: Path) -> None:
    runner = make_runner(tmp_path, 1, turns=2)
    runner.arms[0].decoder = Fails(FakeClock(), 1, MemoryError())
    with pytest.raises(RunFailed):
        runner.measure()
    runner.arms[0].folder.close()
    again = make_runner(tmp_path, 1, turns=2)
    again.measure()
    assert [s.prompt_ids for s in measured(again) if s.turn == 2] == [[1, *range(2, 10), 1]] * 2


def whole_run(path: str) -> None:
    runner = make_runner(Path(path), 24, turns=2, batch_size=3, repeats=2, warmup=1)
    decode = runner.arms[0].decoder.decode

    def slow(*arguments: Any) -> Any:
        time.sleep(0.002)
        return decode(*arguments)

    runner.arms[0].decoder.decode = slow  # type: ignore[method-assign]
    runner.warm_up()
    runner.measure()
    runner.arms[0].folder.update(status="finished", eos_ids=[0])
    runner.arms[0].folder.write_summary({})
    runner.arms[0].folder.close()


def kill_after(process: BaseProcess, samples: Path, rows: int, pause_s: float) -> None:
    """Kill -9 some moments after the file has reached a number of rows."""
    while process.is_alive() and (not samples.exists() or samples.read_bytes().count(b"\n") < rows):
        time.sleep(0.001)
    time.sleep(pause_s)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL, "the run was over before it could be killed"


def test_killed_at_any_moment_and_resumed_no_prompt_is_lost_or_measured_twice(tmp_path: Path) -> None:
    moments, samples = random.Random(5), tmp_path / "run" / "samples.jsonl"
    for rows in (moments.randrange(7, 20), moments.randrange(40, 70), moments.randrange(90, 140)):
        kill_after(start_call(whole_run, str(tmp_path)), samples, rows, moments.uniform(0, 0.005))
    before = [s for s in read_samples(samples) if s.phase == "measure"]
    process = start_call(whole_run, str(tmp_path))
    process.join()
    assert process.exitcode == 0
    rows_after = [s for s in read_samples(samples) if s.phase == "measure"]
    assert 0 < len(before) < len(rows_after)
    wanted = {(f"{i}/{t}", r, a) for i in range(24) for t in (1, 2) for r in (0, 1) for a in ("method", "baseline")}
    assert Counter((s.prompt_id, s.repeat, s.arm) for s in rows_after) == dict.fromkeys(wanted, 1)
    whole = make_runner(tmp_path / "unbroken", 24, turns=2, batch_size=3, repeats=2)
    whole.measure()
    assert {_outcome(s) for s in rows_after} == {_outcome(s) for s in measured(whole)}
    assert validate(tmp_path / "run") == []


def _outcome(s: Sample) -> tuple[Any, ...]:
    return s.prompt_id, s.repeat, s.arm, s.seed, s.order, s.batch, tuple(s.output_ids)


# ------------------------------------------------------------------------------------------------------ progress


def test_without_a_terminal_there_is_a_line_every_thirty_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    progress = Progress("prompts", 20, clock=lambda: now[0])
    for _ in range(10):
        now[0] += 12.0
        progress.advance()
    assert capsys.readouterr().err.splitlines() == [
        "prompts: 3/20, 0:36 elapsed, 3:24 left",
        "prompts: 6/20, 1:12 elapsed, 2:48 left",
        "prompts: 9/20, 1:48 elapsed, 2:12 left",
    ]


def test_the_time_left_comes_from_this_sessions_own_rate() -> None:
    now = [0.0]
    progress = Progress("prompts", 30, done=10, clock=lambda: now[0])
    now[0] = 25.0
    progress.advance(5)
    assert progress.line() == "prompts: 15/30, 0:25 elapsed, 1:15 left"


# --------------------------------------------------------------------------------------------------- real decoders


@pytest.mark.parametrize("batch_size", [1, 3])
def test_real_decoders_are_measured_and_agree_with_the_target(tmp_path: Path, batch_size: int) -> None:
    target = checks.tiny_target(keep_hf=False)
    runner = make_runner(tmp_path, 4, turns=2, batch_size=batch_size, limit=12, eos_ids=(17,), warmup=1)
    runner.baseline = Autoregressive(target, Sampling())
    runner.arms[0].decoder = PromptLookup(target, Sampling())
    runner.instruments = Instruments(target.device)
    runner.warm_up()
    runner.measure()
    assert Counter(s.arm for s in measured(runner)) == {"method": 8, "baseline": 8}
    assert all(min(s.step_ns) > 0 and s.cpu_ns for s in measured(runner))
    assert all(s.step_tokens[0] == 1 and sum(s.step_drafted) == 0 for s in measured(runner, "baseline"))
    found = check_run(target, runner.arms[0].folder.samples, 1e-9, greedy=True)
    assert found["exact"] == found["identical_to_baseline"] == 1.0 and found["max_gap"] == 0.0
    runner.arms[0].folder.update(status="finished", eos_ids=[17])
    runner.arms[0].folder.write_summary({})
    assert validate(runner.arms[0].folder.path) == []
