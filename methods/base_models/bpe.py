"""One vocabulary of byte pairs for both languages (Sennrich et al. 2016, arXiv 1508.07909), over bytes.

There is no unknown token, and decoding gives the text itself, without detokenisation. The vocabulary is learnt from the
references only, so that all models of one corpus share it and may draft for each other.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast

PAD, EOS, MASK = "<pad>", "</s>", "<mask>"
SPECIAL = (PAD, EOS, MASK)  # the mask is for non-autoregressive students
PAD_ID, EOS_ID, MASK_ID = range(len(SPECIAL))


def learn(texts: Iterable[str], size: int, positions: int) -> PreTrainedTokenizerFast:
    """A tokenizer of at most ``size`` tokens that ends every text with ``</s>``.

    Raises:
        ValueError: a size that does not hold every byte.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if size < (least := len(alphabet) + len(SPECIAL)):
        raise ValueError(f"vocabulary must be at least {least}, all bytes and special tokens, got {size}.")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)  # a first word is like any other word
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {EOS}", pair=f"$A {EOS} $B {EOS}", special_tokens=[(EOS, EOS_ID)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        mask_token=MASK,
        model_max_length=positions,
        clean_up_tokenization_spaces=False,
    )


def generation_config(**more: int) -> GenerationConfig:
    """How a model of this vocabulary writes: up to ``</s>``, and never padding or a mask."""
    return GenerationConfig(pad_token_id=PAD_ID, eos_token_id=EOS_ID, bad_words_ids=[[PAD_ID], [MASK_ID]], **more)
