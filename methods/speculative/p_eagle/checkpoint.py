"""The files of a trained network of P-EAGLE: its sizes and its tensors.

Tensors have the names that speculators and vLLM use. D is the width of network and target, F that of the feed-forward
sub-layer, H and K the query and key heads, d the size of a head, n the number of taps, V the target's vocabulary, v the
draft vocabulary; i counts the layers of the network from 0, and r is 2 D for the first layer and D for the others:

| tensor | shape | |
|---|---|---|
| fc.weight | [D, n D] | mixes the tapped states of a place: its feature |
| fc_norm.{j}.weight | [D] | if ``fc_norm``: of each tapped state before it is mixed |
| mask_hidden | [n D] | takes the tapped states' place where the target has none yet |
| mask_embedding | [D] | token half of such a place, if ``mask`` is None (the authors' is a token's embedding) |
| layers.0.hidden_norm.weight | [D] | of the feature, in front of the first layer |
| layers.{i}.input_layernorm.weight | [D] | of the token half (i = 0), or of the layer's input |
| layers.{i}.self_attn.q_proj.weight | [H d, r] | |
| layers.{i}.self_attn.k_proj.weight, v_proj.weight | [K d, r] | |
| layers.{i}.self_attn.o_proj.weight | [D, H d] | |
| layers.{i}.post_attention_layernorm.weight | [D] | |
| layers.{i}.mlp.gate_proj.weight, up_proj.weight | [F, D] | SiLU of the gate |
| layers.{i}.mlp.down_proj.weight | [D, F] | |
| norm.weight | [D] | before the output matrix |
| d2t | [v] | int64, what to add to a place of the draft vocabulary to get its id; the file has it, ``Part`` does not |
| lm_head.weight | [v, D] | only where the output matrix is not the target's |
| embed_tokens.weight | [V, D] | only where the embedding is not the target's |
| layers.{i}.self_attn.{q,k,v,o}_proj.bias | | only where there are such |
"""

from __future__ import annotations

from dataclasses import dataclass

from methods.engine.checkpoint_files import training_command
from methods.speculative.draft_layers import Shapes, layer_shapes
from methods.speculative.draft_part import LayeredSpec, NetworkPart

TRAIN = training_command("p_eagle")
MASK_HIDDEN, MASK_EMBEDDING = "mask_hidden", "mask_embedding"


@dataclass(frozen=True)
class Spec(LayeredSpec):
    """Sizes of a network of P-EAGLE, and of the target it belongs to: those of every such network, and more.

    Attributes:
        depths: tokens that a pass drafts, as it was trained.
        mask: the token whose embedding a masked place has; None: ``mask_embedding``.
        fc_norm: the tapped states are normalised, each by itself, before they are mixed.
        norm_before_residual: the residual of the first layer is the normalised feature instead of the feature itself.
    """

    depths: int
    mask: int | None = None
    fc_norm: bool = False
    norm_before_residual: bool = False

    def shapes(self) -> Shapes:
        """Every tensor that the network itself has, by its name."""
        width, taps = self.hidden_size, len(self.taps)
        found: Shapes = {
            "fc.weight": (width, taps * width),
            MASK_HIDDEN: (taps * width,),
            "layers.0.hidden_norm.weight": (width,),
            "norm.weight": (width,),
        }
        if self.mask is None:
            found[MASK_EMBEDDING] = (width,)
        if self.fc_norm:
            found |= {f"fc_norm.{number}.weight": (width,) for number in range(taps)}
        for number in range(self.draft_layers):
            layer = layer_shapes(self, 2 * width if number == 0 else width) | {"input_layernorm.weight": (width,)}
            found |= {f"{self.layer(number)}.{name}": shape for name, shape in layer.items()}
        return found


@dataclass(frozen=True)
class Part(NetworkPart[Spec]):
    """A trained network of P-EAGLE; its tensors have the published names."""

    method = "p_eagle"
    spec_class = Spec

    def known(self) -> tuple[Shapes, Shapes]:
        return self.spec.shapes(), self.spec.optional(len(self.vocabulary))
