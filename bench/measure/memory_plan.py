"""Memory that a run takes, computed before it: from sizes alone before a model is loaded, in full before it decodes.

Weights, keys and values count once. What a pass works on is an estimate: the states and products of its nodes, the
mask where no kernel replaces it, and the logits, twice for the argmax and in 32 bit where tokens are drawn. Work space
of libraries, pools of CUDA graphs, pages of code and tables that a method builds of the text are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from bench.config.schema import RunConfig, parallel_of, weights_of
from bench.errors import UserError
from bench.models import loading
from bench.utils import memory
from methods.decoder import Decoder
from methods.engine.causal_lm import CausalLM

_CHARACTERS = 8  # of a prompt per token: more than tokenizers reach, so that no run is refused that would fit
_BYTES = {"int4": 20 / 32, "fp8": 1.0}  # of a weight in blocks of 4-bit numbers, and of one in 8 bits
Planned = Callable[[int, int], "Plan"]  # from rows, and tokens of the longest prompt


@dataclass(frozen=True, slots=True)
class Plan:
    """Bytes of a run.

    Attributes:
        weights: of the target.
        method: what the method holds beside it, such as heads or the weights of a draft model.
        cache: keys and values of the target.
        draft_cache: those of the drafter.
        work: states, mask and logits of the widest pass.
    """

    weights: int
    method: int
    cache: int
    draft_cache: int
    work: int

    @property
    def total(self) -> int:
        return self.weights + self.method + self.cache + self.draft_cache + self.work

    @property
    def to_come(self) -> int:
        """Of ``total``, what target and method do not hold already."""
        return self.cache + self.draft_cache + self.work

    def to_dict(self) -> dict[str, int]:
        """For the manifest."""
        return asdict(self) | {"total": self.total}

    def __str__(self) -> str:
        """``weights 310.5 MiB, cache 2.0 GiB``"""
        return ", ".join(f"{name.replace('_', ' ')} {memory.gib(size)}" for name, size in asdict(self).items() if size)


def plan(
    lm: CausalLM,
    decoders: Sequence[Decoder],
    held_bytes: int,
    rows: int,
    longest: int,
    limit: int,
    *,
    drawn: bool,
) -> Plan:
    """The plan of a run whose target and methods are made.

    Args:
        decoders: method and baseline.
        held_bytes: of the method.
        longest: tokens of the longest prompt.
        limit: most new tokens.
        drawn: tokens are drawn, and not the most likely ones.
    """
    caches = [decoder.planned_caches(rows, longest, limit) for decoder in decoders]
    cache, draft_cache = (max(found.get(name, 0) for found in caches) for name in ("cache", "draft_cache"))
    nodes, taps = max(d.most_nodes for d in decoders), max(d.states_read for d in decoders)
    hidden, item = lm.hidden_size, lm.dtype.itemsize
    wide = int(getattr(lm.config, "intermediate_size", None) or 4 * hidden)
    chunk, groups, slots = min(longest, lm.prefill_chunk(rows)), lm.heads // lm.kv_heads, longest + limit
    of_node = 4 * (3 * wide + 2 * hidden) if lm.fused else item * (3 * wide + 6 * hidden)
    of_slot = 0 if lm.fused else item * (groups + 1)
    logits = rows * nodes * lm.vocab_size * (2 * item + 8 * drawn)
    read = rows * chunk * of_node + chunk * slots * of_slot + 2 * taps * rows * longest * hidden * item
    verified = rows * nodes * (of_node + slots * of_slot) + logits
    return Plan(lm.weight_bytes + lm.encoder_bytes, held_bytes, cache, draft_cache, max(read, verified))


def require(planned: Planned, rows: int, longest: int, limit: int, device: torch.device) -> None:
    """Refuse a run that the device cannot hold, with target and method in memory.

    Raises:
        UserError: says how much is needed, how much there is, and what would fit.
    """
    _require(planned, rows, longest, limit, device, lambda found: found.to_come)


def require_before(cfg: RunConfig, examples: Sequence[Any]) -> None:
    """Refuse a run that the device cannot hold whatever its tokenizer makes of the prompts, before a model is loaded.

    A model that is not on this machine yet, or of which only its files tell the sizes, is not judged.

    Raises:
        UserError: see ``require``.
    """
    groups = cfg.to_dict()
    device, dtype = loading.resolve_hardware(groups["hardware"])
    shape = loading.shape_of(cfg.model, cfg.paths)
    if shape is None:
        return
    embeddings = shape.head_weights * (1 if shape.tied else 2)
    per_weight = _BYTES.get(weights_of(cfg.model), dtype.itemsize)
    layers = int((shape.stored_weights - embeddings) * per_weight)
    size = parallel_of(cfg.model) if device.type == "cuda" else 1  # devices that share the layers; a CPU has them all
    weights = layers // size + embeddings * dtype.itemsize
    if weights > memory.free_bytes(device):
        return  # loading says so, with the number of GPUs that would hold them
    per_token = (shape.layers * 2 * shape.kv_heads * shape.head_dim) * dtype.itemsize // size
    longest, limit = max(1, _shortest_reading(cfg, examples)), cfg.max_new_tokens

    def planned(rows: int, tokens: int) -> Plan:
        logits = rows * shape.vocab_size * dtype.itemsize
        return Plan(weights, 0, rows * (tokens + limit) * per_token, 0, logits)

    _require(planned, min(cfg.batch_size, len(examples)), longest, limit, device, lambda found: found.total)


def _shortest_reading(cfg: RunConfig, examples: Sequence[Any]) -> int:
    """Tokens that the longest prompt has at least."""
    if filled := cfg.dataset.get("fill_to"):
        return int(filled)
    return max((len(turn) for example in examples for turn in example.turns), default=0) // _CHARACTERS


def _require(
    planned: Planned, rows: int, longest: int, limit: int, device: torch.device, needed: Callable[[Plan], int]
) -> None:
    free, found = memory.free_bytes(device), planned(rows, longest)
    if needed(found) <= free:
        return
    fewer = _largest(rows - 1, lambda count: needed(planned(count, longest)) <= free)
    shorter = _largest(longest - 1, lambda tokens: needed(planned(rows, tokens)) <= free)
    fitting = [f"batch_size={fewer}"] * bool(fewer) + [f"max_context={shorter + limit}"] * bool(shorter)
    smaller = "Lower batch_size and the length of the texts, or choose a smaller model."
    cure = f"What fits: {' or '.join(fitting)}." if fitting else smaller
    already = "" if needed(found) == found.total else " beside what is loaded"
    what = f"A batch of {rows} rows of up to {longest + limit:,} tokens"
    place = "on the GPU" if device.type == "cuda" else "in memory"
    raise UserError(
        f"{what} needs {memory.gib(needed(found))}{already}, and {memory.gib(free)} are free {place}. Memory planned: "
        f"{found}. {cure}"
    )


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest count from 1 on that fits, where all smaller ones fit too; 0: none."""
    low, high = 0, max(0, most)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
