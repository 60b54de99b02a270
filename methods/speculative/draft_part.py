"""What the files of the trained draft networks of EAGLE, P-EAGLE, DFlash and DSpark have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor

from methods.engine.causal_lm import CausalLM
from methods.engine.checkpoint_files import read_part, require_shapes, require_target, sizes_of, write_part
from methods.engine.draft_vocabulary import OFFSETS, DraftVocabulary
from methods.speculative.draft_layers import Shapes, bias_shapes

S = TypeVar("S")
P = TypeVar("P", bound="NetworkPart[Any]")


@dataclass(frozen=True)
class LayeredSpec:
    """Sizes of a network of several layers, whose embedding and output matrix may be the target's, and of that target.

    Attributes:
        draft_layers: layers of the network.
        hidden_size: of the network and of the target.
        intermediate_size, heads, kv_heads, head_dim: of the network's layers.
        rms_eps: of its norms.
        layers, vocab_size: of the target.
        taps: layers of the target whose outputs make a feature, 0-based, ascending.
        rope: parameters of the rotary positions, as transformers has them.
    """

    draft_layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_eps: float
    layers: int
    vocab_size: int
    taps: tuple[int, ...]
    rope: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0}, kw_only=True)

    def layer(self, number: int) -> str:
        """Beginning of the names of a layer's tensors."""
        return f"layers.{number}"

    def optional(self, drafts: int) -> Shapes:
        """Tensors that only some networks have: biases, and matrices that are not the target's."""
        layer, width = bias_shapes(self), self.hidden_size
        biases = {f"{self.layer(number)}.{name}": layer[name] for number in range(self.draft_layers) for name in layer}
        return biases | {"lm_head.weight": (drafts, width), "embed_tokens.weight": (self.vocab_size, width)}


@dataclass(frozen=True)
class NetworkPart(ABC, Generic[S]):
    """A trained draft network.

    Attributes:
        spec: its sizes.
        tensors: by the names of the module of ``spec``.
        vocabulary: what it drafts from; place i of its output is token ``vocabulary.ids[i]``.
    """

    spec: S
    tensors: Mapping[str, Tensor]
    vocabulary: DraftVocabulary

    method: ClassVar[str]  # for messages, unless ``load`` is given another
    spec_class: ClassVar[type]

    @abstractmethod
    def known(self) -> tuple[Shapes, Shapes]:
        """Every tensor that the network itself has, by its name; and those that only some have."""

    def save(self, folder: Path) -> None:
        """Write both files; the weights in 16 bit."""
        sizes: Any = self.spec
        write_part(folder, {**self.tensors, OFFSETS: self.vocabulary.offsets}, asdict(sizes))

    @classmethod
    def load(cls: type[P], folder: Path, target: CausalLM, method: str | None = None) -> P:
        """Read it; ``method``: for messages.

        Raises:
            ValueError: files are missing or damaged, or belong to another target.
        """
        named = method or cls.method
        spec, tensors = read_part(
            folder, named, lambda found: cls.spec_class(**{**found, "taps": tuple(found["taps"])})
        )
        require_target(folder, named, sizes_of(spec), target)
        vocabulary = DraftVocabulary.of_offsets(tensors.pop(OFFSETS, None), target.vocab_size)
        part = cls(spec, tensors, vocabulary)
        part.require_shapes(folder)
        return part

    def require_shapes(self, where: Path | str) -> None:
        """Refuse tensors that are not those of the spec.

        Raises:
            ValueError: naming those that differ.
        """
        own, optional = self.known()
        present = {name: shape for name, shape in optional.items() if name in self.tensors}
        require_shapes(where, self.tensors, own | present)

    def require_taps(self, method: str, target: CausalLM) -> None:
        """Refuse taps that the target does not have; ``method``: for the message.

        Raises:
            ValueError: naming the last of them.
        """
        sizes: Any = self.spec
        if (last := target.n_layers - 1) < (found := max(sizes.taps, default=0)):
            raise ValueError(
                f"taps of the {method} checkpoint must be layers of the target, 0 to {last}, got {found}. Use a "
                "checkpoint that was trained for this model."
            )
