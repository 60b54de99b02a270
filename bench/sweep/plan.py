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
from typing import Literal, get_args

import yaml

from bench.config import compose, options
from bench.config.identity import job_id
from bench.config.schema import RunConfig
from bench.errors import UserError
from bench.report.terminal import WIDTH
from bench.sweep.executors import FOLDER, Cluster, Local, Pending
from bench.sweep.history import Archive, State
from bench.sweep.job import Task

Resume = Literal["auto", "never", "force", "only_failed"]
_STATES: tuple[State, ...] = get_args(State)
_RUN: dict[Resume, tuple[State, ...]] = {
    "auto": ("new", "cut", "failed"),
    "never": ("new", "cut", "failed"),
    "force": ("new", "cut", "failed", "done"),
    "only_failed": ("cut", "failed"),
}
_MOST_LINES = 40  # of a plan, for each kind of job


@dataclass(frozen=True, slots=True)
class Options:
    """How a sweep goes about its jobs; none of it defines a run.

    Attributes:
        resume: auto: skip what is done, go on with what was cut or failed. never: skip what is done, begin what was cut
            or failed anew. force: measure everything anew. only_failed: only what was cut or failed, going on with it.
        shuffle_seed: run in a random order that this number decides; None: in the order of the command line.
        dry_run: print the plan and stop.
        cluster: words of the command line that say where the jobs run.
    """

    resume: Resume = "auto"
    shuffle_seed: int | None = None
    dry_run: bool = False
    cluster: tuple[str, ...] = ()

    @property
    def fresh(self) -> bool:
        """Whether earlier records of a job that is run are forgotten."""
        return self.resume in ("never", "force")


@dataclass(frozen=True, slots=True)
class Job:
    """One combination of the sweep's values.

    Attributes:
        words: its command line.
        label: those of them in which the jobs of the sweep differ.
        state: what the records say of it.
        reason: why it failed before, or cannot run.
        left: share of its prompts that is still to be measured.
        seconds: how long it may take, by earlier records; None where there are none.
    """

    words: list[str]
    cfg: RunConfig
    label: str
    state: State = "new"
    reason: str = ""
    left: float = 1.0
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
        counts = Counter(job.state for job in self.jobs)
        counted = ", ".join(f"{counts[state]} {state}" for state in _STATES if counts[state]) or "none"
        lines = [f"Plan: {_plural(len(self.jobs), 'job')}: {counted}. {self._will()}"]
        lines += _listed([_line(job) for job in self.to_run], every)
        shown = ("incompatible", "queued", "running", *(["done"] if every else []))
        others = [job for job in self.jobs if job.state in shown]
        lines += _listed([_line(job) for job in others if job not in self.to_run], every)
        return "\n".join(lines)

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
        if key.lstrip("+") == compose.SWEEP:
            rest = [*named(value), *rest]
        elif key.startswith("hydra"):
            raise UserError(
                f"{word} is not supported: use resume, shuffle_seed and cluster=NAME (python -m bench list cluster) "
                "instead."
            )
        else:
            rest.append(word)
    return parsed, rest


def named(name: str) -> list[str]:
    """The words of a file of conf/sweep: Hydra's ``hydra.sweeper.params``, one word for each."""
    text = compose.config_file(compose.SWEEP, name).read_text(encoding="utf-8")
    return [f"{key}={value}" for key, value in yaml.safe_load(text)["hydra"]["sweeper"]["params"].items()]


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
    composed = compose.compose_jobs(words)
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
        if (stands := pending[results].get(job_id(cfg))) and job.state != "done":
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
        return replace(job, state="incompatible", reason=obstacle, left=0.0)
    expected = archive.seconds(job.cfg)
    return replace(job, state=state, reason=reason, left=left, seconds=expected and expected * left)


def _labels(jobs: Sequence[Sequence[str]]) -> Iterator[str]:
    """The words of each job that not all of them have; all words where there is but one."""
    shared = set.intersection(*map(set, jobs)) if len(jobs) > 1 else set()
    for job in jobs:
        yield " ".join(word for word in job if word not in shared) or "(the defaults)"


# ---------------------------------------------------------------------------------------------------------- the text


def _line(job: Job) -> str:
    """State, label, time and reason; a reason too long for the line is below it."""
    parts = [f"  {job.state:12} {job.label}"]
    parts += [f"about {duration(job.seconds)}"] if job.seconds is not None and job.left else []
    head = "  ".join(parts)
    if not job.reason:
        return head
    beside = f"{head}  ({job.reason})"
    indent = " " * 15
    below = textwrap.wrap(job.reason, WIDTH, initial_indent=indent, subsequent_indent=indent)
    return beside if len(beside) <= WIDTH else "\n".join([head, *below])


def _listed(lines: list[str], every: bool) -> list[str]:
    if every or len(lines) <= _MOST_LINES:
        return lines
    return [*lines[:_MOST_LINES], f"  ... and {len(lines) - _MOST_LINES} more (dry_run=true names all)"]


def duration(seconds: float) -> str:
    """``45 s``, ``12 min``, ``3.5 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


# ----------------------------------------------------------------------------------------------------- handing over


def tasks(plan: Plan, *, fresh: bool) -> list[Task]:
    """The jobs that are to run, as a cluster takes them."""
    return [Task(job.words, job_id(job.cfg), job.label, fresh) for job in plan.to_run]


def folder(plan: Plan) -> Path:
    """Where a cluster may put what these jobs print; made when it is first used."""
    when = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    return Path(plan.to_run[0].cfg.paths.results).resolve() / FOLDER / f"{when}-{os.getpid()}"
