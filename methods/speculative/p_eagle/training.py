"""Training of the network of method=p_eagle on the target's own answers (Hui et al. 2026, arXiv 2602.01469).

At depth 0 every place of a text is read with the target's feature, as in decoding. From a place of the answer depth k
reads the k-th masked place after it and learns the token k + 2 places on; it sees the features up to its place and the
masked places before it. Later depths keep fewer places, a share of max(r^k, r_min) for depth k, and each of them has
all depths before (``rate``, ``least``), so that a batch takes a third of the work that all places and depths would.
The loss is the mean over the depths of each one's loss, of the target's distribution over the draft vocabulary.

Differences: the layers begin as copies of the target's last ones, the feature as its highest tapped state, and masked
places as the target's mean state and a random embedding; output matrix and embedding are the target's and frozen
(``output: own`` trains the matrix; the authors train the embedding, which they report as 5 % more accepted).

Command: ``python -m bench train method=p_eagle model=smollm2``
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from methods.engine.causal_layers import FeedForward
from methods.engine.causal_lm import CausalLM
from methods.engine.draft_vocabulary import DraftVocabulary
from methods.engine.sampling import in_float
from methods.speculative.eagle.training import (
    MEASURED,
    Output,
    PairLearner,
    Places,
    RMSNorm,
    attend,
    begin_state_norms,
    default_taps,
    gain_of,
    is_plain,
    normed_taps,
    sizes_of_stack,
)
from methods.speculative.p_eagle.checkpoint import Part, Spec
from methods.training.draft_training import DraftTraining
from methods.training.features import Batch, Features
from methods.training.interface import TrainingContext, require
from methods.training.losses import CROSS_ENTROPY, DraftLoss

_QUIET = 0.02  # standard deviation of what is not copied from the target


class Layer(nn.Module):
    """One Llama layer; the first reads the token half beside the norm of its input."""

    def __init__(self, spec: Spec, first: bool) -> None:
        super().__init__()
        self._dim, width, inner = spec.head_dim, spec.hidden_size, spec.intermediate_size
        read, heads, kv_heads = width * (1 + first), spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        sizes = {"q": (read, heads), "k": (read, kv_heads), "v": (read, kv_heads), "o": (heads, width)}
        self.self_attn = nn.ModuleDict({f"{name}_proj": nn.Linear(*size, bias=False) for name, size in sizes.items()})
        sizes = {"gate": (width, inner), "up": (width, inner), "down": (inner, width)}
        self.mlp = nn.ModuleDict({f"{name}_proj": nn.Linear(*size, bias=False) for name, size in sizes.items()})
        self.input_layernorm = RMSNorm(width, spec.rms_eps)
        self.post_attention_layernorm = RMSNorm(width, spec.rms_eps)
        if first:
            self.hidden_norm = RMSNorm(width, spec.rms_eps)

    def heads(self, name: str, read: Float[Tensor, "*b I"]) -> Float[Tensor, "*b h d"]:
        """Heads of ``q``, ``k`` or ``v``, before the rotary positions."""
        return cast(Tensor, self.self_attn[f"{name}_proj"](read)).unflatten(-1, (-1, self._dim))

    def leave(self, rows: Float[Tensor, "*b D"], mixed: Float[Tensor, "*b H"]) -> Float[Tensor, "*b D"]:
        """Input of the next layer, from this one's and the output of the heads."""
        rows = rows + self.self_attn["o_proj"](mixed)
        x = self.post_attention_layernorm(rows)
        return cast(Tensor, rows + self.mlp["down_proj"](F.silu(self.mlp["gate_proj"](x)) * self.mlp["up_proj"](x)))


