"""Choose the threshold of a run on calibration prompts, before anything is timed.

The prompts come from a corpus, without those of the run and, where that is known, without those that the exits were
trained on or that chose among checkpoints of the training. The target answers each, then the method at one threshold
after another, the safest first, with the settings of the run. This module measures what each text loses;
``methods.decoder.Calibrator`` chooses by the losses. They are cached by threshold, for other tolerances and for
resuming.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from bench.config import instantiate
from bench.config.schema import RunConfig, sanitise
from bench.errors import UserError
from bench.models import artifacts
from bench.models.artifacts import Prepared
from bench.models.trained import is_trained
from bench.records.run_folder import device_name
from bench.scoring import SCORERS
from bench.scoring.rouge import rouge_l
from bench.tasks import corpus, overlap, prompts
from bench.tasks.corpus import Dialogue
from bench.tasks.sources import Sources
from bench.utils import files, machine
from bench.utils.progress import Progress
from methods.decoder import Calibrated, Calibrator, Decoder, generate

_FORM = 1  # of the cached losses
_USUAL = {"causal": "rougeL", "seq2seq": "bleu"}
_USUAL_CORPUS = "dolly"
_OF_ONE_ANSWER = ("rouge", "translation", "gsm8k")  # scorers that need nothing but a reference
_NOT_APART = {
    "training": "The exits may have been trained on some calibration prompts, which the risk target rules out. Train "
    "the exits with corpus_limit=N, or use other prompts: method.calibration.corpus=NAME or FILE.jsonl.",
    "selection": "Checkpoints of the model were chosen by the calibration prompts, which the risk target rules out. "
    "Train it with some of them only, such as train.validation=multi30k_val:507, or use other prompts: "
    "method.calibration.corpus=NAME or FILE.jsonl.",
}

Losses = Float[np.ndarray, "prompts tried"]


@dataclass(frozen=True)
class CalibrationSet:
    """Prompts (ids) and reference answers that a threshold is chosen by; ``facts`` on the draw are recorded."""

    calibrator: Calibrator
    rows: list[list[int]]
    references: list[str]
    facts: dict[str, Any]

    @property
    def sha256(self) -> str:
        return str(self.facts["sha256"])


@dataclass(frozen=True)
class Writer:
    """Writes texts with the settings of the run; ``loaded`` is the target with its tokenizer."""

    loaded: Any
    limit: int
    eos_ids: Sequence[int]
    batch_size: int

    def write(self, decoder: Decoder, rows: Sequence[Sequence[int]], label: str) -> list[list[int]]:
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
    cfg: RunConfig,
    method: Decoder,
    loaded: Any,
    examples: Sequence[Any],
    part: Prepared | None,
    context: int,
    most: int | None = None,
) -> CalibrationSet | None:
    """The calibration prompts of a run; None if its method has no risk target.

    Args:
        examples: the run's own, none of which may be a calibration prompt.
        part: the trained exits, whose card says what they were trained on.
        context: most tokens of prompt and answer together, or of each of them for an encoder-decoder.
        most: prompts, in place of what the method plans; fewer are taken where the corpus has no more.

    Raises:
        UserError: an unknown corpus or metric, or too few prompts.
    """
    calibrator = method.calibrator if isinstance(method, Calibrated) else None
    if calibrator is None:
        return None
    target, sources = calibrator.risk_target, Sources(cfg.paths.data, cfg.paths.cache)
    _scorer(target.metric)
    wanted, name = target.prompts or most or calibrator.planned(), target.corpus or _corpus_of(cfg, loaded.kind)
    texts = corpus.read(name, None, target.seed, sources)
    asked = {turn.strip() for example in examples for turn in example.turns}
    unasked = [dialogue for dialogue in texts.dialogues if dialogue.said[-1].strip() not in asked]
    room = context if loaded.kind == "seq2seq" else context - cfg.max_new_tokens
    order = random.Random(target.seed).sample(unasked, len(unasked))
    cards = [card for card in (part and part.card, _card_of_model(cfg)) if card]
    known = {"training": _read(cards, _trained_on, sources), "selection": _read(cards, _chosen_by, sources)}
    least = target.prompts or calibrator.fewest
    left, apart = order, dict.fromkeys(known)
    for what, digests in known.items():
        if digests is None:
            continue
        others = [dialogue for dialogue in left if dialogue.digest not in digests]
        apart[what] = not digests or len(_take(others, least, loaded, room)) == least
        left = others if apart[what] else left
    rows = _take(left, wanted, loaded, room)
    wanted = wanted if most is None else len(rows)
    _require(len(rows), wanted, name, calibrator)
    for what, is_apart in apart.items():
        if is_apart is False or (is_apart is None and cards and what == "training"):
            print(f"warning: {_NOT_APART[what]}", file=sys.stderr)
    encoded = [ids for _, ids in rows]
    facts = {
        "names": list(texts.names),
        "content": texts.sha256,
        "dialogues": len(texts.dialogues),
        "also_asked": len(texts.dialogues) - len(unasked),
        "apart_from_training": apart["training"],
        "apart_from_selection": apart["selection"],
        "wanted": wanted,
        "prompts": len(rows),
        "seed": target.seed,
        "sha256": files.sha256(json.dumps(encoded)),
    }
    return CalibrationSet(calibrator, encoded, [dialogue.answer for dialogue, _ in rows], facts)


def _corpus_of(cfg: RunConfig, kind: str) -> str:
    """The train or validation split of the run's data set, if known."""
    name = str(cfg.dataset["name"])
    if kind == "causal":
        return name if name in corpus.KNOWN else _USUAL_CORPUS
    languages = (cfg.dataset.get("source"), cfg.dataset.get("target"))
    for pairs, (split, *read) in corpus.PAIRS.items():
        if split == "val" and tuple(read) == languages:
            return pairs
    raise UserError(
        f"method.calibration.corpus must be set for dataset={name}: no corpus of pairs from {languages[0]} to "
        f"{languages[1]} is known. Use one of {', '.join(corpus.PAIRS)}, or FILE.jsonl."
    )


