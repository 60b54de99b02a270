"""The share of decoding time spent on deciding whether to exit, measured by one more decode outside of a run.

A decision begins when the reader makes the state at an exit readable and ends when the target is asked for more layers.
It comprises the exit's own map, the output matrix as far as the confidence needs it, the confidence, and the host's
wait for it. The logits of an exit that is taken also give its token, so this is more than what a decoder without a
confidence would save. Where the kernels judge exits within a pass, torch's operators do so here, and take longer than
what the kernels measure of themselves, which a run records.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from typing import Any

from jaxtyping import Float, Int
from torch import Generator, Tensor

from methods.decoder import Step, generate
from methods.early_exit.exits import Reader
from methods.early_exit.loop import DecodeStats, ExitDecoder
from methods.engine.causal_lm import CausalLM
from methods.engine.stopwatch import Stopwatch, synchronize

_ON_THE_WAY = ("begin", "run", "fill")  # of a target, between two decisions


class _Watch:
    def __init__(self, reader: Reader, target: CausalLM) -> None:
        self.depths, self.nbytes = reader.depths, reader.nbytes
        self._reader, self._layers = reader, target.n_layers
        self._deciding = False
        self.spans: list[Stopwatch] = []
        self.target = copy.copy(target)
        for name in _ON_THE_WAY:
            setattr(self.target, name, self._heard(getattr(target, name)))

    def read(self, depth: int, hidden: Float[Tensor, "*b D"]) -> Float[Tensor, "*b D"]:
        """See ``Reader``. After the whole model there is nothing to decide."""
        if depth < self._layers:
            self._deciding = True
            self.spans.append(Stopwatch(hidden.device))
            self.spans[-1].start()
        return self._reader.read(depth, hidden)

    def maps(self, depth: int) -> int:
        return self._reader.maps(depth)

    def kernel_maps(self) -> None:
        """None: a decision in the midst of a call of the kernels cannot be timed from outside."""

    def close(self) -> None:
        """End of a decision."""
        if self._deciding:
            self.spans[-1].stop()
        self._deciding = False

    def _heard(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def heard(*given: Any, **named: Any) -> Any:
            self.close()
            return call(*given, **named)

        return heard


def confidence_share(
    decoder: ExitDecoder, prompts: list[Int[Tensor, "_"]], limit: int, rng: Generator
) -> dict[str, float]:
    """Decode once more, watched, to the end of every text; the decoder itself does not change.

    Returns:
        ``confidence_share``, of the time after the prompts, and ``looks_per_step``.
    """
    twin, watch = copy.copy(decoder), _Watch(decoder.reader, decoder.target)
    twin.target, twin.reader, twin.counters = watch.target, watch, DecodeStats()
    whole, steps = Stopwatch(decoder.target.device), -1  # the first one reads the prompts

    def count(step: Step, rows: Collection[int]) -> None:
        nonlocal steps
        watch.close()
        steps += 1
        if not steps:
            whole.start()

    generate(twin, prompts, limit, decoder.target.eos_ids, rng, count)
    whole.stop()
    synchronize(decoder.target.device)
    spent = whole.ns()
    if steps < 1 or not spent:
        return {}
    deciding = sum(span.ns() for span in watch.spans)
    return {"confidence_share": deciding / spent, "looks_per_step": len(watch.spans) / steps}