class DraftModule(nn.Module):
    """The draft network, with the names of parameters of its checkpoint."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec, width = spec, spec.hidden_size
        self.fc = nn.Linear(len(spec.taps) * width, width, bias=False)
        if spec.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(width, spec.rms_eps) for _ in spec.taps)
        self.mask_hidden = nn.Parameter(torch.zeros(len(spec.taps) * width))
        self.mask_embedding = nn.Parameter(torch.zeros(width))
        self.layers = nn.ModuleList(Layer(spec, number == 0) for number in range(spec.draft_layers))
        self.norm = RMSNorm(width, spec.rms_eps)

    def feature(self, taps: Sequence[Float[Tensor, "*b D"]]) -> Float[Tensor, "*b D"]:
        """The mixture of the target's states at a place."""
        return cast(Tensor, self.fc(torch.cat(normed_taps(taps, getattr(self, "fc_norm", None)), dim=-1)))

    def masked(self) -> tuple[Float[Tensor, "D"], Float[Tensor, "D"]]:
        """Feature and token half of a masked place."""
        return self.feature(self.mask_hidden.view(len(self.spec.taps), -1).unbind()), self.mask_embedding

    def read(
        self, number: int, rows: Float[Tensor, "*b D"], beside: Float[Tensor, "*b D"]
    ) -> tuple[Float[Tensor, "*b D"], Float[Tensor, "*b I"]]:
        """Residual of a layer and what its projections read; ``beside``: the token half, for the first."""
        layer = self.layers[number]
        assert isinstance(layer, Layer)
        if number:
            return rows, layer.input_layernorm(rows)
        normed = layer.hidden_norm(rows)
        residual = normed if self.spec.norm_before_residual else rows
        return residual, torch.cat([layer.input_layernorm(beside), normed], dim=-1)

    def scored(self, feature: Float[Tensor, "*b D"]) -> Float[Tensor, "*b D"]:
        """What the output matrix multiplies."""
        return cast(Tensor, self.norm(feature))


class PEagleLearner(PairLearner):
    """The draft network over a frozen target.

    Args:
        target, vocabulary, output, draft_loss: see ``PairLearner``.
        spec: sizes.
        rate, least: depth k is trained at a share of max(rate^k, least) of the places.
        decay: weight of a depth over that of the one before.
    """

    def __init__(
        self,
        target: CausalLM,
        spec: Spec,
        vocabulary: DraftVocabulary,
        rate: float = 0.7,
        least: float = 0.2,
        output: Output = "shared",
        draft_loss: DraftLoss = CROSS_ENTROPY,
        decay: float = 1.0,
    ) -> None:
        super().__init__(target, vocabulary, DraftModule(spec), output, draft_loss, decay)
        self.depth, self._rate, self._least = spec.depths, rate, least
        begin(self.network, target)

    def part(self) -> Part:
        """The current checkpoint."""
        return Part(self.spec, self._matrices(), self.vocabulary)

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor | float]]:
        """Weighted mean of the depths' losses."""
        total, curves = super().loss(batch)
        return total / sum(self.decay**depth for depth in range(self.depth)), curves

    def places(self, batch: Batch) -> Places:
        """All places, in a random order: later depths keep the first of them."""
        every = Places.of(batch)
        order = torch.randperm(len(every.row), device=every.row.device)
        return Places(every.row[order], every.place[order], every.column[order], every.width)

    def steps(self, batch: Batch, places: Places, count: int) -> Iterator[Float[Tensor, "R D"]]:
        """See ``PairLearner``; in training later depths keep a share of the places, at least one."""
        kept = [len(places.row)] * count
        if self.training:
            kept = [max(min(1, most), int(most * max(self._rate**k, self._least))) for k, most in enumerate(kept)]
        yield from self._states(batch, [places.first(number) for number in kept])

    def _states(self, batch: Batch, depths: Sequence[Places]) -> list[Float[Tensor, "R D"]]:
        """The network's output at the places of each depth, every one of which has all depths before."""
        network, length, first = self.network, batch.tokens.shape[1], depths[0]
        self._rotary.reserve(length + len(depths))
        at, chosen = torch.arange(length, device=batch.tokens.device)[None], (first.row, first.place)
        later = [places.place + depth for depth, places in enumerate(depths) if depth]
        masks = torch.cat([at[0, :0], *later])
        rows = network.feature([batch.hidden_layers[tap] for tap in self.spec.taps])
        beside = self._embed(F.pad(batch.tokens[:, 1:], (0, 1)))
        masked, masked_beside = (half.expand(len(masks), -1) for half in network.masked())
        for number, layer in enumerate(network.layers):
            residual, read = network.read(number, rows, beside)
            masked_residual, masked_read = network.read(number, masked, masked_beside)
            query, keys, values = self._attended(layer, read, at)
            own = self._attended(layer, masked_read, masks)
            masked = layer.leave(masked_residual, _attend_masked(own, keys, values, depths[1:]))
            if number + 1 < len(network.layers):
                rows = layer.leave(residual, _causal(query, keys, values))
            else:
                rows = layer.leave(residual[chosen], attend(query[chosen], keys, values, [], first))
        return [rows, *masked.split([len(places) for places in later])]

    def _attended(
        self, layer: Any, read: Float[Tensor, "*b I"], at: Int[Tensor, "*p"]
    ) -> tuple[Float[Tensor, "*b H d"], Float[Tensor, "*b K d"], Float[Tensor, "*b K d"]]:
        """Queries, keys and values of places."""
        query, keys = (self._turn(layer.heads(name, read), at) for name in "qk")
        return query, keys, layer.heads("v", read)


