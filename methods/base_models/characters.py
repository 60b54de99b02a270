"""A small language model of bytes that is trained to be left early: for trying exits out, and for tests.

Early exit works on models that were trained to exit, and on others hardly. This one is made from any text in minutes:
eight layers, 1.6 million weights, one token per byte, CALM's weighted loss (``methods.training.layer_losses``). Every
layer of it is read by the model's own norm and output matrix:

    python -m bench.train method=character_model corpus=shakespeare
    python -m bench model=shakespeare_characters method=calm method.head=lens 'method.exits=[1,2,3,4,5,6,7]' \\
        dataset=jsonl dataset.path=FOLDER/prompts.jsonl dataset.limit=40 max_new_tokens=48 \\
        method.calibration.tolerance=0.05 method.calibration.corpus=FOLDER/prompts.jsonl

FOLDER is the model's. Beside it lie prompts of half its length from the text that was held out; the calibration takes
those that the run does not ask.

``exits`` chooses the loss: ``calm``, ``free``, ``hash`` (each byte takes the layers that a table gives it, in training
as in decoding; the table lies beside the model and is what ``method.checkpoint`` of ``hash_ee`` names), or ``last``,
which trains the last layer alone, for comparison. The card says how good each exit is over text that was held out, and
how many layers a token takes when it is left by confidence.

On Shakespeare's works layers 1 to 7 agree with the last one on 66, 79, 85, 90, 92, 95 and 97 % of the bytes, and who
leaves at a confidence of 0.7 is right in 99 % of the cases. What CALM loses is lost elsewhere: bytes that take all
layers read keys and values that were projected from states that left early, and 7 % of them come out otherwise. FREE
(``method=free method.head=lens method.depth=3``) computes those later and does not lose them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Generator, Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from methods.decoder import generate
from methods.early_exit.calm import Calm
from methods.early_exit.hash_tables import Corpus, HashTable, even_depths, make_table
from methods.early_exit.training_states import Recipe
from methods.engine.byte_tokenizer import byte_tokenizer
from methods.engine.causal_lm import CausalLM
from methods.engine.generation import answer
from methods.engine.sampling import Sampling
from methods.training.exit_quality import judge, quality, summary
from methods.training.interface import Foundry
from methods.training.layer_losses import LayerLoss, collected, frozen_from, make_loss
from methods.training.trainer import Loop, autocast, discard

Loss = Literal["calm", "free", "hash", "last"]

_HELD_OUT = 10  # the last tenth of the text is held out
_JUDGED = 64  # windows of it that exits are judged over
_TEXTS = 100  # texts that are written to see what exits lose
_THRESHOLDS = (0.9, 0.7, 0.5, 0.35, 0.25, 0.15, 0.1, 0.05)
_BUCKETS = 4  # of the table of ``hash``
_PROMPTS, _MOST_PROMPTS = "prompts.jsonl", 600
_EMBEDDED, _THETA = 0.1, 100.0  # deviation of the embeddings; base of the rotary wavelengths, for texts of 100 bytes


class CharacterModel:
    """Makes the model.

    Args:
        exits: the loss, see the head of this file.
        layers, width, heads: of the network; its feed-forward layers have 8/3 of the width, rounded up to 8.
        positions: longest text, in bytes, and length of what a step learns from.
        shallow, distillation: of ``free``.
        mixed: with ``calm``, share of the texts of a step whose tokens leave at depths that are drawn, so that later
            tokens learn to read keys and values of states that left early; the paper has none.
        recipe: of the training; ``batch_size`` counts texts.

    Raises:
        ValueError: a number out of range.
    """

    prepares: ClassVar[str] = "a language model of bytes that can be left behind every layer"
    takes: ClassVar[str] = "ten minutes on a CPU core"
    corpus: ClassVar[str] = "shakespeare"
    validation: str | None = None
    learns_from_teacher: bool = False

    def __init__(
        self,
        exits: Loss = "calm",
        layers: int = 8,
        width: int = 128,
        heads: int = 4,
        positions: int = 96,
        shallow: int | None = None,
        distillation: float = 0.5,
        mixed: float = 0.5,
        recipe: Recipe | None = None,
    ) -> None:
        if min(layers, heads) < 1 or positions < 2 or width < 1 or width % (2 * heads) or not 0 <= mixed <= 1:
            raise ValueError(
                f"layers={layers}, width={width}, heads={heads}, positions={positions}, mixed={mixed:g} came; at least "
                "1, two positions, a width that twice the heads divide, and a share from 0 to 1 are needed."
            )
        self.exits, self.layers, self.width, self.heads, self.positions = exits, layers, width, heads, positions
        self.layer_loss = make_loss(exits, layers, shallow, distillation) if exits in ("calm", "free") else None
        self.mixed = mixed if exits == "calm" else 0.0
        self.recipe = recipe or Recipe(steps=1500, batch_size=32, learning_rate=2e-3)

    def model_name(self, corpus: str) -> str:
        """``shakespeare_characters``, ``shakespeare_characters_hash``."""
        return f"{corpus}_characters" + ("" if self.exits == "calm" else f"_{self.exits}")

    def fit(self, foundry: Foundry) -> dict[str, Any]:
        """See ``methods.training.interface.ModelMaker``."""
        tokenizer = byte_tokenizer()
        text = "\n".join("\n".join(filter(None, pair)) for pair in foundry.pairs)
        ids = torch.tensor(tokenizer(text)["input_ids"], device=foundry.device)
        split = len(ids) - len(ids) // _HELD_OUT
        if len(ids) - split <= self.positions:
            raise ValueError(
                f"The corpus has {len(ids)} bytes; at least {_HELD_OUT * (self.positions + 1)} are needed. Name a "
                "larger one (corpus=...)."
            )
        table = self._table(ids[:split], len(tokenizer), foundry.seed) if self.exits == "hash" else None
        torch.manual_seed(foundry.seed)
        network = self.network(len(tokenizer)).to(foundry.device)
        course = _Course(network, ids[:split], ids[split:], self, table, foundry)
        course.run()
        network.half().save_pretrained(foundry.folder)
        tokenizer.save_pretrained(foundry.folder)
        if table is not None:
            table.save(foundry.folder)
        lines = prompts_of(text.encode()[split:].decode(errors="ignore"), self.positions // 2)
        (foundry.folder / _PROMPTS).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        discard(foundry.folder)
        facts: dict[str, Any] = {
            "bytes": len(ids),
            "held_out_bytes": len(ids) - split,
            "parameters": sum(p.numel() for p in network.parameters()),
            "steps": course.step,
            "curve": course.curve,
        }
        target = CausalLM.from_hf(network.float().requires_grad_(False), linear="plain")
        windows = course.windows(ids[split:], _spread(len(ids) - split - self.positions, _JUDGED))
        facts["exits"] = exits_of(target, windows)
        if self.exits != "hash":
            starts = _spread(len(ids) - split - self.positions, _TEXTS)
            facts["left_by_confidence"] = frontier(target, course.windows(ids[split:], starts), self.positions)
        facts["summary"] = summary({"lens": facts["exits"]})
        return facts | ({} if table is None else {"table": table.facts, "table_sha256": table.checksum})

    def network(self, tokens: int) -> Any:
        """With random weights of PyTorch's own sizes, but small embeddings, so that the first layer has a say."""
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

    def _table(self, ids: Int[Tensor, "N"], tokens: int, seed: int) -> HashTable:
        depths = even_depths(min(_BUCKETS, self.layers), self.layers)
        corpus = Corpus.of([ids.tolist()], tokens)
        return make_table("frequency", depths, corpus, self.layers, balance="mass", seed=seed)


