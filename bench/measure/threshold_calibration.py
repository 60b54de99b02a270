"""Chooses the threshold of a run on calibration prompts, before anything is timed.

The prompts are requests of a corpus that the run does not ask and, where that can be told, that the exits were not
trained on. The target answers each of them, then the method at one threshold after the other, the safest first, by the
settings of the run (limit, batch size, type). What a text loses is measured here; what may be promised for these losses
the method's own calibrator says (``methods.decoder.Calibrator``).

Losses are kept in the cache, threshold by threshold: the same prompts are not decoded again for another tolerance, nor
after an interruption.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from bench.config.schema import RunConfig, sanitise
from bench.errors import UserError
from bench.models.artifacts import Prepared
from bench.scoring import SCORERS
from bench.scoring.rouge import rouge_l
from bench.tasks import corpus, prompts
from bench.tasks.corpus import Dialogue
from bench.tasks.sources import Sources
from bench.utils import files, machine
from bench.utils.progress import Progress
from methods.decoder import Calibrated, Calibrator, Decoder, generate

_FORM = 1  # of the cached losses
_USUAL = {"causal": "rougeL", "seq2seq": "bleu"}
_USUAL_CORPUS = "dolly"
_OF_ONE_ANSWER = ("rouge", "translation", "gsm8k")  # scorers that need nothing but a reference
_NOT_APART = (
    "Calibration prompts may be among those that the exits were trained on; the promise supposes that none is. Train "
    "the exits with corpus_limit=N, or name other prompts: method.calibration.corpus=NAME or FILE.jsonl."
)

Losses = Float[np.ndarray, "prompts tried"]


@dataclass(frozen=True)
class CalibrationSet:
    """What a threshold is chosen by: prompts, and how much was drawn from what.

    Attributes:
        rows: prompts as the target reads them.
        references: the answers of the corpus.
        facts: of the draw, to be recorded.
    """

    calibrator: Calibrator
    rows: list[list[int]]
    references: list[str]
    facts: dict[str, Any]

    @property
    def sha256(self) -> str:
        """Of all prompts in their order: part of what defines the run."""
        return str(self.facts["sha256"])


@dataclass(frozen=True)
class Writer:
    """How texts are written in the run.

    Attributes:
        loaded: the target, with its tokenizer.
        limit, eos_ids, batch_size: as in ``bench.measure.interleave.Settings``.
    """

    loaded: Any
    limit: int
    eos_ids: Sequence[int]
    batch_size: int

    def write(self, decoder: Decoder, rows: Sequence[Sequence[int]], label: str) -> list[list[int]]:
        """What a decoder answers to each prompt, cut as in the run."""
        device = self.loaded.lm.device
        found: list[list[int]] = []
        with Progress(label, len(rows)) as progress:
            for start in range(0, len(rows), self.batch_size):
                batch = [torch.tensor(row, device=device) for row in rows[start : start + self.batch_size]]
                found += generate(decoder, batch, self.limit, self.eos_ids)
                progress.advance(len(batch))
        return found

    def text(self, ids: Sequence[int]) -> str:
        return str(self.loaded.tokenizer.decode(ids, skip_special_tokens=True))


# ---------------------------------------------------------------------------------------------------------- the draw


def draw(
    cfg: RunConfig, method: Decoder, loaded: Any, examples: Sequence[Any], part: Prepared | None, context: int
) -> CalibrationSet | None:
    """The calibration prompts of a run; None where its method promises nothing.

    Args:
        cfg: the run.
        method: the decoder under test.
        loaded: the target.
        examples: what the run asks, none of which may be a calibration prompt.
        part: the trained exits, with the card that says what they learnt from.
        context: most tokens of prompt and answer together, or of each of them for an encoder-decoder.

    Raises:
        UserError: an unknown corpus or metric, or too few prompts.
    """
    calibrator = method.calibrator if isinstance(method, Calibrated) else None
    if calibrator is None:
        return None
    promise, sources = calibrator.promise, Sources(cfg.paths.data, cfg.paths.cache)
    _scorer(promise.metric)
    wanted, name = promise.prompts or calibrator.planned(), promise.corpus or _corpus_of(cfg, loaded.kind)
    texts = corpus.read(name, None, promise.seed, sources)
    asked = {turn.strip() for example in examples for turn in example.turns}
    unasked = [dialogue for dialogue in texts.dialogues if dialogue.said[-1].strip() not in asked]
    room = context if loaded.kind == "seq2seq" else context - cfg.max_new_tokens
    order = random.Random(promise.seed).sample(unasked, len(unasked))
    learnt = _learnt(part, sources)
    apart: bool | None = None if learnt is None else True
    rows = _take([dialogue for dialogue in order if dialogue.digest not in (learnt or ())], wanted, loaded, room)
    if learnt and len(rows) < wanted:
        rows, apart = _take(order, wanted, loaded, room), False
    _require(len(rows), wanted, name, calibrator)
    if part and not apart:
        print(f"warning: {_NOT_APART}", file=sys.stderr)
    encoded = [ids for _, ids in rows]
    facts = {
        "names": list(texts.names),
        "content": texts.sha256,
        "dialogues": len(texts.dialogues),
        "also_asked": len(texts.dialogues) - len(unasked),
        "apart_from_training": apart,
        "wanted": wanted,
        "prompts": len(rows),
        "seed": promise.seed,
        "sha256": hashlib.sha256(json.dumps(encoded).encode()).hexdigest(),
    }
    return CalibrationSet(calibrator, encoded, [dialogue.answer for dialogue, _ in rows], facts)


def _corpus_of(cfg: RunConfig, kind: str) -> str:
    """Requests as like those of the run as there are: its data set's own train or validation split, if known."""
    name = str(cfg.dataset["name"])
    if kind == "causal":
        return name if name in corpus.KNOWN else _USUAL_CORPUS
    languages = (cfg.dataset.get("source"), cfg.dataset.get("target"))
    for pairs, (split, *read) in corpus.PAIRS.items():
        if split == "val" and tuple(read) == languages:
            return pairs
    raise UserError(
        f"A calibration for dataset={name} came, and no corpus of pairs from {languages[0]} to {languages[1]} is "
        f"known; one of {', '.join(corpus.PAIRS)} or a file is needed. Set method.calibration.corpus=FILE.jsonl."
    )