def _attend_masked(
    own: tuple[Float[Tensor, "E H d"], Float[Tensor, "E K d"], Float[Tensor, "E K d"]],
    keys: Float[Tensor, "B T K d"],
    values: Float[Tensor, "B T K d"],
    depths: Sequence[Places],
) -> Float[Tensor, "E HD"]:
    """Attention of masked places, depth by depth: the features up to the place, and the masked ones up to the depth."""
    counts = [len(places.row) for places in depths]
    if not counts:
        return own[0].flatten(1)
    queries, own_keys, own_values = (heads.split(counts) for heads in own)
    mixed = []
    for depth, (query, places) in enumerate(zip(queries, depths, strict=True), start=1):
        later = [(k[: len(query)], v[: len(query)]) for k, v in zip(own_keys[:depth], own_values[:depth], strict=True)]
        mixed.append(attend(query, keys, values, later, places))
    return torch.cat(mixed)


def _causal(
    query: Float[Tensor, "B T H d"], keys: Float[Tensor, "B T K d"], values: Float[Tensor, "B T K d"]
) -> Float[Tensor, "B T HD"]:
    """Attention of every place over those up to it: texts are padded at the end."""
    query, keys, values = (heads.transpose(1, 2).to(values.dtype) for heads in (query, keys, values))
    mixed = F.scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=True)
    return mixed.transpose(1, 2).flatten(2)


# -- initialisation ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def begin(network: DraftModule, target: CausalLM) -> None:
    """Copy the target's last layers if they are Llama layers; other weights start small, at random."""
    spec = network.spec
    for parameter in network.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, _QUIET)
    network.fc.weight[:, -spec.hidden_size :] = torch.eye(spec.hidden_size)
    network.norm.weight.copy_(gain_of(target.norm, target))
    scale = in_float(target.embed(torch.arange(target.vocab_size, device=target.device))).std()
    network.mask_embedding.normal_(0.0, float(scale))
    for number, source in enumerate(target.layers[-spec.draft_layers :]):
        _copy_layer(cast(Layer, network.layers[number]), source, spec, target)


