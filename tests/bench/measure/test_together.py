"""Several methods against one baseline: records, order, failures, resuming, and pairs in which the machine stalled."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import cli
from bench.analysis import audit, stalls
from bench.config import compose
from bench.config.schema import RunConfig
from bench.errors import OK, RunFailed, UserError
from bench.measure import interleave
from bench.measure.interleave import MethodArm, Runner, random_order
from bench.measure.run import RunResult, run, run_together
from bench.records.run_folder import RunFolder, Sample, read_manifest, read_samples, validate
from methods.speculative.suffix_decoding import SuffixDecoding
from tests.bench.measure.test_interleave import Fails, make_runner, measured
from tests.helpers.fakes import FakeClock, FakeDecoder
from tests.helpers.random_runs import random_run

PROMPTS = [
    {"question_id": i, "category": "any", "turns": [f"Say {i} {i} {i} again.", "And once more?"]} for i in range(4)
]
METHODS = ("prompt_lookup", "suffix", "token_recycling")


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests keep the machine busy; noise is judged where a test says so."""
    monkeypatch.setattr(audit, "CHECKS", tuple(check for check in audit.CHECKS if check not in audit.NOISE))


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    return random_run(tmp_path, PROMPTS)


@pytest.fixture
def cfgs(words: list[str]) -> list[RunConfig]:
    return [compose.compose([f"method={name}", *words]) for name in METHODS]


def results(found: list[RunResult | Exception]) -> list[RunResult]:
    for each in found:
        if isinstance(each, Exception):
            raise each
    return [each for each in found if isinstance(each, RunResult)]


def rows(path: Path, arm: str) -> list[Sample]:
    return [sample for sample in read_samples(path) if sample.phase == "measure" and sample.arm == arm]


