"""The files of a trained block drafter, DFlash or DSpark: its sizes and its tensors.

Tensors have the names that the authors' checkpoints use. D is the width of network and target, F that of the
feed-forward sub-layer, H and K the query and key heads, d the size of a head, n the number of taps, V the target's
vocabulary, v the draft vocabulary, r the Markov rank; i counts the layers of the network from 0:

| tensor | shape | |
|---|---|---|
| fc.weight | [D, n D] | mixes the tapped states of a place |
| hidden_norm.weight | [D] | norm of the mixture: with it, the feature of the place |
| layers.{i}.input_layernorm.weight | [D] | of the block alone; features are not normalised again |
| layers.{i}.self_attn.q_proj.weight | [H d, D] | |
| layers.{i}.self_attn.k_proj.weight, v_proj.weight | [K d, D] | the same for features and block |
| layers.{i}.self_attn.q_norm.weight, k_norm.weight | [d] | if ``qk_norm``, before the rotary positions, for each head |
| layers.{i}.self_attn.o_proj.weight | [D, H d] | |
| layers.{i}.post_attention_layernorm.weight | [D] | |
| layers.{i}.mlp.gate_proj.weight, up_proj.weight | [F, D] | SiLU of the gate |
| layers.{i}.mlp.down_proj.weight | [D, F] | |
| norm.weight | [D] | before the output matrix |
| mask_embedding | [D] | input of a masked place, if ``mask`` is None (no name of the authors: they use a token) |
| markov_head.markov_w1.weight | [V, r] | if ``markov_rank``: a row for each previous token |
| markov_head.markov_w2.weight | [v, r] | if ``markov_rank`` |
| confidence_head.proj.weight | [1, D + r] | if ``confidence``; D columns where it does not read the Markov row |
| confidence_head.proj.bias | [1] | if ``confidence`` |
| d2t | [v] | int64, what to add to a place of the draft vocabulary to get its id; the file has it, ``Part`` does not |
| lm_head.weight | [v, D] | only where the output matrix is not the target's |
| embed_tokens.weight | [V, D] | only where the embedding is not the target's |
| layers.{i}.self_attn.{q,k,v,o}_proj.bias | | only where there are such |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from methods.speculative.draft_layers import Shapes, layer_shapes
from methods.speculative.draft_part import LayeredSpec, NetworkPart

Kind = Literal["dflash", "dspark"]

MARKOV_ROWS, MARKOV_OUTPUT = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
CONFIDENCE = "confidence_head.proj"
MASK = "mask_embedding"


@dataclass(frozen=True)
class Spec(LayeredSpec):
    """Sizes of a block drafter, and of the target it belongs to: those of every such network, and more.

    Attributes:
        block: places of a pass: the anchor, which is the last committed token, and ``block - 1`` masked ones.
        mask: the token whose embedding a masked place has; None: ``mask_embedding``.
        sample_from_anchor: the anchor's place predicts the token after it, so a pass drafts ``block`` tokens; otherwise
            a masked place predicts its own token, and a pass drafts ``block - 1``.
        qk_norm: queries and keys are normalised for each head, as in Qwen3.
        markov_rank: of the Markov head; 0: none.
        confidence: there is a confidence head.
        confidence_reads_markov: it reads the Markov row of the previous token beside the hidden state.
    """

    block: int
    mask: int | None = None
    sample_from_anchor: bool = False
    qk_norm: bool = True
    markov_rank: int = 0
    confidence: bool = False
    confidence_reads_markov: bool = True

    @property
    def kind(self) -> Kind:
        """DSpark is DFlash with a Markov or a confidence head."""
        return "dspark" if self.markov_rank or self.confidence else "dflash"

    @property
    def drafted(self) -> int:
        """Tokens that a pass drafts."""
        return self.block if self.sample_from_anchor else self.block - 1

    def shapes(self, drafts: int) -> Shapes:
        """Every tensor that the network itself has, by its name; ``drafts``: size of the draft vocabulary."""
        width, rank = self.hidden_size, self.markov_rank
        layer = layer_shapes(self) | {"input_layernorm.weight": (width,)}
        if self.qk_norm:
            layer |= {f"self_attn.{name}_norm.weight": (self.head_dim,) for name in "qk"}
        found: Shapes = {
            "fc.weight": (width, len(self.taps) * width),
            "hidden_norm.weight": (width,),
            "norm.weight": (width,),
        }
        for number in range(self.draft_layers):
            found |= {f"{self.layer(number)}.{name}": shape for name, shape in layer.items()}
        if self.mask is None:
            found[MASK] = (width,)
        if rank:
            found |= {MARKOV_ROWS: (self.vocab_size, rank), MARKOV_OUTPUT: (drafts, rank)}
        if self.confidence:
            read = width + (rank if self.confidence_reads_markov else 0)
            found |= {f"{CONFIDENCE}.weight": (1, read), f"{CONFIDENCE}.bias": (1,)}
        return found


@dataclass(frozen=True)
class Part(NetworkPart[Spec]):
    """A trained block drafter; its tensors have the authors' names."""

    method = "dspark"
    spec_class = Spec

    def known(self) -> tuple[Shapes, Shapes]:
        drafts = len(self.vocabulary)
        return self.spec.shapes(drafts), self.spec.optional(drafts)


def spread_taps(layers: int, count: int) -> tuple[int, ...]:
    """The authors' choice of ``count`` layers of a target of ``layers``: evenly from its second to its third last.

    Raises:
        ValueError: the target has too few layers for as many different ones.
    """
    if count == 1:
        return (layers // 2,)
    taps = tuple(round(1 + i * (layers - 4) / (count - 1)) for i in range(count))
    if not taps or any(above <= below for below, above in zip(taps, taps[1:], strict=False)):
        raise ValueError(
            f"The number of tapped layers must be 1 to {max(1, layers - 3)} for a model of {layers} layers, got "
            f"{count}. Tap fewer layers."
        )
    return taps
