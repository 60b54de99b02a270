"""The files of a trained draft network of EAGLE: its sizes and its tensors.

Tensors have the names that the authors' checkpoints use. A checkpoint of ours shares the target's embedding and, unless
it was trained along, its output matrix: neither is in the file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from methods.engine.checkpoint_files import training_command
from methods.speculative.draft_layers import Shapes, bias_shapes, layer_shapes
from methods.speculative.draft_part import NetworkPart

TRAIN = training_command("eagle")


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
        norm_output: version 3: a guess has the feature after the last norm, not the one before it. ``fc_norm`` with
            ``norm_output`` is EAGLE-3.1; networks trained here have neither of the other two flags.
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

    draft_layers: ClassVar[int] = 1

    @property
    def layer(self) -> str:
        """What the authors call the one layer."""
        return "midlayer" if self.version == 3 else "layers.0"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that the network itself has, by its name."""
        width = self.hidden_size
        layer = layer_shapes(self, 2 * width if self.version == 3 else width)
        if self.version == 3:
            layer |= {"hidden_norm.weight": (width,), "input_layernorm.weight": (width,)}
            around = {"fc.weight": (width, len(self.taps) * width), "norm.weight": (width,)}
            around |= {f"{name}.weight": (size,) for name, size in self._mixing_norms()}
        else:
            around = {"fc.weight": (width, 2 * width)}
        return around | {f"{self.layer}.{name}": shape for name, shape in layer.items()}

    def _mixing_norms(self) -> list[tuple[str, int]]:
        together = [("input_norm", len(self.taps) * self.hidden_size)] if self.norm_before_fc else []
        return together + [(f"fc_norm.{number}", self.hidden_size) for number in range(len(self.taps)) if self.fc_norm]

    def optional(self) -> dict[str, tuple[int, ...]]:
        """Tensors that only some networks have: biases, and an embedding that is not the target's."""
        biases = {f"{self.layer}.{name}": shape for name, shape in bias_shapes(self).items()}
        embedding = {"embed_tokens.weight": (self.vocab_size, self.hidden_size)}
        return {"fc.bias": (self.hidden_size,), **biases, **embedding}


@dataclass(frozen=True)
class Part(NetworkPart[Spec]):
    """A trained draft network; its tensors have the authors' names, ``lm_head.weight`` where the output is its own."""

    method = "eagle"
    spec_class = Spec

    def known(self) -> tuple[Shapes, Shapes]:
        output = {"lm_head.weight": (len(self.vocabulary), self.spec.hidden_size)}
        return self.spec.shapes(), output | self.spec.optional()
