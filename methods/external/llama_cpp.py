"""llama.cpp with our interface, through llama-cpp-python: its own passes, sampler and draft loop, on the same weights.

The weights of the target are written to a GGUF file (``methods.external.gguf_file``) once, in the type of the run or in
one of the format's quantised ones. Ids go in and come out; an end of sequence is left to the runner, as with every
method. Each prompt is read anew unless ``measure.prefix_cache`` lets all methods keep what two prompts begin with in
common, as the library does.

``draft=prompt_lookup`` is the library's own (``LlamaPromptLookupDecoding``); with it, the library has llama.cpp compute
logits for every token of a prompt, not only for the last one. A draft model is a second model behind the library's
interface for drafters, which writes ``gamma`` tokens greedily.

The library's loop takes one row. A batch has a sequence of llama.cpp for each row, in a context of its own, and a round
is one pass over the last token of every row that is not done. Drafts are for one row.

Differences from our engine: keys and values have 16 bit (``kv``); products multiply weights of bfloat16 with inputs
rounded to it, and quantised ones with inputs of 8 bit. So texts differ in near-ties, and every run reports how often.

Install: ``pip install 'decodebench[rivals]'``. Commands: ``python -m bench method=llama_cpp dataset=mtbench``,
``method.weights=q4_1``, ``method.draft=prompt_lookup``; with others: ``python -m bench -m +sweep=rivals``
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from jaxtyping import Int, Int32
from torch import Generator, Tensor

from methods.decoder import Decoder, Guarantee, PrefixCaching, Rounds, Step
from methods.engine.causal_lm import CausalLM
from methods.engine.sampling import Sampling
from methods.engine.seq2seq_lm import Seq2SeqLM
from methods.external import gguf_file
from methods.rows import ComputedRows

_KINDS = {"f32": (Type.F32, torch.float32), "f16": (Type.F16, torch.float16), "bf16": (Type.BF16, torch.bfloat16)}
_SLOTS = 256  # llama.cpp rounds the room of a sequence up to a multiple of it
_GREEDY = {"temp": 0.0, "repeat_penalty": 1.0}


class LlamaCpp(Decoder, PrefixCaching):
    """llama-cpp-python's ``Llama.generate``, greedy, or for several rows llama.cpp's passes over a batch.

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
        self._sequences: _Sequences | None = None
        self._build(min(context, target.max_positions))

    @classmethod
    def most_rows(cls, settings: Mapping[str, Any]) -> int | None:
        """See ``methods.decoder.Decoder.most_rows``: with drafts one, else any number."""
        return None if settings.get("draft", "none") == "none" and settings.get("draft_model") is None else 1

    def decode(self, prompts: list[Int[Tensor, "_"]], limit: int, rng: Generator) -> Rounds:
        """See ``methods.decoder.Decoder.decode``; a round is a pass of llama.cpp and what the library keeps of it."""
        if len(prompts) > 1:
            if self._drafter is not None:
                raise ValueError(
                    f"batch_size must be 1 for llama_cpp with drafts, got {len(prompts)}. Set batch_size=1, or "
                    "method.draft=none."
                )
            yield from self._decode_rows(prompts, limit)
            return
        longest = len(prompts[0]) + limit + self._gamma + 1
        if longest > self._context:
            self._build(self._context * 2 ** math.ceil(math.log2(longest / self._context)))
        for model in () if self.keeps_prefix else self._models():
            model.reset()
        done, passes, drafter = 0, _Passes(self._model), self._drafter
        tokens, new = self._model.generate(prompts[0].tolist(), **_GREEDY), list[int]()
        with passes:
            for token in tokens:
                new.append(int(token))
                draft = passes.draft
                if len(new) <= len(draft) and new[-1] == draft[len(new) - 1]:
                    continue
                yield _step(new, len(draft), drafter, 0 if done else len(prompts[0]) - passes.read)
                done, new = done + len(new), []
                if done >= limit:
                    return

    def _decode_rows(self, prompts: list[Int[Tensor, "_"]], limit: int) -> Rounds:
        sequences = self._sequences_for(len(prompts), max(map(len, prompts)) + limit)
        rows, counts = ComputedRows(len(prompts)), [1] * len(prompts)
        last = sequences.read(dict(enumerate(prompt.tolist() for prompt in prompts)))
        rows.take((yield Step.undrafted([[token] for token in last.values()], rows=len(last))))
        while any(open_rows := rows.below(limit, counts)):
            last = sequences.read({row: [last[row]] for row, is_open in enumerate(open_rows) if is_open})
            counts = [count + is_open for count, is_open in zip(counts, open_rows, strict=True)]
            tokens = [[last[row]] if is_open else [] for row, is_open in enumerate(open_rows)]
            rows.take((yield Step.undrafted(tokens, rows=len(last))))

    def _sequences_for(self, rows: int, slots: int) -> _Sequences:
        """Empty ones."""
        if self._sequences is None or self._sequences.rows != rows or self._sequences.slots < slots:
            self._close_sequences()
            self._sequences = _Sequences(self._library, self._model, rows, slots)
            self._made += 1
        self._sequences.clear()
        return self._sequences

    def _close_sequences(self) -> None:
        if self._sequences is not None:
            self._sequences.close()
            self._sequences = None

    def memory(self) -> dict[str, int | None]:
        """See ``methods.decoder.Decoder.memory``; weights are counted by their files."""
        files = [file for file in (self._file, self._draft_file) if file is not None]
        models = [model for model in (self.target, self._draft_target) if model is not None]
        tokens = sum(2 * model.n_layers * model.kv_heads * model.head_dim for model in models)
        return {
            "weights": sum(file.stat().st_size for file in files),
            "cache": (self._context + (self._sequences.all_slots if self._sequences else 0)) * tokens * self._kv_bytes,
        }

    def stats(self) -> dict[str, Any]:
        """See ``methods.decoder.Decoder.stats``: the instructions that llama.cpp uses here, and its context."""
        system = self._library.llama_print_system_info().decode().strip()
        return {"system": system, "context": self._context, "contexts_made": self._made}

    def _build(self, context: int) -> None:
        self._close_sequences()
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


