"""The prefix layer of Hydra++ (Ankner et al. 2024, arXiv 2402.05109, sec. 4.3).

A decoder layer of the target's sizes reads the target's last states of the whole text, and the heads read its output,
after a norm of its own, in the place of the target's last state. So they know more of the text than one state says, for
one pass of one layer per round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from methods.drafting import Context
from methods.engine.causal_layers import Attention, FeedForward, Layer
from methods.engine.causal_lm import CausalLM
from methods.speculative.added_layers import AddedLayer, StateReader
from methods.speculative.draft_layers import MOST_UNREAD, Shapes, Weights, layer_shapes, turned

_QUIET = 0.02  # standard deviation of the weights that do not begin as zero


@dataclass(frozen=True)
class _Sizes:
    """Of the layer, see ``draft_layers.Sizes``; its positions are the target's."""

    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    rope: Mapping[str, Any] = field(default_factory=dict)


def prefix_shapes(target: CausalLM) -> Shapes:
    """Its tensors, by the names of a Llama layer, and the norm after it."""
    width = target.hidden_size
    given: dict[str, Any] = {**target.layer_sizes}
    sizes = _Sizes(width, head_dim=target.head_dim, **given)
    return {**layer_shapes(sizes), "input_layernorm.weight": (width,), "norm.weight": (width,)}


def _eps(target: CausalLM) -> float:
    return float(getattr(target.config, "rms_norm_eps", 1e-6))


class Prefix:
    """The layer in decoding: it reads what passes commit.

    Args:
        nodes: most that a draft has.
    """

    def __init__(self, target: CausalLM, tensors: Mapping[str, Tensor], nodes: int) -> None:
        weights = Weights(target, tensors, _eps(target))
        attention = Attention(
            norm=weights.norm("input_layernorm"),
            qkv=weights.linear(*(f"self_attn.{name}_proj" for name in "qkv")),
            out=weights.linear("self_attn.o_proj"),
            query_norm=None,
            key_norm=None,
            norm_heads=False,
            post_norm=None,
            rotary=True,
        )
        mlp = FeedForward(
            norm=weights.norm("post_attention_layernorm"),
            gate_up=weights.linear("mlp.gate_proj", "mlp.up_proj"),
            down=weights.linear("mlp.down_proj"),
            activation=F.silu,
            post_norm=None,
        )
        self._layer, self._norm = AddedLayer(target, Layer(attention, mlp), plain=True), weights.norm("norm")
        self._nodes = nodes
        self._reader: StateReader | None = None
        self.nbytes = self._layer.nbytes

    def reset(self, prompts: list[list[int]], limit: int) -> None:
        """Forget earlier texts."""
        self._reader = self._new_reader(prompts, limit)

    def _new_reader(self, prompts: list[list[int]], limit: int) -> StateReader:
        return StateReader(self._layer, len(prompts), StateReader.capacity(prompts, limit, self._nodes))

    def resume(self, last: Context, prompts: list[list[int]], limit: int, kept: int) -> int:
        """See ``methods.drafting.ResumingDrafter``."""
        before = self._reader
        assert before is not None, "reset comes before resume"
        before.note(last)
        self._read(before)
        self._reader = self._new_reader(prompts, limit)
        return self._reader.continue_from(before, kept)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Keep only some rows, in this order."""
        assert self._reader is not None, "reset comes before keep_rows"
        self._reader.keep_rows(rows)

    def skip(self, context: Context) -> None:
        """Keep the states of the last pass; read them once in a while."""
        assert self._reader is not None, "reset comes before skip"
        self._reader.note(context)
        if len(self._reader.unread) > MOST_UNREAD:
            self._read(self._reader)

    def state(self, context: Context) -> Float[Tensor, "B D"]:
        """What the heads read in the place of the target's last state."""
        assert self._reader is not None, "reset comes before state"
        self._reader.note(context)
        return self._norm(self._read(self._reader))

    @staticmethod
    def _read(reader: StateReader) -> Float[Tensor, "B D"]:
        counts, states = reader.unread.take()
        return reader.advance(states[0], counts)


# -- training ---------------------------------------------------------------------------------------------------------


class PrefixModule(nn.Module):
    """The layer in training, with the names of its tensors.

    It starts as the identity, up to the length of the states: both updates are zero, and the norm's factor is the root
    mean square of the states.

    Args:
        scale: the root mean square of the target's states.
    """

    def __init__(self, target: CausalLM, scale: float) -> None:
        super().__init__()
        self._target = [target]  # not a part of this module
        self._eps = _eps(target)
        self.weights = nn.ParameterDict()
        for name, shape in prefix_shapes(target).items():
            weight = torch.ones(shape, device=target.device)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()
            elif len(shape) > 1:
                weight.normal_(0.0, _QUIET)
            self.weights[_key(name)] = nn.Parameter(weight * scale if name == "norm.weight" else weight)

    def forward(self, states: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """What the heads read at every place, of the target's states up to it."""
        target, weight = self._target[0], self._weight
        cos, sin = target.reserve_positions(states.shape[1])[:2]
        read = self._norm(states, "input_layernorm")
        heads = [
            F.linear(read, weight(f"self_attn.{name}_proj")).unflatten(-1, (-1, target.head_dim)) for name in "qkv"
        ]
        query, key = (turned(part, cos, sin).to(heads[2].dtype) for part in heads[:2])
        query, key, value = (part.transpose(1, 2) for part in (query, key, heads[2]))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        states = states + F.linear(mixed.transpose(1, 2).flatten(2), weight("self_attn.o_proj"))
        read = self._norm(states, "post_attention_layernorm")
        inner = F.silu(F.linear(read, weight("mlp.gate_proj"))) * F.linear(read, weight("mlp.up_proj"))
        return self._norm(states + F.linear(inner, weight("mlp.down_proj")), "norm")

    def trained(self) -> dict[str, Tensor]:
        """Its tensors."""
        return {name: self._weight(name.removesuffix(".weight")).detach() for name in prefix_shapes(self._target[0])}

    def _weight(self, name: str) -> Tensor:
        return self.weights[_key(f"{name}.weight")]

    def _norm(self, states: Float[Tensor, "B T D"], name: str) -> Float[Tensor, "B T D"]:
        weight = self._weight(name)
        return F.rms_norm(states.to(weight.dtype), weight.shape, weight, self._eps)


def _key(name: str) -> str:
    return name.replace(".", "/")  # a ParameterDict takes no dots
