"""A training job: corpus, model, output folder, resuming, and the card of the result."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from bench.config import compose, identity, instantiate
from bench.config.schema import DEFAULT_CORPUS, RunConfig, TrainConfig, parallel_of, sanitise
from bench.errors import UserError
from bench.measure import acceptance_check, preconditions
from bench.models import adapted, artifacts, loading
from bench.models.artifacts import CARD, CURVES, LOCK, LOG, PLAN
from bench.models.source import Loaded
from bench.records.tracking import STEP, Tracker
from bench.tasks import corpus, overlap
from bench.tasks.corpus import Corpus, Texts
from bench.tasks.sources import Sources
from bench.train import corpora
from bench.utils import files, machine, redact
from bench.utils.progress import Progress
from methods.training.interface import Trainable, TrainingContext

_ADAPTED = "smollm2_layerskip"  # a model group whose base and difference can be replaced
_OLD_PLAN, _OLD_LOG = "making.json", "making"


def prepare(settings: TrainConfig, overrides: Sequence[str], words: Sequence[str]) -> str:
    """Train, unless the result is already there, and write its card.

    Args:
        settings: what to train, and from what.
        overrides: words of the command line that configure model, machine and the training itself.
        words: the whole command line, for the card.

    Returns:
        Where the result is, as text.

    Raises:
        UserError: the settings cannot work.
    """
    cfg, group = compose.compose_training(overrides, settings.method)
    train = _with_heads(group, cfg)
    if like := cfg.model.get("like"):
        raise UserError(preconditions.random_weights(like, f"method={settings.method} learns from a model's text"))
    trainable = instantiate.build_trainable(train)
    if settings.publish and trainable.makes == "difference":
        raise UserError(f"method={settings.method} stores its weights in 8 bits by itself. Leave out publish=.")
    tracker = instantiate.build_tracker(cfg.tracker)
    texts = _read(trainable, settings, cfg)
    machine.set_threads(cfg.hardware.threads)
    job = TrainingJob(trainable, settings, cfg, train, texts, words)
    with files.output(job.folder, "folder"):
        job.folder.mkdir(parents=True, exist_ok=True)
    with files.locked(job.folder / LOCK, f"{job.folder} is in use by another process. Wait, or set out=FOLDER."):
        if made := job.claim():
            job.run(tracker)
        if settings.publish:
            from bench.train.publish import publish

            without = [name for name in settings.without.split(",") if name]
            print(publish(job.folder, settings.publish, without, texts, cfg), file=sys.stderr)
        elif not made:
            return f"{job.folder} is already there. Set force=true to train again."
        job.check_acceptance()
    return job.report()


def _with_heads(train: dict[str, Any], cfg: RunConfig) -> dict[str, Any]:
    """The ``train`` group; if it has a speculator and names no ``heads``, with the checkpoint that is found for it."""
    if "speculator" not in train or train.get("heads") is not None:
        return train
    found = artifacts.first_finished(artifacts.places(train["speculator"], cfg.model["name"], cfg.paths).values())
    return {**train, "heads": found and str(found)}


def _read(trainable: Trainable, settings: TrainConfig, cfg: RunConfig) -> Texts:
    """The corpus, without dialogues that overlap with an evaluation set; says what is left out and what is unusual."""
    if trainable.learns_from == "nothing":
        if settings.corpus or settings.publish:
            raise UserError(
                f"method={settings.method} reads no corpus and stores no weights. Leave out corpus= and publish=."
            )
        return Texts((), (), ())
    wanted = settings.corpus or trainable.corpus or DEFAULT_CORPUS
    sources = Sources(cfg.paths.data, cfg.paths.cache)
    compared = overlap.evaluation(sources) if trainable.learns_from == "dialogues" else None
    unanswered = not trainable.needs_answers
    texts = corpus.read(wanted, settings.corpus_limit, cfg.seed, sources, evaluated=compared, unanswered=unanswered)
    for warning in filter(None, [*(revision.warning for revision in texts.revisions), compared and compared.warning]):
        print(f"warning: {warning}", file=sys.stderr)
    for name, count in (texts.left_out or {}).items():
        if count:
            print(f"corpus={name}: {count} dialogues overlap with an evaluation set and are left out", file=sys.stderr)
    return texts


class TrainingJob:
    """One training: what defines it, the folder it fills, and its progress.

    Args:
        trainable: what is trained.
        settings: of the command.
        cfg: model and machine.
        train: the ``train`` group.
        texts: the corpus.
        words: of the command line, for the card.

    Attributes:
        model: the target or teacher; None: the training makes a model from scratch.
        subject: name of the model that is trained for, or made.
        places: where results for it are looked for.
        folder: output.
        definition: two results with an equal one are the same.
        memo: the model's answers that come with the project, for a training on answers of the model.

    Raises:
        UserError: model and corpus do not fit.
    """

    def __init__(
        self,
        trainable: Trainable,
        settings: TrainConfig,
        cfg: RunConfig,
        train: Mapping[str, Any],
        texts: Texts,
        words: Sequence[str],
    ) -> None:
        self.trainable, self.settings, self.cfg, self.texts, self.words = trainable, settings, cfg, texts, words
        self.model = _load_model(trainable, settings, cfg, texts, words)
        made, paired = trainable.makes == "model", trainable.learns_from == "pairs"
        target = None if made else self.model
        self.subject = target.name if target else trainable.model_name("_".join(n.split(".")[0] for n in texts.names))
        self.model_facts = {
            "name": self.subject,
            "revision": target and target.revision,
            "sha256": target and target.sha256,
        }
        self.places = artifacts.places(settings.method, self.subject, cfg.paths)
        self.folder = Path(settings.out).expanduser() if settings.out else self.places["trained"]
        self.definition: dict[str, Any] = {
            "method": settings.method,
            "train": {"_target_": train["_target_"], **instantiate.arguments(train, compose.TRAIN)},
            "model": {name: self.model_facts[name] for name in ("name", "revision")},
            "corpus": texts.sha256,
            "seed": cfg.seed,
        }
        decodes = trainable.learns_from == "dialogues" and not trainable.needs_answers
        self.memo = corpora.memo_of(self.model) if self.model and decodes else None
        if self.memo:
            self.definition["answers"] = self.memo.sha256[:12]
        self.pairs = corpus.pairs(texts) if paired else []
        self.validation = _validation(trainable.validation, texts, cfg) if paired else []
        if paired:
            self.definition["validation"] = files.json_sha256(self.validation)
        if made:
            teacher = self.model and {"name": self.model.name, "revision": self.model.revision}
            self.definition["teacher"] = teacher
        self._seconds = 0.0  # interrupted attempts included
        self._summary: list[str] = []

    @property
    def definition_sha256(self) -> str:
        """Decides whether a result is already there."""
        return identity.definition_sha256(self.definition)

    @cached_property
    def device(self) -> torch.device:
        """Where the training runs."""
        return self.model.lm.device if self.model else loading.resolve_hardware(asdict(self.cfg.hardware))[0]

    def claim(self) -> bool:
        """Prepare the folder; False if the finished result is there already.

        An unfinished attempt with the same definition is resumed, also with ``force=true``; one of another definition
        that has saved nothing yet is replaced.

        Raises:
            UserError: the folder has other content, which only ``force`` may replace.
        """
        if (self.folder / _OLD_PLAN).exists():  # an unfinished training of an earlier version
            for old, new in ((_OLD_PLAN, PLAN), (_OLD_LOG, LOG)):
                with suppress(FileNotFoundError):
                    (self.folder / old).rename(self.folder / new)
        card, plan = artifacts.read_card(self.folder), files.read_json(self.folder / PLAN)
        left = card or plan or {}
        if "definition" not in left:
            if any(path.name != LOCK for path in self.folder.iterdir()):
                raise UserError(f"{self.folder} must be empty or of a training, got other files. Set out=FOLDER.")
        elif identity.definition_sha256(left["definition"]) != self.definition_sha256:
            if card or any(path.name not in (LOCK, PLAN, LOG) for path in self.folder.iterdir()):
                self._require_force(left)
            _empty(self.folder)
        elif card:
            if not self.settings.force:
                return False
            _empty(self.folder)
        else:
            self._seconds = float(left.get("seconds", 0.0))
            print(f"{self.folder}: resuming after {self._seconds:.0f} s. Delete it to start over.", file=sys.stderr)
        return True

    def _require_force(self, left: Mapping[str, Any]) -> None:
        if self.settings.force:
            return
        theirs, ours = left.get("definition") or {}, redact.tree(self.definition)
        differing = ", ".join(key for key in ours if theirs.get(key) != ours[key])
        raise UserError(
            f"{self.folder} has a result of other settings ({differing}). Set force=true to replace it, or out=FOLDER."
        )

    def context(self, stages: StageProgress, curves: CurveLog) -> TrainingContext:
        """What the training works with."""
        model = self.model
        return TrainingContext(
            output=self.folder,
            shared_cache=self._shared_cache(),
            model=model.lm if model else None,
            tokenizer=model.tokenizer if model else None,
            examples=_examples(self.texts, model) if model and self.trainable.learns_from == "dialogues" else (),
            pairs=self.pairs,
            validation=self.validation,
            memo=self.memo,
            seed=self.cfg.seed,
            device=self.device,
            report_progress=stages,
            log=curves,
        )

    def _shared_cache(self) -> Path:
        """Of this model and corpus, and of the seed, which decides the order of prompts."""
        if self.model is None:
            return self.folder
        model, dtype = self.model, str(self.model.lm.dtype)
        if self.trainable.learns_from == "pairs":
            digest = files.json_sha256([model.name, model.revision, model.sha256, dtype, self.texts.sha256])
        else:
            shared = {key: self.definition[key] for key in ("model", "corpus", "seed")}
            digest = files.json_sha256(shared | {"dtype": dtype, "sha256": model.sha256})
        return Path(self.cfg.paths.cache) / "common" / f"{sanitise(model.name)}-{digest[:12]}"

    def run(self, tracker: Tracker) -> None:
        """Train, log, and write the card.

        Raises:
            UserError: settings or corpus cannot work.
        """
        trainable, stages = self.trainable, StageProgress()
        print(
            f"{self.settings.method} for {self.subject}: {trainable.description}; {trainable.duration}", file=sys.stderr
        )
        with self._timed(), self._tracked(tracker):
            try:
                facts = dict(trainable.fit(self.context(stages, CurveLog(self.folder / CURVES, tracker))))
            except ValueError as error:
                raise UserError(str(error)) from error
            finally:
                stages.close()
        self._summary = facts.pop("summary", [])
        files.write_json(self.folder / CARD, redact.tree(self._card(facts)))
        (self.folder / PLAN).unlink(missing_ok=True)

    def check_acceptance(self) -> None:
        """Write what the checkpoint does on fixed prompts into its card, by which a wrong loading is noticed later."""
        if self.trainable.makes == "corpus":
            return
        makes, model = self.trainable.makes, self.cfg.model
        if makes == "model":
            model = {"name": str(self.folder)}
        elif makes == "difference":
            model = adapted.group_of(self.folder, model)
        try:
            loaded = self.model if makes == "checkpoint" else None
            loaded = loaded or loading.load(model, asdict(self.cfg.hardware), self.cfg.paths)
            acceptance_check.write(self.folder, loaded)
        except (UserError, ValueError) as error:
            print(f"warning: the card has no {acceptance_check.ENTRY}: {error}", file=sys.stderr)

    def report(self) -> str:
        """Where the result is, and the command that uses it."""
        size = sum(path.stat().st_size for path in artifacts.files(self.folder).values())
        made = f"{self.folder}: {size / 1e6:,.1f} MB in {self._seconds:,.0f} s"
        usage = shlex.join(["python", "-m", "bench", *self._usage()])
        return "\n".join([made, *self._summary, f"Use it: {usage}"])

    def _usage(self) -> list[str]:
        if self.trainable.makes == "corpus":
            made = ",".join(str(path) for path in artifacts.files(self.folder).values())
            return ["train", "method=medusa", f"corpus=dolly,{made}"]
        if self.trainable.makes == "checkpoint":
            first = artifacts.first_finished(self.places.values())
            named = [] if first == self.folder else [f"method.checkpoint={self.folder}"]
            same = [word for word in self.words if re.match(r"(model|paths)[.=]", word)]
            return [f"method={self.settings.method}", *named, *same]
        choices, corpus_name = compose.groups(), self.texts.names[0]
        if self.trainable.makes == "difference":
            name = self.trainable.model_name(self.subject)
            group = adapted.group_of(self.folder, self.subject)
            place = [f"model.{key}={group[key]}" for key in ("base", "folder")]
            known = name in choices["model"] and self.folder == self.places["trained"]
            model = [f"model={name}"] if known else [f"model={_ADAPTED}", f"model.name={sanitise(name)}", *place]
            return ["method=calm", "method.head=lens", *model]
        known = self.subject in choices["model"] and self.folder == self.places["trained"]
        model = [f"model={self.subject}"] if known else ["model=hf", f"model.name={self.folder}"]
        own = ["dataset=jsonl", "dataset.path=FILE"]  # lines of a corpus are not lines of a data set
        return [*model, *([f"dataset={corpus_name}"] if corpus_name in choices["dataset"] else own)]

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Note definition and time so far in the folder of the unfinished result."""
        begin, before = perf_counter(), self._seconds
        self._note_plan()
        try:
            yield
        finally:
            self._seconds = before + perf_counter() - begin
            with suppress(OSError):  # the disk may be full, which is reported already
                self._note_plan()

    def _note_plan(self) -> None:
        plan = {"definition_sha256": self.definition_sha256, "definition": redact.tree(self.definition)}
        files.write_json(self.folder / PLAN, plan | {"seconds": round(self._seconds, 1)})

    @contextmanager
    def _tracked(self, tracker: Tracker) -> Iterator[None]:
        name = f"{self.places['trained'].name}-{self.definition_sha256[:12]}"
        group = "-".join([self.subject, *self.texts.names])
        tracker.start(name, group, redact.tree(self.definition), [self.settings.method, self.subject], "train")
        status = "failed"
        try:
            yield
            status = "finished"
        finally:
            tracker.finish(status)

    def _card(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        parts, texts = artifacts.files(self.folder), self.texts
        dtype = self.model.lm.dtype if self.model and self.trainable.makes != "model" else torch.float16
        return {
            "description": self.trainable.description,
            "definition_sha256": self.definition_sha256,
            "definition": self.definition,
            "facts": dict(facts),
            "sha256": files.digest(parts),
            "bytes": {name: path.stat().st_size for name, path in parts.items()},
            "command": shlex.join(["python", "-m", "bench", "train", *redact.argv(self.words)]),
            "seed": self.cfg.seed,
            "seconds": round(self._seconds, 1),
            "finished_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "corpus": {
                "names": list(texts.names),
                "asked": texts.asked,
                "limit": self.settings.corpus_limit,
                "dialogues": len(texts.dialogues),
                "sha256": texts.sha256,
                "left_out": texts.left_out,
                "files": [asdict(revision) for revision in texts.revisions],
            },
            "model": self.model_facts,
            "dtype": str(dtype).removeprefix("torch."),
            "hardware": machine.facts(self.device),
            "versions": machine.versions(),
            "git": machine.git_state(),
        }


