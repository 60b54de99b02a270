"""What surrounds a preparation: corpus, model, folder, interrupted and finished attempts, and the card of the part."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from bench.config import compose, instantiate
from bench.config.identity import definition_sha256
from bench.config.schema import DEFAULT_CORPUS, RunConfig, TrainConfig, sanitise
from bench.errors import UserError
from bench.measure import preconditions
from bench.models import artifacts, loading
from bench.models.artifacts import CARD, CURVES, LOCK, PLAN
from bench.models.source import Loaded
from bench.records.tracking import Tracker
from bench.tasks import corpus
from bench.tasks.corpus import Corpus, Texts
from bench.tasks.sources import Sources
from bench.utils import files, machine, redact
from bench.utils.progress import Progress
from methods.training.interface import ModelMaker, PairLearner, Trainable, Workshop

if TYPE_CHECKING:
    import torch


def prepare(settings: TrainConfig, overrides: Sequence[str], words: Sequence[str]) -> str:
    """Read, load, make the part unless it is there, and write its card.

    Args:
        settings: what to prepare, and from what.
        overrides: words of the command line that configure model, machine and the preparation itself.
        words: the whole command line, for the card.

    Returns:
        Where the part is, for people.

    Raises:
        UserError: what was asked for cannot be prepared.
    """
    cfg, train = compose.compose_training(overrides, settings.method)
    if like := cfg.model.get("like"):
        raise UserError(preconditions.random_weights(like, f"method={settings.method} learns from what a model says"))
    trainable = instantiate.build_trainable(train)
    tracker = instantiate.build_tracker(cfg.tracker)
    wanted = settings.corpus or str(getattr(trainable, "corpus", DEFAULT_CORPUS))
    texts = corpus.read(wanted, settings.corpus_limit, cfg.seed, Sources(cfg.paths.data, cfg.paths.cache))
    for warning in filter(None, (revision.warning for revision in texts.revisions)):
        print(f"warning: {warning}", file=sys.stderr)
    machine.set_threads(cfg.hardware.threads)
    job = _job(settings, cfg, train, trainable, texts, words)
    with _alone(job.folder):
        if made := job.claim():
            job.make(trainable, tracker)
        if settings.publish:
            from bench.train.publish import publish

            without = [name for name in settings.without.split(",") if name]
            print(publish(job.folder, settings.publish, without, texts, cfg), file=sys.stderr)
        elif not made:
            return f"{job.folder} is already there; force=true makes it anew."
    return job.report()


def _job(
    settings: TrainConfig,
    cfg: RunConfig,
    train: Mapping[str, Any],
    trainable: Trainable | ModelMaker | PairLearner,
    texts: Texts,
    words: Sequence[str],
) -> Job:
    if isinstance(trainable, ModelMaker):
        from bench.train.foundry import model_job

        return model_job(settings, cfg, train, trainable, texts, words)
    if isinstance(trainable, PairLearner):
        from bench.train.foundry import student_job

        return student_job(settings, cfg, train, trainable, texts, words)
    return PartJob(settings, cfg, train, texts, loading.load(cfg.model, asdict(cfg.hardware), cfg.paths), words)


@dataclass(frozen=True, slots=True)
class Subject:
    """The model that something is prepared for, or that is made."""

    name: str
    revision: str | None
    sha256: str | None
    device: torch.device
    dtype: torch.dtype


class Job:
    """One preparation: what defines it, the folder it fills, and how far it came.

    Attributes:
        subject: the model it is about.
        places: where it is looked for.
        folder: where the part goes.
        definition: two parts with an equal one are the same part.
    """

    def __init__(
        self,
        settings: TrainConfig,
        cfg: RunConfig,
        train: Mapping[str, Any],
        texts: Texts,
        subject: Subject,
        words: Sequence[str],
    ) -> None:
        self.settings, self.cfg, self.texts, self.subject, self.words = settings, cfg, texts, subject, words
        self.places = artifacts.places(settings.method, subject.name, cfg.paths)
        self.folder = Path(settings.out).expanduser() if settings.out else self.places["trained"]
        self.definition: dict[str, Any] = {
            "method": settings.method,
            "train": {"_target_": train["_target_"], **instantiate.arguments(train, compose.TRAIN)},
            "model": {"name": subject.name, "revision": subject.revision},
            "corpus": texts.sha256,
            "seed": cfg.seed,
        }
        self._spent = 0.0  # seconds, those of interrupted attempts included
        self._summary: list[str] = []

    @property
    def definition_sha256(self) -> str:
        """Jobs with an equal one make the same checkpoint."""
        return definition_sha256(self.definition)

    def claim(self) -> bool:
        """Make the folder ready for this job; False if the finished part is there already.

        An unfinished attempt with the same definition goes on, a forced one too: else the second call of a command
        with ``force=true`` would throw away what the first one did.

        Raises:
            UserError: the folder holds something else, which only ``force`` may replace.
        """
        card, plan = artifacts.read_card(self.folder), files.read_json(self.folder / PLAN)
        left = card or plan or {}
        if "definition" not in left:
            self._require_empty()
        elif definition_sha256(left["definition"]) != self.definition_sha256:
            self._require_force(left)
            _empty(self.folder)
        elif card:
            if not self.settings.force:
                return False
            _empty(self.folder)
        else:
            self._spent = float(left.get("seconds", 0.0))
            print(f"{self.folder}: going on after {self._spent:.0f} s; delete it to begin anew.", file=sys.stderr)
        return True

    def _require_empty(self) -> None:
        if any(path.name != LOCK for path in self.folder.iterdir()):
            raise UserError(
                f"{self.folder} holds other files; an empty folder or one of bench.train is needed. Set out=FOLDER."
            )

    def _require_force(self, left: Mapping[str, Any]) -> None:
        if self.settings.force:
            return
        theirs, ours = left["definition"], redact.tree(self.definition)
        differing = ", ".join(key for key in ours if theirs.get(key) != ours[key])
        raise UserError(
            f"{self.folder} holds a part that was made otherwise ({differing}). force=true puts this one in its "
            "place, out=FOLDER puts it elsewhere."
        )

    def shop(self, stages: Stages, curves: Curves) -> Any:
        """What the class works with."""
        raise NotImplementedError

    def usage(self) -> str:
        """The command that uses what was made."""
        raise NotImplementedError

    def make(self, trainable: Trainable | ModelMaker | PairLearner, tracker: Tracker) -> None:
        """Let the class work, follow it, and write the card.

        Raises:
            UserError: the class refuses its arguments or the corpus.
        """
        print(
            f"{self.settings.method} for {self.subject.name}: {trainable.prepares}; {trainable.takes}", file=sys.stderr
        )
        stages, curves = Stages(), Curves(self.folder / CURVES, tracker)
        with self._clocked(), self._followed(tracker):
            try:
                found = dict(trainable.fit(self.shop(stages, curves)))
            except ValueError as error:
                raise UserError(str(error)) from error
            finally:
                stages.close()
        self._summary = found.pop("summary", [])
        files.write_json(self.folder / CARD, redact.tree(self._card(trainable, found)))
        (self.folder / PLAN).unlink(missing_ok=True)

    def report(self) -> str:
        """Where the part is, and the command that uses it."""
        size = sum(path.stat().st_size for path in artifacts.files(self.folder).values())
        made = f"{self.folder}: {size / 1e6:,.1f} MB in {self._spent:,.0f} s"
        return "\n".join([made, *self._summary, f"Use it: {self.usage()}"])

    @contextmanager
    def _clocked(self) -> Iterator[None]:
        """Note beside the unfinished part what it is to become, and how long it took so far."""
        begin, before = perf_counter(), self._spent
        self._note_plan()
        try:
            yield
        finally:
            self._spent = before + perf_counter() - begin
            with suppress(OSError):  # the disk may be full: that message is on its way already
                self._note_plan()

    def _note_plan(self) -> None:
        plan = {"definition_sha256": self.definition_sha256, "definition": redact.tree(self.definition)}
        files.write_json(self.folder / PLAN, plan | {"seconds": round(self._spent, 1)})

    @contextmanager
    def _followed(self, tracker: Tracker) -> Iterator[None]:
        name = f"{self.places['trained'].name}-{self.definition_sha256[:12]}"
        tracker.start(name, redact.tree(self.definition), ["train", self.settings.method, self.subject.name])
        status = "failed"
        try:
            yield
            status = "finished"
        finally:
            tracker.finish(status)

    def _card(self, trainable: Trainable | ModelMaker | PairLearner, found: Mapping[str, Any]) -> dict[str, Any]:
        subject, parts = self.subject, artifacts.files(self.folder)
        return {
            "prepares": trainable.prepares,
            "definition_sha256": self.definition_sha256,
            "definition": self.definition,
            "facts": dict(found),
            "sha256": files.digest(parts),
            "bytes": {name: path.stat().st_size for name, path in parts.items()},
            "command": shlex.join(["python", "-m", "bench.train", *redact.argv(self.words)]),
            "seed": self.cfg.seed,
            "seconds": round(self._spent, 1),
            "finished_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "corpus": self._corpus_facts(),
            "model": {"name": subject.name, "revision": subject.revision, "sha256": subject.sha256},
            "dtype": str(subject.dtype).removeprefix("torch."),
            "hardware": machine.facts(subject.device),
            "versions": machine.versions(),
            "git": machine.git_state(),
        }

    def _corpus_facts(self) -> dict[str, Any]:
        return {
            "names": list(self.texts.names),
            "asked": self.texts.asked,
            "limit": self.settings.corpus_limit,
            "dialogues": len(self.texts.dialogues),
            "sha256": self.texts.sha256,
            "files": [asdict(revision) for revision in self.texts.revisions],
        }


class PartJob(Job):
    """A part of a method for a model that is there."""

    def __init__(
        self,
        settings: TrainConfig,
        cfg: RunConfig,
        train: Mapping[str, Any],
        texts: Texts,
        loaded: Loaded,
        words: Sequence[str],
    ) -> None:
        subject = Subject(loaded.name, loaded.revision, loaded.sha256, loaded.lm.device, loaded.lm.dtype)
        super().__init__(settings, cfg, train, texts, subject, words)
        loading.require_languages(loaded, f"corpus={texts.asked}", corpus.languages(texts.names))
        if loaded.kind == "seq2seq" and settings.corpus is None and corpus.languages(texts.names) is None:
            raise UserError(
                f"method={settings.method} learns from {texts.asked} unless told otherwise, requests that an "
                f"encoder-decoder as {loaded.name} does not answer. Name what it reads: corpus=multi30k, or "
                "corpus=FILE.jsonl."
            )
        self.loaded = loaded
        if not all(dialogue.said[0] for dialogue in texts.dialogues):
            raise UserError(
                f"corpus={','.join(texts.names)} has plain text, which asks nothing; requests are needed for the model "
                f"to answer. Name another, such as {DEFAULT_CORPUS}."
            )

    def shop(self, stages: Stages, curves: Curves) -> Workshop:
        """See ``Job.shop``."""
        return Workshop(self.loaded.lm, self._corpus(), self.folder, self.cfg.seed, stages, curves, self._common())

    def usage(self) -> str:
        """See ``Job.usage``."""
        first = next((folder for folder in self.places.values() if artifacts.read_card(folder)), None)
        named = [] if first == self.folder else [f"method.checkpoint={self.folder}"]
        same = [word for word in self.words if re.match(r"(model|paths)[.=]", word)]
        return shlex.join(["python", "-m", "bench", f"method={self.settings.method}", *named, *same])

    def _common(self) -> Path:
        """What depends on model, corpus and seed alone is made once, whatever method needs it."""
        shared = {key: self.definition[key] for key in ("model", "corpus", "seed")}
        shared |= {"dtype": str(self.loaded.lm.dtype), "sha256": self.loaded.sha256}
        digest = files.json_sha256(shared)[:12]
        return Path(self.cfg.paths.cache) / "common" / f"{sanitise(self.loaded.name)}-{digest}"

    def _corpus(self) -> Corpus:
        lm, tokenizer = self.loaded.lm, self.loaded.tokenizer
        end = getattr(tokenizer, "eos_token_id", None)
        if lm.eos_ids and end not in lm.eos_ids:
            end = lm.eos_ids[0]
        return Corpus(self.texts, tokenizer, end, lm.max_positions, apart=self.loaded.kind == "seq2seq")


# ------------------------------------------------------------------------------------------------------- the folder


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Claim a folder for this process.

    Raises:
        UserError: another process has it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    refusal = f"{folder} is being filled by another process; one folder has one writer. Wait, or set out=FOLDER."
    with files.locked(folder / LOCK, refusal):
        yield


def _empty(folder: Path) -> None:
    """Remove what an earlier call left. The lock stays; the card goes last, for it says whose files these are."""
    for path in sorted(folder.iterdir(), key=lambda path: path.name in (CARD, PLAN)):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()


# --------------------------------------------------------------------------------------------- what the class is given


class Stages:
    """Shows the stage that a preparation is in, and how far it came."""

    def __init__(self) -> None:
        self._shown: Progress | None = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        """``done`` of ``total``; a new name, another total or a step back begins a new line."""
        shown = self._shown
        if shown is None or (shown.label, shown.total) != (stage, total) or done < shown.done:
            self.close()
            shown = self._shown = Progress(stage, total, done)
        shown.advance(done - shown.done)

    def close(self) -> None:
        """The stage is over."""
        if self._shown is not None:
            self._shown.close()
        self._shown = None


class Curves:
    """Points of the curves to be followed: one line each in a file, and on to the tracker.

    A preparation that goes on may report points a second time: of equal steps the last line counts.
    """

    def __init__(self, file: Path, tracker: Tracker) -> None:
        self.file, self.tracker = file, tracker

    def __call__(self, point: Mapping[str, int | float]) -> None:
        """Append one point."""
        with self.file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(dict(point), default=float) + "\n")
        self.tracker.log_point(point)
