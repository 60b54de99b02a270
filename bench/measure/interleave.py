"""The measuring loop: one baseline and one or more methods, interleaved on the same prompts.

It owns warm-up, order, seeds, clocks, resume, and measuring stalled pairs again. Every method has a record of its own,
which holds the rows of the baseline too; what several methods share is the time of the baseline.
"""

from __future__ import annotations

import gc
import hashlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Any, Literal

import torch
from torch import Tensor

from bench.analysis import stalls
from bench.errors import RunFailed, explain, is_of_cluster
from bench.measure.instruments import Instruments, held_bytes
from bench.measure.timing import Timed, timed_decode
from bench.records.run_folder import REPEATED, Arm, RunFolder, Sample
from bench.tasks import prompts
from bench.tasks.prompts import Batch
from bench.utils.progress import Progress, stage
from methods.decoder import Decoder, PrefixCaching, Rehearsed, Step, common_prefix

_SEED_BYTES = 6  # 48 bits survive JSON readers that use doubles
_AFTER_HISTORY = 8  # tokens: drafters that read only what their rounds need have read the history then
_MOST_AGAIN = 2  # times that a stalled pair is measured again
_MOST_STALLED = 0.2  # share of the pairs; where more have stalled, measuring again would choose quiet moments


@dataclass(frozen=True, slots=True)
class Settings:
    """What the loop needs from the configuration.

    Attributes:
        limit: most new tokens per prompt.
        context: most tokens of prompt and answer together; with ``apart`` (encoder-decoders) of each of them.
        eos_ids: ids that end a text.
        repeats: of each prompt by each arm.
        warmup: prompts decoded by both arms before the measurement.
        refill: continuous batching: a waiting prompt takes the place of a finished row.
        refill_queue: with ``refill``, the fewest prompts of a queue, which is measured as a whole; None: all.
        prefix_cache: before a later turn baseline and methods hold the conversation so far (``PrefixCaching``).
    """

    seed: int
    limit: int
    context: int
    eos_ids: tuple[int, ...] = ()
    batch_size: int = 1
    repeats: int = 1
    warmup: int = 2
    apart: bool = False
    refill: bool = False
    refill_queue: int | None = None
    prefix_cache: bool = False


@dataclass(slots=True)
class Seconds:
    """Where the time of a run went, in seconds.

    ``timed`` and ``scoring`` are parts of ``loop``; ``device`` is what its own limits, energy and traces took.
    """

    loop: float = 0.0
    timed: float = 0.0
    scoring: float = 0.0
    warmup: float = 0.0
    cost_curve: float = 0.0
    device: float = 0.0
    quality: float = 0.0
    agreement: float = 0.0

    @property
    def harness_share(self) -> float | None:
        """Share of the loop, scoring left out, that was not spent decoding; None before anything was measured."""
        rest = self.loop - self.timed - self.scoring
        return rest / (self.loop - self.scoring) if self.timed else None

    def share(self, runs: int) -> Seconds:
        """Of each of the runs that were measured together."""
        return Seconds(**{name: getattr(self, name) / runs for name in self.__slots__})

    def __add__(self, other: Seconds) -> Seconds:
        """Of two processes that worked on one run."""
        return Seconds(**{name: getattr(self, name) + getattr(other, name) for name in self.__slots__})


@dataclass(frozen=True, slots=True)
class _Unit:
    """What is measured and recorded together: one batch or queue, once, by both arms; ``rows``: ids of each prompt."""

    batch: Batch
    repeat: int
    rows: list[list[int]]
    seed: int
    phase: Literal["warmup", "measure"] = "measure"


def derive_seed(seed: int, *names: object) -> int:
    """A seed that depends on its arguments alone, so that a resumed run draws the same."""
    text = "\x1f".join(str(name) for name in (seed, *names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:_SEED_BYTES], "big")


def random_order(names: Iterable[str], seed: int, batch: Sequence[str], repeat: int) -> list[str]:
    """Order in which a batch of prompts is decoded, determined by the seed; of any two names it is that of the two."""
    return sorted(names, key=lambda name: derive_seed(seed, "order", *batch, repeat, name))


@dataclass(slots=True)
class MethodArm:
    """A method under test.

    Attributes:
        folder: where its samples and the baseline's go; what it already holds is not measured again.
        held_bytes: memory that the method holds besides the target.
        error: why it was given up; the other methods of the run go on.
    """

    decoder: Decoder
    folder: RunFolder
    held_bytes: int = 0
    error: Exception | None = None

    @property
    def name(self) -> str:
        """Of the run; the same while it is being repeated."""
        return self.folder.path.name.removesuffix(REPEATED)