def _copy_layer(layer: Layer, source: Any, spec: Spec, target: CausalLM) -> None:
    """The half of the first layer's projections that reads the feature is the target's."""
    attention, mlp = source.attention, source.mlp
    gain = gain_of(attention.norm, target)
    for norm in (layer.input_layernorm, getattr(layer, "hidden_norm", None)):
        if norm is not None:
            norm.weight.copy_(gain)
    if mlp.norm is not None:
        layer.post_attention_layernorm.weight.copy_(gain_of(mlp.norm, target))
    if isinstance(mlp, FeedForward) and mlp.width == spec.intermediate_size:  # others have experts, or another width
        for name, copy in zip(("gate", "up", "down"), (*mlp.gate_up.dense.chunk(2), mlp.down.dense), strict=True):
            layer.get_parameter(f"mlp.{name}_proj.weight").copy_(copy)
    if not is_plain(attention) or attention.query_norm is not None:
        return
    sizes = [spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.kv_heads * spec.head_dim]
    for name, copy in zip("qkv", in_float(attention.qkv.dense).split(sizes), strict=True):
        layer.get_parameter(f"self_attn.{name}_proj.weight")[:, -spec.hidden_size :] = copy
    layer.get_parameter("self_attn.o_proj.weight").copy_(attention.out.dense)


@torch.no_grad()
def begin_masks(network: DraftModule, batch: Batch) -> None:
    """Masked places begin with the target's mean states over some dialogues."""
    means = [in_float(batch.hidden_layers[tap])[batch.present].mean(0) for tap in network.spec.taps]
    network.mask_hidden.copy_(torch.cat(means))


# -- training ---------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class PEagleTraining(DraftTraining):
    """Trains the draft network.

    Args:
        layers: of the network.
        depths: tokens that a pass learns to draft.
        rate, least, decay: see ``PEagleLearner``.
        taps: layers of the target whose states are features, 0-based; None: as EAGLE-3, 1, L / 2 - 1 and L - 4.
        fc_norm: see ``Spec``.
        output: ``shared``, the target's rows of the output matrix, or ``own``, trained and saved.
        loss, top_k, top_k_weight: see ``DraftLoss``.
        vocabulary, answers, features, recipe: see ``HeadTraining``.
    """

    description = "a network of a few layers that drafts several tokens in one pass from the target's features"
    duration = "an hour or two on two CPU cores for smollm2; minutes on a GPU"

    layers: int = 2
    depths: int = 6
    rate: float = 0.7
    least: float = 0.2
    decay: float = 1.0
    taps: list[int] | None = None
    fc_norm: bool = False
    output: Output = "shared"

    def __post_init__(self) -> None:
        super().__post_init__()
        require("at least 1", layers=self.layers, depths=self.depths)
        require("above 0 and at most 1", rate=self.rate)
        require("from 0 to 1", least=self.least)
        require("above 0", decay=self.decay)

    def layers_read(self, target: CausalLM) -> Sequence[int]:
        """See ``HeadTraining``."""
        return self.spec(target).taps

    def spec(self, target: CausalLM) -> Spec:
        """Sizes of the network, whose layers are as wide as the target's.

        Raises:
            ValueError: more layers than the target has.
        """
        return Spec(
            taps=tuple(sorted(self.taps)) if self.taps else default_taps(target.n_layers),
            depths=self.depths,
            fc_norm=self.fc_norm,
            **sizes_of_stack(target, self.layers),
        )

    def learner(self, target: CausalLM, vocabulary: DraftVocabulary, found: Features) -> PEagleLearner:
        """See ``HeadTraining``."""
        spec = self.spec(target)
        options = (self.rate, self.least, self.output, self.draft_loss, self.decay)
        learner, batch = PEagleLearner(target, spec, vocabulary, *options), found.batch(found.train[:MEASURED])
        begin_masks(learner.network, batch)
        if self.fc_norm:
            begin_state_norms(learner.network.fc_norm, spec.taps, batch)
        return learner

    def save(self, learner: PEagleLearner, found: Features, context: TrainingContext) -> dict[str, Any]:
        """See ``HeadTraining``."""
        learner.part().save(context.output)
        return {"drafted": self.depths}
