"""The target's weights as they were trained along with the heads of blockwise decoding: a folder of the part.

Stern et al. 2018 (arXiv 1811.03115, sec. 6) fine-tune the whole model with the heads. Blocks get longer, and the text
is that of the fine-tuned model, no longer the original's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoModelForSeq2SeqLM

from methods.engine.causal_lm import CausalLM
from methods.engine.checkpoint_files import training_command
from methods.engine.seq2seq_lm import Seq2SeqLM

_TRUNK = "trunk"


def save_trunk(network: Any, folder: Path) -> None:
    """Write an encoder-decoder of transformers beside the heads, in 16 bit."""
    network.half().save_pretrained(folder / _TRUNK)


def load_trunk(folder: Path, target: CausalLM) -> tuple[CausalLM, int] | None:
    """Read it onto the target's device and in its type, with its bytes; None where the part has no weights of its own.

    Raises:
        ValueError: files are missing or damaged.
    """
    place = folder / _TRUNK
    if not place.is_dir():
        return None
    try:
        network: Any = AutoModelForSeq2SeqLM.from_pretrained(place, dtype=target.dtype)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"{place} cannot be read as a fine-tuned model ({error}). Name another folder, or train one: "
            f"{training_command('blockwise_translation')}."
        ) from error
    size = sum(weight.numel() * weight.element_size() for weight in network.parameters())
    return Seq2SeqLM.from_hf(network.requires_grad_(False).to(target.device)), size
