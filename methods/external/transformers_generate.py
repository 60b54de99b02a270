"""Hugging Face's own decoders with our interface, for comparison side by side.

transformers' ``generate`` blocks until it is done; a stopping criterion, which it calls once per round with all ids so
far, notes the time and the length. Drafted tokens are counted where the candidate generator shows them. Assisted
generation and prompt lookup of transformers run one row at a time. These are peers, never the denominator of a
speed-up.

Commands: ``python -m bench method=hf_generate``, ``hf_compiled``, ``hf_prompt_lookup``, ``hf_assisted``; all at once:
``python -m bench -m +sweep=peers``
"""

from __future__ import annotations

import copy
import time
from collections.abc import Collection, Iterator
from typing import Any, ClassVar

import torch
from jaxtyping import Int
from torch import Generator, Tensor
from transformers import CompileConfig, GenerationConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from methods.decoder import Decoder, Guarantee, ModelKind, Step
from methods.engine.causal_lm import CausalLM
from methods.engine.sampling import Sampling
from methods.engine.seq2seq_lm import Seq2SeqLM
from methods.engine.stopwatch import synchronize


class StepRecorder(StoppingCriteria):
    """Notes, once per round, when it ended and how long the rows were, and never stops the generation."""

    def __init__(self) -> None:
        self.times: list[int] = []
        self.lengths: list[int] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        synchronize(input_ids.device)
        self.times.append(time.perf_counter_ns())
        self.lengths.append(input_ids.shape[1])
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class HFGenerate(Decoder):
    """``model.generate`` of transformers: greedy or sampling, any batch, dynamic cache.

    Raises:
        ValueError: the engine released the original weights, or an encoder-decoder for a class that takes none.
    """

    guarantee = Guarantee.EXACT
    family = "external"
    needs_hf = True
    speed_only = True
    model_kind: ClassVar[ModelKind] = "causal"

    def __init__(self, target: CausalLM, sampling: Sampling) -> None:
        if isinstance(target, Seq2SeqLM) and self.model_kind == "causal":
            raise ValueError(
                f"{type(self).__name__} needs a causal model, got an encoder-decoder. Choose method=hf_beam, whose "
                "num_beams=1 is transformers' greedy search on both, or a causal model."
            )
        if target.hf is None:
            raise ValueError(
                f"{type(self).__name__} needs the Hugging Face model, which was released. Use keep_hf=True."
            )
        self.target, self.sampling = target, sampling
        self.model: Any = target.hf

    def decode(self, prompts: list[Int[Tensor, "_"]], limit: int, rng: Generator) -> Iterator[Step]:
        """See ``methods.decoder.Decoder.decode``; stops at end-of-sequence by itself, as transformers does."""
        ids, attention = padded(prompts, self.target.device)
        recorder, drafted = StepRecorder(), [0]
        torch.manual_seed(rng.initial_seed())
        options = self._options(limit)
        with torch.inference_mode():
            self._watch_candidates(drafted)
            try:
                output = self.model.generate(
                    ids,
                    attention_mask=attention,
                    generation_config=options,
                    stopping_criteria=StoppingCriteriaList([recorder]),
                    **self._arguments(),
                )
            finally:
                self._unwatch()
        yield from self._steps(output, ids.shape[1], recorder, drafted[1:])

    def _options(self, limit: int) -> GenerationConfig:
        s = self.sampling
        draws = {} if s.greedy else {"temperature": s.temperature, "top_k": s.top_k, "top_p": s.top_p}
        eos = list(self.target.eos_ids) or None
        return GenerationConfig(
            max_new_tokens=limit, do_sample=not s.greedy, eos_token_id=eos, pad_token_id=(eos or [0])[0], **draws
        )

    def _arguments(self) -> dict[str, Any]:
        return {}

    def _watch_candidates(self, drafted: list[int]) -> None:
        """Plain generation drafts nothing."""

    def _unwatch(self) -> None:
        self.model.__dict__.pop("_get_candidate_generator", None)

    def _steps(self, output: Tensor, start: int, recorder: StepRecorder, drafted: list[int]) -> Iterator[Step]:
        rows = output[:, start:].tolist()
        batch = len(rows)
        before = start
        for number, (end, at_ns) in enumerate(zip(recorder.lengths, recorder.times, strict=True)):
            new = [row[before - start : end - start] for row in rows]
            proposed = drafted[number] if number < len(drafted) else 0
            kept = [max(0, len(tokens) - 1) for tokens in new]
            yield Step(
                new,
                drafted=[max(proposed, kept[0])] * batch,
                accepted=kept,
                layers=[1.0] * batch,
                depth=[max(proposed, kept[0])] * batch,
                nodes=1 + proposed,
                draft_passes=proposed,
                at_ns=at_ns,
            )
            before = end


class HFCompiled(HFGenerate):
    """``model.generate`` with a static cache and its passes over one token compiled by ``torch.compile``.

    transformers compiles by itself on a GPU, and on a CPU by a setting for all devices. Compilation takes minutes of
    the first prompts, which belong to the warm-up.

    Args:
        cache_length: tokens that the cache holds, prompt included; longer texts make a longer one, and compile again.
        backend: of ``torch.compile`` on a CPU.

    Raises:
        ValueError: on a CPU, there is no C++ compiler for Inductor.
    """

    def __init__(
        self, target: CausalLM, sampling: Sampling, cache_length: int = 2048, backend: str = "inductor"
    ) -> None:
        super().__init__(target, sampling)
        if target.device.type == "cpu" and backend == "inductor":
            _require_compiler()
        self.cache_length, self.backend = cache_length, backend

    def _options(self, limit: int) -> GenerationConfig:
        options = super()._options(limit)
        options.cache_implementation, options.max_cache_len = "static", self.cache_length
        if self.target.device.type == "cpu":
            options.compile_config = CompileConfig(backend=self.backend, dynamic=False, mode="default")
            options.compile_config._compile_all_devices = True
        return options


