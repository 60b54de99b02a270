"""Training of the drafter of method=specdec on the target's own greedy translations.

The network sees a random beginning of each translation and fills the block after it (Xia et al. 2023, arXiv
2203.16487). Glancing training (Qian et al. 2021, arXiv 2008.07905): the block is filled once without a gradient; the
number of wrong places times ``glancing`` is how many places are revealed, drawn among all; the network then learns the
others, given the revealed tokens. The share falls linearly.

The target is frozen; its encoder, embedding and output matrix are shared, not stored. Difference from the paper: the
block of each batch has a random length, independent of its texts, so that shorter blocks may be drafted too, and the
length of a block does not reveal where a text ends.

Command: ``python -m bench train method=specdec model=multi30k_4_4``
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from methods.engine.draft_vocabulary import DraftVocabulary
from methods.engine.sampling import argmax
from methods.engine.seq2seq_lm import Seq2SeqLM
from methods.speculative.specdec.decoder import translates
from methods.speculative.specdec.network import BlockDecoder, Layout, Shape, Sources, save
from methods.training.distillation import digest, distilled_pairs
from methods.training.interface import Trainable, TrainingContext, require
from methods.training.losses import cross_entropy
from methods.training.trainer import (
    Epochs,
    Loss,
    Point,
    Trainer,
    TrainingConfig,
    attention_over_short_rows,
    autocast,
    discard,
)
from methods.training.translation import NONE, Pair, padded

_HELD_OUT, _MOST_HELD_OUT = 30, 256  # every thirtieth pair, and no more


@dataclass(frozen=True)
class Blocks:
    """Beginnings of some texts, and the block after each.

    Attributes:
        tokens: [B, M] the decoder's start, the beginning, and the right tokens of the block.
        wanted: [B, k] the right tokens of the block; ``NONE`` after the end of a text.
        layout: of the nodes.
    """

    tokens: Int[Tensor, "B M"]
    wanted: Int[Tensor, "B k"]
    layout: Layout

    @classmethod
    def of(
        cls,
        start: Sequence[int],
        texts: Sequence[Sequence[int]],
        given: Sequence[int],
        block: int,
        device: torch.device,
    ) -> Blocks:
        """Blocks of ``block`` places after the first ``given`` tokens of each text."""
        rows = [[*start, *text[: count + block]] for text, count in zip(texts, given, strict=True)]
        new = [len(start) + count for count in given]
        nodes = max(new) + block
        wanted = padded([row[n:] for row, n in zip(rows, new, strict=True)], device, width=block)
        length = torch.tensor(new, device=device)
        layout = Layout.of(torch.zeros_like(length), length, block, nodes)
        return cls(padded(rows, device, 0, nodes), wanted, layout)

    @property
    def present(self) -> Bool[Tensor, "B k"]:
        """Where there is a token."""
        return self.wanted != NONE

    def masked(self, revealed: Bool[Tensor, "B k"] | None = None) -> Bool[Tensor, "B M"]:
        """Nodes that the network has to fill: the block except what is revealed."""
        place = self.layout.places
        if revealed is None:
            return place >= 0
        return (place >= 0) & ~revealed.gather(1, place.clamp(0, revealed.shape[1] - 1))


def reveal(wrong: Int[Tensor, "B"], present: Bool[Tensor, "B k"], share: float) -> Bool[Tensor, "B k"]:
    """floor(share * wrong) places of each row, drawn among all that are present (Qian et al. 2021, sec. 3.2)."""
    luck = torch.rand(present.shape).to(present.device).masked_fill(~present, 2.0)
    return (luck.argsort(1).argsort(1) < (share * wrong).floor()[:, None]) & present


class BlockLearner:
    """The network in training, between the frozen parts of its target.

    Args:
        target: the model it drafts for.
        vocabulary: what it proposes from, on the target's device.
        network: what is trained.
        label_smoothing: probability that is spread over all tokens.
    """

    def __init__(
        self, target: Seq2SeqLM, vocabulary: DraftVocabulary, network: BlockDecoder, label_smoothing: float
    ) -> None:
        self.target, self.vocabulary, self.network, self.label_smoothing = target, vocabulary, network, label_smoothing
        weight, bias = target.output_rows(vocabulary.ids)
        self._weight, self._bias = weight.float(), None if bias is None else bias.float()

    def read(self, sources: Sequence[Sequence[int]]) -> Sources:
        """The target's encoder states of some sources, as the network reads them."""
        memory = None if self.network.shape.encoder_layers else self._memory(sources)
        lengths = [len(source) for source in sources]
        tokens = padded(sources, self.target.device, 0)
        return self.network.read(self.target.embed(tokens).float(), memory, lengths)

    def _memory(self, sources: Sequence[Sequence[int]]) -> Float[Tensor, "B S D"]:
        rows = [torch.tensor(source, device=self.target.device) for source in sources]
        with torch.autocast(self.target.device.type, enabled=False):  # its products are packed for its own type
            return self.target.encode(rows).states.float().clone()  # tensors of inference mode have no gradient

    def loss(self, blocks: Blocks, sources: Sources, share: float) -> tuple[Tensor, dict[str, Tensor | float]]:
        """Smoothed cross-entropy of the places that are not revealed; tokens that cannot be proposed do not count."""
        revealed = self._glance(blocks, sources, share) if share else None
        learnt = blocks.present if revealed is None else blocks.present & ~revealed
        logits = self._logits(self._states(blocks, sources, revealed)[learnt])
        labels = self.vocabulary.of(blocks.wanted.clamp(min=0))[learnt]
        known = labels >= 0
        loss = cross_entropy(logits[known], labels[known], self.label_smoothing)
        right = (argmax(logits.detach()) == labels).sum() / known.sum().clamp(min=1)
        return loss, {"right": right, "revealed": 1 - learnt.sum() / blocks.present.sum()}

    def fill(self, blocks: Blocks, sources: Sources) -> Int[Tensor, "B k"]:
        """The most likely token of every place."""
        states = self._states(blocks, sources, None)
        return self.vocabulary.tokens(self._logits(states).argmax(-1))

    @torch.no_grad()
    def _glance(self, blocks: Blocks, sources: Sources, share: float) -> Bool[Tensor, "B k"]:
        with torch.random.fork_rng():  # the training pass has the same dropout
            filled = self.fill(blocks, sources)
        wrong = ((filled != blocks.wanted) & blocks.present).sum(1)
        return reveal(wrong, blocks.present, share)

    def _states(self, blocks: Blocks, sources: Sources, revealed: Bool[Tensor, "B k"] | None) -> Float[Tensor, "B k D"]:
        embeddings = self.target.embed(blocks.tokens).float()
        states = self.network(embeddings, blocks.masked(revealed), blocks.layout, sources)
        return blocks.layout.block(states, blocks.wanted.shape[1])

    def _logits(self, states: Float[Tensor, "*b D"]) -> Float[Tensor, "*b v"]:
        return F.linear(states, self._weight, self._bias)


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How exact greedy decoding of some texts would go with a drafter.

    Attributes:
        shares: how often place i of a draft was right, given those before it.
        judged: how often that was judged.
        accepted: drafted tokens accepted per round.
        per_step: tokens written per round, the target's own included.
    """

    shares: list[float]
    judged: list[int]
    accepted: float
    per_step: float


@torch.no_grad()
def acceptance(learner: BlockLearner, pairs: Sequence[Pair], block: int, batch_size: int) -> Acceptance:
    """Draft and verify some texts round by round; the first token of each is the target's."""
    right, judged = torch.zeros(block), torch.zeros(block)
    rounds, kept, written = 0, 0, 0
    for first in range(0, len(pairs), batch_size):
        rows = pairs[first : first + batch_size]
        done = [1] * len(rows)
        while going := [place for place, row in enumerate(rows) if done[place] < len(row[1])]:
            sources = learner.read([rows[place][0] for place in going])
            texts, given = [rows[place][1] for place in going], [done[place] for place in going]
            blocks = Blocks.of(learner.target.start, texts, given, block, learner.target.device)
            hits = (learner.fill(blocks, sources) == blocks.wanted).long().cumprod(1).cpu()
            before = torch.cat([torch.ones(len(hits), 1), hits[:, :-1]], dim=1) * blocks.present.cpu()
            right, judged = right + hits.sum(0), judged + before.sum(0)
            for place, count in zip(going, hits.sum(1).tolist(), strict=True):
                step = min(count + 1, len(rows[place][1]) - done[place])
                done[place], rounds, kept, written = done[place] + step, rounds + 1, kept + count, written + step
    shares = (right / judged.clamp(min=1)).tolist()
    return Acceptance(shares, [int(n) for n in judged.tolist()], kept / max(1, rounds), written / max(1, rounds))


