"""Training of the draft network of method=eagle on what the target itself answers; ``eagle.py`` is the method.

Version 3 learns by the training-time test (Li et al. 2025, arXiv 2503.01840, sec. 3.2): the network is unrolled over
features of its own, as it will be in decoding, and every step is judged by cross-entropy against the target's
distribution over the draft vocabulary, step i with weight 0.8^i. Versions 1 and 2 learn the target's next feature
(smooth L1) and its distribution (Li et al. 2024, arXiv 2401.15077, sec. 3.2), one step unless ``unroll`` says more,
which is what HASS does (Zhang et al. 2024, arXiv 2408.15766).

In step i the query of place t sees the keys of the true features up to t, and of each later step the one of its own
place: what a draft sees that began at t. Only places from which the target writes its answer are unrolled; prompts are
keys and values alone.

Differences: the network begins as a copy of the target's last layer, which saves most of the steps; output matrix and
embedding are the target's and stay as they are (``output: own`` trains a matrix); the target's distribution is that of
its features, so its own forward pass is not part of a step.

Command: ``python -m bench.train method=eagle model=smollm2``
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from methods.engine.causal_layers import Rows
from methods.engine.causal_lm import CausalLM
from methods.engine.draft_vocabulary import DraftVocabulary
from methods.speculative.eagle.checkpoint import Part, Spec
from methods.training.answers import HEADS_CORPUS, AnswerRecipe
from methods.training.features import Batch, FeatureForm, features
from methods.training.head_trainer import Learner, Recipe, discard, teach
from methods.training.interface import Workshop

Output = Literal["shared", "own"]

_DECAY = 0.8  # weight of a step over that of the one before
_POSITIONS, _RANKS = 5, 10  # of the held-out acceptance
_CHUNK = 256  # rows of logits that exist at once: megabytes that stay in the cache, and in the heap
_QUIET = 0.02  # standard deviation of what is not copied from the target
_LEAST_GAIN = 1e-2  # a smaller one would blow up what undoes it


class RMSNorm(nn.Module):
    """x / rms(x) * w in the type of the weight, also under mixed precision."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] to [..., D]."""
        return F.rms_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """The projections of a Llama layer, reading ``read`` features."""

    def __init__(self, spec: Spec, read: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(read, spec.heads * spec.head_dim, bias=False)
        self.k_proj = nn.Linear(read, spec.kv_heads * spec.head_dim, bias=False)
        self.v_proj = nn.Linear(read, spec.kv_heads * spec.head_dim, bias=False)
        self.o_proj = nn.Linear(spec.heads * spec.head_dim, spec.hidden_size, bias=False)


class FeedForward(nn.Module):
    """The gated layer of Llama."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.up_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.down_proj = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] to [..., D]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """The one layer; version 1 has no norm in front of its attention, version 3 one for each half of the pair."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        width = spec.hidden_size
        self.self_attn = Attention(spec, 2 * width if spec.version == 3 else width)
        self.mlp = FeedForward(spec)
        self.post_attention_layernorm = RMSNorm(width, spec.rms_eps)
        if spec.version == 3:
            self.hidden_norm = RMSNorm(width, spec.rms_eps)
            self.input_layernorm = RMSNorm(width, spec.rms_eps)


class DraftModule(nn.Module):
    """The draft network; its parameters have the authors' names."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec, width = spec, spec.hidden_size
        if spec.version == 3:
            self.fc = nn.Linear(len(spec.taps) * width, width, bias=False)
            self.midlayer = Layer(spec)
            self.norm = RMSNorm(width, spec.rms_eps)
        else:
            self.fc = nn.Linear(2 * width, width)
            self.layers = nn.ModuleList([Layer(spec)])

    @property
    def layer(self) -> Layer:
        return self.midlayer if self.spec.version == 3 else self.layers[0]  # type: ignore[return-value]

    def feature(self, hidden: Float[Tensor, "*b D"], taps: Sequence[Float[Tensor, "*b D"]]) -> Float[Tensor, "*b D"]:
        """What the target knows at a place."""
        return self.fc(torch.cat(list(taps), dim=-1)) if self.spec.version == 3 else hidden

    def enter(
        self, feature: Float[Tensor, "*b D"], embedding: Float[Tensor, "*b D"]
    ) -> tuple[Float[Tensor, "*b D"], Float[Tensor, "*b I"]]:
        """A pair as the layer takes it: the residual, and what its projections read."""
        if self.spec.version != 3:
            mixed = self.fc(torch.cat([embedding, feature], dim=-1))
            return mixed, mixed
        normed = self.layer.hidden_norm(feature)
        read = torch.cat([self.layer.input_layernorm(embedding), normed], dim=-1)
        return normed if self.spec.norm_before_residual else feature, read

    def leave(self, residual: Float[Tensor, "*b D"], mixed: Float[Tensor, "*b H"]) -> Float[Tensor, "*b D"]:
        """The next feature, from the residual and what the heads gathered."""
        hidden = residual + self.layer.self_attn.o_proj(mixed)
        return hidden + self.layer.mlp(self.layer.post_attention_layernorm(hidden))

    def scored(self, feature: Float[Tensor, "*b D"]) -> Float[Tensor, "*b D"]:
        """What the output matrix multiplies."""
        return self.norm(feature) if self.spec.version == 3 else feature


@dataclass(frozen=True)
class Places:
    """Where a draft begins, in the order of the packed rows.

    Attributes:
        row, place: of the pair with which it begins: the feature at ``place`` and the token behind it.
        column: number of the place among those of its row.
        width: most of them in a row.
    """

    row: Int[Tensor, "R"]
    place: Int[Tensor, "R"]
    column: Int[Tensor, "R"]
    width: int

    @classmethod
    def of(cls, batch: Batch) -> Places:
        """Every place behind which the target wrote at least two more tokens of its answer."""
        wanted = batch.shifted(1)[1] & batch.shifted(2)[1]
        row, place = wanted.nonzero(as_tuple=True)
        column = (wanted.cumsum(1) - 1)[row, place]
        return cls(row, place, column, max(1, int(wanted.sum(1).max())))

    def spread(self, packed: Float[Tensor, "R *s"], batch: int) -> Float[Tensor, "B W *s"]:
        """Packed rows in a rectangle, zero where a row has fewer places."""
        wide = packed.new_zeros(batch, self.width, *packed.shape[1:])
        return wide.index_put((self.row, self.column), packed)

    def pack(self, wide: Float[Tensor, "B W *s"]) -> Float[Tensor, "R *s"]:
        """The rectangle's used cells."""
        return wide[self.row, self.column]


class EagleLearner(Learner):
    """The draft network over a frozen target.

    Args:
        target: the model it is trained for.
        spec: sizes; see ``spec_of``.
        vocabulary: what it proposes from, on the target's device.
        unroll: steps over features of its own, the first one over the target's included.
        output: whether the rows of the target's output matrix stay as they are or are trained along.
        noise: version 1: widest change of a true feature at random, over 512 places; as the authors add it.
        classification: version 1: weight of the cross-entropy beside the smooth L1.
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
    ) -> None:
        super().__init__()
        self.spec, self.vocabulary, self.unroll = spec, vocabulary, unroll
        self.noise, self.classification = noise, classification
        self._target = (target,)  # no module: not to be searched for parameters
        self.network = DraftModule(spec).to(target.device)
        begin(self.network, target)
        self._rotary = spec.rotary(target.device, torch.float32)
        weight, bias = target.output_rows(vocabulary.ids)
        self.register_buffer("taught_weight", weight.float(), persistent=False)
        self.register_buffer("taught_bias", None if bias is None else bias.float(), persistent=False)
        self.lm_head = nn.Parameter(weight.float().clone()) if output == "own" else None

    taught_weight: Float[Tensor, "v D"]
    taught_bias: Float[Tensor, "v"] | None

    def part(self) -> Part:
        """As it is now."""
        tensors = {name: tensor.detach() for name, tensor in self.network.state_dict().items()}
        if self.lm_head is not None:
            tensors["lm_head.weight"] = self.lm_head.detach()
        return Part(self.spec, tensors, self.vocabulary)

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor | float]]:
        """Sum of the steps' losses, step i with weight 0.8^i.

        A place whose next token lies outside the draft vocabulary does not count: there is nothing right to propose.
        """
        places = Places.of(batch)
        taught, index = self._taught(batch)
        total = batch.hidden.new_zeros(())
        curves: dict[str, Tensor | float] = {}
        for step, feature in enumerate(self.steps(batch, places, self.unroll)):
            labels, valid = self._labels(batch, places, step)
            judged = (valid & (labels >= 0)).nonzero()[:, 0]
            ahead = (places.place + 1 + step).clamp(max=batch.tokens.shape[1] - 1)
            loss = soft_cross_entropy(
                self.network.scored(feature)[judged], *self._output, taught, index[places.row, ahead][judged]
            )
            curves[f"cross_entropy_{step + 1}"] = loss.detach()
            if self.spec.version != 3:
                wanted = batch.hidden[places.row, ahead]
                distance = F.smooth_l1_loss(_wide(feature[valid]), _wide(wanted[valid]), reduction="sum")
                distance = distance / (valid.sum() * wanted.shape[-1]).clamp(min=1)
                curves[f"smooth_l1_{step + 1}"] = distance.detach()
                loss = distance + self.classification * loss
            total = total + _DECAY**step * loss
        return total, curves

    def hits(self, batch: Batch) -> tuple[Int[Tensor, "P R"], Int[Tensor, "P"]]:
        """See ``Learner.hits``: chains of five over features of its own, the ten best tokens of each place."""
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

    def steps(self, batch: Batch, places: Places, count: int) -> Iterator[Float[Tensor, "R D"]]:
        """The features that the network makes, step by step: the i-th of them is that of ``place + 1 + i``.

        The tokens are the true ones, the features from the second step on the network's own.
        """
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
                residual, read = network.enter(feature, self._embed(_behind(batch.tokens, 1 + step)[rows]))
                later.append((self._keys(read, places.place + step), self._values(read)))
            query = self._turn(self._heads(network.layer.self_attn.q_proj(read)), places.place + step)
            mixed = attend(query, keys, values, later, places)
            feature = network.leave(residual, mixed)
            yield feature

    @property
    def _output(self) -> tuple[Tensor, Tensor | None]:
        return (self.taught_weight, self.taught_bias) if self.lm_head is None else (self.lm_head, None)

    def _taught(self, batch: Batch) -> tuple[Float[Tensor, "A v"], Int[Tensor, "B T"]]:
        """The target's distribution wherever an answer token follows, packed, and where each place is in it."""
        written = batch.shifted(1)[1]
        index = (written.flatten().cumsum(0) - 1).clamp(min=0).view(written.shape)
        with torch.no_grad():
            logits = F.linear(batch.hidden[written], self.taught_weight, self.taught_bias)
            return torch.cat([_wide(part).softmax(-1).to(logits.dtype) for part in logits.split(_CHUNK)]), index

    def _labels(self, batch: Batch, places: Places, step: int) -> tuple[Int[Tensor, "R"], Bool[Tensor, "R"]]:
        """What a step should propose, as a place in the vocabulary (-1: not in it), and whether there is a token."""
        tokens, valid = batch.shifted(2 + step)
        return self.vocabulary.of(tokens[places.row, places.place]), valid[places.row, places.place]

    def _best(self, states: Float[Tensor, "R D"]) -> Int[Tensor, "R k"]:
        ranks = min(_RANKS, len(self.vocabulary))
        return torch.cat([F.linear(part, *self._output).topk(ranks).indices for part in states.split(_CHUNK)])

    def _noisy(self, true: Float[Tensor, "B T D"], batch: Batch) -> Float[Tensor, "B T D"]:
        if self.spec.version == 3 or not self.training or self.noise == 0:
            return true
        wide = torch.tensor(batch.lengths, device=true.device)[:, None, None]
        return true + (torch.rand_like(true) - 0.5) * self.noise * 512 / wide

    def _embed(self, tokens: Int[Tensor, "*b"]) -> Float[Tensor, "*b D"]:
        return self._target[0].embed(tokens).to(self.taught_weight.dtype)

    def _heads(self, projected: Float[Tensor, "*b H"]) -> Float[Tensor, "*b h d"]:
        return projected.unflatten(-1, (-1, self.spec.head_dim))

    def _keys(self, read: Float[Tensor, "*b I"], at: Int[Tensor, "*p"]) -> Float[Tensor, "*b K d"]:
        return self._turn(self._heads(self.network.layer.self_attn.k_proj(read)), at)

    def _values(self, read: Float[Tensor, "*b I"]) -> Float[Tensor, "*b K d"]:
        return self._heads(self.network.layer.self_attn.v_proj(read))

    def _turn(self, heads: Float[Tensor, "*b h d"], at: Int[Tensor, "*p"]) -> Float[Tensor, "*b h d"]:
        """Rotary positions."""
        cos, sin = (table.view(*at.shape, 1, -1) for table in self._rotary.gather(at.reshape(1, -1)))
        return heads * cos + heads.roll(heads.shape[-1] // 2, -1) * sin


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
    scores = _wide(folded @ keys.permute(0, 2, 3, 1)).unflatten(2, (-1, groups))  # B K W G T
    first = places.place.new_zeros(batch, places.width)
    first[places.row, places.column] = places.place
    hidden = torch.arange(length, device=keys.device) > first[:, :, None]
    scores = scores.masked_fill(hidden[:, None, :, None], -torch.inf)
    spread = [(places.spread(k, batch), places.spread(v, batch)) for k, v in later]
    own = [_wide(torch.einsum("bwkgd,bwkd->bkwg", wide, k))[..., None] for k, _ in spread]
    shares = (torch.cat([scores, *own], dim=-1) * dim**-0.5).softmax(-1).to(values.dtype)
    mixed = shares[..., :length].flatten(2, 3) @ values.transpose(1, 2)
    mixed = mixed.unflatten(2, (-1, groups)).transpose(1, 2)  # B W K G d
    for step, (_, value) in enumerate(spread):
        share = shares[..., length + step].transpose(1, 2)[..., None]  # B W K G 1
        mixed = mixed + share * value[:, :, :, None]
    return places.pack(mixed.flatten(2))


def soft_cross_entropy(
    states: Float[Tensor, "R D"],
    weight: Float[Tensor, "v D"],
    bias: Float[Tensor, "v"] | None,
    taught: Float[Tensor, "A v"],
    index: Int[Tensor, "R"],
) -> Float[Tensor, ""]:
    """Mean cross-entropy of ``softmax(states weight^T + bias)`` against the distributions ``taught[index]``.

    The logits of all places at once would take gigabytes, so their gradient is computed with them, portion by portion.
    """
    device = states.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        states, weight = states.to(dtype), weight.to(dtype)
    total: Tensor = _SoftCrossEntropy.apply(states, weight, bias, taught, index)
    return total / max(1, len(states))


class _SoftCrossEntropy(torch.autograd.Function):
    """Sum over the rows; the gradients for states and weight, not for the bias, which is the target's."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None, taught: Tensor, index: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.promote_types(states.dtype, torch.float32), device=states.device)
        of_states = torch.zeros_like(states)
        of_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        with torch.autocast(states.device.type, enabled=False):
            for start in range(0, len(states), _CHUNK):
                rows = slice(start, start + _CHUNK)
                logits = (states[rows] @ weight.T).to(total.dtype)
                logits = logits if bias is None else logits + bias
                wanted = taught[index[rows]].to(total.dtype)
                normal = logits.logsumexp(-1, keepdim=True)
                total += (normal[:, 0] * wanted.sum(-1) - (wanted * logits).sum(-1)).sum()
                slope = ((logits - normal).exp_() * wanted.sum(-1, keepdim=True) - wanted).to(weight.dtype)
                of_states[rows] = slope @ weight
                if of_weight is not None:
                    of_weight += slope.T @ states[rows]
        ctx.save_for_backward(of_states, of_weight)
        return total

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        of_states, of_weight = ctx.saved_tensors
        scaled = None if of_weight is None else of_weight * slope.to(of_weight.dtype)
        return of_states * slope.to(of_states.dtype), scaled, None, None, None


def _wide(x: Tensor) -> Tensor:
    """At least 32 bit."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _behind(tokens: Int[Tensor, "B T"], count: int) -> Int[Tensor, "B T"]:
    """The token ``count`` places on, 0 behind the end."""
    return F.pad(tokens[:, count:], (0, min(count, tokens.shape[1])))


# -- where it begins --------------------------------------------------------------------------------------------------


def default_taps(layers: int) -> tuple[int, ...]:
    """Outputs of three layers, low, middle and high, 0-based: 1, L / 2 - 1 and L - 4, as the authors choose them.

    Their code names the inputs of layers 2, L / 2 and L - 3, which is the same.
    """
    return tuple(sorted({min(1, layers - 1), max(layers // 2 - 1, 0), max(layers - 4, 0)}))


def spec_of(target: CausalLM, version: int, taps: Sequence[int] | None = None) -> Spec:
    """A draft network with the sizes of the target's own layers."""
    chosen = tuple(default_taps(target.n_layers) if taps is None else taps)
    return Spec(
        version=version,
        hidden_size=target.hidden_size,
        intermediate_size=target.layers[-1].mlp.down.dense.shape[1],
        heads=target.heads,
        kv_heads=target.kv_heads,
        head_dim=target.head_dim,
        rms_eps=float(getattr(target.config, "rms_norm_eps", 1e-6)),
        layers=target.n_layers,
        vocab_size=target.vocab_size,
        rope=_rope(target),
        taps=chosen if version == 3 else (),
    )


def _rope(target: CausalLM) -> dict[str, Any]:
    found = dict(getattr(target.config, "rope_parameters", None) or {})
    return {"rope_type": "default", "rope_theta": 10000.0} | found


@torch.no_grad()
def begin(network: DraftModule, target: CausalLM) -> None:
    """Copy the target's last layer where it is a Llama layer; what it lacks starts small, at random.

    Version 3: the first feature is the highest tapped state, the half that reads it is the target's, and the last norm
    is the target's final norm. Version 1: the feature stands behind the final norm, so that norm is undone.
    """
    spec, source = network.spec, target.layers[-1]
    for parameter in network.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, _QUIET)
    width = spec.hidden_size
    network.fc.weight[:, -width:] = torch.eye(width)
    if spec.version == 3:
        network.norm.weight.copy_(_gain(target.norm, target))
        network.layer.input_layernorm.weight.copy_(_gain(source.attention.norm, target))
        network.layer.hidden_norm.weight.copy_(_gain(source.attention.norm, target))
    else:
        network.fc.bias.zero_()
    _copy_feed_forward(network, target)
    if source.attention.query_norm is None and source.attention.norm is not None:
        _copy_attention(network, target)


def _copy_attention(network: DraftModule, target: CausalLM) -> None:
    source, spec, attention = target.layers[-1].attention, network.spec, network.layer.self_attn
    sizes = [spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.kv_heads * spec.head_dim]
    gain = 1.0 if spec.version == 3 else _gain(source.norm, target) / _gain(target.norm, target)
    copies = (source.qkv.dense.float() * gain).split(sizes)
    for module, copy in zip((attention.q_proj, attention.k_proj, attention.v_proj), copies, strict=True):
        module.weight[:, -spec.hidden_size :] = copy
    attention.o_proj.weight.copy_(source.out.dense)


def _copy_feed_forward(network: DraftModule, target: CausalLM) -> None:
    source, layer = target.layers[-1].mlp, network.layer
    if source.norm is not None:
        layer.post_attention_layernorm.weight.copy_(_gain(source.norm, target))
    gate, up = source.gate_up.dense.chunk(2)
    layer.mlp.gate_proj.weight.copy_(gate)
    layer.mlp.up_proj.weight.copy_(up)
    layer.mlp.down_proj.weight.copy_(source.down.dense)


def _gain(norm: Rows | None, target: CausalLM) -> Float[Tensor, "D"]:
    """What a norm multiplies with; 1 where there is none, or one without a weight."""
    ones = torch.ones(target.hidden_size, dtype=target.dtype, device=target.device)
    gain = (ones if norm is None else norm(ones)).float()
    return torch.where(gain.abs() < _LEAST_GAIN, 1.0, gain)


# -- the preparation --------------------------------------------------------------------------------------------------


class EagleTraining:
    """Trains the draft network.

    Args:
        version: 1, 2 (the same network) or 3.
        unroll: steps over features of its own, the first one over the target's included; None: 4 for version 3, else 1.
        taps: layers of the target that version 3 reads, 0-based; None: 1, L / 2 - 1 and L - 4.
        output: ``shared``, the target's rows of the output matrix, or ``own``, trained along and part of the file.
        vocabulary: most tokens that it chooses among.
        noise: version 1: on the target's features, see ``EagleLearner``.
        classification: version 1: weight of the cross-entropy beside the smooth L1.
        answers: of the target, to learn from; None: the defaults.
        features: read the target's states from files, or compute them for each batch.
        recipe: of the training; None: the defaults.

    Raises:
        ValueError: a number out of range.
    """

    prepares: ClassVar[str] = "a draft network of one layer that predicts the target's next features"
    takes: ClassVar[str] = "an hour or two on two CPU cores for smollm2; minutes on a GPU"
    corpus: ClassVar[str] = HEADS_CORPUS

    def __init__(
        self,
        version: Literal[1, 2, 3] = 3,
        unroll: int | None = None,
        taps: list[int] | None = None,
        output: Output = "shared",
        vocabulary: int = 8192,
        noise: float = 0.2,
        classification: float = 0.1,
        answers: AnswerRecipe | None = None,
        features: FeatureForm = "cached",
        recipe: Recipe | None = None,
    ) -> None:
        steps = unroll if unroll is not None else (4 if version == 3 else 1)
        if min(steps, vocabulary) < 1 or min(noise, classification) < 0:
            raise ValueError(
                f"unroll={unroll}, vocabulary={vocabulary}, noise={noise}, classification={classification} came; "
                "counts of at least 1 (unroll: or null) and weights of at least 0 are allowed. Correct them, or leave "
                "them out for the defaults."
            )
        self.version, self.unroll, self.taps, self.output = (3 if version == 3 else 1), steps, taps, output
        self.vocabulary, self.noise, self.classification = vocabulary, noise, classification
        self.answers, self.features, self.recipe = answers or AnswerRecipe(), features, recipe or Recipe()

    def fit(self, workshop: Workshop) -> dict[str, Any]:
        """See ``methods.training.interface.Trainable``."""
        target = workshop.target
        spec = spec_of(target, self.version, self.taps)
        found = features(workshop, spec.taps, self.answers, self.features)
        vocabulary = found.vocabulary(self.vocabulary, target)
        torch.manual_seed(workshop.seed)
        learner = EagleLearner(target, spec, vocabulary, self.unroll, self.output, self.noise, self.classification)
        facts = teach(learner, found, self.recipe, workshop)
        learner.part().save(workshop.folder)
        discard(workshop.folder)
        return facts | {
            "version": self.version,
            "draft_vocabulary": len(vocabulary),
            "held_out_coverage": found.coverage(vocabulary),
        }
