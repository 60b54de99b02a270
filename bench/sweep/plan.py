"""The plan of a sweep: its jobs, those that are done, those that cannot run here and why. No model is loaded."""

from __future__ import annotations

import json
import os
import random
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import yaml

from bench.config import compose, league, options, overrides
from bench.config.identity import job_id
from bench.config.schema import RunConfig
from bench.errors import UserError
from bench.report import terminal
from bench.report.terminal import plural
from bench.sweep.executors import FOLDER, Cluster, Local, Pending
from bench.sweep.history import Archive, State
from bench.sweep.job import ARMS, Task

if TYPE_CHECKING:
    from bench.report.leaderboard import ComparisonGroup

Resume = Literal["auto", "unfinished", "never", "force", "only_failed"]
_STATES: tuple[State, ...] = get_args(State)
_RUN: dict[Resume, tuple[State, ...]] = {
    "auto": ("new", "cut", "failed", "noisy"),
    "unfinished": ("new", "cut", "failed"),
    "never": ("new", "cut", "failed", "noisy"),
    "force": ("new", "cut", "failed", "noisy", "invalid", "done"),
    "only_failed": ("cut", "failed", "noisy"),
}
_MOST_LINES = 40  # of a plan, for each kind of job


@dataclass(frozen=True, slots=True)
class Options:
    """How a sweep goes about its jobs; none of it defines a run.

    Attributes:
        resume: auto: skip what is done, resume what was cut or failed, repeat what is INVALID because of noise alone.
            unfinished: the same, without repeating. never: auto, but from the beginning instead of resuming. force:
            measure everything again. only_failed: auto without new jobs.
        shuffle_seed: run in a random order that this number decides; None: in the order of the command line.
        dry_run: print the plan and stop.
        baseline: shared: runs that differ in their method alone are one job, measured prompt by prompt against one
            baseline. own: each by itself. auto: shared where jobs run one after another in this process.
        cluster: words of the command line that say where the jobs run.
    """

    resume: Resume = "auto"
    shuffle_seed: int | None = None
    dry_run: bool = False
    baseline: Literal["auto", "shared", "own"] = "auto"
    cluster: tuple[str, ...] = ()

    @property
    def fresh(self) -> bool:
        """Whether a job that is run starts from the beginning."""
        return self.resume in ("never", "force")


@dataclass(frozen=True, slots=True)
class Job:
    """One combination of the sweep's values.

    Attributes:
        words: its command line.
        label: those of them in which the jobs of the sweep differ.
        state: what the records say of it.
        reason: why it failed before, or cannot run.
        seconds: how long it may take if it is run, by earlier records; None where there are none.
    """

    words: list[str]
    cfg: RunConfig
    label: str
    state: State = "new"
    reason: str = ""
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """All jobs in the order of the command line, and those that are to run, in the order they will."""

    jobs: list[Job]
    to_run: list[Job]

    def text(self, *, every: bool = False) -> str:
        """For the terminal: counts, what will run, what will not and why.

        Args:
            every: name the jobs that are done, too, and leave none out.
        """
        counts = Counter(_shown(job) for job in self.jobs)
        counted = ", ".join(f"{counts[state]} {state}" for state in _STATES if counts[state]) or "none"
        lines = [f"Plan: {plural(len(self.jobs), 'job')}: {counted}. {self._will()}"]
        lines += _listed([_line(job, job.seconds) for job in self.to_run], every)
        shown = ("queued", "running", "invalid", *(["done"] if every else []))
        others = [job for job in self.jobs if job.state in shown and job not in self.to_run]
        lines += _listed([_line(job) for job in others], every)
        return "\n".join(lines + _refused([job for job in self.jobs if job.state == "incompatible"], every))

    def _will(self) -> str:
        if not self.to_run:
            return "Nothing to run."
        known = [job.seconds for job in self.to_run if job.seconds is not None]
        if not known:
            return f"To run: {len(self.to_run)}, no earlier record tells how long."
        of = "" if len(known) == len(self.to_run) else f" for {len(known)} of them"
        return f"To run: {len(self.to_run)}, about {duration(sum(known))}{of} by earlier records."


# ----------------------------------------------------------------------------------------------------- command line


