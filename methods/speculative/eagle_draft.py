"""The draft network of EAGLE: its sizes, its files, and its pass for decoding.

One Llama layer predicts the target's next feature from the pair of the feature at a place and the embedding of the
token behind it, and the output matrix turns that feature into a token. Versions 1 and 2 (arXiv 2401.15077, sec. 3.1;
arXiv 2406.16858) mix the pair in front of the layer, and the feature is the target's last hidden state behind its final
norm. Version 3 (arXiv 2503.01840, sec. 3) mixes the states behind three layers of the target into the first feature,
gives the layer both halves of the pair side by side, and no longer asks that its own feature resemble the target's.

Tensors have the names that the authors' checkpoints use, ours and published ones alike. A part of ours shares the
target's embedding and, unless it was trained along, its output matrix: neither is in the file. ``eagle_training.py``
holds the same network as a module; a test proves the two equal.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from methods.engine.cache import Cache
from methods.engine.families import RMSNorm
from methods.engine.linear import Linear, make_linear
from methods.engine.lm import CausalLM, RotaryTable, _rotate_
from methods.speculative.vocabulary import DraftVocabulary

WEIGHTS, CONFIG = "head.safetensors", "config.json"
TRAIN = "python -m bench.train method=eagle model=MODEL"
VOCABULARY = "d2t"  # the authors' name: what to add to a place to get its id


@dataclass(frozen=True)
class Spec:
    """Sizes of a draft network, and of the target it belongs to.

    Attributes:
        version: 1 or 3; the weights of version 2 are those of version 1.
        hidden_size, intermediate_size, heads, kv_heads, head_dim: of the layer.
        rms_eps: of its norms.
        rope: parameters of its rotary positions, as transformers has them.
        taps: layers of the target whose outputs make a feature (version 3), 0-based.
        layers, vocab_size: of the target.
        norm_before_residual: version 3: the residual is the normalised feature instead of the feature itself.
        norm_before_fc, fc_norm: version 3: the tapped states are normalised before they are mixed, together or each.
        norm_output: version 3: a guess has the feature behind the last norm, not the one before it. No network trained
            here has any of these four; published ones may.
    """

    version: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_eps: float
    layers: int
    vocab_size: int
    rope: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    taps: tuple[int, ...] = ()
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    @property
    def layer(self) -> str:
        """What the authors call the one layer."""
        return "midlayer" if self.version == 3 else "layers.0"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that the network itself has, by its name."""
        width, heads, kv = self.hidden_size, self.heads * self.head_dim, self.kv_heads * self.head_dim
        read = 2 * width if self.version == 3 else width
        layer: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj.weight": (heads, read),
            "self_attn.k_proj.weight": (kv, read),
            "self_attn.v_proj.weight": (kv, read),
            "self_attn.o_proj.weight": (width, heads),
            "mlp.gate_proj.weight": (self.intermediate_size, width),
            "mlp.up_proj.weight": (self.intermediate_size, width),
            "mlp.down_proj.weight": (width, self.intermediate_size),
            "post_attention_layernorm.weight": (width,),
        }
        if self.version == 3:
            layer |= {"hidden_norm.weight": (width,), "input_layernorm.weight": (width,)}
            around = {"fc.weight": (width, len(self.taps) * width), "norm.weight": (width,)}
            around |= {f"{name}.weight": (size,) for name, size in self._mixing_norms()}
        else:
            around = {"fc.weight": (width, 2 * width)}
        return around | {f"{self.layer}.{name}": shape for name, shape in layer.items()}

    def _mixing_norms(self) -> list[tuple[str, int]]:
        """Norms in front of ``fc`` and what they act on."""
        together = [("input_norm", len(self.taps) * self.hidden_size)] if self.norm_before_fc else []
        return together + [(f"fc_norm.{number}", self.hidden_size) for number in range(len(self.taps)) if self.fc_norm]

    def optional(self) -> dict[str, tuple[int, ...]]:
        """Tensors that only some networks have: biases, and an embedding that is not the target's."""
        heads, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        sizes = {"q": heads, "k": kv, "v": kv, "o": self.hidden_size}
        biases = {f"{self.layer}.self_attn.{name}_proj.bias": (size,) for name, size in sizes.items()}
        embedding = {"embed_tokens.weight": (self.vocab_size, self.hidden_size)}
        return {"fc.bias": (self.hidden_size,), **biases, **embedding}

    def rotary(self, device: torch.device, dtype: torch.dtype) -> RotaryTable:
        """Cosines and sines of its positions."""
        config = LlamaConfig(
            hidden_size=self.hidden_size,
            num_attention_heads=self.heads,
            head_dim=self.head_dim,
            rope_parameters=dict(self.rope),
        )
        return RotaryTable(LlamaRotaryEmbedding(config).to(device), device, dtype)


