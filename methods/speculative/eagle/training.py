"""Training of the draft network of method=eagle on the target's own answers.

Version 3 uses the training-time test (Li et al. 2025, arXiv 2503.01840, sec. 3.2): the network is unrolled over its own
features, as in decoding, and step i has the cross-entropy against the target's distribution over the draft vocabulary
with weight 0.8^i, over 7 steps as in the authors' code. Versions 1 and 2 learn the target's next feature (smooth L1)
and its distribution (Li et al. 2024, arXiv 2401.15077, sec. 3.2) in one step, or in ``unroll`` steps, as in HASS (Zhang
et al. 2024, arXiv 2408.15766).

In step i the query of place t sees the keys of the true features up to t, and the key of its own place in each later
step: what a draft from t sees. Only places from which the target writes its answer are unrolled; prompts provide keys
and values.

Differences: the network starts as a copy of the target's last layer, which saves most of the steps; output matrix and
embedding are the target's and frozen (``output: own`` trains a matrix); the target's distribution is computed from its
features, so its forward pass is not part of a step. ``loss`` and ``top_k`` offer losses of acceptance and HASS's term
over the target's likeliest tokens (``DraftLoss``); HASS weights a step with ``decay: 0.5``. The target's distribution
is that over the draft vocabulary; a place where it writes another token does not count.

Command: ``python -m bench train method=eagle model=smollm2``
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from methods.engine.causal_layers import Attention, Rows, SparseFeedForward, rope_parameters
from methods.engine.causal_lm import CausalLM
from methods.engine.draft_vocabulary import DraftVocabulary
from methods.engine.sampling import in_float
from methods.speculative.draft_layers import rotary_table, turned
from methods.speculative.eagle.checkpoint import Part, Spec
from methods.training.draft_training import DraftTraining
from methods.training.features import Batch, Features
from methods.training.head_trainer import Learner
from methods.training.interface import TrainingContext, require
from methods.training.losses import CROSS_ENTROPY, DraftLoss, draft_loss_of_states

Output = Literal["shared", "own"]

PUBLISHED_UNROLL = 7  # of version 3, in the authors' code
_POSITIONS, _RANKS = 5, 10  # of the held-out acceptance
_CHUNK = 256  # rows of logits that exist at once
_QUIET = 0.02  # standard deviation of what is not copied from the target
MEASURED = 8  # dialogues by which norms of tapped states begin
_LEAST_GAIN = 1e-2  # a smaller one would blow up what undoes it


class RMSNorm(nn.RMSNorm):
    """In the type of the weight, also under mixed precision."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] to [..., D]."""
        return super().forward(x.to(self.weight.dtype))


