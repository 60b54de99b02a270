"""Measure methods as ``python -m bench`` does: the same arms, audit, verdict and records."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
from transformers import PreTrainedModel

from bench.analysis import audit, metrics, ranking
from bench.config import compose, instantiate, overrides
from bench.config.schema import RunConfig
from bench.errors import UserError
from bench.measure import run
from bench.records import run_folder
from bench.records.run_folder import Sample
from bench.report import compare as comparison
from bench.report import terminal, tracked_run
from bench.tasks import Task, prompts
from bench.tasks.given import GivenPrompts
from bench.utils.stats import Interval
from decodebench import page
from decodebench.target import DraftModels, Target, as_target, configure, with_hf

COLUMNS = {"speedup": "speed-up", "tokens_per_step": "tokens/step", "acceptance": "acceptance"}


@dataclass(frozen=True)
class Measurement:
    """A method measured over prompts.

    Attributes:
        summary: content of summary.json.
        path: folder of the record; None if it was not kept.
        config: of the run, as ``python -m bench --config`` prints it.
        table: see ``to_dataframe``.
    """

    summary: dict[str, Any]
    path: Path | None
    config: dict[str, Any]
    table: pd.DataFrame

    @property
    def method(self) -> str:
        return str(self.summary["method"])

    @property
    def speedup(self) -> Interval:
        """The baseline's time over the method's (``value``), with a 95 % interval (``low``, ``high``)."""
        found = metrics.headline(self.summary)
        return Interval(**{name: value for name, value in found.items() if name != "of"})

    @property
    def result(self) -> audit.Result:
        """VALID, INCONCLUSIVE (noise could have made the speed-up) or INVALID (the numbers cannot be trusted)."""
        return audit.result(self.summary)

    @property
    def valid(self) -> bool:
        """Whether the result is VALID."""
        return self.result == "VALID"

    @property
    def reasons(self) -> list[str]:
        """Why it is INVALID or INCONCLUSIVE, and what to do."""
        return audit.explained(self.summary)

    def to_dataframe(self) -> pd.DataFrame:
        """One row per prompt: what was asked, both texts, whether they are identical, speed-up, tokens per step,
        acceptance. Texts are those of the first repeat, numbers the mean of all."""
        return self.table.copy()

    def show(self) -> None:
        """Print the table of the command line."""
        print(str(self))

    def __str__(self) -> str:
        table = terminal.render(self.summary, self.path or self.summary["run_id"])
        return table.partition("\nNext:")[0]

    def __repr__(self) -> str:
        found = f"{terminal.times(self.speedup.value)}, 95 % {terminal.interval(metrics.headline(self.summary))}"
        return f"Measurement({self.method!r}, {found}, {self.result})"

    def _repr_html_(self) -> str:
        return page.measurement(self.summary, self.table)


@dataclass(frozen=True)
class Measurements(Sequence[Measurement]):
    """Several methods measured over the same prompts, in the order in which they were named."""

    found: tuple[Measurement, ...]

    def __getitem__(self, key: Any) -> Any:
        """By place, or by name of the method."""
        if not isinstance(key, str):
            return self.found[key]
        for each in self.found:
            if each.method == key:
                return each
        raise KeyError(f"{key!r} was not measured, but {', '.join(each.method for each in self.found)}")

    def __len__(self) -> int:
        return len(self.found)

    def to_dataframe(self) -> pd.DataFrame:
        """The leaderboard: one row per method, the fastest first, those without a rank last."""
        reasons = ranking.in_table([each.summary for each in self.found])
        rows = [_leaderboard_row(each) | {"not ranked": why} for each, why in zip(self.found, reasons, strict=True)]
        places = {id(summary): place for place, summary in enumerate(terminal.ordered([e.summary for e in self.found]))}
        order = sorted(range(len(rows)), key=lambda place: places[id(self.found[place].summary)])
        return pd.DataFrame([rows[place] for place in order])

    def show(self) -> None:
        """Print the leaderboard of the command line."""
        print(str(self))

    def __str__(self) -> str:
        return terminal.leaderboard(each.summary for each in self.found)

    def __repr__(self) -> str:
        return f"Measurements({', '.join(map(repr, self.found))})"

    def _repr_html_(self) -> str:
        return page.leaderboard([each.summary for each in self.found])


def benchmark(
    target: Target | str | PreTrainedModel,
    prompts: str | Path | Sequence[Any],
    method: str | Sequence[str] = "eagle",
    max_new_tokens: int = 128,
    measure: str = "quick",
    *,
    limit: int | None = None,
    batch_size: int = 1,
    temperature: float = 0.0,
    seed: int = 0,
    fresh: bool = False,
    keep: bool = True,
    **options: Any,
) -> Measurement | Measurements:
    """Measure how much faster a method writes than plain decoding, and whether its text is the same.

    Every prompt is decoded with each method and with the baseline, in random order. A finished record of the same run
    is returned without measuring again.

    Args:
        target: of ``load``, or a name.
        prompts: a list of texts or of lists of messages, a file (.jsonl, .txt), or the name of a data set.
        method: a name of ``methods()``, or several for a leaderboard.
        max_new_tokens: most tokens per prompt.
        measure: ``quick``, ``default`` or ``full``; with ``quick`` a data set has 10 examples unless ``limit`` is set.
        limit: most prompts.
        batch_size: prompts decoded together.
        temperature: 0 is greedy.
        seed: of every draw.
        fresh: measure again.
        keep: keep the record in ``results/``, where every command finds it.
        options: settings of one method (``python -m bench show method/eagle``); a draft model may be a ``Target``.

    Raises:
        UserError: as the same settings on the command line.
        RunFailed: out of memory or disk; what was measured is kept.
    """
    names = [method] if isinstance(method, str) else list(method)
    if not names or (len(names) > 1 and options):
        raise UserError(
            f"{', '.join(options) or 'method'} must be of one method, got {len(names)} methods. Measure it alone."
        )
    target = as_target(target)
    dataset, task = _prompts(prompts, limit)
    words = [f"measure={measure}", f"max_new_tokens={max_new_tokens}", f"batch_size={batch_size}", f"seed={seed}"]
    words += [*dataset, f"sampling.temperature={temperature}"]
    configured = [configure(target, name, options, words) for name in names]
    found = _measured(target, configured, task, fresh=fresh, keep=keep)
    return found[0] if isinstance(method, str) else Measurements(found)


def compare(a: Measurement, b: Measurement) -> str:
    """``python -m bench compare``: how much faster B is than A, and what differs; both must be kept."""
    if a.path is None or b.path is None:
        raise UserError("compare needs the records of both, got one that was not kept. Measure it with keep=True.")
    return comparison.compare(comparison.Run.read(a.path), comparison.Run.read(b.path))


def _prompts(given: Any, limit: int | None) -> tuple[list[str], Task | None]:
    """The words that choose a data set, or the prompts as a task."""
    most = [] if limit is None else [f"dataset.limit={limit}"]
    if isinstance(given, str | Path):
        name = str(given)
        if name.removesuffix(".gz").endswith((".jsonl", ".txt")):
            return ["dataset=jsonl", f"dataset.path={overrides.written(name)}", *most], None
        if name not in compose.groups()["dataset"]:
            raise compose.unknown_choice("dataset", name)
        return [f"dataset={name}", *most], None
    if not isinstance(given, Sequence) or not given:
        raise UserError(f"prompts must be a list of at least one prompt, or a name, got {given!r}.")
    return [], GivenPrompts(prompts=list(given), limit=limit)


def _measured(
    target: Target, configured: Sequence[tuple[RunConfig, DraftModels]], task: Task | None, *, fresh: bool, keep: bool
) -> tuple[Measurement, ...]:
    """The runs, measured together; the first failure is raised when all others are recorded."""
    cfgs, drafts = [cfg for cfg, _ in configured], {name: d for _, named in configured for name, d in named.items()}
    loaded = next((found for cfg in cfgs if (found := with_hf(target, cfg)) is not target.loaded), target.loaded)
    own = sum(each.model_bytes for each in drafts.values()) + (target.model_bytes if loaded is target.loaded else 0)
    task = task or instantiate.build_task(cfgs[0].dataset, cfgs[0].paths)
    given = run.Given(loaded, task, {name: draft.loaded for name, draft in drafts.items()}, own)
    with ExitStack() as stack:
        if not keep:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            cfgs = [replace(cfg, paths=replace(cfg.paths, results=folder)) for cfg in cfgs]
        asked = {prompts.prompt_id(each, turn): text for each in task.load() for turn, text in enumerate(each.turns)}
        return tuple(
            _measurement(cfg, done, asked, keep=keep)
            for cfg, done in zip(cfgs, run.run_together(cfgs, fresh=fresh, given=given, quiet=True), strict=True)
        )


def _measurement(
    cfg: RunConfig, done: run.RunResult | Exception, asked: Mapping[str, str], *, keep: bool
) -> Measurement:
    if isinstance(done, Exception):
        raise done
    table = _table(run_folder.read_samples(done.path), asked)
    return Measurement(done.summary, done.path if keep else None, cfg.to_dict(), table)


def _table(samples: Sequence[Sample], asked: Mapping[str, str]) -> pd.DataFrame:
    """See ``Measurement.to_dataframe``."""
    first = [row for row in samples if row.phase == "measure" and row.repeat == 0]
    written = {arm: {row.prompt_id: row.text for row in first if row.arm == arm} for arm in ("method", "baseline")}
    numbers = tracked_run.per_prompt(samples)
    texts = {
        "prompt": numbers.index.map(asked),
        "text": numbers.index.map(written["method"]),
        "baseline text": numbers.index.map(written["baseline"]),
        "identical": numbers["identical"].to_numpy(),
    }
    return pd.DataFrame(texts, index=numbers.index).join(numbers[list(COLUMNS)].rename(columns=COLUMNS))


def _leaderboard_row(each: Measurement) -> dict[str, Any]:
    summary, total = each.summary, each.speedup
    return {
        "method": each.method,
        "guarantee": summary["guarantee"],
        "speed-up": total.value,
        "low": total.low,
        "high": total.high,
        "tokens/step": summary["tokens_per_step"],
        "acceptance": summary["acceptance_rate"],
        "tokens/s": summary["tokens_per_s"],
        "agreement": (summary.get("agreement") or {}).get("exact"),
        "result": each.result,
    }
