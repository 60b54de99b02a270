"""Generate text with a method, without timing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Generator, Tensor
from transformers import PreTrainedModel

from bench.errors import UserError
from bench.measure import draft_costs, manifest, preconditions
from bench.measure.interleave import Settings
from bench.tasks import prompts
from decodebench.target import Target, as_target, configure, decoder
from methods.decoder import Calibrated, CostAware, Decoder, Step, next_step
from methods.decoder import generate as decode

ROWS = 8  # prompts decoded together, where the method can
Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class Generation:
    """What was written for one prompt; ``str()`` is the text.

    Attributes:
        ids: of the text, up to the limit or the first end-of-sequence token, which is included.
        finish: ``eos`` or ``length``.
        steps: rounds of the method; the first reads the prompt.
        target_passes: passes of the target after that.
        tokens_per_step: tokens per such pass; None without one.
        drafted: draft tokens that were judged.
        accepted: those that were kept.
    """

    text: str
    ids: list[int]
    prompt_ids: list[int]
    finish: Literal["eos", "length"]
    steps: int
    target_passes: int
    tokens_per_step: float | None
    drafted: int
    accepted: int

    @property
    def acceptance(self) -> float | None:
        """Accepted / drafted; None if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    def __str__(self) -> str:
        return self.text


def generate(
    target: Target | str | PreTrainedModel,
    prompt: Prompt | Sequence[Prompt] | Tensor,
    method: str = "eagle",
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
    *,
    batch_size: int | None = None,
    **options: Any,
) -> Generation | list[Generation]:
    """Write an answer to a prompt, or to each of several.

    Args:
        target: of ``load``, or a name that is loaded for this call alone.
        prompt: a text, which is put as a user's message where the tokenizer has a chat template; a list of messages; or
            token ids, which are used as they are. A list of these gives a list.
        method: a name of ``methods()``.
        max_new_tokens: most tokens per prompt.
        temperature: 0 is greedy.
        seed: of the draws, which also depend on the prompts that are decoded together.
        batch_size: prompts decoded together; None: up to 8, if the method can.
        options: settings of the method (``python -m bench show method/eagle``); a draft model may be a ``Target``.

    Raises:
        UserError: as the same settings on the command line; or a prompt that is empty or does not fit.
    """
    target = as_target(target)
    words = [f"max_new_tokens={max_new_tokens}", f"sampling.temperature={temperature}", f"seed={seed}"]
    words += [] if batch_size is None else [f"batch_size={batch_size}"]
    cfg, drafts = configure(target, method, options, words)
    preconditions.require(preconditions.check(cfg))
    several, asked = _split(prompt)
    settings = manifest.settings(cfg, target.loaded)
    rows = [_encode(target, each) for each in asked]
    for number, row in enumerate(rows, start=1):
        prompts.fits(str(number), len(row), settings.limit, settings.context, apart=settings.apart)
    made = decoder(target, cfg, drafts)
    if isinstance(made, Calibrated) and made.calibrator is not None:
        raise UserError(f"method={method} with a calibration chooses its threshold in benchmark. Pass threshold=VALUE.")
    size = batch_size or min(ROWS, made.most_rows(cfg.method) or ROWS)
    _hand_over_costs(target, made, min(size, len(rows)), max(map(len, rows)))
    found: list[Generation] = []
    for start in range(0, len(rows), size):
        found += _written(target, made, rows[start : start + size], settings, seed + start)
    return found if several else found[0]


def _hand_over_costs(target: Target, made: Decoder, batch: int, context: int) -> None:
    """Tell a method that sizes its drafts what passes cost here; at its first use, for calls of any size."""
    if draft_costs.wanted(made):
        assert isinstance(made, CostAware), "only those ask"
        curve = draft_costs.passes(target.model, [made], batch, context, repeats=3)
        made.use_costs(draft_costs.measure(target.model, made, curve))


class _Recorded(Decoder):
    """A method whose steps are kept."""

    def __init__(self, inner: Decoder) -> None:
        self.inner, self.guarantee = inner, inner.guarantee
        self.steps: list[Step] = []

    def decode(self, prompts: list[Tensor], limit: int, rng: Generator) -> Iterator[Step]:
        steps, changes = self.inner.decode(prompts, limit, rng), None
        while (step := next_step(steps, changes or {})) is not None:
            self.steps.append(step)
            changes = yield step


def _written(
    target: Target, made: Decoder, rows: Sequence[list[int]], settings: Settings, seed: int
) -> Iterator[Generation]:
    """The answers to prompts that are decoded together."""
    recorded, device = _Recorded(made), target.model.device
    asked = [torch.tensor(row, device=device) for row in rows]
    texts = decode(recorded, asked, settings.limit, settings.eos_ids, Generator(device).manual_seed(seed))
    for row, ids in enumerate(texts):
        steps = _own(recorded.steps, row, len(ids))
        yield _generation(target, rows[row], ids, settings.eos_ids, steps, row)


def _own(steps: Sequence[Step], row: int, length: int) -> list[Step]:
    """The steps up to the one that ended a row's text."""
    written, own = 0, []
    for step in steps:
        own.append(step)
        written += len(step.tokens[row])
        if written >= length:
            break
    return own


def _generation(
    target: Target, prompt: list[int], ids: list[int], eos_ids: Sequence[int], steps: Sequence[Step], row: int
) -> Generation:
    passes = sum(step.target_passes for step in steps[1:])
    later = len(ids) - min(len(ids), len(steps[0].tokens[row]))
    return Generation(
        text=str(target.tokenizer.decode(ids, skip_special_tokens=True)),
        ids=ids,
        prompt_ids=prompt,
        finish="eos" if ids[-1] in eos_ids else "length",
        steps=len(steps),
        target_passes=passes,
        tokens_per_step=later / passes if passes else None,
        drafted=sum(step.drafted[row] for step in steps),
        accepted=sum(step.accepted[row] for step in steps),
    )


def _split(prompt: Any) -> tuple[bool, list[Any]]:
    """Whether there are several prompts, and all of them."""
    plain = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not isinstance(plain, list | tuple) or not plain:
        return False, [plain]
    several = not isinstance(plain[0], int | Mapping)
    return several, list(plain) if several else [list(plain)]


def _encode(target: Target, prompt: Any) -> list[int]:
    """Token ids of a text, of messages, or as they are."""
    plain = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if isinstance(plain, str):
        plain = plain.strip() and [{"role": "user", "content": plain}]
    if not plain or not isinstance(plain, list | tuple):
        raise UserError(
            "A prompt must be a text, a list of messages or a list of token ids, and not empty, got "
            f"{'nothing' if plain is not None and not plain else type(prompt).__name__}."
        )
    if all(isinstance(each, Mapping) and {"role", "content"} <= each.keys() for each in plain):
        return prompts.encode(target.tokenizer, plain)
    if not all(isinstance(each, int) and 0 <= each < target.model.vocab_size for each in plain):
        raise UserError(
            f"Token ids must be whole numbers from 0 to {target.model.vocab_size - 1}, and messages must have a role "
            f"and content, got {plain[:3]!r}. Correct the prompt."
        )
    return list(plain)
