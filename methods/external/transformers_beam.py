"""Beam search of transformers with our interface: the baseline that translation papers compare with.

Works on causal and on encoder-decoder models. With ``num_beams=1`` it is transformers' greedy search. Of the model's
generation settings only those are kept that decide which tokens may be written (start token, forced first token,
forbidden tokens); penalties on repetition or length and forced ends are left out, so that the search is over the same
distribution that every other method here decodes from.

The text is known only when the search ends. Rounds are reported one token each, as they extended the beams, and the
last one ends when ``generate`` returns: totals are right, times of single tokens are not.

Command: ``python -m bench method=hf_beam model=hf model.name=Helsinki-NLP/opus-mt-en-de dataset=multi30k``
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Int
from torch import Generator, Tensor
from transformers import GenerationConfig, StoppingCriteriaList

from methods.decoder import Guarantee, Step
from methods.engine.causal_lm import CausalLM
from methods.engine.sampling import Sampling
from methods.engine.seq2seq_lm import Seq2SeqLM
from methods.engine.stopwatch import synchronize
from methods.external.transformers_generate import HFGenerate, StepRecorder, padded

_KEPT = ("decoder_start_token_id", "forced_bos_token_id", "bad_words_ids", "suppress_tokens")


class HFBeam(HFGenerate):
    """``model.generate`` with beams.

    Args:
        target: an engine that kept its Hugging Face model.
        sampling: must be greedy.
        num_beams: hypotheses per row.
        length_penalty: exponent of the length that a hypothesis' log-probability is divided by.
        early_stopping: end a row once ``num_beams`` hypotheses have ended, even if a better one might follow.

    Raises:
        ValueError: the engine released the original weights, a temperature, or no beam.
    """

    guarantee = Guarantee.RELAXED
    model_kind = "any"
    greedy_only = True
    speed_only = False

    def __init__(
        self,
        target: CausalLM,
        sampling: Sampling,
        num_beams: int = 5,
        length_penalty: float = 1.0,
        early_stopping: bool = False,
    ) -> None:
        super().__init__(target, sampling)
        if num_beams < 1:
            raise ValueError(f"num_beams must be at least 1, got {num_beams}. Set method.num_beams.")
        if not sampling.greedy:
            raise ValueError(
                f"Beam search must be greedy, got temperature={sampling.temperature}. Set sampling=greedy, or choose "
                "another method."
            )
        self.num_beams, self.length_penalty, self.early_stopping = num_beams, length_penalty, early_stopping
        self._start = len(target.start) if isinstance(target, Seq2SeqLM) else None

    def decode(self, prompts: list[Int[Tensor, "_"]], limit: int, rng: Generator) -> Iterator[Step]:
        """See ``methods.decoder.Decoder.decode``; ends by itself, as transformers does."""
        left = self._start is None  # an encoder counts positions from the left
        ids, attention = padded(prompts, self.target.device, left)
        recorder, start = StepRecorder(), ids.shape[1] if self._start is None else self._start
        options = self._options(limit)
        with torch.inference_mode(), plainly(self.model, options):
            output = self.model.generate(
                ids,
                attention_mask=attention,
                generation_config=options,
                stopping_criteria=StoppingCriteriaList([recorder]),
            )
        synchronize(ids.device)
        yield from self._rounds(output[:, start:].tolist(), recorder, time.perf_counter_ns())

    def _options(self, limit: int) -> GenerationConfig:
        """Of the model's own settings only those are kept that decide which tokens may be written."""
        model: Any = self.target.hf
        kept = {name: getattr(model.generation_config, name, None) for name in _KEPT}
        beams = {"length_penalty": self.length_penalty, "early_stopping": self.early_stopping}
        eos = list(self.target.eos_ids) or None
        return GenerationConfig(
            max_new_tokens=limit + (self._start or 1) - 1,  # transformers counts a forced first token
            do_sample=False,
            num_beams=self.num_beams,
            eos_token_id=eos,
            pad_token_id=(eos or [0])[0],
            **(beams if self.num_beams > 1 else {}),
            **{name: value for name, value in kept.items() if value is not None},
        )

    def _rounds(self, rows: list[list[int]], recorder: StepRecorder, end_ns: int) -> Iterator[Step]:
        count = len(rows[0])
        times: list[Any] = [*recorder.times[: count - 1], end_ns]
        for place, at_ns in enumerate(times):
            yield Step.undrafted(
                [[row[place]] for row in rows],
                nodes=self.num_beams,
                target_passes=1 if place < count - 1 else max(1, len(recorder.times) - place),
                at_ns=at_ns,
            )


@contextmanager
def plainly(model: Any, options: GenerationConfig) -> Iterator[None]:
    """Without the model's own settings, from which transformers would fill what ``options`` leaves open."""
    own = model.generation_config
    model.generation_config = options
    try:
        yield
    finally:
        model.generation_config = own
