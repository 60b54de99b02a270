"""Sizes of public architectures, for models with random weights: what a pass costs depends on nothing else.

The sizes are those of the ``config.json`` of the hub repository that ``source`` names, with the paper that lists them.
Tests compare the number of parameters with the published one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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
        experts: of each layer with a mixture of experts.
        active_experts: that a token passes through.
        expert_size: numbers between the two matrices of an expert.
        shared_size: the same of an expert of all tokens, and its gate; 0: none.
        sparse_layers: with a mixture of experts; all others are as ``intermediate_size`` says.
        window: tokens that a token sees in a layer with a sliding window.
        window_layers: with one.
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
    experts: int = 0
    active_experts: int = 0
    expert_size: int = 0
    shared_size: int = 0
    sparse_layers: int = 0
    window: int = 0
    window_layers: int = 0

    @classmethod
    def of(cls, config: Any) -> Architecture:
        """The sizes of a loaded model, from its transformers configuration."""
        from methods.engine import causal_layers

        heads, layers = config.num_attention_heads, range(config.num_hidden_layers)
        sparse = sum(causal_layers.is_sparse(config, layer) for layer in layers)
        windows = [size for layer in layers if (size := causal_layers.window(config, layer))]
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
            **(_experts_of(config) if sparse else {}),
            sparse_layers=sparse,
            window=max(windows, default=0),
            window_layers=len(windows),
        )

    def with_layers(self, layers: int) -> Architecture:
        """The same layers, fewer or more of them; layers of several kinds take turns."""
        kinds = {name: -(-getattr(self, name) * layers // self.layers) for name in ("sparse_layers", "window_layers")}
        return replace(self, layers=layers, **kinds)

    @property
    def attention_weights(self) -> int:
        """Entries of query, key, value and output of one layer."""
        return self.hidden_size * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    @property
    def dense_weights(self) -> int:
        """Entries of gate, up and down of a layer without experts."""
        return 3 * self.hidden_size * self.intermediate_size

    def sparse_weights(self, experts: int | float) -> int | float:
        """Entries of the router, the shared expert with its gate, and so many experts of a layer."""
        shared = 3 * self.shared_size + (1 if self.shared_size else 0)
        return self.hidden_size * (self.experts + shared + 3 * self.expert_size * experts)

    @property
    def layer_weights(self) -> int:
        """Entries of the matrices of one layer, the largest, with all its experts."""
        dense = self.dense_weights if self.sparse_layers < self.layers else 0
        sparse = int(self.sparse_weights(self.experts)) if self.sparse_layers else 0
        return self.attention_weights + max(dense, sparse)

    @property
    def head_weights(self) -> int:
        """Entries of the output matrix, and of the embedding."""
        return self.vocab_size * self.hidden_size

    def _weights(self, experts: int | float) -> int | float:
        """Entries of all matrices but the embedding, with so many experts of each mixture."""
        dense = (self.layers - self.sparse_layers) * self.dense_weights
        sparse = self.sparse_layers * self.sparse_weights(experts)
        return self.layers * self.attention_weights + dense + sparse + self.head_weights

    @property
    def token_weights(self) -> int:
        """Entries of the matrices that one token is multiplied with."""
        return int(self._weights(self.active_experts))

    def read_weights(self, tokens: int) -> float:
        """Entries of the matrices that a pass over so many tokens is expected to read.

        All of them but experts that no token chose; how many these are is an estimate, see
        ``methods.engine.expert_layers.expected_experts``.
        """
        from methods.engine.expert_layers import expected_experts

        if not self.sparse_layers:
            return float(self._weights(0))
        return float(self._weights(expected_experts(self.experts, self.active_experts, tokens)))

    @property
    def stored_weights(self) -> int:
        """Entries of all matrices of the model; norms and biases, some thousandths of them, are left out."""
        return int(self._weights(self.experts)) + (0 if self.tied else self.head_weights)

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
            **(self._mixture_config() if self.experts else {}),
            **({"sliding_window": self.window} if self.window else {}),
            **fields,
        )

    def _mixture_config(self) -> dict[str, int]:
        if self.family in ("mixtral", "gpt_oss"):
            return {"num_local_experts": self.experts, "num_experts_per_tok": self.active_experts}
        shared = {"shared_expert_intermediate_size": self.shared_size} if self.shared_size else {}
        return {
            "num_experts": self.experts,
            "num_experts_per_tok": self.active_experts,
            "moe_intermediate_size": self.expert_size,
            **shared,
        }


def _experts_of(config: Any) -> dict[str, int]:
    return {
        "experts": getattr(config, "num_local_experts", None) or config.num_experts,
        "active_experts": config.num_experts_per_tok,
        "expert_size": getattr(config, "moe_intermediate_size", None) or config.intermediate_size,
        "shared_size": getattr(config, "shared_expert_intermediate_size", None)
        or getattr(config, "n_shared_experts", 0) * getattr(config, "moe_intermediate_size", 0),
    }


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
    "mixtral_8x7b": Architecture(
        *("mixtral", 32000, 4096, 14336, 32, 32, 8, 128, 32768),
        source="mistralai/Mixtral-8x7B-v0.1; arXiv 2401.04088, table 1",
        experts=8,
        active_experts=2,
        expert_size=14336,
        sparse_layers=32,
    ),
    "qwen3_30b_a3b": Architecture(
        *("qwen3_moe", 151936, 2048, 6144, 48, 32, 4, 128, 40960),
        source="Qwen/Qwen3-30B-A3B; arXiv 2505.09388, table 2",
        experts=128,
        active_experts=8,
        expert_size=768,
        sparse_layers=48,
    ),
    "gpt_oss_20b": Architecture(
        *("gpt_oss", 201088, 2880, 2880, 24, 64, 8, 64, 131072),
        source="openai/gpt-oss-20b; arXiv 2508.10925, sec. 2",
        experts=32,
        active_experts=4,
        expert_size=2880,
        sparse_layers=24,
        window=128,
        window_layers=12,
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