# --------------------------------------------------------------------------------------------------- model and corpus


def _load_model(
    trainable: Trainable, settings: TrainConfig, cfg: RunConfig, texts: Texts, words: Sequence[str]
) -> Loaded | None:
    """The target or teacher.

    Raises:
        UserError: it does not fit the training or the corpus.
    """
    made, paired = trainable.makes == "model", trainable.learns_from == "pairs"
    if made:
        named = any(word.split("=")[0] == "model" for word in words)
        if named and not trainable.needs_model:
            raise UserError(
                f"method={settings.method} trains a model from scratch, got model=. Leave it out, learn its "
                "translations (train.data=distilled), or start with its weights (train.begin=model)."
            )
        if not trainable.needs_model:
            return None
        if not named:
            raise UserError(
                f"{trainable.teaching} need another model, got none. Name one: model={trainable.usual_teacher}, or "
                "model=hf model.name=HUB_ID_OR_FOLDER."
            )
    if (devices := parallel_of(cfg.model)) > 1:
        raise UserError(f"model.parallel must be 1 where something is trained, got {devices}. Set model.parallel=1.")
    changed = trainable.makes == "difference"
    model = loading.load(cfg.model, asdict(cfg.hardware), cfg.paths, keep_hf=paired or changed)
    if changed and (model.kind != "causal" or model.denoises):
        raise UserError(
            f"method={settings.method} trains a decoder-only model that writes from left to right, got {model.name}. "
            "Set model=smollm2, or method=exit_teacher for a translation model."
        )
    if made and trainable.teacher_kind == "seq2seq" != model.kind:
        raise UserError(
            f"The teacher must be an encoder-decoder that translates, got {model.name}, a causal model. Set "
            "model=multi30k_4_4, or model=hf model.name=HUB_ID_OR_FOLDER."
        )
    languages = corpus.languages(texts.names)
    loading.require_languages(model, f"corpus={texts.asked}", languages)
    if made:
        return model
    if model.kind == "seq2seq" and settings.corpus is None and languages is None:
        raise UserError(
            f"An encoder-decoder such as {model.name} needs a corpus that it can read, got the default {texts.asked}. "
            "Set corpus=multi30k, or corpus=FILE.jsonl."
        )
    if not all(dialogue.said[0] for dialogue in texts.dialogues):
        raise UserError(
            f"method={settings.method} needs requests to the model, got corpus={','.join(texts.names)}, which has "
            f"plain text. Name another, such as {DEFAULT_CORPUS}."
        )
    return model


