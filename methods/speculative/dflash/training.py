"""Training of the networks of method=dflash and method=dspark on the target's own answers.

DFlash (arXiv 2602.06036): random tokens of an answer are anchors. The block of an anchor reads its embedding and masked
places; it sees the features of all tokens before the anchor, and itself in both directions. The tokens after the anchor
are its labels, and the k-th one has weight exp(-(k - 1) / fade). All blocks of a batch are one pass.

DSpark (arXiv 2607.05147) adds a Markov head, which reads the true token before each label, and a confidence head, which
learns the overlap of draft and target, sum min(p, q), by binary cross-entropy. Its loss is 0.1 CE + 0.9 L1 distance
(``ce_tv`` of ``DraftLoss``) + 1.0 of the confidence.

Differences: the layers start as copies of the target's last ones, and the feature as its last tapped state, which saves
most of the steps; the masked place has an embedding of its own, not that of a token; the Markov head starts as none.
The target's distribution, over the draft vocabulary, is both labels' source: DSpark's cross-entropy has the token. The
first label that cannot be drafted ends a block; the confidence of its place learns 0.

Command: ``python -m bench train method=dspark model=smollm2``
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from methods.engine.causal_layers import FeedForward
from methods.engine.causal_lm import CausalLM
from methods.engine.draft_vocabulary import DraftVocabulary
from methods.engine.sampling import in_float
from methods.speculative.dflash.checkpoint import CONFIDENCE, MARKOV_OUTPUT, MARKOV_ROWS, Part, Spec
from methods.speculative.draft_layers import rotary_table, turned
from methods.speculative.eagle.training import Places, RMSNorm, default_taps, gain_of, is_plain, sizes_of_stack
from methods.training.draft_training import DraftTraining
from methods.training.features import Batch, Features
from methods.training.head_trainer import Learner
from methods.training.interface import TrainingContext, require
from methods.training.losses import DraftLoss, LossKind, draft_loss_of_states

Turn = Callable[[Tensor, Tensor], Tensor]

_RANKS = 10  # of the held-out acceptance
_CHUNK = 256  # rows of logits that exist at once
_QUIET = 0.02  # standard deviation of what is not copied from the target
_MARKOV = 0.3  # of the Markov head's output matrix; its rows start as 0, so a token never seen has no effect


class Layer(nn.Module):
    """One Llama layer over a block; with ``qk_norm`` a Qwen3 layer."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self._dim, width, inner = spec.head_dim, spec.hidden_size, spec.intermediate_size
        heads, kv_heads = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        sizes = {"q": (width, heads), "k": (width, kv_heads), "v": (width, kv_heads), "o": (heads, width)}
        self.self_attn = nn.ModuleDict({f"{name}_proj": nn.Linear(*size, bias=False) for name, size in sizes.items()})
        if spec.qk_norm:
            self.self_attn.update({f"{name}_norm": RMSNorm(spec.head_dim, spec.rms_eps) for name in "qk"})
        sizes = {"gate": (width, inner), "up": (width, inner), "down": (inner, width)}
        self.mlp = nn.ModuleDict({f"{name}_proj": nn.Linear(*size, bias=False) for name, size in sizes.items()})
        self.input_layernorm = RMSNorm(width, spec.rms_eps)
        self.post_attention_layernorm = RMSNorm(width, spec.rms_eps)

    def heads(self, name: str, read: Float[Tensor, "*b D"]) -> Float[Tensor, "*b h d"]:
        """Heads of ``q``, ``k`` or ``v``, before the rotary positions."""
        heads = self.self_attn[f"{name}_proj"](read).unflatten(-1, (-1, self._dim))
        norm = f"{name}_norm"
        return cast(Tensor, self.self_attn[norm](heads) if norm in self.self_attn else heads)

    def leave(self, rows: Float[Tensor, "*b D"], mixed: Float[Tensor, "*b H"]) -> Float[Tensor, "*b D"]:
        """Input of the next layer, from this one's and the output of the heads."""
        rows = rows + self.self_attn["o_proj"](mixed)
        x = self.post_attention_layernorm(rows)
        return cast(Tensor, rows + self.mlp["down_proj"](F.silu(self.mlp["gate_proj"](x)) * self.mlp["up_proj"](x)))


