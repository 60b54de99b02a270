"""Whether a checkpoint drafts, exits or translates as its card says: counters over five fixed prompts.

``measure`` counts what a checkpoint does on them; ``bench.train`` writes the counters into its card. ``python -m bench
doctor checkpoints=true`` counts again, and the warm-up of every run is compared with them (``doubt``). A part that was
loaded with other weights, layers, tokenizer or chat template still gives the target's text, but accepts little.

What is compared: acceptance by position of a method that drafts; of an early exit also the share of the layers; of a
one-pass student, an early exit and a model the likeness (ROUGE-L over ids) to the target's own text, of a model to the
text that its card holds.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from bench.analysis import metrics
from bench.config import compose, instantiate
from bench.config.schema import PathsConfig, RunConfig, SamplingConfig
from bench.models import adapted, artifacts, loading
from bench.models.artifacts import Prepared
from bench.models.source import Loaded
from bench.records.run_folder import Sample
from bench.scoring.rouge import rouge_l
from bench.tasks import prompts
from bench.tasks.chat import Demo
from bench.utils import files
from methods.autoregressive import Autoregressive
from methods.decoder import Decoder, Step, generate
from methods.engine.sampling import Sampling

ENTRY = "acceptance_check"  # the key of the card
MODEL_FILE = "model.safetensors"  # in the folder of a checkpoint that is a model
NEW_TOKENS = 48
PROMPTS = ("demo-01", "demo-04", "demo-08", "demo-10", "demo-12")  # one of each category
SENTENCES = {  # written for this project; Apache-2.0
    "en": (
        "A man with a long white beard is sleeping on a wooden bench in the park while his dog lies next to him.",
        "Two children in red jackets are playing with a ball on the grass, and a woman in a blue dress is watching.",
        "A young woman with a bag over her shoulder is crossing a busy street in front of a yellow bus.",
        "Three brown dogs are running through the snow, and one of them is carrying a stick in its mouth.",
        "An old man in a hat is sitting in front of a small shop and reading a newspaper on a sunny day.",
    ),
    "de": (
        "Ein Mann mit langem weißem Bart schläft auf einer Holzbank im Park, während sein Hund neben ihm liegt.",
        "Zwei Kinder in roten Jacken spielen im Gras mit einem Ball, und eine Frau in einem blauen Kleid sieht zu.",
        "Eine junge Frau mit einer Tasche über der Schulter überquert vor einem gelben Bus eine belebte Straße.",
        "Drei braune Hunde laufen durch den Schnee, und einer von ihnen trägt einen Stock im Maul.",
        "Ein alter Mann mit Hut sitzt an einem sonnigen Tag vor einem kleinen Laden und liest eine Zeitung.",
    ),
}
_ERRORS, _OTHER_PROMPTS = 2.0, 0.5  # see ``problem``
_LAYERS = 0.05
_RUN_OF_TOKENS = 4  # tokens of a text are right or wrong together; so many count as one
_CAUSES = "wrong target revision, chat template, tokenizer, or tap layers?"


@dataclass(frozen=True)
class Seen:
    """Counters of some texts.

    Attributes:
        tokens_per_step: without the prefill, if there were steps behind it.
        acceptance_at: of the drafts with position 1, 2, .. the share that kept it.
        judged: how many drafts those were.
        layers_per_token: share of the layers that a step ran, the first step included.
        similarity: mean ROUGE-L between ids and reference ids.
        tokens: of the reference texts, by which the error of ``similarity`` is estimated.
    """

    tokens_per_step: float
    acceptance_at: list[float]
    judged: list[int]
    layers_per_token: float
    similarity: float
    tokens: int

    def text(self) -> str:
        """For people, in a line."""
        if self.acceptance_at:
            shares = ", ".join(f"{share:.2f}" for share in self.acceptance_at)
            return f"acceptance {shares} by position, {self.tokens_per_step:.2f} tokens per step"
        return f"likeness {self.similarity:.2f} to the target's texts, {self.layers_per_token:.2f} of the layers"


@dataclass
class Text:
    """What one prompt gave: counters of its steps, its ids, and those it is compared with."""

    ids: list[int] = field(default_factory=list)
    reference: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    depth: list[int] = field(default_factory=list)
    layers: list[float] = field(default_factory=list)
    first: int = 0


def count(texts: Sequence[Text]) -> Seen:
    """The counters of at least one text, rounded to four decimals."""
    depths = [depth for text in texts for depth in text.depth]
    accepted = [count for text in texts for count in text.accepted]
    kept = metrics.acceptance(pd.DataFrame({"depth": depths, "drafted": depths, "accepted": accepted, "weight": 1.0}))
    shares = kept["acceptance_at"]
    layers = [share for text in texts for share in text.layers]
    behind = sum(len(text.layers) - 1 for text in texts)
    written = sum(len(text.ids) - (text.first if behind else 0) for text in texts)
    return Seen(
        round(written / (behind or len(layers)), 4),
        [round(share, 4) for share in shares],
        [sum(depth > place for depth in depths) for place in range(len(shares))],
        round(sum(layers) / len(layers), 4),
        round(sum(rouge_l(text.reference, text.ids) for text in texts) / len(texts), 4),
        sum(len(text.reference) for text in texts),
    )


def model_of(folder: Path, card: Mapping[str, Any]) -> Mapping[str, Any]:
    """The ``model`` group of the target of a checkpoint; a checkpoint that is a model is its own."""
    if adapted.is_difference(folder):
        return adapted.group_of(folder, card["model"]["name"])
    return {"name": str(folder)} if is_model(folder) else loading.named(card["model"]["name"])


def is_model(folder: Path) -> bool:
    """Whether a checkpoint is a model, in itself or as a difference of another one."""
    return (folder / MODEL_FILE).is_file() or adapted.is_difference(folder)


def load(folder: Path, card: Mapping[str, Any], paths: PathsConfig, dtype: str = "float32") -> Loaded:
    """The target of a checkpoint in 32 bit, in which the counters do not depend on the machine.

    Raises:
        UserError: it is not to be had.
    """
    return loading.load(model_of(folder, card), {"device": "auto", "dtype": dtype, "threads": None}, paths)


def write(folder: Path, loaded: Loaded) -> Seen:
    """Measure a checkpoint, and write what was seen into its card.

    Raises:
        UserError, ValueError: see ``measure``.
    """
    card = artifacts.read_card(folder) or {}
    found = measure(folder, card, loaded)
    files.write_json(folder / artifacts.CARD, card | {ENTRY: found.to_json()})
    return found.seen


def measure(
    folder: Path,
    card: Mapping[str, Any],
    loaded: Loaded,
    entry: Mapping[str, Any] | None = None,
    full: Sequence[Sequence[int]] | None = None,
) -> Entry:
    """Decode the fixed prompts greedily with a checkpoint.

    Args:
        folder: of the checkpoint.
        card: its card, which names the method.
        loaded: the target, or the model itself.
        entry: the earlier one of the card, whose settings and texts are used again.
        full: see ``full_texts``; None: decode them.

    Raises:
        UserError: settings that the method does not have.
        ValueError: the checkpoint does not fit.
    """
    entry = entry or {}
    alone = is_model(folder)
    method = dict(entry.get("settings") or _settings("autoregressive" if alone else card["definition"]["method"]))
    own = None if alone else folder
    decoder = instantiate.build_decoder(method, loaded.lm, SamplingConfig(), checkpoint=own)
    names, rows = fixed_prompts(loaded)
    texts = _decode(decoder, rows, loaded)
    if alone:
        full = [list(map(int, ids.split())) for ids in entry.get("texts", ())] or [text.ids for text in texts]
    for text, reference in zip(texts, full or full_texts(loaded), strict=True):
        text.reference = list(reference)
    facts = {"prompts": names, "max_new_tokens": NEW_TOKENS, "dtype": str(loaded.lm.dtype).removeprefix("torch.")}
    return Entry(facts, method, count(texts), [text.ids for text in texts] if alone else None)


@dataclass(frozen=True)
class Entry:
    """What ``measure`` found, and how it is written into a card."""

    facts: dict[str, Any]
    settings: dict[str, Any]
    seen: Seen
    texts: list[list[int]] | None

    def to_json(self) -> dict[str, Any]:
        own = {"texts": [" ".join(map(str, ids)) for ids in self.texts]} if self.texts else {}
        return self.facts | {"settings": self.settings} | asdict(self.seen) | own


def full_texts(loaded: Loaded) -> list[list[int]]:
    """What the target writes by itself after the fixed prompts."""
    return [text.ids for text in _decode(Autoregressive(loaded.lm, Sampling()), fixed_prompts(loaded)[1], loaded)]


def fixed_prompts(loaded: Loaded) -> tuple[list[str], list[torch.Tensor]]:
    """Names and ids of the prompts for a model."""
    if loaded.kind == "seq2seq":
        language = loaded.languages[0] if loaded.languages and loaded.languages[0] in SENTENCES else "en"
        names = [f"sentence-{language}-{place + 1}" for place in range(len(SENTENCES[language]))]
        asked = list(SENTENCES[language])
    else:
        examples = {example.id: example for example in Demo().load()}
        names, asked = list(PROMPTS), [examples[name].turns[0] for name in PROMPTS]
    room = max(1, loaded.lm.max_positions // 2)
    encoded = [prompts.encode(loaded.tokenizer, [{"role": "user", "content": text}])[-room:] for text in asked]
    return names, [torch.tensor(ids, device=loaded.lm.device) for ids in encoded]


def _settings(name: str) -> dict[str, Any]:
    """The method with its default settings, and those by which its checkpoint is checked."""
    group = compose.compose([f"method={name}", "dataset=demo"]).method
    return {key: value for key, value in group.items() if key != "checkpoint"} | dict(
        instantiate.method_class(group).checked_with
    )


def _decode(decoder: Decoder, rows: list[torch.Tensor], loaded: Loaded) -> list[Text]:
    limit = min(NEW_TOKENS, max(1, loaded.lm.max_positions // 2))
    at_once = decoder.max_batch or len(rows)
    texts: list[Text] = []
    for start in range(0, len(rows), at_once):
        batch = rows[start : start + at_once]
        noted = [Text() for _ in batch]

        def note(step: Step, open_rows: Collection[int], noted: list[Text] = noted) -> None:
            for row in open_rows:
                text = noted[row]
                text.first = text.first if text.layers else len(step.tokens[row])
                text.accepted.append(step.accepted[row])
                text.depth.append(step.depth[row])
                text.layers.append(step.layers[row])

        for text, ids in zip(noted, generate(decoder, batch, limit, loaded.lm.eos_ids, watch=note), strict=True):
            text.ids = ids
        texts += noted
    return texts


# ------------------------------------------------------------------------------------------------------- comparing


def doubt(cfg: RunConfig, method: Decoder, part: Prepared | None, warm: Sequence[Sample]) -> str | None:
    """What the warm-up of a run says against the checkpoint of its method, if anything.

    Args:
        part: the checkpoint. Its card is compared where the run decodes greedily with the settings of the card.
        warm: samples of both arms.
    """
    written = [sample for sample in warm if sample.arm == "method" and sample.error is None]
    if not written:
        return None
    if own := method.acceptance_warning([metrics.kept_at(sample) for sample in written]):
        return own
    entry = ((part and part.card) or {}).get(ENTRY)
    if part is None or not entry or cfg.sampling.temperature or not _same_settings(cfg.method, entry["settings"]):
        return None
    full = {(s.prompt_id, s.repeat): s.output_ids for s in warm if s.arm == "baseline"}
    seen = count([_text(sample, full.get((sample.prompt_id, sample.repeat), [])) for sample in written])
    return problem(part.folder.name, entry, seen, same_prompts=False)


def _same_settings(method: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    return all(method.get(key) == value for key, value in settings.items() if key != "name")


def _text(sample: Sample, reference: list[int]) -> Text:
    counters = (sample.step_accepted, sample.step_depth, sample.step_layers)
    return Text(sample.output_ids, reference, *counters, first=sample.step_tokens[0] if sample.step_tokens else 0)


def problem(name: str, entry: Mapping[str, Any], seen: Seen, *, same_prompts: bool) -> str | None:
    """A warning if a checkpoint does clearly less than its card says, else None.

    A share is too low if it is two standard errors, over the drafts or tokens seen, below the card's or, on other
    prompts, below half of the card's: between data sets the acceptance of the project's heads differs by less. The
    errors also allow for a machine that decides near-ties otherwise. Other prompts are judged by the first position
    alone, or by the likeness of texts where nothing is drafted.

    Args:
        name: of the checkpoint.
        entry: of its card.
        seen: counted now.
        same_prompts: as the entry's, and the same number of tokens.
    """
    card = Seen(**{key: entry[key] for key in Seen.__dataclass_fields__})
    where = "on the same prompts" if same_prompts else f"on {len(entry['prompts'])} fixed prompts"
    advice = "" if same_prompts else " python -m bench doctor checkpoints=true compares on the same prompts."
    found = _drafts(card, seen, same_prompts) if card.acceptance_at else _writes(card, seen, same_prompts)
    return f"{name} {found[0]}, its card says {found[1]} {where}: {_CAUSES}{advice}" if found else None


def _drafts(card: Seen, seen: Seen, same_prompts: bool) -> tuple[str, str] | None:
    """The first position with too low an acceptance: what was seen, and what the card has."""
    for place, expected in enumerate(card.acceptance_at[: None if same_prompts else 1]):
        here = place < len(seen.judged)
        share, n = (seen.acceptance_at[place], seen.judged[place]) if here else (0.0, card.judged[place])
        if (here or same_prompts) and share < _least(expected, n, same_prompts):
            return f"accepts {share:.2f} at position {place + 1}", f"{expected:.2f}"
    return None


def _writes(card: Seen, seen: Seen, same_prompts: bool) -> tuple[str, str] | None:
    """The same for texts and, on the same prompts, the layers; there more than the card says is wrong, too."""
    n = min(seen.tokens, card.tokens) // _RUN_OF_TOKENS
    if not n:
        return None
    least, most = _least(card.similarity, n, same_prompts), 1 - _least(1 - card.similarity, n, same_prompts)
    if seen.similarity < least or (same_prompts and seen.similarity > most):
        return f"writes texts with a likeness of {seen.similarity:.2f} to the target's", f"{card.similarity:.2f}"
    if same_prompts and abs(seen.layers_per_token - card.layers_per_token) > _LAYERS:
        return f"runs {seen.layers_per_token:.2f} of the layers for a token", f"{card.layers_per_token:.2f}"
    return None


def _least(share: float, n: int, same_prompts: bool) -> float:
    """The lowest share of ``n`` that is believed where the card has ``share``."""
    expected = share if same_prompts else _OTHER_PROMPTS * share
    return expected - _ERRORS * math.sqrt(expected * (1 - expected) / n)