def _learnt(part: Prepared | None, sources: Sources) -> set[bytes] | None:
    """What the exits were trained on, read again as their card says; None where that cannot be told."""
    card = (part and part.card) or {}
    facts = card.get("corpus") or {}
    try:
        texts = corpus.read(str(facts.get("asked", "")), facts.get("limit"), card.get("seed") or 0, sources)
    except UserError:
        return None
    return {dialogue.digest for dialogue in texts.dialogues} if texts.sha256 == facts.get("sha256") else None


def _take(dialogues: Sequence[Dialogue], wanted: int, loaded: Any, room: int) -> list[tuple[Dialogue, list[int]]]:
    """The first so many that fit into the context, with their ids."""
    found: list[tuple[Dialogue, list[int]]] = []
    for dialogue in dialogues:
        ids = prompts.encode(loaded.tokenizer, dialogue.messages)
        if 1 <= len(ids) <= room:
            found.append((dialogue, ids))
        if len(found) == wanted:
            break
    return found


def _require(found: int, wanted: int, name: str, calibrator: Calibrator) -> None:
    """Too few to promise anything are refused, and so are fewer than the user asked for."""
    least = calibrator.promise.prompts or calibrator.fewest
    if found < least:
        raise UserError(
            f"corpus={name} has {found} calibration prompts that fit the context and that the run does not ask; "
            f"{least} or more are needed for this tolerance, {wanted} are advised. Name a larger corpus: "
            "method.calibration.corpus=NAME,NAME or FILE.jsonl; or allow a larger method.calibration.tolerance."
        )
    if found < wanted:
        print(f"warning: {wanted} calibration prompts are advised, {name} has {found}.", file=sys.stderr)


# --------------------------------------------------------------------------------------------------------- the choice


def choose(
    drawn: CalibrationSet, cfg: RunConfig, baseline: Decoder, method: Decoder, writer: Writer, part: str | None
) -> Choice:
    """Decode the calibration prompts as far as it takes, and let the method use what is chosen.

    Args:
        drawn: of ``draw``.
        cfg: the run.
        baseline: the target decoding one token at a time.
        method: the decoder under test; afterwards it has the chosen threshold.
        writer: how texts are written.
        part: sha256 of the trained exits.

    Returns:
        The record of the calibration, and its losses.
    """
    assert isinstance(method, Calibrated)
    promise = drawn.calibrator.promise
    kept = _Kept.open(cfg, drawn, writer.loaded, part)
    full = kept.full or writer.write(baseline, drawn.rows, "calibration: full model")
    kept.note_full(full)
    lost = _loss(promise, drawn.references, full, writer)
    columns: list[list[float]] = []
    for threshold in drawn.calibrator.thresholds:
        if drawn.calibrator.complete(_table(columns, len(drawn.rows))):
            break
        if (known := kept.measured.get(repr(threshold))) is None:
            method.set_threshold(threshold)
            texts = writer.write(method, drawn.rows, f"calibration: threshold {threshold:.3g}")
            known = {"losses": lost(texts), "layer_equivalents": _layer_equivalents(method)}
            kept.note(threshold, known)
        columns.append(known["losses"])
    record = drawn.calibrator.choose(_table(columns, len(drawn.rows)))
    if part and not drawn.facts["apart_from_training"]:
        record["explanation"] += "; its exits may have been trained on these prompts"
    method.set_threshold(record["threshold"])
    costs = [kept.measured[repr(threshold)]["layer_equivalents"] for threshold in record["thresholds"]]
    metric = None if promise.against == "textual" else promise.metric or _USUAL[writer.loaded.kind]
    facts = {"against": promise.against, "metric": metric, "layer_equivalents": costs, "corpus": drawn.facts}
    print(f"calibration: {record['explanation']}", file=sys.stderr)
    return Choice(record | facts, columns)


