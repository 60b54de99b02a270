"""``python -m bench compare A B``: two runs side by side, and how much faster B is than A.

Each run has its own interleaved baseline, so the two speed-ups are compared: a machine that was slower on one day slows
both arms. Their ratio and its interval are paired by prompt. Runs of different models, prompts or machines are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from bench.analysis import metrics, pairs, ranking
from bench.analysis.pairs import Pairs
from bench.config import instantiate
from bench.errors import UserError
from bench.records import run_folder
from bench.report import tables, terminal
from bench.report.collect import read_summary
from bench.tasks import prompts
from bench.utils import stats
from bench.utils.text import first_line, flatten

_SAME_BASELINE = 0.01  # of the baseline's tokens: where it wrote other texts, the two speed-ups are of other work
_N_BOOTSTRAP, _SEED = 10_000, 0
_ARMS = ("baseline", "method")


@dataclass(frozen=True)
class Run:
    """The records of one finished run."""

    path: Path
    summary: dict[str, Any]
    manifest: dict[str, Any]
    pairs: Pairs

    @classmethod
    def read(cls, path: Path) -> Run:
        """From its folder.

        Raises:
            UserError: no records there, or of a run that is not finished.
        """
        manifest = run_folder.read_manifest(path)
        summary = read_summary(path)
        if manifest is None or summary is None or manifest.get("status") != "finished":
            status = "none" if manifest is None else repr(manifest.get("status"))
            raise UserError(
                f"{path} must hold a finished run, got status {status}. Repeat the command that made it to resume it."
            )
        return cls(path, summary, manifest, pairs.read(path))

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def valid(self) -> bool:
        return bool((self.summary.get("verdict") or {}).get("valid"))

    @cached_property
    def answers(self) -> dict[str, str]:
        """The method's texts by prompt, of the first repeat.

        Raises:
            UserError: the samples are not kept.
        """
        rows = (s for s in run_folder.read_samples(self.path) if s.phase == "measure" and s.arm == "method")
        rows = (s for s in rows if s.repeat == 0)
        return {sample.prompt_id: sample.text for sample in rows}

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.yaml."""
        try:
            return dict(yaml.safe_load((self.path / run_folder.CONFIG).read_text(encoding="utf-8")))
        except (OSError, yaml.YAMLError, TypeError, ValueError) as error:
            raise UserError(
                f"{self.path / run_folder.CONFIG} cannot be read: {first_line(error)}. Restore it."
            ) from error

    @cached_property
    def settings(self) -> dict[str, Any]:
        """config.yaml, flattened, and what the machine decided."""
        config = {key: value for key, value in self.config.items() if key != "tracker"}
        part = (self.manifest.get("part") or {}).get("sha256")
        facts = {"part": part and part[:12], "git": (self.manifest.get("git") or {}).get("sha")}
        return dict(flatten(config)) | facts | dict(flatten({"versions": self.manifest.get("versions", {})}))


def compare(a: Run, b: Run, n_resamples: int = _N_BOOTSTRAP) -> str:
    """The comparison as text.

    Raises:
        UserError: the runs differ in what makes numbers comparable.
    """
    require_comparable(a, b)
    ratio = speedup_ratio(a, b, n_resamples)
    table = tables.aligned(["", "A", "B"], list(_rows(a, b)))
    return "\n".join(
        [
            *(f"{label}  {run.path}{_mark(run)}" for label, run in (("A", a), ("B", b))),
            *(f"   {line}" for line in _differences(a, b)),
            "",
            *(f"  {line}".rstrip() for line in table.splitlines()),
            "",
            *_categories(a, b),
            *_qualities(a, b),
            *_verdict(a, b, ratio),
        ]
    )


def against(best: Run, others: Iterable[tuple[str, Run]], name: str) -> Iterator[str]:
    """A line for each run: its speed-up over that of another, with the interval of the two, paired by conversation.

    Args:
        best: the run that the others are compared with, and its name.
        others: name and run; those that cannot be compared with it are left out.
    """
    for label, run in others:
        try:
            require_comparable(best, run)
        except UserError:
            continue
        found = speedup_ratio(best, run)
        shown = terminal.interval(asdict(found))
        yield f"{label}: {terminal.times(found.value)} of {name}, 95 % {shown}"


