"""A causal language model as every method sees it: any of its layers over any tree of tokens, batch first.

The weights are those of a Hugging Face model; the forward pass is our own, so that a pass can score a token tree, skip
sub-layers, stop early, return hidden states of any layer, and write into a static cache whose rows have different
lengths. Tests prove the logits equal to ``model(...)`` for every family it accepts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from methods.engine import causal_layers, fused_layers, token_tree
from methods.engine.causal_layers import (
    Attention,
    FeedForward,
    Layer,
    RMSNorm,
    Rows,
    SparseFeedForward,
    UnsupportedModel,
)
from methods.engine.cpu_kernels import reading_groups
from methods.engine.expert_layers import ClampedSwish, expected_experts
from methods.engine.fused_layers import (
    Drawing,
    Embedded,
    Ending,
    Exited,
    ExitRule,
    FusedLayers,
    Norm,
    Portion,
    Ran,
    Scored,
    Waiting,
)
from methods.engine.guesses import GuessedRounds
from methods.engine.kv_cache import Cache
from methods.engine.linear import (
    DraftWeights,
    KernelLinear,
    Linear,
    LinearForm,
    PanelLinear,
    ScreenedLinear,
    draft_form,
    make_linear,
    require_blocks,
)
from methods.engine.sampling import in_float
from methods.engine.token_tree import Nodes, Parents
from methods.engine.triton_layers import TritonLayers

__all__ = ["CausalLM", "Output", "Pass", "UnsupportedModel"]

Weights = Literal["full", "int4", "fp8"]
_HEAD_FORM: LinearForm = "int8"  # of the output matrix beside layers of 4 bits on a CPU
States = tuple[Float[Tensor, "B M D"], dict[int, Float[Tensor, "B M D"]]]  # after all layers, and after some

_PREFILL_CHUNK = 512
_SCORE_CHUNK = 256
_LEAST_CHUNK, _MOST_CHUNK, _MOST_ROWS = 16, 256, 1024
_SPARSE = 0.75
_SHORT = 8 * 2**20  # bytes that a pass reads
ROUNDS_TOGETHER = 16  # in a call of the kernels, at most


@dataclass(slots=True)
class Output:
    """Result of a pass of the target.

    Attributes:
        logits: [B, M, V] of every scored node; after a prefill [B, 1, V] of each row's last token.
        hidden: [B, P, D] after the final norm (what the output matrix multiplies); P = M, but after a prefill with
            hidden_layers it covers all positions of the prompts, rows padded at the end.
        hidden_layers: hidden states after the layers asked for, over the same positions.
        memory: [B, S, D] encoder states of the sources, rows padded at the end; only after a prefill of an
            encoder-decoder.
        best: [B, M] the first of the largest logits of every node; None: the pass did not look for it.
        candidates: the k most likely tokens after every node, the likeliest first, where the logits are not kept; what
            is after the nodes of the pass has no meaning. None: nothing asked for them.
    """

    logits: Float[Tensor, "B M V"]
    hidden: Float[Tensor, "B P D"]
    hidden_layers: dict[int, Float[Tensor, "B P D"]] = field(default_factory=dict)
    memory: Float[Tensor, "B S D"] | None = None
    best: Int[Tensor, "B M"] | None = None
    candidates: Int[Tensor, "B C k"] | None = None

    @classmethod
    def of_groups(cls, groups: Sequence[Sequence[int]], outputs: Sequence[Output]) -> Output:
        """What prefills of these rows each returned, as if by one."""
        places = sum(map(len, groups))

        def joined(parts: Sequence[Float[Tensor, "_ _ D"]]) -> Float[Tensor, "_ _ D"]:
            rows = parts[0].new_zeros(places, max(part.shape[1] for part in parts), parts[0].shape[2])
            for group, part in zip(groups, parts, strict=True):
                rows[list(group), : part.shape[1]] = part
            return rows

        layers = {layer: joined([each.hidden_layers[layer] for each in outputs]) for layer in outputs[0].hidden_layers}
        return cls(joined([each.logits for each in outputs]), joined([each.hidden for each in outputs]), layers)

    def copied(self) -> Output:
        """With states of its own, where those of recorded passes are written again."""
        layers = {layer: states.clone() for layer, states in self.hidden_layers.items()}
        return replace(self, hidden=self.hidden.clone(), hidden_layers=layers)

    def of_rows(self, rows: list[int]) -> Output:
        """The result of these rows, in this order."""
        layers = {layer: states[rows] for layer, states in self.hidden_layers.items()}
        memory = None if self.memory is None else self.memory[rows]
        best = None if self.best is None else self.best[rows]
        candidates = None if self.candidates is None else self.candidates[rows]
        return Output(self.logits[rows], self.hidden[rows], layers, memory, best, candidates)


@dataclass(slots=True)
class Near:
    """What layers with a sliding window use in a pass in the place of ``Pass.cos``, ``Pass.sin`` and ``Pass.mask``.

    Attributes:
        mask: over the slots from ``start`` on.
        start: the first slot that a node of any row may see there.
    """

    cos: Float[Tensor, "b M 1 r"]
    sin: Float[Tensor, "b M 1 r"]
    mask: Float[Tensor, "b 1 MG S"] | None
    start: int = 0


@dataclass(slots=True)
class Pass:
    """State of a pass on its way through the layers.

    Attributes:
        hidden: [B, M, D] input of the next layer.
        cos, sin: rotary tables at the nodes' positions, [B or 1, M, 1, r]; ``sin`` carries the sign of the half turn.
        mask: [B or 1, 1, M * G, S] additive, G query heads per key head; None where all of S is visible, or ``fused``.
        slots: cache slots of the nodes; None where all rows have the same length, or kernels find them.
        end: S, the slots a node may see at most.
        near: of layers with a sliding window; None if the model has none.
        fused: kernels run the layers, which know what a node sees from ``reach`` and the cache's lengths.
        reach: ancestors of each node, its own place included, of a pass of fixed shape by Triton's kernels as bits (see
            ``methods.engine.triton_kernels.pack_bits``); None: a chain.
    """

    hidden: Float[Tensor, "B M D"]
    cos: Float[Tensor, "b M 1 r"]
    sin: Float[Tensor, "b M 1 r"]
    mask: Float[Tensor, "b 1 MG S"] | None
    slots: Int[Tensor, "B M"] | None
    end: int
    cache: Cache
    near: Near | None = None
    fused: bool = False
    reach: Bool[Tensor, "B M M"] | Int[Tensor, "B M"] | None = None


class CausalLM:
    """A decoder-only model over a static cache. Build it with ``from_hf``.

    Attributes:
        skipped_attention, skipped_mlp: sub-layers this view leaves out.
        max_positions: longest context, in tokens.
        eos_ids: ids that end a text; empty if the model declares none.
        hf: the original model, or None where its weights were released.
        weights: of the layers: ``full``, in the type of the device; or ``int4`` or ``fp8``, see
            ``methods.engine.linear``.
        draft_weights: of networks that draft for this model, see ``methods.engine.linear.draft_form``.
        window: tokens that a token sees in layers with a sliding window; None if there are none.
    """

    weights: Weights = "full"
    draft_weights: DraftWeights = "auto"
    _fused: FusedLayers | TritonLayers | None = None
    _ending: Ending | None = None  # made by the first pass that ends by the kernels
    window: int | None = None
    _logit_cap: float | None = None

    def __init__(
        self, model: PreTrainedModel, linear: LinearForm = "auto", keep_hf: bool = False, weights: Weights = "full"
    ) -> None:
        config = model.config
        causal_layers.check(config)
        self.config = config
        self.name = str(getattr(config, "_name_or_path", "") or config.model_type)
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = getattr(config, "num_key_value_heads", None) or self.heads
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.hidden_size: int = config.hidden_size
        self.vocab_size: int = config.vocab_size
        self.max_positions = int(config.max_position_embeddings)
        self.eos_ids = eos_ids(model)
        self.skipped_attention: frozenset[int] = frozenset()
        self.skipped_mlp: frozenset[int] = frozenset()
        over = getattr(config, "query_pre_attn_scalar", None) or self.head_dim
        self._scale = float(getattr(config, "attention_multiplier", None) or over**-0.5)
        self._residual = float(getattr(config, "residual_multiplier", 1.0))
        self._logit_divisor = float(getattr(config, "logits_scaling", 1.0))
        self._logit_cap = getattr(config, "final_logit_softcapping", None)
        self._key_value: dict[int, Linear] = {}  # made when first asked for, see ``fill``
        self.weights = weights
        self._read(model, linear, keep_hf)
        if type(self) is CausalLM:
            self._fused = self._kernels_of(self.layers)

    @classmethod
    def from_hf(
        cls,
        model: PreTrainedModel,
        *,
        linear: LinearForm = "auto",
        keep_hf: bool = False,
        weights: Weights = "full",
    ) -> CausalLM:
        """Take over the weights of a Hugging Face model.

        Args:
            model: any causal LM of the proven families, in evaluation mode.
            linear: form of the matrix products, see ``methods.engine.linear``.
            keep_hf: leave the original usable (peers need it); costs its memory once more where weights are packed.
            weights: int4 rounds the matrices of the layers to 4 bits and on a CPU the output matrix to 8, fp8 those of
                the layers to floating point of 8 bits; the embedding stays.

        Raises:
            UnsupportedModel: no equality test covers this model.
            ValueError: no such weights for this class, device, type or shape.
        """
        if weights == "full":
            return cls(model.eval(), linear, keep_hf)
        if cls is not CausalLM:
            raise ValueError(
                f"model.weights={weights} needs a decoder-only model that writes from left to right, got one of type "
                f"{model.config.model_type}. Set model.weights=full."
            )
        return cls(model.eval(), linear, keep_hf, weights)

    def _read(self, model: PreTrainedModel, linear: LinearForm, keep_hf: bool) -> None:
        base: Any = model.model
        embedding: Any = model.get_input_embeddings()
        if not keep_hf:
            leave_file(model, embedding.weight)
        self._embedding = embedding.weight.detach()
        self._embed_scale = float(getattr(embedding, "scalar_embed_scale", 1.0)) * float(
            getattr(self.config, "embedding_multiplier", 1.0)
        )
        self.device, self.dtype = self._embedding.device, self._embedding.dtype
        self._embed_factor = torch.tensor(self._embed_scale, dtype=self.dtype, device=self.device)
        kinds = sorted(causal_layers.rope_parameters(self.config))  # of all layers, or full_ before sliding_attention
        self._rope = RotaryTable(base.rotary_emb, self.device, self.dtype, kinds[0])
        self._near_rope = self._rope
        if len(kinds) > 1:
            self._near_rope = RotaryTable(base.rotary_emb, self.device, self.dtype, kinds[1])
        head: Any = model.get_output_embeddings()
        self._final_norm: Rows = causal_layers.read_norm(base.norm)  # type: ignore[assignment]
        form = linear if self.weights == "full" else self.weights
        head_form = _HEAD_FORM if form == "int4" and self.device.type == "cpu" else linear
        self._head: Linear = make_linear([head.weight.detach()], [head.bias], head_form)
        self.layers: list[Layer] = []
        for index, layer in enumerate(base.layers[: self.config.num_hidden_layers]):
            self.layers.append(causal_layers.read_layer(layer, form, self.config, index))
            if not keep_hf:
                causal_layers.release(layer)
        if not keep_hf:
            causal_layers.release(model)
        self.window = next((found.attention.window for found in self.layers if found.attention.window), None)
        self.hf = model if keep_hf else None

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    @property
    def layer_sizes(self) -> dict[str, int]:
        """Of a layer of the whole model: ``heads``, ``kv_heads``, and ``intermediate_size`` of the last one."""
        return {"heads": self.heads, "kv_heads": self.kv_heads, "intermediate_size": self.layers[-1].mlp.width}

    @property
    def weight_bytes(self) -> int:
        """Bytes of the matrices this view multiplies with, all experts among them, and of the embedding."""
        products = [self._head, *self._products()]
        experts = sum(mlp.experts.nbytes for mlp in self._sparse())
        return sum(p.nbytes for p in products) + experts + self.embedding_bytes

    @property
    def embedding_bytes(self) -> int:
        """Of ``weight_bytes``, those of the embedding, of which a pass reads some rows only."""
        return self._embedding.numel() * self._embedding.element_size()

    def pass_bytes(self, tokens: int) -> float:
        """Of ``weight_bytes``, those that a pass over so many tokens is expected to read, see ``expected_experts``."""
        unread = 0.0
        for mlp in self._sparse():
            count = mlp.experts.count
            unread += mlp.experts.nbytes * (1 - expected_experts(count, mlp.router.active, tokens) / count)
        return self.weight_bytes - unread

    @property
    def int4_bytes(self) -> int:
        """Of ``weight_bytes``, those in blocks of 4-bit numbers."""
        experts = [product for mlp in self._sparse() for product in mlp.experts.products()]
        return sum(product.nbytes for product in (*self._products(), *experts) if product.form == "int4")

    def _products(self) -> Iterator[Linear]:
        """All but those of experts that only some tokens pass through."""
        for index, layer in enumerate(self.layers):
            if index not in self.skipped_attention:
                yield from (layer.attention.qkv, layer.attention.out)
            if index not in self.skipped_mlp:
                mlp = layer.mlp
                yield from mlp.products if isinstance(mlp, SparseFeedForward) else (mlp.gate_up, mlp.down)

    def _sparse(self) -> Iterator[SparseFeedForward]:
        """Mixtures of experts that this view does not skip."""
        for index, layer in enumerate(self.layers):
            if index not in self.skipped_mlp and isinstance(layer.mlp, SparseFeedForward):
                yield layer.mlp

    @property
    def output_bytes(self) -> int:
        """Bytes of the output matrix."""
        return self._head.nbytes

    @property
    def encoder_bytes(self) -> int:
        """Bytes of the matrices that reading a source multiplies with; 0 unless the model is an encoder-decoder."""
        return 0

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of one token."""
        kept = self.n_layers - len(self.skipped_attention)
        return kept * 2 * self.kv_heads * self.head_dim * self.dtype.itemsize

    def skip(self, attention: Collection[int] = (), mlp: Collection[int] = ()) -> CausalLM:
        """The same weights without some attention and feed-forward sub-layers (0-based layers).

        Raises:
            ValueError: a layer number beyond the model.
        """
        outside = sorted(i for i in {*attention, *mlp} if not 0 <= i < self.n_layers)
        if outside:
            raise ValueError(f"Layers {outside} cannot be skipped: {self.name} has layers 0 to {self.n_layers - 1}.")
        view = object.__new__(type(self))
        view.__dict__.update(self.__dict__)
        view.skipped_attention = self.skipped_attention | frozenset(attention)
        view.skipped_mlp = self.skipped_mlp | frozenset(mlp)
        view.name = (
            f"{self.name} without {len(view.skipped_attention)} attention and {len(view.skipped_mlp)} mlp layers"
        )
        return view

    def rounded(self, first: int, head: LinearForm | int | None = None) -> CausalLM:
        """A view whose layers from ``first`` on are copies rounded to 4 bits; it and this model may share a cache.

        Args:
            first: 0-based.
            head: form of a copy of the output matrix; a number: 4 bits find so many of the largest logits, which this
                model's matrix then gives (``ScreenedLinear``), or 8 bits where that is not in panels; None: it is
                this model's.

        Raises:
            ValueError: no 4-bit weights for this class, device, type or shape, or the layers have them already.
        """
        if type(self) is not CausalLM or self.weights != "full":
            kind = self.config.model_type if self.weights == "full" else f"weights={self.weights}"
            raise ValueError(
                f"Copies of 4 bits must be of a decoder-only model with full weights, got {kind}. Set "
                "model.weights=full and hardware=cpu_bf16, or choose another model."
            )
        require_blocks(self.device, self.dtype, "Layers rounded to 4 bits need", "choose another method")
        view = object.__new__(CausalLM)
        view.__dict__.update(self.__dict__)
        view.layers = [*self.layers[:first], *map(causal_layers.rounded, self.layers[first:])]
        view.weights, view._key_value, view._fused = "int4", {}, self._kernels_of(view.layers)
        if isinstance(head, int) and isinstance(self._head, PanelLinear):
            view._head = ScreenedLinear(self._head, min(head, self.vocab_size))
        elif head is not None:
            form = _HEAD_FORM if isinstance(head, int) else head
            view._head = make_linear([self._head.dense], [self._head.bias], form)
        return view

    def _kernels_of(self, layers: Sequence[Layer]) -> FusedLayers | None:
        """A CPU's kernels for these layers, where they can run them."""
        found = fused_layers.of_layers(layers, self.head_dim, self.max_positions)
        return None if found is None else FusedLayers(found, self.heads, self.kv_heads, self._scale, self._residual)

    def pays_to_drop(self, kept: int, rows: int) -> bool:
        """Whether to drop finished rows from a batch of ``rows``, so that ``kept`` are left.

        A model whose passes are bound to a batch size never drops any.
        """
        return pays_to_drop(kept, rows)

    def new_cache(self, batch: int, capacity: int) -> Cache:
        """An empty cache for ``batch`` rows of up to ``capacity`` tokens, drafts in flight included."""
        return self._make_cache(batch, capacity)

    def _make_cache(self, batch: int, capacity: int) -> Cache:
        kept = [i for i in range(self.n_layers) if i not in self.skipped_attention]
        return Cache(kept, batch, capacity, self.kv_heads, self.head_dim, dtype=self.dtype, device=self.device)

    # -- a pass in three acts: begin, run (any layers, in any portions), head ---------------------------------------

    def begin(
        self, tokens: Nodes, parents: Parents, cache: Cache, levels: int | None = None, end: int | None = None
    ) -> Pass:
        """Embed the nodes of a pass and lay out positions and mask.

        Args:
            tokens: node 0 is the root.
            parents: of the other nodes.
            cache: where rows end, and keys and values go.
            levels: of the tree, if known.
            end: slots that attention reads, for a pass whose shapes do not depend on the rows' lengths; their
                positions must have been reserved. None: up to the last node of the longest row.
        """
        nodes, fixed = tokens.shape[1], end is not None
        end = end or max(cache.lengths) + nodes
        assert end <= cache.capacity, f"a pass over {nodes} nodes needs {end} slots, the cache has {cache.capacity}"
        if fixed and (kernels := self.round_kernels(nodes)) is not None:
            factor, tables = None if self._embed_scale == 1.0 else self._embed_factor, self._rope.slice(0, end)
            laid = kernels.lay_out(tokens, parents, levels, self._embedding, factor, *tables, cache.length)
            return Pass(laid.hidden, laid.cos, laid.sin, None, None, end, cache, fused=True, reach=laid.bits)
        hidden = F.embedding(tokens, self._embedding)
        if self._embed_scale != 1.0:
            hidden = hidden * self._embed_factor
        groups = self.heads // self.kv_heads
        by_kernels = self._fused is not None and self._fused.takes(nodes, fixed)
        if parents is None and cache.uniform and not fixed:
            start = cache.lengths[0]
            cos, sin = self._rope.slice(start, start + nodes)
            if by_kernels:
                return Pass(hidden, cos, sin, None, None, end, cache, fused=True)
            mask = None if nodes == 1 else causal_mask(nodes, start, groups, self.dtype, self.device)
            near = None if self.window is None else self._near_chain(cos, sin, mask, nodes, cache)
            return Pass(hidden, cos, sin, mask, None, end, cache, near)
        reach = None
        self._rope.reserve(end)
        if parents is not None and by_kernels and self.fused:
            rows = parents.tolist()
            reach = token_tree.ancestors_on_host(rows)
            cos, sin = self._rope.gather(torch.tensor(token_tree.places_on_host(rows, cache.lengths)))
        else:
            if parents is not None:
                reach = token_tree.ancestors(parents, levels or nodes)
            offsets = torch.arange(nodes, device=self.device)[None] if reach is None else token_tree.depths(reach)
            cos, sin = self._rope.gather(cache.length[:, None] + offsets)
        slots = None if cache.uniform and not fixed else cache.slots(nodes)
        if by_kernels:
            return Pass(hidden, cos, sin, None, slots, end, cache, fused=True, reach=reach)
        mask = ragged_mask(cache.length, reach, nodes, end, groups, self.dtype)
        near = None if self.window is None else self._near(cos, sin, mask, reach, offsets, end, cache, fixed)
        return Pass(hidden, cos, sin, mask, slots, end, cache, near, reach=reach)

    def _near_chain(self, cos: Tensor, sin: Tensor, mask: Tensor | None, nodes: int, cache: Cache) -> Near:
        """Of a chain after rows of the same length."""
        assert self.window is not None
        begin = cache.lengths[0]
        start, end, groups = max(0, begin + 1 - self.window), begin + nodes, self.heads // self.kv_heads
        if self._near_rope is not self._rope:
            cos, sin = self._near_rope.slice(begin, end)
        if nodes > 1 and end > self.window:
            row, places = cache.length[:1], torch.arange(nodes, device=self.device)[None]
            mask = ragged_mask(row, None, nodes, end, groups, self.dtype, Window(self.window, start, places))
        return Near(cos, sin, mask, start)

    def _near(
        self,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor,
        reach: Bool[Tensor, "B M M"] | None,
        places: Int[Tensor, "b M"],
        end: int,
        cache: Cache,
        fixed: bool,
    ) -> Near:
        """Of a tree, of rows of different length, or of a pass whose shapes do not depend on the lengths."""
        assert self.window is not None
        if self._near_rope is not self._rope:
            self._near_rope.reserve(end)
            cos, sin = self._near_rope.gather(cache.length[:, None] + places)
        if end <= self.window:
            return Near(cos, sin, mask)
        start = 0 if fixed else max(0, min(cache.lengths) + 1 - self.window)
        nodes, groups = places.shape[1], self.heads // self.kv_heads
        window = Window(self.window, start, places)
        return Near(cos, sin, ragged_mask(cache.length, reach, nodes, end, groups, self.dtype, window), start)

    def reserve_positions(self, positions: int) -> tuple[Tensor, ...]:
        """Extend the rotary tables to so many positions; returned tables keep their memory while referenced."""
        near = () if self._near_rope is self._rope else self._near_rope.slice(0, positions)
        return (*self._rope.slice(0, positions), *near)

    def run(
        self, state: Pass, layers: Iterable[int], hidden_layers: Collection[int] = ()
    ) -> dict[int, Float[Tensor, "B M D"]]:
        """Run a pass through ``layers``; returns the hidden states after those in ``hidden_layers``."""
        if state.fused and self._fused is not None:
            return self._run_fused(state, layers, hidden_layers)
        seen = {}
        for index in layers:
            layer = self.layers[index]
            if index not in self.skipped_attention:
                state.hidden = self._add(state.hidden, self._attend(layer.attention, index, state))
            if index not in self.skipped_mlp:
                state.hidden = self._add(state.hidden, self._feed(layer.mlp, state.hidden))
            if index in hidden_layers:
                seen[index] = state.hidden
        return seen

    def _run_fused(
        self, state: Any, layers: Iterable[int], hidden_layers: Collection[int]
    ) -> dict[int, Float[Tensor, "B M D"]]:
        """``run`` by the kernels; ``state`` is a pass of the model's own kind."""
        assert self._fused is not None
        where = (state.cos, state.sin, state.reach, state.cache, self._portions(layers))
        state.hidden, seen = self._fused.run(state.hidden, *where, hidden_layers)
        return seen

    @property
    def exits_fused(self) -> bool:
        """Whether the kernels can let rows leave a pass, see ``run_to_exits``."""
        plain = self._logit_cap is None and self._logit_divisor == 1.0
        return self.fused and plain and isinstance(self._head, KernelLinear) and isinstance(self._final_norm, RMSNorm)

    def run_to_exits(
        self,
        state: Any,
        deepest: int,
        rule: ExitRule,
        rows: Sequence[bool],
        first: int = 0,
        last: int | None = None,
    ) -> Exited:
        """Run a pass over one node per row through the first ``deepest`` layers, which rows may leave by a rule.

        A row that leaves is computed no longer; the layers above only make its keys and values, see ``fill``.

        Args:
            state: a pass of the model's own kind.
            rows: which are run; the states of others do not matter.
            first: layers that they have run before.
            last: depth up to which they are run now; None: ``deepest``.
        """
        assert isinstance(self._fused, FusedLayers) and isinstance(self._head, KernelLinear)
        assert isinstance(self._final_norm, Norm)
        where = (state.cos, state.sin, state.cache, self._portions(range(deepest)))
        after = (self._final_norm, self._head)
        return self._fused.run_to_exits(state.hidden, *where, rule, *after, rows, first, last)

    @property
    def rounds_fused(self) -> bool:
        """Whether the kernels can run several rounds in one call, see ``rounds``."""
        return type(self) is CausalLM and self._embed_scale == 1.0 and self.ends_fused

    @property
    def runs_rounds(self) -> bool:
        """Whether texts are written by several rounds in one call.

        The tokens of a call come together, so they only are where a pass is short and the host takes a part of it.
        """
        return self.rounds_fused and self.pass_bytes(1) <= _SHORT

    def rounds(
        self,
        roots: Sequence[int],
        cache: Cache,
        most: int,
        moves: Sequence[bool],
        ends: Collection[int],
        depth: int | None = None,
        exit_map: KernelLinear | None = None,
        rule: ExitRule | None = None,
        waiting: Waiting | None = None,
        drawing: Drawing | None = None,
        guessed: GuessedRounds | None = None,
    ) -> Ran:
        """Rounds without drafts, up to the first in which a text ends; the cache's lengths do not change.

        Args:
            roots: the last committed token of each row.
            most: rounds.
            moves: which rows commit tokens.
            ends: tokens that end a text.
            depth: layers that are run, the first ones; None: all.
            exit_map: of the normed states, before the output matrix.
            rule: by which rows leave a round before those layers; its maps are in the place of that one.
            waiting: see ``FusedLayers.run_rounds``.
            drawing: how tokens are drawn, without a rule; None: they are the likeliest.
            guessed: see ``FusedLayers.run_rounds``.
        """
        assert isinstance(self._fused, FusedLayers)
        portions = self._portions(range(self.n_layers if depth is None else depth))
        places = max(cache.written) + most + (0 if waiting is None else waiting.most)
        places += 0 if guessed is None else guessed.guesses.nodes
        embedded, ending = self._embedded(places), self._fused_ending(exit_map)
        return self._fused.run_rounds(
            roots, cache, portions, embedded, ending, most, moves, ends, rule, waiting, drawing, guessed
        )

    def _embedded(self, places: int) -> Embedded:
        """How the kernels embed a token at one of so many places."""
        return Embedded(self._embedding, turns=self._rope.slice(0, places))

    def _portions(self, layers: Iterable[int]) -> list[Portion]:
        """What this view runs of some layers."""
        attends = [(i, i not in self.skipped_attention) for i in layers]
        return [Portion(i, attention, i not in self.skipped_mlp, attention) for i, attention in attends]

    def fill(self, state: Pass, layers: Sequence[int]) -> None:
        """Write into the cache the keys and values that ``layers`` make of a state, without running them.

        Each layer projects the same state with its own norm and weights, for a token that exited early (hidden-state
        propagation, Schuster et al. 2022, arXiv 2207.07061, sec. 3.3).
        """
        kept = [index for index in layers if index not in self.skipped_attention]
        by_turn: dict[tuple[bool, bool], list[int]] = {}
        for index in kept:
            attention = self.layers[index].attention
            by_turn.setdefault((attention.rotary, attention.window is not None), []).append(index)
        for (rotary, windowed), group in by_turn.items():
            heads = torch.stack([self._project(index, state.hidden) for index in group])
            if rotary:  # of all layers at once: the token has one position
                turn = state.near if windowed and state.near is not None else state
                cos, sin = (t if len(t) == 1 else t.repeat(len(group), 1, 1, 1) for t in (turn.cos, turn.sin))
                rotate_(heads.flatten(0, 1)[:, :, : self.kv_heads], cos, sin)
            for index, new in zip(group, heads, strict=True):
                state.cache.write(index, new, state.slots)

    @property
    def fill_bytes(self) -> int:
        """Bytes of the key and value projections that ``fill`` keeps; plain ones are views of the layers' own."""
        return sum(linear.nbytes for linear in self._key_value.values() if linear.form != "plain")

    @property
    def fused(self) -> bool:
        """Whether a CPU's kernels run the layers, see ``methods.engine.fused_layers``."""
        return isinstance(self._fused, FusedLayers)

    def use_triton(self) -> None:
        """Let Triton's kernels run the layers in passes over few nodes, of this model and of later views of it.

        Raises:
            ValueError: they do not have all that these layers do, or cannot run here.
        """
        model = (self.name, self.dtype, self.device, self.max_positions)
        self._fused = TritonLayers.of(self.layers, self.kv_heads, self._scale, self._residual, *model)

    @property
    def kernels(self) -> Literal["torch", "triton"]:
        """What runs the layers where there is no ``fused``, in passes over few nodes."""
        return "triton" if isinstance(self._fused, TritonLayers) else "torch"

    def reads_lengths(self, nodes: int) -> bool:
        """Whether a pass of fixed shape over so many nodes finds the ends of the rows on the device."""
        return isinstance(self._fused, TritonLayers) and self._fused.takes(nodes, True)

    def round_kernels(self, nodes: int) -> Any | None:
        """Triton's kernels of what is around the layers in a pass of fixed shape over so many nodes; None: torch."""
        return self._fused.rounds if isinstance(self._fused, TritonLayers) and self.reads_lengths(nodes) else None

    @property
    def batch_invariant(self) -> bool:
        """Whether the bits of a token's logits do not depend on what else is in a pass, or on how passes are cut."""
        return self.fused and isinstance(self._head, KernelLinear)

    @property
    def linear_form(self) -> LinearForm:
        """The form of the weights, see ``methods.engine.linear``."""
        return self._head.form if self.weights == "full" else self.weights

    def draft_linear(
        self, weights: Sequence[Float[Tensor, "_ I"]], biases: Sequence[Float[Tensor, "_"] | None]
    ) -> Linear:
        """A product, or several with the same input, of a network that drafts for this model.

        Raises:
            ValueError: ``draft_weights`` that the device or the type does not allow.
        """
        return make_linear(weights, biases, draft_form(self.draft_weights, self.linear_form, weights[0]))

    @property
    def drafts_rounded_to(self) -> LinearForm | None:
        """The form of ``draft_linear`` for inputs as wide as the hidden state, if it rounds; else None."""
        form = draft_form(self.draft_weights, self.linear_form, self._embedding[:0])
        return form if form in ("int8", "int4") else None

    def head(self, hidden: Float[Tensor, "*b D"]) -> Float[Tensor, "*b V"]:
        """Logits of hidden states that are already after the final norm."""
        logits = self._head(hidden.reshape(-1, hidden.shape[-1])).view(*hidden.shape[:-1], -1)
        if self._logit_cap is not None:
            return torch.tanh(logits / self._logit_cap) * self._logit_cap
        return logits if self._logit_divisor == 1.0 else logits / self._logit_divisor

    def norm(self, hidden: Float[Tensor, "*b D"]) -> Float[Tensor, "*b D"]:
        """The final norm."""
        return self._final_norm(hidden)

    def embed(self, tokens: Int[Tensor, "*b"]) -> Float[Tensor, "*b D"]:
        """Input embeddings as the first layer receives them."""
        return F.embedding(tokens, self._embedding) * self._embed_scale

    @property
    def embedding_table(self) -> Float[Tensor, "V D"] | None:
        """The rows that ``embed`` yields; None: it scales them."""
        return self._embedding if self._embed_scale == 1.0 else None

    def output_rows(self, ids: Int[Tensor, "n"]) -> tuple[Float[Tensor, "n D"], Float[Tensor, "n"] | None]:
        """Weight and bias of the output matrix for some tokens: ``hidden @ weight.T + bias`` are their logits.

        Of a model with a soft cap on its logits (Gemma 2) they are those before it, whose order is the same.
        """
        weight, bias = self._head.dense[ids], self._head.bias
        kept = None if bias is None else bias[ids]
        if self._logit_divisor == 1.0:
            return weight, kept
        return weight / self._logit_divisor, None if kept is None else kept / self._logit_divisor

    # -- whole passes -------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def forward(
        self,
        tokens: Nodes,
        parents: Parents,
        cache: Cache,
        *,
        levels: int | None = None,
        hidden_layers: Collection[int] = (),
    ) -> Output:
        """Score M nodes per row after the cache; the cache's lengths do not change.

        Args:
            tokens: [B, M] ids; node 0 is the root.
            parents: [B, M - 1] of the other nodes.
            levels: depth of the tree, if known; a smaller bound is cheaper.
            hidden_layers: layers whose outputs are wanted.
        """
        if self.ends_fused:
            made = self.run_to_logits(self.begin(tokens, parents, cache, levels), self.n_layers, None, hidden_layers)
            return Output(made.logits, made.hidden, made.seen, best=made.best)
        last, seen = self.forward_layers(tokens, parents, cache, levels, hidden_layers)
        hidden = self.norm(last)
        return Output(self.head(hidden), hidden, seen)

    def run_to_logits(
        self, state: Any, depth: int, exit_map: KernelLinear | None = None, hidden_layers: Collection[int] = ()
    ) -> Scored:
        """Run a pass through the first ``depth`` layers and read its states, in one call of the kernels.

        Args:
            state: a pass of the model's own kind.
            exit_map: of the normed states, before the output matrix.
            hidden_layers: layers whose outputs are wanted.
        """
        assert isinstance(self._fused, FusedLayers)
        where = (state.hidden, state.cos, state.sin, state.reach, state.cache, self._portions(range(depth)))
        return self._fused.run_to_logits(*where, self._fused_ending(exit_map), hidden_layers)

    @property
    def ends_fused(self) -> bool:
        """Whether the kernels run the final norm and the output matrix after the layers, see ``run_to_logits``."""
        return self.exits_fused and type(self._final_norm) is RMSNorm  # others have other bits in ``norm``

    def _fused_ending(self, exit_map: KernelLinear | None) -> Ending:
        assert isinstance(self._head, KernelLinear) and isinstance(self._final_norm, Norm | None)
        kept = self._ending
        if kept is None or kept.head is not self._head or kept.exit_map is not exit_map:  # a view may have another head
            kept = self._ending = Ending(self._final_norm, self._head, exit_map)
        return kept

    def forward_layers(
        self, tokens: Nodes, parents: Parents, cache: Cache, levels: int | None, hidden_layers: Collection[int]
    ) -> States:
        """Hidden states after all layers, before the final norm, and those after ``hidden_layers``; see ``forward``."""
        state = self.begin(tokens, parents, cache, levels)
        seen = self.run(state, range(self.n_layers), hidden_layers)
        return state.hidden, seen

    @torch.inference_mode()
    def prefill(
        self,
        prompts: Sequence[Int[Tensor, "_"]],
        cache: Cache,
        *,
        hidden_layers: Collection[int] = (),
        chunk: int = _PREFILL_CHUNK,
        kept: int = 0,
    ) -> Output:
        """Read whole prompts, ragged, in chunks; afterwards each row of the cache holds its prompt.

        On a CPU, prompts of very different lengths are read in groups, as all places of a pass take time there. Rows
        shorter than the longest of their group write after their end, which is never read.

        Args:
            hidden_layers: those whose states are returned, of all places read.
            chunk: most tokens of a row in one pass.
            kept: tokens of a single prompt that the cache holds already; they are not read again.
        """
        groups = reading_groups(list(map(len, prompts))) if self.device.type == "cpu" else []
        if len(groups) > 1:
            cache.reset()
            read = [{row: prompts[row] for row in rows} for rows in groups]
            parts = [self.prefill_rows(each, cache, hidden_layers=hidden_layers, chunk=chunk) for each in read]
            return Output.of_groups(groups, parts)
        if kept:
            cache.set_lengths([kept])
            prompts = [prompts[0][kept:]]
        else:
            cache.reset()
        chunk = min(chunk, self.prefill_chunk(len(prompts)))
        lengths, tokens = [len(prompt) for prompt in prompts], padded_rows(prompts, self.device)
        last = torch.tensor(lengths, device=self.device) - 1
        final = torch.empty(len(prompts), 1, self.hidden_size, dtype=self.dtype, device=self.device)
        every: dict[int, Tensor] = {}  # states of all places, after the layers wanted and, as -1, after the last one
        for start in range(0, max(lengths), chunk):
            state = self.begin(tokens[:, start : start + chunk], None, cache)
            seen = self.run(state, range(self.n_layers), hidden_layers)
            width = state.hidden.shape[1]
            here = (last >= start) & (last < start + width)
            picked = state.hidden.gather(1, (last - start).clamp(0, width - 1)[:, None, None].expand_as(final))
            final = torch.where(here[:, None, None], picked, final)
            for layer, part in ({-1: state.hidden} | seen if hidden_layers else {}).items():
                if layer not in every:
                    every[layer] = part.new_empty(len(prompts), max(lengths), part.shape[2])
                every[layer][:, start : start + width] = part
            cache.advance([width] * len(prompts))
        cache.set_lengths([kept + length for length in lengths])
        hidden = self.norm(final)
        logits = self.head(hidden)
        if not hidden_layers:
            return Output(logits, hidden)
        return Output(logits, self.norm(every.pop(-1)), {layer: every[layer] for layer in hidden_layers})

    def prefill_chunk(self, rows: int) -> int:
        """Most tokens of each of so many prompts that one pass of ``prefill`` reads."""
        if not self.fused:
            return _PREFILL_CHUNK
        # kernels: their buffers of 32 bit take 25 kB a row, and a short pass fills them as well
        return min(_MOST_CHUNK, max(_LEAST_CHUNK, _MOST_ROWS // rows))

    def prefill_rows(
        self,
        prompts: Mapping[int, Int[Tensor, "_"]],
        cache: Cache,
        *,
        hidden_layers: Collection[int] = (),
        chunk: int = _PREFILL_CHUNK,
    ) -> Output:
        """Read whole prompts, by row, into some rows of a cache, in place of their content; the others do not change.

        Returns:
            Of the rows named, in their order, as ``prefill`` does.
        """
        own = self._make_cache(len(prompts), max(map(len, prompts.values())))
        output = self.prefill(list(prompts.values()), own, hidden_layers=hidden_layers, chunk=chunk)
        cache.adopt(list(prompts), own)
        return output

    @torch.inference_mode()
    def score(self, tokens: Int[Tensor, "T"], start: int = 0) -> Float[Tensor, "R V"]:
        """Teacher forcing: logits after tokens ``start`` .. T - 1, where row i judges token ``start + i + 1``."""
        cache = self.new_cache(1, len(tokens))
        rows = []
        for begin in range(0, len(tokens), _SCORE_CHUNK):
            part = tokens[None, begin : begin + _SCORE_CHUNK]
            state = self.begin(part, None, cache)
            self.run(state, range(self.n_layers))
            cache.advance([part.shape[1]])
            wanted = state.hidden[0, max(0, start - begin) :]
            if len(wanted):
                rows.append(self.head(self.norm(wanted)))
        return torch.cat(rows)

    # -- one sub-layer each -------------------------------------------------------------------------------------------

    def _add(self, hidden: Tensor, update: Tensor) -> Tensor:
        return hidden + update if self._residual == 1.0 else hidden + update * self._residual

    def _attend(self, attention: Attention, index: int, state: Pass) -> Float[Tensor, "B M D"]:
        batch, nodes, width = state.hidden.shape
        rows = state.hidden if attention.norm is None else attention.norm(state.hidden)
        heads = attention.qkv(rows.reshape(-1, width)).view(batch, nodes, self.heads + 2 * self.kv_heads, self.head_dim)
        near = state.near if attention.window is not None else None
        used = state if near is None else near
        heads = self.turn(attention, heads, used.cos, used.sin)
        state.cache.write(index, heads[:, :, self.heads :], state.slots)
        keys, values = state.cache.view(index, state.end)
        if near is not None:
            keys, values = keys[:, :, near.start :], values[:, :, near.start :]
        mixed = self._mix(heads[:, :, : self.heads], keys, values, used.mask, attention)
        update = attention.out(mixed).view(batch, nodes, width)
        return update if attention.post_norm is None else attention.post_norm(update)

    def turn(self, attention: Attention, heads: Float[Tensor, "B M H d"], cos: Tensor, sin: Tensor) -> Tensor:
        """Queries, keys and values of a layer after the norms of the heads and the rotary embedding."""
        heads = causal_layers.norm_heads(attention, heads, self.kv_heads)
        if attention.rotary:
            rotate_(heads[:, :, : self.heads + self.kv_heads], cos, sin)
        return heads

    @staticmethod
    def gate(activation: Rows | ClampedSwish, both: Float[Tensor, "R G"]) -> Float[Tensor, "R F"]:
        """The gate of a feed-forward sub-layer: from its first products to the input of the last."""
        gate, up = both.chunk(2, dim=-1)
        return activation.join(gate, up) if isinstance(activation, ClampedSwish) else activation(gate) * up

    def _project(self, index: int, hidden: Float[Tensor, "B M D"]) -> Float[Tensor, "B M H d"]:
        attention = self.layers[index].attention
        rows = hidden if attention.norm is None else attention.norm(hidden)
        flat = self._key_value_of(index)(rows.reshape(-1, rows.shape[-1]))
        heads = flat.view(*hidden.shape[:2], 2 * self.kv_heads, self.head_dim)
        if attention.key_norm is None:
            return heads
        key, value = heads.chunk(2, dim=2)
        wide = key if attention.norm_heads else key.flatten(2)
        return torch.cat([attention.key_norm(wide).view(key.shape), value], dim=2)

    def _key_value_of(self, index: int) -> Linear:
        """The rows of a layer's joined projection that make keys and values."""
        if index not in self._key_value:
            first, joined = self.heads * self.head_dim, self.layers[index].attention.qkv
            bias = None if joined.bias is None else joined.bias[first:]
            self._key_value[index] = make_linear([joined.dense[first:].contiguous()], [bias], joined.form)
        return self._key_value[index]

    def _mix(
        self,
        query: Float[Tensor, "B M H d"],
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        attention: Attention,
    ) -> Float[Tensor, "R HD"]:
        """Attention with the query heads of a group laid side by side, so that no key or value is repeated."""
        batch, nodes, heads, dim = query.shape
        groups = heads // self.kv_heads
        folded = query.view(batch, nodes, self.kv_heads, groups, dim).transpose(1, 2)
        folded = folded.reshape(batch, self.kv_heads, nodes * groups, dim)
        if attention.soft_cap is None and attention.sinks is None:
            mixed = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=self._scale)
        else:
            mixed = capped_attention(folded, keys, values, mask, self._scale, attention)
        mixed = mixed.view(batch, self.kv_heads, nodes, groups, dim).transpose(1, 2)
        return mixed.reshape(batch * nodes, heads * dim)

    def _feed(self, mlp: FeedForward | SparseFeedForward, hidden: Float[Tensor, "B M D"]) -> Float[Tensor, "B M D"]:
        rows = (hidden if mlp.norm is None else mlp.norm(hidden)).reshape(-1, hidden.shape[-1])
        if isinstance(mlp, SparseFeedForward):
            update = mlp.mix(rows, self.gate).view(hidden.shape)
        else:
            update = mlp.down(self.gate(mlp.activation, mlp.gate_up(rows))).view(hidden.shape)
        return update if mlp.post_norm is None else mlp.post_norm(update)


def capped_attention(
    query: Float[Tensor, "B K R d"],
    keys: Float[Tensor, "B K S d"],
    values: Float[Tensor, "B K S d"],
    mask: Float[Tensor, "b 1 R S"] | None,
    scale: float,
    attention: Attention,
) -> Float[Tensor, "B K R d"]:
    """Attention with a soft cap on the scores, or with sinks; row m * G + g of R is query head g of node m."""
    scores = in_float(query @ keys.transpose(2, 3)) * scale
    if attention.soft_cap is not None:
        scores = torch.tanh(scores / attention.soft_cap) * attention.soft_cap
    if mask is not None:
        scores = scores + mask
    if attention.sinks is None:
        return scores.softmax(-1).to(values.dtype) @ values
    batch, heads, rows, _ = scores.shape
    sinks = attention.sinks.to(scores.dtype).view(heads, 1, -1).expand(-1, rows * heads // len(attention.sinks), -1)
    column = sinks.reshape(1, heads, rows, 1).expand(batch, -1, -1, -1)
    return torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1].to(values.dtype) @ values


class RotaryTable:
    """Cosines and sines of all positions so far asked for, computed by the model's own rotary module.

    Args:
        kind: type of the layers whose positions they are, if a module has several (Gemma 3).
    """

    def __init__(self, module: torch.nn.Module, device: torch.device, dtype: torch.dtype, kind: str = "") -> None:
        self._module, self._like, self._kind = module, torch.empty(0, device=device, dtype=dtype), kind
        self._cos, self._sin = self._build(256)

    def _build(self, positions: int) -> tuple[Tensor, Tensor]:
        with torch.inference_mode(False), torch.no_grad():  # the same kind of tensors in every mode
            positions_row = torch.arange(positions, device=self._like.device)[None]
            cos, sin = self._module(self._like, positions_row, *((self._kind,) if self._kind else ()))
        if type(self._module).__name__ == "GptOssRotaryEmbedding":  # both halves of a head share its columns
            cos, sin = torch.cat([cos, cos], dim=-1), torch.cat([sin, sin], dim=-1)
        half = sin.shape[-1] // 2
        signed = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
        return cos[0, :, None], signed[0, :, None]

    def reserve(self, positions: int) -> None:
        """Extend the tables to ``positions`` rows."""
        if positions > len(self._cos):
            self._cos, self._sin = self._build(max(positions, 2 * len(self._cos)))

    def slice(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        self.reserve(end)
        return self._cos[start:end][None], self._sin[start:end][None]

    def gather(self, positions: Int[Tensor, "B M"]) -> tuple[Tensor, Tensor]:
        return self._cos[positions], self._sin[positions]


def rotate_(heads: Float[Tensor, "B M H d"], cos: Tensor, sin: Tensor) -> None:
    """Rotary embedding in place; dimensions beyond the table's width pass through."""
    width = cos.shape[-1]
    turned = heads if width == heads.shape[-1] else heads[..., :width]
    swapped = turned.roll(width // 2, -1).mul_(sin)
    turned.mul_(cos).add_(swapped)


def pays_to_drop(kept: int, rows: int) -> bool:
    """Whether passes over ``kept`` instead of ``rows`` rows save what the copy of the cache costs.

    That is about one pass over the cache, so fewer than three quarters of the rows must be left.
    """
    return 0 < kept < _SPARSE * rows


def padded_rows(rows: Sequence[Int[Tensor, "_"]], device: torch.device) -> Int[Tensor, "B T"]:
    """Ragged rows of ids in one tensor, 0 after the end of each."""
    tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long, device=device)
    for row, ids in enumerate(rows):
        tokens[row, : len(ids)] = ids
    return tokens


def causal_mask(nodes: int, start: int, groups: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    mask = torch.full((nodes, start + nodes), -torch.inf, dtype=dtype, device=device).triu_(start + 1)
    return mask.repeat_interleave(groups, 0)[None, None]


@dataclass(frozen=True, slots=True)
class Window:
    """A window on the slots of a cache.

    Attributes:
        size: positions that a node sees, the last ones and its own.
        start: slots before this one are left out of the mask.
        places: of the nodes, positions after the row's length.
    """

    size: int
    start: int
    places: Int[Tensor, "b M"]


def ragged_mask(
    length: Int[Tensor, "B"],
    reach: Bool[Tensor, "B M M"] | None,
    nodes: int,
    end: int,
    groups: int,
    dtype: torch.dtype,
    window: Window | None = None,
) -> Float[Tensor, "B 1 MG S"]:
    """Row b sees its own prefix, and of the pass what ``reach`` says (None: a chain); of both what the window shows."""
    start = 0 if window is None else window.start
    offset = torch.arange(start, end, device=length.device)[None] - length[:, None]
    inside = (offset >= 0) & (offset < nodes)
    if reach is None:
        visible = offset[:, None] <= torch.arange(nodes, device=length.device)[:, None]
    else:
        columns = offset.clamp(0, nodes - 1)[:, None].expand(-1, nodes, -1)
        visible = torch.where(inside[:, None], reach.gather(2, columns), offset[:, None] < 0)
    if window is not None:
        places = window.places.expand(len(length), -1)
        of_slots = torch.where(inside, places.gather(1, offset.clamp(0, nodes - 1)), offset)
        visible = visible & (places[:, :, None] - of_slots[:, None] < window.size)
    mask = torch.zeros(visible.shape, dtype=dtype, device=length.device).masked_fill_(~visible, -torch.inf)
    return mask.repeat_interleave(groups, 1)[:, None]


def leave_file(model: PreTrainedModel, embedding: Tensor) -> None:
    """Copy the weights that are kept after the packing.

    Weights read from a file are views into one mapping of it: a single norm kept would keep all of it resident.
    """
    for parameter in model.parameters():
        if parameter.device.type == "cpu" and (parameter.dim() < 2 or parameter is embedding):
            parameter.data = parameter.data.clone()


def eos_ids(model: PreTrainedModel) -> tuple[int, ...]:
    generation = getattr(model, "generation_config", None)
    found = getattr(generation, "eos_token_id", None)
    if found is None:
        found = getattr(model.config, "eos_token_id", None)
    if found is None:
        return ()
    return tuple(int(i) for i in found) if isinstance(found, (list, tuple)) else (int(found),)
