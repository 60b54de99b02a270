"""The part of the vocabulary that a trained head proposes from.

An output matrix over the whole vocabulary costs a small model as much as several layers, and most of its rows are never
proposed. A head therefore chooses among the tokens that the target writes most often (EAGLE-3, Li et al. 2025, arXiv
2503.01840, sec. 4, uses 32,000 of 128,256; FR-Spec, Zhao et al. 2025, arXiv 2502.14856). Verification uses the whole
vocabulary, so only drafts of rare tokens are lost.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from jaxtyping import Float, Int
from torch import Tensor

OFFSETS = "d2t"  # the name in files of draft networks: what to add to a place to get its id


class DraftVocabulary:
    """Some ids of a vocabulary, in ascending order.

    Attributes:
        ids: [n] the ids; place i of a head's output is token ``ids[i]``.
        size: of the whole vocabulary.

    Raises:
        ValueError: ids that are no ascending selection of the vocabulary.
    """

    def __init__(self, ids: Int[Tensor, "n"], size: int) -> None:
        ids = ids.long()
        if not len(ids) or int(ids[0]) < 0 or int(ids[-1]) >= size or not bool((ids.diff() > 0).all()):
            raise ValueError(
                f"Draft ids must be different, ascending and below {size}, the size of the vocabulary, got {len(ids)} "
                "ids. Load the checkpoint with the model it was made for."
            )
        self.ids, self.size = ids, size
        self._places = torch.full((size,), -1, dtype=torch.long, device=ids.device)
        self._places[ids] = torch.arange(len(ids), device=ids.device)

    @classmethod
    def all(cls, size: int, device: torch.device | None = None) -> DraftVocabulary:
        """Every id."""
        return cls(torch.arange(size, device=device), size)

    @classmethod
    def of_offsets(cls, offsets: Int[Tensor, "n"] | None, size: int) -> DraftVocabulary:
        """From what files hold; None: every id."""
        if offsets is None:
            return cls.all(size)
        return cls(torch.arange(len(offsets)) + offsets.long().cpu(), size)

    @property
    def offsets(self) -> Int[Tensor, "n"]:
        """What files hold: what to add to a place to get its id."""
        ids = self.ids.cpu()
        return ids - torch.arange(len(ids))

    @classmethod
    def frequent(
        cls, tokens: Int[Tensor, "T"], wanted: int, size: int, always: Collection[int] = ()
    ) -> DraftVocabulary:
        """The ``wanted`` most frequent of ``tokens``, of equally frequent ones the lower ids, and those of ``always``.

        Fewer where fewer occur.
        """
        counts = torch.bincount(tokens.flatten().long(), minlength=size)
        counts[list(always)] = int(counts.sum()) + 1
        order = counts.argsort(descending=True, stable=True)[: min(wanted, size)]
        return cls(order[counts[order] > 0].sort().values, size)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def full(self) -> bool:
        """Nothing is left out, so a place is an id."""
        return len(self.ids) == self.size

    def of(self, tokens: Int[Tensor, "*b"]) -> Int[Tensor, "*b"]:
        """Places of ``tokens``; -1 for those that are left out."""
        return self._places[tokens]

    def tokens(self, places: Int[Tensor, "*b"]) -> Int[Tensor, "*b"]:
        """Ids at ``places``."""
        return places if self.full else self.ids[places]

    def everywhere(self, probs: Float[Tensor, "B m v"]) -> Float[Tensor, "B m V"]:
        """Probabilities of all tokens, 0 for those that are left out."""
        if self.full:
            return probs
        return probs.new_zeros(*probs.shape[:2], self.size).index_copy_(2, self.ids, probs)

    def to(self, device: torch.device) -> DraftVocabulary:
        """The same on another device."""
        return DraftVocabulary(self.ids.to(device), self.size)