class Layer(nn.Module):
    """One Llama layer; version 1 has no norm before its attention, version 3 one for each half of the pair."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        width, inner, read = spec.hidden_size, spec.intermediate_size, spec.hidden_size * (1 + (spec.version == 3))
        heads, kv_heads = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.self_attn = _linears(
            q_proj=(read, heads), k_proj=(read, kv_heads), v_proj=(read, kv_heads), o_proj=(heads, width)
        )
        self.mlp = _linears(gate_proj=(width, inner), up_proj=(width, inner), down_proj=(inner, width))
        self.post_attention_layernorm = RMSNorm(width, spec.rms_eps)
        if spec.version == 3:
            self.hidden_norm = RMSNorm(width, spec.rms_eps)
            self.input_layernorm = RMSNorm(width, spec.rms_eps)

    def feed_forward(self, x: Tensor) -> Tensor:
        """[..., D] to [..., D]."""
        x = self.post_attention_layernorm(x)
        return cast(Tensor, self.mlp["down_proj"](F.silu(self.mlp["gate_proj"](x)) * self.mlp["up_proj"](x)))


def _linears(**sizes: tuple[int, int]) -> nn.ModuleDict:
    return nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})


class DraftModule(nn.Module):
    """The draft network, with the authors' names of parameters."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec, width = spec, spec.hidden_size
        if spec.version == 3:
            self.fc = nn.Linear(len(spec.taps) * width, width, bias=False)
            self.midlayer = Layer(spec)
            self.norm = RMSNorm(width, spec.rms_eps)
            if spec.fc_norm:
                self.fc_norm = nn.ModuleList(RMSNorm(width, spec.rms_eps) for _ in spec.taps)
        else:
            self.fc = nn.Linear(2 * width, width)
            self.layers = nn.ModuleList([Layer(spec)])

    @property
    def layer(self) -> Layer:
        return self.midlayer if self.spec.version == 3 else self.layers[0]  # type: ignore[return-value]

    def feature(self, hidden: Float[Tensor, "*b D"], taps: Sequence[Float[Tensor, "*b D"]]) -> Float[Tensor, "*b D"]:
        """The target's feature at a place."""
        if self.spec.version != 3:
            return hidden
        return cast(Tensor, self.fc(torch.cat(normed_taps(taps, getattr(self, "fc_norm", None)), dim=-1)))

    def enter(
        self, feature: Float[Tensor, "*b D"], embedding: Float[Tensor, "*b D"]
    ) -> tuple[Float[Tensor, "*b D"], Float[Tensor, "*b I"]]:
        """The layer's input for a pair: the residual, and what its projections read."""
        if self.spec.version != 3:
            mixed = self.fc(torch.cat([embedding, feature], dim=-1))
            return mixed, mixed
        normed = self.layer.hidden_norm(feature)
        read = torch.cat([self.layer.input_layernorm(embedding), normed], dim=-1)
        return normed if self.spec.norm_before_residual else feature, read

    def leave(self, residual: Float[Tensor, "*b D"], mixed: Float[Tensor, "*b H"]) -> Float[Tensor, "*b D"]:
        """The next feature, from the residual and the attention's output."""
        hidden = residual + self.layer.self_attn["o_proj"](mixed)
        return hidden + self.layer.feed_forward(hidden)

    def scored(self, feature: Float[Tensor, "*b D"]) -> Float[Tensor, "*b D"]:
        """What the output matrix multiplies."""
        return self.norm(feature) if self.spec.version == 3 else feature

    def fed_back(self, feature: Float[Tensor, "*b D"]) -> Float[Tensor, "*b D"]:
        """The feature that the pair with the next token has."""
        return self.scored(feature) if self.spec.norm_output else feature


def normed_taps(taps: Sequence[Float[Tensor, "*b D"]], norms: nn.ModuleList | None) -> list[Float[Tensor, "*b D"]]:
    """The target's states at some places, each after its norm; None: as they are."""
    return list(taps) if norms is None else [norm(tap) for norm, tap in zip(norms, taps, strict=True)]


@dataclass(frozen=True)
class Places:
    """Where drafts begin, in the order of the packed rows.

    Attributes:
        row, place: of the pair with which it begins: the feature at ``place`` and the token after it.
        column: number of the place among those of its row.
        width: most of them in a row.
    """

    row: Int[Tensor, "R"]
    place: Int[Tensor, "R"]
    column: Int[Tensor, "R"]
    width: int

    @classmethod
    def of(cls, batch: Batch) -> Places:
        """Every place after which the target wrote at least two more tokens of its answer."""
        wanted = batch.shifted(1)[1] & batch.shifted(2)[1]
        row, place = wanted.nonzero(as_tuple=True)
        column = (wanted.cumsum(1) - 1)[row, place]
        return cls(row, place, column, max(1, int(wanted.sum(1).max())))

    def spread(self, packed: Float[Tensor, "R *s"], batch: int) -> Float[Tensor, "B W *s"]:
        """Packed rows in a rectangle, zero where a row has fewer places."""
        wide = packed.new_zeros(batch, self.width, *packed.shape[1:])
        return wide.index_put((self.row, self.column), packed)

    def first(self, count: int) -> Places:
        """The first ``count`` of them."""
        return Places(self.row[:count], self.place[:count], self.column[:count], self.width)

    def pack(self, wide: Float[Tensor, "B W *s"]) -> Float[Tensor, "R *s"]:
        """The rectangle's used cells."""
        return wide[self.row, self.column]