def _require_compiler() -> None:
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler as error:
        raise ValueError(
            "method=hf_compiled needs a C++ compiler on a CPU, got none. Install g++, or name one in CXX, or use "
            "method=hf_generate."
        ) from error


class HFAssistedBase(HFGenerate):
    """Common to transformers' draft-and-verify modes: one row at a time, candidates that can be counted."""

    max_batch = 1
    speed_only = False

    def decode(self, prompts: list[Int[Tensor, "_"]], limit: int, rng: Generator) -> Iterator[Step]:
        if len(prompts) != 1:
            raise ValueError(
                f"batch_size must be 1 for {type(self).__name__}, as transformers' assisted generation takes one row, "
                f"got {len(prompts)}. Set batch_size=1."
            )
        yield from super().decode(prompts, limit, rng)

    def _watch_candidates(self, drafted: list[int]) -> None:
        make = self.model._get_candidate_generator

        def watched(*args: Any, **kwargs: Any) -> Any:
            generator = make(*args, **kwargs)
            propose = generator.get_candidates

            def counted(input_ids: Tensor, *more: Any, **named: Any) -> Any:
                result = propose(input_ids, *more, **named)
                drafted.append(result[0].shape[1] - input_ids.shape[1])
                return result

            generator.get_candidates = counted
            return generator

        self.model.__dict__["_get_candidate_generator"] = watched


class HFPromptLookup(HFAssistedBase):
    """transformers' prompt lookup.

    Args:
        gamma: ``prompt_lookup_num_tokens``.
        max_ngram: ``max_matching_ngram_size``.
    """

    def __init__(self, target: CausalLM, sampling: Sampling, gamma: int = 10, max_ngram: int = 2) -> None:
        super().__init__(target, sampling)
        self.gamma, self.max_ngram = gamma, max_ngram

    def _options(self, limit: int) -> GenerationConfig:
        options = super()._options(limit)
        options.prompt_lookup_num_tokens, options.max_matching_ngram_size = self.gamma, self.max_ngram
        return options


class HFAssisted(HFAssistedBase):
    """transformers' assisted generation.

    Args:
        gamma: ``num_assistant_tokens``, kept constant.
        confidence: ``assistant_confidence_threshold``; 0 never stops a draft early.
        draft_model: the assistant; None: the target without the layers in ``skip_layers``.
        skip_layers: 0-based layers left out whole.
    """

    def __init__(
        self,
        target: CausalLM,
        sampling: Sampling,
        gamma: int = 20,
        confidence: float = 0.4,
        draft_model: CausalLM | None = None,
        skip_layers: Collection[int] = (),
    ) -> None:
        super().__init__(target, sampling)
        if (draft_model is None) == (not skip_layers):
            raise ValueError(
                "hf_assisted needs one drafter: method.draft_model=NAME with method.skip_layers=[], or layers in "
                "method.skip_layers with method.draft_model=null."
            )
        if draft_model is not None and draft_model.hf is None:
            raise ValueError("The draft model of hf_assisted must keep its Hugging Face model (keep_hf=True).")
        drafter = draft_model.hf if draft_model is not None else without_layers(self.model, skip_layers)
        assert drafter is not None
        self.drafter, self.gamma, self.confidence = drafter, gamma, confidence

    def _arguments(self) -> dict[str, Any]:
        # transformers reads the assistant's own options, and changes them; a copy per call keeps prompts apart.
        self.drafter.generation_config = copy.deepcopy(self.drafter.generation_config)
        self.drafter.generation_config.num_assistant_tokens = self.gamma
        self.drafter.generation_config.num_assistant_tokens_schedule = "constant"
        self.drafter.generation_config.assistant_confidence_threshold = self.confidence
        return {"assistant_model": self.drafter}


def without_layers(model: Any, skip: Collection[int]) -> PreTrainedModel:
    """A model that shares the weights of ``model`` but leaves out whole layers."""
    base = model.model
    kept = [layer for index, layer in enumerate(base.layers) if index not in skip]
    view = copy.copy(model)
    view.__dict__ = dict(model.__dict__)
    view._modules = dict(model._modules)
    view.config = copy.deepcopy(model.config)
    view.config.num_hidden_layers = len(kept)
    if getattr(view.config, "layer_types", None):
        view.config.layer_types = [t for i, t in enumerate(view.config.layer_types) if i not in skip]
    view.generation_config = copy.deepcopy(model.generation_config)
    inner = copy.copy(base)
    inner.__dict__ = dict(base.__dict__)
    inner._modules = dict(base._modules)
    inner.config = view.config
    inner.layers = torch.nn.ModuleList(_renumber(layer, place) for place, layer in enumerate(kept))
    view.model = inner
    return view


def _renumber(layer: Any, place: int) -> torch.nn.Module:
    moved = copy.copy(layer)
    moved.__dict__ = dict(layer.__dict__)
    moved._modules = dict(layer._modules)
    attention = copy.copy(layer.self_attn)
    attention.__dict__ = dict(layer.self_attn.__dict__)
    attention.layer_idx = place
    moved.self_attn = attention
    return moved


def padded(prompts: list[Int[Tensor, "_"]], device: torch.device, left: bool = True) -> tuple[Tensor, Tensor]:
    """Ids and attention mask, filled up on one side."""
    ids = torch.zeros(len(prompts), max(map(len, prompts)), dtype=torch.long, device=device)
    attention = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        place = slice(-len(prompt), None) if left else slice(len(prompt))
        ids[row, place], attention[row, place] = prompt, 1
    return ids, attention
