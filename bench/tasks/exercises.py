"""Exercises with an answer that is right or wrong: GSM8K and HumanEval."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from bench.errors import UserError
from bench.scoring import Gsm8kScorer, HumanEvalScorer, Scorer
from bench.tasks.base import ANY, Example, Message, Task
from bench.tasks.sources import Revision, Row, Sources

_CALCULATION = re.compile(r"<<[^<>]*>>")  # notes for a calculator in the answers of GSM8K; no reader wants them


@dataclass(eq=False)
class Gsm8k(Task):
    """GSM8K (Cobbe et al. 2021, arXiv 2110.14168): 1,319 word problems of the test split.

    Attributes:
        n_shot: solved problems of the train split, its first ones, that are shown before each question.
    """

    name = "gsm8k"

    n_shot: int = 0
    _shown: list[Message] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_shot < 0:
            raise UserError(f"dataset.n_shot must be at least 0, got {self.n_shot}.")

    @cached_property
    def judges(self) -> Mapping[str, Scorer]:
        return {ANY: Gsm8kScorer()}

    def read(self, sources: Sources) -> tuple[list[Example], list[Revision]]:
        tables = [sources.get("gsm8k")]
        if self.n_shot:
            tables.append(sources.get("gsm8k_train"))
            self._shown = [message for row in tables[1].rows[: self.n_shot] for message in solved(row)]
        examples = [
            Example(f"gsm8k-{number}", "math_reasoning", (_problem(row),), (row["answer"],))
            for number, row in enumerate(tables[0].rows)
        ]
        return examples, [table.revision for table in tables]

    def messages(self, example: Example, turn: int, history: Sequence[str]) -> list[Message]:
        return [*self._shown, *super().messages(example, turn, history)]


@dataclass(eq=False)
class HumanEval(Task):
    """HumanEval (Chen et al. 2021, arXiv 2107.03374): 164 Python functions to be completed.

    Attributes:
        allow_code_execution: run the answers, without which pass@1 is not measured. They run in a sandbox
            (``bench.scoring.sandbox``); a machine that cannot offer one refuses them.
        style: ``chat`` asks for the function, for instruction-tuned models; ``plain`` gives its beginning, as in
            the paper.
    """

    name = "humaneval"

    allow_code_execution: bool = False
    style: Literal["chat", "plain"] = "chat"

    @cached_property
    def judges(self) -> Mapping[str, Scorer]:
        return {ANY: HumanEvalScorer(self.allow_code_execution)}

    def read(self, sources: Sources) -> tuple[list[Example], list[Revision]]:
        table = sources.get("humaneval")
        return [self._example(row) for row in table.rows], [table.revision]

    def _example(self, row: Row) -> Example:
        chat = f"Complete this Python function. Reply with the whole function.\n\n```python\n{row['prompt']}```"
        reference = {key: row[key] for key in ("prompt", "entry_point", "test")}
        asked = chat if self.style == "chat" else row["prompt"]
        return Example(row["task_id"], "coding", (asked,), (reference,))


def _problem(row: Row) -> str:
    return f"{row['question']}\n\nSolve the problem step by step. Write the final number in a last line as: #### number"


def solved(row: Row) -> list[Message]:
    """A problem of GSM8K and its answer, as they are shown to a model."""
    answer = _CALCULATION.sub("", row["answer"])
    return [{"role": "user", "content": _problem(row)}, {"role": "assistant", "content": answer}]
