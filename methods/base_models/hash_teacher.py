"""Training of translation models for method=hash_ee: with the table that they are decoded with.

HASH-EE (Sun et al. 2022, arXiv 2203.01670, sec. 3) assigns each token a depth before the training, and the model learns
with these exits: at the place of a token its state stays as it is after so many layers, higher layers attend to it, and
the loss is that of the state with which the token exits (``layer_losses.frozen_from``). The table counts the tokens of
the translations that are learnt. Tokens that they do not have take all layers, and so does the decoder's start, which
decoding reads with the prompt.

    python -m bench train method=hash_teacher corpus=multi30k model=multi30k_4_4
    python -m bench method=hash_ee model=multi30k_4_4_distilled_hash dataset=multi30k method.head=lens \\
        method.checkpoint=FOLDER

FOLDER is the model's, where the table is too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import PegasusForConditionalGeneration, PreTrainedTokenizerFast

from methods.base_models.translation import ContinuedTraining, Judge, decoder_input
from methods.decoder import generate
from methods.early_exit.hash_ee import HashEE
from methods.early_exit.hash_tables import Balance, Corpus, HashTable, Kind, even_depths, make_table
from methods.engine.sampling import Sampling
from methods.engine.seq2seq_lm import Seq2SeqLM
from methods.training.interface import TrainingContext, require
from methods.training.layer_losses import frozen_from
from methods.training.trainer import Loss
from methods.training.translation import Pair, padded


@dataclass
class HashTeacherTraining(ContinuedTraining):
    """Trains a translation model whose tokens exit by a table.

    Args:
        kind, balance: of the table, see ``hash_tables.make_table``; no embeddings are clustered.
        buckets: depths, evenly spread; at most as many as the decoder has layers.
        begin, layers, width, inner, heads, vocabulary, positions, data, beams, validation, recipe: see
            ``ContinuedTraining``.

    Attributes:
        table: once the training has made it.

    Raises:
        ValueError: a number out of range, or ``kind=clustered``.
    """

    description = "a translation model whose tokens exit by a table, with its tokenizer"
    searches: ClassVar[Sequence[tuple[str, int]]] = (("greedy", 1),)

    kind: Kind = "frequency"
    balance: Balance = "mass"
    buckets: int = 4
    table: HashTable | None = field(init=False, default=None, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        require("at least 1", buckets=self.buckets)
        if self.kind == "clustered" or self.balance == "none":
            raise ValueError(
                "kind must be random, frequency or mutual_information, and balance types or mass, as a new model has "
                f"no embeddings to cluster, got {self.kind} and {self.balance}. Set train.kind=frequency."
            )

    def model_name(self, corpus: str) -> str:
        """``multi30k_4_4_distilled_hash``."""
        return f"{super().model_name(corpus)}_hash"

    def prepare(self, network: Any, pairs: Sequence[Pair], context: TrainingContext) -> None:
        """See ``TeacherTraining``: make the table and save it."""
        depth, vocabulary = self.layers[1], network.config.vocab_size
        depths = even_depths(min(self.buckets, depth), depth)
        corpus = Corpus.of([target for _, target in pairs], vocabulary)
        special = {network.config.decoder_start_token_id}
        shared: dict[str, Any] = {"balance": self.balance, "special": special, "seed": context.seed}
        self.table = make_table(self.kind, depths, corpus, depth, **shared)
        self.table.save(context.output)

    def judge(
        self, tokenizer: PreTrainedTokenizerFast, pairs: Sequence[tuple[str, str]], context: TrainingContext
    ) -> Judge:
        """See ``TeacherTraining``: translations by the table."""
        return HashJudge(tokenizer, pairs, context.output)

    def loss(self, network: Any, pairs: Sequence[Pair]) -> Callable[[list[int], int], Loss]:
        """Smoothed cross-entropy per token of the target, at the state with which the token before it exits."""
        assert self.table is not None, "prepare makes it"
        depths = torch.from_numpy(self.table.depths.astype("int64")).to(network.device)
        whole = super().loss(network, pairs)

        def loss(rows: list[int], step: int) -> Loss:
            targets = padded([pairs[row][1] for row in rows], network.device)
            read = decoder_input(network, targets)
            with frozen_from(network.model.decoder.layers, depths[read]):
                return whole(rows, step)

        return loss

    def describe(
        self, network: Any, tokenizer: PreTrainedTokenizerFast, validation: Sequence[tuple[str, str]]
    ) -> dict[str, Any]:
        """See ``TeacherTraining``: the table."""
        assert self.table is not None, "prepare makes it"
        return {"table": self.table.facts, "table_sha256": self.table.checksum}


class HashJudge(Judge):
    """See ``Judge``, for a table in a folder."""

    def __init__(self, tokenizer: Any, pairs: Sequence[tuple[str, str]], folder: Path) -> None:
        super().__init__(tokenizer, pairs)
        self._folder = folder

    def texts(self, network: PegasusForConditionalGeneration, beams: int = 1) -> list[str]:
        """Greedy translations; there is no beam search over exits."""
        assert beams == 1, "exits are for greedy search"
        target = Seq2SeqLM.from_hf(network, linear="plain", keep_hf=True)
        assert isinstance(target, Seq2SeqLM)
        decoder = HashEE(target, Sampling(), head="lens", checkpoint=self._folder)
        return self.write_all(
            lambda sources, limit: generate(decoder, sources, limit, target.eos_ids),
            target.max_positions,
            target.device,
        )