@dataclass(frozen=True)
class Part:
    """A trained draft network.

    Attributes:
        spec: its sizes.
        tensors: by the authors' names; ``lm_head.weight`` where the output matrix is its own.
        vocabulary: what it proposes from; place i of its output is token ``vocabulary.ids[i]``.
    """

    spec: Spec
    tensors: Mapping[str, Tensor]
    vocabulary: DraftVocabulary

    def save(self, folder: Path) -> None:
        """Write it into a folder, as ``load`` reads it; the weights in 16 bit."""
        tensors = {name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in self.tensors.items()}
        ids = self.vocabulary.ids.cpu()
        tensors[VOCABULARY] = ids - torch.arange(len(ids))
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS)
        (folder / CONFIG).write_text(json.dumps(asdict(self.spec)) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path, target: CausalLM) -> Part:
        """Read it.

        Raises:
            ValueError: files are missing or damaged, or belong to another target.
        """
        spec, tensors = _read(folder)
        theirs = (spec.hidden_size, spec.layers, spec.vocab_size)
        ours = (target.hidden_size, target.n_layers, target.vocab_size)
        if theirs != ours:
            raise ValueError(
                f"The draft network in {folder} is of a model with hidden size, layers and vocabulary {theirs}; "
                f"{target.name} has {ours}, and all must be the same. Train one for this model: {TRAIN}."
            )
        offsets = tensors.pop(VOCABULARY, None)
        vocabulary = vocabulary_of(offsets, target.vocab_size)
        part = cls(spec, tensors, vocabulary)
        part.require_shapes(str(folder))
        return part

    def require_shapes(self, where: str) -> None:
        """Refuse tensors that are not those of the spec.

        Raises:
            ValueError: names what is missing, what is too much, and what has another shape.
        """
        optional = {"lm_head.weight": (len(self.vocabulary), self.spec.hidden_size), **self.spec.optional()}
        wanted = self.spec.shapes() | {name: shape for name, shape in optional.items() if name in self.tensors}
        found = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
        if found != wanted:
            differing = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
            came = ", ".join(f"{name} {found.get(name, 'missing')}" for name in differing)
            needed = ", ".join(f"{name} {wanted.get(name, 'none')}" for name in differing)
            raise ValueError(
                f"The weights in {where} do not fit version {self.spec.version} of eagle: {came} came; {needed} "
                f"is needed. Copy the files again, or train a draft network: {TRAIN}."
            )


def vocabulary_of(offsets: Int[Tensor, "n"] | None, vocab_size: int) -> DraftVocabulary:
    """The draft vocabulary from the authors' offsets; None: all tokens."""
    if offsets is None:
        return DraftVocabulary.all(vocab_size)
    return DraftVocabulary(torch.arange(len(offsets)) + offsets.long().cpu(), vocab_size)