def find(name: str, *folders: Path) -> Path:
    """The folder of a run: a path, an id in one of ``folders``, or a beginning that only one id has.

    Raises:
        UserError: none, or several.
    """
    if Path(name).is_dir():
        return Path(name)
    found = [path for folder in folders for path in run_folder.folders(folder) if path.name.startswith(name)]
    if len(found) == 1 or (found and found[0].name == name):
        return found[0]
    what = f"{len(found)} runs begin so: {', '.join(f.name for f in found[:4])}" if found else "there is none"
    raise UserError(f"'{name}' must name one run, but {what}. See {folders[0]}, or python -m bench collect.")


# ------------------------------------------------------------------------------------------------ may they be compared


def require_comparable(a: Run, b: Run) -> None:
    """Refuse runs of different models, prompts, machines or baselines, with all reasons at once.

    Raises:
        UserError: names what differs.
    """
    if reasons := [*_other_keys(a, b), *_other_prompts(a, b), *_other_baseline(a, b)]:
        raise UserError(
            f"{a.name} and {b.name} cannot be compared: {'; '.join(reasons)}. Both must share "
            f"{', '.join(terminal.JOIN_KEYS)}, prompts and the text of their baselines. Repeat one of them with the "
            "settings of the other."
        )


def _other_keys(a: Run, b: Run) -> Iterator[str]:
    for key in terminal.JOIN_KEYS:
        ours, theirs = (terminal.join_value(run.summary, key) for run in (a, b))
        if ours != theirs:
            yield f"{key} is {ours} in A and {theirs} in B"


def _other_prompts(a: Run, b: Run) -> Iterator[str]:
    ours, theirs = a.pairs.prompts, b.pairs.prompts
    if missing := set(ours) ^ set(theirs):
        yield f"{len(missing)} prompts were asked in one of them only, {min(missing)} for one"
    if other := [name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name]]:
        yield f"{len(other)} prompts have other tokens, {min(other)} for one"


def _other_baseline(a: Run, b: Run) -> Iterator[str]:
    ours, theirs = a.pairs.baseline, b.pairs.baseline
    shared = ours.keys() & theirs.keys()
    total = sum(ours[key][0] for key in shared)
    apart = sum(abs(ours[key][0] - theirs[key][0]) for key in shared)
    if total and apart > _SAME_BASELINE * total:
        yield f"the baselines wrote texts of other lengths ({apart} tokens apart, of {total})"


# ------------------------------------------------------------------------------------------------------- the numbers


def speedup_ratio(a: Run, b: Run, n_resamples: int = _N_BOOTSTRAP, category: str | None = None) -> stats.Interval:
    """Speed-up of B over speed-up of A, over the conversations that both runs finished; each of its headline's kind."""
    joined = a.pairs.units.add_suffix("_a").join(b.pairs.units.add_suffix("_b"), how="inner")
    if category is not None:
        joined = joined[joined["category_a"] == category]
    tokens = {end: metrics.headline(run.summary)["of"] == "per_token" for end, run in (("a", a), ("b", b))}
    columns = [joined[f"{arm}_s_{end}"].to_numpy(float) for end in "ba" for arm in _ARMS]
    if any(tokens.values()):
        written = (joined[f"{arm}_tokens_{end}"] if tokens[end] else 1.0 for end in "ba" for arm in _ARMS)
        columns += [np.broadcast_to(np.asarray(each, dtype=float), len(joined)) for each in written]
    return stats.ratio_of_ratios(columns, n_resamples=n_resamples, seed=_SEED)


# ---------------------------------------------------------------------------------------------------------- the text

_ROWS = (
    "method", "guarantee", "speed-up", "95 %", "novel", "worst", "slower", "tokens/step", "tokens/s", "memory",
    "agreement", "result",
)  # fmt: skip


def _rows(a: Run, b: Run) -> Iterator[tuple[str, str, str]]:
    for name in _ROWS:
        cell = terminal.COLUMNS[name]
        yield name, cell(a.summary), cell(b.summary)
    was = [terminal.rate_number(run.summary["baseline_tokens_per_s"]) for run in (a, b)]
    yield "was tokens/s", was[0], was[1]
    scores = dict.fromkeys([*a.summary["quality"], *b.summary["quality"]])
    for score in scores:
        cells = [terminal.number(run.summary["quality"].get(score)) for run in (a, b)]
        yield f"quality {score}", cells[0], cells[1]