def test_each_method_has_the_record_of_a_run_of_its_own_and_the_baseline_in_common(
    cfgs: list[RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stalls, "stalled", lambda samples: [])  # else a method's pair has a baseline anew
    together = results(run_together(cfgs))
    assert [each.summary["method"] for each in together] == list(METHODS)
    before = [[(s.prompt_id, s.batch_ns) for s in rows(each.path, "baseline")] for each in together]
    assert before[0] == before[1] == before[2] and len(before[0]) == 8
    for cfg, each in zip(cfgs, together, strict=True):
        manifest = read_manifest(each.path) or {}
        assert validate(each.path) == [] and manifest["measured_with"] == list(METHODS)
        assert each.summary["agreement"]["exact"] == 1.0 and manifest["cost_curve"]["nodes"][0] == 1
        assert run(cfg).path == each.path, "a run alone is the same run"
    curves = [(read_manifest(each.path) or {})["cost_curve"] for each in together]
    assert curves[0] == curves[1] == curves[2]


def test_a_record_that_is_there_is_not_measured_again(cfgs: list[RunConfig]) -> None:
    alone = run(cfgs[1])
    together = results(run_together(cfgs))
    assert rows(together[1].path, "method") == rows(alone.path, "method")
    assert (read_manifest(together[0].path) or {})["measured_with"] == ["prompt_lookup", "token_recycling"]


def test_a_method_that_fails_does_not_spoil_the_others_and_goes_on_alone(
    cfgs: list[RunConfig], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    decode, results = SuffixDecoding.decode, Path(cfgs[1].paths.results)

    def broken(self: SuffixDecoding, prompts: list[torch.Tensor], *rest: Any) -> Iterator[Any]:
        if any(len(rows(folder, "method")) == 2 for folder in results.glob("suffix-*")):
            raise RuntimeError("out of memory")
        return decode(self, prompts, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(SuffixDecoding, "decode", broken)
        found = run_together(cfgs)
    assert isinstance(found[1], RunFailed) and "Out of memory" in str(found[1])
    assert all(isinstance(found[place], RunResult) and found[place].summary["n_prompts"] == 8 for place in (0, 2))
    assert "is given up, the others go on" in capsys.readouterr().err
    (folder,) = found[0].path.parent.glob("suffix-*")
    assert (read_manifest(folder) or {})["status"] == "failed"
    kept = rows(folder, "method")
    assert len(kept) == 2
    assert rows(run(cfgs[1]).path, "method")[: len(kept)] == kept


def test_a_run_that_is_cut_goes_on_with_all_its_methods(cfgs: list[RunConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    decode, calls = SuffixDecoding.decode, []

    def interrupted(self: SuffixDecoding, prompts: list[torch.Tensor], *rest: Any) -> Iterator[Any]:
        calls.append(prompts)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return decode(self, prompts, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(SuffixDecoding, "decode", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_together(cfgs)
    monkeypatch.setattr(stalls, "stalled", lambda samples: [])  # whose pairs would be measured again
    folders = list(Path(cfgs[0].paths.results).glob("*-random-*"))
    assert {(read_manifest(folder) or {})["status"] for folder in folders} == {"interrupted"}
    kept = {folder: rows(folder, "method") for folder in folders}
    for each in results(run_together(cfgs)):
        assert rows(each.path, "method")[: len(kept[each.path])] == kept[each.path] and validate(each.path) == []


def test_a_method_that_is_refused_is_one_message_and_the_others_run(cfgs: list[RunConfig]) -> None:
    refused = replace(cfgs[0], method=compose.compose(["method=eagle"]).method)
    found = run_together([cfgs[0], refused])
    assert isinstance(found[0], RunResult) and isinstance(found[1], UserError)
    assert "eagle has no checkpoint" in str(found[1])


def test_a_package_that_one_method_lacks_is_one_message_and_the_others_run(
    cfgs: list[RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacks(self: SuffixDecoding, *given: Any, **options: Any) -> None:
        raise ModuleNotFoundError("No module named 'diskcache'", name="diskcache")

    monkeypatch.setattr(SuffixDecoding, "__init__", lacks)
    found = run_together(cfgs)
    assert isinstance(found[1], UserError) and "diskcache is not installed for this Python" in str(found[1])
    assert all(isinstance(found[place], RunResult) for place in (0, 2))


def test_arms_on_the_command_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["arms=[prompt_lookup,suffix]", *words]) == OK
    said = capsys.readouterr().out
    assert "2 jobs: 2 new" in said and "[1-2/2] method=prompt_lookup | method=suffix" in said
    assert "x of " in said, "the difference of the two, with its own interval"
    assert cli.main(["-m", "method=prompt_lookup,suffix", "resume=force", *words]) == OK
    assert "[1-2/2] method=prompt_lookup | method=suffix" in capsys.readouterr().out
    assert cli.main(["-m", "method=prompt_lookup,suffix", "resume=force", "baseline=own", *words]) == OK
    assert "[2/2]" in capsys.readouterr().out


@pytest.mark.parametrize("word", ["arms=[]", "arms=[suffix,suffix]", "arms=[sufix]", "baseline=none"])
def test_wrong_arms_are_one_message(word: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([word, *words]) == 2
    assert "Traceback" not in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ the loop, fake clock


def runner_of(path: Path, decoders: list[FakeDecoder], count: int = 6) -> Runner:
    runner = make_runner(path / "first", count)
    runner.arms[0].folder.close()
    runner.arms = [MethodArm(decoder, RunFolder.create(path, f"run{i}", {}, "")) for i, decoder in enumerate(decoders)]
    return runner


def test_the_order_of_two_arms_does_not_depend_on_the_others() -> None:
    for prompt in map(str, range(50)):
        three = random_order(["", "a", "b"], 0, [prompt], 0)
        assert random_order(["", "a"], 0, [prompt], 0) == [name for name in three if name != "b"]
    firsts = Counter(random_order(["", "a", "b"], 0, [str(i)], 0)[0] for i in range(3_000))
    assert all(900 < count < 1_100 for count in firsts.values())


def test_memory_of_the_other_methods_is_not_counted(tmp_path: Path) -> None:
    runner = runner_of(tmp_path, [FakeDecoder(FakeClock()), FakeDecoder(FakeClock())])
    runner.instruments.memory.peak_bytes = lambda: 1_000  # type: ignore[method-assign]
    runner.arms[0].held_bytes, runner.arms[1].held_bytes = 100, 250
    runner.measure()
    peaks = [{sample.peak_bytes for sample in arm.folder.samples} for arm in runner.arms]
    assert peaks == [{750}, {900}]


class Lazy(FakeDecoder):
    """An engine of its own, which loads 400 bytes at its first text."""

    libraries = {"engine": "rivals"}


def test_what_another_engine_loads_at_its_first_text_is_not_counted_for_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lazy, other = Lazy(FakeClock()), FakeDecoder(FakeClock())
    runner = runner_of(tmp_path, [lazy, other])
    runner.settings = replace(runner.settings, warmup=1)
    runner.instruments.memory.peak_bytes = lambda: 1_000  # type: ignore[method-assign]
    monkeypatch.setattr(interleave, "held_bytes", lambda device: 300 + (400 if lazy.calls else 0))
    runner.warm_up()
    runner.measure()
    peaks = [{sample.peak_bytes for sample in arm.folder.samples if sample.phase == "measure"} for arm in runner.arms]
    assert peaks == [{1_000}, {600}] and runner.arms[0].held_bytes == 400


def test_the_last_method_that_fails_ends_the_run(tmp_path: Path) -> None:
    failing = [Fails(FakeClock(), call, MemoryError()) for call in (1, 3)]
    runner = runner_of(tmp_path, list(failing))
    with pytest.raises(RunFailed, match="3 prompts are kept"):
        runner.measure()
    assert [len(arm.folder.done_keys()) for arm in runner.arms] == [1, 3]


class Stalls(FakeDecoder):
    """Takes a second more on the n-th call and on those after it."""

    def __init__(self, clock: FakeClock, calls: set[int]) -> None:
        super().__init__(clock, width=3, step_ns=130)
        self.clock_of, self.slow = clock, calls

    def decode(self, batch: list[torch.Tensor], limit: int, rng: torch.Generator) -> Any:
        if len(self.calls) in self.slow:
            self.clock_of.spend(10**9)
        return super().decode(batch, limit, rng)


def test_a_pair_in_which_the_machine_stalled_is_measured_again_and_kept_as_stalled(tmp_path: Path) -> None:
    runner = make_runner(tmp_path, 8)
    clock = runner.instruments.clock
    runner.arms[0].decoder = Stalls(clock, {3})  # type: ignore[arg-type]
    runner.measure()
    folder = runner.arms[0].folder
    phases = Counter((sample.phase, sample.arm) for sample in folder.samples)
    assert phases == {("measure", arm): 8 for arm in ("method", "baseline")} | {
        ("stalled", arm): 1 for arm in ("method", "baseline")
    }
    assert max(sample.batch_ns for sample in measured(runner)) < 10**6
    assert max(sample.batch_ns for sample in folder.samples if sample.phase == "stalled") > 10**9
    folder.update(status="finished", eos_ids=[0])
    folder.write_summary({})
    folder.close()
    assert validate(folder.path) == [] and len(read_samples(folder.path)) == 18
    reopened = RunFolder.create(tmp_path, "run", {}, "")
    assert len(reopened.samples) == 18 and len(reopened.done_keys()) == 8


class Exits(FakeDecoder):
    """Calls sys.exit in the second decode."""

    def decode(self, batch: list[torch.Tensor], limit: int, rng: torch.Generator) -> Any:
        if len(self.calls) == 1:
            sys.exit("done")
        return super().decode(batch, limit, rng)


def test_a_method_that_ends_the_program_is_a_failure(tmp_path: Path) -> None:
    runner = make_runner(tmp_path, 3)
    runner.arms[0].decoder = Exits(runner.instruments.clock)  # type: ignore[arg-type]
    with pytest.raises(RunFailed, match=r"Exits ended the program at prompt .* \(SystemExit: done\)"):
        runner.measure()
    assert len(measured(runner)) == 2


def test_a_pair_in_which_the_process_was_stopped_is_measured_again(tmp_path: Path) -> None:
    """Of three pairs, too few to say what is slow; the processor's clock stands still in the first decode."""
    runner = make_runner(tmp_path, 3)
    clock = runner.instruments.clock
    runner.arms[0].decoder = Stalls(clock, {0})  # type: ignore[arg-type]
    runner.instruments.cpu_clock = lambda: clock() % 10**9
    runner.measure()
    assert Counter(sample.phase for sample in runner.arms[0].folder.samples) == {"measure": 6, "stalled": 2}
    assert max(sample.batch_ns for sample in measured(runner)) < 10**6


def test_a_pair_in_which_the_clock_was_set_is_measured_again(tmp_path: Path) -> None:
    runner, reads = make_runner(tmp_path, 3), itertools.count()
    runner.instruments.offset = lambda: 10**9 if next(reads) >= 3 else 0  # the second decode reads 2 and 3
    runner.measure()
    jumps = Counter((sample.phase, sample.jump_ns) for sample in runner.arms[0].folder.samples)
    assert jumps == {("measure", 0): 6, ("stalled", 0): 1, ("stalled", 10**9): 1}


def test_stalls_that_remain_are_measured_twice_more_at_most(tmp_path: Path) -> None:
    runner = make_runner(tmp_path, 8)
    runner.arms[0].decoder = Stalls(runner.instruments.clock, {3, 8, 9, 10})  # type: ignore[arg-type]
    runner.measure()
    assert len(runner.arms[0].decoder.calls) == 10  # type: ignore[attr-defined]


def test_a_machine_that_stalls_all_the_time_is_not_measured_again(tmp_path: Path) -> None:
    runner = make_runner(tmp_path, 8)
    runner.arms[0].decoder = Stalls(runner.instruments.clock, {1, 3, 6})  # type: ignore[arg-type]
    runner.measure()
    assert len(runner.arms[0].decoder.calls) == 8  # type: ignore[attr-defined]


def test_texts_may_go_on_behind_their_ends(cfgs: list[RunConfig]) -> None:
    cfg = replace(cfgs[0], measure=replace(cfgs[0].measure, ignore_eos=True))
    found = run(cfg)
    assert {s.n_output_tokens for s in read_samples(found.path) if s.phase == "measure"} == {8}
    assert found.summary["speedup"]["headline"]["value"] == found.summary["speedup"]["total"]["value"]
    assert validate(found.path) == [] and found.path != run(cfgs[0]).path
