"""N-grams draft: what followed in the text before, and what the target wrote after one to three tokens elsewhere.

Drafts that take no time and no network (The N-Grammys, Stewart et al. 2024, arXiv 2411.03786, judge a batch of chains
from n-grams of the context and from the model's bigrams: the next token is seldom the likeliest of them, but often one
of a few). Here both sources grow one tree: the path that most often followed the longest ending of the text, and beside
and behind it the likeliest tokens of a table of contexts of one to three tokens, each weighed with the shorter contexts
in it. The likeliest nodes are drafted, with ``costs`` as many as pay, by what was kept of either source lately
(``budget.py``). ``rest`` takes the longest n-gram of the same datastore instead, however rare it is.

The table is counted in seconds from the datastore of ``rest``:

    python -m bench train method=rest

Differences from the paper: a tree instead of a batch of chains; shares counted in the target's own answers, with up to
three tokens before, instead of bigrams from its weights.

Command: ``python -m bench method=ngram dataset=mtbench``
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np

from methods.drafting import Context, Draft, StatelessDrafter
from methods.engine import cpu_kernels
from methods.engine.causal_lm import CausalLM
from methods.engine.checkpoint_files import part_folder
from methods.engine.guesses import GuessedTree, Guesses, NgramTable
from methods.engine.sampling import Sampling
from methods.engine.token_tree import places_on_host
from methods.speculative.budget import CostsOption
from methods.speculative.guess_costs import measured_costs
from methods.speculative.loop import SpeculativeDecoder
from methods.speculative.rest import Tree, as_draft
from methods.speculative.rest_datastore import HEADER, SEPARATOR, Datastore
from methods.speculative.verification import default_rule

_TABLES: WeakValueDictionary[tuple[Path, int], NgramTable] = WeakValueDictionary()  # by datastore


class NgramDrafter(StatelessDrafter):
    """Drafts the likeliest guesses after each text.

    Args:
        guesses: all of them.
    """

    def __init__(self, guesses: Guesses) -> None:
        self.nodes, self.guesses = guesses.nodes, guesses
        self._in_rounds = replace(guesses)

    def rounds_guesses(self) -> Guesses:
        """See ``RoundsDrafter``; by costs as many as pay."""
        return self._in_rounds

    def use_costs(self, costs: Sequence[float] | None) -> None:
        """Of passes in rounds over a root and 0 to ``nodes`` guesses; None: all are judged."""
        self._in_rounds.costs = costs

    def propose(self, context: Context) -> Draft:
        found = [self.guesses.tree(text) for text in context.tokens]
        draft = as_draft([_tree(guessed) for guessed in found], context.root.device)
        return replace(draft, gains=[each.gains for each in found], sources=[each.sources for each in found])


def _tree(guessed: GuessedTree) -> Tree:
    (_, *depths), *_ = places_on_host([guessed.parents], [0])
    return Tree(guessed.tokens, guessed.parents, depths)


class Ngram(SpeculativeDecoder):
    """Drafts by n-grams of the text and of a table.

    Args:
        nodes: most tokens of a draft.
        least: likelihood below which nothing is drafted.
        costs: of passes, by which drafts are sized; see ``methods.speculative.budget``.
        datastore: the method whose datastore the table is counted from.
        checkpoint: folder of a datastore; None: the one prepared for this model.

    Raises:
        ValueError: an option out of range, no datastore that fits, or no compiler for the kernels.
    """

    continuous_batching = True
    checkpoint_of = "datastore"
    trainable = True
    needs = "a datastore"
    paper = "Stewart et al. 2024, arXiv 2411.03786"

    drafter: NgramDrafter

    def __init__(
        self,
        target: CausalLM,
        sampling: Sampling,
        nodes: int = 24,
        least: float = 0.02,
        costs: CostsOption = None,
        datastore: str = "rest",
        checkpoint: str | Path | None = None,
    ) -> None:
        if nodes < 1 or not 0.0 <= least < 1.0:
            raise ValueError(
                f"ngram needs nodes >= 1 and least from 0 to below 1, got nodes={nodes}, least={least}. Set "
                "method.nodes=24 and method.least=0.02 or so."
            )
        if cpu_kernels.library() is None:
            raise ValueError("ngram needs a C++ compiler for its kernels, got none. Install g++, or use method=suffix.")
        self._table = ngram_table(datastore, checkpoint, target)
        drafter = NgramDrafter(Guesses(nodes, self._table, least=least))
        super().__init__(target, sampling, drafter, default_rule(sampling, "tree", drawn=False), costs)
        self.forget_costs()

    def use_costs(self, costs: Sequence[Sequence[int | float]]) -> None:
        super().use_costs(costs)
        if self.target.runs_rounds:  # those of rounds, as of this moment
            self.drafter.use_costs(measured_costs(self.target, self.drafter.nodes))

    def forget_costs(self) -> None:
        super().forget_costs()
        costs = self.costs
        self.drafter.use_costs(None if costs is None else [costs.time(1 + n) for n in range(1 + self.drafter.nodes)])

    def memory(self) -> dict[str, int | None]:
        """Memory of the table."""
        return {"ngram_table": self._table.nbytes}


def ngram_table(method: str, checkpoint: str | Path | None, target: CausalLM) -> NgramTable:
    """A table counted from a datastore, once for all methods that use it at the same time.

    Args:
        method: that makes such datastores.
        checkpoint: folder of one.

    Raises:
        ValueError: there is none, or it does not fit.
    """
    folder = part_folder(method, "datastore", checkpoint)
    store = Datastore.load(folder, target.vocab_size)
    written = (folder.resolve(), (folder / HEADER).stat().st_mtime_ns)
    table = _TABLES.get(written)
    if table is None:
        tokens = store.tokens.astype(np.int64)
        _TABLES[written] = table = NgramTable(np.where(tokens == SEPARATOR, -1, tokens), store.vocab_size)
    return table
