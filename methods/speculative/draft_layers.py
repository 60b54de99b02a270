"""Draft networks of Llama layers: names and shapes of their tensors, their weights in decoding, what they read."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from methods.drafting import Context
from methods.engine import fused_layers
from methods.engine.causal_layers import Attention, FeedForward, Layer, RMSNorm
from methods.engine.causal_lm import CausalLM, RotaryTable
from methods.engine.draft_vocabulary import DraftVocabulary
from methods.engine.fused_layers import FusedLayers
from methods.engine.host_copies import from_host
from methods.engine.kv_cache import Cache
from methods.engine.linear import Linear
from methods.engine.triton_layers import TritonLayers
from methods.rows import of_rows

MOST_UNREAD = 128  # passes that a drafter sits out before it reads
Shapes = dict[str, tuple[int, ...]]


@runtime_checkable
class Sizes(Protocol):
    """Of a layer; ``rope`` as transformers has it in ``rope_parameters``."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def rope(self) -> Mapping[str, Any]: ...


def layer_shapes(sizes: Sizes, read: int | None = None) -> Shapes:
    """Tensors of a layer whose projections read ``read`` values; None: as many as it writes."""
    width, heads, kv = sizes.hidden_size, sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    read = read or width
    return {
        "self_attn.q_proj.weight": (heads, read),
        "self_attn.k_proj.weight": (kv, read),
        "self_attn.v_proj.weight": (kv, read),
        "self_attn.o_proj.weight": (width, heads),
        "mlp.gate_proj.weight": (sizes.intermediate_size, width),
        "mlp.up_proj.weight": (sizes.intermediate_size, width),
        "mlp.down_proj.weight": (width, sizes.intermediate_size),
        "post_attention_layernorm.weight": (width,),
    }


def bias_shapes(sizes: Sizes) -> Shapes:
    """Biases of its attention, which few networks have."""
    heads, kv = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    parts = {"q": heads, "k": kv, "v": kv, "o": sizes.hidden_size}
    return {f"self_attn.{name}_proj.bias": (size,) for name, size in parts.items()}


