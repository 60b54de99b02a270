"""``python -m bench train league``: train the heads of ``sweep=league`` that are missing, one after the other.

All learn from the same answers of the model, with the same number of processor minutes. A killed command resumes; a
finished head is left as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.config import league, options
from bench.config.typecheck import did_you_mean
from bench.errors import OK, UserError

_OF_A_RUN = ("model", "hardware", "tracker", "paths", "seed")


@dataclass(frozen=True)
class LeagueConfig:
    """Settings of ``python -m bench train league``, besides model and machine.

    Attributes:
        minutes: processor minutes of updates of each head (on a GPU, minutes of the clock); several with commas between
            them make a checkpoint each
        tokens: of the model's answers that all learn from; default: all that come with the project, or 480,000
        corpus: whose prompts the answers are to; default: that of all draft heads
        only: names of heads with commas between them; default: all
        force: train again what is there with other settings
    """

    minutes: str = f"{league.MINUTES:g}"
    tokens: int | None = None
    corpus: str | None = None
    only: str = ""
    force: bool = False


def main(words: Sequence[str], train: Callable[[list[str]], str]) -> int:
    """Train what is missing; returns the exit code.

    Args:
        train: one training, from its words; what it returns is printed.
    """
    return options.command(lambda rest: _main(rest, train), help_text, words, measures=False)


def help_text() -> str:
    summary = (
        f"Trains the heads of sweep={league.LEAGUE} that are missing, one after the other: "
        f"{', '.join(arm.name for arm in _trained())}.\n"
        "The same command resumes. python -m bench league shows what they reach.\n"
        "model, hardware, paths and seed are as in python -m bench; train.KEY=VALUE holds for all heads."
    )
    examples = (
        "python -m bench train league minutes=7",
        "python -m bench train league only=medusa,dflash tokens=100000",
    )
    return options.help_text("train league [key=value ...]", summary, examples, {"Options": LeagueConfig})


def _main(words: list[str], train: Callable[[list[str]], str]) -> int:
    settings, others = options.parse(LeagueConfig, words)
    for word in others:
        if word.lstrip("+~").partition("=")[0].split(".")[0] not in ("train", *_OF_A_RUN):
            raise UserError(
                f"'{word}' has no effect on the league's trainings. Allowed: "
                f"{', '.join((*options.keys(LeagueConfig), 'train', *_OF_A_RUN))}. Leave it out."
            )
    root, chosen = league.folder(others), _chosen(settings.only)
    wanted = [(arm, minutes) for minutes in _budgets(settings.minutes) for arm in chosen]
    for place, (arm, minutes) in enumerate(wanted, start=1):
        print(f"{arm.name}, {minutes:g} minutes, {place} of {len(wanted)}", file=sys.stderr)
        print(train(training(arm, minutes, settings, root, others)), flush=True)
    return OK


def training(arm: league.Arm, minutes: float, settings: LeagueConfig, root: Path, others: Sequence[str]) -> list[str]:
    """The words of the training of one arm."""
    budget = [f"train.recipe.minutes={minutes:g}"]
    budget += [] if settings.tokens is None else [f"train.answers.tokens={settings.tokens}"]
    own = [] if settings.corpus is None else [f"corpus={settings.corpus}"]
    own += ["force=true"] if settings.force else []
    return [*arm.train, *budget, *own, f"out={arm.folder(root, minutes)}", *others]


def _budgets(minutes: str) -> list[float]:
    try:
        return [float(each) for each in minutes.split(",")]
    except ValueError as error:
        raise UserError(f"minutes must be numbers with commas between them, got {minutes}. Set minutes=7.") from error


def _trained() -> list[league.Arm]:
    return [arm for arm in league.arms() if arm.train]


def _chosen(only: str) -> list[league.Arm]:
    known = {arm.name: arm for arm in _trained()}
    names = [name.strip() for name in only.split(",")] if only else list(known)
    for name in names:
        if name not in known:
            raise UserError(f"Unknown head '{name}'.{did_you_mean(name, list(known))} Heads: {', '.join(known)}.")
    return [known[name] for name in names]
