"""Report finished runs to Weights & Biases, or to nothing.

Runs are sent after they finish, so nothing here affects timing; training is logged while it runs. A run that is sent
again replaces what was sent before, under the same id. A tracker never fails a run: errors are printed as warnings.
"""

from __future__ import annotations

import functools
import io
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from bench.utils.files import sha256

SWEEP = "DECODEBENCH_SWEEP"  # group of the runs of the sweep under way, in the environment of its jobs
PROMPT = "prompt"  # number of a prompt, the step of a run's curves; the curves are named prompt/...
STEP = "step"  # of a training
_PATIENCE_S = 60.0  # for a start, a login and an upload, so that a service that does not answer holds up no sweep
_HISTOGRAM_BINS = 64
_LONGEST_TAG = 64  # longer ones are refused
# Words that say how a sweep is run, not what it is.
_HOW = ("resume=", "shuffle_seed=", "dry_run=", "cluster", "tracker", "paths.", "hydra")
_Method = TypeVar("_Method", bound=Callable[..., None])
JobType = Literal["benchmark", "train"]


@contextmanager
def grouped(words: Sequence[str]) -> Iterator[None]:
    """Give the runs of a sweep one group, derived from its command line."""
    what = sorted(word for word in words if not word.startswith(_HOW))
    named = next((word.partition("=")[2] for word in what if word.lstrip("+").startswith("sweep=")), "sweep")
    before = os.environ.get(SWEEP)
    os.environ[SWEEP] = f"{named}-{sha256(' '.join(what))[:8]}"
    try:
        yield
    finally:
        os.environ.pop(SWEEP)
        if before is not None:
            os.environ[SWEEP] = before