def read_words(words: Sequence[str], *, fresh: bool = False) -> tuple[Options, list[str]]:
    """The options of a sweep, and the other words with a named sweep's settings before them.

    Several sweeps, ``sweep=a,b``, and one with arms stay one word at the begin: ``make`` plans the jobs of each.

    Args:
        words: of the command line.
        fresh: ``--fresh`` was given, which is ``resume=force``.

    Raises:
        UserError: a value that an option does not take, or no sweep of that name.
    """
    first = ["resume=force"] if fresh else []
    cluster = [word for word in words if word.partition("=")[0].lstrip("+").split(".")[0] == compose.CLUSTER]
    parsed, others = options.parse(
        Options, [*first, *(word for word in words if word not in cluster)], cluster=tuple(cluster)
    )
    rest: list[str] = []
    for word in others:
        key, _, value = word.partition("=")
        if key == ARMS:
            rest.append(_methods(value))
            parsed = replace(parsed, baseline="shared")
        elif key.lstrip("+") == compose.SWEEP:
            names = value.split(",")
            one, several = [named(name) for name in names], len(names) > 1 or bool(league.arms(names[0]))
            rest = [f"{compose.SWEEP}={value}", *rest] if several else [*one[0], *rest]
        elif key.startswith("hydra") and key != "hydra.searchpath":
            raise UserError(
                f"{word} is not supported: use resume, shuffle_seed and cluster=NAME (python -m bench list cluster) "
                "instead."
            )
        else:
            rest.append(word)
    return parsed, rest


def _methods(arms: str) -> str:
    """``arms=[a,b]`` as the word of a sweep.

    Raises:
        UserError: no method, or one twice.
    """
    names = [name.strip() for name in arms.removeprefix("[").removesuffix("]").split(",")]
    if not all(names) or len(set(names)) < len(names):
        raise UserError(f"{ARMS} must be different methods, got {arms or 'none'}. Set {ARMS}=[eagle,suffix].")
    return f"method={','.join(names)}"


def named(name: str) -> list[str]:
    """The words of a file of conf/sweep: Hydra's ``hydra.sweeper.params``, one word for each."""
    text = compose.config_file(compose.SWEEP, name).read_text(encoding="utf-8")
    return [f"{key}={value}" for key, value in yaml.safe_load(text)["hydra"]["sweeper"]["params"].items()]


def _sweeps(words: Sequence[str]) -> list[list[str]]:
    """The words of each of several sweeps, and of each arm of one that has arms; the others count in all of them."""
    of_sweeps = f"{compose.SWEEP}="
    names = [name for word in words if word.startswith(of_sweeps) for name in word.removeprefix(of_sweeps).split(",")]
    others = [word for word in words if not word.startswith(of_sweeps)]
    return [[*named(name), *arm, *others] for name in names for arm in _arms(name, others)] or [others]


def _arms(name: str, others: Sequence[str]) -> list[list[str]]:
    """The words of each arm and checkpoint of a sweep; one list without words if it has no arms."""
    found = league.arms(name)
    root = league.folder(others, name) if any(arm.heads for arm in found) else Path()
    return [[*arm.run, *checkpoint] for arm in found for checkpoint in _checkpoints(arm, root)] or [[]]


def _checkpoints(arm: league.Arm, root: Path) -> list[list[str]]:
    if not arm.heads:
        return [[]]
    return [[f"method.checkpoint={overrides.written(str(path))}"] for path in arm.checkpoints(root)]


# ---------------------------------------------------------------------------------------------------------- the plan


def make(words: Sequence[str], options: Options, cluster: Cluster | None = None) -> Plan:
    """Compose and check every job and look it up among the records.

    Args:
        words: of the command line, without those of ``options``.
        cluster: where the jobs would run; None: here.

    Raises:
        UserError: a job whose settings are wrong; no job at all is run then.
    """
    from bench.config import instantiate
    from bench.measure import preconditions

    cluster = cluster or Local()
    if cluster.threads and not any(word.partition("=")[0] == "hardware.threads" for word in words):
        words = [*words, f"hardware.threads={cluster.threads}"]
    every = [job for sweep in _sweeps(words) for job in compose.compose_jobs(sweep)]
    composed = list({job_id(cfg): (job, cfg) for job, cfg in every}.values())  # what two sweeps share runs once
    here = cluster.here
    archives: dict[str, Archive] = {}
    pending: dict[str, Pending] = {}
    known: preconditions.Known = {}
    checked = set()
    jobs = []
    for label, (job_words, cfg) in zip(_labels([job for job, _ in composed]), composed, strict=True):
        groups = [getattr(cfg, name) for name in ("method", "model", "dataset", "tracker")]
        if (key := json.dumps(groups, sort_keys=True)) not in checked:
            instantiate.check(cfg)
            checked.add(key)
        job = Job(job_words, cfg, label)
        if (results := cfg.paths.results) not in archives:
            archives[results] = Archive.read(Path(results), here=here)
            pending[results] = cluster.pending(Path(results))
        job = _placed(job, " ".join(preconditions.check(cfg, known)) if here else "", archives[results])
        if (stands := pending[results].get(job_id(cfg))) and job.state not in ("done", "invalid"):
            job = replace(job, state=stands[0], reason=stands[1])
        jobs.append(job)
    to_run = [job for job in jobs if job.state in _RUN[options.resume]]
    if options.shuffle_seed is not None:
        random.Random(options.shuffle_seed).shuffle(to_run)
    return Plan(jobs, to_run)


