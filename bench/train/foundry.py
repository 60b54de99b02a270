"""Making things out of pairs: a whole model, where there is no target that a part belongs to, or a student of one."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bench.config import compose
from bench.config.schema import RunConfig, TrainConfig, sanitise
from bench.errors import UserError
from bench.models import loading
from bench.models.source import Loaded
from bench.tasks import corpus
from bench.tasks.corpus import Texts
from bench.tasks.sources import Sources
from bench.train.job import Curves, Job, PartJob, Stages, Subject
from methods.training.interface import Foundry, ModelMaker, PairLearner


class ModelJob(Job):
    """One model to be made.

    Args:
        maker: the class that makes it.
        texts: pairs to learn from.
        teacher: the model that is learnt from, if one is.
    """

    def __init__(
        self,
        settings: TrainConfig,
        cfg: RunConfig,
        train: Mapping[str, Any],
        maker: ModelMaker,
        texts: Texts,
        teacher: Loaded | None,
        words: Sequence[str],
    ) -> None:
        self.maker, self.teacher = maker, teacher
        device, _ = loading.resolve_hardware(asdict(cfg.hardware))
        name = maker.model_name("_".join(name.split(".")[0] for name in texts.names))
        super().__init__(settings, cfg, train, texts, Subject(name, None, None, device, torch.float16), words)
        self.pairs, self.validation = corpus.pairs(texts), _validation(maker.validation, texts, cfg)
        self.definition |= {
            "teacher": {"name": teacher.name, "revision": teacher.revision} if teacher else None,
            "validation": _hash(self.validation),
        }

    def shop(self, stages: Stages, curves: Curves) -> Foundry:
        """What the class works with."""
        teacher = (self.teacher.lm, self.teacher.tokenizer) if self.teacher else None
        return Foundry(
            self.pairs,
            self.validation,
            teacher,
            self.subject.device,
            self.folder,
            self.cfg.seed,
            stages,
            curves,
            _common(self.teacher, self.texts, self.cfg) if self.teacher else self.folder,
        )

    def usage(self) -> str:
        """The command that decodes with the model."""
        choices, corpus_name = compose.groups(), self.texts.names[0]
        known = self.subject.name in choices["model"] and self.folder == self.places["trained"]
        model = [f"model={self.subject.name}"] if known else ["model=hf", f"model.name={self.folder}"]
        own = ["dataset=jsonl", "dataset.path=FILE"]  # lines of a corpus are no lines of a data set
        data = [f"dataset={corpus_name}"] if corpus_name in choices["dataset"] else own
        return shlex.join(["python", "-m", "bench", *model, *data])


class StudentJob(PartJob):
    """A part that learns from pairs what a translation model does.

    Args:
        learner: the class that makes it.
        loaded: the model, with its Hugging Face weights.
    """

    def __init__(
        self,
        settings: TrainConfig,
        cfg: RunConfig,
        train: Mapping[str, Any],
        learner: PairLearner,
        texts: Texts,
        loaded: Loaded,
        words: Sequence[str],
    ) -> None:
        super().__init__(settings, cfg, train, texts, loaded, words)
        self.pairs, self.validation = corpus.pairs(texts), _validation(learner.validation, texts, cfg)
        self.definition["validation"] = _hash(self.validation)

    def shop(self, stages: Stages, curves: Curves) -> Foundry:  # type: ignore[override]
        """What the class works with."""
        loaded = self.loaded
        return Foundry(
            self.pairs,
            self.validation,
            (loaded.lm, loaded.tokenizer),
            loaded.lm.device,
            self.folder,
            self.cfg.seed,
            stages,
            curves,
            _common(loaded, self.texts, self.cfg),
        )


def model_job(
    settings: TrainConfig,
    cfg: RunConfig,
    train: Mapping[str, Any],
    maker: ModelMaker,
    texts: Texts,
    words: Sequence[str],
) -> ModelJob:
    """Load the teacher, if one is needed, and lay out what is to be made.

    Raises:
        UserError: a model is named where none is needed, or not named where one is.
    """
    named = any(word.split("=")[0] == "model" for word in words)
    if named != maker.learns_from_teacher:
        raise UserError(
            "train.data=distilled learns from what another model translates, and train.begin=model begins with another "
            "model's weights; none is named. Name one: model=multi30k_4_4, or model=hf model.name=HUB_ID_OR_FOLDER."
            if maker.learns_from_teacher
            else f"model= came, and method={settings.method} makes a model of its own from the corpus. Leave it "
            "out, learn its translations (train.data=distilled), or begin with its weights (train.begin=model)."
        )
    teacher = loading.load(cfg.model, asdict(cfg.hardware), cfg.paths, keep_hf=True) if named else None
    if teacher and teacher.kind != "seq2seq":
        raise UserError(
            f"model={teacher.name} is a causal model; a teacher must be an encoder-decoder that translates. Set "
            "model=multi30k_4_4, or model=hf model.name=HUB_ID_OR_FOLDER."
        )
    if teacher:
        loading.require_languages(teacher, f"corpus={texts.asked}", corpus.languages(texts.names))
    return ModelJob(settings, cfg, train, maker, texts, teacher, words)


def student_job(
    settings: TrainConfig,
    cfg: RunConfig,
    train: Mapping[str, Any],
    learner: PairLearner,
    texts: Texts,
    words: Sequence[str],
) -> StudentJob:
    """Load the model that a part is made for, with the weights that the part may begin with."""
    loaded = loading.load(cfg.model, asdict(cfg.hardware), cfg.paths, keep_hf=True)
    return StudentJob(settings, cfg, train, learner, texts, loaded, words)


def _validation(name: str | None, texts: Texts, cfg: RunConfig) -> list[tuple[str, str]]:
    """Pairs to judge by: those of that name, else the corpus' own; empty where there are none."""
    if name is None and len(texts.names) == 1:
        name = corpus.validation_of(texts.names[0])
    if name is None:
        return []
    return corpus.pairs(corpus.read(name, sources=Sources(cfg.paths.data, cfg.paths.cache)))


def _hash(pairs: Sequence[tuple[str, str]]) -> str:
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()


def _common(teacher: Loaded, texts: Texts, cfg: RunConfig) -> Path:
    """Of this teacher and these pairs: whoever learns from its translations shares them."""
    made = [teacher.name, teacher.revision, teacher.sha256, str(teacher.lm.dtype), texts.sha256]
    digest = hashlib.sha256(json.dumps(made).encode()).hexdigest()[:12]
    return Path(cfg.paths.cache) / "common" / f"{sanitise(teacher.name)}-{digest}"
