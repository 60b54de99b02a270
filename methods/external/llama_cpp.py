"""llama.cpp with our interface, through llama-cpp-python: its own passes, sampler and draft loop, on the same weights.

The weights of the target are written to a GGUF file (``methods.external.gguf_file``) once, in the type of the run or in
one of the format's quantised ones. Ids go in and come out; an end of sequence is left to the runner, as with every
method. Each prompt is read anew: the library would keep what two prompts begin with in common, and no other method here
does.

``draft=prompt_lookup`` is the library's own (``LlamaPromptLookupDecoding``); with it, the library has llama.cpp compute
logits for every token of a prompt, not only for the last one. A draft model is a second model behind the library's
interface for drafters, which writes ``gamma`` tokens greedily.

Differences from our engine: keys and values have 16 bit (``kv``); products multiply weights of bfloat16 with inputs
rounded to it, and quantised ones with inputs of 8 bit. So texts differ in near-ties, and every run reports how often.

Install: ``pip install 'decodebench[rivals]'``. Commands: ``python -m bench method=llama_cpp dataset=mtbench``,
``method.weights=q4_1``, ``method.draft=prompt_lookup``; with others: ``python -m bench -m +sweep=rivals``
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from jaxtyping import Int, Int32
from torch import Generator, Tensor

from methods.decoder import Decoder, Guarantee, Step
from methods.engine.causal_lm import CausalLM
from methods.engine.sampling import Sampling
from methods.engine.seq2seq_lm import Seq2SeqLM
from methods.external import gguf_file

_KINDS = {"f32": (Type.F32, torch.float32), "f16": (Type.F16, torch.float16), "bf16": (Type.BF16, torch.bfloat16)}
_GREEDY = {"temp": 0.0, "repeat_penalty": 1.0}


class LlamaCpp(Decoder):
    """llama-cpp-python's ``Llama.generate``, greedy, one row at a time.

    Args:
        target: a causal model of the types in ``gguf_file.ARCHITECTURES``.
        sampling: must be greedy.
        weights: of the layers; full: in the type of the run.
        output: of the output matrix, and of the embedding if the two are one.
        draft: prompt_lookup is the library's own.
        draft_model: drafts, in full weights.
        gamma: most tokens of a draft.
        max_ngram: longest key of the prompt lookup.
        kv: type of keys and values; f16 is llama.cpp's default.
        flash_attention: llama.cpp's kernel of that name.
        context: tokens that keys and values are first reserved for; a longer text doubles it.
        storage: root under which the file is kept; None: it is written anew, and removed with this object.

    Raises:
        ValueError: it is not installed, is built for another device, or the model or a setting is not supported.
    """

    guarantee = Guarantee.EXACT
    family = "external"
    max_batch = 1
    model_kind = "causal"
    greedy_only = True
    libraries = {"llama-cpp-python": "rivals"}

    def __init__(
        self,
        target: CausalLM,
        sampling: Sampling,
        weights: gguf_file.Weights = "full",
        output: gguf_file.Weights = "full",
        draft: Literal["none", "prompt_lookup"] = "none",
        draft_model: CausalLM | None = None,
        gamma: int = 10,
        max_ngram: int = 2,
        kv: Literal["f32", "f16", "bf16"] = "f16",
        flash_attention: bool = False,
        context: int = 4096,
        storage: Path | None = None,
    ) -> None:
        for name, number in (("gamma", gamma), ("max_ngram", max_ngram), ("context", context)):
            if number < 1:
                raise ValueError(f"method.{name} must be at least 1, got {number}.")
        if isinstance(target, Seq2SeqLM) or not sampling.greedy:
            raise ValueError("llama_cpp needs a causal model and sampling=greedy. Choose these, or another method.")
        if draft != "none" and draft_model is not None:
            raise ValueError(
                f"llama_cpp takes one drafter, got draft={draft} and a draft model. Set method.draft=none or "
                "method.draft_model=null."
            )
        self._library = _library(target.device)
        self.target, self.sampling = target, sampling
        self._draft, self._gamma, self._max_ngram = draft, gamma, max_ngram
        self._context, self._made = 0, 0
        kv_type, kv_dtype = _KINDS[kv]
        self._options = {
            "n_gpu_layers": -1 if target.device.type == "cuda" else 0,
            "n_threads": torch.get_num_threads(),
            "n_threads_batch": torch.get_num_threads(),
            "flash_attn": flash_attention,
            "type_k": int(kv_type),
            "type_v": int(kv_type),
            "verbose": False,
        }
        coarse = torch.finfo(kv_dtype).eps > torch.finfo(target.dtype).eps and target.dtype != torch.float64
        if {weights, output} != {"full"} or coarse:
            self.guarantee = Guarantee.RELAXED
        self._kv_bytes = kv_dtype.itemsize
        self._own_folder = tempfile.TemporaryDirectory() if storage is None else None
        folder = Path(self._own_folder.name if self._own_folder else storage or "") / "models" / "gguf"
        self._file = gguf_file.write(target, folder, weights, output)
        self._draft_target = draft_model
        self._draft_file = None if draft_model is None else gguf_file.write(draft_model, folder)
        self._model: Any = None
        self._drafter: _Drafter | None = None
        self._build(min(context, target.max_positions))

    def decode(self, prompts: list[Int[Tensor, "_"]], limit: int, rng: Generator) -> Iterator[Step]:
        """See ``methods.decoder.Decoder.decode``; a round is a pass of llama.cpp and what the library keeps of it."""
        if len(prompts) != 1:
            raise ValueError(f"batch_size must be 1 for llama_cpp, got {len(prompts)}. Set batch_size=1.")
        longest = len(prompts[0]) + limit + self._gamma + 1
        if longest > self._context:
            self._build(self._context * 2 ** math.ceil(math.log2(longest / self._context)))
        for model in self._models():
            model.reset()
        done, passes, drafter = 0, _Passes(self._model), self._drafter
        tokens, new = self._model.generate(prompts[0].tolist(), **_GREEDY), list[int]()
        with passes:
            for token in tokens:
                new.append(int(token))
                draft = passes.draft
                if len(new) <= len(draft) and new[-1] == draft[len(new) - 1]:
                    continue
                yield _step(new, len(draft), drafter)
                done, new = done + len(new), []
                if done >= limit:
                    return

    def memory(self) -> dict[str, int | None]:
        """See ``methods.decoder.Decoder.memory``; weights are counted by their files."""
        files = [file for file in (self._file, self._draft_file) if file is not None]
        models = [model for model in (self.target, self._draft_target) if model is not None]
        tokens = sum(2 * model.n_layers * model.kv_heads * model.head_dim for model in models)
        return {
            "weights": sum(file.stat().st_size for file in files),
            "cache": self._context * tokens * self._kv_bytes,
        }

    def stats(self) -> dict[str, Any]:
        """See ``methods.decoder.Decoder.stats``: the instructions that llama.cpp uses here, and its context."""
        system = self._library.llama_print_system_info().decode().strip()
        return {"system": system, "context": self._context, "contexts_made": self._made}

    def _build(self, context: int) -> None:
        for old in self._models():
            old.close()
        # With a drafter the library keeps the scores of every position, but makes room for one batch of them only.
        options = {**self._options, "n_ctx": context, "logits_all": self._draft == "prompt_lookup"}
        if self._draft_file is not None:
            second = self._library.Llama(str(self._draft_file), **options)
            options["logits_all"] = True
            self._drafter = _Drafter(_SecondModel(second, self._gamma, self.target.vocab_size))
        elif self._draft == "prompt_lookup":
            from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

            self._drafter = _Drafter(LlamaPromptLookupDecoding(self._max_ngram, self._gamma))
        self._model = self._library.Llama(str(self._file), draft_model=self._drafter, **options)
        self._context, self._made = context, self._made + 1

    def _models(self) -> list[Any]:
        return [model for model in (self._model, self._drafter and self._drafter.model) if model is not None]


class _Passes:
    """Within it, the draft that the library's latest pass judged, which is all of its tokens but the first.

    The first pass reads the prompt and judges none.
    """

    def __init__(self, model: Any) -> None:
        self._model, self._eval, self._count = model, model.eval, 0
        self.draft: list[int] = []

    def __enter__(self) -> None:
        self._model.eval = self._noted

    def __exit__(self, *_: object) -> None:
        del self._model.eval

    def _noted(self, tokens: Sequence[Any]) -> None:
        self.draft = [int(token) for token in tokens[1:]] if self._count else []
        self._count += 1
        self._eval(tokens)


class _Drafter:
    """The library's interface of a drafter, with the time that the latest draft took."""

    def __init__(self, propose: Any) -> None:
        self._propose = propose
        self.passes = isinstance(propose, _SecondModel)
        self.model = propose.model if isinstance(propose, _SecondModel) else None
        self.spent_ns = 0

    def __call__(self, ids: Int32[np.ndarray, "T"], **more: Any) -> Int32[np.ndarray, "g"]:
        began = time.perf_counter_ns()
        found: np.ndarray = self._propose(ids, **more)
        self.spent_ns = time.perf_counter_ns() - began
        return found


