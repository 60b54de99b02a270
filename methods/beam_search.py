"""Beam search on our own engine: the baseline of translation papers, with the kernels and caches of every other row.

Published speed-ups of one-pass methods are over a beam of 4 or 5. This is that baseline at its best: encoder once per
source, beams as rows of one batch, caches reordered on the device, finished rows dropped. ``hf_beam`` is transformers'
own search, which writes the same texts.

The text is known only when the search ends. Rounds are reported one token each, as they extended the beams, and the
last one ends with the search: totals are right, times of single tokens are not.

Command: ``python -m bench method=beam_search model=multi30k_4_4 dataset=multi30k``
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from jaxtyping import Int
from torch import Generator, Tensor

from methods.decoder import Decoder, Guarantee, Step
from methods.engine.beam_search import BeamSettings, search
from methods.engine.causal_lm import CausalLM
from methods.engine.sampling import Sampling
from methods.engine.stopwatch import synchronize


class BeamSearch(Decoder):
    """The likeliest text that ``num_beams`` beams find, by log-probability / length^length_penalty.

    Args:
        target: of either kind.
        sampling: must be greedy.
        num_beams, length_penalty, early_stopping: see ``BeamSettings``.

    Raises:
        ValueError: fewer than two beams, or a temperature.
    """

    guarantee = Guarantee.RELAXED
    family = "baseline"
    greedy_only = True
    speed_only = True

    def __init__(
        self,
        target: CausalLM,
        sampling: Sampling,
        num_beams: int = 5,
        length_penalty: float = 1.0,
        early_stopping: bool = False,
    ) -> None:
        if not sampling.greedy:
            raise ValueError(
                f"Beam search must be greedy, got temperature={sampling.temperature}. Set sampling=greedy, or choose "
                "another method."
            )
        self.target, self.settings = target, BeamSettings(num_beams, length_penalty, early_stopping)
        self._texts = self._passes = self._tokens = 0

    @property
    def most_nodes(self) -> int:
        """Every beam is a row of the pass."""
        return self.settings.beams

    def decode(self, prompts: list[Int[Tensor, "_"]], limit: int, rng: Generator) -> Iterator[Step]:
        """See ``methods.decoder.Decoder.decode``; ends by itself."""
        times: list[int] = []
        rows: list[int] = []

        def watch(count: int) -> None:
            synchronize(self.target.device)
            times.append(time.perf_counter_ns())
            rows.append(count)

        texts = search(self.target, prompts, limit, self.settings, watch)
        synchronize(self.target.device)
        self._texts, self._passes = self._texts + len(texts), self._passes + len(times)
        self._tokens += sum(map(len, texts))
        longest = max(map(len, texts))
        whole = [[*text, *[text[-1]] * (longest - len(text))] for text in texts]  # what follows an end is not read
        ends = [*times[: longest - 1], time.perf_counter_ns()]
        for place, at_ns in enumerate(ends):
            yield Step.undrafted(
                [[text[place]] for text in whole],
                nodes=self.settings.beams if place else 1,
                target_passes=1 if place < longest - 1 else max(1, len(times) - place),
                at_ns=at_ns,
            )

    def stats(self) -> dict[str, Any]:
        """Beams, and passes of the target per batch and token of the texts."""
        passes = self._passes / self._tokens if self._tokens else None
        return {"num_beams": self.settings.beams, "passes_per_token": passes}
