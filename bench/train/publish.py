"""Store a finished checkpoint in fewer bits per weight, and note in its card what that costs.

``python -m bench train check FOLDER ...`` writes the ``acceptance_check`` of finished checkpoints into their cards.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from bench.config import compose, instantiate
from bench.config.schema import RunConfig, SamplingConfig
from bench.errors import OK, UserError, guard
from bench.measure import acceptance_check, agreement
from bench.models import artifacts, loading
from bench.models.source import Loaded
from bench.scoring.translation import TranslationScorer
from bench.tasks import MTBench, corpus, prompts
from bench.tasks.corpus import Dialogue, Texts
from bench.tasks.sources import Sources
from bench.utils import files
from methods.decoder import Step, generate
from methods.engine.checkpoint_files import pack_file

FORMS: dict[str, tuple[int, int | None]] = {  # bits of a weight, weights that share a scale (None: a row)
    "int8": (8, None),
    "int6": (6, 64),
    "int5": (5, 64),
    "int4": (4, 64),
}
_PAIRS, _PROMPTS, _ROWS, _TOKENS = 300, 16, 32, 64  # judged by, decoded at once, and most of a text


def publish(folder: Path, form: str, without: Sequence[str], texts: Texts, cfg: RunConfig) -> str:
    """Pack the weights of a checkpoint in place; the card gets its quality before and after.

    Args:
        form: one of ``FORMS``.
        without: beginnings of names of tensors to leave out.
        texts: it was trained on; it is judged by their validation pairs, by MT-bench if they are public requests, else
            by some of their own.
        cfg: model and hardware.

    Returns:
        A line for people.

    Raises:
        UserError: it is packed already.
    """
    card = artifacts.read_card(folder) or {}
    if "stored" in card:
        raise UserError(f"{folder} is stored as {card['stored']['form']}. Add force=true to make it again.")
    dialogues = _dialogues(texts, cfg)
    before, written = _measure(folder, card, cfg, dialogues)
    with TemporaryDirectory(dir=folder.parent) as place:  # beside it: the card may refer to files of other folders
        packed = Path(place)
        shutil.copytree(folder, packed, dirs_exist_ok=True)
        weights = list(packed.rglob("*.safetensors"))
        for file in weights:
            pack_file(file, *FORMS[form], without)
        after, now = _measure(packed, card, cfg, dialogues)
        after["same_texts"] = round(sum(map(list.__eq__, written, now)) / len(now), 4)
        parts = artifacts.files(packed)
        stored = {"form": form, "without": list(without), "sha256": card["sha256"], "before": before, "after": after}
        card |= {"sha256": files.digest(parts), "bytes": {name: path.stat().st_size for name, path in parts.items()}}
        for file in weights:
            os.replace(file, folder / file.relative_to(packed))
        files.write_json(folder / artifacts.CARD, card | {"stored": stored})
    return f"{folder} is stored as {form}: {before} before, {after} after."


def _dialogues(texts: Texts, cfg: RunConfig) -> list[Dialogue]:
    sources = Sources(cfg.paths.data, cfg.paths.cache)
    if name := corpus.validation_of(texts.names[0]):
        return list(corpus.read(name, sources=sources).dialogues[:_PAIRS])
    if texts.names[0] in corpus.KNOWN:
        return [Dialogue(example.turns[:1], "") for example in MTBench(limit=_PROMPTS).load(sources)]
    return list(texts.dialogues[:_PROMPTS])


def _measure(
    folder: Path, card: dict[str, Any], cfg: RunConfig, dialogues: Sequence[Dialogue]
) -> tuple[dict[str, float], list[list[int]]]:
    """Quality and steps of what a checkpoint writes, and the ids of every text."""
    is_model = (folder / acceptance_check.MODEL_FILE).is_file()
    model = {"name": str(folder)} if is_model else cfg.model
    loaded = loading.load(model, asdict(cfg.hardware), cfg.paths)
    method = "autoregressive" if is_model else card["definition"]["method"]
    group = compose.compose([f"method={method}", "dataset=demo"]).method
    decoder = instantiate.build_decoder(group, loaded.lm, SamplingConfig(), checkpoint=folder)
    asked = [torch.tensor(_ids(dialogue, loaded), device=loaded.lm.device) for dialogue in dialogues]
    texts: list[list[int]] = []
    layers: list[float] = []

    def note(step: Step, rows: Collection[int]) -> None:
        layers.extend(step.layers[row] for row in rows)

    for start in range(0, len(asked), _ROWS):
        texts += generate(decoder, asked[start : start + _ROWS], _TOKENS, loaded.lm.eos_ids, watch=note)
    steps = len(layers)
    found = {"tokens_per_step": round(sum(map(len, texts)) / steps, 3), "layers": round(sum(layers) / steps, 3)}
    if loaded.kind == "seq2seq":
        lines = loaded.tokenizer.batch_decode(texts, skip_special_tokens=True)
        pairs = [(dialogue.answer, line) for dialogue, line in zip(dialogues, lines, strict=True)]
        found["bleu"] = round(TranslationScorer().aggregate(pairs)["bleu"] or 0.0, 2)
    else:
        checks = [agreement.check(loaded.lm, ids.tolist(), text, 0.0) for ids, text in zip(asked, texts, strict=True)]
        found["agreement"] = round(sum(check.exact for check in checks) / sum(map(len, texts)), 4)
    return found | {"prompts": len(asked)}, texts


def _ids(dialogue: Dialogue, loaded: Loaded) -> list[int]:
    """Of a prompt; of plain text, which asks nothing, its beginning."""
    if dialogue.said[0]:
        return prompts.encode(loaded.tokenizer, dialogue.messages)[-loaded.lm.max_positions // 2 :]
    return list(loaded.tokenizer(dialogue.answer)["input_ids"][:_TOKENS])


def main(words: Sequence[str]) -> int:
    """Measure the ``acceptance_check`` of the folders named, and write it into their cards; returns the exit code."""
    return guard(lambda: _check_again([Path(word) for word in words]), measures=False)


def _check_again(folders: Sequence[Path]) -> int:
    missing = [str(folder) for folder in folders if not artifacts.read_card(folder)]
    if missing or not folders:
        raise UserError(
            f"train check needs folders with a card, got {', '.join(missing) or 'none'}. Name some: "
            "python -m bench train check data/checkpoints/*"
        )
    paths = compose.compose([]).paths
    for folder in folders:
        loaded = acceptance_check.load(folder, artifacts.read_card(folder) or {}, paths)
        print(f"{folder}: {acceptance_check.write(folder, loaded).text()}", flush=True)
    return OK
