"""Training of the table of ``hash_ee``, and of exits for the depths it is decoded with.

HASH-EE trains and decodes with one table, which is its advantage (Sun et al. 2022, arXiv 2203.01670): in decoding, an
exit reads states of a text whose earlier tokens left where the table says. The maps over a frozen model are fitted to
such states: the model reads its own answers, every token frozen from its depth on, and a map takes the states at its
depth to those of the whole model without frozen tokens. It is fitted to the tokens that leave there or later, and
judged by those that leave there.

A model that is trained as a whole with a table needs no maps (``train.maps=false``): ``base_models/characters.py`` with
``train.exits=hash``.

    python -m bench train method=hash_ee model=smollm2 train.kind=frequency
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from methods.early_exit.affine_maps import HELD_OUT, Maps, Places, fit_maps, judge
from methods.early_exit.exits import Exits, Lens, Reader, Translated, require_depths
from methods.early_exit.hash_ee import frozen_pass
from methods.early_exit.hash_tables import (
    Balance,
    Corpus,
    HashTable,
    Kind,
    even_depths,
    make_table,
    settling_depths,
)
from methods.training.answers import HEADS_CORPUS, AnswerRecipe, own_answers
from methods.training.exit_quality import quality, summary
from methods.training.interface import Example, Trainable, TrainingContext, require

_BATCH = 16  # dialogues read at once
_HELD_OUT_EVERY = 16  # dialogues


@dataclass
class HashTraining(Trainable):
    """Makes a table from counts of the model's own answers, and its exits.

    Args:
        kind: see ``hash_tables``.
        balance: likewise.
        buckets: number of buckets; their depths are spread evenly over the model and end with the whole of it.
        depths: ascending depths of the buckets; None: even ones.
        special: ids that always take the whole model, beside those that end a text.
        maps: fit maps for the depths, for a model that was not trained to exit.
        ridge: penalty on the maps, as a share of the mean variance of a state.
        tokens: of the answers to fit to.
        answers: the target's answers to learn from.

    Raises:
        ValueError: a number out of range.
    """

    description = "a table of the number of layers for each token, and matching exits"
    duration = "some minutes on two CPU cores for smollm2 after its answers; seconds on a GPU"
    corpus = HEADS_CORPUS

    kind: Kind = "frequency"
    balance: Balance = "types"
    buckets: int = 6
    depths: Sequence[int] | None = None
    special: Sequence[int] = ()
    maps: bool = True
    ridge: float = 1e-3
    tokens: int = 16384
    answers: AnswerRecipe = field(default_factory=AnswerRecipe)

    def __post_init__(self) -> None:
        require("at least 1", buckets=self.buckets, tokens=self.tokens)
        require("above 0", ridge=self.ridge)
        if self.balance == "none" and self.kind != "clustered":
            raise ValueError(f"balance must be types or mass for kind={self.kind}, got none. Set train.balance=types.")

    @property
    def needs_answers(self) -> bool:
        """See ``Trainable``: the answers are the target's own."""
        return False

    def fit(self, context: TrainingContext) -> dict[str, Any]:
        """See ``Trainable``."""
        target = context.target
        depths = even_depths(self.buckets, target.n_layers) if self.depths is None else tuple(self.depths)
        require_depths(depths, target, Lens(target), "train.depths", last=True)
        answers = own_answers(context, self.answers)
        table = self._table(context, depths, answers.rows)
        table.save(context.output)
        facts = {"answers_sha256": answers.sha256, "table": table.facts, "table_sha256": table.checksum}
        exits = tuple(depth for depth in depths if depth < target.n_layers)
        return facts | (self._exits(context, table, exits, answers.rows) if self.maps and exits else {})

    def _table(self, context: TrainingContext, depths: Sequence[int], rows: Sequence[Example]) -> HashTable:
        target = context.target
        embeddings = None
        if self.kind == "clustered":
            embeddings = target.embed(torch.arange(target.vocab_size, device=target.device)).float().cpu().numpy()
        settling = self._settling(context, depths, rows) if self.kind == "learnt" else None
        return make_table(
            self.kind,
            depths,
            Corpus.of([row.answer for row in rows], target.vocab_size),
            target.n_layers,
            balance=self.balance,
            special={*target.eos_ids, *self.special},
            seed=context.seed,
            embeddings=embeddings,
            settling=settling,
        )

    def _settling(
        self, context: TrainingContext, depths: Sequence[int], rows: Sequence[Example]
    ) -> Float[np.ndarray, "V"]:
        """For a learnt table, by token: the depth at which the exits settle, read as they will be, over its answers."""
        target, exits = context.target, [depth for depth in depths if depth < context.target.n_layers]
        read, places = unfrozen(context, exits, rows, self.tokens)
        reader: Reader = Lens(target)
        if self.maps and exits:
            reader = Translated(target, Exits(tuple(exits), fit_maps(target, places, self.ridge)))
        seen = judge(target, {"": reader}, places)[""]
        agrees = torch.stack([seen[depth][0] for depth in exits], dim=1).cpu().numpy()
        return settling_depths(read.cpu().numpy(), agrees, exits, target.n_layers, target.vocab_size)

    def _exits(
        self, context: TrainingContext, table: HashTable, exits: Sequence[int], rows: Sequence[Example]
    ) -> dict[str, Any]:
        target = context.target
        every = _HELD_OUT_EVERY
        held_out = rows[every - 1 :: every] or rows[-1:]
        learnt = [row for place, row in enumerate(rows) if place % every != every - 1][: len(rows) - 1] or rows
        train = states(context, table, exits, learnt, self.tokens)
        judged = states(context, table, exits, held_out, min(HELD_OUT, -(-self.tokens // 8)), meant=True)
        maps: Maps = {}
        for places in train.values():
            maps |= fit_maps(target, places, self.ridge)
        trained = Exits(tuple(exits), maps)
        readers: dict[str, Reader] = {"lens": Lens(target), "matched": Translated(target, trained)}
        facts: dict[str, Any] = {"tokens": sum(map(len, train.values())), "ridge": self.ridge}
        for depth, places in judged.items():
            for name, seen in judge(target, readers, places).items():
                facts.setdefault(name, {})[str(depth)] = quality(*seen[depth]) | {"places": len(places)}
        Exits(trained.depths, maps, facts=facts).save(context.output, target)
        return facts | {"summary": summary({name: facts[name] for name in readers if name in facts})}


@torch.inference_mode()
def unfrozen(
    context: TrainingContext, depths: Sequence[int], rows: Sequence[Example], tokens: int
) -> tuple[Int[Tensor, "N"], Places]:
    """Tokens of answers, and the states that the whole model has after reading each.

    Args:
        depths: of the states.
        tokens: most of them; the batch of dialogues that reaches it is the last one.
    """
    target, found, done = context.target, [], 0
    for start in range(0, len(rows), _BATCH):
        group = [row for row in rows[start : start + _BATCH] if len(row.answer) > 1]
        if done >= tokens or not group:
            continue
        prompts = [torch.tensor(row.prompt, device=target.device) for row in group]
        read = pad_sequence([torch.tensor(row.answer, device=target.device) for row in group], batch_first=True)
        cache = target.new_cache(len(group), max(map(len, prompts)) + read.shape[1])
        target.prefill(prompts, cache)
        output = target.forward(read, None, cache, hidden_layers=[depth - 1 for depth in depths])
        ends = torch.tensor([[len(row.answer) - 1] for row in group], device=target.device)
        present = torch.arange(read.shape[1], device=target.device) < ends
        exits = {depth: output.hidden_layers[depth - 1][present] for depth in depths}
        found.append((read[present], exits, output.hidden[present], read.roll(-1, 1)[present]))
        done += int(present.sum())
        context.report_progress("settling depths (tokens)", min(done, tokens), tokens)
    joined = {depth: torch.cat([exits[depth] for _, exits, _, _ in found]) for depth in depths}
    final, chosen = torch.cat([part[2] for part in found]), torch.cat([part[3] for part in found])
    return torch.cat([part[0] for part in found]), Places(joined, final, chosen)


@torch.inference_mode()
def states(
    context: TrainingContext,
    table: HashTable,
    depths: Sequence[int],
    rows: Sequence[Example],
    tokens: int,
    meant: bool = False,
) -> dict[int, Places]:
    """By depth, the states of tokens that reach it, and those of the whole model at the same places.

    Args:
        depths: of the states.
        rows: dialogues; prompts are read by the whole model.
        tokens: most tokens of answers; the dialogue that reaches it is the last one.
        meant: only of tokens that leave there.
    """
    target, done = context.target, 0
    found: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {depth: [] for depth in depths}
    by_id = torch.from_numpy(table.depths.astype("int64")).to(target.device)
    for start in range(0, len(rows), _BATCH):
        if done >= tokens:
            break
        group = [row for row in rows[start : start + _BATCH] if len(row.answer) > 1]
        if not group:
            continue
        prompts = [torch.tensor(row.prompt, device=target.device) for row in group]
        answers = [torch.tensor(row.answer, device=target.device) for row in group]
        read = pad_sequence(answers, batch_first=True)
        cache = target.new_cache(len(group), max(map(len, prompts)) + read.shape[1])
        target.prefill(prompts, cache)
        final = target.forward(read, None, cache).hidden
        wanted = by_id[read]
        behind = frozen_pass(target, read, wanted, cache, depths)
        present = torch.arange(read.shape[1], device=target.device) < torch.tensor(
            [[len(answer) - 1] for answer in answers], device=target.device
        )
        chosen = read.roll(-1, 1)
        for depth in depths:
            here = present & ((wanted == depth) if meant else (wanted >= depth))
            found[depth].append((behind[depth][here], final[here], chosen[here]))
        done += int(present.sum())
        context.report_progress("hashed states (tokens)", min(done, tokens), tokens)
    return {
        depth: Places({depth: torch.cat([s for s, _, _ in parts])}, *(torch.cat([p[i] for p in parts]) for i in (1, 2)))
        for depth, parts in found.items()
        if sum(len(s) for s, _, _ in parts)
    }
