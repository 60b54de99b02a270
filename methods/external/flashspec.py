"""FlashSpec (PyPI) with our interface: a peer with its own loop, on the weights of the same Hugging Face model.

Without ``draft_model`` it drafts by prompt lookup alone; with one, by prompt lookup where the context has a match and
by the model elsewhere, which is its default (``composite-g6-f2``). On CUDA its first call compiles and captures graphs
over a static cache of ``cache_length`` tokens, which takes minutes and belongs to the warm-up; ``compile=false`` runs
eagerly. Its authors measured one pair of models on one GPU, and say that it does not pay on CPUs. One row at a time.

Install: ``pip install 'decodebench[peers]'``. Command: ``python -m bench method=flashspec dataset=mtbench``
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Generator, Tensor

from methods.decoder import Decoder, Guarantee, Step
from methods.engine.causal_lm import CausalLM
from methods.engine.sampling import Sampling
from methods.engine.seq2seq_lm import Seq2SeqLM


class FlashSpec(Decoder):
    """FlashSpec's ``SpeculativeEngine``.

    Args:
        target: an engine that kept its Hugging Face model.
        sampling: temperature and top-p are passed on; FlashSpec has no top-k.
        gamma: most tokens drafted in a round where prompt lookup drafts alone.
        max_ngram: longest key of its prompt lookup.
        draft_model: drafts where prompt lookup finds nothing; None: such rounds have no draft.
        compile: its compiled path; ``auto``: on CUDA with Triton.
        cache_length: tokens that the compiled path's static cache holds, prompt included.

    Raises:
        ValueError: it is not installed, the target is an encoder-decoder or released its weights, or top-k is wanted.
    """

    guarantee = Guarantee.EXACT
    family = "external"
    max_batch = 1
    needs_hf = True
    supports_top_k = False
    model_kind = "causal"
    libraries = {"flashspec": "peers"}

    def __init__(
        self,
        target: CausalLM,
        sampling: Sampling,
        gamma: int = 6,
        max_ngram: int = 3,
        draft_model: CausalLM | None = None,
        compile: bool | Literal["auto"] = "auto",
        cache_length: int = 2048,
    ) -> None:
        flashspec, engine = _library()
        if isinstance(target, Seq2SeqLM) or target.hf is None or (draft_model is not None and draft_model.hf is None):
            raise ValueError(
                "flashspec needs causal models that kept their Hugging Face form (keep_hf=True). Choose such a target."
            )
        if sampling.top_k:
            raise ValueError(f"sampling.top_k must be 0 for flashspec, got {sampling.top_k}. Set sampling.top_k=0.")
        self.target, self.sampling = target, sampling
        lookup = engine.NgramDrafter(max_ngram=max_ngram)
        drafters = [lookup] if draft_model is None else [_wrapped(engine.HuggingFaceDrafter, draft_model), lookup]
        if draft_model is not None and not sampling.greedy:
            drafters[0].set_temperature(sampling.temperature)
        self._config: dict[str, Any] = {
            "device": str(target.device),
            "drafter_strategy": "bandit" if draft_model is None else "composite-g6-f2",
            "bandit": flashspec.BanditConfig(n_arms=1),
            "compile": compile,
            "compile_max_cache_len": cache_length,
            "eos_token_ids": target.eos_ids,
        }
        self._flashspec, self._gamma = flashspec, gamma
        self._drafters, self._target = drafters, _wrapped(engine.TargetModel, target)
        self._engine: Any = None

    def decode(self, prompts: list[Int[Tensor, "_"]], limit: int, rng: Generator) -> Iterator[Step]:
        """See ``methods.decoder.Decoder.decode``; stops at end-of-sequence by itself."""
        if len(prompts) != 1:
            raise ValueError(f"batch_size must be 1 for flashspec, got {len(prompts)}. Set batch_size=1.")
        engine = self._built(rng.initial_seed())
        torch.manual_seed(rng.initial_seed())
        began = time.perf_counter_ns()
        with torch.inference_mode():
            result = engine.generate(prompts[0][None].to(self.target.device), max_new_tokens=limit)
        ended = time.perf_counter_ns()
        yield from _steps(result, began, ended)

    def _built(self, seed: int) -> Any:
        if self._engine is None or not self.sampling.greedy:
            s = self.sampling
            drawn = {} if s.greedy else {"top_p": s.top_p or 1.0, "seed": seed % 2**31}
            sampling = self._flashspec.SamplingConfig(gamma=self._gamma, temperature=s.temperature, **drawn)
            config = self._flashspec.FlashSpecConfig(**self._config, sampling=sampling)
            self._engine = self._flashspec.SpeculativeEngine(config, self._drafters, self._target)
        return self._engine


def _library() -> tuple[Any, Any]:
    try:
        import flashspec
        import flashspec.engine
    except ImportError as error:
        raise ValueError(
            f"flashspec, an optional peer, cannot be imported ({error}). Install it: pip install 'decodebench[peers]' "
            "(Python 3.11 or later)."
        ) from error
    return flashspec, flashspec.engine


def _wrapped(kind: Any, model: CausalLM) -> Any:
    return kind(model.name, model.device, model.dtype, model=model.hf)


def _steps(result: Any, began: int, ended: int) -> Iterator[Step]:
    text: list[int] = result.output_ids[0, : result.n_tokens_generated].tolist()
    rounds = list(result.arm_steps)
    now = ended - round(sum(one.seconds for one in rounds) * 1e9)
    place = 0
    first = len(text) - sum(one.emitted for one in rounds)  # what the prefill wrote, if its account leaves that out
    if first > 0:
        yield _step(text[:first], 0, 0, max(began, now))
        place = first
    for one in rounds:
        now += round(one.seconds * 1e9)
        yield _step(text[place : place + one.emitted], one.proposed, min(one.accepted, one.emitted), now)
        place += one.emitted


def _step(tokens: list[int], proposed: int, accepted: int, at_ns: int) -> Step:
    return Step(
        [tokens],
        drafted=[proposed],
        accepted=[accepted],
        layers=[1.0],
        depth=[proposed],
        nodes=1 + proposed,
        draft_passes=0,
        at_ns=at_ns,
    )