class BlockModule(nn.Module):
    """The draft network, with the names of parameters of its checkpoint.

    Args:
        spec: sizes.
        drafts: size of the draft vocabulary.
    """

    def __init__(self, spec: Spec, drafts: int) -> None:
        super().__init__()
        self.spec, width, rank = spec, spec.hidden_size, spec.markov_rank
        self.fc = nn.Linear(len(spec.taps) * width, width, bias=False)
        self.hidden_norm = RMSNorm(width, spec.rms_eps)
        self.layers = nn.ModuleList(Layer(spec) for _ in range(spec.draft_layers))
        self.norm = RMSNorm(width, spec.rms_eps)
        self.mask_embedding = nn.Parameter(torch.zeros(width))
        if rank:
            matrices = {"markov_w1": nn.Embedding(spec.vocab_size, rank), "markov_w2": nn.Linear(rank, drafts, False)}
            self.markov_head = nn.ModuleDict(matrices)
        if spec.confidence:
            self.confidence_head = nn.ModuleDict({"proj": nn.Linear(width + rank, 1)})

    def forward(
        self, taps: Sequence[Float[Tensor, "B T D"]], embedded: Float[Tensor, "R D"], anchors: Places, turn: Turn
    ) -> Float[Tensor, "R n D"]:
        """What the output matrix multiplies, at the places of each block that draft.

        Args:
            taps: the target's states.
            embedded: of each anchor.
            anchors: where the blocks begin.
            turn: applies rotary positions to heads.
        """
        spec = self.spec
        features = self.hidden_norm(self.fc(torch.cat(list(taps), dim=-1)))
        masks = self.mask_embedding.expand(len(embedded), spec.block - 1, -1)
        rows = torch.cat([embedded[:, None], masks], dim=1)
        before = torch.arange(features.shape[1], device=rows.device)[None]
        at = anchors.place[:, None] + torch.arange(spec.block, device=rows.device)
        for layer in self.layers:
            assert isinstance(layer, Layer)
            memory = turn(layer.heads("k", features), before), layer.heads("v", features)
            read = layer.input_layernorm(rows)
            own = turn(layer.heads("k", read), at), layer.heads("v", read)
            rows = layer.leave(rows, attend(turn(layer.heads("q", read), at), memory, own, anchors))
        return cast(Tensor, self.norm(rows[:, spec.block - spec.drafted :]))

    def markov(self, before: Int[Tensor, "*b"]) -> Float[Tensor, "*b r"] | None:
        """The Markov rows of tokens; None: there is no such head."""
        return self.markov_head["markov_w1"](before) if self.spec.markov_rank else None

    def confidence(self, states: Float[Tensor, "n D"], markov: Float[Tensor, "n r"] | None) -> Float[Tensor, "n"]:
        """Logits of how likely the tokens of places are kept."""
        read = states if markov is None else torch.cat([states, markov], dim=-1)
        return cast(Tensor, self.confidence_head["proj"](read)[:, 0])


def attend(
    query: Float[Tensor, "R b H d"],
    memory: tuple[Float[Tensor, "B T K d"], Float[Tensor, "B T K d"]],
    own: tuple[Float[Tensor, "R b K d"], Float[Tensor, "R b K d"]],
    anchors: Places,
) -> Float[Tensor, "R b HD"]:
    """Attention of blocks: keys and values of the features before each one's anchor, and those of the block itself."""
    (keys, values), (own_keys, own_values) = memory, own
    (batch, length, kv_heads, dim), block = keys.shape, query.shape[1]
    query = query.unflatten(2, (kv_heads, -1))  # R b K G d
    wide = anchors.spread(query, batch).permute(0, 3, 1, 2, 4, 5)  # B K W b G d
    size = wide.shape[2:5]
    scores = in_float(wide.flatten(2, 4) @ keys.permute(0, 2, 3, 1)).unflatten(2, size)
    first = anchors.place.new_zeros(batch, anchors.width)
    first[anchors.row, anchors.column] = anchors.place
    hidden = torch.arange(length, device=keys.device) >= first[:, :, None]
    scores = scores.masked_fill(hidden[:, None, :, None, None], -torch.inf)
    within = in_float(torch.einsum("rqkgd,rskd->rkqgs", query, own_keys))
    within = anchors.spread(within, batch).transpose(1, 2)  # B K W b G b
    shares = (torch.cat([scores, within], dim=-1) * dim**-0.5).softmax(-1).to(values.dtype)
    mixed = shares[..., :length].flatten(2, 4) @ values.transpose(1, 2)
    mixed = anchors.pack(mixed.unflatten(2, size).permute(0, 2, 3, 1, 4, 5))  # R b K G d
    within = anchors.pack(shares[..., length:].transpose(1, 2))
    return (mixed + torch.einsum("rkqgs,rskd->rqkgd", within, own_values)).reshape(-1, block, kv_heads * size[2] * dim)


