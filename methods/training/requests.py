"""Requests that the target writes itself: prompts like those it was trained on, when there are none at hand.

A model that was tuned to answer continues the header of a user's turn with a request (Magpie: Xu et al. 2024, arXiv
2406.08464, sec. 2.1, step 1). A sampled opening for some of them makes the kinds of requests more even. What is not
finished, too short, or too much like an earlier one is dropped.

Differences: Magpie samples from the bare header alone and filters by scores of another model (sec. 2.2); here openings
are given, and the filters are plain rules. Answers are not part of it (``methods.training.answers``).

Command: ``python -m bench train method=own_requests model=smollm2``
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from methods.engine.generation import answer
from methods.engine.sampling import Sampling
from methods.training.answers import append, read_lines
from methods.training.interface import Trainable, TrainingContext, require
from methods.training.ngrams import ngrams, words

__all__ = ["OPENINGS", "OwnRequests", "Sieve"]

OPENINGS = (
    "Write a Python function that",
    "Write a Python program to",
    "Write a JavaScript function",
    "Explain what this code does:\n",
    "How do I write a SQL query",
    "Write code in C++",
    "Summarize the following",
    "Rewrite the following",
    "Extract",
    "Classify",
    "Give me a list of",
    "Write a short story about",
    "Write a poem about",
    "Write an email to",
    "Write a blog post about",
    "Compose",
    "Pretend you are",
    "Imagine you are",
    "Act as",
    "What is the difference between",
    "Explain",
    "Why",
    "How",
    "Who",
    "Describe",
    "Compare",
    "Design",
    "Solve",
    "Calculate",
    "If a",
    "A train",
    "Suppose",
    "Given the following",
    "Translate",
    "Prove that",
    "Create a",
    "Plan",
    "Analyze",
    "Suggest",
    "Draft",
    "Develop",
    "Provide",
    "Can you",
    "Is it",
    "Edit the following paragraph",
    "Evaluate",
)
_RUN = 8  # words that two requests have in common
_FOREIGN = 0x2FFF  # from here on: scripts that the tokenizer of a model for English breaks
_MARK = "@@"
_EMPTY = 20  # batches in a row without a request after which no more can be expected
FILE, _DRAWN = "requests.jsonl", "drawn.jsonl"


class Sieve:
    """Lets those requests pass that are long enough, in a common script, and unlike all before them.

    Args:
        shortest: fewest words.
        alike: share of the word 8-grams of a request that earlier ones may have, all together.
    """

    def __init__(self, shortest: int = 5, alike: float = 0.5) -> None:
        self.shortest, self.alike = shortest, alike
        self._texts: set[str] = set()
        self._runs: set[str] = set()

    def passes(self, request: str) -> bool:
        """Whether it is kept; later ones are compared with it then."""
        said = words(request)
        text, runs = " ".join(said), ngrams(request, _RUN)
        strange = any(ord(character) > _FOREIGN or character == "\ufffd" for character in request)
        if strange or len(request.split()) < self.shortest or not said or text in self._texts:
            return False
        if runs and len(runs & self._runs) > self.alike * len(runs):
            return False
        self._texts.add(text)
        self._runs |= runs
        return True


@dataclass
class OwnRequests(Trainable):
    """Lets the target write requests.

    Args:
        count: requests wanted.
        openings: share of requests that begin with one of ``OPENINGS``; the others begin with nothing.
        temperature: of sampling.
        top_p: likewise.
        limit: most tokens of a request; one that is longer is dropped.
        shortest: fewest words of a request.
        alike: share of the word 8-grams of a request that earlier ones may have.
        batch: rows decoded together.

    Raises:
        ValueError: a number out of range.
    """

    makes = "corpus"
    learns_from = "nothing"
    description = "requests that the target writes itself, as a corpus without answers"
    duration = "an hour for 9,000 on a CPU core for smollm2; a minute on a GPU"

    count: int = 9000
    openings: float = 0.885
    temperature: float = 1.0
    top_p: float = 0.95
    limit: int = 96
    shortest: int = 5
    alike: float = 0.5
    batch: int = 192

    def __post_init__(self) -> None:
        require("at least 1", count=self.count, limit=self.limit, shortest=self.shortest, batch=self.batch)
        require("above 0", temperature=self.temperature)
        require("above 0 and at most 1", top_p=self.top_p)
        require("from 0 to 1", openings=self.openings, alike=self.alike)

    def fit(self, context: TrainingContext) -> dict[str, Any]:
        """See ``Trainable``. Each batch depends on its number alone; a killed run resumes after the last whole one."""
        header = user_header(context.tokenizer)
        log = context.output / "training_log"
        log.mkdir(exist_ok=True)
        drawn: list[dict[str, Any]] = read_lines(log / _DRAWN)
        number = drawn[-1]["batch"] if drawn else 0  # the last one may be incomplete
        drawn = [line for line in drawn if line["batch"] < number]
        sieve, idle = Sieve(self.shortest, self.alike), 0
        for line in drawn:
            sieve.passes(line["prompt"])
        while len(drawn) < self.count:
            context.report_progress("requests", len(drawn), self.count)
            new = [text for text in self._draw(context, header, number) if sieve.passes(text)]
            lines = [{"batch": number, "prompt": text} for text in new]
            append(log / _DRAWN, lines, keep=len(drawn))
            drawn, number, idle = [*drawn, *lines], number + 1, 0 if new else idle + 1
            if idle == _EMPTY:
                raise ValueError(
                    f"The model must write requests, got none in the last {idle * self.batch} texts and {len(drawn)} "
                    "in all. Set train.limit higher, train.shortest lower, or train.count to what there is."
                )
        context.report_progress("requests", self.count, self.count)
        requests = [line["prompt"] for line in drawn[: self.count]]
        write_requests(context.output / FILE, requests)
        return {"requests": len(requests), "batches": number, "words": sum(len(words(text)) for text in requests)}

    def _draw(self, context: TrainingContext, header: str, number: int) -> list[str]:
        """The finished requests of a batch."""
        target, tokenizer = context.target, context.tokenizer
        lots = random.Random(f"{context.seed}/{number}")
        openings = [lots.choice(OPENINGS) if lots.random() < self.openings else "" for _ in range(self.batch)]
        begun = [tokenizer(header + opening, add_special_tokens=False)["input_ids"] for opening in openings]
        prompts = [torch.tensor(ids, device=target.device) for ids in begun]
        rng = torch.Generator(target.device).manual_seed(context.seed * 1_000_003 + number)
        texts = answer(target, prompts, self.limit, Sampling(self.temperature, top_p=self.top_p), rng)
        return [
            (opening + tokenizer.decode(text, skip_special_tokens=True)).strip()
            for opening, text in zip(openings, texts, strict=True)
            if text[-1] in target.eos_ids
        ]


def user_header(tokenizer: Any) -> str:
    """What the chat template writes before a user's first request, a default system message included.

    Raises:
        ValueError: there is no chat template.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "A model that writes requests must have a chat template, got a tokenizer without one. Name a model that "
            "was tuned for chat."
        )
    written = tokenizer.apply_chat_template([{"role": "user", "content": _MARK}], tokenize=False)
    return str(written).partition(_MARK)[0]


def write_requests(file: Path, requests: Sequence[str]) -> None:
    """As JSON lines, a corpus without answers."""
    file.write_text("".join(_line(text) for text in requests), encoding="utf-8")


def distinct(requests: Iterable[str], sieve: Sieve) -> list[str]:
    """Those that pass the sieve, in their order."""
    return [text for text in requests if sieve.passes(text)]


def _line(text: str) -> str:
    return json.dumps({"prompt": text}, ensure_ascii=False) + "\n"
