"""Which sub-layers a self-speculative draft leaves out: Bayesian optimisation over 2L binary variables.

Zhang et al. 2023, arXiv 2309.08168, sec. 3.3. The paper maximises measured tokens per second over variables in (0, 1)
that are rounded, by a Gaussian process, in 1000 iterations that take hours of a GPU. Here the default objective is the
prediction of ``skip_objective.py``: costs measured once, and the acceptance of a set on calibration prompts. It takes
one pass per set instead of decoding, has no timing noise, and is reproducible: with the same costs and seed a search
finds the same set, also after an interruption. Drafting nothing has speed-up 1 by definition; the best set is written
even if its speed-up is lower.

The best of hundreds of sets on some prompts owes part of its score to those prompts. So there are three groups of
prompts: one for the search, one to compare the finalists (the best sets, and the best of the warm start), and one for
the facts of the card, ``pays`` included.

Differences from the paper: binary variables (``relaxation=continuous`` has the paper's); a warm start by uniform sets,
early exits, every sub-layer alone, and the best of these joined; draft length and threshold are chosen with each set.
``objective=measured`` decodes instead: seconds per set, and a clock that is never quite the same.

Command: ``python -m bench train method=self_speculative model=smollm2``
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from methods.engine.causal_lm import CausalLM
from methods.speculative.self_speculative.decoder import SkipSet, exit_set
from methods.speculative.self_speculative.skip_objective import (
    Calibration,
    Costs,
    Trial,
    best_prediction,
    measured_speedup,
    predict,
)
from methods.training.answers import append, read_lines
from methods.training.interface import Example, Trainable, TrainingContext, require

_COSTS, _TRIALS, _PICTURE = "training_log/costs.json", "training_log/trials.jsonl", "training_log/search.png"
_MEASURED_PROMPTS, _MEASURED_TOKENS = 4, 48
_FINALISTS = 10


def uniform_sets(layers: int) -> list[SkipSet]:
    """Every k-th attention, feed-forward or whole layer, counted from the middle of the first k; three early exits."""
    found = []
    for step in (2, 3, 4, 6, 8, 12):
        spaced = tuple(range(step // 2, layers, step))
        found += [SkipSet(layers, spaced, ()), SkipSet(layers, (), spaced), SkipSet(layers, spaced, spaced)]
    exits = (exit_set(layers, layers - max(1, layers // share)) for share in (2, 4, 8))
    return [skips for skips in dict.fromkeys((*found, *exits)) if skips.size]


def single_sets(layers: int) -> list[SkipSet]:
    """Each sub-layer alone."""
    return [SkipSet(layers, (i,), ()) for i in range(layers)] + [SkipSet(layers, (), (i,)) for i in range(layers)]


def joined_sets(trials: Sequence[Trial], layers: int) -> list[SkipSet]:
    """The best 2, 3, 4, 6, .. of the sub-layers that were tried alone, together."""
    singles = {trial.key: trial for trial in trials if trial.skips.size == 1}  # a uniform set may be one of them
    alone = sorted(singles.values(), key=lambda trial: -trial.speedup)
    found = []
    for count in (2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40):
        if count <= len(alone):
            best = [trial.skips for trial in alone[:count]]
            found.append(
                SkipSet(
                    layers,
                    tuple(sorted(i for s in best for i in s.attention)),
                    tuple(sorted(i for s in best for i in s.mlp)),
                )
            )
    return found


def random_set(like: SkipSet, rng: random.Random) -> SkipSet:
    """As many attention and feed-forward sub-layers as ``like`` has, anywhere."""
    attention, mlp = (
        tuple(sorted(rng.sample(range(like.layers), len(chosen)))) for chosen in (like.attention, like.mlp)
    )
    return replace(like, attention=attention, mlp=mlp)


# ------------------------------------------------------------------------------------------------------- the search


@dataclass
class SkipSearch(Trainable):
    """Bayesian search for a skip set.

    Args:
        trials: sets tried after the warm start (uniform sets, early exits, every sub-layer alone, joined ones).
        prompts: per group, drawn from the corpus: one to search, one to choose a finalist, one held out for the facts.
        new_tokens: tokens that each is continued by; a multiple of ``gamma``.
        gamma: longest draft considered.
        context: longest prompt that is drawn, in tokens.
        objective: predicted by cost table and replayed acceptance, or measured by decoding four of the prompts.
        relaxation: variables that are yes or no, or the paper's in (0, 1) with yes above one half.
        random_sets: sets of the found one's size that it is compared with.

    Raises:
        ValueError: an option out of range.
    """

    description = "a set of sub-layers that the draft leaves out (skip_set.json), with its search"
    duration = "seconds per set tried; some ten minutes for 30 small layers on two CPU cores"

    trials: int = 120
    prompts: int = 32
    new_tokens: int = 64
    gamma: int = 8
    context: int = 256
    objective: Literal["predicted", "measured"] = "predicted"
    relaxation: Literal["none", "continuous"] = "none"
    random_sets: int = 20

    def __post_init__(self) -> None:
        require("at least 0", trials=self.trials)
        require(
            "at least 1", prompts=self.prompts, gamma=self.gamma, random_sets=self.random_sets, context=self.context
        )
        if self.new_tokens < self.gamma or self.new_tokens % self.gamma:
            raise ValueError(
                f"new_tokens must be a multiple of gamma, {self.gamma}, got {self.new_tokens}. Set train.new_tokens."
            )

    def fit(self, context: TrainingContext) -> dict[str, Any]:
        """See ``Trainable``: writes the set, the costs, the trials and a picture of them."""
        target, folder = context.target, context.output
        (folder / "training_log").mkdir(exist_ok=True)
        context.report_progress("calibration", 0, 1)
        drawn = self._draw(context)
        blocks = self.new_tokens // self.gamma
        groups = [drawn[place::3] for place in range(3)]
        calibration = Calibration.make(target, groups[0], blocks, self.gamma)
        costs = Costs.load(folder / _COSTS)
        if costs is None:
            costs = Costs.measure(target, calibration.prompts[0], self.gamma)
            costs.save(folder / _COSTS)
        context.report_progress("calibration", 1, 1)
        trials = self._search(context, calibration, costs)
        best = _choose(target, finalists(trials), Calibration.make(target, groups[1], blocks, self.gamma), costs)
        best.best_set.save(folder)
        draw_history(trials, folder / _PICTURE)
        held_out = self._compare(context, trials, best, Calibration.make(target, groups[2], blocks, self.gamma), costs)
        return {**self._facts(trials, best, costs), "pays": held_out["speedup_measured"] > 1.0, "held_out": held_out}

    def _draw(self, context: TrainingContext) -> list[Int[Tensor, "_"]]:
        """Three groups of prompts of at most ``context`` tokens, in an order given by the seed."""
        order = list(range(len(context.examples)))
        random.Random(context.seed).shuffle(order)
        found: list[Example] = []
        for place in order:
            example = context.examples[place]
            if 1 <= len(example.prompt) <= self.context:
                found.append(example)
            if len(found) == 3 * self.prompts:
                return [torch.tensor(example.prompt, device=context.target.device) for example in found]
        raise ValueError(
            f"The corpus must have {3 * self.prompts} prompts of at most {self.context} tokens, three groups of "
            f"train.prompts, got {len(found)}. Name a larger corpus, or set train.prompts or train.context."
        )

    def _search(self, context: TrainingContext, calibration: Calibration, costs: Costs) -> list[Trial]:
        layers = context.target.n_layers
        warm = list(dict.fromkeys([*uniform_sets(layers), *single_sets(layers)]))
        joined = len(joined_sets([_untried(skips) for skips in warm], layers))
        total = len(warm) + joined + self.trials
        history = History(context.output / _TRIALS, layers)
        context.report_progress("search", len(history.trials), total)
        while (number := len(history.trials)) < total:
            if number < len(warm):
                skips = warm[number]
            elif number < len(warm) + joined:
                skips = joined_sets(history.trials[: len(warm)], layers)[number - len(warm)]
            else:
                skips = self._suggest(history.trials, layers, f"{context.seed}-{number}")
            history.add(self._try(context.target, calibration, costs, skips))
            best = max(trial.speedup for trial in history.trials)
            context.log({"step": number, "speedup": history.trials[-1].speedup, "best": best})
            context.report_progress("search", number + 1, total)
        return history.trials

    def _try(self, target: CausalLM, calibration: Calibration, costs: Costs, skips: SkipSet) -> Trial:
        rounds = calibration.replay(target.skip(skips.attention, skips.mlp))
        trial = best_prediction(rounds, costs, skips)
        if self.objective == "predicted":
            return trial
        prompts = calibration.prompts[:_MEASURED_PROMPTS]
        return replace(trial, speedup=measured_speedup(target, trial.best_set, prompts, _MEASURED_TOKENS))

    def _suggest(self, trials: Sequence[Trial], layers: int, seed: str) -> SkipSet:
        """A set that was not tried, by a Gaussian process over all trials.

        Sampler and study are rebuilt from history and seed, so that an interrupted search resumes without a difference.
        """
        optuna = _optuna()
        rng = random.Random(seed)
        kinds = optuna.distributions
        kind = kinds.IntDistribution(0, 1) if self.relaxation == "none" else kinds.FloatDistribution(0.0, 1.0)
        space = {f"{part}{i}": kind for part in ("attention", "mlp") for i in range(layers)}
        sampler = _sampler(optuna, rng.getrandbits(31), noisy=self.objective == "measured")
        study = optuna.create_study(direction="maximize", sampler=sampler)
        for trial in trials:
            values = {name: self._value(name, trial.skips) for name in space}
            study.add_trial(optuna.trial.create_trial(params=values, distributions=space, value=trial.speedup))
        asked = study.ask(space).params
        chosen = {name for name, value in asked.items() if value > 0.5}
        return _new_set(chosen, list(space), {trial.key for trial in trials}, layers, rng)

    def _value(self, name: str, skips: SkipSet) -> int | float:
        """A variable's value for a set; in the relaxation the middle of its half."""
        skipped = name in _names(skips)
        return int(skipped) if self.relaxation == "none" else (0.75 if skipped else 0.25)

    def _facts(self, trials: Sequence[Trial], best: Trial, costs: Costs) -> dict[str, Any]:
        return {
            "objective": self.objective,
            "speedup_in_search": best.speedup,
            "skipped_attention": len(best.skips.attention),
            "skipped_mlp": len(best.skips.mlp),
            "gamma": best.gamma,
            "confidence": best.confidence,
            "tokens_per_round": best.tokens_per_round,
            "acceptance": best.rate,
            "draft_over_round": costs.draft_s(best.skips) / costs.full[0],
            "sets_tried": len(trials),
            "found_at": trials.index(best),
        }

    def _compare(
        self, context: TrainingContext, trials: Sequence[Trial], best: Trial, held_out: Calibration, costs: Costs
    ) -> dict[str, Any]:
        """Prompts that nothing was chosen on: the winner, the best uniform set of the search, random ones of its size.

        The first two draft with the length and threshold chosen before; random sets with what suits them best here,
        which can only favour them.
        """
        target, rng = context.target, random.Random(context.seed)
        uniform = max(trials[: len(uniform_sets(target.n_layers))], key=lambda trial: trial.speedup)
        others = []
        for number in range(self.random_sets):
            skips = random_set(best.skips, rng)
            rounds = held_out.replay(target.skip(skips.attention, skips.mlp))
            others.append(best_prediction(rounds, costs, skips).speedup)
            context.report_progress("comparison", number + 1, self.random_sets)
        return {
            "speedup": _again(target, best, held_out, costs).speedup,
            "speedup_measured": measured_speedup(
                target, best.best_set, held_out.prompts[:_MEASURED_PROMPTS], self.new_tokens
            ),
            "uniform": _again(target, uniform, held_out, costs).speedup,
            "random_mean": mean(others),
            "random_best": max(others),
        }


