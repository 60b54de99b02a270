"""A small language model of bytes for early exit: for experiments and tests.

Early exit works on models that were trained for it, and hardly on others. This one is trained on any text in minutes:
eight layers, 1.6 million weights, one token per byte, CALM's weighted loss (``methods.training.layer_losses``). Every
layer is read by the model's own norm and output matrix:

    python -m bench train method=character_model corpus=shakespeare
    python -m bench model=shakespeare_characters method=calm method.head=lens 'method.exits=[1,2,3,4,5,6,7]' \\
        dataset=jsonl dataset.path=FOLDER/prompts.jsonl dataset.limit=40 max_new_tokens=48 \\
        method.calibration.tolerance=0.05 method.calibration.corpus=FOLDER/prompts.jsonl

FOLDER is the model's. ``prompts.jsonl`` has pieces of half its length from the held-out text; the calibration takes
those that the run does not use.

``exits`` chooses the loss: ``calm``, ``free``, ``hash`` (each byte takes the layers that a table says, in training and
in decoding; the table is saved with the model, for ``method.checkpoint`` of ``hash_ee``), or ``last``, the last layer
only, for comparison. ``table`` is the kind of that table; clustered and learnt ones need a model of bytes, whose
embeddings are clustered and whose exits say how soon a byte settles:

    python -m bench train method=character_model train.exits=hash train.table=learnt model=shakespeare_characters

The card says how good each exit is over held-out text, and the layers per token by confidence.

On Shakespeare's works layers 1 to 7 agree with the last one on 66, 79, 85, 90, 92, 95 and 97 % of the bytes, and exits
at a confidence of 0.7 are right in 99 % of the cases. The loss of CALM has another cause: bytes that take all layers
read keys and values projected from states that exited early, and 7 % of them change. FREE (``method=free
method.head=lens method.depth=3``) computes those later and does not have this loss.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Generator, Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from methods.base_models.translation import require_multiple
from methods.decoder import generate
from methods.early_exit.calm import Calm
from methods.early_exit.hash_tables import Corpus, HashTable, Kind, even_depths, make_table, settling_depths
from methods.engine.byte_tokenizer import byte_tokenizer
from methods.engine.causal_lm import CausalLM
from methods.engine.generation import answer
from methods.engine.sampling import Sampling
from methods.training.exit_quality import judge, quality, summary
from methods.training.interface import Trainable, TrainingContext, require
from methods.training.layer_losses import collected, frozen_from, make_loss
from methods.training.trainer import Loss, Point, Trainer, TrainingConfig, added, autocast, discard

ExitLoss = Literal["calm", "free", "hash", "last"]

_HELD_OUT = 10  # the last tenth of the text is held out
_JUDGED = 64  # windows of it for the evaluation of exits
_TEXTS = 100  # texts that are generated to measure the loss of exits
_THRESHOLDS = (0.9, 0.7, 0.5, 0.35, 0.25, 0.15, 0.1, 0.05)
_BUCKETS = 4  # of the table of ``hash``
_OF_A_MODEL = ("clustered", "learnt")  # tables that another model is asked for
_SETTLED = 512  # texts over which its exits are judged for a learnt one
_PROMPTS, _MOST_PROMPTS = "prompts.jsonl", 600
_EMBEDDED, _THETA = 0.1, 100.0  # deviation of the embeddings; base of the rotary wavelengths, for texts of 100 bytes


@dataclass
class CharacterModel(Trainable):
    """Trains the model.

    Args:
        exits: the loss, see the module's docstring.
        layers, width, heads: of the network; its feed-forward layers have 8/3 of the width, rounded up to 8.
        positions: longest text in bytes, and length of the texts of a step.
        shallow, distillation: of ``free``.
        mixed: with ``calm``, share of the texts of a step whose tokens exit at random depths, so that later tokens
            learn to read keys and values of early states; the paper has none.
        table: with ``hash``, its kind, see ``methods.early_exit.hash_tables``.
        recipe: of the training; ``batch_size`` counts texts.

    Raises:
        ValueError: a number out of range.
    """

    makes = "model"
    learns_from = "pairs"
    description = "a language model of bytes that can be left after every layer"
    duration = "ten minutes on a CPU core"
    corpus = "shakespeare"
    teaching = "train.table=clustered and train.table=learnt"
    teacher_kind = "causal"
    usual_teacher = "shakespeare_characters"

    exits: ExitLoss = "calm"
    layers: int = 8
    width: int = 128
    heads: int = 4
    positions: int = 96
    shallow: int | None = None
    distillation: float = 0.5
    mixed: float = 0.5
    table: Kind = "frequency"
    recipe: TrainingConfig = field(
        default_factory=lambda: TrainingConfig(steps=1500, batch_size=32, learning_rate=2e-3)
    )

    def __post_init__(self) -> None:
        require("at least 1", layers=self.layers, heads=self.heads, width=self.width)
        require("at least 2", positions=self.positions)
        require("from 0 to 1", mixed=self.mixed)
        require_multiple(self.width, 2 * self.heads)
        if self.table != "frequency" and self.exits != "hash":
            raise ValueError(
                f"table must be frequency with exits={self.exits}, which has no table, got {self.table}. Set "
                "train.exits=hash."
            )
        loss = self.exits if self.exits in ("calm", "free") else None
        self.layer_loss = make_loss(loss, self.layers, self.shallow, self.distillation) if loss else None

    @property
    def needs_model(self) -> bool:
        """See ``Trainable``: a model of bytes, for the tables that are made with one."""
        return self.table in _OF_A_MODEL

    def model_name(self, corpus: str) -> str:
        """``shakespeare_characters``, ``shakespeare_characters_hash``, ``shakespeare_characters_hash_learnt``."""
        table = "" if self.table == "frequency" else f"_{self.table}"
        return f"{corpus}_characters" + ("" if self.exits == "calm" else f"_{self.exits}") + table

    def fit(self, context: TrainingContext) -> dict[str, Any]:
        """See ``Trainable``."""
        tokenizer, recipe = byte_tokenizer(), self.recipe
        text = "\n".join("\n".join(filter(None, pair)) for pair in context.pairs)
        ids = torch.tensor(tokenizer(text)["input_ids"], device=context.device)
        split = len(ids) - len(ids) // _HELD_OUT
        if len(ids) - split <= self.positions:
            raise ValueError(
                f"The corpus must have at least {_HELD_OUT * (self.positions + 1)} bytes, got {len(ids)}. Name a "
                "larger one (corpus=...)."
            )
        train, held_out = ids[:split], ids[split:]
        table = self._table(context, train, len(tokenizer)) if self.exits == "hash" else None
        depths = None if table is None else torch.from_numpy(table.depths.astype("int64")).to(context.device)
        torch.manual_seed(context.seed)
        network = self.network(len(tokenizer)).to(context.device)
        data = f"{len(train)} bytes, {int((train * torch.arange(1, len(train) + 1, device=train.device)).sum())}"
        trainer = Trainer(recipe, network, context, data)

        def batch(step: int) -> Int[Tensor, "n W"]:
            return self.windows(train, torch.randint(len(train) - self.positions, (recipe.batch_size,)))

        def loss(texts: Int[Tensor, "n W"], step: int) -> Loss:
            return self.loss(network, texts, self.random_depths(texts) if depths is None else depths[texts[:, :-1]])

        def evaluate() -> Point:
            texts = self.windows(held_out, _spread(len(held_out) - self.positions, _JUDGED))
            with autocast(recipe.precision, context.device):
                found, parts = self.loss(network, texts, None if depths is None else depths[texts[:, :-1]])
            numbers = {name: float(value) for name, value in {"loss": added(found), **parts}.items()}
            point = {name: round(value, 4) for name, value in numbers.items()}
            return point, {f"held_out/{name}": value for name, value in numbers.items()}

        trainer.run(loss, batch, evaluate)
        network.half().save_pretrained(context.output)
        tokenizer.save_pretrained(context.output)
        if table is not None:
            table.save(context.output)
        lines = prompts_of(text.encode()[split:].decode(errors="ignore"), self.positions // 2)
        (context.output / _PROMPTS).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        discard(context.output)
        facts: dict[str, Any] = {"bytes": len(ids), "held_out_bytes": len(held_out), **trainer.facts}
        target = CausalLM.from_hf(network.float().requires_grad_(False), linear="plain")
        starts = len(held_out) - self.positions
        facts["exits"] = exits_of(target, self.windows(held_out, _spread(starts, _JUDGED)))
        if self.exits != "hash":
            texts = self.windows(held_out, _spread(starts, _TEXTS))
            facts["left_by_confidence"] = frontier(target, texts, self.positions)
        facts["summary"] = summary({"lens": facts["exits"]})
        return facts | ({} if table is None else {"table": table.facts, "table_sha256": table.checksum})

    def windows(self, ids: Int[Tensor, "N"], starts: Sequence[int] | Int[Tensor, "n"]) -> Int[Tensor, "n W"]:
        """Texts of one byte more than there are positions."""
        places = torch.as_tensor(starts)[:, None] + torch.arange(self.positions + 1)
        return ids[places.to(ids.device)]

    def random_depths(self, texts: Int[Tensor, "n W"]) -> Int[Tensor, "n w"] | None:
        """Random depths at which the tokens of a share of the texts exit, others at the end; None: all at the end."""
        count = round(self.mixed * self.recipe.batch_size) if self.exits == "calm" else 0
        if not count:
            return None
        depths = torch.randint(1, self.layers + 1, (len(texts), texts.shape[1] - 1), device=texts.device)
        depths[count:] = self.layers
        return depths

    def loss(self, network: Any, texts: Int[Tensor, "n W"], depths: Int[Tensor, "n w"] | None) -> Loss:
        """Over all layers, or the last one; tokens exit at ``depths``."""
        read, wanted, model = texts[:, :-1], texts[:, 1:].flatten(), network.model

        def cross_entropy(ready: Float[Tensor, "n D"]) -> Float[Tensor, ""]:
            return F.cross_entropy(network.lm_head(ready).float(), wanted)

        exiting = nullcontext() if depths is None else frozen_from(model.layers, depths)
        with exiting, collected(model.layers) as states:
            last = model(read, use_cache=False).last_hidden_state
        if self.layer_loss is None:
            return cross_entropy(last.flatten(0, 1)), {}
        return self.layer_loss([s.flatten(0, 1) for s in states], lambda state: cross_entropy(model.norm(state)))

    def network(self, tokens: int) -> Any:
        """With PyTorch's own initialisation, but small embeddings, so that the first layer matters."""
        config = LlamaConfig(
            vocab_size=tokens,
            hidden_size=self.width,
            intermediate_size=-(-8 * self.width // 24) * 8,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            max_position_embeddings=self.positions,
            tie_word_embeddings=False,
            rope_parameters={"rope_type": "default", "rope_theta": _THETA},
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
        network = LlamaForCausalLM(config)
        for module in network.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                module.reset_parameters()
        with torch.no_grad():
            network.model.embed_tokens.weight.mul_(_EMBEDDED)
        return network

    def _table(self, context: TrainingContext, ids: Int[Tensor, "N"], tokens: int) -> HashTable:
        depths = even_depths(min(_BUCKETS, self.layers), self.layers)
        embeddings = settling = None
        if self.table == "clustered":
            target = _of_bytes(context.target, tokens)
            embeddings = target.embed(torch.arange(tokens, device=target.device)).float().cpu().numpy()
        if self.table == "learnt":
            width = min(self.positions, context.target.max_positions)
            starts = _spread(len(ids) - width, _SETTLED)
            texts = torch.stack([ids[start : start + width] for start in starts.tolist()])
            settling = settled_after(_of_bytes(context.target, tokens), texts)
        return make_table(
            self.table,
            depths,
            Corpus.of([ids.tolist()], tokens),
            self.layers,
            balance="mass",
            seed=context.seed,
            embeddings=embeddings,
            settling=settling,
        )


def _of_bytes(model: CausalLM, tokens: int) -> CausalLM:
    if model.vocab_size != tokens:
        raise ValueError(
            f"The model of the table must have one token per byte, {tokens} in all, got {model.name} with "
            f"{model.vocab_size}. Set model=shakespeare_characters."
        )
    return model


@torch.inference_mode()
def settled_after(target: CausalLM, texts: Int[Tensor, "n W"]) -> Float[np.ndarray, "V"]:
    """By byte, the share of the layers after which the target's exits, read by the lens, settle; over whole texts."""
    rows, layers = list(texts.to(target.device)), range(target.n_layers)
    output = target.prefill(rows, target.new_cache(len(rows), len(rows[0])), hidden_layers=layers)
    exits = {layer + 1: output.hidden_layers[layer].flatten(0, 1) for layer in layers[:-1]}
    seen = judge(target.head, {"": lambda _, states: target.norm(states)}, exits, output.hidden.flatten(0, 1))[""]
    agrees = torch.stack([agreed for agreed, _ in seen.values()], dim=1).cpu().numpy()
    read = texts.flatten().cpu().numpy()
    return settling_depths(read, agrees, list(seen), target.n_layers, target.vocab_size) / target.n_layers


def prompts_of(text: str, length: int) -> list[dict[str, Any]]:
    """ASCII pieces of a text as prompts, with their continuations, as lines of a data set or a corpus."""
    starts = _spread(max(1, len(text) - 2 * length + 1), _MOST_PROMPTS).tolist()
    halves = [(text[start : start + length], text[start + length : start + 2 * length]) for start in starts]
    plain = [
        (first, second) for first, second in halves if (first + second).isascii() and first.strip() and second.strip()
    ]
    return [
        {"question_id": number, "category": "held_out", "turns": [first], "reference": [second]}
        for number, (first, second) in enumerate(plain)
    ]


@torch.inference_mode()
def exits_of(target: CausalLM, texts: Int[Tensor, "n W"]) -> dict[str, dict[str, float]]:
    """How good each layer is, read by the lens, over whole texts."""
    rows, layers = list(texts[:, :-1]), range(target.n_layers)
    output = target.prefill(rows, target.new_cache(len(rows), len(rows[0])), hidden_layers=layers)
    exits = {layer + 1: output.hidden_layers[layer].flatten(0, 1) for layer in layers[:-1]}
    seen = judge(target.head, {"": lambda _, states: target.norm(states)}, exits, output.hidden.flatten(0, 1))[""]
    return {str(depth): quality(*found) for depth, found in seen.items()}


def frontier(target: CausalLM, texts: Int[Tensor, "n W"], positions: int) -> list[dict[str, float]]:
    """By threshold of CALM with every layer an exit: layers per token, and the loss on second halves of texts."""
    prompts = [text[: positions // 2] for text in texts]
    limit = positions - positions // 2
    whole = answer(target, prompts, limit, Sampling(), Generator(target.device))
    found = []
    for threshold in _THRESHOLDS:
        decoder = Calm(target, Sampling(), threshold, exits=range(1, target.n_layers), head="lens")
        written = generate(decoder, prompts, limit)
        counts = decoder.counters.exits
        losses = [1 - overlap(ours, theirs) for ours, theirs in zip(written, whole, strict=True)]
        layers = sum(depth * count for depth, count in counts.items()) / sum(counts.values())
        exact = sum(ours == theirs for ours, theirs in zip(written, whole, strict=True)) / len(whole)
        point = {"threshold": threshold, "layers": layers, "loss": sum(losses) / len(losses), "exact": exact}
        found.append({name: round(value, 4) for name, value in point.items()})
    return found


def overlap(first: Sequence[int], second: Sequence[int]) -> float:
    """ROUGE-L of two texts of tokens: F1 of their longest common subsequence."""
    lengths = [0] * (len(second) + 1)
    for token in first:
        before = 0
        for place, other in enumerate(second, 1):
            kept = lengths[place]
            lengths[place] = before + 1 if token == other else max(lengths[place], lengths[place - 1])
            before = kept
    return 2 * lengths[-1] / (len(first) + len(second)) if first and second else 0.0


def _spread(most: int, count: int) -> Int[Tensor, "n"]:
    """Places evenly spread from 0 to below ``most``."""
    return torch.linspace(0, most - 1, min(count, most)).long()
