"""Counts what a round of decoding asks of a device outside of the target's pass: launches, copies and reads.

On a GPU every operator that computes is one launch of some microseconds or more, and every tensor that is made of
numbers of the host a copy that waits. Both can be counted on a CPU; views and new memory are neither.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from methods.decoder import Decoder
from methods.engine import cuda_graphs
from methods.engine.causal_lm import CausalLM
from methods.engine.cuda_graphs import GraphedLM, Recorded
from methods.engine.sampling import Sampling

_KERNELS = ("rms_norm", "linear", "scaled_dot_product_attention", "repeat_interleave", "roll")  # one each on CUDA
_FREE = {
    "view", "expand", "slice", "select", "unsqueeze", "squeeze", "transpose", "t", "as_strided", "detach", "detach_",
    "alias", "split", "split_with_sizes", "unbind", "chunk", "permute", "_unsafe_view", "_reshape_alias", "unflatten",
    "lift_fresh", "lift", "empty", "empty_like", "new_empty", "empty_strided", "diagonal", "narrow", "resize_", "set_",
    "_local_scalar_dense", "lift_fresh_copy",
}  # fmt: skip


@dataclass
class Counts:
    """Per phase of a round: ``exposed``, from the read of the last round to the pass of the target, while a device has
    nothing to do; ``hidden``, from that pass to the read.

    Attributes:
        rounds: how many were counted.
        operators: by phase, the operators that compute.
        copies: tensors made of numbers of the host that a GPU would make the host wait for (``from_host`` does not).
        reads: of the device.
    """

    rounds: int = 0
    operators: dict[str, Counter[str]] = field(default_factory=lambda: {"exposed": Counter(), "hidden": Counter()})
    copies: int = 0
    reads: int = 0

    def per_round(self, phase: str) -> float:
        return sum(self.operators[phase].values()) / self.rounds


class _Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.into: Counter[str] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in _KERNELS and func._can_decompose():
            with self:
                found = func.decompose(*args, **(kwargs or {}))
            if found is not NotImplemented:
                return found
        found = func(*args, **(kwargs or {}))
        first = found[0] if isinstance(found, (tuple, list)) and found else found
        empty = isinstance(first, Tensor) and not first.numel()
        if self.into is not None and name not in _FREE and not empty:
            self.into[name] += 1
        return found


def count_rounds(
    make: Callable[[CausalLM, Sampling], Decoder], target: CausalLM, prompts: Sequence[Tensor], limit: int
) -> Counts:
    """Count in greedy rounds after the first two, which may begin otherwise than a decode goes on.

    What a graph would replay is one launch, and is not counted; it is recorded in decodes before.
    """
    counts, counter = Counts(), _Count()
    with torch.inference_mode(), _watched(target, counter, counts):
        decoder = make(target, Sampling())
        for _ in range(3 if isinstance(target, GraphedLM) else 0):
            for _ in decoder.decode(list(prompts), limit, torch.Generator().manual_seed(0)):
                pass
        steps = decoder.decode(list(prompts), limit, torch.Generator().manual_seed(0))
        next(steps), next(steps)
        counts.copies = counts.reads = 0
        with counter:
            counter.into = counts.operators["exposed"]
            for _ in steps:
                counts.rounds += 1
    return counts


@contextmanager
def _watched(target: CausalLM, counter: _Count, counts: Counts) -> Iterator[None]:
    """Passes of the target and replays are not counted; a read ends a round."""
    tensor, tolist, forward, record = torch.tensor, Tensor.tolist, target.forward, cuda_graphs.record

    def passed(*args: Any, **kwargs: Any) -> Any:
        counter.into = None
        found = forward(*args, **kwargs)
        counter.into = counts.operators["hidden"]
        return found

    def recorded(*args: Any, **kwargs: Any) -> Recorded:
        made = record(*args, **kwargs)

        def run() -> None:
            counted, counter.into = counter.into, None
            made.run()
            counter.into = counted

        return Recorded(run, made.results)

    def copied(*args: Any, **kwargs: Any) -> Tensor:
        counts.copies += 1
        return tensor(*args, **kwargs)

    def unwaited(values: Any, device: torch.device) -> Tensor:
        return tensor(values, dtype=torch.long)

    def read(self: Tensor) -> Any:
        counts.reads += 1
        found = tolist(self)
        counter.into = counts.operators["exposed"]
        return found

    with ExitStack() as stack:
        for place, name, new in (
            (target, "forward", passed),
            (cuda_graphs, "record", recorded),
            (torch, "tensor", copied),
            (Tensor, "tolist", read),
            *((module, "from_host", unwaited) for module in _modules_with("from_host")),
        ):
            stack.enter_context(mock.patch.object(place, name, new))
        yield


def _modules_with(name: str) -> list[Any]:
    return [module for key, module in sys.modules.items() if key.startswith("methods.") and name in vars(module)]
