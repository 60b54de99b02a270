"""A causal model of the engine as a GGUF file, which llama.cpp and engines built on it read.

Token ids are all that is exchanged, so the file has no vocabulary, only its size. Norms and biases have 32 bit; queries
and keys of the ``llama`` architecture have the pairs of the rotation side by side, as that format wants them.

Proven for models of the types ``ARCHITECTURES`` with the rotary positions of Llama 2 or Llama 3.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter, quants
from jaxtyping import Float
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from methods.engine.causal_layers import FeedForward, Rows
from methods.engine.causal_lm import CausalLM
from methods.engine.linear import Linear

Weights = Literal["full", "f16", "q8_0", "q4_1", "q4_0"]

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}  # by type of the model
BLOCK = 32  # numbers that share a scale in all quantised types here
_FORMAT = 2  # raise when the file of the same weights changes
_FULL = {
    torch.float64: Type.F32,  # the format's 64 bit are no weights to llama.cpp
    torch.float32: Type.F32,
    torch.float16: Type.F16,
    torch.bfloat16: Type.BF16,
}
_OTHER = {"f16": Type.F16, "q8_0": Type.Q8_0, "q4_1": Type.Q4_1, "q4_0": Type.Q4_0}
_FILE_TYPES = {Type.F32: 0, Type.F16: 1, Type.Q4_0: 2, Type.Q4_1: 3, Type.Q8_0: 7, Type.BF16: 32}  # of most matrices
_ROPE = ("default", "llama3")
_EVEN = 1024.0  # its square is far above every epsilon, and a power of two: norms of such rows are exact


class Entry(NamedTuple):
    """A tensor of the file and the type it is stored in."""

    name: str
    tensor: Float[Tensor, "..."]
    type: Type


def write(target: CausalLM, folder: Path, weights: Weights = "full", output: Weights = "full") -> Path:
    """Write the file, unless it is there; it appears whole or not at all.

    Args:
        folder: where it goes; its name has a digest of sizes and weights.
        weights: of the layers; full: in the type of the model.
        output: of the output matrix, and of the embedding if the two are one or it is f16.

    Raises:
        ValueError: a model that the format does not hold here, or matrices without whole blocks.
    """
    require(target, weights, output)
    file = folder / f"{_architecture(target)}-{digest(target)[:16]}-{weights}-{output}.gguf"
    if file.is_file():
        return file
    folder.mkdir(parents=True, exist_ok=True)
    handle, scratch = tempfile.mkstemp(suffix=".gguf", prefix=".", dir=folder)
    os.close(handle)
    try:
        _write(target, Path(scratch), weights, output)
        os.chmod(scratch, 0o644)  # a cache may be shared
        os.replace(scratch, file)
    finally:
        Path(scratch).unlink(missing_ok=True)
    return file


def require(target: CausalLM, weights: Weights = "full", output: Weights = "full") -> None:
    """Refuse what cannot be written.

    Raises:
        ValueError: see ``write``.
    """
    config: Any = target.config
    if config.model_type not in ARCHITECTURES:
        raise ValueError(
            f"The type of a model written as GGUF must be one of {', '.join(ARCHITECTURES)}, got "
            f"'{config.model_type}'. Choose such a model."
        )
    if (rope := _rope(config)["rope_type"]) not in _ROPE:
        raise ValueError(
            f"The rotary positions of a model written as GGUF must be {' or '.join(_ROPE)}, got '{rope}'. Choose a "
            "model with these."
        )
    if target.window is not None and target.window < target.max_positions:
        raise ValueError(
            f"A model written as GGUF must see its whole context, got a sliding window of {target.window} tokens. "
            "Choose another one."
        )
    one = torch.zeros(1, dtype=torch.long, device=target.device)
    if config.hidden_act != "silu" or target.output_rows(one)[1] is not None:
        raise ValueError("A model written as GGUF must have SiLU and no bias of the output matrix. Choose another one.")
    inputs = (target.hidden_size, target.heads * target.head_dim, config.intermediate_size)
    for wanted, widths in ((weights, inputs), (output, inputs[:1])):
        if wanted.startswith("q") and any(width % BLOCK for width in widths):
            raise ValueError(
                f"Weights of type {wanted} need matrices whose inputs are a multiple of {BLOCK}, got "
                f"{', '.join(map(str, widths))}. Use full weights."
            )


def digest(target: CausalLM) -> str:
    """sha256 over sizes and weights of a model, as they are before a type is chosen for the file."""
    found = hashlib.sha256(f"{_FORMAT} {_sizes(target)}\n".encode())
    for name, tensor, _ in _entries(target, "full", "full"):
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        found.update(tensor.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _write(target: CausalLM, file: Path, weights: Weights, output: Weights) -> None:
    sizes, writer = _sizes(target), GGUFWriter(file, _architecture(target))
    writer.add_context_length(sizes["context"])
    writer.add_vocab_size(sizes["vocabulary"])
    writer.add_embedding_length(sizes["hidden"])
    writer.add_block_count(sizes["layers"])
    writer.add_feed_forward_length(sizes["inner"])
    writer.add_head_count(sizes["heads"])
    writer.add_head_count_kv(sizes["kv_heads"])
    writer.add_key_length(sizes["head_dim"])
    writer.add_value_length(sizes["head_dim"])
    writer.add_rope_dimension_count(sizes["head_dim"])
    writer.add_rope_freq_base(sizes["rope_base"])
    writer.add_layer_norm_rms_eps(sizes["eps"])
    writer.add_file_type(_FILE_TYPES[_OTHER.get(weights, _FULL[target.dtype])])
    writer.add_tokenizer_model("none")
    for name, tensor, kind in _entries(target, weights, output):
        shape = quants.quant_shape_to_byte_shape(tuple(tensor.shape), kind)
        writer.add_tensor_info(name, shape, np.dtype(np.uint8), int(np.prod(shape)), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, tensor, kind in _entries(target, weights, output):
        writer.write_tensor_data(_encoded(tensor, kind))
    writer.close()


def _sizes(target: CausalLM) -> dict[str, Any]:
    config: Any = target.config
    return {
        "context": int(config.max_position_embeddings),
        "vocabulary": target.vocab_size,
        "hidden": target.hidden_size,
        "layers": target.n_layers,
        "inner": int(config.intermediate_size),
        "heads": target.heads,
        "kv_heads": target.kv_heads,
        "head_dim": target.head_dim,
        "rope_base": float(_rope(config)["rope_theta"]),
        "eps": float(config.rms_norm_eps),
    }


def _entries(target: CausalLM, weights: Weights, output: Weights) -> Iterator[Entry]:
    full = _FULL[target.dtype]
    layers, last = _OTHER.get(weights, full), _OTHER.get(output, full)
    tied, ids = bool(target.config.tie_word_embeddings), torch.arange(target.vocab_size, device=target.device)
    yield Entry("token_embd.weight", target.embed(ids), last if tied or last == Type.F16 else full)
    if not tied:
        yield Entry("output.weight", target.output_rows(ids)[0], last)
    yield Entry("output_norm.weight", _factors(target.norm, target.hidden_size, target), Type.F32)
    if _rope(target.config)["rope_type"] != "default":
        yield Entry("rope_freqs.weight", _frequency_factors(target), Type.F32)
    for index in range(target.n_layers):
        for name, tensor in _layer(target, index):
            matrix = tensor.dim() == 2
            yield Entry(f"blk.{index}.{name}", tensor, layers if matrix else Type.F32)


def _layer(target: CausalLM, index: int) -> Iterator[tuple[str, Float[Tensor, "..."]]]:
    attention, mlp = target.layers[index].attention, target.layers[index].mlp
    assert isinstance(mlp, FeedForward) and attention.norm is not None and mlp.norm is not None, "so are ARCHITECTURES"
    query, key = target.heads * target.head_dim, target.kv_heads * target.head_dim
    yield "attn_norm.weight", _factors(attention.norm, target.hidden_size, target)
    for kind, joined in _parts(attention.qkv):
        parts = joined.split([query, key, key])
        for name, part, heads in zip("qkv", parts, (target.heads, target.kv_heads, 0), strict=True):
            turned = heads and _architecture(target) == "llama"
            yield f"attn_{name}.{kind}", _side_by_side(part, heads) if turned else part
    if attention.query_norm is not None and attention.key_norm is not None:
        yield "attn_q_norm.weight", _factors(attention.query_norm, target.head_dim, target)
        yield "attn_k_norm.weight", _factors(attention.key_norm, target.head_dim, target)
    for kind, matrix in _parts(attention.out):
        yield f"attn_output.{kind}", matrix
    yield "ffn_norm.weight", _factors(mlp.norm, target.hidden_size, target)
    for kind, joined in _parts(mlp.gate_up):
        gate, up = joined.chunk(2)
        yield f"ffn_gate.{kind}", gate
        yield f"ffn_up.{kind}", up
    for kind, matrix in _parts(mlp.down):
        yield f"ffn_down.{kind}", matrix


def _parts(linear: Linear) -> Iterator[tuple[str, Float[Tensor, "O *I"]]]:
    yield "weight", linear.dense
    if linear.bias is not None:
        yield "bias", linear.bias


def _side_by_side(rows: Float[Tensor, "O *I"], heads: int) -> Float[Tensor, "O *I"]:
    """Rows i and i + d / 2 of each head, which are rotated together, next to each other."""
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def _factors(norm: Rows, width: int, target: CausalLM) -> Float[Tensor, "D"]:
    """The factors of an RMS norm: what it makes of equal numbers."""
    return norm(torch.full((1, width), _EVEN, dtype=target.dtype, device=target.device))[0]


def _frequency_factors(target: CausalLM) -> Float[Tensor, "d"]:
    """What Llama 3 divides each frequency of the rotation by."""
    config: Any = target.config
    scaled, _ = ROPE_INIT_FUNCTIONS[_rope(config)["rope_type"]](config, torch.device("cpu"))
    steps = torch.arange(0, target.head_dim, 2, dtype=torch.float32) / target.head_dim
    return _rope(config)["rope_theta"] ** -steps / scaled


def _rope(config: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0} | dict(config.rope_parameters or {})


def _architecture(target: CausalLM) -> str:
    return ARCHITECTURES[target.config.model_type]


def _encoded(tensor: Float[Tensor, "..."], kind: Type) -> np.ndarray:
    plain = tensor.detach().contiguous().cpu()
    if kind == Type.BF16:
        return plain.view(torch.uint8).numpy()
    return quants.quantize(plain.float().numpy(), kind)