@dataclass(frozen=True)
class Lessons:
    """What the places of the blocks learn.

    Attributes:
        before: the token before each label.
        label: its place in the draft vocabulary, -1 where it has none.
        taught: place of the target's state that wrote it.
        reached: the answer has a token here, and all earlier labels of the block can be drafted.
        judged: this one can be drafted, too.
    """

    before: Int[Tensor, "R n"]
    label: Int[Tensor, "R n"]
    taught: Int[Tensor, "R n"]
    reached: Bool[Tensor, "R n"]
    judged: Bool[Tensor, "R n"]

    @classmethod
    def of(cls, batch: Batch, anchors: Places, drafted: int, vocabulary: DraftVocabulary) -> Lessons:
        row = anchors.row[:, None]
        at = anchors.place[:, None] + torch.arange(drafted + 1, device=anchors.place.device)
        inside = at < batch.tokens.shape[1]
        at = torch.where(inside, at, 0)
        tokens = batch.tokens[row, at]
        there, label = (inside & batch.answered[row, at])[:, 1:], vocabulary.of(tokens[:, 1:])
        judged = (there & (label >= 0)).cumprod(1).bool()
        reached = there & F.pad(judged[:, :-1], (1, 0), value=True)
        return cls(tokens[:, :-1], label, at[:, :-1], reached, judged)


