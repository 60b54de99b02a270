"""``python -m bench.lossless experiment=greedy|sampling|joint method=... model=... draws=...``"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from dataclasses import fields
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.config import compose
from bench.config.schema import RunConfig
from bench.config.typecheck import did_you_mean
from bench.errors import INVALID, OK, UserError, report_failure

if TYPE_CHECKING:
    from bench.lossless.experiments import Lab

_HELP = """\
Does speculative sampling cost accuracy? Repeat the experiments on any exact method and model.

Try:
  python -m bench.lossless experiment=greedy method=prompt_lookup
  python -m bench.lossless experiment=sampling method=speculative_sampling draws=100000
  python -m bench.lossless experiment=joint method=speculative_sampling draws=1000 batch_size=64

Experiments:
  greedy     the same prompts by the target alone and by the method at temperature 0, token for token
  sampling   the first token of four prompts, drawn by every verification rule that fits; wrong rules are to be caught
  joint      whole short continuations by the full decoder, against the target's exact joint distribution

Settings:
  draws=1000000        per prompt, temperature and rule
  temperatures=[0.7,1.0]
  level=0.01           chance of a false alarm over all tests together
  children=3           siblings per draft of the tree rules
  horizon=3            tokens of a continuation (joint)
  floor=0.001          continuations at least this likely are told apart (joint)
  controls=true        run the known-wrong rules too (sampling)
  and method, model, sampling, hardware, seed, max_new_tokens and batch_size as in python -m bench

Exit codes: 0 as promised, 1 failed, 2 bad input, 3 an exact rule failed or a wrong one was not caught."""

EXPERIMENTS = ("greedy", "sampling", "joint")
SETTINGS = ("draws", "temperatures", "level", "children", "horizon", "floor", "controls")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one experiment; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if "-h" in words or "--help" in words:
        print(_HELP)
        return OK
    try:
        experiment, settings, overrides = split(words)
        return run(experiment, settings, compose.compose(overrides))
    except (Exception, KeyboardInterrupt) as error:
        return report_failure(error)


def split(words: Sequence[str]) -> tuple[str, dict[str, Any], list[str]]:
    """The experiment, the laboratory's own settings, and the rest, which configures the run.

    Raises:
        UserError: no experiment, an unknown one, or a value that cannot be read.
    """
    own = {"experiment", *SETTINGS}
    settings: dict[str, Any] = {}
    overrides = []
    for word in words:
        key, _, value = word.partition("=")
        if key in own:
            settings[key] = _read(key, value)
        elif hint := _mistyped(key, own):
            raise UserError(f"Unknown setting '{key}'.{hint} (python -m bench.lossless --help)")
        else:
            overrides.append(word)
    experiment = settings.pop("experiment", None)
    if experiment not in EXPERIMENTS:
        hint = did_you_mean(str(experiment), EXPERIMENTS)
        raise UserError(f"experiment came as {experiment!r}.{hint} Choose one: experiment={'|'.join(EXPERIMENTS)}")
    return experiment, settings, overrides


def _read(key: str, value: str) -> Any:
    """A value as YAML reads it, and 1e-3 as a number too.

    Raises:
        UserError: text that is no YAML.
    """
    import yaml

    try:
        found = yaml.safe_load(value)
        return float(found) if isinstance(found, str) else found
    except yaml.YAMLError:
        raise UserError(
            f"{key} came as '{value}'; it cannot be read. Set {key}=VALUE or {key}=[VALUE,VALUE]."
        ) from None
    except ValueError:  # a word
        return found


def _mistyped(key: str, own: Collection[str]) -> str:
    """A hint if the word is nothing of a run's configuration, but close to a setting of the laboratory."""
    known = {*compose.groups(), *(field.name for field in fields(RunConfig))}
    return "" if key.lstrip("+~").split(".")[0] in known else did_you_mean(key, own)


def to_lab(settings: dict[str, Any]) -> Lab:
    """The laboratory's own settings, checked.

    Raises:
        UserError: a value of the wrong type or out of range.
    """
    from bench.config.typecheck import check_arguments
    from bench.lossless.experiments import Lab

    values = check_arguments(Lab, settings)
    if "temperatures" in values:
        values["temperatures"] = tuple(float(value) for value in values["temperatures"])
    return Lab(**values)


def run(experiment: str, settings: dict[str, Any], cfg: RunConfig) -> int:
    """Load, experiment, record, print."""
    from dataclasses import asdict

    from bench.config import instantiate
    from bench.lossless import experiments, report
    from bench.models import loading
    from bench.utils import machine

    lab = to_lab(settings)
    instantiate.check(cfg)
    machine.set_threads(cfg.hardware.threads)
    loaded = loading.load(cfg.model, asdict(cfg.hardware), cfg.paths, keep_hf=instantiate.needs_hf(cfg.method))
    work = {
        "greedy": experiments.greedy_identity,
        "sampling": experiments.first_token_sampling,
        "joint": experiments.joint_sampling,
    }[experiment]
    begin = datetime.now(timezone.utc)
    result = work(cfg, lab, loaded)
    seconds = (datetime.now(timezone.utc) - begin).total_seconds()
    folder = Path(cfg.paths.results) / "lossless" / report.folder_name(experiment, cfg, lab, loaded)
    report.write(folder, experiment, cfg, lab, loaded, result, begin, seconds)
    print(report.render(experiment, result, folder, cfg))
    return OK if result["passed"] else INVALID


if __name__ == "__main__":
    from bench.utils.memory import keep_freed_memory

    keep_freed_memory()
    sys.exit(main())