class _SecondModel:
    """Drafts up to ``gamma`` tokens that another model writes next, as far as the target knows them."""

    def __init__(self, model: Any, gamma: int, vocabulary: int) -> None:
        self.model, self._gamma, self._vocabulary = model, gamma, vocabulary

    def __call__(self, ids: Int32[np.ndarray, "T"], **more: Any) -> Int32[np.ndarray, "g"]:
        written = islice(self.model.generate(ids.tolist(), **_GREEDY), self._gamma)
        return np.fromiter(takewhile(lambda id: id < self._vocabulary, written), dtype=np.intc)


def _step(new: list[int], drafted: int, drafter: _Drafter | None) -> Step:
    return Step(
        [new],
        drafted=[drafted],
        accepted=[len(new) - 1],
        layers=[1.0],
        depth=[drafted],
        nodes=1 + drafted,
        draft_passes=drafted if drafter and drafter.passes else 0,
        draft_ns=drafter.spent_ns if drafter and drafted else None,
    )


def _library(device: torch.device) -> Any:
    if missing := LlamaCpp.missing_library():
        raise ValueError(f"llama_cpp cannot run here. {missing}")
    import llama_cpp

    if device.type == "cuda" and not llama_cpp.llama_supports_gpu_offload():
        raise ValueError(
            "llama-cpp-python is built for the CPU, and the model is on a GPU. Install it with CUDA "
            "(CMAKE_ARGS=-DGGML_CUDA=on pip install --no-binary :all: llama-cpp-python), or set hardware=cpu_bf16."
        )
    return llama_cpp