def finalists(trials: Sequence[Trial]) -> list[Trial]:
    """The best sets of a search, and the best ones of up to two sub-layers, which chance has favoured least."""
    ranked = sorted({trial.key: trial for trial in trials}.values(), key=lambda trial: -trial.speedup)
    small = [trial for trial in ranked if trial.skips.size <= 2]
    return list({trial.key: trial for trial in (*ranked[:_FINALISTS], *small[:_FINALISTS])}.values())


def _choose(target: CausalLM, trials: Sequence[Trial], calibration: Calibration, costs: Costs) -> Trial:
    return max(trials, key=lambda trial: _again(target, trial, calibration, costs).speedup)


def _again(target: CausalLM, trial: Trial, calibration: Calibration, costs: Costs) -> Trial:
    rounds = calibration.replay(target.skip(trial.skips.attention, trial.skips.mlp))
    return predict(rounds, costs, trial.skips, trial.gamma, trial.confidence)


class History:
    """The trials of a search, in a file that stays readable when the process is killed."""

    def __init__(self, file: Path, layers: int) -> None:
        self._file, self._layers = file, layers
        self.trials = [self._trial(**stored) for stored in read_lines(file)]

    def add(self, trial: Trial) -> None:
        """Append, in memory and in the file."""
        content = asdict(trial)
        skips = content.pop("skips")
        append(self._file, [{"attention": skips["attention"], "mlp": skips["mlp"], **content}], keep=len(self.trials))
        self.trials.append(trial)

    def _trial(self, attention: list[int], mlp: list[int], **found: Any) -> Trial:
        return Trial(SkipSet(self._layers, tuple(attention), tuple(mlp)), **found)