def _placed(job: Job, obstacle: str, archive: Archive) -> Job:
    """The job with its state; what is done stays done, even if it could not be measured here any more."""
    state, reason, left = archive.state(job.cfg)
    if obstacle and state != "done":
        return replace(job, state="incompatible", reason=obstacle)
    expected = archive.seconds(job.cfg)
    return replace(job, state=state, reason=reason, seconds=expected and expected * (left or 1.0))


def _labels(jobs: Sequence[Sequence[str]]) -> Iterator[str]:
    """The words of each job that not all of them have; all words where there is but one."""
    shared = set.intersection(*map(set, jobs)) if len(jobs) > 1 else set()
    for job in jobs:
        yield " ".join(word for word in job if word not in shared) or "(the defaults)"


# ---------------------------------------------------------------------------------------------------------- the text


def _line(job: Job, seconds: float | None = None) -> str:
    """State, label, time and reason; a reason too long for the line is below it."""
    head = f"  {_shown(job):12} {job.label}"
    head += "" if seconds is None else f"  about {duration(seconds)}"
    beside = f"{head}  ({job.reason})" if job.reason else head
    return beside if len(beside) <= terminal.width() else "\n".join([head, *_below(job.reason)])


def _shown(job: Job) -> State:
    """The state as printed: noise alone makes INVALID, too."""
    return "invalid" if job.state == "noisy" else job.state


def _below(text: str) -> list[str]:
    indent = " " * 15
    return textwrap.wrap(text, terminal.width(), initial_indent=indent, subsequent_indent=indent)


def _refused(jobs: Sequence[Job], every: bool) -> list[str]:
    """The jobs that cannot run here, those with one reason together."""
    from bench.measure import preconditions

    lines = []
    for reason, alike in preconditions.by_reason((job.cfg.method["name"], job.reason, job) for job in jobs):
        labels = ", ".join(job.label for job in alike)
        together = [f"  incompatible {plural(len(alike), 'job')}: {reason}", *_below(labels)]
        lines.append(_line(alike[0]) if len(alike) == 1 else "\n".join(together))
    return _listed(lines, every)


def _listed(lines: list[str], every: bool) -> list[str]:
    if every or len(lines) <= _MOST_LINES:
        return lines
    return [*lines[:_MOST_LINES], f"  ... and {len(lines) - _MOST_LINES} more (dry_run=true names all)"]


def duration(seconds: float) -> str:
    """``45 s``, ``12 min``, ``3.5 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


# ----------------------------------------------------------------------------------------------------- handing over


def tasks(plan: Plan, *, fresh: bool, shared: bool = False) -> list[Task]:
    """The jobs that are to run, as a cluster takes them.

    Args:
        shared: jobs that differ in their method alone are one task.
    """
    alike: dict[str, list[Job]] = {}
    for job in plan.to_run:
        alike.setdefault(_shareable(job.cfg) if shared else job_id(job.cfg), []).append(job)
    return [_task(jobs, fresh) for jobs in alike.values()]


def _shareable(cfg: RunConfig) -> str:
    """What runs with one baseline share: all but the method, and whether it keeps a second copy of the model."""
    from bench.config import instantiate

    return json.dumps([replace(cfg, method={}).to_dict(), instantiate.needs_hf(cfg.method)], sort_keys=True)


def _task(jobs: Sequence[Job], fresh: bool) -> Task:
    first, *others = jobs
    label = " | ".join(job.label for job in jobs)
    return Task(first.words, job_id(first.cfg), label, fresh, together={job_id(job.cfg): job.words for job in others})


def leaderboards(plan: Plan) -> str:
    """A table for each group of comparable runs of the plan that are finished; empty if there are not two."""
    from bench.report import leaderboard
    from bench.report.collect import Record, read_summary

    archives = {
        results: Archive.read(Path(results), here=False) for results in {j.cfg.paths.results for j in plan.jobs}
    }
    entries = [entry for job in plan.jobs if (entry := archives[job.cfg.paths.results].finished(job.cfg))]
    records = [Record(entry.path, entry.manifest, read_summary(entry.path)) for entry in entries]
    groups = [group for group in leaderboard.groups(records) if len(group.rows) > 1]
    return "".join(f"\n{_leaderboard(group)}\n" for group in groups)


def _leaderboard(group: ComparisonGroup) -> str:
    """The table of a group, and how far each row is from the first, with the interval of that difference."""
    from bench.report import compare

    table = terminal.leaderboard(row.summary | {"method": row.label} for row in group.rows)
    first, *others = group.rows
    runs = ((row.label, compare.Run.read(row.record.path)) for row in others)
    lines = compare.against(compare.Run.read(first.record.path), runs, first.label)
    return "\n".join([table, "", *lines]).rstrip()


def folder(plan: Plan) -> Path:
    """Where a cluster may put what these jobs print; made when it is first used."""
    when = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    return Path(plan.to_run[0].cfg.paths.results).resolve() / FOLDER / f"{when}-{os.getpid()}"
