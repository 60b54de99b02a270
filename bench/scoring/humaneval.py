"""HumanEval (Chen et al. 2021, arXiv 2107.03374): pass@1, the share of problems whose tests the answer passes.

One answer per problem is judged, so pass@1 is the plain share (eq. 1 of the paper with n = k = 1). The published
package executes an answer and its tests in one process; ours runs the answer in a sandbox and the tests outside of the
answer's process, and only where the user has allowed it.
"""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bench.scoring import sandbox
from bench.scoring.base import Pair, Scorer, percent

_FENCE = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
_NEXT = re.compile(r"\n(?=\S)")  # a line at the margin ends the body of a function


class HumanEvalScorer(Scorer):
    """Runs the tests of a problem on the code in an answer.

    A reference is a row of the data set: prompt, entry_point, test.

    Args:
        allow_code_execution: without it nothing is run and pass@1 is absent.
        limits: what a program may use.
        workers: programs at a time when many are scored at once.
    """

    metrics = ("pass@1",)

    def __init__(
        self, allow_code_execution: bool = False, limits: sandbox.Limits | None = None, workers: int | None = None
    ) -> None:
        self.allowed, self.limits = allow_code_execution, limits or sandbox.Limits()
        self.workers = workers or os.cpu_count() or 1
        self._passed: dict[tuple[str, str], bool] = {}

    def score(self, reference: Any, answer: str) -> dict[str, float]:
        return {"pass@1": percent(self.passes(reference, answer))} if self.allowed else {}

    def aggregate(self, pairs: Sequence[Pair]) -> dict[str, float | None]:
        if self.allowed:
            with ThreadPoolExecutor(self.workers) as pool:  # threads only wait; the programs are processes
                list(pool.map(lambda pair: self.passes(*pair), pairs))
        return super().aggregate(pairs)

    def passes(self, problem: Mapping[str, str], answer: str) -> bool:
        """Whether the tests pass. A program is run once; the same text later gives the same verdict."""
        solution = build_solution(problem["prompt"], problem["entry_point"], answer)
        key = solution, build_check(problem)
        if key not in self._passed:
            self._passed[key] = sandbox.run(solution, self.limits, key[1]) is None
        return self._passed[key]

    def notes(self) -> dict[str, str]:
        if self.allowed:
            limits = f"{self.limits.cpu_s} s of processor time each"
            return {"pass@1": f"one answer per problem, {limits}, isolated by {sandbox.isolation().name}"}
        return {"pass@1": "not measured: running what a model wrote needs dataset.allow_code_execution=true"}


def build_check(problem: Mapping[str, str]) -> str:
    """The program that fails unless the function ``remote`` gives solves ``problem``; its tests use the prompt too."""
    entry = problem["entry_point"]
    prompt = f"{problem['prompt'].rstrip()}\n    pass\n\n\n{entry} = remote({entry!r})"
    return f"{prompt}\n\n{problem['test']}\n\ncheck({entry})\n"


def build_solution(prompt: str, entry: str, answer: str) -> str:
    """The code in an answer as a module: the whole function if it is there, else the prompt with its continuation.

    What the prompt has before the function, its imports and helpers, stays in front of a whole function.
    """
    code = extract_code(answer, entry)
    if defines(code, entry):
        return _definition(entry).split(prompt, maxsplit=1)[0] + code
    return prompt + _continuation(prompt, code)


def extract_code(answer: str, entry: str) -> str:
    """The fenced block that defines ``entry``, else the first one, else the answer itself.

    A block without its closing fence, as in an answer that was cut, reaches to the end.
    """
    blocks = [match[1] for match in _FENCE.finditer(answer)]
    blocks = [textwrap.dedent(block) if defines(textwrap.dedent(block), entry) else block for block in blocks]
    return next((block for block in blocks if defines(block, entry)), blocks[0] if blocks else answer)


def defines(code: str, entry: str) -> bool:
    """Whether the code has a function of that name at the margin."""
    return _definition(entry).search(code) is not None


def _definition(entry: str) -> re.Pattern[str]:
    return re.compile(rf"^(?:async\s+)?def\s+{re.escape(entry)}\s*\(", re.MULTILINE)


def _continuation(prompt: str, code: str) -> str:
    """The body of the function, up to the first line at the margin, with the indent that a model may have left out."""
    body = code.strip("\n")
    if not body[:1].isspace():
        if _compiles(prompt + (indented := textwrap.indent(body, "    ") + "\n")):
            return indented
        body = "    " + body  # only the first line has lost its indent
    return _NEXT.split(body, maxsplit=1)[0] + "\n"


def _compiles(code: str) -> bool:
    try:
        compile(code, "answer", "exec", dont_inherit=True)  # nothing is run
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