@dataclass
class SpecDecTraining(Trainable):
    """Trains the drafter.

    Args:
        block: most places that are filled at once.
        depth: layers of the network.
        heads: of each attention.
        inner: units of its feed-forward layers; None: twice the target's hidden size.
        encoder_layers: of an encoder of its own, as published; 0: the target's encoder, which stays as it is.
        vocabulary: most tokens that it proposes from.
        glancing: share of wrong places that is revealed, in the first step and in the last; 0 and 0: none are.
        label_smoothing: probability that is spread over all tokens.
        dropout: of its input and its sub-layers.
        recipe: of the training.

    Raises:
        ValueError: a number out of range.
    """

    description = "a decoder that drafts a block of tokens in one pass"
    duration = "half an hour on one CPU core for a 4-4 translation model, with its translations"
    corpus = "multi30k"

    block: int = 25
    depth: int = 2
    heads: int = 4
    inner: int | None = None
    encoder_layers: int = 0
    vocabulary: int = 8192
    glancing: Sequence[float] = (0.5, 0.3)
    label_smoothing: float = 0.1
    dropout: float = 0.1
    recipe: TrainingConfig = field(default_factory=TrainingConfig)

    def __post_init__(self) -> None:
        counts = {"block": self.block, "depth": self.depth, "heads": self.heads, "vocabulary": self.vocabulary}
        require("at least 1", **counts, inner=self.inner)
        require("at least 0", encoder_layers=self.encoder_layers)
        require("from 0 to below 1", label_smoothing=self.label_smoothing, dropout=self.dropout)
        if len(self.glancing) != 2 or not all(0 <= share < 1 for share in self.glancing):
            raise ValueError(f"glancing must be two shares from 0 to below 1, got {list(self.glancing)}.")

    def fit(self, context: TrainingContext) -> dict[str, Any]:
        """See ``Trainable``."""
        target, recipe = translates(context.target), self.recipe
        shape = self._shape(target)
        pairs = distilled_pairs(context, [example.prompt for example in context.examples], 1, least=2)
        texts = torch.tensor([token for _, text in pairs for token in text])
        frequent = DraftVocabulary.frequent(texts, self.vocabulary, target.vocab_size, target.eos_ids)
        vocabulary = frequent.to(target.device)
        torch.manual_seed(context.seed)
        network = BlockDecoder(shape, self.dropout).to(target.device)
        learner = BlockLearner(target, vocabulary, network, self.label_smoothing)
        places = list(range(_HELD_OUT - 1, len(pairs), _HELD_OUT))[:_MOST_HELD_OUT] or [len(pairs) - 1]
        held_out = [pairs[place] for place in places]
        lengths = {n: len(pairs[n][0]) + len(pairs[n][1]) for n in sorted({*range(len(pairs))} - {*places})}
        epochs = Epochs.shuffled(lengths, recipe.batch_size, context.seed)
        sha256 = digest([[*source, NONE, *text] for source, text in pairs])
        trainer = Trainer(recipe, network, context, sha256)
        trainer.run(
            lambda rows, step: self._loss(learner, [pairs[row] for row in rows], step),
            epochs.batch,
            lambda: self._evaluate(learner, held_out),
        )
        save(context.output, network, vocabulary)
        discard(context.output)
        last = trainer.curve[-1]
        return {
            "translations": len(pairs),
            "translations_sha256": sha256,
            "held_out": len(held_out),
            "epochs": epochs.count(trainer.step),
            **{name: last[name] for name in ("acceptance", "accepted", "tokens_per_step")},
            **trainer.facts,
            "left_out": len(context.examples) - len(pairs),
            "draft_vocabulary": len(vocabulary),
        }

    def _loss(self, learner: BlockLearner, rows: Sequence[Pair], step: int) -> Loss:
        block = int(torch.randint(1, self.block + 1, ()))
        given = [int(torch.randint(1, len(text), ())) for _, text in rows]
        device, (first, last) = learner.target.device, self.glancing
        share = first + (last - first) * step / max(1, self.recipe.steps - 1)
        with attention_over_short_rows(device):
            blocks = Blocks.of(learner.target.start, [text for _, text in rows], given, block, device)
            return learner.loss(blocks, learner.read([source for source, _ in rows]), share)

    def _evaluate(self, learner: BlockLearner, held_out: Sequence[Pair]) -> Point:
        """Acceptance on the held-out translations, place by place, and tokens per step."""
        with autocast(self.recipe.precision, learner.target.device):
            found = acceptance(learner, held_out, self.block, self.recipe.batch_size)
        point = {
            "acceptance": [round(share, 4) for share in found.shares],
            "judged": found.judged,
            "accepted": round(found.accepted, 4),
            "tokens_per_step": round(found.per_step, 4),
        }
        flat = {f"held_out/acceptance_{place}": share for place, share in enumerate(found.shares, 1)}
        return point, {"held_out/tokens_per_step": found.per_step, **flat}

    def _shape(self, target: Seq2SeqLM) -> Shape:
        width = target.hidden_size
        if width % self.heads:
            raise ValueError(
                f"heads must divide the hidden size of {target.name}, {width}, got {self.heads}. Set train.heads."
            )
        return Shape(
            block=self.block,
            depth=self.depth,
            heads=self.heads,
            inner=self.inner or 2 * width,
            positions=target.max_positions + self.block,
            hidden_size=width,
            layers=target.n_layers,
            vocab_size=target.vocab_size,
            encoder_layers=self.encoder_layers,
        )
