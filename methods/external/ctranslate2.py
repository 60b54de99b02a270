"""CTranslate2 with our interface: translation models of this project in an engine made for translators of this size.

The weights are written once in CTranslate2's own format, as its description of a Transformer (``TransformerSpec``); its
tokens are the ids in decimal, so text is neither split nor joined. ``num_beams=1`` is its greedy search, more are its
beam search. Forbidden tokens are forbidden here too; penalties other than the one on length stay at nothing.

``weights=int8`` rounds matrices to 8 bit with a scale per row, and the inputs of products to 8 bit as well.

With one beam the library reports every token as it is chosen, and the times are those. A beam search is known only when
it ends, so all its tokens get that time. Rows that have ended leave the batch.

Install: ``pip install 'decodebench[rivals]'``. Command: ``python -m bench method=ctranslate2 model=multi30k_4_4
dataset=multi30k``, ``method.num_beams=5``, ``method.weights=int8``
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Int
from torch import Generator, Tensor

from methods.decoder import Decoder, Guarantee, Step
from methods.engine.causal_lm import CausalLM
from methods.engine.sampling import Sampling
from methods.engine.seq2seq_lm import Seq2SeqLM

NORMS_BEFORE = {"pegasus": True, "marian": False}  # types of models that can be written, and where their norms are
_ACTIVATIONS = {"relu": "RELU", "gelu": "GELU", "swish": "SWISH", "silu": "SWISH"}
_FORMAT = 1  # raise when the files of the same weights change
_TYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


class CTranslate2(Decoder):
    """CTranslate2's ``Translator``.

    Args:
        target: an encoder-decoder of the types in ``NORMS_BEFORE`` that kept its Hugging Face model.
        sampling: must be greedy.
        num_beams: hypotheses per row; 1 is greedy search.
        length_penalty: exponent of the length that a hypothesis' log-probability is divided by.
        weights: full: in the type of the run; int8: also the inputs of the products.
        storage: root under which the files are kept; None: they are written anew, and removed with this object.

    Raises:
        ValueError: it is not installed, or the model or a setting is not supported.
    """

    guarantee = Guarantee.EXACT
    family = "external"
    needs_hf = True
    model_kind = "seq2seq"
    greedy_only = True
    libraries = {"ctranslate2": "rivals"}

    def __init__(
        self,
        target: CausalLM,
        sampling: Sampling,
        num_beams: int = 1,
        length_penalty: float = 1.0,
        weights: Literal["full", "int8"] = "full",
        storage: Path | None = None,
    ) -> None:
        model = _required(target, sampling, num_beams)
        library, device = _library(), target.device.type
        compute = _TYPES.get(target.dtype, "float32") if weights == "full" else weights
        able = library.get_supported_compute_types(device)
        if compute not in able:
            raise ValueError(
                f"CTranslate2 must support the type of the run on this machine, {compute}; it has "
                f"{', '.join(sorted(able))}. Set hardware=cpu_fp32, or method.weights=int8."
            )
        if num_beams > 1 or weights != "full":
            self.guarantee = Guarantee.RELAXED
        self.target, self.sampling = model, sampling
        self.num_beams, self.length_penalty = num_beams, length_penalty
        self._own_folder = tempfile.TemporaryDirectory() if storage is None else None
        root = Path(self._own_folder.name if self._own_folder else storage or "")
        self.folder = write(model, root / "models" / "ctranslate2")
        threads = {"inter_threads": 1, "intra_threads": torch.get_num_threads()} if device == "cpu" else {}
        self._translator = library.Translator(str(self.folder), device=device, compute_type=compute, **threads)

    def decode(self, prompts: list[Int[Tensor, "_"]], limit: int, rng: Generator) -> Iterator[Step]:
        """See ``methods.decoder.Decoder.decode``; each row ends by itself, with its end-of-sequence token."""
        times: dict[int, int] = {}

        def note(step: Any) -> bool:
            times[step.step] = time.perf_counter_ns()
            return False

        results = self._translator.translate_batch(
            [[str(id) for id in prompt.tolist()] for prompt in prompts],
            beam_size=self.num_beams,
            length_penalty=self.length_penalty,
            max_decoding_length=limit,
            min_decoding_length=0,
            max_input_length=0,
            return_end_token=True,
            suppress_sequences=[[str(id)] for id in self.target.suppressed] or None,
            callback=note if self.num_beams == 1 else None,
        )
        ended = time.perf_counter_ns()
        rows = [[int(token) for token in result.hypotheses[0]] for result in results]
        for place in range(max(map(len, rows))):
            new = [row[place : place + 1] for row in rows]
            yield Step.undrafted(new, nodes=self.num_beams, at_ns=times.get(place, ended), rows=sum(map(len, new)))

    def memory(self) -> dict[str, int | None]:
        """See ``methods.decoder.Decoder.memory``; of the weights, the size of their file, which has 32 bit."""
        return {"weights": (self.folder / "model.bin").stat().st_size}


def write(target: Seq2SeqLM, folder: Path) -> Path:
    """Write a model as CTranslate2 reads it, unless it is there; it appears whole or not at all.

    Args:
        folder: above it; the model's own is named by a digest of sizes and weights.

    Returns:
        The folder of the model.
    """
    made = folder / f"{target.config.model_type}-{_digest(target)[:16]}"
    if made.is_dir():
        return made
    folder.mkdir(parents=True, exist_ok=True)
    scratch = tempfile.mkdtemp(prefix=".", dir=folder)
    try:
        described = _described(target)
        described.validate()
        described.optimize(quantization="float32")
        described.save(scratch)
        os.chmod(scratch, 0o755)
        try:
            os.rename(scratch, made)
        except OSError:
            if not made.is_dir():  # another process was faster
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return made


def _described(target: Seq2SeqLM) -> Any:
    """The model as CTranslate2 describes one."""
    from ctranslate2.specs import common_spec, transformer_spec

    config: Any = target.config
    model: Any = target.hf
    kind = {
        "pre_norm": NORMS_BEFORE[config.model_type],
        "activation": getattr(common_spec.Activation, _ACTIVATIONS[config.activation_function]),
    }
    spec = transformer_spec.TransformerSpec(
        transformer_spec.TransformerEncoderSpec(config.encoder_layers, config.encoder_attention_heads, **kind),
        transformer_spec.TransformerDecoderSpec(config.decoder_layers, config.decoder_attention_heads, **kind),
    )
    ids, (start,) = [str(id) for id in range(target.vocab_size)], target.start
    spec.register_source_vocabulary(ids)
    spec.register_target_vocabulary(ids)
    spec.config.unk_token = spec.config.bos_token = spec.config.decoder_start_token = str(start)
    spec.config.eos_token = str(target.eos_ids[0])
    for name in ("encoder", "decoder"):
        _fill_stack(getattr(spec, name), getattr(model.model, name), config)
    spec.decoder.projection.weight = _numbers(model.get_output_embeddings().weight)
    bias = getattr(model, "final_logits_bias", None)
    if bias is not None and bool(bias.any()):
        spec.decoder.projection.bias = _numbers(bias[0])
    return spec


def _fill_stack(spec: Any, module: Any, config: Any) -> None:
    embeddings = spec.embeddings[0] if isinstance(spec.embeddings, list) else spec.embeddings
    embeddings.weight = _numbers(module.embed_tokens.weight)
    spec.scale_embeddings = float(config.d_model**0.5) if config.scale_embedding else 1.0
    positions = module.embed_positions
    spec.position_encodings.encodings = _numbers(positions.weight[getattr(positions, "offset", 0) :])
    if NORMS_BEFORE[config.model_type]:
        _fill_norm(spec.layer_norm, module.layer_norm)
    for layer, own in zip(spec.layer, module.layers, strict=True):
        _fill_attention(layer.self_attention, own.self_attn, own.self_attn_layer_norm, [3])
        if hasattr(own, "encoder_attn"):
            _fill_attention(layer.attention, own.encoder_attn, own.encoder_attn_layer_norm, [1, 2])
        _fill_linear(layer.ffn.linear_0, [own.fc1])
        _fill_linear(layer.ffn.linear_1, [own.fc2])
        _fill_norm(layer.ffn.layer_norm, own.final_layer_norm)


def _fill_attention(spec: Any, module: Any, norm: Any, joined: Sequence[int]) -> None:
    """Of a layer; ``joined`` says how many of query, key and value each product makes."""
    parts = iter((module.q_proj, module.k_proj, module.v_proj))
    for linear, count in zip(spec.linear[:-1], joined, strict=True):
        _fill_linear(linear, [next(parts) for _ in range(count)])
    _fill_linear(spec.linear[-1], [module.out_proj])
    _fill_norm(spec.layer_norm, norm)


def _fill_linear(spec: Any, modules: Sequence[Any]) -> None:
    spec.weight = np.concatenate([_numbers(module.weight) for module in modules])
    if any(module.bias is not None for module in modules):
        spec.bias = np.concatenate([_numbers(module.bias) for module in modules])


def _fill_norm(spec: Any, module: Any) -> None:
    spec.gamma, spec.beta = _numbers(module.weight), _numbers(module.bias)


def _numbers(tensor: Tensor) -> np.ndarray:
    return np.ascontiguousarray(tensor.detach().float().cpu().numpy())


def _digest(target: Seq2SeqLM) -> str:
    """sha256 over sizes, special ids and weights."""
    config: Any = target.config
    heads = (config.encoder_attention_heads, config.decoder_attention_heads)
    sizes = (heads, config.activation_function, config.scale_embedding)
    found = hashlib.sha256(f"{_FORMAT} {sizes} {target.start} {target.eos_ids}\n".encode())
    model: Any = target.hf
    state: dict[str, Tensor] = model.state_dict()
    for name in sorted(state):
        found.update(f"{name} {list(state[name].shape)}\n".encode())
        found.update(_numbers(state[name]).tobytes())
    return found.hexdigest()


def _required(target: CausalLM, sampling: Sampling, num_beams: int) -> Seq2SeqLM:
    if num_beams < 1:
        raise ValueError(f"method.num_beams must be at least 1, got {num_beams}.")
    if not sampling.greedy:
        raise ValueError(
            f"ctranslate2 needs sampling=greedy, got temperature={sampling.temperature}. Set sampling=greedy, or "
            "choose another method."
        )
    if not isinstance(target, Seq2SeqLM) or target.hf is None:
        raise ValueError(
            "ctranslate2 needs an encoder-decoder that kept its Hugging Face form (keep_hf=True). Choose such a target."
        )
    kind, activation = target.config.model_type, getattr(target.config, "activation_function", None)
    if kind not in NORMS_BEFORE or activation not in _ACTIVATIONS:
        raise ValueError(
            f"The model must be of a type that is written for CTranslate2 ({', '.join(NORMS_BEFORE)}; with "
            f"{', '.join(_ACTIVATIONS)}), got {kind} with {activation}. Choose such a model."
        )
    if len(target.start) != 1 or len(target.eos_ids) != 1:
        raise ValueError(
            f"The model must begin with one token and end with one for CTranslate2, got {target.start} and "
            f"{target.eos_ids}. Choose another model."
        )
    return target


def _library() -> Any:
    if missing := CTranslate2.missing_library():
        raise ValueError(f"ctranslate2 cannot run here. {missing}")
    import ctranslate2

    return ctranslate2
