"""REST: draft what followed the last words wherever they stood in a datastore.

He et al. 2023, arXiv 2311.08252. The longest ending of the text, ``max_ngram`` to ``min_ngram`` tokens, that stands
in the datastore is looked up (sec. 3.1); the continuations of its occurrences become a trie weighted by how many of
them share a prefix, and the ``nodes`` most frequent prefixes are the draft, a tree (sec. 3.2). No model drafts. The
datastore must be prepared, of text like the text to be written:

    python -m bench.train method=rest model=smollm2 corpus=dolly,gsm8k

Published: 1.62x to 2.36x with Code Llama on HumanEval and Vicuna on MT-bench, 7B and 13B, one A6000; Spec-Bench with
Vicuna-7B: 1.48x on an A100, 1.28x on a 3090, 1.82 and 1.63 tokens per step. Endings of 16 to 2 tokens, continuations
of 10, 5000 occurrences and 64 nodes are those of the paper's code, and the defaults here. Where a pass over 65 nodes
costs several steps, as on a CPU, that tree cannot pay; the YAML file names a small one.

Differences: drafts are judged by the exact rule for trees that were not drawn; at a temperature the paper's code keeps
the longest of several paths sampled apart, which changes the distribution. Documents are apart: no ending and no
continuation crosses their borders. Of more than ``occurrences`` places, evenly spaced ones are read in the order of
their continuations, so shares are kept and a run repeats. Of equally frequent prefixes the shorter goes first,
then the one whose ids are smaller.

Command: ``python -m bench method=rest dataset=mtbench``
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int64

from methods.decoder import ABSENT, Context, Draft
from methods.engine.lm import CausalLM
from methods.engine.sampling import Sampling
from methods.speculative.datastore import LONGEST, Datastore, Matches
from methods.speculative.loop import SpeculativeDecoder
from methods.speculative.verify import default_rule


@dataclass(frozen=True, slots=True)
class Prefixes:
    """The most frequent prefixes per row, as nodes of a tree. Rows in order; in a row the most frequent first.

    Attributes:
        rows: the row each node belongs to.
        columns: its number in that row.
        tokens: the last token of the prefix.
        parents: column of the prefix without its last token; -1 for a prefix of one token.
        depths: tokens of the prefix.
        counts: continuations that begin with it.
    """

    rows: Int64[np.ndarray, "n"]
    columns: Int64[np.ndarray, "n"]
    tokens: Int64[np.ndarray, "n"]
    parents: Int64[np.ndarray, "n"]
    depths: Int64[np.ndarray, "n"]
    counts: Int64[np.ndarray, "n"]


def spread(matches: Matches, most: int) -> tuple[Int64[np.ndarray, "K"], Int64[np.ndarray, "K"]]:
    """Row and index into ``Datastore.places`` of at most ``most`` occurrences a row, evenly spaced over its range."""
    spans = matches.high - matches.low
    taken = np.minimum(spans, most)
    rows = np.repeat(np.arange(len(spans)), taken)
    turn = np.arange(len(rows)) - (np.cumsum(taken) - taken)[rows]
    return rows, matches.low[rows] + (2 * turn + 1) * spans[rows] // (2 * taken[rows])


def frequent_prefixes(paths: Int64[np.ndarray, "K d"], rows: Int64[np.ndarray, "K"], most: int) -> Prefixes:
    """The ``most`` most frequent prefixes of each row's paths.

    A prefix is at least as frequent as a longer one that begins with it and goes first among equals, so whatever is
    kept has its parent kept, and before it.

    Args:
        paths: tokens, ``ABSENT`` behind the end of a path; those of a row stand together and equal beginnings do too.
        rows: the row of each path, ascending.
    """
    differs = np.ones(paths.shape, bool)
    differs[1:] = (paths[1:] != paths[:-1]) | (rows[1:] != rows[:-1])[:, None]
    begins = np.logical_or.accumulate(differs, axis=1).T.ravel()  # level by level: is this prefix a new one?
    firsts = np.flatnonzero(begins)
    counts = np.diff(firsts, append=begins.size)  # the first path of a level is new, so no count runs on into the next
    levels, path = np.divmod(firsts, max(len(paths), 1))
    tokens, owners = paths[path, levels], rows[path]

    order = np.lexsort((path, levels, -counts, owners))
    order = order[tokens[order] != ABSENT]
    rank = np.arange(len(order)) - np.searchsorted(owners[order], owners[order])
    kept, columns = order[rank < most], rank[rank < most]

    column_of = np.full(len(firsts), ABSENT)
    column_of[kept] = columns
    prefix_at = np.cumsum(begins) - 1
    above = np.maximum(levels[kept] - 1, 0) * len(paths) + path[kept]
    parents = np.where(levels[kept] > 0, column_of[prefix_at[above]], -1)
    return Prefixes(owners[kept], columns, tokens[kept], parents, levels[kept] + 1, counts[kept])


def as_draft(prefixes: Prefixes, batch: int, device: torch.device) -> Draft:
    """A tree per row; a chain where no row branches, which costs the target no tree mask."""
    sizes = np.bincount(prefixes.rows, minlength=batch)
    width = int(sizes.max())
    nodes = np.full((2, batch, width), ABSENT)
    nodes[:, prefixes.rows, prefixes.columns] = prefixes.tokens, prefixes.parents
    tokens, parents = torch.from_numpy(nodes).to(device)
    children = int(np.bincount(prefixes.rows * (width + 1) + prefixes.parents + 1, minlength=1).max())
    if children <= 1:
        return Draft.chain(tokens, sizes=sizes.tolist())
    depths = np.zeros(batch, np.int64)
    np.maximum.at(depths, prefixes.rows, prefixes.depths)
    return Draft(
        tokens, parents, sizes=sizes.tolist(), depths=depths.tolist(), levels=int(depths.max()), width=children
    )


class RestDrafter:
    """Drafts from a datastore; nothing is kept between rounds."""

    taps: Sequence[int] = ()

    def __init__(
        self, store: Datastore, nodes: int, max_ngram: int, min_ngram: int, continuation: int, occurrences: int
    ) -> None:
        self.nodes, self.store = nodes, store
        self._longest, self._shortest = max_ngram, min_ngram
        self._continuation, self._occurrences = continuation, occurrences

    def reset(self, prompts: list[list[int]], limit: int) -> None:
        pass

    def propose(self, context: Context) -> Draft:
        matches = self.store.find(context.tokens, self._longest, self._shortest)
        rows, found = spread(matches, self._occurrences)
        paths = self.store.behind(self.store.places[found] + matches.lengths[rows], self._continuation)
        return as_draft(frequent_prefixes(paths, rows, self.nodes), len(context.tokens), context.root.device)


class Rest(SpeculativeDecoder):
    """REST with a tree of up to ``nodes`` tokens.

    Args:
        target: model that verifies.
        sampling: how its distribution is processed.
        nodes: most tokens drafted per round.
        max_ngram: longest ending that is looked up; longer ones are preferred.
        min_ngram: shortest ending that is looked up.
        continuation: most tokens read behind an occurrence, the depth of the tree.
        occurrences: most occurrences read per round.
        checkpoint: folder of a datastore; None: the one prepared for this model.
        part: that one's folder, from the runner.

    Raises:
        ValueError: an option out of range, or no datastore that fits.
    """

    def __init__(
        self,
        target: CausalLM,
        sampling: Sampling,
        nodes: int = 64,
        max_ngram: int = 16,
        min_ngram: int = 2,
        continuation: int = 10,
        occurrences: int = 5000,
        checkpoint: str | Path | None = None,
        part: Path | None = None,
    ) -> None:
        if min(nodes, occurrences) < 1 or not 1 <= continuation <= LONGEST:
            raise ValueError(
                f"nodes={nodes}, continuation={continuation}, occurrences={occurrences} came; nodes and occurrences "
                f"of at least 1 and continuation from 1 to {LONGEST} are allowed. For no draft at all use "
                "method=autoregressive."
            )
        if not 1 <= min_ngram <= max_ngram <= LONGEST:
            raise ValueError(
                f"min_ngram={min_ngram} and max_ngram={max_ngram} came; 1 <= min_ngram <= max_ngram <= {LONGEST} is "
                "allowed. Change one of the two."
            )
        store = Datastore.load(_folder(checkpoint, part), target.vocab_size)
        drafter = RestDrafter(store, nodes, max_ngram, min_ngram, continuation, occurrences)
        super().__init__(target, sampling, drafter, default_rule(sampling, "tree", drawn=False))
        self._store = store

    def own_bytes(self) -> dict[str, int | None]:
        """Memory beside the target's: what is mapped, and how much of it is resident now."""
        return {"datastore_mapped": self._store.mapped_bytes, "datastore_resident": self._store.resident_bytes()}


def _folder(checkpoint: str | Path | None, part: Path | None) -> Path:
    folder = Path(checkpoint).expanduser() if checkpoint is not None else part
    if folder is None:
        raise ValueError(
            "rest has no datastore for this model; it needs one to draft from. Make it: "
            "python -m bench.train method=rest model=MODEL; or name yours: method.checkpoint=FOLDER."
        )
    return folder
