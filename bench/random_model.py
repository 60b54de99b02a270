"""A small random Llama with a byte tokenizer: to try the suite out where nothing can be fetched, never for a result."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.models import Read

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

_BYTES = 256
_SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}  # ids 256 to 259
_CHAT = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
_SPREAD = 0.3  # of the weights: at the usual 0.02 all tokens would be about equally likely


class RandomModel:
    """A Llama of any shape with weights drawn from a seed.

    Args:
        seed: of the weights.
        vocab_size: at least 260: the bytes and four special tokens.
        hidden_size, layers, heads, kv_heads: its shape.
        max_positions: longest context, in tokens.

    Raises:
        ValueError: a shape that is none.
    """

    def __init__(
        self,
        seed: int = 0,
        vocab_size: int = _BYTES + len(_SPECIAL),
        hidden_size: int = 64,
        layers: int = 4,
        heads: int = 4,
        kv_heads: int = 2,
        max_positions: int = 2048,
    ) -> None:
        sizes = (hidden_size, layers, heads, kv_heads, max_positions)
        if vocab_size < _BYTES + len(_SPECIAL) or min(sizes) < 1 or hidden_size % (2 * heads) or heads % kv_heads:
            raise ValueError(
                f"vocab_size={vocab_size}, hidden_size={hidden_size}, layers={layers}, heads={heads}, "
                f"kv_heads={kv_heads}, max_positions={max_positions} came; vocab_size >= {_BYTES + len(_SPECIAL)}, all "
                "others >= 1, hidden_size a multiple of 2 * heads and heads a multiple of kv_heads are needed. Set "
                "model.NAME=VALUE."
            )
        self.seed = seed
        self.shape: dict[str, Any] = {
            "vocab_size": vocab_size,
            "hidden_size": hidden_size,
            "intermediate_size": 4 * hidden_size,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "max_position_embeddings": max_positions,
        }

    def read(self, dtype: torch.dtype, cache: Path) -> Read:
        """See ``bench.models.Source``. Weights are drawn in 32 bit, so that other types hold them rounded."""
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        tokenizer = byte_tokenizer()
        config = LlamaConfig(
            **self.shape,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            initializer_range=_SPREAD,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model: Any = LlamaForCausalLM(config)
        return Read(model.to(dtype), tokenizer, f"seed {self.seed}", None)


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """One token per byte, four special ones behind them, and a chat template of one line per message."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIAL.values()))
    wrapped: PreTrainedTokenizerBase = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **_SPECIAL)
    wrapped.chat_template = _CHAT
    return wrapped