class BlockLearner(Learner):
    """The draft network over a frozen target.

    Args:
        target, vocabulary: see ``Learner``.
        spec: sizes.
        anchors: most blocks of a dialogue in a batch.
        draft_loss: of the distributions.
        fade: of the weights exp(-(k - 1) / fade) of the places.
        confidence_weight: of the confidence head's loss.
    """

    def __init__(
        self,
        target: CausalLM,
        spec: Spec,
        vocabulary: DraftVocabulary,
        anchors: int,
        draft_loss: DraftLoss,
        fade: float = 4.0,
        confidence_weight: float = 1.0,
    ) -> None:
        super().__init__(target, vocabulary)
        self.spec, self.anchors, self.draft_loss = spec, anchors, draft_loss
        self.fade, self.confidence_weight = fade, confidence_weight
        self._target = (target,)  # in a tuple: its parameters are not the learner's
        self.network = BlockModule(spec, len(vocabulary)).to(target.device)
        begin(self.network, target)
        self._rotary = rotary_table(spec, target.device, torch.float32)

    def part(self) -> Part:
        """The current checkpoint."""
        tensors = {name: tensor.detach() for name, tensor in self.network.state_dict().items()}
        return Part(self.spec, tensors, self.vocabulary)

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor | float]]:
        """Mean over the places that are judged, with their weights, and that of the confidence."""
        anchors = self.places(batch)
        lessons = Lessons.of(batch, anchors, self.spec.drafted, self.vocabulary)
        states = self.states(batch, anchors)
        markov, judged, reached = self.network.markov(lessons.before), lessons.judged, lessons.reached
        weights = torch.exp(-torch.arange(self.spec.drafted, device=states.device) / self.fade).expand(judged.shape)
        products = [(states[judged], self.output)]
        if markov is not None:
            products.append((markov[judged], self.network.get_parameter(MARKOV_OUTPUT)))
        taught, index = self._taught(batch, anchors, lessons)
        loss, overlap = draft_loss_of_states(
            self.draft_loss, products, self.output_bias, taught, index, weights[judged]
        )
        overlaps = torch.zeros_like(weights).to(overlap.dtype).masked_scatter(judged, overlap)
        curves: dict[str, Tensor | float] = {"loss_drafts": loss.detach()}
        shares = overlaps.sum(0) / reached.sum(0).clamp(min=1)
        curves |= {f"overlap_{place}": share for place, share in enumerate(shares, 1)}
        if self.spec.confidence:
            rows = None if markov is None else markov[reached]
            scores = in_float(self.network.confidence(states[reached], rows))
            each = F.binary_cross_entropy_with_logits(scores, overlaps[reached].to(scores.dtype), reduction="none")
            sure = (each * weights[reached]).sum() / weights[reached].sum().clamp(min=1e-9)
            curves["loss_confidence"] = sure.detach()
            loss = loss + self.confidence_weight * sure
        return loss, curves

    def hits(self, batch: Batch) -> tuple[Int[Tensor, "P R"], Int[Tensor, "P"]]:
        """See ``Learner.hits``: the ten best tokens of each place of a block, given the true token before it."""
        anchors = self.places(batch)
        lessons = Lessons.of(batch, anchors, self.spec.drafted, self.vocabulary)
        states, markov = self.states(batch, anchors), self.network.markov(lessons.before)
        best = self._best(states.flatten(0, 1), None if markov is None else markov.flatten(0, 1))
        found = best.view(*states.shape[:2], -1) == lessons.label[:, :, None]
        right = F.pad(found[:, :-1, 0].long().cumprod(1), (1, 0), value=1).bool()
        alive = right & lessons.reached
        return (found & alive[:, :, None]).sum(0), alive.sum(0)

    def places(self, batch: Batch) -> Places:
        """Random anchors: tokens of the answer that another one follows; outside of training always the same ones."""
        allowed = batch.answered & batch.shifted(1)[1]
        rng = None if self.training else torch.Generator(allowed.device).manual_seed(0)
        drawn = torch.rand(allowed.shape, generator=rng, device=allowed.device).masked_fill(~allowed, -1.0)
        chosen = torch.zeros_like(allowed).scatter(1, drawn.topk(min(self.anchors, allowed.shape[1])).indices, True)
        chosen &= allowed
        row, place = chosen.nonzero(as_tuple=True)
        return Places(row, place, (chosen.cumsum(1) - 1)[row, place], max(1, int(chosen.sum(1).max())))

    def states(self, batch: Batch, anchors: Places) -> Float[Tensor, "R n D"]:
        """What the output matrix multiplies, at the places of each block that draft."""
        taps = [batch.hidden_layers[tap] for tap in self.spec.taps]
        self._rotary.reserve(batch.tokens.shape[1] + self.spec.block)
        embedded = self._target[0].embed(batch.tokens[anchors.row, anchors.place]).to(self.output.dtype)
        return cast(Tensor, self.network(taps, embedded, anchors, self._turn))

    @torch.no_grad()
    def _taught(self, batch: Batch, anchors: Places, lessons: Lessons) -> tuple[Float[Tensor, "A v"], Int[Tensor, "N"]]:
        """The target's distribution at all places that a judged label was written from, and each one's index in it."""
        needed = torch.zeros_like(batch.present)
        rows = anchors.row[:, None].expand(lessons.taught.shape)[lessons.judged]
        needed[rows, lessons.taught[lessons.judged]] = True
        index = (needed.flatten().cumsum(0) - 1).view(needed.shape)[rows, lessons.taught[lessons.judged]]
        logits = [self.logits(part) for part in batch.hidden[needed].split(_CHUNK)]
        return torch.cat([in_float(part).softmax(-1).to(part.dtype) for part in logits]), index

    def _best(self, states: Float[Tensor, "N D"], markov: Float[Tensor, "N r"] | None) -> Int[Tensor, "N k"]:
        ranks, best = min(_RANKS, len(self.vocabulary)), []
        for start in range(0, len(states), _CHUNK):
            logits = self.logits(states[start : start + _CHUNK])
            if markov is not None:
                matrix = self.network.get_parameter(MARKOV_OUTPUT)
                logits = logits + F.linear(markov[start : start + _CHUNK], matrix)
            best.append(logits.topk(ranks).indices)
        return torch.cat(best)

    def _turn(self, heads: Float[Tensor, "*b h d"], at: Int[Tensor, "*p"]) -> Float[Tensor, "*b h d"]:
        """Rotary positions."""
        cos, sin = self._rotary.gather(at)
        return turned(heads, cos, sin)


# -- initialisation ---------------------------------------------------------------------------------------------------


def taps_of(layers: int) -> tuple[int, ...]:
    """Outputs of three layers as EAGLE 3 takes them, and of the last one."""
    return tuple(sorted({*default_taps(layers), layers - 1}))


@torch.no_grad()
def begin(network: BlockModule, target: CausalLM) -> None:
    """Copy the target's last layers if they are Llama or Qwen3 layers; other weights start small, at random.

    The feature is the highest tapped state, without scale. Features and block are read by the same projections, so the
    factors of the target's norms go into those, and both norms start without any.
    """
    spec = network.spec
    for parameter in network.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, _QUIET)
    width = spec.hidden_size
    network.fc.weight[:, -width:] = torch.eye(width)
    network.norm.weight.copy_(gain_of(target.norm, target))
    scale = in_float(target.embed(torch.arange(target.vocab_size, device=target.device))).std()
    network.mask_embedding.normal_(0.0, float(scale))
    if spec.markov_rank:
        network.get_parameter(MARKOV_ROWS).zero_()
        network.get_parameter(MARKOV_OUTPUT).normal_(0.0, _MARKOV)
    if spec.confidence:
        for part in ("weight", "bias"):
            network.get_parameter(f"{CONFIDENCE}.{part}").zero_()
    for layer, source in zip(network.layers, target.layers[-spec.draft_layers :], strict=True):
        _copy_layer(cast(Layer, layer), source, spec, target)


