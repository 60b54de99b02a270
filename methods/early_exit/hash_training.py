"""The table of ``hash_ee``, and exits that are fitted with the depths it is decoded with.

HASH-EE trains and decodes with one table, and calls that its advantage (Sun et al. 2022, arXiv 2203.01670): what an
exit reads in decoding are states of a text whose earlier tokens have left as the table says. Over a model that stays as
it is the maps are fitted to just these: the model reads its own answers, every token frozen from its depth on, and a
map takes the states that arrive at its depth to what the whole model has there when nothing is frozen. The tokens of a
map are those that its depth or a later one is meant for; it is judged by the former.

A model that is trained as a whole with a table needs no maps (``train.maps=false``): ``character_model.py`` with
``train.exits=hash``.

    python -m bench.train method=hash_ee model=smollm2 train.kind=frequency
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from methods.early_exit.affine_maps import HELD_OUT, Maps, Places, fit_maps, judge
from methods.early_exit.exits import Exits, Lens, Reader, Translated, require_depths
from methods.early_exit.hash_tables import Balance, Corpus, HashTable, Kind, even_depths, make_table
from methods.early_exit.training_states import HEADS_CORPUS, AnswerRecipe, own_answers
from methods.engine.causal_lm import CausalLM
from methods.training.exit_quality import quality, summary
from methods.training.interface import Example, Workshop

_BATCH = 16  # dialogues read at once
_FEWEST = 16  # held-out dialogues are every so manieth


class HashTraining:
    """Makes a table from counts of the model's own answers, and the exits it sends tokens to.

    Args:
        kind: see ``hash_tables``.
        balance: likewise.
        buckets: how many; their depths are spread evenly over the model, the last is the whole of it.
        depths: depths of the buckets, ascending, in place of even ones.
        special: ids that always take the whole model, beside those that end a text.
        maps: fit maps for the depths, for a model that was not trained to exit.
        ridge: penalty on the maps, as a share of the mean variance of a state.
        tokens: of the answers to fit to.
        answers: of the target, to learn from; None: the defaults.

    Raises:
        ValueError: a number out of range.
    """

    prepares: ClassVar[str] = "a table that says for each token how many layers it takes, and exits to match it"
    takes: ClassVar[str] = "some minutes on two CPU cores for smollm2 once its answers are there; seconds on a GPU"
    corpus: ClassVar[str] = HEADS_CORPUS

    def __init__(
        self,
        kind: Kind = "frequency",
        balance: Balance = "types",
        buckets: int = 6,
        depths: Sequence[int] | None = None,
        special: Sequence[int] = (),
        maps: bool = True,
        ridge: float = 1e-3,
        tokens: int = 16384,
        answers: AnswerRecipe | None = None,
    ) -> None:
        if min(buckets, tokens) < 1 or ridge <= 0 or (balance == "none" and kind != "clustered"):
            raise ValueError(
                f"buckets={buckets}, tokens={tokens}, ridge={ridge}, kind={kind}, balance={balance} came; at least one "
                "bucket and token, a ridge above 0, and balance=none only with kind=clustered are allowed. Set "
                "train.buckets=6, train.balance=types."
            )
        self.kind, self.balance, self.buckets, self.depths = kind, balance, buckets, depths
        self.special, self.maps, self.ridge, self.tokens = special, maps, ridge, tokens
        self.answers = answers or AnswerRecipe()

    def fit(self, workshop: Workshop) -> dict[str, Any]:
        """See ``methods.training.interface.Trainable``."""
        target = workshop.target
        depths = even_depths(self.buckets, target.n_layers) if self.depths is None else tuple(self.depths)
        require_depths(depths, target, Lens(target), "train.depths", last=True)
        answers = own_answers(workshop, self.answers)
        table = self._table(workshop, depths, answers.rows)
        table.save(workshop.folder)
        facts = {"answers_sha256": answers.sha256, "table": table.facts, "table_sha256": table.checksum}
        exits = tuple(depth for depth in depths if depth < target.n_layers)
        return facts | (self._exits(workshop, table, exits, answers.rows) if self.maps and exits else {})

    def _table(self, workshop: Workshop, depths: Sequence[int], rows: Sequence[Example]) -> HashTable:
        target = workshop.target
        embeddings = None
        if self.kind == "clustered":
            embeddings = target.embed(torch.arange(target.vocab_size, device=target.device)).float().cpu().numpy()
        return make_table(
            self.kind,
            depths,
            Corpus.of([row.answer for row in rows], target.vocab_size),
            target.n_layers,
            balance=self.balance,
            special={*target.eos_ids, *self.special},
            seed=workshop.seed,
            embeddings=embeddings,
        )

    def _exits(
        self, workshop: Workshop, table: HashTable, exits: Sequence[int], rows: Sequence[Example]
    ) -> dict[str, Any]:
        target = workshop.target
        held_out = rows[_FEWEST - 1 :: _FEWEST] or rows[-1:]
        learnt = [row for place, row in enumerate(rows) if place % _FEWEST != _FEWEST - 1][: len(rows) - 1] or rows
        train = states(workshop, table, exits, learnt, self.tokens)
        judged = states(workshop, table, exits, held_out, min(HELD_OUT, -(-self.tokens // 8)), meant=True)
        maps: Maps = {}
        for places in train.values():
            maps |= fit_maps(target, places, self.ridge)
        trained = Exits(tuple(exits), maps)
        readers: dict[str, Reader] = {"lens": Lens(target), "matched": Translated(target, trained)}
        facts: dict[str, Any] = {"tokens": sum(map(len, train.values())), "ridge": self.ridge}
        for depth, places in judged.items():
            for name, seen in judge(target, readers, places).items():
                facts.setdefault(name, {})[str(depth)] = quality(*seen[depth]) | {"places": len(places)}
        Exits(trained.depths, maps, facts=facts).save(workshop.folder, target)
        return facts | {"summary": summary({name: facts[name] for name in readers if name in facts})}


@torch.inference_mode()
def states(
    workshop: Workshop,
    table: HashTable,
    depths: Sequence[int],
    rows: Sequence[Example],
    tokens: int,
    meant: bool = False,
) -> dict[int, Places]:
    """By depth, what the tokens that arrive there have, and what the whole model has at the same places.

    Args:
        depths: of which states are wanted.
        rows: dialogues; prompts are read by the whole model.
        tokens: of answers, at most, that are looked at; the dialogue that reaches it is the last one.
        meant: only of tokens that leave there.
    """
    target, done = workshop.target, 0
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
        workshop.progress("hashed states (tokens)", min(done, tokens), tokens)
    return {
        depth: Places({depth: torch.cat([s for s, _, _ in parts])}, *(torch.cat([p[i] for p in parts]) for i in (1, 2)))
        for depth, parts in found.items()
        if sum(len(s) for s, _, _ in parts)
    }


def frozen_pass(
    target: CausalLM, tokens: Int[Tensor, "B T"], wanted: Int[Tensor, "B T"], cache: Any, depths: Sequence[int]
) -> dict[int, Float[Tensor, "B T D"]]:
    """All tokens through all layers; a layer changes the states of those alone that go so deep.

    Args:
        wanted: layers that each token takes.
        depths: behind which states are returned.
    """
    state, found = target.begin(tokens, None, cache), {}
    for layer in range(max(depths)):
        before = state.hidden
        target.run(state, (layer,))
        state.hidden = torch.where(wanted[:, :, None] > layer, state.hidden, before)
        if layer + 1 in depths:
            found[layer + 1] = state.hidden
    return found