def draw_history(trials: Sequence[Trial], file: Path) -> None:
    """The speed-up of every set tried, and of the best so far."""
    import seaborn
    from matplotlib.figure import Figure

    values = [trial.speedup for trial in trials]
    best = [max(values[: place + 1]) for place in range(len(values))]
    figure = Figure(figsize=(6.0, 3.5), layout="constrained")
    axes = figure.subplots()
    seaborn.scatterplot(x=range(len(values)), y=values, ax=axes, s=14, color="0.6", label="set tried")
    seaborn.lineplot(x=range(len(best)), y=best, ax=axes, drawstyle="steps-post", label="best so far")
    axes.axhline(1.0, color="black", linewidth=0.8, linestyle=":", label="autoregression")
    axes.set(xlabel="set", ylabel="speed-up, greedy, one row")
    axes.legend()
    figure.savefig(file, dpi=120, metadata={"Software": None})


def _untried(skips: SkipSet) -> Trial:
    return Trial(skips, 0.0, 1, 0.0, 1.0, 0.0)


def _names(skips: SkipSet) -> set[str]:
    return {f"attention{i}" for i in skips.attention} | {f"mlp{i}" for i in skips.mlp}


def _new_set(
    chosen: set[str], names: Sequence[str], tried: Collection[object], layers: int, rng: random.Random
) -> SkipSet:
    """The chosen set; if it was tried before or is empty, variables are flipped until it is new."""
    while True:
        skips = SkipSet(
            layers,
            tuple(i for i in range(layers) if f"attention{i}" in chosen),
            tuple(i for i in range(layers) if f"mlp{i}" in chosen),
        )
        if skips.size and (skips.attention, skips.mlp) not in tried or len(tried) >= 2 ** len(names) - 1:
            return skips
        chosen = chosen ^ {rng.choice(names)}


def _sampler(optuna: Any, seed: int, noisy: bool) -> Any:
    with warnings.catch_warnings():  # a warning at every set that this argument may change some day
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.samplers.GPSampler(seed=seed, n_startup_trials=0, deterministic_objective=not noisy)


def _optuna() -> Any:
    try:
        import optuna
    except ModuleNotFoundError:
        raise ValueError(
            "The search needs optuna, which is not installed here. Install it: pip install optuna."
        ) from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna
