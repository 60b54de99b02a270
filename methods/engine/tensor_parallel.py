"""A target on several devices: tensor parallelism (Megatron-LM, Shoeybi et al. 2019, arXiv 1909.08053, sec. 3).

Every device has some of the heads and some of the numbers between the matrices of a feed-forward sub-layer: the first
matrices are cut by columns and the last ones by rows, as DTensor's plan says, and one sum over the devices follows each
sub-layer. Embedding, norms and output matrix are on every device.

One process per device. The first one runs the program with ``DrivingLM``, which tells the others what pass comes; they
run its layers in ``follow`` and nothing else. So methods, rules, clocks and draft models are of one process, and the
target alone is spread. A pass costs its sums, and one message of some numbers to the others.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from transformers import PreTrainedModel

from methods.engine.causal_layers import DENSE
from methods.engine.causal_lm import CausalLM, Pass
from methods.engine.kv_cache import Cache
from methods.engine.linear import Linear, LinearForm
from methods.engine.token_tree import Nodes, Parents

_COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
_ROWS = ("self_attn.o_proj", "mlp.down_proj")
_HEADER = 256  # numbers of a message; longer ones are followed by a second one


def plan() -> dict[str, ParallelStyle]:
    """How the matrices of a layer are cut."""
    return {**{name: ColwiseParallel() for name in _COLUMNS}, **{name: RowwiseParallel() for name in _ROWS}}


def require_divisible(model: PreTrainedModel, size: int) -> None:
    """Refuse what the plan does not fit.

    Raises:
        ValueError: another family, projections that are stored together, biases after a sum, or sizes that so many
            devices do not divide.
    """
    config: Any = model.config
    what = f"model.parallel={size}"
    if config.model_type not in DENSE:
        raise ValueError(
            f"{what} needs a decoder-only model without a mixture of experts ({', '.join(DENSE)}), got "
            f"{config.model_type}. Set model.parallel=1."
        )
    layer = model.model.layers[0]
    names = {name for name, _ in layer.named_modules()}
    if missing := [name for name in (*_COLUMNS, *_ROWS) if name not in names]:
        raise ValueError(f"{what} needs projections of their own, got none called {missing[0]}. Set model.parallel=1.")
    if biased := [name for name in _ROWS if layer.get_submodule(name).bias is not None]:
        raise ValueError(f"{what} needs no bias after a sum, got one in {biased[0]}. Set model.parallel=1.")
    norm = getattr(layer.self_attn, "q_norm", None)
    if norm is not None and norm.weight.shape[0] != layer.self_attn.head_dim:
        raise ValueError(f"{what} needs norms of single heads, got one of all queries. Set model.parallel=1.")
    sizes = {
        "heads": config.num_attention_heads,
        "kv_heads": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        "intermediate_size": config.intermediate_size,
    }
    if uneven := {name: value for name, value in sizes.items() if value % size}:
        found = ", ".join(f"{name}={value}" for name, value in uneven.items())
        raise ValueError(f"{what} must divide the heads and widths of the model, got {found}. Lower model.parallel.")


def cut(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Leave of a model's layers what this process computes; of a model on the meta device, placements alone.

    Parameters stay DTensors there, from which ``part_of`` reads which part of a value is wanted.
    """
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan(), src_data_rank=None)  # every process has read the same weights
        for module in layer.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if isinstance(parameter, DTensor) and not parameter.is_meta:
                    own = parameter.to_local().detach().clone()
                    setattr(module, name, nn.Parameter(own, requires_grad=False))


def part_of(parameter: Tensor, value: Tensor) -> Tensor:
    """Of a value for a whole parameter, what this process keeps."""
    if not isinstance(parameter, DTensor):
        return value
    (placement,), mesh = parameter.placements, parameter.device_mesh
    if not placement.is_shard():
        return value
    return value.chunk(mesh.size(), dim=placement.dim)[mesh.get_local_rank()].clone()  # type: ignore[attr-defined]


class SummedLinear(Linear):
    """A product whose input is spread over the devices: the sum of their products, on all of them."""

    def __init__(self, own: Linear, group: dist.ProcessGroup) -> None:
        self.own, self._group = own, group
        self.form, self.bias, self.nbytes = own.form, own.bias, own.nbytes

    def __call__(self, rows: Float[Tensor, "R I"]) -> Float[Tensor, "R O"]:
        found = self.own(rows)
        dist.all_reduce(found, group=self._group)
        return found

    @property
    def dense(self) -> Float[Tensor, "O I"]:
        """The part of this device."""
        return self.own.dense


@dataclass(frozen=True, slots=True)
class Devices:
    """The processes of a target, as one of them sees them.

    Attributes:
        mesh: of their devices.
        sums: group of the sums, on the devices.
        words: group of the messages, on the hosts.
    """

    mesh: DeviceMesh
    sums: dist.ProcessGroup
    words: dist.ProcessGroup

    @property
    def size(self) -> int:
        return int(self.mesh.size())


class PartLM(CausalLM):
    """The part of a model that one device has. Build it with ``of``."""

    devices: Devices

    @classmethod
    def of(cls, model: PreTrainedModel, devices: Devices, linear: LinearForm = "auto") -> PartLM:
        """Take over the weights of a model that was ``cut``."""
        lm = cls(model.eval(), linear)
        lm.devices = devices
        lm.heads, lm.kv_heads = lm.heads // devices.size, lm.kv_heads // devices.size
        lm.layers = [
            replace(
                layer,
                attention=replace(layer.attention, out=SummedLinear(layer.attention.out, devices.sums)),
                mlp=replace(layer.mlp, down=SummedLinear(layer.mlp.down, devices.sums)),  # type: ignore[union-attr,arg-type]
            )
            for layer in lm.layers
        ]
        return lm

    @property
    def layer_sizes(self) -> dict[str, int]:
        return {name: size * self.devices.size for name, size in super().layer_sizes.items()}


class _Word(IntEnum):
    """What the first process tells the others."""

    STOP = 0
    CACHE = 1  # number, batch, capacity; layers left out
    DROP = 2  # number of a cache
    BEGIN = 3  # number of a cache, lengths of its rows, nodes, levels, and whether there are parents
    RUN = 4  # layers; sub-layers left out
    PACK = 5  # number of a cache, lengths, width of the path
    SELECT = 6  # number of a cache, rows
    ADOPT = 7  # numbers of two caches, rows, lengths of the second


def _say(devices: Devices, *numbers: int) -> None:
    """Send a message to the other processes."""
    message = torch.zeros(_HEADER, dtype=torch.long)
    content = torch.tensor(numbers)
    message[0], head = len(numbers), content[: _HEADER - 1]
    message[1 : 1 + len(head)] = head
    dist.broadcast(message, 0, group=devices.words)
    if len(numbers) > len(head):
        dist.broadcast(content, 0, group=devices.words)


def _hear(devices: Devices) -> list[int]:
    """The next message."""
    message = torch.empty(_HEADER, dtype=torch.long)
    dist.broadcast(message, 0, group=devices.words)
    count = int(message[0])
    if count < _HEADER:
        return message[1 : 1 + count].tolist()
    content = torch.empty(count, dtype=torch.long)
    dist.broadcast(content, 0, group=devices.words)
    return content.tolist()


class DrivingCache(Cache):
    """The first process's part of a cache, which moves the others' with it. ``DrivingLM.new_cache`` makes it."""

    number: int
    devices: Devices

    def pack(self, path: Int[Tensor, "B P"]) -> None:
        _say(self.devices, _Word.PACK, self.number, path.shape[1], *self.lengths)
        dist.broadcast(path.contiguous(), 0, group=self.devices.sums)
        super().pack(path)

    def select(self, rows: Sequence[int]) -> None:
        _say(self.devices, _Word.SELECT, self.number, len(self.lengths), *self.lengths, *rows)
        super().select(rows)

    def reorder(self, rows: Int[Tensor, "B"], start: int) -> None:
        raise ValueError("Beam search needs a target on one device, got model.parallel above 1. Set model.parallel=1.")

    def adopt(self, rows: Sequence[int], other: Cache) -> None:
        assert isinstance(other, DrivingCache), "caches of one model"
        _say(self.devices, _Word.ADOPT, self.number, other.number, len(rows), *rows, *other.lengths, *self.lengths)
        super().adopt(rows, other)


@dataclass
class _Course:
    """What a driving model and its views remember between two messages.

    Attributes:
        caches: how many were made.
        dropped: numbers of those that are gone here, and not yet elsewhere.
        state: of the pass under way, and its hidden states as the last layer left them.
        failed: a pass ended in its middle, where the others still wait for it.
    """

    caches: int = 0
    dropped: list[int] = field(default_factory=list)
    state: tuple[int, weakref.ref[Tensor]] | None = None
    failed: bool = False


class DrivingLM(PartLM):
    """The first process's part of a model, whose passes the other processes run too. Build it with ``of``."""

    _course: _Course

    @classmethod
    def of(cls, model: PreTrainedModel, devices: Devices, linear: LinearForm = "auto") -> DrivingLM:
        lm = super().of(model, devices, linear)
        assert isinstance(lm, DrivingLM)
        lm._course = _Course()
        return lm

    def _make_cache(self, batch: int, capacity: int) -> Cache:
        course = self._course
        while course.dropped:
            _say(self.devices, _Word.DROP, course.dropped.pop())
        course.caches += 1
        cache = object.__new__(DrivingCache)
        cache.__dict__.update(super()._make_cache(batch, capacity).__dict__)
        cache.number, cache.devices = course.caches, self.devices
        _say(self.devices, _Word.CACHE, cache.number, batch, capacity, *sorted(self.skipped_attention))
        weakref.finalize(cache, course.dropped.append, cache.number)
        return cache

    def begin(
        self, tokens: Nodes, parents: Parents, cache: Cache, levels: int | None = None, end: int | None = None
    ) -> Pass:
        assert isinstance(cache, DrivingCache) and end is None, "caches are of this model, and passes of any shape"
        if self._course.failed:
            raise RuntimeError("A pass over several devices failed in its middle; load the target again.")
        form = (tokens.shape[1], levels or 0, int(parents is not None))
        _say(self.devices, _Word.BEGIN, cache.number, *form, *cache.lengths)
        for tensor in (tokens, parents) if parents is not None else (tokens,):
            dist.broadcast(tensor.contiguous(), 0, group=self.devices.sums)
        state = super().begin(tokens, parents, cache, levels)
        self._note(state)
        return state

    def _note(self, state: Pass) -> None:
        self._course.state = id(state), weakref.ref(state.hidden)

    def run(
        self, state: Pass, layers: Iterable[int], hidden_layers: Collection[int] = ()
    ) -> dict[int, Float[Tensor, "B M D"]]:
        chosen = list(layers)
        number, hidden = self._course.state or (0, None)
        if hidden is None or number != id(state) or hidden() is not state.hidden:
            raise ValueError(
                "model.parallel above 1 needs a method that changes no state between the layers, as the baseline and "
                "speculative methods with drafters of their own. Set model.parallel=1."
            )
        left_out = (sorted(self.skipped_attention), sorted(self.skipped_mlp))
        _say(self.devices, _Word.RUN, *(len(each) for each in (chosen, *left_out)), *chosen, *left_out[0], *left_out[1])
        try:
            seen = super().run(state, chosen, hidden_layers)
        except BaseException:
            self._course.failed = True
            raise
        self._note(state)
        return seen

    def fill(self, state: Pass, layers: Sequence[int]) -> None:
        raise ValueError("Early exit needs a target on one device, got model.parallel above 1. Set model.parallel=1.")

    def stop(self) -> None:
        """Let the other processes end."""
        _say(self.devices, _Word.STOP)


@torch.inference_mode()
def follow(lm: PartLM) -> None:
    """Run the passes of the first process until it says stop."""
    caches: dict[int, Cache] = {}
    state: Pass | None = None
    while True:
        word, *numbers = _hear(lm.devices)
        if word == _Word.STOP:
            return
        if word == _Word.CACHE:
            number, batch, capacity, *left_out = numbers
            state = None  # it holds a cache
            caches[number] = lm.skip(attention=left_out).new_cache(batch, capacity)
        elif word == _Word.DROP:
            caches.pop(numbers[0], None)
        elif word == _Word.BEGIN:
            state = _begin(lm, caches[numbers[0]], numbers[1:])
        elif word == _Word.RUN:
            assert state is not None, "a pass begins before it runs"
            _run(lm, state, numbers)
        elif word == _Word.PACK:
            cache, width = caches[numbers[0]], numbers[1]
            cache.set_lengths(numbers[2:])
            path = torch.empty(cache.batch, width, dtype=torch.long, device=lm.device)
            dist.broadcast(path, 0, group=lm.devices.sums)
            cache.pack(path)
        elif word == _Word.SELECT:
            number, count, *rest = numbers
            caches[number].set_lengths(rest[:count])
            caches[number].select(rest[count:])
        elif word == _Word.ADOPT:
            number, source, count, *rest = numbers
            caches[source].set_lengths(rest[count : 2 * count])
            caches[number].set_lengths(rest[2 * count :])
            caches[number].adopt(rest[:count], caches[source])


def _begin(lm: PartLM, cache: Cache, numbers: Sequence[int]) -> Pass:
    nodes, levels, has_parents, *lengths = numbers
    cache.set_lengths(lengths)
    tokens = torch.empty(cache.batch, nodes, dtype=torch.long, device=lm.device)
    dist.broadcast(tokens, 0, group=lm.devices.sums)
    parents = None
    if has_parents:
        parents = torch.empty(cache.batch, nodes - 1, dtype=torch.long, device=lm.device)
        dist.broadcast(parents, 0, group=lm.devices.sums)
    return lm.begin(tokens, parents, cache, levels or None)


def _run(lm: PartLM, state: Pass, numbers: Sequence[int]) -> None:
    layers, attention, mlp, *rest = numbers
    chosen, left_out, left_out_mlp = rest[:layers], rest[layers : layers + attention], rest[layers + attention :]
    assert len(left_out_mlp) == mlp, "all layers were named"
    lm.skip(left_out, left_out_mlp).run(state, chosen)