@dataclass(frozen=True)
class Choice:
    """A chosen threshold.

    Attributes:
        record: for the manifest.
        losses: by threshold that was tried, of every calibration prompt.
    """

    record: dict[str, Any]
    losses: list[list[float]]

    def to_json(self) -> dict[str, Any]:
        """For a file beside the manifest, from which the choice can be made again."""
        return self.record | {"losses": self.losses}


def _table(columns: Sequence[Sequence[float]], rows: int) -> Losses:
    return np.array(columns, dtype=np.float64).reshape(len(columns), rows).T


def _layer_equivalents(method: Decoder) -> float | None:
    """Of a step at this threshold, where the method counts them; those of a token where a step is one."""
    found = method.stats().get("layer_equivalents_per_step")
    return None if found is None else float(found)


def _loss(
    promise: Any, references: Sequence[str], full: Sequence[Sequence[int]], writer: Writer
) -> Callable[[Sequence[Sequence[int]]], list[float]]:
    """What each text loses, in [0, 1]."""
    if promise.against == "textual":
        return lambda texts: [1.0 - rouge_l(ours, theirs) for ours, theirs in zip(full, texts, strict=True)]
    metric = promise.metric or _USUAL[writer.loaded.kind]
    scorer = _scorer(metric)

    def scores(texts: Sequence[Sequence[int]]) -> list[float]:
        pairs = zip(references, texts, strict=True)
        return [min(1.0, scorer.score(reference, writer.text(ids))[metric] / 100) for reference, ids in pairs]

    before = scores(full)
    return lambda texts: [max(0.0, was - now) for was, now in zip(before, scores(texts), strict=True)]


def _scorer(metric: str | None) -> Any:
    """What computes a metric of one answer.

    Raises:
        UserError: nothing does.
    """
    known = {name: SCORERS[kind] for kind in _OF_ONE_ANSWER for name in SCORERS[kind].metrics}
    if metric is not None and metric not in known:
        raise UserError(
            f"method.calibration.metric came as '{metric}'; it must be one of {', '.join(known)}, or null. Set it."
        )
    return known[metric]() if metric else None


# ---------------------------------------------------------------------------------------------------------- the cache


class _Kept:
    """Losses of one set of prompts, by everything that they depend on."""

    def __init__(self, file: Path, definition: Mapping[str, Any]) -> None:
        self._file = file
        found = files.read_json(file) or {}
        same = found.get("definition") == definition
        self._content: dict[str, Any] = found if same else {"definition": definition, "full": None, "measured": {}}

    @classmethod
    def open(cls, cfg: RunConfig, drawn: CalibrationSet, loaded: Any, part: str | None) -> _Kept:
        facts = machine.facts(loaded.lm.device)
        definition = {
            "form": _FORM,
            "method": dict(_settings(cfg.method)),
            "part": part,
            "model": [loaded.name, loaded.revision, loaded.sha256],
            "machine": [facts["gpu"]["name"] if facts["gpu"] else facts["cpu"], facts["threads"], str(loaded.lm.dtype)],
            "limit": cfg.max_new_tokens,
            "batch_size": cfg.batch_size,
            "prompts": drawn.sha256,
            "loss": [drawn.calibrator.promise.against, drawn.calibrator.promise.metric],
        }
        digest = hashlib.sha256(json.dumps(definition, sort_keys=True, default=str).encode()).hexdigest()[:12]
        name = f"{sanitise(str(cfg.method['name']))}-{sanitise(loaded.name)}-{digest}.json"
        return cls(Path(cfg.paths.cache) / "calibration" / name, json.loads(json.dumps(definition, default=str)))

    @property
    def full(self) -> list[list[int]] | None:
        """The target's own texts."""
        return self._content["full"]

    @property
    def measured(self) -> dict[str, Any]:
        """By threshold: the losses and what a step cost."""
        found: dict[str, Any] = self._content["measured"]
        return found

    def note_full(self, texts: list[list[int]]) -> None:
        self._content["full"] = texts
        self._write()

    def note(self, threshold: float, found: Mapping[str, Any]) -> None:
        self.measured[repr(threshold)] = dict(found)
        self._write()

    def _write(self) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        files.write_json(self._file, self._content)


def _settings(method: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Of the method, without what is chosen and what the promise is."""
    yield from ((key, value) for key, value in method.items() if key not in ("threshold", "calibration"))
