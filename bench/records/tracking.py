"""Report finished runs to Weights & Biases, or to nothing.

Runs are logged after they finish, so logging cannot affect timing; training is logged while it runs. A killed job is
logged again under the same id. A tracker never fails a run: errors are printed as warnings.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

from bench.records import run_folder
from bench.records.run_folder import Sample
from bench.utils.files import sha256

MOST_GENERATIONS = 200
SWEEP = "DECODEBENCH_SWEEP"  # group of the runs of the sweep under way, in the environment of its jobs
_HISTOGRAM_BINS = 64
_COLUMNS = ("prompt_id", "category", "text", "n_prompt_tokens", "n_output_tokens", "finish", "seconds", "quality")
_NAMES = ("method", "model", "dataset", "hardware", "dtype")
_IDENTITY = (
    "method",
    "guarantee",
    "model",
    "dataset",
    "dtype",
    "sampling",
    "measure",
    "seed",
    "max_new_tokens",
    "batch_size",
    "hardware",
    "versions",
    "git",
)
_BESIDE = (run_folder.MANIFEST, run_folder.CONFIG, run_folder.SUMMARY)
# Words that say how a sweep is run, not what it is.
_HOW = ("resume=", "shuffle_seed=", "dry_run=", "cluster", "tracker", "paths.", "hydra")
_Method = TypeVar("_Method", bound=Callable[..., None])


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


class Tracker:
    """Receives a run in this order; none of the calls raises. This one ignores everything."""

    def log(self, summary: Mapping[str, Any], manifest: Mapping[str, Any], path: Path) -> None:
        """A whole run: its summary.json, its manifest.json and its folder."""

    def start(self, run_id: str, identity: Mapping[str, Any], tags: Sequence[str]) -> None:
        """A run begins, or is resumed under the same id."""

    def log_point(self, point: Mapping[str, int | float]) -> None:
        """One point of the curves of a training that is under way."""

    def log_summary(self, summary: Mapping[str, Any]) -> None:
        """The numbers, as in summary.json."""

    def log_samples(self, samples: Sequence[Sample], file: Path | None = None) -> None:
        """At most 200 of the texts, and the file with all; files of the run beside it are included."""

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

    Nothing about the machine is sent but what the manifest holds: no host metrics, no code, no command line.

    Args:
        project: project there.
        entity: user or team; None is the default one.
        mode: offline writes below ``dir`` (send it later with ``wandb sync``), online needs ``wandb login``.
        group: what belongs together; None: the runs of a sweep.
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
        self.broken = False
        self._run: Any = None

    def log(self, summary: Mapping[str, Any], manifest: Mapping[str, Any], path: Path) -> None:
        """See ``Tracker``."""
        identity = {key: manifest[key] for key in _IDENTITY if key in manifest}
        tags = [str(summary[key]) for key in _NAMES if summary.get(key)]
        self.start(str(summary["run_id"]), identity, tags)
        self.log_summary(summary)
        self.log_samples(run_folder.read_samples(path), run_folder.samples_file(path))
        self.finish(str(manifest.get("status", "finished")))

    @_harmless
    def start(self, run_id: str, identity: Mapping[str, Any], tags: Sequence[str]) -> None:
        """See ``Tracker``; a repeated run continues the one of the same id."""
        import wandb

        Path(self.dir).mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=self.project,
            entity=self.entity,
            mode=self.mode,
            dir=self.dir,
            group=self.group or os.environ.get(SWEEP),
            id=run_id,
            name=run_id,
            resume="allow",
            reinit="create_new",
            job_type="benchmark",
            tags=[tag[:64] for tag in tags],  # longer ones are refused
            config=dict(identity),
            settings=wandb.Settings(
                silent=True,
                console="off",
                disable_git=True,
                disable_code=True,
                disable_job_creation=True,
                x_disable_meta=True,
                x_disable_stats=True,
            ),
        )

    @_harmless
    def log_point(self, point: Mapping[str, int | float]) -> None:
        """See ``Tracker``; points of one curve share a name."""
        self._run.log(dict(point))

    @_harmless
    def log_summary(self, summary: Mapping[str, Any]) -> None:
        """Every number once, under its path in summary.json (``speedup/total/value``)."""
        self._run.summary.update(dict(scalars(summary)))

    @_harmless
    def log_samples(self, samples: Sequence[Sample], file: Path | None = None) -> None:
        """A table of the method's texts, a histogram of its step times, and the records as an artifact."""
        import numpy as np
        import wandb

        rows = [sample for sample in samples if sample.arm == "method" and sample.phase == "measure"]
        steps_s = [ns / 1e9 for sample in rows for ns in sample.step_ns[1:]]
        logged: dict[str, Any] = {"generations": wandb.Table(columns=list(_COLUMNS), data=[*generations(rows)])}
        if steps_s:
            logged["step_s"] = wandb.Histogram(np_histogram=np.histogram(steps_s, bins=_HISTOGRAM_BINS))
        self._run.log(logged)
        if file is not None:
            artifact = wandb.Artifact(f"samples-{self._run.id}", type="samples")
            for each in (file, *(file.with_name(name) for name in _BESIDE)):
                if each.is_file():
                    artifact.add_file(str(each), name=each.name)
            self._run.log_artifact(artifact)

    @_harmless
    def finish(self, status: str) -> None:
        """See ``Tracker``."""
        self._run.finish(exit_code=0 if status == "finished" else 1)
        self._run = None


def scalars(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, float | int | str]]:
    """Every number, boolean and text of nested mappings by its path; None is left out."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from scalars(value, f"{path}{key}/")
        elif isinstance(value, list) and value and all(isinstance(item, (int, float)) for item in value):
            yield from ((f"{path}{key}/{position}", item) for position, item in enumerate(value))
        elif isinstance(value, (int, float, str)):
            yield f"{path}{key}", value


def generations(rows: Sequence[Sample]) -> list[list[Any]]:
    """At most 200 rows of the table, spread evenly over the run: the first repeat, in order."""
    first = [row for row in rows if row.repeat == 0]
    every = -(-len(first) // MOST_GENERATIONS) or 1
    return [
        [
            row.prompt_id,
            row.category,
            row.text,
            row.n_prompt_tokens,
            row.n_output_tokens,
            row.finish,
            sum(row.step_ns) / 1e9,
            " ".join(f"{name}={value:.4g}" for name, value in row.quality.items()),
        ]
        for row in first[::every]
    ]