def _examples(texts: Texts, model: Loaded) -> Corpus:
    lm, end = model.lm, getattr(model.tokenizer, "eos_token_id", None)
    if lm.eos_ids and end not in lm.eos_ids:
        end = lm.eos_ids[0]
    return Corpus(texts, model.tokenizer, end, lm.max_positions, apart=model.kind == "seq2seq")


def _validation(name: str | None, texts: Texts, cfg: RunConfig) -> list[tuple[str, str]]:
    """Pairs of that name, else those that belong to the corpus; empty where there are none."""
    if name is None and len(texts.names) == 1:
        name = corpus.validation_of(texts.names[0])
    if name is None:
        return []
    return corpus.pairs(corpus.read(name, sources=Sources(cfg.paths.data, cfg.paths.cache)))


# --------------------------------------------------------------------------------------------------------- the folder


def _empty(folder: Path) -> None:
    """Remove the files of an earlier call except the lock; the card, which says whose files these are, goes last."""
    for path in sorted(folder.iterdir(), key=lambda path: path.name in (CARD, PLAN)):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()


# ---------------------------------------------------------------------------------------------------------- reporting


class StageProgress:
    """Shows the current stage of a training and its progress."""

    def __init__(self) -> None:
        self._shown: Progress | None = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        """``done`` of ``total``; a new name, another total or a step back starts a new line."""
        shown = self._shown
        if shown is None or (shown.label, shown.total) != (stage, total) or done < shown.done:
            self.close()
            shown = self._shown = Progress(stage, total, done)
        shown.advance(done - shown.done)

    def close(self) -> None:
        """End the stage."""
        if self._shown is not None:
            self._shown.close()
        self._shown = None


class CurveLog:
    """Training curves: one line per point in a file, and a tracker.

    A resumed training repeats the steps after its last checkpoint; a point that is in the file is not logged again.
    The tracker, whose run begins anew, first gets the points of the file.
    """

    def __init__(self, file: Path, tracker: Tracker) -> None:
        self.file, self.tracker = file, tracker
        earlier = _read_points(file)
        self._logged = {_point_key(point) for point in earlier if STEP in point}
        for point in earlier:
            tracker.log_point(point)

    def __call__(self, point: Mapping[str, int | float]) -> None:
        """Append one point."""
        if STEP in point:
            if (key := _point_key(point)) in self._logged:
                return
            self._logged.add(key)
        with self.file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(dict(point), default=float) + "\n")
        self.tracker.log_point(point)


def _point_key(point: Mapping[str, int | float]) -> tuple[Any, ...]:
    """Two points with an equal one are of the same step of the same curves."""
    return point[STEP], *sorted(point)


def _read_points(file: Path) -> list[dict[str, Any]]:
    """The points of curves; an incomplete last line, of a killed training, is removed from the file."""
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        files.atomic_write(file, whole)
    return [json.loads(line) for line in whole.splitlines()]
