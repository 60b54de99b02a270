"""SpecDec: a non-autoregressive drafter fills a block of tokens at once, the target keeps what it finds good enough.

Xia et al. 2023, arXiv 2203.16487, for encoder-decoder targets. The drafter reads the target's encoder; a shallow
decoder with a place for each token of the block reads the source and the committed text and fills all places in one
pass (``network.py``). The target scores the block in one pass; a drafted token stays while it is among the target's
``top_beta`` most likely ones and its log-probability is at most ``tau`` below that of the most likely one (eq. 5-6).
With ``top_beta=1`` the text is exactly the target's. The drafter must be trained:

    python -m bench train method=specdec model=multi30k_4_4

Published, blocks of 25, Transformer base on WMT, one P100 at batch 1: 5.1 times the speed of beam search with 5 beams
en-de, 5.5 times de-en, 4.6 times en-ro, at BLEU 35.45 en-ro and 35.03 ro-en.

Differences: committed tokens see only what is before them, so their keys and values are cached. The encoder is the
target's, frozen, and runs once for both models, unless the drafter was trained with one of its own as published
(``train.encoder_layers``). Each place of the block has a vector of its own instead of a common
mask token; sinusoidal positions are added once; norms come before sub-layers; tokens are proposed from a reduced
vocabulary. A draft ends with its first end-of-sequence token. At a temperature the exact rule for drafts that were not
drawn holds, whatever ``top_beta``.

Command: ``python -m bench model=multi30k_4_4 dataset=multi30k method=specdec``
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from methods.drafting import AcceptanceRule, Context, Draft
from methods.engine.causal_lm import CausalLM
from methods.engine.checkpoint_files import part_folder
from methods.engine.sampling import Sampling
from methods.engine.seq2seq_lm import Seq2SeqLM
from methods.rows import of_rows
from methods.speculative.heads.base import HeadsDecoder
from methods.speculative.specdec.network import DraftPass, load
from methods.speculative.verification import TopBetaGap, default_rule


class SpecDrafter:
    """Drafts a chain of up to ``nodes`` tokens, the whole of it in one pass."""

    hidden_layers: Sequence[int] = ()

    def __init__(self, draft: DraftPass, nodes: int) -> None:
        self.nodes, self._draft = nodes, draft
        self._start, self._ends = draft.target.start, frozenset(draft.target.eos_ids)
        self._sources: list[list[int]] = []

    @property
    def nbytes(self) -> dict[str, int]:
        """Memory beside the target's."""
        return self._draft.nbytes

    def reset(self, prompts: list[list[int]], limit: int) -> None:
        self._sources = [list(prompt) for prompt in prompts]
        in_flight = 3 * (self.nodes + 1)  # beyond the limit, committed since the last pass, and the block
        self._draft.make_room(len(prompts), len(self._start) + limit + in_flight)

    def keep_rows(self, rows: Sequence[int]) -> None:
        self._sources = of_rows(self._sources, rows)
        self._draft.keep_rows(rows)

    def propose(self, context: Context) -> Draft:
        if context.path is None:
            memory = context.output.memory
            assert memory is not None, "an encoder-decoder shows what its encoder made of the sources"
            self._draft.read(self._sources, memory[:, : max(map(len, self._sources))])  # a longer row may have left
        texts = [[*self._start, *row[len(s) :]] for row, s in zip(context.tokens, self._sources, strict=True)]
        new = [text[done:] for text, done in zip(texts, self._draft.written, strict=True)]
        filled = self._draft.fill(new, self.nodes).tolist()
        drafts = Draft.chains([self._up_to_end(row) for row in filled], context.root.device)
        return replace(drafts, passes=1)

    def _up_to_end(self, row: list[int]) -> list[int]:
        """Draft tokens up to the end: reading the block costs a wait, and saves the target the places after most
        sentences.
        """
        return row[: next((place for place, token in enumerate(row, 1) if token in self._ends), len(row))]


class SpecDec(HeadsDecoder):
    """SpecDec with a trained drafter.

    Args:
        target: encoder-decoder model that verifies.
        block: tokens drafted at once; None: as many as the drafter was trained for, which is also the most.
        top_beta: a drafted token must be among so many most likely ones of the target; 1 is the target's own text.
        tau: most nats that its log-probability may be below that of the most likely one.
        checkpoint: folder of a trained drafter; None: the one prepared for this model. None were published.

    Raises:
        ValueError: a causal target, no drafter or one of another target, or an option out of range.
    """

    model_kind = "seq2seq"
    paper = "Xia et al. 2023, arXiv 2203.16487"

    def __init__(
        self,
        target: CausalLM,
        sampling: Sampling,
        block: int | None = None,
        top_beta: int = 1,
        tau: float = 1.0,
        checkpoint: str | Path | None = None,
    ) -> None:
        model = translates(target)
        rule = _rule(sampling, top_beta, tau)
        folder = part_folder("specdec", "drafter", checkpoint)
        decoder, vocabulary = load(folder, model)
        drafter = SpecDrafter(DraftPass(model, decoder, vocabulary), _block(block, decoder.shape.block))
        super().__init__(target, sampling, drafter, rule)


def translates(target: CausalLM) -> Seq2SeqLM:
    """The target as an encoder-decoder.

    Raises:
        ValueError: it is a causal model.
    """
    if isinstance(target, Seq2SeqLM):
        return target
    raise ValueError(
        f"specdec needs an encoder-decoder, whose encoder output its drafter reads, got {target.name}, a causal model. "
        "Set model=multi30k_4_4, or model=hf model.name=HUB_ID_OR_FOLDER."
    )


def _rule(sampling: Sampling, top_beta: int, tau: float) -> AcceptanceRule:
    relaxed = TopBetaGap(top_beta, tau)
    return relaxed if top_beta > 1 and sampling.greedy else default_rule(sampling, "chain", drawn=False)


def _block(block: int | None, trained: int) -> int:
    wanted = trained if block is None else block
    if not 1 <= wanted <= trained:
        raise ValueError(
            f"block must be from 1 to {trained}, the places of the drafter, got {wanted}. Set method.block to one of "
            "these, or train a drafter with more (train.block=N)."
        )
    return wanted
