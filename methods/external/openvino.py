"""OpenVINO GenAI with our interface: its ``LLMPipeline`` over a GGUF file, plain or with its prompt lookup.

The pipeline reads the file of ``methods.external.gguf_file`` with the reader that is its default, which takes 16-bit
floats, Q8_0 and Q4_0. It demands a tokenizer, and gets one of single bytes, which is never asked: ids go in and come
out. Its prefix cache is off, as prompts are read anew unless the run says otherwise, and it gets no
end-of-sequence token: this module stops it after one.

The library shows which tokens a round kept, not what it drafted. So ``drafted`` counts what was kept, and an acceptance
rate says nothing here.

Left out: draft models, for which the library reads the tokenizer from the file; factors of frequencies (Llama 3) and
biases of a Llama, which that reader does not take.

Differences from our engine: weights have 16-bit floats in place of bfloat16; keys and values have 8 bit, the library's
default, unless ``kv`` says otherwise. So texts differ, and every run reports how often.

Install: ``pip install 'decodebench[rivals]'``. Commands: ``python -m bench method=openvino dataset=mtbench``,
``method.weights=q8_0``, ``method.draft=prompt_lookup``
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Generator, Tensor

from methods.decoder import Decoder, Guarantee, Step
from methods.engine.causal_lm import CausalLM
from methods.engine.sampling import Sampling
from methods.engine.seq2seq_lm import Seq2SeqLM
from methods.external import gguf_file

_PRECISIONS = {torch.float16: "f16", torch.bfloat16: "bf16"}
_NO_LIMIT = 1 << 20  # tokens of one pass: a prompt is read at once


class OpenVINO(Decoder):
    """OpenVINO GenAI's ``LLMPipeline``, greedy, one row at a time, on the CPU.

    Args:
        target: a causal model of the types in ``gguf_file.ARCHITECTURES``, with the rotary positions of Llama 2.
        sampling: must be greedy.
        weights: of the layers; embedding and output matrix have f16.
        draft: prompt_lookup is the library's own.
        gamma: most tokens of a draft.
        max_ngram: longest key of the prompt lookup.
        kv: type of keys and values; u8 is the library's default.
        quantise_inputs: the library's default: it may round the inputs of products with quantised weights to 8 bit.
        storage: root under which the file is kept; None: it is written anew, and removed with this object.

    Raises:
        ValueError: it is not installed, or the model or a setting is not supported.
    """

    guarantee = Guarantee.RELAXED
    family = "external"
    max_batch = 1
    model_kind = "causal"
    greedy_only = True
    libraries = {"openvino-genai": "rivals", "openvino": "rivals"}

    def __init__(
        self,
        target: CausalLM,
        sampling: Sampling,
        weights: Literal["f16", "q8_0", "q4_0"] = "f16",
        draft: Literal["none", "prompt_lookup"] = "none",
        gamma: int = 5,
        max_ngram: int = 3,
        kv: Literal["u8", "f16", "f32"] = "u8",
        quantise_inputs: bool = True,
        storage: Path | None = None,
    ) -> None:
        _require(target, sampling, gamma, max_ngram)
        self._library = _library()
        self.target, self.sampling = target, sampling
        self._draft, self._gamma, self._max_ngram = draft, gamma, max_ngram
        self._own_folder = tempfile.TemporaryDirectory()
        folder = Path(self._own_folder.name)
        self._file = gguf_file.write(target, (storage or folder) / "models" / "gguf", weights, "f16")
        schedule = self._library.SchedulerConfig()
        schedule.enable_prefix_caching = False
        schedule.max_num_batched_tokens = _NO_LIMIT
        options = {
            "scheduler_config": schedule,
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "INFERENCE_PRECISION_HINT": _PRECISIONS.get(target.dtype, "f32"),
            "KV_CACHE_PRECISION": kv,
            **({} if quantise_inputs else {"DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}),
            **({"prompt_lookup": True} if draft == "prompt_lookup" else {}),
        }
        self._pipeline = self._library.LLMPipeline(str(self._file), _tokenizer(self._library, folder), "CPU", **options)

    def decode(self, prompts: list[Int[Tensor, "_"]], limit: int, rng: Generator) -> Iterator[Step]:
        """See ``methods.decoder.Decoder.decode``; stops after an end-of-sequence token."""
        if len(prompts) != 1:
            raise ValueError(f"batch_size must be 1 for openvino, got {len(prompts)}. Set batch_size=1.")
        import openvino

        rounds: list[tuple[list[int], int]] = []
        ends, running = set(self.target.eos_ids), self._library.StreamingStatus

        class Watch(self._library.StreamerBase):  # type: ignore[name-defined]
            def write(self, new: int | list[int]) -> Any:
                tokens = [new] if isinstance(new, int) else [int(token) for token in new]
                rounds.append((tokens, time.perf_counter_ns()))
                return running.STOP if ends & set(tokens) else running.RUNNING

            def end(self) -> None:
                """Nothing is held back."""

        self._pipeline.generate(openvino.Tensor(prompts[0][None].cpu().numpy()), self._settings(limit), Watch())
        for tokens, at_ns in rounds:
            if tokens:
                yield _step(tokens, at_ns)

    def memory(self) -> dict[str, int | None]:
        """See ``methods.decoder.Decoder.memory``; weights are counted by their file."""
        return {"weights": self._file.stat().st_size}

    def _settings(self, limit: int) -> Any:
        found = self._library.GenerationConfig()
        found.max_new_tokens, found.ignore_eos, found.do_sample = limit, True, False
        if self._draft == "prompt_lookup":
            found.num_assistant_tokens, found.max_ngram_size = self._gamma, self._max_ngram
        return found


def _step(tokens: list[int], at_ns: int) -> Step:
    kept = len(tokens) - 1
    return Step([tokens], drafted=[kept], accepted=[kept], layers=[1.0], depth=[kept], nodes=len(tokens), at_ns=at_ns)


def _require(target: CausalLM, sampling: Sampling, gamma: int, max_ngram: int) -> None:
    for name, number in (("gamma", gamma), ("max_ngram", max_ngram)):
        if number < 1:
            raise ValueError(f"method.{name} must be at least 1, got {number}.")
    if isinstance(target, Seq2SeqLM) or not sampling.greedy or target.device.type != "cpu":
        raise ValueError("openvino needs a causal model on the CPU and sampling=greedy. Choose another method.")
    gguf_file.require(target)
    rope = (target.config.rope_parameters or {}).get("rope_type", "default")
    biased = target.config.model_type == "llama" and target.layers[0].attention.qkv.bias is not None
    if rope != "default" or biased:
        raise ValueError(
            "OpenVINO's reader of GGUF files takes no factors of frequencies (Llama 3) and no biases of a Llama; the "
            "model has them. Choose another model, or method=llama_cpp."
        )


def _tokenizer(library: Any, folder: Path) -> Any:
    """Of single bytes."""
    import openvino
    from openvino_tokenizers import convert_tokenizer
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]  # a merge and a special token are demanded
    plain = Tokenizer(models.BPE(vocab={word: id for id, word in enumerate(words)}, merges=[("a", "b")]))
    plain.add_special_tokens(["<end>"])
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    whole = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<end>", pad_token="<end>")
    for model, name in zip(convert_tokenizer(whole, with_detokenizer=True), ("tokenizer", "detokenizer"), strict=True):
        openvino.save_model(model, folder / f"openvino_{name}.xml")
    return library.Tokenizer(str(folder))


def _library() -> Any:
    if missing := OpenVINO.missing_library():
        raise ValueError(f"openvino cannot run here. {missing}")
    import openvino_genai

    return openvino_genai