@dataclass(slots=True)
class Runner:
    """Measures methods against one baseline over the prompts of a task.

    The baseline's answer to an earlier turn (first repeat) is the history of a later one in all arms, so that all get
    the same prompt. Prompts must have passed ``bench.tasks.prompts.check``.

    Args:
        baseline: the target decoding one token at a time.
        arms: the methods; all of the same run but for their settings.
        task: writes prompts and scores answers.
        examples: what is measured, in order.
        spare: examples that are not measured; warm-up prefers them.
        between: called between prompts while measuring.
    """

    baseline: Decoder
    arms: Sequence[MethodArm]
    task: Any
    examples: Sequence[Any]
    tokenizer: Any
    settings: Settings
    instruments: Instruments
    spare: Sequence[Any] = ()
    wall: Callable[[], float] = time.perf_counter
    seconds: Seconds = field(default_factory=Seconds)
    between: Callable[[], None] | None = None
    _answers: dict[str, str] = field(default_factory=dict)
    _spent_ns: dict[str, tuple[int, int]] = field(default_factory=dict)  # by baseline and method, in this process
    _scores: dict[tuple[str, str], tuple[dict[str, float], str | None]] = field(default_factory=dict)
    _held: dict[str, list[int]] = field(default_factory=dict)  # by arm: the last prompt and what followed

    def __post_init__(self) -> None:
        for decoder in (self.baseline, *(arm.decoder for arm in self.arms)):
            if isinstance(decoder, PrefixCaching):
                decoder.keeps_prefix = self.settings.prefix_cache
        for arm in self.arms:
            self._remember(arm.folder.samples)

    @property
    def open(self) -> list[MethodArm]:
        """The methods that were not given up."""
        return [arm for arm in self.arms if arm.error is None]

    @property
    def complete(self) -> bool:
        """Whether nothing is left to measure."""
        return not any(self._missing(batch, repeat) for batch, repeat in self._units())

    def warm_up(self) -> list[list[Sample]]:
        """Decode prompts of the real shapes with all arms; in the samples ``repeat`` counts the processes so far.

        Returns:
            The samples of this warm-up for each of ``arms``.
        """
        begin = self.wall()
        self.instruments.wake()
        before = [sample.repeat for arm in self.arms for sample in arm.folder.samples if sample.phase == "warmup"]
        session = 1 + max(before, default=-1)
        for batch in self._warmup_batches():
            self._decode_all(self._unit(batch, session, "warmup"), self.open)
        self.seconds.warmup += self.wall() - begin
        return [
            [sample for sample in arm.folder.samples if sample.phase == "warmup" and sample.repeat == session]
            for arm in self.arms
        ]

    def measure(self) -> None:
        """Measure every pair that the folders do not hold yet, then those again in which the machine stalled.

        Raises:
            RunFailed: out of memory or disk; what was measured is kept.
        """
        units = self._units()
        todo = [(batch, repeat) for batch, repeat in units if self._missing(batch, repeat)]
        done = _rows(units) - _rows(todo)
        with _quiet_heap():
            begin = self.wall()
            try:
                with Progress("measuring", _rows(units), done, unit=" prompts") as progress:
                    for batch, repeat in todo:
                        self._decode_all(self._unit(batch, repeat), self._missing(batch, repeat))
                        progress.advance(len(batch.examples), self._so_far())
                        self.instruments.clocks.note()
                        self._between()
                        _settle()
                self._measure_stalled_again(units)
            except KeyboardInterrupt as interrupt:
                interrupt.kept = self._kept()  # type: ignore[attr-defined]
                raise
            finally:
                self.seconds.loop += self.wall() - begin

    def _between(self) -> None:
        """Its time is that of costs and not of the loop."""
        if self.between is not None:
            begin = self.wall()
            self.between()
            took = self.wall() - begin
            self.seconds.cost_curve += took
            self.seconds.loop -= took

    def decode_for(self, decoder: Decoder, least_s: float) -> tuple[float, int]:
        """Decode measured prompts, from the first one on and over and over, for at least so many seconds.

        Returns:
            The seconds it took, and the tokens written.
        """
        begin, tokens = self.wall(), 0
        for batch, _ in cycle(self._units()):
            timed = self._decode(decoder, self._unit(batch, 0))
            tokens += sum(len(row.ids) for row in timed.rows)
            if self.wall() - begin >= least_s:
                break
        return self.wall() - begin, tokens

    def first_prompts(self) -> list[Tensor]:
        """Ids of the first batch; of continuous batching, of its first rows."""
        rows = self._unit(self._units()[0][0], 0).rows[: self.settings.batch_size]
        return [torch.tensor(row, dtype=torch.long, device=self.instruments.device) for row in rows]

    def _measure_stalled_again(self, units: Sequence[tuple[Batch, int]]) -> None:
        """Pairs in which the machine stalled, unless they are so many that it is the usual state."""
        for _ in range(_MOST_AGAIN):
            stalled = {(batch.index, repeat): (batch, repeat, list[MethodArm]()) for batch, repeat in units}
            for arm in self.open:
                for index, repeat in {(batch, repeat) for batch, repeat, *_ in stalls.stalled(arm.folder.samples)}:
                    stalled[index, repeat][2].append(arm)
            again = [(batch, repeat, arms) for batch, repeat, arms in stalled.values() if arms]
            if not again or len(again) > max(1, _MOST_STALLED * len(units)):
                return
            stage(f"measuring {len(again)} of {len(units)} pairs again, in which the machine stalled")
            for batch, repeat, arms in again:
                self._decode_all(self._unit(batch, repeat), [arm for arm in arms if arm.error is None], again=True)
                _settle()

    def _so_far(self) -> str:
        """Time of the baseline by the method's over the pairs measured; of several methods that of the fastest."""
        ratios = {name: before / after for name, (before, after) in self._spent_ns.items() if after}
        best = max(ratios, key=lambda name: ratios[name], default=None)
        if best is None:
            return ""
        which = f"{best.partition('-')[0]} " if len(self.arms) > 1 else ""
        return f"{which}{ratios[best]:.2f}x so far"

    def _units(self) -> list[tuple[Batch, int]]:
        settings = self.settings
        if settings.refill:
            batches = prompts.plan_queues(self.examples, settings.refill_queue)
        else:
            batches = prompts.plan(self.examples, settings.batch_size)
        return [(batch, repeat) for repeat in range(self.settings.repeats) for batch in batches]

    def _missing(self, batch: Batch, repeat: int) -> list[MethodArm]:
        """The methods that have not decoded a batch yet."""
        wanted = {(name, repeat) for name in batch.prompt_ids}
        return [arm for arm in self.open if not wanted <= arm.folder.done_keys()]

    def _kept(self) -> int:
        return min((len({name for name, _ in arm.folder.done_keys()}) for arm in self.open), default=0)

    def _warmup_batches(self) -> list[Batch]:
        """First turns of spare examples, else of the ones that are measured last."""
        size, wanted = self.settings.batch_size, self.settings.warmup
        if not wanted:
            return []
        if self.settings.refill:
            size *= 2  # every row is refilled once
        batches = -(-wanted // size)
        pool = [*self.spare, *reversed(self.examples)][: batches * size]
        return [Batch(i, 0, tuple(pool[i * size : (i + 1) * size])) for i in range(-(-len(pool) // size))]

    def _unit(self, batch: Batch, repeat: int, phase: Literal["warmup", "measure"] = "measure") -> _Unit:
        rows = [self._encode(example, batch.turn) for example in batch.examples]
        return _Unit(batch, repeat, rows, derive_seed(self.settings.seed, *batch.prompt_ids, repeat), phase)

    def _encode(self, example: Any, turn: int) -> list[int]:
        history = [self._answers[prompts.prompt_id(example, earlier)] for earlier in range(turn)]
        ids = prompts.encode(self.tokenizer, self.task.messages(example, turn, history))
        settings = self.settings
        name = prompts.prompt_id(example, turn)
        prompts.fits(name, len(ids), settings.limit, settings.context, apart=settings.apart)
        return ids

    def _decode_all(self, unit: _Unit, arms: Sequence[MethodArm], *, again: bool = False) -> None:
        """Baseline and methods in a random order; each method is recorded with the baseline beside it or not at all.

        A method that fails is given up, and raises only if none is left.

        Args:
            again: the pairs replace those recorded.
        """
        if self.settings.prefix_cache and unit.batch.turn:
            self._hold_history(unit, arms)
            arms = [arm for arm in arms if arm.error is None]
        by_name = {arm.name: arm for arm in arms}
        order = random_order(["", *by_name], self.settings.seed, unit.batch.prompt_ids, unit.repeat)
        timed: dict[str, Timed] = {}
        for name in order:
            try:
                timed[name] = self._decode_arm(by_name[name], unit) if name else self._decode(self.baseline, unit)
            except Exception as error:
                if not name:
                    raise
                self._give_up(by_name[name], error)
        if self.settings.prefix_cache:
            self._held |= {name: [*unit.rows[0], *each.rows[0].ids] for name, each in timed.items()}
        for arm in (by_name[name] for name in timed if name):
            first = order.index("") < order.index(arm.name)
            samples = [
                *self._samples(unit, timed[""], "baseline", 0 if first else 1, self._others(arm)),
                *self._samples(unit, timed[arm.name], "method", 1 if first else 0, self._others(arm)),
            ]
            samples.sort(key=lambda sample: sample.order)
            if again:
                arm.folder.replace(samples)
            else:
                arm.folder.append(samples)
            self._remember(samples)
            if unit.phase == "measure":
                before, after = self._spent_ns.get(arm.name, (0, 0))
                self._spent_ns[arm.name] = before + timed[""].batch_ns, after + timed[arm.name].batch_ns
        if unit.phase == "measure":
            self.seconds.timed += sum(each.wall_ns for each in timed.values()) / 1e9

    def _hold_history(self, unit: _Unit, arms: Sequence[MethodArm]) -> None:
        """Let all arms keep the conversation before this turn, before the clock starts.

        An arm that holds another text (it drew another answer, or other tokens of the same text; a cut, or a stalled
        pair that is measured again) reads the history as a prompt and writes a few tokens, as its drafter reads it too.
        """
        before = replace(unit.batch, turn=unit.batch.turn - 1)
        (prompt,), answer = unit.rows, self._answers[before.prompt_ids[0]]
        text = prompts.followed(self.tokenizer, self._encode(before.examples[0], before.turn), answer)
        quoted = common_prefix(text, prompt)
        history = _Unit(before, unit.repeat, [prompt[:quoted]], unit.seed, unit.phase)

        def holds(name: str) -> bool:
            return common_prefix(self._held.get(name, []), prompt) >= quoted

        if not holds(""):
            self._decode(self.baseline, history, most=_AFTER_HISTORY)
        for arm in arms:
            if holds(arm.name):
                continue
            try:
                self._decode(arm.decoder, history, most=_AFTER_HISTORY)
            except Exception as error:
                self._give_up(arm, error)

    def _give_up(self, arm: MethodArm, error: Exception) -> None:
        arm.error = error
        if not self.open:
            raise error
        print(f"warning: {arm.name} is given up, the others go on: {error}", file=sys.stderr)

    def _others(self, arm: MethodArm) -> int:
        """Memory that the other methods hold, which a peak of this one must not count."""
        return sum(other.held_bytes for other in self.arms if other is not arm)

    def _decode_arm(self, arm: MethodArm, unit: _Unit) -> Timed:
        """Decode with a method; what another engine loads at its first texts is held from then on."""
        if unit.phase != "warmup" or not arm.decoder.libraries:
            return self._decode(arm.decoder, unit)
        device = self.instruments.device
        before = held_bytes(device)
        timed = self._decode(arm.decoder, unit)
        arm.held_bytes += max(0, held_bytes(device) - before)
        return timed

    def _decode(self, decoder: Decoder, unit: _Unit, *, most: int | None = None) -> Timed:
        """Decode a unit.

        Args:
            most: new tokens per prompt, whatever they are; None: up to the limit, or a text's end.
        """
        device, settings = self.instruments.device, self.settings
        limit, ends = (settings.limit, settings.eos_ids) if most is None else (min(most, settings.limit), ())
        rng = torch.Generator(device=device).manual_seed(unit.seed)
        ids: list[Tensor] = [torch.tensor(row, dtype=torch.long, device=device) for row in unit.rows]
        try:
            places = settings.batch_size if settings.refill else None
            if isinstance(decoder, Rehearsed):
                self._rehearse(decoder, ids, unit)
            return timed_decode(decoder, ids, limit, ends, rng, self.instruments, places)
        except SystemExit as error:
            if is_of_cluster(error):
                raise
            raise RunFailed(
                f"{type(decoder).__name__} ended the program at prompt {unit.batch.prompt_ids[0]} (SystemExit: "
                f"{error.code}). A decoder must return or raise another exception."
            ) from error
        except (RuntimeError, MemoryError, OSError) as error:
            context = max(map(len, unit.rows)) + settings.limit
            where = f"prompt {unit.batch.prompt_ids[0]} (context {context:,})"
            if failed := explain(error, where, self._kept()):
                raise failed from error
            raise

    def _rehearse(self, decoder: Rehearsed, ids: Sequence[Tensor], unit: _Unit) -> None:
        """Before the clock starts; its time is of the warm-up and not of the loop."""
        begin = self.wall()
        decoder.rehearse(ids, self.settings.limit)
        if unit.phase == "measure":
            took = self.wall() - begin
            self.seconds.warmup += took
            self.seconds.loop -= took

    def _samples(self, unit: _Unit, timed: Timed, arm: Arm, order: int, others_bytes: int) -> list[Sample]:
        """The rows of an arm, one per prompt of the batch."""
        found = [self._sample(unit, row, timed, arm, order) for row in range(len(unit.rows))]
        if not others_bytes:
            return found
        peaks = [None if s.peak_bytes is None else max(0, s.peak_bytes - others_bytes) for s in found]
        return [replace(sample, peak_bytes=peak) for sample, peak in zip(found, peaks, strict=True)]

    def _sample(self, unit: _Unit, row: int, timed: Timed, arm: Arm, order: int) -> Sample:
        example, turn = unit.batch.examples[row], unit.batch.turn
        text = self.tokenizer.decode(timed.rows[row].ids, skip_special_tokens=True)
        quality, error = self._score(example, turn, text) if unit.phase == "measure" else ({}, None)
        return Sample(
            prompt_id=prompts.prompt_id(example, turn),
            category=example.category,
            turn=turn + 1,
            repeat=unit.repeat,
            order=order,
            arm=arm,
            phase=unit.phase,
            seed=unit.seed,
            batch=unit.batch.index,
            batch_size=min(self.settings.batch_size, len(unit.rows)),
            queue=len(unit.rows) if self.settings.refill else None,
            admitted=timed.rows[row].first if self.settings.refill else None,
            n_prompt_tokens=len(unit.rows[row]),
            n_kept_tokens=timed.steps[timed.rows[row].first].kept,
            prompt_ids=unit.rows[row],
            text=text,
            quality=quality,
            error=error,
            **_measured(timed, row),
        )

    def _score(self, example: Any, turn: int, text: str) -> tuple[dict[str, float], str | None]:
        """Scores of an answer; the same answer to the same prompt is scored once. An error is recorded, not raised."""
        key = (prompts.prompt_id(example, turn), text)
        if key not in self._scores:
            begin = self.wall()
            try:
                found = self.task.score(example, turn, text)
                self._scores[key] = {name: float(value) for name, value in found.items()}, None
            except Exception as error:  # the measured times are good; the audit reports what went wrong here
                self._scores[key] = {}, f"scoring failed: {type(error).__name__}: {error}"
            self.seconds.scoring += self.wall() - begin
        return self._scores[key]

    def _remember(self, samples: Sequence[Sample]) -> None:
        """The answers that later turns quote."""
        for sample in samples:
            if sample.arm == "baseline" and sample.phase == "measure" and sample.repeat == 0:
                self._answers[sample.prompt_id] = sample.text


def _measured(timed: Timed, row: int) -> dict[str, Any]:
    """The fields of a sample that come from the clock and from the steps of one prompt."""
    kept = timed.rows[row]
    place, own = kept.place, slice(kept.first, kept.first + len(kept.counts))
    steps, step_ns = timed.steps[own], timed.step_ns[own]
    return {
        "n_output_tokens": len(kept.ids),
        "output_ids": kept.ids,
        "finish": kept.finish,
        "prefill_ns": step_ns[0],
        "batch_ns": timed.batch_ns,
        "step_ns": step_ns,
        "step_tokens": kept.counts,
        "step_drafted": [step.drafted[place] for step in steps],
        "step_accepted": [step.accepted[place] for step in steps],
        "step_depth": [step.depth[place] for step in steps],
        "step_nodes": [step.nodes for step in steps],
        "step_rows": None if any(step.rows is None for step in steps) else [step.rows for step in steps],
        "step_layers": [float(step.layers[place]) for step in steps],
        "step_draft_ns": [step.draft_ns for step in steps],
        "step_pass_ns": None if any(step.pass_ns is None for step in steps) else [step.pass_ns for step in steps],
        "step_target_passes": [0 if _waits(step, place) else step.target_passes for step in steps],
        "step_draft_passes": [step.draft_passes for step in steps],
        "peak_bytes": timed.reading.peak_bytes,
        "energy_j": timed.reading.energy_j,
        "cpu_ns": timed.reading.cpu_ns,
        "jump_ns": timed.reading.jump_ns,
    }


def _waits(step: Step, place: int) -> bool:
    """Whether a row waited while prompts of others were read."""
    return bool(step.admitted) and place not in step.admitted


def _rows(units: Sequence[tuple[Batch, int]]) -> int:
    return sum(len(batch.examples) for batch, _ in units)


@contextmanager
def _quiet_heap() -> Iterator[None]:
    """Freeze live objects so that gc between sections takes 1 ms, not 200."""
    _settle()
    try:
        yield
    finally:
        gc.unfreeze()


def _settle() -> None:
    """Collect and freeze; after each pair, or its samples would be searched at every later one."""
    gc.collect()
    gc.freeze()
