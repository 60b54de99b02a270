"""Common to decoders with trained heads: memory, and the warning for published ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from methods.drafting import AcceptanceRule, Drafter
from methods.engine.causal_lm import CausalLM
from methods.engine.sampling import Sampling
from methods.speculative.budget import CostsOption, affordable
from methods.speculative.loop import SpeculativeDecoder
from methods.speculative.published.formats import check_plausible


@runtime_checkable
class HeadsDrafter(Drafter, Protocol):
    """A drafter that reports the memory of its matrices."""

    @property
    def nbytes(self) -> dict[str, int]: ...


class HeadsDecoder(SpeculativeDecoder):
    """A decoder whose drafter was trained.

    Args:
        published: the origin of its heads, if they are published ones.
        costs: see ``SpeculativeDecoder``.
    """

    trainable = True
    needs = "training"
    min_warmup = 3

    def __init__(
        self,
        target: CausalLM,
        sampling: Sampling,
        drafter: HeadsDrafter,
        rule: AcceptanceRule,
        published: str | None = None,
        costs: CostsOption = None,
    ) -> None:
        self._heads, self._published = drafter, published
        super().__init__(target, sampling, drafter, rule, costs)
        self._settle()

    def use_costs(self, costs: Sequence[Sequence[int | float]]) -> None:
        super().use_costs(costs)
        self._settle()

    def forget_costs(self) -> None:
        super().forget_costs()
        self._settle()

    def _settle(self) -> None:
        """Draft with the heads, or not at all where the costs say that they cannot pay."""
        self.drafter = affordable(self._heads, self.costs)

    def memory(self) -> dict[str, int | None]:
        """Memory beside the target's, such as the heads, and the rows of its output matrix that they use."""
        return dict(self._heads.nbytes)

    @property
    def draft_weights(self) -> str | None:
        return self.target.drafts_rounded_to

    def acceptance_warning(self, rates: Sequence[Sequence[float]]) -> str | None:
        """A warning where published heads draft implausibly badly."""
        return check_plausible(self._published, rates) if self._published else None