def _card_of_model(cfg: RunConfig) -> dict[str, Any] | None:
    """The card of a target that was trained here, by name or by folder."""
    folder = Path(str(cfg.model["name"]))
    if is_trained(cfg.model):
        folder = instantiate.build_model(cfg.model).find(Path(cfg.paths.cache))
    return artifacts.read_card(folder)


def _read(
    cards: Sequence[Mapping[str, Any]],
    read: Callable[[Mapping[str, Any], Sources], corpus.Texts | None],
    sources: Sources,
) -> set[bytes] | None:
    """Digests of what the cards name, read again; None where there is no card, or one names what cannot be read."""
    try:
        texts = [read(card, sources) for card in cards]
    except UserError:
        return None
    return {dialogue.digest for each in texts if each for dialogue in each.dialogues} if texts else None


def _trained_on(card: Mapping[str, Any], sources: Sources) -> corpus.Texts:
    facts = card.get("corpus") or {}
    compared = overlap.evaluation(sources) if facts.get("left_out") is not None else None
    seed = card.get("seed") or 0
    texts = corpus.read(
        str(facts.get("asked", "")), facts.get("limit"), seed, sources, evaluated=compared, unanswered=True
    )
    if texts.sha256 != facts.get("sha256"):
        raise UserError("The corpus has changed since the training. Restore it.")
    return texts


def _chosen_by(card: Mapping[str, Any], sources: Sources) -> corpus.Texts | None:
    """Validation pairs that chose among checkpoints; None if there were none."""
    definition = card.get("definition") or {}
    if not (digest := definition.get("validation")):
        return None
    names = (card.get("corpus") or {}).get("names") or [""]
    wanted = (definition.get("train") or {}).get("validation") or corpus.validation_of(names[0]) or ""
    texts = corpus.read(wanted, sources=sources)
    if files.json_sha256(corpus.pairs(texts)) != digest:
        raise UserError("The validation pairs have changed since the training. Restore them.")
    return texts


def _take(dialogues: Sequence[Dialogue], wanted: int, loaded: Any, room: int) -> list[tuple[Dialogue, list[int]]]:
    """The first ``wanted`` dialogues that fit into the context, with their ids."""
    found: list[tuple[Dialogue, list[int]]] = []
    for dialogue in dialogues:
        ids = prompts.encode(loaded.tokenizer, dialogue.messages)
        if 1 <= len(ids) <= room:
            found.append((dialogue, ids))
        if len(found) == wanted:
            break
    return found


def _require(found: int, wanted: int, name: str, calibrator: Calibrator) -> None:
    least = calibrator.risk_target.prompts or calibrator.fewest
    if found < least:
        raise UserError(
            f"corpus={name} must have at least {least} prompts that fit the context and are not in the run (better "
            f"{wanted}), got {found}. Use a larger one: method.calibration.corpus=NAME,NAME or FILE.jsonl; or a larger "
            "method.calibration.tolerance."
        )
    if found < wanted:
        print(f"warning: {name} has {found} calibration prompts; {wanted} are recommended.", file=sys.stderr)


# --------------------------------------------------------------------------------------------------------- the choice