class _Course(Loop):
    def __init__(
        self,
        network: Any,
        train: Int[Tensor, "N"],
        held_out: Int[Tensor, "M"],
        maker: CharacterModel,
        table: HashTable | None,
        foundry: Foundry,
    ) -> None:
        self.network, self.train, self.held_out, self.recipe = network, train, held_out, maker.recipe
        self.positions = maker.positions
        self.layer_loss: LayerLoss | None = maker.layer_loss
        self._mixed = round(maker.mixed * maker.recipe.batch_size)
        self._depths = None if table is None else torch.from_numpy(table.depths.astype("int64")).to(train.device)
        learnt = dict(network.named_parameters())
        recipe = maker.recipe
        optimizer = torch.optim.AdamW(
            learnt.values(), recipe.learning_rate, betas=recipe.betas, weight_decay=recipe.weight_decay
        )
        about = {"text": f"{len(train)} bytes, {int((train * torch.arange(1, len(train) + 1)).sum())}"}
        super().__init__(learnt, optimizer, recipe, foundry, about)

    def windows(self, ids: Int[Tensor, "N"], starts: Sequence[int] | Int[Tensor, "n"]) -> Int[Tensor, "n W"]:
        """Texts of a byte more than there are positions, from some places on."""
        places = torch.as_tensor(starts)[:, None] + torch.arange(self.positions + 1)
        return ids[places.to(ids.device)]

    def loss(self) -> tuple[Tensor, Mapping[str, Tensor | float | int]]:
        self.network.train()
        starts = torch.randint(len(self.train) - self.positions, (self.recipe.batch_size,))
        texts = self.windows(self.train, starts)
        with autocast(self.recipe.precision, self.train.device):
            return self._loss(texts, self._leaving(texts))

    def _leaving(self, texts: Int[Tensor, "n W"]) -> Int[Tensor, "n w"] | None:
        """Depths at which the tokens of some texts leave, those of the others never; None: no token does."""
        layers = len(self.network.model.layers)
        if not self._mixed:
            return None
        depths = torch.randint(1, layers + 1, (len(texts), texts.shape[1] - 1), device=texts.device)
        depths[self._mixed :] = layers
        return depths

    @torch.no_grad()
    def evaluate(self) -> None:
        self.network.eval()
        starts = _spread(len(self.held_out) - self.positions, _JUDGED)
        with autocast(self.recipe.precision, self.train.device):
            loss, parts = self._loss(self.windows(self.held_out, starts))
        point = {name: float(value) for name, value in {"loss": loss, **parts}.items()}
        self.curve.append({"step": self.step} | {name: round(value, 4) for name, value in point.items()})
        self.place.log({"step": self.step} | {f"held_out/{name}": value for name, value in point.items()})

    def _loss(
        self, texts: Int[Tensor, "n W"], leaving: Int[Tensor, "n w"] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        read, wanted = texts[:, :-1], texts[:, 1:].flatten()
        model = self.network.model

        def cross_entropy(ready: Float[Tensor, "n D"]) -> Float[Tensor, ""]:
            return F.cross_entropy(self.network.lm_head(ready).float(), wanted)

        if self._depths is not None:
            leaving = self._depths[read]
        with (
            nullcontext() if leaving is None else frozen_from(model.layers, leaving),
            collected(model.layers) as states,
        ):
            last = model(read, use_cache=False).last_hidden_state
        if self.layer_loss is None:
            return cross_entropy(last.flatten(0, 1)), {}
        flat = [state.flatten(0, 1) for state in states]
        return self.layer_loss(flat, lambda state: cross_entropy(model.norm(state)))


def prompts_of(text: str, length: int) -> list[dict[str, Any]]:
    """Pieces of a text to go on from, and how it went on, as a data set and as a corpus has them; of ASCII alone."""
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
    """By threshold of CALM with every layer an exit: layers per token, and what the second halves of texts lose."""
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
