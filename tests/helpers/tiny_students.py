"""Tiny teachers of both families, and random students of it, for the tests of the non-autoregressive family."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    MarianConfig,
    MarianMTModel,
    PegasusConfig,
    PegasusForConditionalGeneration,
)

from methods.engine.seq2seq_lm import Seq2SeqLM
from methods.non_autoregressive.network import Network, Shape
from methods.non_autoregressive.student import Batch, Student, save_student
from methods.training.interface import TrainingContext

VOCABULARY = 37
HONESTY = {  # what every record of the family says
    "data",
    "rescored_by_teacher",
    "repeats_collapsed",
    "passes_per_token",
    "decoder_layer_passes_per_token",
    "decoder_layer_passes_per_token_of_the_teacher",
    "rescoring_passes_per_sentence",
    "rescoring_seconds_per_sentence",
    "repeated_tokens",
    "empty_texts",
}
FAMILIES: dict[str, tuple[Any, Any]] = {
    "marian": (MarianConfig, MarianMTModel),
    "pegasus": (PegasusConfig, PegasusForConditionalGeneration),
}


def network(dtype: torch.dtype = torch.float64, seed: int = 0, family: str = "marian", **options: Any) -> Any:
    """Random, with sharp distributions; ``options`` of its config."""
    configuration, architecture = FAMILIES[family]
    special: dict[str, Any] = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "d_model": 16,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 24,
        "decoder_ffn_dim": 24,
        "max_position_embeddings": 48,
        "activation_function": "relu",
        "dropout": 0.0,
        "scale_embedding": True,
        "forced_eos_token_id": None,
    }
    config = configuration(**{**shape, **special, **options})
    torch.manual_seed(seed)
    model: Any = architecture(config).to(dtype).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.dim() > 1:
                scale = 1.0 if len(parameter) == VOCABULARY else 0.15  # small updates: states differ by their inputs
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * scale)
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.dim() == 1:  # no norm is another's by chance
                parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.02)
    model.generation_config = GenerationConfig(**special, bad_words_ids=[[0], [2]])
    return model.requires_grad_(False)


def teacher(dtype: torch.dtype = torch.float64, seed: int = 0, family: str = "marian") -> Seq2SeqLM:
    found = Seq2SeqLM.from_hf(network(dtype, seed, family), keep_hf=True)
    assert isinstance(found, Seq2SeqLM)
    return found


def student(kind: type[Student], target: Seq2SeqLM, own: bool = False, **options: Any) -> Any:
    """With the teacher's weights; everything of its own is random, so that nothing is the same by chance."""
    hf: Any = target.hf
    torch.manual_seed(3)
    shape, embedding = Shape.of(target), hf.get_input_embeddings().weight.detach()
    network = Network(shape, embedding, own, **kind.network_options(options))
    network.start_from(hf)
    made = kind(network, **options)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if not name.startswith("network.") or ".positional." in name:
                parameter.add_(torch.randn(parameter.shape) * 0.5)
        if hasattr(made, "lengths"):  # different lengths, near the source's
            made.lengths.head.weight.mul_(0.3)
            made.lengths.head.bias.copy_(-(torch.arange(41.0) - 22).abs())
    return made.to(target.dtype).eval()


def save(made: Student, folder: Path, target: Seq2SeqLM, **facts: Any) -> Path:
    """As a part; it is rounded to 16 bit there."""
    folder.mkdir(parents=True, exist_ok=True)
    save_student(made, folder, target, {"data": "raw"} | facts)
    return folder


def sources(*lengths: int, seed: int = 1) -> list[Tensor]:
    """Random, each with its end."""
    generator = torch.Generator().manual_seed(seed)
    body = [torch.randint(3, VOCABULARY, (length - 1,), generator=generator) for length in lengths]
    return [torch.cat([row, torch.ones(1, dtype=torch.long)]) for row in body]


def batch_of(pairs: list[tuple[list[int], list[int]]], notes: list[list[int]] | None = None, width: int = 0) -> Batch:
    """Padded to the longest, or to ``width``."""

    def rows(side: list[list[int]]) -> Tensor:
        most = max(width, *map(len, side))
        return torch.tensor([row + [0] * (most - len(row)) for row in side])

    ours, theirs = [list(source) for source, _ in pairs], [list(target) for _, target in pairs]
    counts = [torch.tensor([len(row) for row in side]) for side in (ours, theirs)]
    return Batch(rows(ours), counts[0], rows(theirs), counts[1], None if notes is None else rows(notes))


class Words:
    """A tokenizer: ids as text."""

    def __call__(self, text: Any, **_: Any) -> dict[str, Any]:
        one = isinstance(text, str)
        rows = [[*map(int, line.split()), 1] for line in ([text] if one else text)]
        return {"input_ids": rows[0] if one else rows}

    def batch_decode(self, rows: Any, skip: bool = False) -> list[str]:
        return [" ".join(str(token) for token in row if token != 1) for row in rows]


def context(target: Seq2SeqLM, pairs: Sequence[tuple[list[int], list[int]]], root: Path) -> TrainingContext:
    """For a student of this teacher and these ids; the first three pairs are for validation."""
    texts = [(" ".join(map(str, source[:-1])), " ".join(map(str, goal))) for source, goal in pairs]
    (root / "part").mkdir(parents=True, exist_ok=True)
    shared = {"model": target, "tokenizer": Words(), "pairs": texts, "validation": texts[:3]}
    return TrainingContext(output=root / "part", shared_cache=root / "common", **shared)
