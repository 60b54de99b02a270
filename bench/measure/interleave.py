"""The measuring loop: two arms, interleaved on the same prompts. It owns warm-up, order, seeds, clocks and resume."""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from bench.errors import explain
from bench.measure.instruments import Instruments
from bench.measure.timing import Timed, timed_decode
from bench.records.run_folder import Arm, RunFolder, Sample
from bench.tasks import prompts
from bench.tasks.prompts import Batch
from bench.utils.progress import Progress
from methods.decoder import Decoder, Step

_SEED_BYTES = 6  # 48 bits survive JSON readers that use doubles


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


@dataclass(slots=True)
class Seconds:
    """Where the time of a run went, in seconds; ``timed`` and ``scoring`` are parts of ``loop``."""

    loop: float = 0.0
    timed: float = 0.0
    scoring: float = 0.0
    warmup: float = 0.0
    cost_curve: float = 0.0
    quality: float = 0.0
    agreement: float = 0.0

    @property
    def harness_share(self) -> float | None:
        """Share of the loop, scoring left out, that was not spent decoding; None before anything was measured."""
        rest = self.loop - self.timed - self.scoring
        return rest / (self.loop - self.scoring) if self.timed else None

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


def arm_order(seed: int, batch: Sequence[str], repeat: int) -> tuple[Arm, Arm]:
    """Random order of the arms on a batch of prompts, determined by the seed."""
    first = derive_seed(seed, "order", *batch, repeat) & 1
    return ("method", "baseline") if first else ("baseline", "method")


@dataclass(slots=True)
class Runner:
    """Measures a method against its baseline over the prompts of a task.

    The baseline's answer to an earlier turn (first repeat) is the history of a later one in both arms, so that both get
    the same prompt. Prompts must have passed ``bench.tasks.prompts.check``.

    Args:
        baseline: the target decoding one token at a time.
        method: the decoder under test.
        task: writes prompts and scores answers.
        examples: what is measured, in order.
        folder: where samples go; what it already holds is not measured again.
        spare: examples that are not measured; warm-up prefers them.
    """

    baseline: Decoder
    method: Decoder
    task: Any
    examples: Sequence[Any]
    tokenizer: Any
    folder: RunFolder
    settings: Settings
    instruments: Instruments
    spare: Sequence[Any] = ()
    wall: Callable[[], float] = time.perf_counter
    seconds: Seconds = field(default_factory=Seconds)
    _answers: dict[str, str] = field(default_factory=dict)
    _scores: dict[tuple[str, str], tuple[dict[str, float], str | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._remember(self.folder.samples)

    @property
    def complete(self) -> bool:
        """Whether nothing is left to measure."""
        return all(self._is_done(batch, repeat) for batch, repeat in self._units())

    def warm_up(self) -> list[Sample]:
        """Decode prompts of the real shapes with both arms; in the samples ``repeat`` counts the processes so far."""
        begin = self.wall()
        session = 1 + max((s.repeat for s in self.folder.samples if s.phase == "warmup"), default=-1)
        done: list[Sample] = []
        for batch in self._warmup_batches():
            done += self._pair(self._unit(batch, session, "warmup"))
        self.seconds.warmup += self.wall() - begin
        return done

    def measure(self) -> None:
        """Measure every pair that the folder does not hold yet.

        Raises:
            RunFailed: out of memory or disk; what was measured is kept.
        """
        units = self._units()
        todo = [(batch, repeat) for batch, repeat in units if not self._is_done(batch, repeat)]
        done = _rows(units) - _rows(todo)
        with _quiet_heap(), Progress("measuring", _rows(units), done, unit=" prompts") as progress:
            begin = self.wall()
            try:
                for batch, repeat in todo:
                    self._pair(self._unit(batch, repeat))
                    progress.advance(len(batch.examples), self._so_far())
                    _settle()
            except KeyboardInterrupt as interrupt:
                interrupt.kept = self._kept()  # type: ignore[attr-defined]
                raise
            finally:
                self.seconds.loop += self.wall() - begin

    def _so_far(self) -> str:
        """Total time of the baseline by the method's, over the pairs measured."""
        spent: dict[str, dict[tuple[int, int], int]] = {"baseline": {}, "method": {}}  # rows of a batch share its time
        for sample in self.folder.samples:
            if sample.phase == "measure":
                spent[sample.arm][sample.batch, sample.repeat] = sample.batch_ns
        before, after = (sum(spent[arm].values()) for arm in ("baseline", "method"))
        return f"{before / after:.2f}x so far" if after else ""

    def _units(self) -> list[tuple[Batch, int]]:
        settings = self.settings
        if settings.refill:
            batches = prompts.plan_queues(self.examples, settings.refill_queue)
        else:
            batches = prompts.plan(self.examples, settings.batch_size)
        return [(batch, repeat) for repeat in range(self.settings.repeats) for batch in batches]

    def _is_done(self, batch: Batch, repeat: int) -> bool:
        done = self.folder.done_keys()
        return all((name, repeat) in done for name in batch.prompt_ids)

    def _kept(self) -> int:
        return len({name for name, _ in self.folder.done_keys()})

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

    def _pair(self, unit: _Unit) -> list[Sample]:
        """Both arms in turn, recorded together or not at all."""
        arms: dict[Arm, Decoder] = {"baseline": self.baseline, "method": self.method}
        samples: list[Sample] = []
        for order, arm in enumerate(arm_order(self.settings.seed, unit.batch.prompt_ids, unit.repeat)):
            timed = self._decode(arms[arm], unit)
            if unit.phase == "measure":
                self.seconds.timed += timed.wall_ns / 1e9
            samples += [self._sample(unit, row, timed, arm, order) for row in range(len(unit.rows))]
        self.folder.append(samples)
        self._remember(samples)
        return samples

    def _decode(self, decoder: Decoder, unit: _Unit) -> Timed:
        device, settings = self.instruments.device, self.settings
        rng = torch.Generator(device=device).manual_seed(unit.seed)
        ids: list[Tensor] = [torch.tensor(row, dtype=torch.long, device=device) for row in unit.rows]
        try:
            places = settings.batch_size if settings.refill else None
            return timed_decode(decoder, ids, settings.limit, settings.eos_ids, rng, self.instruments, places)
        except (RuntimeError, MemoryError, OSError) as error:
            context = max(map(len, unit.rows)) + settings.limit
            where = f"prompt {unit.batch.prompt_ids[0]} (context {context:,})"
            if failed := explain(error, where, self._kept()):
                raise failed from error
            raise

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
        "step_layers": [float(step.layers[place]) for step in steps],
        "step_draft_ns": [step.draft_ns for step in steps],
        "step_target_passes": [0 if _waits(step, place) else step.target_passes for step in steps],
        "step_draft_passes": [step.draft_passes for step in steps],
        "peak_bytes": timed.reading.peak_bytes,
        "energy_j": timed.reading.energy_j,
        "cpu_ns": timed.reading.cpu_ns,
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
