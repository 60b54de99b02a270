"""``python -m bench train method=NAME``: train or build what a method needs before decoding.

The class named in conf/train/NAME.yaml does the work, in a job of ``bench.train.job``. Nothing here imports torch
before a job or the list of methods needs it.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from bench.config import compose, options
from bench.config.schema import TrainConfig
from bench.config.typecheck import did_you_mean
from bench.errors import OK, UserError

_SUMMARY = """\
Trains or builds what a method needs: heads, exits, a datastore, a search; or a translation model.
Without arguments: what each method needs and how long that takes.

Methods:
{methods}

train pack packs requests and answers that a model wrote (train pack --help); train check FOLDERS writes into the cards
of checkpoints what their drafts and exits do on fixed prompts; train league trains the heads of sweep=league with one
budget (train league --help).
method=NAME is needed otherwise; train.KEY=VALUE are the method's own settings (python -m bench show train/NAME).
model, hardware, tracker, paths and seed are as in python -m bench. The same command resumes an interrupted job."""

_OF_A_RUN = ("model", "hardware", "tracker", "paths", "seed")
_KNOWN = (*options.keys(TrainConfig), compose.TRAIN, *_OF_A_RUN)


def main(argv: Sequence[str] | None = None) -> int:
    """Train one method; returns the exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ["league"]:
        from bench.train import league

        return league.main(given[1:], _train)
    return options.command(_main, help_text, argv, measures=False)


def _main(words: list[str]) -> int:
    if words in ([], ["list"]):
        print(listing())
    elif words[0] == "pack":
        from bench.train import corpora

        return corpora.main(words[1:])
    elif words[0] == "check":
        from bench.train import publish

        return publish.main(words[1:])
    else:
        print(_train(words))
    return OK


def _train(words: list[str]) -> str:
    """One training; where its result is, as text."""
    settings, overrides = split(words)
    from bench.train.job import prepare
    from bench.utils.memory import keep_freed_memory

    keep_freed_memory()
    return prepare(settings, overrides, words)


def help_text() -> str:
    example = f"python -m bench train method={(trainings() or ['NAME'])[0]}"
    examples = (example, f"{example} corpus=dolly,gsm8k corpus_limit=2000 seed=1")
    summary = _SUMMARY.format(methods=textwrap.fill(", ".join(trainings()) or "none", 110))
    return options.help_text("train method=NAME [key=value ...]", summary, examples, {"Options": TrainConfig})


def trainings() -> list[str]:
    """The methods that can be trained."""
    return compose.every_group().get(compose.TRAIN, [])


def listing() -> str:
    """What is made for each method, and how long it takes; imports the classes."""
    rows = [(name, *_describe(name)) for name in trainings()]
    if not rows:
        return "No method has anything to train."
    width = max(len(name) for name, _, _ in rows)
    lines = [f"  {name:{width}}  {part}\n  {'':{width}}  takes {takes}" for name, part, takes in rows]
    return "\n".join(["What can be trained, and how long it takes (python -m bench train method=NAME):", *lines])


def _describe(name: str) -> tuple[str, str]:
    import yaml

    from bench.config.instantiate import locate

    group = yaml.safe_load(compose.config_file(compose.TRAIN, name).read_text(encoding="utf-8"))
    kind: Any = locate(group.get("_target_"))
    return kind.description, kind.duration


def split(words: Sequence[str]) -> tuple[TrainConfig, list[str]]:
    """The settings of a training, and the words that configure method, model and machine.

    Raises:
        UserError: no method, one that cannot be trained, an unknown setting, a value of the wrong type.
    """
    named = [word for word in words if word.startswith("method=")]
    _check_method(named[-1].partition("=")[2] if named else "")
    settings, overrides = options.parse(TrainConfig, words)
    for word in overrides:
        key, equals, _ = word.lstrip("+~").partition("=")
        if word.startswith("-"):
            raise UserError(f"Unknown option '{word}'. A setting is written key=value (python -m bench train --help)")
        if equals and key.split(".")[0] not in (compose.TRAIN, *_OF_A_RUN):
            raise _unknown(word, key)
    return settings, overrides


def _unknown(word: str, key: str) -> UserError:
    if key.split(".")[0] in {*compose.groups(), "max_new_tokens", "batch_size", "max_context"}:
        own = " Settings of the training are train.KEY=VALUE." if key.startswith("method.") else ""
        return UserError(f"'{key}' has no effect on a training.{own} Allowed: {', '.join(_KNOWN)}. Leave it out.")
    return UserError(f"Unknown setting '{key}'.{did_you_mean(key, _KNOWN)} (python -m bench train --help)")


def _check_method(name: str) -> None:
    known = ", ".join(trainings()) or "none"
    if not name:
        raise UserError(f"train needs method=NAME, one of: {known}.")
    if name in trainings():
        return
    methods = compose.groups().get("method", [])
    if name in methods:
        raise UserError(f"Method '{name}' needs no training. Methods that do: {known}.")
    raise UserError(f"Unknown method '{name}'.{did_you_mean(name, [*trainings(), *methods])} Trainable: {known}.")