class PairLearner(Learner):
    """A network over pairs of a feature and the token after it, which drafts from places of the target's answers.

    Args:
        target, vocabulary: see ``Learner``.
        network: with the methods of ``DraftModule``.
        output: whether the rows of the target's output matrix are frozen or trained.
        draft_loss: of the distributions.
        decay: weight of a step over that of the one before.
    """

    depth = 1  # steps of a draft in training

    def __init__(
        self,
        target: CausalLM,
        vocabulary: DraftVocabulary,
        network: Any,
        output: Output = "shared",
        draft_loss: DraftLoss = CROSS_ENTROPY,
        decay: float = 0.8,
    ) -> None:
        super().__init__(target, vocabulary)
        self.draft_loss, self.decay, self.spec = draft_loss, decay, network.spec
        self._target = (target,)  # in a tuple: its parameters are not the learner's
        self.network = network.to(target.device)
        self._rotary = rotary_table(self.spec, target.device, torch.float32)
        self.lm_head = nn.Parameter(self.output.clone()) if output == "own" else None

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor | float]]:
        """Sum of the steps' losses, step i with weight ``decay``^i.

        A place whose next token is outside the draft vocabulary does not count.
        """
        every = self.places(batch)
        taught, index = self._taught(batch)
        total = batch.hidden.new_zeros(())
        curves: dict[str, Tensor | float] = {}
        for step, feature in enumerate(self.steps(batch, every, self.depth)):
            places = every.first(len(feature))
            labels, valid = self._labels(batch, places, step)
            judged = (valid & (labels >= 0)).nonzero()[:, 0]
            ahead = (places.place + 1 + step).clamp(max=batch.tokens.shape[1] - 1)
            matrix, bias = self._output
            scored = [(self.network.scored(feature)[judged], matrix)]
            loss, overlap = draft_loss_of_states(
                self.draft_loss, scored, bias, taught, index[places.row, ahead][judged]
            )
            curves |= {f"loss_{step + 1}": loss.detach(), f"overlap_{step + 1}": overlap.sum() / max(1, len(judged))}
            further, seen = self._further(feature[valid], batch.hidden[places.row, ahead][valid], loss)
            curves |= {f"{name}_{step + 1}": number for name, number in seen.items()}
            total = total + self.decay**step * further
        return total, curves

    def hits(self, batch: Batch) -> tuple[Int[Tensor, "P R"], Int[Tensor, "P"]]:
        """See ``Learner.hits``: chains of five from every place, the ten best tokens of each step."""
        places = Places.of(batch)
        alive = torch.ones_like(places.place, dtype=torch.bool)
        right, count = [], []
        for step, feature in enumerate(self.steps(batch, places, _POSITIONS)):
            labels, valid = self._labels(batch, places, step)
            best = self._best(self.network.scored(feature))
            found = best == labels[:, None]
            alive = alive & valid
            count.append(alive.sum())
            right.append((found & alive[:, None]).sum(0))
            alive = alive & found[:, 0]
        return torch.stack(right), torch.stack(count)

    def places(self, batch: Batch) -> Places:
        """Where drafts of the training begin."""
        return Places.of(batch)

    def steps(self, batch: Batch, places: Places, count: int) -> Iterator[Float[Tensor, "R D"]]:
        """The network's features step by step: the i-th of ``place + 1 + i``, of all places or the first ones."""
        raise NotImplementedError

    def _further(
        self, feature: Float[Tensor, "n D"], wanted: Float[Tensor, "n D"], loss: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a step: that of its distributions, and what is added; numbers for the curves."""
        return loss, {}

    def _matrices(self) -> dict[str, Tensor]:
        """The tensors of a checkpoint."""
        tensors = {name: tensor.detach() for name, tensor in self.network.state_dict().items()}
        return tensors if self.lm_head is None else tensors | {"lm_head.weight": self.lm_head.detach()}

    @property
    def _output(self) -> tuple[Tensor, Tensor | None]:
        return (self.output, self.output_bias) if self.lm_head is None else (self.lm_head, None)

    def _taught(self, batch: Batch) -> tuple[Float[Tensor, "A v"], Int[Tensor, "B T"]]:
        """The target's distribution wherever an answer token follows, packed, and each place's index in it."""
        written = batch.shifted(1)[1]
        index = (written.flatten().cumsum(0) - 1).clamp(min=0).view(written.shape)
        with torch.no_grad():
            logits = self.logits(batch.hidden[written])
            return torch.cat([in_float(part).softmax(-1).to(logits.dtype) for part in logits.split(_CHUNK)]), index

    def _labels(self, batch: Batch, places: Places, step: int) -> tuple[Int[Tensor, "R"], Bool[Tensor, "R"]]:
        """What a step should propose, as an index into the vocabulary (-1: not in it), and whether there is a token."""
        tokens, valid = batch.shifted(2 + step)
        return self.vocabulary.of(tokens[places.row, places.place]), valid[places.row, places.place]

    def _best(self, states: Float[Tensor, "R D"]) -> Int[Tensor, "R k"]:
        ranks = min(_RANKS, len(self.vocabulary))
        return torch.cat([F.linear(part, *self._output).topk(ranks).indices for part in states.split(_CHUNK)])

    def _embed(self, tokens: Int[Tensor, "*b"]) -> Float[Tensor, "*b D"]:
        return self._target[0].embed(tokens).to(self.output.dtype)

    def _heads(self, projected: Float[Tensor, "*b H"]) -> Float[Tensor, "*b h d"]:
        return projected.unflatten(-1, (-1, self.spec.head_dim))

    def _turn(self, heads: Float[Tensor, "*b h d"], at: Int[Tensor, "*p"]) -> Float[Tensor, "*b h d"]:
        """Rotary positions."""
        cos, sin = (table.view(*at.shape, 1, -1) for table in self._rotary.gather(at.reshape(1, -1)))
        return turned(heads, cos, sin)


class EagleLearner(PairLearner):
    """The draft network over a frozen target.

    Args:
        target, vocabulary: see ``Learner``.
        spec: sizes; see ``spec_of``.
        unroll: steps, of which the first one is over the target's features and later ones over its own.
        output, draft_loss, decay: see ``PairLearner``.
        noise: version 1: width of the uniform noise on true features, over 512 places; as the authors add it.
        classification: version 1: weight of the loss beside the smooth L1.
    """

    def __init__(
        self,
        target: CausalLM,
        spec: Spec,
        vocabulary: DraftVocabulary,
        unroll: int,
        output: Output = "shared",
        noise: float = 0.2,
        classification: float = 0.1,
        draft_loss: DraftLoss = CROSS_ENTROPY,
        decay: float = 0.8,
    ) -> None:
        super().__init__(target, vocabulary, DraftModule(spec), output, draft_loss, decay)
        self.unroll = self.depth = unroll
        self.start_sha256: str | None = None
        self.noise, self.classification = noise, classification
        begin(self.network, target)

    @torch.no_grad()
    def begin_from(self, part: Part, where: str) -> None:
        """Take the weights of a trained network; the rows of its own output matrix are not among them.

        Raises:
            ValueError: a network of other sizes.
        """
        if part.spec != self.spec:
            theirs = asdict(part.spec)
            other = {name: (theirs[name], mine) for name, mine in asdict(self.spec).items() if theirs[name] != mine}
            raise ValueError(
                f"train.start must be a network of the sizes that are trained, got {where}, which differs in "
                + ", ".join(f"{name} ({found} instead of {mine})" for name, (found, mine) in other.items())
                + ". Name another folder, or set these options as they are there."
            )
        digest = hashlib.sha256()
        for name, parameter in self.network.named_parameters():
            parameter.copy_(part.tensors[name])
            digest.update(part.tensors[name].float().contiguous().numpy(force=True).tobytes())
        self.start_sha256 = digest.hexdigest()

    def part(self) -> Part:
        """The current checkpoint."""
        return Part(self.spec, self._matrices(), self.vocabulary)

    def steps(self, batch: Batch, places: Places, count: int) -> Iterator[Float[Tensor, "R D"]]:
        """See ``PairLearner``: tokens are the true ones; features are the network's own from the second step on."""
        network, rows = self.network, (places.row, places.place)
        true = self._noisy(network.feature(batch.hidden, [batch.hidden_layers[tap] for tap in self.spec.taps]), batch)
        residual, read = network.enter(true, self._embed(_behind(batch.tokens, 1)))
        at = torch.arange(batch.tokens.shape[1], device=true.device)
        self._rotary.reserve(len(at) + count)
        keys, values = self._keys(read, at[None]), self._values(read)
        residual, read = residual[rows], read[rows]
        later: list[tuple[Tensor, Tensor]] = []
        feature = true[rows]
        for step in range(count):
            if step:
                before = network.fed_back(feature)
                residual, read = network.enter(before, self._embed(_behind(batch.tokens, 1 + step)[rows]))
                later.append((self._keys(read, places.place + step), self._values(read)))
            query = self._turn(self._heads(network.layer.self_attn["q_proj"](read)), places.place + step)
            mixed = attend(query, keys, values, later, places)
            feature = network.leave(residual, mixed)
            yield feature

    def _further(
        self, feature: Float[Tensor, "n D"], wanted: Float[Tensor, "n D"], loss: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Versions 1 and 2 learn the target's feature, too."""
        if self.spec.version == 3:
            return loss, {}
        distance = F.smooth_l1_loss(in_float(feature), in_float(wanted), reduction="sum")
        distance = distance / max(1, wanted.numel())
        return distance + self.classification * loss, {"smooth_l1": distance.detach()}

    def _noisy(self, true: Float[Tensor, "B T D"], batch: Batch) -> Float[Tensor, "B T D"]:
        if self.spec.version == 3 or not self.training or self.noise == 0:
            return true
        wide = torch.tensor(batch.lengths, device=true.device)[:, None, None]
        return true + (torch.rand_like(true) - 0.5) * self.noise * 512 / wide

    def _keys(self, read: Float[Tensor, "*b I"], at: Int[Tensor, "*p"]) -> Float[Tensor, "*b K d"]:
        return self._turn(self._heads(self.network.layer.self_attn["k_proj"](read)), at)

    def _values(self, read: Float[Tensor, "*b I"]) -> Float[Tensor, "*b K d"]:
        return self._heads(self.network.layer.self_attn["v_proj"](read))


def attend(
    query: Float[Tensor, "R H d"],
    keys: Float[Tensor, "B T K d"],
    values: Float[Tensor, "B T K d"],
    later: Sequence[tuple[Float[Tensor, "R K d"], Float[Tensor, "R K d"]]],
    places: Places,
) -> Float[Tensor, "R HD"]:
    """Attention of a step: the true features up to the query's place, and its own place's key of each later step."""
    batch, length, kv_heads, dim = keys.shape
    wide = places.spread(query, batch).unflatten(2, (kv_heads, -1))  # B W K G d
    groups = wide.shape[3]
    folded = wide.permute(0, 2, 1, 3, 4).reshape(batch, kv_heads, -1, dim)
    scores = in_float(folded @ keys.permute(0, 2, 3, 1)).unflatten(2, (-1, groups))  # B K W G T
    first = places.place.new_zeros(batch, places.width)
    first[places.row, places.column] = places.place
    hidden = torch.arange(length, device=keys.device) > first[:, :, None]
    scores = scores.masked_fill(hidden[:, None, :, None], -torch.inf)
    spread = [(places.spread(k, batch), places.spread(v, batch)) for k, v in later]
    own = [in_float(torch.einsum("bwkgd,bwkd->bkwg", wide, k))[..., None] for k, _ in spread]
    shares = (torch.cat([scores, *own], dim=-1) * dim**-0.5).softmax(-1).to(values.dtype)
    mixed = shares[..., :length].flatten(2, 3) @ values.transpose(1, 2)
    mixed = mixed.unflatten(2, (-1, groups)).transpose(1, 2)  # B W K G d
    for step, (_, value) in enumerate(spread):
        share = shares[..., length + step].transpose(1, 2)[..., None]  # B W K G 1
        mixed = mixed + share * value[:, :, :, None]
    return places.pack(mixed.flatten(2))


def _behind(tokens: Int[Tensor, "B T"], count: int) -> Int[Tensor, "B T"]:
    """The token ``count`` places on, 0 after the end."""
    return F.pad(tokens[:, count:], (0, min(count, tokens.shape[1])))


# -- initialisation ---------------------------------------------------------------------------------------------------


def default_taps(layers: int) -> tuple[int, ...]:
    """Outputs of three layers, 0-based: 1, L / 2 - 1 and L - 4, the authors' inputs of layers 2, L / 2 and L - 3."""
    return tuple(sorted({min(1, layers - 1), max(layers // 2 - 1, 0), max(layers - 4, 0)}))


def spec_of(target: CausalLM, version: int, taps: Sequence[int] | None = None, **flags: Any) -> Spec:
    """A draft network with the sizes of the target's layers; ``flags``: those of ``Spec``."""
    chosen = tuple(default_taps(target.n_layers) if taps is None else taps)
    return Spec(version=version, taps=chosen if version == 3 else (), **sizes_of_target(target), **flags)


def sizes_of_stack(target: CausalLM, layers: int) -> dict[str, Any]:
    """``sizes_of_target`` for so many layers.

    Raises:
        ValueError: more layers than the target has.
    """
    if layers > target.n_layers:
        raise ValueError(
            f"layers must be at most {target.n_layers}, those of {target.name}, got {layers}. Set train.layers."
        )
    return {"draft_layers": layers, **sizes_of_target(target)}


def sizes_of_target(target: CausalLM) -> dict[str, Any]:
    """Of a network whose layers are as those of its target: the fields of a ``Spec`` by name."""
    return {
        "hidden_size": target.hidden_size,
        **target.layer_sizes,
        "head_dim": target.head_dim,
        "rms_eps": float(getattr(target.config, "rms_norm_eps", 1e-6)),
        "layers": target.n_layers,
        "vocab_size": target.vocab_size,
        "rope": rope_of(target),
    }


def rope_of(target: CausalLM) -> dict[str, Any]:
    """Parameters of the rotary positions of the target's last layer."""
    by_layer = rope_parameters(target.config)
    found = by_layer[""] if "" in by_layer else by_layer[target.config.layer_types[-1]]
    return {"rope_type": "default", "rope_theta": 10000.0} | found


@torch.no_grad()
def begin(network: DraftModule, target: CausalLM) -> None:
    """Copy the target's last layer if it is a Llama layer; other weights start small, at random.

    Version 3: the first feature is the highest tapped state, the half that reads it is the target's, and the last norm
    is the target's final norm. Version 1: the feature comes after the final norm, so that norm is undone.
    """
    spec, source = network.spec, target.layers[-1]
    for parameter in network.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, _QUIET)
    width = spec.hidden_size
    network.fc.weight[:, -width:] = torch.eye(width)
    if spec.version == 3:
        network.norm.weight.copy_(gain_of(target.norm, target))
        network.layer.input_layernorm.weight.copy_(gain_of(source.attention.norm, target))
        network.layer.hidden_norm.weight.copy_(gain_of(source.attention.norm, target))
    else:
        network.fc.bias.zero_()
    _copy_feed_forward(network, target)
    if is_plain(source.attention) and source.attention.query_norm is None:
        _copy_attention(network, target)


@torch.no_grad()
def begin_state_norms(norms: nn.ModuleList, taps: Sequence[int], batch: Batch) -> None:
    """Let the norms of the tapped states keep the length that these have on average, so that they begin as none."""
    for norm, tap in zip(norms, taps, strict=True):
        length = in_float(batch.hidden_layers[tap])[batch.present].square().mean().sqrt()
        norm.get_parameter("weight").fill_(float(length))


def is_plain(attention: Attention) -> bool:
    """Whether attention is as in a Llama layer, but for norms of the heads."""
    changed = (attention.post_norm, attention.soft_cap, attention.sinks)
    return attention.norm is not None and all(change is None for change in changed)


def _copy_attention(network: DraftModule, target: CausalLM) -> None:
    source, spec, attention = target.layers[-1].attention, network.spec, network.layer.self_attn
    sizes = [spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.kv_heads * spec.head_dim]
    gain = 1.0 if spec.version == 3 else gain_of(source.norm, target) / gain_of(target.norm, target)
    copies = (source.qkv.dense.float() * gain).split(sizes)
    weights = dict(attention.named_parameters())
    for name, copy in zip("qkv", copies, strict=True):
        weights[f"{name}_proj.weight"][:, -spec.hidden_size :] = copy
    weights["o_proj.weight"].copy_(source.out.dense)


def _copy_feed_forward(network: DraftModule, target: CausalLM) -> None:
    source, layer = target.layers[-1].mlp, network.layer
    if source.norm is not None:
        layer.post_attention_layernorm.weight.copy_(gain_of(source.norm, target))
    if isinstance(source, SparseFeedForward):  # which of the experts?
        return
    copies = (*source.gate_up.dense.chunk(2), source.down.dense)
    for weight, copy in zip(layer.mlp.parameters(), copies, strict=True):  # gate, up, down
        weight.copy_(copy)


def gain_of(norm: Rows | None, target: CausalLM) -> Float[Tensor, "D"]:
    """The factors of a norm; 1 without a norm or weight."""
    ones = torch.ones(target.hidden_size, dtype=target.dtype, device=target.device)
    gain = (ones if norm is None else norm(ones)).float()
    return torch.where(gain.abs() < _LEAST_GAIN, 1.0, gain)


# -- training ---------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class EagleTraining(DraftTraining):
    """Trains the draft network.

    Args:
        version: 1, 2 (the same network) or 3.
        unroll: see ``EagleLearner``; None: as published, 7 for version 3, else 1.
        taps: layers of the target that version 3 reads, 0-based; None: as published, 1, L / 2 - 1 and L - 4.
        output: ``shared``, the target's rows of the output matrix, or ``own``, trained and saved.
        noise, classification, decay: see ``EagleLearner``.
        fc_norm, norm_output: the two flags of EAGLE-3.1, for version 3: see ``Spec``.
        start: folder of a trained network of the same sizes, from whose weights it begins instead of the target's.
        loss, top_k, top_k_weight: see ``DraftLoss``.
        vocabulary, answers, features, recipe: see ``HeadTraining``.

    Raises:
        ValueError: an option out of range, or a ``start`` of other sizes.
    """

    description = "a draft network of one layer that predicts the target's next features"
    duration = "an hour or two on two CPU cores for smollm2; minutes on a GPU"

    version: Literal[1, 2, 3] = 3
    unroll: int | None = None
    taps: list[int] | None = None
    output: Output = "shared"
    noise: float = 0.2
    classification: float = 0.1
    decay: float = 0.8
    fc_norm: bool = False
    norm_output: bool = False
    start: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.version != 3 and (self.fc_norm or self.norm_output):
            raise ValueError(
                f"fc_norm and norm_output must be false for version {self.version}, got true: version 3 has them. Set "
                "train.version=3."
            )
        require("at least 1", unroll=self.unroll)
        require("above 0", decay=self.decay)
        require("at least 0", noise=self.noise, classification=self.classification)

    def layers_read(self, target: CausalLM) -> Sequence[int]:
        """See ``HeadTraining``."""
        return self._spec(target).taps

    def _spec(self, target: CausalLM) -> Spec:
        flags = {"fc_norm": self.fc_norm, "norm_output": self.norm_output}
        return spec_of(target, 3 if self.version == 3 else 1, self.taps, **flags)

    def learner(self, target: CausalLM, vocabulary: DraftVocabulary, found: Features) -> EagleLearner:
        """See ``HeadTraining``."""
        spec, unroll = self._spec(target), self.unroll or (PUBLISHED_UNROLL if self.version == 3 else 1)
        learner = EagleLearner(
            target,
            spec,
            vocabulary,
            unroll,
            self.output,
            self.noise,
            self.classification,
            self.draft_loss,
            self.decay,
        )
        if self.start is not None:
            learner.begin_from(Part.load(Path(self.start), target), self.start)
        elif self.fc_norm:
            begin_state_norms(learner.network.fc_norm, spec.taps, found.batch(found.train[:MEASURED]))
        return learner

    def save(self, learner: EagleLearner, found: Features, context: TrainingContext) -> dict[str, Any]:
        """See ``HeadTraining``."""
        learner.part().save(context.output)
        return {"version": learner.spec.version, "start_sha256": learner.start_sha256}
