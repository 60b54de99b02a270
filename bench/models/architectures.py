"""Sizes of public architectures, for models with random weights: what a pass costs depends on nothing else.

The sizes are those of the ``config.json`` of the hub repository that ``source`` names, with the paper that lists them.
Tests compare the number of parameters with the published one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bench.config.typecheck import did_you_mean
from bench.errors import UserError


@dataclass(frozen=True, slots=True)
class Architecture:
    """Sizes of a decoder-only model with gated feed-forward layers.

    Attributes:
        family: ``model_type`` of transformers.
        head_dim: of each attention head; heads * head_dim need not be hidden_size.
        max_positions: longest context, in tokens.
        tied: whether the output matrix is the embedding.
        source: where the sizes come from.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    tied: bool = False
    source: str = ""

    @classmethod
    def of(cls, config: Any) -> Architecture:
        """The sizes of a loaded model, from its transformers configuration."""
        heads = config.num_attention_heads
        return cls(
            family=config.model_type,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            layers=config.num_hidden_layers,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            max_positions=config.max_position_embeddings,
            tied=bool(getattr(config, "tie_word_embeddings", False)),
            source="configuration of the loaded model",
        )

    @property
    def layer_weights(self) -> int:
        """Entries of the matrices of one layer: query, key, value, output; gate, up, down."""
        attention = self.hidden_size * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def head_weights(self) -> int:
        """Entries of the output matrix, and of the embedding."""
        return self.vocab_size * self.hidden_size

    @property
    def pass_weights(self) -> int:
        """Entries of all matrices that a pass multiplies with."""
        return self.layers * self.layer_weights + self.head_weights

    @property
    def stored_weights(self) -> int:
        """Entries of all matrices of the model; norms and biases, some thousandths of them, are left out."""
        return self.pass_weights + (0 if self.tied else self.head_weights)

    def transformers_config(self, **fields: Any) -> Any:
        """The configuration transformers builds such a model from."""
        from transformers import AutoConfig

        return AutoConfig.for_model(
            self.family,
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=self.max_positions,
            tie_word_embeddings=self.tied,
            **fields,
        )


ARCHITECTURES: dict[str, Architecture] = {
    "smollm2": Architecture(
        *("llama", 49152, 576, 1536, 30, 9, 3, 64, 8192, True),
        source="HuggingFaceTB/SmolLM2-135M-Instruct; arXiv 2502.02737",
    ),
    "tinyllama_1b": Architecture(
        *("llama", 32000, 2048, 5632, 22, 32, 4, 64, 2048),
        source="TinyLlama/TinyLlama-1.1B-Chat-v1.0; arXiv 2401.02385, table 2",
    ),
    "llama32_1b": Architecture(
        *("llama", 128256, 2048, 8192, 16, 32, 8, 64, 131072, True), source="meta-llama/Llama-3.2-1B"
    ),
    "llama2_7b": Architecture(
        *("llama", 32000, 4096, 11008, 32, 32, 32, 128, 4096), source="meta-llama/Llama-2-7b-hf; arXiv 2307.09288"
    ),
    "llama2_13b": Architecture(
        *("llama", 32000, 5120, 13824, 40, 40, 40, 128, 4096), source="meta-llama/Llama-2-13b-hf; arXiv 2307.09288"
    ),
    "llama3_8b": Architecture(
        *("llama", 128256, 4096, 14336, 32, 32, 8, 128, 8192),
        source="meta-llama/Meta-Llama-3-8B; arXiv 2407.21783, table 3",
    ),
    "llama3_70b": Architecture(
        *("llama", 128256, 8192, 28672, 80, 64, 8, 128, 8192),
        source="meta-llama/Meta-Llama-3-70B; arXiv 2407.21783, table 3",
    ),
    "qwen25_7b": Architecture(
        *("qwen2", 152064, 3584, 18944, 28, 28, 4, 128, 32768),
        source="Qwen/Qwen2.5-7B-Instruct; arXiv 2412.15115, table 1",
    ),
    "qwen3_8b": Architecture(
        *("qwen3", 151936, 4096, 12288, 36, 32, 8, 128, 40960), source="Qwen/Qwen3-8B; arXiv 2505.09388, table 1"
    ),
}


def architecture(name: str) -> Architecture:
    """The sizes of a public architecture by the name it has among the models.

    Raises:
        UserError: none of that name.
    """
    if name not in ARCHITECTURES:
        hint = did_you_mean(name, ARCHITECTURES)
        raise UserError(f"model.like must be one of {', '.join(ARCHITECTURES)}, got '{name}'.{hint}")
    return ARCHITECTURES[name]
