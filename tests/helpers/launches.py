"""Counts what a round of decoding asks of a device outside of the target's pass: launches, copies and reads.

On a GPU every operator that computes is one launch of some microseconds or more, and every tensor that is made of
numbers of the host a copy that waits. Both can be counted on a CPU; views and new memory are neither.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from methods.decoder import Decoder
from methods.engine.causal_lm import CausalLM

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
        copies: tensors made of numbers of the host.
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


def count_rounds(decoder: Decoder, target: CausalLM, prompts: Sequence[Tensor], limit: int) -> Counts:
    """Count in all rounds after the first, which a decoder may begin otherwise than it goes on."""
    counts, counter = Counts(), _Count()
    with torch.inference_mode(), _watched(target, counter, counts):
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
    """The pass of the target is not counted; a read ends a round."""
    passes: dict[str, Callable[..., Any]] = {
        name: getattr(target, name) for name in ("forward", "verify") if hasattr(target, name)
    }
    tensor, tolist = torch.tensor, Tensor.tolist

    def untracked(work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            counter.into = None
            found = work(*args, **kwargs)
            counter.into = counts.operators["hidden"]
            return found

        return run

    def copied(*args: Any, **kwargs: Any) -> Tensor:
        counts.copies += 1
        return tensor(*args, **kwargs)

    def read(self: Tensor) -> Any:
        counts.reads += 1
        found = tolist(self)
        counter.into = counts.operators["exposed"]
        return found

    for name, work in passes.items():
        setattr(target, name, untracked(work))
    try:
        with mock.patch.object(torch, "tensor", copied), mock.patch.object(Tensor, "tolist", read):
            yield
    finally:
        for name in passes:
            delattr(target, name)