def _copy_layer(layer: Layer, source: Any, spec: Spec, target: CausalLM) -> None:
    attention, mlp = source.attention, source.mlp
    if mlp.norm is not None:
        layer.post_attention_layernorm.weight.copy_(gain_of(mlp.norm, target))
    if isinstance(mlp, FeedForward) and mlp.width == spec.intermediate_size:  # others have experts, or another width
        for name, copy in zip(("gate", "up", "down"), (*mlp.gate_up.dense.chunk(2), mlp.down.dense), strict=True):
            layer.get_parameter(f"mlp.{name}_proj.weight").copy_(copy)
    if not is_plain(attention) or (attention.query_norm is not None and not attention.norm_heads):
        return
    sizes = [spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.kv_heads * spec.head_dim]
    copies = (in_float(attention.qkv.dense) * gain_of(attention.norm, target)).split(sizes)
    for name, copy in zip("qkv", copies, strict=True):
        layer.get_parameter(f"self_attn.{name}_proj.weight").copy_(copy)
    layer.get_parameter("self_attn.o_proj.weight").copy_(attention.out.dense)
    if spec.qk_norm:
        for name, norm in (("q", attention.query_norm), ("k", attention.key_norm)):
            ones = torch.ones(spec.head_dim, dtype=target.dtype, device=target.device)
            layer.get_parameter(f"self_attn.{name}_norm.weight").copy_(norm(ones))


# -- training ---------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class DFlashTraining(DraftTraining):
    """Trains the draft network.

    Args:
        layers: of the network.
        taps: layers of the target whose states are features, 0-based; None: 1, L / 2 - 1, L - 4 and L - 1.
        block: places of a pass, the anchor's included.
        sample_from_anchor: see ``Spec``.
        markov_rank: of the Markov head; 0: none.
        confidence: there is a confidence head.
        anchors: most blocks of a dialogue in a batch.
        fade, confidence_weight: see ``BlockLearner``.
        loss, top_k, top_k_weight: see ``DraftLoss``.
        vocabulary, answers, features, recipe: see ``HeadTraining``.
    """

    description = "a network that drafts a block of tokens in one pass"
    duration = "an hour or two on two CPU cores for smollm2; minutes on a GPU"

    layers: int = 2
    taps: list[int] | None = None
    block: int = 5
    sample_from_anchor: bool = True
    markov_rank: int = 96
    confidence: bool = True
    anchors: int = 64
    fade: float = 4.0
    confidence_weight: float = 1.0
    loss: LossKind = "ce_tv"

    def __post_init__(self) -> None:
        super().__post_init__()
        require("at least 1", layers=self.layers, anchors=self.anchors)
        require("at least 1" if self.sample_from_anchor else "at least 2", block=self.block)
        require("at least 0", markov_rank=self.markov_rank, confidence_weight=self.confidence_weight)
        require("above 0", fade=self.fade)

    def layers_read(self, target: CausalLM) -> Sequence[int]:
        """See ``HeadTraining``."""
        return self.spec(target).taps

    def spec(self, target: CausalLM) -> Spec:
        """Sizes of the network, whose layers are as wide as the target's.

        Raises:
            ValueError: more layers than the target has.
        """
        attention = target.layers[-1].attention
        return Spec(
            taps=tuple(sorted(self.taps)) if self.taps else taps_of(target.n_layers),
            block=self.block,
            sample_from_anchor=self.sample_from_anchor,
            qk_norm=attention.query_norm is not None and attention.norm_heads,
            markov_rank=self.markov_rank,
            confidence=self.confidence,
            confidence_reads_markov=self.markov_rank > 0,
            **sizes_of_stack(target, self.layers),
        )

    def learner(self, target: CausalLM, vocabulary: DraftVocabulary, found: Features) -> BlockLearner:
        """See ``HeadTraining``."""
        return BlockLearner(
            target, self.spec(target), vocabulary, self.anchors, self.draft_loss, self.fade, self.confidence_weight
        )

    def save(self, learner: BlockLearner, found: Features, context: TrainingContext) -> dict[str, Any]:
        """See ``HeadTraining``."""
        learner.part().save(context.output)
        return {"block": self.block, "drafted": learner.spec.drafted}
