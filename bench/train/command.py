"""``python -m bench.train method=NAME``: the one entry for whatever must be prepared before decoding.

The class behind conf/train/NAME.yaml does the work, ``bench.train.job`` is what surrounds it, and here is the command
line. Nothing here imports torch before a preparation or the listing needs it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from bench import errors
from bench.config import compose
from bench.config.schema import DEFAULT_CORPUS, TrainConfig
from bench.config.typecheck import check_arguments, did_you_mean
from bench.errors import INTERRUPTED, OK, RunFailed, UserError, report_failure

_HELP = """\
Prepare what a method needs before it can decode: a datastore, a search, trained heads; or a translation model.

Try:
  python -m bench.train                                        what can be prepared, and how long it takes
  python -m bench.train method={example}
  python -m bench.train method={example} corpus=dolly,gsm8k corpus_limit=2000 seed=1
  python -m bench.train method=teacher corpus=multi30k

Methods: {methods}

Settings:
  method=NAME            what to prepare; its own settings are train.KEY=VALUE (python -m bench show train/NAME)
  corpus={corpus}     dolly, dolly_15k, gsm8k (its train split), multi30k and FILE.jsonl or FILE.jsonl.gz, with commas
                         between; NAME:COUNT takes so many of one. Unless set: what the method declares
  corpus_limit=N         most dialogues, drawn by the seed
  out=FOLDER             where the part goes; else where the method finds it by itself
  force=true             make a finished part anew, or in place of one with other settings
  publish=int8           store the weights in 8, 6, 5 or 4 bits; the card shows the quality before and after
  without=NAME           with publish, leave out tensors whose names begin so
  and model, hardware, tracker, paths and seed as in python -m bench

An interrupted preparation goes on with the same command. Exit codes: 0 fine, 1 failed, 2 bad input, 130 interrupted."""

_OF_A_RUN = ("model", "hardware", "tracker", "paths", "seed")  # of a run's configuration, what a preparation needs
_OWN = tuple(setting.name for setting in fields(TrainConfig))
_TEXTS = ("method", "corpus", "out", "publish", "without")
_KEPT = "What is prepared so far is kept; the same command goes on"


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare one method; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if "-h" in words or "--help" in words:
            return _show(help_text())
        if words in ([], ["list"]):
            return _show(listing())
        settings, overrides = split(words)
        from bench.train.job import prepare

        return _show(prepare(settings, overrides, words))
    except KeyboardInterrupt:
        print(f"Interrupted. {_KEPT}.", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        return report_failure(_in_words(error))


def _show(text: str) -> int:
    print(text)
    return OK


def _in_words(error: Exception) -> Exception:
    """What the machine refused, with what that means for a preparation."""
    if isinstance(error, RunFailed) or (found := errors.explain(error)) is None:
        return error
    what = str(found).partition(errors.kept_prompts(None))[0].strip()
    failed = RunFailed(f"{what} {_KEPT}.")
    failed.__cause__ = error
    return failed


# -------------------------------------------------------------------------------------------------- the command line


def help_text() -> str:
    """What ``--help`` prints."""
    methods = trainings()
    return _HELP.format(example=(methods or ["NAME"])[0], methods=", ".join(methods) or "none", corpus=DEFAULT_CORPUS)


def trainings() -> list[str]:
    """The methods that have something to prepare."""
    return compose.every_group().get(compose.TRAIN, [])


def listing() -> str:
    """What each method prepares, and how long it takes; imports the classes."""
    rows = [(name, *_describe(name)) for name in trainings()]
    if not rows:
        return "No method has anything to prepare."
    width = max(len(name) for name, _, _ in rows)
    lines = [f"  {name:{width}}  {part}\n  {'':{width}}  takes {takes}" for name, part, takes in rows]
    return "\n".join(["What can be prepared, and how long it takes (python -m bench.train method=NAME):", *lines])


def _describe(name: str) -> tuple[str, str]:
    import yaml

    from bench.config.instantiate import locate

    group = yaml.safe_load(compose.config_file(compose.TRAIN, name).read_text(encoding="utf-8"))
    kind: Any = locate(group.get("_target_"))
    return kind.prepares, kind.takes


def split(words: Sequence[str]) -> tuple[TrainConfig, list[str]]:
    """The settings of a preparation, and the rest, which configures model and machine.

    Raises:
        UserError: no method, one that has nothing to prepare, an unknown setting, a value of the wrong type.
    """
    settings: dict[str, Any] = {}
    overrides = []
    for word in words:
        key, equals, value = word.partition("=")
        if equals and key in _OWN:
            settings[key] = value if key in _TEXTS else _read(key, value)
        elif _belongs(key.lstrip("+~")) or not (equals or word.startswith("-")):
            overrides.append(word)  # a word that is no setting at all is refused where all the others are read
        else:
            raise _unknown(word, key)
    if not settings.get("method"):
        raise UserError(f"No method is named. Name one: method=NAME. These have something to prepare: {_names()}.")
    _check_method(settings["method"])
    return TrainConfig(**check_arguments(TrainConfig, settings)), overrides


def _belongs(key: str) -> bool:
    return key.split(".")[0] in (compose.TRAIN, *_OF_A_RUN)


def _read(key: str, value: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(value)
    except yaml.YAMLError:
        raise UserError(f"{key} came as '{value}'; it cannot be read. Set {key}=VALUE.") from None


def _unknown(word: str, key: str) -> UserError:
    if word.startswith("-"):
        return UserError(f"Unknown option '{word}'. A setting is written key=value (python -m bench.train --help)")
    known = (*_OWN, compose.TRAIN, *_OF_A_RUN)
    of_a_run = {*compose.groups(), "max_new_tokens", "batch_size", "max_context"}
    if key.split(".")[0] in of_a_run:
        train = " Settings of a preparation are train.KEY=VALUE." if key.startswith("method.") else ""
        return UserError(f"'{key}' does not matter to a preparation.{train} Allowed: {', '.join(known)}. Leave it out.")
    return UserError(f"Unknown setting '{key}'.{did_you_mean(key, known)} (python -m bench.train --help)")


def _check_method(name: str) -> None:
    if name in trainings():
        return
    if name in compose.groups().get("method", []):
        raise UserError(f"Method '{name}' has nothing to prepare. These have: {_names()}.")
    hint = did_you_mean(name, [*trainings(), *compose.groups().get("method", [])])
    raise UserError(f"Unknown method '{name}'.{hint} These have something to prepare: {_names()}.")


def _names() -> str:
    return ", ".join(trainings()) or "none"


if __name__ == "__main__":
    from bench.utils.memory import keep_freed_memory

    keep_freed_memory()
    sys.exit(main())
