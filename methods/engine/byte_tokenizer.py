"""A tokenizer with one token per byte: it reads every text and needs no file."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

BYTES = 256
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}  # ids 256 to 259


def byte_tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerBase:
    """One token per byte, and four special ones after them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL.values()))
    wrapped: PreTrainedTokenizerBase = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL)
    wrapped.chat_template = chat_template
    return wrapped