def choose(
    drawn: CalibrationSet, cfg: RunConfig, baseline: Decoder, method: Decoder, writer: Writer, part: str | None
) -> Choice:
    """Decode the calibration prompts with as many thresholds as needed, and set the chosen one.

    Args:
        part: sha256 of the trained exits.
    """
    assert isinstance(method, Calibrated)
    target = drawn.calibrator.risk_target
    kept = _Losses(cfg, drawn, writer.loaded, part)
    full = kept.full or writer.write(baseline, drawn.rows, "calibration: full model")
    kept.note(found=full)
    lost = loss_of(target, drawn.references, full, writer)
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
    if drawn.facts["apart_from_selection"] is False:
        record["explanation"] += "; its checkpoints were chosen by these prompts"
    method.set_threshold(record["threshold"])
    costs = [kept.measured[repr(threshold)]["layer_equivalents"] for threshold in record["thresholds"]]
    metric = metric_of(target, writer.loaded.kind)
    facts = {"against": target.against, "metric": metric, "layer_equivalents": costs, "corpus": drawn.facts}
    print(f"calibration: {record['explanation']}", file=sys.stderr)
    return Choice(record | facts, columns)


@dataclass(frozen=True)
class Choice:
    """A chosen threshold: the record for the manifest, and by threshold tried the loss of every prompt."""

    record: dict[str, Any]
    losses: list[list[float]]

    def to_json(self) -> dict[str, Any]:
        """Everything from which the choice can be repeated."""
        return self.record | {"losses": self.losses}


def _table(columns: Sequence[Sequence[float]], rows: int) -> Losses:
    return np.array(columns, dtype=np.float64).reshape(len(columns), rows).T


def _layer_equivalents(method: Decoder) -> float | None:
    """Per step at this threshold, if the method counts them."""
    found = method.stats().get("layer_equivalents_per_step")
    return None if found is None else float(found)


def metric_of(target: Any, kind: str) -> str | None:
    """The score that losses of a risk target compare, for a model of this kind; None: the texts themselves."""
    return None if target.against == "textual" else target.metric or _USUAL[kind]


def loss_of(
    target: Any, references: Sequence[str], full: Sequence[Sequence[int]], writer: Writer
) -> Callable[[Sequence[Sequence[int]]], list[float]]:
    """A function from texts to the loss of each, in [0, 1]."""
    if (metric := metric_of(target, writer.loaded.kind)) is None:
        return lambda texts: [1.0 - rouge_l(ours, theirs) for ours, theirs in zip(full, texts, strict=True)]
    scorer = _scorer(metric)

    def scores(texts: Sequence[Sequence[int]]) -> list[float]:
        pairs = zip(references, texts, strict=True)
        return [min(1.0, scorer.score(reference, writer.text(ids))[metric] / 100) for reference, ids in pairs]

    before = scores(full)
    return lambda texts: [max(0.0, was - now) for was, now in zip(before, scores(texts), strict=True)]


def _scorer(metric: str | None) -> Any:
    known = {name: SCORERS[kind] for kind in _OF_ONE_ANSWER for name in SCORERS[kind].metrics}
    if metric is not None and metric not in known:
        raise UserError(f"method.calibration.metric must be one of {', '.join(known)} or null, got '{metric}'.")
    return known[metric]() if metric else None


# ---------------------------------------------------------------------------------------------------------- the cache


class _Losses:
    """Cached losses of one set of prompts, in a file named by everything that they depend on."""

    def __init__(self, cfg: RunConfig, drawn: CalibrationSet, loaded: Any, part: str | None) -> None:
        facts = machine.facts(loaded.lm.device)
        target = drawn.calibrator.risk_target
        definition = {
            "form": _FORM,
            "method": {k: v for k, v in cfg.method.items() if k not in ("threshold", "calibration")},
            "part": part,
            "model": [loaded.name, loaded.revision, loaded.sha256],
            "machine": [device_name(facts), facts["threads"], str(loaded.lm.dtype)],
            "limit": cfg.max_new_tokens,
            "batch_size": cfg.batch_size,
            "prompts": drawn.sha256,
            "loss": [target.against, target.metric],
        }
        digest = files.json_sha256(definition)[:12]
        name = f"{sanitise(str(cfg.method['name']))}-{sanitise(loaded.name)}-{digest}.json"
        self._file = Path(cfg.paths.cache) / "calibration" / name
        self._content: dict[str, Any] = files.read_json(self._file) or {"full": None, "measured": {}}
        self._content["definition"] = definition

    @property
    def full(self) -> list[list[int]] | None:
        """The target's own texts."""
        return self._content["full"]

    @property
    def measured(self) -> dict[str, Any]:
        """By threshold: the losses and what a step cost."""
        found: dict[str, Any] = self._content["measured"]
        return found

    def note(self, threshold: float | None = None, found: Any = None) -> None:
        """Store what one threshold lost or, without one, the target's own texts."""
        if threshold is None:
            self._content["full"] = found
        else:
            self.measured[repr(threshold)] = found
        self._file.parent.mkdir(parents=True, exist_ok=True)
        files.write_json(self._file, self._content)
