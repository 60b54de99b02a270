"""What a model wrote itself and the project ships: requests, and its answers to the prompts of the corpora for heads.

``data/corpora/MODEL/requests.jsonl.gz`` and ``answers.npz``; docs/training.md has the counts. Command:

    python -m bench train pack model=smollm2 requests=FILE.jsonl answers=FILE.jsonl
"""

from __future__ import annotations

import gzip
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.config import compose, options
from bench.config.schema import RunConfig, sanitise
from bench.errors import OK, UserError
from bench.models import loading
from bench.models.source import Loaded
from bench.tasks import conversations, corpus, overlap, prompts
from bench.tasks.overlap import Evaluated
from bench.tasks.requests import OWN_FILE
from bench.tasks.sources import Sources, project_data
from bench.utils import files
from methods.training.answer_memo import AnswerMemo, Origin, key_of
from methods.training.answers import HEADS_CORPUS, read_lines
from methods.training.requests import Sieve, distinct

ANSWERS_FILE = "answers.npz"
_OF_A_RUN = ("model", "hardware", "paths")


@dataclass(frozen=True)
class PackConfig:
    """Settings of ``python -m bench train pack``, besides the model.

    Attributes:
        requests: JSON lines with a prompt each; those alike or overlapping with an evaluation set are left out
        answers: JSON lines with the ids of a prompt and of its answer, as a training keeps them in its cache
        limit: most tokens of an answer, as they were decoded
        temperature: at which they were decoded
        corpus: only answers to its prompts are packed
        out: folder of the files; default: where trainings find them
    """

    requests: Path | None = None
    answers: Path | None = None
    limit: int = 256
    temperature: float = 0.0
    corpus: str = HEADS_CORPUS
    out: Path | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Pack requests and answers; returns the exit code."""
    return options.command(_main, _help_text, argv, measures=False)


def _help_text() -> str:
    examples = ("python -m bench train pack model=smollm2 requests=requests.jsonl answers=answers.jsonl",)
    summary = (
        "Packs requests and answers that a model wrote into data/corpora/MODEL, for trainings to read.\n"
        "model, hardware and paths are as in python -m bench."
    )
    return options.help_text("train pack [key=value ...]", summary, examples, {"Options": PackConfig})


def _main(words: list[str]) -> int:
    settings, overrides = options.parse(PackConfig, words)
    options.refuse([word for word in overrides if word.split("=")[0].split(".")[0] not in _OF_A_RUN], "train", _known())
    if settings.requests is None and settings.answers is None:
        raise UserError("Either requests or answers must be named, got neither. Set answers=FILE.jsonl.")
    cfg = compose.compose(overrides)
    loaded = loading.load(cfg.model, asdict(cfg.hardware), cfg.paths)
    folder = settings.out or folder_of(loaded.name)
    sources = Sources(cfg.paths.data, cfg.paths.cache)
    compared = overlap.evaluation(sources)
    if compared.warning:
        print(f"warning: {compared.warning}", file=sys.stderr)
    if settings.requests is not None:
        print(pack_requests(settings.requests, folder / OWN_FILE, compared))
    if settings.answers is not None:
        print(pack_answers(settings, folder / ANSWERS_FILE, loaded, cfg, compared))
    return OK


def _known() -> list[str]:
    return [*options.keys(PackConfig), *_OF_A_RUN]


def folder_of(model: str) -> Path:
    """Where what a model wrote is shipped."""
    return project_data() / "corpora" / sanitise(model)


def memo_of(loaded: Loaded) -> AnswerMemo | None:
    """The answers of a model that are shipped; None: there are none, or they are of other weights.

    Raises:
        UserError: the file is damaged.
    """
    file = folder_of(loaded.name) / ANSWERS_FILE
    if not file.is_file():
        return None
    try:
        memo = AnswerMemo.load(file)
    except ValueError as error:
        raise UserError(str(error)) from error
    theirs = (memo.origin.model, memo.origin.revision, memo.origin.sha256)
    if theirs == (loaded.name, loaded.revision, loaded.sha256):
        return memo
    print(
        f"warning: {file} has answers of revision {memo.origin.revision}, and this is {loaded.revision}: they are "
        "not used",
        file=sys.stderr,
    )
    return None


def pack_requests(source: Path, file: Path, compared: Evaluated) -> str:
    """Write the requests that differ from each other and from evaluation prompts; a line for people.

    Raises:
        UserError: the source cannot be read.
    """
    texts = [each.turns[0] for each in conversations.read_file(source)[0]]
    unlike = distinct(texts, Sieve())
    kept = [text for text in unlike if not compared.overlaps(text)]
    content = "".join(json.dumps({"prompt": text}, ensure_ascii=False) + "\n" for text in kept)
    file.parent.mkdir(parents=True, exist_ok=True)
    files.atomic_write(file, gzip.compress(content.encode(), mtime=0))
    return (
        f"{file}: {len(kept)} requests of {len(texts)}; {len(texts) - len(unlike)} are like an earlier one or too "
        f"short, {len(unlike) - len(kept)} overlap with an evaluation set"
    )


def pack_answers(settings: PackConfig, file: Path, loaded: Loaded, cfg: RunConfig, compared: Evaluated) -> str:
    """Write the answers to prompts of the corpus that do not overlap with an evaluation prompt; a table for people.

    Raises:
        UserError: the source has no such answer, or one longer than the limit.
    """
    assert settings.answers is not None
    if not settings.answers.is_file():
        raise UserError(f"{settings.answers} cannot be read; it must be a file of JSON lines. Name another file.")
    asked = _prompts(settings.corpus, loaded, cfg, compared)
    packed: list[tuple[list[int], list[int]]] = []
    counts: dict[str, Counter[str]] = {name: Counter(prompts=count) for name, count in Counter(asked.values()).items()}
    for prompt, answer in read_lines(settings.answers):
        name = asked.pop(key_of(prompt), None)
        if name is None:
            continue
        counts[name].update(answers=1, tokens=len(answer))
        if compared.overlaps(str(loaded.tokenizer.decode(answer, skip_special_tokens=True))):
            counts[name].update(overlap=1, tokens=-len(answer))
        else:
            packed.append((prompt, answer))
    dtype = str(loaded.lm.dtype).removeprefix("torch.")
    origin = Origin(loaded.name, loaded.revision, loaded.sha256, dtype, settings.limit, settings.temperature)
    try:
        memo = AnswerMemo.pack(origin, packed)
    except ValueError as error:
        raise UserError(f"{settings.answers}: {error}") from error
    memo.save(file)
    size = file.stat().st_size
    lines = [
        f"{name}: {found['prompts']} prompts, {found['answers']} answered, {found['overlap']} of the answers overlap, "
        f"{found['tokens']:,} tokens packed"
        for name, found in counts.items()
    ]
    total = f"{file}: {len(memo)} answers, {memo.tokens:,} tokens, {size:,} bytes, {size / memo.tokens:.2f} per token"
    return "\n".join([*lines, total])


def _prompts(wanted: str, loaded: Loaded, cfg: RunConfig, compared: Evaluated) -> dict[int, str]:
    """The corpus of each prompt, by key; a prompt of two corpora counts for the first."""
    sources = Sources(cfg.paths.data, cfg.paths.cache)
    found: dict[int, str] = {}
    for name in wanted.split(","):
        texts = corpus.read(name, sources=sources, evaluated=compared, unanswered=True)
        print(f"{name}: {sum((texts.left_out or {}).values())} dialogues overlap with an evaluation set")
        for dialogue in texts.dialogues:
            found.setdefault(key_of(prompts.encode(loaded.tokenizer, dialogue.messages)), name)
    return found
