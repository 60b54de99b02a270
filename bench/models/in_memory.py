"""Models that a Python program holds already, as transformers made them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.errors import UserError
from bench.models.source import Read
from bench.utils.files import json_sha256

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from methods.engine.causal_lm import CausalLM

NAME = "module"  # of every model in memory; the digest tells them apart
GROUP = {"name": NAME, "_target_": "bench.models.in_memory.InMemoryModel"}
_CHANGING = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "_attn_implementation")
_PROBE = 8  # tokens of the comparison
_ROUNDING = {"torch.bfloat16": 0.1, "torch.float16": 0.02}  # error of logits over their spread; 1e-3 in 32 bit


class InMemoryModel:
    """What the records of such a model name as its source: only the program that holds the model can measure it."""

    def read(self, dtype: torch.dtype, cache: Path) -> Read:
        """See ``bench.models.source.Source``."""
        raise UserError(
            f"model={NAME} is a model in the memory of a Python program, which decodebench.load(model, tokenizer) "
            "takes. Save it with save_pretrained(FOLDER) and use model=hf model.name=FOLDER."
        )


def require(module: object, tokenizer: object) -> None:
    """Refuse what is no language model of transformers with its tokenizer.

    Raises:
        UserError: says which of them is missing and how to get it.
    """
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    if not isinstance(module, PreTrainedModel):
        raise UserError(
            "target must be a name, a folder or a PreTrainedModel of transformers, got "
            f"{type(module).__name__}. Merge adapters first (model = model.merge_and_unload())."
        )
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise UserError(
            f"A model in memory needs its tokenizer, got {type(tokenizer).__name__}. Pass it: "
            "decodebench.load(model, AutoTokenizer.from_pretrained(NAME))."
        )
    if module.get_output_embeddings() is None:
        raise UserError(
            f"target must have a language model head, got {type(module).__name__}. Load it with AutoModelForCausalLM "
            "or AutoModelForSeq2SeqLM."
        )
    if getattr(module.config, "quantization_config", None) is not None:
        raise UserError("target must have plain weights of 16 or 32 bit, got quantised ones. Load it without them.")


def require_equal(lm: CausalLM, module: PreTrainedModel) -> None:
    """Compare logits of the engine with those of the module itself, as its layers may be other than its type says.

    Raises:
        UserError: they differ by more than rounding, as with adapters, hooks or replaced layers.
    """
    import torch

    from methods.engine.seq2seq_lm import Seq2SeqLM

    ids = torch.arange(_PROBE, device=lm.device) * (lm.vocab_size // _PROBE)
    more = {"decoder_input_ids": torch.tensor([lm.start], device=lm.device)} if isinstance(lm, Seq2SeqLM) else {}
    with torch.inference_mode():
        ours = lm.score(ids, start=_PROBE - 1)[-1].float()
        theirs = module(input_ids=ids[None], **more).logits[0, -1].float()
    known = ours.isfinite()  # some models never write some tokens
    error = (ours - theirs)[known].square().mean().sqrt() / theirs[known].std()
    if not float(error) <= _ROUNDING.get(str(lm.dtype), 1e-3):
        raise UserError(
            f"The engine and this {type(module).__name__} compute different logits, so its layers are not those of "
            "its family. Merge adapters and remove hooks before loading it."
        )


def digest(module: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 over weights, configuration, vocabulary and chat template."""
    config = {key: value for key, value in module.config.to_dict().items() if key not in _CHANGING}
    words = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    found = hashlib.sha256(json_sha256([config, words, tokenizer.chat_template]).encode())
    for name, tensor in sorted(module.state_dict().items()):
        found.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        found.update(_bytes(tensor))
    return found.hexdigest()


def _bytes(tensor: torch.Tensor) -> Any:
    import torch

    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