@dataclass(frozen=True)
class Table:
    """Named columns, and rows of as many cells."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


@dataclass(frozen=True)
class FinishedRun:
    """What is sent of a finished run; see ``bench.report.tracked_run``.

    Attributes:
        group: what it belongs to, unless it is part of a sweep.
        config: what defines it.
        summary: its numbers and texts, nested as in summary.json.
        prompts: numbers of each prompt, in the order they were measured.
        step_s: seconds of the method's steps after the prefill.
        images: PNG files by name.
        files: the record, attached as an artifact.
        status: ``finished``, or anything else for a failure.
    """

    run_id: str
    group: str
    config: Mapping[str, Any]
    tags: Sequence[str]
    summary: Mapping[str, Any]
    prompts: Sequence[Mapping[str, float]] = ()
    tables: Mapping[str, Table] = field(default_factory=dict)
    step_s: Sequence[float] = ()
    images: Mapping[str, bytes] = field(default_factory=dict)
    files: Sequence[Path] = ()
    status: str = "finished"


class Tracker:
    """Receives a finished run with ``log``, a training with the other calls. None of them raises; this one ignores
    everything.
    """

    broken = False  # whether a call failed

    def log(self, make: Callable[[], FinishedRun]) -> None:
        """A whole run; ``make`` is called only by trackers that use it."""

    def start(self, run_id: str, group: str, config: Mapping[str, Any], tags: Sequence[str], job: JobType) -> None:
        """A run begins. An earlier one of the same id is replaced."""

    def log_point(self, point: Mapping[str, int | float]) -> None:
        """One point of the curves of a training that is under way."""

    def finish(self, status: str) -> None:
        """It ended: ``"finished"``, or anything else for a failure."""


class NoTracker(Tracker):
    """Follows nothing."""


def _harmless(method: _Method) -> _Method:
    """Turn any failure into a warning, and stay silent from then on."""

    @functools.wraps(method)
    def guarded(self: WandbTracker, *args: Any, **kwargs: Any) -> None:
        if self.broken:
            return
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            self.broken = True
            print(
                f"warning: Weights & Biases failed ({type(error).__name__}: {error}). The run continues, and its "
                "results are in its folder; tracker=none leaves it out.",
                file=sys.stderr,
            )

    return guarded  # type: ignore[return-value]


class WandbTracker(Tracker):
    """Weights & Biases: one run there per run here, under the same id; offline it needs no account.

    Nothing about the machine is sent but what the manifest holds: no host name, no host metrics, no list of packages,
    no code, no command line.

    Args:
        project: project there.
        entity: user or team; None is the default one.
        mode: offline writes below ``dir`` (send it later with ``wandb sync``), online needs ``wandb login``.
        group: what belongs together; None: the runs of a sweep, else those of one model and data set.
        dir: folder of the local files; ``wandb/`` is made below it.
    """

    def __init__(
        self,
        project: str = "decodebench",
        entity: str | None = None,
        mode: Literal["offline", "online"] = "offline",
        group: str | None = None,
        dir: str = ".",
    ) -> None:
        self.project, self.entity, self.mode, self.group, self.dir = project, entity, mode, group, dir
        self._run: Any = None

    @_harmless
    def log(self, make: Callable[[], FinishedRun]) -> None:
        """See ``Tracker``: a step for each prompt, and with the last one the tables and images."""
        run = make()
        self.start(run.run_id, run.group, run.config, run.tags, "benchmark")
        self._send(run)
        self.finish(run.status)

    @_harmless
    def start(self, run_id: str, group: str, config: Mapping[str, Any], tags: Sequence[str], job: JobType) -> None:
        """See ``Tracker``."""
        import wandb

        Path(self.dir).mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=self.project,
            entity=self.entity,
            mode=self.mode,
            dir=self.dir,
            group=self.group or os.environ.get(SWEEP) or group,
            id=run_id,
            name=run_id,
            reinit="create_new",
            job_type=job,
            tags=[tag[:_LONGEST_TAG] for tag in tags],
            config=dict(config),
            settings=wandb.Settings(
                silent=True,
                console="off",
                host="",
                init_timeout=_PATIENCE_S,
                login_timeout=_PATIENCE_S,
                finish_timeout=_PATIENCE_S,
                finish_timeout_raises=True,
                disable_git=True,
                disable_code=True,
                disable_job_creation=True,
                x_disable_meta=True,
                x_disable_stats=True,
                x_save_requirements=False,
            ),
        )
        step, curves = (PROMPT, f"{PROMPT}/*") if job == "benchmark" else (STEP, "*")
        self._run.define_metric(step)
        self._run.define_metric(curves, step_metric=step)

    @_harmless
    def log_point(self, point: Mapping[str, int | float]) -> None:
        """See ``Tracker``; points of one curve share a name, and those of one training step are one row."""
        step, reached = point.get(STEP), self._run.step
        ahead = isinstance(step, int) and step >= reached  # another stage may count from 0 again
        self._run.log(dict(point), step=step if ahead else reached + 1)

    @_harmless
    def _send(self, run: FinishedRun) -> None:
        import numpy as np
        import wandb
        from PIL import Image

        last: dict[str, Any] = {name: wandb.Table(list(t.columns), [*t.rows]) for name, t in run.tables.items()}
        last |= {name: wandb.Image(Image.open(io.BytesIO(png))) for name, png in run.images.items()}
        if run.step_s:
            last["step_s"] = wandb.Histogram(np_histogram=np.histogram(run.step_s, bins=_HISTOGRAM_BINS))
        for number, curves in enumerate(run.prompts, start=1):
            self._run.log({PROMPT: number} | {f"{PROMPT}/{key}": value for key, value in curves.items()}, step=number)
        self._run.log(last, step=len(run.prompts))
        self._run.summary.update(dict(scalars(run.summary)))
        artifact = wandb.Artifact(f"record-{run.run_id}", type="record")
        for file in run.files:
            artifact.add_file(str(file), name=file.name)
        self._run.log_artifact(artifact)

    @_harmless
    def finish(self, status: str) -> None:
        """See ``Tracker``."""
        self._run.finish(exit_code=0 if status == "finished" else 1)
        self._run = None


def scalars(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, float | int | str]]:
    """Every number, boolean and text of nested mappings by its path (``speedup/total/value``); None is left out.

    Numbers of a list are numbered from 0, texts of a list are lines of one text.
    """
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from scalars(value, f"{path}{key}/")
        elif isinstance(value, list) and value and all(isinstance(item, (int, float)) for item in value):
            yield from ((f"{path}{key}/{position}", item) for position, item in enumerate(value))
        elif isinstance(value, list) and value and all(isinstance(item, str) for item in value):
            yield f"{path}{key}", "\n".join(value)
        elif isinstance(value, (int, float, str)):
            yield f"{path}{key}", value
