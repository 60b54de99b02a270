"""From the examples of a task to batches of token ids, and the checks that come before anything is measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.errors import UserError


@dataclass(frozen=True, slots=True)
class Batch:
    """Prompts that are decoded together: the same turn of consecutive examples.

    Attributes:
        index: running number over the run; together with the repeat it names a unit of measurement.
        turn: 0-based.
    """

    index: int
    turn: int
    examples: tuple[Any, ...]

    @property
    def prompt_ids(self) -> list[str]:
        """``"81/1"``: the example and its turn, counted from 1."""
        return [prompt_id(example, self.turn) for example in self.examples]


def prompt_id(example: Any, turn: int) -> str:
    """The example's id and the turn, counted from 1."""
    return f"{example.id}/{turn + 1}"


def by_length(examples: Iterable[Any]) -> list[Any]:
    """By the characters of all turns, the shortest first; equal ones in the data set's order."""
    return sorted(examples, key=lambda example: sum(map(len, example.turns)))


def plan(examples: Sequence[Any], batch_size: int) -> list[Batch]:
    """The batches of a run in the order they are measured; a function of the data set alone, so it can be resumed.

    All turns of a group of examples come before the next group, earlier turns first, since a turn needs the
    answers to those before it.
    """
    return _plan([examples[start : start + batch_size] for start in range(0, len(examples), batch_size)])


def plan_queues(examples: Sequence[Any], least: int | None) -> list[Batch]:
    """As ``plan``, in queues of at least ``least`` examples (None: all) whose lengths differ by one at most."""
    count = max(1, len(examples) // (least or len(examples)))
    ends = [len(examples) * i // count for i in range(count + 1)]
    return _plan([examples[start:end] for start, end in zip(ends, ends[1:], strict=False)])


def _plan(groups: Iterable[Sequence[Any]]) -> list[Batch]:
    batches: list[Batch] = []
    for group in groups:
        for turn in range(max(len(example.turns) for example in group)):
            rows = tuple(example for example in group if turn < len(example.turns))
            batches.append(Batch(len(batches), turn, rows))
    return batches


def encode(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Token ids of a conversation that waits for the model's answer.

    With the tokenizer's chat template where it has one, else as plain text.

    Raises:
        UserError: the template refuses the conversation, or cannot be read.
    """
    if not getattr(tokenizer, "chat_template", None):
        return _ids(tokenizer("\n\n".join(message["content"] for message in messages)))
    from jinja2 import TemplateError

    try:
        return _ids(
            tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=True, return_dict=False)
        )
    except TemplateError as error:  # some refuse system messages
        roles = ", ".join(message["role"] for message in messages)
        raise UserError(
            f"The model's chat template refuses a conversation of {roles}: {error}. Change the prompts, or set "
            "model.chat_template."
        ) from error


def followed(tokenizer: Any, prompt: Sequence[int], answer: str) -> list[int]:
    """Token ids of a prompt and of an answer to it, without what a chat template puts behind."""
    return [*prompt, *_ids(tokenizer(answer, add_special_tokens=False))]


def _ids(encoded: Any) -> list[int]:
    ids = encoded["input_ids"] if hasattr(encoded, "keys") else encoded
    ids = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    return list(ids[0]) if ids and isinstance(ids[0], list) else ids


def check(
    task: Any, examples: Iterable[Any], tokenizer: Any, limit: int, context: int, *, apart: bool = False
) -> list[int]:
    """Refuse what cannot be decoded, before anything is measured.

    A later turn holds answers that are not written yet; each is counted with ``limit`` tokens.

    Args:
        task: writes the messages.
        examples: all that will be measured.
        tokenizer: the target's.
        limit: most new tokens per prompt.
        context: most tokens of prompt and answer together.
        apart: of each of the two instead: an encoder-decoder reads the one and writes the other.

    Returns:
        Lengths of all prompts in tokens; of later turns the most they can become.

    Raises:
        UserError: an empty data set, an example without text, or a prompt that does not fit.
    """
    examples = list(examples)
    if not examples:
        raise UserError("The data set holds no example; at least one is needed. Raise dataset.limit or name another.")
    _check_ids(examples)
    lengths = []
    for example in examples:
        for turn in range(len(example.turns)):
            name, longest = prompt_id(example, turn), _longest(task, example, turn, tokenizer, limit)
            fits(name, longest, limit, context, bound=turn > 0, apart=apart)
            lengths.append(longest)
    return lengths


def _longest(task: Any, example: Any, turn: int, tokenizer: Any, limit: int) -> int:
    """The most tokens a prompt can have: earlier answers are not written yet."""
    if example.turns[turn].strip() and (ids := encode(tokenizer, task.messages(example, turn, [""] * turn))):
        return len(ids) + turn * limit
    raise UserError(_empty(prompt_id(example, turn)))


def fits(name: str, length: int, limit: int, context: int, *, bound: bool = False, apart: bool = False) -> None:
    """Raise UserError unless a prompt of ``length`` tokens leaves room for ``limit`` more.

    Args:
        bound: the length is the most it can become, not a count.
        apart: prompt and answer each have the whole context.
    """
    if apart:
        return _fits_apart(name, length, limit, context)
    if length + limit <= context:
        return
    most = "up to " if bound else ""
    cure = f"lower max_new_tokens to {context - length}" if not bound and context > length else "lower max_new_tokens"
    raise UserError(
        f"Prompt {name} has {most}{length:,} tokens; with max_new_tokens={limit:,} the context of {context:,} allows "
        f"{max(0, context - limit):,}. Shorten or drop the prompt, {cure}, or choose a model with a longer context."
    )


def _fits_apart(name: str, length: int, limit: int, context: int) -> None:
    if limit > context:
        raise UserError(
            f"max_new_tokens must be at most {context:,}, the context of this encoder-decoder model, got {limit:,}. "
            f"Set max_new_tokens={context}, or choose a model with a longer context."
        )
    if length > context:
        raise UserError(
            f"Prompt {name} has {length:,} tokens; the encoder of this model has a context of {context:,}. Shorten or "
            "drop the prompt (dataset.max_words, where the data set has it), or choose a model with a longer context."
        )


def _check_ids(examples: Sequence[Any]) -> None:
    seen: set[str] = set()
    for example in examples:
        if not example.turns:
            raise UserError(_empty(str(example.id)))
        if example.id in seen:
            raise UserError(f"The id {example.id} is used twice in the data set; ids must differ. Rename one.")
        seen.add(example.id)


def _empty(name: str) -> str:
    return f"Prompt {name} is empty; a prompt needs at least one token. Remove it from the data set or write its text."