def _differences(a: Run, b: Run) -> Iterator[str]:
    """Settings that differ, each on a line."""
    keys = dict.fromkeys([*a.settings, *b.settings])
    differing = [key for key in keys if key != "method._target_" and a.settings.get(key) != b.settings.get(key)]
    if not differing:
        yield "Both have the same settings."
    width = max(map(len, differing), default=0)
    for key in differing:
        yield f"{key:{width}}  {_shown(a.settings, key)} -> {_shown(b.settings, key)}"


def _shown(settings: Mapping[str, Any], key: str) -> str:
    return str(settings[key]) if key in settings else "(has none)"


def _mark(run: Run) -> str:
    return "" if run.valid else "   INVALID"


def _categories(a: Run, b: Run) -> Iterator[str]:
    """The ratio by category, where there are several with more than one conversation."""
    counted = a.pairs.units["category"].value_counts()
    names = sorted(str(name) for name, count in counted.items() if count > 1)
    if len(names) < 2:
        return
    yield "B against A by category"
    for name in names:
        found = speedup_ratio(a, b, category=name)
        interval = terminal.interval(asdict(found))
        yield f"  {name:16} {terminal.times(found.value)}  95 % {interval}  ({found.n} conversations)"
    yield ""


def _verdict(a: Run, b: Run, ratio: stats.Interval) -> Iterator[str]:
    how = f"95 % {terminal.interval(asdict(ratio))}, {ratio.n} conversations" + (
        f", {ratio.reason}" if ratio.reason else ""
    )
    yield f"B against A: {terminal.times(ratio.value)} ({how})"
    if invalid := [label for label, run in (("A", a), ("B", b)) if not run.valid]:
        yield f"RESULT: none, for {' and '.join(invalid)} {'is' if len(invalid) == 1 else 'are'} INVALID"
    elif ratio.low is None or ratio.high is None or ratio.low <= 1.0 <= ratio.high:
        yield "RESULT: no difference shown, the interval holds 1"
    else:
        yield f"RESULT: {'B' if ratio.low > 1 else 'A'} is faster"
    yield from _notes(a, b)


def _qualities(a: Run, b: Run) -> Iterator[str]:
    """How far B's scores are from A's, where the answers give an interval and the references are at hand."""
    if "bleu" not in a.summary["quality"] or "bleu" not in b.summary["quality"]:
        return
    try:
        changes = quality_change(a, b)
    except UserError as error:
        yield f"note: BLEU is compared without an interval: {error}"
        return
    for metric, found in changes.items():
        yield f"{metric} of B against A: {terminal.points(asdict(found))} (paired bootstrap, {found.n} segments)"


def quality_change(a: Run, b: Run) -> dict[str, stats.Interval]:
    """B's scores less A's, over the prompts that both answered, see ``Scorer.change``.

    Raises:
        UserError: the data set is not here, or no longer the one that was asked.
    """
    task = instantiate.build_task(a.config["dataset"])
    asked = {prompts.prompt_id(e, turn): (e, turn) for e in task.load() for turn in range(len(e.turns))}
    answers = [run.answers for run in (a, b)]
    shared = [name for name in answers[0] if name in answers[1]]
    if missing := [name for name in shared if name not in asked]:
        raise UserError(f"{missing[0]} is not in {task.name}. Choose the data set of the runs.")
    before, after = ([(*asked[name], given[name]) for name in shared] for given in answers)
    found: dict[str, stats.Interval] = task.change(before, after)
    return found


def _notes(a: Run, b: Run) -> Iterator[str]:
    ours, theirs = a.pairs.baseline, b.pairs.baseline
    if other := [key for key in ours.keys() & theirs.keys() if ours[key] != theirs[key]]:
        yield f"note: the baselines wrote another text on {len(other)} of {len(ours)} prompts"
    speeds = [run.summary["baseline_tokens_per_s"] for run in (a, b)]
    if all(speeds) and abs(speeds[1] / speeds[0] - 1) > ranking.SPEED_RANGE:
        yield (
            f"warning: the baseline wrote {speeds[0]:.0f} tokens/s in A and {speeds[1]:.0f} in B, more than "
            f"{100 * ranking.SPEED_RANGE:.0f} % apart: not measured under the same conditions"
        )
    if a.summary["guarantee"] != b.summary["guarantee"]:
        yield "note: the guarantees differ; weigh the speed against agreement and quality"