class _Sequences:
    """A context of llama.cpp with a sequence for each row of a batch, over the weights of a ``Llama``.

    Attributes:
        rows: of the batch.
        slots: tokens that each has room for.
    """

    def __init__(self, library: Any, model: Any, rows: int, slots: int) -> None:
        from llama_cpp import _internals

        self.rows, self.slots = rows, -(-slots // _SLOTS) * _SLOTS
        options = type(model.context_params).from_buffer_copy(model.context_params)
        options.n_seq_max, options.n_ctx, options.kv_unified = rows, self.all_slots, False
        options.n_batch = max(rows, options.n_batch)
        self._library, self._most, self._vocabulary = library, int(options.n_batch), int(model.n_vocab())
        self._context = _internals.LlamaContext(model=model._model, params=options, verbose=False)
        self._batch = _internals.LlamaBatch(n_tokens=self._most, embd=0, n_seq_max=1, verbose=False)
        self._lengths = [0] * rows

    @property
    def all_slots(self) -> int:
        return self.rows * self.slots

    def clear(self) -> None:
        """Forget all texts."""
        self._library.llama_memory_clear(self._context.memory, False)
        self._lengths = [0] * self.rows

    def read(self, tokens: Mapping[int, Sequence[int]]) -> dict[int, int]:
        """Append tokens to some rows; the likeliest next one of each."""
        each = [(row, id, place == len(ids)) for row, ids in tokens.items() for place, id in enumerate(ids, start=1)]
        found: dict[int, int] = {}
        for start in range(0, len(each), self._most):
            found |= self._pass(each[start : start + self._most])
        return found

    def _pass(self, tokens: Sequence[tuple[int, int, bool]]) -> dict[int, int]:
        """Over tokens of rows; the likeliest next one where it is asked for."""
        batch = self._batch.batch
        batch.n_tokens = len(tokens)
        for place, (row, id, asked) in enumerate(tokens):
            batch.token[place], batch.pos[place], batch.logits[place] = id, self._lengths[row], asked
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, row
            self._lengths[row] += 1
        if failed := self._library.llama_decode(self._context.ctx, batch):
            raise RuntimeError(f"llama.cpp could not decode a batch of {self.rows} rows: it returned {failed}.")
        return {row: self._likeliest(place) for place, (row, _, asked) in enumerate(tokens) if asked}

    def _likeliest(self, place: int) -> int:
        logits = self._library.llama_get_logits_ith(self._context.ctx, place)
        return int(np.ctypeslib.as_array(logits, (self._vocabulary,)).argmax())

    def close(self) -> None:
        """Free the context; the weights stay."""
        self._batch.close()
        self._context.close()


class _Passes:
    """Within it, the draft that the library's latest pass judged, which is all of its tokens but the first.

    The first pass reads the prompt and judges none; ``read``: its tokens.
    """

    def __init__(self, model: Any) -> None:
        self._model, self._eval = model, model.eval
        self.draft: list[int] = []
        self.read = 0

    def __enter__(self) -> None:
        self._model.eval = self._noted

    def __exit__(self, *_: object) -> None:
        del self._model.eval

    def _noted(self, tokens: Sequence[Any]) -> None:
        self.draft = [int(token) for token in tokens[1:]] if self.read else []
        self.read = self.read or len(tokens)
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


def _step(new: list[int], drafted: int, drafter: _Drafter | None, kept: int) -> Step:
    return Step(
        [new],
        drafted=[drafted],
        accepted=[len(new) - 1],
        layers=[1.0],
        depth=[drafted],
        nodes=1 + drafted,
        draft_passes=drafted if drafter and drafter.passes else 0,
        draft_ns=drafter.spent_ns if drafter and drafted else None,
        kept=kept,
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