def _read(folder: Path) -> tuple[Spec, dict[str, Tensor]]:
    try:
        found = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        spec = Spec(**{**found, "taps": tuple(found["taps"])})
        with safe_open(folder / WEIGHTS, "pt") as file:
            return spec, {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118, no mapping
    except (OSError, ValueError, TypeError, KeyError, AttributeError, SafetensorError) as error:
        raise ValueError(
            f"{folder} cannot be read as a draft network of method=eagle ({error}); it must hold {CONFIG} and "
            f"{WEIGHTS} as their training leaves them. Name another folder, or train one: {TRAIN}."
        ) from error


class Network:
    """The draft network of a target, its weights in the target's type and packed as the target's are."""

    def __init__(self, target: CausalLM, part: Part) -> None:
        self.spec, self._tensors = part.spec, part.tensors
        self.device, self.dtype = target.device, target.dtype
        self._embed = self._embedding(target)
        self.vocabulary = part.vocabulary.to(target.device)
        self.rotary = self.spec.rotary(target.device, target.dtype)
        layer = self.spec.layer
        self._fc = self._linear("fc")
        self._qkv = self._linear(*(f"{layer}.self_attn.{name}_proj" for name in "qkv"))
        self._out = self._linear(f"{layer}.self_attn.o_proj")
        self._gate_up = self._linear(f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj")
        self._down = self._linear(f"{layer}.mlp.down_proj")
        self._mlp_norm = self._norm(f"{layer}.post_attention_layernorm")
        if self.spec.version == 3:
            self._token_norm = self._norm(f"{layer}.input_layernorm")
            self._feature_norm = self._norm(f"{layer}.hidden_norm")
            self._last_norm = self._norm("norm")
        spec = self.spec
        self._state_norms = [self._norm(f"fc_norm.{number}") for number in range(len(spec.taps)) if spec.fc_norm]
        self._mixing_norm = self._norm("input_norm") if spec.norm_before_fc else None
        self._score, own = self._output(target)
        linears = (self._fc, self._qkv, self._out, self._gate_up, self._down)
        self.nbytes = {"draft_network": sum(linear.nbytes for linear in linears), "draft_output_matrix": own}
        self._tensors = {}  # what was packed is needed no more

    def _weight(self, name: str) -> Tensor | None:
        found = self._tensors.get(name)
        return None if found is None else found.to(self.device, self.dtype)

    def _linear(self, *names: str) -> Linear:
        weights = [self._tensors[f"{name}.weight"].to(self.device, self.dtype) for name in names]
        return make_linear(weights, [self._weight(f"{name}.bias") for name in names])

    def _norm(self, name: str) -> RMSNorm:
        return RMSNorm(self._tensors[f"{name}.weight"].to(self.device, self.dtype), self.spec.rms_eps)

    def _embedding(self, target: CausalLM) -> Callable[[Tensor], Tensor]:
        own = self._weight("embed_tokens.weight")
        return target.embed if own is None else functools.partial(F.embedding, weight=own)

    def _output(self, target: CausalLM) -> tuple[Callable[[Tensor], Tensor], int]:
        """The output matrix, and the bytes it takes beside the target."""
        own = self._weight("lm_head.weight")
        if own is None and self.vocabulary.full:
            return target.head, 0
        weight, bias = (own, None) if own is not None else target.output_rows(self.vocabulary.ids)
        linear = make_linear([weight], [bias])
        return linear, linear.nbytes

    def feature(self, hidden: Float[Tensor, "B M D"], taps: Sequence[Float[Tensor, "B M D"]]) -> Float[Tensor, "B M D"]:
        """What the target knows at some places: its last state, or what version 3 makes of three."""
        if self.spec.version != 3:
            return hidden
        if self._state_norms:
            taps = [norm(tap) for norm, tap in zip(self._state_norms, taps, strict=True)]
        states = torch.cat(list(taps), dim=-1)
        if self._mixing_norm is not None:
            states = self._mixing_norm(states)
        return self._fc(states.flatten(0, 1)).view(hidden.shape)

    def enter(
        self, feature: Float[Tensor, "B M D"], tokens: Int[Tensor, "B M"]
    ) -> tuple[Float[Tensor, "B M D"], Float[Tensor, "B M h d"]]:
        """Pairs at the layer's door: the residual, and the heads of query, key and value side by side."""
        embedding = self._embed(tokens)
        if self.spec.version == 3:
            normed = self._feature_norm(feature)
            read = torch.cat([self._token_norm(embedding), normed], dim=-1).flatten(0, 1)
            residual = normed if self.spec.norm_before_residual else feature
        else:
            read = self._fc(torch.cat([embedding, feature], dim=-1).flatten(0, 1))
            residual = read.view(feature.shape)
        return residual, self._qkv(read).view(*tokens.shape, -1, self.spec.head_dim)

    def leave(self, residual: Float[Tensor, "B M D"], mixed: Float[Tensor, "R H"]) -> Float[Tensor, "B M D"]:
        """The next features, from the residual and what the heads gathered."""
        hidden = residual + self._out(mixed).view(residual.shape)
        gate, up = self._gate_up(self._mlp_norm(hidden).flatten(0, 1)).chunk(2, dim=-1)
        return hidden + self._down(F.silu(gate) * up).view(hidden.shape)

    def logits(self, feature: Float[Tensor, "B M D"]) -> tuple[Float[Tensor, "B M v"], Float[Tensor, "B M D"]]:
        """Logits over the draft vocabulary of the next token, and the feature that a pair with that token has."""
        if self.spec.version != 3:
            return self._scores(feature), feature
        normed = self._last_norm(feature)
        return self._scores(normed), normed if self.spec.norm_output else feature

    def _scores(self, rows: Float[Tensor, "B M D"]) -> Float[Tensor, "B M v"]:
        return self._score(rows.flatten(0, 1)).view(*rows.shape[:2], -1)


class Reader:
    """The draft network at work: pairs of committed tokens in a cache of its own, and a tree of guesses behind them.

    A pair is the feature at a place and the token behind it; it counts from 0 as the place does. Committed pairs have
    the target's features and stand at each row's own slots; guesses of all rows begin at the same slot, behind the
    longest, so that a level of the tree is written and masked alike in every row.
    """

    def __init__(self, network: Network, batch: int, capacity: int) -> None:
        spec = network.spec
        self.network, self._groups = network, spec.heads // spec.kv_heads
        self._cache = Cache(
            [0], batch, capacity, spec.kv_heads, spec.head_dim, dtype=network.dtype, device=network.device
        )
        self._guesses = 0
        self._prefix: Tensor | None = None

    @property
    def lengths(self) -> list[int]:
        """Committed pairs of each row."""
        return self._cache.lengths

    def read(
        self, feature: Float[Tensor, "B W D"], tokens: Int[Tensor, "B W"], counts: Sequence[int]
    ) -> Float[Tensor, "B 1 D"]:
        """Commit the first ``counts[b]`` pairs of each row and forget all guesses; the feature behind the last pair.

        Of the earlier ones only keys and values are wanted.
        """
        cache, spec = self._cache, self.network.spec
        width, start = tokens.shape[1], cache.lengths[0]
        residual, heads = self.network.enter(feature, tokens)
        if cache.uniform:
            cos, sin = self.network.rotary.slice(start, start + width)
        else:
            self.network.rotary.reserve(max(cache.lengths) + width)
            cos, sin = self.network.rotary.gather(cache.slots(width))
        _rotate_(heads[:, :, : spec.heads + spec.kv_heads], cos, sin)
        cache.write(0, heads[:, :, spec.heads :], None if cache.uniform else cache.slots(width))
        cache.advance(counts)
        self._guesses, self._prefix = 0, self._hide_padding()
        if len(counts) == 1 or min(counts) == width:
            residual, query = residual[:, counts[0] - 1 :][:, :1], heads[:, counts[0] - 1 :][:, :1, : spec.heads]
        else:
            last = torch.tensor(counts, device=heads.device).sub_(1).clamp_(min=0)
            rows = torch.arange(len(counts), device=heads.device)
            residual, query = residual[rows, last][:, None], heads[rows, last][:, None, : spec.heads]
        return self.network.leave(residual, self._mix(query, self._prefix))

    def guess(
        self,
        feature: Float[Tensor, "B M D"],
        tokens: Int[Tensor, "B M"],
        level: int,
        reach: Bool[Tensor, "b M g"] | None = None,
    ) -> Float[Tensor, "B M D"]:
        """The features behind some guesses of one level, 0 being the one right behind the root.

        Args:
            feature: behind the parent of each.
            tokens: the guesses.
            level: guesses between each and the root.
            reach: which guesses each of them sees, of all so far and these; None: all (a chain).
        """
        cache, spec, network = self._cache, self.network.spec, self.network
        start = max(cache.lengths) + self._guesses
        end = start + tokens.shape[1]
        assert end <= cache.capacity, f"{end} pairs in a cache of {cache.capacity}"
        residual, heads = network.enter(feature, tokens)
        _rotate_(heads[:, :, : spec.heads + spec.kv_heads], *self._turn(level))
        cache.store[0][:, start:end] = heads[:, :, spec.heads :]
        self._guesses += tokens.shape[1]
        return network.leave(residual, self._mix(heads[:, :, : spec.heads], self._mask(reach)))

    def _turn(self, level: int) -> tuple[Tensor, Tensor]:
        cache, rotary = self._cache, self.network.rotary
        if cache.uniform:
            return rotary.slice(cache.lengths[0] + level, cache.lengths[0] + level + 1)
        rotary.reserve(max(cache.lengths) + level + 1)
        return rotary.gather(cache.length[:, None] + level)

    def _hide_padding(self) -> Float[Tensor, "B 1 S"] | None:
        """Added to the scores of the committed part; None where all rows are of one length."""
        cache = self._cache
        if cache.uniform:
            return None
        behind = torch.arange(max(cache.lengths), device=cache.length.device) >= cache.length[:, None]
        zeros = torch.zeros(behind.shape, dtype=self.network.dtype, device=behind.device)
        return zeros.masked_fill_(behind, -torch.inf)[:, None]

    def _mask(self, reach: Bool[Tensor, "b M g"] | None) -> Float[Tensor, "b2 m S"] | None:
        """Added to the scores of committed pairs and guesses."""
        committed, prefix = max(self._cache.lengths), self._prefix
        if reach is None:
            return None if prefix is None else F.pad(prefix, (0, self._guesses))
        guesses = torch.zeros(reach.shape, dtype=self.network.dtype, device=reach.device)
        guesses.masked_fill_(~reach, -torch.inf)
        if prefix is None:
            return F.pad(guesses, (committed, 0))
        batch, nodes = len(prefix), reach.shape[1]
        return torch.cat([prefix.expand(-1, nodes, -1), guesses.expand(batch, -1, -1)], dim=2)

    def _mix(self, query: Float[Tensor, "B M H d"], mask: Float[Tensor, "b m S"] | None) -> Float[Tensor, "R HD"]:
        """Attention over all that is in the cache, the query heads of a key head side by side."""
        batch, nodes, heads, dim = query.shape
        keys, values = self._cache.view(0, max(self._cache.lengths) + self._guesses)
        folded = query.unflatten(2, (-1, self._groups)).transpose(1, 2).flatten(2, 3)  # B K MG d
        if mask is not None:
            mask = mask.expand(-1, nodes, -1).repeat_interleave(self._groups, 1)[:, None]
        mixed = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask)
        mixed = mixed.unflatten(2, (nodes, self._groups)).transpose(1, 2)
        return mixed.reshape(batch * nodes, heads * dim)