def turned(heads: Float[Tensor, "*b d"], cos: Float[Tensor, "*c r"], sin: Float[Tensor, "*c r"]) -> Tensor:
    """Heads at the positions of a table, as ``causal_lm.rotate_`` turns them in place; gradients pass."""
    width = cos.shape[-1]
    near, rest = heads[..., :width], heads[..., width:]
    near = near * cos + near.roll(width // 2, -1) * sin
    return torch.cat([near, rest], -1) if rest.shape[-1] else near


def rotary_table(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> RotaryTable:
    """Cosines and sines of its positions."""
    config = LlamaConfig(
        hidden_size=sizes.hidden_size,
        num_attention_heads=sizes.heads,
        head_dim=sizes.head_dim,
        rope_parameters=dict(sizes.rope),
    )
    return RotaryTable(LlamaRotaryEmbedding(config).to(device), device, dtype)


class Weights:
    """Tensors of a draft network; its products have the form of ``CausalLM.draft_linear``.

    Args:
        tensors: by the authors' names.
        eps: of the norms.
    """

    def __init__(self, target: CausalLM, tensors: Mapping[str, Tensor], eps: float) -> None:
        self._target, self._tensors, self._eps = target, tensors, eps

    def get(self, name: str) -> Tensor | None:
        found = self._tensors.get(name)
        return None if found is None else found.to(self._target.device, self._target.dtype)

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name].to(self._target.device, self._target.dtype)

    def linear(self, *names: str) -> Linear:
        """One product for the matrices of these names."""
        weights, biases = (
            [self.tensor(f"{name}.weight") for name in names],
            [self.get(f"{name}.bias") for name in names],
        )
        return self._target.draft_linear(weights, biases)

    def norm(self, name: str) -> RMSNorm:
        return RMSNorm(self.tensor(f"{name}.weight"), self._eps)

    def layer(self, name: str, norm: str | None = "input_layernorm", norm_heads: bool = False) -> Layer:
        """A decoder layer.

        Args:
            name: what the names of its tensors begin with.
            norm: in front of its attention; None: there is none.
            norm_heads: queries and keys are normalised for each head, as in Qwen3.
        """
        attention = Attention(
            norm=None if norm is None else self.norm(f"{name}.{norm}"),
            qkv=self.linear(*(f"{name}.self_attn.{part}_proj" for part in "qkv")),
            out=self.linear(f"{name}.self_attn.o_proj"),
            query_norm=self.norm(f"{name}.self_attn.q_norm") if norm_heads else None,
            key_norm=self.norm(f"{name}.self_attn.k_norm") if norm_heads else None,
            norm_heads=norm_heads,
            post_norm=None,
            rotary=True,
        )
        mlp = FeedForward(
            norm=self.norm(f"{name}.post_attention_layernorm"),
            gate_up=self.linear(f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj"),
            down=self.linear(f"{name}.mlp.down_proj"),
            activation=nn.SiLU(),
            post_norm=None,
        )
        return Layer(attention, mlp)

    def embedding(self) -> Callable[[Int[Tensor, "*b"]], Float[Tensor, "*b D"]]:
        """Its own, or the target's."""
        own = self._own_embedding
        return self._target.embed if own is None else functools.partial(F.embedding, weight=own)

    def embedding_table(self) -> Float[Tensor, "V D"] | None:
        """What ``embedding`` looks up, where nothing is done to it."""
        own = self._own_embedding
        return self._target.embedding_table if own is None else own

    @functools.cached_property
    def _own_embedding(self) -> Tensor | None:
        return self.get("embed_tokens.weight")

    def output(self, vocabulary: DraftVocabulary) -> tuple[Callable[[Float[Tensor, "R D"]], Float[Tensor, "R v"]], int]:
        """The output matrix over the draft vocabulary, its own or the target's; its bytes beside the target."""
        own = self.get("lm_head.weight")
        if own is None and vocabulary.full:
            return self._target.head, 0
        weight, bias = (own, None) if own is not None else self._target.output_rows(vocabulary.ids)
        linear = self._target.draft_linear([weight], [bias])
        return linear, linear.nbytes


def kernels_of(layers: Sequence[Layer], sizes: Sizes, beside: int = 0) -> FusedLayers | None:
    """What runs these layers in one call; None: torch's operators do."""
    found = fused_layers.of_layers(layers, sizes.head_dim, 0)
    if found is None:
        return None
    return FusedLayers(found, sizes.heads, sizes.kv_heads, sizes.head_dim**-0.5, 1.0, beside)


def triton_of(target: CausalLM, layers: Sequence[Layer], sizes: Sizes) -> TritonLayers | None:
    """What runs these layers in recorded drafts; None: torch's operators do, as in the target."""
    if target.kernels != "triton":
        return None
    return TritonLayers(layers, sizes.kv_heads, sizes.head_dim**-0.5, 1.0)


def bytes_of(layer: Layer) -> int:
    """Of its matrices."""
    return sum(linear.nbytes for linear in fused_layers.described(layer).matrices.values())


def after_attention(layer: Layer, rows: Float[Tensor, "R D"], mixed: Float[Tensor, "R H"]) -> Float[Tensor, "R D"]:
    """A layer's output, from its input and the output of its heads."""
    rows, mlp = rows + layer.attention.out(mixed), layer.mlp
    assert isinstance(mlp, FeedForward) and mlp.norm is not None
    gate, up = mlp.gate_up(mlp.norm(rows)).chunk(2, dim=-1)
    return rows + mlp.down(F.silu(gate) * up)


class Unread:
    """The target's states at committed tokens that a drafter has not read: it may sit out rounds.

    Args:
        rows: of the batch.
        read: tokens of each row that were read before.
    """

    def __init__(self, rows: int, read: int = 0) -> None:
        self._passes: list[_Passed] = []
        self._seen = [read] * rows  # tokens whose states were noted

    def __len__(self) -> int:
        """Passes noted since the last ``take``."""
        return len(self._passes)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Keep only some rows, in this order."""
        self._passes = [passed.of_rows(rows) for passed in self._passes]
        self._seen = of_rows(self._seen, rows)

    def note(self, context: Context, states: Sequence[Float[Tensor, "B P D"]]) -> None:
        """Keep what the last pass committed, all before the root; ``states`` are those of its nodes."""
        counts = [len(row) - 1 - seen for row, seen in zip(context.tokens, self._seen, strict=True)]
        self._seen = [len(row) - 1 for row in context.tokens]
        path = None if _leads(context, max(counts)) else context.path
        passed = _Passed(counts, states, path, context.kept)
        if context.report is not None:  # a recorded round overwrites the states of the one before
            passed = passed.copied()
        if self._passes:  # of one alone the nodes may be asked for
            self._passes[-1] = self._passes[-1].compact()
        self._passes.append(passed)

    def read_by(self, context: Context) -> None:
        """Count what the last pass committed as read: a recorded draft reads it on the device."""
        assert not self._passes, "earlier passes come first"
        self._seen = [len(row) - 1 for row in context.tokens]

    def take(self) -> tuple[list[int], Sequence[Float[Tensor, "B W D"]]]:
        """All that was noted, as if by one pass: how many places each row has, and the states there; then forget it."""
        found, self._passes = self._joined(), []
        return found.counts, found.states

    def take_last(self, most: int) -> tuple[list[int], Sequence[Float[Tensor, "B W D"]]]:
        """``take`` of the last ``most`` places of each row at most; the ones before stay, to be taken first."""
        found, self._passes = self._joined(), []
        counts = [min(count, most) for count in found.counts]
        earlier = [count - new for count, new in zip(found.counts, counts, strict=True)]
        if not any(earlier):
            return counts, found.states
        self._passes = [_Passed(earlier, found.states, None, None)]
        width, device = max(counts), found.states[0].device
        path = from_host([[start] for start in earlier], device) + torch.arange(width, device=device)
        return counts, [_at(each, path.clamp_(max=each.shape[1] - 1)) for each in found.states]

    def _joined(self) -> _Passed:
        """All that was noted, as if by one pass."""
        passes = [passed.compact() for passed in self._passes]
        if len(passes) == 1:
            return passes[0]
        counts = [sum(row) for row in zip(*(passed.counts for passed in passes), strict=True)]
        columns: list[list[int]] = [[] for _ in counts]
        start = 0
        for passed in passes:
            for row, count in enumerate(passed.counts):
                columns[row] += range(start, start + count)
            start += passed.states[0].shape[1]
        states = [torch.cat(parts, 1) for parts in zip(*(passed.states for passed in passes), strict=True)]
        width = max(counts)
        path = from_host([row + [0] * (width - len(row)) for row in columns], states[0].device)
        return _Passed(counts, [_at(each, path) for each in states], None, None)

    def take_row(self, most: int) -> tuple[Sequence[Float[Tensor, "1 P D"]], Sequence[int]] | None:
        """What one pass of one row committed: the states of its nodes, and which of them; then forget it.

        None, and nothing is forgotten: that is of several passes or rows, of none or more than ``most`` nodes, or these
        are not known on the host.
        """
        if len(self._passes) != 1:
            return None
        passed = self._passes[0]
        nodes = passed.nodes if len(passed.counts) == 1 and 0 < passed.counts[0] <= most else None
        if nodes is None:
            return None
        self._passes = []
        return passed.states, nodes


@dataclass(frozen=True, slots=True)
class _Passed:
    """States of the nodes of a pass, of which the first ``counts[b]`` of ``path`` are kept in each row.

    Attributes:
        path: None: the first nodes.
        kept: the same on the host; None: it is not known there, or there is no path.
    """

    counts: list[int]
    states: Sequence[Float[Tensor, "B P D"]]
    path: Int[Tensor, "B Q"] | None
    kept: Sequence[Sequence[int]] | None

    @property
    def nodes(self) -> Sequence[int] | None:
        """Of the first row; None: not known on the host."""
        if self.path is None:
            return range(self.counts[0])
        return None if self.kept is None else self.kept[0][: self.counts[0]]

    def compact(self) -> _Passed:
        """With the states of kept nodes only."""
        width = max(self.counts)
        if self.path is None:
            return _Passed(self.counts, [states[:, :width] for states in self.states], None, None)
        path = self.path[:, :width].clamp(min=0)
        return _Passed(self.counts, [_at(states, path) for states in self.states], None, None)

    def copied(self) -> _Passed:
        """``compact``, in memory of its own."""
        found = self.compact()
        return found if self.path is not None else replace(found, states=[states.clone() for states in found.states])

    def of_rows(self, rows: Sequence[int]) -> _Passed:
        found = self.compact()
        states = [each[list(rows)] for each in found.states]
        return replace(found, counts=of_rows(found.counts, rows), states=states)


def _leads(context: Context, width: int) -> bool:
    """Whether what was kept are the first nodes of the pass, as far as is known on the host."""
    if context.path is None or context.kept is None:
        return context.path is None
    return all(nodes[:width] == list(range(len(nodes[:width]))) for nodes in context.kept)


def _at(states: Float[Tensor, "B P D"], path: Int[Tensor, "B W"]) -> Float[Tensor, "B W D"]:
    """The states of a pass at some nodes."""
    return states.gather(1, path[:, :, None].expand(-1, -1, states.shape[2]))


def slots_of(cache: Cache, width: int) -> Int[Tensor, "B W"] | None:
    """Where the next ``width`` places of each row go; None: rows are uniform, and slices do.

    A row may have fewer new places than another; what is written for the others stays within the cache, where it is
    never visible.
    """
    return None if cache.uniform else cache.slots(width).clamp(max=cache.capacity - 1)


def hidden_padding(cache: Cache, dtype: torch.dtype) -> Float[Tensor, "B 1 S"] | None:
    """Added to the scores of what rows hold: -inf after the end of each; None where all rows are of one length."""
    if cache.uniform:
        return None
    behind = torch.arange(max(cache.lengths), device=cache.length.device) >= cache.length[:, None]
    zeros = torch.zeros(behind.shape, dtype=dtype, device=behind.device)
    return zeros.masked_fill_(behind, -torch.inf)[:, None]


def attend(
    query: Float[Tensor, "B M H d"],
    keys: Float[Tensor, "B K S d"],
    values: Float[Tensor, "B K S d"],
    mask: Float[Tensor, "b m S"] | None,
) -> Float[Tensor, "R HD"]:
    """Attention, the query heads of a key head side by side, so that no key is repeated; rows are those of all nodes.

    ``mask`` is added to the scores; one row of it is for all nodes.
    """
    batch, nodes, heads, dim = query.shape
    groups = heads // keys.shape[1]
    folded = query.unflatten(2, (-1, groups)).transpose(1, 2).flatten(2, 3)  # B K MG d
    if mask is not None:
        mask = mask.expand(-1, nodes, -1).repeat_interleave(groups, 1)[:, None]
    mixed = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask)
    return mixed.unflatten(2, (nodes, groups)).transpose(1, 2).reshape(batch * nodes, heads * dim)
