"""The length of a translation: a distribution over its length minus that of the source.

Both count tokens without the end. The head reads the encoder's states and does not change them: on a small corpus a
length is learnt by heart, and an encoder that serves this learns to translate less. The card of a student compares its
loss on validation pairs with that of the mere frequencies of the differences.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from methods.non_autoregressive.network import Memory, present_up_to


class LengthHead(nn.Module):
    """One linear map of the mean of the encoder's states, which get no gradient from it.

    Args:
        width: of the states.
        reach: largest difference of the lengths either way; larger ones count as that.
        positions: longest target.
    """

    def __init__(self, width: int, positions: int, reach: int = 20) -> None:
        super().__init__()
        self.reach, self.positions = reach, positions
        self.head = nn.Linear(width, 2 * reach + 1)

    def forward(self, memory: Memory) -> Float[Tensor, "B R"]:
        """Logits of the differences -reach to reach."""
        states = memory.states.detach()
        present = present_up_to(memory.lengths, states.shape[1])[:, :, None].to(states.dtype)
        return self.head((states * present).sum(1) / present.sum(1))

    def loss(self, memory: Memory, lengths: Int[Tensor, "B"]) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """Cross-entropy per sentence, and the share of the lengths that are right."""
        logits = self(memory).float()
        wanted = (lengths - memory.content).clamp(-self.reach, self.reach) + self.reach
        return F.cross_entropy(logits, wanted), (logits.argmax(-1) == wanted).float().mean()

    def frequency_loss(self, learnt: Sequence[int], judged: Sequence[int]) -> float:
        """Cross-entropy of differences by how often each was seen, one more than that; what any source adds is less.

        Args:
            learnt, judged: differences of the lengths.
        """
        seen, asked = (
            torch.tensor(list(side)).clamp(-self.reach, self.reach) + self.reach for side in (learnt, judged)
        )
        counts = torch.bincount(seen, minlength=2 * self.reach + 1).float() + 1
        return float(F.nll_loss((counts / counts.sum()).log().expand(len(asked), -1), asked))

    def require(self, count: int) -> None:
        """Refuse to try more lengths than there are.

        Raises:
            ValueError: more.
        """
        if count > 2 * self.reach + 1:
            raise ValueError(
                f"length_beam must be at most {2 * self.reach + 1}, the lengths that the length head knows, got "
                f"{count}. Set a smaller method.length_beam."
            )

    def best(self, memory: Memory, count: int = 1) -> Int[Tensor, "B K"]:
        """The most likely lengths, best first.

        Raises:
            ValueError: see ``require``.
        """
        self.require(count)
        offset = self(memory).topk(count, -1).indices - self.reach
        return (memory.content[:, None] + offset).clamp(1, self.positions)
